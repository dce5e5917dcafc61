"""Groups of named workers on an agent's slots. Worker classes are plain classes that know nothing of Ray.

A call that takes longer than ``cluster.call_timeout_s`` is taken for hung: every late rank writes the stacks of its
threads into its log, and the run ends with their names.
"""

import logging
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from megarl.backends.cluster import Cluster, WorkerLost
from megarl.backends.host import Host, dump_stacks
from megarl.backends.placement import Bundle, Placement, in_bundle

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 20
STACK_LINES = 60
STACKS_WITHIN_S = 20.0
LOOK_S = 10.0  # between looks at whether the nodes of those who are waited for are still there
PORT_ATTEMPTS = 3


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
        self._pids: list[int] = []
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

    def close(self, farewell: str | None = None, timeout_s: float = 30.0) -> None:
        """End this group's processes, and nobody else's.

        Every rank may first finish the method ``farewell``, for ``timeout_s``. What goes wrong in that is logged and
        not raised: it would hide the error for which a run is closed.
        """
        if farewell is not None and self._actors:
            self._say(farewell, timeout_s)
        for actor in self._actors:
            with suppress(RayError):  # the cluster is gone, and its processes with it
                ray.kill(actor, no_restart=True)
        self._actors = []

    def _say(self, farewell: str, timeout_s: float) -> None:
        try:
            asked = [actor.call.remote(farewell, ()) for actor in self._actors]
            done, late = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
            if late:
                log.warning("%s: %d ranks did not finish %s() in %g s", self.name, len(late), farewell, timeout_s)
            ray.get(done)
        except RayError as error:  # whatever a worker raises comes as one
            log.warning("%s: %s() failed: %s", self.name, farewell, error)

    def _start(
        self,
        cls: Callable[..., Any],
        kwargs: Sequence[Mapping[str, Any]],
        env: Mapping[str, str],
        owns_slots: bool,
        build_timeout_s: float,
    ) -> None:
        cluster = self._cluster
        visible = [{} if owns_slots else _gpu_env(seat) for seat in self._seats]
        process_env = {**_process_env(cluster), **env}
        slot = {} if not owns_slots else ({"num_gpus": 1} if cluster.device == "cuda" else {"resources": {"slot": 1}})
        for rank, seat in enumerate(self._seats):
            host = in_bundle(
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
        address, port, _ = found[0]
        self._pids = [pid for _, _, pid in found]
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

    def _gather(self, refs: list[Any], doing: str, timeout_s: float | None) -> list[Any]:
        """Results in rank order; a failure ends the wait, and the dead are blamed before those they took along."""
        limit_s = self._cluster.config.call_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        results: list[Any] = [None] * len(refs)
        failures: dict[int, RayError] = {}
        pending = list(refs)
        while pending:
            left_s = max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=min(left_s, LOOK_S))
            if not done:
                late = [ranks[ref] for ref in pending]
                if left_s > LOOK_S:
                    self._check_nodes(late, doing)
                    continue
                if failures:
                    break
                self._raise_late(late, doing, limit_s)
            rank = ranks[done[0]]
            try:
                results[rank] = ray.get(done[0])
            except RayError as error:
                failures[rank] = error
                if not isinstance(error, RayTaskError):
                    break
                # a peer's death shows first as a broken connection in the survivors: give the news time to arrive
                deadline = min(deadline, time.monotonic() + 3.0)
        if failures:
            self._raise_first(failures, doing)
        return results

    def _check_nodes(self, ranks: Sequence[int], doing: str) -> None:
        """WorkerLost where a node has left the cluster: what is asked to start there would wait for ever."""
        alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
        for rank in ranks:
            if (node := self._seats[rank][0].node).id not in alive:
                text = f"{self.name} rank {rank} of {self.world}: node {node} was lost during {doing}"
                raise WorkerLost(text, self.name)

    def _raise_late(self, ranks: Sequence[int], doing: str, limit_s: float) -> NoReturn:
        """TimeoutError, after the ranks have written down where they are."""
        if self._pids:
            asked = [
                in_bundle(dump_stacks, self._seats[rank][0], num_cpus=0).remote(self._pids[rank]) for rank in ranks
            ]
            ray.wait(asked, num_returns=len(asked), timeout=STACKS_WITHIN_S)
        late, log_file = ", ".join(str(rank) for rank in ranks), self.log_file(ranks[0])
        raise TimeoutError(
            f"{self.name}: rank {late} did not finish {doing} within {limit_s:g} s; "
            f"see {log_file}{_tail(log_file, STACK_LINES if self._pids else LOG_TAIL_LINES)}"
        )

    def _raise_first(self, failures: Mapping[int, RayError], doing: str) -> None:
        for rank, error in failures.items():
            if not isinstance(error, RayTaskError):
                log_file = self.log_file(rank)
                raise WorkerLost(
                    f"{self.name} rank {rank} of {self.world} on node {self._seats[rank][0].node} died during {doing}"
                    f"{_cause(error)}; log: {log_file}{_tail(log_file)}",
                    self.name,
                ) from error
        rank, error = min(failures.items())
        assert isinstance(error, RayTaskError)
        cause = error.cause if isinstance(error.cause, Exception) else error
        cause.add_note(f"in {self.name} rank {rank}, {doing}; log: {self.log_file(rank)}\n{error}")
        raise cause


def _process_env(cluster: Cluster) -> dict[str, str]:
    """Environment that must stand before a worker's first import: thread counts, module path, loopback, sockets."""
    threads = str(cluster.config.threads_per_rank)
    env = {
        "PYTHONPATH": os.pathsep.join(_own_module_path(sys.path)),
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


def _gpu_env(seat: Sequence[Bundle]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of the seat's GPUs: Ray hides them from an actor that takes none."""
    gpus = [bundle.gpu for bundle in seat if bundle.gpu is not None]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _own_module_path(search_path: Sequence[str]) -> list[str]:
    """The folders of ``search_path`` that no environment holds: checkouts, editable installs, test folders.

    What every Python of this installation finds by itself is left out: its standard library and site-packages. A prefix
    says nothing here: a checkout may well stand below /usr.
    """
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    found: list[str] = []
    for spelled in search_path:
        path = Path(os.path.abspath(spelled))
        here = path.resolve()
        installed = {"site-packages", "dist-packages"} & {*path.parts, *here.parts}
        if here.is_dir() and not installed and not any(here.is_relative_to(folder) for folder in standard):
            found.append(str(path))
    return list(dict.fromkeys(found))


def _cause(error: RayError) -> str:
    """What Ray says of a loss that is not a plain death."""
    if isinstance(error, RayActorError):
        return ""
    return f" ({type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0]})"


def _is_bind_race(error: BaseException) -> bool:
    """Somebody took rank 0's port between the look and the bind."""
    text = f"{error} {getattr(error, '__notes__', '')}"
    return "EADDRINUSE" in text or "ddress already in use" in text


def _tail(log_file: Path, count: int = LOG_TAIL_LINES) -> str:
    if not log_file.exists():
        return "\n(the log file is not visible from the driver's node)"
    lines = log_file.read_text(errors="replace").splitlines()[-count:]
    return "".join(f"\n  | {line}" for line in lines)
