"""A connected Ray cluster: found or started, and told apart from a neighbour's.

A slot is a GPU, or on CPU the seat of one process; an agent owns a set of slots (``placement``), and its policy and its
engine (``workers``) share them.
"""

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from megarl.backends.patches import loopback_only
from megarl.backends.scratch import RANDOM_DIGITS, RAY, Scratch, fresh, sweep
from megarl.settings import ClusterConfig

Device = Literal["cuda", "cpu"]
GROUP_LABEL = "megarl.io/group"  # launch/node.py gives it to the nodes of a heterogeneous job
RESOURCES: dict[Device, str] = {"cuda": "GPU", "cpu": "slot"}  # what Ray calls a slot

# An AF_UNIX path holds 107 bytes, and Ray appends "/session_<date>_<time>_<us>_<pid>/sockets/plasma_store".
SOCKET_PATH_LIMIT = 107
RAY_SOCKET_SUFFIX = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
START_ATTEMPTS = 3


class WorkerLost(RuntimeError):
    """A worker process died; the message names agent, rank, node and log file and ends with the log's last lines."""

    def __init__(self, message: str, group: str) -> None:
        super().__init__(message)
        self.group = group  # of workers, e.g. qwen/engine


@dataclass(frozen=True, slots=True)
class Node:
    """One machine (one raylet) of the cluster."""

    id: str
    address: str
    slots: int
    group: str | None = None  # of the nodes of one kind, in a job of several kinds

    def __str__(self) -> str:
        return f"{self.address}/{self.id[:6]}"


@dataclass(slots=True)
class Cluster:
    """A connected Ray cluster: the device was decided here, once, for everybody."""

    device: Device
    config: ClusterConfig
    run_dir: Path
    nodes: tuple[Node, ...]
    driver_node: str  # id of the node that this process is on
    scratch: Scratch | None  # sockets and logs of a cluster of our own; None: joined
    groups: list[PlacementGroup] = field(default_factory=list)

    @property
    def resource(self) -> str:
        return RESOURCES[self.device]

    @property
    def temp_dir(self) -> Path | None:
        return self.scratch.path if self.scratch else None

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"

    def close(self) -> None:
        """Give the slots back and disconnect; a cluster of our own ends here. Each is done whatever became of the one
        before it.
        """
        with ExitStack() as last:
            if self.scratch is not None:
                last.callback(self.scratch.close)
            last.callback(ray.shutdown)
            for group in self.groups:
                last.callback(remove_placement_group, group)
            self.groups.clear()


def connect(cfg: ClusterConfig, run_dir: Path) -> Cluster:
    """A cluster of our own on loopback where ``cfg.address`` is null, else the one at that address.

    RAY_ADDRESS is never read: on a shared node it may belong to a neighbour.
    The device of a cluster that is joined follows from its resources: the driver may sit on a node without a GPU.
    Raises ValueError where nobody answers at the address, and when fewer than ``cfg.nodes`` nodes come up within
    ``cfg.start_timeout_s``; nothing is left running then.
    """
    run_dir = run_dir.resolve()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    if cfg.address is None and cfg.nodes > 1:
        raise ValueError(f"cluster.nodes={cfg.nodes} needs cluster.address: a cluster of one's own has one node")
    with ExitStack() as undo:
        scratch = None
        device: Device | None = None if cfg.device == "auto" else cfg.device
        if cfg.address is None:
            device = _own_device(cfg.device)
            scratch = _short_temp_dir()
            undo.callback(scratch.close)
            undo.callback(ray.shutdown)
            _start(cfg, device, scratch.path)
        else:
            _join(cfg.address, cfg.start_timeout_s)
            undo.callback(ray.shutdown)
        device, nodes = _wait_for_nodes(cfg, device)
        undo.pop_all()
    here = ray.get_runtime_context().get_node_id()
    return Cluster(device=device, config=cfg, run_dir=run_dir, nodes=nodes, driver_node=here, scratch=scratch)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts handlers of its own in place of the driver's, which exit or abort it unseen: put the driver's back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _join(address: str, timeout_s: float) -> None:
    _wait_for_port(address, timeout_s)
    try:
        with _own_signals():
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cluster.address={address}: no Ray cluster can be joined there ({reason})") from error


def _wait_for_port(address: str, timeout_s: float) -> None:
    """Until somebody listens at the address; Ray itself would try for minutes and not say why."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"cluster.address={address} is no host:port")
    if host in ("localhost", "127.0.0.1"):
        host = ray.util.get_node_ip_address()  # as Ray reads it
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"cluster.address={address}: nobody answered there in {timeout_s:g} s ({error}); "
                    "null starts a cluster of the run's own"
                ) from error
        time.sleep(0.2)


def _start(cfg: ClusterConfig, device: Device, temp_dir: Path) -> None:
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


def _start_ray(**settings: Any) -> None:
    """``ray.init``, tried again where its raylet was late: Ray allows it 30 s, which a busy machine may exceed."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with loopback_only(), _own_signals():
                ray.init(**settings)
            return
        except Exception as error:  # Ray raises this very class there, and its subclasses elsewhere
            if type(error) is not Exception or attempt == START_ATTEMPTS:
                raise
            ray.shutdown()


def _own_device(wanted: Literal["auto", "cuda", "cpu"]) -> Device:
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


def _short_temp_dir() -> Scratch:
    """A fresh directory short enough for Ray's sockets, in TMPDIR, /tmp or /dev/shm; those of dead drivers go."""
    limit = SOCKET_PATH_LIMIT - RAY_SOCKET_SUFFIX
    tried = []
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm")):
        if len(os.fsencode(base)) + len(f"/{RAY}") + RANDOM_DIGITS > limit:
            tried.append(f"{base} is {len(os.fsencode(base))} bytes long")
        elif not os.access(base, os.W_OK):
            tried.append(f"{base} cannot be written")
        else:
            sweep(Path(base), RAY)
            return fresh(Path(base), RAY)
    raise ValueError(
        f"no temporary directory for Ray's sockets: their path may hold {SOCKET_PATH_LIMIT} bytes, so the "
        f"directory {limit}; {'; '.join(tried)}; set TMPDIR to a short one"
    )


def _object_store_bytes() -> int:
    """A tenth of the memory, at most 2 GB: rollouts and samples pass here, weights do not."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total // 10, 2_000_000_000)


def _wait_for_nodes(cfg: ClusterConfig, wanted: Device | None) -> tuple[Device, tuple[Node, ...]]:
    """The nodes with slots, once there are enough; with no device wanted, GPUs are where any node has one."""
    deadline = time.monotonic() + cfg.start_timeout_s
    while True:
        alive = [entry for entry in ray.nodes() if entry["Alive"]]
        device = wanted or ("cuda" if any(entry["Resources"].get("GPU") for entry in alive) else "cpu")
        resource = RESOURCES[device]
        nodes = [
            Node(
                entry["NodeID"],
                entry["NodeManagerAddress"],
                int(entry["Resources"].get(resource, 0)),
                entry.get("Labels", {}).get(GROUP_LABEL),
            )
            for entry in alive
        ]
        nodes.sort(key=lambda node: (node.address, node.id))
        ready = [node for node in nodes if node.slots > 0]
        if len(ready) >= cfg.nodes:
            return device, tuple(ready)
        if time.monotonic() > deadline:
            seen = ", ".join(f"{node}: {node.slots} {resource}" for node in nodes) or "none"
            raise ValueError(
                f"cluster.nodes={cfg.nodes} wanted, {len(ready)} with resource {resource} after "
                f"{cfg.start_timeout_s:g} s (nodes: {seen})"
            )
        time.sleep(0.2)
