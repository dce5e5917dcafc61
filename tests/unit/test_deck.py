"""Prompt files, views, and what is dealt when."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.chat import open_chat
from megarl.deck import Seat, open_deck
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


def test_dealing_is_a_pure_function_of_seed_and_step(tmp_path, chat):
    path = write(tmp_path / "d.jsonl")
    seats = {"a": Seat("original", 4)}
    one, again, other = (deck(chat, seed, path=path) for seed in (1, 1, 2))
    rows = [one.rows_at(step, 3) for step in range(7)]
    assert rows == [again.rows_at(step, 3) for step in range(7)]
    assert rows != [other.rows_at(step, 3) for step in range(7)]
    # an epoch is three steps of three; nothing twice within it, and the next epoch is another shuffle
    for epoch in (0, 1):
        dealt = [row for step in range(3) for row in rows[3 * epoch + step]]
        assert len(set(dealt)) == 9
    assert rows[:3] != rows[3:6]
    assert [p.n for p in one.deal(0, 3, seats)] == [4, 4, 4]


def test_every_agent_gets_the_same_rows_each_in_its_own_view(tmp_path, chat):
    views = {"original": ViewConfig(), "rewrite": ViewConfig(column="other")}
    made = open_deck(
        DataConfig(path=write(tmp_path / "d.jsonl"), views=views),
        {"a": ("original", chat), "b": ("rewrite", chat)},
        0,
    )
    cards = made.deal(2, 4, {"a": Seat("original", 2), "b": Seat("rewrite", 3)})
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
        made.rows_at(0, 11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere.jsonl"}, "no such file"),
        ({"path": "d.txt"}, "unknown suffix '.txt'"),
        ({"path": "d.jsonl", "prompt": "question"}, "no 'question'; its columns: prompt, other, answer, key"),
        ({"path": "d.jsonl", "gold": "solution"}, "no 'solution'"),
        ({"path": "twice.jsonl", "id": "key"}, "'k0' stands twice"),
        ({"path": "broken.jsonl"}, "broken.jsonl:2: not JSON"),
    ],
)
def test_bad_files_are_named(tmp_path, chat, settings, message):
    write(tmp_path / "d.jsonl")
    write(tmp_path / "twice.jsonl", [ROWS[0], ROWS[0]])
    (tmp_path / "d.txt").write_text("prompt\n1\n")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt\n')
    with pytest.raises(ValueError, match=message):
        deck(chat, **{**settings, "path": str(tmp_path / settings["path"])})


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
    blank = sum(not made.gold[uid].strip() for uid in made.uids)
    assert blank <= 5  # the MATH train file itself leaves a few true answers empty
