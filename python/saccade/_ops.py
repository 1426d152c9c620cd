"""What torch's pointwise functions and Python's operators are in the language.

Each takes a Tracer and Traced operands and writes one local or a few. Types follow torch's
promotion over bool, int and float; // and % are Python's, without code for the sign where the
operands are known not to be negative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._errors import fail

if TYPE_CHECKING:
    from ._trace import Traced, Tracer


def convert(t: Tracer, x: "Traced", type: str) -> "Traced":
    if x.type == type:
        return x
    if type == "bool":
        return t.local(f"({x.name} != 0)", "bool")
    if type == "int" or x.type == "bool":
        x = t.local(f"int({x.name})", "int", x.nonneg or x.type == "bool")
    return x if type == "int" else t.local(f"float({x.name})", "float", x.nonneg)


_RANK = {"bool": 0, "int": 1, "float": 2}


def _promote(t: Tracer, xs, least: str = "bool"):
    type = max([least] + [x.type for x in xs], key=_RANK.__getitem__)
    return [convert(t, x, type) for x in xs], type


def arith(symbol):
    def op(t, x, y):
        (x, y), type = _promote(t, (x, y), "int")
        nonneg = x.nonneg and y.nonneg and symbol in "+*"
        return t.local(f"({x.name} {symbol} {y.name})", type, nonneg)

    return op


def _compare(symbol):
    def op(t, x, y):
        both_bool = x.type == y.type == "bool"
        if not (both_bool and symbol in ("==", "!=")):
            (x, y), _ = _promote(t, (x, y), "int")
        return t.local(f"({x.name} {symbol} {y.name})", "bool")

    return op


def _bitwise(symbol, of_bools):
    def op(t, x, y):
        (x, y), type = _promote(t, (x, y))
        if type == "float":
            fail(f"got a float with {symbol}, expected bool or int")
        word = of_bools if type == "bool" else symbol
        return t.local(f"({x.name} {word} {y.name})", type, x.nonneg and y.nonneg)

    return op


def logical(word):
    def op(t, x, y):
        return t.local(
            f"({convert(t, x, 'bool').name} {word} {convert(t, y, 'bool').name})", "bool"
        )

    return op


def _shift(symbol):
    def op(t, x, y):
        if "float" in (x.type, y.type):
            fail(f"got a float with {symbol}, expected int")
        return t.local(
            f"({convert(t, x, 'int').name} {symbol} {convert(t, y, 'int').name})",
            "int",
            x.nonneg and symbol == ">>",
        )

    return op


def _true_divide(t, x, y):
    x, y = convert(t, x, "float"), convert(t, y, "float")
    if y.constant is not None and y.constant != 0:
        return t.local(f"({x.name} / {y.name})", "float")
    # The language says x / 0 is 0; Python's tensors say inf or nan.
    return t.local(f"({y.name} == 0 ? {x.name} * inf : {x.name} / {y.name})", "float")


def _floor_divide(t, x, y):
    (x, y), type = _promote(t, (x, y), "int")
    if type == "float":
        return _call("floor")(t, _true_divide(t, x, y))
    if x.nonneg and y.constant is not None and y.constant > 0:
        return t.local(f"({x.name} / {y.name})", "int", True)
    return t.local(f"floordiv({x.name}, {y.name})", "int", x.nonneg and y.nonneg)


def _remainder(t, x, y):
    (x, y), type = _promote(t, (x, y), "int")
    if type == "float":
        return arith("-")(t, x, arith("*")(t, y, _floor_divide(t, x, y)))
    if x.nonneg and y.constant is not None and y.constant > 0:
        return t.local(f"({x.name} % {y.name})", "int", True)
    return t.local(f"floormod({x.name}, {y.name})", "int", bool(y.constant and y.constant > 0))


def _divide(t, x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return _true_divide(t, x, y)
    if rounding_mode == "floor":
        return _floor_divide(t, x, y)
    (x, y), type = _promote(t, (x, y), "int")
    return (
        t.local(f"({x.name} / {y.name})", "int")
        if type == "int"
        else _call("trunc")(t, _true_divide(t, x, y))
    )


def _call(name, integer=False):
    """A function of one argument; keeps int where `integer`."""

    def op(t, x):
        if integer and x.type != "float":
            return t.local(f"{name}({convert(t, x, 'int').name})", "int", name == "abs")
        return t.local(f"{name}({convert(t, x, 'float').name})", "float")

    return op


def _rounding(name):
    def op(t, x):
        return x if x.type == "int" else _call(name)(t, x)

    return op


def _round(t, x):
    """Half to even, as torch rounds: half away, then stepped back at ties to an odd number."""
    if x.type == "int":
        return x
    x = convert(t, x, "float")
    near = t.local(f"round({x.name})", "float")
    half = t.local(
        f"(abs({x.name} - trunc({x.name})) == 0.5 && "
        f"abs({near.name} - 2.0 * trunc({near.name} / 2.0)) == 1.0)",
        "bool",
    )
    return t.local(f"({half.name} ? trunc({x.name}) : {near.name})", "float")


def extreme(name):
    def op(t, x, y):
        (x, y), type = _promote(t, (x, y), "int")
        nonneg = (x.nonneg or y.nonneg) if name == "max" else (x.nonneg and y.nonneg)
        if type == "int":
            return t.local(f"{name}({x.name}, {y.name})", type, nonneg)
        nan = f"({x.name} != {x.name} ? {x.name} : {name}({y.name}, {x.name}))"
        if y.constant is not None:
            nan = f"{name}({y.name}, {x.name})"  # a < b ? a : b gives x for a NaN x
        elif x.constant is not None:
            nan = f"{name}({x.name}, {y.name})"
        return t.local(nan, type)

    return op


def clamp(t, x, min=None, max=None):
    if min is not None:
        x = extreme("max")(t, x, t.value(min))
    if max is not None:
        x = extreme("min")(t, x, t.value(max))
    return x


def _where(t, c, x, y):
    (x, y), type = _promote(t, (x, y))
    c = convert(t, c, "bool")
    return t.local(f"({c.name} ? {x.name} : {y.name})", type, x.nonneg and y.nonneg)


def _neg(t, x):
    x = convert(t, x, "int") if x.type == "bool" else x
    constant = None if x.constant is None else -x.constant
    if constant is not None:
        return t.value(constant)
    return t.local(f"(-{x.name})", x.type)


def _invert(t, x):
    if x.type == "float":
        fail("got ~ of a float, expected bool or int")
    return t.local(f"(!{x.name})" if x.type == "bool" else f"(~{x.name})", x.type)


def _logical_not(t, x):
    return t.local(f"(!{convert(t, x, 'bool').name})", "bool")


def _pow(t, x, y):
    if y.constant == 2:
        return arith("*")(t, x, x)
    return t.local(
        f"pow({convert(t, x, 'float').name}, {convert(t, y, 'float').name})", "float"
    )


def _pointwise(text):
    """A float formula in {x}."""

    def op(t, x):
        return t.local(text.format(x=convert(t, x, "float").name), "float")

    return op


def _is_nan(t, x):
    return t.local(f"({x.name} != {x.name})", "bool") if x.type == "float" else t.value(False)


def _identity(t, x, *_, **__):
    return x


def _to(t, x, *arguments, **options):
    for a in list(arguments) + list(options.values()):
        name = str(a)
        if "torch." not in name:
            continue
        name = name.rsplit(".", 1)[-1]
        if name == "bool":
            return convert(t, x, "bool")
        if "int" in name:
            return convert(t, x, "int")
        if "float" in name or name in ("half", "double"):
            return convert(t, x, "float")
    return x


def _filled(number):
    """new_ones, zeros_like and their kin: a constant of the wanted type."""

    def op(t, x, *_, dtype=None, **__):
        name = str(dtype).rsplit(".", 1)[-1] if dtype is not None else x.type
        if name == "bool":
            return t.value(bool(number))
        return t.value(int(number) if "int" in name else float(number))

    return op


def _full(t, x, *arguments, fill_value=None, **_):
    value = fill_value if fill_value is not None else arguments[-1]
    return t.value(value)


_BINARY = {
    "add": arith("+"),
    "sub": arith("-"),
    "subtract": arith("-"),
    "mul": arith("*"),
    "multiply": arith("*"),
    "true_divide": _true_divide,
    "truediv": _true_divide,
    "floor_divide": _floor_divide,
    "floordiv": _floor_divide,
    "remainder": _remainder,
    "mod": _remainder,
    "pow": _pow,
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "less": _compare("<"),
    "less_equal": _compare("<="),
    "greater": _compare(">"),
    "greater_equal": _compare(">="),
    "not_equal": _compare("!="),
    "and": _bitwise("&", "&&"),
    "or": _bitwise("|", "||"),
    "xor": _bitwise("^", "!="),
    "bitwise_and": _bitwise("&", "&&"),
    "bitwise_or": _bitwise("|", "||"),
    "bitwise_xor": _bitwise("^", "!="),
    "logical_and": logical("&&"),
    "logical_or": logical("||"),
    "logical_xor": logical("!="),
    "lshift": _shift("<<"),
    "rshift": _shift(">>"),
    "bitwise_left_shift": _shift("<<"),
    "bitwise_right_shift": _shift(">>"),
    "minimum": extreme("min"),
    "maximum": extreme("max"),
    "min": extreme("min"),
    "max": extreme("max"),
}
_UNARY = {
    "neg": _neg,
    "negative": _neg,
    "invert": _invert,
    "bitwise_not": _invert,
    "logical_not": _logical_not,
    "abs": _call("abs", integer=True),
    "absolute": _call("abs", integer=True),
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "trunc": _rounding("trunc"),
    "round": _round,
    "isnan": _is_nan,
    "relu": _pointwise("max(0.0, {x})"),
    "silu": _pointwise("({x} * sigmoid({x}))"),
    "square": lambda t, x: arith("*")(t, x, x),
    "reciprocal": lambda t, x: _true_divide(t, t.value(1.0), x),
    "expm1": _pointwise("(exp({x}) - 1.0)"),
    "log1p": _pointwise("log(1.0 + {x})"),
    "softplus": _pointwise("({x} > 20.0 ? {x} : log(1.0 + exp({x})))"),
    "log10": _pointwise("(log({x}) * 0.4342944819032518)"),
    "float": lambda t, x: convert(t, x, "float"),
    "int": lambda t, x: convert(t, x, "int"),
    "long": lambda t, x: convert(t, x, "int"),
    "bool": lambda t, x: convert(t, x, "bool"),
    "double": lambda t, x: convert(t, x, "float"),
    "half": lambda t, x: convert(t, x, "float"),
}
for _name in (
    "sqrt",
    "rsqrt",
    "exp",
    "exp2",
    "log",
    "log2",
    "sin",
    "cos",
    "tan",
    "tanh",
    "sigmoid",
    "erf",
):
    _UNARY[_name] = _call(_name)
_OTHER = {
    "where": _where,
    "div": _divide,
    "divide": _divide,
    "clamp": clamp,
    "clip": clamp,
    "clamp_min": lambda t, x, min: clamp(t, x, min=min),
    "clamp_max": lambda t, x, max: clamp(t, x, max=max),
    "to": _to,
    "type": _to,
    "new_ones": _filled(1),
    "new_zeros": _filled(0),
    "ones_like": _filled(1),
    "zeros_like": _filled(0),
    "full_like": _full,
    "new_full": _full,
    "new_tensor": _full,
    "clone": _identity,
    "detach": _identity,
    "contiguous": _identity,
    "view": _identity,
    "reshape": _identity,
    "squeeze": _identity,
}


def operator(name):
    """Handler of a torch function or method by its name; None when there is none."""
    name = name.strip("_")
    reflected = name[1:] if name.startswith("r") and name[1:] in _BINARY else None
    if name in _BINARY:
        return _BINARY[name], 2, False
    if reflected and name not in _UNARY:
        return _BINARY[reflected], 2, True
    if name in _UNARY:
        return _UNARY[name], 1, False
    if name in _OTHER:
        return _OTHER[name], 0, False
    return None
