"""Response text -> answer, by style."""

import re
from collections.abc import Sequence
from dataclasses import replace

from megarl.answers.boxes import boxed, last_box
from megarl.answers.equal import canonical
from megarl.answers.final import final_part
from megarl.answers.form import MAX_LENGTH
from megarl.answers.letter import letter
from megarl.answers.verdict import read_verdict
from megarl.settings import AnswersConfig, AnswerStyle
from megarl.types import Rollout

_TAG = re.compile(r"<answer>(.*?)</answer\s*>", re.IGNORECASE | re.DOTALL)
_MARK = re.compile(r"^\s*#{4}\s*(\S.*?)\s*$", re.MULTILINE)
_NUMBER = re.compile(
    r"(?:(?<![0-9)\]}.])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+(?![0-9A-Za-z]))?"
)


def read_answers(rollouts: Sequence[Rollout], cfg: AnswersConfig) -> list[Rollout]:
    """The rollouts with ``answer`` and ``well_formed`` filled in, in their order.

    Responses that were aborted have no answer; neither have those cut by length, unless cfg.truncated is "read": an
    early box in a response that had not ended is usually one that it would have taken back. The answer of a "verify"
    turn is its verdict, "correct" or "wrong", which stands at the very end: where that can be read nothing is missing.
    """
    out = []
    for r in rollouts:
        if r.prompt.role == "verify":
            verdict, well_formed = read_verdict(r.text, cfg.verdict)
            out.append(replace(r, answer=verdict, well_formed=well_formed))
            continue
        complete = r.stop == "end" or (r.stop == "length" and cfg.truncated == "read")
        answer = read_answer(r.text, cfg) if complete else None
        out.append(replace(r, answer=answer, well_formed=answer is not None))
    return out


def read_answer(text: str, cfg: AnswersConfig) -> str | None:
    """The final answer as it is spelt; None where there is none, it is blank, or longer than MAX_LENGTH.

    A verdict is "correct" or "wrong" as a sentence, "correct" or "incorrect" in a box.
    """
    if cfg.style == "verdict_sentence":
        return read_verdict(text, "keywords" if cfg.verdict == "keywords" else "sentence")[0]
    if cfg.style == "verdict_boxed":
        return {"correct": "correct", "wrong": "incorrect", None: None}[read_verdict(text, "boxed")[0]]
    text = final_part(text)
    answer = letter(text, cfg.options) if cfg.style == "letter" else _styled(text, cfg.style)
    # a box that was begun and not ended means that no answer was given
    if answer is None and not (cfg.style == "boxed" and last_box(text) is not None):
        answer = next((a for a in (_styled(text, style) for style in cfg.fallback) if a is not None), None)
    if answer is None or len(answer) > MAX_LENGTH or canonical(answer) is None:
        return None
    return answer


def _styled(text: str, style: AnswerStyle) -> str | None:
    if style == "boxed":
        return boxed(text)
    if style == "tag":
        return tagged(text)
    if style == "mark":
        marks = _MARK.findall(text)
        return _NUMBER.sub(lambda m: m[0].replace(",", ""), marks[-1]) if marks else None
    return last_number(text)


def tagged(text: str) -> str | None:
    """Content of the last <answer> block; of a box in it, where there is one."""
    blocks = _TAG.findall(text)
    if not blocks:
        return None
    return boxed(blocks[-1]) if "\\boxed" in blocks[-1] else blocks[-1].strip()


def last_number(text: str) -> str | None:
    """The last number, without thousands separators."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None
