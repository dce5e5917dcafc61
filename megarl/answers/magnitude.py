"""The size of numbers that nobody can write out: towers of powers, and factorials of them.

A positive number is held as (level, x): level 0 is x itself, level n+1 is 10 to the number of level n. Only sizes that
differ widely are told apart; whatever is close stays undecided.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from megarl.answers.algebra import Poly

_TOP = 1e300
_CLOSE = 1e-6  # relative, of x on equal levels
_MAX_LEVEL = 40


@dataclass(frozen=True, slots=True, order=True)
class Size:
    level: int
    x: float


def differ(a: Poly, b: Poly) -> bool:
    """Is the one far larger than the other, beyond what can be computed? Letters make that unknown."""
    sizes = [_poly(a), _poly(b)]
    if sizes[0] is None or sizes[1] is None or max(s.level for s in sizes if s) < 2:
        return False
    low, high = sorted(s for s in sizes if s is not None)
    return low.level < high.level or high.x - low.x > _CLOSE * high.x


def _poly(poly: Poly) -> Size | None:
    """Size of a sum that one positive term rules."""
    terms = []
    for monomial, coefficient in poly.items():
        size = _rational(abs(coefficient.numerator), coefficient.denominator)
        for name, k in monomial:
            inner = _atom(name)
            if inner is None or k < 0:
                return None
            size = _times(size, _power(inner, Size(0, float(k))))
        terms.append((size, coefficient > 0))
    if not terms:
        return Size(0, 0.0)
    terms.sort()
    (top, positive) = terms[-1]
    close = 0.5 if top.level < 2 else 1 - _CLOSE  # such terms might cancel
    if len(terms) > 1 and terms[-2][0].level == top.level and terms[-2][0].x >= close * top.x:
        return None
    return top if positive else None


def _rational(above: int, below: int) -> Size:
    if above.bit_length() < 900 and below.bit_length() < 900:
        return Size(0, above / below)
    digits = (above.bit_length() - below.bit_length()) * math.log10(2)
    return Size(1, digits) if digits > 300 else Size(0, 10**digits)


def _atom(name: str) -> Size | None:
    """Size of pi, e, a root, a power or a factorial of numbers."""
    if name.startswith("root:"):
        return _power(_rational(int(name[5:], 16), 1), Size(0, 0.5))
    if name in ("\\pi", "e"):
        return Size(0, math.pi if name != "e" else math.e)
    function, _, rest = name.partition("(")
    if function not in ("pow", "factorial") or not rest:
        return None
    arguments = [_poly(_read(a)) for a in _split(rest[:-1], ",")]
    if any(a is None for a in arguments):
        return None
    first = arguments[0]
    assert first is not None
    if function == "factorial":  # n! is about n^n: the next level hides the difference
        return _power(first, first) if first.level >= 1 else None
    exponent = arguments[1]
    assert exponent is not None
    return _power(first, exponent) if first.x > 1 or first.level else None


def _power(base: Size, exponent: Size) -> Size:
    if base.level == 0 and exponent.level == 0 and base.x > 0 and exponent.x * abs(math.log10(base.x)) < 300:
        return Size(0, base.x**exponent.x)
    return _lift(_times(exponent, _log(base)))


def _log(a: Size) -> Size:
    if a.level:
        return Size(a.level - 1, a.x)
    return Size(0, max(math.log10(a.x), 1e-12) if a.x > 0 else 1e-12)


def _lift(a: Size) -> Size:
    """10 to the a, on the lowest level that holds it."""
    if a.level == 0 and a.x < 300:
        return Size(0, 10**a.x)
    return Size(min(a.level + 1, _MAX_LEVEL), a.x)


def _times(a: Size, b: Size) -> Size:
    if a.level == 0 and b.level == 0 and (a.x == 0 or b.x == 0 or math.log10(a.x) + math.log10(b.x) < 300):
        return Size(0, a.x * b.x)
    if (a.level == 0 and a.x <= 0) or (b.level == 0 and b.x <= 0):
        return Size(0, 0.0)
    low, high = sorted((_log(a), _log(b)))
    if high.level:  # the larger swallows the smaller
        return _lift(high)
    return _lift(Size(0, low.x + high.x))


def _read(spelling: str) -> Poly:
    """The poly that algebra.spell wrote."""
    out: Poly = {}
    position = 0
    while position < len(spelling) and spelling != "0":
        sign = -1 if spelling[position] == "-" else 1
        start = spelling.index("[", position)
        above, _, below = spelling[position + 1 : start].partition("/")
        end = _closing(spelling, start)
        monomial = tuple(_factor(f) for f in _split(spelling[start + 1 : end], "*") if f)
        out[monomial] = Fraction(sign * int(above, 16), int(below, 16) if below else 1)
        position = end + 1
    return out


def _factor(text: str) -> tuple[str, int]:
    name, mark, exponent = text.rpartition("^")
    plain = mark and "(" not in exponent and ")" not in exponent
    return (name, int(exponent)) if plain else (text, 1)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "[(") - (text[i] in "])")
        if depth == 0:
            return i
    raise AssertionError(text)


def _split(text: str, mark: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[(") - (c in "])")
        if c == mark and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]
