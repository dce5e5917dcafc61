"""The conversation of an evaluation: solve, verify once, and revise once where the verdict is wrong (CoVerRL, 13.1).

All turns are turns of one conversation with one model; a verification's parent is the answer it speaks of, a
revision's parent the verification that called for it. The sentences of the verdict are CoVerRL's; the rest of the
wording is our own, so published numbers are to be compared with care.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.types import Message, Prompt, Role, Rollout

CORRECT, WRONG = "The answer is correct.", "The answer is wrong."
VERIFY = (
    "Check the solution above step by step. If you find a mistake, name the step, say what is wrong with it, and end "
    f'with this sentence: "{WRONG}" If every step holds, end with this sentence: "{CORRECT}"'
)
REVISE = (
    "You have found your answer to be wrong. Reflect step by step on what went wrong, solve the problem again, and "
    "give the final answer in the form that was asked for at first."
)
_VERDICT = re.compile(r"The answer is (correct|wrong)\.\n?\Z")
_BLAME = ("wrong", "incorrect", "mistake")

VerdictRule = Literal["strict", "keyword"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification says of an answer. ``correct`` is None where it says nothing that counts."""

    correct: bool | None
    well_formed: bool


def read_verdict(text: str, rule: VerdictRule) -> Verdict:
    """Well-formed is a text that ends with one of the two sentences, case and period included, and at most one newline.

    Any other text has no verdict; under "keyword" it is "wrong" if it contains wrong, incorrect or mistake in any case,
    else "correct", the empty text included (the release's fallback: "no mistake found" is wrong).
    """
    found = _VERDICT.search(text)
    if found:
        return Verdict(correct=found[1] == "correct", well_formed=True)
    if rule == "strict":
        return Verdict(correct=None, well_formed=False)
    return Verdict(correct=not any(word in text.lower() for word in _BLAME), well_formed=False)


def verifications(answered: Sequence[Rollout]) -> list[Prompt]:
    """One request to check each answer."""
    return [_next_turn(r, "verify", VERIFY) for r in answered]


def revisions(verified: Sequence[Rollout], rule: VerdictRule) -> list[Prompt]:
    """One request to solve again for each verification whose verdict is "wrong"."""
    return [_next_turn(r, "revise", REVISE) for r in verified if read_verdict(r.text, rule).correct is False]


def _next_turn(r: Rollout, role: Role, request: str) -> Prompt:
    said, asked = Message("assistant", r.text), Message("user", request)
    return Prompt(
        agent=r.prompt.agent,
        uid=r.prompt.uid,
        role=role,
        messages=(*r.prompt.messages, said, asked),
        n=1,
        parent=r.key,
    )
