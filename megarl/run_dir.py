"""A run's folder: one writer at a time, nothing in it overwritten, and what a run that is taken up again may change."""

import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl import checkpoint
from megarl.config import RunConfig, validate
from megarl.deck import Deck
from megarl.log import Row, rows_logged, step_of

# Where and how fast a run goes on, what it reports, and how it learns from here on. Whatever else decides what was and
# will be sampled, or what the saved weights are, stays: another value is another run.
MAY_CHANGE = (
    *("steps", "cluster", "checkpoint", "evaluation", "guard", "reshard", "kernels", "vllm", "megatron", "data.path"),
    *("batch.tokens_per_microbatch", "batch.updates_per_step", "loss", "agents.*.layout", "agents.*.engine"),
    *("agents.*.optimizer", "agents.*.kl_coef"),
)
MAY_NOT_CHANGE = ("agents.*.optimizer.name",)  # its state would not fit
TRY = "MEGARL_TRY"  # set by whoever starts a job again: JOB.TRY


class Superseded(RuntimeError):
    """Another process has taken the run over; this one must not write into it any more."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A run's folder, the number of steps that are done in it, and the right to write there."""

    path: Path
    start: int
    token: str

    def check(self) -> None:
        """Raise Superseded unless the folder is still ours: a node that was cut off may have lost it unknowingly."""
        owner = _owner(self.path)
        if owner.get("token") != self.token:
            raise Superseded(f"{self.path} was taken over by {owner.get('try') or 'another process'}")


@contextmanager
def claim(cfg: RunConfig, resume: Path | None, deck: Deck) -> Iterator[Claim]:
    """The run's folder, for as long as the block lasts.

    A later try of the same job (MEGARL_TRY is JOB.TRY) takes the folder from an earlier one, whose process may live on
    where nobody can reach it; the earlier one finds out before it writes.

    Raises ValueError where another process is at work there, where a new run would stand on top of an old one, and
    where ``resume`` finds nothing to go on from or a run that this configuration does not continue. Nothing has been
    changed then. A start that failed before it had done a step leaves the name free.
    """
    path = resume or cfg.run_dir
    if resume is None:
        _must_be_free(path)
    path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        start = 0
        if resume is None:
            _must_be_free(path)  # once more: who was here first may have finished by now
        else:
            start = _steps_done(cfg, path, deck)
        token = uuid.uuid4().hex
        owner = {"token": token, "try": os.environ.get(TRY), "host": socket.gethostname(), "pid": os.getpid()}
        new = path / f".owner.{token}"
        new.write_text(json.dumps(owner), encoding="utf-8")
        new.replace(path / ".owner")
        yield Claim(path, start, token)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock of the folder. ValueError where another process holds it, or a later try of this job has been here."""
    mine, theirs = _try(os.environ.get(TRY)), _try(_owner(path).get("try"))
    if mine and theirs and mine[0] == theirs[0] and mine[1] < theirs[1]:
        raise ValueError(f"{path}: try {theirs[1]} of job {theirs[0]} has it; this is try {mine[1]}")
    file = path / ".lock"
    with ExitStack() as stack:
        lock = stack.enter_context(file.open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not (mine and theirs and mine[0] == theirs[0] and mine[1] > theirs[1]):
                raise ValueError(f"{path}: another process is training in this folder") from error
            file.unlink()  # the old one keeps its lock, on a file that is no more
            lock = stack.enter_context(file.open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _owner(path: Path) -> dict[str, Any]:
    try:
        owner = json.loads((path / ".owner").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _try(text: str | None) -> tuple[str, int] | None:
    """(job, try) of JOB.TRY"""
    job, dot, number = (text or "").rpartition(".")
    return (job, int(number)) if dot and number.isdigit() else None


def _must_be_free(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} exists and is no folder: choose another name=... or output=...")
    if any(path.iterdir()) and not (path / "config.yaml").is_file() and not (path / ".lock").is_file():
        raise ValueError(f"{path} exists already and holds no run: choose another name=...")
    if checkpoint.find(path).path is not None:
        raise ValueError(f"{path} exists already: choose another name=..., or go on with --resume {path}")
    if rows_logged(path):
        raise ValueError(f"{path} exists already and has no checkpoint to go on from: choose another name=...")


def _steps_done(cfg: RunConfig, path: Path, deck: Deck) -> int:
    """Steps of the newest complete checkpoint, after a look at everything that could be wrong with it."""
    rows = rows_logged(path)
    before = validate(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")))
    for text in changes(before, cfg):
        print(f"{path}: {text}")
    found = checkpoint.find(path)
    for name, why in found.skipped.items():
        print(f"{path}/checkpoints/{name}: passed over: {why}")
    if found.path is None:
        _must_have_lost_nothing(path, before.checkpoint.every_steps, rows)
    else:
        checkpoint.check(found.path, tuple(cfg.agents), deck)
    if found.step > cfg.steps:
        raise ValueError(f"{found.path} is past the end of the run: steps={cfg.steps}")
    print(f"{path}: resuming after step {found.step} of {cfg.steps}")
    return found.step


def _must_have_lost_nothing(path: Path, every: int | None, rows: Sequence[Row]) -> None:
    """Starting again from nothing is right before the first checkpoint, and wrong where there should be one."""
    done = max((step_of(row) + 1 for row in rows), default=0)
    if every is None and done:
        raise ValueError(
            f"--resume {path}: the run saves no checkpoints (checkpoint.every_steps is null), so its {done} steps "
            "cannot be continued; start another one under another name"
        )
    if every is not None and done >= every:
        raise ValueError(
            f"--resume {path}: {done} steps are logged and a checkpoint was due every {every}, but none is complete; "
            "start another run, or bring back its checkpoints"
        )


def changes(before: RunConfig, after: RunConfig) -> list[str]:
    """One line per value that differs; ValueError if one of them makes it another run."""
    old, new = (dict(_leaves(cfg.model_dump(mode="json"))) for cfg in (before, after))
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    lines = [f"{key}: {old.get(key)} -> {new.get(key)}" for key in differing]
    fixed = [line for key, line in zip(differing, lines, strict=True) if not _may_change(key)]
    if fixed:
        raise ValueError(
            f"a run that is resumed keeps these: {'; '.join(fixed)}. With other values it is another run: start that "
            "under another name"
        )
    return lines


def _may_change(key: str) -> bool:
    return _under(key, MAY_CHANGE) and not _under(key, MAY_NOT_CHANGE)


def _under(key: str, patterns: tuple[str, ...]) -> bool:
    parts = key.split("/")
    for pattern in patterns:
        wanted = pattern.split(".")
        if len(parts) >= len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=False)):
            return True
    return False


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(key/with/slashes, value) of nested mappings: names of agents may hold dots."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}/{key}" if path else str(key))
    else:
        yield path, value
