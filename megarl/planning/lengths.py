"""How long responses are: a log-normal law cut at the limit, where the cut ones pile up."""

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response tokens with a given mean after the cut at ``limit``; ``spread`` is the sigma of their logarithm."""

    mean: float
    limit: float
    spread: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.mean < self.limit:
            raise ValueError(
                f"mean response of {self.mean:g} tokens: it lies between 0 and the limit of {self.limit:g}"
            )

    def quantile(self, share: np.ndarray) -> np.ndarray:
        """Tokens that a ``share`` of the responses stays below; float64 of the same shape."""
        z = np.array([_NORMAL.inv_cdf(float(p)) for p in np.clip(share, 1e-9, 1 - 1e-9).ravel()]).reshape(share.shape)
        return np.minimum(np.exp(self.location + self.spread * z), self.limit)

    @property
    def location(self) -> float:
        return _location(self.mean, self.limit, self.spread)

    @property
    def mean_context(self) -> float:
        """Tokens before an average response token: E[L^2] / (2 E[L])."""
        sizes = self.quantile((np.arange(256) + 0.5) / 256)
        return float((sizes**2).mean() / (2 * sizes.mean()))


@functools.cache
def _location(mean: float, limit: float, spread: float) -> float:
    """mu with E[min(exp(N(mu, spread)), limit)] = mean, by bisection; the expectation grows with mu."""
    low, high = math.log(mean) - 20 * spread - 20, math.log(limit) + 20 * spread + 20
    for _ in range(200):
        mu = (low + high) / 2
        z = (math.log(limit) - mu) / spread
        below = math.exp(mu + spread**2 / 2 + math.log(max(_NORMAL.cdf(z - spread), 1e-300)))
        if below + limit * (1 - _NORMAL.cdf(z)) < mean:
            low = mu
        else:
            high = mu
    return (low + high) / 2
