"""What most methods share: the vote of every group, and the reward for agreeing with a label."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from megarl.answers.equal import equal
from megarl.answers.vote import vote
from megarl.settings import Section
from megarl.types import Ballot, Group, Labels, Need, Prompt, Rollout


class OneTurn(Section):
    """A method that asks each prompt once."""

    needs: ClassVar[frozenset[Need]] = frozenset()

    def check(self, agents: Sequence[str]) -> None:
        """Raise where the method cannot run with these agents."""
        if not agents:
            raise ValueError("agents is empty: a run needs at least one")

    def prompt_limit(self, question: int) -> int:
        """There is no longer prompt than the question."""
        return question

    def follow_up(self, seen: Sequence[Rollout]) -> list[Prompt]:
        """No second turn."""
        return []


def answers_by_prompt(seen: Sequence[Rollout]) -> dict[tuple[str, str], list[Rollout]]:
    """(agent, uid) -> its "solve" rollouts in index order, whatever order they arrived in; keys by first appearance."""
    out: dict[tuple[str, str], list[Rollout]] = {}
    for r in seen:
        if r.prompt.role == "solve":
            out.setdefault((r.prompt.agent, r.prompt.uid), []).append(r)
    return {key: sorted(members, key=lambda r: r.index) for key, members in out.items()}


def tally(seen: Sequence[Rollout]) -> dict[tuple[str, str], Ballot]:
    """(agent, uid) -> the vote of that agent's own rollouts; ``winners`` are their indices in index order."""
    return {key: vote([r.answer for r in members]) for key, members in answers_by_prompt(seen).items()}


def agreement(seen: Sequence[Rollout], labels: Labels) -> list[Group]:
    """One group per (agent, uid): reward 1 where the answer equals the label, else 0.

    An answer that could not be read earns 0. Without a label everybody earns 0, so nothing is learnt from that
    prompt: two answers that are both missing do not agree.
    """
    return [
        Group(
            key=(agent, uid, "solve"),
            rollouts=tuple(r.key for r in members),
            rewards=tuple(_matches(r.answer, labels[agent, uid].answer) for r in members),
        )
        for (agent, uid), members in answers_by_prompt(seen).items()
    ]


def _matches(answer: str | None, label: str | None) -> float:
    return float(answer is not None and label is not None and equal(answer, label))


def uids_by_agent(ballots: Mapping[tuple[str, str], Ballot]) -> dict[str, list[str]]:
    """agent -> its prompts in the order in which they were dealt."""
    out: dict[str, list[str]] = {}
    for agent, uid in ballots:
        out.setdefault(agent, []).append(uid)
    return out
