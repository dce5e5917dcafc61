"""`megarl demo`: TTRL, Co-RL and RLVR from one start, each an ordinary `megarl train`; a table and a picture.

A demo starts over: it replaces the runs of an earlier one, and keeps the warm-started models if their manifest still
describes them.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl import cli
from megarl.config import RunConfig, compose
from megarl.demo.picture import draw
from megarl.demo.warmstart import Recipe, warm_start, write_problems
from megarl.log import read_metrics
from megarl.types import Metrics

METHODS = {"ttrl": "TTRL", "corl": "Co-RL", "rlvr": "RLVR"}

Accuracy = dict[str, float]  # by agent


def run(args: Sequence[str], recipe: Recipe = Recipe()) -> None:  # noqa: B008 (frozen value)
    """Warm-start, train three times, and write OUTPUT/demo/summary.json and curves.png."""
    parser = argparse.ArgumentParser(prog="megarl demo", description=run.__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs"), help="the demo's folder is OUTPUT/demo")
    parser.add_argument("overrides", nargs="*", help="key=value, for all three runs")
    options = parser.parse_intermixed_args(args)
    began = time.perf_counter()
    console, folder = Console(stderr=True), options.output / "demo"
    runs = {method: compose(overrides(method, options.output, options.overrides)) for method in METHODS}
    for method, cfg in runs.items():
        if cfg.run_dir != folder / method:
            raise ValueError(
                f"the demo names its runs itself: {cfg.run_dir} is not {folder / method}; --output moves it"
            )
        shutil.rmtree(cfg.run_dir, ignore_errors=True)

    write_problems(folder / "problems")
    console.print(f"warm start of {folder / 'models'}: two tiny models, about a minute unless they are there")
    warm_start(folder / "models", recipe)
    for method in METHODS:
        console.rule(METHODS[method])
        if code := cli.train(overrides(method, options.output, options.overrides)):
            sys.exit(code)

    curves = {method: accuracy_curves(read_metrics(cfg.run_dir), tuple(cfg.agents)) for method, cfg in runs.items()}
    summary = summarize(curves, runs["corl"], time.perf_counter() - began)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(curves, METHODS, folder / "curves.png")
    console.print(table(summary))
    console.print(
        "Sampled accuracy on problems that no run trained on. TTRL learns from an agent's own majority, so it makes "
        "firm what the agent often gets wrong; Co-RL learns from the majority of the other, whose errors are others; "
        "RLVR is told the true answers.",
        f"{folder / 'summary.json'}  {folder / 'curves.png'}  {time.perf_counter() - began:.0f} s",
        sep="\n",
    )


def overrides(method: str, output: Path, changes: Sequence[str]) -> list[str]:
    """What `megarl train` is told: the method's experiment, moved to ``output``, with the user's changes."""
    folder = output / "demo"
    moved = {
        "output": output,
        "data.path": folder / "problems/train.jsonl",
        "evaluation.data.path": folder / "problems/test.jsonl",
        "agents.qwen.model": folder / "models/qwen",
        "agents.llama.model": folder / "models/llama",
    }
    return [f"+experiment=demo_{method}", *(f"{key}={quoted(path)}" for key, path in moved.items()), *changes]


def quoted(path: Path) -> str:
    """A path as hydra reads it back, whatever characters it has."""
    text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", r"\'"), str(path))
    return "'" + text.replace("${", r"\${") + "'"


def accuracy_curves(rows: Sequence[Metrics], agents: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """(steps done, sampled accuracy) of every evaluation, by agent."""
    return {
        name: [(int(row["step"]), row[key]) for row in rows if key in row]
        for name in agents
        for key in [f"agent/{name}/eval/accuracy"]
    }


def summarize(
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], cfg: RunConfig, seconds: float
) -> dict[str, object]:
    """What summary.json holds: accuracy at the start and at the end of each method, layouts, wall seconds."""
    start: Accuracy = {name: curve[0][1] for name, curve in curves["ttrl"].items()}
    ends = {method: {name: curve[-1][1] for name, curve in agents.items()} for method, agents in curves.items()}
    layout = {name: str(agent.layout) for name, agent in cfg.agents.items()}
    return {"start": start, **ends, "layout": layout, "seconds": round(seconds, 1)}


def table(summary: Mapping[str, object]) -> Table:
    """The demo's result, one row per agent."""
    shown = Table(title="sampled accuracy")
    for title in ("agent", "policy", "start", *METHODS.values()):
        shown.add_column(title, justify="left" if title in ("agent", "policy") else "right")
    columns = [summary[key] for key in ("start", *METHODS)]
    layout = summary["layout"]
    assert isinstance(layout, dict)
    for agent, spread in layout.items():
        shown.add_row(agent, spread, *(f"{column[agent]:.3f}" for column in columns if isinstance(column, dict)))
    return shown
