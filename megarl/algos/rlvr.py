"""RLVR: reward 1 for the true answer. The supervised reference that label-free methods are held against."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from megarl.algos.common import OneTurn, agreement, answers_by_prompt
from megarl.types import Ballot, Gold, Group, Labels, Need, Rollout, RolloutKey, TokenStats


class RLVR(OneTurn):
    """r = 1[answer = gold], by the equality that votes use as well; no format reward."""

    name: Literal["rlvr"] = "rlvr"
    needs: ClassVar[frozenset[Need]] = frozenset({"gold"})

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """The true answers, as ballots that nobody voted in."""
        if gold is None:
            raise ValueError("algo.name=rlvr needs true answers: set data.gold to the column that holds them")
        keys = list(answers_by_prompt(seen))
        missing = sorted({uid for _, uid in keys if uid not in gold})
        if missing:
            raise ValueError(f"no true answer for {len(missing)} prompts, the first is uid={missing[0]!r}")
        return {(agent, uid): Ballot(answer=gold[uid], count=0, parsed=0, total=0) for agent, uid in keys}

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """1 where the answer equals the label."""
        return agreement(seen, labels)
