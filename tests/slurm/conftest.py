import os
import sys
from pathlib import Path

import pytest

from tests import cohort
from tests.slurm import emulated, jobs

STEPS = 24
MEGATRON = {
    "agents.ann.backend": "megatron",
    "agents.bob.backend": "megatron",
    "agents.ann.layout": {"tp": 2},
    "agents.bob.layout": {"pp": 2},
    "cluster": {"nodes": 1, "gpus_per_node": 4, "threads_per_rank": 1},
    "checkpoint": {"every_steps": None},
}


@pytest.fixture(scope="package")
def slurm():
    """Four nodes, three of which a cohort of two agents takes."""
    if reason := emulated.why_not():
        pytest.skip(reason)
    with emulated.Slurm(4, keep=[Path(sys.prefix), Path(__file__).parents[2]]) as cluster:
        os.environ["PYTHONPATH"] = ""
        yield cluster


@pytest.fixture(scope="package")
def plain(slurm):
    """The folder of the run on this machine whose rollouts the cluster's runs train on again."""
    from megarl.config import validate
    from megarl.train import train

    local = cohort.raw(slurm.shared, **MEGATRON, name="plain", steps=STEPS)
    run = train(validate(local))
    replay = {"backend": "replay", "replay": str(run)}
    there = {"agents.ann.engine": replay, "agents.bob.engine": replay, "cluster.nodes": 3, "cluster.gpus_per_node": 2}
    jobs.write_experiment(slurm, cohort.changed(cohort.raw(slurm.shared, **MEGATRON, steps=STEPS), there))
    return run
