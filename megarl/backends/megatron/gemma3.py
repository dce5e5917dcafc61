"""Gemma-3 (text): local layers see a window and rotate by frequencies of their own; queries and keys are normed; norms
stand behind attention and MLP as well.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from megarl.backends.megatron.family import Family, Frequencies, Values, refuse_unless
from megarl.backends.megatron.spec import Kind

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def _is_global(config: Any, layer_number: int) -> bool:
    return layer_number % sum(config.interleaved_attn_pattern) == 0


def _window(config: Any, layer_number: int) -> int | None:
    return None if _is_global(config, layer_number) else config.window_size


class LocalGlobalAttention(SelfAttention):
    """Takes its own of the two tables of rotary angles."""

    def forward(self, *args: Any, rotary_pos_emb: torch.Tensor, **kwargs: Any):  # pyright: ignore
        angles = rotary_pos_emb[int(_is_global(self.config, self.layer_number))]
        return super().forward(*args, rotary_pos_emb=angles, **kwargs)


class ScaledEmbedding(LanguageModelEmbedding):
    """Embedding rows times sqrt(hidden size), a factor that is rounded to the model's dtype, as in transformers and
    vLLM: 25.25 instead of 25.298 in bfloat16 at 640. Bridge's own class does not round.
    """

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = super().forward(*args, **kwargs)
        return rows * torch.tensor(self.config.hidden_size**0.5, dtype=rows.dtype, device=rows.device)


def pattern(layer_types: Sequence[str]) -> tuple[int, int]:
    """(local layers, 1) of a period. Raises ValueError for another arrangement."""
    period = layer_types.index(GLOBAL) + 1 if GLOBAL in layer_types else len(layer_types) + 1
    if list(layer_types) != [LOCAL if n % period else GLOBAL for n in range(1, len(layer_types) + 1)]:
        raise ValueError(f"layer_types={list(layer_types)} of a Gemma-3 model: only every n-th layer may be global")
    return period - 1, 1


def _settings(hf: Any) -> dict[str, Any]:
    return {"interleaved_attn_pattern": pattern(hf.layer_types)}


def _refuse(values: Values) -> None:
    refuse_unless(
        values,
        "Gemma-3",
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        tie_word_embeddings=True,
        use_bidirectional_attention=False,
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
    )
    pattern(values["layer_types"])


def _complete(model: Any) -> None:
    if model.pre_process:
        model.embedding.__class__ = ScaledEmbedding


def _frequencies(hf: Any) -> list[Frequencies]:
    made = Gemma3RotaryEmbedding(hf)
    kinds = [kind if kind in made.layer_types else made.layer_types[0] for kind in (LOCAL, GLOBAL)]
    return [(getattr(made, f"{kind}_inv_freq"), getattr(made, f"{kind}_attention_scaling")) for kind in kinds]


def _tables(rotary: RotaryEmbedding) -> list[RotaryEmbedding]:
    both: Any = rotary  # Bridge's Gemma3RotaryEmbedding
    return [both.rope_local, both]


def _spec_for_te(config: Any) -> Any:
    from megatron.bridge.models.gemma.gemma3_provider import gemma3_layer_spec

    return gemma3_layer_spec(config)


FAMILY = Family(
    refuse=_refuse,
    settings=_settings,
    complete=_complete,
    frequencies=_frequencies,
    tables=_tables,
    kind=Kind(attention=LocalGlobalAttention, window=_window, post_norms=True, spec_for_te=_spec_for_te),
)
