"""Response text -> answer."""

import re
from collections.abc import Sequence
from dataclasses import replace

from megarl.answers.clean import matching
from megarl.answers.equal import MAX_LENGTH, canonical
from megarl.answers.verdict import read_verdict
from megarl.settings import AnswersConfig
from megarl.types import Rollout

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[A-Za-z0-9.,/+-]+")
_FENCE = re.compile(r"```.*?```", re.DOTALL)
_NUMBER = re.compile(r"(?:(?<![\d)\]}.])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def read_answers(rollouts: Sequence[Rollout], cfg: AnswersConfig) -> list[Rollout]:
    """The rollouts with ``answer`` and ``well_formed`` filled in, in their order.

    Responses that were aborted have no answer; neither have those cut by length, unless cfg.truncated is "read": an
    early box in a response that had not ended is usually one that it would have taken back. The answer of a "verify"
    turn is its verdict, which stands at the very end: where that can be read nothing is missing.
    """
    out = []
    for r in rollouts:
        if r.prompt.role == "verify":
            verdict, well_formed = read_verdict(r.text, keywords=cfg.verdict == "keywords")
            out.append(replace(r, answer=verdict, well_formed=well_formed))
            continue
        complete = r.stop == "end" or (r.stop == "length" and cfg.truncated == "read")
        answer = read_answer(r.text, cfg) if complete else None
        out.append(replace(r, answer=answer, well_formed=answer is not None))
    return out


def read_answer(text: str, cfg: AnswersConfig) -> str | None:
    """The final answer as it is spelt; None where there is none, it is blank, or longer than MAX_LENGTH."""
    text = final_part(text)
    answer = boxed(text) if cfg.style == "boxed" else last_number(text)
    if answer is None or len(answer) > MAX_LENGTH or canonical(answer) is None:
        return None
    return answer


def final_part(text: str) -> str:
    """The text after the last thinking block; nothing where that block never ends."""
    opened, closed = text.rfind("<think>"), text.rfind("</think>")
    if opened > closed:
        return ""
    return text[closed + len("</think>") :] if closed >= 0 else text


def boxed(text: str) -> str | None:
    r"""Content of the last non-empty \boxed or \fbox outside of code; the innermost of nested ones.

    A last box that is cut off means that no final answer was given: earlier ones do not stand in for it.
    """
    # from the end: the verdict is that of the last box, unless it is empty
    for found in reversed(list(_BOX.finditer(_FENCE.sub(" ", text)))):
        start, whole = found.end(), found.string
        if whole.startswith("{", start):
            # a closing brace beyond the cap is not looked for: the answer is too long in any case
            end = matching(whole[start : start + MAX_LENGTH + 2], 0)
            content = whole[start + 1 : start + end].strip() if end > 0 else None
        else:
            bare = _BARE.match(whole, start) if whole[start - 1].isspace() else None
            content = bare[0].rstrip(".,") if bare else ""
        if content is None or content:
            return content
    return None


def last_number(text: str) -> str | None:
    """The last number, without thousands separators."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None
