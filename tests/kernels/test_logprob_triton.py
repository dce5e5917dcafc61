"""The Triton kernels of the logprob functions, as far as a CPU can tell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl_kernels import vocab_parallel_logprob

ROOT = Path(__file__).parents[2]


def test_interpreted():
    pytest.importorskip("triton", reason="triton is not installed")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted/logprob_cases.py"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout and "skipped" not in run.stdout


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="here the interpreter takes CPU tensors")
def test_compiled_kernels_refuse_cpu_tensors():
    with pytest.raises(ValueError, match=r"backend='triton'.*CPU tensor"):
        vocab_parallel_logprob(torch.zeros(2, 4), torch.tensor([0, 1]), backend="triton")
