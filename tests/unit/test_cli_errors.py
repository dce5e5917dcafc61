"""What a user reads when a run ends in an error."""

import pytest

from megarl import cli


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
