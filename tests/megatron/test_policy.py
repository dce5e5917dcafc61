"""The policy as the loop uses it: reference weights, nothing to train on, bad gradients, refusals."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from megarl import packing
from megarl.settings import BatchConfig, LayoutConfig, LossConfig, OptimizerConfig
from tests import tiny
from tests.megatron import data

SGD = OptimizerConfig(name="sgd", lr=0.05)
BATCH = BatchConfig(tokens_per_microbatch=128)
REFERENCE = frozenset({"reference"})


@pytest.mark.parametrize("layout", (LayoutConfig(), LayoutConfig(tp=2, pp=2)), ids=str)
def test_reference_stays(layout, models, policy):
    seen = data.rollouts()
    opened, _ = policy(models["qwen3"], layout, optimizer=SGD, keep_reference=True)
    before = opened.measure(seen, REFERENCE)
    assert all(np.array_equal(s.reference, s.logprobs) for s in before.values())
    batch = data.samples(seen, before, reference=True)
    with_kl = LossConfig(kl_coef=0.1)
    first = opened.update(batch, with_kl, BATCH, [0.05])
    weights = data.weights(opened)
    after = opened.measure(seen, REFERENCE)
    assert all(np.array_equal(after[k].reference, before[k].reference) for k in before)
    assert data.worst(after, before) > 1e-2  # the policy itself moved
    assert data.worst(data.weights(opened), weights) == 0  # and came back after the reference pass
    assert first["kl"] < 1e-6 < opened.update(batch, with_kl, BATCH, [0.05])["kl"]


def test_reference_is_that_of_the_model_directory_after_loading(models, policy, tmp_path):
    seen = data.rollouts()
    opened, _ = policy(models["llama"], optimizer=SGD, keep_reference=True)
    before = opened.measure(seen, REFERENCE)
    data.train(opened, data.samples(seen, before), 0.05)
    opened.save(tmp_path / "saved")
    resumed, _ = policy(models["llama"], optimizer=SGD, keep_reference=True)
    resumed.load(tmp_path / "saved")
    after = resumed.measure(seen, REFERENCE)
    assert all(np.array_equal(after[k].reference, before[k].reference) for k in before)
    assert data.worst(after, before) > 1e-2


def test_reference_that_was_not_kept_is_refused(models, policy):
    opened, _ = policy(models["llama"])
    with pytest.raises(ValueError, match="kl_coef"):
        opened.measure(data.rollouts(2), REFERENCE)


def test_nothing_to_train_on(models, policy):
    """case-I3: nothing but the version moves."""
    opened, _ = policy(models["llama"], LayoutConfig(dp=2))
    weights = data.weights(opened)
    metrics = opened.update([], LossConfig(), BATCH, [0.1])
    assert metrics["tokens"] == metrics["skipped_steps"] == 0 and opened.version == 1
    assert opened.measure([], frozenset()) == {}
    assert data.worst(data.weights(opened), weights) == 0


def test_several_steps_in_one_update(models, policy):
    seen = data.rollouts()
    opened, _ = policy(models["qwen2"], optimizer=SGD)
    batch = data.samples(seen, opened.measure(seen, frozenset()))
    rates = [0.05, 0.02]
    metrics = opened.update(batch, LossConfig(), BATCH, rates)
    together = data.weights(opened)
    assert opened.version == 1
    by_hand, _ = policy(models["qwen2"], optimizer=SGD)
    each = [
        by_hand.update(part, LossConfig(), BATCH, [lr])
        for part, lr in zip(packing.minibatches(batch, 2), rates, strict=True)
    ]
    assert data.worst(data.weights(by_hand), together) == 0
    assert metrics["loss"] == pytest.approx((each[0]["loss"] + each[1]["loss"]) / 2)
    assert metrics["tokens"] == each[0]["tokens"] + each[1]["tokens"]


@torch.no_grad()
def _spoil(worker: Any) -> None:
    worker.model.parameters()[-1].view(-1)[0] = torch.nan


@pytest.mark.parametrize("optimizer", (SGD, OptimizerConfig(lr=1e-3)), ids=lambda o: o.name)
def test_bad_gradient_is_reported_and_moves_nothing(optimizer, models, policy):
    seen = data.rollouts()
    opened, ranks = policy(models["llama"], LayoutConfig(tp=2), optimizer=optimizer)
    batch = data.samples(seen, opened.measure(seen, frozenset()))
    assert opened.update(batch, LossConfig(), BATCH, [1e-3])["skipped_steps"] == 0
    ranks.run(_spoil)
    weights = {n: t.nan_to_num(7.0) for n, t in data.weights(opened).items()}
    metrics = opened.update(batch, LossConfig(), BATCH, [1e-3])
    assert metrics["skipped_steps"] == 1 and not np.isfinite(metrics["grad_norm"])
    assert data.worst({n: t.nan_to_num(7.0) for n, t in data.weights(opened).items()}, weights) == 0


def test_phases_in_the_wrong_order_raise(models, policy):
    opened, _ = policy(models["llama"])
    with pytest.raises(RuntimeError, match="on its device already"):
        opened.onload()
    opened.offload()
    for forbidden in (opened.offload, lambda: opened.measure(data.rollouts(1), frozenset())):
        with pytest.raises(RuntimeError, match="onload it first"):
            forbidden()
    opened.onload()
    opened.measure(data.rollouts(1), frozenset())


@pytest.mark.parametrize(
    ("overrides", "message"),
    (
        ({"recompute_granularit": "full"}, "no such field; did you mean recompute_granularity"),
        ({"tensor_model_parallel_size": 2}, "set by layout.tp"),
    ),
)
def test_native_overrides_are_checked(overrides, message, models, policy):
    with pytest.raises(ValueError, match=message):
        policy(models["llama"], overrides=overrides)


def test_native_overrides_arrive(models, policy):
    """Activation recomputation changes memory, not numbers."""
    seen = data.rollouts()
    plain, _ = policy(models["llama"], optimizer=SGD)
    batch = data.samples(seen, plain.measure(seen, frozenset()))
    wanted = data.train(plain, batch, 0.02)
    fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recomputing, ranks = policy(models["llama"], optimizer=SGD, overrides=fields)
    assert ranks.run(_recomputes) == ["full"]
    assert data.train(recomputing, batch, 0.02) == wanted


def _recomputes(worker: Any) -> str:
    return worker.model.config.recompute_granularity


@pytest.mark.parametrize(
    ("family", "changes", "layout", "message"),
    (
        ("qwen2", {"use_sliding_window": True}, LayoutConfig(), "sliding"),
        ("llama", {"attention_bias": True}, LayoutConfig(), "attention_bias"),
        ("llama", {"architectures": ["GemmaForCausalLM"]}, LayoutConfig(), "GemmaForCausalLM is not one of"),
        ("llama", {"intermediate_size": 97}, LayoutConfig(tp=2), "layout.tp=2"),
        ("llama", {"num_hidden_layers": 2}, LayoutConfig(pp=4), "layout.pp=4"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            LayoutConfig(),
            "other frequencies",
        ),
    ),
    ids=lambda value: None,
)
def test_models_it_cannot_train_are_refused(family, changes, layout, message, models, policy, tmp_path):
    """case-E11, case-G11: before any training, with the reason."""
    model = tiny.write(tmp_path / "m", family)
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        policy(model, layout)


def test_llama3_rope_scaling(policy, tmp_path):
    """The scaling of Llama 3.1 and 3.2, whose frequencies a short test sequence does reach."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny.write(tmp_path / "m", "llama", rope_parameters=rope)
    opened, _ = policy(model)
    seen = data.rollouts()
    assert data.worst(opened.measure(seen, frozenset()), data.transformers_stats(model, seen, 0.7)) < 1e-4


def _rotary_dtype(worker: Any) -> str:
    inner = worker.model.chunk.module.module
    return str(inner.rotary_pos_emb.inv_freq.dtype)


def test_bfloat16_is_float32_rounded(models, policy):
    seen = data.rollouts()
    exact, _ = policy(models["qwen3"])
    stats = exact.measure(seen, frozenset({"entropy"}))
    rounded, ranks = policy(models["qwen3"], LayoutConfig(tp=2), dtype="bfloat16", optimizer=OptimizerConfig())
    difference = data.worst(rounded.measure(seen, frozenset({"entropy"})), stats)
    assert 1e-4 < difference < 0.15
    assert ranks.run(_rotary_dtype) == ["torch.float32"] * 2  # rounded frequencies turn far tokens wrongly


def test_sgd_needs_float32(models, policy):
    with pytest.raises(ValueError, match="dtype=float32"):
        policy(models["llama"], optimizer=SGD, dtype="bfloat16")


def test_the_token_budget_is_per_context_parallel_rank(models, policy):
    """A sequence of 200 tokens and a budget of 128: two context-parallel ranks hold it, with its numbers; one not."""
    seen = data.rollouts(3)
    ids, prompt_ids = np.arange(190, dtype=np.int32) % 128, np.arange(10, dtype=np.int32)
    seen[1] = dataclasses.replace(seen[1], prompt_ids=prompt_ids, token_ids=ids, logprobs=np.full(190, -3, np.float32))
    alone, _ = policy(models["llama"], tokens=128)
    with pytest.raises(ValueError, match="200"):
        alone.measure(seen, frozenset())
    halved, _ = policy(models["llama"], LayoutConfig(cp=2), optimizer=SGD, tokens=128)
    stats = halved.measure(seen, frozenset(("entropy", "certainty")))
    assert data.worst(stats, data.transformers_stats(models["llama"], seen, 0.7)) < 1e-4
    metrics = halved.update(data.samples(seen, stats), LossConfig(), BATCH, [0.01])
    assert metrics["tokens"] == sum(len(r.token_ids) for r in seen) and metrics["skipped_steps"] == 0
