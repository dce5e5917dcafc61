"""Spelling of an answer -> one plain spelling: wrappers, spacing, look-alike macros, units and separators removed."""

import re

from megarl.answers.characters import ascii_math
from megarl.answers.words import NUMBERS

_SPACING = re.compile(
    r"\\(?:left|right|middle|[bB]ig{1,2}[lrm]?|displaystyle|textstyle|scriptstyle|limits|q?quad|hspace\s*\{[^{}]*\}"
    r"|(?:thin|med|thick|neg)?space|bf|it|rm|boldmath|hline|[lL]arge|LARGE|[hH]uge|small|tiny|normalsize)(?![A-Za-z])"
    r"|(?<!\\)\\[!,;:> ]|~|&nbsp;"
)
_SYNONYMS = [
    (re.compile(r"\\(?:[dtc]|[sn]ice|s)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\leq(?:slant|q)?(?![A-Za-z])|<=|=<"), r"\\le "),
    (re.compile(r"\\geq(?:slant|q)?(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!=|\\not\s*="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\(?:cdot|times|ast|bullet)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\\lbrack(?![A-Za-z])"), "["),
    (re.compile(r"\\rbrack(?![A-Za-z])"), "]"),
    (re.compile(r"\\(?:colon|ratio)(?![A-Za-z])|\{\s*:\s*\}"), ":"),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])"), "|"),
    (re.compile(r"\\[lrv]?Vert(?![A-Za-z])|\\\|"), "||"),
    (re.compile(r"\\(?:dots[cbmi]?|cdots|ldots)(?![A-Za-z])|(?<!\.)\.\.\.+"), r"\\ldots "),
    (re.compile(r"\\(?:backslash|smallsetminus)(?![A-Za-z])"), r"\\setminus "),
    (re.compile(r"\\(?:measured)?angle(?![A-Za-z])|^\s*\\(?:approx|simeq)(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), r" \\wedge "),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), r" \\vee "),
    (re.compile(r"\\bar(?![A-Za-z])(?=\s*\{?\d)"), r"\\overline"),
    (re.compile(r"(?<![A-Za-z\\])d([a-z])\s*/\s*d([a-z])(?![A-Za-z])"), r"\\frac{d\1}{d\2}"),
    (re.compile(r"\\(?:to|rightarrow)(?![A-Za-z])"), r"\\to "),
    (re.compile(r"\\(?:Reals|R)(?![A-Za-z])"), r"\\mathbb{R}"),
    (re.compile(r"\\var(phi|epsilon|theta|rho|sigma|pi)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\\begin\s*\{[bp]?(?:small)?matrix\*?\}(?:\[\w\])?"), r"\\begin{matrix}"),
    (re.compile(r"\\end\s*\{[bp]?(?:small)?matrix\*?\}"), r"\\end{matrix}"),
    (re.compile(r"\\begin\s*\{array\}\s*\{[^{}]*\}"), r"\\begin{matrix}"),
    (re.compile(r"\\end\s*\{array\}"), r"\\end{matrix}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<![A-Za-z\\])(?:infinity|infty|inf)(?![A-Za-z])", re.IGNORECASE), r"\\infty "),
    (
        re.compile(r"(?<![A-Za-z\\])(sqrt|arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|ln|log|exp)(?=\s*[({\[\d^_])"),
        r"\\\1",
    ),
    (re.compile(r"(?<![A-Za-z\\])(pi|theta|alpha|beta)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<=\d)\s*x\s*(?=10\s*\^)"), "*"),
]  # fmt: skip
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}\s*|,(?:\\[!,;: ]|~)+\s*|\\,)(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?!\d|,\d)")
_OPENERS, _CLOSERS = re.compile(r"[(\[]|\\\{"), re.compile(r"[)\]]|\\\}")
_SPACED = re.compile(r"(?<![\d.,^_}])(?<!\d )[1-9]\d{0,2}(?: \d{3})+(?![\d/]| \d|,\d)(?:\.\d+)?(?!\s*(?:\\frac|\d*/))")
_TEXT_OPENS = r"(?:\\(?:text|mathrm|textrm|mbox)\s*\{\s*)?"
_DEGREE = re.compile(
    r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}|\{?\s*\u00b0\s*\}?|\\degree(?![A-Za-z]))"
    r"|\\degrees?(?![A-Za-z])|(?<=[\d)}])\s*\\circ(?![A-Za-z]|\s*[A-Za-z(\\])"  # f \circ g has no degrees
    rf"|\^?\{{?\s*(?<=\d)\s*{_TEXT_OPENS}deg(?:ree)?s?\b\s*\}}?"
)
_PERCENT = re.compile(
    rf"\\?%(?!\s*[\d(]|[A-Za-z])|\s*{_TEXT_OPENS}\b(?:per ?cent|percentage points?|pct)\b\.?\s*\}}?", re.IGNORECASE
)
_CURRENCY = re.compile(r"\\(?:\$|pounds|euro)(?![A-Za-z])|\b(?:US|USD)\s*(?=\$?\d)")
_TEXT = r"\\(?:text|textbf|textit|textnormal|textrm|textsf|texttt|textup|emph|mathrm|mbox|hbox|operatorname\*?)"
_FONT = re.compile(
    _TEXT + r"\s*\{([^{}]*)\}"
    r"|\\(?:mathbf|mathit|mathsf|mathtt|mathcal|boldsymbol|bm|underline|ensuremath|mathord|mathop)\s*\{([^{}]*)\}"
)
_COLOR = re.compile(r"\\(?:textcolor|color|colorbox)\s*\{[^{}]*\}")
_SCALE = {"hundred": "100", "thousand": "1000", "million": "1000000", "billion": "1000000000", "dozen": "12",
          "trillion": "10^{12}", "hundred thousand": "100000"}  # fmt: skip
_AMOUNT = r"(?:(?<=\d)|(?<=[})])|(?<=\\pi)|(?<=\\pi )|(?<=\d )|(?<=[})] ))"
_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"
_UNIT_TEXT = re.compile(_AMOUNT + r"\s*" + _TEXT + r"\s*\{((?:[^{}\d\\]|\^\{?\d\}?)*)\}" + _POWER + r"\s*\.?$")
_WORD = r"[A-Za-z]{2,}\.?"
_UNIT_WORDS = re.compile(_AMOUNT + rf"\s+({_WORD}(?:(?:\s+|\s*/\s*|-){_WORD}){{0,3}})" + _POWER + r"\s*\.?$")
_UNITS = (
    r"(?:[kcmdn\u03bc]?m|km|ft|in|inch(?:es)?|feet|foot|yards?|yd|miles?|mi|[km]?g|kg|lbs?|oz|[m]?[lL]|s|sec|min|h|hr|hrs|hours?"
    r"|minutes?|seconds?|days?|weeks?|months?|years?|mph|kph|cents?|dollars?|units?|square|sq|cubic|cu|rad(?:ians?)?|meters?"
    r"|centimeters?|kilometers?|grams?|lit(?:er|re)s?|[kM]?W|[kM]?J|[kM]?N|[kM]?Pa|[kM]?Hz|V|A|K|C|F|mol|per|km/h|m/s|cm/s|ft/s)"
)
_UNIT_KNOWN = re.compile(rf"(?<=[\d}})A-Za-z])\s*{_TEXT}\s*\{{\s*{_UNITS}(?:[\s/*]+{_UNITS})*\s*\}}{_POWER}\s*\.?$")
_UNIT_PLAIN = re.compile(rf"(?<=[\d}})])\s*(?<![A-Za-z\\])(?:[kcm]m|km/h|m/s|kg|mph|ft|cm/s){_POWER}\s*\.?$")
_MONTHS = (
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?|(?:mon|tues|wednes|thurs|fri|satur|sun)day"
)
# letters side by side that are no word: 2 ab, 2 \pi rh
_FACTORS = re.compile(r"[A-Za-z]{2}|[b-df-hj-np-tv-z]{3}|abc|[xyz]{3}")
_ONE_UNIT = re.compile(_UNITS)
_PARTS = re.compile(r"[,;]|(?<![A-Za-z\\])and(?![A-Za-z])")
_LAST_WORDS = re.compile(r"(?<=\d)\s*(?:\\[a-z]+\s*\{)?\s*([A-Za-z]{2,}(?:[ /-][A-Za-z]{2,})*)\W*$")
# words after a number that are part of what it says, rather than a unit
_MEANING = re.compile(
    r"\b(?:and|or|if|is|are|when|where|for|mod|modulo|not|to|only|except|through|even|odd|prime|positive|negative|am|pm"
    r"|a\.m|p\.m|bc|ad|heads?|tails?|north|south|east|west|left|right|up|down|true|false|yes|no|plus|minus|times|over"
    r"|squared|cubed|factorial|d[a-z]|choose|below|above|before|after|half|then|than|of|sqrt|pi|base|remainder"
    r"|halves|thirds?|fourths?|quarters?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|(?:hundred|thousand|million)ths?"
    r"|more|less|fewer|least|most|older|younger|taller|shorter|longer|higher|lower|greater|smaller|larger|deeper|faster"
    r"|slower|fast|slow|early|late|earlier|later|ago|hence|ahead|behind|inwards?|outwards?|upwards?|downwards?|forwards?"
    r"|backwards?|(?:counter|anti)?-?clockwise|wins?|loss(?:es)?|decreased?|off|noon|midnight|profit|gain(?:ed)?|lost|inclusive|exclusive|between"
    rf"|{_MONTHS})\b",
    re.IGNORECASE,
)
_ORDINAL = re.compile(r"(?<=\d)\s*\^?\s*\{?\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?$")
_SENTENCE = re.compile(
    r"^(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my|our)\s+)?(?:final\s+|correct\s+)?answer\s*(?:is|=|:)*\s*:?\s*(?=\S)",
    re.IGNORECASE,
)
_GLUE = re.compile(r"(?<=\d)\\!(?=\d)")
_BOLD = r"\\(?:mathbf|boldsymbol|bm|vec)\s*\{\s*[A-Za-z]\s*\}"
_CROSS = re.compile(rf"({_BOLD})\s*\\times\s*({_BOLD})")
_BASES = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
_BASE = re.compile(rf"(?<=[\dA-Za-z)])\s*_\s*\{{?\s*({_BASES})\s*\}}?(?![a-z])", re.IGNORECASE)
_JOINED = re.compile(r"\s*[,;]?\s+(?:and|or)\s+(?=\S)|\s*;\s*")
_INEQUALITY = re.compile(r"<|>|\\(?:le|ge|ne)(?![A-Za-z])")
_OR, _AND = re.compile(r"\s*,?\s+or\s+(?=\S)"), re.compile(r"\s*,?\s+and\s+(?=\S)")
_TOKEN = r"(?:\d|[A-Za-z]|\{[^{}]*\}|\\(?:pi|theta|alpha|beta)(?![A-Za-z]))"
_SHORT_FRACTION = re.compile(rf"\\frac\s*({_TOKEN})\s*({_TOKEN})")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}")
_REPEATING = re.compile(r"(\d*)\.(\d*)\s*(?:\\overline\s*\{?(\d+)\}?|\\dot\s*\{?(\d)\}?|\\overline\s*\{\\?(\d+)\})")
_MIXED_MACRO = re.compile(r"(?<![\d.^_{}A-Za-z])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_MIXED_PLAIN = re.compile(r"(?<![\d.^_/])(\d+) +(\d+) ?/ ?(\d+)(?![\d.])")
_QUOTES = (("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("`", "`"), ('"', '"'), ("``", "''"))


def clean(text: str) -> str:
    """The answer without what only changes its look. Empty where nothing is left."""
    # blanks are single before every pattern that allows some: a run of them would cost its square or its cube
    text = _unwrap(_COLOR.sub("", _CURRENCY.sub(" ", _single(ascii_math(text)))))
    text = _CROSS.sub(r"\1 \\crossed \2", _GLUE.sub("", text))
    text = _single(_SPACING.sub(" ", _SEPARATOR.sub("", text)))
    for pattern, plain in _SYNONYMS:
        text = pattern.sub(plain, text)
    text = _single(text)
    text = _PERCENT.sub("", _DEGREE.sub("\u00b0", text)).strip()
    text = without_unit(text)
    for _ in range(4):
        text = _FONT.sub(lambda m: f" {m[1] if m[1] is not None else m[2]} ", text)
    text = _single(text)
    text = _SENTENCE.sub("", text.strip(" \t$").rstrip(".;, ").removesuffix("\\\\").strip()).strip("$ ")
    text = _BASE.sub(lambda m: f"_{{{NUMBERS[m[1].lower()]}}}", text)
    text = without_unit(text)
    if "=" in text or _INEQUALITY.search(text):
        text = text.replace("\\wedge", " and ").replace("\\vee", " or ")
    if _INEQUALITY.search(text):  # "x > 1 and x < 3" is not "x > 1 or x < 3"
        text = _AND.sub(r" \\and ", _OR.sub(r" \\or ", text))
    text = _JOINED.sub(" , ", text)
    text = _fractions(_single(text)).strip()
    text = _SPACED.sub(lambda m: m[0].replace(" ", ""), text)
    return _without_braces(_unwrap(text))


def ungroup(text: str) -> str:
    """Thousands separators out: 1,234 -> 1234. Not in 0,123 and 12,34, which are lists, nor within brackets, where
    (1,234) is a pair."""

    def plain(found: re.Match[str]) -> str:
        before = text[: found.start()]
        inside = len(_OPENERS.findall(before)) > len(_CLOSERS.findall(before))
        return found[0] if inside else found[0].replace(",", "")

    return _GROUPED.sub(plain, text)


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


def _single(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _unwrap(text: str) -> str:
    """Without dollars, brackets of mathematics, bold marks, quotes and boxes around the whole."""
    while True:
        before = text
        text = text.strip().strip("$").strip()
        if re.fullmatch(r"\*[^*]+\*", text):
            text = text[1:-1]
        for opener, closer in _QUOTES:
            if len(text) > len(opener) + len(closer) and text.startswith(opener) and text.endswith(closer):
                text = text[len(opener) : -len(closer)]
        found = re.match(r"\\(?:boxed|fbox|framebox)\s*\{", text)
        if found and matching(text, found.end() - 1) == len(text) - 1:
            text = text[found.end() : -1]
        if text == before:
            return text


def without_unit(text: str) -> str:
    """The text without the unit behind its number; "million" and its like multiply instead.

    Where several numbers stand in it with a unit each, such as 3 ft, 4 in, the units say which is which, and stay."""
    if units_differ(text):
        return text
    for pattern in (_UNIT_KNOWN, _UNIT_PLAIN, _ORDINAL):
        text = pattern.sub("", text)
    for pattern in (_UNIT_TEXT, _UNIT_WORDS):
        found = pattern.search(text)
        if found is None:
            continue
        head, words = text[: found.start()], found[1].strip().strip(".").lower()
        scale, _, unit = words.partition(" ")
        if words in _SCALE or scale in _SCALE:
            scaled = _SCALE.get(words) or _SCALE[scale]
            return head if _MEANING.search(unit) and words not in _SCALE else f"{head}*{scaled}"
        plain = pattern is _UNIT_WORDS
        if (
            words
            and not _MEANING.search(words)
            and not (plain and _FACTORS.fullmatch(words) and not _is_unit(found[1]))
        ):
            return head
    return text


def units_differ(text: str) -> bool:
    """Is it a list of amounts of different things?"""
    units = [m[1] for part in _PARTS.split(text) if (m := _LAST_WORDS.search(part))]
    return len({u.lower().removesuffix("s") for u in units}) > 1


def _is_unit(word: str) -> bool:
    return _ONE_UNIT.fullmatch(word.strip().strip(".")) is not None


def _fractions(text: str) -> str:
    r"""\frac12, a \over b, 0.\overline{3} and mixed numbers in the one form \frac{a}{b}."""
    text = _OVER.sub(r"\\frac{\1}{\2}", _CHOOSE.sub(r"\\binom{\1}{\2}", text))
    text = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{_bare(m[1])}}}{{{_bare(m[2])}}}", text)
    text = _REPEATING.sub(_repeating, text)
    return _MIXED_MACRO.sub(_mixed, _MIXED_PLAIN.sub(_mixed, text))


def _bare(token: str) -> str:
    return token[1:-1] if token.startswith("{") else token


def _repeating(found: re.Match[str]) -> str:
    whole, start, cycle = found[1], found[2], found[3] or found[4] or found[5]
    if len(whole + start + cycle) > 300:
        return found[0]
    below = "9" * len(cycle) + "0" * len(start)
    above = int(whole + start + cycle) - int(whole + start or "0")
    return rf"\frac{{{above}}}{{{below}}}"


def _mixed(found: re.Match[str]) -> str:
    whole, top, bottom = found.groups()
    proper = len(top) < 9 and len(bottom) < 9 and int(top) < int(bottom)
    return f"({whole}+\\frac{{{top}}}{{{bottom}}})" if proper else found[0]


def _without_braces(text: str) -> str:
    while text.startswith("{") and matching(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text
