"""Equations and inequalities: by the difference of their sides, as intervals where they are linear."""

import re
from collections.abc import Callable
from fractions import Fraction

from megarl.answers import algebra
from megarl.answers.algebra import Poly
from megarl.answers.expression import Unreadable, read_expression
from megarl.answers.shapes import CLOSE, INFINITY, NAME, OPEN, Form, common, number, ordered, union, unordered, without

RELATION = re.compile(r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|<|>|=)")
_MIRROR = {">": "<", "\\ge": "\\le", "<": "<", "\\le": "\\le"}

Read = Callable[[str], Form]  # the form of a side


def read_relation(text: str, read: Read) -> Form | None:
    """Equations by the difference of their sides, chains of equal values, inequalities as intervals where linear."""
    parts = _relation_parts(text)
    sides, signs = [p.strip() for p in parts[::2]], parts[1::2]
    if not signs or not all(sides):
        return None
    if all(s == "=" for s in signs):
        return _equation(sides, read)
    if all(s in ("<", "\\le") for s in signs) or all(s in (">", "\\ge") for s in signs):
        if signs[0] in (">", "\\ge"):
            sides, signs = sides[::-1], signs[::-1]
        return _inequality(sides, [_MIRROR[s] for s in signs], read)
    if signs == ["\\ne"]:
        return _unequal(sides, read)
    return ordered(f"chain{' '.join(signs)}:", (read(s) for s in sides))


def _relation_parts(text: str) -> list[str]:
    """Sides and signs in turn; signs within brackets do not count."""
    pieces = RELATION.split(text)
    parts = [pieces[0]]
    for sign, side in zip(pieces[1::2], pieces[2::2], strict=True):
        if sum((c in OPEN) - (c in CLOSE) for c in parts[-1]) == 0:
            parts += [sign, side]
        else:
            parts[-1] += sign + side
    return parts


def _poly(text: str) -> Poly | None:
    try:
        return read_expression(text.replace("\u00b0", ""))
    except (Unreadable, ArithmeticError):
        return None


def _equation(sides: list[str], read: Read) -> Form:
    """x = 2 + 3 = 5 is 5; other equations are left minus right = 0 up to a constant factor."""
    if re.fullmatch(NAME + r"(?:\s*\(\s*" + NAME + r"\s*\))?", sides[0]) and len(sides) > 2:
        sides = sides[1:]
    forms = [read(s) for s in sides]
    if len({f.key for f in forms}) == 1 and forms[0].poly is not None and not algebra.variables(forms[0].poly):
        return forms[-1]
    polys = [_poly(s) for s in sides]
    if len(sides) == 2 and polys[0] is not None and polys[1] is not None:
        try:
            difference = algebra.add(polys[0], algebra.negate(polys[1]))
            if algebra.holds_letters(difference):
                return _zero("equation", difference)
        except algebra.TooLarge:
            pass
    return unordered("equal:", forms)


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
    return Form(kind, f"{kind}:{algebra.spell(difference)}", (number(difference),), not algebra.is_closed(difference))


def _unequal(sides: list[str], read: Read) -> Form:
    polys = [_poly(s) for s in sides]
    if polys[0] is None or polys[1] is None:
        return unordered("unequal:", (read(s) for s in sides))
    form = _zero("unequal", algebra.add(polys[0], algebra.negate(polys[1])))
    solved = _bound(form.parts[0].poly or {})
    return (without([number(solved[0])]) if solved else None) or form


def _inequality(sides: list[str], signs: list[str], read: Read) -> Form:
    """a < x <= b is an interval, as is 2x < 6; others are kept with their sides' difference."""
    polys = [_poly(s) for s in sides]
    brackets = {"<": "()", "\\le": "[]"}
    known = [p for p in polys if p is not None]
    if (
        len(known) == 3
        and re.fullmatch(NAME, sides[1])
        and not algebra.variables(known[0]) | algebra.variables(known[2])
    ):
        low, high = brackets[signs[0]][0], brackets[signs[1]][1]
        return ordered(low, (number(known[0]), number(known[2])), high)
    within = _within(sides, signs, read) if len(sides) == 2 else None
    if within is not None:
        return within
    if len(known) != 2 or len(sides) != 2:
        return ordered(f"chain{' '.join(signs)}:", (read(s) for s in sides))
    difference = algebra.add(known[1], algebra.negate(known[0]))  # 0 < difference
    solved = _bound(difference)
    if solved:
        bound, positive = solved
        if positive:
            return ordered(brackets[signs[0]][0], (number(bound), number(INFINITY)), ")")
        return ordered("(", (number(algebra.negate(INFINITY)), number(bound)), brackets[signs[0]][1])
    if not difference:
        return Form("text", f"text:0{signs[0]}0")
    lead = abs(difference[min(difference)])
    scaled = number({m: c / lead for m, c in difference.items()})
    return Form(f"0{signs[0]}", f"0{signs[0]}{scaled.key}", (scaled,), scaled.open)


def _within(sides: list[str], signs: list[str], read: Read) -> Form | None:
    """|x - 1| < 3 as an interval, 3 < |x - 1| as the two beside it."""
    for i, side in enumerate(sides):
        found = re.fullmatch(r"\|([^|]+)\|", side)
        c = _poly(sides[1 - i])
        if found is None or c is None or not (algebra.constant(c) or 0) > 0:
            continue
        inside, edge = found[1], sides[1 - i]
        first, second = [inside, edge], [f"-({edge})", inside]
        if i == 1:
            first, second = first[::-1], second[::-1]
        halves = [_inequality(half, signs, read) for half in (first, second)]
        return common(halves) if i == 0 else union(halves)
    return None


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
