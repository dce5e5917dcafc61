"""TTRL: an agent is rewarded for agreeing with its own majority (arXiv 2504.16084).

The vote counts all rollouts of a prompt; how many of them train is the batch's business. Votes that could not be read
do not count (the release lets the empty answer vote, and win). It sharpens whatever the majority already believes:
prompts the agent gets right less than half of the time get worse.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from megarl.algos.common import OneTurn, agreement, tally
from megarl.types import Gold, Group, Labels, Rollout, RolloutKey, TokenStats


class TTRL(OneTurn):
    """label = majority of the agent's own answers; r = 1[answer = label]."""

    name: Literal["ttrl"] = "ttrl"

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """Each agent's own votes."""
        return tally(seen)

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """1 where the answer equals the label."""
        return agreement(seen, labels)
