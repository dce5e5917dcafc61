"""Connecting, where it fails before any Ray is there; the rest is in tests/integration/test_cluster*.py."""

import socket
import time

import pytest

from megarl.backends import cluster
from megarl.backends.cluster import connect
from megarl.settings import ClusterConfig


def test_a_cluster_that_nobody_answers_for_is_named(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(ValueError, match=rf"cluster\.address={address}: nobody answered there in 0\.5 s"):
            connect(ClusterConfig(address=address, start_timeout_s=0.5), tmp_path)
        assert time.monotonic() - start < 10
    for wrong in ("auto", "head", "head:", ":6379"):
        with pytest.raises(ValueError, match=f"cluster.address={wrong} is no host:port"):
            connect(ClusterConfig(address=wrong), tmp_path)


def test_a_ray_that_does_not_start_leaves_no_folder(tmp_path, monkeypatch):
    def fails(**settings):
        assert list(tmp_path.glob("mgl-*"))
        raise RuntimeError("no memory")

    monkeypatch.setattr(cluster, "_short_temp_dir", lambda: cluster.fresh(tmp_path, cluster.RAY))
    monkeypatch.setattr(cluster.ray, "init", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        connect(ClusterConfig(device="cpu"), tmp_path / "run")
    assert not list(tmp_path.glob("mgl-*"))


def entry(name: str, **resources: float) -> dict:
    return {"NodeID": name * 8, "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": resources}


@pytest.mark.parametrize("drivers_own", [0, 8])
def test_a_cluster_that_is_joined_decides_the_device(monkeypatch, drivers_own):
    """The driver's own GPUs say nothing of the nodes that the ranks will run on."""
    monkeypatch.setattr(cluster, "_gpus", lambda: drivers_own)
    found = {}
    for kind, nodes in {
        "cuda": [entry("a", CPU=8), entry("b", GPU=8.0)],
        "cpu": [entry("a", slot=4.0), entry("b", slot=2.0)],
    }.items():
        monkeypatch.setattr(cluster.ray, "nodes", lambda nodes=nodes: nodes)
        device, ready = cluster._wait_for_nodes(ClusterConfig(address="10.0.0.1:6379"), None)
        found[kind] = (device, [node.slots for node in ready])
    assert found == {"cuda": ("cuda", [8]), "cpu": ("cpu", [4, 2])}


def test_gpus_that_are_wanted_must_be_there(monkeypatch):
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [entry("a", slot=4.0)])
    wanted = ClusterConfig(address="10.0.0.1:6379", device="cuda", start_timeout_s=0.1)
    with pytest.raises(ValueError, match=r"cluster\.nodes=1 wanted, 0 with resource GPU after 0\.1 s"):
        cluster._wait_for_nodes(wanted, "cuda")
