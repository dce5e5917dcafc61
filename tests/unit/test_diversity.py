"""Overlap of errors, the predicted flow, and `megarl diversity`."""

import json

import numpy as np
import pytest

from megarl import cli, rollouts
from megarl.diversity import alone, answers_of, classes, overlap, pairs, rings
from megarl.flow import majority_right, mobility, pull, settle, velocity
from tests import cohort
from tests.by_hand import boxed
from tests.unit.records import rollout
from tests.unit.records import rollouts as some


def test_v34_overlap():
    # right: A 1 1 1 0 0 0 0 1, B 1 0 1 1 0 0 0 1; both wrong in three, twice with the same answer
    gold = {str(i): "1" for i in range(8)}
    a = {str(i): [x] for i, x in enumerate(["1", "1", "1", "2", "3", "4", None, "1"])}
    b = {str(i): [x] for i, x in enumerate(["1", "2", "1", "1", "3", "8/2", None, "1"])}
    found = overlap(("a", "b"), a, b, gold)
    assert (found.kappa, found.complementarity, found.same_wrong, found.either) == (0.5, 0.25, 0.25, 0.625)
    assert found.agreement == 5 / 8  # three right, two wrong; two that cannot be read do not agree
    assert (found.rising, found.even, found.predicted) == (3 / 8, 2 / 8, 0.5)
    # without truth only agreement is known
    blind = overlap(("a", "b"), a, b, None)
    assert blind.agreement == 5 / 8 and blind.kappa is None and blind.predicted is None


def test_several_samples_are_all_pairs_of_samples():
    # a: right 3/4, wrong x once; b: right 1/4, wrong x twice, unreadable once
    a, b = {"q": ["1", "1", "1", "x"]}, {"q": ["1", "x", "x", None]}
    found = overlap(("a", "b"), a, b, {"q": "1"})
    assert found.complementarity == 3 / 4 * 3 / 4 + 1 / 4 * 1 / 4
    assert found.same_wrong == 1 / 4 * 2 / 4
    assert found.agreement == 3 / 4 * 1 / 4 + 1 / 4 * 2 / 4
    assert (found.rising, found.even) == (0, 1)  # 3/4 + 1/4 is the border, exactly
    thirds = overlap(("a", "b"), {"q": ["1"] * 7 + ["x"] * 5}, {"q": ["1"] * 5 + ["x"] * 7}, {"q": "1"})
    assert thirds.even == 1


def test_kappa_where_chance_decides_everything():
    always = {"q1": ["1"], "q2": ["1"]}
    assert overlap(("a", "b"), always, always, {"q1": "1", "q2": "1"}).kappa is None
    assert overlap(("a", "b"), always, {"q3": ["1"]}, None) is None


def test_classes_are_those_of_equal_answers():
    assert classes(["1/2", None, "3", "0.5", "1/2", "3"]) == [("1/2", 3), ("3", 2)]
    assert classes([None]) == []


def test_v35_flow():
    p = np.array([0.2, 0.9])
    assert pull(p, 7)[1] == pytest.approx(0.994544, abs=1e-6)
    assert mobility(p, 7)[0] == pytest.approx(0.052125, abs=1e-6)
    assert velocity(p[:, None], [1, 0], 7)[:, 0] == pytest.approx([0.051841, -0.016707], abs=1e-6)
    slope = (pull(np.array(0.5 + 1e-6), 7) - pull(np.array(0.5 - 1e-6), 7)) / 2e-6
    assert slope == pytest.approx(4.375, abs=1e-6)
    assert majority_right(np.array(0.5), 7) == 0.5
    with pytest.raises(ValueError, match="votes=8"):
        settle(p[:, None], [1, 0], 8)


def test_pairs_rise_exactly_above_the_separatrix():
    """(0.2, 0.9) and (0.3, 0.6) of V35, and a grid: sums above 1 end at 1, below at 0; alone 1/2 decides."""
    grid = np.array([(a, b) for a in np.arange(0.05, 1, 0.1) for b in np.arange(0.1, 1, 0.1) if abs(a + b - 1) > 0.04])
    starts = np.concatenate([[(0.2, 0.9), (0.3, 0.6)], grid]).T
    ends = settle(starts, [1, 0], 7)
    expected = np.where(starts.sum(axis=0) > 1, 1.0, 0.0)
    assert np.abs(ends - expected).max() < 0.05
    own = np.array([[0.3, 0.45, 0.55, 0.9]])
    assert settle(own, [0], 7).round(1).tolist() == [[0, 0, 1, 1]]


def answers(right: dict[str, float], samples: int = 10) -> dict[str, list[str]]:
    """So many right (1) answers, the others x."""
    return {
        uid: ["1"] * round(share * samples) + ["x"] * (samples - round(share * samples)) for uid, share in right.items()
    }


def test_ranking_prefers_those_who_make_up_for_each_other():
    gold = {"q1": "1", "q2": "1"}
    cohort_of = {
        "strong": answers({"q1": 0.9, "q2": 0.3}),
        "alike": answers({"q1": 0.9, "q2": 0.4}),
        "other": answers({"q1": 0.4, "q2": 0.9}),
    }
    first, *_, last = pairs(cohort_of, gold)
    assert set(first.agents) != {"strong", "alike"} and first.predicted == 1 and last.agents == ("alike", "strong")
    assert last.predicted == 0.5 and last.kappa > first.kappa
    best, *_, worst = rings(cohort_of, gold, sizes=(2,), votes=11)
    assert worst.agents == ("alike", "strong") and worst.mean < 0.6 and best.mean > 0.95
    # three agents have a ring in each direction; without truth those that agree least come first
    assert [set(r.agents) for r in rings(cohort_of, gold, sizes=(3,), votes=11)] == [set(cohort_of)] * 2
    assert pairs(cohort_of, None)[-1].agents == ("alike", "strong")
    now, later = alone(cohort_of["strong"], gold, votes=11)
    assert now == 0.6 and 0.4 < later < 0.6


def test_answers_of_follow_index_order():
    seen = some("a", "q", ["1", None, "2"])
    assert answers_of(seen[::-1]) == {"a": {"q": ["1", None, "2"]}}


def megarl(*argv: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in argv])
    return ended.value.code


def test_the_command_on_recorded_files(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"q": "?", "a": "1"}\n{"q": "?", "a": "1"}\n')
    (tmp_path / "set.yaml").write_text(f"data: {{path: {tmp_path / 'p.jsonl'}, prompt: q, gold: a}}\n")
    for name, (first, second) in {"x": ("1", "5"), "y": ("2", "1")}.items():
        seen = [rollout("same", uid, 0, n=1, text=boxed(a)) for uid, a in (("0", first), ("1", second))]
        rollouts.write(tmp_path / f"{name}.parquet", seen, step=0)
    files = [f"{name}={tmp_path / name}.parquet" for name in "xy"]
    command = ["diversity", "--set", tmp_path / "set.yaml", "--out", tmp_path / "out.json", "--rollouts"]
    assert megarl(*command, *files) == 0
    [pair] = json.loads((tmp_path / "out.json").read_text())["pairs"]
    assert pair["agents"] == ["x", "y"] and (pair["complementarity"], pair["either"], pair["kappa"]) == (1, 1, -1)
    shown = capsys.readouterr().out
    assert "x ~ y" in shown and "coarse guess" in shown
    assert megarl(*command, *(f.partition("=")[2] for f in files)) == 2
    assert "NAME=FILE" in capsys.readouterr().err
    assert megarl(*command, files[0]) == 2
    assert "there is only x" in capsys.readouterr().err
    for option, message in {
        ("--ring", "1"): "at least 2 agents",
        ("--ring", "3"): "rings of 2 to 2",
        ("--top", "0"): "--top 0",
        ("--out", tmp_path / "p.jsonl" / "x"): "no place for a file",
    }.items():
        assert megarl("diversity", "--set", tmp_path / "set.yaml", "--rollouts", *files, *option) == 2
        assert message in capsys.readouterr().err


def test_the_command_on_models(tmp_path, capsys):
    raw = cohort.raw(tmp_path)
    read_as = "answers: {style: last-number, truncated: read}\n"
    (tmp_path / "set.yaml").write_text(f"data: {{gold: answer, id: id, limit: 4, max_prompt_tokens: 32}}\n{read_as}")
    models = [f"agents.{name}.{k}={v}" for name, of in raw["agents"].items() for k, v in [("model", of["model"])]]
    models += [
        f"agents.{n}.{k}"
        for n in raw["agents"]
        for k in ("backend=reference", "engine.backend=reference", "dtype=float32")
    ]
    exam = ["evaluation.samples_per_prompt=4", "evaluation.sampling.max_tokens=6", f"output={tmp_path}"]
    assert megarl("diversity", *models, *exam, "--set", f"{tmp_path / 'set.yaml'}={tmp_path / 'problems.jsonl'}") == 0
    shown = capsys.readouterr().out
    assert "ann ~ bob" in shown and "ann > bob" in shown and "coarse" not in shown
