"""Second wordings: what is taken from a reply, what is refused, and the record that a later command goes on from."""

import json
from dataclasses import asdict

import pyarrow.parquet as pq
import pytest

from megarl.deck import open_deck
from megarl.rows import read_rows
from megarl.settings import DataConfig, SamplingConfig
from megarl.views import (
    INSTRUCTION,
    PLACE,
    Outcome,
    Reply,
    Request,
    checked_instruction,
    open_record,
    problems,
    reworded,
    with_view,
    write_rows,
)

REQUEST = Request(
    model="m",
    source_sha256="0",
    prompt="prompt",
    id="id",
    column="second",
    instruction=INSTRUCTION,
    sampling=SamplingConfig(),
    seed=None,
    attempts=1,
)


def outcome(uid, text="other", **changes):
    return Outcome(**{"id": uid, "text": text, "refused": None, "reply": f"<problem>{text}", "attempts": 1, **changes})


@pytest.mark.parametrize(
    ("reply", "text", "refused"),
    [
        ("<problem>Add 2 and 3.</problem>", "Add 2 and 3.", None),
        ("Sure:\n<problem>\n Add 2\nand 3. \n</problem> Good luck!", "Add 2\nand 3.", None),
        ("<think><problem>no</problem></think><problem>yes</problem>", "yes", None),
        ("Add 2 and 3.", None, "no <problem> block"),
        ("<problem>Add 2 and", None, "no <problem> block"),
        ("<think><problem>Add 2 and 3.</problem>", None, "no <problem> block"),
        ("<problem>a</problem><problem>b</problem>", None, "more than one <problem> block"),
        ("<problem>a</problem><problem>b", None, "more than one <problem> block"),
        ("<problem>a</problem></problem>", None, "more than one <problem> block"),
        ("</problem><problem>", None, "no <problem> block"),
        ("<problem><problem>a</problem>", None, "more than one <problem> block"),
        ("<problem> \n</problem>", None, "empty <problem> block"),
        ("<problem>what IS 2 + 3 </problem>", None, "the same words again"),
        ("<problem>Add 2 and 3: \\boxed{5}</problem>", None, "gives a boxed answer"),
        ("<problem>Add \ud800 and 3</problem>", None, "half of a character (a lone surrogate)"),
    ],
)
def test_what_is_taken_from_a_reply(reply, text, refused):
    assert reworded(Reply(text=reply), "What is 2+3?") == (text, refused)


def test_replies_that_are_none():
    whole = "<problem>Add 2 and 3.</problem>"
    assert reworded(Reply(text=whole, complete=False), "What is 2+3?") == (None, "cut by max_tokens")
    assert reworded(Reply(fault="bad request"), "What is 2+3?") == (None, "bad request")


def test_the_instruction_names_the_place_of_the_problem():
    assert checked_instruction(INSTRUCTION, "built-in").count(PLACE) == 1
    for text in ("Reword it.", f"{PLACE} {PLACE}"):
        with pytest.raises(ValueError, match=r"--instruction f: \{problem\} must stand in it once"):
            checked_instruction(text, "--instruction f")


def test_ids_and_wordings():
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
    rows = [{"id": 7, "prompt": "1+1?"}, {"id": "x", "prompt": turns}]
    assert problems(rows, "prompt", "id", "f") == {"7": "1+1?", "x": "2+3?"}
    assert list(problems(rows, "prompt", None, "f")) == ["0", "1"]
    with pytest.raises(ValueError, match="--id id is not unique: '7' stands twice"):
        problems([*rows, {"id": "7", "prompt": "?"}], "prompt", "id", "f")


def test_a_view_is_read_by_the_deck(tmp_path):
    """Rows keep what they have; a refused one is missing for both views; a conversation stays one."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
    rows = [{"id": str(i), "prompt": turns if i == 2 else f"{i}+3?", "answer": str(i + 3), "x": None} for i in range(4)]
    done = {uid: outcome(uid, f"{uid} and 3?") for uid in ("3", "0", "2")} | {"1": outcome("1", None, refused="no")}
    made = with_view(rows, list("0123"), done, REQUEST)
    assert [{k: v for k, v in row.items() if k != "second"} for row in made] == [rows[0], rows[2], rows[3]]
    assert made[1]["second"] == [turns[0], {"role": "user", "content": "2 and 3?"}] and turns[1]["content"] == "2+3?"
    write_rows(tmp_path / "out.jsonl", made)
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]
    data = DataConfig(
        path=str(tmp_path / "out.jsonl"),
        gold="answer",
        id="id",
        views={"original": {}, "rewrite": {"column": "second"}},
    )
    deck = open_deck(data, {}, 0)
    assert deck.uids == ("0", "2", "3") and deck.gold == {"0": "3", "2": "5", "3": "6"}
    assert [m[-1].content for m in deck.views["original"]] == ["0+3?", "2+3?", "3+3?"]
    assert [m[-1].content for m in deck.views["rewrite"]] == ["0 and 3?", "2 and 3?", "3 and 3?"]
    assert len(deck.views["rewrite"][1]) == 2


def test_rows_without_ids_are_numbered(tmp_path):
    rows = [{"prompt": f"{i}+3?", "when": float("nan")} for i in range(3)]
    request = REQUEST.model_copy(update={"id": None})
    made = with_view(rows, list("012"), {uid: outcome(uid) for uid in "02"}, request)
    assert [row["row"] for row in made] == [0, 2]
    with pytest.raises(ValueError, match=r"nothing that JSON can say .*; name the file \.parquet"):
        write_rows(tmp_path / "out.jsonl", made)
    assert not list(tmp_path.iterdir())
    write_rows(tmp_path / "out.parquet", made)
    assert [row["second"] for row in read_rows(tmp_path / "out.parquet")] == ["other", "other"]
    assert pq.read_schema(tmp_path / "out.parquet").names == ["prompt", "when", "row", "second"]


def test_a_record_is_gone_on_with(tmp_path):
    path = tmp_path / "record.jsonl"
    first, second = outcome("0", "\u00e9 \u2028 \x85"), outcome("1", None, refused="no <problem> block")
    with open_record(path, REQUEST, {"by": "m"}) as record:
        record.add(first)
        record.add(second)
        with pytest.raises(ValueError, match="another megarl rewrite is writing it"), open_record(path, REQUEST, {}):
            pass
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "2", "te')  # ended in the middle of a line
    with open_record(path, REQUEST, {"by": "other"}) as record:
        assert record.done == {"0": first, "1": second}
        record.add(outcome("2"))
    assert path.read_bytes() == whole + json.dumps(asdict(outcome("2"))).encode() + b"\n"
    head = json.loads(whole.splitlines()[0])
    assert head["facts"] == {"by": "m"} and head["request"]["model"] == "m" and PLACE in head["request"]["instruction"]


def test_a_record_of_something_else_is_refused(tmp_path):
    path = tmp_path / "record.jsonl"
    other = REQUEST.model_copy(update={"model": "n"})
    with open_record(path, other, {}):
        pass
    with open_record(path, REQUEST, {}) as record:  # nothing was recorded, so nothing is lost
        record.add(outcome("0"))
    with pytest.raises(ValueError, match='was begun with model="m", and now it is "n": go on as it was begun'):
        open_record(path, other, {}).__enter__()
    for text, match in (
        ("{}\n{}\n", "is no record of megarl rewrite"),
        ("1\n2\n", ":1: no line of a record"),
        (path.read_text() + "{\n", ":3: no line of a record"),
        (path.read_text() + '{"id": "1"}\n', ":3: no outcome of a row"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=match):
            open_record(path, REQUEST, {}).__enter__()
        assert path.read_text() == text
        path.write_text(json.dumps({"request": REQUEST.model_dump(mode="json"), "facts": {}}) + "\n")
