"""Planned refits over the whole grid, or the memory of one.

    python -m tests.bench.reshard [--family NAME ...] [--json FILE]
    python -m tests.bench.reshard --memory [--bucket-mib 16]

The grid: every family x training layout x engine, on real Megatron ranks over gloo. Per row: are the engine's
parameters bit-equal to what vLLM's own load_weights makes of the checkpoint; bytes counted at the collectives beside
the plan's and the lower bound (ratio 1.00: nothing travels that need not); and Bridge's whole export in the same run.
Exit code 1 where a row is not bit-equal or moves more than its bound.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from tests import refit_grid, vllm_layouts
from tests.bench import refit_memory


def grid(kinds: Sequence[str], folder: Path, console: Console) -> list[refit_grid.Row]:
    """All rows; a layout's ranks are started once."""
    models = {kind: path for kind, path in refit_grid.write_models(folder).items() if kind in kinds}
    jobs = [(path, tp) for path in models.values() for tp in (1, 2)]
    (folder / "loaded").mkdir()
    loaded = vllm_layouts.load(jobs, folder / "loaded")
    found: list[refit_grid.Row] = []
    for layout in (*refit_grid.LAYOUTS, *refit_grid.EXPERTS):
        able = {kind: path for kind, path in models.items() if layout.ep == 1 or kind == "qwen3_moe"}
        if able:
            console.print(f"[dim]{layout} ...[/dim]")
            found += refit_grid.rows(layout, able, loaded)
    return found


def show(rows: Sequence[refit_grid.Row], console: Console) -> None:
    table = Table()
    for column in ("family", "policy", "engine", "bitwise"):
        table.add_column(column)
    for column in ("wire", "plan", "bound", "ratio", "export / wire", "export s / refit s"):
        table.add_column(column, justify="right")
    reasons = list(dict.fromkeys(row.absent for row in rows if row.absent))
    for row in rows:
        names = (row.kind, str(row.layout), f"TP{row.tp}")
        if row.absent:
            table.add_row(*names, f"absent ({reasons.index(row.absent) + 1})")
            continue
        bytes_ratio = f"{row.exported / row.wire:.1f}" if row.wire else "-" if not row.exported else "inf"
        table.add_row(
            *names,
            "yes" if not row.wrong else f"NO: {row.wrong[0]}",
            *(f"{value:,}" for value in (row.wire, row.plan, row.bound)),
            f"{row.ratio:.2f}",
            bytes_ratio,
            f"{row.export_seconds / row.seconds:.1f}",
        )
    console.print(table)
    for number, why in enumerate(reasons, start=1):
        console.print(f"({number}) {why}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.reshard", description=__doc__)
    parser.add_argument("--family", nargs="+", choices=tuple(refit_grid.MODELS), default=tuple(refit_grid.MODELS))
    parser.add_argument("--memory", action="store_true", help="what a refit takes beyond what its processes hold")
    parser.add_argument("--bucket-mib", type=int, default=16, help="of --memory")
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    args = parser.parse_args(argv)
    disable_progress_bar()
    console = Console(width=None if sys.stdout.isatty() else 140)
    if args.memory:
        measured = refit_memory.measure(args.bucket_mib << 20)
        if args.json:
            args.json.write_text(json.dumps(measured, indent=1))
        return 0 if refit_memory.show(measured, console) else 1
    with tempfile.TemporaryDirectory() as folder:
        rows = grid(args.family, Path(folder), console)
    show(rows, console)
    if args.json:
        args.json.write_text(json.dumps([_as_data(row) for row in rows], indent=1))
    done = [row for row in rows if not row.absent]
    good = [row for row in done if not row.wrong and row.wire == row.plan == row.bound]
    console.print(f"{len(good)} of {len(done)} refits bit-equal at the lower bound; {len(rows) - len(done)} absent")
    return 0 if len(good) == len(done) else 1


def _as_data(row: refit_grid.Row) -> dict[str, Any]:
    return asdict(row) | {"layout": str(row.layout), "ratio": row.ratio}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
