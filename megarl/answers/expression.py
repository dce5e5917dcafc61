"""A recursive-descent reader of LaTeX and plain arithmetic into canonical sums of products. No eval, bounded depth."""

import re
from fractions import Fraction

from megarl.answers import algebra
from megarl.answers.algebra import Poly

MAX_DEPTH = 40
MAX_DIGITS = 1000
MAX_EXPONENT = 400  # of ten, in 1e400
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)|(?P<macro>\\[A-Za-z]+)|(?P<letter>[A-Za-z])"
    r"|(?P<mark>[-+*/^_(){}\[\]!]))"
)
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln",
              "log", "exp"}  # fmt: skip
_CONSTANTS = {"pi", "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "rho", "sigma", "phi",
              "varphi", "omega", "infty", "tau", "eta", "zeta", "kappa", "xi", "nu", "chi", "psi"}  # fmt: skip
_CLOSER = {"(": ")", "[": "]", "{": "}"}


class Unreadable(ValueError):
    """The text is no expression this reader knows."""


def read_expression(text: str) -> Poly:
    """The value of an expression; raises Unreadable, or algebra.TooLarge beyond the bounds."""
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
            raise Unreadable("nested too deeply")
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
        return kind in ("letter", "macro") or token in _CLOSER

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
                base = algebra.factorial(base)
            elif self.take("_"):
                base = algebra.atom(f"sub({algebra.spell(base)},{algebra.spell(self.argument(depth))})")
            elif self.take("^"):
                return algebra.power(base, self.argument(depth))
            else:
                return base

    def argument(self, depth: int) -> Poly:
        """What follows ^, _ or a macro: a group, or one signed token."""
        if self.peek() in ("{", "("):
            return self.primary(depth)
        if self.take("-"):
            return algebra.negate(self.primary(depth))
        return self.primary(depth)

    def group(self, opener: str, depth: int) -> Poly:
        self.need(opener)
        value = self.sum(depth + 1)
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
            return algebra.number(_number(token))
        if kind == "letter":
            return algebra.atom(token)
        if kind == "macro":
            return self.macro(token[1:], depth)
        raise Unreadable(f"at {token!r}")

    def macro(self, name: str, depth: int) -> Poly:
        if depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        if name == "frac":
            top = self.argument(depth + 1)
            return algebra.divide(top, self.argument(depth + 1))
        if name == "sqrt":
            degree = 2
            if self.take("["):
                value = algebra.constant(self.sum(depth + 1))
                self.need("]")
                if value is None or value.denominator != 1 or not 2 <= value <= 64:
                    raise Unreadable("degree of a root")
                degree = int(value)
            return algebra.root(self.argument(depth + 1), degree)
        if name in _CONSTANTS:
            return algebra.atom(f"\\{name}")
        if name in _FUNCTIONS:
            return self.function(name, depth)
        raise Unreadable(f"\\{name}")

    def function(self, name: str, depth: int) -> Poly:
        """sin^2 x, log_2 8, sin(x): the argument is a group, or the factors up to the next sign."""
        base = f",{algebra.spell(self.argument(depth + 1))}" if self.take("_") else ""
        exponent = self.argument(depth + 1) if self.take("^") else algebra.number(1)
        if self.peek() in ("(", "{"):
            inside = self.primary(depth + 1)
        else:
            inside = self.power(depth + 1)
            while self.peek() is not None and self.starts_factor() and self.tokens[self.position][0] != "macro":
                inside = algebra.multiply(inside, self.power(depth + 1))
        return algebra.power(algebra.atom(f"{name}({algebra.spell(inside)}{base})"), exponent)


def _number(token: str) -> Fraction:
    digits, _, exponent = token.lower().partition("e")
    if len(digits) > MAX_DIGITS or len(exponent) > 4 or (exponent and abs(int(exponent)) > MAX_EXPONENT):
        raise algebra.TooLarge("number")
    whole, _, part = digits.partition(".")
    value = Fraction(int((whole + part) or "0"), 10 ** len(part))
    return value * Fraction(10) ** int(exponent) if exponent else value
