"""Benches of megarl_kernels: ``python kernels/bench/run.py [--device cpu|cuda] [--dry] [--only NAME] [--json FILE]``.

Each module named in BENCHES has ``run(device, dry)``, which gives rows (dictionaries of what was measured).
The table is printed last, after the facts of the machine; ``--json`` keeps all of it.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

BENCHES = ("logprob", "advantage", "token_loss")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry", action="store_true", help="small shapes: does everything run?")
    parser.add_argument("--only", choices=BENCHES, action="append", help="these benches; may be repeated")
    parser.add_argument("--json", type=Path, help="file for facts and rows")
    parser.add_argument("--threads", type=int, help="of torch on CPU")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    facts = measure.facts(device, options.dry)
    rows: list[dict[str, Any]] = []
    for name in options.only or BENCHES:
        for row in importlib.import_module(name).run(device, options.dry):
            rows.append({"bench": name} | row)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(facts))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    return 0


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Rows under one heading per group of equal columns."""
    lines: list[str] = []
    heading: tuple[str, ...] = ()
    for row in rows:
        if tuple(row) != heading:
            heading = tuple(row)
            lines += ["", "  ".join(f"{name:>{width(name)}}" for name in heading)]
        lines.append("  ".join(f"{text(row[name]):>{width(name)}}" for name in heading))
    return "\n".join(lines)


def width(name: str) -> int:
    return max(len(name), {"provider": 22, "what": 20, "shape": 21, "bench": 10}.get(name, 9))


def text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "x".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
