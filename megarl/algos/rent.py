"""RENT: an agent is rewarded for low entropy of its own predictions (arXiv 2505.22660).

    r = - mean over response tokens of H(p_t)

over *all* response tokens, by the present policy at the sampling temperature (the paper finds that the last tokens
tell most, its release takes them all). The release's command line also gives a response without a readable answer an
entropy of 7: one such member dominates its group's baseline, so here that is an option, off by default.

Entropy falls to zero by itself: the reward spread vanishes, responses grow, accuracy follows down.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from megarl.algos.common import OneTurn, response_means
from megarl.types import Gold, Group, Labels, Need, Rollout, RolloutKey, TokenStats


class RENT(OneTurn):
    """No label; r = - mean entropy of the response's tokens, in nats, at most 0."""

    name: Literal["rent"] = "rent"
    needs: ClassVar[frozenset[Need]] = frozenset({"entropy"})
    unparseable_entropy: float | None = Field(
        default=None, ge=0, description="entropy charged for a response without a readable answer (release: 7.0)"
    )

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """None: nothing is taken for the truth."""
        return {}

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """Higher is surer. A response without tokens has no reward."""
        penalty = self.unparseable_entropy
        if penalty is None:
            return response_means(seen, lambda r: _negative(stats[r.key].entropy))
        charged = np.array([-penalty])
        return response_means(seen, lambda r: charged if r.answer is None else _negative(stats[r.key].entropy))


def _negative(entropy: np.ndarray | None) -> np.ndarray | None:
    return None if entropy is None else -entropy
