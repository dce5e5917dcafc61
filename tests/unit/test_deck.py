"""Prompt files, views, and what is dealt when."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.chat import open_chat
from megarl.deck import Cursor, Seat, open_deck
from megarl.settings import DataConfig, ViewConfig
from tests import tiny

ROWS = [{"prompt": f"{a}+{a}=", "other": f"twice {a}?", "answer": str(2 * a), "key": f"k{a}"} for a in range(10)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return open_chat(str(tiny.write(tmp_path_factory.mktemp("deck") / "qwen2", "qwen2")))


def write(path, rows=ROWS):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    else:
        path.write_text(json.dumps(rows))
    return str(path)


def deck(chat, seed=0, view="original", **settings):
    return open_deck(DataConfig(**settings), {"a": (view, chat)}, seed)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_all_formats_give_the_same_deck(tmp_path, chat, suffix):
    made = deck(chat, path=write(tmp_path / f"d.{suffix}"), gold="answer", id="key")
    assert made.uids == tuple(f"k{a}" for a in range(10))
    assert made.views["original"][3][0].content == "3+3="
    assert made.gold == {f"k{a}": str(2 * a) for a in range(10)}


def test_chat_prompts_and_nested_columns(tmp_path, chat):
    rows = [
        {
            "prompt": [{"role": "system", "content": "hm"}, {"role": "user", "content": "1+1?"}],
            "reward_model": {"ground_truth": "2"},
        }
    ]
    made = deck(
        chat,
        path=write(tmp_path / "d.parquet", rows),
        gold="reward_model.ground_truth",
        views={"original": ViewConfig(before="Q: ", after="\nBox it: \\boxed{}.")},
    )
    assert [tuple(m) for m in made.views["original"][0]] == [
        ("system", "hm"),
        ("user", "Q: 1+1?\nBox it: \\boxed{}."),
    ]
    assert made.gold == {"0": "2"}


def steps(made, count, prompts_per_step, seats, start=Cursor()):
    """uids of so many steps, and the cursor behind each."""
    dealt, cursors, cursor = [], [], start
    for _ in range(count):
        cards, cursor = made.deal(cursor, prompts_per_step, seats)
        dealt.append([p.uid for p in cards])
        cursors.append(cursor)
    return dealt, cursors


def test_dealing_is_a_pure_function_of_seed_and_cursor(tmp_path, chat):
    path = write(tmp_path / "d.jsonl")
    seats = {"a": Seat("original", 4)}
    one, again, other = (deck(chat, seed, path=path) for seed in (1, 1, 2))
    dealt, cursors = steps(one, 7, 3, seats)
    assert dealt == steps(again, 7, 3, seats)[0]
    assert dealt != steps(other, 7, 3, seats)[0]
    # an epoch is three steps of three; nothing twice within it, and the next epoch is another shuffle
    for epoch in (0, 1):
        assert len({uid for step in range(3) for uid in dealt[3 * epoch + step]}) == 9
    assert dealt[:3] != dealt[3:6]
    assert [p.n for p in one.deal(Cursor(), 3, seats)[0]] == [4, 4, 4]
    # case-E1: taken up at any step, the end of an epoch included, the rest is what it would have been
    for done in range(6):
        assert steps(again, 6 - done, 3, seats, start=cursors[done])[0] == dealt[done + 1 :]


def test_further_prompts_of_a_step_are_new_and_end_with_the_epoch(tmp_path, chat):
    made = deck(chat, path=write(tmp_path / "d.jsonl"))
    seats = {"a": Seat("original", 2), "b": Seat("original", 3)}
    first, cursor = made.deal(Cursor(), 4, seats)
    more, cursor = made.deal_more(cursor, 3, seats)
    assert [p.uid for p in more[:3]] == [p.uid for p in more[3:]] and [p.n for p in more] == [2] * 3 + [3] * 3
    last, cursor = made.deal_more(cursor, 9, seats)
    assert len(last) == 2 * 3, "three rows were left"
    uids = [p.uid for p in first[:4] + more[:3] + last[:3]]
    assert sorted(uids) == sorted(made.uids)
    assert made.deal_more(cursor, 9, seats) == ([], cursor)
    # the next step begins the next epoch, as if the further prompts had been a step
    assert made.deal(cursor, 4, seats) == made.deal(Cursor(epoch=1), 4, seats)


def test_every_agent_gets_the_same_rows_each_in_its_own_view(tmp_path, chat):
    views = {"original": ViewConfig(), "rewrite": ViewConfig(column="other")}
    made = open_deck(
        DataConfig(path=write(tmp_path / "d.jsonl"), views=views),
        {"a": ("original", chat), "b": ("rewrite", chat)},
        0,
    )
    cards, _ = made.deal(Cursor(place=2), 4, {"a": Seat("original", 2), "b": Seat("rewrite", 3)})
    a, b = cards[:4], cards[4:]
    assert [p.uid for p in a] == [p.uid for p in b]
    for left, right in zip(a, b, strict=True):
        assert left.messages[0].content == f"{left.uid}+{left.uid}="
        assert right.messages[0].content == f"twice {left.uid}?"


def test_a_view_file_in_another_order_is_refused(tmp_path, chat):
    path = write(tmp_path / "d.jsonl")
    for rows, message in ((ROWS[::-1], "row 0 is 'k9', but 'k0'"), (ROWS[:-1], "has 9 rows"), (ROWS, None)):
        second = write(tmp_path / "second.jsonl", rows)
        settings = {
            "path": path,
            "id": "key",
            "views": {"original": ViewConfig(), "b": ViewConfig(path=second, column="other")},
        }
        if message is None:
            assert deck(chat, **settings).views["b"][0][0].content == "twice 0?"
        else:
            with pytest.raises(ValueError, match=message):
                deck(chat, **settings)


def test_long_prompts_are_left_out_and_counted(tmp_path, chat):
    rows = [*ROWS[:4], {**ROWS[4], "prompt": "9" * 50}, *ROWS[5:]]
    made = deck(chat, path=write(tmp_path / "d.jsonl", rows), max_prompt_tokens=32)
    assert len(made) == 9
    assert made.filtered == 1
    assert "4" not in made.uids
    with pytest.raises(ValueError, match="max_prompt_tokens=2"):
        deck(chat, path=write(tmp_path / "d.jsonl"), max_prompt_tokens=2)


def test_more_prompts_than_the_deck_holds(tmp_path, chat):
    made = deck(chat, path=write(tmp_path / "d.jsonl"))
    with pytest.raises(ValueError, match=r"prompts_per_step=11.*holds 10 prompts"):
        made.deal(Cursor(), 11, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere.jsonl"}, "no such file"),
        ({"path": "d.txt"}, "unknown suffix '.txt'"),
        (
            {"path": "d.jsonl", "prompt": "question"},
            "no row has a value of 'question'; its columns: prompt, other, answer, key",
        ),
        ({"path": "d.jsonl", "gold": "solution"}, "no row has a value of 'solution'"),
        ({"path": "twice.jsonl", "id": "key"}, "'k0' stands twice"),
        ({"path": "broken.jsonl"}, "broken.jsonl:2: not JSON"),
        ({"path": "deep.jsonl"}, "deep.jsonl:1: not JSON that can be read"),
        ({"path": "digits.jsonl"}, "digits.jsonl:1: not JSON that can be read"),
        ({"path": "latin.jsonl"}, "not UTF-8"),
        ({"path": "empty.jsonl"}, "the file holds no rows"),
        ({"path": "d.jsonl", "views": {"original": {"path": "d.jsonl"}}}, "name the ids that align it by data.id"),
        ({"path": "folder.jsonl"}, "a folder, not a file"),
        ({"path": "no.parquet"}, "not a parquet file"),
    ],
)
def test_bad_files_are_named(tmp_path, chat, settings, message):
    write(tmp_path / "d.jsonl")
    write(tmp_path / "twice.jsonl", [ROWS[0], ROWS[0]])
    (tmp_path / "d.txt").write_text("prompt\n1\n")
    (tmp_path / "deep.jsonl").write_text('{"prompt": ' + "[" * 100_000)
    (tmp_path / "digits.jsonl").write_text('{"prompt": ' + "1" * 5000 + "}")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "no.parquet").write_text("prompt")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt\n')
    with pytest.raises(ValueError, match=message):
        deck(chat, **{**settings, "path": str(tmp_path / settings["path"])})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, r"d\.jsonl: row 1, 'prompt': expected a text or a list of chat messages, found int 7"),
        ([], "found list"),
        ({"role": "user"}, "found dict"),
        (["2+2?"], "message 0: expected an object with role and content, found str"),
        ([{"from": "human", "value": "2+2?"}], "message 0: expected an object with role and content"),
        ([{"role": "human", "content": "2+2?"}], "role 'human' is none of system, user, assistant"),
        ([{"role": "user", "content": None}], "expected a text, found NoneType"),
        ([{"role": "user", "content": 5}], "expected a text, found int 5"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "only texts are understood"),
        ("half \ud800", "lone surrogate"),
        (" ", "the prompt is empty"),
    ],
)
def test_prompts_that_are_none_are_named(tmp_path, chat, prompt, message):
    path = write(tmp_path / "d.jsonl", [{"prompt": "1+1?"}, {"prompt": prompt}])
    with pytest.raises(ValueError, match=message):
        deck(chat, path=path)


def test_content_may_come_in_parts(tmp_path, chat):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    made = deck(chat, path=write(tmp_path / "d.jsonl", [{"prompt": [{"role": "user", "content": parts}]}]))
    assert made.views["original"][0][0].content == "1+1?"


@pytest.mark.parametrize("answer", [True, [1], {"a": 1}, float("nan")])
def test_true_answers_that_are_none_are_named(tmp_path, chat, answer):
    rows = [{"prompt": "q", "answer": "1"}, {"prompt": "q", "answer": answer}]
    with pytest.raises(ValueError, match="row 1, 'answer': expected a text or a number"):
        deck(chat, path=write(tmp_path / "d.jsonl", rows), gold="answer")


def test_rows_without_a_true_answer_stay_unless_it_is_needed(tmp_path, chat):
    rows = [{"prompt": "a", "answer": 1.5}, {"prompt": "b", "answer": None}, {"prompt": "c", "answer": " "}]
    cfg = DataConfig(path=write(tmp_path / "d.jsonl", rows), gold="answer")
    made = open_deck(cfg, {"a": ("original", chat)}, 0)
    assert (len(made), made.gold, made.unanswered) == (3, {"0": "1.5"}, 0)
    needed = open_deck(cfg, {"a": ("original", chat)}, 0, gold_needed=True)
    assert (needed.uids, needed.filtered, needed.unanswered) == (("0",), 0, 2)


def test_answers_after_a_mark(tmp_path, chat):
    rows = [{"prompt": "q", "answer": "3 + 4 = 7\n#### 7"}]
    made = deck(chat, path=write(tmp_path / "d.jsonl", rows), gold="answer", gold_after="####")
    assert made.gold == {"0": "7"}


@pytest.mark.parametrize(
    ("file", "settings", "rows"),
    [
        ("math7500_train.parquet", {"gold": "reward_model.ground_truth"}, 7500),
        ("math_test.json", {"gold": "answer", "id": "id"}, 500),
        ("gsm8k_test.jsonl", {"prompt": "question", "gold": "answer", "gold_after": "####"}, 1319),
    ],
)
def test_real_problem_sets(chat, file, settings, rows):
    shared = Path(os.environ.get("MEGARL_SHARED", Path(__file__).resolve().parents[3] / "shared"))
    path = shared / "data" / file
    if not path.is_file():
        pytest.skip(f"{file} is not beside the checkout (set MEGARL_SHARED to a folder that holds data/{file})")
    made = deck(chat, path=str(path), max_prompt_tokens=100_000, **settings)
    assert len(made) == rows
    blank = sum(uid not in made.gold for uid in made.uids)
    assert blank <= 5  # the MATH train file itself leaves a few true answers empty
