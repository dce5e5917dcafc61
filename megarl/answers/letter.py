"""Multiple choice: the letter that a response settles on."""

import re

from megarl.answers.boxes import last_box
from megarl.answers.clean import clean
from megarl.answers.final import NEAR_END
from megarl.answers.form import MAX_LENGTH

# an answer that says nothing but a letter, or a letter and what it stands for
_ALONE = re.compile(r"(?:(?i:option|choice|answer))?[\s:]*[(\[]?\s*([A-Za-z])\s*[)\].:]?")
_LABEL = re.compile(
    r"(?:(?i:option|choice|answer))?[\s:]*"
    r"(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Za-z])\s*(?:[).:]|\s-)|([A-Z])(?=\s))\s*(.*)",
    re.DOTALL,
)
_SEVERAL = re.compile(r"(?:\s*(?:,|/|&|\bor\b|\band\b)\s*[(\[]?[A-Z](?![A-Za-z])|\s*[(\[][A-Z][)\]])")
_REASON = re.compile(r"(?:because|since|as|is|due|for|given|while|which|where|based|by|from|with)\b", re.IGNORECASE)
_WRAP = r"[\s*_`$\"'(\[{:]*(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{[\s(*]*)?"
_LETTER = r"([A-Z])(?![A-Za-z0-9'])"
_QUOTED = r"[(\[{]\s*([a-z])\s*[)\]}]"
_ANNOUNCED = re.compile(
    r"\b(?:answer|option|choice)s?[*_\s]*(?:is|are|=|:|would be|should be|must be)+[*_]*\s*(?:therefore\s+|thus\s+)?"
    rf"(?:(?:the\s+)?(?:option|choice|letter|answer)\b)?(?:{_WRAP}(?-i:{_LETTER})|\s*{_QUOTED})",
    re.IGNORECASE,
)
_CHOSEN = re.compile(
    r"\b(?:(?:I|we)\s+(?:would\s+|will\s+)?(?:choose|pick|select|go with)"
    r"|(?:choose|pick|select)(?=\s+(?:option|choice|\()))"
    rf"\s*(?:option|choice|answer)?{_WRAP}(?-i:{_LETTER})",
    re.IGNORECASE,
)
_CALLED_RIGHT = re.compile(
    rf"(?:\b(?:option|choice)\s*)?(?-i:(?<![A-Za-z]){_LETTER})[)\].*_]*\s+(?:is|must be|has to be)\s+(?:the\s+)?"
    r"(?:only\s+)?(?:correct|right|best|true|final)\b(?!\s*(?:that|for\b.*\bnot))",
    re.IGNORECASE,
)


def letter(text: str, options: str) -> str | None:
    """The chosen one of ``options`` ("ABCD"), in capitals; None where there is none, or more than one.

    A box that holds a letter decides; a box with something else in it says nothing, and an announcement ("Answer: B",
    "B is correct") does; last, a final line of a letter alone. Several letters in one of these are no choice. A lone
    "a" in a sentence is an article.
    """
    box = last_box(text)
    if box == "":
        return None
    if box is not None:
        found = _of(box, options)
        if found is not None:
            return found or None
    found = _announced(text[-NEAR_END:], options)
    if found is not None:
        return found or None
    lines = [line for line in text.splitlines() if line.strip()]
    return (_of(lines[-1], options, label=len(lines) == 1) or None) if lines else None


def _of(content: str, options: str, label: bool = True) -> str | None:
    """The letter that the content is, or begins with; "" for several, None where it is something else."""
    if len(content) > MAX_LENGTH:
        return None
    plain = clean(content).strip(" *_`$\"'")
    alone = _ALONE.fullmatch(plain)
    if alone:
        return _known(alone[1], options)
    listed = re.fullmatch(r"[(\[{]?\s*[A-Za-z](?:\s*[)\]]?\s*[,;/&]\s*[(\[]?\s*[A-Za-z]\s*[)\]]?)+", plain)
    if listed:
        return ""
    found = _LABEL.fullmatch(plain) if label else None
    if found is None:
        return None
    which, rest = found[1] or found[2] or found[3], found[4]
    if re.match(r"[=<>+*/^_\\-]|\\", rest):
        return None  # a formula that begins with a letter
    if found[3] == "A" and not _REASON.match(rest):
        return None  # "A car": an article
    if _SEVERAL.match(" " + rest):
        return ""
    return _known(which, options)


def _announced(text: str, options: str) -> str | None:
    """The letter of the last announcement; "" for several letters in it."""
    found = [m for pattern in (_ANNOUNCED, _CHOSEN, _CALLED_RIGHT) for m in pattern.finditer(text)]
    for m in sorted(found, key=lambda m: m.start(), reverse=True):
        which = next(g for g in m.groups() if g)
        rest = text[m.end() : m.end() + 40]
        if which == "A" and re.match(r"\s+[a-z]", rest) and not _REASON.match(rest.strip()):
            continue  # "the answer is A car": an article in capitals
        if re.match(r"\s*[=<>+^_]|\s*\\(?!\)|\])", rest):
            continue  # a formula
        if _known(which, options) is None:
            continue
        return "" if _SEVERAL.match(rest.lstrip("*_)}]$ ")) or _SEVERAL.match(rest) else _known(which, options)
    return None


def _known(which: str, options: str) -> str | None:
    return which.upper() if which.upper() in options.upper() else None
