"""Which box of which tensor vLLM's own loaders put where, recorded without weights.

A second model of the worker's configuration is made on the meta device and loads meta tensors; every ``copy_`` between
the two is noted: a view of a tensor without data still knows its offset and strides. The live model is not touched.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model

from megarl.backends.shards.boxes import Box
from megarl.backends.shards.layout import Shard, Tensor


def record(
    vllm_config: Any, tensors: Sequence[Tensor]
) -> tuple[list[Shard], dict[str, tuple[int, ...]], dict[str, str]]:
    """This rank's shards, the shapes of its parameters, and the tensors whose loading cannot be a copy of boxes: why.

    To be called in a worker, where vLLM's process groups stand. A tensor that this rank holds nothing of is in none of
    them.
    """
    model = blank(vllm_config)
    recorder = _Recorder(model, tensors)
    sources = recorder.sources
    with loading(vllm_config), recorder:
        model.load_weights(iter(sources.items()))
    return recorder.shards, recorder.params, recorder.failed


def blank(vllm_config: Any) -> Any:
    """A model of this configuration without storage, beside the live one."""
    with loading(vllm_config) as config, torch.device("meta"):
        return initialize_model(vllm_config=config)


@contextmanager
def loading(vllm_config: Any) -> Iterator[Any]:
    """vLLM's context for a blank model's loaders; layers of the live model are registered in its own."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    with set_current_vllm_config(config), torch.no_grad():
        yield config


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def named_storages(model: torch.nn.Module) -> dict[int, str]:
    """Storage -> its parameter or buffer, of tied ones the first."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {storage_of(param): name for name, param in reversed(named.items())}


class _Recorder(TorchFunctionMode):
    """Notes copies from the sources' storages into the parameters' storages."""

    def __init__(self, model: torch.nn.Module, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.sources = {t.name: torch.empty(t.shape, dtype=_dtype(t.itemsize), device="meta") for t in tensors}
        self.shards: list[Shard] = []
        self.failed: dict[str, str] = {}
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._source_of = {storage_of(source): name for name, source in self.sources.items()}
        self._param_of = named_storages(model)
        self.params = {name: tuple(param.shape) for name, param in model.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.Tensor.copy_:
            self._note(args[0], args[1] if len(args) > 1 else (kwargs or {})["src"])
        return func(*args, **(kwargs or {}))

    def _note(self, into: torch.Tensor, source: torch.Tensor) -> None:
        name, param = self._source_of.get(storage_of(source)), self._param_of.get(storage_of(into))
        if name is None or param is None or source.numel() == 0:
            return
        if into.shape != source.shape or into.dtype != source.dtype:
            self.failed[name] = f"{tuple(source.shape)} {source.dtype} into {tuple(into.shape)} {into.dtype} of {param}"
            return
        placed = box_of(self._shapes[name], int(source.storage_offset()), tuple(source.shape), source.stride())
        if placed is None:
            self.failed[name] = f"strides {source.stride()} at {source.storage_offset()} are no box of it"
            return
        box, axes = placed
        strides = tuple(0 if axis is None else into.stride()[axis] for axis in axes)
        self.shards.append(Shard(name, box, param, int(into.storage_offset()), strides))


def _dtype(itemsize: int) -> torch.dtype:
    return {2: torch.bfloat16, 4: torch.float32}[itemsize]


def box_of(
    shape: Sequence[int], offset: int, view_shape: Sequence[int], view_strides: Sequence[int]
) -> tuple[Box, tuple[int | None, ...]] | None:
    """The box that a strided view of a contiguous tensor shows, and which axis of the view each axis of the box is.

    An axis of one element may have no axis in the view (None). None: the view is no box.
    """
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    origin, left = [], offset
    for stride in strides:
        start, left = divmod(left, stride)
        origin.append(start)
    wide = [axis for axis, size in enumerate(view_shape) if size != 1]
    axes: list[int | None] = []
    box: list[tuple[int, int]] = []
    for start, size, stride in zip(origin, shape, strides, strict=True):
        found = next((a for a in wide if view_strides[a] == stride and a not in axes and size > 1), None)
        axes.append(found)
        box.append((start, start + (1 if found is None else view_shape[found])))
    inside = all(stop <= size for (_, stop), size in zip(box, shape, strict=True))
    return (tuple(box), tuple(axes)) if inside and {*axes} >= {*wide} else None
