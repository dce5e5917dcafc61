"""What methods share: the vote of every group, rewards by prompt, and which groups are let through."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from megarl.answers.equal import equal
from megarl.answers.vote import vote
from megarl.settings import Section
from megarl.types import Ballot, Group, Labels, Need, Prompt, Rollout

ShareOf = Literal["parsed", "total"]


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


def paid(seen: Sequence[Rollout], reward: Callable[[Rollout], float]) -> list[Group]:
    """One group of "solve" rollouts per (agent, uid), each member paid ``reward(rollout)``."""
    return [
        Group(
            key=(agent, uid, "solve"),
            rollouts=tuple(r.key for r in members),
            rewards=tuple(reward(r) for r in members),
        )
        for (agent, uid), members in answers_by_prompt(seen).items()
    ]


def agreement(seen: Sequence[Rollout], labels: Labels) -> list[Group]:
    """One group per (agent, uid): reward 1 where the answer equals the label, else 0.

    An answer that could not be read earns 0. Without a label everybody earns 0, so nothing is learnt from that
    prompt: two answers that are both missing do not agree.
    """
    return paid(seen, lambda r: agrees(r, labels))


def agrees(rollout: Rollout, labels: Labels) -> float:
    """1 where the answer equals the label of the rollout's agent and prompt, else 0."""
    label = labels[rollout.prompt.agent, rollout.prompt.uid].answer
    return float(rollout.answer is not None and label is not None and equal(rollout.answer, label))


def consistent(groups: Sequence[Group], labels: Labels, min_share: float, of: ShareOf) -> list[Group]:
    """The groups of prompts whose label has at least ``min_share`` of the votes; 0 lets every group through.

    ``of`` names the denominator: the answers that could be read, or all of them. The two are not comparable.
    """
    if min_share <= 0:
        return list(groups)
    return [g for g in groups if _share(labels[g.rollouts[0].agent, g.rollouts[0].uid], of) >= min_share]


def _share(ballot: Ballot, of: ShareOf) -> float:
    return ballot.share_parsed if of == "parsed" else ballot.share_total


def response_means(seen: Sequence[Rollout], statistic: Callable[[Rollout], np.ndarray | None]) -> list[Group]:
    """One group per (agent, uid), each member paid the mean of a statistic[Lc] over its response tokens.

    Equal responses to one prompt earn exactly the same, whatever packs they were measured in: else rounding would tell
    them apart, and a group without spread would learn from it. NaN (masked) where there is no finite mean.
    """
    known: dict[tuple[str, str, bytes], float] = {}

    def mean(r: Rollout) -> float:
        key = r.prompt.agent, r.prompt.uid, r.token_ids.tobytes()
        if key not in known:
            known[key] = _finite_mean(statistic(r), r)
        return known[key]

    return paid(seen, mean)


def _finite_mean(values: np.ndarray | None, rollout: Rollout) -> float:
    if values is None:
        raise ValueError(f"{rollout.key} was not measured: its method names the statistic in its needs")
    mean = float(values.mean(dtype=np.float64)) if values.size else float("nan")
    return mean if np.isfinite(mean) else float("nan")


def uids_by_agent(ballots: Mapping[tuple[str, str], Ballot]) -> dict[str, list[str]]:
    """agent -> its prompts in the order in which they were dealt."""
    out: dict[str, list[str]] = {}
    for agent, uid in ballots:
        out.setdefault(agent, []).append(uid)
    return out
