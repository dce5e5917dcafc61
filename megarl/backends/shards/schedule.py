"""A plan cut into rounds of bounded bytes.

Tensors are cut along their first axis at the same rows for every rank, so that a piece that is passed on inside a node
lies in one piece that arrived. All ranks make the same rounds.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from megarl.backends.shards.boxes import meet, volume
from megarl.backends.shards.layout import Shard, View
from megarl.backends.shards.plan import Copy, Plan


@dataclass(frozen=True, slots=True)
class Round:
    """Copies that are carried out together: first those from training parameters, then those passed on."""

    copies: tuple[Copy, ...]

    @property
    def first(self) -> list[Copy]:
        return [copy for copy in self.copies if not copy.forwarded]

    @property
    def passed_on(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.forwarded]

    def largest(self) -> int:
        """Bytes of the fullest buffer of any rank: what it sends to others in either part, or all that arrives."""
        return max(_loads(self.copies).values(), default=0)


def rounds(plan: Plan, bucket_bytes: int) -> list[Round]:
    """The plan's copies, cut where a buffer would exceed ``bucket_bytes``; a row of a tensor is never cut.

    Raises ValueError for fewer than one byte.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: at least 1")
    by_tensor: dict[str, list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        by_tensor[copy.tensor].append(copy)
    found: list[Round] = []
    taken: list[Copy] = []
    loads: dict[tuple[str, int], int] = defaultdict(int)
    for name, copies in by_tensor.items():
        tensor = plan.engine.tensors[name]
        for cell in _cells(tensor.shape, tensor.itemsize, copies, bucket_bytes):
            more = _loads(cell)
            if taken and any(loads[place] + nbytes > bucket_bytes for place, nbytes in more.items()):
                found.append(Round(tuple(taken)))
                taken, loads = [], defaultdict(int)
            taken += cell
            for place, nbytes in more.items():
                loads[place] += nbytes
    return [*found, Round(tuple(taken))] if taken else found


def _loads(copies: Iterable[Copy]) -> dict[tuple[str, int], int]:
    """(buffer, rank) -> bytes."""
    found: dict[tuple[str, int], int] = defaultdict(int)
    for copy in copies:
        found["arriving", copy.destination] += copy.nbytes
        if copy.tier != "local":
            found["passing on" if copy.forwarded else "leaving", copy.source] += copy.nbytes
    return found


def _cells(shape: Sequence[int], itemsize: int, copies: Sequence[Copy], bucket_bytes: int) -> Iterable[list[Copy]]:
    """The copies of one tensor, cut at common rows where they are too large for a bucket."""
    if max(_loads(copies).values()) <= bucket_bytes:
        yield list(copies)
        return
    sends: dict[int, int] = defaultdict(int)
    for copy in copies:
        sends[copy.source] += 1
    row = itemsize * prod(shape[1:]) * max(sends.values())
    step = max(1, bucket_bytes // row)
    for start in range(0, shape[0], step):
        band = ((start, min(start + step, shape[0])), *((0, size) for size in shape[1:]))
        cell = [piece for copy in copies if (piece := _cut(copy, band, itemsize)) is not None]
        if cell:
            yield cell


def _cut(copy: Copy, band: tuple[tuple[int, int], ...], itemsize: int) -> Copy | None:
    box = meet(copy.box, band)
    if box is None:
        return None
    return replace(
        copy,
        box=box,
        read=_moved(copy, copy.read, box),
        write=_moved(copy, copy.write, box),
        nbytes=volume(box) * itemsize,
    )


def _moved(copy: Copy, view: View, box: tuple[tuple[int, int], ...]) -> View:
    return Shard(copy.tensor, copy.box, view.param, view.offset, view.strides).view(box)
