"""Exact sums of products: the arithmetic behind canonical answers. Standard library only, bounded in size.

A ``Poly`` maps monomials to rational coefficients; a monomial is a sorted tuple of (atom, integer exponent) and an
atom is a string: a variable, a constant such as pi, or the spelling of something that is not expanded ("root(...)").
Integers are spelt in hexadecimal: Python refuses to print long ones in decimal.
"""

import math
from fractions import Fraction

Monomial = tuple[tuple[str, int], ...]
Poly = dict[Monomial, Fraction]

MAX_BITS = 1 << 14  # of an integer that is written out
MAX_TERMS = 64
MAX_EXPANSION = 12  # exponent up to which a sum is multiplied out
MAX_FACTORIAL = 500
_PRIMES = [p for p in range(2, 1000) if all(p % q for q in range(2, math.isqrt(p) + 1))]
_ROOT = "root:"


class TooLarge(ArithmeticError):
    """The expression would outgrow the bounds."""


def number(value: Fraction | int) -> Poly:
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLarge("integer")
    return {(): value} if value else {}


def atom(name: str) -> Poly:
    return {((name, 1),): Fraction(1)}


def constant(poly: Poly) -> Fraction | None:
    """The value of a poly without atoms, else None."""
    if not poly:
        return Fraction(0)
    return poly[()] if len(poly) == 1 and () in poly else None


def add(a: Poly, b: Poly) -> Poly:
    out = dict(a)
    for monomial, coefficient in b.items():
        out[monomial] = out.get(monomial, Fraction(0)) + coefficient
    return _bounded({m: c for m, c in out.items() if c})


def negate(a: Poly) -> Poly:
    return {m: -c for m, c in a.items()}


def multiply(a: Poly, b: Poly) -> Poly:
    if len(a) * len(b) > MAX_TERMS * 8:
        raise TooLarge("product")
    out: Poly = {}
    for m, c in a.items():
        for n, d in b.items():
            factor, monomial = _times(m, n)
            out[monomial] = out.get(monomial, Fraction(0)) + c * d * factor
    return _bounded({m: c for m, c in out.items() if c})


def divide(a: Poly, b: Poly) -> Poly:
    """a / b; a sum in the denominator stays one atom, with its leading coefficient taken out."""
    if not b:
        raise ZeroDivisionError("division by zero")
    return multiply(a, _inverse(b))


def power(base: Poly, exponent: Poly) -> Poly:
    e = constant(exponent)
    if e is None:
        return atom(f"pow({spell(base)},{spell(exponent)})")
    if e.denominator == 2:
        return multiply(root(base), power(base, number(e - Fraction(1, 2))))
    if e.denominator != 1:
        return atom(f"pow({spell(base)},{spell(exponent)})")
    n = int(e)
    if n < 0:
        return power(divide(number(1), base), number(-n))
    if len(base) <= 1:
        [(monomial, coefficient)] = base.items() or [((), Fraction(0))]
        size = max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length())
        if size > 1 and size * n > 2 * MAX_BITS:  # too long to write out: towers stay as they are spelt
            return atom(f"pow({spell(base)},{spell(exponent)})")
        out = number(coefficient**n)
        for name, k in monomial:
            out = multiply(out, _atom_power(name, k * n))
        return out
    if n > MAX_EXPANSION:
        return atom(f"pow({spell(base)},{spell(exponent)})")
    out = number(1)
    for _ in range(n):
        out = multiply(out, base)
    return out


def root(a: Poly, degree: int = 2) -> Poly:
    """The degree-th root; square roots of rationals as (rational) * root of a squarefree integer."""
    value = constant(a)
    if degree == 2 and value is not None and value >= 0:
        inside = value.numerator * value.denominator
        outside, rest = _square_part(inside)
        out = number(Fraction(outside, value.denominator))
        return out if rest == 1 else multiply(out, atom(f"{_ROOT}{rest:x}"))
    if value is not None and value >= 0:
        p, q = _exact_root(value.numerator, degree), _exact_root(value.denominator, degree)
        if p is not None and q is not None:
            return number(Fraction(p, q))
    return atom(f"root{degree}({spell(a)})")


def factorial(a: Poly) -> Poly:
    value = constant(a)
    if value is not None and value.denominator == 1 and 0 <= value <= MAX_FACTORIAL:
        return number(math.factorial(int(value)))
    return atom(f"factorial({spell(a)})")


def spell(a: Poly) -> str:
    """One string per value, whatever order it was built in."""
    terms = []
    for monomial, c in sorted(a.items()):
        names = "*".join(name if k == 1 else f"{name}^{k}" for name, k in monomial)
        sign = "-" if c < 0 else "+"
        terms.append(
            f"{sign}{abs(c.numerator):x}" + (f"/{c.denominator:x}" if c.denominator != 1 else "") + f"[{names}]"
        )
    return "".join(terms) or "0"


def _bounded(a: Poly) -> Poly:
    if len(a) > MAX_TERMS:
        raise TooLarge("terms")
    if any(max(c.numerator.bit_length(), c.denominator.bit_length()) > MAX_BITS for c in a.values()):
        raise TooLarge("coefficient")
    return a


def _times(m: Monomial, n: Monomial) -> tuple[Fraction, Monomial]:
    """Product of two monomials: a rational that square roots may set free, and the rest."""
    exponents = dict(m)
    for name, k in n:
        exponents[name] = exponents.get(name, 0) + k
    factor, radicand = Fraction(1), 1
    for name in [x for x in exponents if x.startswith(_ROOT)]:
        k, inside = exponents.pop(name), int(name.removeprefix(_ROOT), 16)
        if inside.bit_length() * abs(k) > 4 * MAX_BITS:
            raise TooLarge("power of a root")
        factor *= Fraction(inside) ** (k // 2)
        radicand *= inside ** (k % 2)
    if radicand > 1:
        outside, rest = _square_part(radicand)
        factor *= outside
        if rest > 1:
            exponents[f"{_ROOT}{rest:x}"] = 1
    return factor, tuple(sorted((name, k) for name, k in exponents.items() if k))


def _atom_power(name: str, k: int) -> Poly:
    factor, monomial = _times((), ((name, k),))
    return {monomial: factor}


def _inverse(b: Poly) -> Poly:
    if len(b) == 1:
        [(monomial, coefficient)] = b.items()
        factor, inverted = _times((), tuple((name, -k) for name, k in monomial))
        return {inverted: factor / coefficient}
    lead = b[min(b)]
    monic = {m: c / lead for m, c in b.items()}
    return multiply(number(1 / lead), atom(f"inverse({spell(monic)})"))


def _square_part(n: int) -> tuple[int, int]:
    """(s, r) with n = s^2 r; r is squarefree but for squares of primes above 1000 that are not the whole rest."""
    if n == 0:
        return 0, 1
    outside, rest = 1, 1
    for p in _PRIMES:
        if n == 1:
            break
        count = 0
        while n % p == 0:
            n //= p
            count += 1
        outside *= p ** (count // 2)
        rest *= p ** (count % 2)
    whole = math.isqrt(n)
    return (outside * whole, rest) if whole * whole == n else (outside, rest * n)


def _exact_root(n: int, degree: int) -> int | None:
    if degree > 64 or n.bit_length() > 1024:
        return None
    low, high = 0, 1 << (n.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree < n:
            low = middle + 1
        else:
            high = middle
    return low if low**degree == n else None
