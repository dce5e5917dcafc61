"""Comparing digits that the workers found. A number is "mantissa p exponent" in hexadecimal, a value two of them."""

from collections.abc import Sequence

_TRUSTED = 40  # bits of a rough value
_SURE = 600  # bits on which a proportion must agree


def digits_differ(a: str, b: str) -> bool:
    """Are two values apart by more than the error of a rough one?"""
    first, second = _parts(a), _parts(b)
    size = max(_top(x) for x in (*first, *second))
    for x, y in zip(first, second, strict=True):
        if abs(_shifted(x, size) - _shifted(y, size)) >> (_WIDTH - _TRUSTED):
            return True
    return False


_WIDTH = 64


def proportional(a: Sequence[str], b: Sequence[str], positive: bool) -> bool:
    """Is a = c b for one c, in all settings? ``positive``: and is c above 0?"""
    first, second = [_parts(x) for x in a], [_parts(x) for x in b]
    pivot = next((i for i, y in enumerate(second) if y[0][0] or y[1][0]), None)
    if pivot is None:
        return all(not x[0][0] and not x[1][0] for x in first)
    for x, y in zip(first, second, strict=True):
        if not _same(_times(x, second[pivot]), _times(first[pivot], y)):
            return False
    ratio = _times(first[pivot], (second[pivot][0], (-second[pivot][1][0], second[pivot][1][1])))
    return ratio[0][0] > 0 if positive else bool(first[pivot][0][0] or first[pivot][1][0])


Binary = tuple[int, int]  # mantissa, exponent of two


def _parts(value: str) -> tuple[Binary, Binary]:
    real, imaginary = ((int(m, 16), int(e, 16)) for m, _, e in (piece.partition("p") for piece in value.split(",")))
    return real, imaginary


def _top(x: Binary) -> int:
    """Position of the leading bit; far below everything for 0."""
    return x[0].bit_length() + x[1] if x[0] else -(1 << 62)


def _shifted(x: Binary, top: int) -> int:
    """x in units of 2^(top - _WIDTH), bits below cut off."""
    shift = x[1] - top + _WIDTH
    if shift >= 0:
        return x[0] << min(shift, _WIDTH)  # more than that would lie above top
    return x[0] >> min(-shift, x[0].bit_length() + 1) if x[0] >= 0 else -(-x[0] >> min(-shift, x[0].bit_length() + 1))


def _times(a: tuple[Binary, Binary], b: tuple[Binary, Binary]) -> tuple[Binary, Binary]:
    return (
        _plus(_product(a[0], b[0]), _negative(_product(a[1], b[1]))),
        _plus(_product(a[0], b[1]), _product(a[1], b[0])),
    )


def _product(a: Binary, b: Binary) -> Binary:
    return a[0] * b[0], a[1] + b[1]


def _negative(a: Binary) -> Binary:
    return -a[0], a[1]


def _plus(a: Binary, b: Binary) -> Binary:
    if not a[0] or not b[0]:
        return b if not a[0] else a
    low, high = sorted((a, b), key=lambda x: x[1])
    gap = high[1] - low[1]
    if gap > 4096:  # beyond all digits
        return max(a, b, key=_top)
    return low[0] + (high[0] << gap), low[1]


def _same(a: tuple[Binary, Binary], b: tuple[Binary, Binary]) -> bool:
    top = max(_top(x) for x in (*a, *b))
    gaps = [_plus(x, _negative(y)) for x, y in zip(a, b, strict=True)]
    return all(not g[0] or _top(g) < top - _SURE for g in gaps)
