"""Second wordings of prompts: what a model is asked, what is taken from its reply, and the record of both.

The wording goes into a column of its own beside the first one, so that id, answer and both wordings of a problem stand
in one row: no other file has to be aligned with it, and a row without a second wording is missing for every view alike.
"""

import fcntl
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.answers.final import final_part
from megarl.rows import Row, column, conversation, texts
from megarl.settings import SamplingConfig, Section

PLACE = "{problem}"
INSTRUCTION = f"""\
Reword the mathematics problem below. Say it in other words and, where the problem allows it, in another setting taken \
from life. The mathematics must not change: the same quantities and conditions, the same question, and therefore the \
same final answer in the same form and unit. Neither solve the problem nor hint at its answer.
Write the reworded problem, and nothing else, between <problem> and </problem>.

{PLACE}"""
_BLOCK = re.compile(r"<problem>(.*?)</problem>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a model said to one request."""

    text: str = ""
    complete: bool = True  # it ended by itself
    fault: str | None = None  # why there is no text


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row's second wording, or why it has none."""

    id: str
    text: str | None
    refused: str | None
    reply: str
    attempts: int


class Request(Section):
    """What every row of a view has in common: another one is another view."""

    model: str
    source_sha256: str
    prompt: str
    id: str | None
    column: str
    instruction: str
    sampling: SamplingConfig
    seed: int | None
    attempts: int


def problems(rows: list[Row], prompt: str, id_column: str | None, path: str) -> dict[str, str]:
    """id (row number, where no column has it) -> the wording to change (of a conversation: its last message)."""
    uids = texts(rows, id_column, path) if id_column else [str(number) for number in range(len(rows))]
    if len(set(uids)) < len(uids):
        twice = next(uid for uid in uids if uids.count(uid) > 1)
        raise ValueError(f"{path}: --id {id_column} is not unique: {twice!r} stands twice")
    values = column(rows, prompt, path)
    where = [f"{path}: row {number}, {prompt!r}" for number in range(len(rows))]
    turns = [conversation(value, at)[-1] for value, at in zip(values, where, strict=True)]
    return dict(zip(uids, (turn.content for turn in turns), strict=True))


def checked_instruction(text: str, where: str) -> str:
    """The instruction, which must name the place of the problem exactly once."""
    if text.count(PLACE) != 1:
        raise ValueError(f"{where}: {PLACE} must stand in it once, where the problem goes; found {text.count(PLACE)}")
    return text


def reworded(reply: Reply, problem: str) -> tuple[str | None, str | None]:
    """The second wording, or the reason for refusing the reply; exactly one of them is None.

    Whether the answer is still the same cannot be seen here: ``megarl eval`` in both views tells.
    """
    if reply.fault is not None:
        return None, reply.fault
    if not reply.complete:
        return None, "cut by max_tokens"
    said = final_part(reply.text)
    block = _BLOCK.search(said)
    if block is None:
        return None, "no <problem> block"
    if said.count("<problem>") > 1 or said.count("</problem>") > 1:
        return None, "more than one <problem> block"
    text = block[1].strip()
    if not text:
        return None, "empty <problem> block"
    if _plain(text) == _plain(problem):
        return None, "the same words again"
    if text.count("\\boxed") > problem.count("\\boxed"):
        return None, "gives a boxed answer"
    try:
        text.encode()
    except UnicodeEncodeError:
        return None, "half of a character (a lone surrogate)"
    return text, None


def _plain(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip().casefold()


class Record:
    """A file of one JSON object per line: the request, then every row's outcome as it comes. It is what a view that was
    interrupted goes on from, and what says afterwards how it was made.
    """

    def __init__(self, path: Path, stream: IO[str], done: Mapping[str, Outcome]) -> None:
        self.path = path
        self.done = dict(done)  # id -> outcome
        self._stream = stream

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome, at once."""
        self._stream.write(json.dumps(asdict(outcome)) + "\n")
        self._stream.flush()
        self.done[outcome.id] = outcome


@contextmanager
def open_record(path: Path, request: Request, facts: Mapping[str, str]) -> Iterator[Record]:
    """The record at ``path``, begun or gone on with; ``facts`` are noted when it begins.

    Raises ValueError where it is of another request, not a record, or being written by somebody else.
    """
    with path.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path}: another megarl rewrite is writing it") from error
        stream.seek(0)
        lines = stream.read().split("\n")[:-1]  # what is behind the last line's end was cut off in the middle
        if len(lines) < 2:  # no outcome: nothing to go on from
            stream.truncate(0)
            stream.write(json.dumps({"request": request.model_dump(mode="json"), "facts": dict(facts)}) + "\n")
            stream.flush()
            yield Record(path, stream, {})
            return
        stream.truncate(sum(len(line.encode()) + 1 for line in lines))
        _same_request(_line(lines[0], path, 1).get("request"), request.model_dump(mode="json"), path)
        outcomes = [_outcome(_line(line, path, n), path, n) for n, line in enumerate(lines[1:], 2)]
        yield Record(path, stream, {o.id: o for o in outcomes})


def _line(text: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: no line of a record ({error}); move the file away to begin anew") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}:{number}: no line of a record; move the file away to begin anew")
    return value


def _outcome(value: dict[str, Any], path: Path, number: int) -> Outcome:
    try:
        return Outcome(**value)
    except TypeError as error:
        raise ValueError(f"{path}:{number}: no outcome of a row ({error}); move the file away to begin anew") from error


def _same_request(begun: Any, now: Mapping[str, Any], path: Path) -> None:
    if not isinstance(begun, dict):
        raise ValueError(f"{path} is no record of megarl rewrite: choose another OUT")
    for key, value in now.items():
        if begun.get(key) != value:
            raise ValueError(
                f"{path} was begun with {key}={_short(begun.get(key))}, and now it is {_short(value)}: go on as it was "
                "begun, or move the file away to begin anew"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def with_view(
    rows: Sequence[Row], uids: Sequence[str], done: Mapping[str, Outcome], request: Request
) -> list[dict[str, Any]]:
    """The rows that have a second wording, in order, unchanged but for its column; a conversation stays one. Rows
    without an id of their own get their number as ``row``.
    """
    out = []
    for row, uid in zip(rows, uids, strict=True):
        text = done[uid].text if uid in done else None
        if text is None:
            continue
        first = column([row], request.prompt, "")[0]
        value = [*first[:-1], {**first[-1], "content": text}] if isinstance(first, list) else text
        out.append({**row, **({} if request.id else {"row": int(uid)}), request.column: value})
    return out


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """The rows as .jsonl or .parquet; the file appears complete or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), partial)
        else:
            partial.write_text("".join(json_row(row, path) + "\n" for row in rows), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def json_row(row: Row, path: Path) -> str:
    """A row as a line of JSON; ValueError for what only a parquet file can hold."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: a row is nothing that JSON can say ({error}); name the file .parquet") from error
