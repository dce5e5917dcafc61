"""CoVerRL, Co-rewarding and a ring of three from end to end on the reference backends."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

from megarl.algos.common import tally
from megarl.algos.coverrl import CoVerRL
from megarl.answers.equal import equal
from megarl.answers.read import read_answers
from megarl.chat import open_chat
from megarl.config import validate
from megarl.demo import families, verifier
from megarl.demo.warmstart import Recipe, write_problems
from megarl.log import read_metrics
from megarl.rollouts import read, step_path
from megarl.settings import AnswersConfig
from megarl.train import train
from tests import cohort

REFERENCE = {"backend": "reference", "dtype": "float32", "engine": {"backend": "reference"}, "optimizer": {"lr": 1e-3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models of noise; one that has learnt how a verifier talks, but not sums; sums in two wordings."""
    made = tmp_path_factory.mktemp("methods")
    cohort.raw(made)
    families.save(*families.build("qwen", 0), made / "base")
    verifier.teach(made / "base", made / "verifier", Recipe(steps=60, batch=16, lr=8e-3))
    write_problems(made / "problems")
    return made


def raw(folder, name, algo, agents, **changes):
    problems = folder / "problems" / "train.jsonl"
    data = {"path": str(problems), "gold": "answer", "id": "id", "max_prompt_tokens": 32}
    views = {"original": {}, "swapped": {"column": "swapped"}}
    run = cohort.raw(folder, name=name, steps=2, algo=algo, data={**data, "views": views}, agents=agents)
    return cohort.changed(run, changes)


def coverrl(folder, name, **changes):
    requests = verifier.REQUESTS.model_dump()
    algo = {"name": "coverrl", "positives": 4, "min_positives": 1, "revisions": 2, "requests": requests}
    agents = {
        "sure": {**REFERENCE, "model": str(folder / "verifier")},
        "noise": {**REFERENCE, "model": str(folder / "model-bob")},  # never says a verdict: nothing of it is kept
    }
    settings = {
        "seed": 8,  # one under which some revisions train
        "algo.max_prompt_tokens": 96,
        "batch.prompts_per_step": 16,  # about one question in five passes the filter and has something to revise
        "batch.samples_per_prompt": 8,
        "batch.train_samples_per_prompt": 4,
        "sampling.max_tokens": 32,
        "batch.tokens_per_microbatch": 512,
        "answers.truncated": "invalid",
    }
    return raw(folder, name, algo, agents, **settings | changes)


@pytest.fixture(scope="module")
def plain(folder):
    return train(validate(coverrl(folder, "coverrl")))


def saved(run_dir, step):
    return read(step_path(run_dir, step))


def test_coverrl_goes_through_all_its_turns(folder, plain):
    rows = read_metrics(plain)
    chats = {"sure": open_chat(str(folder / "verifier")), "noise": open_chat(str(folder / "model-bob"))}
    algo = CoVerRL.model_validate(coverrl(folder, "x")["algo"])
    trained = 0
    for step, row in enumerate(rows):
        seen = read_answers(saved(plain, step), AnswersConfig(style="last-number"))
        roles = Counter((r.prompt.agent, r.prompt.role) for r in seen)
        assert roles["sure", "solve"] == roles["noise", "solve"] == 16 * 8
        assert roles["sure", "verify"] > 0 and roles["noise", "revise"] == 0
        # what was asked is a pure function of what was said before
        first = [r for r in seen if r.prompt.role == "solve"]
        asked = {(p.parent, p.n) for p in algo.follow_up(first)}
        assert asked == {(r.prompt.parent, r.prompt.n) for r in seen if r.prompt.role == "verify"}
        for r in seen:
            assert r.version == step
            assert r.prompt_ids.tolist() == chats[r.prompt.agent].render(r.prompt.messages).tolist()
        groups = [g for g in algo.reward(seen, algo.label(seen, None), {}) if g.key[0] == "sure"]
        keys = [k for g in groups for k in (g.rollouts[:4] if g.key[2] == "solve" else g.rollouts)]
        lengths = {r.key: len(r.token_ids) for r in seen}
        assert row["agent/sure/policy/tokens"] == sum(lengths[k] for k in keys)
        assert row["agent/sure/verifier/revisions"] == roles["sure", "revise"]
        trained += sum(k.role == "revise" for k in keys)
        # case-I3: one agent has nothing to train, the other goes on
        assert row["agent/noise/policy/tokens"] == 0
        for name in chats:
            assert row[f"agent/{name}/policy/logprob_drift_mean"] < 1e-4
    assert trained > 0, "no revision trained"


def test_follow_ups_that_are_too_long_end_the_conversation(folder):
    limits = {"algo.max_prompt_tokens": 12, "data.max_prompt_tokens": 12}
    rows = read_metrics(train(validate(coverrl(folder, "short", steps=1, **limits))))
    # a question and its marks are 9 tokens at most: with an answer and a request nothing fits
    assert rows[0]["agent/sure/engine/prompts_too_long"] > 0
    assert rows[0]["agent/sure/policy/tokens"] == 0


def test_corewarding_trains_one_policy_on_both_views(folder):
    one = {**REFERENCE, "model": str(folder / "model-ann"), "seats": {"plain": "original", "swapped": "swapped"}}
    algo = {"name": "corewarding", "views": ["plain", "swapped"]}
    run_dir = train(validate(raw(folder, "corewarding", algo, {"one": one}, **{"checkpoint.every_steps": 2})))
    problems = [json.loads(line) for line in (folder / "problems/train.jsonl").read_text().splitlines()]
    wordings = {p["id"]: {"plain": p["prompt"], "swapped": p["swapped"]} for p in problems}
    rows = read_metrics(run_dir)
    for step, row in enumerate(rows):
        seen = saved(run_dir, step)
        assert Counter(r.prompt.agent for r in seen) == {"plain": 32, "swapped": 32}
        assert {r.version for r in seen} == {step}
        for r in seen:
            assert r.prompt.messages[-1].content == wordings[r.prompt.uid][r.prompt.agent]
        assert row["agent/one/policy/tokens"] == sum(len(r.token_ids) for r in seen)  # one update on all of them
        assert "agent/plain/label/label_accuracy" in row and "agent/plain/policy/tokens" not in row
    labels = labels_of(run_dir, 0)
    own = tally(read_answers(saved(run_dir, 0), AnswersConfig(style="last-number", truncated="read")))
    other = {"plain": "swapped", "swapped": "plain"}
    assert all(same(label, own[other[agent], uid].answer) for (agent, uid), label in labels.items())
    assert any(not same(label, own[key].answer) for key, label in labels.items())
    assert [p.name for p in (run_dir / "checkpoints/step_2/agents").iterdir()] == ["one"]


def test_a_ring_of_three_of_two_families_and_two_views(folder):
    models = {"ann": "model-ann", "bob": "model-bob", "cas": "model-ann"}
    agents = {name: {**REFERENCE, "model": str(folder / model)} for name, model in models.items()}
    agents["cas"] |= {"view": "swapped"}
    agents["bob"] |= {"samples_per_prompt": 5}
    algo = {"name": "corl", "ring": ["ann", "bob", "cas"]}
    run_dir = train(validate(raw(folder, "ring3", algo, agents)))
    rows = read_metrics(run_dir)
    seen = saved(run_dir, 0)
    assert Counter(r.prompt.agent for r in seen) == {"ann": 32, "bob": 20, "cas": 32}
    own = tally(read_answers(seen, AnswersConfig(style="last-number", truncated="read")))
    teacher = {"ann": "cas", "bob": "ann", "cas": "bob"}
    labels = labels_of(run_dir, 0)
    assert labels and all(same(label, own[teacher[agent], uid].answer) for (agent, uid), label in labels.items())
    assert {key for key in rows[0] if key.startswith("cohort/agreement/")} == {
        f"cohort/agreement/{pair}" for pair in ("ann~bob", "ann~cas", "bob~cas")
    }
    backwards = train(validate(raw(folder, "ring3-reordered", algo, dict(reversed(agents.items())))))
    assert cohort.comparable(read_metrics(backwards)) == cohort.comparable(rows)


def labels_of(run_dir, step):
    rows = pq.read_table(step_path(run_dir, step)).to_pylist()
    return {(row["agent"], row["uid"]): row["label"] for row in rows}


def same(a, b):
    return a is None and b is None if a is None or b is None else equal(a, b)
