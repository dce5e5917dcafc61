r"""Equality of answers: an equivalence relation with three outcomes.

Two answers are equal when their forms have one key, or when the values in them are proven equal by their prints (198
digits at generic points, see numeric). Each of these is a property of one answer alone, so equality is symmetric and
transitive by construction, and depends on no order, clock, load or number of processes. Undecided is what can neither
be shown equal nor different within the budget; it is never taken for either.

What is decided where opinions differ: a percent sign, a degree mark, a currency and a unit are dropped (28% is 28 and
not 0.28; degrees inside of sin count); case does not matter in words and lone letters; a bare list, a "2 and 5" and a
set are the set of their members, a list of one is that one; x = 5 is 5, x = 1, y = 2 is (1, 2); 2/4 is 1/2; decimals
are exact, 0.3333 is not 1/3; 2x < 6 is the interval (-infinity, 3); 37_8 is 31; 2:4 is not 1:2, as clock times are
not; "log" without a base is undecided where the base matters; amounts of different things (3 ft, 4 in) keep their
units, and letters side by side (2 ab, \pi rh) are factors and no unit; pieces of the line with rational ends are joined
or cut where they touch, and statements of different letters stay apart. math-verify's verdicts are not used: its reader
and sympy work out integrals, sums and limits only.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import combinations
from typing import Any

from megarl.answers import algebra, magnitude
from megarl.answers.form import MAX_LENGTH, Form, read_form
from megarl.answers.prints import digits_differ, proportional
from megarl.answers.solvers import Question, Reply, ask

__all__ = ["MAX_LENGTH", "Judgement", "Outcome", "canonical", "compare", "equal", "judge", "partition"]

_MAX_SURE = 150  # characters of a closed value up to which its print is taken to be its alone
_UNORDERED = ("set", "union", "all:", "equal:", "unequal:")
_DEEP = "deep:"
_POSITIVE_BASE = re.compile(r"pow\(\+[0-9a-f/]+\[\],")
_JUMPS = re.compile(r"(?:floor|ceil)\(")
_LEFT = "not real"
_log = logging.getLogger(__name__)


class Outcome(Enum):
    """What is known of two answers."""

    EQUAL = True
    DIFFERENT = False
    UNDECIDED = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """An outcome and, in words, what it rests on."""

    outcome: Outcome
    reason: str


def equal(a: str, b: str) -> bool:
    """Are the answers known to mean the same? An answer that is empty after cleaning equals nothing, itself included.

    Undecided is False here: ask ``compare`` where it matters.
    """
    return compare(a, b) is Outcome.EQUAL


def compare(a: str, b: str) -> Outcome:
    """Equal, different or undecided."""
    return judge(a, b).outcome


def judge(a: str, b: str) -> Judgement:
    """The outcome with its reason."""
    return _judge(*sorted((a, b)))


def canonical(answer: str) -> str | None:
    """Key of the answer's form; None where nothing but wrapping is there. Equal keys are equal answers."""
    form = read_form(answer)
    return None if form is None else form.key


@lru_cache(maxsize=1 << 16)
def _judge(a: str, b: str) -> Judgement:
    forms = [read_form(a), read_form(b)]
    if forms[0] is None or forms[1] is None:
        return Judgement(Outcome.DIFFERENT, "an empty answer equals nothing")
    found = _forms(forms[0], forms[1])
    if found.outcome is Outcome.UNDECIDED:
        _log.warning("undecided, %s: %.120s | %.120s", found.reason, a, b)
    return found


def partition(forms: Sequence[Form]) -> tuple[list[list[int]], int]:
    """Positions of the forms by class, classes and members in order; and the number of undecided pairs of classes."""
    classes: dict[str, list[int]] = {}
    for i, form in enumerate(forms):
        classes.setdefault(form.key, []).append(i)
    merged = list(classes.values())
    heads = [forms[members[0]] for members in merged]
    pairs = [(i, j) for i, j in combinations(range(len(heads)), 2) if _may_meet(heads[i], heads[j])]
    if not pairs:
        return merged, 0
    ask([q for i in sorted({k for pair in pairs for k in pair}) for q in _questions(heads[i])])
    parent = list(range(len(heads)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    open_pairs: list[tuple[int, int]] = []
    for i, j in pairs:
        outcome = _forms(heads[i], heads[j]).outcome
        if outcome is Outcome.EQUAL:
            low, high = sorted((root(i), root(j)))
            parent[high] = low
        elif outcome is Outcome.UNDECIDED:
            open_pairs.append((i, j))
    joined: dict[int, list[int]] = {}
    for i, members in enumerate(merged):
        joined.setdefault(root(i), []).extend(members)
    undecided = {tuple(sorted((root(i), root(j)))) for i, j in open_pairs if root(i) != root(j)}
    for i, j in sorted(undecided)[:1]:
        _log.warning("%d undecided pairs, as %.120s | %.120s", len(undecided), heads[i].key, heads[j].key)
    return [sorted(members) for members in joined.values()], len(undecided)


def _may_meet(a: Form, b: Form) -> bool:
    """May forms with different keys be equal?"""
    return (a.open or b.open) and a.kind == b.kind


def _forms(a: Form, b: Form) -> Judgement:
    """The judgement of two forms, by their structure."""
    if a.key == b.key:
        return Judgement(Outcome.EQUAL, "one form")
    if not _may_meet(a, b):
        return Judgement(Outcome.DIFFERENT, "different forms")
    if a.kind == "value":
        found = _values(a, b)
    elif a.kind in ("equation", "unequal") or a.kind.startswith("0"):
        found = _relations(a, b)
    elif a.kind in _UNORDERED:
        found = _sets(a, b)
    elif len(a.parts) != len(b.parts):
        found = Judgement(Outcome.DIFFERENT, "different lengths")
    else:
        found = _all([_forms(p, q) for p, q in zip(a.parts, b.parts, strict=True)])
    return found


def _all(parts: Iterable[Judgement]) -> Judgement:
    """Equal where all parts are, different where one is."""
    outcomes = {p.outcome: p for p in parts}
    for outcome in (Outcome.DIFFERENT, Outcome.UNDECIDED, Outcome.EQUAL):
        if outcome in outcomes:
            return outcomes[outcome]
    raise AssertionError("no parts")


def _sets(a: Form, b: Form) -> Judgement:
    table = [[_forms(p, q) for q in b.parts] for p in a.parts]
    lines = [*table, *([row[j] for row in table] for j in range(len(b.parts)))]
    if all(any(j.outcome is Outcome.EQUAL for j in line) for line in lines):
        return Judgement(Outcome.EQUAL, "equal members")
    lonely = [line for line in lines if all(j.outcome is Outcome.DIFFERENT for j in line)]
    if lonely:
        return Judgement(Outcome.DIFFERENT, "a member of one only")
    return Judgement(Outcome.UNDECIDED, "undecided members")


def _questions(form: Form) -> list[Question]:
    if form.parts:
        return [q for p in form.parts for q in _questions(p)]
    return [_question(form)] if form.kind == "value" and not form.key.startswith(_DEEP) else []


def _question(form: Form) -> Question:
    kind, _, text = form.key.partition(":")
    return ("latex" if kind == "latex" else "key"), text


def _values(a: Form, b: Form) -> Judgement:
    """Values of which at least one is open."""
    if a.poly is not None and b.poly is not None:
        if magnitude.differ(a.poly, b.poly):
            return Judgement(Outcome.DIFFERENT, "different by magnitude")
        if _is_nonzero(algebra.add(a.poly, algebra.negate(b.poly))):
            return Judgement(Outcome.DIFFERENT, "their difference is not 0")
    if a.key.startswith(_DEEP) or b.key.startswith(_DEEP):
        return Judgement(Outcome.UNDECIDED, "nested too deeply")
    replies = ask([_question(a), _question(b)])
    if any("text" in r for r in replies):
        return Judgement(Outcome.DIFFERENT, "one is no mathematics")
    for r in replies:
        if "undecided" in r:
            return Judgement(Outcome.UNDECIDED, str(r["undecided"]))
    if any("rough" in r for r in replies):
        known = [r["rough"] if "rough" in r else r["prints"][0][0] for r in replies]
        if any(k.startswith("undefined") for k in known) or digits_differ(known[0], known[1]):
            return Judgement(Outcome.DIFFERENT, "different digits")
        return Judgement(Outcome.UNDECIDED, "the digits that are known agree")
    return _prints(a, b, replies)


def _is_nonzero(difference: algebra.Poly) -> bool:
    """Is it a single product of factors that are never 0?"""
    if len(difference) != 1:
        return False
    [monomial] = difference
    return all(name != "\\infty" if "(" not in name else _POSITIVE_BASE.match(name) for name, _ in monomial)


def _prints(a: Form, b: Form, replies: Sequence[Reply]) -> Judgement:
    """By the prints in each setting: the letters positive with "log" to 10 and to e, and letters negative."""
    first, second = (_comparable(r["prints"]) for r in replies)
    same = [p == q for p, q in zip(first, second, strict=True)]
    if all(same):
        lossy = any(len(p) > 2 and p[2] for r in replies for p in r["prints"])
        # generic points are no integers: floor(x) + 1 is ceil(x) there, and not everywhere
        lossy |= any(_JUMPS.search(f.key) and f.poly is not None and algebra.holds_letters(f.poly) for f in (a, b))
        closed = [f for f in (a, b) if not f.open]
        if lossy or any(len(f.key) > _MAX_SURE for f in closed) or first[0].startswith("undefined"):
            return Judgement(Outcome.UNDECIDED, "they agree in all digits that were computed")
        return Judgement(Outcome.EQUAL, "equal values")
    if not same[0] and not same[1]:
        return Judgement(Outcome.DIFFERENT, "different values")
    if not (same[0] and same[1]):
        return Judgement(Outcome.UNDECIDED, "it depends on the base of log")
    if any(p != q and _LEFT not in (p, q) for p, q in zip(first[2:], second[2:], strict=True)):
        return Judgement(Outcome.DIFFERENT, "different values where the letters are negative")
    return Judgement(Outcome.UNDECIDED, "equal where the letters are positive")


def _comparable(prints: Sequence[Sequence[Any]]) -> list[str]:
    """The digits; where they are real for positive letters and not for negative ones, no more than that."""
    digits = [str(p[0]) for p in prints]
    if len(prints[0]) > 1 and not prints[0][1]:
        digits[2:] = [_LEFT if len(p) < 2 or p[1] else d for d, p in zip(digits[2:], prints[2:], strict=True)]
    return digits


def _relations(a: Form, b: Form) -> Judgement:
    """Equations and inequalities that are not linear: equal where the one is the other times a constant."""
    replies = ask([_question(a.parts[0]), _question(b.parts[0])])
    for r in replies:
        if "prints" not in r or any(len(p) < 2 or (len(p) > 2 and p[2]) for p in r["prints"]):
            return Judgement(Outcome.UNDECIDED, "no value found")
    first, second = ([p[0] for p in r["prints"]] for r in replies)
    signed = a.kind.startswith("0")
    if proportional(first, second, positive=signed):
        return Judgement(Outcome.EQUAL, "one is a multiple of the other")
    if not signed and _solved_for(a) & _solved_for(b):
        return Judgement(Outcome.DIFFERENT, "different values of one variable")
    return Judgement(Outcome.UNDECIDED, "not a constant multiple")


def _solved_for(form: Form) -> set[str]:
    """Letters that occur once, on their own: "y" of y - sin(x) = 0."""
    poly = form.parts[0].poly or {}
    alone = {m[0][0] for m in poly if len(m) == 1 and m[0][1] == 1 and "(" not in m[0][0]}
    rest = {name: [n for m in poly for n, _ in m if m != ((name, 1),)] for name in alone}
    return {name for name, others in rest.items() if not any(name in other for other in others)}
