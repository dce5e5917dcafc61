"""GSPO over real ranks: a sequence cut by context parallelism, or packed with others, has the ratio of the whole."""

from typing import Any

import pytest

from megarl.settings import BatchConfig, LayoutConfig, LossConfig, OptimizerConfig
from tests.megatron import data

LR = 0.02
SGD = OptimizerConfig(name="sgd", lr=LR)
GSPO = LossConfig(
    ratio_level="sequence", clip_low=0.02, clip_high=0.03, aggregation="seq-mean-token-mean", kl_coef=0.1, tis_cap=2.0
)


def _train(policy, batch, tokens=128, lr=LR):
    cfg = BatchConfig(tokens_per_microbatch=tokens)
    return [policy.update(batch, GSPO, cfg, [lr]) for _ in range(2)]


def _forget_the_other_rank(worker: Any) -> None:
    worker._context_sum = lambda values: values


def _remember(worker: Any) -> None:
    del worker._context_sum


def test_context_parallel_and_packing_equal_one_rank(models, policy):
    seen = data.rollouts()
    alone, _ = policy(models["llama"], optimizer=SGD, keep_reference=True)
    batch = data.samples(seen, alone.measure(seen, frozenset({"reference"})), reference=True)
    wanted = _train(alone, batch)
    weights = data.weights(alone)
    assert all(0 < m["clip_share"] < 1 for m in wanted) and wanted[1]["kl"] > 0  # the first update is at the reference

    packed, _ = policy(models["llama"], optimizer=SGD, keep_reference=True)
    assert [m["loss"] for m in _train(packed, batch, tokens=48)] == pytest.approx([m["loss"] for m in wanted], abs=1e-6)

    cut, ranks = policy(models["llama"], LayoutConfig(cp=2), optimizer=SGD, keep_reference=True)
    ranks.run(_forget_the_other_rank)
    halves = _train(cut, batch, lr=0.0)[0]
    assert abs(halves["ratio"] - wanted[0]["ratio"]) > 1e-3  # the bounds below catch a ratio of half a sequence
    assert halves["grad_norm"] != pytest.approx(wanted[0]["grad_norm"], rel=1e-2)
    ranks.run(_remember)
    for here, there in zip(_train(cut, batch), wanted, strict=True):
        for name in ("loss", "kl", "ratio", "log_ratio", "clip_share"):
            assert here[name] == pytest.approx(there[name], abs=1e-6), name
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=5e-5)
    assert data.worst(data.weights(cut), weights) < 1e-5
