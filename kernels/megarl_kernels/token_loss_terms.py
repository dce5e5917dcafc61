"""What the implementations of the token loss share: its inputs, its options, the order of its metrics.

Axes: T tokens of a pack, S sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Kl = Literal["k1", "k2", "k3"]
RatioLevel = Literal["token", "sequence"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

LOG_RATIO_BOUND = 20.0  # of log rho and of the KL's exponent; beyond it the gradient is zero
K3_BOUND = 10.0

METRICS = (
    "tokens",
    "policy_loss",
    "kl_loss",
    "ratio_sum",
    "log_ratio_sum",
    "clip_low_tokens",
    "clip_high_tokens",
    "dual_clip_tokens",
    "kl_sum",
    "tis_weight_sum",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The tensors of one call; all but ``logprob`` are constants of the gradient."""

    logprob: Tensor  # [T]
    old_logprob: Tensor  # [T]
    advantage: Tensor  # [S]
    sequence_ids: Tensor  # int64[T]
    mask: Tensor  # bool[T]
    reference_logprob: Tensor | None  # [T]
    tis_weight: Tensor | None  # [T]
    sequence_tokens: Tensor | None  # [S]; None where ``Terms.needs_sequence_tokens`` is false

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic, the loss and the metrics."""
        return torch.float64 if self.logprob.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The options of one call."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    kl: Kl
    ratio_level: RatioLevel
    aggregation: Aggregation
    max_tokens: int | None
    num_tokens: int | Tensor
    num_sequences: int | Tensor
    context_sum: Callable[[Tensor], Tensor] | None

    @property
    def count(self) -> int | Tensor:
        """The global count that the aggregation divides by."""
        return self.num_tokens if self.aggregation == "token-mean" else self.num_sequences

    @property
    def needs_sequence_tokens(self) -> bool:
        return self.ratio_level == "sequence" or self.aggregation == "seq-mean-token-mean"

    @property
    def norm(self) -> int:
        """What a token's weight is divided by beside the count, where that is one number."""
        return self.max_tokens or 1 if self.aggregation == "seq-mean-token-sum-norm" else 1


def check_terms(terms: Terms, has_reference: bool, has_sequence_tokens: bool) -> None:
    for name, value, known in (
        ("kl", terms.kl, get_args(Kl)),
        ("ratio_level", terms.ratio_level, get_args(RatioLevel)),
        ("aggregation", terms.aggregation, get_args(Aggregation)),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: there are {', '.join(known)}")
    if terms.aggregation == "seq-mean-token-sum-norm" and not terms.max_tokens:
        raise ValueError("aggregation=seq-mean-token-sum-norm needs max_tokens, a constant of the run")
    if terms.kl_coef != 0 and not has_reference:
        raise ValueError(f"kl_coef={terms.kl_coef} needs reference_logprob")
    for name, count in (("num_tokens", terms.num_tokens), ("num_sequences", terms.num_sequences)):
        if not isinstance(count, Tensor) and not count >= 0:
            raise ValueError(f"{name}={count!r} must be a count of the whole step, not negative")
    if terms.dual_clip is not None and terms.dual_clip <= 1:
        raise ValueError(f"dual_clip={terms.dual_clip}: more than 1, or None for none")
    if not (0 <= terms.clip_low <= 1 and terms.clip_high >= 0):
        raise ValueError(
            f"clip_low={terms.clip_low}, clip_high={terms.clip_high}: the ratio is clipped to "
            "[1 - clip_low, 1 + clip_high], with clip_low in [0, 1] and clip_high not negative"
        )
    if terms.context_sum is not None and not has_sequence_tokens:
        raise ValueError("context_sum says that sequences are cut over ranks: that needs sequence_tokens")


def check_pack(pack: Pack) -> None:
    if pack.logprob.dim() != 1 or not pack.logprob.is_floating_point():
        raise ValueError(f"logprob{list(pack.logprob.shape)} of {pack.logprob.dtype} must be a floating vector [T]")
    for name, value in (
        ("old_logprob", pack.old_logprob),
        ("sequence_ids", pack.sequence_ids),
        ("mask", pack.mask),
        ("reference_logprob", pack.reference_logprob),
        ("tis_weight", pack.tis_weight),
    ):
        if value is not None and value.shape != pack.logprob.shape:
            raise ValueError(f"{name}{list(value.shape)} must be [T] like logprob{list(pack.logprob.shape)}")
    if pack.advantage.dim() != 1:
        raise ValueError(f"advantage{list(pack.advantage.shape)} must be [S], one per sequence")
    if pack.sequence_tokens is not None and pack.sequence_tokens.shape != pack.advantage.shape:
        raise ValueError(
            f"sequence_tokens{list(pack.sequence_tokens.shape)} must be [S] like advantage{list(pack.advantage.shape)}"
        )
    if pack.sequence_ids.device.type == "cpu" and pack.sequence_ids.numel():
        low, high = (int(v) for v in pack.sequence_ids.aminmax())
        if low < 0 or high >= pack.advantage.shape[0]:
            raise ValueError(
                f"sequence_ids reach from {low} to {high}: advantage has {pack.advantage.shape[0]} sequences"
            )
