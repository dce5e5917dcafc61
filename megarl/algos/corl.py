"""Co-RL: each agent is rewarded for agreeing with the majority vote of another one (arXiv 2608.17253).

    label of agent n on prompt x = majority of the K answers of its teacher;  r = 1[answer = label]

An agent's own answers never enter its own label, and nothing but that label's string crosses between agents.
``ring`` is written in the paper's direction: each is taught by the one before it, the first by the last. The release
runs the other direction (its peer lists name the teacher first); for two agents they are the same.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from megarl.algos.common import OneTurn, agreement, tally, uids_by_agent
from megarl.types import Gold, Group, Labels, Rollout, RolloutKey, TokenStats


class CoRL(OneTurn):
    """label = majority of the teacher's answers; r = 1[answer = label].

    Example: ``CoRL(ring=("qwen", "llama", "gemma")).teachers`` is {llama: qwen, gemma: llama, qwen: gemma}.
    """

    name: Literal["corl"] = "corl"
    ring: tuple[str, ...] = Field(default=(), strict=False, description="agents, each taught by the one before it")
    teacher: dict[str, str] = Field(default={}, description="instead of ring: agent -> its teacher")
    several_rings: bool = Field(default=False, description="may teacher fall apart into rings that do not meet?")

    @model_validator(mode="after")
    def _is_a_derangement(self) -> "CoRL":
        if bool(self.ring) == bool(self.teacher):
            raise ValueError("name the teachers by exactly one of algo.ring and algo.teacher")
        if len(set(self.ring)) < len(self.ring):
            raise ValueError(f"algo.ring={list(self.ring)} names an agent twice")
        teachers = self.teachers
        own = [agent for agent, teacher in teachers.items() if agent == teacher]
        if own:
            raise ValueError(
                f"in this ring {own[0]} would teach itself: at least two agents, each with another as teacher"
            )
        if set(teachers) != set(teachers.values()):
            raise ValueError(f"algo.teacher={self.teacher}: every agent teaches exactly one other, and has one teacher")
        first = next(iter(teachers))
        ring = _ring_from(first, teachers)
        if len(ring) < len(teachers) and not self.several_rings:
            raise ValueError(
                f"algo.teacher falls apart: the ring of {first} is {ring} and leaves "
                f"{sorted(set(teachers) - set(ring))} out; algo.several_rings=true allows it"
            )
        return self

    @property
    def teachers(self) -> dict[str, str]:
        """agent -> its teacher."""
        if self.ring:
            return dict(zip(self.ring, (self.ring[-1], *self.ring[:-1]), strict=True))
        return dict(self.teacher)

    def check(self, agents: Sequence[str]) -> None:
        """The ring must hold the run's agents, all of them and no other."""
        if set(agents) != set(self.teachers):
            raise ValueError(
                f"algo {self.name} names {sorted(self.teachers)} and the run has {sorted(agents)}: "
                "both must be the same agents"
            )

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """(agent, uid) -> the ballot of that agent's teacher on the same prompt.

        Raises where agent and teacher did not get the same prompts in the same order.
        """
        return taught(seen, self.teachers)

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """1 where the answer equals the label."""
        return agreement(seen, labels)


def taught(seen: Sequence[Rollout], teachers: Mapping[str, str]) -> Labels:
    """(agent, uid) -> the ballot of that agent's teacher on the same prompt.

    Raises where the two did not get the same prompts in the same order: labels of other prompts would look like noise
    and train.
    """
    ballots = tally(seen)
    dealt = uids_by_agent(ballots)
    for agent, uids in dealt.items():
        _aligned(agent, uids, teachers[agent], dealt.get(teachers[agent], []))
    return {(agent, uid): ballots[teachers[agent], uid] for agent, uid in ballots}


def _ring_from(first: str, teachers: Mapping[str, str]) -> list[str]:
    ring = [first]
    while teachers[ring[-1]] != first:
        ring.append(teachers[ring[-1]])
    return ring


def _aligned(agent: str, uids: Sequence[str], teacher: str, theirs: Sequence[str]) -> None:
    for one, own, other, others in ((agent, uids, teacher, theirs), (teacher, theirs, agent, uids)):
        missing = set(own) - set(others)
        if missing:
            raise ValueError(
                f"{teacher} teaches {agent}, but prompt uid={min(missing)!r} was answered by {one} and not by {other}"
            )
    for place, (mine, their) in enumerate(zip(uids, theirs, strict=True)):
        if mine != their:
            raise ValueError(
                f"prompts are not aligned: place {place} is uid={mine!r} at {agent} and uid={their!r} at its teacher "
                f"{teacher}; every agent must be dealt the same prompts in the same order"
            )
