"""Whole runs of the methods and of dynamic sampling on the reference backends."""

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from megarl.config import validate
from megarl.log import read_metrics
from megarl.rollouts import step_path
from megarl.train import train
from tests import cohort


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("methods")


def raw(folder: Path, algo: dict, **changes) -> dict:
    """One agent, and few tokens."""
    small = {
        "algo": algo,
        "agents.bob": None,
        "agents.ann.optimizer": {"lr": 1e-3},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_microbatch": 128},
        "sampling.max_tokens": 4,
        "checkpoint.every_steps": 1,
    }
    return cohort.raw(folder, **(small | changes))


def weights(run_dir: Path, step: int) -> dict:
    files = sorted((run_dir / "checkpoints" / f"step_{step}" / "agents").rglob("*.safetensors"))
    found = {f"{f.parent.name}/{f.name}/{k}": t.numpy().tobytes() for f in files for k, t in load_file(f).items()}
    assert found
    return found


@pytest.fixture(scope="module")
def lies(folder):
    """The same problems with noise for true answers."""
    cohort.raw(folder)
    rows = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    noise = random.Random(0)
    path = folder / "lies.jsonl"
    path.write_text("".join(json.dumps(row | {"answer": str(noise.randrange(10))}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["intuitor", "rent", "random", "format"])
def test_v39_a_run_without_labels_does_not_depend_on_the_truth(folder, lies, name):
    """Weights after a step, bit for bit; and the method's reward is what the logged rollouts say it is."""
    runs = [
        train(validate(raw(folder, {"name": name}, name=f"{name}-{i}", steps=1, **changes)))
        for i, changes in enumerate(({}, {"data.path": str(lies)}))
    ]
    assert weights(runs[0], 1) == weights(runs[1], 1)
    [row] = read_metrics(runs[0])
    assert row["agent/ann/policy/grad_norm"] > 0, "it did learn"
    logged = pq.read_table(step_path(runs[0], 0)).to_pydict()
    by_hand = {
        "intuitor": lambda i: np.mean(logged["certainty"][i]),
        "rent": lambda i: -np.mean(logged["entropy"][i]),
        "format": lambda i: float(logged["answer"][i] is not None),
    }
    if name in by_hand:
        expected = [by_hand[name](i) for i in range(16)]
        assert logged["reward"] == pytest.approx(expected, abs=1e-6)
        assert row["agent/ann/reward/reward_mean"] == pytest.approx(np.mean(expected), abs=1e-6)
    assert set(logged["label"]) == {None}


DYNAMIC = {
    "batch": {"prompts_per_step": 3, "samples_per_prompt": 4, "tokens_per_microbatch": 128, "refill_rounds": 2},
    "agents.ann.optimizer": {"lr": 1e-3, "schedule": {"decay": "linear"}},
}
KEYS = ("cohort/refill_rounds", "cohort/prompts_dealt", "agent/ann/reward/prompts_missing")


def test_case_b7_nothing_but_consensus(folder, capfd):
    """Nearly greedy sampling: all rollouts of a prompt are equal. The refill ends, is said and counted, and the run
    goes on with step, learning rate and deck where they ought to be.
    """
    changes = DYNAMIC | {"sampling.temperature": 1e-6, "guard": {"on_drift": "warn"}, "steps": 4}
    run = train(validate(raw(folder, {"name": "ttrl"}, name="consensus", **changes)))
    rows = read_metrics(run)
    # 24 problems: two steps of 3 + 2 * 3, then 6 are left: one refill of 3, and the epoch has no more
    assert [[row[key] for key in KEYS] for row in rows] == [[2, 9, 3], [2, 9, 3], [1, 6, 3], [2, 9, 3]]
    assert [row["agent/ann/reward/prompts_teaching"] for row in rows] == [0] * 4
    assert [row["agent/ann/policy/learning_rate"] for row in rows] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert all(math.isfinite(x) for row in rows for x in row.values())
    state = json.loads((run / "checkpoints" / "step_4" / "state.json").read_text())
    assert state["cursor"] == {"epoch": 1, "place": 9}
    assert weights(run, 3) == weights(run, 4), "no update"
    asked = [uid for step in range(3) for uid in set(pq.read_table(step_path(run, step)).to_pydict()["uid"])]
    assert len(asked) == len(set(asked)) == 24, "an epoch asks each prompt once"
    text = capfd.readouterr().err
    assert "agent ann lacks 3 of 3 prompts whose rewards differ after 2 refills and 9 prompts" in text
    assert "(batch.refill_rounds=2): no update" in text and "(the epoch has no more): no update" in text


def test_a_step_from_which_all_is_dropped_says_so(folder, capfd):
    """Nobody's answer can be read, so no majority reaches tau: no update, in words."""
    changes = {"sampling.max_tokens": 1, "answers.truncated": "invalid", "steps": 1}
    algo = {"name": "ttrl", "min_majority_share": 0.5}
    [row] = read_metrics(train(validate(raw(folder, algo, name="dropped", **changes))))
    assert "agent ann: algo.name=ttrl dropped every prompt of this step: no update" in capfd.readouterr().err
    assert row["agent/ann/policy/tokens"] == 0 and "agent/ann/policy/grad_norm" not in row


def test_a_refilled_step_is_full_and_resumes_exactly(folder):
    changes = DYNAMIC | {"checkpoint": {"every_steps": 1, "keep": 4}, "steps": 4}
    cfg = validate(raw(folder, {"name": "ttrl"}, name="dynamic", **changes))
    whole = train(cfg)
    rows = read_metrics(whole)
    assert any(row["cohort/refill_rounds"] > 0 for row in rows), "this run has nothing to refill: choose another seed"
    for step, row in enumerate(rows):
        table = pq.read_table(step_path(whole, step)).to_pydict()
        trained = [i for i in range(len(table["uid"])) if table["advantage"][i] is not None]
        by_prompt = {}
        for i in trained:
            by_prompt.setdefault(table["uid"][i], set()).add(table["reward"][i])
        assert all(len(rewards) > 1 for rewards in by_prompt.values())
        assert len(by_prompt) == 3 - row["agent/ann/reward/prompts_missing"]
        assert len(set(table["uid"])) == row["cohort/prompts_dealt"]
    assert any(row["agent/ann/reward/prompts_missing"] == 0 for row in rows)

    again = folder / "runs" / "test" / "resumed"
    shutil.copytree(whole, again)
    for done in (3, 4):
        shutil.rmtree(again / "checkpoints" / f"step_{done}")
    train(cfg, resume=again)
    assert cohort.comparable(read_metrics(again)) == cohort.comparable(rows)
    assert weights(again, 4) == weights(whole, 4)


def test_two_agents_are_refilled_with_the_same_prompts(folder):
    """One agent's votes are the other's labels, so both get every further prompt; each keeps its own first ones."""
    changes = DYNAMIC | {"agents.bob": cohort.raw(folder)["agents"]["bob"], "steps": 2}
    run = train(validate(raw(folder, {"name": "corl", "ring": ["ann", "bob"]}, name="pair", **changes)))
    for step, row in enumerate(read_metrics(run)):
        table = pq.read_table(step_path(run, step)).to_pydict()
        asked = {a: [u for u, b in zip(table["uid"], table["agent"], strict=True) if a == b] for a in ("ann", "bob")}
        assert asked["ann"] == asked["bob"]
        for name in ("ann", "bob"):
            kept = {
                table["uid"][i]
                for i in range(len(table["uid"]))
                if table["agent"][i] == name and table["advantage"][i] is not None
            }
            assert len(kept) == 3 - row[f"agent/{name}/reward/prompts_missing"]
            teaching = row[f"agent/{name}/reward/prompts_teaching"]
            assert len(kept) == min(teaching, 3)
