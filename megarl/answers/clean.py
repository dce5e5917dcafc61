"""Spelling of an answer -> one plain spelling: wrappers, spacing, look-alike macros, units and separators removed."""

import re
import unicodedata

_UNICODE = {
    "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}",
    "\u2153": r"\frac{1}{3}", "\u2154": r"\frac{2}{3}",
    "\u2070": "^{0}", "\u00b9": "^{1}", "\u00b2": "^{2}", "\u00b3": "^{3}", "\u2074": "^{4}", "\u2075": "^{5}",
    "\u2076": "^{6}", "\u2077": "^{7}", "\u2078": "^{8}", "\u2079": "^{9}",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ",
    "\u222a": r"\cup ", "\u2208": r"\in ", "\u2205": r"\emptyset ", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
    "\u00f7": "/", "\u00b1": r"\pm ", "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00b0": "",
}  # fmt: skip
_ROOT_SIGN = re.compile("\u221a\\s*(\\d+|[A-Za-z])")
_SPACING = re.compile(
    r"\\(?:left|right|[bB]ig[lr]?|displaystyle|textstyle|limits|q?quad)(?![A-Za-z])"
    r"|(?<!\\)\\[!,;:> ]|~"
)
_SYNONYMS = [
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\leq(?:slant)?(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\geq(?:slant)?(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\(?:cdot|times|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:lbrace|rbrace)(?![A-Za-z])"), lambda m: r"\{" if m[0].startswith(r"\l") else r"\}"),
    (re.compile(r"\\colon(?![A-Za-z])|\{:\}"), ":"),
    (re.compile(r"\\[bpvV]?matrix"), r"\\matrix"),
    (re.compile(r"\{[bpvV]matrix\}"), "{matrix}"),
]
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d)")
_GROUPED = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?![\d,])")
_OPENERS, _CLOSERS = re.compile(r"[(\[]|\\\{"), re.compile(r"[)\]]|\\\}")
_SPACED = re.compile(r"[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?")
_DEGREE = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|\\circ(?![A-Za-z])")
_PERCENT = re.compile(r"\\?%|\s*\bper ?cent\b")
_FONT = re.compile(
    r"\\(?:text|textbf|textit|textnormal|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|mbox|operatorname|boldsymbol|bm)"
    r"\s*\{([^{}]*)\}"
)
_UNIT = re.compile(
    r"(?<=[A-Za-z\d})])\s*\\(?:text|textnormal|mathrm|textrm|mbox)\s*\{([^{}\d\\]*)\}(?:\^\{?\d\}?)?\s*\.?$"
)
_SCALE = {"hundred": "100", "thousand": "1000", "million": "1000000", "billion": "1000000000", "trillion": "10^{12}"}
_SENTENCE = re.compile(r"^(?:so |thus |hence |therefore )?(?:the )?(?:final )?answer is:?\s+(?=\S)", re.IGNORECASE)
_JOINED = re.compile(r"\s*,?\s+(?:and|or)\s+")
_MIXED_MACRO = re.compile(r"(?<![\d.^_{}])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_MIXED_PLAIN = re.compile(r"(?<![\d.^_/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d|[A-Za-z])\s*(\d|[A-Za-z])(?![A-Za-z])")
_ASSIGNED = re.compile(r"^[A-Za-z]\s*(?:=|\\in(?![A-Za-z]))\s*(?=\S)")


def clean(text: str) -> str:
    """The answer without what only changes its look. Empty where nothing is left."""
    text = "".join(_UNICODE.get(c, c) for c in _ROOT_SIGN.sub(r"\\sqrt{\1}", text).replace("\u221a", r"\sqrt "))
    text = unicodedata.normalize("NFKC", text).strip()
    text = _unwrap(text.replace("\\$", ""))  # an amount of dollars; bare ones delimit mathematics
    text = _SEPARATOR.sub("", text)
    text = _SPACING.sub(" ", text)
    for pattern, plain in _SYNONYMS:
        text = pattern.sub(plain, text)
    text = _PERCENT.sub("", _DEGREE.sub("", text)).strip()
    text = _without_unit(text)
    for _ in range(4):
        text = _FONT.sub(r" \1 ", text)
    text = _SENTENCE.sub("", text.strip())
    text = _JOINED.sub(" , ", text.strip().rstrip(".;,").strip())
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _MIXED_MACRO.sub(_mixed, _MIXED_PLAIN.sub(_mixed, text))
    text = re.sub(r"\s+", " ", text).strip()
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    return _without_braces(text)


def without_name(text: str) -> str:
    """The value of "x = value" or "x in set", for a name of one letter; anything else as it is."""
    value = _ASSIGNED.sub("", text, count=1)
    return value if "=" not in value else text


def ungroup(text: str) -> str:
    """Thousands separators out: 1,234 -> 1234. Not in 0,123 and 12,34, which are lists, nor within brackets, where
    (1,234) is a pair."""

    def plain(found: re.Match[str]) -> str:
        before = text[: found.start()]
        inside = len(_OPENERS.findall(before)) > len(_CLOSERS.findall(before))
        return found[0] if inside else found[0].replace(",", "")

    return _GROUPED.sub(plain, text)


def _unwrap(text: str) -> str:
    while True:
        before = text
        text = text.strip().strip("$").strip()
        for opener, closer in (("\\(", "\\)"), ("\\[", "\\]"), ("**", "**")):
            if len(text) >= len(opener) + len(closer) and text.startswith(opener) and text.endswith(closer):
                text = text[len(opener) : -len(closer)]
        for macro in ("\\boxed{", "\\fbox{"):
            if text.startswith(macro) and matching(text, len(macro) - 1) == len(text) - 1:
                text = text[len(macro) : -1]
        if text == before:
            return text


def _without_unit(text: str) -> str:
    found = _UNIT.search(text)
    if found is None:
        return text
    words = found[1].strip().lower()
    if words in _SCALE:
        return f"{text[: found.start()]}*{_SCALE[words]}"
    if re.search(r"\b(?:and|or)\b", words):
        return text
    return text[: found.start()]


def _without_braces(text: str) -> str:
    while text.startswith("{") and matching(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _mixed(found: re.Match[str]) -> str:
    whole, top, bottom = found.groups()
    proper = len(top) < 9 and len(bottom) < 9 and int(top) < int(bottom)
    return f"({whole}+\\frac{{{top}}}{{{bottom}}})" if proper else found[0]


def matching(text: str, start: int) -> int:
    """Position of the brace that closes the one at ``start``, -1 where there is none; escaped braces do not count."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
        i += 1
    return -1
