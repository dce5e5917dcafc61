"""Text of an answer -> its form: a tree of sets, tuples, relations and matrices over exact values and words.

Two forms with one key mean the same. Two closed forms with different keys mean different things. Where a form is open
(it holds sin, a cube root, an integral ...) different keys may still be one value: ``compare`` decides.
"""

import hashlib
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from megarl.answers import algebra
from megarl.answers.algebra import Poly
from megarl.answers.clean import clean, ungroup, without_unit
from megarl.answers.expression import TooDeep, Unreadable, read_expression
from megarl.answers.words import NUMBERS, PHRASES

MAX_LENGTH = 2000  # characters beyond which an answer is compared as text
_MAX_NESTING = 12
_SHALLOW = 8  # brackets deep that any caller's stack has room for
_OPEN, _CLOSE = "([{", ")]}"
_WORDS = re.compile(r"\(?\s*([A-Za-z]|[A-Za-z]{2,}(?: [A-Za-z]+|[-'][A-Za-z]{2,}|[-'][A-Za-z]\b)*)\s*\)?")
_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{2,3}|ab|ac|abc|[xyz]{2,3}|ax|ay|bx|by")  # letters that are no word
_CHOICE = re.compile(r"\(([A-J])\)\s*\S.*")
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{4,}")  # a product of letters, read so, would forget their order
_MATRIX = re.compile(r"[(\[]?\s*\\begin ?\{matrix\}(.*)\\end ?\{matrix\}\s*[)\]]?", re.DOTALL)
_RELATION = re.compile(r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|<|>|=)")
_MIRROR = {">": "<", "\\ge": "\\le", "<": "<", "\\le": "\\le"}
_NAME = r"(?:[A-Za-z](?:_(?:\w|\{\w+\}))?'?|\\(?:alpha|beta|gamma|theta|phi|lambda|mu|omega|sigma|rho|Delta|ell))"
_NAMED = re.compile(
    rf"\s*({_NAME}(?:\s*\(\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\))?|\(\s*{_NAME}(?:\s*,\s*{_NAME})+\s*\)|[A-Za-z][A-Za-z ]{{2,40}})"
    r"\s*(?:=|\\in(?![A-Za-z]))\s*(?=\S)"
)
_MIRRORED = re.compile(rf"([^=<>]*\S)\s*=\s*({_NAME})\s*")
_POINT = re.compile(r"\s*[A-Z]\s*(?==?\s*\()")
_APPROXIMATE = re.compile(r"\\(?:approx|simeq|thickapprox)(?![A-Za-z])")
_OPERATOR = re.compile(r"\\(?:i{0,3}nt|oint|sum|prod|lim|max|min|gcd|lcm|det|bmod|infty)(?![A-Za-z])|\\frac\s*\{\s*d")
_MODULUS = re.compile(r"(.*\S)\s*(?:\\p?mod\s*\{?|\\bmod\s*|\(\s*(?:mod|\\bmod)\s*|\bmod(?:ulo)?\s+)\s*(\w+)\s*[})]*\s*")
_BASED = re.compile(r"\(?\s*([0-9A-Za-z]*[0-9][0-9A-Za-z]*)\s*\)?\s*_\s*\{?\s*(\d{1,2})\s*\}?")
_CLOCK = re.compile(r"(\d{1,2}(?::\d{2}){0,2})\s*([ap])\.?\s*m\.?", re.IGNORECASE)
_BUILDER = re.compile(rf"\\\{{\s*({_NAME})\s*(?:\\in\s*\\mathbb\s*\{{?R\}}?\s*)?[|:]\s*(.*)\\\}}")
_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?")
_WITHOUT = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?\s*(?:\\setminus|\\|-)\s*\\\{(.*)\\\}")
_NESTED = re.compile(r"\(\s*(\([^()]*\))\s*\)")

Reader = Callable[[str, int], "Form | None"]


@dataclass(frozen=True, slots=True)
class Form:
    """A canonical answer. ``kind`` is "value", "text", "set", "union", "sequence", a relation, or a bracket pair."""

    kind: str
    key: str
    parts: tuple["Form", ...] = ()
    open: bool = False
    poly: Poly | None = field(default=None, compare=False, hash=False)


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
        depth += (c in _OPEN) - (c in _CLOSE)
        deepest = max(deepest, depth)
    return deepest


def _node(text: str, depth: int) -> Form:
    """The form of cleaned text, by its outermost structure."""
    text = text.strip()
    if depth > _MAX_NESTING:
        return _text(text)
    for reader in (_words, _approximation, _collection, _assignment, _special, _matrix, _relation, _plus_minus, _brackets):
        form = reader(text, depth)
        if form is not None:
            return form
    return _value(text)


def _text(text: str) -> Form:
    plain = re.sub(r"\s+", " ", text.replace("\u00b0", "").replace("$", "")).strip()
    if not re.search(r"[\\^_=<>+*/]", plain):
        plain = plain.casefold().strip("\"'.!?,:; ")
    return Form("text", f"text:{plain.replace(' ', '')}")


def _ordered(kind: str, parts: Iterable[Form], close: str = "") -> Form:
    parts = tuple(parts)
    return Form(kind + close, f"{kind}{'|'.join(p.key for p in parts)}{close}", parts, any(p.open for p in parts))


def _unordered(kind: str, parts: Iterable[Form]) -> Form:
    kept = sorted({p.key: p for p in parts}.values(), key=lambda p: p.key)
    if kind == "set" and len(kept) == 1:  # a list of one is what stands in it
        return kept[0]
    return Form(kind, f"{kind}{{{'|'.join(p.key for p in kept)}}}", tuple(kept), any(p.open for p in kept))


def _number(poly: Poly) -> Form:
    return Form("value", f"value:{algebra.spell(poly)}", (), not algebra.is_closed(poly), poly)


_INFINITY = algebra.atom("\\infty")
_LINE = _ordered("(", (_number(algebra.negate(_INFINITY)), _number(_INFINITY)), ")")
EMPTY = _unordered("set", ())


def _words(text: str, depth: int) -> Form | None:
    """Words, letters of options, words for numbers, and phrases with a meaning of their own."""
    choice = _CHOICE.fullmatch(text)
    if choice and not re.match(r"\([A-J]\)\s*[,;:=<>+*/^_\\-]", text):
        return _number(algebra.atom(choice[1].casefold()))
    found = _WORDS.fullmatch(text.rstrip("."))
    if found is None:
        return None
    plain = re.sub(r"\s+", " ", found[1]).casefold().strip()
    if plain in NUMBERS:
        return _number(algebra.number(NUMBERS[plain]))
    if plain in PHRASES:
        return {"empty": EMPTY, "reals": _LINE}.get(PHRASES[plain], Form("text", f"text:{PHRASES[plain]}"))
    if len(plain) == 1:  # the letter of an option, or a variable: case does not matter as long as it stands alone
        return _number(algebra.atom(plain))
    if _PRODUCT.fullmatch(found[1]):
        return None
    return Form("text", f"text:{plain.replace(' ', '')}")


def _approximation(text: str, depth: int) -> Form | None:
    r"""a \approx b is the exact a, unless that is but a name."""
    parts = _APPROXIMATE.split(text)
    if len(parts) < 2 or not all(p.strip() for p in parts):
        return None
    exact = parts[1] if re.fullmatch(rf"\s*{_NAME}\s*", parts[0]) else parts[0]
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
        if mirrored is None or _letters(mirrored[1]):
            return None
        return _node(mirrored[1], depth + 1)
    name, value = found[1].strip(), text[found.end() :]
    if not value or re.search(r"(?:<|>|\\le|\\ge|\\ne)(?![A-Za-z])", value):
        return None
    if name.startswith("("):
        return _point(name, value, depth)
    names = _letters(name) if "(" not in name and "_" not in name else {name[0]}  # S_n is a name, n its argument
    free = _letters(value)
    if names & free or (name in ("x", "y", "z") and free & {"x", "y", "z"}):
        return None
    return _node(value, depth + 1)


def _letters(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text)))


def _point(name: str, value: str, depth: int) -> Form | None:
    """(y, x) = (1, 2) with its names in order: (2, 1)."""
    names = [n.strip() for n in name.strip("() ").split(",")]
    values = _brackets(value.strip(), depth + 1)
    if values is None or len(values.parts) != len(names):
        return _node(value, depth + 1)
    pairs = sorted(zip(names, values.parts, strict=True), key=lambda pair: pair[0])
    return _ordered(value.strip()[0], (v for _, v in pairs), value.strip()[-1])


def _collection(text: str, depth: int) -> Form | None:
    """Unions, lists and ratios."""
    parts = split(text, "\\cup")
    if parts is not None and len(parts) > 1 and all(p.strip() for p in parts):
        return _union([_node(p, depth + 1) for p in parts])
    parts = split(text, ",")
    if parts is not None and len(parts) > 1:
        return _list([p.strip() for p in parts if p.strip()], depth)
    parts = split(text, ":")
    if parts is not None and len(parts) > 1 and all(p.strip() for p in parts):
        return _ordered("ratio:", (_node(p, depth + 1) for p in parts))
    return None


def _list(parts: list[str], depth: int) -> Form:
    parts = [without_unit(p) for p in parts]
    if any("\\ldots" in p for p in parts):
        return _ordered("sequence:", (_node(p, depth + 1) for p in parts))
    if len(parts) == 1:
        return _node(parts[0], depth + 1)
    found = [_NAMED.match(p) for p in parts]
    names = [m[1].strip() for m in found if m is not None]
    if len(names) == len(parts) == len(set(names)):  # x = 1, y = 2: the point (1, 2)
        values = {m[1].strip(): p[m.end() :] for m, p in zip(found, parts, strict=True) if m is not None}
        if not any(_RELATION.search(v) for v in values.values()) and not set(names) & _letters("".join(values.values())):
            return _ordered("(", (_node(values[n], depth + 1) for n in sorted(values)), ")")
    forms = [_node(p, depth + 1) for p in parts]
    if len(set(names)) > 1:
        labels = [m[1].strip() if m is not None else "" for m in found]
        forms = [_ordered(f"named:{name}=", (f,)) for name, f in zip(labels, forms, strict=True)]
    if forms and all(f.kind[0] in "([" or f.kind == "union" for f in forms) and any(_RELATION.search(p) for p in parts):
        return _union(forms)
    return _unordered("set", forms)


def _union(parts: list[Form]) -> Form:
    """A union of sets; sets of points are put together, intervals that are equal once."""
    flat = [q for p in parts for q in (p.parts if p.kind == "union" else (p,)) if q != EMPTY]
    points = [q for p in flat if p.kind == "set" for q in p.parts]
    rest = [p for p in flat if p.kind != "set"]
    if points:
        rest.append(_unordered("set", points))
    if len(rest) == 1:
        return rest[0]
    return _unordered("union", rest) if rest else EMPTY


def _special(text: str, depth: int) -> Form | None:
    """Named sets, clock times, residues, numbers in another base and set-builder notation."""
    if re.fullmatch(r"\\emptyset|\\\{\s*\\\}", text):
        return EMPTY
    if _REALS.fullmatch(text):
        return _LINE
    found = _WITHOUT.fullmatch(text)
    if found:
        holes = split(found[1], ",")
        return _without([_node(h, depth + 1) for h in holes]) if holes else None
    found = _CLOCK.fullmatch(text)
    if found:
        return Form("text", f"clock:{found[1].lstrip('0')}{found[2].lower()}m")
    found = _BASED.fullmatch(text)
    if found and 2 <= int(found[2]) <= 36 and not re.fullmatch(r"[A-Za-z].?", found[1]):
        try:
            return _number(algebra.number(int(found[1], int(found[2]))))
        except (ValueError, algebra.TooLarge):
            return _text(text)
    found = _BUILDER.fullmatch(text)
    if found:
        inside = _node(found[2], depth + 1)
        return inside if inside.kind in ("()", "[)", "(]", "[]", "union") else _ordered("where:", (inside,))
    found = _MODULUS.fullmatch(text)
    if found:
        value = re.sub(r"^.*\\equiv(?![A-Za-z])", "", found[1])
        return _ordered("mod:", (_node(value, depth + 1), _node(found[2], depth + 1)))
    return None


def _without(holes: list[Form]) -> Form | None:
    """The real line without some rational points."""
    values = [algebra.constant(h.poly) for h in holes if h.poly is not None]
    if len(values) != len(holes) or any(v is None for v in values):
        return None
    ends = [algebra.negate(_INFINITY), *(algebra.number(v) for v in sorted({v for v in values if v is not None})), _INFINITY]
    return _union([_ordered("(", (_number(a), _number(b)), ")") for a, b in zip(ends, ends[1:], strict=False)])


def _matrix(text: str, depth: int) -> Form | None:
    found = _MATRIX.fullmatch(text)
    if found is None or "\\begin" in found[1]:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\(?:\s*\[[^\]]*\])?", found[1]) if row.strip()]
    shape = ",".join(str(len(row)) for row in rows)
    return _ordered(f"matrix:{shape}:", (_node(cell, depth + 1) for row in rows for cell in row))


def _relation(text: str, depth: int) -> Form | None:
    """Equations by the difference of their sides, chains of equal values, inequalities as intervals where linear."""
    parts = _relation_parts(text)
    sides, signs = [p.strip() for p in parts[::2]], parts[1::2]
    if not signs or not all(sides):
        return None
    if all(s == "=" for s in signs):
        return _equation(sides, depth)
    if all(s in ("<", "\\le") for s in signs) or all(s in (">", "\\ge") for s in signs):
        if signs[0] in (">", "\\ge"):
            sides, signs = sides[::-1], signs[::-1]
        return _inequality(sides, [_MIRROR[s] for s in signs], depth)
    if signs == ["\\ne"]:
        return _unequal(sides, depth)
    return _ordered(f"chain{' '.join(signs)}:", (_node(s, depth + 1) for s in sides))


def _relation_parts(text: str) -> list[str]:
    """Sides and signs in turn; signs within brackets do not count."""
    pieces = _RELATION.split(text)
    parts = [pieces[0]]
    for sign, side in zip(pieces[1::2], pieces[2::2], strict=True):
        if sum((c in _OPEN) - (c in _CLOSE) for c in parts[-1]) == 0:
            parts += [sign, side]
        else:
            parts[-1] += sign + side
    return parts


def _poly(text: str) -> Poly | None:
    try:
        return read_expression(text.replace("\u00b0", ""))
    except (Unreadable, ArithmeticError):
        return None


def _equation(sides: list[str], depth: int) -> Form:
    """x = 2 + 3 = 5 is 5; other equations are left minus right = 0 up to a constant factor."""
    if re.fullmatch(_NAME + r"(?:\s*\(\s*" + _NAME + r"\s*\))?", sides[0]) and len(sides) > 2:
        sides = sides[1:]
    forms = [_node(s, depth + 1) for s in sides]
    if len({f.key for f in forms}) == 1 and forms[0].poly is not None and not algebra.variables(forms[0].poly):
        return forms[-1]
    polys = [_poly(s) for s in sides]
    if len(sides) == 2 and polys[0] is not None and polys[1] is not None:
        try:
            return _zero("equation", algebra.add(polys[0], algebra.negate(polys[1])))
        except algebra.TooLarge:
            pass
    return _unordered("equal:", forms)


def _zero(kind: str, difference: Poly) -> Form:
    """difference = 0 (or not), free of denominators and up to a constant factor."""
    exponents: dict[str, int] = {}
    for monomial in difference:
        for name, k in monomial:
            if name not in algebra.CONSTANTS:
                exponents[name] = min(exponents.get(name, 0), k)
    for name, k in exponents.items():
        if k < 0:
            difference = algebra.multiply(difference, {((name, -k),): Fraction(1)})
    if difference:
        lead = difference[min(difference)]
        difference = {m: c / lead for m, c in difference.items()}
    return Form(kind, f"{kind}:{algebra.spell(difference)}", (_number(difference),), not algebra.is_closed(difference))


def _unequal(sides: list[str], depth: int) -> Form:
    polys = [_poly(s) for s in sides]
    if polys[0] is None or polys[1] is None:
        return _unordered("unequal:", (_node(s, depth + 1) for s in sides))
    form = _zero("unequal", algebra.add(polys[0], algebra.negate(polys[1])))
    solved = _bound(form.parts[0].poly or {})
    return (_without([_number(solved[0])]) if solved else None) or form


def _inequality(sides: list[str], signs: list[str], depth: int) -> Form:
    """a < x <= b is an interval, as is 2x < 6; others are kept with their sides' difference."""
    polys = [_poly(s) for s in sides]
    brackets = {"<": "()", "\\le": "[]"}
    known = [p for p in polys if p is not None]
    if len(known) == 3 and re.fullmatch(_NAME, sides[1]) and not algebra.variables(known[0]) | algebra.variables(known[2]):
        low, high = brackets[signs[0]][0], brackets[signs[1]][1]
        return _ordered(low, (_number(known[0]), _number(known[2])), high)
    if len(known) != 2 or len(sides) != 2:
        return _ordered(f"chain{' '.join(signs)}:", (_node(s, depth + 1) for s in sides))
    difference = algebra.add(known[1], algebra.negate(known[0]))  # 0 < difference
    solved = _bound(difference)
    if solved:
        bound, positive = solved
        if positive:
            return _ordered(brackets[signs[0]][0], (_number(bound), _number(_INFINITY)), ")")
        return _ordered("(", (_number(algebra.negate(_INFINITY)), _number(bound)), brackets[signs[0]][1])
    if not difference:
        return Form("text", f"text:0{signs[0]}0")
    lead = abs(difference[min(difference)])
    scaled = _number({m: c / lead for m, c in difference.items()})
    return Form(f"0{signs[0]}", f"0{signs[0]}{scaled.key}", (scaled,), scaled.open)


def _bound(difference: Poly) -> tuple[Poly, bool] | None:
    """(b, positive) where difference = c (x - b), c > 0 or not, for one variable x and a rational c."""
    names = algebra.variables(difference)
    if len(names) != 1 or not algebra.is_closed(difference):
        return None
    [name] = names
    c = difference.get(((name, 1),))
    rest = {m: v for m, v in difference.items() if m != ((name, 1),)}
    if c is None or algebra.variables(rest):
        return None
    return {m: -v / c for m, v in rest.items()}, c > 0


def _plus_minus(text: str, depth: int) -> Form | None:
    """Both values; each sign on its own, unless a minus-plus ties them together."""
    signs = re.findall(r"\\(?:pm|mp)(?![A-Za-z])", text)
    if not 1 <= len(signs) <= 4:
        return None
    parts = re.split(r"\\(?:pm|mp)(?![A-Za-z])", text)
    tied = "\\mp" in signs
    choices = [0, (1 << len(signs)) - 1] if tied else range(1 << len(signs))
    forms = []
    for choice in choices:
        whole = parts[0]
        for i, (sign, part) in enumerate(zip(signs, parts[1:], strict=True)):
            minus = bool(choice >> i & 1) != (tied and sign == "\\mp")
            whole += ("-" if minus else "+") + part
        forms.append(_node(whole, depth + 1))
    return _unordered("set", forms)


def _brackets(text: str, depth: int) -> Form | None:
    """Sets, tuples and intervals, which are tuples that may mix their brackets; ]a, b[ is (a, b)."""
    if text.startswith("\\{") and text.endswith("\\}"):
        parts = split(text[2:-2], ",")
        return None if parts is None else _unordered("set", (_node(p, depth + 1) for p in parts))
    if len(text) < 3 or text[0] not in "([]" or text[-1] not in ")][":
        return None
    parts = split(text[1:-1], ",")
    if parts is None or len(parts) < 2 or not all(p.strip() for p in parts):
        return None
    opener, closer = text[0].replace("]", "("), text[-1].replace("[", ")")
    return _ordered(opener, (_node(p, depth + 1) for p in parts), closer)


def _value(text: str) -> Form:
    if _PROSE.search(text):
        return _text(text)
    try:
        return _number(read_expression(text))
    except ZeroDivisionError:
        return _text(text)
    except algebra.TooLarge as error:
        if split(text, ",") is None:
            return _text(text)
        return Form("value", f"{'deep' if isinstance(error, TooDeep) else 'latex'}:{text}", (), True)
    except Unreadable:
        if _OPERATOR.search(text):
            return Form("value", f"latex:{text}", (), True)
        return _text(text)


def split(text: str, separator: str) -> list[str] | None:
    """The text cut at separators outside of all brackets; None where brackets do not close. Half-open intervals
    make any opener match any closer."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            i += len(separator)
            start = i
            continue
        if text[i] == "\\" and text[i + 1 : i + 2] not in ("{", "}"):
            i += 2
            continue
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        if depth < 0:
            return None
        i += 1
    return [*parts, text[start:]] if depth == 0 else None
