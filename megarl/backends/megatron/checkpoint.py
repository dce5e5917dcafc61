"""A policy's weights and optimizer on disk, in Megatron's distributed format: another layout may read them."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megarl.backends.megatron import patches
from megarl.backends.megatron.model import Model, Optimizer


def save(path: Path, model: Model, optimizer: Optimizer, version: int) -> None:
    """Write ``path``, a directory that exists and is empty; all ranks together."""
    patches.save_in_process()
    dist_checkpointing.save(_state(model, optimizer, version, loading=False), str(path))


def load(path: Path, model: Model, optimizer: Optimizer) -> int:
    """The version that was saved; weights and optimizer are as they were then, bit for bit if the layout is too.

    Raises ValueError where only one side keeps the optimizer of experts apart: Megatron has no way across.
    """
    saved = dist_checkpointing.load_common_state_dict(str(path)).get("optimizers", 1)
    here = len(optimizer.inner.chained_optimizers)
    if optimizer.cfg.name == "adam" and saved != here:
        how = ("has layout.ep=1", "is spread by layout.ep")
        raise ValueError(f"{path}: the policy that was saved {how[saved > 1]}, this one {how[here > 1]}")
    state: Any = dist_checkpointing.load(_state(model, optimizer, 0, loading=True), str(path))
    model.chunk.module.load_state_dict(state["model"], strict=True)
    if "optimizer" in state:
        optimizer.inner.load_state_dict(state["optimizer"])
        optimizer.own_steps()
    return int(state["version"])


def _state(model: Model, optimizer: Optimizer, version: int, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": model.groups.dp_cp,
    }
    with torch.no_grad():
        inner: Any = model.chunk.module
        weights = inner.sharded_state_dict(metadata=metadata)
        state: dict[str, Any] = {"model": weights, "version": version}
        if optimizer.cfg.name == "adam":  # plain SGD has no state
            state["optimizers"] = len(optimizer.inner.chained_optimizers)
            state["optimizer"] = optimizer.inner.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return state
