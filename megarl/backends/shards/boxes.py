"""Boxes of a tensor: one half-open interval (start, stop) per axis. Pure integers."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    found = 1
    for start, stop in box:
        found *= stop - start
    return found


def meet(one: Box, other: Box) -> Box | None:
    """What both hold; None: nothing."""
    if one == other:
        return one
    found = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        found.append((start, stop))
    return tuple(found)


def subtract(one: Box, other: Box) -> list[Box]:
    """``one`` without ``other``, in disjoint boxes: at most two per axis."""
    common = meet(one, other)
    if common is None:
        return [one]
    if common == one:
        return []
    left = []
    for axis, ((start, stop), (a, b)) in enumerate(zip(one, common, strict=True)):
        head, tail = common[:axis], one[axis + 1 :]
        if start < a:
            left.append((*head, (start, a), *tail))
        if b < stop:
            left.append((*head, (b, stop), *tail))
    return left


def without(box: Box, others: Iterable[Box]) -> list[Box]:
    """``box`` without any of the others, in disjoint boxes."""
    left = [box]
    for other in others:
        left = [piece for part in left for piece in subtract(part, other)]
    return left


@lru_cache(maxsize=1 << 16)
def covered(box: Box, others: frozenset[Box]) -> int:
    """Elements of ``box`` that lie in any of the others, counted on the grid of all their edges.

    Shares nothing with ``without``, so that what a plan moves can be held against it.
    """
    inside = [found for other in others if (found := meet(box, other)) is not None]
    if not inside:
        return 0
    edges = [sorted({*box[axis], *(edge for other in inside for edge in other[axis])}) for axis in range(len(box))]
    cells = np.zeros([len(edge) - 1 for edge in edges], dtype=bool)
    for other in inside:
        cells[tuple(slice(e.index(a), e.index(b)) for e, (a, b) in zip(edges, other, strict=True))] = True
    widths = np.ones((), dtype=np.int64)
    for edge in edges:
        widths = np.multiply.outer(widths, np.array([b - a for a, b in pairwise(edge)], dtype=np.int64))
    return int(widths[cells].sum())
