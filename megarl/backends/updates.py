"""What the optimizer steps of one update have in common, whoever takes them."""

from collections.abc import Callable, Sequence

from megarl.packing import minibatches, response_tokens
from megarl.types import Metrics, Sample

TOTALS = ("tokens", "microbatches", "skipped_steps")
KERNELS = "kernels_"  # prefix of metrics that compare two ways of computing: the largest difference counts


def take_steps(
    samples: Sequence[Sample], learning_rates: Sequence[float], step: Callable[[Sequence[Sample], float], Metrics]
) -> Metrics:
    """``step(part, learning rate)`` of equal parts of the samples, one per rate.

    A part without any response token takes none: not even Adam's moments may move where there is nothing to learn from.

    Returns the steps' metrics averaged over the steps taken, but the sums of ``tokens`` (response tokens),
    ``microbatches`` (per rank) and ``skipped_steps`` (their gradient was not finite, the weights did not move), and
    the largest of what is named kernels_...
    """
    parts = zip(minibatches(samples, len(learning_rates)), learning_rates, strict=True)
    reports = [step(part, rate) for part, rate in parts if response_tokens(part)]
    if not reports:
        return dict.fromkeys(TOTALS, 0.0)
    return {name: _over_steps(name, [r[name] for r in reports]) for name in reports[0]}


def _over_steps(name: str, values: Sequence[float]) -> float:
    if name.startswith(KERNELS):
        return max(values)
    return sum(values) / (1 if name in TOTALS else len(values))
