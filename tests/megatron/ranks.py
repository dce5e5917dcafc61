"""Rank processes on this machine: what the policy tests use in place of Ray. Real Megatron over gloo in each."""

import functools
import logging
import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

CALL_S = 120.0
GRACE_S = 3.0


@functools.cache
def _context() -> ForkServerContext:
    """Processes are forked from one that has imported Megatron, so that its import is paid once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.megatron.preload"])
    return context


class LocalRanks:
    """The ranks of one policy: ``call_all``, ``call_each``, ``close``, and ``run`` for what only tests do.

    Whatever one rank raises is raised here; if its peers then hang, all of them end.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.world = kwargs["agent"].layout.world
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(self.world):
            ours, theirs = _context().Pipe()
            process = _context().Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        port = str(_free_port())
        shared = {"WORLD_SIZE": str(self.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._ask([("build", (kwargs, {"RANK": str(rank)} | shared)) for rank in range(self.world)])

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return self._ask([("call", (method, args))] * self.world)

    def call_each(self, method: str, args_per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._ask([("call", (method, args)) for args in args_per_rank])

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(worker, *args)`` on every rank; ``fn`` is a module's function."""
        return self._ask([("run", (fn, args))] * self.world)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def _ask(self, asks: Sequence[tuple[str, Any]]) -> list[Any]:
        for pipe, ask in zip(self.pipes, asks, strict=True):
            pipe.send(ask)
        answers: dict[int, tuple[Any, BaseException | None]] = {}
        deadline = time.monotonic() + CALL_S
        while len(answers) < self.world:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                value, error = pipe.recv()
                answers[self.pipes.index(pipe)] = (value, error)
                if error is not None:  # its peers may wait for it in a collective
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(answers) < self.world:
            self.close()
        for _, error in answers.values():
            if error is not None:
                raise error
        if len(answers) < self.world:
            raise TimeoutError(f"{self.world - len(answers)} ranks did not answer {asks[0][0]} in {CALL_S:.0f} s")
        return [answers[rank][0] for rank in range(self.world)]


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(pipe: Connection) -> None:
    """Build a worker, then do what is asked of it until the other side is gone."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from megarl.backends.megatron.policy import make_worker

    worker: Any = None
    while True:
        try:
            verb, (what, args) = pipe.recv()
        except EOFError:
            return
        try:
            if verb == "build":
                os.environ.update(args)
                worker = make_worker(**what)
                answer = None
            elif verb == "call":
                answer = getattr(worker, what)(*args)
            else:
                answer = what(worker, *args)
            pipe.send((answer, None))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send((None, error))
