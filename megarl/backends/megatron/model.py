"""Building a policy: the only file that makes a Megatron model, its process groups and its optimizer.

Sizes and weights come from a Hugging Face directory through Megatron-Bridge; layout, precision and everything about
the run come from megarl's configuration; ``megatron:`` overrides fields of the real provider class last.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import clip_grads, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from transformers import AutoConfig, PretrainedConfig

from megarl.backends.megatron import patches
from megarl.backends.megatron.attention import PackedRotary
from megarl.backends.megatron.families import check_rope, family_of
from megarl.backends.megatron.spec import Layers, choose_layers
from megarl.settings import AgentConfig, LayoutConfig, OptimizerConfig, did_you_mean

VOCABULARY_ROWS = ("model.embed_tokens.weight", "lm_head.weight")
_LONE_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
# switches of kernels that belong to TransformerEngine, apex or CUDA extensions
NO_FUSED_KERNELS = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "attention_backend": AttnBackend.auto,  # Bridge's choice for Gemma-3 is between TransformerEngine's kernels
}
# provider fields that other settings own
OWNED = {
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp",
    "expert_model_parallel_size": "layout.ep",
    "expert_tensor_parallel_size": "layout.tp",
    "sequence_parallel": "layout.sp",
    "virtual_pipeline_model_parallel_size": "nothing: one model chunk per stage",
    "params_dtype": "dtype",
    "bf16": "dtype",
    "fp16": "dtype",
    "calculate_per_token_loss": "nothing: gradients are plain sums",
    "variable_seq_lengths": "nothing: microbatches are packed",
    "vocab_size": "the model's config.json",
}


def process_groups(layout: LayoutConfig, seed: int = 0) -> ProcessGroupCollection:
    """Megatron's groups over the initialized default group; every later call gets them as an argument."""
    if layout.cp * layout.dp % layout.ep:
        raise ValueError(f"layout.ep={layout.ep} does not divide cp * dp = {layout.cp * layout.dp}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )
    model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


@dataclasses.dataclass(slots=True, kw_only=True)
class Model:
    """One rank's part of a policy."""

    bridge: Any  # megatron.bridge.AutoBridge
    hf: PretrainedConfig
    config: Any  # the provider, a TransformerConfig
    chunk: Any  # DistributedDataParallel; where the model is not trained, what would be inside of it
    groups: ProcessGroupCollection
    layers: Layers
    plain_head: bool  # see Family
    dtype: torch.dtype
    vocab_size: int  # true, without padding

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.chunk.parameters())

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Under Megatron's own names, without those of the modules around the model. Experts that stand alone have the
        names of grouped ones.
        """
        inner: Any = self.chunk
        while isinstance(inner, DistributedDataParallel | Float16Module):
            inner = inner.module
        return {_LONE_EXPERT.sub(r".experts.\2.weight\1", name): p for name, p in inner.named_parameters()}

    def buffers(self) -> list[Any]:
        """Megatron's parameter and gradient buffers."""
        return [*self.chunk.buffers, *self.chunk.expert_parallel_buffers]

    def largest_weight(self) -> int:
        """Bytes of the largest tensor in ``exported``."""
        c = self.config
        rows = max(self.vocab_size, c.ffn_hidden_size, c.num_attention_heads * c.kv_channels)
        return rows * c.hidden_size * self.dtype.itemsize

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) on every rank; all ranks must take the same number of steps.

        Vocabulary padding is cut off and a tied head comes once, as the embedding.
        """
        tied = self.config.share_embeddings_and_output_weights
        for name, tensor in self.bridge.export_hf_weights([self.chunk], cpu=False, show_progress=False):
            if tied and name == "lm_head.weight":
                continue
            yield name, tensor[: self.vocab_size] if name in VOCABULARY_ROWS else tensor


def build_model(
    agent: AgentConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
    overrides: Mapping[str, object],
    *,
    weights: bool = True,
    train: bool = True,
) -> Model:
    """The agent's model, with its weights loaded unless ``weights`` is false; without ``train`` it has no gradients'
    buffers. Raises ValueError for what it cannot train faithfully.
    """
    hf = AutoConfig.from_pretrained(agent.model)
    family = family_of(hf, agent.layout)
    dtype = getattr(torch, agent.dtype)
    bridges = patches.import_bridge()
    bridge = bridges.from_hf_pretrained(agent.model, torch_dtype=dtype) if weights else bridges.from_hf_config(hf)
    provider = bridge.to_megatron_provider(load_weights=False)
    layers = choose_layers(family.kind)
    if torch.distributed.get_rank() == 0:
        print(f"layer modules: {layers.reason}", flush=True)
    settings = _settings(hf, agent.layout, dtype, device) | family.settings(hf)
    settings |= NO_FUSED_KERNELS if layers.ours else {}
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.transformer_layer_spec = layers.spec
    apply_overrides(provider, overrides)
    provider.finalize()
    # after finalize(), which refuses it together with the default token dispatcher even in a model without experts
    provider.variable_seq_lengths = agent.layout.pp > 1
    provider._pg_collection = groups
    provider.finalize_model_grads_func = _sum_gradients
    inner = provider.provide(pre_process=groups.pp.rank() == 0, post_process=groups.pp.rank() == groups.pp.size() - 1)
    family.complete(inner)
    tables = family.tables(inner.rotary_pos_emb)
    check_rope(hf, family, tables)
    if layers.ours:
        inner.rotary_pos_emb = PackedRotary(*tables)
    if weights:
        bridge.load_hf_weights([inner])
    chunk = _trainable(inner.to(device), provider, agent, groups) if train else inner.to(device, dtype)
    return Model(
        bridge=bridge,
        hf=hf,
        config=provider,
        chunk=chunk,
        groups=groups,
        layers=layers,
        plain_head=family.plain_head,
        dtype=dtype,
        vocab_size=int(provider.vocab_size),
    )


def _trainable(
    inner: Any, provider: Any, agent: AgentConfig, groups: ProcessGroupCollection
) -> DistributedDataParallel:
    for p in inner.parameters():
        # one bucket per buffer: a tied embedding's own bucket is padded in the buffer but not in the copy that a
        # checkpoint is made of, which shifts every later parameter (distrib_optimizer.py 1400 against 1780)
        p.shared_embedding = False
    return DistributedDataParallel(
        config=provider,
        ddp_config=DistributedDataParallelConfig(
            use_distributed_optimizer=agent.optimizer.name == "adam",
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
        ),
        module=Float16Module(provider, inner) if provider.bf16 else inner,
        pg_collection=groups,
    )


def _settings(hf: PretrainedConfig, layout: LayoutConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp,
        "sequence_parallel": layout.sp and layout.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "attention_softmax_in_fp32": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,  # the weights are loaded
        "use_cpu_initialization": device.type == "cpu",
        # the loss carries global denominators already: no division by tokens, microbatches or ranks
        "calculate_per_token_loss": True,
        "batch_p2p_comm": True,
        # Bridge cannot pad where tp is 1, so the padding is the least that tp allows
        "make_vocab_size_divisible_by": 1,
        "should_pad_vocab": True,
        **_stages(hf.num_hidden_layers, layout.pp),
    }


def _stages(layers: int, pp: int) -> dict[str, list[list[str]]]:
    """Layers per pipeline stage: equal where possible, else one more in the first ones. Megatron counts what the stages
    build against the model's layers.
    """
    if layers < pp:
        raise ValueError(f"layout.pp={pp} stages, but the model has num_hidden_layers={layers}")
    if layers % pp == 0:
        return {}
    least, more = divmod(layers, pp)
    stages = [["decoder"] * (least + (stage < more)) for stage in range(pp)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return {"pipeline_model_parallel_layout": stages}


def apply_overrides(provider: Any, overrides: Mapping[str, object]) -> None:
    """Set the ``megatron:`` fields. Raises ValueError for a field that does not exist or that megarl owns."""
    known = {field.name for field in dataclasses.fields(provider) if not field.name.startswith("_")}
    for name, value in overrides.items():
        if name in OWNED:
            raise ValueError(f"megatron.{name} is not free: it is set by {OWNED[name]}")
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"megatron.{name}: {type(provider).__name__} has no such field{hint}")
        setattr(provider, name, value)


def _sum_gradients(model: list, num_tokens: torch.Tensor | None, **groups: Any) -> None:
    """Megatron's gradient reductions without its division by tokens."""
    finalize_model_grads(model, None, **groups)


class Optimizer:
    """Megatron's optimizer, stepping by a learning rate given per step; a non-finite gradient steps nothing."""

    def __init__(self, cfg: OptimizerConfig, model: Model) -> None:
        if cfg.name == "sgd" and model.dtype != torch.float32:
            raise ValueError("optimizer.name=sgd has no float32 copy of the weights: it needs dtype=float32")
        patches.keep_adam_step()
        self.cfg = cfg
        self._model = model
        self.inner: Any = get_megatron_optimizer(
            CoreOptimizerConfig(
                optimizer=cfg.name,
                lr=cfg.lr,
                weight_decay=cfg.weight_decay,
                adam_beta1=cfg.betas[0],
                adam_beta2=cfg.betas[1],
                adam_eps=cfg.eps,
                sgd_momentum=0.0,
                clip_grad=0.0,  # clipped below, after the check for non-finite gradients
                bf16=model.dtype == torch.bfloat16,
                params_dtype=model.dtype,
                use_distributed_optimizer=cfg.name == "adam",
            ),
            [model.chunk],
            use_gloo_process_groups=False,
            pg_collection=model.groups,
        )
        self._start_adam()

    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [o.optimizer for o in self.inner.chained_optimizers if o.optimizer is not None]

    def _start_adam(self) -> None:
        """Give torch's Adam its state now: megatron-core cannot write or read a checkpoint of one that never stepped
        (distrib_optimizer.py 839).
        """
        for optimizer in self.torch_optimizers():
            if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        optimizer.state[p] = {
                            "step": torch.tensor(0.0),
                            "exp_avg": torch.zeros_like(p),
                            "exp_avg_sq": torch.zeros_like(p),
                        }

    def own_steps(self) -> None:
        """After loading: megatron-core gives all parameters one ``step`` tensor, which torch's Adam then advances once
        per parameter (distrib_optimizer.py 1015); each gets its own again.
        """
        for optimizer in self.torch_optimizers():
            for state in optimizer.state.values():
                if "step" in state and isinstance(state["step"], torch.Tensor):
                    state["step"] = state["step"].clone()

    def to_host(self) -> None:
        """Move state and float32 weights to host memory; views of the model's own parameters go with the model."""
        for holder in self._held():
            holder.data = holder.data.cpu()

    def to_device(self, device: torch.device) -> None:
        for holder in self._held():
            holder.data = holder.data.to(device)

    def _held(self) -> Iterator[torch.Tensor]:
        model_memory = {p.untyped_storage().data_ptr() for p in self._model.parameters()}
        for optimizer in self.torch_optimizers():
            for state in optimizer.state.values():
                yield from (v for v in state.values() if isinstance(v, torch.Tensor) and v.dim() > 0)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
                    if p.untyped_storage().data_ptr() not in model_memory:
                        yield p

    def step(self, lr: float) -> tuple[float, bool]:
        """(gradient norm before clipping, whether the weights moved)."""
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.cfg.weight_decay * group["wd_mult"]
        overflow = self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if overflow or not math.isfinite(norm):
            return norm, False
        if self.cfg.clip_grad > 0:
            for part in self.inner.chained_optimizers:
                clip_grads.clip_grad_by_total_norm_fp32(part.get_parameters(), self.cfg.clip_grad, norm)
        return norm, bool(self.inner.step_with_ready_grads())
