"""The doctor finds what is really there, and calls a fault a fault."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import doctor


def test_this_machine_is_fit_and_versions_are_the_installed_ones():
    env = os.environ | {"RAY_ADDRESS": "neighbour:6379"}
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "doctor", "--json"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {entry["what"]: entry for entry in json.loads(done.stdout)}
    for package in ("torch", "ray", "megatron-core", "megatron-bridge", "transformers"):
        assert found[package] == {
            "what": package, "found": importlib.metadata.version(package), "verdict": "ok", "advice": "",
        }  # fmt: skip
    assert found["shared memory between processes"]["found"] == "works"
    assert found["RAY_ADDRESS"]["verdict"] == "warn"
    assert found["kernels"]["advice"]


def test_another_version_or_none_fails(monkeypatch):
    installed = {"ray": "2.59.0", "torch": None}
    monkeypatch.setattr(doctor, "_version", lambda name: installed.get(name, importlib.metadata.version("ray")))
    found = {finding.what: finding for finding in doctor.versions()}
    assert found["ray"].verdict == "fail" and "2.60" in found["ray"].advice
    assert found["torch"].found == "absent" and found["torch"].verdict == "fail"
    assert found["vllm"].verdict == "fail" and "keep one" in found["vllm"].advice  # both answer here


def test_the_impostor_of_apex():
    assert doctor.apex(["apex/__init__.py", "apex/models.py"]).verdict == "fail"
    assert doctor.apex(["apex/__init__.py", "apex/optimizers/fused_adam.py"]).verdict == "ok"


def test_case_f11_device_variables_of_several_makers():
    several = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}
    assert [f.verdict for f in doctor.environment(several)] == ["fail"]
    assert list(doctor.environment({"CUDA_VISIBLE_DEVICES": "0"})) == []


@pytest.mark.parametrize(("text", "verdict"), [("32768\t60999\n", "ok"), ("1024 65535", "warn")])
def test_ports(text, verdict):
    assert doctor.ports(text).verdict == verdict


def test_paths(tmp_path):
    assert doctor.temporary("/tmp").verdict == "ok" and doctor.temporary("/tmp/" + "x" * 90).verdict == "warn"
    assert doctor.between_processes(tmp_path).verdict == "ok"
    assert doctor.between_processes(Path("/nowhere")).verdict == "fail"
