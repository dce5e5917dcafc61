"""A cohort on several emulated nodes of a real Slurm: the same numbers as here, and nothing lost when it is preempted."""

import math

import pytest

from megarl.log import read_metrics
from tests import cohort
from tests.slurm import jobs
from tests.slurm.emulated import CONTROLLER

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def uninterrupted(plain, slurm):
    job = jobs.launch(slurm, "uninterrupted")
    assert job.end() == "COMPLETED", job.said
    return job


def test_a_cohort_on_three_nodes_learns_what_it_learns_on_one(plain, uninterrupted):
    here, there = cohort.comparable(read_metrics(plain)), cohort.comparable(read_metrics(uninterrupted.run_dir))
    assert len(here) == len(there) > 3
    for ours, theirs in zip(here, there, strict=True):
        shared = {key for key in ours.keys() & theirs.keys() if "/reshard/" not in key and "drift" not in key}
        assert len(shared) > 20
        for key in shared:
            assert math.isclose(ours[key], theirs[key], rel_tol=TOLERANCE, abs_tol=TOLERANCE) or math.isnan(
                ours[key]
            ), key
    assert "n0, n1, n2 are fit" in uninterrupted.said
    # each agent on a node of its own: the cohort said where
    logs = {path.name: path.read_text() for path in (uninterrupted.run_dir / "logs").glob("*")}
    assert logs


def test_preempted_and_requeued_it_goes_on_as_if_nothing_had_been(uninterrupted, slurm):
    job = jobs.launch(slurm, "preempted")
    job.until(lambda: job.rows() >= 3, "three steps")
    other = slurm.on(CONTROLLER, "sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 1").split()[0]
    assert job.end() == "COMPLETED", job.said
    print(job.said)
    assert slurm.state_of(other) == "COMPLETED"
    assert "asked to leave by SIGUSR1: checkpointed after step" in job.said and "try 1" in job.said
    assert (job.folder / f"job-{job.number}.1").is_dir()
    # tokens and numbers to the bit
    whole, parts = (cohort.comparable(read_metrics(run.run_dir)) for run in (uninterrupted, job))
    assert [{k: repr(v) for k, v in row.items()} for row in parts] == [
        {k: repr(v) for k, v in row.items()} for row in whole
    ]
