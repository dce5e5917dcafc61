"""Every replacement in a library is still needed: a test here that fails names one that can go."""

import importlib
import inspect
import sys
from typing import Any

import psutil
import pytest
import torch

from megarl.backends.megatron import cpu
from megarl.settings import LayoutConfig, OptimizerConfig
from tests import tiny
from tests.megatron import data

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")


def _used(worker: Any) -> set[str]:
    return cpu.used


def test_every_patch_is_used(models, policy, tmp_path):
    """Three layouts, a step, a save and a load reach all of them."""
    seen = data.rollouts()
    found: set[str] = set()
    experts = tiny.write(tmp_path / "experts", "qwen3_moe")
    for model, layout in (
        (models["qwen2"], LayoutConfig(tp=2, cp=2, sp=True)),
        (models["qwen2"], LayoutConfig(pp=2)),
        (experts, LayoutConfig(dp=2, ep=2)),
    ):
        opened, ranks = policy(model, layout, optimizer=OptimizerConfig(lr=1e-3))
        data.train(opened, data.samples(seen, opened.measure(seen, frozenset())), 1e-3, updates=1)
        opened.save(tmp_path / str(layout))
        opened.load(tmp_path / str(layout))
        found |= set().union(*ranks.run(_used))
    assert found == set(cpu.PATCHES)


def _import_bridge_again(worker: Any) -> str | None:
    for name in [n for n in sys.modules if n.startswith("megatron.bridge")]:
        del sys.modules[name]
    try:
        importlib.import_module("megatron.bridge")
    except ModuleNotFoundError as error:
        return error.name
    return None


def test_bridge_still_needs_the_stand_in_names(models, policy):
    _, ranks = policy(models["qwen2"])
    assert ranks.run(_import_bridge_again) == ["transformer_engine"]


def _no_honest_import(worker: Any) -> str:
    try:
        import transformer_engine
    except ModuleNotFoundError:
        return "absent"
    return str(transformer_engine)


def _adam_step(worker: Any, path: str) -> str:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    ours = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = ours.__wrapped__
    try:
        worker.load(path)
    except KeyError as error:
        return str(error)
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = ours
    return "loaded"


def test_stand_ins_are_gone_after_the_import_and_adam_needs_its_step(models, policy, tmp_path):
    opened, ranks = policy(models["qwen2"], optimizer=OptimizerConfig(lr=1e-3))
    assert ranks.run(_no_honest_import) == ["absent"]
    opened.save(tmp_path / "saved")
    assert ranks.run(_adam_step, str(tmp_path / "saved")) == ["'step'"]


def _children(worker: Any) -> int:
    return len(psutil.Process().children(recursive=True))


def _source_of_writer(worker: Any) -> str:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    return inspect.getsource(filesystem_async)


def test_saving_leaves_no_processes(models, policy, tmp_path):
    opened, ranks = policy(models["qwen2"], LayoutConfig(dp=2))
    before = ranks.run(_children)
    opened.save(tmp_path / "saved")
    assert ranks.run(_children) == before == [0, 0]
    assert "ctx.Manager().Queue()" in ranks.run(_source_of_writer)[0]  # what the replacement is for
