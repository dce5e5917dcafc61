"""What the ranks of a conversion do: a model without optimizer or gradients, from one format into the other."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.backends.checksum import checksum
from megarl.backends.megatron import checkpoint, cpu

cpu.enable()  # ahead of megatron-core

from megarl.backends.megatron.model import Model, build_model, process_groups  # noqa: E402
from megarl.backends.megatron.records import Job  # noqa: E402


def to_megatron(job: Job) -> dict[str, int]:
    """Load a Hugging Face folder and write the checkpoint ``job.out``; name -> checksum of every tensor that it holds.

    Raises ValueError, naming the tensor, where Megatron's parameters do not give back what was loaded, bit for bit.
    """
    with _groups(job) as groups:
        return write_checkpoint(groups, job)


def to_huggingface(job: Job) -> dict[str, int]:
    """Load the checkpoint ``job.source`` and write safetensors into ``job.out``; name -> checksum of every tensor."""
    with _groups(job) as groups:
        return write_safetensors(groups, job)


class _groups:
    """Process groups of a conversion, ended with it."""

    def __init__(self, job: Job) -> None:
        self.layout = job.agent.layout

    def __enter__(self):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.layout.world))
        dist.init_process_group("gloo")
        return process_groups(self.layout)

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group()


def write_checkpoint(groups, job: Job) -> dict[str, int]:
    model = build_model(job.agent, groups, torch.device("cpu"), {}, train=False)
    read = _Source(job.source)
    sums: dict[str, int] = {}
    for name, tensor in model.exported():
        if dist.get_rank() == 0:
            if not torch.equal(tensor, read[name].to(tensor.dtype)):
                raise ValueError(f"{job.source}: {name} does not come back from Megatron as it went in")
            sums[name] = checksum(tensor)
    checkpoint.save(job.out, model, None, 0)
    return sums


def write_safetensors(groups, job: Job) -> dict[str, int]:
    model = build_model(job.agent, groups, torch.device("cpu"), {}, weights=False, train=False)
    checkpoint.load(job.source, model, None)
    sums: dict[str, int] = {}
    files: list[list[str]] = []
    for part in _parts(model, job.shard_bytes, keep=dist.get_rank() == 0):
        if dist.get_rank() == 0:
            sums |= {name: checksum(tensor) for name, tensor in part.items()}
            save_file(part, job.out / f"part-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(part))
    return sums


def _parts(model: Model, limit: int, *, keep: bool) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, exported in model.exported():
        tensor = exported.to(model.dtype)
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        # a copy: what comes may be a view of a parameter or of a larger tensor
        part[name] = tensor.detach().clone(memory_format=torch.contiguous_format) if keep else tensor[:0]
        size += tensor.nbytes
    yield part


class _Source:
    """Tensors of a folder of safetensors by name."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                self._file_of |= dict.fromkeys(opened.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], "pt") as opened:
            return opened.get_tensor(name)
