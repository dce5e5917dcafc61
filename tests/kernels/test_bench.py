"""What `python -m tests.gpu` runs on a card, run as far as it goes without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(*arguments):
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_bench_runs_dry_and_every_provider_is_right(tmp_path):
    done = python("kernels/bench/run.py", "--device", "cpu", "--dry", "--json", str(tmp_path / "table.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "table.json").read_text())
    assert found["facts"]["dry"] and found["facts"]["date"] and found["facts"]["triton"]
    rows = found["rows"]
    assert {row["bench"] for row in rows} == {"logprob", "advantage", "token_loss"}
    assert all(row["ok"] for row in rows if "ok" in row)
    held = [row for row in rows if row.get("what") == "against float64"]
    assert {row["provider"] for row in held} >= {"naive", "megarl torch 512M"}
    assert all(row["note"] in ("", " (no entropy)") for row in held)
    assert "forward and backward" in done.stdout


def test_without_a_card_the_gpu_command_says_so():
    done = python("-m", "tests.gpu")
    assert done.returncode == 2 and "no CUDA device" in done.stdout


def test_one_optimizer_step_of_a_megatron_policy_by_both_heads():
    pytest.importorskip("megatron.core")
    done = python("-m", "tests.gpu.policy_step", "cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    exact, rounded = found["torch.float32"], found["torch.bfloat16"]
    assert exact["logprob"] < 1e-5 and exact["gradient"] < 5e-5 and exact["loss"] < 1e-5
    # the model's own head rounds its logits to bfloat16, ours does not: were they one path, this would be 0
    assert 0 < rounded["logprob"] < 5e-2 and 0 < rounded["gradient"] < 5e-2
    for one in (exact, rounded):
        assert one["moved"] and one["norm"] > 0 and one["compared"]
