"""Python's operators and torch's functions of few lines, in the language.

Each operation takes a tracer and its operands and writes one local or a few. Types follow
torch's promotion over bool, int and float.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, NamedTuple

from .dtypes import WRAPS, highest, joined, language_type, name_of
from .errors import fail
from .grad_mode import cut
from .symbols import Traced


class Op(NamedTuple):
    """An operation: its operands by torch's names, then options, which stay as they are."""

    run: Callable[..., Any]
    values: tuple[str, ...]
    options: tuple[str, ...] = ()


def convert(t, x, type: str):
    """x as bool, int or float."""
    if x.kind == type:
        return x
    dtype = joined([x.dtype_name], type)
    if type == "float" and x.kind == "int" and x.constant is not None:
        return t.with_dtype(t.value(float(x.constant)), dtype)
    if type == "bool":
        return t.local(f"({x.name} != 0)", "bool", dtype="bool")
    if type == "int" or x.kind == "bool":
        nonneg = x.nonneg or x.kind == "bool"
        x = t.local(f"int({x.name})", "int", nonneg, dtype=joined([x.dtype_name], "int"))
    if type == "int":
        return x
    return t.local(f"float({x.name})", "float", x.nonneg, dtype=dtype)


def wrapped(t, x, dtype: str | None):
    """The int x as an integer of the dtype; of few bits it wraps."""
    if dtype not in WRAPS:
        return t.with_dtype(x, dtype)
    bits, is_signed = WRAPS[dtype]
    top, ones = 1 << (bits - 1), (1 << bits) - 1
    if x.constant is not None:
        value = x.constant & ones
        value = value - 2 * top if is_signed and value >= top else value
        return t.with_dtype(t.value(value), dtype)
    if not is_signed:
        return t.local(f"({x.name} & {ones})", "int", True, dtype=dtype)
    return t.local(f"((({x.name} & {ones}) ^ {top}) - {top})", "int", dtype=dtype)


def promoted(t, xs, least: str = "bool"):
    """Operands of one type, that type, and the dtype of what they give."""
    xs = list(xs)
    type = highest([least] + [x.kind for x in xs])
    dtype = joined([x.dtype_name for x in xs], type)
    xs = [convert(t, x, type) for x in xs]
    if dtype in WRAPS:  # Python's numbers take the dtype of the tensors
        xs = [wrapped(t, x, dtype) if x.dtype_name is None else x for x in xs]
    return xs, type, dtype


def made(t, text, type, nonneg, dtype):
    """A local, of few bits where the dtype has them."""
    x = t.local(text, type, nonneg, dtype=dtype)
    return wrapped(t, x, dtype) if dtype in WRAPS else x


_OF_BOOLS = {"+": "||", "*": "&&"}


def arith(symbol):
    def op(t, x, y, alpha=1):
        if alpha != 1:
            y = arith("*")(t, y, t.value(alpha))
        if x.kind == y.kind == "bool":
            if symbol == "-":
                fail("got - between bools, expected ^ or !=")
            return t.local(f"({x.name} {_OF_BOOLS[symbol]} {y.name})", "bool")
        (x, y), type, dtype = promoted(t, (x, y), "int")
        nonneg = x.nonneg and y.nonneg and symbol in "+*"
        return made(t, f"({x.name} {symbol} {y.name})", type, nonneg, dtype)

    return op


def _compare(symbol):
    def op(t, x, y):
        both_bool = x.kind == y.kind == "bool"
        if not (both_bool and symbol in ("==", "!=")):
            (x, y), _, _ = promoted(t, (x, y), "int")
        return t.local(f"({x.name} {symbol} {y.name})", "bool")

    return op


def _bitwise(symbol, of_bools):
    def op(t, x, y):
        (x, y), type, dtype = promoted(t, (x, y))
        if type == "float":
            fail(f"got a float with {symbol}, expected bool or int")
        word = of_bools if type == "bool" else symbol
        nonneg = x.nonneg and y.nonneg
        return t.local(f"({x.name} {word} {y.name})", type, nonneg, dtype=dtype)

    return op


def logical(word):
    def op(t, x, y):
        return t.local(
            f"({convert(t, x, 'bool').name} {word} {convert(t, y, 'bool').name})", "bool"
        )

    return op


def _shift(symbol):
    def op(t, x, y):
        if "float" in (x.kind, y.kind):
            fail(f"got a float with {symbol}, expected int")
        (x, y), _, dtype = promoted(t, (x, y), "int")
        nonneg = x.nonneg and symbol == ">>"
        return made(t, _shifted(symbol, x, y), "int", nonneg, dtype)

    return op


def _shifted(symbol, x, y):
    """The language takes counts mod 32. To torch one of all bits or more, or below 0, leaves
    nothing but the sign."""
    if y.constant is not None and 0 <= y.constant < 32:
        return f"({x.name} {symbol} {y.name})"
    is_far = f"{y.name} > 31" if y.nonneg else f"{y.name} < 0 || {y.name} > 31"
    if symbol == "<<":
        return f"({is_far} ? 0 : {x.name} << {y.name})"
    return f"({x.name} >> ({is_far} ? 31 : {y.name}))"


def true_divide(t, x, y):
    """The language says x / 0 is 0; torch says inf or nan, and heeds the sign of a float's 0.
    What shows that sign in the language costs as much as a division: of what is computed from
    the score, whose zeros are a matter of rounding, it is not asked."""
    dtype = joined([x.dtype_name, y.dtype_name], "float")
    has_sign = y.kind == "float" and y.name not in t.of_score
    x, y = convert(t, x, "float"), convert(t, y, "float")
    text = f"({x.name} / {y.name})"
    if y.constant is not None:
        if y.constant == 0:
            text = f"({x.name} * {t.literal(math.copysign(math.inf, y.constant))})"
        return t.local(text, "float", dtype=dtype)
    inverse = f"rsqrt({y.name})" if has_sign else "inf"
    text = f"({y.name} == 0 ? {x.name} * {inverse} : {text})"
    return t.local(text, "float", dtype=dtype)


def float_call(name):
    """A function of the language from float to float."""

    def op(t, x):
        x = convert(t, x, "float")
        return t.local(f"{name}({x.name})", "float", dtype=x.dtype_name)

    return op


def _rounding(name):
    def op(t, x):
        return x if x.kind == "int" else float_call(name)(t, x)

    return op


def _round(t, x, decimals=0):
    """Half to even, as torch rounds: half away, then stepped back at ties to an odd number."""
    if x.kind == "int":
        return x
    if decimals:
        scale = t.value(10.0**decimals)
        return true_divide(t, _round(t, arith("*")(t, x, scale)), scale)
    x = convert(t, x, "float")
    near = t.local(f"round({x.name})", "float")
    half = t.local(
        f"(abs({x.name} - trunc({x.name})) == 0.5 && "
        f"abs({near.name} - 2.0 * trunc({near.name} / 2.0)) == 1.0)",
        "bool",
    )
    text = f"({half.name} ? trunc({x.name}) : {near.name})"
    return t.local(text, "float", dtype=x.dtype_name)


def _number(t, x):
    """Of a number of the closure, which is captured, one that the language knows for a
    constant: a bound takes nothing of the gradient at a tie."""
    return cut(t, x) if x.dtype_name is None else x


def extreme(name):
    def op(t, x, y):
        if x.kind == y.kind == "bool":
            return logical("||" if name == "max" else "&&")(t, x, y)
        if x.kind == y.kind == "int" and y.dtype_name is None:
            y = t.with_dtype(y, x.dtype_name)  # a bound, which a short integer may never reach
        (x, y), type, dtype = promoted(t, map(partial(_number, t), (x, y)), "int")
        nonneg = (x.nonneg or y.nonneg) if name == "max" else (x.nonneg and y.nonneg)
        if type == "int":
            return t.local(f"{name}({x.name}, {y.name})", type, nonneg, dtype=dtype)
        nan = f"({x.name} != {x.name} ? {x.name} : {name}({x.name}, {y.name}))"
        if y.constant is not None:
            nan = f"{name}({y.name}, {x.name})"  # a < b ? a : b gives x for a NaN x
        elif x.constant is not None:
            nan = f"{name}({x.name}, {y.name})"
        return t.local(nan, type, dtype=dtype)

    return op


def _ignores_nan(name):
    """fmax and fmin: of a NaN and a number the number."""

    def op(t, x, y):
        (x, y), type, dtype = promoted(t, (x, y), "int")
        both = extreme(name)(t, x, y)
        text = (
            f"({x.name} != {x.name} ? {y.name} : {y.name} != {y.name} ? {x.name} : {both.name})"
        )
        return both if type == "int" else t.local(text, "float", dtype=dtype)

    return op


def clamp(t, x, min=None, max=None):
    if min is None and max is None:
        fail("got clamp without min and max, expected one of them")
    if min is not None:
        x = extreme("max")(t, x, t.value(min))
    if max is not None:
        x = extreme("min")(t, x, t.value(max))
    return x


def where(t, c, x, y):
    (x, y), type, dtype = promoted(t, (x, y))
    c = convert(t, c, "bool")
    text = f"({c.name} ? {x.name} : {y.name})"
    return t.local(text, type, x.nonneg and y.nonneg, dtype=dtype)


def _masked_fill(t, x, mask, value):
    value = convert(t, value, x.kind) if highest((x.kind, value.kind)) == x.kind else None
    if value is None:
        fail(f"got a fill value of another type than the {x.kind} that it fills")
    return where(t, mask, t.with_dtype(value, x.dtype_name), x)


def _neg(t, x):
    if x.kind == "bool":
        fail("got - of a bool, expected ~ or int()")
    if x.constant is not None and x.dtype_name is None:
        return t.value(-x.constant)
    return made(t, f"(-{x.name})", x.kind, False, x.dtype_name)


def _abs(t, x):
    if x.kind != "int":
        return float_call("abs")(t, x)
    return made(t, f"abs({x.name})", "int", True, x.dtype_name)


def _sign(t, x):
    if x.kind == "bool":
        return x
    zero, one = ("0", "1") if x.kind == "int" else ("0.0", "1.0")
    text = f"({x.name} > {zero} ? {one} : {x.name} < {zero} ? -{one} : {zero})"
    return t.local(text, x.kind, x.nonneg, dtype=x.dtype_name)


def _invert(t, x):
    if x.kind == "float":
        fail("got ~ of a float, expected bool or int")
    if x.kind == "bool":
        return t.local(f"(!{x.name})", "bool")
    return made(t, f"(~{x.name})", "int", False, x.dtype_name)


def _logical_not(t, x):
    return t.local(f"(!{convert(t, x, 'bool').name})", "bool")


def _pow(t, x, y):
    whole = y.constant if isinstance(y.constant, int) else None
    if x.kind == "bool" and y.kind != "float":
        x = convert(t, x, "int")
    if whole == 0 and x.kind == "int":
        return t.with_dtype(t.value(1), x.dtype_name)
    if whole is not None and 1 <= whole <= 64 and (x.kind == "int" or whole <= 3):
        return _repeated(t, x, whole)
    if x.kind != "float" and y.kind != "float":
        if x.constant == 2:
            text = f"({y.name} < 0 || {y.name} > 31 ? 0 : 1 << {y.name})"
            return made(t, text, "int", False, joined([y.dtype_name], "int"))
        fail("got an integer to the power of an integer that is not constant; write float(x)")
    dtype = joined([x.dtype_name, y.dtype_name], "float")
    x, y = convert(t, x, "float"), convert(t, y, "float")
    return t.local(f"pow({x.name}, {y.name})", "float", dtype=dtype)


def _repeated(t, x, n):
    half = _repeated(t, x, n // 2) if n > 1 else None
    if half is None:
        return x
    square = arith("*")(t, half, half)
    return arith("*")(t, square, x) if n % 2 else square


def _compared(text):
    """A bool of a float; of an int what `text` says of a finite number."""

    def op(t, x):
        return t.local(text.format(x=convert(t, x, "float").name), "bool")

    return op


# ---- dtypes and shapes ----


def to_dtype(t, x, dtype: str):
    """x.to(dtype). Floats are computed in f32: rounding to fewer bits has no meaning here."""
    if dtype == x.dtype_name:
        return x
    type = language_type(dtype)
    if dtype in ("float16", "bfloat16") and x.kind != "bool":
        fail(
            f"got a conversion to {dtype}, which rounds; scores are computed in float32: "
            "write .float(), or convert the tensor outside of the mod"
        )
    y = convert(t, x, type)
    if type == "int" and dtype in WRAPS:
        return wrapped(t, y, dtype)
    return t.with_dtype(y, dtype)


def _is_dtype(a) -> bool:
    return type(a).__name__ == "dtype" or (isinstance(a, str) and a.startswith("torch."))


def _to(t, x, *arguments, dtype=None, device=None, non_blocking=False, copy=False, other=None):
    for a in arguments:
        if _is_dtype(a):
            dtype = a
        elif hasattr(a, "dtype"):
            other = a
    if other is not None:
        dtype = t.value(other).dtype_name if type(other) is Traced else other.dtype
    return x if dtype is None else to_dtype(t, x, name_of(dtype))


def _type(t, x, dtype=None, non_blocking=False):
    if dtype is None or not _is_dtype(dtype):
        fail("got type() without a torch dtype, expected type(torch.float32)")
    return to_dtype(t, x, name_of(dtype))


def _type_as(t, x, other):
    if other.dtype_name is None:
        fail("got type_as of a Python number, expected a tensor or a traced value")
    return to_dtype(t, x, other.dtype_name)


def _dropout(t, x, p=0.5, training=True, inplace=False):
    if training and p != 0:
        fail(
            "got dropout of a score in training, which differs from call to call; drop weights "
            "by flex_attention(..., dropout_p=p), or write dropout(x, p, training=False)"
        )
    return x


def _as(dtype):
    return lambda t, x: to_dtype(t, x, dtype)


def _is_scalar_shape(size) -> bool:
    return all(n in ((), [], (1,), [1], 1, -1, (-1,), [-1]) for n in size)


def _same(t, x, *size, **_):
    if not _is_scalar_shape(size):
        fail(f"got a shape {size} for one score, expected ()")
    return x


def _filled(t, x, value, size, dtype):
    if not _is_scalar_shape(size):
        fail(f"got a shape {size} for one score, expected ()")
    dtype = x.dtype_name or "float32" if dtype is None else name_of(dtype)
    return to_dtype(t, t.value(value), dtype)


_PLACE = ("device", "layout", "requires_grad", "memory_format", "pin_memory")


def _fill(number):
    """ones_like, new_zeros and their kin: a constant of the wanted dtype."""

    def op(t, x, *size, dtype=None, **_):
        return _filled(t, x, number, size, dtype)

    return op


def _full_like(t, x, fill_value, dtype=None, **_):
    return _filled(t, x, fill_value, (), dtype)


def _new_full(t, x, size, fill_value, dtype=None, **_):
    return _filled(t, x, fill_value, (size,), dtype)


def _new_tensor(t, x, data, dtype=None, **_):
    value = t.value(data)
    return value if dtype is None else to_dtype(t, value, name_of(dtype))


_TWO, _ONE = ("input", "other"), ("input",)


def table(op_of, names, values=_TWO, options=()):
    return {name: Op(op_of, values, options) for name in names.split()}


BINARY = {
    **table(arith("+"), "add", options=("alpha",)),
    **table(arith("-"), "sub subtract", options=("alpha",)),
    **table(arith("*"), "mul multiply"),
    **table(true_divide, "true_divide truediv"),
    **table(_pow, "pow", ("input", "exponent")),
    **table(_compare("<"), "lt less"),
    **table(_compare("<="), "le less_equal"),
    **table(_compare(">"), "gt greater"),
    **table(_compare(">="), "ge greater_equal"),
    **table(_compare("=="), "eq"),
    **table(_compare("!="), "ne not_equal"),
    **table(_bitwise("&", "&&"), "and bitwise_and"),
    **table(_bitwise("|", "||"), "or bitwise_or"),
    **table(_bitwise("^", "!="), "xor bitwise_xor"),
    **table(logical("&&"), "logical_and"),
    **table(logical("||"), "logical_or"),
    **table(logical("!="), "logical_xor"),
    **table(_shift("<<"), "lshift bitwise_left_shift"),
    **table(_shift(">>"), "rshift bitwise_right_shift"),
    **table(extreme("min"), "minimum min"),
    **table(extreme("max"), "maximum max"),
    **table(_ignores_nan("min"), "fmin"),
    **table(_ignores_nan("max"), "fmax"),
}
UNARY = {
    **table(_neg, "neg negative", _ONE),
    **table(_invert, "invert bitwise_not", _ONE),
    **table(_logical_not, "logical_not", _ONE),
    **table(_abs, "abs absolute", _ONE),
    **table(_sign, "sign sgn", _ONE),
    **table(_round, "round", _ONE, ("decimals",)),
    **table(_compared("({x} != {x})"), "isnan", _ONE),
    **table(_compared("(abs({x}) < inf)"), "isfinite", _ONE),
    **table(_compared("(abs({x}) == inf)"), "isinf", _ONE),
    **table(_compared("({x} == inf)"), "isposinf", _ONE),
    **table(_compared("({x} == -inf)"), "isneginf", _ONE),
    **table(lambda t, x: arith("*")(t, x, x), "square", _ONE),
    **table(lambda t, x: true_divide(t, t.value(1.0), x), "reciprocal", _ONE),
    **table(_rounding("floor"), "floor", _ONE),
    **table(_rounding("ceil"), "ceil", _ONE),
    **table(_rounding("trunc"), "trunc fix", _ONE),
    **table(_as("float32"), "float", _ONE),
    **table(_as("float64"), "double", _ONE),
    **table(_as("float16"), "half", _ONE),
    **table(_as("bfloat16"), "bfloat16", _ONE),
    **table(_as("int32"), "int", _ONE),
    **table(_as("int64"), "long", _ONE),
    **table(_as("int16"), "short", _ONE),
    **table(_as("int8"), "char", _ONE),
    **table(_as("uint8"), "byte", _ONE),
    **table(_as("bool"), "bool", _ONE),
}
OTHER = {
    **table(where, "where", ("condition", "input", "other")),
    **table(
        lambda t, x, c, y: where(t, c, x, y), "Tensor.where", ("input", "condition", "other")
    ),
    **table(_masked_fill, "masked_fill", ("input", "mask", "value")),
    **table(clamp, "clamp clip", _ONE, ("min", "max")),
    **table(extreme("max"), "clamp_min", ("input", "min")),
    **table(extreme("min"), "clamp_max", ("input", "max")),
    **table(_to, "to", _ONE, ("*", "dtype", "device", "non_blocking", "copy", "other")),
    **table(_type, "type", _ONE, ("dtype", "non_blocking")),
    **table(_type_as, "type_as"),
    **table(_fill(1), "ones_like new_ones", _ONE, ("*", "size", "dtype", *_PLACE)),
    **table(_fill(0), "zeros_like new_zeros", _ONE, ("*", "size", "dtype", *_PLACE)),
    **table(_full_like, "full_like", _ONE, ("fill_value", "dtype", *_PLACE)),
    **table(_new_full, "new_full", _ONE, ("size", "fill_value", "dtype", *_PLACE)),
    **table(_new_tensor, "new_tensor", _ONE, ("data", "dtype", *_PLACE)),
    **table(_dropout, "dropout", _ONE, ("p", "training", "inplace")),
    **table(_same, "clone contiguous positive", _ONE, ("memory_format",)),
    **table(_same, "view reshape expand", _ONE, ("*", "shape")),
    **table(lambda t, x, other: x, "view_as reshape_as expand_as"),
    **table(lambda t, x, *_, **__: x, "cpu cuda", _ONE, ("*", "device", "non_blocking")),
    **table(lambda t, x, dim=None: x, "squeeze unsqueeze", _ONE, ("dim",)),
}
