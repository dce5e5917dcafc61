"""Carrying out a plan: training shards into the engine's, over the policy's own process group.

Per round every rank gathers what it sends into one buffer, all ranks exchange, what a node received once is passed on
inside it, and what arrived is handed to whoever holds this GPU's engine parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megarl.backends.shards.boxes import sizes, volume
from megarl.backends.shards.layout import View
from megarl.backends.shards.plan import Copy, Plan
from megarl.backends.shards.schedule import Round, rounds


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a run of a bucket's elements goes: ``start`` in the bucket, a region of an engine parameter."""

    start: int
    shape: tuple[int, ...]
    into: View


Take = Callable[[torch.Tensor, Sequence[Piece]], None]  # a flat bucket and what it holds


@dataclass(slots=True)
class Moved:
    """What one rank's refit moved. ``received`` counts the output of the collectives, this rank's own part excluded."""

    received: int = 0
    sent: int = 0
    stayed: int = 0
    rounds: int = 0


class Exchange:
    """One rank's part in a plan. All ranks of the group make it of the same plan and call ``run`` together."""

    def __init__(self, plan: Plan, group: Any, *, bucket_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ValueError where the group is not of the plan's size, or the plan not of this dtype."""
        self._rank, world = dist.get_rank(group), dist.get_world_size(group)
        if world != plan.world:
            raise ValueError(f"a plan of {plan.world} ranks cannot be carried out by a group of {world}")
        wrong = [name for name, tensor in plan.engine.tensors.items() if tensor.itemsize != dtype.itemsize]
        if wrong:
            raise ValueError(f"{wrong[0]} has {plan.engine.tensors[wrong[0]].itemsize} bytes an element, not {dtype}")
        self._world, self._group, self._dtype, self._device = world, group, dtype, device
        self._rounds = [_mine(r, self._rank) for r in rounds(plan, bucket_bytes)]

    def run(self, training: Mapping[str, torch.Tensor], take: Take) -> Moved:
        """Send what this rank holds, and ``take`` every bucket that arrives."""
        moved = Moved()
        for buckets in self.rounds(training, moved):
            for bucket, pieces in buckets:
                take(bucket, pieces)
                del bucket  # the next round is made beside whatever is still held
            del buckets
        return moved

    def rounds(
        self, training: Mapping[str, torch.Tensor], moved: Moved
    ) -> Iterator[list[tuple[torch.Tensor, list[Piece]]]]:
        """Round by round what arrives at this rank, at most two buckets; all ranks take the same number of rounds.

        Nothing of a round is kept here: it is gone once the caller lets go of it.
        """
        for first, passed_on in self._rounds:
            yield self._round(first, passed_on, training, moved)

    @torch.no_grad()
    def _round(
        self,
        first: Sequence[Copy],
        passed_on: Sequence[Copy] | None,
        training: Mapping[str, torch.Tensor],
        moved: Moved,
    ) -> list[tuple[torch.Tensor, list[Piece]]]:
        bucket, pieces, spans = self._first(first, training, moved)
        buckets = [(bucket, pieces)]
        if passed_on is not None:
            buckets.append(self._passed_on(passed_on, bucket, spans, moved))
        moved.rounds += 1
        return [(values, held) for values, held in buckets if held]

    def _first(
        self, copies: Sequence[Copy], training: Mapping[str, torch.Tensor], moved: Moved
    ) -> tuple[torch.Tensor, list[Piece], list[tuple[Copy, int]]]:
        """The bucket: what stays on this rank, then what arrives from each rank in turn."""
        staying = [c for c in copies if c.source == c.destination == self._rank]
        leaving = [[c for c in copies if c.source == self._rank and c.destination == d] for d in range(self._world)]
        coming = [[c for c in copies if c.destination == self._rank and c.source == s] for s in range(self._world)]
        leaving[self._rank], coming[self._rank] = [], []
        own = _elements(staying)
        bucket = self._empty(own + sum(map(_elements, coming)))
        _gather(staying, training, bucket[:own])
        send = self._empty(sum(map(_elements, leaving)))
        _gather([copy for part in leaving for copy in part], training, send)
        self._exchange(bucket[own:], send, coming, leaving, moved)
        moved.stayed += own * self._dtype.itemsize
        order = [*staying, *(copy for part in coming for copy in part)]
        pieces = _pieces(order)
        return bucket, pieces, [(copy, piece.start) for copy, piece in zip(order, pieces, strict=True)]

    def _passed_on(
        self, copies: Sequence[Copy], bucket: torch.Tensor, spans: Sequence[tuple[Copy, int]], moved: Moved
    ) -> tuple[torch.Tensor, list[Piece]]:
        """What others of the node received for this rank as well; read from their buckets, not from their engines."""
        leaving = [[c for c in copies if c.source == self._rank and c.destination == d] for d in range(self._world)]
        coming = [[c for c in copies if c.destination == self._rank and c.source == s] for s in range(self._world)]
        more, send = self._empty(sum(map(_elements, coming))), self._empty(sum(map(_elements, leaving)))
        at = 0
        for copy in (copy for part in leaving for copy in part):
            n = _elements([copy])
            send[at : at + n].view(sizes(copy.box)).copy_(_inside(copy, bucket, spans))
            at += n
        self._exchange(more, send, coming, leaving, moved)
        return more, _pieces([copy for part in coming for copy in part])

    def _exchange(
        self,
        into: torch.Tensor,
        send: torch.Tensor,
        coming: Sequence[Sequence[Copy]],
        leaving: Sequence[Sequence[Copy]],
        moved: Moved,
    ) -> None:
        dist.all_to_all_single(
            into, send, [_elements(part) for part in coming], [_elements(part) for part in leaving], group=self._group
        )
        moved.received += into.nbytes
        moved.sent += send.nbytes

    def _empty(self, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=self._dtype, device=self._device)


def place(params: Mapping[str, torch.Tensor], bucket: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Copy a bucket's pieces into engine parameters, in place. Parameters are contiguous."""
    for piece in pieces:
        values = bucket[piece.start : piece.start + prod(piece.shape)].view(piece.shape)
        region(params[piece.into.param], piece.into, piece.shape).copy_(values)


def region(param: torch.Tensor, view: View, shape: Sequence[int]) -> torch.Tensor:
    """The strided region of a contiguous parameter."""
    if not param.is_contiguous():
        raise ValueError(f"parameter {view.param} of shape {tuple(param.shape)} is not contiguous: {param.stride()}")
    return param.as_strided(tuple(shape), view.strides, param.storage_offset() + view.offset)


def _mine(one: Round, rank: int) -> tuple[list[Copy], list[Copy] | None]:
    """This rank's copies of a round; None: nobody passes anything on in it, so that there is no second exchange."""
    first = [copy for copy in one.first if rank in (copy.source, copy.destination)]
    passed_on = [copy for copy in one.passed_on if rank in (copy.source, copy.destination)]
    return first, passed_on if one.passed_on else None


def _elements(copies: Sequence[Copy]) -> int:
    return sum(volume(copy.box) for copy in copies)


def _gather(copies: Sequence[Copy], params: Mapping[str, torch.Tensor], into: torch.Tensor) -> None:
    at = 0
    for copy in copies:
        shape = sizes(copy.box)
        source = region(params[copy.read.param], copy.read, shape)
        into[at : at + source.numel()].view(shape).copy_(source)
        at += source.numel()


def _pieces(copies: Sequence[Copy]) -> list[Piece]:
    found, at = [], 0
    for copy in copies:
        found.append(Piece(at, sizes(copy.box), copy.write))
        at += _elements([copy])
    return found


def _inside(copy: Copy, bucket: torch.Tensor, spans: Sequence[tuple[Copy, int]]) -> torch.Tensor:
    """The box of a copy, cut from the piece of a bucket that holds it."""
    for held, start in spans:
        if held.tensor == copy.tensor and all(
            a <= c and d <= b for (a, b), (c, d) in zip(held.box, copy.box, strict=True)
        ):
            whole = bucket[start : start + _elements([held])].view(sizes(held.box))
            cut = tuple(slice(c - a, d - a) for (a, _), (c, d) in zip(held.box, copy.box, strict=True))
            return whole[cut]
    raise AssertionError(f"{copy.tensor} {copy.box} is passed on, but did not arrive in this round")
