"""Placement and worker groups on a real Ray cluster of our own, on CPU."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from megarl.backends.cluster import WorkerLost, connect
from megarl.backends.placement import Placement, place
from megarl.backends.scratch import RAY, sweep
from megarl.backends.workers import WorkerGroup
from megarl.settings import ClusterConfig


class Clerk:
    """A plain class, as the policies' and engines' workers are."""

    def __init__(self, word: str = "", die: bool = False, hang: bool = False, busy_port: str = "") -> None:
        print(f"clerk {os.environ['RANK']} of {os.environ['WORLD_SIZE']} says {word}")
        if busy_port and not Path(busy_port).exists():
            Path(busy_port).write_text(os.environ["MASTER_PORT"])
            raise OSError("[Errno 98] Address already in use (EADDRINUSE)")
        if die:
            os.write(2, b"the clerk fell over\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if hang:
            time.sleep(600)
        self.word = word

    def say(self, *more):
        return (self.word, os.environ["RANK"], *more)

    def pid(self):
        return os.getpid()

    def env(self, name):
        return os.environ.get(name)

    def refuse(self):
        raise ValueError("batch.tokens is not for clerks")

    def noise(self):
        os.write(1, b"from C\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)

    def slowly(self):
        time.sleep(60)

    def sum_of_ranks(self):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(os.environ["RANK"])])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item(), torch.get_num_threads()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Four slots, though RAY_ADDRESS names somebody else's cluster and TMPDIR is too long for sockets."""
    long = tmp_path_factory.mktemp("x" * 90)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
        patch.setenv("TMPDIR", str(long))
        patch.setattr("tempfile.tempdir", None)
        made = connect(ClusterConfig(device="cpu", gpus_per_node=4), tmp_path_factory.mktemp("run"))
        yield made
        made.close()
        assert not made.temp_dir.exists()


@pytest.fixture(scope="module")
def placements(cluster):
    return place(cluster, {"ann": 2, "bob": 1}, one_node={"ann": 2, "bob": 1}, timeout_s=20)


@pytest.fixture(scope="module")
def clerks(placements):
    group = WorkerGroup(placements["ann"], "ann/policy", Clerk, [{"word": "a"}, {"word": "b"}])
    yield group
    group.close()


def test_the_cluster_is_our_own_and_listens_on_loopback_only(cluster):
    assert [node.address for node in cluster.nodes] == ["127.0.0.1"]
    assert [node.slots for node in cluster.nodes] == [4]
    listening = [
        (process.name(), connection.laddr)
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert any("raylet" in name for name, _ in listening)
    assert {address.ip.removeprefix("::ffff:") for _, address in listening} == {"127.0.0.1"}


def test_agents_have_disjoint_slots(placements):
    held = [(bundle.group.id, bundle.index) for placement in placements.values() for bundle in placement.bundles]
    assert len(held) == len(set(held)) == 3


def test_more_slots_than_there_are(cluster, placements):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"agent eve: 2 slots wanted.*wanted 2 slots \(eve 2\), available 1 \(127"):
        place(cluster, {"eve": 2}, one_node={}, timeout_s=1)
    with pytest.raises(ValueError, match=r"agent eve: 8 slots wanted.*wanted 8 slots \(eve 8\), available 4 \(127"):
        place(cluster, {"eve": 8}, one_node={}, timeout_s=20)
    with pytest.raises(ValueError, match="agent eve: its tensor-parallel groups want 8 slots in one node"):
        place(cluster, {"eve": 8}, one_node={"eve": 8}, timeout_s=20)
    assert time.monotonic() - start < 5


def test_calls_reach_every_rank_in_order(clerks):
    assert clerks.call_all("say", 1, 2) == [("a", "0", 1, 2), ("b", "1", 1, 2)]
    assert clerks.call_each("say", [(3,), (4,)]) == [("a", "0", 3), ("b", "1", 4)]
    assert ray.get(ray.get_actor("ann/policy/1").call.remote("say", ())) == ("b", "1")
    with pytest.raises(ValueError, match="arguments for 1 of 2 ranks"):
        clerks.call_each("say", [()])


def test_ranks_can_meet(clerks):
    assert clerks.call_all("sum_of_ranks") == [(1.0, 1)] * 2


def test_an_error_arrives_as_what_it_was(clerks):
    with pytest.raises(ValueError) as caught:
        clerks.call_all("refuse")
    assert str(caught.value) == "batch.tokens is not for clerks"
    assert "ann/policy rank 0" in caught.value.__notes__[0]
    assert clerks.call_all("say") == [("a", "0"), ("b", "1")]


def test_output_goes_to_the_run_directory(cluster, clerks):
    clerks.call_all("noise")
    for rank, word in enumerate("ab"):
        assert clerks.log_file(rank) == cluster.run_dir / "logs" / f"ann-policy-{rank}.log"
        text = clerks.log_file(rank).read_text()
        assert f"clerk {rank} of 2 says {word}\n" in text
        assert "from C\n" in text
        assert "from a child\n" in text


def test_engines_sit_beside_the_policy(placements, clerks):
    beside = WorkerGroup(placements["ann"], "ann/engine", Clerk, [{"word": "e"}], slots_per_rank=2, owns_slots=False)
    assert beside.call_all("say") == [("e", "0")]
    beside.close()
    assert clerks.call_all("say") == [("a", "0"), ("b", "1")]  # closing one group leaves the others


def test_a_placement_has_no_more_seats_than_slots(placements):
    with pytest.raises(ValueError, match="agent bob: 2 slots wanted, 1 placed"):
        WorkerGroup(placements["bob"], "bob/policy", Clerk, [{}, {}])


def test_a_worker_killed_at_start(placements):
    start = time.monotonic()
    with pytest.raises(WorkerLost) as caught:
        WorkerGroup(placements["bob"], "bob/policy", Clerk, [{"word": "x", "die": True}])
    assert time.monotonic() - start < 60
    message = str(caught.value)
    for part in (
        "bob/policy rank 0 of 1",
        "node 127.0.0.1",
        "building Clerk",
        "bob-policy-0.log",
        "the clerk fell over",
    ):
        assert part in message


def test_a_worker_killed_in_a_call(placements):
    """The group that follows finds the slot free again."""
    group = WorkerGroup(placements["bob"], "bob/policy", Clerk, [{}])
    (pid,) = group.call_all("pid")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"bob/policy rank 0 of 1 .* died during say"):
        group.call_all("say")
    group.close(farewell="say")  # which the dead cannot; nothing is raised


def test_a_worker_that_does_not_get_ready(placements):
    with pytest.raises(TimeoutError, match=r"bob/policy: rank 0 did not finish building Clerk within 0\.5 s"):
        WorkerGroup(placements["bob"], "bob/policy", Clerk, [{"hang": True}], build_timeout_s=0.5)


def test_what_hangs_is_named_and_says_where(cluster, placements, caplog, monkeypatch):
    group = WorkerGroup(placements["bob"], "bob/policy", Clerk, [{}])
    monkeypatch.setattr(cluster, "config", cluster.config.model_copy(update={"call_timeout_s": 0.5}))
    with pytest.raises(TimeoutError, match=r"rank 0 did not finish slowly\(\) within 0.5 s") as caught:
        group.call_all("slowly")
    assert re.search(r'test_cluster.py", line \d+ in slowly', str(caught.value))  # the stack, of its log
    group.close(farewell="say", timeout_s=0.1)
    assert "bob/policy: 1 ranks did not finish say() in 0.1 s" in caplog.text


def test_a_port_that_was_taken_meanwhile_is_drawn_again(placements, tmp_path, caplog):
    first = tmp_path / "port"
    group = WorkerGroup(placements["bob"], "bob/policy", Clerk, [{"busy_port": str(first)}])
    (port,) = group.call_all("env", "MASTER_PORT")
    assert port != first.read_text()
    (pid,) = group.call_all("pid")
    with pytest.raises(KeyError, match="why the run ends"):  # an error in closing does not take its place
        try:
            raise KeyError("why the run ends")
        finally:
            group.close(farewell="refuse")
    assert "bob/policy: refuse() failed" in caplog.text and "batch.tokens is not for clerks" in caplog.text
    psutil.wait_procs([process for process in psutil.process_iter() if process.pid == pid], timeout=30)
    assert not psutil.pid_exists(pid)


def test_placing_is_undone_with_the_cluster(cluster, placements):
    assert all(isinstance(placement, Placement) for placement in placements.values())
    assert len(cluster.groups) == 2


DRIVER = """
import os, sys, time
from pathlib import Path
from megarl.backends.cluster import connect
from megarl.backends.placement import place
from megarl.backends.workers import WorkerGroup
from megarl.settings import ClusterConfig
from tests.integration.test_cluster import Clerk

cluster = connect(ClusterConfig(device="cpu", gpus_per_node=1), Path(sys.argv[1]))
group = WorkerGroup(place(cluster, {"ann": 1}, one_node={}, timeout_s=20)["ann"], "ann/policy", Clerk, [{}])
print("ready", cluster.temp_dir, flush=True)
group.call_all("slowly")
"""


def test_a_killed_driver_leaves_nothing(tmp_path):
    """No process, and no folder once the next run has looked for those of the dead."""
    root = str(Path(__file__).parents[2])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, f"{root}/kernels"])},
    )
    word, temp_dir = driver.stdout.readline().split()
    assert word == "ready"
    folder = Path(temp_dir)
    assert folder not in sweep(folder.parent, RAY) and folder.is_dir()
    below = psutil.Process(driver.pid).children(recursive=True)
    # Ray's two agents look for their raylet every few seconds, and end after the fifth miss
    workers = [process for process in below if process.name() not in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")]
    assert any("Host" in process.name() for process in workers)
    driver.kill()
    driver.wait()
    alive = psutil.wait_procs(workers, timeout=30)[1]
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert folder in sweep(folder.parent, RAY) and not folder.exists()


ENDED = """
import os, signal, sys, threading, time
from pathlib import Path
from megarl import cli
from megarl.backends.cluster import connect
from megarl.settings import ClusterConfig

def wait(argv):
    cluster = connect(ClusterConfig(device="cpu", gpus_per_node=1), Path(sys.argv[1]))
    try:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        time.sleep(60)
    finally:
        cluster.close()
        print("closed")

cli.VERBS["wait"] = wait
cli.main(["wait"])
"""


def test_sigterm_closes_the_cluster(tmp_path):
    """Ray would end the driver itself, with its own code and nothing closed."""
    done = subprocess.run([sys.executable, "-c", ENDED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM
    assert "closed" in done.stdout and "ended by SIGTERM" in done.stderr
