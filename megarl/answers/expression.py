"""A recursive-descent reader of LaTeX and plain arithmetic into canonical sums of products. No eval, bounded depth."""

import re
from fractions import Fraction

from megarl.answers import algebra
from megarl.answers.algebra import Poly

MAX_DEPTH = 140  # a bracket is one deep and six frames of the reader, a root two and nine
MAX_DIGITS = 4096
MAX_EXPONENT = 12  # digits of the exponent of ten, in 1e400
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<macro>\\[A-Za-z]+)|(?P<letter>[A-Za-z])"
    r"|(?P<mark>[-+*/^_(){}\[\]!|'\u00b0]))"
)
_TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"}
_FUNCTIONS = _TRIGONOMETRIC | {"arcsin", "arccos", "arctan", "ln", "log", "lg", "exp"}
_LETTERS = {"pi", "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "rho", "sigma", "phi", "omega",
            "infty", "tau", "eta", "zeta", "kappa", "xi", "nu", "chi", "psi", "Gamma", "Delta", "Theta", "Lambda", "Pi",
            "Sigma", "Phi", "Psi", "Omega", "ell", "hbar"}  # fmt: skip
_UNKNOWN_FUNCTIONS = "fgh"  # f(x + 1) is no product
_CLOSER = {"(": ")", "[": "]", "{": "}"}
_HALVES = {"floor": ("lfloor", "rfloor"), "ceil": ("lceil", "rceil")}


class Unreadable(ValueError):
    """The text is no expression this reader knows."""


class TooDeep(algebra.TooLarge):
    """Brackets, roots and fractions nested beyond MAX_DEPTH."""


def read_expression(text: str) -> Poly:
    """The value of an expression; raises Unreadable, ZeroDivisionError, or algebra.TooLarge beyond the bounds."""
    reader = _Reader(_tokens(text))
    value = reader.sum(0)
    if reader.peek() is not None:
        raise Unreadable(f"at {reader.peek()!r}")
    return value


def _tokens(text: str) -> list[tuple[str, str]]:
    out, position = [], 0
    text = text.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise Unreadable(f"at {text[position : position + 10]!r}")
        assert found.lastgroup is not None
        out.append((found.lastgroup, found[found.lastgroup]))
        position = found.end()
    return out


class _Reader:
    """sum -> product -> signed -> power -> primary, over a list of tokens."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.position = 0
        self.bars = 0  # open |...|: a bar inside closes it
        self.angles = 0  # open arguments of functions, where a degree mark is pi/180

    def peek(self) -> str | None:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else None

    def take(self, *expected: str) -> bool:
        if self.peek() in expected:
            self.position += 1
            return True
        return False

    def need(self, mark: str) -> None:
        if not self.take(mark):
            raise Unreadable(f"{mark!r} missing before {self.peek()!r}")

    def sum(self, depth: int) -> Poly:
        if depth > MAX_DEPTH:
            raise TooDeep("nested too deeply")
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            minus = self.take("-")
            if not minus:
                self.take("+")
            term = self.product(depth)
            value = algebra.add(value, algebra.negate(term) if minus else term)
        return value

    def product(self, depth: int) -> Poly:
        value = self.signed(depth)
        while self.peek() is not None:
            if self.take("*"):
                value = algebra.multiply(value, self.signed(depth))
            elif self.take("/"):
                value = algebra.divide(value, self.signed(depth))
            elif self.starts_factor():
                value = algebra.multiply(value, self.power(depth))
            else:
                break
        return value

    def starts_factor(self) -> bool:
        """Does a factor stand here without a sign for it? Two numbers side by side are no product."""
        kind, token = self.tokens[self.position]
        if kind == "number":
            if self.tokens[self.position - 1][0] == "number":
                raise Unreadable("two numbers side by side")
            return True
        if token == "|":
            return self.bars == 0
        return kind == "letter" or (kind == "macro" and token[1:] not in ("rfloor", "rceil")) or token in _CLOSER

    def signed(self, depth: int) -> Poly:
        minus = False
        while self.peek() in ("+", "-"):
            minus ^= self.take("-")
            self.take("+")
        value = self.power(depth)
        return algebra.negate(value) if minus else value

    def power(self, depth: int) -> Poly:
        base = self.primary(depth)
        while True:
            if self.take("!"):
                base = algebra.factorial(base, 2 if self.take("!") else 1)
            elif self.take("_"):
                base = self.subscript(base, depth)
            elif self.take("'"):
                base = algebra.call("prime", base)
            elif self.take("\u00b0"):
                if self.angles:
                    base = algebra.multiply(
                        base, algebra.multiply(algebra.atom("\\pi"), algebra.number(Fraction(1, 180)))
                    )
            elif self.take("^"):
                return algebra.power(base, self.argument(depth))
            else:
                return base

    def subscript(self, base: Poly, depth: int) -> Poly:
        """37_8 is a number in base 8; x_1 a name."""
        start = self.position - 2
        index = self.argument(depth)
        kind, token = self.tokens[start]
        if kind == "number" and "." not in token:
            radix = algebra.constant(index)
            if radix is None or radix.denominator != 1 or not 2 <= radix <= 36:
                raise Unreadable("base of a number")
            return algebra.number(_based(token, int(radix)))
        names = [token if kind == "letter" else "", *(name for monomial in index for name, _ in monomial)]
        if kind == "letter" and len(index) <= 1 and all("(" not in name for name in names):
            return algebra.atom(f"{token}_{algebra.spell(index).strip('+[]').replace('[', '')}")
        return algebra.call("sub", base, index)

    def argument(self, depth: int) -> Poly:
        """What follows ^, _ or a macro: a group, or one signed token with its own exponent tower left out."""
        if self.take("-"):
            return algebra.negate(self.argument(depth + 1))
        if depth > MAX_DEPTH:
            raise TooDeep("nested too deeply")
        self.take("+")
        return self.primary(depth)

    def group(self, opener: str, depth: int) -> Poly:
        self.need(opener)
        bars, self.bars = self.bars, 0
        value = self.sum(depth + 1)
        self.bars = bars
        self.need(_CLOSER[opener])
        return value

    def primary(self, depth: int) -> Poly:
        token = self.peek()
        if token is None:
            raise Unreadable("ends early")
        kind = self.tokens[self.position][0]
        if token in _CLOSER:
            return self.group(token, depth)
        self.position += 1
        if kind == "number":
            return _number(token)
        if kind == "letter":
            if token in _UNKNOWN_FUNCTIONS and self.peek() == "(":
                return algebra.call(token, self.group("(", depth))
            return algebra.atom(token)
        if kind == "macro":
            return self.macro(token[1:], depth)
        if token == "|":
            self.bars += 1
            inside = self.sum(depth + 1)
            self.need("|")
            self.bars -= 1
            return _absolute(inside)
        raise Unreadable(f"at {token!r}")

    def macro(self, name: str, depth: int) -> Poly:
        if depth > MAX_DEPTH:
            raise TooDeep("nested too deeply")
        if name in ("frac", "binom"):
            above = self.position
            top = self.argument(depth + 1)
            below = self.position
            bottom = self.argument(depth + 1)
            if name == "frac" and self.is_differential(above) and self.is_differential(below):
                if below - above == 3 or (self.tokens[above + 2][1] == "^" and self.tokens[below - 2][0] != "letter"):
                    raise Unreadable("a derivative to be worked out")
                return algebra.call("derivative", top, bottom)
            return algebra.divide(top, bottom) if name == "frac" else algebra.binomial(top, bottom)
        if name == "sqrt":
            return self.root(depth)
        if name in _LETTERS:
            return algebra.atom(f"\\{name}")
        if name in _FUNCTIONS:
            self.angles += 1
            value = self.function(name, depth)
            self.angles -= 1
            return value
        for function, (opener, closer) in _HALVES.items():
            if name == opener:
                inside = self.sum(depth + 1)
                self.need(f"\\{closer}")
                return _rounded(function, inside)
        raise Unreadable(f"\\{name}")

    def is_differential(self, start: int) -> bool:
        """Does {d}, {dy} or {d^2 y} begin there?"""
        first = [token for _, token in self.tokens[start : start + 3]]
        return first[:2] == ["{", "d"] and (first[2] in ("}", "^") or self.tokens[start + 2][0] == "letter")

    def root(self, depth: int) -> Poly:
        if not self.take("["):
            return algebra.root(self.argument(depth + 1))
        value = self.sum(depth + 1)
        self.need("]")
        degree = algebra.constant(value)
        inside = self.argument(depth + 1)
        if degree is not None and degree.denominator == 1 and 2 <= degree <= 64:
            return algebra.root(inside, int(degree))
        return algebra.power(inside, algebra.divide(algebra.number(1), value))

    def function(self, name: str, depth: int) -> Poly:
        """sin^2 x, log_2 8, sin(x): the argument is a group, or the factors up to the next sign or function."""
        base = self.argument(depth + 1) if self.take("_") else algebra.number(10) if name == "lg" else None
        exponent = self.argument(depth + 1) if self.take("^") else algebra.number(1)
        if self.peek() in ("(", "{", "["):
            inside = self.primary(depth + 1)
        else:
            inside = self.signed(depth + 1)
            while self.peek() is not None and self.starts_factor() and not self.starts_function():
                inside = algebra.multiply(inside, self.power(depth + 1))
        if name in ("log", "lg"):
            value = algebra.logarithm(base, inside)
        elif base is not None:
            raise Unreadable(f"\\{name}_")
        elif name in _TRIGONOMETRIC and algebra.constant(exponent) == -1:
            return algebra.call(f"arc{name}", inside)
        elif name == "exp":
            value = algebra.power(algebra.atom("e"), inside)
        else:
            value = algebra.logarithm(algebra.atom("e"), inside) if name == "ln" else algebra.call(name, inside)
        return algebra.power(value, exponent)

    def starts_function(self) -> bool:
        kind, token = self.tokens[self.position]
        return kind == "macro" and token[1:] in _FUNCTIONS


def _absolute(value: Poly) -> Poly:
    number = algebra.constant(value)
    if number is not None:
        return algebra.number(abs(number))
    return algebra.call("abs", min(value, algebra.negate(value), key=algebra.spell))


def _rounded(function: str, value: Poly) -> Poly:
    number = algebra.constant(value)
    if number is None:
        return algebra.call(function, value)
    return algebra.number(number.__floor__() if function == "floor" else number.__ceil__())


def _based(digits: str, radix: int) -> int:
    try:
        return int(digits, radix)
    except ValueError as error:
        raise Unreadable(f"{digits!r} in base {radix}") from error


def _number(token: str) -> Poly:
    digits, _, exponent = token.lower().partition("e")
    if len(digits) > MAX_DIGITS or len(exponent) > MAX_EXPONENT:
        raise Unreadable("a number of too many digits")
    whole, _, part = digits.partition(".")
    value = algebra.number(Fraction(int((whole + part) or "0"), 10 ** len(part)))
    if not exponent:
        return value
    return algebra.multiply(value, algebra.power(algebra.number(10), algebra.number(int(exponent))))
