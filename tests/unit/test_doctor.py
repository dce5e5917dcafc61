"""The doctor finds what is really there, and calls a fault a fault."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import doctor, doctor_nodes
from megarl.doctor import Finding


def test_this_machine_is_fit_and_versions_are_the_installed_ones():
    env = os.environ | {"RAY_ADDRESS": "neighbour:6379"}
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "doctor", "--json"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {entry["what"]: entry for entry in json.loads(done.stdout)}
    for package in ("torch", "ray", "megatron-core", "megatron-bridge", "transformers"):
        assert found[package] == {
            "what": package, "found": importlib.metadata.version(package), "verdict": "ok", "advice": "", "alike": True,
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


def test_nodes_that_differ() -> None:
    """What must be alike fails where it is not; what may differ is only told; the worst verdict stands."""
    told = {
        "n1": [Finding("ray", "2.60.0", "ok", alike=True), Finding("/dev/shm", "9.0 GiB free", "ok")],
        "n2": [Finding("ray", "2.59.0", "ok", alike=True), Finding("/dev/shm", "1.0 GiB free", "warn", "small")],
        "n3": [Finding("ray", "2.60.0", "ok", alike=True), Finding("visible devices", "A and B", "fail")],
    }
    text = "\n".join(["a library's greeting", *(doctor_nodes.line(name, own) for name, own in told.items()), "bye"])
    ray, shm, visible = doctor_nodes.compare(doctor_nodes.read_lines(text))
    assert (ray.found, ray.verdict) == ("2.60.0 on n1, n3; 2.59.0 on n2", "fail")
    assert shm.found == "9.0 GiB free on n1; 1.0 GiB free on n2; not looked at on n3"
    assert (shm.verdict, shm.advice) == ("warn", "small")
    assert visible.verdict == "fail"
    same = doctor_nodes.compare({"n1": told["n1"], "n2": told["n1"]})
    assert [(f.found, f.verdict) for f in same] == [("2.60.0", "ok"), ("9.0 GiB free", "ok")]


def test_nodes_are_those_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match="inside of one"):
        doctor_nodes.ask_nodes()
