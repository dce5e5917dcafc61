"""Cohort checkpoints: all agents at one step, or none.

A checkpoint is a folder ``checkpoints/step_N`` (N steps are done) that is written under another name, closed with a
``COMPLETE`` file and then renamed, so that a kill at any moment leaves either the whole of it or none. What a step
draws (seeds, learning rates) is a pure function of its number, and its prompts of the deck's cursor, so N, the cursor
and the policies' state are all there is to keep.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.agents import Agents, each
from megarl.deck import Cursor, Deck
from megarl.guards import GuardStop
from megarl.types import derive

_COMPLETE = "COMPLETE"


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint of a run, and the folders passed over with the reason."""

    path: Path | None
    step: int
    skipped: Mapping[str, str]


def find(run_dir: Path, step: int | None = None) -> Found:
    """Look for a checkpoint (of ``step``, else the newest); partial and damaged folders are named, never used."""
    faults = {path: _fault(path) for path in sorted((run_dir / "checkpoints").glob("step_*"))}
    whole = {_step(path): path for path, fault in faults.items() if fault is None}
    skipped = {path.name: fault for path, fault in faults.items() if fault is not None}
    if step is not None and step not in whole:
        raise ValueError(f"{run_dir}: no complete checkpoint of step {step}; there are {sorted(whole)}")
    found = max(whole, default=0) if step is None else step
    return Found(whole.get(found), found, skipped)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A checkpoint that is being written; ``end`` makes it one."""

    final: Path
    agents: Agents
    state: dict[str, Any]
    keep: int
    still_ours: Callable[[], None]

    def end(self) -> Path:
        """``checkpoints/step_<step>``, whole; all but the newest ``keep`` complete ones are removed."""
        partial = _partial(self.final)
        each(self.agents, lambda agent: agent.policy.end_save())
        files = sorted(file for file in partial.rglob("*") if file.is_file())
        state = {**self.state, "bytes": {str(file.relative_to(partial)): file.stat().st_size for file in files}}
        _write_through(partial / "state.json", json.dumps(state, indent=1))
        _write_through(partial / _COMPLETE, f"{state['step']}\n")
        self.still_ours()
        shutil.rmtree(self.final, ignore_errors=True)
        partial.rename(self.final)
        _sync(self.final.parent)
        complete = {_step(path): path for path in self.final.parent.glob("step_*[0-9]") if (path / _COMPLETE).is_file()}
        for old in sorted(complete)[: -self.keep]:
            shutil.rmtree(complete[old])
        return self.final


def begin(
    run_dir: Path,
    agents: Agents,
    deck: Deck,
    keep: int,
    still_ours: Callable[[], None],
    step: int,
    cursor: Cursor,
) -> Saving:
    """Begin ``checkpoints/step_<step>``: what the policies are now is kept, whatever becomes of them before it ends.

    ``still_ours`` raises where another process has taken the run over: what was written is then not made a checkpoint.
    """
    still_ours()
    final = run_dir / "checkpoints" / f"step_{step}"
    partial = _partial(final)
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "agents").mkdir(parents=True)
    each(agents, lambda agent: agent.policy.begin_save(partial / "agents" / agent.name))
    state = {
        "step": step,
        "deck": _fingerprint(deck),
        "cursor": asdict(cursor),
        "agents": {name: {"model": a.config.model, "layout": str(a.config.layout)} for name, a in agents.items()},
    }
    return Saving(final=final, agents=agents, state=state, keep=keep, still_ours=still_ours)


class Saver:
    """The checkpoints of one run, at most one at a time under way. As a context: the last one is ended with it, unless
    what ends the run took the policies along.
    """

    def __init__(self, begin: Callable[[int, Cursor], Saving], *, background: bool) -> None:
        self._begin, self._background = begin, background
        self._saving: Saving | None = None

    def save(self, step: int, cursor: Cursor, *, now: bool) -> None:
        """A checkpoint of ``step``; whole on return if wanted ``now``, or if nothing is written in the background."""
        self.settle()
        self._saving = self._begin(step, cursor)
        if now or not self._background:
            self.settle()

    def settle(self) -> None:
        """End what is under way."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.end()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or issubclass(kind, GuardStop):
            self.settle()


def check(path: Path, agents: Collection[str], deck: Deck) -> None:
    """Raise ValueError unless these agents can go on from the checkpoint with this deck. Nothing is loaded."""
    state = _state(path)
    if set(state["agents"]) != set(agents):
        raise ValueError(
            f"{path} holds agents {', '.join(sorted(state['agents']))}, the run {', '.join(sorted(agents))}"
        )
    if state["deck"] != _fingerprint(deck):
        raise ValueError(f"{path} was made with other prompts, or in another order, than data.path gives now")


def load(path: Path, agents: Agents) -> Cursor:
    """Bring every policy to where the checkpoint was, and say where the deck was; another layout is allowed."""
    load_weights(path, agents)
    return Cursor(**_state(path)["cursor"])


def load_weights(path: Path, agents: Agents) -> None:
    """Bring the policies of ``agents`` to where the checkpoint was, whatever they are asked next."""
    each(agents, lambda agent: agent.policy.load(path / "agents" / agent.name))


def _partial(final: Path) -> Path:
    return final.with_name(f"{final.name}.partial")


def _state(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _fault(path: Path) -> str | None:
    """Why a folder cannot be resumed from; None: it can."""
    if re.fullmatch(r"step_[0-9]+", path.name) is None:
        return "no finished checkpoint"
    if not (path / _COMPLETE).is_file():
        return f"not finished (no {_COMPLETE})"
    try:
        state = _state(path)
        sizes = dict(state["bytes"])
        Cursor(**state["cursor"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"state.json is damaged or of another version ({error!r})"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or cut"
    return None


def _fingerprint(deck: Deck) -> str:
    """Of everything that decides what is dealt and how it reads."""
    gold = None if deck.gold is None else sorted(deck.gold.items())
    return f"{derive(deck.uids, deck.seed, deck.shuffle, sorted(deck.views.items()), gold):x}"


def _write_through(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
