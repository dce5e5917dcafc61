"""Cohort checkpoints: all agents at one step, or none.

A checkpoint is a folder ``checkpoints/step_N`` (N steps are done) that is written under another name, closed with a
``COMPLETE`` file and then renamed, so that a kill at any moment leaves either the whole of it or none. What a step
draws (seeds, learning rates) is a pure function of its number, and its prompts of the deck's cursor, so N, the cursor
and the policies' state are all there is to keep.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.agents import Agents, each
from megarl.deck import Cursor, Deck
from megarl.types import derive

_COMPLETE = "COMPLETE"


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint of a run, and the folders passed over."""

    path: Path | None
    step: int
    skipped: tuple[str, ...]


def find(run_dir: Path, step: int | None = None) -> Found:
    """Look for a checkpoint (of ``step``, else the newest); partial folders are named, never used."""
    complete = _complete(run_dir)
    every = sorted((run_dir / "checkpoints").glob("step_*"))
    if step is None:
        step = max(complete, default=0)
    elif step not in complete:
        raise ValueError(f"{run_dir}: no complete checkpoint of step {step}; there are {sorted(complete)}")
    return Found(complete.get(step), step, tuple(path.name for path in every if path not in complete.values()))


def save(run_dir: Path, step: int, agents: Agents, deck: Deck, cursor: Cursor, keep: int) -> Path:
    """Write ``checkpoints/step_<step>`` and remove all but the newest ``keep`` complete ones."""
    final = run_dir / "checkpoints" / f"step_{step}"
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "agents").mkdir(parents=True)
    each(agents, lambda agent: agent.policy.save(partial / "agents" / agent.name))
    state = {
        "step": step,
        "deck": _fingerprint(deck),
        "cursor": asdict(cursor),
        "agents": {name: {"model": a.config.model, "layout": str(a.config.layout)} for name, a in agents.items()},
    }
    _write_through(partial / "state.json", json.dumps(state, indent=1))
    _write_through(partial / _COMPLETE, f"{step}\n")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _sync(final.parent)
    for old in sorted(_complete(run_dir))[:-keep]:
        shutil.rmtree(run_dir / "checkpoints" / f"step_{old}")
    return final


def load(path: Path, agents: Agents, deck: Deck) -> Cursor:
    """Bring every policy to where the checkpoint was, and say where the deck was; another layout is allowed."""
    state = json.loads((path / "state.json").read_text())
    if set(state["agents"]) != set(agents):
        raise ValueError(
            f"{path} holds agents {', '.join(sorted(state['agents']))}, the run {', '.join(sorted(agents))}"
        )
    if state["deck"] != _fingerprint(deck):
        raise ValueError(f"{path} was made with other prompts, or in another order, than data.path gives now")
    if "cursor" not in state:
        raise ValueError(f"{path} does not say how far the deck was dealt: an older megarl wrote it; start anew")
    load_weights(path, agents)
    return Cursor(**state["cursor"])


def load_weights(path: Path, agents: Agents) -> None:
    """Bring the policies of ``agents`` to where the checkpoint was, whatever they are asked next."""
    each(agents, lambda agent: agent.policy.load(path / "agents" / agent.name))


def _complete(run_dir: Path) -> dict[int, Path]:
    """Step -> folder, of every checkpoint that was finished."""
    folders = {path.name.removeprefix("step_"): path for path in (run_dir / "checkpoints").glob("step_*")}
    return {int(name): path for name, path in folders.items() if name.isdigit() and (path / _COMPLETE).is_file()}


def _fingerprint(deck: Deck) -> str:
    return f"{derive(deck.uids, deck.seed, deck.shuffle):x}"


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
