"""Scoring verifiers on pairs of a right and a wrong solution of one problem (RewardBench's way, arXiv 2403.13787).

A generative verifier has no scalar: its score of a solution is the share of its n verdicts that say "correct". A pair
is won where the right solution scores higher, and half won where both score alike, as RewardBench counts ties of
generative judges. Which protocol CoVerRL's table used on the math-prm subset is not published.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from megarl.algos.coverrl import Requests
from megarl.answers.read import read_answers
from megarl.evaluation.estimate import Part, estimate
from megarl.evaluation.score import Rules, Scores
from megarl.evaluation.sets import ExamSet
from megarl.rows import read_rows
from megarl.types import Message, Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One problem with a right (chosen) and a wrong (rejected) solution."""

    uid: str
    subset: str
    prompt: str
    chosen: str
    rejected: str


def read_pairs(cfg: ExamSet) -> list[Pair]:
    """The pairs of a file, in its order. Raises ValueError for a missing column, and where no row is of a subset that
    is asked for."""
    columns = cfg.pairs
    assert columns is not None
    pairs = []
    for number, row in enumerate(read_rows(Path(cfg.data.path))):
        wanted = (cfg.data.prompt, columns.chosen, columns.rejected, *([cfg.data.id] if cfg.data.id else []))
        absent = [name for name in wanted if name not in row]
        if absent:
            raise ValueError(f"{cfg.data.path}: row {number} has no {absent[0]!r}; its columns: {', '.join(row)}")
        subset = str(row.get(columns.subset, ""))
        if columns.only and subset not in columns.only:
            continue
        prompt, chosen, rejected = (str(row[name]) for name in wanted[:3])
        uid = str(row[cfg.data.id] if cfg.data.id else number)
        pairs.append(Pair(uid=uid, subset=subset, prompt=prompt, chosen=chosen, rejected=rejected))
    if not pairs:
        raise ValueError(f"{cfg.data.path}: no pair of subset {', '.join(columns.only) or '(any)'}")
    return pairs[: cfg.data.limit]


def judgements(pairs: Sequence[Pair], agent: str, n: int, requests: Requests) -> list[Prompt]:
    """Requests for ``n`` verdicts on both solutions of every pair, the chosen one first."""
    out = []
    for pair in pairs:
        for uid, solution in zip(uids(pair), (pair.chosen, pair.rejected), strict=True):
            turns = (Message("user", pair.prompt), Message("assistant", solution), Message("user", requests.verify))
            out.append(Prompt(agent=agent, uid=uid, role="verify", messages=turns, n=n))
    return out


def uids(pair: Pair) -> tuple[str, str]:
    """The ids under which its two solutions are judged."""
    return f"{pair.uid}/chosen", f"{pair.uid}/rejected"


def score_pairs(rollouts: Sequence[Rollout], pairs: Sequence[Pair], rules: Rules) -> Scores:
    """Per agent: pair_accuracy, over all pairs and per subset (pair_accuracy/<subset>); correct_recall (verdicts
    "correct" on right solutions), wrong_recall, verify_accuracy (over both), malformed.

    Pairs of which a solution was not judged are left out.
    """
    said: dict[str, dict[str, list[Rollout]]] = {}
    for r in read_answers(rollouts, rules.answers):
        said.setdefault(r.prompt.agent, {}).setdefault(r.prompt.uid, []).append(r)
    out: Scores = {}
    for agent, of in said.items():
        both = [(pair, *(of.get(uid, []) for uid in uids(pair))) for pair in pairs]
        parts = _parts([(pair, chosen, rejected) for pair, chosen, rejected in both if chosen and rejected])
        out[agent] = estimate(parts, seed=rules.seed, resamples=rules.resamples, confidence=rules.confidence)
    return out


def _parts(judged: Sequence[tuple[Pair, list[Rollout], list[Rollout]]]) -> dict[str, list[Part]]:
    out: dict[str, list[Part]] = {}
    subsets = sorted({pair.subset for pair, _, _ in judged if pair.subset})
    for pair, chosen, rejected in judged:
        passed = Fraction(sum(r.answer == "correct" for r in chosen), len(chosen))
        fooled = Fraction(sum(r.answer == "correct" for r in rejected), len(rejected))
        won = Fraction(1, 2) if passed == fooled else Fraction(passed > fooled)
        caught = sum(r.answer == "wrong" for r in rejected)
        both = len(chosen) + len(rejected)
        entries: dict[str, Part] = {
            "pair_accuracy": (won, 1),
            "verify_accuracy": (passed * len(chosen) + caught, both),
            "correct_recall": (passed * len(chosen), len(chosen)),
            "wrong_recall": (Fraction(caught), len(rejected)),
            "malformed": (Fraction(sum(not r.well_formed for r in (*chosen, *rejected))), both),
        }
        for subset in subsets:
            entries[f"pair_accuracy/{subset}"] = (won, 1) if pair.subset == subset else (Fraction(), 0)
        for name, part in entries.items():
            out.setdefault(name, []).append(part)
    return out
