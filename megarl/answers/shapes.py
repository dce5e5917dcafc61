"""The parts that forms of answers are made of: values, texts, ordered and unordered collections."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
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
        plain = plain.casefold().strip("\"'.!?,:; ")
    return Form("text", f"text:{plain.replace(' ', '')}")


def ordered(kind: str, parts: Iterable[Form], close: str = "") -> Form:
    parts = tuple(parts)
    return Form(kind + close, f"{kind}{'|'.join(p.key for p in parts)}{close}", parts, any(p.open for p in parts))


def unordered(kind: str, parts: Iterable[Form]) -> Form:
    kept = sorted({p.key: p for p in parts}.values(), key=lambda p: p.key)
    if kind == "set" and len(kept) == 1:  # a list of one is what stands in it
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
    if points:
        rest.append(unordered("set", points))
    if len(rest) == 1:
        return rest[0]
    return unordered("union", rest) if rest else EMPTY


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
