"""// and % and torch's other divisions that give whole numbers or rests, in the language.

// and % are Python's, without code for the sign where the operands are known not to be
negative. Of floats they are those of the exact quotient, as torch's are, and not of the rounded
one: f32 has 1 / 0.1 as 10, while ten times its 0.1 is more than 1.
"""

from __future__ import annotations

import math

from .errors import fail
from .grad_mode import cut
from .ops import arith, float_call, made, promoted, table, true_divide

_SHORT = 6  # digits of a divisor whose product with a quotient is exact in f32 for long


def _is_short(x) -> bool:
    return x.constant is not None and (math.frexp(x.constant)[0] * 2**_SHORT).is_integer()


def _halves(t, x):
    """x as a sum of two floats of half its digits (Veltkamp)."""
    much = arith("*")(t, x, t.value(134217729.0 if t.is_double else 4097.0))
    high = arith("-")(t, much, arith("-")(t, much, x))
    return high, arith("-")(t, x, high)


def _lost(t, x, y, product):
    """What rounding took from a product of floats (Dekker); nothing is differentiated."""
    (a, b), (c, d), add, mul = _halves(t, x), _halves(t, y), arith("+"), arith("*")
    crossed = add(t, add(t, arith("-")(t, mul(t, a, c), product), mul(t, a, d)), mul(t, b, c))
    lost = add(t, crossed, mul(t, b, d))
    text = f"(abs({y.name}) < 1e30 ? {lost.name} : 0.0)"
    return cut(t, t.local(text, "float", dtype=lost.dtype_name))


def _rest_of(t, x, y, whole):
    """x - whole * y, exact up to quotients of all digits."""
    product = arith("*")(t, whole, y)
    rest = arith("-")(t, x, product)
    if not _is_short(y):
        rest = arith("-")(t, rest, _lost(t, whole, y, product))
    text = f"({whole.name} == 0.0 ? {x.name} : {rest.name})"
    return t.local(text, "float", dtype=whole.dtype_name)


def _rest(t, x, y):
    """fmod of floats. A quotient that is rounded may be whole where the true one is below it:
    then the rest has the other sign, and lacks a y."""
    whole = float_call("trunc")(t, true_divide(t, x, y))
    rest = _rest_of(t, x, y, whole).name
    x, size = x.name, f"abs({y.name})"
    lacks = f"(({x} < 0.0) != ({rest} < 0.0) && {rest} != 0.0)"
    full = f"({lacks} ? ({x} < 0.0 ? {rest} - {size} : {rest} + {size}) : {rest})"
    return t.local(full, "float", dtype=whole.dtype_name)


def _has_other_sign(t, rest, y):
    text = f"({rest.name} != 0.0 && ({rest.name} < 0.0) != ({y.name} < 0.0))"
    return t.local(text, "bool")


def _floor_of_floats(t, x, y):
    """The rounded quotient's floor, which is at most one too large: where the quotient became
    whole and lies below. Ranges of it are those of x / y. An infinite x has no rest, and so
    none but by 0."""
    quotient = true_divide(t, x, y)
    whole = float_call("floor")(t, quotient)
    is_over = _has_other_sign(t, _rest_of(t, x, y, whole), y).name
    text = f"({whole.name} - ({is_over} ? 1.0 : 0.0))"
    if x.constant is None or math.isinf(x.constant):
        text = f"(abs({x.name}) == inf && {y.name} != 0.0 ? nan : {text})"
    return cut(t, t.local(text, "float", dtype=quotient.dtype_name))


def _floor_divide(t, x, y):
    (x, y), type, dtype = promoted(t, (x, y), "int")
    if type == "float":
        return _floor_of_floats(t, x, y)
    if x.nonneg and y.constant is not None and y.constant > 0:
        return t.local(f"({x.name} / {y.name})", "int", True, dtype=dtype)
    nonneg = x.nonneg and y.nonneg
    return made(t, f"floordiv({x.name}, {y.name})", "int", nonneg, dtype)


def _remainder(t, x, y):
    (x, y), type, dtype = promoted(t, (x, y), "int")
    if type == "float":
        rest = _rest(t, x, y)
        text = f"({_has_other_sign(t, rest, y).name} ? {rest.name} + {y.name} : {rest.name})"
        return t.local(text, "float", dtype=rest.dtype_name)
    if x.nonneg and y.constant is not None and y.constant > 0:
        return t.local(f"({x.name} % {y.name})", "int", True, dtype=dtype)
    nonneg = bool(y.constant and y.constant > 0)
    return made(t, f"floormod({x.name}, {y.name})", "int", nonneg, dtype)


def _fmod(t, x, y):
    (x, y), type, dtype = promoted(t, (x, y), "int")
    if type == "int":
        return t.local(f"({x.name} % {y.name})", "int", x.nonneg, dtype=dtype)
    return _rest(t, x, y)


def _divide(t, x, y, rounding_mode=None):
    if rounding_mode is None:
        return true_divide(t, x, y)
    if rounding_mode == "floor":
        return _floor_divide(t, x, y)
    if rounding_mode != "trunc":
        fail(f"got rounding_mode {rounding_mode!r}, expected None, 'trunc' or 'floor'")
    (x, y), type, dtype = promoted(t, (x, y), "int")
    if type == "int":
        return made(t, f"({x.name} / {y.name})", "int", x.nonneg and y.nonneg, dtype)
    return float_call("trunc")(t, true_divide(t, x, y))


def _divmod(t, x, y):
    return _floor_divide(t, x, y), _remainder(t, x, y)


DIVISIONS = {
    **table(_floor_divide, "floor_divide floordiv"),
    **table(_divide, "div divide", options=("rounding_mode",)),
    **table(_remainder, "remainder mod"),
    **table(_fmod, "fmod"),
    **table(_divmod, "divmod"),
}
