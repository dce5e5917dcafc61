"""Moments of a block of logits and the gradient of the block, in torch: the reference, and the path of CPUs.

Both go over a few rows at a time, so that temporaries stay in the cache of a CPU core and are small beside the logits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl_kernels.moments import BELOW, PEAK, REST, SQUARES, U_TARGET, Options, Rows, S

BLOCK_BYTES = {"cpu": 1 << 20}  # of one temporary
OTHER_BLOCK_BYTES = 64 << 20  # on an accelerator small blocks would wait for launches


def blocks(rows: int, columns: int, like: Tensor) -> Iterator[slice]:
    """Slices of at least two rows where there are two: a single row's sum may be split over threads, and then has
    other bits than the same row's among others.
    """
    budget = BLOCK_BYTES.get(like.device.type, OTHER_BLOCK_BYTES)
    step = max(2, budget // (like.element_size() * max(columns, 1)))
    start = 0
    while start < rows:
        stop = rows if rows - start <= step + 1 else start + step
        yield slice(start, stop)
        start = stop


def fill_moments(
    logits: Tensor, target: Tensor, factor: Tensor, options: Options, out: Tensor, overwrite: bool = False
) -> None:
    """Moments of logits[N, Vl] into out[N, 7]. ``overwrite``: the logits are of its dtype and may be spoiled."""
    if logits.shape[0] == 1:
        twice = out.expand(2, -1).clone()
        fill_moments(logits.expand(2, -1), target.expand(2), factor.expand(2), options, twice)
        out.copy_(twice[:1])
        return
    local = target - options.vocab_start
    here = (local >= 0) & (local < options.columns)
    local = local.clamp(0, options.columns - 1)
    for rows in blocks(logits.shape[0], options.columns, factor):
        u = _capped(logits[rows, : options.columns], factor.dtype, options, overwrite)
        chunk = out[rows]
        peak, where = u.max(dim=1)
        chunk[:, PEAK] = peak
        chunk[:, U_TARGET] = torch.where(here[rows], u.gather(1, local[rows, None])[:, 0], -torch.inf)
        # a row of -inf alone is an empty shard: subtracting its maximum would give NaN
        z = u.sub_(peak.masked_fill(peak == -torch.inf, 0.0)[:, None]).mul_(factor[rows, None])
        e = z.exp()
        if "self_certainty" in options.stats:
            chunk[:, BELOW] = z.sum(dim=1)
        if "sum_p2" in options.stats:
            chunk[:, SQUARES] = e.square().sum(dim=1)
        if "entropy" in options.stats:
            chunk[:, S] = z.clamp_(min=torch.finfo(z.dtype).min).mul_(e).sum(dim=1)  # clamped for 0 * -inf
        chunk[:, REST] = e.scatter_(1, where[:, None], 0.0).sum(dim=1)


def fill_gradient(logits: Tensor, rows: Rows, options: Options, out: Tensor) -> None:
    """d loss / d logits[N, Vl] into out[N, Vl], which may be the logits themselves where they have the accumulator's
    dtype. Columns of padding, logits of -inf and ignored rows get exactly 0.
    """
    in_place = out.data_ptr() == logits.data_ptr()
    out[:, options.columns :] = 0
    if options.columns == 0:
        return
    live = (rows.target != options.ignore_index) & (rows.peak > -torch.inf)
    for block in blocks(logits.shape[0], options.columns, rows.factor):
        x = logits[block, : options.columns]
        dx = _gradient(x, rows.at(block), options, in_place)
        if not bool(live[block].all()) if live.device.type == "cpu" else True:
            dx.masked_fill_(~live[block, None], 0.0)
        if not in_place:
            out[block, : options.columns] = dx


def _gradient(x: Tensor, rows: Rows, options: Options, in_place: bool) -> Tensor:
    """Into ``x`` itself with ``in_place``."""
    dtype = rows.factor.dtype
    slope = None
    if options.softcap > 0:  # 1 - tanh^2 as 1 / cosh^2, which keeps its digits where tanh is nearly 1
        slope = x.to(dtype).mul(options.logit_scale / options.softcap).cosh_().square_().reciprocal_()
    u = _capped(x, dtype, options, in_place)
    log_p = u.sub_(rows.peak[:, None]).mul_(rows.factor[:, None]).sub_(rows.log_d[:, None])
    p = log_p.exp()
    parts = None
    if rows.g_certainty is not None:
        parts = torch.where(log_p == -torch.inf, 0.0, p - 1.0 / options.vocab_size) * rows.g_certainty[:, None]
    if rows.g_entropy is not None:
        log_p.clamp_(min=torch.finfo(dtype).min)  # 0 * -inf
        entropy_part = log_p.add_(rows.entropy[:, None]).mul_(p).mul_(-rows.g_entropy[:, None])
        parts = entropy_part if parts is None else parts.add_(entropy_part)
    # p_t becomes p_t - 1, from the logprob: the difference of two rounded numbers loses its digits near p_t = 1
    local = rows.target - options.vocab_start
    here = (local >= 0) & (local < options.columns)
    at = local.clamp(0, options.columns - 1)[:, None]
    p.scatter_(1, at, torch.where(here[:, None], -rows.rest_p[:, None], p.gather(1, at)))
    factor = rows.factor * options.logit_scale if options.softcap > 0 else rows.factor
    dz = p.mul_(-(rows.g_logprob * factor)[:, None])
    if parts is not None:
        dz.add_(parts.mul_(factor[:, None]))
    if slope is not None:
        dz.mul_(slope)
    return x.copy_(dz) if in_place else dz


def _capped(x: Tensor, dtype: torch.dtype, options: Options, in_place: bool) -> Tensor:
    """u of one block; a fresh array unless ``in_place``."""
    u = x if in_place else x.to(dtype, copy=True)
    if options.softcap > 0:
        u.mul_(options.logit_scale / options.softcap).tanh_().mul_(options.softcap)
    return u
