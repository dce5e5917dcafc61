"""Logprobs and distribution statistics from a shard of the logits.

Axes: N rows (tokens), Vl vocabulary columns of this rank, V the true vocabulary.

With z the logits after scale, soft-cap and temperature, M = max z, D = sum e^(z-M), S = sum e^(z-M) (z-M):

    logprob = (z_t - M) - log D           (not z_t - logsumexp: its error is one ulp of z - M, not of logsumexp)
    entropy = log D - S / D
    self-certainty = KL(uniform || p) = log D - mean(z - M) - log V

D is kept as 1 + rest (the maximum's own term apart), so that 1 - p of a nearly certain token keeps its digits. Ranks
merge (M, rest, S, ...) with one all-gather in rank order; after it all of them hold M, D and the entropy, hence
backward needs no collective:

    dz_v = g_logprob (1[v=t] - p_v) - g_entropy p_v (log p_v + entropy) + g_certainty (p_v - 1/V)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

STATS = ("entropy", "self_certainty", "top1_probability", "sum_p2")
BACKENDS = ("auto", "torch")
WORKSPACE_BYTES = 256 << 20  # of the row chunks' temporaries
_CHUNK_COPIES = 4  # arrays of a chunk's size alive at once


class LogprobOutput(NamedTuple):
    """``logprob`` float32[N] and the statistics asked for, each float32[N] (float64 where the logits are)."""

    logprob: Tensor
    stats: dict[str, Tensor]


class _Options(NamedTuple):
    vocab_size: int
    vocab_start: int
    columns: int  # of this shard, that belong to the true vocabulary
    tp_group: dist.ProcessGroup | None
    softcap: float
    logit_scale: float
    ignore_index: int
    stats: tuple[str, ...]


def vocab_parallel_logprob(  # noqa: PLR0913
    logits: Tensor,
    target: Tensor,
    *,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    stats: Sequence[str] = ("entropy",),
    backend: str = "auto",
) -> LogprobOutput:
    """Logprob of target[N] (global vocabulary ids) under logits[N, Vl], and ``stats`` of the whole distribution.

    ``vocab_size`` is the true vocabulary: columns beyond it are padding, take no part and get no gradient (null: all
    columns of all ranks). ``vocab_start`` is the id of column 0 (null: tp rank * Vl). z = softcap * tanh(logit_scale *
    x / softcap) / temperature, the cap only where softcap > 0. Rows whose target is ``ignore_index`` give 0 and no
    gradient. Gradients of logprob, entropy and self_certainty are exact; top1_probability and sum_p2 carry none. The
    input is never written to, whatever its dtype. A target outside the vocabulary raises on CPU and gives NaN on an
    accelerator, where a check would wait for the device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: there are {', '.join(BACKENDS)}")
    unknown = sorted(set(stats) - set(STATS))
    if unknown:
        raise ValueError(f"stats={unknown}: there are {', '.join(STATS)}")
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits{list(logits.shape)} and target{list(target.shape)} must be [N, Vl] and [N]")
    width = logits.shape[1]
    ranks = dist.get_world_size(tp_group) if tp_group is not None else 1
    vocab_size = width * ranks if vocab_size is None else vocab_size
    if vocab_start is None:
        vocab_start = width * dist.get_rank(tp_group) if tp_group is not None else 0
    if not 0 < vocab_size <= width * ranks:
        raise ValueError(
            f"vocab_size={vocab_size} does not fit {ranks} shards of {width} columns: logits are one rank's shard, "
            "not gathered ones"
        )
    options = _Options(
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        columns=min(max(vocab_size - vocab_start, 0), width),
        tp_group=tp_group if ranks > 1 else None,
        softcap=float(softcap),
        logit_scale=float(logit_scale),
        ignore_index=ignore_index,
        stats=tuple(stats),
    )
    accumulate = torch.float64 if logits.dtype == torch.float64 else torch.float32
    inverse_temperature = _inverse_temperature(temperature, logits, accumulate)
    logprob, *values = _LogprobFunction.apply(logits, _checked(target, options), inverse_temperature, options)
    return LogprobOutput(logprob, dict(zip(options.stats, values, strict=True)))


def _inverse_temperature(temperature: float | Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
    rows = logits.shape[0]
    t = torch.as_tensor(temperature, dtype=dtype, device=logits.device)
    if t.dim() > 1 or (t.dim() == 1 and t.shape[0] != rows):
        raise ValueError(f"temperature{list(t.shape)} must be a number or one per row [{rows}]")
    return t.expand(rows).detach()


def _checked(target: Tensor, options: _Options) -> Tensor:
    target = target.to(torch.int64)
    if target.device.type == "cpu":
        wrong = ((target < 0) | (target >= options.vocab_size)) & (target != options.ignore_index)
        if bool(wrong.any()):
            raise ValueError(
                f"target {int(target[wrong][0])} is outside the vocabulary [0, {options.vocab_size}) "
                f"and is not ignore_index={options.ignore_index}"
            )
    return target


def _chunks(rows: int, columns: int, dtype: torch.dtype) -> list[slice]:
    itemsize = torch.finfo(dtype).bits // 8
    step = max(1, WORKSPACE_BYTES // (_CHUNK_COPIES * itemsize * max(columns, 1)))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def _warp(x: Tensor, temperature: Tensor, options: _Options) -> tuple[Tensor, Tensor | None]:
    """z of one chunk as a fresh array, and tanh (None without soft-cap) for its derivative."""
    z = x.to(temperature.dtype, copy=True)
    tanh = None
    if options.logit_scale != 1.0:
        z.mul_(options.logit_scale)
    if options.softcap > 0:
        tanh = z.div_(options.softcap).tanh_()
        z = tanh * options.softcap
    return z.div_(temperature[:, None]), tanh


def _shard_moments(logits: Tensor, target: Tensor, temperature: Tensor, options: _Options) -> Tensor:
    """This shard's (M, rest, z_t, S, sum z-M, columns, sum of squared exponentials), [N, 7]."""
    rows = logits.shape[0]
    out = torch.zeros(rows, 7, dtype=temperature.dtype, device=logits.device)
    out[:, 0] = out[:, 2] = -torch.inf
    out[:, 5] = options.columns
    if options.columns == 0:
        return out
    local = target - options.vocab_start
    here = (local >= 0) & (local < options.columns)
    local = local.clamp(0, options.columns - 1)
    for rows_ in _chunks(rows, options.columns, temperature.dtype):
        z, _ = _warp(logits[rows_, : options.columns], temperature[rows_], options)
        z_target = z.gather(1, local[rows_, None])[:, 0]
        peak, where = z.max(dim=1)
        # a row of -inf alone is an empty shard: subtracting its maximum would give NaN
        z.sub_(torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)[:, None])
        e = z.exp()
        chunk = out[rows_]
        chunk[:, 0] = peak
        chunk[:, 2] = torch.where(here[rows_], z_target, chunk[:, 2])
        if "self_certainty" in options.stats:
            chunk[:, 4] = z.sum(dim=1)
        if "sum_p2" in options.stats:
            chunk[:, 6] = e.square().sum(dim=1)
        if "entropy" in options.stats:
            z.masked_fill_(e == 0, 0.0)  # 0 * -inf
            chunk[:, 3] = z.mul_(e).sum(dim=1)
        chunk[:, 1] = e.scatter_(1, where[:, None], 0.0).sum(dim=1)
    return out


class _Moments(NamedTuple):
    peak: Tensor
    rest: Tensor
    z_target: Tensor
    s: Tensor
    below: Tensor  # sum over the vocabulary of z - M
    squares: Tensor


def _merge(local: Tensor, group: dist.ProcessGroup | None) -> _Moments:
    """Moments of the whole vocabulary, [N] each, the same bits on every rank."""
    if group is None:
        peak, rest, z_target, s, below, _, squares = local.unbind(1)
        return _Moments(peak, rest, z_target, s, below, squares)
    shards = torch.empty(dist.get_world_size(group), *local.shape, dtype=local.dtype, device=local.device)
    dist.all_gather(list(shards.unbind(0)), local, group=group)
    peaks, rests, z_targets, ss, belows, columns, squares = shards.unbind(2)  # [ranks, N] each
    peak, top = peaks.max(dim=0)
    lower = torch.where(peaks == -torch.inf, torch.zeros_like(peaks), peaks - peak)
    scale = torch.where(peaks == -torch.inf, torch.zeros_like(peaks), lower.exp())
    is_top = torch.arange(peaks.shape[0], device=peaks.device)[:, None] == top
    return _Moments(
        peak=peak,
        rest=torch.where(is_top, rests, scale * (1 + rests)).sum(dim=0),
        z_target=z_targets.max(dim=0).values,
        s=(scale * (ss + (1 + rests) * lower)).sum(dim=0),
        below=(belows + columns * lower).sum(dim=0),
        squares=(scale.square() * squares).sum(dim=0),
    )


class _LogprobFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, temperature: Tensor, options: _Options):
        moments = _merge(_shard_moments(logits, target, temperature, options), options.tp_group)
        log_d = torch.log1p(moments.rest)
        kept = target != options.ignore_index
        in_range = (target >= 0) & (target < options.vocab_size)
        logprob = (moments.z_target - moments.peak) - log_d
        logprob = torch.where(in_range, logprob, torch.full_like(logprob, torch.nan))
        values = {
            "entropy": log_d - moments.s / (1 + moments.rest),
            "self_certainty": log_d
            - moments.below / options.vocab_size
            - torch.log(torch.tensor(float(options.vocab_size), dtype=log_d.dtype, device=log_d.device)),
            "top1_probability": torch.exp(-log_d),
            "sum_p2": moments.squares / (1 + moments.rest).square(),
        }
        outputs = [torch.where(kept, x, torch.zeros_like(x)) for x in (logprob, *(values[s] for s in options.stats))]
        ctx.save_for_backward(logits, target, temperature, moments.peak, log_d, outputs[0], values["entropy"])
        ctx.options = options
        ctx.mark_non_differentiable(
            *(x for name, x in zip(options.stats, outputs[1:], strict=True) if name in ("top1_probability", "sum_p2"))
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        grad_logprob, *grad_stats = grads
        options: _Options = ctx.options
        logits, target, temperature, peak, log_d, logprob, entropy = ctx.saved_tensors
        kept = target != options.ignore_index
        zero = torch.zeros_like(logprob)
        stats = dict(zip(options.stats, grad_stats, strict=True))
        g_l = torch.where(kept, grad_logprob, zero)
        g_h = torch.where(kept, stats["entropy"], zero) if "entropy" in stats else None
        g_c = torch.where(kept, stats["self_certainty"], zero) if "self_certainty" in stats else None
        grad = torch.zeros_like(logits)
        if options.columns == 0:
            return grad, None, None, None
        local = target - options.vocab_start
        here = (local >= 0) & (local < options.columns) & kept
        local = local.clamp(0, options.columns - 1)
        for rows in _chunks(logits.shape[0], options.columns, temperature.dtype):
            z, tanh = _warp(logits[rows, : options.columns], temperature[rows], options)
            log_p = z.sub_(peak[rows, None]).sub_(log_d[rows, None])
            p = log_p.exp()
            dz = torch.zeros_like(p)
            if g_h is not None:
                log_p.masked_fill_(p == 0, 0.0)  # 0 * -inf
                dz.sub_(log_p.add_(entropy[rows, None]).mul_(p).mul_(g_h[rows, None]))
            if g_c is not None:
                dz.add_((p - 1.0 / options.vocab_size).mul_(g_c[rows, None]))
            # p_t becomes p_t - 1, by expm1: the difference of two rounded numbers loses its digits near p_t = 1
            at = local[rows, None]
            p.scatter_(1, at, torch.where(here[rows, None], torch.expm1(logprob[rows, None]), p.gather(1, at)))
            dz.sub_(p.mul_(g_l[rows, None]))
            dz.mul_(options.logit_scale).div_(temperature[rows, None])
            if tanh is not None:
                dz.mul_(1 - tanh.square())
            grad[rows, : options.columns] = torch.where(kept[rows, None], dz, torch.zeros_like(dz)).to(grad.dtype)
        return grad, None, None, None
