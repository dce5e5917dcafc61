"""When a run leaves its nodes before it is done: it was asked to (SIGUSR1), or their time is nearly up. Pure.

Whoever starts a run under a time limit says in MEGARL_END_TIME when its nodes are taken away, in seconds of the epoch
(`megarl launch slurm` does). The signal ends no step: what was begun is finished, saved, and the run exits with 75.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping

MARGIN_S = 30.0  # for closing engines and files, and for what the clock of the scheduler is off
SLOWER = 1.5  # the next step may take that many times the longest so far, and so may its checkpoint

_asked = threading.Event()  # a signal is its process's


class Left(RuntimeError):
    """The run is checkpointed and wants to be taken up again."""


def listen() -> None:
    """From here on SIGUSR1 asks the run to leave, instead of killing it."""
    signal.signal(signal.SIGUSR1, lambda *_: _asked.set())


def reason_to_leave(step_s: float, longest: Mapping[str, float]) -> str | None:
    """Why not to begin another step; None: go on. ``step_s`` are the seconds of the step that ends, ``longest`` those
    of the longest "step" and "save" so far.
    """
    if _asked.is_set():
        return "asked to leave by SIGUSR1"
    end = os.environ.get("MEGARL_END_TIME")
    if end is None:
        return None
    step_s = max(step_s, longest.get("step", 0.0))
    # a first checkpoint is taken to be as long as a step
    left, needed = float(end) - time.time(), SLOWER * (step_s + longest.get("save", step_s)) + MARGIN_S
    if left >= needed:
        return None
    return f"the nodes are ours for another {left:.0f} s, a step and its checkpoint may take {needed:.0f} s"
