"""Co-rewarding-I: one policy reads two wordings of a question, and each is labeled by the other's vote (2508.00410).

    label of view v on question x = majority of the K answers to the other view;  r = 1[answer = label]

This is Co-RL on one set of weights: the two views are two seats of one agent (``agents.<name>.seats``), which share its
policy, its optimizer step and its engine. Nothing but the wording keeps the two votes apart, so the method can only
unlearn errors that depend on the wording. Answers are compared by the equality of all votes; the release compares
strings. Co-rewarding-II, where a moving average of the weights votes, is not here: it samples a second set of rollouts
under other weights, for which an agent would need another engine with a reshard of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from megarl.algos.common import OneTurn, agreement
from megarl.algos.corl import taught
from megarl.types import Gold, Group, Labels, Rollout, RolloutKey, TokenStats


class CoRewarding(OneTurn):
    """label = majority of the other view's answers; r = 1[answer = label].

    Example: ``CoRewarding(views=("plain", "reworded"))``, with ``agents.a.seats={plain: ..., reworded: ...}``.
    """

    name: Literal["corewarding"] = "corewarding"
    views: Annotated[tuple[str, str], Field(strict=False)] = Field(description="the two seats of the one agent")

    def check(self, agents: Sequence[str]) -> None:
        """The run must have these two seats and no other; RunConfig sees to it that they are of one agent."""
        if len(set(self.views)) < 2 or set(agents) != set(self.views):
            raise ValueError(
                f"algo.views={list(self.views)} and the run has {sorted(agents)}: Co-rewarding needs one agent whose "
                "agents.<name>.seats are these two names, each with a view"
            )

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """(seat, uid) -> the ballot of the other seat on the same question."""
        one, other = self.views
        return taught(seen, {one: other, other: one})

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """1 where the answer equals the label."""
        return agreement(seen, labels)
