"""The driver's handle on a Megatron policy: packs, sends, puts results back to their rollouts.

Nothing here imports Megatron: the driver stays light.
"""

import itertools
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megarl import packing
from megarl.backends.buckets import roomy_folder
from megarl.backends.exchange import Moved, Piece
from megarl.backends.megatron.order import context_rows
from megarl.backends.megatron.records import Coordinates, UpdateResult
from megarl.backends.protocols import WeightBucket
from megarl.backends.scratch import BUCKET
from megarl.backends.shards import layout as shards
from megarl.backends.shards.topology import Topology
from megarl.backends.updates import KERNELS, take_steps
from megarl.backends.vocabulary import check_rollouts
from megarl.loss import summarize
from megarl.settings import AgentConfig, BatchConfig, LossConfig
from megarl.types import Metrics, Microbatch, Need, Rollout, RolloutKey, Sample, TokenStats


class Ranks(Protocol):
    """What the policy needs of a worker group: calls on all ranks at once, results in rank order."""

    def call_all(self, method: str, *args: Any) -> list[Any]: ...
    def call_each(self, method: str, args_per_rank: Sequence[tuple[Any, ...]]) -> list[Any]: ...
    def close(self) -> None: ...


def make_worker(**kwargs: Any) -> Any:
    """A ``MegatronWorker``, in the process that is to be a rank: for a worker group in place of the class."""
    from megarl.backends.megatron import cpu

    cpu.enable()  # ahead of megatron-core, whose import decides on compilation
    from megarl.backends.megatron.worker import MegatronWorker

    return MegatronWorker(**kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One rank's buckets of one round: files, and the pieces of engine parameters in each; and its counts so far."""

    files: list[tuple[str, list[Piece]]]
    moved: Moved


class MegatronPolicy:
    """A ``Policy`` whose ranks are ``make_worker`` processes of ``agent.layout``.

    ``writers`` are the ranks that write exported weights: one per node that hosts the policy. ``bucket_dir`` is where;
    None: shared memory where it has room, else the temporary directory.
    """

    def __init__(
        self,
        agent: AgentConfig,
        ranks: Ranks,
        *,
        tokens_per_microbatch: int,
        writers: Sequence[int] = (0,),
        bucket_dir: Path | None = None,
    ) -> None:
        self.version = 0
        self._layout = agent.layout
        self._round_bytes = 0  # of the files of one round of planned refits
        self._ranks = ranks
        self._tokens = tokens_per_microbatch
        self._writers = frozenset(writers)
        self._bucket_dir = bucket_dir
        self._places: list[Coordinates] = ranks.call_all("coordinates")
        self._vocab_size: int = ranks.call_all("vocab_size")[0]

    def measure(self, rollouts: Sequence[Rollout], needs: frozenset[Need]) -> dict[RolloutKey, TokenStats]:
        """Statistics of every rollout's response tokens under the present weights; {} for no rollouts."""
        if not rollouts:
            return {}
        check_rollouts(rollouts, self._vocab_size)
        shards = self._pack(packing.from_rollouts(rollouts), self._tokens)
        answers = self._ranks.call_each("measure", self._per_rank([(shard, needs) for shard in shards]))
        found: dict[int, dict[str, np.ndarray]] = {}
        for dp, shard in enumerate(shards):
            parts = [(p.cp, a) for p, a in zip(self._places, answers, strict=True) if a and p.dp == dp]
            for name in parts[0][1][0]:
                values = [self._joined(m, [(cp, part[i][name]) for cp, part in parts]) for i, m in enumerate(shard)]
                for index, value in packing.unpack(shard, values).items():
                    found.setdefault(index, {})[name] = value
        return {r.key: TokenStats(**found[i]) for i, r in enumerate(rollouts)}

    def update(
        self, samples: Sequence[Sample], loss: LossConfig, batch: BatchConfig, learning_rates: Sequence[float]
    ) -> Metrics:
        """See Policy."""
        report = take_steps(samples, learning_rates, lambda part, lr: self._step(part, loss, batch, lr))
        self.version += 1
        return report

    def _step(self, part: Sequence[Sample], loss: LossConfig, batch: BatchConfig, lr: float) -> Metrics:
        shards = self._pack(part, batch.tokens_per_microbatch)
        tokens, sequences = packing.response_tokens(part), packing.num_sequences(part)
        results: list[UpdateResult] = self._ranks.call_each(
            "update", self._per_rank([(shard, loss, tokens, sequences, lr) for shard in shards])
        )
        told = [r.sums for r in results if r.sums]
        sums = {name: sum(one[name] for one in told) for name in told[0]}
        return summarize(sums) | {
            "grad_norm": results[0].grad_norm,
            "skipped_steps": 0.0 if results[0].applied else 1.0,
            "tokens": float(tokens),
            "microbatches": float(len(shards[0])),
            **_largest([r.differences for r in results]),
        }

    def weights(self, bucket_bytes: int) -> Generator[WeightBucket, None, None]:
        """All weights under their Hugging Face names, bucket by bucket; a bucket's file goes when the next is asked."""
        largest = max(self._ranks.call_all("begin_export"))  # a tensor larger than a bucket has a file of its own
        directory = self._bucket_dir or roomy_folder(max(bucket_bytes, largest))
        stem = f"{BUCKET}{uuid.uuid4().hex}"
        for count in itertools.count():
            path = directory / f"{stem}-{count}" / "bucket.safetensors"
            writes = [(str(path), bucket_bytes, rank in self._writers) for rank in range(self._layout.world)]
            names, nbytes = self._ranks.call_each("next_bucket", writes)[0]
            if not names:
                return
            try:
                yield WeightBucket(path=path, names=names, nbytes=nbytes)
            finally:
                self._ranks.call_all("remove_bucket")

    def open_plan(self, training: shards.Layout, engine: shards.Layout, topology: Topology, bucket_bytes: int) -> None:
        """Every rank makes the plan of refits to that engine. Raises ValueError where it cannot be carried out."""
        self._round_bytes = 2 * bucket_bytes * self._layout.world  # what arrives, and what is passed on
        keys = self._ranks.call_all("open_plan", training, engine, topology, bucket_bytes)
        assert len(set(keys)) == 1, "ranks made different plans"

    def planned_rounds(self) -> Generator[list[Parcel], None, None]:
        """Round by round what each rank has for the engine on its GPU; the files go when the next round is asked."""
        self._ranks.call_all("begin_plan")
        directory = self._bucket_dir or roomy_folder(self._round_bytes)
        stem = f"{BUCKET}{uuid.uuid4().hex}"
        try:
            for count in itertools.count():
                folders = [(str(directory / f"{stem}-{count}-{rank}"),) for rank in range(self._layout.world)]
                arrived = self._ranks.call_each("next_round", folders)
                if arrived[0][0] is None:
                    return
                yield [Parcel(files=files, moved=moved) for files, moved in arrived]
        finally:
            self._ranks.call_all("remove_round")

    def save(self, path: Path) -> None:
        """Weights, optimizer and version into ``path``, a directory (made if missing) that all ranks can write to."""
        self.begin_save(path)
        self.end_save()

    def begin_save(self, path: Path) -> None:
        """The same, written in the background: all that follows may change what was saved."""
        path.mkdir(parents=True, exist_ok=True)
        self._ranks.call_all("begin_save", str(path), self.version)

    def end_save(self) -> None:
        """Wait until what was begun is on disk."""
        self._ranks.call_all("end_save")

    def load(self, path: Path) -> None:
        """What was saved, also by another layout."""
        self.version = self._ranks.call_all("load", str(path))[0]

    def onload(self) -> None:
        self._ranks.call_all("onload")

    def offload(self) -> None:
        self._ranks.call_all("offload")

    def close(self) -> None:
        self._ranks.close()

    def _pack(self, samples: Sequence[Sample], tokens: int) -> list[list[Microbatch]]:
        layout = self._layout
        return packing.pack(
            samples,
            dp=layout.dp,
            tokens_per_microbatch=tokens * layout.cp,  # the budget is per rank; a pack is shared by cp of them
            sequence_multiple=layout.sequence_multiple,
            total_multiple=layout.total_multiple,
        )

    def _per_rank(self, per_dp: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The arguments of each rank; ranks that share a data-parallel rank share the tuple, so it travels once."""
        return [per_dp[place.dp] for place in self._places]

    def _joined(self, microbatch: Microbatch, parts: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
        """float32[T] from the slices of all context-parallel ranks."""
        whole = np.empty(microbatch.tokens, np.float32)
        for cp, part in parts:
            whole[context_rows(microbatch.cu_seqlens, self._layout.cp, cp)] = part
        return whole


def _largest(differences: Sequence[dict[str, float]]) -> Metrics:
    """Over all ranks; a NaN, which compares with nothing, is kept."""
    found: dict[str, list[float]] = {}
    for one in differences:
        for name, value in one.items():
            found.setdefault(KERNELS + name, []).append(value)
    return {name: float(np.max(values)) for name, values in found.items()}
