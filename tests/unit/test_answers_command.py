"""megarl answers judge, extract and vote, as a user runs them."""

import json

import pytest

from megarl.cli import main


@pytest.fixture
def answers(tmp_path):
    def run(verb, rows):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        with pytest.raises(SystemExit) as end:
            main(["answers", verb, str(source), str(target)])
        if end.value.code:
            return end.value.code
        return [json.loads(line) for line in target.read_text("utf-8").splitlines()]

    return run


def test_judge(answers):
    rows = [
        {"id": "a", "a": "1/2", "b": "0.5", "note": "ignored"},
        {"id": "b", "a": "28", "b": "0.28"},
        {"id": "c", "a": r"\ln(ab)", "b": r"\ln a+\ln b"},
        {"id": "d", "a": "\ud800", "b": "\x00"},
    ]
    out = answers("judge", rows)
    assert [(row["id"], row["equal"]) for row in out] == [("a", True), ("b", False), ("c", None), ("d", False)]
    assert out[2]["reason"] == "equal where the letters are positive"


def test_extract(answers):
    rows = [
        {"id": 1, "text": "so \\boxed{7}", "task": "math", "options": None},
        {"id": 2, "text": "#### 1,072"},
        {"id": 3, "text": "Answer: E", "task": "mcq", "options": "ABCDE"},
        {"id": 4, "text": "Answer: E", "task": "mcq", "options": ["A", "B"]},
        {"id": 5, "text": "\\boxed{Incorrect}", "task": "verdict"},
        {"id": 6, "text": "The answer is wrong.", "task": "verdict_sentence"},
        {"id": 7, "text": "nothing", "task": "math"},
    ]
    assert [row["answer"] for row in answers("extract", rows)] == ["7", "1072", "E", None, "incorrect", "wrong", None]


def test_vote(answers):
    [out] = answers("vote", [{"id": "v", "answers": ["28", None, "0.28", "28\\%", "\ud800"]}])
    assert out == {
        "id": "v",
        "answer": "28",
        "count": 2,
        "parsed": 3,  # what is invisible is no answer
        "total": 5,
        "tie": False,
        "undecided": 0,
        "clusters": [[0, 3], [2]],
    }
    assert answers("vote", [{"id": 1, "answers": [None]}])[0]["answer"] is None


@pytest.mark.parametrize(
    ("verb", "row", "says"),
    [
        ("judge", {"id": 1, "a": "1"}, "in.jsonl:1: b=None: a string"),
        ("extract", {"id": 1, "text": "", "task": "chess"}, "task='chess': one of math, mcq"),
        ("vote", {"id": 1, "answers": [1]}, "answers=[1]: a list of strings and nulls"),
        ("vote", [], "is no object"),
        ("extract", {"id": 1, "text": "", "task": ["mcq"]}, "task=['mcq']: one of math, mcq"),
        ("extract", {"id": 1, "text": "", "task": "mcq", "options": 5}, "options=5: the letters"),
        ("extract", {"id": 1, "text": "", "task": "mcq", "options": ["A", "two"]}, "options=['A', 'two']"),
    ],
)
def test_bad_rows_are_named(answers, capsys, verb, row, says):
    assert answers(verb, [row]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["answers", "judge", str(tmp_path / "no"), str(tmp_path / "out")])
    assert end.value.code == 2 and "no such file" in capsys.readouterr().err


@pytest.mark.parametrize("second", [b'{"id": 2, "a": "1"', b"\xff\xfe", b"[" * 100_000, b'{"id": 2}'])
def test_a_bad_row_leaves_nothing_behind(tmp_path, capsys, second):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"id": 1, "a": "1", "b": "1"}\n' + second + b"\n")
    target.write_text("of another day\n")
    with pytest.raises(SystemExit) as end:
        main(["answers", "judge", str(source), str(target)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "in.jsonl:2: " in said and said.count("\n") == 1
    assert target.read_text() == "of another day\n" and sorted(tmp_path.iterdir()) == [source, target]


def test_a_target_without_a_folder_is_bad_input(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 1, "a": "1", "b": "1"}\n')
    for target in (tmp_path / "no" / "out.jsonl", tmp_path):
        with pytest.raises(SystemExit) as end:
            main(["answers", "judge", str(source), str(target)])
        assert end.value.code == 2 and f"{target}: no place for a file" in capsys.readouterr().err
