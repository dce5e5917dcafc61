"""From hidden states to logprobs: the ``output_processor`` that GPTModel.forward calls in place of its own head.

Fused, the logits of a pack never exist as a whole (``megarl_kernels.linear_logprob``). Otherwise, and where the head
computes more than a product, the model's own output layer makes them, in the model's dtype, and
``vocab_parallel_logprob`` reads them.

Axes: T tokens of a pack on this rank, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl_kernels import LogprobOutput, linear_logprob, vocab_parallel_logprob
from megarl_kernels.dispatch import pick

if TYPE_CHECKING:  # the hook itself needs torch, megatron-core and the kernels alone
    from megarl.settings import KernelsConfig

IGNORED = -100


@dataclass(slots=True)
class Differences:
    """The largest differences between the two paths since they were last taken; filled where ``kernels.compare``."""

    found: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, value: Tensor) -> None:
        # a NaN stays: a path that fails must not look like one that agrees
        worst = torch.tensor([self.found.get(name, 0.0), float(value)]).max()
        self.found[name] = float(worst)

    def take(self) -> dict[str, float]:
        taken, self.found = self.found, {}
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the head about one pack; travels as ``output_processor_context``."""

    target: Tensor  # int64[T], IGNORED where nothing is asked
    temperature: float
    stats: tuple[str, ...]
    vocab_size: int  # true, without padding
    tp_group: ProcessGroup | None
    kernels: "KernelsConfig"
    differences: Differences

    def shared(self) -> dict[str, Any]:
        """Keywords of both paths."""
        return {
            "vocab_size": self.vocab_size,
            "tp_group": self.tp_group,
            "temperature": self.temperature,
            "ignore_index": IGNORED,
            "stats": self.stats,
        }


def describe(parameter: Tensor, kernels: "KernelsConfig", *, fusible: bool) -> str:
    """What computes logprobs of a model with such parameters, and why."""
    name = "linear_logprob" if kernels.fused_head and fusible else "vocab_parallel_logprob"
    backend, reason = pick(name, parameter)
    if kernels.backend != "auto":
        backend, reason = kernels.backend, "kernels.backend"
    return f"logprobs: {name} by {backend} ({reason})" + (", compared with the other path" if kernels.compare else "")


Path = Callable[[Tensor, Tensor], LogprobOutput]  # hidden [T (/ tp), 1, H], the head's weight


def process(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    context: Question,
    **unused: Any,
) -> LogprobOutput:
    """Answers of the last pipeline stage; the signature is that of Megatron's hook."""
    layer = _checked(output_layer, context.kernels)
    fusible = context.kernels.fused_head and plain(layer)
    weight: Tensor = layer.weight if output_weight is None else output_weight
    backend = context.kernels.backend

    def fused(hidden: Tensor, weight: Tensor) -> LogprobOutput:
        return linear_logprob(
            hidden[:, 0],
            weight,
            context.target,
            logit_scale=float(scale_logits(torch.ones(()))),
            bias=layer.bias,
            sequence_parallel=layer.sequence_parallel,
            workspace_bytes=context.kernels.workspace_bytes,
            backend=backend,
            **context.shared(),
        )

    def by_logits(hidden: Tensor, weight: Tensor) -> LogprobOutput:
        logits, _ = layer(hidden, weight=weight)
        return vocab_parallel_logprob(
            scale_logits(logits)[:, 0],
            context.target,
            backend="auto" if backend == "liger" else backend,
            **context.shared(),
        )

    paths = (fused, by_logits) if fusible else (by_logits, fused)
    answer = paths[0](hidden_states, weight)
    if context.kernels.compare:
        _compare(paths, hidden_states, weight, answer, context.differences)
    return answer


def plain(layer: torch.nn.Module) -> bool:
    """Is the output layer nothing but a product with its weight? Gemma-2's caps the logits as well."""
    return type(layer) is ColumnParallelLinear


def _checked(layer: Any, kernels: "KernelsConfig") -> Any:
    """The output layer, where it can do what is asked."""
    if kernels.compare and not plain(layer):
        raise ValueError("kernels.compare=true: this model's head caps its logits, so there is one way to compute it")
    if kernels.compare and layer.gradient_accumulation_fusion:
        raise ValueError("kernels.compare=true needs megatron.gradient_accumulation_fusion=false")
    return layer


def _compare(
    paths: Sequence[Path], hidden: Tensor, weight: Tensor, answer: LogprobOutput, differences: Differences
) -> None:
    """Note how far the other path is from ``answer``, and once its gradient is known, from the answer's gradients."""

    def apart() -> list[Tensor]:
        return [x.detach().requires_grad_(answer.logprob.requires_grad) for x in (hidden, weight)]

    with torch.no_grad():
        other = paths[1](hidden, weight)
    for name, a, b in (
        ("logprob", answer.logprob, other.logprob),
        *((stat, answer.stats[stat], other.stats[stat]) for stat in answer.stats),
    ):
        if a.numel():
            differences.note(f"{name}_difference", (a.detach() - b).abs().max())
    if not answer.logprob.requires_grad:
        return

    def on_gradient(upstream: Tensor) -> None:
        found = []
        for path in paths:
            leaves = apart()
            with torch.enable_grad():
                logprob = path(*leaves).logprob
            found.append(torch.autograd.grad(logprob, leaves, upstream))
        for a, b in zip(*found, strict=True):
            norm = b.float().norm()
            gap = (a.float() - b.float()).norm() / torch.where(norm > 0, norm, torch.ones_like(norm))
            differences.note("gradient_difference", gap)

    answer.logprob.register_hook(on_gradient)
