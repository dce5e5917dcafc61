"""The parts that forms of answers are made of: values, texts, ordered and unordered collections."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from megarl.answers import algebra
from megarl.answers.algebra import Poly

OPEN, CLOSE = "([{", ")]}"
NAME = r"(?:[A-Za-z](?:_(?:\w|\{\w+\}))?'?|\\(?:alpha|beta|gamma|theta|phi|lambda|mu|omega|sigma|rho|Delta|ell))"


@dataclass(frozen=True, slots=True)
class Form:
    """A canonical answer. ``kind`` is "value", "text", "set", "union", "sequence", a relation, or a bracket pair."""

    kind: str
    key: str
    parts: tuple["Form", ...] = ()
    open: bool = False
    poly: Poly | None = field(default=None, compare=False, hash=False)


def as_text(text: str) -> Form:
    plain = re.sub(r"\s+", " ", text.replace("\u00b0", "").replace("$", "")).strip()
    if not re.search(r"[\\^_=<>+*/]", plain):
        plain = plain.casefold().strip("\"'.!?,:; ") or plain
    return Form("text", f"text:{plain.replace(' ', '')}")


def ordered(kind: str, parts: Iterable[Form], close: str = "") -> Form:
    parts = tuple(parts)
    return Form(kind + close, f"{kind}{'|'.join(p.key for p in parts)}{close}", parts, any(p.open for p in parts))


def unordered(kind: str, parts: Iterable[Form]) -> Form:
    kept = sorted({p.key: p for p in parts}.values(), key=lambda p: p.key)
    if kind == "set" and len(kept) == 1 and kept[0].kind != "set":  # a list of one is what stands in it
        return kept[0]
    return Form(kind, f"{kind}{{{'|'.join(p.key for p in kept)}}}", tuple(kept), any(p.open for p in kept))


def number(poly: Poly) -> Form:
    return Form("value", f"value:{algebra.spell(poly)}", (), not algebra.is_closed(poly), poly)


INFINITY = algebra.atom("\\infty")
LINE = ordered("(", (number(algebra.negate(INFINITY)), number(INFINITY)), ")")
EMPTY = unordered("set", ())


def union(parts: list[Form]) -> Form:
    """A union of sets; sets of points are put together, intervals that are equal once."""
    flat = [q for p in parts for q in (p.parts if p.kind == "union" else (p,)) if q != EMPTY]
    points = [q for p in flat if p.kind == "set" for q in p.parts]
    rest = [p for p in flat if p.kind != "set"]
    spans = [_span(p) for p in rest] + [_span(p) for p in points]
    known = [s for s in spans if s is not None]
    if rest and len(known) == len(spans):
        return _unbroken(known)
    if points:
        rest.append(unordered("set", points))
    if len(rest) == 1:
        return rest[0]
    return unordered("union", rest) if rest else EMPTY


# a piece of the line: its lower end as (value, 0 where it belongs to it, else 1), its upper end as (value, 0 or -1)
_Span = tuple[tuple[float | Fraction, int], tuple[float | Fraction, int]]


def _span(form: Form) -> _Span | None:
    """An interval with rational or infinite ends, or a rational point; None for everything else."""
    if form.kind == "value":
        value = _end(form)
        return None if value is None or isinstance(value, float) else ((value, 0), (value, 0))
    if form.kind not in ("()", "(]", "[)", "[]") or len(form.parts) != 2:
        return None
    low, high = (_end(p) for p in form.parts)
    if low is None or high is None or low >= high:
        return None
    return (low, int(form.kind[0] == "(")), (high, -int(form.kind[1] == ")"))


def _end(form: Form) -> float | Fraction | None:
    for poly, value in ((INFINITY, math.inf), (algebra.negate(INFINITY), -math.inf)):
        if form.poly == poly:
            return value
    return None if form.poly is None else algebra.constant(form.poly)


def _interval(span: _Span) -> Form:
    (low, after), (high, before) = span
    ends = [
        number(
            algebra.negate(INFINITY) if e == -math.inf else INFINITY if e == math.inf else algebra.number(Fraction(e))
        )
        for e in (low, high)
    ]
    return ends[0] if low == high else ordered("(" if after else "[", ends, ")" if before else "]")


def _unbroken(spans: list[_Span]) -> Form:
    """The union with pieces that touch joined: (0, 1] and [1, 2) are (0, 2)."""
    joined: list[_Span] = []
    for low, high in sorted(spans):
        # the next one begins within the last, or at an end that one of the two holds
        if joined and (low[0] < joined[-1][1][0] or (low[0] == joined[-1][1][0] and low[1] + -joined[-1][1][1] < 2)):
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    forms = [_interval(s) for s in joined]
    points = [f for f in forms if f.kind == "value"]
    rest = [f for f in forms if f.kind != "value"]
    if points:
        rest.append(unordered("set", points))
    return rest[0] if len(rest) == 1 else unordered("union", rest)


def common(parts: list[Form]) -> Form:
    """Statements that hold together; intervals by what they have in common."""
    spans = [_span(p) if p.kind != "value" else None for p in parts]
    known = [s for s in spans if s is not None]
    if parts and len(known) == len(parts):
        low, high = max(s[0] for s in known), min(s[1] for s in known)
        if low[0] < high[0]:
            return _interval((low, high))
        if low[0] > high[0] or low[1] or high[1]:
            return EMPTY
        return _interval((low, high))
    return unordered("all:", parts)


def without(holes: list[Form]) -> Form | None:
    """The real line without some rational points."""
    values = [algebra.constant(h.poly) for h in holes if h.poly is not None]
    if len(values) != len(holes) or any(v is None for v in values):
        return None
    ends = [
        algebra.negate(INFINITY),
        *(algebra.number(v) for v in sorted({v for v in values if v is not None})),
        INFINITY,
    ]
    return union([ordered("(", (number(a), number(b)), ")") for a, b in pairwise(ends)])


def letters(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text)))


def split(text: str, separator: str) -> list[str] | None:
    """The text cut at separators outside of all brackets; None where brackets do not close. Half-open intervals
    make any opener match any closer."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            i += len(separator)
            start = i
            continue
        if text[i] == "\\" and text[i + 1 : i + 2] not in ("{", "}"):
            i += 2
            continue
        depth += (text[i] in OPEN) - (text[i] in CLOSE)
        if depth < 0:
            return None
        i += 1
    return [*parts, text[start:]] if depth == 0 else None
