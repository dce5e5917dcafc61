"""TTRL: an agent is rewarded for agreeing with its own majority (arXiv 2504.16084).

The vote counts all rollouts of a prompt; how many of them train is the batch's business. Votes that could not be read
do not count (the release lets the empty answer vote, and win). It sharpens whatever the majority already believes:
prompts the agent gets right less than half of the time get worse.

``min_majority_share`` is the naive consistency filter tau (a baseline of CoVerRL, arXiv 2603.17775: 0.1 and 0.2):
prompts whose majority is smaller do not train. Nothing replaces them, unless batch.refill_rounds asks for that; a step
from which all are dropped makes no update.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from megarl.algos.common import OneTurn, ShareOf, agrees, consistent, paid, tally
from megarl.types import Gold, Group, Labels, Rollout, RolloutKey, TokenStats


class TTRL(OneTurn):
    """label = majority of the agent's own answers; r = 1[answer = label]."""

    name: Literal["ttrl"] = "ttrl"
    min_majority_share: float = Field(default=0.0, ge=0, le=1, description="tau: prompts with less do not train")
    share_of: ShareOf = Field(default="parsed", description="of the answers that could be read, or of all")
    format_reward: bool = Field(default=False, description="1 more for any answer that could be read (CoVerRL's TTRL)")

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """Each agent's own votes."""
        return tally(seen)

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """1 where the answer equals the label, of the prompts that the filter lets through."""

        def reward(r: Rollout) -> float:
            return agrees(r, labels) + float(self.format_reward and r.answer is not None)

        return consistent(paid(seen, reward), labels, self.min_majority_share, self.share_of)
