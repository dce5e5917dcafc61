"""A policy's weights and optimizer on disk, in Megatron's distributed format: another layout may read them."""

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel

from megarl.backends.megatron import patches
from megarl.backends.megatron.model import Model, Optimizer


class Saving:
    """A save under way into ``path``, a directory that exists and is empty; all ranks together. The model's config.json
    comes with it, its dtype being that of the weights.

    What is written is a copy in host memory, made before this returns, so that weights and optimizer may change and
    move meanwhile. The copy is as large as this rank's part of the state.
    """

    def __init__(self, path: Path, model: Model, optimizer: Optimizer | None, version: int) -> None:
        patches.save_in_process()
        self._path = path
        self._config = model.hf.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
        state = _state(model, optimizer, version, loading=False)
        self._request: Any = dist_checkpointing.save(state, str(path), async_sharded_save=True, async_strategy="mcore")
        self._error: BaseException | None = None
        self._writer = Thread(target=self._write, args=(_copied(self._request.async_fn_args),), name="save")
        self._writer.start()

    def _write(self, args: Sequence[Any]) -> None:
        try:
            if self._request.async_fn is not None:  # None: this rank has nothing to write
                self._request.async_fn(*args, **self._request.async_fn_kwargs)
        except BaseException as error:  # a thread's own is lost; the rank raises it in ``end``
            self._error = error

    def end(self) -> None:
        """Wait, and close the directory; raises what went wrong in writing."""
        self._writer.join()
        if self._error is not None:
            raise self._error
        torch.distributed.barrier()
        for close in self._request.finalize_fns:
            close()
        if torch.distributed.get_rank() == 0:
            text = json.dumps(self._config, indent=2, default=str)
            (self._path / "config.json").write_text(f"{text}\n", encoding="utf-8")
        torch.distributed.barrier()


def save(path: Path, model: Model, optimizer: Optimizer | None, version: int) -> None:
    """The whole of it at once."""
    Saving(path, model, optimizer, version).end()


def _copied(args: Sequence[Any]) -> list[Any]:
    """Arguments of megatron-core's writer, [rank, buckets, results], with every tensor a copy in host memory."""
    if not args:
        return []
    rank, buckets, results = args
    copies = [
        (file, key, (texts, [(item, tensor.detach().to("cpu", copy=True)) for item, tensor in tensors]))
        for file, key, (texts, tensors) in buckets
    ]
    return [rank, copies, results]


def load(path: Path, model: Model, optimizer: Optimizer | None) -> int:
    """The version that was saved; weights and optimizer are as they were then, bit for bit if the layout is too.

    Raises ValueError where only one side keeps the optimizer of experts apart: Megatron has no way across.
    """
    if optimizer is not None and optimizer.cfg.name == "adam":
        saved = dist_checkpointing.load_common_state_dict(str(path)).get("optimizers", 1)
        here = len(optimizer.inner.chained_optimizers)
        if saved != here:
            how = ("has layout.ep=1", "is spread by layout.ep")
            raise ValueError(f"{path}: the policy that was saved {how[saved > 1]}, this one {how[here > 1]}")
    state: Any = dist_checkpointing.load(_state(model, optimizer, 0, loading=True), str(path))
    _inside(model).load_state_dict(state["model"], strict=True)
    if optimizer is not None and "optimizer" in state:
        optimizer.inner.load_state_dict(state["optimizer"])
        optimizer.own_steps()
    return int(state["version"])


def _inside(model: Model) -> Any:
    return model.chunk.module if isinstance(model.chunk, DistributedDataParallel) else model.chunk


def _state(model: Model, optimizer: Optimizer | None, version: int, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": model.groups.dp_cp,
    }
    with torch.no_grad():
        weights = _inside(model).sharded_state_dict(metadata=metadata)
        state: dict[str, Any] = {"model": weights, "version": version}
        if optimizer is not None and optimizer.cfg.name == "adam":  # plain SGD has no state
            state["optimizers"] = len(optimizer.inner.chained_optimizers)
            state["optimizer"] = optimizer.inner.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return state
