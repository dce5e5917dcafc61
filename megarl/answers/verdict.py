"""Response text -> verdict on an answer: CoVerRL's exact sentence (arXiv 2603.17775, and what its release reads), or a
boxed word."""

import re
from typing import Literal

from megarl.answers.boxes import last_box
from megarl.answers.clean import clean
from megarl.answers.final import final_part

Verdict = Literal["correct", "wrong"]
VerdictStyle = Literal["sentence", "keywords", "boxed"]  # as answers.verdict

CORRECT, WRONG = "The answer is correct.", "The answer is wrong."
_ENDING = re.compile(r"The answer is (correct|wrong)\.\n?\Z")
_WORDS_OF_DOUBT = ("wrong", "incorrect", "mistake")
_SUBJECT = r"(?:(?:the )?(?:(?:final )?answer|solution|verdict|response) ?(?:is|:)? ?)?"
_BOXED = re.compile(_SUBJECT + r"(?:(correct|right)|incorrect|wrong|not (?:correct|right))")


def read_verdict(text: str, style: VerdictStyle = "sentence") -> tuple[Verdict | None, bool]:
    """The verdict, and whether it is well-formed.

    sentence: a text that ends with one of the two sentences, letter by letter, its period included; one newline may
    follow. Any other text has no verdict. keywords: such a text has the release's guess, not well-formed: wrong where
    "wrong", "incorrect" or "mistake" occurs in it, else correct, be it empty. boxed: the word that the last box of the
    final part holds as its whole content, "incorrect" and "not correct" being wrong.

    Example: ``read_verdict("2+2 is 4. The answer is correct.")`` is ("correct", True).
    """
    if style == "boxed":
        verdict = _boxed(last_box(final_part(text)))
        return verdict, verdict is not None
    found = _ENDING.search(text)
    if found is not None:
        return ("correct" if found[1] == "correct" else "wrong"), True
    if style == "sentence":
        return None, False
    return ("wrong" if any(word in text.lower() for word in _WORDS_OF_DOUBT) else "correct"), False


def _boxed(content: str | None) -> Verdict | None:
    found = _BOXED.fullmatch(clean(content).casefold().strip(" *_.!?\"'")) if content else None
    if found is None:
        return None
    return "correct" if found[1] else "wrong"
