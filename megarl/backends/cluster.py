"""Ray: the cluster, who sits where, and groups of named workers.

``connect`` -> ``place`` -> ``WorkerGroup``. A slot is a GPU, or on CPU the seat of one process; an agent owns a set of
slots and its policy and its engine share them. Worker classes are plain classes that know nothing of Ray.
"""

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray
from ray._private import ray_constants
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.backends.host import GpuProbe, Host
from megarl.settings import ClusterConfig

Device = Literal["cuda", "cpu"]

# An AF_UNIX path holds 107 bytes, and Ray appends "/session_<date>_<time>_<us>_<pid>/sockets/plasma_store".
SOCKET_PATH_LIMIT = 107
RAY_SOCKET_SUFFIX = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
LOG_TAIL_LINES = 20
PORT_ATTEMPTS = 3
START_ATTEMPTS = 3


class WorkerLost(RuntimeError):
    """A worker process died; the message names agent, rank, node and log file and ends with the log's last lines."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine (one raylet) of the cluster."""

    id: str
    address: str
    slots: int

    def __str__(self) -> str:
        return f"{self.address}/{self.id[:6]}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """One slot of a placement: bundle ``index`` of ``group``, on ``node``."""

    group: PlacementGroup
    index: int
    node: Node


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of one agent, in rank order."""

    cluster: "Cluster"
    agent: str
    bundles: tuple[Bundle, ...]

    def seats(self, world: int, slots_per_seat: int = 1) -> tuple[tuple[Bundle, ...], ...]:
        """The first ``world * slots_per_seat`` slots, cut into one run of bundles per worker."""
        need = world * slots_per_seat
        if need > len(self.bundles):
            raise ValueError(f"agent {self.agent}: {need} slots wanted, {len(self.bundles)} placed")
        return tuple(self.bundles[i : i + slots_per_seat] for i in range(0, need, slots_per_seat))


@dataclass(slots=True)
class Cluster:
    """A connected Ray cluster: the device was decided here, once, for everybody."""

    device: Device
    config: ClusterConfig
    run_dir: Path
    nodes: tuple[Node, ...]
    temp_dir: Path | None  # of a cluster of our own; None: joined
    groups: list[PlacementGroup] = field(default_factory=list)

    @property
    def resource(self) -> str:
        return "GPU" if self.device == "cuda" else "slot"

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"

    def close(self) -> None:
        """Give the slots back and disconnect; a cluster of our own ends here."""
        for group in self.groups:
            remove_placement_group(group)
        self.groups.clear()
        ray.shutdown()
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)


# ---------------------------------------------------------------- connecting


def connect(cfg: ClusterConfig, run_dir: Path) -> Cluster:
    """A cluster of our own on loopback where ``cfg.address`` is null, else the one at that address.

    RAY_ADDRESS is never read: on a shared node it may belong to a neighbour.
    Raises ValueError when fewer than ``cfg.nodes`` nodes come up within ``cfg.start_timeout_s``.
    """
    device = _device(cfg.device)
    run_dir = run_dir.resolve()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    if cfg.address is not None:
        ray.init(address=cfg.address, log_to_driver=False, logging_level=logging.WARNING)
        nodes = _wait_for_nodes(cfg, device)
        return Cluster(device=device, config=cfg, run_dir=run_dir, nodes=nodes, temp_dir=None)
    if cfg.nodes > 1:
        raise ValueError(f"cluster.nodes={cfg.nodes} needs cluster.address: a cluster of one's own has one node")
    temp_dir = _short_temp_dir()
    slots: dict[str, Any] = (
        {"num_gpus": min(cfg.gpus_per_node, _gpus())}
        if device == "cuda"
        else {"num_gpus": 0, "resources": {"slot": cfg.gpus_per_node}}
    )
    _start_ray(
        address="local",
        num_cpus=1,  # our actors ask for slots, not CPUs; Ray starts this many idle workers in advance
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=_object_store_bytes(),
        _node_ip_address="127.0.0.1",
        _temp_dir=str(temp_dir),
        _system_config={"worker_niceness": 0},  # ranks and engines are the job, not background work
        **slots,
    )
    nodes = _wait_for_nodes(cfg, device)
    return Cluster(device=device, config=cfg, run_dir=run_dir, nodes=nodes, temp_dir=temp_dir)


def _start_ray(**settings: Any) -> None:
    """``ray.init``, tried again where its raylet was late: Ray allows it 30 s, which a busy machine may exceed."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _loopback_only():
                ray.init(**settings)
            return
        except Exception as error:  # Ray raises this very class there, and its subclasses elsewhere
            if type(error) is not Exception or attempt == START_ATTEMPTS:
                raise
            ray.shutdown()


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Ray replaces 127.0.0.1 by an outside address, and then listens on all interfaces, unless clusters are off."""
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled


def _device(wanted: Literal["auto", "cuda", "cpu"]) -> Device:
    if wanted == "cpu":
        return "cpu"
    if _gpus() > 0:
        return "cuda"
    if wanted == "cuda":
        raise ValueError("cluster.device=cuda, but torch sees no CUDA device here; use cpu or auto")
    return "cpu"


def _gpus() -> int:
    import torch  # a worker imports this file before its thread counts are set: torch only where needed

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _short_temp_dir() -> Path:
    """A fresh directory short enough for Ray's sockets, in TMPDIR, /tmp or /dev/shm."""
    limit = SOCKET_PATH_LIMIT - RAY_SOCKET_SUFFIX
    tried = []
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm")):
        if len(os.fsencode(base)) + len("/mrl-12345678") > limit:
            tried.append(f"{base} is {len(os.fsencode(base))} bytes long")
        elif not os.access(base, os.W_OK):
            tried.append(f"{base} cannot be written")
        else:
            return Path(tempfile.mkdtemp(prefix="mrl-", dir=base))
    raise ValueError(
        f"no temporary directory for Ray's sockets: their path may hold {SOCKET_PATH_LIMIT} bytes, so the "
        f"directory {limit}; {'; '.join(tried)}; set TMPDIR to a short one"
    )


def _object_store_bytes() -> int:
    """A tenth of the memory, at most 2 GB: rollouts and samples pass here, weights do not."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total // 10, 2_000_000_000)


def _wait_for_nodes(cfg: ClusterConfig, device: Device) -> tuple[Node, ...]:
    deadline = time.monotonic() + cfg.start_timeout_s
    resource = "GPU" if device == "cuda" else "slot"
    while True:
        nodes = tuple(
            sorted(
                (
                    Node(entry["NodeID"], entry["NodeManagerAddress"], int(entry["Resources"].get(resource, 0)))
                    for entry in ray.nodes()
                    if entry["Alive"]
                ),
                key=lambda node: (node.address, node.id),
            )
        )
        ready = [node for node in nodes if node.slots > 0]
        if len(ready) >= cfg.nodes:
            return tuple(ready)
        if time.monotonic() > deadline:
            seen = ", ".join(f"{node}: {node.slots} {resource}" for node in nodes) or "none"
            ray.shutdown()
            raise ValueError(
                f"cluster.nodes={cfg.nodes} wanted, {len(ready)} with resource {resource} after "
                f"{cfg.start_timeout_s:g} s (nodes: {seen})"
            )
        time.sleep(0.2)


# ---------------------------------------------------------------- placement


def place(
    cluster: Cluster, slots_by_agent: Mapping[str, int], *, one_node: Mapping[str, int], timeout_s: float
) -> dict[str, Placement]:
    """Disjoint sets of slots, one bundle per slot, an agent's bundles in rank order.

    ``one_node[agent]``: so many consecutive slots must share a node (the larger tensor-parallel size).
    Raises ValueError, with wanted against available per node: at once where the nodes are too small, after
    ``timeout_s`` where somebody holds their slots.
    """
    deadline = time.monotonic() + timeout_s
    plan_nodes({node: node.slots for node in cluster.nodes}, slots_by_agent, one_node)
    chunks_by_agent = _plan_free(cluster, slots_by_agent, one_node, deadline)
    placements: dict[str, Placement] = {}
    for agent, chunks in chunks_by_agent.items():
        bundles: list[Bundle] = []
        for node, size in chunks:
            group = placement_group(
                [{cluster.resource: 1}] * size,
                strategy="STRICT_PACK",
                bundle_label_selector=[{"ray.io/node-id": node.id}] * size,
            )
            cluster.groups.append(group)
            if not group.wait(max(1.0, deadline - time.monotonic())):
                raise ValueError(
                    f"agent {agent}: {size} slots on node {node} were not granted within {timeout_s:g} s; "
                    + _wanted_against_available(_free_slots(cluster), slots_by_agent)
                )
            bundles += [Bundle(group, index, node) for index in range(size)]
        placements[agent] = Placement(cluster, agent, tuple(bundles))
    return placements


def _plan_free(
    cluster: Cluster, slots_by_agent: Mapping[str, int], one_node: Mapping[str, int], deadline: float
) -> dict[str, list[tuple[Node, int]]]:
    """A plan over the slots that are free; those of a job that has just ended take a moment to come back."""
    while True:
        try:
            return plan_nodes(_free_slots(cluster), slots_by_agent, one_node)
        except ValueError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def plan_nodes(
    free: Mapping[Node, int], slots_by_agent: Mapping[str, int], one_node: Mapping[str, int]
) -> dict[str, list[tuple[Node, int]]]:
    """Which agent gets how many slots of which node, in rank order; the largest agents choose first.

    An agent sits in the fullest node that holds it whole; one that fits in no node, or nowhere whole any more, is cut
    into pieces that are multiples of ``one_node[agent]``.
    """
    left = dict(free)
    largest = max(free.values(), default=0)
    for agent, size in one_node.items():
        if agent in slots_by_agent and size > largest:
            raise ValueError(
                f"agent {agent}: its tensor-parallel group wants {size} slots in one node, the largest node has "
                f"{largest} free; " + _wanted_against_available(free, slots_by_agent)
            )
    planned: dict[str, list[tuple[Node, int]]] = {}
    for agent in sorted(slots_by_agent, key=lambda name: -slots_by_agent[name]):
        want = slots_by_agent[agent]
        whole = [node for node in left if left[node] >= want]
        if whole:
            chunks = [(min(whole, key=lambda node: left[node]), want)]
        else:
            chunks = _cut(left, want, one_node.get(agent, 1))
        if sum(size for _, size in chunks) < want:
            raise ValueError(
                f"agent {agent}: {want} slots wanted (in runs of {one_node.get(agent, 1)} per node); "
                + _wanted_against_available(free, slots_by_agent)
            )
        for node, size in chunks:
            left[node] -= size
        planned[agent] = chunks
    return {agent: planned[agent] for agent in slots_by_agent}


def _cut(left: Mapping[Node, int], want: int, run: int) -> list[tuple[Node, int]]:
    """Pieces of whole runs from the emptiest nodes first; may hold fewer than ``want`` slots."""
    chunks = []
    for node in sorted(left, key=lambda node: -left[node]):
        size = min(left[node], want) // run * run
        if size:
            chunks.append((node, size))
            want -= size
    return chunks


def _free_slots(cluster: Cluster) -> dict[Node, int]:
    available = available_resources_per_node()
    return {node: int(available.get(node.id, {}).get(cluster.resource, 0)) for node in cluster.nodes}


def _wanted_against_available(free: Mapping[Node, int], slots_by_agent: Mapping[str, int]) -> str:
    wanted = ", ".join(f"{agent} {slots}" for agent, slots in slots_by_agent.items())
    per_node = ", ".join(f"{node} {slots}" for node, slots in free.items()) or "no node"
    return (
        f"wanted {sum(slots_by_agent.values())} slots ({wanted}), available {sum(free.values())} ({per_node}); "
        f"shrink the layouts or raise cluster.nodes x cluster.gpus_per_node"
    )


# ---------------------------------------------------------------- workers


class WorkerGroup:
    """Named workers on an agent's slots: ``WorkerGroup(placement, "qwen/policy", MegatronWorker, [kwargs] * 4)``.

    One rank per entry of ``kwargs``. Rank r is the Ray actor ``<name>/<r>`` and writes to
    ``<run>/logs/<name with - for />-<r>.log``. Before its class is built a rank finds RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in its environment. With ``owns_slots`` a rank takes its bundle's slot; without (engines, which share
    the policy's) it only sits in the same bundle and sees its slots' GPUs.
    """

    def __init__(
        self,
        placement: Placement,
        name: str,
        cls: Callable[..., Any],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        slots_per_rank: int = 1,
        env: Mapping[str, str] | None = None,
        owns_slots: bool = True,
        build_timeout_s: float = 900.0,
    ) -> None:
        """Return once every rank has been built. Raises WorkerLost, TimeoutError, or what the class itself raised."""
        if owns_slots and slots_per_rank != 1:
            raise ValueError(f"{name}: a rank that owns its slot has one, not {slots_per_rank}")
        self.name = name
        self.world = len(kwargs)
        self._cluster = placement.cluster
        self._seats = placement.seats(self.world, slots_per_rank)
        self._actors: list[Any] = []
        for attempt in range(PORT_ATTEMPTS):
            try:
                self._start(cls, kwargs, env or {}, owns_slots, build_timeout_s)
                return
            except BaseException as error:
                self.close()
                if not _is_bind_race(error) or attempt + 1 == PORT_ATTEMPTS:
                    raise

    def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """``method(*args)`` on every rank at once, results in rank order; the arguments are stored once."""
        shared = ray.put(args)
        return self._gather([actor.call.remote(method, shared) for actor in self._actors], f"{method}()", timeout_s)

    def call_each(self, method: str, args_per_rank: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list:
        """``method(*args_per_rank[r])`` on each rank r at once; a tuple given to several ranks is stored once."""
        if len(args_per_rank) != self.world:
            raise ValueError(f"{self.name}.{method}: arguments for {len(args_per_rank)} of {self.world} ranks")
        stored = {id(args): ray.put(args) for args in args_per_rank}
        return self._gather(
            [
                actor.call.remote(method, stored[id(args)])
                for actor, args in zip(self._actors, args_per_rank, strict=True)
            ],
            f"{method}()",
            timeout_s,
        )

    def log_file(self, rank: int) -> Path:
        return self._cluster.log_dir / f"{self.name.replace('/', '-')}-{rank}.log"

    def close(self) -> None:
        """End this group's processes, and nobody else's."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _start(
        self,
        cls: Callable[..., Any],
        kwargs: Sequence[Mapping[str, Any]],
        env: Mapping[str, str],
        owns_slots: bool,
        build_timeout_s: float,
    ) -> None:
        cluster = self._cluster
        visible = [{} if owns_slots else self._gpu_env(seat) for seat in self._seats]
        process_env = {**_process_env(cluster), **env}
        slot = {} if not owns_slots else ({"num_gpus": 1} if cluster.device == "cuda" else {"resources": {"slot": 1}})
        for rank, seat in enumerate(self._seats):
            host = _in_bundle(
                Host,
                seat[0],
                name=f"{self.name}/{rank}",
                num_cpus=0,
                runtime_env={"env_vars": process_env},
                **slot,
            )
            self._actors.append(host.remote(self.log_file(rank), visible[rank]))
        # on a busy machine importing Ray alone takes a while: the longer of the two deadlines
        start_s = max(build_timeout_s, cluster.config.start_timeout_s)
        found = self._gather([actor.where.remote() for actor in self._actors], "its start", start_s)
        address, port = found[0]
        self._gather(
            [
                actor.build.remote(
                    cls,
                    dict(kwargs[rank]),
                    {
                        "RANK": str(rank),
                        "WORLD_SIZE": str(self.world),
                        "MASTER_ADDR": address,
                        "MASTER_PORT": str(port),
                    },
                )
                for rank, actor in enumerate(self._actors)
            ],
            f"building {cls.__name__}",
            build_timeout_s,
        )

    def _gpu_env(self, seat: Sequence[Bundle]) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of the seat's GPUs: Ray hides them from an actor that takes none."""
        if self._cluster.device == "cpu":
            return {}
        ids = [gpu for bundle in seat for gpu in _bundle_gpus(bundle, self._cluster.config.start_timeout_s)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(ids)}

    def _gather(self, refs: list[Any], doing: str, timeout_s: float | None) -> list[Any]:
        """Results in rank order; a failure ends the wait, and the dead are blamed before those they took along."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        results: list[Any] = [None] * len(refs)
        failures: dict[int, RayActorError | RayTaskError] = {}
        pending = list(refs)
        while pending:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=wait_s)
            if not done:
                if failures:
                    break
                late = ", ".join(str(ranks[ref]) for ref in pending)
                raise TimeoutError(
                    f"{self.name}: rank {late} did not finish {doing} within {timeout_s:g} s; "
                    f"see {self.log_file(ranks[pending[0]])}{_tail(self.log_file(ranks[pending[0]]))}"
                )
            rank = ranks[done[0]]
            try:
                results[rank] = ray.get(done[0])
            except (RayActorError, RayTaskError) as error:
                failures[rank] = error
                if isinstance(error, RayActorError):
                    break
                # a peer's death shows first as a broken connection in the survivors: give the news time to arrive
                deadline = min(deadline or time.monotonic() + 3.0, time.monotonic() + 3.0)
        if failures:
            self._raise_first(failures, doing)
        return results

    def _raise_first(self, failures: Mapping[int, RayActorError | RayTaskError], doing: str) -> None:
        for rank, error in failures.items():
            if isinstance(error, RayActorError):
                log_file = self.log_file(rank)
                raise WorkerLost(
                    f"{self.name} rank {rank} of {self.world} on node {self._seats[rank][0].node} died during {doing}; "
                    f"log: {log_file}{_tail(log_file)}"
                ) from error
        rank, error = min(failures.items())
        assert isinstance(error, RayTaskError)
        cause = error.cause if isinstance(error.cause, Exception) else error
        cause.add_note(f"in {self.name} rank {rank}, {doing}; log: {self.log_file(rank)}\n{error}")
        raise cause


def _bundle_gpus(bundle: Bundle, timeout_s: float) -> list[str]:
    probe = _in_bundle(GpuProbe, bundle, num_cpus=0, num_gpus=1).remote()
    try:
        return ray.get(probe.ids.remote(), timeout=timeout_s)
    except GetTimeoutError as error:
        raise TimeoutError(f"GPU {bundle.index} of node {bundle.node} did not answer in {timeout_s:g} s") from error
    finally:
        ray.kill(probe, no_restart=True)


def _in_bundle(cls: type, bundle: Bundle, **options: Any) -> Any:
    """The Ray actor class of ``cls``, to be started in that bundle."""
    strategy = PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.index)
    actor: Any = ray.remote(cls)
    return actor.options(scheduling_strategy=strategy, **options)


def _process_env(cluster: Cluster) -> dict[str, str]:
    """Environment that must stand before a worker's first import: thread counts, module path, loopback, sockets."""
    threads = str(cluster.config.threads_per_rank)
    env = {
        "PYTHONPATH": os.pathsep.join(_own_module_path()),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cluster.temp_dir is not None:
        # vLLM and multiprocessing put their sockets into TMPDIR, which may be too long for them
        env["TMPDIR"] = str(cluster.temp_dir)
        env["GLOO_SOCKET_IFNAME"] = "lo"
        env["VLLM_HOST_IP"] = "127.0.0.1"
    return env


def _own_module_path() -> list[str]:
    """Where the driver finds modules that no environment holds: checkouts, editable installs, test folders."""
    environment = (sys.prefix, sys.base_prefix)
    return list(dict.fromkeys(os.path.abspath(path) for path in sys.path if not path.startswith(environment)))


def _is_bind_race(error: BaseException) -> bool:
    """Somebody took rank 0's port between the look and the bind."""
    text = f"{error} {getattr(error, '__notes__', '')}"
    return "EADDRINUSE" in text or "ddress already in use" in text


def _tail(log_file: Path) -> str:
    if not log_file.exists():
        return "\n(the log file is not visible from the driver's node)"
    lines = log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "".join(f"\n  | {line}" for line in lines)
