"""What may be done to a run's folder: resumed, refused, damaged, fought over. Reference backends."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl import checkpoint
from megarl.config import validate
from megarl.guards import GuardStop
from megarl.log import read_metrics
from megarl.train import train
from tests import cohort

STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def finished(folder):
    """A run of two steps with a checkpoint after each."""
    return train(validate(cohort.raw(folder, name="finished", steps=STEPS, **{"checkpoint.every_steps": 1})))


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def config(run: Path, **changes):
    raw = yaml.safe_load((run / "config.yaml").read_text())
    return validate(cohort.changed(raw, changes))


def contents(run: Path) -> dict[str, bytes]:
    """Everything that a refused command must leave as it was."""
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megarl", "train", *map(str, args)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 8}, "seed: 7 -> 8"),
        ({"data.shuffle": False}, "data/shuffle: True -> False"),
        ({"batch.prompts_per_step": 3}, "batch/prompts_per_step: 4 -> 3"),
        ({"batch.samples_per_prompt": 4}, "batch/samples_per_prompt: 8 -> 4"),
        ({"sampling.temperature": 0.5}, "sampling/temperature: 1.0 -> 0.5"),
        ({"agents.ann.dtype": "bfloat16"}, "agents/ann/dtype: float32 -> bfloat16"),
        ({"agents.ann.optimizer.name": "sgd"}, "agents/ann/optimizer/name: adam -> sgd"),
        ({"algo": {"name": "ttrl"}}, "algo/name: corl -> ttrl"),
        ({"name": "other"}, "name: finished -> other"),
    ],
)
def test_what_makes_it_another_run_is_refused_and_changes_nothing(run, changes, expected):
    before = contents(run)
    with pytest.raises(ValueError, match="keeps these") as caught:
        train(config(run, steps=3, **changes), resume=run)
    assert expected in str(caught.value)
    assert contents(run) == before


def test_what_may_change_is_said(run, capsys):
    changes = {"steps": 3, "agents.ann.optimizer.lr": 1e-4, "batch.tokens_per_microbatch": 256}
    train(config(run, **changes), resume=run)
    said = capsys.readouterr().out
    assert "steps: 2 -> 3" in said and "agents/ann/optimizer/lr: 0.001 -> 0.0001" in said
    assert [row["step"] for row in read_metrics(run)] == [0, 1, 2]
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] == 3


def test_other_prompts_under_the_same_ids_are_refused(run, tmp_path):
    raw = yaml.safe_load((run / "config.yaml").read_text())
    rows = [json.loads(line) for line in Path(raw["data"]["path"]).read_text().splitlines()]
    moved, other = tmp_path / "moved.jsonl", tmp_path / "other.jsonl"
    shutil.copy(raw["data"]["path"], moved)
    other.write_text("".join(json.dumps(row | {"prompt": row["prompt"] + " "}) + "\n" for row in rows))
    before = contents(run)
    with pytest.raises(ValueError, match="made with other prompts"):
        train(config(run, steps=3, **{"data.path": str(other)}), resume=run)
    assert contents(run) == before
    train(config(run, steps=3, **{"data.path": str(moved)}), resume=run)


def test_a_run_that_saves_nothing_keeps_its_results(folder):
    raw = cohort.raw(folder, name="unsaved", steps=1, checkpoint={})
    made = train(validate(raw))
    before = contents(made)
    with pytest.raises(ValueError, match=r"saves no checkpoints .* its 1 steps cannot be continued"):
        train(validate(raw), resume=made)
    with pytest.raises(ValueError, match="has no checkpoint to go on from: choose another name"):
        train(validate(raw))
    assert contents(made) == before


def damaged(run: Path, what: str) -> None:
    last = run / "checkpoints" / "step_2"
    tensors = next((last / "agents").rglob("*.safetensors"))
    match what:
        case "unfinished":
            (last / "COMPLETE").unlink()
        case "no state":
            (last / "state.json").unlink()
        case "cut state":
            (last / "state.json").write_text('{"step": 2')
        case "cut tensors":
            os.truncate(tensors, tensors.stat().st_size // 2)
        case "no agent":
            shutil.rmtree(last / "agents" / "ann")


@pytest.mark.parametrize("what", ["unfinished", "no state", "cut state", "cut tensors", "no agent"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(run, what):
    damaged(run, what)
    found = checkpoint.find(run)
    assert (found.step, list(found.skipped)) == (1, ["step_2"])


def test_odd_folders_are_passed_over(run):
    for name in ("step_²", "step_٣", "step_7", "step_2.partial", "step_x"):
        (run / "checkpoints" / name).mkdir()
    (run / "rollouts" / "step_foo.parquet").touch()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "cut\x00\xff')  # as a kill leaves it
    train(config(run, steps=3), resume=run)
    assert [row["step"] for row in read_metrics(run)] == [0, 1, 2]


def test_all_checkpoints_lost_is_no_new_start(run):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="2 steps are logged and a checkpoint was due every 1, but none is complete"):
        train(config(run), resume=run)


def test_rows_that_are_none_are_named(run):
    text = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([text[0], "garbage", text[1]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a row"):
        train(config(run), resume=run)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a=[1"], "while parsing"),
        (["+experiment=debug_cpu"], "only key=value"),
        (["stepz=3"], "did you mean steps"),
        (["--config-dir", "."], "--config-dir has no place"),
    ],
)
def test_wrong_words_beside_resume(run, arguments, expected):
    done = command("--resume", run, *arguments)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


def test_a_configuration_that_cannot_be_read(run):
    (run / "config.yaml").write_text("a: [")
    done = command("--resume", run)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_one_process_at_a_time_and_a_signal_ends_it_cleanly(folder, finished):
    """A second process is refused (2); SIGTERM ends the first with 143, and its run can go on."""
    raw = cohort.raw(folder, name="living", steps=500, **{"checkpoint.every_steps": 1, "checkpoint.keep": 500})
    file = folder / "living.yaml"
    file.write_text(yaml.safe_dump(raw))
    run = folder / "runs" / "test" / "living"
    code = (
        f"import yaml; from megarl import cli; raw = yaml.safe_load(open({str(file)!r}))\n"
        "from megarl.config import validate\n"
        "cli.compose = lambda *_: validate(raw); cli.main(['train'])"
    )
    first = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    cohort.wait_for_rows(run / "metrics.jsonl", 2, first)
    second = command("--resume", run)
    assert second.returncode == 2 and "another process is training in this folder" in second.stderr
    third = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert third.returncode == 2
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 128 + signal.SIGTERM
    assert first.stderr is not None and "ended by SIGTERM" in first.stderr.read()
    done = checkpoint.find(run).step
    assert done >= 2
    train(config(run, steps=done + 1), resume=run)
    assert [row["step"] for row in read_metrics(run)] == list(range(done + 1))


def test_a_failed_start_leaves_the_name_free(folder):
    raw = cohort.raw(folder, name="failed", steps=1, checkpoint={})
    with pytest.raises(ValueError, match="no such file"):
        train(validate(cohort.changed(dict(raw), {"data": raw["data"] | {"path": "nowhere.jsonl"}})))
    assert not (folder / "runs" / "test" / "failed").exists()
    (folder / "runs" / "test" / "failed" / "logs").mkdir(parents=True)  # as a start that failed later leaves it
    (folder / "runs" / "test" / "failed" / ".lock").touch()
    train(validate(raw))


def test_a_folder_that_is_no_run_is_left_alone(folder):
    mine = folder / "runs" / "test" / "mine"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds no run"):
        train(validate(cohort.raw(folder, name="mine")))


def test_spoilt_weights_stop_the_run(folder):
    """A gradient that is never finite again: three steps are skipped, then the run stops (exit 3)."""
    raw = cohort.raw(folder, name="spoilt", steps=8, **{"agents.ann.optimizer": {"lr": 1e12}})
    with pytest.raises((GuardStop, FloatingPointError), match=r"not finite, for the 3\. step in a row|no numbers"):
        train(validate(raw))


def test_saving_in_the_background_changes_no_number(folder, finished):
    """Nor what can be resumed: killed between the copy and the end of a save, the checkpoint before it is there."""
    raw = cohort.raw(folder, name="background", steps=STEPS, **{"checkpoint.every_steps": 1})
    raw["checkpoint"]["background"] = True
    config = folder / "background.yaml"
    config.write_text(yaml.safe_dump(raw))
    killed = (
        "import os, signal, yaml; from megarl import checkpoint; from megarl.config import validate\n"
        "ends = []\n"
        "def end(saving, inner=checkpoint.Saving.end):\n"
        "    ends.append(saving)\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if len(ends) == 2 else inner(saving)\n"
        "checkpoint.Saving.end = end\n"
        f"from megarl.train import train; train(validate(yaml.safe_load(open({str(config)!r}))))"
    )
    assert subprocess.run([sys.executable, "-c", killed], timeout=300, check=False).returncode == -signal.SIGKILL
    run = folder / "runs" / "test" / "background"
    assert checkpoint.find(run).step == 1 and set(checkpoint.find(run).skipped) == {"step_2.partial"}
    train(validate(raw), resume=run)
    assert cohort.comparable(read_metrics(run)) == cohort.comparable(read_metrics(finished))
    assert checkpoint.find(run).step == STEPS
