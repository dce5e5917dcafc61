"""`megarl report`: one HTML page of one or more runs."""

import argparse
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.report.page import page
from megarl.report.run import Run, collapses, columns, gold_of, open_run
from megarl.report.steps import kept, step_block
from megarl.rollouts import step_path


def run(argv: Sequence[str]) -> int:
    """Read the runs, write the page, say where it is and what it left out."""
    args = _parse(argv)
    runs = [open_run(path) for path in args.runs]
    out = args.out or (args.runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out {out}: {'a folder' if out.is_dir() else 'its folder does not exist'}; name a file")
    budget = int(args.rollouts_mb * 1e6 / len(runs))
    parts, blocks = [], {}
    for number, found in enumerate(runs):
        own, part = described(found, budget)
        blocks |= {(number, step): block for step, block in own.items()}
        parts.append(part)
    title = ", ".join(part["name"] for part in parts)
    made = time.strftime("%Y-%m-%d %H:%M")
    text = page(title, {"version": __version__, "made": made, "runs": parts}, blocks, katex())
    _write(out, text)
    print(f"{out}  {len(text.encode()) / 1e6:.1f} MB{_left_out(parts, args.rollouts_mb)}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megarl report",
        description="One HTML page of one or more runs, for any browser and without a network: learning curves, signs "
        "of collapse, where the time went, the configuration, and the rollouts, to search and to filter.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder; several are compared")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html; of several, report.html")
    parser.add_argument(
        "--rollouts-mb",
        type=float,
        default=64,
        metavar="N",
        help="megabytes of the page that rollouts may take, all runs together; steps at even distances are kept",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.rollouts_mb <= 512:
        raise ValueError(f"--rollouts-mb {args.rollouts_mb:g}: from 0 to 512 (no browser opens larger pages well)")
    if twice := {str(path) for path in args.runs if args.runs.count(path) > 1}:
        raise ValueError(f"RUN given twice: {', '.join(sorted(twice))}")
    return args


def described(run: Run, budget: int) -> tuple[dict[int, str], dict[str, Any]]:
    """A run's blocks of rollouts by step, and all else that the page knows of it."""
    gold, unknown = gold_of(run)
    steps = run.rollout_steps
    blocks = kept(steps, lambda step: step_block(step_path(run.path, step), gold), budget)
    return blocks, {
        "name": run.name,
        "path": str(run.path),
        "method": run.cfg.algo.name,
        "agents": {name: {"model": agent.model, "layout": str(agent.layout)} for name, agent in run.cfg.agents.items()},
        "seats": list(run.cfg.seats),
        "config": run.cfg.model_dump(mode="json"),
        "yaml": run.config,
        "environment": run.environment,
        "columns": columns(run.rows),
        "signs": collapses(run),
        "rollouts": {"steps": list(blocks), "of": len(steps), "unknown": unknown},
    }


def _left_out(parts: Sequence[dict[str, Any]], megabytes: float) -> str:
    told = [(part["name"], len(part["rollouts"]["steps"]), part["rollouts"]["of"]) for part in parts]
    lines = [f"\n{name}: rollouts of {here} of {of} steps fit" for name, here, of in told if here < of]
    return f"{''.join(lines)} in --rollouts-mb {megabytes:g}" if lines else ""


def katex() -> str:
    """The source of KaTeX, out of the package that ships it; ValueError where that is not installed."""
    parent = find_spec("sphinxcontrib")  # the parent alone: importing the package itself would import Sphinx
    for folder in parent.submodule_search_locations or () if parent else ():
        if (file := Path(folder) / "katex.min.js").is_file():
            return file.read_text(encoding="utf-8")
    raise ValueError("mathematics is shown by KaTeX, which is not installed: pip install 'megarl[report]'")


def _write(out: Path, text: str) -> None:
    """Write the page whole or not at all."""
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(out)
