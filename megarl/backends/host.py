"""The worker's side of a group: the process that Ray starts, before it becomes a policy's rank or an engine."""

import faulthandler
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import ray

from megarl.backends.scratch import sweep_buckets

FIRST_UNPRIVILEGED = 1024
PORTS = range(20000, 32768)  # where the kernel's own range leaves no room below it


class Host:
    """The actor: one process that holds one object of a plain class and calls its methods by name."""

    def __init__(self, log_file: Path, env: Mapping[str, str]) -> None:
        _redirect_output(log_file)
        _end_with_parent()
        sweep_buckets()  # here, because every node has its own
        os.environ.update(env)
        self._worker: Any = None

    def where(self) -> tuple[str, int, int]:
        """Address of this node, a port on it that was free a moment ago, and this process there."""
        return ray.util.get_node_ip_address(), free_port(), os.getpid()

    def build(self, cls: Callable[..., Any], kwargs: Mapping[str, Any], env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._worker = cls(**kwargs)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._worker, method)(*args)


def gpu_ids() -> list[str]:
    """The GPUs that Ray has given to the task that asks, as CUDA_VISIBLE_DEVICES spells them."""
    return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def dump_stacks(pid: int) -> None:
    """Let a Host on this node write the stacks of its threads into its log; whatever it is doing, it will."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
        time.sleep(1.0)  # the signal is taken between two instructions of Python, or at once in a system call


def _end_with_parent() -> None:
    """Follow the raylet that started this process: Ray's own notice misses a rank whose main thread is in a collective,
    and a rank that outlives its run holds a GPU."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _redirect_output(log_file: Path) -> None:
    """Send this process's stdout and stderr, those of C code and children too, to ``log_file``."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - it lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR2, sys.stderr, all_threads=True)


def free_port() -> int:
    """A TCP port, free now, where the kernel draws none for outgoing connections if there is such a place."""
    ports = _ports(int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    draw = random.Random(os.getpid() ^ time.time_ns())
    for _ in range(200):
        port = draw.choice(ports)
        with closing(socket.socket()) as probe:
            probe.settimeout(1.0)  # a listener whose queue is full does not answer
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                continue
        with closing(socket.socket()) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port found from {ports.start} to {ports.stop - 1}")


def _ports(first_ephemeral: int) -> range:
    """Ports below the kernel's own, or, where too few of those may be used by everybody, ``PORTS``."""
    first = min(PORTS.start, first_ephemeral - 1000)
    return range(first, first_ephemeral) if first >= FIRST_UNPRIVILEGED else PORTS
