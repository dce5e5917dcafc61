"""Whole runs on the reference backends: what is written, and what must not change it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

import megarl.agents
from megarl.backends.reshard import reshard
from megarl.config import validate
from megarl.guards import GuardStop
from megarl.log import read_metrics
from megarl.rollouts import read, step_path
from megarl.train import train
from tests import cohort


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def plain(folder):
    """The run that others are compared with."""
    return train(validate(cohort.raw(folder, name="plain")))


def weights(run_dir: Path, step: int = 4) -> dict:
    """Every tensor of a checkpoint's agents, as bytes."""
    found = {}
    for file in sorted((run_dir / "checkpoints" / f"step_{step}" / "agents").rglob("*.safetensors")):
        tensors = load_file(file)
        found |= {f"{file.parent.name}/{file.name}/{k}": t.numpy().tobytes() for k, t in tensors.items()}
    assert found
    return found


def tokens(run_dir: Path) -> dict:
    return {r.key: r.token_ids.tolist() for step in range(4) for r in read(step_path(run_dir, step))}


def test_a_run_leaves_everything_behind(plain):
    rows = read_metrics(plain)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for name in ("ann", "bob"):
        for key in (
            "label/label_accuracy",
            "label/majority_share_total",
            "reward/reward_mean",
            "policy/grad_norm",
            "policy/logprob_drift_mean",
            "policy/learning_rate",
            "time/generate",
        ):
            assert all(f"agent/{name}/{key}" in row for row in rows), key
        assert sum(row[f"agent/{name}/reward/reward_mean"] for row in rows) > 0, "nothing was ever rewarded"
    assert {p.name for p in plain.iterdir()} >= {
        *("config.yaml", "environment.json", "metrics.jsonl", "rollouts", "checkpoints", "tensorboard", "logs")
    }
    assert validate(yaml.safe_load((plain / "config.yaml").read_text())).name == "plain"
    assert [p.name for p in sorted((plain / "checkpoints").iterdir())] == ["step_2", "step_4"]
    assert len(read(step_path(plain, 3))) == 2 * 4 * 8


def test_the_same_run_twice_is_the_same(folder, plain):
    again = train(validate(cohort.raw(folder, name="again")))
    assert cohort.comparable(read_metrics(again)) == cohort.comparable(read_metrics(plain))
    assert weights(again) == weights(plain)


def test_agents_in_another_order(folder, plain):
    raw = cohort.raw(folder, name="swapped")
    raw["agents"] = dict(reversed(raw["agents"].items()))
    swapped = train(validate(raw))
    assert tokens(swapped) == tokens(plain)
    assert cohort.comparable(read_metrics(swapped)) == cohort.comparable(read_metrics(plain))


@pytest.mark.parametrize("algo", [{"name": "corl", "ring": ["ann", "bob"]}, {"name": "ttrl"}])
def test_truth_never_reaches_a_label_free_run(folder, algo):
    problems = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    nonsense = folder / "nonsense.jsonl"
    nonsense.write_text("".join(json.dumps({**row, "answer": f"{random.random()}"}) + "\n" for row in problems))
    name = algo["name"]
    runs = [
        train(validate(cohort.raw(folder, name=f"{name}-{kind}", algo=algo, **{"data.path": str(path)})))
        for kind, path in (("true", folder / "problems.jsonl"), ("nonsense", nonsense))
    ]
    assert weights(runs[0]) == weights(runs[1])
    accuracies = [read_metrics(run)[0]["agent/ann/label/label_accuracy"] for run in runs]
    assert accuracies[1] == 0.0


def test_truth_does_reach_rlvr(folder, plain):
    """The control of the test above."""
    algo = {"name": "rlvr"}
    rows = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    shifted = folder / "shifted.jsonl"
    shifted.write_text("".join(json.dumps({**row, "answer": str(int(row["answer"]) % 10)}) + "\n" for row in rows))
    constant = folder / "constant.jsonl"
    constant.write_text("".join(json.dumps({**row, "answer": "1"}) + "\n" for row in rows))
    runs = [
        train(validate(cohort.raw(folder, name=path.stem, algo=algo, **{"data.path": str(path)})))
        for path in (shifted, constant)
    ]
    assert weights(runs[0]) != weights(runs[1])


def test_replayed_rollouts_train_the_same(folder, plain):
    engines = {f"agents.{name}.engine": {"backend": "replay", "replay": str(plain)} for name in ("ann", "bob")}
    replayed = train(validate(cohort.raw(folder, name="replayed", **engines)))
    assert tokens(replayed) == tokens(plain)
    assert weights(replayed) == weights(plain)


def test_an_existing_run_is_refused(folder, plain):
    with pytest.raises(ValueError, match=r"exists already: choose another name=..., or go on with --resume"):
        train(validate(cohort.raw(folder, name="plain")))


def test_a_perturbed_engine_is_caught(folder, monkeypatch):
    def faulty(policy, engine, version, bucket_bytes):
        class Perturbed:
            def weights(self, nbytes):
                for bucket in policy.weights(nbytes):
                    tensors = load_file(bucket.path)
                    for name in tensors:
                        if "layers.1.mlp.down_proj" in name:
                            tensors[name] = tensors[name] * 1.1
                    save_file(tensors, bucket.path)
                    yield bucket

        return reshard(Perturbed(), engine, version, bucket_bytes)

    monkeypatch.setattr(megarl.agents, "reshard", faulty)
    with pytest.raises(GuardStop, match=r"agent (ann|bob): engine and policy differ by"):
        train(validate(cohort.raw(folder, name="perturbed")))
    warned = train(validate(cohort.raw(folder, name="warned", steps=1, **{"guard.on_drift": "warn"})))
    assert read_metrics(warned)[0]["agent/ann/policy/logprob_drift_mean"] > 1e-4


@pytest.mark.parametrize("moment", ["early", "saving", "late"])
def test_killed_at_a_random_moment_and_resumed(folder, plain, moment):
    """kill -9, then --resume: bit for bit the run that was never interrupted."""
    file = folder / f"{moment}.yaml"
    file.write_text(yaml.safe_dump({"raw": cohort.raw(folder, name=f"killed-{moment}")}))
    code = "import os, signal, yaml; from megarl import checkpoint; from megarl.config import validate\n"
    if moment == "saving":  # policies are written, the checkpoint is not yet closed
        code += "checkpoint._write_through = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    code += f"from megarl.train import train; train(validate(yaml.safe_load(open({str(file)!r}))['raw']))"
    run_dir = folder / "runs" / "test" / f"killed-{moment}"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    if moment != "saving":
        cohort.wait_for_rows(run_dir / "metrics.jsonl", 1 if moment == "early" else 3, process)
        time.sleep(random.random() * (0.2 if moment == "early" else 0.02))  # late: a step is left, a short one
        assert process.poll() is None, "the run ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=120) == -signal.SIGKILL
    assert len(read_metrics(run_dir)) < 4
    assert (run_dir / "checkpoints" / "step_2.partial").is_dir() == (moment == "saving")

    command = [sys.executable, "-m", "megarl", "train", "--resume", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert cohort.comparable(read_metrics(run_dir)) == cohort.comparable(read_metrics(plain))
    assert weights(run_dir) == weights(plain)
