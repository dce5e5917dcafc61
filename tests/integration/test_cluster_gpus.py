"""Who sees which GPU, on real Ray: it counts GPUs without looking for them, so that a CPU will do."""

import os

import pytest
import ray

from megarl.backends import cluster as cluster_module
from megarl.backends.cluster import connect
from megarl.backends.placement import place
from megarl.backends.workers import WorkerGroup
from megarl.settings import ClusterConfig


class Looker:
    def gpus(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two GPUs, of which the driver was given the numbers 4 and 7: an id is not a count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
        patch.setattr(cluster_module, "_gpus", lambda: 2)
        made = connect(ClusterConfig(gpus_per_node=2), tmp_path_factory.mktemp("run"))
        yield made


@pytest.fixture(scope="module")
def placements(cluster):
    return place(cluster, {"ann": 2}, one_node={"ann": 2}, timeout_s=60)


def test_a_bundle_knows_its_gpu(cluster, placements):
    assert (cluster.device, cluster.resource) == ("cuda", "GPU")
    assert sorted(bundle.gpu for bundle in placements["ann"].bundles) == ["4", "7"]


def test_policy_and_engine_of_an_agent_see_the_same_gpus(placements):
    """The policy holds both GPUs when the engine starts, and keeps them."""
    first, second = (bundle.gpu for bundle in placements["ann"].bundles)
    policy = WorkerGroup(placements["ann"], "ann/policy", Looker, [{}] * 2)
    engine = WorkerGroup(placements["ann"], "ann/engine", Looker, [{}], slots_per_rank=2, owns_slots=False)
    assert engine.call_all("gpus") == [f"{first},{second}"]
    assert policy.call_all("gpus") == [first, second]


def test_closing_goes_on_after_what_fails(cluster):
    cluster.groups.append(None)  # no placement group
    with pytest.raises(AssertionError):
        cluster.close()
    assert not ray.is_initialized()
    assert not cluster.temp_dir.exists()
