"""rollouts.py: the file gives back exactly what went in, and says it in columns a person can read."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from megarl import rollouts
from megarl.types import Ballot, Message, Prompt, Rollout, RolloutKey, TokenStats

ASK = (Message("system", "Be brief."), Message("user", "2 + 2 = ?\n\u00bd \U0001f600"))


def make(agent="qwen", uid="7", role="solve", index=0, parent=None, tokens=(5, 6, 2), **changes) -> Rollout:
    one = Rollout(
        prompt=Prompt(agent=agent, uid=uid, role=role, messages=ASK, n=4, parent=parent),
        index=index,
        prompt_ids=np.array([1, 9, 8], np.int32),
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32) / 3,
        text="4",
        stop="end",
        version=3,
        answer="4",
        well_formed=True,
    )
    return replace(one, **changes)


def same(a: Rollout, b: Rollout) -> bool:
    arrays = ("prompt_ids", "token_ids", "logprobs")
    rest = ("prompt", "index", "text", "stop", "version", "answer", "well_formed", "key")
    return all(
        getattr(a, f).tobytes() == getattr(b, f).tobytes() and getattr(a, f).dtype == getattr(b, f).dtype
        for f in arrays
    ) and all(getattr(a, f) == getattr(b, f) for f in rest)


@pytest.fixture
def seen() -> list[Rollout]:
    first = make()
    check = make(role="verify", parent=first.key, index=1, text="", answer=None, well_formed=False)
    return [
        first,
        make(agent="llama", uid='a"/b', index=3, stop="length", logprobs=np.array([np.nan, -0.0, -np.inf], np.float32)),
        check,
        make(role="revise", parent=check.key, tokens=(), text="x", stop="abort"),
    ]


def test_round_trip_is_exact(tmp_path, seen):
    path = rollouts.step_path(tmp_path, 12)
    rollouts.write(path, seen, step=12)
    back = rollouts.read(path)
    assert len(back) == len(seen)
    assert all(same(a, b) for a, b in zip(seen, back, strict=True))
    # control: the comparison sees a single flipped bit and a changed parent
    assert not same(seen[1], replace(seen[1], logprobs=np.array([np.nan, 0.0, -np.inf], np.float32)))
    assert not same(seen[2], replace(seen[2], prompt=replace(seen[2].prompt, parent=None)))


def test_arrays_read_back_are_writable_and_own_their_memory(tmp_path, seen):
    rollouts.write(tmp_path / "a.parquet", seen, step=0)
    one, two, *_ = rollouts.read(tmp_path / "a.parquet")
    one.token_ids[:] = 0
    assert two.token_ids.tolist() == [5, 6, 2]


def test_empty_step(tmp_path):
    rollouts.write(tmp_path / "a.parquet", [], step=0)
    assert rollouts.read(tmp_path / "a.parquet") == []


def test_columns_for_people(tmp_path, seen):
    key, cut = seen[0].key, seen[1].key
    stats = {key: TokenStats(logprobs=seen[0].logprobs, entropy=np.array([0.5, 0.25, np.nan], np.float32))}
    ballot = Ballot(answer="4", count=3, parsed=3, total=4, tie=True)
    rollouts.write(
        tmp_path / "a.parquet",
        seen,
        step=2,
        labels={("qwen", "7"): ballot, ("llama", 'a"/b'): Ballot(answer=None, count=0, parsed=0, total=4)},
        rewards={key: 1.0, cut: float("nan")},
        advantages={key: 0.866025403784},
        stats=stats,
    )
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [r["step"] for r in rows] == [2] * 4
    assert rows[0]["label"] == "4" and rows[0]["label_count"] == 3 and rows[0]["label_tie"] is True
    assert rows[1]["label"] is None and rows[1]["label_total"] == 4
    assert rows[0]["reward"] == 1.0 and rows[1]["reward"] != rows[1]["reward"] and rows[2]["reward"] is None
    assert rows[0]["advantage"] == 0.866025403784 and rows[1]["advantage"] is None
    assert rows[0]["policy_logprobs"] == seen[0].logprobs.tolist()
    assert rows[0]["entropy"][:2] == [0.5, 0.25] and rows[0]["certainty"] is None and rows[1]["entropy"] is None
    assert rows[0]["messages"][1] == {"role": "user", "content": ASK[1].content}
    # a follow-up joins its parent by text
    assert rows[2]["parent"] == rows[0]["key"] and rows[3]["parent"] == rows[2]["key"] and rows[0]["parent"] is None


def test_keys_survive_text(seen):
    for r in seen:
        assert rollouts.parse_key(rollouts.key_text(r.key)) == r.key
    deep = RolloutKey("a", "1", "revise", seen[2].key, 5)
    assert rollouts.parse_key(rollouts.key_text(deep)) == deep
    assert rollouts.key_text(seen[0].key) == '["qwen","7","solve",null,0]'


def test_a_failed_write_leaves_no_file(tmp_path, seen):
    bad = [replace(seen[0], logprobs=np.array([0.1, 0.2, 0.3]))]  # float64
    with pytest.raises(AssertionError, match="float32"):
        rollouts.write(tmp_path / "a.parquet", bad, step=0)
    assert not (tmp_path / "a.parquet").exists()


def test_another_parquet_file_is_refused(tmp_path):
    import pyarrow as pa

    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no rollout file: it lacks the columns key"):
        rollouts.read(tmp_path / "a.parquet")
