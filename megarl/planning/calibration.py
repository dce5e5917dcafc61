"""Rates from observed seconds: fitted on half of the published runs, or learned from runs of one's own cluster."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from megarl.config import CONFIG_DIR, RunConfig, validate
from megarl.planning.devices import Device
from megarl.planning.options import Choice, Estimator, Need
from megarl.planning.published import ROWS, Row, predict
from megarl.planning.request import choices_of, needs_of, setting_of
from megarl.planning.steptime import Rates, Turn, Workload
from megarl.planning.workload import Expectations

SHIPPED = CONFIG_DIR / "calibration" / "published.json"
PRIOR_SPREAD = 0.4  # of the logarithm: how far a rate may stray from its prior before it costs as much as ERROR does
ERROR = 0.1  # of the logarithm: what the model leaves unexplained
ROUNDS = 24
WARM_UP = 2  # steps of a run that are not looked at: engines compile, caches fill
# phase of the planner -> metric of a run
METRICS = {"rollout": "generate", "measure": "measure", "train": "update", "refit": "reshard"}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Seconds by phase that were seen, and what a model with other rates says of the same run."""

    predict: Callable[[Rates], Mapping[str, float]]
    seconds: Mapping[str, float]


def misfit(seen: Sequence[Observation], rates: Rates, prior: Rates, spread: float = PRIOR_SPREAD) -> float:
    """Squared log errors of every observed number over ERROR^2, and of the rates against their prior over spread^2."""
    told = [(one.predict(rates), one.seconds) for one in seen]
    miss = sum(math.log(said[phase] / value) ** 2 for said, true in told for phase, value in true.items())
    strayed = sum(math.log(asdict(rates)[name] / value) ** 2 for name, value in asdict(prior).items())
    return miss / ERROR**2 + strayed / spread**2


def fit(seen: Sequence[Observation], prior: Rates, spread: float = PRIOR_SPREAD) -> Rates:
    """Rates of the least ``misfit``: cyclic descent from the prior, one rate at a time. Deterministic."""
    rates, width = prior, spread
    best = misfit(seen, rates, prior, spread)
    for _ in range(ROUNDS):
        for field in fields(Rates):
            for move in (width, -width):
                tried = moved(rates, field.name, move)
                if (found := misfit(seen, tried, prior, spread)) < best:
                    best, rates = found, tried
        width *= 0.85
    return rates


def moved(rates: Rates, name: str, by: float) -> Rates:
    """The rates with the logarithm of one of them moved."""
    return replace(rates, **{name: asdict(rates)[name] * math.exp(by)})


def load_rates(path: Path | None = None) -> Rates:
    """Rates of a calibration file; None: the shipped one. Raises ValueError for a file that is none."""
    path = path or SHIPPED
    known = {field.name for field in fields(Rates)}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["rates"]
        if set(values) != known or not all(0 < float(value) < float("inf") for value in values.values()):
            raise ValueError(f"rates must be positive numbers, named {', '.join(sorted(known))}")
        return Rates(**values)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--rates {path}: no calibration file: {error}") from error


def save_rates(path: Path, rates: Rates, source: str) -> None:
    rounded = {name: float(f"{value:.4g}") for name, value in asdict(rates).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"source": source, "rates": rounded}, indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- published runs


def published_observations() -> list[Observation]:
    """The rows that are marked as fitted; the others take no part."""

    def observed(row: Row) -> Observation:
        return Observation(predict=lambda rates: predict(row, rates), seconds=row.split)

    return [observed(row) for row in ROWS if row.fitted]


def fit_published(prior: Rates = Rates()) -> Rates:  # noqa: B008 (frozen value)
    return fit(published_observations(), prior)


def errors(rates: Rates, rows: Sequence[Row] = ROWS) -> dict[str, float]:
    """Row -> predicted over published step time, minus 1."""
    return {row.name: predict(row, rates)["step"] / row.split["step"] - 1 for row in rows}


def held_out(rates: Rates) -> tuple[float, float]:
    """(median, worst) absolute error of the rows that were not fitted."""
    misses = [abs(miss) for miss in errors(rates, [row for row in ROWS if not row.fitted]).values()]
    return statistics.median(misses), max(misses)


def report(*, refit: bool, write: Path | None, markdown: bool) -> None:
    """Print every published run beside its prediction."""
    rates = fit_published() if refit else load_rates()
    if write is not None:
        save_rates(
            write, rates, "NeMo RL, on-policy BF16 GRPO on DGX-H100: rows marked fitted in planning/published.py"
        )
    header = ("run", "rows", "published s", "predicted s", "error", *METRICS)
    lines = [_line(row, predict(row, rates)) for row in ROWS]
    if markdown:
        print("\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)))
    else:
        table = Table(*header)
        for cells in lines:
            table.add_row(*cells)
        Console(width=140).print(table)
    median, worst = held_out(rates)
    print(f"held-out rows: median error {median:.1%}, worst {worst:.1%}")


def _line(row: Row, said: Mapping[str, float]) -> list[str]:
    def phase(name: str) -> str:
        return f"{said[name]:.0f}" + (f" ({row.split[name]:g})" if name in row.split else "")

    error = said["step"] / row.split["step"] - 1
    return [
        row.name,
        "fitted" if row.fitted else "held out",
        f"{row.split['step']:g}",
        f"{said['step']:.0f}",
        f"{error:+.0%}",
        *(phase(name) for name in METRICS),
    ]


# ---------------------------------------------------------------- runs of one's own


def learn(runs: Sequence[Path], device: Device, write: Path) -> None:
    """Fit rates on the phase times in the metrics of finished runs, starting from the shipped ones."""
    seen = [observation for run in runs for observation in observe(run, device)]
    prior = load_rates()
    rates = fit(seen, prior, spread=1.0)
    save_rates(write, rates, f"{device.name}: {', '.join(str(run) for run in runs)}")
    for label, used in (("before", prior), ("after", rates)):
        misses = [abs(o.predict(used)[phase] / value - 1) for o in seen for phase, value in o.seconds.items()]
        print(f"median error over {len(misses)} phase times {label}: {statistics.median(misses):.0%}")


def observe(run: Path, device: Device) -> list[Observation]:
    """One observation per agent: medians of its phases' seconds, at the lengths that were sampled.

    Raises ValueError for a folder that holds no run, or too short a one.
    """
    try:
        stated = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"), resolve=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"{run}: no run there ({error})") from error
    assert isinstance(stated, dict)
    cfg = validate({str(key): value for key, value in stated.items()})
    rows = rows[WARM_UP:]
    if not rows:
        raise ValueError(f"{run}: no more than {WARM_UP} steps; the first {WARM_UP} are not typical")
    return [_observation(cfg, need, rows, device) for need in needs_of(cfg, Expectations(), layouts="all")]


def _observation(cfg: RunConfig, need: Need, rows: Sequence[Mapping[str, float]], device: Device) -> Observation:
    def median(metric: str) -> float:
        return statistics.median(row[f"agent/{need.name}/{metric}"] for row in rows)

    asked = need.work.turns[0]
    tokens = min(median("engine/response_tokens"), 0.99 * asked.lengths.limit)
    turn: Turn = replace(asked, lengths=replace(asked.lengths, mean=tokens))
    work: Workload = replace(need.work, turns=(turn, *need.work.turns[1:]))
    stated = replace(need, work=work)
    choice: Choice = choices_of(cfg, [stated])[0]

    def said(rates: Rates) -> Mapping[str, float]:
        estimator = Estimator(setting_of(cfg, device, rates))
        return estimator.seconds(stated, cfg.agents[need.name].slots, choice)

    return Observation(predict=said, seconds={phase: median(f"time/{name}") for phase, name in METRICS.items()})
