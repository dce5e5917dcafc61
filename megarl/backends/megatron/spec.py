"""Which modules a transformer layer is made of: TransformerEngine's where it is installed, ours otherwise.

Ours carry the same parameter names as TransformerEngine's (``linear_qkv.layer_norm_weight``), so that Bridge's
mappings and checkpoints see one naming. Their attention takes packed sequences and context parallelism.

Axes: T tokens, H query heads and G key/value heads of this rank, D head size.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.distributed import ProcessGroup

from megarl.backends.megatron.order import Grid, Order
from megarl.backends.megatron.patches import has_transformer_engine


@dataclass
class Packed(PackedSeqParams):
    """A pack as our modules see it. Megatron's own fields but ``qkv_format`` stay empty: see ``PackedRotary``."""

    order: Order = field(default_factory=lambda: Order(gather=None, grids=()))
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # int64[T], of each token in its sequence


class PackedRotary(torch.nn.Module):
    """Rotary angles [T, 1, D] of the tokens of a pack, in place of Megatron's table of angles by position.

    With a table and sequence bounds Megatron rotates one sequence after the other and writes each into a shared tensor
    (rope_utils.py, ``_apply_rotary_pos_emb_thd``), whose gradient costs sequences times tokens; without bounds it
    rotates all tokens at once.
    """

    def __init__(self, table: RotaryEmbedding) -> None:
        super().__init__()
        self.inv_freq = table.inv_freq  # no buffer: a bfloat16 model would round it
        self.interpolation = table.seq_len_interpolation_factor or 1.0

    def get_rotary_seq_len(
        self, context: object, block: object, hidden: object, config: object, pack: Packed
    ) -> Packed:
        return pack

    def forward(self, pack: Packed, packed_seq: bool = True, cp_group: object = None) -> torch.Tensor:
        self.inv_freq = self.inv_freq.to(pack.positions.device)
        angles = torch.outer(pack.positions / self.interpolation, self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None]


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in float32, usable under sequence parallelism: its gradient is then summed over tp."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(x, self.weight, self.eps)


class OurLayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMS norm, then a column-parallel linear. Bridge knows the kind of its parameters by the end of the name."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self.layer_norm_eps = config.layernorm_epsilon

    def forward(self, input_: torch.Tensor, *args, **kwargs):
        return super().forward(_rms_norm(input_, self.layer_norm_weight, self.layer_norm_eps), *args, **kwargs)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata: Any = None):
        tp_group: Any = self.tp_group
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},  # the norm's weight is whole on every rank
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight: Any = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
    weight.sequence_parallel = config.sequence_parallel
    return weight


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class PackedAttention(MegatronModule):
    """Causal attention inside each packed sequence, query groups and context parallelism included.

    Context parallelism gathers keys and values of all ranks (their gradients are reduce-scattered), each rank
    attending with the queries it holds: chunks r and 2 cp - 1 - r of every sequence, which balances the work.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout or config.window_size or config.apply_query_key_layer_scaling:
            raise ValueError(
                "attention without TransformerEngine knows no dropout, window or layer scaling: "
                f"attention_dropout={config.attention_dropout}, window_size={config.window_size}, "
                f"apply_query_key_layer_scaling={config.apply_query_key_layer_scaling}"
            )
        if pg_collection is None:
            raise ValueError("PackedAttention takes its process groups as an argument: pg_collection is None")
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, G, D]
        value: torch.Tensor,  # [T, G, D]
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """[T, H * D]"""
        if not isinstance(packed_seq_params, Packed):
            raise ValueError("PackedAttention takes packed sequences only, described by describe_for_ours")
        order = packed_seq_params.order
        if order.gather is not None:
            both = torch.stack((key, value), dim=1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
            key, value = both.index_select(0, order.gather).unbind(1)
        out = torch.zeros_like(query)
        for grid in order.grids:
            out = out.index_copy(0, grid.query_rows, self._attend(grid, query, key, value))
        return out.flatten(1)

    def _attend(self, grid: Grid, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        def cells(rows: torch.Tensor, taken: torch.Tensor, placed: torch.Tensor, length: int) -> torch.Tensor:
            flat = rows.new_zeros(grid.sequences * length, *rows.shape[1:])
            flat = flat.index_copy(0, placed, rows.index_select(0, taken))
            return flat.view(grid.sequences, length, *rows.shape[1:]).transpose(1, 2)

        q = cells(query, grid.query_rows, grid.query_cells, grid.query_length)
        k = cells(key, grid.key_rows, grid.key_cells, grid.key_length)
        v = cells(value, grid.key_rows, grid.key_cells, grid.key_length)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=grid.mask, is_causal=grid.mask is None, scale=self.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(0, 1).index_select(0, grid.query_cells)


Describe = Callable[[np.ndarray, torch.Tensor, ProcessGroup], PackedSeqParams]


@dataclass(frozen=True, slots=True)
class Layers:
    """Which modules the layers are made of, and how a pack is described to them."""

    spec: Callable[..., Any]  # provider -> spec
    describe: Describe  # cu_seqlens int[S + 1] of whole sequences, positions int64[T] of this rank, cp group
    ours: bool
    reason: str


def choose_layers() -> Layers:
    """TransformerEngine's where it is installed and there is a GPU; ours otherwise."""
    if has_transformer_engine() and torch.cuda.is_available():
        from megatron.bridge.models.gpt_provider import transformer_engine_layer_spec

        return Layers(transformer_engine_layer_spec, describe_for_te, False, "TransformerEngine's: it is installed")
    why = "there is no CUDA device" if has_transformer_engine() else "TransformerEngine is not installed"
    return Layers(our_block_spec, describe_for_ours, True, f"megarl's: {why}")


def describe_for_te(cu_seqlens: np.ndarray, positions: torch.Tensor, cp: ProcessGroup) -> PackedSeqParams:
    bounds = torch.tensor(cu_seqlens, dtype=torch.int32, device=positions.device)
    # the true maximum: a table of exactly as many angles as the pack has tokens would be taken for angles by place in
    # the pack (rope_utils.py, _apply_rotary_pos_emb_thd)
    longest = int(np.diff(cu_seqlens).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def describe_for_ours(cu_seqlens: np.ndarray, positions: torch.Tensor, cp: ProcessGroup) -> PackedSeqParams:
    order = Order.of(cu_seqlens, cp.size(), cp.rank(), positions.device)
    return Packed(qkv_format="thd", order=order, positions=positions)


def our_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage and the final norm, from modules that need neither TransformerEngine nor apex."""
    if config.normalization != "RMSNorm" or config.num_moe_experts:
        raise ValueError(
            "layers without TransformerEngine are dense and use RMSNorm: "
            f"normalization={config.normalization}, num_moe_experts={config.num_moe_experts}"
        )
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=OurLayerNormColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    mlp = functools.partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=OurLayerNormColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    add_residual: Any = get_bias_dropout_add
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=add_residual,
            mlp=mlp,
            mlp_bda=add_residual,
        ),
    )
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=config._pg_collection.pp.rank())
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
