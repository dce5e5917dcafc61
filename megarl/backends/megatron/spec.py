"""Which modules a transformer layer is made of: TransformerEngine's where it is installed, ours otherwise.

Ours carry the same parameter names as TransformerEngine's (``linear_qkv.layer_norm_weight``), so that Bridge's
mappings and checkpoints see one naming. Their attention takes packed sequences and context parallelism.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.distributed import ProcessGroup

from megarl.backends.megatron.attention import PackedAttention, Window, describe_for_ours, describe_for_te
from megarl.backends.megatron.norms import OurLayerNormColumnParallelLinear, OurPostNormRowParallelLinear, RMSNorm
from megarl.backends.megatron.patches import has_transformer_engine

Describe = Callable[[np.ndarray, torch.Tensor, ProcessGroup], PackedSeqParams]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How the layers of a family differ from Llama's, where ours are used."""

    attention: type[SelfAttention] = SelfAttention
    window: Window | None = None
    cap: Callable[[Any], float | None] | None = None  # configuration -> cap of attention scores
    post_norms: bool = False  # a norm behind attention and MLP as well
    spec_for_te: Callable[..., Any] | None = None  # provider -> spec; None: the general one
    never_te: str | None = None  # why TransformerEngine's modules do not serve


@dataclass(frozen=True, slots=True)
class Layers:
    """Which modules the layers are made of, and how a pack is described to them."""

    spec: Callable[..., Any]  # provider -> spec
    describe: Describe  # cu_seqlens int[S + 1] of whole sequences, positions int64[T] of this rank, cp group
    ours: bool
    reason: str


def choose_layers(kind: Kind) -> Layers:
    """TransformerEngine's where it is installed and there is a GPU; ours otherwise."""
    if has_transformer_engine() and torch.cuda.is_available() and not kind.never_te:
        from megatron.bridge.models.gpt_provider import transformer_engine_layer_spec

        spec = kind.spec_for_te or transformer_engine_layer_spec
        return Layers(spec, describe_for_te, False, "TransformerEngine's: it is installed")
    why = "there is no CUDA device" if has_transformer_engine() else "TransformerEngine is not installed"
    return Layers(
        functools.partial(our_block_spec, kind=kind), describe_for_ours, True, f"megarl's: {kind.never_te or why}"
    )


def our_block_spec(config: Any, kind: Kind, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage and the final norm, from modules that need neither TransformerEngine nor apex."""
    if config.normalization != "RMSNorm":
        raise ValueError(f"layers without TransformerEngine use RMSNorm: normalization={config.normalization}")
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    row: Any = OurPostNormRowParallelLinear if kind.post_norms else RowParallelLinear
    core: Any = functools.partial(PackedAttention, window=kind.window, cap=kind.cap(config) if kind.cap else None)
    attention = ModuleSpec(
        module=kind.attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=OurLayerNormColumnParallelLinear,
            core_attention=core,
            linear_proj=row,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    add_residual: Any = get_bias_dropout_add
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=add_residual,
            pre_mlp_layernorm=RMSNorm if config.num_moe_experts else IdentityOp,
            mlp=_experts() if config.num_moe_experts else _mlp(row),
            mlp_bda=add_residual,
        ),
    )
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=config._pg_collection.pp.rank())
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)


def _mlp(row: Any) -> Any:
    submodules = MLPSubmodules(linear_fc1=OurLayerNormColumnParallelLinear, linear_fc2=row)
    return functools.partial(MLP.as_mlp_submodule, submodules=submodules)


def _experts() -> Any:
    """A mixture of experts, one after the other: grouped products are TransformerEngine's."""
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts: Any = functools.partial(SequentialMLP, submodules=submodules)
    return functools.partial(MoELayer, submodules=MoESubmodules(experts=experts))
