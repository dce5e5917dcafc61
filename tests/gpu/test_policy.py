"""One step of a Megatron policy on a single GPU, in a process of its own: process groups are global."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs a megatron-core wheel"),
]


def test_a_step_by_the_fused_head_and_by_logits():
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gpu.policy_step", "cuda"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    exact, rounded = found["torch.float32"], found["torch.bfloat16"]
    assert exact["logprob"] < 1e-5 and exact["gradient"] < 5e-5 and exact["loss"] < 1e-5
    assert rounded["logprob"] < 5e-2 and rounded["gradient"] < 5e-2  # the model's own head rounds its logits
    for one in (exact, rounded):
        assert one["moved"] and one["norm"] > 0
        assert one["compared"]["gradient_difference"] < 5e-2
