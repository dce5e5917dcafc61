"""Mistral: Llama with a window in every layer, where the configuration has one."""

from typing import Any

from megarl.backends.megatron.family import Family, Values, refuse_unless
from megarl.backends.megatron.spec import Kind


def _window(config: Any, layer_number: int) -> int | None:
    return config.window_size[0] + 1 if config.window_size else None


def _refuse(values: Values) -> None:
    refuse_unless(values, "Mistral", hidden_act="silu")


FAMILY = Family(refuse=_refuse, kind=Kind(window=_window))
