"""A run's folder as the report reads it: its metrics by key, its configuration, its signs of collapse."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.collapse import signs
from megarl.config import RunConfig, validate
from megarl.deck import open_deck
from megarl.log import read_metrics
from megarl.rollouts import step_path
from megarl.types import Gold, Metrics

_DIGITS = 6  # significant ones that a chart can show


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run directory, read."""

    path: Path
    name: str  # <experiment>/<name>
    cfg: RunConfig
    config: str  # config.yaml as it stands
    environment: dict[str, Any]
    rows: tuple[Metrics, ...]  # by step; at least one

    @property
    def rollout_steps(self) -> list[int]:
        """Steps whose rollouts are there, ascending."""
        return sorted(step for step in {int(row["step"]) for row in self.rows} if step_path(self.path, step).is_file())


def open_run(path: Path) -> Run:
    """Read a run directory; ValueError where it is none, and where no step is done in it yet."""
    file = path / "config.yaml"
    if not path.exists():
        raise ValueError(f"{path}: no such folder; name a run's, as runs/<experiment>/<name>")
    if not file.is_file():
        raise ValueError(f"{path}: no run there (no config.yaml); name a run's folder, as runs/<experiment>/<name>")
    text = file.read_text(encoding="utf-8")
    try:
        cfg = validate(_mapping(yaml.safe_load(text)))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{file}: not the configuration of a run of this version: {error}") from error
    rows = read_metrics(path)
    if not rows:
        raise ValueError(f"{path}: no step of this run is done yet (no row in metrics.jsonl)")
    rows.sort(key=lambda row: row["step"])
    return Run(
        path=path,
        name=f"{cfg.experiment}/{cfg.name}",
        cfg=cfg,
        config=text,
        environment=_environment(path / "environment.json"),
        rows=tuple(rows),
    )


def _mapping(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError("it holds no keys")
    return raw


def _environment(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return _mapping(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON of a run's environment ({error})") from error


def columns(rows: Sequence[Metrics]) -> dict[str, list[float | None]]:
    """key -> its value in every row, to six digits; None where a row lacks it or it is not finite."""
    keys = sorted({key for row in rows for key in row})
    return {key: [_short(row.get(key)) for row in rows] for key in keys}


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{_DIGITS}g}")


def collapses(run: Run) -> list[dict[str, Any]]:
    """The signs of collapse of every step, as the guard tells them: {step, key, text}, each turn once."""
    guard = run.cfg.guard
    found: list[dict[str, Any]] = []
    for end in range(1, len(run.rows) + 1):
        rows = run.rows[max(0, end - guard.window - 1) : end]
        before = signs(rows[:-1], run.cfg.seats, guard)
        new = {key: text for key, text in signs(rows, run.cfg.seats, guard).items() if key not in before}
        found += [{"step": int(rows[-1]["step"]), "key": key, "text": text} for key, text in new.items()]
    return found


def gold_of(run: Run) -> tuple[Gold, str]:
    """The true answers of the prompts the run trains on, and why there are none (empty where there are)."""
    if run.cfg.data.gold is None:
        return {}, "the run's data names no column of true answers (data.gold)"
    try:
        return open_deck(run.cfg.data, {}, run.cfg.seed).gold or {}, ""
    except (ValueError, OSError) as error:
        return {}, f"the run's prompts are not to be read from here: {error}"
