"""torch's dtypes of traced values: what operators give, and integers that wrap in few bits.

The language has bool, int (32 bits) and float. A traced value knows the dtype that it would
have in torch as well, by name ("uint8"); a Python number has none and takes the others' one.
"""

from __future__ import annotations

from .errors import fail

_RANK = {"bool": 0, "int": 1, "float": 2}
DEFAULT_DTYPE = {"bool": "bool", "int": "int64", "float": "float32"}
_INTEGERS = {f"{u}int{n}": (n, not u) for u in ("", "u") for n in (8, 16, 32, 64)}
_FLOATS = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}
WRAPS = {name: of for name, of in _INTEGERS.items() if of[0] < 32}  # (bits, whether signed)
_OF_METHOD = {"half": "float16", "double": "float64", "float": "float32", "short": "int16"}
_OF_METHOD |= {"int": "int32", "long": "int64", "bool": "bool", "char": "int8", "byte": "uint8"}
_OF_METHOD |= {"bfloat16": "bfloat16"}


def name_of(dtype) -> str:
    """ "float32" of torch.float32, of "torch.float32" and of an array's dtype."""
    name = str(dtype).rsplit(".", 1)[-1]
    name = _OF_METHOD.get(name, name)
    if name != "bool" and name not in _INTEGERS and name not in _FLOATS:
        fail(f"got dtype {dtype}, expected bool, int or float")
    return name


def language_type(dtype: str) -> str:
    """bool, int or float: what the language computes this dtype in."""
    return "bool" if dtype == "bool" else "int" if dtype in _INTEGERS else "float"


def _join(a: str, b: str) -> str:
    """The dtype of a tensor of a with one of b, both integers or both floats."""
    if a == b or a in _FLOATS:
        rank = _FLOATS.get(a, 0) - _FLOATS.get(b, 0)
        return a if a == b or rank > 0 else b if rank < 0 else "float32"
    (bits, is_signed), (other, other_is_signed) = _INTEGERS[a], _INTEGERS[b]
    if is_signed == other_is_signed:
        return a if bits > other else b
    signed, unsigned = (bits, other) if is_signed else (other, bits)
    return f"int{signed if signed > unsigned else min(2 * unsigned, 64)}"


def joined(dtypes, type: str) -> str | None:
    """The dtype of an operator's result, in the language a `type`; None of Python numbers."""
    strong = [d for d in dtypes if d is not None]
    if not strong:
        return None
    same = [d for d in strong if language_type(d) == type]
    if not same:
        return DEFAULT_DTYPE[type]
    found = same[0]
    for d in same[1:]:
        found = _join(found, d)
    return found


def highest(types) -> str:
    return max(types, key=_RANK.__getitem__)
