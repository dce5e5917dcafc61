"""A verification's verdict: the exact sentence of CoVerRL, or a boxed word.

Paper: CoVerRL, arXiv 2603.17775. Its release takes any other text by keywords, so that an empty or cut verification
counts as "correct" and "No mistake found" as "wrong"; here that is ``keywords=True``, and without it such a text has
no verdict.
"""

import re
from typing import NamedTuple

from megarl.answers.clean import clean

_SENTENCE = re.compile(r"The answer is (correct|wrong)\.\n?\Z")
_KEYWORDS = ("wrong", "incorrect", "mistake")
_RIGHT = re.compile(r"(?:(?:the )?(?:answer|solution|verdict|response|final answer)\s*(?:is|:)?\s*)?(?:correct|right)")
_WRONG = re.compile(
    r"(?:(?:the )?(?:answer|solution|verdict|response|final answer)\s*(?:is|:)?\s*)?(?:incorrect|wrong|not (?:correct|right)|in-correct)"
)


class Verdict(NamedTuple):
    verdict: str | None  # "correct", "wrong" or (of a box) "incorrect"; None: none was given
    well_formed: bool  # in the form that was asked for


def verdict_sentence(text: str, keywords: bool = False) -> Verdict:
    """The verdict of "The answer is correct." or "... wrong." at the very end, with its period and at most a newline."""
    found = _SENTENCE.search(text)
    if found:
        return Verdict(found[1], True)
    if not keywords:
        return Verdict(None, False)
    plain = text.lower()
    return Verdict("wrong" if any(k in plain for k in _KEYWORDS) else "correct", False)


def boxed_verdict(content: str | None) -> Verdict:
    """"correct" or "incorrect" (also for "wrong") of a box's whole content; anything else is no verdict."""
    plain = clean(content).casefold().strip(" *_.!?\"'") if content else ""
    if _WRONG.fullmatch(plain):
        return Verdict("incorrect", True)
    if _RIGHT.fullmatch(plain):
        return Verdict("correct", True)
    return Verdict(None, False)
