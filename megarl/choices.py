"""Options of a multiple-choice question under letters, in an order that depends on nothing but the question's id."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np

from megarl.types import derive


@dataclass(frozen=True, slots=True)
class Choices:
    """How the options are written below a question, and the letter of the right one."""

    text: str
    right: str


def draw_choices(uid: str, right: str, wrong: Sequence[str]) -> Choices:
    """The options of question ``uid``. Raises ValueError for more options than letters.

    Example: ``draw_choices("q1", "7", ["8", "9"])`` is the same on every machine, for every seed of a run; its text
    starts with two newlines and has one line "A) ..." per option.
    """
    options = [right.strip(), *(w.strip() for w in wrong)]
    if len(options) > len(ascii_uppercase):
        raise ValueError(f"question {uid!r} has {len(options)} options, and there are {len(ascii_uppercase)} letters")
    order = np.random.Generator(np.random.PCG64(derive("options", uid))).permutation(len(options)).tolist()
    lines = [f"{letter}) {options[i]}" for letter, i in zip(ascii_uppercase, order, strict=False)]
    return Choices(text="\n\n" + "\n".join(lines), right=ascii_uppercase[order.index(0)])
