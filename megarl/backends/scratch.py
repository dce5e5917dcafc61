"""Folders that a killed process cannot leave behind for good.

A folder is locked while somebody uses it; the kernel drops the lock with the process, however that ends, and whoever
comes later removes the folders that nobody holds. A lock, where a process id in the name would do, is right in two
containers that share /dev/shm, and after a process id has come round again.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BUCKET = "megarl-bucket-"  # weights on their way from a policy to its engine
RAY = "mgl-"  # sockets and logs of a Ray cluster of our own; short, see cluster.SOCKET_PATH_LIMIT
RANDOM_DIGITS = 8
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder in use by this process."""

    path: Path
    lock: int  # an open file; children that are started by exec do not inherit it

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def fresh(base: Path, kind: str) -> Scratch:
    """A new folder below ``base``."""
    return hold(base / f"{kind}{secrets.token_hex(RANDOM_DIGITS // 2)}")


def hold(path: Path) -> Scratch:
    """The folder ``path``, made where it does not exist; several processes may hold one."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(path, FOLDER)
        except FileNotFoundError:  # a sweep came between making and opening it
            continue
        with suppress(OSError):  # a file system without locks: then ``sweep`` cannot take it either
            fcntl.flock(lock, fcntl.LOCK_SH)
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            return Scratch(path, lock)
        os.close(lock)  # a sweep came between opening and locking it


def sweep(base: Path, kind: str) -> list[Path]:
    """Remove the folders of this kind in ``base`` that nobody holds; returns them."""
    swept = []
    for path in sorted(base.glob(f"{kind}*")):
        try:
            lock = os.open(path, FOLDER)
        except OSError:  # gone, somebody else's, or no folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or not to be locked at all
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
        finally:
            os.close(lock)
    return swept


def sweep_buckets() -> None:
    """Remove the weights that killed runs have left on this node."""
    for base in {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        sweep(base, BUCKET)
