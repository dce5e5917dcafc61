"""Exact sums of products: the arithmetic behind canonical answers. Standard library only, bounded in size.

A ``Poly`` maps monomials to rational coefficients; a monomial is a sorted tuple of (atom, integer exponent). An atom is
a string: a variable, a constant such as pi or i, the square root of a squarefree integer ("root:2"), or a function
that is not expanded ("sin(...)", with the spelling of its arguments). Integers are spelt in hexadecimal: Python
refuses to print long ones in decimal.

Where all atoms are plain (``is_closed``) two polys are equal only if their spellings are: square roots of different
squarefree integers are linearly independent over the rationals, pi is transcendental, and i is reduced.
"""

import math
import re
from fractions import Fraction

CONSTANTS = frozenset({"\\pi", "e", "i", "\\infty"})
Monomial = tuple[tuple[str, int], ...]
Poly = dict[Monomial, Fraction]

MAX_BITS = 1 << 14  # of an integer that is written out
MAX_TERMS = 64
MAX_EXPANSION = 12  # exponent up to which a sum is multiplied out
MAX_FACTORIAL = 500
MAX_SPELLING = 4000  # characters of an atom
_PRIMES = [p for p in range(2, 1000) if all(p % q for q in range(2, math.isqrt(p) + 1))]
_SURE = 1000**3  # a cofactor below it without a prime factor below 1000 is a prime, a product of two, or a square
_ROOT = "root:"
_I = "i"
_INSIDE = re.compile(r"[\[*]([^\[\]*^(),]+)(?=[\]*^])")  # the plain atoms in the spelling of a function


class TooLarge(ArithmeticError):
    """The expression would outgrow the bounds."""


def number(value: Fraction | int) -> Poly:
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLarge("integer")
    return {(): value} if value else {}


def atom(name: str) -> Poly:
    if len(name) > MAX_SPELLING:
        raise TooLarge("spelling")
    return {((name, 1),): Fraction(1)}


def call(function: str, *arguments: Poly) -> Poly:
    """The function of the arguments as one atom."""
    return atom(f"{function}({','.join(spell(a) for a in arguments)})")


def is_closed(poly: Poly) -> bool:
    """Is the spelling canonical, so that another one is another value?"""
    return all("(" not in name for monomial in poly for name, _ in monomial)


def variables(poly: Poly) -> set[str]:
    """Plain atoms that stand for no number of their own."""
    names = {name for monomial in poly for name, _ in monomial}
    return {n for n in names if "(" not in n and not n.startswith(_ROOT) and n not in CONSTANTS}


def holds_letters(poly: Poly) -> bool:
    """Does the value depend on a variable, on its own or within a function?"""
    names = {inside for monomial in poly for name, _ in monomial for inside in _INSIDE.findall(name)}
    return bool(variables(poly)) or any(not n.startswith(_ROOT) and n not in CONSTANTS for n in names)


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
    """base^exponent; integer exponents are multiplied out where that stays small."""
    e = constant(exponent)
    if e is not None and e.denominator == 2 and abs(e) < MAX_BITS:
        return multiply(root(base), power(base, number(e - Fraction(1, 2))))
    b = constant(base)
    if e is None or e.denominator != 1:
        return _symbolic_power(base, b, exponent, e)
    n = int(e)
    if n < 0 and len(base) != 1:
        return power(divide(number(1), base), number(-n))
    if len(base) <= 1:
        [(monomial, coefficient)] = base.items() or [((), Fraction(0))]
        if n < 0 and not coefficient:
            raise ZeroDivisionError("0 to a negative power")
        size = max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length())
        if size > 1 and size * abs(n) > 2 * MAX_BITS:  # too long to write out: towers stay as they are spelt
            return _symbolic_power(base, b, exponent, e)
        raised = coefficient**n
        if max(raised.numerator.bit_length(), raised.denominator.bit_length()) > MAX_BITS:
            return _symbolic_power(base, b, exponent, e)
        out = number(raised)
        for name, k in monomial:
            out = multiply(out, _atom_power(name, k * n))
        return out
    if n > MAX_EXPANSION:
        return call("pow", base, exponent)
    out = number(1)
    for _ in range(n):
        out = multiply(out, base)
    return out


def _symbolic_power(base: Poly, b: Fraction | None, exponent: Poly, e: Fraction | None) -> Poly:
    if b is not None and b > 0:
        if b == 1:
            return number(1)
        if e is not None and 1 < e.denominator <= 64:
            p, q = _exact_root(b.numerator, e.denominator), _exact_root(b.denominator, e.denominator)
            if p is not None and q is not None:
                return power(number(Fraction(p, q)), number(e.numerator))
        if b.denominator == 1:
            r, k = _primitive(b.numerator)
            return call("pow", number(r), multiply(exponent, number(k)))
    if e is not None and b == 0:
        return number(0)
    return call("pow", base, exponent)


def root(a: Poly, degree: int = 2) -> Poly:
    """The degree-th root; square roots of rationals as (rational) * root of a squarefree integer (times i)."""
    value = constant(a)
    if value is None or degree != 2:
        odd = value is not None and value < 0 and degree % 2 == 1  # the real root, as in cbrt(-8) = -2
        inside = negate(a) if odd else a
        out = _symbolic_power(inside, constant(inside), number(Fraction(1, degree)), Fraction(1, degree))
        return negate(out) if odd else out
    outside, rest, sure = _square_part(abs(value.numerator) * value.denominator)
    out = number(Fraction(outside, value.denominator))
    if value < 0:
        out = multiply(out, atom(_I))
    if rest == 1:
        return out
    return multiply(out, atom(f"{_ROOT}{rest:x}") if sure else call("pow", number(rest), number(Fraction(1, 2))))


def factorial(a: Poly, step: int = 1) -> Poly:
    """a!, or a!! with step 2."""
    value = constant(a)
    if value is not None and value.denominator == 1 and 0 <= value <= MAX_FACTORIAL:
        return number(math.prod(range(int(value), 0, -step)))
    return call("factorial" if step == 1 else "factorial2", a)


def binomial(n: Poly, k: Poly) -> Poly:
    top, bottom = constant(n), constant(k)
    if top is None or bottom is None or not top.denominator == bottom.denominator == 1:
        return call("binomial", n, k)
    if bottom < 0 or not 0 <= top <= 2 * MAX_FACTORIAL:
        return call("binomial", n, k)
    return number(math.comb(int(top), int(bottom)) if bottom <= top else 0)


def logarithm(base: Poly | None, a: Poly) -> Poly:
    """log to a base; None: the writer did not say which."""
    if base is None:
        return number(0) if constant(a) == 1 else call("log", a)
    b, value = constant(base), constant(a)
    if value == 1:
        return number(0)
    if spell(base) == spell(a):
        return number(1)
    if b is not None and value is not None and b.denominator == 1 and b > 1 and value > 0:
        size = value if value >= 1 else 1 / value
        if size.denominator == 1:
            (r, k), (s, m) = _primitive(b.numerator), _primitive(size.numerator)
            if r == s:
                return number(Fraction(m, k) if value >= 1 else Fraction(-m, k))
    return call("log", a, base)


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
    turns = exponents.pop(_I, 0) % 4
    if turns % 2:
        exponents[_I] = 1
    if turns >= 2:
        factor = -factor
    for name in [x for x in exponents if x.startswith(_ROOT)]:
        k, inside = exponents.pop(name), int(name.removeprefix(_ROOT), 16)
        if inside.bit_length() * abs(k) > 4 * MAX_BITS:
            raise TooLarge("power of a root")
        factor *= Fraction(inside) ** (k // 2)
        if k % 2:  # radicands are squarefree, so their product is, but for the square of what they share
            shared = math.gcd(radicand, inside)
            factor *= shared
            radicand = (radicand // shared) * (inside // shared)
    if radicand > 1:
        exponents[f"{_ROOT}{radicand:x}"] = 1
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


def _square_part(n: int) -> tuple[int, int, bool]:
    """(s, r, sure) with n = s^2 r; r is known to be squarefree where ``sure``."""
    if n == 0:
        return 0, 1, True
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
    if whole * whole == n:
        return outside * whole, rest, True
    return outside, rest * n, n < _SURE


def _primitive(n: int) -> tuple[int, int]:
    """(r, k) with n = r^k and k as large as can be; huge ones are left as they are."""
    if n < 4 or n.bit_length() > 1024:
        return n, 1
    for k in range(min(n.bit_length(), 64), 1, -1):
        r = _exact_root(n, k)
        if r is not None:
            return r, k
    return n, 1


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
