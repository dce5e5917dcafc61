"""Scoring verifiers on pairs of a right and a wrong solution of one problem (RewardBench's way, arXiv 2403.13787).

A generative verifier has no scalar: its score of a solution is the share of its n verdicts that say "correct". A pair
is won where the right solution scores higher, and half won where both score alike, as RewardBench counts ties of
generative judges. Which protocol CoVerRL's table used on the math-prm subset is not published.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from megarl.deck import read_rows
from megarl.evaluation.estimate import Part, estimate
from megarl.evaluation.protocol import VERIFY, read_verdict
from megarl.evaluation.score import Rules, Scores
from megarl.evaluation.sets import ExamSet
from megarl.types import Message, Prompt, Rollout

Side = Literal["chosen", "rejected"]


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


def judgements(pairs: Sequence[Pair], agent: str, n: int) -> list[Prompt]:
    """Requests for ``n`` verdicts on both solutions of every pair."""
    return [_judge(pair, side, agent, n) for pair in pairs for side in ("chosen", "rejected")]


def _judge(pair: Pair, side: Side, agent: str, n: int) -> Prompt:
    solution = pair.chosen if side == "chosen" else pair.rejected
    messages = (Message("user", pair.prompt), Message("assistant", solution), Message("user", VERIFY))
    return Prompt(agent=agent, uid=_uid(pair, side), role="verify", messages=messages, n=n)


def _uid(pair: Pair, side: Side) -> str:
    return f"{pair.uid}/{side}"


def score_pairs(rollouts: Sequence[Rollout], pairs: Sequence[Pair], rules: Rules) -> Scores:
    """Per agent: pair_accuracy, over all pairs and per subset (pair_accuracy/<subset>); correct_recall (verdicts
    "correct" on right solutions), wrong_recall, verify_accuracy (over both), malformed.

    Pairs of which a solution was not judged are left out.
    """
    said: dict[str, dict[str, list[Rollout]]] = {}
    for r in rollouts:
        said.setdefault(r.prompt.agent, {}).setdefault(r.prompt.uid, []).append(r)
    out: Scores = {}
    for agent, of in said.items():
        judged = [p for p in pairs if _uid(p, "chosen") in of and _uid(p, "rejected") in of]
        parts = _parts([(p, of[_uid(p, "chosen")], of[_uid(p, "rejected")]) for p in judged], rules)
        out[agent] = estimate(parts, seed=rules.seed, resamples=rules.resamples, confidence=rules.confidence)
    return out


def _parts(judged: Sequence[tuple[Pair, list[Rollout], list[Rollout]]], rules: Rules) -> dict[str, list[Part]]:
    out: dict[str, list[Part]] = {}
    subsets = sorted({pair.subset for pair, _, _ in judged if pair.subset})
    for pair, chosen, rejected in judged:
        right, wrong = ([read_verdict(r.text, rules.verdict) for r in rs] for rs in (chosen, rejected))
        passed = Fraction(sum(v.correct is True for v in right), len(right))
        fooled = Fraction(sum(v.correct is True for v in wrong), len(wrong))
        won = Fraction(1, 2) if passed == fooled else Fraction(passed > fooled)
        caught = sum(v.correct is False for v in wrong)
        both = len(right) + len(wrong)
        entries: dict[str, Part] = {
            "pair_accuracy": (won, 1),
            "verify_accuracy": (passed * len(right) + caught, both),
            "correct_recall": (passed * len(right), len(right)),
            "wrong_recall": (Fraction(caught), len(wrong)),
            "malformed": (Fraction(sum(not v.well_formed for v in (*right, *wrong))), both),
        }
        for subset in subsets:
            entries[f"pair_accuracy/{subset}"] = (won, 1) if pair.subset == subset else (Fraction(), 0)
        for name, part in entries.items():
            out.setdefault(name, []).append(part)
    return out
