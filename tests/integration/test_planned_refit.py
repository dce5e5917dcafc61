"""Planned refits against vLLM's own load_weights, bit for bit, on real Megatron ranks and real vLLM models.

And before that: the engine layout as described, as recorded, and as load_weights fills it are one and the same.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.backends.shards.engine import engine_layout
from megarl.backends.shards.families import FAMILIES
from megarl.backends.shards.layout import Layout, Tensor
from megarl.backends.vllm.record import box_of
from megarl.planning.models import read_shape
from megarl.settings import AgentConfig, LayoutConfig
from tests import vllm_layouts
from tests.megatron import refits
from tests.megatron.ranks import LocalRanks
from tests.refit_grid import BUCKET, LAYOUTS, MODELS, engines_of, rows, write_models

JOBS = [(kind, tp) for kind in MODELS for tp in (1, 2)] + [("llama", 4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(models, tmp_path_factory):
    jobs = [(models[kind], tp) for kind, tp in JOBS]
    return vllm_layouts.load(jobs, tmp_path_factory.mktemp("loaded"))


def test_every_family_of_the_description_is_here(models):
    assert {read_shape(str(path)).architecture for path in models.values()} == set(FAMILIES)


@pytest.mark.parametrize(("kind", "tp"), JOBS)
def test_described_recorded_and_loaded_are_one(kind, tp, models, loaded):
    described = engine_layout(read_shape(str(models[kind])), tp, 1, 4)
    described.check()
    source = load_file(models[kind] / "model.safetensors")
    assert {name: t.shape for name, t in described.tensors.items()} == {n: tuple(t.shape) for n, t in source.items()}
    for rank, found in enumerate(loaded[models[kind], tp]):
        assert found["failed"] == {}
        assert {name: tuple(shape) for name, shape in described.params[rank].items()} == found["shapes"]
        order = lambda shard: (shard.tensor, shard.box)  # noqa: E731
        assert sorted(described.shards[rank], key=order) == sorted(found["shards"], key=order)
        made = {name: torch.zeros(shape) for name, shape in found["shapes"].items()}
        for shard in found["shards"]:
            box = tuple(slice(*edge) for edge in shard.box)
            made[shard.param].as_strided([b - a for a, b in shard.box], shard.strides, shard.offset).copy_(
                source[shard.tensor][box]
            )
        padding = described.padding(rank)
        for name, param in found["params"].items():
            assert torch.equal(made[name], param), (rank, name)
            assert (param == 0).sum() == padding.get(name, 0), "padded rows are zero, and nothing else is"


def test_another_layout_is_told_apart(models, loaded):
    """One rank's recording is not the other's, and that of two ranks not that of one."""
    one, two = loaded[models["llama"], 2]
    assert one["shapes"] == two["shapes"] and one["shards"] != two["shards"]
    (alone,) = loaded[models["llama"], 1]
    layout = Layout({"x": Tensor(name="x", shape=(1,), itemsize=4)}, (), ())
    assert layout.world == 0 and alone["shapes"] != one["shapes"]


TRAINED = ("llama", "qwen2", "qwen3")  # every layout in CI; tests/bench/reshard.py has all families


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_planned_refit_is_load_weights_and_moves_the_lower_bound(layout, models, loaded):
    """case-D11, case-D1 (four ranks, two key/value heads), case-D7 (seven layers): tied and untied, TP 1 and 2."""
    found = list(rows(layout, {kind: models[kind] for kind in TRAINED}, loaded))
    assert len(found) == len(TRAINED) * (1 if layout.world == 1 else 2)
    for row in found:
        assert not row.absent and not row.wrong, row
        assert row.wire == row.plan == row.bound and row.ratio == 1.0, row
        assert row.exported >= row.wire and (row.exported > 0) == (layout.tp * layout.pp > 1)
        assert row.tp == 1 or row.exported > row.wire or row.exported == 0, "Bridge gathers whole tensors"
        assert row.largest <= BUCKET
    assert (layout.tp, layout.pp) != (2, 2) or any(row.forwarded for row in found)


@pytest.fixture
def ranks(request, models):
    """Ranks of a layout; they hold a small model of their own, and build those of the test beside it."""
    opened = LocalRanks(
        agent=AgentConfig(model=str(models["llama"]), dtype="float32", layout=request.param), temperature=1.0
    )
    yield opened
    opened.close()


@pytest.mark.parametrize("ranks", (LayoutConfig(),), indirect=True, ids=str)
def test_training_names_are_bridges(ranks, models):
    """All seven families, by name and by kind of mapping; those that are trained also by value, above."""
    (found,) = ranks.run(refits.registry, list(models.values()))
    assert len(found) == len(models) and not any(found.values()), found


@pytest.mark.parametrize("ranks", (LayoutConfig(tp=2),), indirect=True, ids=str)
def test_one_changed_element_changes_that_parameter_alone(ranks, models, loaded):
    """What the comparison above would say of a refit that brings other weights."""
    model = models["qwen2"]
    _, engine = engines_of(model, 2, loaded)[1]
    param = "decoder.layers.1.mlp.linear_fc2.weight"
    results = ranks.run(refits.refit_after_a_change, model, LayoutConfig(tp=2), engine, param)
    for rank, result in enumerate(results):
        wanted = loaded[model, 2][rank]["params"]
        changed = {name for name, value in result["params"].items() if not torch.equal(value, wanted[name])}
        assert changed == ({"model.layers.1.mlp.down_proj.weight"} if rank == 1 else set())


def test_boxes_of_views():
    base = torch.arange(120).view(4, 5, 6)
    for view, box in (
        (base[1:3, :, 2:4], ((1, 3), (0, 5), (2, 4))),
        (base[2], ((2, 3), (0, 5), (0, 6))),
        (base[:, 3:4].transpose(0, 2), ((0, 4), (3, 4), (0, 6))),
        (base[3, 4, 5], ((3, 4), (4, 5), (5, 6))),
    ):
        found = box_of(base.shape, view.storage_offset(), tuple(view.shape), view.stride())
        assert found is not None and found[0] == box
        again = base[tuple(slice(*edge) for edge in box)]
        assert again.numel() == view.numel() and set(again.flatten().tolist()) == set(view.flatten().tolist())
    assert box_of(base.shape, 0, (2, 5), (60, 6)) is None or base[::2, :, 0].shape == (2, 5)
    assert box_of(base.shape, 5, (2, 2), (30, 2)) is None
