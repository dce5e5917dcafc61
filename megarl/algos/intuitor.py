"""Intuitor: an agent is rewarded for being sure of its own words (self-certainty, arXiv 2505.19590).

    r = mean over response tokens of KL(uniform || p_t),   KL(U || p) = logsumexp(z) - mean(z) - log V

by the *present* policy on its own rollouts: a frozen scorer gets hacked by text that inflates the score. The mean over
the vocabulary is over the model's true vocabulary; the columns that Megatron pads it with are left out (the policy's
``measure`` sees to that). The release leaves out - log V, which a group's baseline cancels. Logits are divided by the
sampling temperature.

Not an affine function of entropy: rare tokens dominate mean(z), so it seeks modes. No answer is read and nothing is
voted on; the sign of trouble is a reward spread that goes to zero while responses grow.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from megarl.algos.common import OneTurn, response_means
from megarl.types import Gold, Group, Labels, Need, Rollout, RolloutKey, TokenStats


class Intuitor(OneTurn):
    """No label; r = mean self-certainty of the response's tokens, in nats, at least 0."""

    name: Literal["intuitor"] = "intuitor"
    needs: ClassVar[frozenset[Need]] = frozenset({"certainty"})

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """None: nothing is taken for the truth."""
        return {}

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """Higher is surer. A response without tokens has no reward."""
        return response_means(seen, lambda r: stats[r.key].certainty)
