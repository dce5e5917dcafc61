"""Every layout computes what one rank computes, and one rank what transformers computes; each check can fail."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from megarl.settings import LayoutConfig, OptimizerConfig
from tests import tiny
from tests.megatron import data

LR = 0.02
SGD = OptimizerConfig(name="sgd", lr=LR)
GRID = (
    LayoutConfig(tp=2),
    LayoutConfig(pp=2),
    LayoutConfig(dp=2),
    LayoutConfig(cp=2),
    LayoutConfig(tp=2, sp=True, dp=2),
    LayoutConfig(tp=2, pp=2),
    LayoutConfig(tp=2, cp=2, sp=True),
    LayoutConfig(pp=2, dp=2),
)
NEEDS = frozenset({"entropy", "certainty"})


@pytest.fixture(scope="module")
def one_rank():
    """family -> what one rank measured, its samples, three updates and the weights after them; filled on first use."""
    return {}


@pytest.fixture
def baseline(one_rank, models, policy):
    def of(family: str):
        if family not in one_rank:
            alone, _ = policy(models[family], optimizer=SGD)
            seen = data.rollouts()
            stats = alone.measure(seen, NEEDS)
            batch = data.samples(seen, stats)
            one_rank[family] = (seen, stats, batch, data.train(alone, batch, LR), data.weights(alone))
        return one_rank[family]

    return of


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_rank_equals_transformers(family, baseline, models):
    seen, stats, *_ = baseline(family)
    assert data.worst(stats, data.transformers_stats(models[family], seen, 0.7)) < 1e-4
    assert data.worst(stats, data.transformers_stats(models[family], seen, 0.71)) > 1e-2  # the temperature counts


@pytest.mark.parametrize("layout", GRID, ids=str)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_layout_equals_one_rank(family, layout, baseline, models, policy):
    seen, stats, batch, alone, weights = baseline(family)
    spread, _ = policy(models[family], layout, optimizer=SGD)
    assert data.worst(spread.measure(seen, NEEDS), stats) < 2e-5
    for here, there in zip(data.train(spread, batch, LR), alone, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-6)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=5e-5)
        assert here["clip_share"] == pytest.approx(there["clip_share"], abs=1e-7)
    assert data.worst(data.weights(spread), weights) < 1e-5


@pytest.mark.parametrize("tokens", (48, 80, 4096))
def test_packing_does_not_change_the_loss(tokens, baseline, models, policy):
    _, _, batch, alone, weights = baseline("qwen2")
    packed, _ = policy(models["qwen2"], optimizer=SGD)
    found = data.train(packed, batch, LR, tokens=tokens)
    assert {m["microbatches"] for m in found} != {m["microbatches"] for m in alone}
    for here, there in zip(found, alone, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-6)
    assert data.worst(data.weights(packed), weights) < 1e-5


def test_fewer_samples_than_data_parallel_ranks(models, policy):
    """case-F7, case-B9: a rank without samples takes part with padding."""
    seen = data.rollouts(1)
    alone, _ = policy(models["llama"], optimizer=SGD)
    stats = alone.measure(seen, NEEDS)
    batch = data.samples(seen, stats)
    wanted = data.train(alone, batch, LR)[-1]
    spread, _ = policy(models["llama"], LayoutConfig(dp=2), optimizer=SGD)
    assert data.worst(spread.measure(seen, NEEDS), stats) < 2e-5
    assert data.train(spread, batch, LR)[-1]["loss"] == pytest.approx(wanted["loss"], abs=1e-6)


# ---------------------------------------------------------------- negative controls: the bounds above catch these


def _skip_finalize(worker: Any) -> None:
    worker.model.config.finalize_model_grads_func = lambda *args, **kwargs: None


def _forget_sequence_parallel_norms(worker: Any) -> None:
    for p in worker.model.parameters():
        p.sequence_parallel = False


def _contiguous_context(worker: Any) -> None:
    from megarl.backends.megatron import forward

    forward.context_rows = lambda cu, size, rank: np.arange(int(cu[-1])).reshape(size, -1)[rank]


def _right_context(worker: Any) -> None:
    from megarl.backends.megatron import forward, order

    forward.context_rows = order.context_rows


def _divide_by_tokens(worker: Any) -> None:
    from megatron.core.distributed import finalize_model_grads

    worker.model.config.finalize_model_grads_func = lambda model, tokens, **groups: finalize_model_grads(
        model, tokens + 10, **groups
    )


@torch.no_grad()
def _perturb(worker: Any, by: float) -> None:
    named = dict(worker.model.chunk.named_parameters())
    name = next(n for n in named if n.endswith("layers.1.mlp.linear_fc2.weight"))
    named[name].view(-1)[7] += by


@pytest.mark.parametrize(
    ("layout", "breaking"),
    (
        (LayoutConfig(dp=2), _skip_finalize),
        (LayoutConfig(tp=2, sp=True), _forget_sequence_parallel_norms),
        (LayoutConfig(pp=2), _divide_by_tokens),
    ),
    ids=("finalize off", "sequence-parallel norms not reduced", "gradients divided"),
)
def test_wrong_gradients_are_seen(layout, breaking, baseline, models, policy):
    _, _, batch, alone, weights = baseline("qwen3")
    broken, ranks = policy(models["qwen3"], layout, optimizer=SGD)
    ranks.run(breaking)
    found = data.train(broken, batch, LR)
    assert found[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-6)  # the forward pass is whole
    assert found[0]["grad_norm"] != pytest.approx(alone[0]["grad_norm"], rel=5e-5)
    assert data.worst(data.weights(broken), weights) > 1e-5


def test_tied_embedding_gradients_are_reduced_over_stages(baseline, models, policy):
    """Without finalize the two copies of qwen3's tied embedding part at PP 2."""
    _, _, batch, alone, _ = baseline("qwen3")
    broken, ranks = policy(models["qwen3"], LayoutConfig(pp=2), optimizer=SGD)
    ranks.run(_skip_finalize)
    assert data.train(broken, batch, LR)[1]["loss"] != pytest.approx(alone[1]["loss"], abs=1e-6)


def test_wrong_context_slices_are_seen(baseline, models, policy):
    seen, stats, *_ = baseline("llama")
    broken, ranks = policy(models["llama"], LayoutConfig(cp=2), optimizer=SGD)
    ranks.run(_contiguous_context)
    try:
        assert data.worst(broken.measure(seen, NEEDS), stats) > 1e-2
    finally:
        ranks.run(_right_context)


def test_one_perturbed_weight_is_seen(baseline, models, policy):
    seen, stats, *_ = baseline("llama")
    exact, ranks = policy(models["llama"], optimizer=SGD)
    ranks.run(functools.partial(_perturb, by=0.01))
    assert data.worst(exact.measure(seen, NEEDS), stats) > 1e-4
