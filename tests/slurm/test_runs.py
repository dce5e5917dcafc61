"""A cohort on several emulated nodes of a real Slurm: the same numbers as here, nothing lost when it is preempted."""

import json
import math

import pytest

from megarl.log import read_metrics
from tests import cohort
from tests.slurm import jobs
from tests.slurm.emulated import CONTROLLER

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def uninterrupted(plain, slurm):
    job = jobs.launch(slurm, "uninterrupted", "cluster.check_network=true")
    job.until(lambda: job.rows() >= 1, "a step")
    ranks = [slurm.on(name, "pgrep", "-fc", "^ray::Host", check=False).strip() for name in slurm.names]
    assert sorted(ranks) == ["0", "0", "2", "2"]  # an agent on a node, the other on another
    assert job.end() == "COMPLETED", job.said
    assert "network: 2 nodes, an all-reduce of 64 MiB by gloo at" in job.said
    return job


def test_a_cohort_on_three_nodes_learns_what_it_learns_on_one(plain, uninterrupted):
    assert len(read_metrics(uninterrupted.run_dir)) > 3
    check_alike(plain, uninterrupted)
    assert "n0, n1, n2 are fit" in uninterrupted.said


def check_alike(plain, job):
    """Every metric of every step but times, across layouts."""
    there = cohort.comparable(read_metrics(job.run_dir))
    here = cohort.comparable(read_metrics(plain))[: len(there)]
    for ours, theirs in zip(here, there, strict=True):
        shared = {key for key in ours.keys() & theirs.keys() if "/reshard/" not in key and "drift" not in key}
        assert len(shared) > 20
        for key in shared:
            assert math.isclose(ours[key], theirs[key], rel_tol=TOLERANCE, abs_tol=TOLERANCE) or math.isnan(
                ours[key]
            ), key


def test_preempted_and_requeued_it_goes_on_as_if_nothing_had_been(uninterrupted, slurm):
    job = jobs.launch(slurm, "preempted")
    job.until(lambda: job.rows() >= 3, "three steps")
    other = slurm.on(
        CONTROLLER, "sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 1"
    ).split()[0]
    assert job.end() == "COMPLETED", job.said
    assert slurm.state_of(other) == "COMPLETED"
    assert "asked to leave by SIGUSR1: checkpointed after step" in job.said and "try 1" in job.said
    assert (job.folder / f"job-{job.number}.1").is_dir()
    assert same(job, uninterrupted)


def same(job, other) -> bool:
    """Every metric but times, to the bit."""
    rows = [cohort.comparable(read_metrics(run.run_dir)) for run in (job, other)]
    return repr(rows[0]) == repr(rows[1]) and len(rows[0]) > 3


def test_a_rank_that_dies_sends_the_cohort_back_to_its_checkpoint(uninterrupted, slurm):
    job = jobs.launch(slurm, "rank", "checkpoint.every_steps=2")
    job.until(lambda: job.rows() >= 4, "four steps")
    slurm.on("n1", "pkill", "-9", "-o", "-f", "ray::Host")
    assert job.end() == "COMPLETED", job.said
    assert "all nodes live: on from step" in job.said and "try 1" not in job.said
    assert same(job, uninterrupted)


def test_a_node_that_dies_is_replaced(uninterrupted, slurm):
    job = jobs.launch(slurm, "node", "checkpoint.every_steps=2")
    job.until(lambda: job.rows() >= 4, "four steps")
    slurm.crash("n1")
    try:
        assert job.end(300) == "COMPLETED", job.said
    finally:
        slurm.boot("n1")
    assert "n0, n2, n3 are fit" in job.said
    assert same(job, uninterrupted)


def test_a_node_that_is_cut_off_is_replaced(uninterrupted, slurm):
    """Its ranks live on and wait for the others; the job resumes without them."""
    job = jobs.launch(slurm, "cut", "checkpoint.every_steps=2")
    job.until(lambda: job.rows() >= 4, "four steps")
    slurm.cut("n1")
    try:
        assert job.end(300) == "COMPLETED", job.said
    finally:
        slurm.heal("n1")
    assert "n0, n2, n3 are fit" in job.said
    assert same(job, uninterrupted)
    slurm.until_idle()


def test_a_heterogeneous_job_puts_each_agent_on_its_group(plain, slurm):
    """Left to itself ann would take the node that holds it whole; its group is two nodes of one slot."""
    groups = {"small": {"agents": ["ann"], "nodes": 2, "gpus_per_node": 1}}
    groups["big"] = {"agents": ["bob"], "nodes": 1, "gpus_per_node": 2}
    layouts = ["agents.ann.layout={tp: 1, pp: 2}", "agents.bob.layout={tp: 2, pp: 1}"]
    job = jobs.launch(slurm, "kinds", *layouts, "--ask", f"groups={json.dumps(groups)}")
    job.until(lambda: job.rows() >= 4, "four steps")
    ranks = {name: slurm.on(name, "pgrep", "-fc", "^ray::Host", check=False).strip() for name in slurm.names}
    small, big = (slurm.nodes_of(str(int(job.number) + component)) for component in (0, 1))
    slurm.on(CONTROLLER, "scancel", job.number)
    job.end()
    assert [ranks[name] for name in big] == ["2"] and [ranks[name] for name in small] == ["1", "1"], ranks
    assert len(read_metrics(job.run_dir)) >= 4
    check_alike(plain, job)


def test_a_run_that_is_cut_off_does_not_write_any_more(slurm):
    """Driver, policies and engines are one process on one node: without its network only the fence stops it."""
    jobs.write_experiment(slurm, cohort.raw(slurm.shared, **{"cluster": {"gpus_per_node": 2}}, steps=100_000))
    job = jobs.launch(slurm, "fence", "checkpoint.every_steps=2", "checkpoint.keep=1")
    job.until(lambda: job.rows() >= 4, "four steps")
    (node,) = slurm.nodes_of(job.number)
    slurm.cut(node)
    try:
        job.until(lambda: slurm.on(node, "pgrep", "-fc", "megarl train", check=False).strip() == "0", "the end", 150)
        owner = json.loads((job.run_dir / ".owner").read_text())
        assert owner["try"] == f"{job.number}.1" and owner["host"] != node
        assert "was taken over by" in job.said
        seen = job.rows()
        job.until(lambda: job.rows() > seen + 2, "steps of the second try")
        steps = [row["step"] for row in read_metrics(job.run_dir)]
        assert steps == list(range(len(steps)))  # none twice, none left out
    finally:
        slurm.heal(node)
        slurm.on(CONTROLLER, "scancel", job.number)
    slurm.until_idle()


def test_the_checkpoint_lands_before_the_time_limit(slurm):
    """A cohort in the driver's own process; the job is given two minutes and would take for ever."""
    jobs.write_experiment(slurm, cohort.raw(slurm.shared, **{"cluster": {"gpus_per_node": 2}}, steps=100_000))
    changes = ["checkpoint.every_steps=50000", "--ask", "time=2", "--ask", "warn_s=20"]
    job = jobs.launch(slurm, "limit", *changes)
    job.until(lambda: (job.folder / f"job-{job.number}.1" / "go").exists(), "a second try")
    slurm.on(CONTROLLER, "scancel", job.number)
    # by Slurm's warning or by its own reckoning, whichever came first
    assert "checkpointed after step" in job.said and "put back into the queue" in job.said, job.said
    assert "DUE TO TIME LIMIT" not in job.said, job.said
