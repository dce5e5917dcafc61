"""A connected Ray cluster: found or started, and told apart from a neighbour's.

A slot is a GPU, or on CPU the seat of one process; an agent owns a set of slots (``placement``), and its policy and its
engine (``workers``) share them.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, remove_placement_group

from megarl.settings import ClusterConfig

Device = Literal["cuda", "cpu"]

# An AF_UNIX path holds 107 bytes, and Ray appends "/session_<date>_<time>_<us>_<pid>/sockets/plasma_store".
SOCKET_PATH_LIMIT = 107
RAY_SOCKET_SUFFIX = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
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
