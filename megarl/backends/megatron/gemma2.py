"""Gemma-2: every other layer sees a window, scores and logits are capped, norms stand behind attention and MLP as well.

Bridge brings the embedding's scale and the capped head. Its attention takes no packed sequences, so ours is used on a
GPU, too; capped scores have no fused form there and exist as a whole.
"""

from typing import Any

from megarl.backends.megatron.family import Family, Values, refuse_unless
from megarl.backends.megatron.spec import Kind


def _window(config: Any, layer_number: int) -> int | None:
    return config.window_size[0] + 1 if layer_number % 2 else None


def _settings(hf: Any) -> dict[str, Any]:
    return {"softmax_scale": hf.query_pre_attn_scalar**-0.5}


def _cap(config: Any) -> float | None:
    return config.attn_logit_softcapping


def _refuse(values: Values) -> None:
    refuse_unless(
        values,
        "Gemma-2",
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        tie_word_embeddings=True,
        use_bidirectional_attention=False,
        layer_types=[("full_attention", "sliding_attention")[n % 2] for n in range(1, values["num_hidden_layers"] + 1)],
    )


FAMILY = Family(
    refuse=_refuse,
    settings=_settings,
    plain_head=False,
    kind=Kind(
        window=_window, cap=_cap, post_norms=True, never_te="Bridge's attention for Gemma-2 takes no packed sequences"
    ),
)
