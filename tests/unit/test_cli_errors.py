"""What a user reads when a run ends in an error."""

import pytest

import megarl.train
from megarl import cli
from megarl.backends.fingerprints import RefitMismatch


def test_an_error_says_in_which_worker_it_was_raised(monkeypatch, capsys):
    def verb(argv):
        error = ValueError("layout.tp=3 does not divide the model")
        error.add_note("in ann/policy rank 1, building make_worker; log: runs/x/logs/ann-policy-1.log\nTraceback ...")
        error.add_note("")
        error.add_note("a second note")
        raise error

    monkeypatch.setitem(cli.VERBS, "train", verb)
    with pytest.raises(SystemExit) as left:
        cli.main(["train"])
    assert left.value.code == cli.BAD_INPUT
    assert capsys.readouterr().err.splitlines() == [
        "megarl train: layout.tp=3 does not divide the model",
        "  in ann/policy rank 1, building make_worker; log: runs/x/logs/ann-policy-1.log",
        "  a second note",
    ]
    assert cli.told(ValueError("alone")) == "alone"


def test_a_refit_that_is_wrong_stops_a_run_as_guards_do(monkeypatch, capsys):
    def train(cfg, *, resume):
        raise RefitMismatch("after the refit the engine does not hold the policy's model.norm.weight at rank 0")

    monkeypatch.setattr(megarl.train, "train", train)
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "+experiment=debug_cpu"])
    assert left.value.code == cli.GUARD == 3
    assert "stopped: after the refit the engine does not hold the policy's model.norm.weight" in capsys.readouterr().err
