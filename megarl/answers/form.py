"""Text of an answer -> its form: a tree of sets, tuples, relations and matrices over exact values and words.

Two forms with one key mean the same. Two closed forms with different keys mean different things. Where a form is open
(it holds sin, a cube root, an integral ...) different keys may still be one value: ``compare`` decides.
"""

import hashlib
import re
import threading
from functools import lru_cache

from megarl.answers import algebra
from megarl.answers.clean import clean, ungroup, units_differ, without_unit
from megarl.answers.expression import TooDeep, Unreadable, read_expression
from megarl.answers.relations import RELATION, read_relation
from megarl.answers.shapes import (
    CLOSE,
    EMPTY,
    INFINITY,
    LINE,
    NAME,
    OPEN,
    Form,
    as_text,
    common,
    letters,
    number,
    ordered,
    split,
    union,
    unordered,
    without,
)
from megarl.answers.words import NUMBERS, PHRASES

MAX_LENGTH = 2000  # characters beyond which an answer is compared as text
_MAX_NESTING = 12
_SHALLOW = 8  # brackets deep that any caller's stack has room for
_WORDS = re.compile(r"\(?\s*([A-Za-z]|[A-Za-z]{2,}(?: [A-Za-z]+|[-'][A-Za-z]{2,}|[-'][A-Za-z]\b)*)\s*\)?")
_PRODUCT = re.compile(r"(?!ln)[b-df-hj-np-tv-z]{2,3}|ab|ac|abc|[xyz]{2,3}|ax|ay|bx|by")  # letters that are no word
_CHOICE = re.compile(r"\(([A-J])\)\s*\S.*|(?:[Oo]ption|[Cc]hoice)\s*\(?([A-J])\)?")
_PROSE = re.compile(
    r"(?<![A-Za-z\\])(?:[A-Za-z]{4,}|to|of|at|if|is|or|by|no|on|as|so|the|per|for|are|one|two|six|ten)(?![A-Za-z])"
)  # a product of letters, read so, would forget their order
_LABELED = re.compile(r"\(?([A-Ja-j]|[ivx]{1,4})\)\s*([^\s,;:=<>+*/^_\\-].*)")
_MATRIX = re.compile(r"[(\[]?\s*\\begin ?\{matrix\}(.*)\\end ?\{matrix\}\s*[)\]]?", re.DOTALL)
_NAMED = re.compile(
    rf"\s*({NAME}(?:\s*\(\s*{NAME}(?:\s*,\s*{NAME})*\s*\))?|(?![xyz])[A-Za-z]'?\s*\(\s*-?\d+\s*\)|\(\s*{NAME}(?:\s*,\s*{NAME})+\s*\)"
    r"|[A-Za-z][A-Za-z ]{2,40})"
    r"\s*(?:=|\\in(?![A-Za-z]))\s*(?=\S)"
)
_MIRRORED = re.compile(rf"([^=<>]*\S)\s*=\s*({NAME})\s*")
_POINT = re.compile(r"\s*[A-Z]\s*(?==?\s*\()")
_APPROXIMATE = re.compile(r"\\(?:approx|simeq|thickapprox)(?![A-Za-z])")
_OPERATOR = re.compile(r"\\(?:i{0,3}nt|oint|sum|prod|lim|max|min|gcd|lcm|det|bmod|infty)(?![A-Za-z])|\\frac\s*\{\s*d")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_MODULUS = re.compile(
    r"(.*\S)\s*(?:\\p?mod\s*\{?|\\bmod\s*|\(\s*(?:mod|\\bmod)\s*|\bmod(?:ulo)?\s+)\s*(\w+)\s*[})]*\s*"
)
_BASED = re.compile(r"\(?\s*([0-9A-Za-z]{1,400})\s*\)?\s*_\s*\{?\s*(\d{1,2})\s*\}?")
_INEQUALITY = re.compile(r"<|>|\\(?:le|ge|ne)(?![A-Za-z])")
_REMAINDER = re.compile(r"(\d+)\s*,?\s*(?:[Rr]|rem(?:ainder)?\.?(?: of)?)\s*(\d+)")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{4}")
_CHOOSE = re.compile(r"(?:\{\s*\})?\s*[\^_]?\s*\{?(\d{1,4})\}?\s*([CP])\s*_?\s*\{?(\d{1,4})\}?")
_HEXADECIMAL = re.compile(r"0x([0-9A-Fa-f]{1,400})")
_SCALED = re.compile(r"([^&]*?)\s*\*?\s*(\\begin ?\{matrix\}.*)", re.DOTALL)
_CLOCK = re.compile(r"(\d{1,2}(?::\d{2}){0,2})\s*([ap])\.?\s*m\.?", re.IGNORECASE)
_BUILDER = re.compile(rf"\\\{{\s*({NAME})\s*(?:\\in\s*\\mathbb\s*\{{?R\}}?\s*)?[|:]\s*(.*)\\\}}")
_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?")
_WITHOUT = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?\s*(?:\\setminus|\\|-)\s*\\\{(.*)\\\}")
_NESTED = re.compile(r"\(\s*(\([^()]*\))\s*\)")


@lru_cache(maxsize=1 << 16)
def read_form(answer: str) -> Form | None:
    """The form of an answer; None where nothing but wrapping is there."""
    if len(answer) > MAX_LENGTH:
        return _long(answer.strip())
    text = ungroup(clean(answer))
    for _ in range(len(text)):  # ((((1)))) is no deeper than (1)
        text, changed = _NESTED.subn(r"\1", text)
        if not changed:
            break
    if not text:
        return None
    if len(text) > 4 * MAX_LENGTH:
        return _long(text)
    if _depth(text) <= _SHALLOW:
        return _node(text, 0)
    # on a stack of its own, so that what can be read does not depend on how deep the caller stands
    found: list[Form] = []
    thread = threading.Thread(target=lambda: found.append(_node(text, 0)))
    thread.start()
    thread.join()
    return found[0]


def _long(text: str) -> Form | None:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
    return Form("text", f"long:{len(text)}:{digest}") if text else None


def _depth(text: str) -> int:
    depth = deepest = 0
    for c in text:
        depth += (c in OPEN) - (c in CLOSE)
        deepest = max(deepest, depth)
    return deepest


def _node(text: str, depth: int) -> Form:
    """The form of cleaned text, by its outermost structure."""
    text = text.strip()
    if depth > _MAX_NESTING:
        return as_text(text)
    for reader in (
        _words,
        _approximation,
        _collection,
        _assignment,
        _special,
        _matrix,
        lambda t, d: read_relation(t, lambda side: _node(side, d + 1)),
        _plus_minus,
        _brackets,
    ):
        form = reader(text, depth)
        if form is not None:
            return form
    return _value(text)


def _words(text: str, depth: int) -> Form | None:
    """Words, letters of options, words for numbers, and phrases with a meaning of their own."""
    choice = _CHOICE.fullmatch(text)
    if choice and len(re.findall(r"\([A-J]\)", text)) < 2 and not re.match(r"\([A-J]\)\s*[,;:=<>+*/^_\\-]", text):
        return number(algebra.atom((choice[1] or choice[2]).casefold()))
    found = _WORDS.fullmatch(text.rstrip("."))
    if found is None:
        return None
    plain = re.sub(r"\s+", " ", found[1]).casefold().strip()
    if plain in NUMBERS:
        return number(algebra.number(NUMBERS[plain]))
    if plain in PHRASES:
        return {"empty": EMPTY, "reals": LINE}.get(PHRASES[plain], Form("text", f"text:{PHRASES[plain]}"))
    if len(plain) == 1:  # the letter of an option, or a variable: case does not matter as long as it stands alone
        return number(algebra.atom(plain))
    if _PRODUCT.fullmatch(found[1]):
        return None
    return Form("text", f"text:{plain.replace(' ', '')}")


def _approximation(text: str, depth: int) -> Form | None:
    r"""a \approx b is the exact a, unless that is but a name."""
    parts = _APPROXIMATE.split(text)
    if len(parts) < 2 or not all(p.strip() for p in parts):
        return None
    exact = parts[1] if re.fullmatch(rf"\s*{NAME}\s*", parts[0]) else parts[0]
    return _node(exact, depth + 1)


def _assignment(text: str, depth: int) -> Form | None:
    """The value of "x = value", "f(x) = value", "(x, y) = (1, 2)" or "x in set".

    Not of an equation in x, y and z, such as y = 3 - 2x, nor where the name is in its own value.
    """
    point = _POINT.match(text)
    if point and text.endswith(")") and text[point.end() :].count("(") == 1 and "," in text:
        return _node(text[point.end() :].lstrip("= "), depth + 1)
    found = _NAMED.match(text)
    if found is None:
        mirrored = _MIRRORED.fullmatch(text)
        if mirrored is None or letters(mirrored[1]):
            return None
        return _node(mirrored[1], depth + 1)
    name, value = found[1].strip(), text[found.end() :]
    if not value or re.search(r"(?:<|>|\\le|\\ge|\\ne)(?![A-Za-z])", value):
        return None
    if name.startswith("("):
        return _point(name, value, depth)
    names = letters(name) if "(" not in name and "_" not in name else {name[0]}  # S_n is a name, n its argument
    free = letters(value)
    if names & free or (name in ("x", "y", "z") and free & {"x", "y", "z"}):
        return None
    return _node(value, depth + 1)


def _point(name: str, value: str, depth: int) -> Form | None:
    """(y, x) = (1, 2) with its names in order: (2, 1)."""
    names = [n.strip() for n in name.strip("() ").split(",")]
    values = _brackets(value.strip(), depth + 1)
    if values is None or len(values.parts) != len(names):
        return _node(value, depth + 1)
    pairs = list(zip(names, values.parts, strict=True))
    if "\\" not in name:  # (r, \theta) has an order of its own
        pairs.sort(key=lambda pair: pair[0])
    return ordered(value.strip()[0], (v for _, v in pairs), value.strip()[-1])


def _collection(text: str, depth: int) -> Form | None:
    """Unions, lists and ratios."""
    for joint in ("\\or", "\\cup"):
        parts = split(text, joint)
        if parts is not None and len(parts) > 1 and all(p.strip() for p in parts):
            return union(_by_letter(parts, depth))
    parts = split(text, "\\and")
    if parts is not None and len(parts) > 1:
        return common(_by_letter(parts, depth))
    for joint in ("\\vee", "\\wedge"):
        parts = split(text, joint)
        if parts is not None and len(parts) > 1 and all(p.strip() for p in parts):
            return unordered(f"{joint}:", (_node(p, depth + 1) for p in parts))
    parts = split(text, ",")
    if parts is not None and len(parts) > 1:
        return _list([p.strip() for p in parts if p.strip()], depth)
    parts = split(text, ":")
    if parts is not None and len(parts) > 1 and all(p.strip() for p in parts):
        return ordered("ratio:", (_node(p, depth + 1) for p in parts))
    return None


def _list(parts: list[str], depth: int) -> Form:
    labeled = [_LABELED.fullmatch(p) for p in parts]
    if len(parts) > 1 and len({m[1] for m in labeled if m is not None}) == len(parts):  # (a) 3, (b) 5
        return unordered(
            "set", (ordered(f"named:{m[1]}=", (_node(m[2], depth + 1),)) for m in labeled if m is not None)
        )
    if not units_differ(",".join(parts)):
        parts = [without_unit(p) for p in parts]
    if any("\\ldots" in p for p in parts):
        return ordered("sequence:", (_node(p, depth + 1) for p in parts))
    if len(parts) == 1:
        return _node(parts[0], depth + 1)
    found = [_NAMED.match(p) for p in parts]
    names = [m[1].strip() for m in found if m is not None]
    if len(names) == len(parts) == len(set(names)):  # x = 1, y = 2: the point (1, 2)
        values = {m[1].strip(): p[m.end() :] for m, p in zip(found, parts, strict=True) if m is not None}
        if not any(RELATION.search(v) for v in values.values()) and not set(names) & letters("".join(values.values())):
            return ordered("(", (_node(values[n], depth + 1) for n in sorted(values)), ")")
    forms = _by_letter(parts, depth)
    if len(set(names)) > 1:
        labels = [m[1].strip() if m is not None else "" for m in found]
        forms = [ordered(f"named:{name}=", (f,)) for name, f in zip(labels, forms, strict=True)]
    if any(_INEQUALITY.search(p) for p in parts):  # x > 1, x < 3: both hold
        return common(forms)
    if len(set(names)) <= 1:
        forms = [f for part, form in zip(parts, forms, strict=True) for f in _members(part, form)]
    return unordered("set", forms)


def _by_letter(parts: list[str], depth: int) -> list[Form]:
    """The forms of statements; with the letter that each is about, where they are about several: x > 1, y < 2."""
    forms = [_node(p, depth + 1) for p in parts]
    about = [frozenset(letters(p)) if _INEQUALITY.search(p) else frozenset[str]() for p in parts]
    if len({a for a in about if a}) < 2:
        return forms
    return [ordered(f"on {'*'.join(sorted(a))}:", (f,)) if a else f for a, f in zip(about, forms, strict=True)]


def _members(text: str, form: Form) -> tuple[Form, ...]:
    """Both values of a plus-minus, and anything else on its own."""
    return form.parts if form.kind == "set" and _PLUS_MINUS.search(text) and "{" not in text[:2] else (form,)


def _special(text: str, depth: int) -> Form | None:
    """Named sets, clock times, residues, numbers in another base and set-builder notation."""
    if re.fullmatch(r"\\emptyset|\\\{\s*\\\}", text):
        return EMPTY
    if _REALS.fullmatch(text):
        return LINE
    found = _WITHOUT.fullmatch(text)
    if found:
        holes = split(found[1], ",")
        return without([_node(h, depth + 1) for h in holes]) if holes else None
    found = _CLOCK.fullmatch(text)
    if found:
        return Form("text", f"clock:{found[1].lstrip('0')}{found[2].lower()}m")
    found = _REMAINDER.fullmatch(text)
    if found:
        return ordered("remainder:", (_node(found[1], depth + 1), _node(found[2], depth + 1)))
    if _DATE.fullmatch(text):
        return as_text(text)
    found = _CHOOSE.fullmatch(text)
    if found:
        return _chosen(int(found[1]), found[2], int(found[3]))
    found = _HEXADECIMAL.fullmatch(text) or re.fullmatch(r"\(?([A-F]{2,40}|[a-f]{2,40})\)?\s*_\s*\{?\s*16\s*\}?", text)
    if found:
        return number(algebra.number(int(found[1], 16)))
    found = _BASED.fullmatch(text)
    if (
        found
        and 2 <= int(found[2]) <= 36
        and re.search(r"[0-9]", found[1])
        and not re.fullmatch(r"[A-Za-z].?", found[1])
    ):
        try:
            return number(algebra.number(int(found[1], int(found[2]))))
        except (ValueError, algebra.TooLarge):
            return as_text(text)
    found = _BUILDER.fullmatch(text)
    if found:
        inside = _node(found[2], depth + 1)
        return inside if inside.kind in ("()", "[)", "(]", "[]", "union") else ordered("where:", (inside,))
    found = _MODULUS.fullmatch(text)
    if found:
        value = re.sub(r"^.*\\equiv(?![A-Za-z])", "", found[1])
        return ordered("mod:", (_node(value, depth + 1), _node(found[2], depth + 1)))
    return None


def _chosen(n: int, which: str, k: int) -> Form:
    """5C2 and 5P2: the numbers of choices and of arrangements."""
    try:
        chosen = algebra.binomial(algebra.number(n), algebra.number(k))
        return number(chosen if which == "C" else algebra.multiply(chosen, algebra.factorial(algebra.number(k))))
    except algebra.TooLarge:
        return as_text(f"{n}{which}{k}")


def _matrix(text: str, depth: int) -> Form | None:
    """A matrix by its cells, a number before it multiplied into them."""
    factor, scaled = None, _SCALED.fullmatch(text)
    if scaled and scaled[1] and scaled[1].count("(") == scaled[1].count(")"):
        try:
            factor = read_expression("-1" if scaled[1] == "-" else scaled[1])
        except (Unreadable, ArithmeticError):
            return None
        text = scaled[2]
    found = _MATRIX.fullmatch(text)
    if found is None or "\\begin" in found[1]:
        return None
    if factor is not None:
        return _times(factor, _matrix(text, depth))
    rows = [row.split("&") for row in re.split(r"\\\\(?:\s*\[[^\]]*\])?", found[1]) if row.strip()]
    shape = ",".join(str(len(row)) for row in rows)
    return ordered(f"matrix:{shape}:", (_node(cell, depth + 1) for row in rows for cell in row))


def _times(factor: algebra.Poly, matrix: Form | None) -> Form | None:
    """None where a cell is no value."""
    polys = [cell.poly for cell in matrix.parts] if matrix else [None]
    known = [p for p in polys if p is not None]
    if matrix is None or len(known) != len(polys):
        return None
    try:
        return ordered(matrix.kind, (number(algebra.multiply(factor, p)) for p in known))
    except algebra.TooLarge:
        return None


def _plus_minus(text: str, depth: int) -> Form | None:
    """Both values; each sign on its own, unless a minus-plus ties them together."""
    signs = _PLUS_MINUS.findall(text)
    if not 1 <= len(signs) <= 4:
        return None
    parts = _PLUS_MINUS.split(text)
    tied = "\\mp" in signs
    choices = [0, (1 << len(signs)) - 1] if tied else range(1 << len(signs))
    forms = []
    for choice in choices:
        whole = parts[0]
        for i, (sign, part) in enumerate(zip(signs, parts[1:], strict=True)):
            minus = bool(choice >> i & 1) != (tied and sign == "\\mp")
            whole += ("-" if minus else "+") + part
        forms.append(_node(whole, depth + 1))
    return unordered("set", forms)


def _brackets(text: str, depth: int) -> Form | None:
    """Sets, tuples and intervals, which are tuples that may mix their brackets; ]a, b[ is (a, b)."""
    if text.startswith("\\{") and text.endswith("\\}"):
        parts = split(text[2:-2], ",")
        if parts is None:
            return None
        return unordered("set", (f for p in parts for f in _members(p.strip(), _node(p, depth + 1))))
    if len(text) < 3 or text[0] not in "([]" or text[-1] not in ")][":
        return None
    parts = split(text[1:-1], ",")
    if parts is None or len(parts) < 2 or not all(p.strip() for p in parts):
        return None
    opener, closer = text[0].replace("]", "("), text[-1].replace("[", ")")
    return ordered(opener, (_node(p, depth + 1) for p in parts), closer)


def _value(text: str) -> Form:
    if _PROSE.search(text):
        return as_text(text)
    try:
        value = read_expression(text)
        if "\\infty" in text and value not in (INFINITY, algebra.negate(INFINITY)):
            return as_text(text)  # infinity less infinity is not 0
        return number(value)
    except ZeroDivisionError:
        return as_text(text)
    except algebra.TooLarge as error:
        if split(text, ",") is None:
            return as_text(text)
        return Form("value", f"{'deep' if isinstance(error, TooDeep) else 'latex'}:{text}", (), True)
    except Unreadable:
        if _OPERATOR.search(text):
            return Form("value", f"latex:{text}", (), True)
        return as_text(text)
