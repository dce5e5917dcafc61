"""Nodes that cannot carry a run: the job says which and why, before anything is trained, and fails.

One job at a time; each fault is real (a filled /dev/shm, another version's files, a route that leads nowhere), and is
undone.
"""

import importlib.metadata
import json
import re
import shlex
import time
from pathlib import Path

import pytest

from tests import cohort
from tests.slurm import jobs
from tests.slurm.emulated import CONTROLLER

SECONDS = 180


@pytest.fixture(scope="module", autouse=True)
def experiment(slurm):
    jobs.write_experiment(slurm, cohort.raw(slurm.shared, **{"cluster": {"nodes": 3, "gpus_per_node": 2}}))


def failed(slurm, name, *words, seconds=SECONDS):
    """What the job said, which took less than so many seconds to fail."""
    began = time.monotonic()
    job = jobs.launch(slurm, name, *words)
    assert job.end(seconds) == "FAILED" and job.exit_code() == 1, job.said
    assert job.rows() == 0
    assert time.monotonic() - began < seconds
    return job.said


def test_an_impossible_placement_is_refused_before_it_is_submitted(slurm):
    said = jobs.try_launch(slurm, "impossible", "agents.ann.backend=megatron", "agents.ann.layout.tp=4")
    assert "agents.ann wants tensor parallel 4, but cluster.gpus_per_node=2" in said
    said = jobs.try_launch(slurm, "impossible", "agents.ann.backend=megatron", "agents.ann.layout.dp=8")
    assert "agents ask for 9 GPUs or CPU slots (ann 8 + bob 1)" in said
    assert slurm.on(CONTROLLER, "squeue", "-h").strip() == ""


def test_another_version_of_a_package(slurm, tmp_path):
    metadata = Path(str(importlib.metadata.distribution("ray")._path)) / "METADATA"  # the file that version() reads
    other = slurm.shared / "METADATA"
    here = importlib.metadata.version("ray")
    other.write_text(metadata.read_text().replace(f"Version: {here}", "Version: 2.59.0", 1))
    slurm.on("n2", "mount", "--bind", str(other), str(metadata))
    try:
        said = failed(slurm, "versions")
        doctor = [jobs.SITE["python"], "-m", "megarl", "doctor", "--nodes", "--json"]
        job = slurm.on(CONTROLLER, "sbatch", "-N3", "--wait", "-odoctor.out", "--wrap", shlex.join(doctor), check=False)
    finally:
        slurm.on("n2", "umount", str(metadata))
    table = (slurm.shared / "doctor.out").read_text()
    found = {row["what"]: row for row in json.loads(table[table.index("[\n") :])}
    assert found["ray"]["verdict"] == "fail", job
    assert found["ray"]["found"] == f"{here} on n0, n1; 2.59.0 on n2"
    assert found["torch"]["verdict"] == "ok" and " on " not in found["torch"]["found"]
    assert f"ray is not the same everywhere: {here} on n0 and n1, 2.59.0 on n2" in said


def test_a_full_dev_shm(slurm):
    slurm.on("n1", "fallocate", "-l", "900M", "/dev/shm/full")
    try:
        said = failed(slurm, "shm")
    finally:
        slurm.on("n1", "rm", "/dev/shm/full")
    assert "n1: /dev/shm has 124 MiB free, 256 are needed (twice object_store_mib)" in said


def test_a_head_that_cannot_be_reached(slurm):
    rays = ["to", "10.93.7.10", "ipproto", "tcp", "dport", "20000-32767", "blackhole"]  # Slurm's own ports lie above
    slurm.on("n1", "ip", "rule", "add", *rays)
    try:
        ranks = ["agents.ann.backend=megatron", "agents.ann.engine.backend=vllm"]
        said = failed(slurm, "unreachable", "--ask", "form_timeout_s=40", *ranks)
    finally:
        slurm.on("n1", "ip", "rule", "del", *rays)
    assert "node-n1: Ray's head at 10.93.7.10:" in said and "cannot be reached from here" in said


def test_two_nodes_that_do_not_reach_each_other(slurm):
    """Ray runs, as both reach its head; what two ranks say to each other is lost."""
    lost = ["to", "10.93.7.12", "ipproto", "tcp", "blackhole"]
    slurm.on("n1", "ip", "rule", "add", *lost)
    try:
        ranks = ["agents.ann.backend=megatron", "agents.ann.layout.dp=5", "cluster.check_network=true"]
        said = failed(slurm, "network", *ranks, seconds=400)  # three pairs are tried in turn
    finally:
        slurm.on("n1", "ip", "rule", "del", *lost)
    assert re.search(
        r"network: nodes do not reach each other by collectives: 10\.93\.7\.11/\w+ and 10\.93\.7\.12/\w+ ", said
    )


def test_a_node_that_is_missing(slurm):
    """Slurm has given it to the job, and it never says a word."""
    slurm.on("n2", "mount", "--bind", "/bin/cat", jobs.SITE["python"])  # it starts, and waits for ever
    try:
        said = failed(slurm, "missing", "--ask", "form_timeout_s=20")
    finally:
        slurm.on("n2", "umount", jobs.SITE["python"])
    assert "all nodes' reports: not within 20 s; no sign of n2" in said
