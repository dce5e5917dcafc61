"""megarl reshard --explain: the figures of two published layouts by hand, and what is refused."""

import json
import time

import pytest

from megarl.backends.shards.engine import engine_layout
from megarl.backends.shards.topology import PRESETS, read_topology
from megarl.config import compose
from megarl.planning import memory
from megarl.planning.calibration import load_rates
from megarl.planning.models import read_shape, shipped
from megarl.reshard_command import plan_of, run

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "mistral-")
LINK = load_rates(None).link_efficiency


def explained(capsys, *overrides: str) -> dict:
    assert run(["--explain", "--json", *overrides]) == 0
    return json.loads(capsys.readouterr().out)


def test_llama_70b_by_hand(capsys):
    """TP8xPP4 to four TP8 engines: a GPU's engine shard is its training shard and those of three other stages.

    All but the norms is cut by eight; a GPU holds its stage's norms whole. So 3/4 of what is cut comes over the
    network; the norms of three stages come once to a node and are passed on to seven GPUs of eight.
    """
    start = time.perf_counter()
    data = explained(capsys, "+experiment=reshard_llama70b")
    assert time.perf_counter() - start < 20
    parameters, norms = 70_553_706_496, (2 * 80 + 1) * 8192
    assert data["model_bytes"] == 2 * parameters
    assert data["wire_bytes"] == data["lower_bound_bytes"] == 2 * (3 * (parameters - norms) + 24 * norms)
    assert data["nvlink_bytes"] == 2 * 3 * 7 * norms
    assert data["full_gather_bytes"] == 2 * (32 * parameters - (parameters - norms) - 8 * norms)
    assert data["local_bytes"] == 2 * ((parameters - norms) + 8 * norms)
    ranks = data["agents"]["llama"]["ranks"]
    assert [row["node"] for row in ranks] == [rank // 8 for rank in range(32)]
    busiest = max(row["network_bytes"] for row in ranks)
    assert busiest / (50e9 * LINK) < data["predicted_seconds"] < 1.1 * busiest / (50e9 * LINK)
    assert data["full_gather_seconds"] > 7 * data["predicted_seconds"]


def test_qwen_32b_by_hand(capsys):
    """TP4xPP2 to two TP4 engines on one node: half of every shard comes over NVLink, which the norms do not change."""
    data = explained(capsys, "+experiment=reshard_qwen32b")
    parameters, norms = read_shape("Qwen/Qwen2.5-32B").parameters, (2 * 64 + 1) * 5120
    assert data["wire_bytes"] == data["nvlink_bytes"] == data["lower_bound_bytes"]
    assert data["wire_bytes"] == 2 * ((parameters - norms) + 4 * norms)
    assert data["full_gather_bytes"] == 2 * (8 * parameters - (parameters - norms) - 4 * norms)
    per_gpu = [row["nvlink_bytes"] for row in data["agents"]["qwen"]["ranks"]]
    assert max(per_gpu) - min(per_gpu) < 1e-3 * max(per_gpu)
    assert max(per_gpu) / (450e9 * LINK) < data["predicted_seconds"] < 2 * max(per_gpu) / (450e9 * LINK)


def test_the_table_says_the_same(capsys):
    assert run(["--explain", "+experiment=reshard_qwen32b"]) == 0
    text = capsys.readouterr().out
    assert "wire 65.532 GB = 1.00 x the lower bound" in text and "NVLink" in text


@pytest.mark.parametrize("name", [n for n in shipped() if n.startswith(FAMILIES) and not read_shape(n).experts])
def test_every_shipped_model_has_a_plan(name):
    """TP2xPP2xDP2 to TP4 (TP2 where four do not divide the heads), checked copy by copy."""
    shape = read_shape(name)
    settings = {
        "model": name,
        "layout.tp": 2,
        "layout.pp": 2,
        "layout.dp": 2,
        "engine.tp": 2 if shape.heads % 4 else 4,
    }
    overrides = [f"agents.llama.{key}={value}" for key, value in settings.items()]
    agent = compose(["+experiment=reshard_llama70b", *overrides]).agents["llama"]
    plan = plan_of(agent, read_topology("h100-8x-ib400", 4, 1.0))
    assert plan.wire_bytes == plan.lower_bound_bytes > 0
    assert plan.training.nbytes == 2 * shape.parameters


@pytest.mark.parametrize("tp", (1, 4))
@pytest.mark.parametrize("name", ("llama-3.1-8b", "qwen2.5-7b", "gemma-2-9b", "qwen3-30b-a3b"))
def test_engine_bytes_are_the_planners(name, tp):
    """megarl plan counts an engine rank's weights by formula: here they are added up, tensor by tensor."""
    shape = read_shape(name)
    layout = engine_layout(shape, tp, 1, 2)
    held = [layout.held_bytes(rank) for rank in range(tp)]
    assert max(held) <= memory.engine_weights(shape, tp) < 1.01 * max(held)


@pytest.mark.parametrize(
    ("argv", "message"),
    (
        (["agents.llama.layout.tp=3", "cluster.nodes=8"], "layout.tp=3 does not divide the 64 attention heads"),
        (["agents.llama.engine.tp=3"], "engine.tp=3 does not divide"),
        (["agents.llama.model=mistralai/Mixtral-8x7B-v0.1"], "MixtralForCausalLM is not one of"),
        (["agents.llama.layout.ep=2"], "layout.ep=2 must divide the 0 experts"),
        (["cluster.gpus_per_node=16"], "a node of h100-8x-ib400 has 8"),
    ),
    ids=str,
)
def test_what_has_no_plan_is_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        run(["--explain", "+experiment=reshard_llama70b", *argv])


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ("engine.replicas=3", r"the 3 x TP4 engine ranks of agents\.qwen are more than its policy's 8 ranks"),
        ("engine.backend=reference", r"agents\.qwen has backend=megatron, engine\.backend=reference: use gathered"),
    ),
)
def test_a_run_that_cannot_be_planned_is_refused(change, message):
    run_of = ["+experiment=reshard_qwen32b", "reshard.method=planned"]
    assert compose(run_of).reshard.method == "planned"
    with pytest.raises(ValueError, match=message):
        compose([*run_of, f"agents.qwen.{change}"])


def test_presets_are_the_planners_devices():
    assert PRESETS == ("a100-8x-ib200", "h100-8x-ib400", "h200-8x-ib400", "b200-8x-ib400")
    with pytest.raises(ValueError, match="--topology h100: not one of a100-8x-ib200"):
        read_topology("h100", 8, 1.0)
