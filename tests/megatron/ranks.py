"""Rank processes on this machine: what the policy tests use in place of Ray. Real Megatron over gloo in each."""

import logging
import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

START_S = 120.0
CALL_S = 120.0


class Pool:
    """Processes that become the ranks of one policy after another; their imports are paid once."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.megatron.preload"])
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ranks(self, **kwargs: Any) -> "LocalRanks":
        """The ranks of a new policy: ``make_worker(**kwargs)`` in as many processes as its layout asks for."""
        return LocalRanks(self, kwargs)

    def close(self) -> None:
        for process in self.processes:
            process.kill()


class LocalRanks:
    """A worker group: ``call_all``, ``call_each``, ``close``, and ``run`` for what only tests do."""

    def __init__(self, pool: Pool, kwargs: dict[str, Any]) -> None:
        self.world = kwargs["agent"].layout.world
        self.pipes = pool.pipes[: self.world]
        port = _free_port()
        self._ask([("build", (kwargs, self.world, port))] * self.world, START_S)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return self._ask([("call", (method, args))] * self.world, CALL_S)

    def call_each(self, method: str, args_per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._ask([("call", (method, args)) for args in args_per_rank], CALL_S)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(worker, *args)`` on every rank; ``fn`` is a module's function."""
        return self._ask([("run", (fn, args))] * self.world, CALL_S)

    def close(self) -> None:
        self._ask([("call", ("close", ()))] * self.world, CALL_S)

    def _ask(self, asks: Sequence[tuple[str, Any]], timeout_s: float) -> list[Any]:
        for pipe, ask in zip(self.pipes, asks, strict=True):
            pipe.send(ask)
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"rank {rank} did not answer {asks[rank][0]} within {timeout_s} s")
            answers.append(pipe.recv())
        for value, error in answers:
            if isinstance(error, BaseException):
                raise error
        return [value for value, _ in answers]


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(rank: int, pipe: Connection) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from megarl.backends.megatron.policy import make_worker

    worker: Any = None
    while True:
        try:
            verb, what = pipe.recv()
        except EOFError:
            return
        try:
            if verb == "build":
                kwargs, world, port = what
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                worker = make_worker(**kwargs)
                answer = None
            elif verb == "call":
                answer = getattr(worker, what[0])(*what[1])
            else:
                answer = what[0](worker, *what[1])
            pipe.send((answer, None))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send((None, error))
