"""From a training layout to an engine layout on the same GPUs: who copies which box whereto.

A GPU takes what it holds itself, then what its node holds, then what other nodes hold; among equals the sender that
has least to send. Nothing is random: every rank that makes the plan makes the same one.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megarl.backends.shards.boxes import Box, covered, meet, subtract, volume
from megarl.backends.shards.layout import Layout, Shard, View
from megarl.backends.shards.topology import Tier, Topology


@dataclass(frozen=True, slots=True)
class Copy:
    """``box`` of a tensor, from a rank's parameter to an engine rank's.

    ``forwarded``: the source is the engine's parameter of a rank of the same node, which received it before.
    """

    tensor: str
    box: Box
    source: int
    read: View
    destination: int
    write: View
    tier: Tier
    nbytes: int
    forwarded: bool = False


@dataclass(frozen=True)
class Plan:
    training: Layout
    engine: Layout
    topology: Topology
    copies: tuple[Copy, ...]

    @property
    def wire_bytes(self) -> int:
        """What travels between GPUs; a byte that is forwarded inside a node counts at each GPU that receives it."""
        return sum(copy.nbytes for copy in self.copies if copy.tier != "local")

    @property
    def lower_bound_bytes(self) -> int:
        return sum(lower_bound(self.training, self.engine, rank) for rank in range(self.engine.world))

    def received(self, tier: Tier) -> list[int]:
        """Bytes per rank that arrive there (local: that are copied there)."""
        found = [0] * self.world
        for copy in self.copies:
            if copy.tier == tier:
                found[copy.destination] += copy.nbytes
        return found

    def sent(self, tier: Tier) -> list[int]:
        found = [0] * self.world
        for copy in self.copies:
            if copy.tier == tier:
                found[copy.source] += copy.nbytes
        return found

    @property
    def world(self) -> int:
        return max(self.training.world, self.engine.world)

    def seconds(self) -> float:
        """Of the slowest rank: its links one after the other, each both ways at once, and its memory traffic.

        A byte that travels is read and written on either side (gathered into a bucket, scattered out of it), one that
        stays is read and written once.
        """
        arriving = {tier: self.received(tier) for tier in ("local", "nvlink", "network")}
        leaving = {tier: self.sent(tier) for tier in ("local", "nvlink", "network")}
        return max(
            2
            * (arriving["local"][rank] + sum(arriving[t][rank] + leaving[t][rank] for t in ("nvlink", "network")))
            / self.topology.memory_bytes_per_s
            + sum(
                max(arriving[tier][rank], leaving[tier][rank]) / self.topology.bandwidth(tier)
                for tier in ("nvlink", "network")
            )
            for rank in range(self.world)
        )

    def check(self) -> None:
        """Raise ValueError unless every element of every engine shard is written exactly once, from a holder of it."""
        written: dict[tuple[int, str], list[Copy]] = defaultdict(list)
        for copy in self.copies:
            _check_source(self, copy)
            written[copy.destination, copy.tensor].append(copy)
        for place, shards in self.engine.at.items():
            _check_written(place[0], shards, written.pop(place, ()))
        if written:
            rank, name = min(written)
            raise ValueError(f"{name}: engine rank {rank} holds nothing of it, but a copy goes there")

    def key(self) -> str:
        """Equal for ranks that made the same plan."""
        return hashlib.sha256(repr(self.copies).encode()).hexdigest()


def lower_bound(training: Layout, engine: Layout, rank: int) -> int:
    """Bytes of an engine rank's shards that its GPU does not hold in training: no plan can move fewer there."""
    held: dict[str, set[Box]] = defaultdict(set)
    if rank < training.world:
        for shard in training.shards[rank]:
            held[shard.tensor].add(shard.box)
    return sum(
        (volume(shard.box) - covered(shard.box, frozenset(held[shard.tensor]))) * engine.tensors[shard.tensor].itemsize
        for shard in engine.shards[rank]
    )


def make_plan(training: Layout, engine: Layout, topology: Topology) -> Plan:
    """Raises ValueError, naming the tensor, where nobody holds what an engine rank needs, or it holds a box twice."""
    planner = _Planner(training, engine, topology)
    copies = [copy for name in engine.tensors for copy in planner.tensor(name)]
    return Plan(training, engine, topology, tuple(copies))


@dataclass
class _Planner:
    training: Layout
    engine: Layout
    topology: Topology
    busy: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # seconds that a rank sends
    waits: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # seconds that the network feeds a rank

    def tensor(self, name: str) -> Iterator[Copy]:
        mine, theirs = self.training.tensors.get(name), self.engine.tensors[name]
        if mine != theirs:
            raise ValueError(f"{name}: the engine has {theirs}, training has {mine}")
        wanted = self.engine.holders.get(name, ())
        if len({rank for rank, _ in wanted}) < len(wanted):
            self._check_disjoint(name, wanted)
        sources = self.training.holders.get(name, ())
        arrived: dict[int, list[tuple[int, Shard]]] = defaultdict(list)  # node -> what its ranks got by the network
        for rank, shard in sorted(wanted, key=lambda held: (self.waits[held[0]], held[0])):
            left = [shard.box]
            for copy in self._take(left, rank, shard, sources, arrived[self.topology.node(rank)]):
                if copy.tier == "network" and self.topology.forwards:
                    view = copy.write
                    arrived[self.topology.node(rank)].append(
                        (rank, Shard(name, copy.box, view.param, view.offset, view.strides))
                    )
                yield copy
            if left:
                raise ValueError(f"{name}: no training rank holds {left[0]}, which engine rank {rank} needs")

    def _check_disjoint(self, name: str, wanted: Sequence[tuple[int, Shard]]) -> None:
        boxes: dict[int, list[Box]] = defaultdict(list)
        for rank, shard in wanted:
            if any(meet(shard.box, other) for other in boxes[rank]):
                raise ValueError(f"{name}: engine rank {rank} holds {shard.box} twice")
            boxes[rank].append(shard.box)

    def _take(
        self,
        left: list[Box],
        rank: int,
        shard: Shard,
        sources: Sequence[tuple[int, Shard]],
        arrived: Sequence[tuple[int, Shard]],
    ) -> Iterator[Copy]:
        """Copies of what is ``left`` of a shard, nearest sources first; what they bring is taken off ``left``."""
        by_tier: dict[Tier, list[tuple[int, Shard]]] = defaultdict(list)
        for source, held in sources:
            by_tier[self.topology.tier(source, rank)].append((source, held))
        stages: list[tuple[Tier, Sequence[tuple[int, Shard]], bool]] = [
            ("local", by_tier["local"], False),
            ("nvlink", by_tier["nvlink"], False),
            ("nvlink", arrived, True),
            ("network", by_tier["network"], False),
        ]
        for tier, candidates, forwarded in stages:
            if not left:
                return
            for source, held in sorted(candidates, key=lambda c: (self.busy[c[0]], c[0])):
                yield from self._from(left, rank, shard, source, held, tier, forwarded)

    def _from(
        self, left: list[Box], rank: int, shard: Shard, source: int, held: Shard, tier: Tier, forwarded: bool
    ) -> Iterator[Copy]:
        itemsize = self.engine.tensors[shard.tensor].itemsize
        for piece in list(left):
            box = meet(piece, held.box)
            if box is None:
                continue
            left.remove(piece)
            left += subtract(piece, box)
            nbytes = volume(box) * itemsize
            if tier != "local":
                seconds = nbytes / self.topology.bandwidth(tier)
                self.busy[source] += seconds
                self.waits[rank] += seconds if tier == "network" else 0.0
            yield Copy(
                shard.tensor, box, source, held.view(box), rank, shard.view(box), tier, nbytes, forwarded=forwarded
            )


def _check_source(plan: Plan, copy: Copy) -> None:
    if copy.tier != plan.topology.tier(copy.source, copy.destination):
        raise ValueError(f"{copy.tensor}: rank {copy.source} to {copy.destination} is not {copy.tier}")
    side = plan.engine if copy.forwarded else plan.training
    held = side.at.get((copy.source, copy.tensor), ())
    if not any(meet(s.box, copy.box) == copy.box and s.view(copy.box) == copy.read for s in held):
        raise ValueError(f"{copy.tensor}: rank {copy.source} does not hold {copy.box} where the copy reads it")


def _check_written(rank: int, shards: Sequence[Shard], copies: Sequence[Copy]) -> None:
    name = shards[0].tensor
    for index, copy in enumerate(copies):
        if not any(meet(copy.box, s.box) == copy.box and s.view(copy.box) == copy.write for s in shards):
            raise ValueError(f"{name}: {copy.box} is written to the wrong place of engine rank {rank}")
        if any(meet(copy.box, other.box) for other in copies[:index]):
            raise ValueError(f"{name}: {copy.box} is written twice at engine rank {rank}")
    if sum(volume(copy.box) for copy in copies) != sum(volume(shard.box) for shard in shards):
        raise ValueError(f"{name}: not all of what engine rank {rank} holds of it is written")
