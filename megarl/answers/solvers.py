"""The driver's side of the worker processes: they are started when first needed and asked through pipes.

No signal, no shared memory and no event loop is involved, so any thread, any process and any actor may ask. Nobody
waits on a clock: a question ends when its own budget does (see solver).
"""

import json
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

Question = tuple[str, str]  # ("key" or "latex", text)
Reply = dict[str, Any]

WORKERS = 2  # of each kind, per process that asks
MAX_KNOWN = 1 << 16  # replies remembered
_ROOT = Path(__file__).parents[2]


class Solvers:
    """A fixed number of worker processes for each kind of question, and what they have answered.

    Kinds are apart because sympy takes seconds to import, and few questions need it; the one that was used last is used
    first, so that a second process starts only where two questions of a kind are asked at once.
    """

    def __init__(self, workers: int = WORKERS) -> None:
        self._known: dict[Question, Reply] = {}
        self._idle: dict[str, queue.LifoQueue[_Worker]] = {"key": queue.LifoQueue(), "latex": queue.LifoQueue()}
        for kind, idle in self._idle.items():
            for _ in range(workers):
                idle.put(_Worker(kind))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="answers")

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """One reply per question; equal questions are worked on once."""
        found = {q: self._known.get(q) for q in questions}
        unknown = [q for q, reply in found.items() if reply is None]
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        for q, reply in zip(unknown, self._threads.map(self._ask, unknown), strict=True):
            found[q] = self._known[q] = reply
        return [reply for q in questions if (reply := found[q]) is not None]

    def forget(self) -> None:
        """Drop what was answered; the processes stay."""
        self._known.clear()

    def kill(self) -> None:
        """End the processes that wait for questions; the next question starts one anew."""
        for idle in self._idle.values():
            waiting = [idle.get() for _ in range(idle.qsize())]
            for worker in waiting:
                worker.kill()
                idle.put(worker)

    def _ask(self, question: Question) -> Reply:
        idle = self._idle[question[0]]
        worker = idle.get()
        try:
            return worker.ask(question)
        finally:
            idle.put(worker)


class _Worker:
    """One process; a new one takes the place of one that was killed."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Question) -> Reply:
        kind, text = question
        line = json.dumps({kind: text}) + "\n"
        for _ in range(2):
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = ""
            if reply:
                return json.loads(reply)
            process.wait()
            self._process = None  # somebody killed it, not the question: that runs in a child of its own
        return {"undecided": "worker lost"}

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _start(self) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "PYTHONHASHSEED": "0",  # the order of sets decides what sympy tries first, and so what it costs
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.answers.solver", self._kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, encoding="utf-8", env=environment, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{sys.executable} -m megarl.answers.solver does not start: run it by hand to see why")
        self._process = process
        return process


@cache
def _solvers(pid: int) -> Solvers:
    return Solvers()


def ask(questions: Sequence[Question]) -> list[Reply]:
    """Replies of this process's own workers; after a fork the child gets workers of its own."""
    return _solvers(os.getpid()).ask(questions)


def forget() -> None:
    """Make this process's workers answer everything anew."""
    _solvers(os.getpid()).forget()
