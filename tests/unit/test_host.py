"""Ports and module paths of workers, without Ray."""

import socket
import sys
from pathlib import Path

import pytest
from ray._private import services

from megarl.backends import host, patches
from megarl.backends.host import _ports, free_port
from megarl.backends.patches import loopback_only
from megarl.backends.workers import _own_module_path


@pytest.mark.parametrize(
    ("first_ephemeral", "ports"),
    [(32768, range(20000, 32768)), (16384, range(15384, 16384)), (1024, host.PORTS), (1500, host.PORTS)],
)
def test_ports_are_below_the_kernels_own_but_never_privileged(first_ephemeral, ports):
    assert _ports(first_ephemeral) == ports
    assert ports.start >= 1024


def test_a_port_in_use_is_not_given(monkeypatch):
    """Where the kernel draws from everywhere, the ports checked are all there is between a rank and its neighbours."""
    monkeypatch.setattr(Path, "read_text", lambda path: "1024\t65535\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1000)
        busy = taken.getsockname()[1]
        monkeypatch.setattr(host, "PORTS", range(busy, busy + 2))
        assert {free_port() for _ in range(5)} <= {busy + 1}
        monkeypatch.setattr(host, "PORTS", range(busy, busy + 1))
        with pytest.raises(RuntimeError, match=f"no free port found from {busy} to {busy}"):
            free_port()


def test_workers_find_a_checkout_wherever_it_stands(monkeypatch, tmp_path):
    """Below the prefix of a system's Python too; site-packages and the standard library they find by themselves."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "usr"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "usr"))
    folders = [
        tmp_path / "usr" / part for part in ("src/megarl", "lib/python3/dist-packages", "lib/site-packages/x", "srcs")
    ]
    for folder in folders:
        folder.mkdir(parents=True)
    standard = [str(Path(socket.__file__).parent), str(Path(pytest.__file__).parents[1])]
    search = [*map(str, folders), *standard, str(tmp_path / "usr/src/../src/megarl"), str(tmp_path / "gone")]
    assert _own_module_path(search) == [str(folders[0]), str(folders[3])]


def test_ray_still_needs_to_be_kept_on_loopback(monkeypatch):
    """Fails once Ray leaves 127.0.0.1 alone, or no longer asks the switch."""
    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda address: "10.1.2.3")
    assert services.resolve_ip_for_localhost("127.0.0.1") == "10.1.2.3"
    with loopback_only():
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
    assert services.resolve_ip_for_localhost("127.0.0.1") == "10.1.2.3"


def test_another_ray_is_not_patched_unseen(monkeypatch):
    monkeypatch.setattr(patches.ray, "__version__", "2.61.0")
    with pytest.raises(RuntimeError, match=r"is written for ray 2\.60\.x, found 2\.61\.0"), loopback_only():
        pass
