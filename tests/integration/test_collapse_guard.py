"""The collapse guard in a run: it stops or warns, and judges the same where the run is taken up again."""

import shutil

import pytest

from megarl import cli
from megarl.config import validate
from megarl.guards import GuardStop
from megarl.log import read_metrics, recent
from megarl.train import train
from tests import cohort

# a window of three steps and turns of any size: noise shows them
TOUCHY = {
    "smooth": 1,
    "window": 3,
    "entropy": {"rise": 0.0, "fall": 1e-9},
    "response_tokens": {"rise": 0.0, "fall": 1e-9},
}


def guarded(folder, name: str, **guard) -> dict:
    return cohort.raw(folder, name=name, steps=6, guard=guard)


def test_signs_are_the_same_after_a_resume(tmp_path, capsys):
    plain = train(validate(guarded(tmp_path, "plain", **TOUCHY)))
    found = [row["cohort/collapse_signs"] for row in read_metrics(plain)]
    assert found[:2] == [0, 0] and len(set(found)) > 1, "the test needs signs that come or go"
    assert "warning: sign of collapse: agent/" in capsys.readouterr().err
    assert [row["step"] for row in recent(plain, 2)] == [4, 5]

    # what is left of a run that was killed after its checkpoint of step 4 (and had logged on)
    shutil.rmtree(plain / "checkpoints" / "step_6")
    before = read_metrics(plain)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--resume", str(plain)])
    assert ended.value.code == 0
    assert cohort.comparable(read_metrics(plain)) == cohort.comparable(before)
    # control: a history that began anew at the resume would show nothing for two steps
    assert any(found[4:])


def test_a_stop_ends_the_run_before_its_update(tmp_path, capsys):
    always = {"on_collapse": "stop", "smooth": 1, "response_tokens": {"most": 0.5}}
    with pytest.raises(GuardStop, match=r"sign of collapse: agent/ann/engine/response_tokens is .*, above 0.5"):
        train(validate(guarded(tmp_path, "stopped", **always)))
    run = tmp_path / "runs" / "test" / "stopped"
    assert [row["step"] for row in read_metrics(run)] == [0, 1]  # a turn takes three steps
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--resume", str(run)])
    assert ended.value.code == 3 and "guard.on_collapse=warn goes on" in capsys.readouterr().err
    off = train(validate(guarded(tmp_path, "off", **{**always, "on_collapse": "off"})))
    assert "cohort/collapse_signs" not in read_metrics(off)[-1]
