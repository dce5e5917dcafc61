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
    """Three GPUs, of which the driver was given the numbers 4, 5 and 7: an id is not a count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
        patch.setattr(cluster_module, "_gpus", lambda: 3)
        made = connect(ClusterConfig(gpus_per_node=3), tmp_path_factory.mktemp("run"))
        yield made


@pytest.fixture(scope="module")
def placements(cluster):
    return place(cluster, {"ann": 2, "bob": 1}, one_node={"ann": 2}, timeout_s=60)


def test_a_bundle_knows_its_gpu(cluster, placements):
    assert (cluster.device, cluster.resource) == ("cuda", "GPU")
    held = {agent: [bundle.gpu for bundle in placement.bundles] for agent, placement in placements.items()}
    assert sorted(held["ann"] + held["bob"]) == ["4", "5", "7"]


def test_policy_and_engine_of_an_agent_see_the_same_gpus(placements):
    """The policy holds both GPUs when the engines start, in whatever shape."""
    first, second = (bundle.gpu for bundle in placements["ann"].bundles)
    policy = WorkerGroup(placements["ann"], "ann/policy", Looker, [{}] * 2)
    assert policy.call_all("gpus") == [first, second]
    wide = WorkerGroup(placements["ann"], "ann/engine", Looker, [{}], slots_per_rank=2, owns_slots=False)
    assert wide.call_all("gpus") == [f"{first},{second}"]
    wide.close()
    replicas = WorkerGroup(placements["ann"], "ann/engine", Looker, [{}] * 2, owns_slots=False)
    assert replicas.call_all("gpus") == [first, second]
    assert policy.call_all("gpus") == [first, second]


def test_an_engine_without_a_policy_on_gpus(placements):
    """As beside a reference policy, which lives in the driver."""
    engine = WorkerGroup(placements["bob"], "bob/engine", Looker, [{}], owns_slots=False)
    assert engine.call_all("gpus") == [placements["bob"].bundles[0].gpu]


def test_closing_goes_on_after_what_fails(cluster):
    cluster.groups.append(None)  # no placement group
    with pytest.raises(AssertionError):
        cluster.close()
    assert not ray.is_initialized()
    assert not cluster.temp_dir.exists()
