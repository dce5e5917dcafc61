"""Families with windows, caps, norms of their own or experts: every layout computes what transformers computes.

Responses of up to 40 tokens, several to a pack, against windows of 8.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.backends.megatron.gemma3 import pattern
from megarl.settings import LayoutConfig, OptimizerConfig
from tests import tiny
from tests.megatron import data

SGD, ADAM = OptimizerConfig(name="sgd", lr=0.02), OptimizerConfig(lr=1e-3)
ONE, SPREAD, CONTEXT = LayoutConfig(), LayoutConfig(tp=2, pp=2, sp=True), LayoutConfig(cp=2)
EXPERTS = LayoutConfig(dp=2, ep=2)
NEEDS = frozenset({"entropy", "certainty"})
CASES = (
    *((family, layout) for family in ("gemma2", "gemma3", "mistral", "qwen3_moe") for layout in (SPREAD, CONTEXT)),
    ("gemma3", LayoutConfig(tp=2, pp=2)),
    ("llama3", SPREAD),
    ("qwen3_moe", EXPERTS),
    ("qwen3_moe", LayoutConfig(cp=2, ep=2)),
)


@pytest.fixture(scope="module")
def known(tmp_path_factory, request):
    """family -> its model, rollouts, what transformers says of them, and what one rank makes of them, once asked."""
    made: dict[str, tuple] = {}

    def of(family: str) -> tuple:
        if family not in made:
            model = tiny.write(tmp_path_factory.mktemp(family), family)
            seen = data.rollouts(longest=40)
            made[family] = (model, seen, data.transformers_stats(model, seen, 0.7), {})
        return made[family]

    return of


def trained(opened, seen, stats) -> tuple:
    batch = data.samples(seen, stats)
    return data.train(opened, batch, 0.02, updates=2), data.weights(opened)


@pytest.fixture
def alone(known, policy):
    def of(family: str) -> tuple:
        model, seen, wanted, kept = known(family)
        if not kept:
            opened, _ = policy(model, optimizer=SGD)
            kept["measured"], kept["exported"] = opened.measure(seen, NEEDS), data.weights(opened)
            kept["trained"] = trained(opened, seen, wanted)
        return model, seen, wanted, kept

    return of


@pytest.mark.parametrize("family", ("gemma2", "gemma3", "mistral", "llama3", "qwen3_moe"))
def test_one_rank_is_transformers(family, alone):
    model, _, wanted, kept = alone(family)
    assert data.worst(kept["measured"], wanted) < 1e-4
    assert data.worst(kept["exported"], load_file(model / "model.safetensors")) == 0


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_layouts_are_transformers(family, layout, alone, policy):
    """Logprobs, the exported weights, and two updates against those of one rank."""
    model, seen, wanted, kept = alone(family)
    spread, _ = policy(model, layout, optimizer=SGD)
    assert data.worst(spread.measure(seen, NEEDS), wanted) < 1e-4
    assert data.worst(data.weights(spread), load_file(model / "model.safetensors")) == 0
    metrics, weights = trained(spread, seen, wanted)
    for here, there in zip(metrics, kept["trained"][0], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-6)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=5e-5)
    assert data.worst(weights, kept["trained"][1]) < 1e-5


@pytest.mark.parametrize(
    ("family", "change"),
    (
        ("gemma3", {"sliding_window": 9}),
        ("mistral", {"sliding_window": 9}),
        ("gemma2", {"attn_logit_softcapping": 2.1}),
        ("gemma2", {"final_logit_softcapping": 1.6}),
        ("gemma3", {"query_pre_attn_scalar": 25}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
        ("qwen3_moe", {"num_experts_per_tok": 3}),
    ),
    ids=str,
)
def test_a_wrong_configuration_would_show(family, change, known, policy, tmp_path):
    """Control: every feature is felt by the rollouts, and read from the model's own configuration."""
    source, seen, wanted, _ = known(family)
    model = _changed(source, tmp_path, change)
    found = policy(model)[0].measure(seen, NEEDS)
    assert data.worst(found, wanted) > 1e-3
    assert data.worst(found, data.transformers_stats(model, seen, 0.7)) < 1e-4


def _changed(source: Path, folder: Path, change: dict) -> Path:
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text()) | change
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "change", "layout", "message"),
    (
        ("gemma3", {"use_bidirectional_attention": True}, ONE, "use_bidirectional_attention=True"),
        ("gemma3", {"final_logit_softcapping": 30.0}, ONE, "final_logit_softcapping=30.0"),
        ("gemma2", {"layer_types": ["full_attention"] * 4}, ONE, "layer_types="),
        ("qwen3_moe", {"mlp_only_layers": [1]}, ONE, "mlp_only_layers"),
        ("qwen3_moe", {}, LayoutConfig(tp=2), "needs layout.sp=true"),
        ("qwen3_moe", {}, LayoutConfig(ep=2), "layout.ep=2 does not divide cp"),
        ("qwen3_moe", {}, LayoutConfig(tp=2, dp=2, ep=2, sp=True), "layout.tp=2 and layout.ep=2"),
        ("llama3", {}, LayoutConfig(dp=2, ep=2), "must divide the experts of the model, of which there are 0"),
    ),
)
def test_what_is_not_built_is_refused(family, change, layout, message, known, policy, tmp_path):
    model = _changed(known(family)[0], tmp_path, change)
    with pytest.raises(ValueError, match=message):
        policy(model, layout)


def test_patterns_of_local_layers():
    local, whole = "sliding_attention", "full_attention"
    assert pattern([local] * 5 + [whole] + [local] * 5 + [whole]) == (5, 1)
    assert pattern([whole, whole]) == (0, 1)
    assert pattern([local] * 3) == (3, 1)
    with pytest.raises(ValueError, match="every n-th"):
        pattern([local, whole, whole])


def test_experts_resume_where_they_were(known, policy, tmp_path):
    model, seen, wanted, _ = known("qwen3_moe")
    batch = data.samples(seen, wanted)
    opened, _ = policy(model, EXPERTS, optimizer=ADAM)
    data.train(opened, batch, 1e-3, updates=1)
    opened.save(tmp_path / "saved")
    data.train(opened, batch, 1e-3, updates=1)
    weights = data.weights(opened)
    resumed, _ = policy(model, EXPERTS, optimizer=ADAM)
    resumed.load(tmp_path / "saved")
    data.train(resumed, batch, 1e-3, updates=1)
    assert data.worst(data.weights(resumed), weights) == 0
    gathered, _ = policy(model, optimizer=ADAM)
    with pytest.raises(ValueError, match=r"is spread by layout.ep, this one has layout.ep=1"):
        gathered.load(tmp_path / "saved")


def _scale(worker) -> list[float]:
    """Of the embedding, in the model's dtype."""
    inner = worker.model.chunk.module.module
    ids = torch.arange(8)[None]
    rows = inner.embedding.word_embeddings.weight[:8]
    scaled = inner.embedding(input_ids=ids, position_ids=ids)[:, 0]
    return (scaled.float() / rows.float()).flatten().tolist()


@pytest.mark.parametrize("family", ("gemma2", "gemma3"))
def test_the_embedding_scale_is_rounded(family, policy, tmp_path):
    """sqrt(72) is 8.485 and in bfloat16 8.5, which transformers and vLLM multiply by."""
    model = tiny.write(tmp_path / "m", family, hidden_size=72, head_dim=16)
    _, ranks = policy(model, dtype="bfloat16", optimizer=ADAM)
    assert np.median(ranks.run(_scale)[0]) == 8.5
