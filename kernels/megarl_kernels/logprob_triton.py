"""Moments of logits and their gradient as Triton kernels, for sm_80 and newer; see ``moments`` for the mathematics.

One program reads a row of logits once and keeps the moments of what it has seen, block after block (forward), or turns
one block of one row into its gradient (backward). The order is fixed, nothing is atomic and the number of blocks
depends on the vocabulary alone: the same row gives the same bits in any batch. Offsets are int64. Blocks are masked on
the width of the shard, which is a multiple of 16 where the head is padded, so that loads stay 16 bytes wide; columns
of padding are masked by value.

``KERNELS`` lists every kernel with the types and constants it is launched with, to be compiled without a GPU.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportInvalidTypeForm=false
# a kernel is launched with a grid and options, and its constants are annotated: Triton is no Python to a type checker

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl_kernels.moments import Options, Rows
from megarl_kernels.offline import Specimen

BLOCK = 4096
WARPS = 8
INTERPRETED_BLOCK = 1024


@triton.jit
def _decay(x, SCALE: tl.constexpr, CAP: tl.constexpr):
    """q = e^(-2 |y|) of y = x SCALE / CAP: |tanh y| = (1 - q) / (1 + q), and 1 - tanh^2 y = 4 q / (1 + q)^2."""
    return tl.exp(-2.0 * tl.abs(x * (SCALE / CAP)))


@triton.jit
def _capped(x, decay, CAP: tl.constexpr):
    """CAP tanh y; -inf stays."""
    u = CAP * ((1.0 - decay) / (1.0 + decay))
    return tl.where(x == float("-inf"), x, tl.where(x < 0, -u, u))


@triton.jit
def _distance(lower, upper, factor):
    """(lower - upper) * factor, 0 where nothing has been seen (lower is -inf)."""
    return tl.where(lower == float("-inf"), 0.0, (lower - upper) * factor)


@triton.jit
def moments_kernel(  # noqa: PLR0913
    X,  # logits [N, stride]
    TARGET,  # int64[N], global ids
    FACTOR,  # float32[N]
    OUT,  # float32[N, 7]
    stride: tl.int64,
    width,
    columns,
    start,
    ignore,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    CERTAINTY: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    OUT += row * 7
    target = tl.load(TARGET + row)
    factor = tl.load(FACTOR + row)
    peak = tl.full([], float("-inf"), tl.float32)
    rest = tl.full([], 0.0, tl.float32)
    s = tl.full([], 0.0, tl.float32)
    below = tl.full([], 0.0, tl.float32)
    squares = tl.full([], 0.0, tl.float32)
    limit = tl.where(target == ignore, 0, columns)  # nothing is read of an ignored row
    for j in range(0, limit, BLOCK):
        c = j + tl.arange(0, BLOCK)
        x = tl.load(X + c, mask=c < width, other=float("-inf")).to(tl.float32)
        x = tl.where(c < columns, x, float("-inf"))
        if CAP > 0:
            x = _capped(x, _decay(x, SCALE, CAP), CAP)
        top = tl.max(x, 0)
        is_top = (x == top) & (x > float("-inf"))
        z = (x - tl.where(top == float("-inf"), 0.0, top)) * factor
        e = tl.where(is_top, 0.0, tl.exp(z))
        # D - 1 of the block: one of the tied maxima is the 1
        block_rest = tl.where(top == float("-inf"), 0.0, tl.sum(e, 0) + tl.sum(is_top.to(tl.float32), 0) - 1.0)
        new = tl.maximum(peak, top)
        down, block_down = _distance(peak, new, factor), _distance(top, new, factor)
        w = tl.where(peak == float("-inf"), 0.0, tl.exp(down))
        block_w = tl.where(top == float("-inf"), 0.0, tl.exp(block_down))
        if ENTROPY:
            block_s = tl.sum(tl.where(e > 0, e * z, 0.0), 0)
            s = w * (s + (1.0 + rest) * down) + block_w * (block_s + (1.0 + block_rest) * block_down)
        if CERTAINTY:
            block_below = tl.sum(tl.where(c < columns, z, 0.0), 0)
            below += j * down + (block_below + tl.minimum(columns - j, BLOCK) * block_down)
        if SQUARES:
            block_squares = tl.sum(e * e, 0) + tl.sum(is_top.to(tl.float32), 0)
            squares = w * w * squares + block_w * block_w * block_squares
        rest = tl.where(peak >= top, rest + block_w * (1.0 + block_rest), block_rest + w * (1.0 + rest))
        peak = new
    local = target - start
    here = (local >= 0) & (local < limit)
    u_target = tl.load(X + tl.where(here, local, 0), mask=here, other=float("-inf")).to(tl.float32)
    if CAP > 0:
        u_target = _capped(u_target, _decay(u_target, SCALE, CAP), CAP)
    tl.store(OUT, peak)
    tl.store(OUT + 1, rest)
    tl.store(OUT + 2, u_target)
    tl.store(OUT + 3, s)
    tl.store(OUT + 4, below)
    tl.store(OUT + 5, columns * 1.0)
    tl.store(OUT + 6, squares)


@triton.jit
def gradient_kernel(  # noqa: PLR0913
    X,  # logits [N, stride]
    DX,  # their gradient [N, dstride]; may be X
    TARGET,  # int64[N]
    FACTOR,
    PEAK,
    LOG_D,
    ENTROPY,
    REST_P,
    G_LOGPROB,
    G_ENTROPY,
    G_CERTAINTY,  # float32[N] each
    stride: tl.int64,
    dstride: tl.int64,
    width,
    columns,
    start,
    ignore,
    vocab_size,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_CERTAINTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + i
    X += row * stride + tl.program_id(1).to(tl.int64) * BLOCK
    DX += row * dstride + tl.program_id(1).to(tl.int64) * BLOCK
    target = tl.load(TARGET + row)
    kept = target != ignore
    factor = tl.load(FACTOR + row)
    x = tl.load(X + i, mask=(c < width) & kept, other=float("-inf")).to(tl.float32)
    x = tl.where(c < columns, x, float("-inf"))
    finite = x != float("-inf")  # true of NaN, which must stay
    slope = tl.full([BLOCK], 1.0, tl.float32) * factor
    if CAP > 0:
        decay = _decay(x, SCALE, CAP)
        slope *= (SCALE * 4.0) * decay / ((1.0 + decay) * (1.0 + decay))
        x = _capped(x, decay, CAP)
    log_p = (x - tl.load(PEAK + row)) * factor - tl.load(LOG_D + row)
    p = tl.exp(log_p)
    g_logprob = tl.load(G_LOGPROB + row)
    # 1 - p of the target comes from its logprob: subtracting rounded numbers loses its digits near p = 1
    g = tl.where(c == target - start, g_logprob * tl.load(REST_P + row), -g_logprob * p)
    if HAS_ENTROPY:
        g -= tl.where(p > 0, tl.load(G_ENTROPY + row) * p * (log_p + tl.load(ENTROPY + row)), 0.0)
    if HAS_CERTAINTY:
        g += tl.load(G_CERTAINTY + row) * (p - 1.0 / vocab_size)
    g = tl.where(finite & kept, g * slope, 0.0)
    tl.store(DX + i, g.to(DX.dtype.element_ty), mask=c < width)


INTERPRETED = not isinstance(moments_kernel, triton.JITFunction)
_BLOCK = INTERPRETED_BLOCK if INTERPRETED else BLOCK


def fill_moments(
    logits: Tensor, target: Tensor, factor: Tensor, options: Options, out: Tensor, overwrite: bool = False
) -> None:
    """Moments of logits[N, Vl] into the contiguous float32 out[N, 7]; nothing else is written."""
    logits = _row_major(logits)
    with _device(logits):
        moments_kernel[(logits.shape[0],)](
            logits,
            target,
            factor,
            out,
            logits.stride(0),
            logits.shape[1],
            options.columns,
            options.vocab_start,
            options.ignore_index,
            SCALE=options.logit_scale,
            CAP=options.softcap,
            ENTROPY="entropy" in options.stats,
            CERTAINTY="self_certainty" in options.stats,
            SQUARES="sum_p2" in options.stats,
            BLOCK=_BLOCK,
            num_warps=WARPS,
        )


def fill_gradient(logits: Tensor, rows: Rows, options: Options, out: Tensor) -> None:
    """d loss / d logits[N, Vl] into out[N, Vl], of any floating dtype; may be the logits themselves."""
    logits = _row_major(logits)
    width = logits.shape[1]
    if out.stride(1) != 1:
        raise ValueError(f"out has strides {out.stride()}: columns must be adjacent")
    with _device(logits):
        gradient_kernel[(logits.shape[0], triton.cdiv(width, _BLOCK))](
            logits,
            out,
            rows.target,
            rows.factor,
            rows.peak,
            rows.log_d,
            rows.entropy,
            rows.rest_p,
            rows.g_logprob,
            rows.g_logprob if rows.g_entropy is None else rows.g_entropy,
            rows.g_logprob if rows.g_certainty is None else rows.g_certainty,
            logits.stride(0),
            out.stride(0),
            width,
            options.columns,
            options.vocab_start,
            options.ignore_index,
            options.vocab_size,
            SCALE=options.logit_scale,
            CAP=options.softcap,
            HAS_ENTROPY=rows.g_entropy is not None,
            HAS_CERTAINTY=rows.g_certainty is not None,
            BLOCK=_BLOCK,
            num_warps=WARPS,
        )


def _row_major(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _device(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the tensors' is."""
    return torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext()


def _specimens() -> list[Specimen]:
    """Both kernels as a padded head launches them."""
    integers = {"width": "i32", "columns": "i32", "start": "i32", "ignore": "i32"}
    rows = ("FACTOR", "PEAK", "LOG_D", "ENTROPY", "REST_P", "G_LOGPROB", "G_ENTROPY", "G_CERTAINTY")
    found = []
    for kind, cap in (("bf16", 0.0), ("bf16", 30.0), ("fp32", 0.0), ("fp32", 30.0)):
        label = f"{kind} logits" + (", capped" if cap else "")
        logits = {"X": f"*{kind}", "TARGET": "*i64"}
        constants = {"SCALE": 1.0, "CAP": cap, "BLOCK": BLOCK}
        found += [
            Specimen(
                kernel=moments_kernel,
                arguments=logits | {"FACTOR": "*fp32", "OUT": "*fp32", "stride": "i64"} | integers,
                constants=constants | {"ENTROPY": True, "CERTAINTY": True, "SQUARES": True},
                aligned=("stride", "width"),
                num_warps=WARPS,
                label=label,
            ),
            Specimen(
                kernel=gradient_kernel,
                arguments=logits
                | {"DX": "*bf16", "stride": "i64", "dstride": "i64", "vocab_size": "i32"}
                | dict.fromkeys(rows, "*fp32")
                | integers,
                constants=constants | {"HAS_ENTROPY": True, "HAS_CERTAINTY": True},
                aligned=("stride", "dstride", "width"),
                num_warps=WARPS,
                label=label,
            ),
        ]
    return found


KERNELS = _specimens()
