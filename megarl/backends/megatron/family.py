"""What sets a family of models apart from Llama, for whoever builds one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megarl.backends.megatron.spec import Kind

Values = Mapping[str, Any]  # a model's config.json
LLAMA = Kind()
Frequencies = tuple[torch.Tensor, float]  # inverse frequencies; factor on the sine and cosine of their angles


def _frequencies(hf: Any) -> list[Frequencies]:
    made = LlamaRotaryEmbedding(hf)
    return [(made.inv_freq, made.attention_scaling)]


def _tables(rotary: RotaryEmbedding) -> list[RotaryEmbedding]:
    return [rotary]


def _no_settings(hf: Any) -> dict[str, Any]:
    return {}


def _complete(model: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture; the defaults are Llama's."""

    refuse: Callable[[Values], None]  # raises ValueError for a feature that the built model would lack
    kind: Kind = LLAMA
    plain_head: bool = True  # logits are nothing but hidden states times the head's weight
    settings: Callable[[Any], dict[str, Any]] = _no_settings  # of Bridge's provider, which leaves them to constants
    complete: Callable[[Any], None] = _complete  # mends the built model
    frequencies: Callable[[Any], list[Frequencies]] = _frequencies  # by transformers
    tables: Callable[[RotaryEmbedding], list[RotaryEmbedding]] = _tables  # Megatron's, in the same order


def refuse_unless(values: Values, name: str, **wanted: object) -> None:
    """Raise ValueError for a value that is neither absent nor the one that is built."""
    for key, right in wanted.items():
        if key in values and values[key] not in (right, None) and values[key] != right:
            raise ValueError(f"{key}={values[key]!r} of a {name} model: only {right!r} is built")
