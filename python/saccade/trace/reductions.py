"""What captured rows become in a mod: sums and their kin, and functions of each entry."""

from __future__ import annotations

import math

from . import ops
from .dtypes import name_of
from .errors import fail, words_of
from .functions import bound, operator
from .ops import Op
from .rows import Vector, is_row, row_of, vector_of


def _sum(t, row):
    wide = [ops.convert(t, x, "int") if x.kind == "bool" else x for x in row.items]
    wide = [t.with_dtype(x, "int64") if x.kind == "int" else x for x in wide]
    return Vector(t, wide).fold(ops.arith("+"))


def _mean(t, row):
    return ops.true_divide(t, _sum(t, row), t.value(float(len(row.items))))


def _product(t, row):
    return row.fold(ops.arith("*"))


def _dot(t, row, other):
    return _sum(t, t.apply("mul", (row, other), {}))


def _norm(t, row, p=2):
    size = [t.apply("abs", (x,), {}) for x in row.items]
    size = Vector(t, [ops.convert(t, x, "float") for x in size])
    if p in (2, "fro", None):
        return t.apply("sqrt", (_dot(t, row, row),), {})
    if p == 1:
        return _sum(t, size)
    if abs(p) == math.inf:
        return size.fold(ops.extreme("max" if p > 0 else "min"))
    if p == 0:
        return _sum(t, Vector(t, [x != 0 for x in size.items]))
    powers = Vector(t, [t.apply("pow", (x, float(p)), {}) for x in size.items])
    total = _sum(t, powers)  # of 0 the power has an infinite slope
    made = t.apply("pow", (total, 1 / p), {})
    return t.apply("where", (total == 0, 0.0, made), {}) if p > 0 else made


def _isin(t, row, other, assume_unique=False, invert=False):
    if isinstance(row, Vector):
        fail("got isin of a captured row, expected isin of one value in a row")
    others = vector_of(t, other)
    if not others.items:
        return t.value(bool(invert))
    found = t.apply("eq", (others, row), {})
    return _invert(t, found.fold(ops.logical("||")), invert)


def _bucketize(t, x, row, out_int32=False, right=False):
    """How many of a row's rising entries lie below x, or with right not above it."""
    if isinstance(x, Vector):
        fail("got bucketize of a captured row, expected one value among a row's boundaries")
    row = vector_of(t, row)
    if not row.items:
        return t.value(0)
    past = t.apply("logical_not", (t.apply("gt" if right else "ge", (row, x), {}),), {})
    found = _sum(t, past)
    return t.with_dtype(found, "int32") if out_int32 else found


def _searchsorted(t, row, x, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        fail("got searchsorted with a sorter, expected a row that rises")
    if side not in (None, "left", "right") or (right and side == "left"):
        fail(f"got searchsorted with side {side!r}, expected 'left' or, as right says, 'right'")
    return _bucketize(t, x, row, out_int32, right or side == "right")


def _invert(t, x, wanted):
    return t.apply("logical_not", (x,), {}) if wanted else x


def _einsum(t, equation, *rows):
    """Dots stand for the dimensions that have an index already, and so for none."""
    inputs, _, output = equation.replace(" ", "").replace("...", "").partition("->")
    if output or len(rows) != 2 or len(set(inputs.split(","))) != 1 or len(inputs) != 3:
        fail(f"got einsum {equation!r}, expected the sum of two rows: 'd,d->'")
    return _dot(t, *[vector_of(t, x) for x in rows])


class _Extreme:
    """What max(dim) gives: values and indices."""

    def __init__(self, values, find):
        self.values, self.find = values, find

    def __getitem__(self, i):
        return self.values if i == 0 else self.indices

    @property
    def indices(self):
        return self.find()


def _first_of(name):
    """The larger or the lesser of two, a NaN before all others; of twins the first, which has
    all of the gradient."""

    def op(t, x, y):
        if x.kind == "bool":
            return ops.extreme(name)(t, x, y)
        (x, y), type, dtype = ops.promoted(t, (x, y), "int")
        beyond = f"{y.name} {'>' if name == 'max' else '<'} {x.name}"
        beyond += f" || {y.name} != {y.name}" if type == "float" else ""
        return t.local(f"({beyond} ? {y.name} : {x.name})", type, dtype=dtype)

    return op


def _extreme(name):
    def op(t, row, dim=None):
        if dim is None:
            return row.fold(ops.extreme(name))
        return _Extreme(row.fold(_first_of(name)), lambda: _place_of(name)(t, row))

    return op


def _place_of(name):
    """The first place of the largest or least entry; a NaN is beyond all others."""

    def op(t, row):
        best, place = row.items[0], t.value(0)
        for i, x in enumerate(row.items[1:], 1):
            beyond = t.apply("gt" if name == "max" else "lt", (x, best), {})
            if x.kind == "float":
                nan = t.apply("logical_and", (x != x, best == best), {})
                beyond = t.apply("logical_or", (beyond, nan), {})
            place = t.apply("where", (beyond, i, place), {})
            best = t.apply("where", (beyond, x, best), {})
        return t.with_dtype(t.value(place), "int64")

    return op


# ---- what a row becomes, or is summed up by, in a few steps ----


def _each(t, name, row, *others):
    return Vector(t, [t.apply(name, (x, *others), {}) for x in row.items])


def _exponents(t, row, is_sum=False):
    """exp(x - m), x - m and m, the largest entry; of a sum, 0 where that is infinite."""
    row = Vector(t, [ops.convert(t, x, "float") for x in row.items])
    most = row.fold(ops.extreme("max"))
    if is_sum:
        most = t.apply("where", (t.apply("isinf", (most,), {}), 0.0, most), {})
    off = _each(t, "sub", row, most)
    return _each(t, "exp", off), off, most


def _logsumexp(t, row):
    powers, _, most = _exponents(t, row, is_sum=True)
    return t.apply("add", (t.apply("log", (_sum(t, powers),), {}), most), {})


def _softmax(t, row, _stacklevel=3):
    """A row whose largest entry is infinite gives NaN, as torch's."""
    powers, _, _ = _exponents(t, row)
    return _each(t, "true_divide", powers, _sum(t, powers))


def _log_softmax(t, row, _stacklevel=3):
    powers, off, _ = _exponents(t, row)
    return _each(t, "sub", off, t.apply("log", (_sum(t, powers),), {}))


def _var(t, row, unbiased=True, correction=None):
    less = int(unbiased) if correction is None else correction
    off = _each(t, "sub", row, _mean(t, row))
    return ops.true_divide(t, _dot(t, off, off), t.value(float(max(len(row.items) - less, 0))))


def _std(t, row, **how):
    return t.apply("sqrt", (_var(t, row, **how),), {})


def _cosine(t, row, other, eps=1e-8):
    if not isinstance(other, Vector):
        fail(
            f"got cosine_similarity of a captured row and {words_of(other)}, expected two rows"
        )
    sizes = [t.apply("clamp", (_norm(t, x), eps), {}) for x in (row, other)]
    return ops.true_divide(t, _dot(t, row, other), t.apply("mul", sizes, {}))


def _normalize(t, row, p=2.0, eps=1e-12):
    return _each(t, "true_divide", row, t.apply("clamp", (_norm(t, row, p), eps), {}))


def _distance(t, row, other, p=2):
    return _norm(t, t.apply("sub", (row, other), {}), p)


def _cumsum(t, row):
    total, made = row.items[0], []
    for k, x in enumerate(row.items):
        total = t.apply("add", (total, x), {}) if k else x
        made.append(total)
    return Vector(t, made)


_DIM = ("dim", "keepdim", "dtype")
_OF_ONE_VALUE = ("isin", "bucketize", "searchsorted")  # and a row
_SPREAD = ("dim", "unbiased", "keepdim", "correction")
_NORMS = ("vector_norm", "linalg_vector_norm", "linalg_norm")
_DOTS = "dot vdot inner matmul rmatmul vecdot linalg_vecdot".split()
_IN_STEPS = {
    "softmax": Op(_softmax, ("input",), ("dim", "dtype", "_stacklevel")),
    "log_softmax": Op(_log_softmax, ("input",), ("dim", "dtype", "_stacklevel")),
    "logsumexp": Op(_logsumexp, ("input",), ("dim", "keepdim")),
    "var": Op(_var, ("input",), _SPREAD),
    "std": Op(_std, ("input",), _SPREAD),
    "argmax": Op(_place_of("max"), ("input",), ("dim", "keepdim")),
    "argmin": Op(_place_of("min"), ("input",), ("dim", "keepdim")),
    "cosine_similarity": Op(_cosine, ("input", "other"), ("dim", "eps")),
    "normalize": Op(_normalize, ("input",), ("p", "dim", "eps")),
    "cumsum": Op(_cumsum, ("input",), ("dim", "dtype")),
}
_REDUCTIONS = {
    **_IN_STEPS,
    "sum": Op(_sum, ("input",), _DIM),
    "mean": Op(_mean, ("input",), _DIM),
    "prod": Op(_product, ("input",), _DIM),
    "any": Op(lambda t, x: x.fold(ops.logical("||")), ("input",), _DIM),
    "all": Op(lambda t, x: x.fold(ops.logical("&&")), ("input",), _DIM),
    "amax": Op(lambda t, x: x.fold(ops.extreme("max")), ("input",), _DIM),
    "amin": Op(lambda t, x: x.fold(ops.extreme("min")), ("input",), _DIM),
    "max": Op(_extreme("max"), ("input",), _DIM),
    "min": Op(_extreme("min"), ("input",), _DIM),
    "norm": Op(_norm, ("input",), ("p", *_DIM)),
    **{n: Op(_norm, ("input",), ("ord", *_DIM)) for n in _NORMS},
    "dist": Op(_distance, ("input", "other"), ("p",)),
    "isin": Op(_isin, ("elements", "test_elements"), ("assume_unique", "invert")),
    "bucketize": Op(_bucketize, ("input", "boundaries"), ("out_int32", "right")),
    "searchsorted": Op(
        _searchsorted,
        ("sorted_sequence", "input"),
        ("out_int32", "right", "side", "sorter"),
    ),
    **{n: Op(_dot, ("input", "other"), ("dim",)) for n in _DOTS},
}


def is_of_rows(plain, arguments) -> bool:
    """Whether an operation is on a captured row, or on a whole captured tensor as one."""
    is_sum = plain in _REDUCTIONS and operator(plain) is None  # of a value too
    return plain == "einsum" or is_sum or any(map(is_row, arguments))


def is_reduction(name: str) -> bool:
    return name in _REDUCTIONS


def vector_call(tracer, plain, found, arguments, options):
    """An operation on rows: a reduction, or one on each element."""
    parts = [row_of(tracer, a) for a in arguments]
    if plain == "einsum":
        return _einsum(tracer, *parts)
    is_pair = plain in ("max", "min") and len(parts) > 1 and not isinstance(parts[1], int)
    if plain in _REDUCTIONS and not is_pair:
        return _reduced(tracer, plain, parts, options)
    if found is None:
        fail(f"got torch.{plain} of a captured row, expected pointwise functions and sums")
    if plain == "unsqueeze" or (plain in _SHAPES and len(_flat(parts[1:])) > 1):
        fail(f"got {plain} of a captured row to more than one dimension, expected its entries")
    lengths = {len(p.items) for p in parts if isinstance(p, Vector)}
    if len(lengths) != 1:
        fail(f"got captured rows of lengths {sorted(lengths)}, expected one length")
    pick = lambda i: [p.items[i] if isinstance(p, Vector) else p for p in parts]  # noqa: E731
    return Vector(tracer, [tracer.apply(plain, pick(i), options) for i in range(lengths.pop())])


_SHAPES = ("view", "reshape", "expand")


def _flat(sizes):
    return [n for s in sizes for n in (s if isinstance(s, (tuple, list)) else (s,))]


def _reduced(tracer, plain, parts, options):
    op = _REDUCTIONS[plain]
    values, _, given = bound(op, plain, parts, options)
    is_value = not isinstance(values[0], Vector)
    dim = given.pop("dim", None)
    given.pop("keepdim", None)  # one entry counts as a value
    if isinstance(dim, bool):  # var(False) says whether it is unbiased
        dim, given["unbiased"] = None, dim
    if dim not in (None, 0, -1, (0,), (-1,), [0], [-1], ()):
        fail(f"got {plain} along {dim}, expected it over the whole row")
    dtype = given.pop("dtype", None)
    if "ord" in given:
        given["p"] = given.pop("ord")
    if plain in ("max", "min") and dim is not None:
        given["dim"] = dim
    if plain in _IN_STEPS:
        values = [_as_vector(tracer, x) for x in values]
    elif plain not in _OF_ONE_VALUE and not isinstance(values[0], Vector):
        return _of_one(tracer, plain, values)
    made = op.run(tracer, *values, **given)
    if isinstance(made, Vector) and is_value:
        made = made.items[0]
    if dtype is None:
        return made
    cast = lambda x: ops.to_dtype(tracer, x, name_of(dtype))  # noqa: E731
    return (
        Vector(tracer, list(map(cast, made.items))) if isinstance(made, Vector) else cast(made)
    )


def _as_vector(t, x):
    return x if isinstance(x, Vector) else Vector(t, [t.value(x)])


def _of_one(tracer, plain, values):
    """A reduction of rows of one element, which are scalars already."""
    if plain == "dist":
        return tracer.apply("abs", (tracer.apply("sub", values, {}),), {})
    if len(values) == 2:
        return tracer.apply("mul", values, {})
    if plain in ("norm", *_NORMS):
        return tracer.apply("abs", values, {})
    if plain in ("any", "all"):
        return ops.convert(tracer, tracer.value(values[0]), "bool")
    return tracer.value(values[0])
