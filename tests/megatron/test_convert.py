"""Folders and checkpoints into one another: bit for bit, whole, with everything that lies beside the weights."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl import hf_folder
from megarl.backends.megatron.records import Job
from megarl.convert_command import run
from megarl.deck import Cursor
from megarl.settings import AgentConfig, LayoutConfig, OptimizerConfig
from tests import cohort, tiny
from tests.megatron import data

ONE, SPREAD = LayoutConfig(), LayoutConfig(tp=2, pp=2, sp=True)
FAMILIES = tuple(tiny.KINDS)


def _round_trip(worker, into, back):
    """On every rank: folder to checkpoint, and that to safetensors."""
    from megarl.backends.megatron.convert import write_checkpoint, write_safetensors

    assert write_checkpoint(worker.groups, into) == write_safetensors(worker.groups, back)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {family: tiny.write(tmp_path_factory.mktemp("source") / family, family, seed=3) for family in FAMILIES}


@pytest.mark.parametrize("layout", (ONE, SPREAD), ids=str)
def test_every_family_comes_back_bit_for_bit(layout, sources, policy, tmp_path):
    """case-D3, case-E9; one launch for all of them."""
    _, ranks = policy(sources["qwen2"], layout, optimizer=OptimizerConfig(name="sgd"))
    for family, source in sources.items():
        middle, out = tmp_path / family / "middle", tmp_path / family / "out"
        for folder in (middle, out):
            folder.mkdir(parents=True)
        agent = AgentConfig(model=str(source), dtype="float32", layout=layout)
        exported = agent.model_copy(update={"model": str(middle)})  # the checkpoint's own config.json is enough
        into, back = Job(agent=agent, source=source, out=middle), Job(agent=exported, source=middle, out=out)
        ranks.run(_round_trip, into, back)
        found = load_file(out / "part-0.safetensors")
        assert data.worst(found, load_file(source / "model.safetensors")) == 0, family


def test_commands_carry_everything_along(tmp_path):
    """A tied model in bfloat16, into a checkpoint by two ranks and back by one."""
    wide, source = tiny.write(tmp_path / "wide", "gemma3", vocab_size=131), tmp_path / "source"
    hf_folder.copy_companions(wide, source)
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.bfloat16)
    model.save_pretrained(source)
    assert run(["hf-to-megatron", str(source), str(tmp_path / "middle"), "--tp", "2"]) == 0
    assert run(["megatron-to-hf", str(tmp_path / "middle"), str(tmp_path / "out")]) == 0
    assert data.worst(load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")) == 0
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    ids = torch.arange(40)[None]
    assert again.dtype == torch.bfloat16 and torch.equal(again(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+1=") == tiny.tokenizer().encode("1+1=")
    with pytest.raises(ValueError, match="exists already"):
        run(["megatron-to-hf", str(tmp_path / "middle"), str(tmp_path / "out")])
    other = tiny.write(
        tmp_path / "other", "gemma3", vocab_size=131, sliding_window=9, num_hidden_layers=3, layer_types=None
    )
    with pytest.raises(ValueError, match="another model") as refused:
        run(["megatron-to-hf", str(tmp_path / "middle"), str(tmp_path / "no"), "--model", str(other)])
    rows = [line.split() for line in str(refused.value).splitlines()[1:]]
    assert rows[0] == ["key", "checkpoint", "model"]
    assert ["sliding_window", "8", "9"] in rows and ["num_hidden_layers", "4", "3"] in rows
    assert not (tmp_path / "no").exists() and not (tmp_path / "no.partial").exists()


def test_a_run_s_agent_becomes_a_folder(policy, tmp_path):
    """Trained at TP 2, exported by two stages; logits are those of the policy."""
    raw = cohort.raw(tmp_path, name="done", steps=1)
    for agent in raw["agents"].values():
        agent.update(backend="megatron", optimizer={"lr": 1e-3}, layout={"tp": 2})
    run_dir = tmp_path / "runs" / "test" / "done"
    step = run_dir / "checkpoints" / "step_1"
    model = Path(raw["agents"]["bob"]["model"])
    opened, _ = policy(model, LayoutConfig(tp=2), optimizer=OptimizerConfig(lr=1e-3))
    seen = data.rollouts(vocabulary=103)
    data.train(opened, data.samples(seen, opened.measure(seen, frozenset())), 1e-2, updates=1)
    opened.save(step / "agents" / "bob")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(raw))
    (step / "state.json").write_text(json.dumps({"bytes": {}, "cursor": asdict(Cursor()), "agents": {}}))
    (step / "COMPLETE").write_text("1\n")
    with pytest.raises(ValueError, match=r"which one of .* ann, bob"):
        run(["megatron-to-hf", "--run", str(run_dir), str(tmp_path / "out")])
    assert run(["megatron-to-hf", "--run", str(run_dir), "--agent", "bob", str(tmp_path / "out"), "--pp", "2"]) == 0
    assert data.worst(load_file(tmp_path / "out" / "model.safetensors"), data.weights(opened)) == 0
    stats = opened.measure(seen, frozenset(("entropy", "certainty")))
    assert data.worst(stats, data.transformers_stats(tmp_path / "out", seen, 0.7)) < 1e-4
    assert data.worst(stats, data.transformers_stats(model, seen, 0.7)) > 1e-2


def test_files_that_are_not_of_the_configuration(tmp_path):
    """case-E11: 5 layers by config.json, 4 in the files; nothing is started."""
    source = tiny.write(tmp_path / "source", "llama", num_hidden_layers=4)
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 5, "vocab_size": 130}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"files and config\.json disagree") as refused:
        run(["hf-to-megatron", str(source), str(tmp_path / "out")])
    rows = [" ".join(line.split()) for line in str(refused.value).splitlines()[1:]]
    assert rows[0] == "tensor in the files by config.json" and len(rows) == 12
    assert "model.layers.4.mlp.up_proj.weight (absent) (96, 64)" in rows
    assert "lm_head.weight (128, 64) (130, 64)" in rows


def test_shards_have_an_index(tmp_path):
    """Three parts are named and listed as transformers looks for them."""
    source = tiny.write(tmp_path / "source", "qwen3")
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    hf_folder.copy_companions(source, tmp_path / "out")
    for part in range(3):
        save_file(
            {n: tensors[n] for n in names[part::3]}, tmp_path / "out" / f"part-{part}.safetensors", {"format": "pt"}
        )
    hf_folder.finish_safetensors(tmp_path / "out")
    hf_folder.check_tensors(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensors[name]) for name in names)


@pytest.mark.parametrize(
    ("argv", "message"),
    (
        (["megatron-to-hf", "OUT"], "what is to be converted"),
        (["megatron-to-hf", "nowhere", "OUT"], "nowhere: no such checkpoint"),
        (["megatron-to-hf", "--run", "nowhere", "OUT"], "no run there"),
        (["hf-to-megatron", "nowhere", "OUT"], "no folder with a config.json"),
    ),
)
def test_what_is_not_there(argv, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run([part.replace("OUT", str(tmp_path / "out")) for part in argv])
