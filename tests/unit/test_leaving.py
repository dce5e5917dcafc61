"""A run leaves when it is asked to, or while a step and a checkpoint still fit into its time; and goes on exactly."""

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from megarl import leaving
from megarl.config import validate
from megarl.log import read_metrics
from megarl.run_dir import Superseded, claim
from tests import cohort


def test_a_step_and_its_checkpoint_have_to_fit(monkeypatch):
    monkeypatch.delenv("MEGARL_END_TIME", raising=False)
    assert leaving.reason_to_leave(100.0, {}) is None
    for step, longest, needed in ((10.0, {}, 30), (1.0, {"step": 10.0, "save": 40.0}, 75), (10.0, {"save": 2.0}, 18)):
        monkeypatch.setenv("MEGARL_END_TIME", str(time.time() + leaving.MARGIN_S + needed + 1))
        assert leaving.reason_to_leave(step, longest) is None
        monkeypatch.setenv("MEGARL_END_TIME", str(time.time() + leaving.MARGIN_S + needed - 1))
        assert "the nodes are ours for another" in str(leaving.reason_to_leave(step, longest))


def start(folder, name, *words, **environment):
    raw = cohort.raw(folder, name=name, steps=6, **{"checkpoint.every_steps": None})
    experiment = folder / "conf" / "experiment"
    experiment.mkdir(parents=True, exist_ok=True)
    body = {k: v for k, v in raw.items() if k not in ("experiment", "name")}
    (experiment / "tiny.yaml").write_text("# @package _global_\n" + yaml.safe_dump(body))
    command = [sys.executable, "-m", "megarl", "train", "+experiment=tiny", f"name={name}", "--config-dir"]
    return subprocess.Popen(
        [*command, str(folder / "conf"), *words], env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )


def test_a_run_that_left_goes_on_as_if_it_had_not(tmp_path):
    """Once by its time and once by a signal, without a checkpoint being due."""
    whole = start(tmp_path, "whole")
    assert whole.wait(120) == 0, whole.stderr.read()
    timed = start(tmp_path, "timed", MEGARL_END_TIME=str(time.time() + 20))
    _, said = timed.communicate(timeout=120)
    assert timed.returncode == 75 and "checkpointed after step 1 of 6" in said
    asked = start(tmp_path, "asked")
    folder = tmp_path / "runs" / "tiny"
    cohort.wait_for_rows(folder / "asked" / "metrics.jsonl", 1, asked)
    asked.send_signal(signal.SIGUSR1)
    _, said = asked.communicate(timeout=120)
    assert asked.returncode == 75 and "asked to leave by SIGUSR1" in said
    rows = {}
    for name in ("whole", "timed", "asked"):
        if name != "whole":
            again = [sys.executable, "-m", "megarl", "train", "--resume", str(folder / name)]
            done = subprocess.run(again, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
        rows[name] = [{k: repr(v) for k, v in row.items()} for row in cohort.comparable(read_metrics(folder / name))]
    assert rows["whole"] == rows["timed"] == rows["asked"] and len(rows["whole"]) == 6


class Deck:
    """Nothing is looked at in a run that begins."""


def test_a_later_try_takes_the_folder_and_the_earlier_one_writes_no_more(tmp_path, monkeypatch):
    cfg = validate(cohort.raw(tmp_path, name="fenced"))
    monkeypatch.setenv("MEGARL_TRY", "17.0")
    with claim(cfg, None, Deck()) as first:
        first.check()
        for other in ("18.3", "17.0"):  # another job; the same try once more
            monkeypatch.setenv("MEGARL_TRY", other)
            with pytest.raises(ValueError, match="another process is training"), claim(cfg, None, Deck()):
                pass
        monkeypatch.setenv("MEGARL_TRY", "17.1")
        with claim(cfg, None, Deck()) as second:
            second.check()
            with pytest.raises(Superseded, match=r"taken over by 17\.1"):
                first.check()
            monkeypatch.setenv("MEGARL_TRY", "17.0")  # the old supervisor starts its driver once more
            with pytest.raises(ValueError, match="try 1 of job 17 has it"), claim(cfg, None, Deck()):
                pass
            second.check()
