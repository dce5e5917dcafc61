"""Equality of answers by canonical key: two answers are equal when their keys are.

An equivalence relation by construction, so a vote cannot depend on the order of its ballots. The price is that some
true identities (sec^2 = tan^2 + 1) are not seen. What is decided where opinions differ: a percent sign, a degree mark
and a unit are dropped (28% is 28 and not 0.28); case does not matter in words and lone letters; a bare list is the
set of its members; 2/4 is 1/2; decimals are exact, 0.3333 is not 1/3.
"""

import re
from functools import lru_cache

from megarl.answers import algebra
from megarl.answers.clean import clean, ungroup, without_name
from megarl.answers.expression import Unreadable, read_expression

MAX_LENGTH = 1000  # characters beyond which an answer is compared as text
_WORDS = re.compile(r"\(?\s*([A-Za-z]|[A-Za-z]{2,}(?: [A-Za-z]+|[-'][A-Za-z]{2,})*)\s*\)?")
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{4,}")  # a product of letters, read so, would forget their order
_EMPTY_SET = re.compile(r"\\emptyset|\\\{\s*\\\}|no(?: real)? solutions?", re.IGNORECASE)
_MATRIX = re.compile(r"\\begin\s*\{matrix\}(.*)\\end\s*\{matrix\}", re.DOTALL)
_RELATION = re.compile(r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|<|>|=)")
_MIRROR = {">": "<", "\\ge": "\\le"}
_OPEN, _CLOSE = "([{", ")]}"
_MAX_NESTING = 12


def equal(a: str, b: str) -> bool:
    """Do the answers mean the same? An answer that is empty after cleaning equals nothing, itself included."""
    key = canonical(a)
    return key is not None and key == canonical(b)


@lru_cache(maxsize=1 << 16)
def canonical(answer: str) -> str | None:
    """Key of the class of answers that are equal to this one; None where nothing but wrapping is there."""
    if len(answer) > MAX_LENGTH:
        return f"long:{answer.strip()}" if answer.strip() else None
    text = clean(answer)
    if not text:
        return None
    return _key(ungroup(text), 0)


def _key(text: str, depth: int) -> str:
    """Key of cleaned text, by its outermost structure."""
    text = without_name(text.strip())
    if depth > _MAX_NESTING:
        return _as_text(text)
    words = _WORDS.fullmatch(text)
    if words:
        plain = words[1].strip().casefold()
        return "set:" if _EMPTY_SET.fullmatch(plain) else f"text:{plain}"
    for reader in (_collection, _matrix, _relation, _plus_minus):
        key = reader(text, depth)
        if key is not None:
            return key
    if _PROSE.search(text):
        return _as_text(text)
    try:
        return f"value:{algebra.spell(read_expression(text))}"
    except (Unreadable, ArithmeticError, RecursionError):
        return _as_text(text)


def _as_text(text: str) -> str:
    return f"text:{re.sub(r'[ ]+', '', text)}"


def _collection(text: str, depth: int) -> str | None:
    """Unions, bare lists, sets, tuples, intervals and ratios."""
    if _EMPTY_SET.fullmatch(text):
        return "set:"
    for separator, name in (("\\cup", "union"), (",", "set"), (":", "ratio")):
        parts = split(text, separator)
        if parts is not None and len(parts) > 1:
            keys = [_key(p, depth + 1) for p in parts]
            return f"{name}:{'|'.join(keys if name == 'ratio' else sorted(set(keys)))}"
    if text.startswith("\\{") and text.endswith("\\}"):
        parts = split(text[2:-2], ",")
        return None if parts is None else f"set:{'|'.join(sorted({_key(p, depth + 1) for p in parts}))}"
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]":
        parts = split(text[1:-1], ",")
        if parts is not None and len(parts) > 1:
            return f"{text[0]}{'|'.join(_key(p, depth + 1) for p in parts)}{text[-1]}"
    return None


def _matrix(text: str, depth: int) -> str | None:
    found = _MATRIX.fullmatch(text)
    if found is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", found[1]) if row.strip()]
    return "matrix:" + ";".join("|".join(_key(cell, depth + 1) for cell in row) for row in rows)


def _relation(text: str, depth: int) -> str | None:
    """Chains of comparisons, read from the smaller side; an equation by its two sides, in either order."""
    parts = _RELATION.split(text)
    if len(parts) < 3 or not all(p.strip() for p in parts[::2]):
        return None
    if parts[1:2] == ["="] and len(parts) == 3:
        equation = _equation(parts[0], parts[2])
        if equation is not None:
            return equation
    sides, signs = [_key(p, depth + 1) for p in parts[::2]], parts[1::2]
    if all(s in ("=", "\\ne") for s in signs):
        return f"{signs[0]}:{'|'.join(sorted(sides))}"
    if all(s in _MIRROR for s in signs):
        sides, signs = sides[::-1], [_MIRROR[s] for s in reversed(signs)]
    return "order:" + "".join(f"{side} {sign} " for side, sign in zip(sides, [*signs, ""], strict=True))


def _equation(left: str, right: str) -> str | None:
    """Left minus right up to a factor: 2x = 4y is x - 2y = 0. None where a side is no expression."""
    try:
        difference = algebra.add(read_expression(left), algebra.negate(read_expression(right)))
    except (Unreadable, ArithmeticError, RecursionError):
        return None
    if not difference:
        return "equation:0"
    lead = difference[min(difference)]
    return f"equation:{algebra.spell({m: c / lead for m, c in difference.items()})}"


def _plus_minus(text: str, depth: int) -> str | None:
    parts = re.split(r"\\pm(?![A-Za-z])", text)
    if len(parts) != 2:
        return None
    keys = {_key(f"{parts[0]}{sign}{parts[1]}", depth + 1) for sign in "+-"}
    return f"set:{'|'.join(sorted(keys))}"


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
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        if depth < 0:
            return None
        i += 1
    return [*parts, text[start:]] if depth == 0 else None
