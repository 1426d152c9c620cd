"""torch's float functions in steps of the language's own, and the lookup of all operations.

A formula is `name = expression;` steps and a last expression, in operands and options by name.
It loses nothing that float32 holds: log(1 + x) and exp(x) - 1 of small x go by Kahan's
corrections, the inverse tangent by a polynomial (Cephes, atanf.c) and one step of Newton's.
"""

from __future__ import annotations

import re

from .division import DIVISIONS
from .dtypes import joined
from .errors import fail
from .grad_mode import cut
from .ops import BINARY, OTHER, UNARY, Op, convert, float_call

_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_NUMBER = re.compile(r"(?<![\w.])\d+(\.\d*)?(e[+-]?\d+)?")


def run_steps(t, text: str, names: dict):
    """Writes a formula; names: what its words stand for. A step calls another formula by
    `name = @formula x;`."""
    names = dict(names)
    *steps, last = [s.strip() for s in text.split(";")]
    for step in steps:
        name, value = (s.strip() for s in step.split("=", 1))
        if value.startswith("@"):
            formula, *given = value[1:].split()
            names[name] = run_steps(t, _PARTS[formula], dict(zip("xy", map(names.get, given))))
        else:
            names[name] = t.local(f"({_replaced(t, value, names)})", _type_of(value)).name
    return t.local(f"({_replaced(t, last, names)})", "float").name


def _replaced(t, text, names):
    if t.is_double:
        text = _NUMBER.sub(lambda m: t.literal(float(m[0])), text)
    return _WORD.sub(lambda m: names.get(m[0], m[0]), text)


def _type_of(text):
    """Comparisons are the only bools that a step holds."""
    return "bool" if re.search(r"[<>]|==|!=", text) and "?" not in text else "float"


# Steps that others are made of, in x and y. Slopes hold at 0 and at ties too: as abs has none
# at 0, |x| is a choice by sign where a slope goes through it.
_PARTS = {
    "log1p": "u = 1.0 + x; d = u - 1.0; "
    "u == 1.0 ? x : u == inf ? u : log(u) * (x / (d == 0.0 ? 1.0 : d))",
    "expm1": "u = exp(x); d = u - 1.0; abs(x) > 0.5 ? d : u == 1.0 ? x : d * (x / log(u))",
    "atan1": "half = x > 0.4142135623730950; w = half ? (x - 1.0) / (x + 1.0) : x; z = w * w; "
    "p = (((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z "
    "- 3.33329491539e-1) * z * w + w; g = half ? p + 0.7853981633974483 : p; "
    "s = sin(g); c = cos(g); g + (x * c - s) / (c + x * s)",  # of 0 to 1
    "atan": "a = x < 0.0 ? -x : x; r = a > 1.0 ? 1.0 / a : a; y = @atan1 r; "
    "q = a > 1.0 ? 1.5707963267948966 - y : y; x < 0.0 ? -q : q",
    "atan2": "a = x < 0.0 ? -x : x; b = y < 0.0 ? -y : y; steep = a > b; m = steep ? a : b; "
    "n = steep ? b : a; r = n == inf ? 1.0 : n / m; t = @atan1 r; "
    "s = steep ? 1.5707963267948966 - t : t; w = y < 0.0 ? 3.141592653589793 - s : s; "
    "x < 0.0 ? -w : w",
    "divide": "y == 0.0 ? x * inf : x / y",
    "softplus": "n = x > 0.0; a = n ? -x : x; e = exp(a); l = @log1p e; n ? x + l : l",
}

# Numerical Recipes in C, section 6.2: relative error below 1.2e-7 everywhere.
_ERFC = (
    "z = abs(x); t = 1.0 / (1.0 + 0.5 * z); "
    "p = -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * (0.09678418 + "
    "t * (-0.18628806 + t * (0.27886807 + t * (-1.13520398 + t * (1.48851587 + "
    "t * (-0.82215223 + t * 0.17087277)))))))); "
    "e = t * exp(p - z * z); x < 0.5 ? 1.0 - erf(x) : e"
)
_LOG_ADD = (
    "n = x > y; m = n ? x : y; d = n ? y - x : x - y; "
    "a = x == y && abs(x) == inf ? 0.0 : d; e = exp(a); l = @log1p e; m + l"
)
_LOG2_ADD = _LOG_ADD.replace("exp(", "exp2(").replace("m + l", "m + l * 1.4426950408889634")
_ASINH = (
    "a = x < 0.0 ? -x : x; d = a + a * a / (1.0 + sqrt(a * a + 1.0)); l = @log1p d; "
    "r = a > 1e9 ? log(a) + 0.6931471805599453 : l; x < 0.0 ? -r : r"
)
_ACOSH = (
    "d = x - 1.0; r = d + sqrt(d * (x + 1.0)); l = @log1p r; "
    "x > 1e9 ? log(x) + 0.6931471805599453 : l"
)
_ATANH = (
    "a = x < 0.0 ? -x : x; u = 2.0 * a; v = 1.0 - a; d = @divide u v; l = @log1p d; "
    "x < 0.0 ? -0.5 * l : 0.5 * l"
)
_SINH = (
    "a = x < 0.0 ? -x : x; m = @expm1 a; "
    "b = a > 40.0 ? 0.5 * exp(a) : 0.5 * (m + m / (m + 1.0)); x < 0.0 ? -b : b"
)
_COSH = (
    "a = abs(x); m = @expm1 a; a > 40.0 ? 0.5 * exp(a) : 1.0 + 0.5 * m * (m / (m + 1.0))"
)
# Near 0 by the series, as sin(z) / z cancels in the derivative.
_SINC = (
    "z = x * 3.141592653589793; w = z * z; "
    "p = 1.0 - w * (0.16666666666666666 - w * (8.333333333333333e-3 - w * "
    "(1.984126984126984e-4 - w * (2.755731922398589e-6 - w * 2.505210838544172e-8)))); "
    "abs(z) < 0.25 ? p : sin(z) / z"
)

# name: (formula, operands, options with their defaults)
_X, _XY = ("input",), ("input", "other")
_FORMULAS: dict[str, tuple] = {
    "relu": ("max(0.0, x)", _X, {}),
    "silu": ("x * sigmoid(x)", _X, {}),
    "expm1": (_PARTS["expm1"], _X, {}),
    "log1p": (_PARTS["log1p"], _X, {}),
    "log10": ("log(x) * 0.4342944819032518", _X, {}),
    "softplus": (
        "s = beta * x; l = @softplus s; s > threshold ? x : l / beta",
        _X,
        {"beta": 1.0, "threshold": 20.0},
    ),
    "logsigmoid": ("n = -x; l = @softplus n; -l", _X, {}),
    "atan": (_PARTS["atan"], _X, {}),
    "atan2": (_PARTS["atan2"], _XY, {}),
    "asin": ("r = x / (1.0 + sqrt(1.0 - x * x)); a = @atan r; 2.0 * a", _X, {}),
    "acos": (
        "u = sqrt(1.0 - x); v = sqrt(1.0 + x); a = @atan2 u v; 2.0 * a",
        _X,
        {},
    ),
    "sinh": (_SINH, _X, {}),
    "cosh": (_COSH, _X, {}),
    "asinh": (_ASINH, _X, {}),
    "acosh": (_ACOSH, _X, {}),
    "atanh": (_ATANH, _X, {}),
    "erfc": (_ERFC, _X, {}),
    "elu": ("m = @expm1 x; x > 0.0 ? x : alpha * m", _X, {"alpha": 1.0}),
    "selu": (
        "m = @expm1 x; 1.0507009873554805 * (x > 0.0 ? x : 1.6732632423543772 * m)",
        _X,
        {},
    ),
    "leaky_relu": ("x > 0.0 ? x : x * slope", _X, {"negative_slope": 0.01}),
    "relu6": ("min(6.0, max(0.0, x))", _X, {}),
    "hardtanh": ("min(high, max(low, x))", _X, {"min_val": -1.0, "max_val": 1.0}),
    "hardsigmoid": ("min(6.0, max(0.0, x + 3.0)) / 6.0", _X, {}),
    "hardswish": ("x * min(6.0, max(0.0, x + 3.0)) / 6.0", _X, {}),
    "mish": ("l = @softplus x; x * tanh(l)", _X, {}),
    "softsign": ("x / (1.0 + abs(x))", _X, {}),
    "frac": ("x - trunc(x)", _X, {}),
    "deg2rad": ("x * 0.017453292519943295", _X, {}),
    "rad2deg": ("x * 57.29577951308232", _X, {}),
    "hypot": (
        "a = abs(x); b = abs(y); steep = a > b; m = steep ? a : b; n = steep ? b : a; "
        "r = n / m; a == inf || b == inf ? inf : "
        "m == 0.0 && n != n ? n : m * sqrt(1.0 + r * r)",
        _XY,
        {},
    ),
    "logaddexp": (_LOG_ADD, _XY, {}),
    "logaddexp2": (_LOG2_ADD, _XY, {}),
    "copysign": ("a = abs(x); y < 0.0 || pow(y, -1.0) < 0.0 ? -a : a", _XY, {}),
    "lerp": (
        "d = y - x; abs(z) < 0.5 ? x + z * d : y - d * (1.0 - z)",
        ("input", "end", "weight"),
        {},
    ),
    "addcmul": ("x + value * y * z", ("input", "tensor1", "tensor2"), {"value": 1.0}),
    "addcdiv": (
        "u = value * y; r = @divide u z; x + r",
        ("input", "tensor1", "tensor2"),
        {"value": 1.0},
    ),
    "celu": ("r = x / alpha; m = @expm1 r; x > 0.0 ? x : alpha * m", _X, {"alpha": 1.0}),
    "threshold": ("x > threshold ? x : value", _X, {"threshold": 0.0, "value": 0.0}),
    "tanhshrink": ("x - tanh(x)", _X, {}),
    "softshrink": (
        "x > lambd ? x - lambd : x < -lambd ? x + lambd : 0.0 * x",
        _X,
        {"lambd": 0.5},
    ),
    "hardshrink": ("x >= -lambd && x <= lambd ? 0.0 : x", _X, {"lambd": 0.5}),
    "prelu": ("x > 0.0 ? x : y * x", ("input", "weight"), {}),
    "sinc": (_SINC, _X, {}),
    "entr": ("x > 0.0 ? -x * log(x) : x == 0.0 ? 0.0 : x < 0.0 ? -inf : x", _X, {}),
    "xlog1py": ("l = @log1p y; x == 0.0 && (y <= -1.0 || y == inf) ? 0.0 : x * l", _XY, {}),
    "xlogy": ("x == 0.0 && (y <= 0.0 || y == inf) ? 0.0 : x * log(y)", _XY, {}),
    "logit": ("d = 1.0 - x; r = @divide x d; log(r)", _X, {}),
    "heaviside": ("x == 0.0 ? y : x > 0.0 ? 1.0 : 0.0", _XY, {}),
    "ldexp": ("x * exp2(y)", _XY, {}),
    "nan_to_num": (
        "x != x ? nan_in : x == inf ? posinf : x == -inf ? neginf : x",
        _X,
        {"nan": 0.0, "posinf": None, "neginf": None},
    ),
}
_FORMULAS["log_sigmoid"] = _FORMULAS["logsigmoid"]
for _name in "tan tan2 sin cos sinh cosh tanh".split():
    _FORMULAS["arc" + _name] = _FORMULAS["a" + _name]
_LARGEST = 3.4028234663852886e38
_SPELT = {"nan": "nan_in", "negative_slope": "slope", "min_val": "low", "max_val": "high"}


def _formula(text, defaults):
    def op(t, *operands, **options):
        dtype = joined([x.dtype_name for x in operands], "float")
        names = dict(zip("xyz", [convert(t, x, "float").name for x in operands]))
        for key, default in defaults.items():
            value = options.get(key, default)
            if value is None:
                value = -_LARGEST if key == "neginf" else _LARGEST
            option = cut(t, convert(t, t.value(value), "float"))
            names[_SPELT.get(key, key)] = option.name
        return t.named(run_steps(t, text, names), "float", dtype)

    return op


def _gelu(t, x, approximate="none"):
    if approximate not in ("none", "tanh"):
        fail(f"got approximate {approximate!r}, expected 'none' or 'tanh'")
    text = "0.5 * x * (1.0 + erf(x * 0.7071067811865476))"
    if approximate == "tanh":
        text = "0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))"
    return _formula(text, {})(t, x)


_FLOATS = "sqrt rsqrt exp exp2 log log2 sin cos tan tanh sigmoid erf".split()
BINARY.update(DIVISIONS)
UNARY.update({name: Op(float_call(name), _X) for name in _FLOATS})
_ALL = {
    **OTHER,
    **BINARY,
    **UNARY,
    **{n: Op(_formula(text, d), v, tuple(d)) for n, (text, v, d) in _FORMULAS.items()},
    "gelu": Op(_gelu, _X, ("approximate",)),
}
_ALL["expit"] = _ALL["sigmoid"]


def operator(name: str):
    """(operation, whether its operands change places) of a torch function's, method's or
    operator's name; None when there is none."""
    if name in _ALL:
        return _ALL[name], False
    name = name.removeprefix("special_").strip("_")
    if name.startswith("r") and name[1:] in BINARY and name not in _ALL:
        return BINARY[name[1:]], True
    return (_ALL[name], False) if name in _ALL else None


_WITHOUT_MEANING = {"out": None, "inplace": False}  # where they say what is so anyway
_OTHER_NAMES = {"self": "input", "x": "input", "x1": "input", "x2": "other"}


def bound(op: Op, name: str, arguments, options):
    """(operands, options by name) of a call, bound as torch binds them. An argument that the
    operation does not know is an error."""
    n, takes_any = len(op.values), "*" in op.options
    known = [o for o in op.options if o != "*"]
    given = dict(zip(op.values, arguments))
    rest = list(arguments[n:])
    if len(rest) > len(known) and not takes_any:
        fail(f"got {len(arguments)} arguments of {name}, expected {n + len(known)} at most")
    if not takes_any:
        given.update(zip(known, rest))
        rest = []
    for key, value in options.items():
        place = key if key in op.values or key in known else _OTHER_NAMES.get(key, key)
        if place in op.values or place in known:
            if place in given:
                fail(f"got {key} of {name} twice")
            given[place] = value
        elif key not in _WITHOUT_MEANING or value is not _WITHOUT_MEANING[key]:
            fail(f"got {key}={value!r} of {name}, which has no meaning for one score here")
    missing = [v for v in op.values if v not in given]
    if missing:
        fail(f"got {name} without {missing[0]}, expected {n} values: {', '.join(op.values)}")
    values = [given.pop(v) for v in op.values]
    return values, rest, given
