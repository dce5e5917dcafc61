"""The spelling of a value -> its digits at a fixed point, to compare values that are not spelt alike.

Runs in the worker process only: the arithmetic may be as large as an answer asks for.

A value is computed twice, with 1000 and 1300 bits. The 660 leading bits (198 digits) on which both agree are its print.
Letters stand for fixed generic numbers, so that a print is an identity test (Schwartz and Zippel): two expressions of
the length of an answer that agree there to 198 digits are the same function.
"""

# pyright: reportInvalidTypeForm=false
# mpmath makes its number types at run time

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from mpmath import libmp, mp, mpc, mpf

PRECISIONS = (1000, 1300)  # bits
PRINT = 660  # bits of a print
_LOST = 640  # bits between the terms of a sum beyond which the smaller one leaves no trace in the print
_MAX_BITS = 1 << 20  # of an exponent, or of a number whose sine is asked for


_ODD = re.compile(r"[+-][0-9a-f]+/[0-9a-f]*[13579bdf]\[\]")  # an odd root of a negative number is negative


class Undefined(ArithmeticError):
    """No finite value there."""


class Unclear(ArithmeticError):
    """The digits do not settle, or there are too many."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the letters are put, and what "log" without a base means."""

    sign: int = 1
    log_base: str = "10"
    mixed: int = 0  # the bit of a name that tells which letters are negative


SETTINGS = (Setting(), Setting(log_base="e"), Setting(sign=-1), Setting(mixed=1), Setting(mixed=2))


@dataclass(frozen=True, slots=True)
class Print:
    """Leading bits of a value: equal prints are equal values, unless one is ``lossy``: a term was too small to show.

    ``left``: a function of real numbers left the real line, such as the root of a negative one.
    """

    digits: str
    left: bool
    lossy: bool


def take_print(key: str, setting: Setting) -> Print:
    """The print of the value that algebra.spell wrote; raises Undefined or Unclear."""
    values, readers = [], []
    for bits in PRECISIONS:
        mp.prec = bits
        reader = _Evaluator(key, setting)
        values.append(reader.value())
        readers.append(reader)
    scale = max(r.scale for r in readers)
    real, imaginary = (_settled(v, w, scale) for v, w in zip(_parts(values[0]), _parts(values[1]), strict=True))
    lossy, left = any(r.lossy for r in readers), any(r.left for r in readers)
    return Print(f"{_spell(real)},{_spell(imaginary)}", left, lossy)


def print_of(low: mpc, high: mpc) -> Print:
    """The print of a value known with two precisions from elsewhere."""
    size = max(_magnitude(low), _magnitude(high))
    real, imaginary = (_settled(v, w, size) for v, w in zip(_parts(low), _parts(high), strict=True))
    return Print(f"{_spell(real)},{_spell(imaginary)}", imaginary != libmp.fzero, False)


def rough_print(value: mpc) -> str:
    """The leading bits of a value of which not many are known."""
    return ",".join(_spell(libmp.mpf_pos(x._mpf_, 53, "n")) for x in _parts(value))


def point(name: str, setting: Setting) -> mpf:
    """The number that a letter stands for: generic digits, between 1/2 and 5/2."""
    bits = b"".join(hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(6))
    sign = -1 if sum(map(ord, name)) & setting.mixed else setting.sign
    return sign * (mpf(1) / 2 + 2 * mpf(int.from_bytes(bits, "big")) / (1 << 8 * len(bits)))


def plain_name(name: str) -> str:
    r"""One name for x_1, x_{1} and \theta, theta."""
    return "".join(c for c in name if c.isalnum())


def _parts(value: mpc) -> tuple[mpf, mpf]:
    return mp.mpc(value).real, mp.mpc(value).imag


def _magnitude(value: mpc | mpf) -> int:
    """Position of the leading bit."""
    if not value:
        return -(1 << 62)
    return max(x._mpf_[2] + x._mpf_[3] for x in _parts(value) if x)


def _settled(low: mpf, high: mpf, scale: int) -> tuple[int, int, int, int]:
    a, b = (libmp.mpf_pos(x._mpf_, PRINT, "n") for x in (low, high))
    for x in (a, b):
        if x in (libmp.fnan, libmp.finf, libmp.fninf):
            raise Undefined("not finite")
    if a == b:
        return a
    tiny = scale - PRECISIONS[0] + 100
    if all(not x or _magnitude(x) < tiny for x in (low, high)):
        return libmp.fzero
    raise Unclear("digits do not settle")


def _spell(value: tuple[int, int, int, int]) -> str:
    sign, mantissa, exponent, _ = value
    return f"{'-' if sign else ''}{mantissa:x}p{exponent:x}"


class _Evaluator:
    """Reads the spelling of algebra.spell from left to right and computes as it goes."""

    def __init__(self, text: str, setting: Setting) -> None:
        self.text = text
        self.setting = setting
        self.position = 0
        self.scale = -(1 << 62)  # leading bit of the largest term of any sum
        self.lossy = False
        self.left = False  # the real line

    def value(self) -> mpc:
        out = self.sum()
        if self.position != len(self.text):
            raise Unclear(f"at {self.text[self.position : self.position + 10]!r}")
        return out

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def take(self, mark: str) -> bool:
        if self.peek() == mark:
            self.position += 1
            return True
        return False

    def until(self, marks: str) -> str:
        start = self.position
        while self.position < len(self.text) and self.text[self.position] not in marks:
            self.position += 1
        return self.text[start : self.position]

    def sum(self) -> mpc:
        if self.take("0"):
            return mpf(0)
        terms = []
        while self.peek() in ("+", "-") and self.peek():
            terms.append(self.term())
        sizes = [_magnitude(t) for t in terms if t]
        if sizes:
            self.scale = max(self.scale, *sizes)
            self.lossy |= max(sizes) - min(sizes) > _LOST
        return mp.fsum(terms)

    def term(self) -> mpc:
        negative = self.take("-")
        if not negative:
            self.take("+")
        above, _, below = self.until("[").partition("/")
        out = mpf(int(above, 16)) / (int(below, 16) if below else 1)
        self.take("[")
        while not self.take("]"):
            self.take("*")
            base = self.atom()
            k = int(self.until("*]")) if self.take("^") else 1
            if not base and k < 0:
                raise Undefined("division by zero")
            out = out * _power(base, mpf(k))
        return -out if negative else out

    def atom(self) -> mpc:
        name = self.until("(^*],)")
        if not self.take("("):
            return self.letter(name)
        start = self.position
        arguments = [self.sum()]
        while self.take(","):
            start = self.position
            arguments.append(self.sum())
        last = self.text[start : self.position]
        self.take(")")
        function = _FUNCTIONS.get(name)
        if name == "log" and len(arguments) == 1:
            arguments.append(mp.e if self.setting.log_base == "e" else mpf(10))
        if name == "pow" and _ODD.fullmatch(last) and not mp.im(arguments[0]) and mp.re(arguments[0]) < 0:
            above, below = (int(x, 16) for x in last[:-2].split("/"))
            out = _power(-arguments[0], mpf(above) / below) * (-1) ** above
        else:
            out = function(*arguments) if function else _unknown(name, arguments)
        if mp.isnan(out) or mp.isinf(out):
            raise Undefined(name)
        self.left |= bool(mp.im(out)) and not any(mp.im(a) for a in arguments)
        return out

    def letter(self, name: str) -> mpc:
        if name.startswith("root:"):
            return mp.sqrt(int(name[5:], 16))
        if name in ("\\pi", "e", "i"):
            return {"\\pi": +mp.pi, "e": +mp.e, "i": mpc(0, 1)}[name]
        if name == "\\infty":
            raise Undefined("infinity")
        return point(plain_name(name), self.setting)


def _power(base: mpc, exponent: mpc) -> mpc:
    if not base:
        if mp.re(exponent) <= 0:
            raise Undefined("0 to a power that is not positive")
        return mpf(0)
    if _magnitude(exponent) > _MAX_BITS or _magnitude(exponent) + abs(_magnitude(base)).bit_length() > _MAX_BITS:
        raise Unclear("too large")
    return base**exponent


def _periodic(function: Callable[[mpc], mpc]) -> Callable[[mpc], mpc]:
    def checked(x: mpc) -> mpc:
        if _magnitude(x) > 4 * PRINT:
            raise Unclear("too large")
        return function(x)

    return checked


def _log(x: mpc, base: mpc) -> mpc:
    if not x or not base or base == 1:
        raise Undefined("log")
    return mp.log(x) / mp.log(base)


def _factorial(x: mpc) -> mpc:
    if _magnitude(x) > 64:
        raise Unclear("too large")
    return mp.gamma(x + 1)


def _double_factorial(x: mpc) -> mpc:
    if _magnitude(x) > 64:
        raise Unclear("too large")
    return mp.fac2(x)


def _binomial(n: mpc, k: mpc) -> mpc:
    if max(_magnitude(n), _magnitude(k)) > 64:
        raise Unclear("too large")
    return mp.binomial(n, k)


def _inverse(x: mpc) -> mpc:
    if not x or _magnitude(x) < -PRECISIONS[0] + 100:
        raise Undefined("division by zero")
    return 1 / x


def _rounding(function: Callable[[mpc], mpc]) -> Callable[[mpc], mpc]:
    """floor and ceil; a value within rounding of an integer is that integer."""

    def rounded(x: mpc) -> mpc:
        near = mp.nint(x)
        return near if abs(x - near) < mpf(2) ** (-PRINT) else function(x)

    return rounded


def _unknown(name: str, arguments: list[mpc]) -> mpc:
    """f(...), a prime, an index: a function of which nothing is known, so a generic number per list of arguments."""
    spelt = ";".join(_spell(libmp.mpf_pos(part._mpf_, PRINT, "n")) for a in arguments for part in _parts(a))
    return point(f"{name}({spelt})", Setting())


_FUNCTIONS: dict[str, Callable[..., mpc]] = {
    "pow": _power, "inverse": _inverse, "log": _log, "factorial": _factorial, "factorial2": _double_factorial,
    "binomial": _binomial, "abs": abs, "floor": _rounding(mp.floor), "ceil": _rounding(mp.ceil),
    **{n: _periodic(f) for n, f in {"sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec,
       "csc": mp.csc, "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh}.items()},
    "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot, "arcsec": mp.asec, "arccsc": mp.acsc,
    "arcsinh": mp.asinh, "arccosh": mp.acosh, "arctanh": mp.atanh,
}  # fmt: skip
