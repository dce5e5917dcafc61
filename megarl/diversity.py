"""How alike the errors of two agents are, and which agents make a cohort (arXiv 2608.17253, on diversity).

All statistics are those of one sample of each agent, averaged over all pairs of samples, so that several samples per
problem make them more exact and change nothing else. Axes: A agents, P problems.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, permutations

import numpy as np

from megarl.answers.equal import equal
from megarl.flow import settle
from megarl.types import Gold, Rollout

Answers = Mapping[str, Sequence[str | None]]  # uid -> one agent's answers; None: unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Two agents on the problems that both answered; None where true answers are needed and there are none.

    ``agreement``: both gave equal answers. With true answers: ``kappa`` (Cohen's, of being right; None where it is
    undefined: both always right, or always wrong), ``complementarity`` (exactly one is right), ``same_wrong`` (both
    wrong with equal answers; two unreadable ones are not equal), ``either`` (at least one is right), ``rising`` and
    ``even`` (share of problems where p_A + p_B > 1, and = 1: those that theory lets the pair learn, and the border).
    """

    agents: tuple[str, str]
    problems: int
    agreement: float
    kappa: float | None = None
    complementarity: float | None = None
    same_wrong: float | None = None
    either: float | None = None
    rising: float | None = None
    even: float | None = None

    @property
    def predicted(self) -> float | None:
        """Share of problems that theory lets the pair learn, the border counted as half."""
        return None if self.rising is None or self.even is None else self.rising + self.even / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Agents, each taught by the one before it and the first by the last, and the mean accuracy its flow leads to."""

    agents: tuple[str, ...]
    accuracies: tuple[float, ...]  # where the flow leads each agent

    @property
    def mean(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)


def answers_of(rollouts: Sequence[Rollout]) -> dict[str, dict[str, list[str | None]]]:
    """agent -> uid -> its first answers, in index order."""
    out: dict[str, dict[str, list[str | None]]] = {}
    for r in sorted(rollouts, key=lambda r: r.index):
        if r.prompt.role == "solve":
            out.setdefault(r.prompt.agent, {}).setdefault(r.prompt.uid, []).append(r.answer)
    return out


def overlap(names: tuple[str, str], a: Answers, b: Answers, gold: Gold | None) -> Overlap | None:
    """Two agents' overlap; None where they share no problem. A problem without a true answer counts for agreement."""
    shared = [uid for uid in a if uid in b]
    if not shared:
        return None
    agreement = _mean([_joint(a[u], b[u]) for u in shared])
    judged = [u for u in shared if gold is not None and u in gold]
    if gold is None or not judged:
        return Overlap(agents=names, problems=len(shared), agreement=agreement)
    right = [(Fraction(_right(a[u], gold[u]), len(a[u])), Fraction(_right(b[u], gold[u]), len(b[u]))) for u in judged]
    p_a, p_b = np.array([[float(x), float(y)] for x, y in right]).T
    wrong = [[[x for x in of[u] if x is not None and not equal(x, gold[u])] for of in (a, b)] for u in judged]
    same = [_joint(x, y) * len(x) * len(y) / (len(a[u]) * len(b[u])) for u, (x, y) in zip(judged, wrong, strict=True)]
    one = float((p_a * (1 - p_b) + p_b * (1 - p_a)).mean())
    chance = float(p_a.mean() * p_b.mean() + (1 - p_a).mean() * (1 - p_b).mean())
    return Overlap(
        agents=names,
        problems=len(shared),
        agreement=agreement,
        kappa=(1 - one - chance) / (1 - chance) if chance < 1 else None,
        complementarity=one,
        same_wrong=_mean(same),
        either=float((1 - (1 - p_a) * (1 - p_b)).mean()),
        rising=_mean([x + y > 1 for x, y in right]),
        even=_mean([x + y == 1 for x, y in right]),
    )


def pairs(answers: Mapping[str, Answers], gold: Gold | None) -> list[Overlap]:
    """All pairs, the most promising first: those that theory lets learn the most problems, then those whose errors are
    the least alike. Without true answers, those that agree the least first.
    """
    found = [overlap((a, b), answers[a], answers[b], gold) for a, b in combinations(sorted(answers), 2)]

    def worth(o: Overlap) -> tuple[float, float, float]:
        return -(o.predicted or 0.0), o.kappa if o.kappa is not None else 1.0, o.agreement

    return sorted((o for o in found if o is not None), key=worth)


def rings(answers: Mapping[str, Answers], gold: Gold, *, sizes: Sequence[int], votes: int) -> list[Ring]:
    """All rings of these sizes, the one with the highest predicted accuracy first.

    Every problem's flow starts at the agent's accuracy on it, (right + 1/2) / (samples + 1): at 0 and 1 nothing moves,
    and a few samples do not tell a never from a seldom. Only problems that all agents answered count.
    """
    names = sorted(answers)
    uids = [u for u in answers[names[0]] if u in gold and all(u in answers[n] for n in names)]
    if not uids:
        raise ValueError(f"agents {', '.join(names)} share no problem with a true answer")
    start = {n: np.array([_smoothed(answers[n][u], gold[u]) for u in uids]) for n in names}
    out = []
    for ring in _rings(names, sizes):
        end_AP = settle(np.stack([start[n] for n in ring]), [len(ring) - 1, *range(len(ring) - 1)], votes)
        out.append(Ring(agents=ring, accuracies=tuple(float(p) for p in end_AP.mean(axis=1))))
    return sorted(out, key=lambda ring: (-ring.mean, ring.agents))


def alone(answers: Answers, gold: Gold, *, votes: int) -> tuple[float, float]:
    """An agent's accuracy now, and where teaching itself (TTRL) leads it."""
    uids = [u for u in answers if u in gold]
    start = np.array([[_smoothed(answers[u], gold[u]) for u in uids]])
    return _mean([_accuracy(answers[u], gold[u]) for u in uids]), float(settle(start, [0], votes).mean())


def classes(answers: Sequence[str | None]) -> list[tuple[str, int]]:
    """Distinct readable answers with their counts, in order of first appearance."""
    spelled: dict[str, int] = {}
    for answer in answers:
        if answer is not None:
            spelled[answer] = spelled.get(answer, 0) + 1
    out: list[tuple[str, int]] = []
    for answer, count in spelled.items():
        place = next((i for i, (other, _) in enumerate(out) if equal(answer, other)), None)
        if place is None:
            out.append((answer, count))
        else:
            out[place] = (out[place][0], out[place][1] + count)
    return out


def _rings(names: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Every ring once: it begins with its first name, and for three and more both directions differ."""
    for size in sizes:
        for members in combinations(names, size):
            for order in permutations(members[1:]):
                yield (members[0], *order)


def _joint(a: Sequence[str | None], b: Sequence[str | None]) -> float:
    """Probability that one answer of each are equal."""
    if not a or not b:
        return 0.0
    theirs = classes(b)
    hits = sum(n * m for x, n in classes(a) for y, m in theirs if equal(x, y))
    return hits / (len(a) * len(b))


def _right(answers: Sequence[str | None], true: str) -> int:
    return sum(answer is not None and bool(equal(answer, true)) for answer in answers)


def _accuracy(answers: Sequence[str | None], true: str) -> float:
    return _right(answers, true) / len(answers)


def _smoothed(answers: Sequence[str | None], true: str) -> float:
    return (_right(answers, true) + 0.5) / (len(answers) + 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
