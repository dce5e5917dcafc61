"""What a run may say: keys, arithmetic, layouts. Nothing here needs a GPU, Ray or a model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import compose, validate
from tests import cohort, tiny


def raw(**changes):
    """A small valid run, with dotted changes."""
    run = {
        "steps": 2,
        "algo": {"name": "corl", "ring": ["a", "b"]},
        "data": {"path": "d.jsonl", "gold": "answer", "max_prompt_tokens": 24},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_microbatch": 64},
        "sampling": {"max_tokens": 8},
        "agents": {"a": {"model": "none/a"}, "b": {"model": "none/b"}},
    }
    return cohort.changed(run, changes)


def refusal(**changes):
    with pytest.raises(ValueError) as caught:
        validate(raw(**{key.replace("__", "."): value for key, value in changes.items()}))
    return str(caught.value)


def test_a_valid_run_is_accepted_and_derives_the_rest():
    cfg = validate(raw(**{"agents.a.layout": {"tp": 2, "dp": 2}, "agents.b.samples_per_prompt": 7}))
    assert cfg.agents["a"].layout.world == cfg.agents["a"].slots == 4
    assert cfg.agents["a"].replicas == 4
    assert (cfg.samples("a"), cfg.samples("b")) == (4, 7)
    assert str(cfg.run_dir) == "runs/default/run"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch__prompt_per_step": 3}, "batch.prompt_per_step: no such key; did you mean prompts_per_step?"),
        ({"stepz": 3}, "stepz: no such key; did you mean steps?"),
        ({"algo__rings": ["a"]}, "did you mean ring?"),
        ({"agents__a__layout": {"tpp": 2}}, "agents.a.layout.tpp: no such key; did you mean tp?"),
        ({"agents__a__optimizer": {"schedule": {"warmpu": 1}}}, "warmpu: no such key; did you mean warmup?"),
        ({"steps": "3"}, "steps: Input should be a valid integer (given: '3')"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1 (given: 0)"),
        ({"loss": {"clip_low": float("nan")}}, "loss.clip_low"),
        ({"algo__name": "grpo"}, "algo: Input tag 'grpo' found using 'name' does not match any of the expected tags"),
        ({"agents": {}}, "agents: Dictionary should have at least 1 item"),
        ({"agents": {"a/b": {"model": "none/a"}, "b": {"model": "none/b"}}}, "agents.a/b.[key]"),
        ({"name": "../../etc"}, "name: String should match pattern"),
        ({"experiment": ".."}, "experiment: String should match pattern"),
        ({"agents__a__optimizer": {"schedule": {"warmup": 10.0}}}, "warmup=10.0: a share of the run is below 1"),
        ({"agents__a__optimizer": {"betas": [1.5, 2]}}, "agents.a.optimizer.betas.0: Input should be less than 1"),
    ],
)
def test_wrong_keys_and_values_are_named(changes, expected):
    assert expected in refusal(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch__tokens_per_microbatch": 31}, "max_prompt_tokens + max_tokens = 32: set it to at least 32"),
        ({"batch__updates_per_step": 17}, "batch.updates_per_step=17 is more than the 16 training samples of agents.a"),
        (
            {"batch__updates_per_step": 9, "batch__train_samples_per_prompt": 2},
            "batch.updates_per_step=9 is more than the 8 training samples of agents.a",
        ),
        (
            {"batch__train_samples_per_prompt": 4, "agents__b__samples_per_prompt": 3},
            "train_samples_per_prompt=4 is more than the 3 rollouts per prompt of agents.b",
        ),
        ({"batch__samples_per_prompt": 1}, "agents.a trains on 1 rollout per prompt"),
        ({"batch__samples_per_prompt": 1, "advantage__mode": "batch"}, "advantage 0 under advantage.mode=batch"),
        (
            {"agents__a": {"model": "m", "backend": "reference", "layout": {"tp": 2}}},
            "agents.a.layout=TP2: backend=ref",
        ),
        (
            {
                "agents__a__engine": {"backend": "replay", "replay": "r"},
                "evaluation": {"every_steps": 1, "data": {"path": "p", "gold": "g"}},
            },
            "agents.a.engine.backend=replay has no rollouts of an evaluation",
        ),
        (
            {"vllm": {"foo": 1}, "agents__a__engine__backend": "reference", "agents__b__engine__backend": "reference"},
            "vllm: foo: no agent has engine.backend=vllm",
        ),
        ({"batch__train_samples_per_prompt": 8}, "train_samples_per_prompt=8 is more than samples_per_prompt=4"),
        ({"sampling__top_p": 0.9}, "training rollouts are drawn from the whole vocabulary"),
        ({"sampling__top_k": 5}, "training rollouts are drawn from the whole vocabulary"),
        ({"agents__a__view": "rewrite"}, "agents.a.view=rewrite is none of data.views: original"),
        ({"agents__a__layout": {"sp": True}}, "needs tp > 1"),
        ({"agents__a__layout": {"tp": 16}}, "agents.a wants tensor parallel 16, but cluster.gpus_per_node=8"),
        ({"agents__a__layout": {"dp": 8}}, "agents ask for 9 GPUs or CPU slots (a 8 + b 1)"),
        ({"algo": {"name": "rlvr"}, "data__gold": None}, "name their column in data.gold"),
        ({"algo__ring": ["a"]}, "in this ring a would teach itself"),
        ({"algo__ring": ["a", "c"]}, "algo corl names ['a', 'c'] and the run has ['a', 'b']"),
        ({"loss": {"aggregation": "seq-mean-token-sum-norm"}}, "needs loss.max_tokens"),
        ({"evaluation": {"every_steps": 3}}, "given together"),
        ({"agents__a__engine": {"backend": "replay"}}, "engine.replay"),
    ],
)
def test_impossible_runs_are_refused_with_the_numbers(changes, expected):
    assert expected in refusal(**changes)


def test_layout_against_the_model(tmp_path):
    model = str(tiny.write(tmp_path / "m", "qwen2"))  # 4 layers, 4 heads
    config = Path(model) / "config.json"
    shape = json.loads(config.read_text())

    def refused(**changes):
        config.write_text(json.dumps(shape | changes))
        return refusal(agents__a={"model": model, "layout": {"tp": 2, "pp": 2}}, cluster={"gpus_per_node": 9})

    assert "num_hidden_layers=4" in refusal(agents__a={"model": model, "layout": {"pp": 5}})
    assert "agents.a.layout.tp=3 does not divide num_attention_heads=4" in refusal(
        agents__a={"model": model, "layout": {"tp": 3}}
    )
    assert "agents.a.layout.tp=2 does not divide intermediate_size=97" in refused(intermediate_size=97)
    assert "layout.tp=2 and num_key_value_heads=3" in refused(num_key_value_heads=3)
    assert "max_position_embeddings=31" in refused(max_position_embeddings=31)
    assert "does not describe a language model" in refused(num_attention_heads=None)
    config.write_text("{")
    assert f"{config} does not describe a language model" in refusal(agents__a={"model": model})
    config.write_text(json.dumps(shape))
    validate(raw(**{"agents.a": {"model": model, "layout": {"tp": 2, "pp": 2}}}))


def test_context_parallel_widens_a_microbatch():
    validate(raw(**{"batch.tokens_per_microbatch": 16, "agents.a.layout": {"cp": 2}, "agents.b.layout": {"cp": 2}}))
    assert "at least 16" in refusal(
        batch__tokens_per_microbatch=15, agents__a__layout={"cp": 2}, agents__b__layout={"cp": 2}
    )
    cp3 = {"agents.a.layout": {"cp": 3}, "agents.b.layout": {"cp": 3}}
    validate(raw(**{"batch.tokens_per_microbatch": 12, **cp3}))
    # 33 tokens hold 32, but a sequence is padded to a multiple of 2 cp = 6: 36
    assert "at least 12" in refusal(batch__tokens_per_microbatch=11, agents__a__layout={"cp": 3})


def test_twins_are_warned_of():
    same = {"model": "none/m", "seed": 3}
    with pytest.warns(UserWarning, match=r"agents a and b have the same model and the same generation seed 3"):
        validate(raw(agents={"a": same, "b": same}))


EXPERIMENT = """# @package _global_
steps: 3
algo: {name: ttrl}
data: {path: d.jsonl}
agents: {a: {model: none/a}}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    return tmp_path


def test_plain_overrides_reach_defaults_that_no_yaml_mentions(folder):
    cfg = compose(["+experiment=mine", "batch.prompts_per_step=5", "agents.a.optimizer.lr=2e-6"], folder)
    assert (cfg.steps, cfg.batch.prompts_per_step, cfg.agents["a"].optimizer.lr) == (3, 5, 2e-6)
    assert cfg.experiment == "mine"


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_typo_is_refused_however_it_is_added(folder, prefix):
    with pytest.raises(ValueError, match=r"batch.prompt_per_step: no such key; did you mean prompts_per_step\?"):
        compose(["+experiment=mine", f"{prefix}batch.prompt_per_step=5"], folder)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algo.name=rlvr", "algo.ring is of algo.name=corl, and this run's is rlvr: take it away by ~algo.ring"),
        ("algo.ringg=[a]", "algo.corl.ringg: no such key; did you mean ring?"),
        ("agents.aa.layout.tp=2", "agents.aa: no such agent; did you mean a? (a further agent needs a model)"),
        ("agents.other.layout.tp=2", "agents.other.model: Field required"),
        ("name=1e5", "name: Input should be a valid string (given: 100000.0); a text that looks like a number"),
        ("data.path=true", "takes quotes: data.path=\"'...'\""),
    ],
)
def test_what_to_do_is_said(folder, override, expected):
    ring = ["algo={name:corl,ring:[a,b]}", "agents.b.model=m"]
    with pytest.raises(ValueError, match=re.escape(expected)):
        compose(["+experiment=mine", *ring, override], folder)


def test_a_number_is_a_name(folder):
    assert compose(["+experiment=mine", "name=3"], folder).name == "3"
    with pytest.raises(ValueError, match="name"):
        compose(["+experiment=mine", "name=-3"], folder)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["+experiment=nowhere"], "nowhere"),
        (["+experiment=mine", "stepz=3"], "stepz: no such key; did you mean steps?"),
        (["+experiment=mine", "batch.prompts_per_step=-1"], "batch.prompts_per_step"),
        (["+experiment=mine", "=3"], ""),
        (["--resume", "nowhere"], "--config-dir has no place beside it"),
    ],
)
def test_the_command_line_ends_with_2_and_one_line(folder, arguments, expected):
    command = [sys.executable, "-m", "megarl", "train", "--config-dir", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_printing_the_resolved_run(folder):
    command = [sys.executable, "-m", "megarl", "train", "--config-dir", str(folder), "+experiment=mine", "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "samples_per_prompt: 16" in done.stdout


def test_a_folder_of_experiments_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        compose(["+experiment=mine"], tmp_path / "nowhere")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"while parsing"):
        compose(["+experiment=mine"], tmp_path)
