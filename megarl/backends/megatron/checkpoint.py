"""A policy's weights and optimizer on disk, in Megatron's distributed format: another layout may read them."""

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel

from megarl.backends.megatron import patches
from megarl.backends.megatron.model import Model, Optimizer


def save(path: Path, model: Model, optimizer: Optimizer | None, version: int) -> None:
    """Write ``path``, a directory that exists and is empty; all ranks together. The model's config.json comes with it,
    its dtype being that of the weights.
    """
    patches.save_in_process()
    dist_checkpointing.save(_state(model, optimizer, version, loading=False), str(path))
    if torch.distributed.get_rank() == 0:
        config = model.hf.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
        (path / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
    torch.distributed.barrier()


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
