"""Logprobs and distribution statistics from hidden states and a shard of the head, without the logits of all rows.

Rows go through in chunks of a fixed size: a chunk's logits, in float32, are made by the library's matrix product,
reduced to seven numbers per row, and forgotten; backward makes them again (2 N H V of 8 N H V operations) and turns
them into their gradient in place.

Axes: N rows (tokens), R rows of a chunk, H hidden size, Vl vocabulary columns of this rank.
"""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl_kernels import moments, projection
from megarl_kernels.dispatch import resolve
from megarl_kernels.head_liger import liger_logprob
from megarl_kernels.logprob import implementation
from megarl_kernels.moments import LogprobOutput, Options, Rows

BACKENDS = ("torch", "triton", "liger")
WORKSPACE_BYTES = 512 << 20
# of a chunk: more would cost padding of the last one and buy no speed
MOST_ROWS = {"cpu": 256}
MOST_ROWS_ELSEWHERE = 1024


def linear_logprob(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
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
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> LogprobOutput:
    """``vocab_parallel_logprob`` of the logits hidden[N, H] @ weight[Vl, H].T + bias[Vl], which never exist as a whole.

    The keywords they share mean the same; ``vocab_size`` also excludes rows of the weight that pad it. Logits are
    float32 (float64 for float64 inputs) from products accumulated in float32, also of half-precision inputs; on CUDA
    float32 inputs follow ``torch.backends.cuda.matmul.allow_tf32``. The weight's gradient is accumulated in float32
    over all rows and rounded to its dtype once.

    ``tp_group``: hidden is the same on its ranks, weight and bias are their shards; hidden's gradient is summed over
    them in hidden's dtype. With ``sequence_parallel`` hidden is this rank's [N / ranks, H] of the N rows in rank order
    (target, temperature and results are of all N on every rank): it is gathered in forward and in backward, and its
    gradient is reduce-scattered.

    ``workspace_bytes`` bounds a chunk's logits together with their gradient; at least one row must fit. Chunks are
    filled up to a fixed number of rows, which depends on the shape of the weight alone, so a row's results and the
    gradient of its hidden state are the same bits in any batch. On CPU ignored rows are left out before the product.

    ``backend``: as there, or liger, where it is installed and within its limits (see ``head_liger``).
    """
    ranks = dist.get_world_size(tp_group) if tp_group is not None else 1
    _check_shapes(hidden, weight, target, bias, ranks if sequence_parallel else 1)
    options = Options.of(
        weight.shape[0],
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        tp_group=tp_group,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        stats=stats,
    )
    chosen = resolve("linear_logprob", backend, hidden, known=BACKENDS)
    target = moments.checked_target(target, options)
    if chosen == "liger":
        return liger_logprob(
            hidden, weight, target, options, temperature=temperature, bias=bias, sequence_parallel=sequence_parallel
        )
    plan = _Plan(
        kernels=implementation(chosen),
        chunk_rows=chunk_rows(weight, workspace_bytes),
        gathers=sequence_parallel and ranks > 1,
    )
    factor = moments.row_factor(temperature, target.shape[0], options, hidden)
    logprob, *values = _LinearFunction.apply(hidden, weight, bias, target, factor, options, plan)
    return LogprobOutput(logprob, dict(zip(options.stats, values, strict=True)))


def chunk_rows(weight: Tensor, workspace_bytes: int) -> int:
    """Rows R of every chunk. Raises ValueError where not even one fits."""
    wide = moments.accumulator(weight.dtype).itemsize
    narrow = 0 if projection.widens(weight) or weight.dtype.itemsize == wide else weight.dtype.itemsize
    fit = workspace_bytes // ((wide + narrow) * max(weight.shape[0], 1))
    if fit < 1:
        raise ValueError(
            f"workspace_bytes={workspace_bytes} holds no row of {weight.shape[0]} logits: "
            f"set it to at least {(wide + narrow) * weight.shape[0]}"
        )
    rows = min(fit, MOST_ROWS.get(weight.device.type, MOST_ROWS_ELSEWHERE))
    return rows // 8 * 8 if rows >= 8 else rows


class _Plan(NamedTuple):
    kernels: ModuleType
    chunk_rows: int
    gathers: bool  # sequence parallel


def _check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, shares: int) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden{list(hidden.shape)} and weight{list(weight.shape)} must be [N, H] and [Vl, H]")
    if target.shape != (hidden.shape[0] * shares,):
        raise ValueError(
            f"target{list(target.shape)} must be [{hidden.shape[0] * shares}]: one per row of hidden"
            + (f" on each of {shares} sequence-parallel ranks" if shares > 1 else "")
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: they must be of one floating dtype")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias{list(bias.shape)} must be one per row of the weight [{weight.shape[0]}]")


class _Chunks:
    """The rows that take part, chunk by chunk; every chunk filled up with ignored rows."""

    def __init__(self, hidden: Tensor, target: Tensor, options: Options, size: int) -> None:
        self.hidden, self.size = hidden, size
        self.kept = target != options.ignore_index
        # elsewhere the number of rows would have to be waited for
        self.index = self.kept.nonzero()[:, 0] if target.device.type == "cpu" else None
        self.buffer = torch.zeros(size, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)

    def __iter__(self) -> Iterator[tuple[slice | Tensor, int]]:
        """(rows, how many)"""
        total = self.hidden.shape[0] if self.index is None else self.index.shape[0]
        for start in range(0, total, self.size):
            stop = min(start + self.size, total)
            yield slice(start, stop) if self.index is None else self.index[start:stop], stop - start

    def rows(self, rows: slice | Tensor, count: int) -> Tensor:
        """hidden[R, H]; 0 for what does not take part, whose hidden state may be NaN."""
        taken = self.hidden[rows]
        if self.index is None:
            taken = torch.where(self.kept[rows, None], taken, torch.zeros_like(taken))
        self.buffer[:count] = taken
        return self.buffer

    def padded(self, x: Tensor, rows: slice | Tensor, fill: float) -> Tensor:
        """x[rows], [R]."""
        out = torch.full((self.size,), fill, dtype=x.dtype, device=x.device)
        taken = x[rows]
        out[: taken.shape[0]] = taken
        return out


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        factor: Tensor,
        options: Options,
        plan: _Plan,
    ):
        local = moments.empty_moments(target.shape[0], options, factor.dtype, hidden.device)
        # by every rank, also one whose shard is padding alone
        whole = _gather(hidden, options.tp_group) if plan.gathers else hidden
        if options.columns:
            chunks = _Chunks(whole, target, options, plan.chunk_rows)
            logits = torch.empty(plan.chunk_rows, weight.shape[0], dtype=factor.dtype, device=hidden.device)
            for rows, count in chunks:
                projection.fill_logits(chunks.rows(rows, count), weight, bias, logits)
                found = moments.empty_moments(plan.chunk_rows, options, factor.dtype, hidden.device)
                targets = chunks.padded(target, rows, options.ignore_index)
                factors = chunks.padded(factor, rows, 1.0)
                plan.kernels.fill_moments(logits, targets, factors, options, found, overwrite=True)
                local[rows] = found[:count]
            del logits
        merged = moments.merge(local, factor, options.tp_group)
        outputs, saved = moments.finish(merged, target, factor, options)
        ctx.save_for_backward(hidden, weight, bias, target, factor, *saved)
        ctx.options, ctx.plan = options, plan
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*moments.without_gradient(outputs, options))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, target, factor, *saved = ctx.saved_tensors
        rows = moments.rows_of(grads, target, factor, saved, ctx.options)
        if rows is None:
            return (None,) * 7
        found = _Gradients.of(hidden, weight, bias, target, ctx.needs_input_grad)
        whole = _gather(hidden, ctx.options.tp_group) if ctx.plan.gathers else hidden
        if ctx.options.columns:
            _add_gradients(found, whole, weight, bias, rows, ctx.options, ctx.plan)
        d_hidden = found.hidden
        if d_hidden is not None and ctx.options.tp_group is not None:
            d_hidden = _reduce(d_hidden, hidden.shape, ctx.options.tp_group, scatter=ctx.plan.gathers)
        d_weight = None if found.weight is None else found.weight.to(weight.dtype)
        d_bias = None if found.bias is None or bias is None else found.bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


class _Gradients(NamedTuple):
    """What is asked for, zeros so far: hidden's over all N rows, the others in the accumulator's dtype."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, needs: Sequence[bool]
    ) -> "_Gradients":
        wide = moments.accumulator(weight.dtype)
        return cls(
            hidden.new_zeros(target.shape[0], hidden.shape[1]) if needs[0] else None,
            torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None,
            torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if needs[2] and bias is not None else None,
        )


def _add_gradients(
    out: _Gradients, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, options: Options, plan: _Plan
) -> None:
    chunks = _Chunks(hidden, rows.target, options, plan.chunk_rows)
    wide = moments.accumulator(weight.dtype)
    logits = torch.empty(plan.chunk_rows, weight.shape[0], dtype=wide, device=weight.device)
    narrow = weight.dtype != wide and not projection.widens(weight)
    d_logits = torch.empty_like(logits, dtype=weight.dtype) if narrow else logits
    for where, count in chunks:
        taken = chunks.rows(where, count)
        projection.fill_logits(taken, weight, bias, logits)
        fills = {"target": options.ignore_index, "factor": 1.0}
        of_chunk = Rows._make(
            None if x is None else chunks.padded(x, where, fills.get(name, 0.0)) for name, x in rows._asdict().items()
        )
        plan.kernels.fill_gradient(logits, of_chunk, options, d_logits)
        if out.bias is not None:
            out.bias.add_(d_logits.sum(dim=0, dtype=wide))
        if out.hidden is not None:
            out.hidden[where] = projection.hidden_gradient(d_logits, weight)[:count].to(out.hidden.dtype)
        if out.weight is not None:
            projection.add_weight_gradient(out.weight, d_logits, taken)


def _gather(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    out = hidden.new_empty(hidden.shape[0] * dist.get_world_size(group), hidden.shape[1])
    dist.all_gather_into_tensor(out, hidden.contiguous(), group=group)
    return out


def _reduce(d_hidden: Tensor, shape: torch.Size, group: dist.ProcessGroup, *, scatter: bool) -> Tensor:
    if not scatter:
        dist.all_reduce(d_hidden, group=group)
        return d_hidden
    out = d_hidden.new_empty(shape)
    dist.reduce_scatter_tensor(out, d_hidden, group=group)
    return out
