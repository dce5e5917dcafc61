"""Response text -> verdict on an answer: CoVerRL's exact sentence (arXiv 2603.17775, and what its release reads)."""

import re
from typing import Literal

Verdict = Literal["correct", "wrong"]

CORRECT, WRONG = "The answer is correct.", "The answer is wrong."
_ENDING = re.compile(r"The answer is (correct|wrong)\.\n?\Z")
_WORDS_OF_DOUBT = ("wrong", "incorrect", "mistake")


def read_verdict(text: str, *, keywords: bool = False) -> tuple[Verdict | None, bool]:
    """The verdict, and whether it is well-formed.

    Well-formed is a text that ends with one of the two sentences, letter by letter, its period included; one newline
    may follow. Any other text has no verdict, unless ``keywords`` asks for the release's guess: wrong where "wrong",
    "incorrect" or "mistake" occurs in it, else correct, be it empty.

    Example: ``read_verdict("2+2 is 4. The answer is correct.")`` is ("correct", True).
    """
    found = _ENDING.search(text)
    if found is not None:
        return ("correct" if found[1] == "correct" else "wrong"), True
    if not keywords:
        return None, False
    return ("wrong" if any(word in text.lower() for word in _WORDS_OF_DOUBT) else "correct"), False
