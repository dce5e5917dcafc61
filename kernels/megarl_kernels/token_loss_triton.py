"""The token loss on a GPU: the loss, its metrics and its gradient from one read of the pack.

Axes: T tokens of a pack, S sequences, P programs. A program takes SPAN tokens in blocks and writes one row of partial
sums; rows are added in their order, with no atomics, so that a run repeats bit for bit. The loss is a scalar, hence
its derivative by each logprob is known in forward: backward multiplies it by what comes from above.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportInvalidTypeForm=false
# a kernel is launched with a grid and options, and its constants are annotated: Triton is no Python to a type checker

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl_kernels.dispatch import launching_on
from megarl_kernels.offline import Specimen
from megarl_kernels.token_loss_terms import K3_BOUND, LOG_RATIO_BOUND, METRICS, Pack, Terms

BLOCK, WARPS = 1024, 8
SPAN = 16384  # tokens of one program: a pack of that size or less is one launch

_LIMIT = tl.constexpr(LOG_RATIO_BOUND)
_K3_LIMIT = tl.constexpr(K3_BOUND)
_METRICS = tl.constexpr(len(METRICS))
_KL = {"k1": 1, "k2": 2, "k3": 3}
_K1 = tl.constexpr(1)
_K2 = tl.constexpr(2)


@triton.jit
def _kept(VALUES, i, here, on):
    """float32 at i where ``on``, else 0. Loaded under the bounds alone, whose mask leaves 16-byte loads whole, and
    chosen afterwards: a masked NaN meets no arithmetic."""
    return tl.where(on, tl.load(VALUES + i, mask=here, other=0.0).to(tl.float32), 0.0)


@triton.jit
def _clamp(x, low, high):
    """A NaN fails both comparisons and stays one, which min and max instructions do not promise."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def _inside(x, bound):
    """1 where the clamp passes a gradient; a NaN counts, so that it is seen in the gradient."""
    return tl.where((x > bound) | (x < -bound), 0.0, 1.0)


@triton.jit
def _expm1_less(d):
    """e^d - 1 - d, without cancellation near 0: Taylor's series there, whose rest is below an ulp."""
    tail = 1.0 / 40320 + d * (1.0 / 362880 + d * (1.0 / 3628800))
    series = 0.5 + d * (1.0 / 6 + d * (1.0 / 24 + d * (1.0 / 120 + d * (1.0 / 720 + d * (1.0 / 5040 + d * tail)))))
    small = (d > -0.5) & (d < 0.5)
    return tl.where(small, d * d * series, (tl.exp(d) - 1.0) - d)


@triton.jit
def _kl(d, KIND: tl.constexpr):
    """(KL estimate, its derivative by the logprob) of the clamped d = reference - logprob."""
    if KIND == _K1:
        value, slope = -d, tl.full(d.shape, 1.0, tl.float32)
    elif KIND == _K2:
        value, slope = 0.5 * d * d, -d
    else:
        rest = _expm1_less(d)
        value = _clamp(rest, -_K3_LIMIT, _K3_LIMIT)
        slope = -(rest + d) * _inside(rest, _K3_LIMIT)
    return value, slope


@triton.jit
def _first_of(IDS, sequence, tokens):
    """Number of tokens whose (ascending) sequence id is below ``sequence``."""
    low = tl.zeros([], tl.int64)
    high = low + tokens
    while low < high:
        middle = (low + high) // 2
        below = tl.load(IDS + middle) < sequence
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def sequence_sums_kernel(LOGPROB, OLD, IDS, MASK, TIS, OUT, tokens, sequences, BLOCK: tl.constexpr):
    """OUT[2, S]: per sequence the sum of its log-ratios and of its importance weights; one program each."""
    sequence = tl.program_id(0).to(tl.int64)
    first, end = _first_of(IDS, sequence, tokens), _first_of(IDS, sequence + 1, tokens)
    log_ratios = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        on = tl.load(MASK + i, mask=i < end, other=0) != 0
        log_ratios += _kept(LOGPROB, i, i < end, on) - _kept(OLD, i, i < end, on)
        if TIS is not None:
            weights += _kept(TIS, i, i < end, on)
        else:
            weights += on.to(tl.float32)
    tl.store(OUT + sequence, tl.sum(log_ratios, 0))
    tl.store(OUT + sequences + sequence, tl.sum(weights, 0))


@triton.jit
def _looked_up(VALUES, sequence, known, on):
    """Per-sequence values at the tokens' sequences; an id outside gives NaN, never a plausible number."""
    values = tl.load(VALUES + sequence, mask=known, other=0.0).to(tl.float32)
    return tl.where(on & (known == 0), float("nan"), values)


@triton.jit
def _surrogate(ratio, a, low: tl.constexpr, high: tl.constexpr, dual_clip: tl.constexpr):
    """(loss, its derivative by the log-ratio, clipped below, clipped above, held by the dual clip)."""
    is_low = (a < 0) & (ratio < low)
    is_high = (a > 0) & (ratio > high)
    loss = -a * tl.where(is_low, low, tl.where(is_high, high, ratio))
    is_dual = is_low & is_high  # nowhere
    if dual_clip is not None:
        is_dual = (a < 0) & (loss > -a * dual_clip)
        loss = tl.where(is_dual, -a * dual_clip, loss)
    slope = tl.where(is_low | is_high | is_dual, 0.0, -a * ratio)
    return loss, slope, is_low, is_high, is_dual


@triton.jit
def _sequence_unit(IDS, SUMS, i, sequence, length, known, on, sequences):
    """(log-ratio, weight of the derivative) that a token shares with its sequence. The sums took ids for ascending:
    where they are not, NaN."""
    before = tl.load(IDS + i - 1, mask=on & (i > 0), other=0)
    log_ratio = _looked_up(SUMS, sequence, known, on) / length
    log_ratio = tl.where(on & (i > 0) & (before > sequence), float("nan"), log_ratio)
    return log_ratio, _looked_up(SUMS + sequences, sequence, known, on) / length


@triton.jit
def token_loss_kernel(  # noqa: PLR0913
    LOGPROB,
    OLD,
    ADVANTAGE,
    IDS,
    MASK,
    REFERENCE,
    TIS,
    SEQUENCE_TOKENS,
    SEQUENCE_SUMS,
    COUNT,
    LOSS,
    OUT,
    SLOPE,
    tokens,
    sequences,
    count,
    low: tl.constexpr,
    high: tl.constexpr,
    dual_clip: tl.constexpr,
    kl_coef: tl.constexpr,
    KL: tl.constexpr,
    per_sequence_tokens: tl.constexpr,
    norm: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partial sums LOSS[P] and OUT[P, metrics], and SLOPE[T], the derivative (None: not wanted). SEQUENCE_SUMS[2, S],
    where given, make the ratio one of sequences. COUNT on the device stands for ``count``."""
    program = tl.program_id(0).to(tl.int64)
    if COUNT is not None:
        count = tl.load(COUNT).to(tl.float32)
    count = tl.maximum(count, 1.0)  # an empty update has counts of 0 and nothing to divide
    none = tl.zeros([BLOCK], tl.float32)
    n_on, n_low, n_high, n_dual = none, none, none, none
    policy, penalty, ratios, log_ratios, kls, weights = none, none, none, none, none, none

    for start in range(0, tl.minimum(tokens - program * SPAN, SPAN), BLOCK):
        i = program * SPAN + start + tl.arange(0, BLOCK)
        here = i < tokens
        on = (tl.load(MASK + i, mask=here, other=0) != 0) & here
        z = on.to(tl.float32)
        new = _kept(LOGPROB, i, here, on)
        log_ratio = new - _kept(OLD, i, here, on)
        tis = z
        if TIS is not None:
            tis = _kept(TIS, i, here, on)
        sequence = tl.load(IDS + i, mask=here, other=0)
        known = on & (sequence >= 0) & (sequence < sequences)
        a = _looked_up(ADVANTAGE, sequence, known, on)

        weight = none + 1.0 / (count * norm)
        unit, pull = log_ratio, tis
        if SEQUENCE_TOKENS is not None:
            length = _looked_up(SEQUENCE_TOKENS, sequence, known, on)
            length = tl.where(length < 1.0, 1.0, length)
            if per_sequence_tokens:
                weight = 1.0 / (count * length)
            if SEQUENCE_SUMS is not None:
                unit, pull = _sequence_unit(IDS, SEQUENCE_SUMS, i, sequence, length, known, on, sequences)
        ratio = tl.exp(_clamp(unit, -_LIMIT, _LIMIT))
        loss, slope, is_low, is_high, is_dual = _surrogate(ratio, a, low, high, dual_clip)
        slope = slope * _inside(unit, _LIMIT) * pull
        if REFERENCE is not None:
            d = _kept(REFERENCE, i, here, on) - new
            kl, kl_slope = _kl(_clamp(d, -_LIMIT, _LIMIT), KL)
            kls += tl.where(on, kl, 0.0)
            penalty += tl.where(on, weight * kl, 0.0)
            slope += kl_coef * kl_slope * _inside(d, _LIMIT)
        if SLOPE is not None:
            tl.store(SLOPE + i, tl.where(on, weight * slope, 0.0), mask=here)

        n_on += z
        n_low += tl.where(is_low, z, 0.0)
        n_high += tl.where(is_high, z, 0.0)
        n_dual += tl.where(is_dual, z, 0.0)
        policy += tl.where(on, weight * tis * loss, 0.0)
        ratios += tl.where(on, ratio, 0.0)
        log_ratios += log_ratio
        weights += tis

    policy_loss = tl.sum(policy, 0)
    kl_loss = kl_coef * tl.sum(penalty, 0)
    tl.store(LOSS + program, policy_loss + kl_loss)
    row = OUT + program * _METRICS
    tl.store(row, tl.sum(n_on, 0))
    tl.store(row + 1, policy_loss)
    tl.store(row + 2, kl_loss)
    tl.store(row + 3, tl.sum(ratios, 0))
    tl.store(row + 4, tl.sum(log_ratios, 0))
    tl.store(row + 5, tl.sum(n_low, 0))
    tl.store(row + 6, tl.sum(n_high, 0))
    tl.store(row + 7, tl.sum(n_dual, 0))
    tl.store(row + 8, tl.sum(kls, 0))
    tl.store(row + 9, tl.sum(weights, 0))


def token_loss(pack: Pack, terms: Terms) -> tuple[Tensor, Tensor]:
    """The loss, and the values of METRICS in their order as one vector."""
    if pack.logprob.numel() == 0:  # nothing to launch, but other ranks may wait
        if terms.ratio_level == "sequence" and terms.context_sum is not None:
            terms.context_sum(torch.zeros(2, pack.advantage.numel(), device=pack.logprob.device))
        return pack.logprob.float().sum(), torch.zeros(len(METRICS), device=pack.logprob.device)
    return _TokenLoss.apply(pack.logprob, pack, terms)  # pyright: ignore[reportReturnType]


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprob: Tensor, pack: Pack, terms: Terms) -> tuple[Tensor, Tensor]:
        slope = torch.empty_like(logprob, memory_format=torch.contiguous_format) if logprob.requires_grad else None
        with launching_on(logprob):
            loss, metrics = _launch(pack, terms, slope)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grads[0].to(slope.dtype), None, None


def _launch(pack: Pack, terms: Terms, slope: Tensor | None) -> tuple[Tensor, Tensor]:
    """Loss and metrics, in memory of their own: a caller may scale the loss in place. Fills ``slope``."""
    tokens, sequences = pack.logprob.numel(), pack.advantage.numel()
    logprob, old = pack.logprob.detach().contiguous(), pack.old_logprob.detach().contiguous()
    ids, mask = pack.sequence_ids.contiguous(), pack.mask.contiguous().view(torch.uint8)
    tis = None if pack.tis_weight is None else pack.tis_weight.detach().contiguous()
    reference = None if pack.reference_logprob is None else pack.reference_logprob.detach().contiguous()

    sums = None
    if terms.ratio_level == "sequence":
        sums = torch.empty(2, sequences, dtype=torch.float32, device=logprob.device)
        sequence_sums_kernel[(sequences,)](
            logprob, old, ids, mask, tis, sums, tokens, sequences, BLOCK=BLOCK, num_warps=WARPS
        )
        if terms.context_sum is not None:
            sums = terms.context_sum(sums).contiguous()

    programs = triton.cdiv(tokens, SPAN)
    loss = torch.empty(() if programs == 1 else programs, dtype=torch.float32, device=logprob.device)
    out = torch.empty(programs, len(METRICS), dtype=torch.float32, device=logprob.device)
    on_device = isinstance(terms.count, Tensor)
    token_loss_kernel[(programs,)](
        logprob,
        old,
        pack.advantage.detach().contiguous(),
        ids,
        mask,
        reference,
        tis,
        pack.sequence_tokens.contiguous() if pack.sequence_tokens is not None and terms.needs_sequence_tokens else None,
        sums,
        terms.count.to(logprob.device) if isinstance(terms.count, Tensor) else None,
        loss,
        out,
        slope,
        tokens,
        sequences,
        1.0 if on_device else float(terms.count),
        low=1 - terms.clip_low,
        high=1 + terms.clip_high,
        dual_clip=terms.dual_clip,
        kl_coef=terms.kl_coef,
        KL=_KL[terms.kl],
        per_sequence_tokens=terms.aggregation == "seq-mean-token-mean",
        norm=terms.norm,
        SPAN=SPAN,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return (loss, out[0]) if programs == 1 else (loss.sum(), out.sum(dim=0))


_VECTORS = {"LOGPROB": "*fp32", "OLD": "*fp32", "IDS": "*i64", "MASK": "*u8"}
_OPTIONAL = {
    "REFERENCE": "*fp32",
    "TIS": "*fp32",
    "SEQUENCE_TOKENS": "*i64",
    "SEQUENCE_SUMS": "*fp32",
    "COUNT": "*i64",
    "SLOPE": "*fp32",
}


def _specimen(label: str, given: tuple[str, ...], **constants: Any) -> Specimen:
    return Specimen(
        kernel=token_loss_kernel,
        arguments={
            **_VECTORS,
            "ADVANTAGE": "*fp32",
            "LOSS": "*fp32",
            "OUT": "*fp32",
            "tokens": "i32",
            "sequences": "i32",
            "count": "fp32",
            **{name: _OPTIONAL[name] for name in given},
        },
        constants={
            **{name: None for name in _OPTIONAL if name not in given},
            **{"low": 0.8, "high": 1.28, "dual_clip": None, "kl_coef": 0.0, "KL": 3},
            **{"per_sequence_tokens": False, "norm": 1, "SPAN": SPAN, "BLOCK": BLOCK},
            **constants,
        },
        aligned=("tokens",),
        num_warps=WARPS,
        label=label,
    )


KERNELS = [
    _specimen("plain", ("SLOPE",)),
    _specimen("KL, weights, dual clip", ("REFERENCE", "TIS", "COUNT", "SLOPE"), dual_clip=3.0, kl_coef=1e-3),
    _specimen(
        "sequence ratio",
        ("REFERENCE", "TIS", "SEQUENCE_TOKENS", "SEQUENCE_SUMS", "SLOPE"),
        kl_coef=1e-3,
        per_sequence_tokens=True,
    ),
    Specimen(
        kernel=sequence_sums_kernel,
        arguments={**_VECTORS, "TIS": "*fp32", "OUT": "*fp32", "tokens": "i32", "sequences": "i32"},
        constants={"BLOCK": BLOCK},
        num_warps=WARPS,
        wide_loads=False,  # a sequence begins anywhere, so its blocks are not aligned
    ),
]
