"""The token loss in torch operations: the reference of the kernels and the path of the CPU; autograd differentiates it.

Axes: T tokens of a pack, S sequences, U what carries a ratio: tokens, or sequences in GSPO.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl_kernels.token_loss_terms import K3_BOUND, LOG_RATIO_BOUND, Kl, Pack, Terms

_TAYLOR = 16  # highest power of d: the rest is below an ulp of float64 where |d| < 1/2


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Everything that has one ratio of its own: the tokens, or whole sequences."""

    log_ratio: Tensor  # [U]
    advantage: Tensor  # [U]
    share: Tensor  # [U] weight of its loss in the loss of this rank
    pull: Tensor  # [U] weight of its loss in the gradient: that of all ranks which hold a piece of the sequence
    tokens: Tensor  # [U] masked tokens it stands for on this rank


def token_loss(pack: Pack, terms: Terms) -> tuple[Tensor, Tensor]:
    """The loss, and the values of METRICS in their order as one vector."""
    mask, dtype = pack.mask, pack.dtype
    zero = torch.zeros((), dtype=dtype, device=mask.device)

    def kept(values: Tensor) -> Tensor:
        # masked values are replaced before any arithmetic: 0 * NaN is NaN, in backward as well
        return torch.where(mask, values.to(dtype), zero)

    new = kept(pack.logprob)
    log_ratio = new - kept(pack.old_logprob.detach())
    tis = mask.to(dtype) if pack.tis_weight is None else kept(pack.tis_weight.detach())
    weight = kept(_weight(pack, terms))
    units = (
        Units(
            log_ratio=log_ratio,
            advantage=kept(pack.advantage.detach()[pack.sequence_ids]),
            share=weight * tis,
            pull=weight * tis,
            tokens=mask.to(dtype),
        )
        if terms.ratio_level == "token"
        else _sequences(pack, terms, log_ratio, weight * tis)
    )
    ratio = _clamp(units.log_ratio, LOG_RATIO_BOUND).exp()
    surrogate, low, high, bounded = _surrogate(ratio, units.advantage, terms)
    policy_loss = (units.pull * surrogate).sum()
    if units.pull is not units.share:
        policy_loss = policy_loss + ((units.share * surrogate).sum() - policy_loss).detach()

    kl = torch.zeros_like(new)
    if pack.reference_logprob is not None:
        kl = _kl(terms.kl, new, kept(pack.reference_logprob.detach()))
    kl_loss = terms.kl_coef * (weight * kl).sum()

    count = units.tokens
    metrics = torch.stack(
        [
            count.sum(),
            policy_loss,
            kl_loss,
            torch.where(count > 0, count * ratio, zero).sum(),
            log_ratio.sum(),
            (count * low).sum(),
            (count * high).sum(),
            (count * bounded).sum(),
            kl.sum(),
            tis.sum(),
        ]
    ).detach()
    return policy_loss + kl_loss, metrics


def _sequences(pack: Pack, terms: Terms, log_ratio: Tensor, share: Tensor) -> Units:
    """Sequences as units: their ratio is the geometric mean of their tokens' ratios, on whatever ranks those are."""
    ids, n = pack.sequence_ids, pack.advantage.shape[0]
    assert pack.sequence_tokens is not None
    total, mine = _summed(log_ratio, ids, n), _summed(share, ids, n)
    whole = mine
    if terms.context_sum is not None:
        everywhere = terms.context_sum(torch.stack([total.detach(), mine]))
        # the value is that of all ranks, the derivative that of a sum of which each rank has its own terms
        total, whole = total + (everywhere[0] - total.detach()), everywhere[1]
    tokens = _summed(pack.mask.to(log_ratio.dtype), ids, n)
    present = tokens > 0
    return Units(
        log_ratio=total / pack.sequence_tokens.to(log_ratio.dtype).clamp(min=1),
        # of a sequence without tokens here nothing may count, not even a NaN
        advantage=torch.where(present, pack.advantage.detach().to(log_ratio.dtype), torch.zeros_like(tokens)),
        share=mine,
        pull=mine if terms.context_sum is None else whole,
        tokens=tokens,
    )


def _summed(values: Tensor, ids: Tensor, sequences: int) -> Tensor:
    """Sums [S], each in the order of its tokens."""
    if values.device.type == "cpu":
        return torch.zeros(sequences, dtype=values.dtype).index_add(0, ids, values)
    return in_segments(values, ids, sequences)


def in_segments(values: Tensor, ids: Tensor, sequences: int) -> Tensor:
    """The same where index_add works with atomics, whose order changes from run to run."""
    order = torch.argsort(ids, stable=True)
    return torch.segment_reduce(values[order], "sum", lengths=torch.bincount(ids, minlength=sequences))


def _surrogate(ratio: Tensor, advantage: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PPO's loss per unit and where a bound decides it: clipped below, clipped above, dual clip."""
    low, high = 1 - terms.clip_low, 1 + terms.clip_high
    below, above = (advantage < 0) & (ratio < low), (advantage > 0) & (ratio > high)
    limit = torch.where(below, torch.full_like(ratio, low), torch.full_like(ratio, high))
    loss = -advantage * torch.where(below | above, limit, ratio)
    bounded = torch.zeros_like(below)
    if terms.dual_clip is not None:
        bounded = (advantage < 0) & (loss > -advantage * terms.dual_clip)
        loss = torch.where(bounded, -advantage * terms.dual_clip, loss)
    return loss, below, above, bounded


def _clamp(values: Tensor, bound: float) -> Tensor:
    """Clamped to +-bound with no gradient beyond it; a NaN stays one, as does its gradient (not in Tensor.clamp)."""
    limit = torch.full_like(values, bound)
    return torch.where(values > bound, limit, torch.where(values < -bound, -limit, values))


def _kl(kind: Kl, logprob: Tensor, reference: Tensor) -> Tensor:
    d = _clamp(reference - logprob, LOG_RATIO_BOUND)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    return _clamp(_ExpLess.apply(d), K3_BOUND)  # pyright: ignore[reportArgumentType]


class _ExpLess(torch.autograd.Function):
    """e^d - 1 - d. Between nearly equal policies the difference has no digit left, and autograd's slope few."""

    @staticmethod
    def forward(ctx: Any, d: Tensor) -> Tensor:
        ctx.save_for_backward(d)
        series = torch.full_like(d, 1 / math.factorial(_TAYLOR))
        for k in range(_TAYLOR - 1, 1, -1):
            series = series * d + 1 / math.factorial(k)
        return torch.where(d.abs() < 0.5, d.square() * series, torch.expm1(d) - d)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (d,) = ctx.saved_tensors
        return grads[0] * torch.expm1(d)


def _weight(pack: Pack, terms: Terms) -> Tensor:
    """Weight of each token [T] in the mean over the optimizer step."""
    # an empty update has counts of 0 and nothing to divide
    count = torch.as_tensor(terms.count, dtype=pack.dtype, device=pack.mask.device).clamp(min=1)
    if terms.aggregation == "seq-mean-token-mean":
        assert pack.sequence_tokens is not None
        return (1 / (count * pack.sequence_tokens.to(pack.dtype).clamp(min=1)))[pack.sequence_ids]
    return (1 / (count * terms.norm)).expand(pack.mask.shape)
