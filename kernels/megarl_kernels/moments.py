"""What is kept of one row's distribution, and what follows from it: shared by every backend of the logprob functions.

Axes: N rows (tokens), Vl vocabulary columns of this rank, V the true vocabulary.

A logit x becomes u = softcap * tanh(logit_scale * x / softcap) (u = x without a cap), and z = a u with the row's
positive factor a = 1 / temperature (logit_scale / temperature without a cap). Peaks are kept as u and distances are
taken before the factor, a (u - M): the subtraction is then exact near the maximum, however large the logits are.

With D = sum e^(a(u-M)) and S = sum e^(a(u-M)) a(u-M):

    logprob = a (u_t - M) - log D           (not z_t - logsumexp: its error is one ulp of z - M, not of logsumexp)
    entropy = log D - S / D
    self-certainty = KL(uniform || p) = log D - mean a(u - M) - log V

D is kept as 1 + rest (the maximum's own term apart), so that 1 - p of a nearly certain token keeps its digits. Ranks
merge with one all-gather, in rank order; after it all of them hold M, D and the entropy, hence backward needs no
collective:

    dz_v = g_logprob (1[v=t] - p_v) - g_entropy p_v (log p_v + entropy) + g_certainty (p_v - 1/V)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

STATS = ("entropy", "self_certainty", "top1_probability", "sum_p2")
WITHOUT_GRADIENT = ("top1_probability", "sum_p2")

# columns of a shard's moments, [N, 7]: an empty shard has peak -inf
PEAK, REST, U_TARGET, S, BELOW, COLUMNS, SQUARES = range(7)


class LogprobOutput(NamedTuple):
    """``logprob`` float32[N] and the statistics asked for, each float32[N] (float64 where the logits are)."""

    logprob: Tensor
    stats: dict[str, Tensor]


class Options(NamedTuple):
    """The arguments that every row shares, checked."""

    vocab_size: int
    vocab_start: int
    columns: int  # of this shard, that belong to the true vocabulary
    tp_group: dist.ProcessGroup | None  # None: one rank
    softcap: float
    logit_scale: float
    ignore_index: int
    stats: tuple[str, ...]

    @classmethod
    def of(
        cls,
        width: int,
        *,
        vocab_size: int | None,
        vocab_start: int | None,
        tp_group: dist.ProcessGroup | None,
        softcap: float,
        logit_scale: float,
        ignore_index: int,
        stats: Sequence[str],
    ) -> "Options":
        """Options of a shard of ``width`` columns. Raises ValueError for what contradicts itself."""
        unknown = sorted(set(stats) - set(STATS))
        if unknown:
            raise ValueError(f"stats={unknown}: there are {', '.join(STATS)}")
        if not (math.isfinite(logit_scale) and logit_scale > 0):
            raise ValueError(f"logit_scale={logit_scale} must be finite and above 0")
        if not (math.isfinite(softcap) and softcap >= 0):
            raise ValueError(f"softcap={softcap} must be finite, and 0 for no cap")
        ranks = dist.get_world_size(tp_group) if tp_group is not None else 1
        vocab_size = width * ranks if vocab_size is None else vocab_size
        if vocab_start is None:
            vocab_start = width * dist.get_rank(tp_group) if tp_group is not None else 0
        if tp_group is None and vocab_start != 0:
            raise ValueError(f"vocab_start={vocab_start} names a shard of many: that needs tp_group")
        if not 0 < vocab_size <= width * ranks:
            raise ValueError(
                f"vocab_size={vocab_size} does not fit {ranks} shards of {width} columns: logits or weight are one "
                "rank's shard, not gathered ones"
            )
        return cls(
            vocab_size=vocab_size,
            vocab_start=vocab_start,
            columns=min(max(vocab_size - vocab_start, 0), width),
            tp_group=tp_group if ranks > 1 else None,
            softcap=float(softcap),
            logit_scale=float(logit_scale),
            ignore_index=ignore_index,
            stats=tuple(stats),
        )


class Rows(NamedTuple):
    """Per row, what the gradient of its logits needs; [N] each. A gradient that is None takes no part."""

    target: Tensor
    factor: Tensor
    peak: Tensor
    log_d: Tensor
    entropy: Tensor
    rest_p: Tensor  # 1 - p of the target
    g_logprob: Tensor
    g_entropy: Tensor | None
    g_certainty: Tensor | None

    def at(self, rows: slice | Tensor) -> "Rows":
        return Rows._make(None if x is None else x[rows] for x in self)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_factor(temperature: float | Tensor, rows: int, options: Options, like: Tensor) -> Tensor:
    """The factor a of each row, [N]."""
    dtype = accumulator(like.dtype)
    scale = 1.0 if options.softcap > 0 else options.logit_scale
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be above 0")
        return torch.full((rows,), scale / temperature, dtype=dtype, device=like.device)
    t = temperature.detach().to(like.device, dtype)
    if t.dim() > 1 or (t.dim() == 1 and t.shape[0] != rows):
        raise ValueError(f"temperature{list(t.shape)} must be a number or one per row [{rows}]")
    if t.device.type == "cpu" and not bool((t > 0).all()):
        raise ValueError(f"temperature={t.flatten()[~(t.flatten() > 0)][0].item()} must be above 0")
    return (scale / t).expand(rows).contiguous()


def checked_target(target: Tensor, options: Options) -> Tensor:
    """Targets as contiguous int64[N]; on CPU, ValueError for one that is neither a token nor ``ignore_index``."""
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"target is {target.dtype}: token ids of an integer dtype are needed")
    target = target.to(torch.int64).contiguous()
    if target.device.type == "cpu":
        wrong = ((target < 0) | (target >= options.vocab_size)) & (target != options.ignore_index)
        if bool(wrong.any()):
            raise ValueError(
                f"target {int(target[wrong][0])} is outside the vocabulary [0, {options.vocab_size}) "
                f"and is not ignore_index={options.ignore_index}"
            )
    return target


def empty_moments(rows: int, options: Options, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Moments of shards of which nothing has been seen."""
    out = torch.zeros(rows, 7, dtype=dtype, device=device)
    out[:, PEAK] = out[:, U_TARGET] = -torch.inf
    out[:, COLUMNS] = options.columns
    return out


def merge(local: Tensor, factor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Moments of the whole vocabulary, [N, 7], the same bits on every rank: one all-gather."""
    if group is None:
        return local
    shards = torch.empty(dist.get_world_size(group), *local.shape, dtype=local.dtype, device=local.device)
    dist.all_gather(list(shards.unbind(0)), local.contiguous(), group=group)
    peaks, rests, targets, ss, belows, columns, squares = shards.unbind(2)  # [ranks, N] each
    peak, top = peaks.max(dim=0)
    empty = peaks == -torch.inf
    zero = torch.zeros_like(peaks)
    lower = torch.where(empty, zero, (peaks - peak) * factor)
    weight = torch.where(empty, zero, lower.exp())
    is_top = torch.arange(peaks.shape[0], device=peaks.device)[:, None] == top
    merged = {
        PEAK: peak,
        REST: torch.where(is_top, rests, weight * (1 + rests)).sum(dim=0),
        U_TARGET: targets.max(dim=0).values,
        S: (weight * (ss + (1 + rests) * lower)).sum(dim=0),
        BELOW: (belows + columns * lower).sum(dim=0),
        COLUMNS: columns.sum(dim=0),
        SQUARES: (weight.square() * squares).sum(dim=0),
    }
    return torch.stack([merged[i] for i in range(7)], dim=1)


class Finished(NamedTuple):
    """Outputs, and what backward reads of the forward pass."""

    outputs: tuple[Tensor, ...]  # logprob, then options.stats
    saved: tuple[Tensor, ...]  # peak, log D, entropy, 1 - p of the target


def finish(moments: Tensor, target: Tensor, factor: Tensor, options: Options) -> Finished:
    """Logprobs and statistics of merged moments. Ignored rows get 0, targets outside the vocabulary a logprob of NaN;
    rows without a finite maximum (all -inf, a NaN, an inf) are no distribution and get NaN throughout."""
    peak, rest, u_target, s, below, _, squares = moments.unbind(1)
    log_d = torch.log1p(rest)
    kept = target != options.ignore_index
    in_range = (target >= 0) & (target < options.vocab_size)
    logprob = (u_target - peak) * factor - log_d
    logprob = torch.where(in_range, logprob, torch.full_like(logprob, torch.nan))
    entropy = log_d - s / (1 + rest)
    values = {
        "entropy": entropy,
        "self_certainty": log_d - below / options.vocab_size - math.log(options.vocab_size),
        "top1_probability": torch.exp(-log_d),
        "sum_p2": squares / (1 + rest).square(),
    }
    nothing, zero = torch.full_like(peak, torch.nan), torch.zeros_like(peak)
    outputs = [
        torch.where(kept, torch.where(torch.isfinite(peak), x, nothing), zero)
        for x in (logprob, *(values[s] for s in options.stats))
    ]
    return Finished(tuple(outputs), (peak, log_d, entropy, -torch.expm1(outputs[0])))


def without_gradient(outputs: Sequence[Tensor], options: Options) -> list[Tensor]:
    return [x for name, x in zip(options.stats, outputs[1:], strict=True) if name in WITHOUT_GRADIENT]


def rows_of(
    grads: Sequence[Tensor | None], target: Tensor, factor: Tensor, saved: Sequence[Tensor], options: Options
) -> Rows | None:
    """What backward needs of each row; None where no output that has a gradient was used."""
    kept = target != options.ignore_index

    def of_kept(g: Tensor | None) -> Tensor | None:
        # where, not a product: an ignored row's upstream gradient may be NaN
        return None if g is None else torch.where(kept, g, torch.zeros_like(g)).contiguous()

    stats = dict(zip(options.stats, grads[1:], strict=True))
    g_logprob, g_entropy = of_kept(grads[0]), of_kept(stats.get("entropy"))
    g_certainty = of_kept(stats.get("self_certainty"))
    if g_logprob is None and g_entropy is None and g_certainty is None:
        return None
    peak, log_d, entropy, rest_p = (x.contiguous() for x in saved)
    return Rows(
        target=target,
        factor=factor,
        peak=peak,
        log_d=log_d,
        entropy=entropy,
        rest_p=rest_p,
        g_logprob=torch.zeros_like(factor) if g_logprob is None else g_logprob,
        g_entropy=g_entropy,
        g_certainty=g_certainty,
    )
