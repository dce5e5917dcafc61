"""Prompt files as a deck of cards: what is dealt is a pure function of the seed and a cursor, the same for all agents.

Gold answers stay here. The loop hands them to a method that declares the need, and to the diagnostics.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.chat import Chat
from megarl.choices import Choices, draw_choices
from megarl.rows import Row, answers, column, conversation, read_rows, texts
from megarl.settings import DataConfig, ViewConfig
from megarl.types import Gold, Message, Prompt, derive

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
    unanswered: int  # rows left out because they have no true answer, where one is needed
    seed: int
    shuffle: bool = True

    def __len__(self) -> int:
        return len(self.uids)

    def check_size(self, prompts_per_step: int) -> None:
        """Raise where a step would hold one prompt twice."""
        if prompts_per_step > len(self):
            raise ValueError(
                f"batch.prompts_per_step={prompts_per_step}, but the deck holds {len(self)} prompts "
                f"({self.filtered} were too long, {self.unanswered} had no true answer); lower it to at most "
                f"{len(self)} or bring more prompts"
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


def open_deck(cfg: DataConfig, chats: Mapping[str, tuple[str, Chat]], seed: int, *, gold_needed: bool = False) -> Deck:
    """Read a prompt file; ``chats`` maps agent -> (view, chat), to leave out prompts too long for any of them.

    A row may lack a true answer; it is left out where ``gold_needed``.
    """
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
    if not any(fits):
        raise ValueError(f"{cfg.path}: no prompt is within data.max_prompt_tokens={cfg.max_prompt_tokens}")
    kept = [row for row, ok in enumerate(fits) if ok and not (gold_needed and gold and uids[row] not in gold)]
    return Deck(
        uids=tuple(uids[row] for row in kept),
        views={name: [messages[row] for row in kept] for name, messages in views.items()},
        gold=gold,
        filtered=fits.count(False),
        unanswered=fits.count(True) - len(kept),
        seed=seed,
        shuffle=cfg.shuffle,
    )


def _uids(rows: list[Row], cfg: DataConfig, path: str) -> list[str]:
    if cfg.id is None:
        return [str(number) for number in range(len(rows))]
    uids = texts(rows, cfg.id, path)
    if len(set(uids)) < len(uids):
        twice = Counter(uids).most_common(1)[0][0]
        raise ValueError(f"{path}: data.id={cfg.id} is not unique: {twice!r} stands twice")
    return uids


def _choices(rows: list[Row], uids: Sequence[str], cfg: DataConfig) -> list[Choices] | None:
    """The options of every row, where prompts are multiple choice."""
    if not cfg.wrong:
        return None
    if cfg.gold is None:
        raise ValueError("data.wrong names columns of wrong options: name that of the right one in data.gold")
    right = texts(rows, cfg.gold, cfg.path)
    wrong = zip(*(texts(rows, name, cfg.path) for name in cfg.wrong), strict=True)
    return [draw_choices(uid, r, list(ws)) for uid, r, ws in zip(uids, right, wrong, strict=True)]


def _view(
    cfg: DataConfig, view: ViewConfig, rows: list[Row], uids: Sequence[str], choices: Sequence[Choices] | None
) -> list[tuple[Message, ...]]:
    path = view.path or cfg.path
    if view.path is not None:
        if cfg.id is None:
            raise ValueError(f"data.views: {view.path} is a file of its own: name the ids that align it by data.id")
        rows = read_rows(Path(view.path))[: cfg.limit]
        _same_order(_uids(rows, cfg, view.path), uids, view.path, cfg.path)
    options = [c.text for c in choices] if choices else [""] * len(rows)
    name = view.column or cfg.prompt
    values = column(rows, name, path)
    where = [f"{path}: row {number}, {name!r}" for number in range(len(rows))]
    return [_messages(*one, view) for one in zip(values, where, options, strict=True)]


def _same_order(found: Sequence[str], expected: Sequence[str], path: str, reference: str) -> None:
    """A view whose rows stand in another order would pair every label with a wrong prompt."""
    if len(found) != len(expected):
        raise ValueError(f"{path} has {len(found)} rows, {reference} has {len(expected)}: views must be row-aligned")
    for row, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a != b:
            raise ValueError(f"{path}: row {row} is {a!r}, but {b!r} in {reference}: views must be row-aligned")


def _messages(value: Any, where: str, options: str, view: ViewConfig) -> tuple[Message, ...]:
    messages = conversation(value, where)
    last = messages[-1]
    messages[-1] = Message(last.role, f"{view.before}{last.content}{options}{view.after}")
    return tuple(messages)


def _gold(rows: list[Row], uids: Sequence[str], cfg: DataConfig, choices: Sequence[Choices] | None) -> Gold:
    assert cfg.gold is not None
    if choices:
        return dict(zip(uids, (c.right for c in choices), strict=True))
    values = answers(rows, cfg.gold, cfg.path, cfg.gold_after)
    return {uid: value for uid, value in zip(uids, values, strict=True) if value is not None}
