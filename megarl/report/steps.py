"""Rollouts for the report's browser: one compressed block per step, and which steps a budget of bytes has room for.

A block is base64 of gzip of JSON, decoded by the page when its step is looked at:

    conversations   [[{role, content}, ...], ...]: every prompt once
    questions       of one agent each: agent, uid, conversation; label, count, parsed, total, tie: what it trained on;
                    gold; right: is the label true (null: not known, or no label); clusters: [{answer, count, right}],
                    the agent's own vote, the largest class first
    rollouts        columns: question, role, index, parent (position of the rollout it follows; -1), conversation,
                    text, answer, stop, formed, reward ("nan": could not be judged), advantage, tokens,
                    cluster (of its question; -1), right (of a verdict: was it the right one; null: not known)
"""

import base64
import gzip
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megarl.answers.equal import equal
from megarl.answers.vote import clusters
from megarl.types import Gold

_LABEL = {"label": "label", "label_count": "count", "label_parsed": "parsed", "label_total": "total"}
_PLAIN = {"role": "role", "index": "index", "text": "text", "answer": "answer", "stop": "stop", "well_formed": "formed"}
_COLUMNS = (
    *("key", "parent", "agent", "uid", "messages", "token_ids", "reward", "advantage", "label_tie"),
    *(*_LABEL, *_PLAIN),
)

Columns = dict[str, list[Any]]


def kept(steps: Sequence[int], block: Callable[[int], str], budget: int) -> dict[int, str]:
    """The most steps, evenly spaced, whose blocks have ``budget`` bytes together: step -> block, ascending.

    Of several the first and the last are among them; one alone is the last.
    """
    made: dict[int, str] = {}
    count = len(steps)
    while count:
        chosen, total, seen = evenly(steps, count), 0, 0
        for step in chosen:
            if step not in made:
                made[step] = block(step)
            total, seen = total + len(made[step]), seen + 1
            if total > budget:
                break
        else:
            return {step: made[step] for step in chosen}
        count = min(count - 1, int(budget * seen / total))  # as many as fit if all are as those seen
    return {}


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """``count`` of the steps at even distances, the first and the last included; one alone is the last."""
    if count >= len(steps):
        return list(steps)
    if count == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def step_block(path: Path, gold: Gold) -> str:
    """The block of a file of rollouts; ValueError where it is none."""
    text = json.dumps(step_data(path, gold), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def step_data(path: Path, gold: Gold) -> dict[str, Any]:
    """What a block holds, see the head of this file."""
    table = _columns(path)
    places = {key: place for place, key in enumerate(table["key"])}
    conversations: dict[str, int] = {}
    numbers: dict[tuple[str, str], int] = {}
    questions: list[dict[str, Any]] = []
    said, asked = [], []
    for row, of in enumerate(zip(table["agent"], table["uid"], strict=True)):
        spelled = json.dumps(table["messages"][row], ensure_ascii=False)
        said.append(conversations.setdefault(spelled, len(conversations)))
        if of not in numbers:
            numbers[of] = len(questions)
            questions.append(_question(table, row, gold.get(of[1]), said[-1]))
        asked.append(numbers[of])
    parents = [-1 if key is None else places.get(key, -1) for key in table["parent"]]
    right = _right(table, gold, parents)
    return {
        "conversations": [json.loads(spelled) for spelled in conversations],
        "questions": questions,
        "rollouts": {
            **{name: table[column] for column, name in _PLAIN.items()},
            **{name: [_number(value) for value in table[name]] for name in ("reward", "advantage")},
            "question": asked,
            "conversation": said,
            "parent": parents,
            "tokens": table["tokens"],
            "cluster": _vote(table, questions, asked, right),
            "right": right,
        },
    }


def _columns(path: Path) -> Columns:
    try:
        names = pq.read_schema(path).names
        if missing := [name for name in _COLUMNS if name not in names]:
            raise ValueError(f"it lacks the columns {', '.join(missing)}")
        table = pq.read_table(path, columns=list(_COLUMNS))
    except ValueError as error:  # pyarrow's are among them
        raise ValueError(f"{path} is no rollout file: {error}") from error
    tokens = pc.list_value_length(table.column("token_ids"))  # pyright: ignore[reportAttributeAccessIssue]
    return {**table.drop_columns(["token_ids"]).to_pydict(), "tokens": pa.chunked_array(tokens).to_pylist()}


def _question(table: Columns, row: int, gold: str | None, conversation: int) -> dict[str, Any]:
    label = table["label"][row]
    return {
        "agent": table["agent"][row],
        "uid": table["uid"][row],
        "conversation": conversation,
        **{name: table[column][row] for column, name in _LABEL.items()},
        "tie": table["label_tie"][row],
        "gold": gold,
        "right": None if gold is None or label is None else equal(label, gold),
        "clusters": [],
    }


def _right(table: Columns, gold: Gold, parents: Sequence[int]) -> list[bool | None]:
    """Of every rollout: is its answer true, is its verdict the right one; None where no true answer is known."""
    truth = [
        None if uid not in gold or role == "verify" else answer is not None and equal(answer, gold[uid])
        for uid, role, answer in zip(table["uid"], table["role"], table["answer"], strict=True)
    ]
    for row, parent in enumerate(parents):
        if table["role"][row] == "verify" and parent >= 0 and truth[parent] is not None:
            truth[row] = table["answer"][row] == ("correct" if truth[parent] else "wrong")
    return truth


def _vote(
    table: Columns, questions: list[dict[str, Any]], asked: Sequence[int], right: Sequence[bool | None]
) -> list[int]:
    """Give every question its classes of equal answers; returns which of them a rollout is in, -1 for none."""
    voters: list[list[int]] = [[] for _ in questions]
    for row, question in enumerate(asked):
        if table["role"][row] == "solve":
            voters[question].append(row)
    classes = [-1] * len(asked)
    for question, rows in zip(questions, voters, strict=True):
        rows.sort(key=lambda row: table["index"][row])
        found = sorted(clusters([table["answer"][row] for row in rows])[0], key=len, reverse=True)
        for number, members in enumerate(found):
            first = rows[members[0]]
            question["clusters"].append(
                {"answer": table["answer"][first], "count": len(members), "right": right[first]}
            )
            for member in members:
                classes[rows[member]] = number
    return classes


def _number(value: float | None) -> float | str | None:
    """To four digits; "nan" for what is no number."""
    if value is None:
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else "nan"
