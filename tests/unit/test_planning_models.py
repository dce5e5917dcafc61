"""Shapes against transformers' own models, and what a rank of a layout holds of them."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.config import compose
from megarl.planning.memory import Layout, rank_parameters, stage_layers
from megarl.planning.models import read_shape, shape_of, shipped

PRESETS = ("cohort_7b_8b", "cohort_3b_ring3", "ring_7b_32b_70b", "coverrl_7b")


def build(config: dict) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@pytest.mark.parametrize("name", shipped())
def test_parameters_are_those_of_transformers(name):
    config = json.loads(shipped()[name].read_text())
    model = build(config)
    assert read_shape(name).parameters == sum(p.numel() for p in model.parameters())
    assert type(model).__name__ == config["architectures"][0]


def test_published_totals():
    """Counts that the models' authors print, by hand: the shipped files themselves could be wrong."""
    totals = {
        "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
        "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
        "meta-llama/Llama-3.1-70B": 70_553_706_496,
        "meta-llama/Llama-3.1-405B-Instruct": 405_853_388_800,
        "Qwen/Qwen2.5-72B": 72_706_203_648,
        "google/gemma-2-9b-it": 9_241_705_984,
        "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
        "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    }
    assert {
        model: read_shape(model.replace("Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3")).parameters for model in totals
    } == totals
    assert read_shape("qwen3-30b-a3b").active_parameters == pytest.approx(3.3e9, rel=0.1)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_models_build_on_the_meta_device(preset):
    for agent in compose([f"+experiment={preset}"]).agents.values():
        shape = read_shape(agent.model)
        assert shape.trainable
        file = shipped()[next(name for name in shipped() if agent.model.lower().rpartition("/")[2].startswith(name))]
        assert sum(p.numel() for p in build(json.loads(file.read_text())).parameters()) == shape.parameters


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3.1-8b", Layout(tp=2, pp=4)),
        ("qwen2.5-7b", Layout(tp=4, pp=3)),
        ("qwen2.5-3b", Layout(tp=2, pp=2)),
        ("qwen3-30b-a3b", Layout(tp=2, pp=3, dp=4, ep=8)),
    ],
)
def test_ranks_hold_the_model_once_and_what_is_replicated_again(model, layout):
    shape = read_shape(model)
    stages = [rank_parameters(shape, layout, stage) for stage in range(layout.pp)]
    held = sum(layout.tp * shared + layout.ep * expert for shared, expert in stages)
    router = shape.mlp if shape.experts else 0
    again = (layout.tp - 1) * (shape.layers * (shape.norms + router) + shape.hidden)
    # a tied embedding stands on the first stage and, as the head, on the last
    again += shape.table if shape.tied and layout.pp > 1 else 0
    assert held == shape.parameters + again


def test_stages():
    assert stage_layers(28, 3) == (10, 10, 8)
    assert stage_layers(32, 4) == (8, 8, 8, 8)
    with pytest.raises(ValueError, match=r"layout.pp=8 is too many stages for 9 layers"):
        stage_layers(9, 8)


def test_a_model_that_nobody_knows():
    with pytest.raises(ValueError, match=r"model acme/Nothing-1B: no directory .* qwen2.5-7b"):
        read_shape("acme/Nothing-1B")
    with pytest.raises(ValueError, match="model_type=mamba2"):
        shape_of("m", {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"})


def test_a_directory_is_read(tmp_path):
    (tmp_path / "config.json").write_text(shipped()["qwen2.5-7b"].read_text())
    assert read_shape(str(tmp_path)).parameters == 7_615_616_512
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="does not describe a language model"):
        read_shape(str(tmp_path))
