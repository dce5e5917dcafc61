"""Rollouts and true answers -> the metrics of an evaluation, per agent and for the cohort.

Example: ``score(rollouts, {"q1": "7"}, rules)["ann"]["avg@4"].value`` is 0.75 where three of ann's four answers are 7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megarl.answers.equal import equal
from megarl.answers.read import read_answers
from megarl.answers.vote import vote
from megarl.evaluation.estimate import Estimate, Part, estimate, pass_at_k
from megarl.settings import AnswersConfig, EvaluationConfig
from megarl.types import Gold, Rollout, RolloutKey

COHORT = "cohort"  # the row of votes that pool the answers of all agents
VERIFICATION = (  # metrics of which there are any only where answers were verified
    *(
        "acc_first",
        "acc_final",
        "verify_accuracy",
        "correct_recall",
        "wrong_recall",
        "malformed",
        "verified",
        "revised",
    ),
    *("wrong_to_right", "right_to_wrong"),
)
Scores = dict[str, dict[str, Estimate]]  # agent -> metric -> estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How rollouts are read and summed up."""

    answers: AnswersConfig
    pass_at: tuple[int, ...] = ()
    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 0

    @classmethod
    def of(cls, cfg: EvaluationConfig, answers: AnswersConfig, seed: int) -> "Rules":
        return cls(
            answers=answers,
            pass_at=cfg.pass_at,
            confidence=cfg.confidence,
            resamples=cfg.resamples,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One sample from its first answer to its last."""

    answer: str | None
    right: bool
    tokens: int  # of the first answer
    truncated: bool
    verified: bool
    verdict: str | None  # "correct" or "wrong"; None: nothing that counts was said
    well_formed: bool  # the verification
    revised: bool
    final_right: bool


Courses = dict[str, dict[str, list[Course]]]  # agent -> uid -> samples in index order


def score(rollouts: Sequence[Rollout], gold: Gold, rules: Rules) -> Scores:
    """Metrics of every agent, and of the pooled cohort where there are several agents.

    avg@n (mean accuracy of the n first answers), pass@k (unbiased), maj@k (is the vote of the first k answers, in index
    order, true?), answered and truncated (shares), tokens (mean, of first answers). Where answers were verified:
    acc_first and acc_final (after a revision where the verdict was wrong), verify_accuracy ((TP + TN) / all, TP being a
    right answer called correct), correct_recall (TP / right answers verified), wrong_recall (TN / wrong ones),
    malformed (share of verifications without the verdict's sentence), revised, wrong_to_right and right_to_wrong
    (shares of all samples). A verification without a verdict is neither TP nor TN, and counts in the denominators.

    Shares over samples weigh samples, not batches. Answers are read anew from the texts, by ``rules.answers``. Raises
    ValueError where a rollout's prompt has no true answer.
    """
    courses = follow(rollouts, gold, rules)
    out = {agent: _estimates(_parts(of, gold, rules.pass_at), rules) for agent, of in courses.items()}
    if len(courses) > 1:
        out[COHORT] = _estimates(_pooled(courses, gold), rules)
    return out


def follow(rollouts: Sequence[Rollout], gold: Gold, rules: Rules) -> Courses:
    """Every sample's course. Of several verifications of one answer, or revisions, the first in index order counts."""
    in_order = sorted(read_answers(rollouts, rules.answers), key=lambda r: r.index)
    children: dict[RolloutKey, Rollout] = {}
    for r in in_order:
        if r.prompt.parent is not None:
            children.setdefault(r.prompt.parent, r)
    out: Courses = {}
    for r in in_order:
        if r.prompt.role != "solve":
            continue
        uid = r.prompt.uid
        if uid not in gold:
            raise ValueError(
                f"no true answer for prompt uid={uid!r}: are the rollouts and the problem file of one set?"
            )
        check = children.get(r.key)
        revision = children.get(check.key) if check else None
        right = is_right(r.answer, gold[uid])
        course = Course(
            answer=r.answer,
            right=right,
            tokens=len(r.token_ids),
            truncated=r.stop == "length",
            verified=check is not None,
            verdict=check.answer if check else None,
            well_formed=check.well_formed if check else False,
            revised=revision is not None,
            final_right=is_right(revision.answer, gold[uid]) if revision else right,
        )
        out.setdefault(r.prompt.agent, {}).setdefault(uid, []).append(course)
    return out


def default_ks(samples: int) -> tuple[int, ...]:
    """1, 2, 4 ... and the number of samples itself."""
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i <= samples]
    return tuple(sorted({*powers, samples}))


def _parts(courses: Mapping[str, list[Course]], gold: Gold, pass_at: Sequence[int]) -> dict[str, list[Part]]:
    problems = list(courses.items())
    samples = min((len(cs) for _, cs in problems), default=0)
    uneven = next((uid for uid, cs in problems if len(cs) != samples), None)
    if uneven is not None:
        raise ValueError(
            f"prompt uid={uneven!r} has {len(courses[uneven])} answers and another one {samples}: an evaluation asks "
            "every prompt equally often"
        )
    out: dict[str, list[Part]] = {f"avg@{samples}": [(_share(c.right for c in cs), 1) for _, cs in problems]}
    for k in [k for k in pass_at or default_ks(samples) if k <= samples]:
        out[f"pass@{k}"] = [(pass_at_k(samples, sum(c.right for c in cs), k), 1) for _, cs in problems]
        out[f"maj@{k}"] = [(_voted([c.answer for c in cs[:k]], gold[uid]), 1) for uid, cs in problems]
    counts = {
        "answered": [(sum(c.answer is not None for c in cs), len(cs)) for _, cs in problems],
        "truncated": [(sum(c.truncated for c in cs), len(cs)) for _, cs in problems],
        "tokens": [(sum(c.tokens for c in cs), len(cs)) for _, cs in problems],
    }
    if any(c.verified for _, cs in problems for c in cs):
        counts |= _verdicts([cs for _, cs in problems])
    return out | {name: [(Fraction(n), d) for n, d in pairs] for name, pairs in counts.items()}


def _verdicts(problems: Sequence[Sequence[Course]]) -> dict[str, list[tuple[int, int]]]:
    out: dict[str, list[tuple[int, int]]] = {}
    for cs in problems:
        checked = [c for c in cs if c.verified]
        right, wrong = [c for c in checked if c.right], [c for c in checked if not c.right]
        true_positive = sum(c.verdict == "correct" for c in right)
        true_negative = sum(c.verdict == "wrong" for c in wrong)
        for name, pair in {
            "acc_first": (sum(c.right for c in cs), len(cs)),
            "acc_final": (sum(c.final_right for c in cs), len(cs)),
            "verify_accuracy": (true_positive + true_negative, len(checked)),
            "correct_recall": (true_positive, len(right)),
            "wrong_recall": (true_negative, len(wrong)),
            "malformed": (sum(not c.well_formed for c in checked), len(checked)),
            "verified": (len(checked), len(cs)),
            "revised": (sum(c.revised for c in cs), len(cs)),
            "wrong_to_right": (sum(c.final_right and not c.right for c in cs), len(cs)),
            "right_to_wrong": (sum(c.right and not c.final_right for c in cs), len(cs)),
        }.items():
            out.setdefault(name, []).append(pair)
    return out


def _pooled(courses: Courses, gold: Gold) -> dict[str, list[Part]]:
    """Votes that pool the same number of answers of every agent: as many as one agent gives (the same budget as one
    agent's vote, where that divides), and all of them. Ballots stand in index order, agents by name within one index.
    """
    agents = sorted(courses)
    uids = set(courses[agents[0]])
    if any(set(of) != uids for of in courses.values()):
        raise ValueError(f"agents {', '.join(agents)} answered different prompts: their votes cannot be pooled")
    samples = min(len(cs) for of in courses.values() for cs in of.values())
    out: dict[str, list[Part]] = {}
    for each in sorted({samples // len(agents), samples} - {0}):
        name = f"maj@{each * len(agents)}"
        for uid in courses[agents[0]]:
            answers = [courses[agent][uid][i].answer for i in range(each) for agent in agents]
            out.setdefault(name, []).append((_voted(answers, gold[uid]), 1))
    return out


def _estimates(parts: Mapping[str, Sequence[Part]], rules: Rules) -> dict[str, Estimate]:
    return estimate(parts, seed=rules.seed, resamples=rules.resamples, confidence=rules.confidence)


def _voted(answers: Sequence[str | None], true: str) -> Fraction:
    return Fraction(is_right(vote(answers).answer, true))


def is_right(answer: str | None, true: str) -> bool:
    """No answer is wrong, and so is one whose equality cannot be decided."""
    return answer is not None and bool(equal(answer, true))


def _share(flags) -> Fraction:
    flags = list(flags)
    return Fraction(sum(flags), len(flags))
