"""Before anything heavy is built: do the nodes of a run reach each other by collectives, and how fast?"""

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from megarl.backends.cluster import Device
from megarl.backends.placement import Bundle, Placement
from megarl.backends.workers import WorkerGroup

NBYTES = 64 << 20
TIMEOUT_S = 30.0
PAIR_S = 10.0
MOST_PAIRS = 28  # of eight nodes; beyond that only those with the first


class Prober:
    """One rank, on one node: a process group that is made, used once and ended."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def all_reduce(self, nbytes: int, timeout_s: float) -> float:
        """Seconds of one all-reduce of so many bytes, of the faster of two; raises where the others do not come."""
        import torch  # here, since the driver imports this file, and a worker before its thread counts are set
        import torch.distributed as dist

        backend = "nccl" if self._device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        data = torch.ones(nbytes // 4, device=self._device)
        seconds, total = [], 0.0
        for _ in range(3):  # the first one makes the connections
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(data)
            total = data[0].item()  # waits for the device
            seconds.append(time.perf_counter() - start)
        world = int(os.environ["WORLD_SIZE"])
        if total != float(world**3):
            raise RuntimeError(f"three all-reduces of ones over {world} nodes gave {total:g}, not {world**3}")
        dist.destroy_process_group()
        return min(seconds[1:])


def check_network(placements: Mapping[str, Placement]) -> str | None:
    """One line about bandwidth; None where the run has one node. ConnectionError names nodes that do not meet.

    One rank per node, on a slot that the run has been given, gone before the policies come.
    """
    first: dict[str, Bundle] = {}
    for placement in placements.values():
        for bundle in placement.bundles:
            first.setdefault(bundle.node.id, bundle)
    seats, cluster = list(first.values()), next(iter(placements.values())).cluster
    if len(seats) < 2:
        return None
    whole = Placement(cluster, "network", tuple(seats))
    try:
        seconds = _all_reduce(whole, NBYTES, TIMEOUT_S)
    except (TimeoutError, RuntimeError) as error:  # torch's own, or a rank that died
        pairs = list(itertools.combinations(seats, 2))
        pairs = pairs if len(pairs) <= MOST_PAIRS else [(seats[0], other) for other in seats[1:]]
        apart = [pair for pair in pairs if not _reach(Placement(cluster, "network", pair))]
        named = "; ".join(f"{one.node} and {other.node}" for one, other in apart)
        why = named or f"all pairs do, all {len(seats)} together do not"
        text = f"network: nodes do not reach each other by collectives: {why} ({_first_line(error)})"
        raise ConnectionError(text) from error
    rate = 2 * (len(seats) - 1) / len(seats) * NBYTES / max(seconds)
    kind = "NCCL" if cluster.device == "cuda" else "gloo"
    return f"network: {len(seats)} nodes, an all-reduce of {NBYTES >> 20} MiB by {kind} at {rate / 1e9:.2f} GB/s"


def _all_reduce(placement: Placement, nbytes: int, timeout_s: float) -> Sequence[float]:
    world = len(placement.bundles)
    group = WorkerGroup(placement, "network", Prober, [{"device": placement.cluster.device}] * world)
    try:
        return group.call_all("all_reduce", nbytes, timeout_s, timeout_s=timeout_s + 10.0)
    finally:
        group.close()


def _reach(pair: Placement) -> bool:
    try:
        _all_reduce(pair, 4, PAIR_S)
    except (TimeoutError, RuntimeError):
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
