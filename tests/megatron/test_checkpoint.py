"""Resume equals the uninterrupted run bit for bit; another layout may resume; each check can fail."""

from typing import Any

import pytest
import torch

from megarl.settings import LayoutConfig, OptimizerConfig
from tests import tiny
from tests.megatron import data

LR = 1e-3
ADAM = OptimizerConfig(name="adam", lr=LR, weight_decay=0.1)


def _run(policy: Any, updates: int) -> list:
    seen = data.rollouts()
    found = []
    for _ in range(updates):
        batch = data.samples(seen, policy.measure(seen, frozenset()), seed=policy.version)
        found += data.train(policy, batch, LR, updates=1)
    return found


@pytest.mark.parametrize(
    ("family", "layout", "optimizer"),
    (
        ("qwen2", LayoutConfig(), ADAM),
        ("qwen3", LayoutConfig(tp=2, pp=2), ADAM),
        ("llama", LayoutConfig(tp=2, dp=2, sp=True), ADAM),
        ("llama", LayoutConfig(cp=2), OptimizerConfig(name="sgd", lr=LR)),
    ),
    ids=("one rank", "TP2xPP2", "TP2xDP2+SP", "CP2, SGD"),
)
def test_resume_is_bitwise(family, layout, optimizer, models, policy, tmp_path):
    """case-E13: 4 updates against 2 + 2."""
    whole, _ = policy(models[family], layout, optimizer=optimizer)
    metrics = _run(whole, 4)
    weights = data.weights(whole)

    first, _ = policy(models[family], layout, optimizer=optimizer)
    found = _run(first, 2)
    first.save(tmp_path / "saved")
    half = data.weights(first)
    second, _ = policy(models[family], layout, optimizer=optimizer)
    second.load(tmp_path / "saved")
    assert second.version == 2
    assert data.worst(data.weights(second), half) == 0
    found += _run(second, 2)

    assert found == metrics
    assert data.worst(data.weights(second), weights) == 0


def test_saving_does_not_disturb(models, policy, tmp_path):
    whole, _ = policy(models["qwen2"], optimizer=ADAM)
    wanted = _run(whole, 3)
    saving, _ = policy(models["qwen2"], optimizer=ADAM)
    saving.save(tmp_path / "0")  # before the first step
    found = _run(saving, 2)
    saving.save(tmp_path / "2")
    assert found + _run(saving, 1) == wanted


def test_what_is_written_in_the_background_is_what_it_was(models, policy, tmp_path):
    """An update, and another policy's whole life, lie between the copy and the end of the save."""
    whole, _ = policy(models["llama"], LayoutConfig(tp=2), optimizer=ADAM)
    _run(whole, 1)
    before = data.weights(whole)
    whole.begin_save(tmp_path / "saved")
    found = _run(whole, 1)
    assert data.worst(data.weights(whole), before) > 0
    with pytest.raises(RuntimeError, match="the last save has not been ended"):
        whole.begin_save(tmp_path / "other")
    whole.end_save()
    again, _ = policy(models["llama"], LayoutConfig(tp=2), optimizer=ADAM)
    again.load(tmp_path / "saved")
    assert again.version == 1 and data.worst(data.weights(again), before) == 0
    assert _run(again, 1) == found


def _share_steps(worker: Any) -> None:
    worker.optimizer.own_steps = lambda: None


def _steps(worker: Any) -> list[float]:
    return sorted({float(s["step"]) for o in worker.optimizer.torch_optimizers() for s in o.state.values()})


def test_shared_adam_steps_would_be_seen(models, policy, tmp_path):
    """Control: without ``own_steps`` one step tensor is advanced once per parameter, and the weights differ."""
    first, ranks = policy(models["qwen2"], optimizer=ADAM)
    _run(first, 2)
    first.save(tmp_path / "saved")
    _run(first, 1)
    weights = data.weights(first)
    assert ranks.run(_steps) == [[3.0]]
    second, ranks = policy(models["qwen2"], optimizer=ADAM)
    ranks.run(_share_steps)
    second.load(tmp_path / "saved")
    _run(second, 1)
    assert ranks.run(_steps) != [[3.0]]
    assert data.worst(data.weights(second), weights) > 1e-5


@pytest.mark.parametrize(
    ("saved", "loaded"),
    (
        (LayoutConfig(tp=2), LayoutConfig(pp=2)),
        (LayoutConfig(tp=2, pp=2), LayoutConfig()),
        (LayoutConfig(), LayoutConfig(tp=2, dp=2, sp=True)),
    ),
    ids=str,
)
@pytest.mark.parametrize("vocabulary", (128, 125))
def test_another_layout_resumes(saved, loaded, vocabulary, policy, tmp_path):
    """125 rows are padded to 126 at TP 2 and not at TP 1: the padding is not part of what is saved."""
    model = tiny.write(tmp_path / "model", "qwen3", vocab_size=vocabulary)
    first, _ = policy(model, saved, optimizer=ADAM)
    seen = data.rollouts(vocabulary=vocabulary)
    batch = data.samples(seen, first.measure(seen, frozenset()))
    data.train(first, batch, LR, updates=2)
    first.save(tmp_path / "saved")
    here = data.weights(first)
    wanted = data.train(first, batch, LR, updates=2)

    second, _ = policy(model, loaded, optimizer=ADAM)
    second.load(tmp_path / "saved")
    assert second.version == 2
    assert data.worst(data.weights(second), here) == 0
    for a, b in zip(data.train(second, batch, LR, updates=2), wanted, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)  # Adam divides by tiny second moments
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def _forget_moments(worker: Any) -> None:
    for optimizer in worker.optimizer.torch_optimizers():
        for state in optimizer.state.values():
            torch.nn.init.zeros_(state["exp_avg"])


def test_lost_moments_would_be_seen(models, policy, tmp_path):
    first, _ = policy(models["qwen3"], optimizer=ADAM)
    _run(first, 2)
    first.save(tmp_path / "saved")
    _run(first, 1)
    weights = data.weights(first)
    second, ranks = policy(models["qwen3"], LayoutConfig(pp=2), optimizer=ADAM)
    second.load(tmp_path / "saved")
    ranks.run(_forget_moments)
    _run(second, 1)
    assert data.worst(data.weights(second), weights) > 1e-4


def test_bfloat16_resumes_bitwise(models, policy, tmp_path):
    """The float32 copy of the weights is part of what is saved."""
    whole, _ = policy(models["llama"], LayoutConfig(tp=2), optimizer=ADAM, dtype="bfloat16")
    first = _run(whole, 2)
    whole.save(tmp_path / "saved")
    rest = _run(whole, 2)
    weights = data.weights(whole)
    resumed, _ = policy(models["llama"], LayoutConfig(tp=2), optimizer=ADAM, dtype="bfloat16")
    resumed.load(tmp_path / "saved")
    assert _run(resumed, 2) == rest != first
    assert data.worst(data.weights(resumed), weights) == 0
