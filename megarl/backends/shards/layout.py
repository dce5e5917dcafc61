"""Which box of which Hugging Face tensor stands where in which rank's parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megarl.backends.shards.boxes import Box, sizes, volume


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A parameter under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    itemsize: int  # bytes of an element

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """A strided region of a parameter's storage, in elements; axes in the order of the logical tensor's."""

    param: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """``box`` of a tensor: element ``i`` of the box stands at offset + sum(i * strides) of the parameter."""

    tensor: str
    box: Box
    param: str
    offset: int
    strides: tuple[int, ...]

    def view(self, box: Box) -> View:
        """Where a box inside this one stands."""
        if box == self.box:
            return View(self.param, self.offset, self.strides)
        moved = sum(
            (start - origin) * stride
            for (start, _), (origin, _), stride in zip(box, self.box, self.strides, strict=True)
        )
        return View(self.param, self.offset + moved, self.strides)


@dataclass(frozen=True)
class Layout:
    """One side's shards and the shapes of its parameters, per rank.

    Elements of a parameter that no shard covers are padding: they belong to no tensor and hold zeros.
    """

    tensors: Mapping[str, Tensor]
    shards: tuple[tuple[Shard, ...], ...]
    params: tuple[Mapping[str, tuple[int, ...]], ...]

    @property
    def world(self) -> int:
        return len(self.shards)

    @cached_property
    def holders(self) -> Mapping[str, tuple[tuple[int, Shard], ...]]:
        """Tensor -> (rank, shard), ranks ascending."""
        found: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
        for rank, shards in enumerate(self.shards):
            for shard in shards:
                found[shard.tensor].append((rank, shard))
        return {name: tuple(held) for name, held in found.items()}

    @cached_property
    def at(self) -> Mapping[tuple[int, str], tuple[Shard, ...]]:
        """(rank, tensor) -> its shards."""
        found: dict[tuple[int, str], list[Shard]] = defaultdict(list)
        for rank, shards in enumerate(self.shards):
            for shard in shards:
                found[rank, shard.tensor].append(shard)
        return {place: tuple(held) for place, held in found.items()}

    @property
    def nbytes(self) -> int:
        """Of all tensors, each once."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def held_bytes(self, rank: int) -> int:
        """Of a rank's shards; padding is not counted."""
        return sum(volume(shard.box) * self.tensors[shard.tensor].itemsize for shard in self.shards[rank])

    def elements(self, rank: int) -> dict[str, int]:
        """Parameter -> elements that shards cover."""
        used = dict.fromkeys(self.params[rank], 0)
        for shard in self.shards[rank]:
            used[shard.param] += volume(shard.box)
        return used

    def padding(self, rank: int) -> dict[str, int]:
        """Parameter -> elements that no tensor owns, where there are any."""
        used = self.elements(rank)
        left = {name: prod(shape) - used[name] for name, shape in self.params[rank].items()}
        return {name: count for name, count in left.items() if count}

    def check(self) -> None:
        """Raise ValueError for a shard outside its tensor or its parameter, and for a parameter with too many."""
        for rank, shards in enumerate(self.shards):
            for shard in shards:
                self._check_shard(rank, shard)
            if over := [name for name, count in self.padding(rank).items() if count < 0]:
                raise ValueError(
                    f"rank {rank}: shards of {over[0]} hold more elements than it has: two of them overlap"
                )

    def _check_shard(self, rank: int, shard: Shard) -> None:
        shape = self.tensors[shard.tensor].shape
        if len(shape) != len(shard.box) or any(
            not 0 <= start < stop <= size for (start, stop), size in zip(shard.box, shape, strict=True)
        ):
            raise ValueError(f"rank {rank}: {shard.box} is no box of {shard.tensor}, which has shape {shape}")
        last = shard.offset + sum((n - 1) * stride for n, stride in zip(sizes(shard.box), shard.strides, strict=True))
        if shard.offset < 0 or last >= prod(self.params[rank][shard.param]):
            raise ValueError(
                f"rank {rank}: {shard.tensor} {shard.box} ends at element {last} of {shard.param}, which has "
                f"{prod(self.params[rank][shard.param])}"
            )


@dataclass(frozen=True, slots=True)
class Run:
    """Rows (or columns) start..stop of a tensor, at ``at`` of the local parameter."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Split:
    """How a rank holds one tensor: runs along ``axis`` of a local parameter that has ``size`` there.

    ``index`` of ``count``: which matrix of a stack of them, where the parameter is one.
    """

    runs: tuple[Run, ...]
    axis: int
    size: int
    index: int = 0
    count: int | None = None

    def param_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        local = tuple(self.size if axis == self.axis else length for axis, length in enumerate(shape))
        return local if self.count is None else (self.count, *local)

    def shards(self, tensor: Tensor, param: str) -> list[Shard]:
        local = self.param_shape(tensor.shape)[-len(tensor.shape) :]
        strides = tuple(prod(local[axis + 1 :]) for axis in range(len(local)))
        base = self.index * prod(local)
        return [
            Shard(
                tensor.name,
                tuple(
                    (run.start, run.stop) if axis == self.axis else (0, length)
                    for axis, length in enumerate(tensor.shape)
                ),
                param,
                base + run.at * strides[self.axis],
                strides,
            )
            for run in self.runs
        ]
