"""Unicode -> the ASCII and LaTeX spelling of the same mathematics."""

import re
import unicodedata

_GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"),
    *("nu", "xi", "omicron", "pi", "rho", "varsigma", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)
_MACROS = {
    "\u221e": "infty", "\u2264": "le", "\u2265": "ge", "\u2a7d": "le", "\u2a7e": "ge", "\u2260": "ne",
    "\u2248": "approx",
    "\u222a": "cup", "\u2229": "cap", "\u2208": "in", "\u2205": "emptyset", "\u2216": "setminus", "\u00b1": "pm",
    "\u2213": "mp", "\u2211": "sum", "\u220f": "prod", "\u222b": "int", "\u2261": "equiv", "\u2026": "ldots",
    "\u22ef": "cdots", "\u230a": "lfloor", "\u230b": "rfloor", "\u2308": "lceil", "\u2309": "rceil", "\u27e8": "langle",
    "\u27e9": "rangle", "\u2329": "langle", "\u232a": "rangle", "\u03d5": "phi", "\u2223": "mid",
    **{chr(0x3B1 + i): name for i, name in enumerate(_GREEK)},
    "\u0393": "Gamma", "\u0394": "Delta", "\u0398": "Theta", "\u039b": "Lambda", "\u03a0": "Pi", "\u03a3": "Sigma",
    "\u03a6": "Phi", "\u03a8": "Psi", "\u03a9": "Omega",
}  # fmt: skip
_PLAIN = {
    **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\u2012\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00d7\u00b7\u22c5\u2217\u2219\u2715", "*"),
    **dict.fromkeys("\u00f7\u2215\u2044\uff0f", "/"),
    **dict.fromkeys("\u2236\uff1a", ":"),
    **dict.fromkeys("\u2018\u2019\u2032\u02b9", "'"),
    **dict.fromkeys("\u201c\u201d\u300c\u300d", '"'),
    **dict.fromkeys("\u00ba\u02da\u00b0", "\u00b0"),
    **dict.fromkeys("\uff0c\u3001", ","),
    **dict.fromkeys("\u20ac\u00a3\u00a5\uffe5\u20b9", "$"),
    "\u3002": ".", "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}", "\u2115": r"\mathbb{N}", "\u221b": r"\sqrt[3]",
    "\u2220": "",
}  # fmt: skip
_ROOT = re.compile("\u221a\\s*([0-9]+|[A-Za-z]|\\\\[a-z]+)?")
_RANGE = re.compile("^([^\\d]?\\d[\\d.,]*)[\u2013\u2014]([^\\d]?\\d[\\d.,]*)$")  # 7 to 8, and no difference
_SCRIPTS = {"<super>": "^", "<sub>": "_"}


def ascii_math(text: str) -> str:
    """The text with look-alikes, fractions, scripts, Greek letters and digits of any writing in one spelling.

    Invisible characters and control characters go, other spaces become blanks. Letters of other writings stay.
    """
    if text.isascii() and text.isprintable():
        return text
    text = _RANGE.sub(r"\1 to \2", text)
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1]}}}" if m[1] else r"\sqrt ", text)
    out: list[str] = []
    script = ""
    for c in text:
        kind, piece = ("", c) if c.isascii() else _decomposed(c)
        if script and kind != script:
            out.append("}")
        if kind and kind != script:
            out.append(kind + "{")
        script = kind
        out.append(piece if c.isprintable() else _blank(c))
    return "".join(out) + ("}" if script else "")


def _decomposed(c: str) -> tuple[str, str]:
    """("^" or "_" for a raised or lowered character, its spelling)."""
    if c in _MACROS:
        return "", f"\\{_MACROS[c]} "
    if c in _PLAIN:
        return "", _PLAIN[c]
    if unicodedata.category(c) == "Nd":
        return "", str(unicodedata.digit(c))
    kind = unicodedata.decomposition(c).partition(" ")[0]
    if kind in _SCRIPTS:
        return _SCRIPTS[kind], "".join(_PLAIN.get(x, x) for x in unicodedata.normalize("NFKC", c))
    if kind == "<fraction>":
        top, _, bottom = unicodedata.normalize("NFKC", c).partition("\u2044")
        return "", rf"\frac{{{top}}}{{{bottom}}}" if bottom else c
    plain = unicodedata.normalize("NFKC", c)
    return "", "".join(f"\\{_MACROS[x]} " if x in _MACROS else _PLAIN.get(x, x) for x in plain)


def _blank(c: str) -> str:
    """What stands for a character that does not print: a blank for spaces, nothing for the invisible."""
    return " " if c.isspace() else ""
