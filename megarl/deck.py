"""Prompt files as a deck of cards: what is dealt is a pure function of the seed and a cursor, the same for all agents.

Gold answers stay here. The loop hands them to a method that declares the need, and to the diagnostics.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from megarl.chat import Chat
from megarl.choices import Choices, draw_choices
from megarl.settings import DataConfig, ViewConfig
from megarl.types import Gold, Message, Prompt, derive

Rows = list[dict[str, Any]]
Views = dict[str, list[tuple[Message, ...]]]  # view -> messages per row


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far the deck was dealt: all there is to its state."""

    epoch: int = 0
    place: int = 0  # rows dealt in this epoch


@dataclass(frozen=True, kw_only=True)
class Deck:
    """Aligned rows: ``uids[i]`` is row i in every view."""

    uids: tuple[str, ...]
    views: Views
    gold: Gold | None
    filtered: int  # rows left out because a view of theirs was too long for some agent
    seed: int
    shuffle: bool = True

    def __len__(self) -> int:
        return len(self.uids)

    def check_size(self, prompts_per_step: int) -> None:
        """Raise where a step would hold one prompt twice."""
        if prompts_per_step > len(self):
            raise ValueError(
                f"batch.prompts_per_step={prompts_per_step}, but the deck holds {len(self)} prompts "
                f"({self.filtered} were too long); lower it to at most {len(self)} or bring more prompts"
            )

    def deal(self, cursor: Cursor, prompts_per_step: int, seats: Mapping[str, "Seat"]) -> tuple[list[Prompt], Cursor]:
        """A step's prompts for every seat (the same rows, each in the seat's own view), and the cursor behind them.

        An epoch is a shuffle of all rows. Where fewer are left of it than a step takes, those are left out and the next
        epoch begins, so that no step holds one prompt twice.
        """
        self.check_size(prompts_per_step)
        if cursor.place + prompts_per_step > len(self):
            cursor = Cursor(epoch=cursor.epoch + 1)
        return self.deal_more(cursor, prompts_per_step, seats)

    def deal_more(self, cursor: Cursor, count: int, seats: Mapping[str, "Seat"]) -> tuple[list[Prompt], Cursor]:
        """Up to ``count`` further prompts for the same step: fewer, or none, where the epoch ends."""
        rows = self._order(cursor.epoch)[cursor.place : cursor.place + count]
        cards = [self._card(row, agent, seat) for agent, seat in seats.items() for row in rows]
        return cards, replace(cursor, place=cursor.place + len(rows))

    def _order(self, epoch: int) -> list[int]:
        order = np.arange(len(self))
        if self.shuffle:
            order = np.random.Generator(np.random.PCG64(derive(self.seed, "deck", epoch))).permutation(order)
        return order.tolist()

    def everything(self, seats: Mapping[str, "Seat"]) -> list[Prompt]:
        """Every row for every seat, in file order: what an evaluation asks."""
        return [self._card(row, agent, seat) for agent, seat in seats.items() for row in range(len(self))]

    def _card(self, row: int, agent: str, seat: "Seat") -> Prompt:
        messages = self.views[seat.view][row]
        return Prompt(agent=agent, uid=self.uids[row], role="solve", messages=messages, n=seat.n)


@dataclass(frozen=True, slots=True)
class Seat:
    """What the deck must know of an agent: which view it reads, how often it answers."""

    view: str
    n: int


def open_deck(cfg: DataConfig, chats: Mapping[str, tuple[str, Chat]], seed: int) -> Deck:
    """Read a prompt file; ``chats`` maps agent -> (view, chat), to leave out prompts too long for any of them."""
    rows = read_rows(Path(cfg.path))[: cfg.limit]
    uids = _uids(rows, cfg, cfg.path)
    choices = _choices(rows, uids, cfg)
    views = {name: _view(cfg, view, rows, uids, choices) for name, view in cfg.views.items()}
    gold = _gold(rows, uids, cfg, choices) if cfg.gold is not None else None
    used = {(view, id(chat)): (view, chat) for view, chat in chats.values()}
    fits = [
        all(len(chat.render(views[view][row])) <= cfg.max_prompt_tokens for view, chat in used.values())
        for row in range(len(rows))
    ]
    kept = [row for row, ok in enumerate(fits) if ok]
    if not kept:
        raise ValueError(f"{cfg.path}: no prompt is within data.max_prompt_tokens={cfg.max_prompt_tokens}")
    return Deck(
        uids=tuple(uids[row] for row in kept),
        views={name: [messages[row] for row in kept] for name, messages in views.items()},
        gold=gold,
        filtered=len(rows) - len(kept),
        seed=seed,
        shuffle=cfg.shuffle,
    )


def read_rows(path: Path) -> Rows:
    """Rows of a .parquet, .jsonl, .json (a list of objects) or .csv file (with a header)."""
    if not path.is_file():
        raise ValueError(f"data.path={path}: no such file")
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    elif path.suffix == ".json":
        rows = _parse(path.read_text(encoding="utf-8"), str(path))
    else:
        raise ValueError(f"data.path={path}: unknown suffix {path.suffix!r}; known: .parquet, .jsonl, .json, .csv")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"data.path={path}: expected a list of objects")
    return rows


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def _column(rows: Rows, name: str, path: str) -> list[Any]:
    """Values of a column; a dotted name reaches into nested fields ("reward_model.ground_truth")."""
    values = []
    for number, row in enumerate(rows):
        value: Any = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            raise ValueError(f"{path}: row {number} has no {name!r}; its columns: {', '.join(row)}")
        values.append(value)
    return values


def _uids(rows: Rows, cfg: DataConfig, path: str) -> list[str]:
    if cfg.id is None:
        return [str(number) for number in range(len(rows))]
    uids = [str(value) for value in _column(rows, cfg.id, path)]
    if len(set(uids)) < len(uids):
        twice = next(uid for uid in uids if uids.count(uid) > 1)
        raise ValueError(f"{path}: data.id={cfg.id} is not unique: {twice!r} stands twice")
    return uids


def _choices(rows: Rows, uids: Sequence[str], cfg: DataConfig) -> list[Choices] | None:
    """The options of every row, where prompts are multiple choice."""
    if not cfg.wrong:
        return None
    if cfg.gold is None:
        raise ValueError("data.wrong names columns of wrong options: name that of the right one in data.gold")
    right = _column(rows, cfg.gold, cfg.path)
    wrong = zip(*(_column(rows, name, cfg.path) for name in cfg.wrong), strict=True)
    return [draw_choices(uid, str(r), [str(w) for w in ws]) for uid, r, ws in zip(uids, right, wrong, strict=True)]


def _view(
    cfg: DataConfig, view: ViewConfig, rows: Rows, uids: Sequence[str], choices: Sequence[Choices] | None
) -> list[tuple[Message, ...]]:
    path = view.path or cfg.path
    if view.path is not None:
        rows = read_rows(Path(view.path))[: cfg.limit]
        _same_order(_uids(rows, cfg, view.path), uids, view.path, cfg.path)
    options = [c.text for c in choices] if choices else [""] * len(rows)
    values = _column(rows, view.column or cfg.prompt, path)
    return [_messages(value, view, text) for value, text in zip(values, options, strict=True)]


def _same_order(found: Sequence[str], expected: Sequence[str], path: str, reference: str) -> None:
    """A view whose rows stand in another order would pair every label with a wrong prompt."""
    if len(found) != len(expected):
        raise ValueError(f"{path} has {len(found)} rows, {reference} has {len(expected)}: views must be row-aligned")
    for row, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a != b:
            raise ValueError(f"{path}: row {row} is {a!r}, but {b!r} in {reference}: views must be row-aligned")


def _messages(value: Any, view: ViewConfig, options: str) -> tuple[Message, ...]:
    turns: list[Any] = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
    messages = [Message(turn["role"], turn["content"]) for turn in turns]
    last = messages[-1]
    messages[-1] = Message(last.role, f"{view.before}{last.content}{options}{view.after}")
    return tuple(messages)


def _gold(rows: Rows, uids: Sequence[str], cfg: DataConfig, choices: Sequence[Choices] | None) -> Gold:
    assert cfg.gold is not None
    if choices:
        return dict(zip(uids, (c.right for c in choices), strict=True))
    values = [str(value) for value in _column(rows, cfg.gold, cfg.path)]
    if cfg.gold_after is not None:
        values = [value.rsplit(cfg.gold_after, 1)[-1].strip() for value in values]
    return dict(zip(uids, values, strict=True))
