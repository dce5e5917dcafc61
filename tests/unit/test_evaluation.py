"""Scores of recorded rollouts against tables worked by hand; estimates; named sets."""

import json
from dataclasses import replace
from fractions import Fraction
from math import comb
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl import cli, rollouts
from megarl.answers.read import read_answer
from megarl.choices import draw_choices
from megarl.config import CONFIG_DIR, compose
from megarl.deck import open_deck
from megarl.evaluation.estimate import estimate, pass_at_k
from megarl.evaluation.pairs import Pair, judgements, score_pairs
from megarl.evaluation.score import Rules, score
from megarl.evaluation.sets import named_sets, open_set
from megarl.settings import AnswersConfig
from tests.by_hand import BY_HAND, CORRECT, GOLD, WRONG, boxed, recorded, turn
from tests.unit.records import rollout


def rules(**changes) -> Rules:
    return Rules(**{"answers": AnswersConfig(), "resamples": 50, **changes})


def values(scores) -> dict[str, dict[str, float]]:
    return {agent: {name: found.value for name, found in of.items()} for agent, of in scores.items()}


def test_recorded_rollouts_give_the_table_worked_by_hand():
    assert values(score(recorded(), GOLD, rules())) == BY_HAND
    # whatever order they arrive in
    shuffled = [recorded()[i] for i in np.random.default_rng(0).permutation(len(recorded()))]
    shuffled.sort(key=lambda r: r.prompt.agent)  # only the order of the rows follows the arrival
    assert values(score(shuffled, GOLD, rules())) == BY_HAND


def test_the_release_guesses_a_verdict_from_words():
    found = values(score(recorded(), GOLD, rules(answers=AnswersConfig(verdict="keywords"))))["ann"]
    # "No mistake found." is wrong now, a true negative; it is no better formed for that
    changed = {"verify_accuracy": 11 / 16, "wrong_recall": 5 / 8}
    assert found == BY_HAND["ann"] | changed


def test_v33_verification():
    firsts = [rollout("a", f"q{i}", 0, n=1, text=boxed(str(a))) for i, a in enumerate((1, 0, 0, 1))]
    seen = [*firsts]
    for first, verdict, revision in zip(firsts, (CORRECT, WRONG, CORRECT, WRONG), (None, 1, None, 0), strict=True):
        seen.append(turn(first, verdict))
        if revision is not None:
            seen.append(turn(seen[-1], boxed(str(revision))))
    found = values(score(seen, {f"q{i}": "1" for i in range(4)}, rules()))["a"]
    assert (found["acc_first"], found["acc_final"], found["verify_accuracy"]) == (0.5, 0.5, 0.5)
    # TP 6, FN 2, TN 3, FP 5
    seen = []
    for i, (right, verdict) in enumerate([(1, CORRECT)] * 6 + [(1, WRONG)] * 2 + [(0, WRONG)] * 3 + [(0, CORRECT)] * 5):
        first = rollout("a", "q", i, n=16, text=boxed(str(right)))
        seen += [first, turn(first, verdict)]
    found = values(score(seen, {"q": "1"}, rules()))["a"]
    assert (found["correct_recall"], found["wrong_recall"], found["verify_accuracy"]) == (0.75, 0.375, 0.5625)


def test_what_cannot_be_scored_is_named():
    with pytest.raises(ValueError, match=r"no true answer for prompt uid='q1'"):
        score(recorded(), {"q2": "1"}, rules())
    with pytest.raises(ValueError, match=r"uid='q1' has 4 answers and another one 3"):
        score(recorded()[:-1], GOLD, rules())
    with pytest.raises(ValueError, match="ann, bob answered different prompts"):
        score([r for r in recorded() if (r.prompt.agent, r.prompt.uid) != ("bob", "q4")], GOLD, rules())
    assert score([], GOLD, rules()) == {}


def test_pass_at_k_is_the_mean_over_all_subsets():
    # right or wrong of five samples; every subset of two counted out
    flags = [1, 0, 0, 1, 0]
    subsets = [(i, j) for i in range(5) for j in range(i)]
    counted = Fraction(sum(flags[i] or flags[j] for i, j in subsets), comb(5, 2))
    assert pass_at_k(5, 2, 2) == counted == Fraction(7, 10)
    assert [pass_at_k(4, c, 4) for c in range(3)] == [0, 1, 1]
    with pytest.raises(ValueError, match="pass@5 of 4 samples"):
        pass_at_k(4, 1, 5)


def ratio(pairs, **changes):
    settings = {"seed": 0, "resamples": 400, "confidence": 0.95, **changes}
    return estimate({"m": [(Fraction(n), d) for n, d in pairs]}, **settings)["m"]


def test_intervals():
    same = ratio([(1, 4)] * 7)
    assert (same.value, same.low, same.high) == (0.25, 0.25, 0.25)
    # of two problems 0 and 1, a resample's mean is 0, 1/2 or 1 with 1/4, 1/2, 1/4
    two = ratio([(0, 1), (1, 1)])
    assert (two.value, two.low, two.high) == (0.5, 0.0, 1.0)
    assert ratio([(0, 1), (1, 1), (1, 1)], seed=1) == ratio([(0, 1), (1, 1), (1, 1)], seed=1)
    # samples weigh, not problems: (0 + 1) / (1 + 3), and a problem without any is of no weight
    assert ratio([(0, 1), (1, 3), (0, 0)]).value == 0.25
    assert estimate({"m": [(Fraction(), 0)]}, seed=0, resamples=5, confidence=0.9) == {}
    narrow, wide = ratio([(i % 2, 1) for i in range(40)], confidence=0.5), ratio([(i % 2, 1) for i in range(40)])
    assert wide.low < narrow.low < 0.5 < narrow.high < wide.high


def test_intervals_cover_the_truth_as_often_as_they_say():
    random, covered = np.random.default_rng(0), 0
    for trial in range(200):
        draws = random.random(60) < 0.3
        found = ratio([(int(x), 1) for x in draws], seed=trial, resamples=200, confidence=0.9)
        covered += found.low <= 0.3 <= found.high
    assert 0.82 < covered / 200 < 0.96


def test_verifiers_on_pairs():
    pairs = [
        Pair(uid=uid, subset=subset, prompt="p", chosen="good", rejected="bad")
        for uid, subset in (("1", "x"), ("2", "x"), ("3", "y"), ("4", "y"))
    ]
    asks = judgements(pairs, "a", 2, open_set(f"rewardbench_math_prm={__file__}", [CONFIG_DIR]).requests)
    assert [m.content for m in asks[1].messages[:2]] == ["p", "bad"] and asks[1].uid == "1/rejected"
    # verdicts on the good and on the bad solution, two each; c: correct, w: wrong, -: none
    said = {"1": ("cc", "ww"), "2": ("cw", "cw"), "3": ("c-", "c-"), "4": ("ww", "cw")}
    text = {"c": CORRECT, "w": WRONG, "-": "hm"}
    seen = [
        replace(rollout("a", uid=ask.uid, index=i, n=2), prompt=ask, text=text[verdict])
        for ask in asks
        for i, verdict in enumerate(said[ask.uid[0]][ask.uid.endswith("rejected")])
    ]
    # won 1, half (1/2 = 1/2), half, lost (0 < 1/2): 2 of 4; right called correct 2+1+1+0, wrong called wrong 2+1+0+1
    assert values(score_pairs(seen, pairs, rules())) == {
        "a": {
            "pair_accuracy": 2 / 4,
            "verify_accuracy": 8 / 16,
            "correct_recall": 4 / 8,
            "wrong_recall": 4 / 8,
            "malformed": 2 / 16,
            "pair_accuracy/x": 1.5 / 2,
            "pair_accuracy/y": 0.5 / 2,
        }
    }


def test_options_depend_on_the_question_alone():
    drawn = [draw_choices(f"q{i}", "right", ["w1", "w2", "w3"]) for i in range(200)]
    assert drawn == [draw_choices(f"q{i}", "right", ["w1", "w2", "w3"]) for i in range(200)]
    for one in drawn:
        assert f"{one.right}) right" in one.text.split("\n")
        assert sorted(line[3:] for line in one.text.strip().split("\n")) == ["right", "w1", "w2", "w3"]
    letters = [one.right for one in drawn]
    assert all(30 < letters.count(letter) < 70 for letter in "ABCD")
    with pytest.raises(ValueError, match="27 options"):
        draw_choices("q", "r", ["w"] * 26)


def test_gpqa_as_its_authors_give_it(tmp_path):
    names = [
        "Question",
        "Correct Answer",
        "Incorrect Answer 1",
        "Incorrect Answer 2",
        "Incorrect Answer 3",
        "Record ID",
    ]
    lines = [",".join(names), '"Which, then?",one,two,three,four,rec1', "Why?,a,b,c,d,rec2"]
    path = tmp_path / "gpqa_diamond.csv"
    path.write_text("\n".join(lines) + "\n")
    found = open_set(f"gpqa_diamond={path}", [CONFIG_DIR])
    made = open_deck(found.data, {}, seed=3)
    assert made.gold == open_deck(found.data.model_copy(update={"shuffle": False}), {}, seed=4).gold
    text = made.views["original"][0][0].content
    assert text.startswith("Which, then?\n\nA) ") and text.endswith(r"\boxed{}.")
    assert f"{made.gold['rec1']}) one\n" in text.replace("\nThink", "\n\nThink")
    assert "letter" in found.requests.revise
    seen = [rollout("a", "rec1", 0, n=1, text=boxed(made.gold["rec1"]))]
    seen += [rollout("a", "rec2", 0, n=1, text=boxed(rf"\text{{({made.gold['rec2']})}}") + " A is a good letter.")]
    assert values(score(seen, made.gold, rules(answers=found.answers)))["a"]["avg@1"] == 1
    assert read_answer(boxed("B) one"), found.answers) == "B" == read_answer("Answer: B", found.answers)


ONE_ROW = {  # of every known file, in its own columns
    "math500": ("m.json", {"prompt": "P", "answer": r"\frac{14}{3}", "source": "math", "id": "test/7.json"}, r"14/3"),
    "amc": ("m.json", {"prompt": "P", "answer": "142.0", "source": "amc", "id": "0"}, "142"),
    "aime24": ("m.json", {"prompt": "P", "answer": "025", "source": "aime", "id": "1"}, "25"),
    "gsm8k": ("m.jsonl", {"question": "P", "answer": "2/2=<<2/2=1>>1 bolt.\n#### 1,080"}, "1080"),
    "math_train": (
        "m.parquet",
        {"prompt": [{"content": "P", "role": "user"}], "id": 3, "reward_model": {"ground_truth": "98"}},
        "98",
    ),
}


def test_known_sets():
    assert set(named_sets([CONFIG_DIR])) == {*ONE_ROW, "gpqa_diamond", "rewardbench_math_prm"}


@pytest.mark.parametrize("name", ONE_ROW)
def test_known_sets_read_their_files(tmp_path, name):
    file, row, answer = ONE_ROW[name]
    path = tmp_path / file
    if file.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps([row]) if file.endswith("json") else json.dumps(row) + "\n")
    deck = open_deck(open_set(f"{name}={path}", [CONFIG_DIR]).data, {}, seed=0)
    (uid,) = deck.uids
    assert deck.views["original"][0][0].content.startswith("P")
    for given, accuracy in ((answer, 1), ("7", 0)):
        found = score([rollout("a", uid, 0, n=1, text=boxed(given))], deck.gold, rules())
        assert values(found)["a"]["avg@1"] == accuracy


def test_a_known_set_is_something_to_train_on(tmp_path):
    cfg = compose(["+data=gsm8k", "data.path=p.jsonl", "steps=1", "algo.name=ttrl", "agents.a.model=m"])
    assert (cfg.data.prompt, cfg.data.gold_after, cfg.answers.style) == ("question", "####", "boxed")
    asked = compose(["+evaluation=coverrl", "data.path=p", "steps=1", "algo.name=ttrl", "agents.a.model=m"]).evaluation
    assert (asked.samples_per_prompt, asked.revise, asked.sampling.top_p) == (16, True, 0.95)


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("math501=x.json", "'math501' is neither a YAML file nor a known set; known: aime24, amc"),
        ("amc", "where is its file"),
        ("amc=nowhere.json", "no such file: nowhere.json"),
        ("bad.yaml=p.json", r"bad.yaml: data.promt: Extra inputs"),
        ("worse.yaml=p.json", r"worse.yaml: not YAML"),
    ],
)
def test_bad_sets_are_named(tmp_path, monkeypatch, spelled, message):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("data: {promt: question}\n")
    Path("worse.yaml").write_text("data: {a: b? c: d}")
    Path("p.json").write_text("[]")
    with pytest.raises(ValueError, match=message):
        open_set(spelled, [CONFIG_DIR])


def megarl(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(argv))
    return ended.value.code


def test_the_command_reproduces_the_table_from_files(tmp_path, capsys):
    problems, own = tmp_path / "problems.jsonl", tmp_path / "own.yaml"
    problems.write_text("".join(json.dumps({"key": k, "q": "?", "a": v}) + "\n" for k, v in GOLD.items()))
    own.write_text("data: {prompt: q, gold: a, id: key}\n")
    half = len(recorded()) // 2
    files = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
    for file, part in zip(files, (recorded()[:half], recorded()[half:]), strict=True):
        rollouts.write(file, part, step=3)
    assert "gold" not in " ".join(pq.read_table(files[0]).column_names)
    out = tmp_path / "out"
    command = ["eval", "--rollouts", *map(str, files), "--set", f"{own}={problems}", "--out", str(out)]
    assert megarl(*command, "evaluation.resamples=100") == 0
    results = json.loads((out / "results.json").read_text())
    scores = results["sets"]["own"]["scores"]
    assert {a: {m: e["value"] for m, e in of.items()} for a, of in scores.items()} == BY_HAND
    assert all(e["low"] <= e["value"] <= e["high"] for of in scores.values() for e in of.values())
    assert results["subjects"]["ann"]["weights"] == "version 0"
    assert results["sets"]["own"]["problems"] == 4 and results["sets"]["own"]["samples"] == 4

    table = [line.strip("|").split("|") for line in (out / "results.md").read_text().splitlines() if line[:1] == "|"]
    cells = {(row[0].strip(), agent.strip()): cell.strip() for row in table for agent, cell in zip(table[0], row)}
    assert cells["acc_final", "ann"].startswith("56.2 [") and cells["acc_final", "bob"] == "-"
    assert cells["maj@8", "cohort"].startswith("75.0 [") and cells["tokens", "bob"] == "3 [3, 3]"
    assert cells["pass@2", "bob"].startswith("58.3 [")
    shown = capsys.readouterr().out
    assert "own: 4 problems x 4 samples" in shown and "100 bootstrap resamples" in shown

    # the same files twice hold every rollout twice
    assert megarl("eval", "--rollouts", str(files[0]), str(files[0]), "--set", f"{own}={problems}") == 2
    assert "stand there twice" in capsys.readouterr().err


def test_faults_of_recorded_files_are_named_and_leave_no_results(tmp_path, capsys):
    """Before anything is computed: results that stand there, and folders that are none."""
    problems, own = tmp_path / "problems.jsonl", tmp_path / "own.yaml"
    problems.write_text("".join(json.dumps({"key": k, "q": "?", "a": v}) + "\n" for k, v in GOLD.items()))
    own.write_text("data: {prompt: q, gold: a, id: key}\n")
    (tmp_path / "untold.yaml").write_text("data: {prompt: q, id: key}\n")
    files = {name: tmp_path / f"{name}.parquet" for name in ("good", "empty", "numbers", "nulls")}
    rollouts.write(files["good"], recorded(), step=3)
    rollouts.write(files["empty"], [], step=3)
    table = pq.read_table(files["good"])
    at = table.column_names.index("text")
    for name, of in {"numbers": pa.array([1] * len(table)), "nulls": pa.nulls(len(table), pa.string())}.items():
        pq.write_table(table.set_column(at, "text", of), files[name])

    def evaluated(file, out, spec=own):
        code = megarl("eval", "--rollouts", str(files[file]), "--set", f"{spec}={problems}", "--out", str(out))
        return code, capsys.readouterr().err

    out = tmp_path / "out"
    for file, message in {"empty": "no rollout in it", "numbers": "column text", "nulls": "column text"}.items():
        code, said = evaluated(file, out)
        assert code == 2 and message in said and said.count("\n") == 1 and not list(out.iterdir())
    code, said = evaluated("good", out, tmp_path / "untold.yaml")
    assert code == 2 and "data.gold names no column" in said
    code, said = evaluated("good", problems / "below")
    assert code == 2 and f"{problems} is a file" in said
    assert evaluated("good", out)[0] == 0
    first = (out / "results.json").read_bytes()
    code, said = evaluated("good", out)
    assert code == 2 and "holds results already" in said and (out / "results.json").read_bytes() == first
    assert sorted(p.name for p in out.iterdir()) == ["results.json", "results.md"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["eval"], "whom to examine?"),
        (["eval", "--rollouts", "x.parquet"], "says nothing of true answers"),
        (["eval", "--run", "nowhere"], "no run there"),
        (["eval", "--run", "a", "--rollouts", "b"], "give one of them"),
        (["eval", "evalution.resamples=3", "agents.a.model=m", "data.path=p"], "did you mean evaluation?"),
        (["eval", "agents.a.model=m", "data.path=p"], "data.gold names no column"),
    ],
)
def test_bad_commands(capsys, argv, message):
    assert megarl(*argv) == 2
    assert message in capsys.readouterr().err


def test_tables_of_any_parquet_reader(tmp_path):
    """A rollout file that lost a column is named, not read as something else."""
    path = tmp_path / "broken.parquet"
    pq.write_table(pa.table({"key": ["x"]}), path)
    with pytest.raises(ValueError, match="no rollout file"):
        rollouts.read(path)
