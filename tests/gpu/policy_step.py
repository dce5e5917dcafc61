"""One optimizer step of a small Megatron policy on one device, by the fused head and by the model's own.

``python -m tests.gpu.policy_step cuda|cpu`` prints what it found as JSON. Needs torch, triton and a megatron-core
wheel, neither Bridge nor TransformerEngine.
"""

import json
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

VOCAB, PADDED = 4003, 4096
LENGTHS = (37, 64, 5, 128)


def start(device: torch.device) -> None:
    from megarl.backends.megatron import cpu

    cpu.enable()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def build(device: torch.device, dtype: torch.dtype) -> SimpleNamespace:
    """Policy and Adam; equal weights every time."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    from megarl.backends.megatron.attention import PackedRotary
    from megarl.backends.megatron.family import LLAMA
    from megarl.backends.megatron.spec import our_block_spec

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=512,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype, use_cpu_initialization=device.type == "cpu", calculate_per_token_loss=True,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    config._pg_collection = groups
    inner = GPTModel(
        config=config, transformer_layer_spec=our_block_spec(config, LLAMA), vocab_size=PADDED, max_sequence_length=256,
        position_embedding_type="rope", share_embeddings_and_output_weights=False, pg_collection=groups,
    ).to(device)  # fmt: skip
    inner.rotary_pos_emb = PackedRotary(inner.rotary_pos_emb)
    chunk = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        module=Float16Module(config, inner) if config.bf16 else inner,
        pg_collection=groups,
    )
    options = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=config.bf16, params_dtype=dtype, use_distributed_optimizer=True, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(options, [chunk], use_gloo_process_groups=False, pg_collection=groups)
    return SimpleNamespace(chunk=chunk, optimizer=optimizer, groups=groups)


def pack(device: torch.device) -> SimpleNamespace:
    random = np.random.default_rng(0)
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)])
    total = int(bounds[-1])
    ids = torch.from_numpy(random.integers(0, VOCAB, total)).to(device)
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in LENGTHS])).to(device)
    labels = torch.from_numpy(random.integers(0, VOCAB, total)).to(device)
    mask = torch.from_numpy(random.random(total) < 0.7).to(device)
    sequences = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)
    return SimpleNamespace(bounds=bounds, ids=ids, positions=positions, labels=labels, mask=mask, sequences=sequences)


def step(device: torch.device, dtype: torch.dtype, kernels: SimpleNamespace) -> dict[str, Any]:
    """Forward, loss, backward, Adam."""
    from megatron.core.distributed import finalize_model_grads

    from megarl.backends.megatron import head
    from megarl.backends.megatron.attention import describe_for_ours
    from megarl_kernels import LogprobOutput, grpo_token_loss

    policy, given = build(device, dtype), pack(device)
    policy.chunk.zero_grad_buffer()
    differences = head.Differences()
    question = head.Question(
        target=torch.where(given.mask, given.labels, head.IGNORED),
        temperature=0.8,
        stats=("entropy", "self_certainty"),
        vocab_size=VOCAB,
        tp_group=None,
        kernels=kernels,
        differences=differences,
    )
    answer = policy.chunk(
        input_ids=given.ids[None],
        position_ids=given.positions[None],
        attention_mask=None,
        packed_seq_params=describe_for_ours(given.bounds, given.positions, policy.groups.cp),
        output_processor=head.process,
        output_processor_context=question,
    )
    output = LogprobOutput(*answer)
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5], device=device)
    loss, _ = grpo_token_loss(
        output.logprob, output.logprob.detach() - 0.05, advantage, given.sequences, given.mask,
        num_tokens=int(given.mask.sum()), num_sequences=len(LENGTHS),
    )  # fmt: skip
    loss.backward()
    finalize_model_grads([policy.chunk], None, pg_collection=policy.groups)
    gradients = {n: p.main_grad.detach().float().cpu().clone() for n, p in policy.chunk.named_parameters()}
    before = [p.detach().clone() for p in policy.chunk.parameters()]
    applied, norm, _ = policy.optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, policy.chunk.parameters(), strict=True)]
    return {
        "loss": float(loss.detach()),
        "logprob": output.logprob.detach().float().cpu(),
        "entropy": output.stats["entropy"].detach().float().cpu(),
        "gradients": gradients,
        "norm": float(norm or 0.0),
        "moved": bool(applied) and any(moved),
        "differences": differences.take(),
    }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def main(kind: str) -> dict[str, Any]:
    device = torch.device(kind)
    start(device)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        fused, logits = (
            step(device, dtype, SimpleNamespace(backend="auto", fused_head=on, compare=on, workspace_bytes=1 << 22))
            for on in (True, False)
        )
        found[str(dtype)] = {
            "loss": abs(fused["loss"] - logits["loss"]),
            "logprob": float((fused["logprob"] - logits["logprob"]).abs().max()),
            "entropy": float((fused["entropy"] - logits["entropy"]).abs().max()),
            "gradient": max(relative(g, logits["gradients"][n]) for n, g in fused["gradients"].items()),
            "norm": logits["norm"],
            "moved": fused["moved"] and logits["moved"],
            "compared": fused["differences"],
        }
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
