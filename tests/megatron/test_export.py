"""Weights come back as they went in, whatever the layout; and they follow the training."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.settings import LayoutConfig, OptimizerConfig
from tests import tiny
from tests.megatron import data

SGD = OptimizerConfig(name="sgd", lr=0.02)


def _source(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


@torch.no_grad()
def _double(worker: Any) -> None:
    for p in worker.model.parameters():
        p.mul_(2)


@pytest.mark.parametrize("layout", (LayoutConfig(), LayoutConfig(tp=2, pp=2), LayoutConfig(tp=4)), ids=str)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_export_is_the_source(family, layout, models, policy):
    """case-D1 at TP 4 with 2 key/value heads, case-E9: qwen3's tied head comes once, the others have heads."""
    opened, ranks = policy(models[family], layout)
    exported, source = data.weights(opened), _source(models[family])
    assert data.worst(exported, source) == 0
    assert ranks.call_all("begin_export") == [max(t.nbytes for t in source.values())] * layout.world
    assert ("lm_head.weight" in exported) == (family != "qwen3")
    ranks.run(_double)
    assert data.worst(data.weights(opened), {name: 2 * t for name, t in source.items()}) == 0


@pytest.mark.parametrize("tp", (1, 2))
def test_query_groups_keep_their_order(tp, policy, tmp_path):
    """case-D3: 4 heads, 2 key/value heads, head size 2, weights that count."""
    model = tiny.write(tmp_path / "m", "qwen3", hidden_size=8, head_dim=2, intermediate_size=8, num_hidden_layers=2)
    source = {n: torch.arange(t.numel(), dtype=torch.float32).view_as(t) for n, t in _source(model).items()}
    save_file(source, model / "model.safetensors", metadata={"format": "pt"})
    opened, _ = policy(model, LayoutConfig(tp=tp))
    assert data.worst(data.weights(opened), source) == 0


def test_more_ranks_than_key_value_heads(models, policy):
    """case-D1: logits and an optimizer step equal those of one rank; the shared heads stay equal."""
    seen = data.rollouts()
    alone, _ = policy(models["qwen3"], optimizer=SGD)
    stats = alone.measure(seen, frozenset())
    batch = data.samples(seen, stats)
    data.train(alone, batch, 0.02)
    weights = data.weights(alone)
    spread, _ = policy(models["qwen3"], LayoutConfig(tp=4), optimizer=SGD)
    assert data.worst(spread.measure(seen, frozenset()), stats) < 1e-5
    data.train(spread, batch, 0.02)
    assert data.worst(data.weights(spread), weights) < 1e-5


@pytest.mark.parametrize("family", ("qwen3", "llama"))
def test_padded_vocabulary(family, policy, tmp_path):
    """case-D5, case-C15: 10 rows on 4 ranks; padding is neither exported nor part of any softmax."""
    model = tiny.write(tmp_path / "m", family, vocab_size=10, hidden_size=64)
    seen = data.rollouts(vocabulary=10)
    needs = frozenset({"entropy", "certainty"})
    opened, _ = policy(model, LayoutConfig(tp=4), optimizer=SGD)
    assert data.worst(data.weights(opened), _source(model)) == 0
    stats = opened.measure(seen, needs)
    assert data.worst(stats, data.transformers_stats(model, seen, 0.7)) < 1e-4
    data.train(opened, data.samples(seen, stats), 0.02)
    moved = data.weights(opened)
    assert moved["model.embed_tokens.weight"].shape[0] == 10
    assert data.worst(moved, _source(model)) > 1e-3


@pytest.mark.parametrize(("layers", "stages"), ((7, [4, 3]), (5, [2, 1, 1, 1])), ids=str)
def test_layers_that_do_not_divide(layers, stages, policy, tmp_path):
    """case-D7: all of them are there, compute, learn, and are saved."""
    model = tiny.write(tmp_path / "m", "llama", num_hidden_layers=layers)
    opened, ranks = policy(model, LayoutConfig(pp=len(stages)), optimizer=SGD)
    assert ranks.run(_layer_count) == stages
    assert data.worst(data.weights(opened), _source(model)) == 0
    seen = data.rollouts(4)
    stats = opened.measure(seen, frozenset({"entropy", "certainty"}))
    assert data.worst(stats, data.transformers_stats(model, seen, 0.7)) < 1e-4
    data.train(opened, data.samples(seen, stats), 0.02, updates=1)
    moved = data.weights(opened)
    assert all(not torch.equal(moved[n], t) for n, t in _source(model).items() if n.endswith("o_proj.weight"))
    opened.save(tmp_path / "saved")
    alone, _ = policy(model, optimizer=SGD)
    alone.load(tmp_path / "saved")
    assert data.worst(data.weights(alone), moved) == 0


def _stage_sizes(worker: Any) -> dict[tuple[int, int], list[int] | str]:
    """(layers, stages) -> layers per stage where they are spelt out, or why there is no such model."""
    from megarl.backends.megatron.model import _stages

    found = {}
    for layers, pp in itertools.product(range(1, 33), (1, 2, 3, 4, 5, 8)):
        try:
            found[layers, pp] = [s.count("decoder") for spelt in _stages(layers, pp).values() for s in spelt]
        except ValueError as error:
            found[layers, pp] = str(error)
    return found


def test_every_layer_has_a_stage(models, policy):
    _, ranks = policy(models["llama"])
    for (layers, pp), sizes in ranks.run(_stage_sizes)[0].items():
        if layers < pp:
            assert sizes == f"layout.pp={pp} stages, but the model has num_hidden_layers={layers}"
        elif layers % pp:
            assert sum(sizes) == layers and len(sizes) == pp
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] == 1
        else:
            assert sizes == []


def _layer_count(worker: Any) -> int:
    return len(worker.model.chunk.module.decoder.layers)


def test_buckets_hold_what_they_may(models, policy, monkeypatch, tmp_path):
    """A larger tensor has a file of its own, for which there must be room too."""
    opened, _ = policy(models["qwen2"], LayoutConfig(tp=2))
    largest = max(t.nbytes for t in _source(models["qwen2"]).values())
    asked = []
    monkeypatch.setattr("megarl.backends.megatron.policy.roomy_folder", lambda nbytes: asked.append(nbytes) or tmp_path)
    paths, names = [], []
    for bucket in opened.weights(largest // 2):
        assert all(not path.exists() for path in paths)
        assert bucket.path.exists()
        assert bucket.nbytes <= largest // 2 or len(bucket.names) == 1
        paths.append(bucket.path)
        names += bucket.names
    assert len(paths) > 5 and sorted(names) == sorted(_source(models["qwen2"]))
    assert asked == [largest]
    assert not list(tmp_path.iterdir())


def test_a_broken_off_export_can_start_again(models, policy):
    opened, _ = policy(models["qwen2"], LayoutConfig(pp=2))
    buckets = opened.weights(20_000)
    first = next(buckets)
    buckets.close()
    assert not first.path.parent.exists()
    assert data.worst(data.weights(opened), _source(models["qwen2"])) == 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trained_weights_load_in_transformers(family, models, policy, tmp_path):
    """case-E9: nothing missing, nothing unexpected, and the same logprobs."""
    seen = data.rollouts()
    opened, _ = policy(models[family], LayoutConfig(tp=2), optimizer=SGD)
    data.train(opened, data.samples(seen, opened.measure(seen, frozenset())), 0.02)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((models[family] / name).read_text())
    save_file(data.weights(opened), tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, notes = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    stats = opened.measure(seen, frozenset())
    assert data.worst(stats, data.transformers_stats(tmp_path, seen, 0.7)) < 1e-4
    assert data.worst(stats, data.transformers_stats(models[family], seen, 0.7)) > 1e-2
