"""The parquet file of one step's rollouts: written by the log, read by people and by the replay engine.

One row per rollout, flat columns, opened by any parquet reader, e.g. ``pandas.read_parquet(path)``:

    key, parent                         JSON text; a follow-up's ``parent`` is the ``key`` of another row, else null
    step, agent, uid, role, index, n    ``n``: how many rollouts its prompt asked for
    messages                            list of {role, content}: the prompt
    prompt_ids, token_ids               int32 lists
    logprobs                            float32 list, by the engine; NaN where it gave none
    text, answer, well_formed           the response, and what was read out of it
    stop, version                       why it ended; which weights sampled it
    label, label_count, label_parsed, label_total, label_tie
                                        the pseudo-label its agent trains on for this prompt, and the vote behind it
    reward, advantage                   null: in no group; NaN reward: in a group, but could not be judged
    policy_logprobs, reference_logprobs, entropy, certainty
                                        float32 lists, by the policy before its update

True answers are never in this file.
"""

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.types import Ballot, Labels, Message, Prompt, Role, Rollout, RolloutKey, Stop, TokenStats

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
IDS, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
READ_BACK = (
    *("key", "parent", "agent", "uid", "role", "index", "n", "messages", "prompt_ids", "token_ids", "logprobs"),
    *("text", "stop", "version", "answer", "well_formed"),
)


def step_path(run: Path, step: int) -> Path:
    """Where a run directory keeps the rollouts of one step."""
    return Path(run) / "rollouts" / f"step_{step:06d}.parquet"


def write(
    path: Path,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    labels: Labels | None = None,
    rewards: Mapping[RolloutKey, float] | None = None,
    advantages: Mapping[RolloutKey, float] | None = None,
    stats: Mapping[RolloutKey, TokenStats] | None = None,
) -> None:
    """Write the rollouts in the order given; the file appears complete or not at all."""
    keys = [r.key for r in rollouts]
    columns = {
        **_of_rollouts(rollouts, step),
        **_of_labels([(labels or {}).get((k.agent, k.uid)) for k in keys]),
        "reward": pa.array([(rewards or {}).get(k) for k in keys], pa.float64()),
        "advantage": pa.array([(advantages or {}).get(k) for k in keys], pa.float64()),
        **_of_stats([(stats or {}).get(k) for k in keys]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    pq.write_table(pa.table(columns), partial, compression="zstd")
    os.replace(partial, path)


def read(path: Path) -> list[Rollout]:
    """The rollouts of a file written by ``write``, equal to those it was given, in the same order."""
    table = pq.read_table(path)
    if missing := [c for c in READ_BACK if c not in table.column_names]:
        raise ValueError(f"{path} is no rollout file: it lacks the columns {', '.join(missing)}")
    for c in ("agent", "uid", "role", "text", "stop"):
        if not pa.types.is_string(table.column(c).type) or table.column(c).null_count:
            raise ValueError(f"{path}: column {c} holds {table.column(c).type} or nulls; texts are expected")
    table = table.select(READ_BACK).combine_chunks()
    lists = {c: _split(table.column(c)) for c in ("prompt_ids", "token_ids", "logprobs")}
    rows = table.drop_columns(list(lists)).to_pylist()
    return [_rollout(row, {c: arrays[i] for c, arrays in lists.items()}) for i, row in enumerate(rows)]


def key_text(key: RolloutKey | None) -> str | None:
    """A key as JSON text, the same for equal keys: ["agent","uid","role",parent,index]."""
    return None if key is None else json.dumps(key, separators=(",", ":"), ensure_ascii=False)


def parse_key(text: str | None) -> RolloutKey | None:
    """The key that ``key_text`` spelled."""
    return None if text is None else _key(json.loads(text))


def _key(parts: list) -> RolloutKey:
    agent, uid, role, parent, index = parts
    return RolloutKey(agent, uid, role, None if parent is None else _key(parent), index)


def _of_rollouts(rollouts: Sequence[Rollout], step: int) -> dict[str, pa.Array]:
    prompts = [r.prompt for r in rollouts]
    return {
        "key": pa.array([key_text(r.key) for r in rollouts], pa.string()),
        "parent": pa.array([key_text(p.parent) for p in prompts], pa.string()),
        "step": pa.array([step] * len(rollouts), pa.int64()),
        "agent": pa.array([p.agent for p in prompts], pa.string()),
        "uid": pa.array([p.uid for p in prompts], pa.string()),
        "role": pa.array([p.role for p in prompts], pa.string()),
        "index": pa.array([r.index for r in rollouts], pa.int32()),
        "n": pa.array([p.n for p in prompts], pa.int32()),
        "messages": pa.array([[m._asdict() for m in p.messages] for p in prompts], MESSAGES),
        "prompt_ids": _lists([r.prompt_ids for r in rollouts], IDS),
        "token_ids": _lists([r.token_ids for r in rollouts], IDS),
        "logprobs": _lists([r.logprobs for r in rollouts], FLOATS),
        "text": pa.array([r.text for r in rollouts], pa.string()),
        "stop": pa.array([r.stop for r in rollouts], pa.string()),
        "version": pa.array([r.version for r in rollouts], pa.int64()),
        "answer": pa.array([r.answer for r in rollouts], pa.string()),
        "well_formed": pa.array([r.well_formed for r in rollouts], pa.bool_()),
    }


def _of_labels(ballots: Sequence[Ballot | None]) -> dict[str, pa.Array]:
    return {
        "label": pa.array([b and b.answer for b in ballots], pa.string()),
        "label_count": pa.array([b and b.count for b in ballots], pa.int32()),
        "label_parsed": pa.array([b and b.parsed for b in ballots], pa.int32()),
        "label_total": pa.array([b and b.total for b in ballots], pa.int32()),
        "label_tie": pa.array([b and b.tie for b in ballots], pa.bool_()),
    }


def _of_stats(stats: Sequence[TokenStats | None]) -> dict[str, pa.Array]:
    return {
        "policy_logprobs": _lists([s and s.logprobs for s in stats], FLOATS),
        "reference_logprobs": _lists([s and s.reference for s in stats], FLOATS),
        "entropy": _lists([s and s.entropy for s in stats], FLOATS),
        "certainty": _lists([s and s.certainty for s in stats], FLOATS),
    }


def _lists(arrays: Iterable[np.ndarray | None], kind: pa.ListType) -> pa.Array:
    """One list per array, bits kept (NaN stays NaN); null for None."""
    arrays = list(arrays)
    dtype = kind.value_type.to_pandas_dtype()
    for a in arrays:
        assert a is None or (a.dtype == dtype and a.ndim == 1), f"wanted a vector of {dtype}, got {a!r}"
    lengths = [0 if a is None else a.shape[0] for a in arrays]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = np.concatenate([a for a in arrays if a is not None] or [np.zeros(0, dtype)])
    absent = pa.array([a is None for a in arrays], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind.value_type), kind, mask=absent)


def _split(column: pa.ChunkedArray) -> list[np.ndarray]:
    chunk = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
    return [values[a:b].copy() for a, b in itertools.pairwise(offsets)]


def _rollout(row: dict, arrays: dict[str, np.ndarray]) -> Rollout:
    if row["role"] not in get_args(Role) or row["stop"] not in get_args(Stop):
        raise ValueError(f"rollout {row['key']}: unknown role {row['role']!r} or stop {row['stop']!r}")
    prompt = Prompt(
        agent=row["agent"],
        uid=row["uid"],
        role=row["role"],
        messages=tuple(Message(m["role"], m["content"]) for m in row["messages"]),
        n=row["n"],
        parent=parse_key(row["parent"]),
    )
    return Rollout(
        prompt=prompt,
        index=row["index"],
        text=row["text"],
        stop=row["stop"],
        version=row["version"],
        answer=row["answer"],
        well_formed=row["well_formed"],
        **arrays,
    )
