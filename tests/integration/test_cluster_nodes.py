"""Placement over two nodes: two raylets on this machine, joined by address."""

import pytest
import ray
from ray.cluster_utils import Cluster as Raylets

from megarl.backends.cluster import connect
from megarl.backends.placement import place
from megarl.backends.workers import WorkerGroup
from megarl.settings import ClusterConfig


class Clerk:
    def node(self):
        return ray.get_runtime_context().get_node_id()


@pytest.fixture(scope="module")
def raylets():
    made = Raylets()
    for _ in range(2):
        made.add_node(num_cpus=1, num_gpus=0, resources={"slot": 2}, include_dashboard=False)
    yield made
    made.shutdown()


@pytest.fixture
def cluster(raylets, tmp_path):
    made = connect(ClusterConfig(address=raylets.address, device="cpu", nodes=2, gpus_per_node=2), tmp_path)
    yield made
    made.close()


def nodes(placement):
    return [bundle.node.id for bundle in placement.bundles]


def test_a_tensor_parallel_agent_sits_in_one_node(cluster):
    placed = place(cluster, {"x": 1, "pair": 2, "y": 1}, one_node={"pair": 2}, timeout_s=30)
    assert len(set(nodes(placed["pair"]))) == 1
    assert set(nodes(placed["pair"])).isdisjoint(nodes(placed["x"]) + nodes(placed["y"]))
    with pytest.raises(ValueError, match=r"agent z: 1 slots wanted.*available 0 \(.* 0, .* 0\)"):
        place(cluster, {"z": 1}, one_node={}, timeout_s=1)


def test_ranks_run_where_they_were_placed(cluster):
    """The slots of the test before came back with its cluster handle."""
    placed = place(cluster, {"big": 4}, one_node={"big": 2}, timeout_s=30)["big"]
    first, second = dict.fromkeys(nodes(placed))
    assert nodes(placed) == [first, first, second, second]
    group = WorkerGroup(placed, "big/policy", Clerk, [{}] * 4)
    assert group.call_all("node") == nodes(placed)
    group.close()


def test_tensor_parallelism_across_nodes_is_refused(cluster):
    with pytest.raises(ValueError, match="agent big: its tensor-parallel groups want 4 slots in one node"):
        place(cluster, {"big": 4}, one_node={"big": 4}, timeout_s=30)


def test_fewer_nodes_than_configured(raylets, tmp_path):
    wanted = ClusterConfig(address=raylets.address, device="cpu", nodes=3, gpus_per_node=2, start_timeout_s=1)
    with pytest.raises(ValueError, match=r"cluster\.nodes=3 wanted, 2 with resource slot after 1 s"):
        connect(wanted, tmp_path)
    assert not ray.is_initialized()


def test_several_nodes_need_an_address(tmp_path):
    with pytest.raises(ValueError, match=r"cluster\.nodes=2 needs cluster\.address"):
        connect(ClusterConfig(device="cpu", nodes=2), tmp_path)
