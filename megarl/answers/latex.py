"""Integrals, sums, products and limits: read by latex2sympy, worked out by sympy. In the worker process only."""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false
# mpmath makes its number types at run time, and sympy is typed by its base class alone

from collections.abc import Iterator
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from mpmath import mp, mpc

from megarl.answers import numeric

_DIGITS = tuple(int(bits * 0.30103) for bits in numeric.PRECISIONS)
_NAMES = ConversionConfig(lowercase_symbols=False)
_ROUGH = 15  # digits asked for where an exact value may not come
_MAX_TERMS = 10_000
_TRUSTED = 40  # bits of which, that are taken for right


def read_latex(text: str) -> Iterator[dict[str, Any]]:
    """Ever better answers, in the form of solver.answers: the last one that the budget allowed counts."""
    try:
        expression = latex2sympy(text, normalization_config=None, conversion_config=_NAMES)
    except Exception:  # what latex2sympy raises where it cannot read is just that
        yield {"text": True}
        return
    if not isinstance(expression, sympy.Expr):
        yield {"undecided": f"a {type(expression).__name__}"}
        return
    yield {"undecided": "no value found"}
    if _is_long(expression):
        yield from _rough(expression)
        return
    exact = expression.doit()
    answer = _prints(exact)
    yield answer
    if "undecided" in answer:
        yield from _rough(exact)


def _is_long(expression: sympy.Expr) -> bool:
    """Would sympy write out a sum or product term by term?"""
    for part in expression.atoms(sympy.Sum, sympy.Product):
        for index, low, high in part.limits:
            if (high - low).is_finite and (high - low).is_number and abs(high - low) > _MAX_TERMS:
                return not (isinstance(part, sympy.Sum) and part.function.is_polynomial(index))
    return False


def _rough(expression: sympy.Expr) -> Iterator[dict[str, Any]]:
    """Some digits, of what has no letters in it."""
    if expression.free_symbols:
        return
    value = expression.evalf(_ROUGH)
    parts = [p for p in value.as_real_imag() if p != 0]
    if not all(isinstance(p, sympy.Float) and p._prec >= _TRUSTED for p in parts):
        return
    mp.prec = 64
    yield {"rough": numeric.rough_print(_number(value))}


def _prints(expression: sympy.Expr) -> dict[str, Any]:
    out: list[list[Any]] = []
    for setting in numeric.SETTINGS:
        try:
            p = numeric.print_of(*(_at(expression, setting, digits) for digits in _DIGITS))
        except numeric.Undefined as error:
            out.append([f"undefined: {error}"])
        except numeric.Unclear as error:
            return {"undecided": str(error)}
        else:
            out.append([p.digits, p.left, p.lossy])
    return {"prints": out}


def _at(expression: sympy.Expr, setting: numeric.Setting, digits: int) -> mpc:
    """The value where the letters stand for their numbers."""
    mp.dps = digits + 10
    points = {
        s: sympy.Float(numeric.point(numeric.plain_name(s.name), setting), digits + 10) for s in expression.free_symbols
    }
    value = expression.subs(points).evalf(digits)
    if value in (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        raise numeric.Undefined(str(value))
    return _number(value)


def _number(value: sympy.Expr) -> mpc:
    real, imaginary = value.as_real_imag()
    if not (real.is_Number and imaginary.is_Number):
        raise numeric.Unclear("no number")
    return mpc(real._to_mpmath(mp.prec), imaginary._to_mpmath(mp.prec))
