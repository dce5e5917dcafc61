"""A few processes on this machine that are the ranks of one short job, over gloo: no Ray, no GPU."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from megarl.backends.host import free_port


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, preload: Sequence[str] = ()) -> list[Any]:
    """``fn(*args)`` in ``world`` processes, results in rank order; ``fn`` is a module's function.

    Before it is called RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in each environment, and no GPU is visible.
    Whatever one rank raises ends the others and is raised here. ``preload`` are modules that are imported once for all.
    """
    with _without_gpus():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        pipes: list[Connection] = []
        processes = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                env = {"RANK": str(rank), **shared}
                process = context.Process(target=_serve, args=(theirs, env, fn, args), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _gather(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _gather(pipes: Sequence[Connection]) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in answers]):
            rank = next(r for r, pipe in enumerate(pipes) if pipe is ready)
            try:
                answers[rank], error = pipes[rank].recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} of {len(pipes)} ended without a word; is memory short?") from None
            if error is not None:
                raise error
    return [answers[rank] for rank in range(len(pipes))]


def _serve(pipe: Connection, env: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    try:
        pipe.send((fn(*args), None))
    except Exception as error:
        error.add_note(traceback.format_exc())
        pipe.send((None, error))


@contextmanager
def _without_gpus() -> Iterator[None]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
