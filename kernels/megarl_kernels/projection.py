"""The three products of a head with chunks of rows: logits, and the gradients of hidden states and of the weight.

Logits are in the accumulator's dtype (float32, or float64 for float64 inputs) whatever the inputs are. On an
accelerator the library multiplies half-precision inputs into float32 by itself; on a CPU it would round the logits to
half precision, so there the inputs are widened, a slice of the vocabulary at a time.

Axes: R rows of a chunk, Vl columns, H hidden size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl_kernels.moments import accumulator

WIDENED_BYTES = 32 << 20  # of the slice of the weight that is in float32 at once


def _slices(weight: Tensor) -> Iterator[slice]:
    step = max(1, WIDENED_BYTES // (4 * max(weight.shape[1], 1)))
    return (slice(i, min(i + step, weight.shape[0])) for i in range(0, weight.shape[0], step))


def widens(weight: Tensor) -> bool:
    """Must inputs be converted before they are multiplied?"""
    return weight.device.type == "cpu" and weight.dtype != accumulator(weight.dtype)


def fill_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """hidden[R, H] @ weight[Vl, H].T + bias[Vl] into out[R, Vl]."""
    if widens(weight):
        wide = hidden.to(out.dtype)
        for columns in _slices(weight):
            torch.mm(wide, weight[columns].to(out.dtype).t(), out=out[:, columns])
    elif weight.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    if bias is not None:
        out.add_(bias)


def hidden_gradient(d_logits: Tensor, weight: Tensor) -> Tensor:
    """d_logits[R, Vl] @ weight[Vl, H]."""
    if not widens(weight):
        return d_logits @ weight
    out = torch.zeros(d_logits.shape[0], weight.shape[1], dtype=d_logits.dtype)
    for columns in _slices(weight):
        out.addmm_(d_logits[:, columns], weight[columns].to(out.dtype))
    return out


def add_weight_gradient(out: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """d_logits[R, Vl].T @ hidden[R, H] added to out[Vl, H], which is in the accumulator's dtype."""
    hidden = hidden if hidden.dtype == d_logits.dtype else hidden.to(d_logits.dtype)
    if d_logits.dtype == out.dtype:
        out.addmm_(d_logits.t(), hidden)
    else:
        torch.addmm(out, d_logits.t(), hidden, out_dtype=out.dtype, out=out)
