"""Kernels in Triton's interpreter, in a process of its own: Triton decides at import whether to interpret."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"


def test_triton_kernels_in_the_interpreter():
    cases = [str(FOLDER / name) for name in ("advantage_cases.py", "logprob_cases.py", "token_loss_cases.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *cases],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 50 and "skipped" not in done.stdout
