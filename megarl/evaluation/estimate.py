"""Estimates over problems: exact ratios, and bootstrap intervals of them.

Axes: M metrics, Q problems, R resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

import numpy as np

from megarl.types import derive

Part = tuple[Fraction, int]  # what one problem adds to a metric's numerator and denominator
_RESAMPLES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric over all problems, and the ends of its interval."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, right: int, k: int) -> Fraction:
    """Probability that k of n samples, drawn without replacement, hold one of the ``right`` ones: the unbiased
    estimator 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1), exact."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: k must be within 1 .. {n}")
    return 1 - Fraction(comb(n - right, k), comb(n, k))


def estimate(
    parts: Mapping[str, Sequence[Part]], *, seed: int, resamples: int, confidence: float
) -> dict[str, Estimate]:
    """Each metric as sum of numerators over sum of denominators, rounded once.

    Intervals are percentiles of the same ratio over problems drawn with replacement; all metrics see the same draws
    (so that differences of two tables of one set can be compared draw by draw), and the draws depend on ``seed`` and
    the number of problems alone. A metric whose denominators are all 0 is left out.
    """
    present = {name: p for name, p in parts.items() if sum(d for _, d in p)}
    if not present:
        return {}
    sizes = {len(p) for p in present.values()}
    assert len(sizes) == 1, f"metrics over different numbers of problems: {sizes}"
    numerators_MQ = np.array([[float(n) for n, _ in p] for p in present.values()])
    denominators_MQ = np.array([[float(d) for _, d in p] for p in present.values()])
    ratios_MR = _resampled(numerators_MQ, denominators_MQ, seed, resamples)
    tail = (1 - confidence) / 2
    low_M, high_M = np.nanquantile(ratios_MR, [tail, 1 - tail], axis=1)
    return {
        name: Estimate(float(sum((n for n, _ in p), Fraction()) / sum(d for _, d in p)), float(low), float(high))
        for (name, p), low, high in zip(present.items(), low_M, high_M, strict=True)
    }


def _resampled(numerators_MQ: np.ndarray, denominators_MQ: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """float64[M, R]; NaN where no problem that was drawn has a denominator."""
    problems = numerators_MQ.shape[1]
    random = np.random.Generator(np.random.PCG64(derive(seed, "bootstrap")))
    ratios = []
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        rows = min(_RESAMPLES_AT_ONCE, resamples - start)
        times_RQ = random.multinomial(problems, np.full(problems, 1 / problems), size=rows).astype(np.float64)
        over_MR = denominators_MQ @ times_RQ.T
        ratios.append(
            np.divide(numerators_MQ @ times_RQ.T, over_MR, out=np.full(over_MR.shape, np.nan), where=over_MR > 0)
        )
    return np.concatenate(ratios, axis=1)
