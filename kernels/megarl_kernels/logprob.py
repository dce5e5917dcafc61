"""Logprobs and distribution statistics from a shard of the logits; see ``moments`` for the mathematics.

Axes: N rows (tokens), Vl vocabulary columns of this rank, V the true vocabulary.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl_kernels import logprob_torch, moments
from megarl_kernels.dispatch import resolve
from megarl_kernels.moments import LogprobOutput, Options


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

    ``vocab_size`` is the true vocabulary: columns beyond it are padding, take no part and get no gradient (None: all
    columns of all ranks). ``vocab_start`` is the id of column 0 (None: tp rank * Vl). z = softcap * tanh(logit_scale *
    x / softcap) / temperature, the cap only where softcap > 0; ``temperature`` is a number or one per row, [N]. Rows
    whose target is ``ignore_index`` give 0 and no gradient.

    ``stats`` in nats: entropy; self_certainty, KL(uniform || p); top1_probability, max p; sum_p2, the sum of squared
    probabilities. Gradients of logprob, entropy and self_certainty are exact; top1_probability and sum_p2 carry none,
    nor does the temperature. A logit of -inf has probability 0 and gets no gradient.

    One all-gather of 28 bytes a row per forward under ``tp_group``, none in backward. The input is never written to,
    whatever its dtype. A row's results are the same bits in any batch. A target outside the vocabulary raises
    ValueError on CPU and gives NaN on an accelerator, where a check would wait for the device.

    ``backend``: torch, triton (sm_80 and newer), or auto (see ``dispatch.pick``).

    Example: ``vocab_parallel_logprob(torch.tensor([[2., 1., 0.]]), torch.tensor([0]), temperature=0.5).logprob`` is
    [-0.1429].
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits{list(logits.shape)} and target{list(target.shape)} must be [N, Vl] and [N]")
    options = Options.of(
        logits.shape[1],
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        tp_group=tp_group,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        stats=stats,
    )
    kernels = implementation(resolve("vocab_parallel_logprob", backend, logits))
    factor = moments.row_factor(temperature, logits.shape[0], options, logits)
    target = moments.checked_target(target, options)
    logprob, *values = _LogprobFunction.apply(logits, target, factor, options, kernels)
    return LogprobOutput(logprob, dict(zip(options.stats, values, strict=True)))


def implementation(backend: str) -> ModuleType:
    """The module whose ``fill_moments`` and ``fill_gradient`` serve."""
    if backend == "torch":
        return logprob_torch
    from megarl_kernels import logprob_triton  # triton may be absent where torch serves

    return logprob_triton


class _LogprobFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, factor: Tensor, options: Options, kernels: ModuleType):
        local = moments.empty_moments(logits.shape[0], options, factor.dtype, logits.device)
        if options.columns and logits.shape[0]:
            kernels.fill_moments(logits, target, factor, options, local)
        merged = moments.merge(local, factor, options.tp_group)
        outputs, saved = moments.finish(merged, target, factor, options)
        ctx.save_for_backward(logits, target, factor, *saved)
        ctx.options, ctx.kernels = options, kernels
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*moments.without_gradient(outputs, options))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, target, factor, *saved = ctx.saved_tensors
        rows = moments.rows_of(grads, target, factor, saved, ctx.options)
        if rows is None:
            return None, None, None, None, None
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if logits.numel():
            ctx.kernels.fill_gradient(logits, rows, ctx.options, grad)
        return grad, None, None, None, None
