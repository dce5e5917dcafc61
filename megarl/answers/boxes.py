r"""The box that holds the final answer: \boxed{...}, \fbox{...}, \boxed 7."""

import re

from megarl.answers.clean import matching
from megarl.answers.form import MAX_LENGTH

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s{0,8}")
_BARE = re.compile(r"(?:\\(?:d?frac|text|sqrt)\s*(?:\{[^{}]*\}){1,2}|[^\s$\\{}]|\\(?=[a-zA-Z%])[a-zA-Z%]+)+")
# code is no answer; a fence of mathematics or of no language may hold one
_FENCE = re.compile(r"```[ \t]*([A-Za-z+]*)[^\n`]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_MATHEMATICS = ("latex", "tex", "math", "markdown", "md", "text")


def boxed(text: str) -> str | None:
    """Content of the last non-empty box outside of code; the innermost of nested ones.

    A last box that is cut off means that no final answer was given: earlier ones do not stand in for it.
    """
    return last_box(text) or None


def last_box(text: str) -> str | None:
    """As ``boxed``, but "" for a box that is never closed; None where there is no box."""
    whole = _FENCE.sub(_fence, text)
    # from the end: the verdict is that of the last box, unless it is empty
    for found in reversed(list(_BOX.finditer(whole))):
        start = found.end()
        if whole.startswith("{", start):
            # a closing brace beyond the cap is not looked for: the answer is too long in any case
            end = matching(whole[start : start + MAX_LENGTH + 2], 0)
            if end < 0:
                return ""
            content = whole[start + 1 : start + end].strip()
        else:
            bare = _BARE.match(whole[start : start + MAX_LENGTH])
            content = bare[0].rstrip(".,;:!?)*") if bare else ""
        if content:
            return content
    return None


def _fence(found: re.Match[str]) -> str:
    keep = found[1].lower() in _MATHEMATICS or (not found[1] and "print" not in found[2] and '"' not in found[2])
    return f" {found[2]} " if keep else " "
