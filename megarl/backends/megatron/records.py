"""What a rank tells the driver; apart from the worker, so that the driver can read it without importing Megatron."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megarl.settings import AgentConfig


class Coordinates(NamedTuple):
    """A rank's place in its agent's layout."""

    dp: int
    pp: int
    cp: int
    tp: int


class UpdateResult(NamedTuple):
    """One optimizer step as a rank saw it."""

    sums: dict[str, float]  # loss metrics added up over this rank's tokens; empty where it computes no loss
    grad_norm: float  # before clipping
    applied: bool  # false: the gradient was not finite and the weights did not move
    differences: dict[str, float]  # between fused head and logits since the last update; empty without kernels.compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One conversion. ``agent`` names the model's folder (for an export, its config.json is enough), layout, dtype."""

    agent: AgentConfig
    source: Path
    out: Path
    shard_bytes: int = 4 << 30
