"""Weights on their way from policy to engine: safetensors files of bounded size, in shared memory where they fit."""

import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megarl.backends.protocols import WeightBucket
from megarl.backends.scratch import BUCKET, SHARED_MEMORY, fresh


def write_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Generator[WeightBucket, None, None]:
    """The named weights in files of at most ``bucket_bytes`` (a larger tensor has a file of its own).

    A file is gone once the next bucket is asked for, and when the iterator is closed. The weights are taken one by
    one, so at most one bucket of them is alive.
    """
    for part in _parts(weights, bucket_bytes):
        nbytes = sum(t.nbytes for t in part.values())
        with closing(fresh(roomy_folder(nbytes), BUCKET)) as folder:
            path = folder.path / "bucket.safetensors"
            save_file({name: t.detach().contiguous() for name, t in part.items()}, path)
            yield WeightBucket(path=path, names=tuple(part), nbytes=nbytes)


def _parts(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > bucket_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def roomy_folder(nbytes: int) -> Path:
    """Shared memory if twice the bucket fits there (other agents write theirs at the same time), else a disk."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * nbytes:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())
