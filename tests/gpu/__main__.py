"""Everything about kernels that needs a card, in one command: ``python -m tests.gpu [--results FOLDER]``.

Runs the tests of this folder, then the bench, whose facts and rows go to FOLDER/<date>-<card>.json; about 8 minutes.
Needs torch 2.11, Triton 3.6, transformers, pytest and a megatron-core wheel or newer ones, nothing else.
"""

import argparse
import datetime
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "kernels/bench/results")
    folder = parser.parse_args().results
    if not torch.cuda.is_available():
        print("no CUDA device is visible to torch; `python kernels/bench/run.py --device cpu` runs without one")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name().lower().replace(" ", "-")
    table = folder / f"{datetime.datetime.now(datetime.UTC).date().isoformat()}-{card}.json"
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    steps = (
        ["-m", "pytest", "-q", "tests/gpu"],
        ["kernels/bench/run.py", "--device", "cuda", "--json", str(table)],
    )
    codes = [
        subprocess.run([sys.executable, *step], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
        for step in steps
    ]
    print(f"tests: {'passed' if codes[0] == 0 else 'FAILED'}; bench: {table if codes[1] == 0 else 'FAILED'}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
