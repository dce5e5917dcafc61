"""Folders of dead processes go, those of living ones stay; whose they are is asked of the kernel."""

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest
import torch

from megarl.backends import scratch
from megarl.backends.buckets import write_buckets
from megarl.backends.reshard import reshard
from megarl.backends.scratch import BUCKET, RAY, fresh, hold, sweep

HOLDER = """
import sys
from pathlib import Path
from megarl.backends.scratch import fresh

held = fresh(Path(sys.argv[1]), sys.argv[2])
(held.path / "bucket.safetensors").write_bytes(b"x" * 100)
print(held.path.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holders(tmp_path):
    """Two processes, each with a folder of its own: (process, folder)."""
    made = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), BUCKET],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        made.append((process, tmp_path / process.stdout.readline().strip()))
    yield made
    for process, _ in made:
        process.kill()
        process.communicate()


def test_only_folders_of_dead_processes_are_swept(tmp_path, holders):
    (dead, left), (_, living) = holders
    other = fresh(tmp_path, RAY)
    (tmp_path / f"{BUCKET}file").write_text("no folder")
    (tmp_path / f"{BUCKET}link").symlink_to(other.path)
    assert sweep(tmp_path, BUCKET) == []
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    assert left.is_dir()  # nobody is there to remove it
    assert sweep(tmp_path, BUCKET) == [left]
    assert not left.exists() and living.is_dir() and other.path.is_dir()
    assert (tmp_path / f"{BUCKET}file").exists()
    other.close()
    assert not other.path.exists()


def test_a_folder_with_two_holders_stays_until_both_are_gone(tmp_path):
    """As where two ranks write on one node."""
    one, two = hold(tmp_path / f"{BUCKET}x"), hold(tmp_path / f"{BUCKET}x")
    os.close(one.lock)  # dies
    assert sweep(tmp_path, BUCKET) == []
    os.close(two.lock)
    assert sweep(tmp_path, BUCKET) == [one.path]


def test_a_folder_that_is_swept_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    path, flock, sweeps = tmp_path / f"{BUCKET}x", scratch.fcntl.flock, []

    def late(lock, how):
        if not sweeps:
            sweeps.append(path)
            path.rmdir()  # between opening and locking
        flock(lock, how)

    monkeypatch.setattr(scratch.fcntl, "flock", late)
    with closing(hold(path)):
        assert sweeps and path.is_dir()
        assert sweep(tmp_path, BUCKET) == []


def test_a_refit_that_fails_leaves_no_bucket(monkeypatch, tmp_path):
    """Not even while its error is still being looked at."""
    monkeypatch.setattr("megarl.backends.buckets.SHARED_MEMORY", tmp_path)

    class Policy:
        def weights(self, bucket_bytes):
            return write_buckets([("a", torch.zeros(4)), ("b", torch.zeros(4))], bucket_bytes)

    class Full:
        def begin_refit(self): ...

        def load_weights(self, bucket):
            assert bucket.path.is_relative_to(tmp_path) and bucket.path.exists()
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room") as caught:
        reshard(Policy(), Full(), 1, 16)
    assert caught.tb is not None  # holds the frames, and what they iterate over
    assert not list(tmp_path.iterdir())
