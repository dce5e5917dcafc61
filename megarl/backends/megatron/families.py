"""The families that a policy can be of, and whether a model of one is built faithfully."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import PretrainedConfig

from megarl.backends.megatron import gemma2, gemma3, mistral, qwen3_moe
from megarl.backends.megatron.family import Family, Values, refuse_unless
from megarl.settings import LayoutConfig


def _llama(values: Values) -> None:
    refuse_unless(values, "Llama", hidden_act="silu", attention_bias=False, mlp_bias=False)


def _qwen2(values: Values) -> None:
    refuse_unless(values, "Qwen2", hidden_act="silu", use_sliding_window=False)


def _qwen3(values: Values) -> None:
    refuse_unless(values, "Qwen3", hidden_act="silu", attention_bias=False, use_sliding_window=False)


FAMILIES = {
    "LlamaForCausalLM": Family(refuse=_llama),
    "Qwen2ForCausalLM": Family(refuse=_qwen2),
    "Qwen3ForCausalLM": Family(refuse=_qwen3),
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
}


def family_of(hf: PretrainedConfig, layout: LayoutConfig) -> Family:
    """Raise ValueError where the model is of none, has features that are not built, or does not divide."""
    architecture = (hf.architectures or ["?"])[0]
    if architecture not in FAMILIES:
        raise ValueError(f"model architecture {architecture} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[architecture]
    family.refuse(hf.to_dict())
    tp, heads, groups = layout.tp, hf.num_attention_heads, hf.num_key_value_heads
    experts = getattr(hf, "num_experts", 0) or 0
    wide = hf.moe_intermediate_size if experts else hf.intermediate_size
    if heads % tp or wide % tp or (groups % tp and tp % groups):
        raise ValueError(
            f"layout.tp={tp} does not divide the model: {heads} heads, {groups} key/value heads, "
            f"intermediate size {wide}"
        )
    if layout.ep > 1 and (not experts or experts % layout.ep):
        raise ValueError(f"layout.ep={layout.ep} must divide the experts of the model, of which there are {experts}")
    if layout.ep > 1 and tp > 1 and not torch.cuda.is_available():
        raise ValueError(f"layout.tp={tp} and layout.ep={layout.ep}: on CPU gloo gathers only parts of equal size")
    if experts and tp > 1 and not layout.sp:
        raise ValueError(f"layout.tp={tp} of a model with experts needs layout.sp=true")
    return family


def check_rope(hf: Any, family: Family, tables: Sequence[RotaryEmbedding]) -> None:
    """Raise ValueError unless Megatron's rotary frequencies are those of transformers.

    Bridge carries the base and a scaling factor over and leaves the rest to constants (Llama 3: 8192 positions, factors
    1 and 4), so a config with other values would train another model without a word.
    """
    for (theirs, factor), table in zip(family.frequencies(hf), tables, strict=True):
        ours = table.inv_freq.double().cpu().numpy() / (table.seq_len_interpolation_factor or 1.0)
        wanted = theirs.double().cpu().numpy()
        if factor != 1.0 or ours.shape != wanted.shape or not np.allclose(ours, wanted, rtol=1e-5, atol=0):
            raise ValueError(
                f"rope_parameters={hf.rope_parameters}: Megatron would rotate with other frequencies "
                f"(lowest {ours[-1]:.6g}, transformers {wanted[-1]:.6g})"
            )
