"""CoVerRL's tree of one question: answers, verdicts on some of them, revisions of those that were called wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.algos.common import answers_by_prompt
from megarl.answers.vote import vote
from megarl.types import Ballot, Labels, Rollout, RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one agent has said to one prompt so far; every list is in key order, whatever order it arrived in."""

    agent: str
    uid: str
    ballot: Ballot
    agreeing: tuple[Rollout, ...]  # Y+: answers equal to the label
    others: tuple[Rollout, ...]  # Y-: all other answers, and those that could not be read
    verdicts: tuple[Rollout, ...]
    revisions: Mapping[RolloutKey, tuple[Rollout, ...]] = field(default_factory=dict)  # by the verdict they follow

    @property
    def answers(self) -> tuple[Rollout, ...]:
        return tuple(sorted((*self.agreeing, *self.others), key=lambda r: r.index))

    @property
    def positive_verdicts(self) -> tuple[Rollout, ...]:
        """V+: verdicts on answers that agree with the label."""
        return self._verdicts_on(self.agreeing)

    @property
    def negative_verdicts(self) -> tuple[Rollout, ...]:
        """V-: verdicts on answers that do not."""
        return self._verdicts_on(self.others)

    @property
    def verified(self) -> bool:
        """Are there verdicts on both sides?"""
        return bool(self.positive_verdicts and self.negative_verdicts)

    def _verdicts_on(self, answers: Sequence[Rollout]) -> tuple[Rollout, ...]:
        keys = {r.key for r in answers}
        return tuple(v for v in self.verdicts if v.prompt.parent in keys)


def questions(seen: Sequence[Rollout], labels: Labels) -> list[Question]:
    """One per (agent, uid), in the order in which they were dealt."""
    verdicts: dict[tuple[str, str], list[Rollout]] = {}
    revisions: dict[tuple[str, str], dict[RolloutKey, list[Rollout]]] = {}
    for r in seen:
        name, parent = (r.prompt.agent, r.prompt.uid), r.prompt.parent
        if r.prompt.role == "verify":
            verdicts.setdefault(name, []).append(r)
        elif r.prompt.role == "revise":
            assert parent is not None, f"{r.key} revises nothing"
            revisions.setdefault(name, {}).setdefault(parent, []).append(r)
    out = []
    for name, answers in answers_by_prompt(seen).items():
        winners = set(labels[name].winners)  # positions in index order, which is the order of ``answers``
        out.append(
            Question(
                agent=name[0],
                uid=name[1],
                ballot=labels[name],
                agreeing=tuple(r for i, r in enumerate(answers) if i in winners),
                others=tuple(r for i, r in enumerate(answers) if i not in winners),
                verdicts=_sorted(verdicts.get(name, [])),
                revisions={key: _sorted(own) for key, own in sorted(revisions.get(name, {}).items(), key=_path)},
            )
        )
    return out


def least_frequent(others: Sequence[Rollout]) -> Rollout:
    """The first answer of the smallest class of equal answers; of equally small classes the first seen.

    An answer that could not be read is in no class and is chosen only where there is nothing else.
    """
    read = [r for r in others if r.answer is not None]
    classes: list[list[Rollout]] = []
    while read:
        winners = set(vote([r.answer for r in read]).winners)
        if not winners:  # blank answers: they do not vote
            break
        classes.append([r for i, r in enumerate(read) if i in winners])
        read = [r for i, r in enumerate(read) if i not in winners]
    if not classes:
        return min(others, key=lambda r: r.index)
    return min(classes, key=lambda members: (len(members), members[0].index))[0]


def _sorted(rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    return tuple(sorted(rollouts, key=lambda r: _indices(r.key)))


def _path(item: tuple[RolloutKey, object]) -> tuple[int, ...]:
    return _indices(item[0])


def _indices(key: RolloutKey) -> tuple[int, ...]:
    """Indices from the answer down; keys themselves do not compare where one has a parent and the other none."""
    return (*(() if key.parent is None else _indices(key.parent)), key.index)
