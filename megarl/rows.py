"""Prompt files as their users bring them: read, and every value looked at before a model sees it."""

import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.types import Message

Row = dict[str, Any]

_ROLES = get_args(Message.__annotations__["role"])


def read_rows(path: Path) -> list[Row]:
    """Rows of a .parquet, .jsonl, .json (a list of objects) or .csv file (with a header); at least one."""
    if not path.is_file():
        raise ValueError(f"data.path={path}: {'a folder, not a file' if path.is_dir() else 'no such file'}")
    readers: dict[str, Callable[[Path], list[Any]]] = {
        ".parquet": _parquet,
        ".csv": _csv,
        ".jsonl": lambda file: [_parse(line, f"{file}:{n}") for n, line in _lines(file)],
        ".json": lambda file: _parse(_text(file), str(file)),
    }
    if path.suffix not in readers:
        raise ValueError(f"data.path={path}: unknown suffix {path.suffix!r}; known: {', '.join(readers)}")
    rows = readers[path.suffix](path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"data.path={path}: expected a list of objects")
    if not rows:
        raise ValueError(f"data.path={path}: the file holds no rows")
    return rows


def _parquet(path: Path) -> list[Any]:
    try:
        return pq.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"data.path={path}: not a parquet file ({error})") from error


def _csv(path: Path) -> list[Any]:
    return list(csv.DictReader(_text(path).splitlines(keepends=True)))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(_text(path).split("\n"), 1) if line.strip())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path={path}: not UTF-8 text ({error})") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError of its own
        raise ValueError(f"{where}: not JSON that can be read ({error})") from error


def column(rows: list[Row], name: str, path: str) -> list[Any]:
    """Values of a column, None where a row has none; a dotted name reaches into fields ("a.b")."""
    values = []
    for row in rows:
        value: Any = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        values.append(value)
    if all(value is None for value in values):
        raise ValueError(f"{path}: no row has a value of {name!r}; its columns: {', '.join(rows[0])}")
    return values


def texts(rows: list[Row], name: str, path: str) -> list[str]:
    """A column of texts or numbers, as texts: ids, options."""
    values = answers(rows, name, path)
    if None in values:
        raise ValueError(f"{path}: row {values.index(None)} has no {name!r}")
    return [value for value in values if value is not None]


def answers(rows: list[Row], name: str, path: str, after: str | None = None) -> list[str | None]:
    """A column of texts or numbers, as texts, None where a row has none; ``after``: what follows the last such mark."""
    where = [f"{path}: row {number}, {name!r}" for number in range(len(rows))]
    values = [_answer(*one) for one in zip(column(rows, name, path), where, strict=True)]
    if after is None:
        return values
    return [None if value is None else value.rsplit(after, 1)[-1].strip() or None for value in values]


def _answer(value: Any, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _sound(value, where) if value.strip() else None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise ValueError(f"{where}: expected a text or a number, found {_shown(value)}")


def conversation(value: Any, where: str) -> list[Message]:
    """The turns of a prompt: a text, or a list of {role, content} whose content is a text or a list of text parts."""
    if isinstance(value, str):
        return [Message("user", _content(value, where))]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: expected a text or a list of chat messages, found {_shown(value)}")
    messages = []
    for number, turn in enumerate(value):
        at = f"{where}, message {number}"
        if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
            raise ValueError(f"{at}: expected an object with role and content, found {_shown(turn)}")
        if turn["role"] not in _ROLES:
            raise ValueError(f"{at}: role {turn['role']!r} is none of {', '.join(_ROLES)}")
        messages.append(Message(turn["role"], _content(turn["content"], at)))
    return messages


def _content(value: Any, where: str) -> str:
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{where}: of content parts only texts are understood, found {_shown(part)}")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected a text, found {_shown(value)}")
    if not value.strip():
        raise ValueError(f"{where}: the prompt is empty")
    return _sound(value, where)


def _sound(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half of a character (a lone surrogate) at {error.start}") from error
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
