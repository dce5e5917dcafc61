"""The fused head gives what the model's own head gives: statistics, losses, gradients; and the comparison can fail."""

import pytest

from megarl.settings import BatchConfig, KernelsConfig, LayoutConfig, LossConfig, OptimizerConfig
from tests.megatron import data

SGD = OptimizerConfig(name="sgd", lr=0.02)
BATCH = BatchConfig(tokens_per_microbatch=128)
NEEDS = frozenset({"entropy", "certainty"})
FUSED, LOGITS = KernelsConfig(), KernelsConfig(fused_head=False)
SMALL = KernelsConfig(workspace_bytes=1 << 16)  # chunks of 128 rows at most, at tp 1


def _gradients(worker):
    """Of the last update; sums over data- and context-parallel ranks."""
    return {name: p.main_grad.clone() for name, p in worker.model.chunk.named_parameters()}


def answers(opened, ranks, batch, seen):
    stats = opened.measure(seen, NEEDS)
    metrics = opened.update(batch, LossConfig(), BATCH, [0.02])
    return stats, metrics, ranks.run(_gradients)


@pytest.mark.parametrize(
    ("family", "layout"),
    (
        ("qwen3", LayoutConfig(tp=2, pp=2)),  # a tied head
        ("llama", LayoutConfig(tp=2, pp=2, sp=True)),
        ("qwen2", LayoutConfig(cp=2)),
    ),
    ids=str,
)
def test_both_paths_give_the_same_gradients(family, layout, models, policy):
    seen = data.rollouts()
    plain, ranks = policy(models[family], layout, optimizer=SGD, kernels=LOGITS)
    batch = data.samples(seen, plain.measure(seen, frozenset()))
    stats, metrics, gradients = answers(plain, ranks, batch, seen)
    fused, ranks = policy(models[family], layout, optimizer=SGD, kernels=FUSED)
    found, fused_metrics, fused_gradients = answers(fused, ranks, batch, seen)
    assert data.worst(found, stats) < 2e-5
    assert metrics.keys() == fused_metrics.keys()
    for name, value in metrics.items():
        assert fused_metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for here, there in zip(fused_gradients, gradients, strict=True):  # rank by rank
        assert here.keys() == there.keys()
        for name in here:
            gap, size = (here[name] - there[name]).norm(), there[name].norm()
            assert gap <= 1e-5 * size + 1e-9, (name, float(gap), float(size))
        assert any(g.any() for g in there.values())


@pytest.mark.parametrize("fused_head", (True, False))
def test_one_run_compares_both(fused_head, models, policy):
    seen = data.rollouts()
    kernels = KernelsConfig(fused_head=fused_head, compare=True)
    opened, ranks = policy(models["qwen3"], LayoutConfig(tp=2, sp=True), optimizer=SGD, kernels=kernels)
    batch = data.samples(seen, opened.measure(seen, NEEDS))
    metrics = opened.update(batch, LossConfig(), BATCH, [0.02])
    for name in ("logprob", "entropy", "self_certainty", "gradient"):
        assert 0 <= metrics[f"kernels_{name}_difference"] < 1e-5, name
    ranks.run(_warm_fused_head)
    metrics = opened.update(batch, LossConfig(), BATCH, [0.02])
    assert metrics["kernels_logprob_difference"] > 1e-2 < metrics["kernels_gradient_difference"]


def _warm_fused_head(worker):
    from megarl.backends.megatron import head

    exact = head.linear_logprob
    head.linear_logprob = lambda *args, temperature, **options: exact(*args, temperature=1.05 * temperature, **options)


def test_bfloat16_model(models, policy):
    """The fused head does not round its logits; the model's own rounds them to bfloat16."""
    seen = data.rollouts()
    kernels = KernelsConfig(compare=True)
    opened, _ = policy(
        models["llama"], LayoutConfig(tp=2), optimizer=OptimizerConfig(lr=1e-3), kernels=kernels, dtype="bfloat16"
    )
    batch = data.samples(seen, opened.measure(seen, NEEDS))
    metrics = opened.update(batch, LossConfig(), BATCH, [1e-3])
    assert metrics["skipped_steps"] == 0
    assert 1e-4 < metrics["kernels_logprob_difference"] < 0.1 and metrics["kernels_gradient_difference"] < 0.05


def _other_head(worker):
    inner = worker.model.chunk.module
    kind = type(inner.output_layer)

    def forward(self, *args, **kwargs):
        logits, bias = kind.forward(self, *args, **kwargs)
        return logits.tanh(), bias

    inner.output_layer.__class__ = type("CappedHead", (kind,), {"forward": forward})


def test_a_head_that_computes_more_makes_its_own_logits(models, policy):
    seen = data.rollouts(2)
    opened, ranks = policy(models["llama"], optimizer=SGD)
    fused = opened.measure(seen, frozenset())
    ranks.run(_other_head)
    assert data.worst(opened.measure(seen, frozenset()), fused) > 0.01
    compared, ranks = policy(models["llama"], optimizer=SGD, kernels=KernelsConfig(compare=True))
    ranks.run(_other_head)
    with pytest.raises(ValueError, match=r"kernels.compare=true: this model's head caps"):
        compared.measure(seen, frozenset())


def test_chunks_do_not_show(models, policy):
    """Packs of several chunks, and a chunk that several packs fill."""
    seen = data.rollouts()
    one, _ = policy(models["llama"], optimizer=SGD, kernels=FUSED, tokens=4096)
    whole = one.measure(seen, NEEDS)
    cut, _ = policy(models["llama"], optimizer=SGD, kernels=SMALL, tokens=4096)
    assert data.worst(cut.measure(seen, NEEDS), whole) < 1e-6
