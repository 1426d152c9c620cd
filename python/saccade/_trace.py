"""Python callables to language text, by running them once on symbols.

A `Traced` value is the name of a local in the text being written. Operators and torch functions
(through __torch_function__) append one local each; indexing a real tensor with a Traced value
captures the tensor. Nothing is compiled by torch and no value is ever computed.
"""

from __future__ import annotations

import linecache
import math
from typing import Any

from . import _ops
from ._errors import NeedsConstant, TraceError, fail

_INT32 = (-(1 << 31), (1 << 31) - 1)
MAX_VECTOR = 512  # entries of a captured row that a mod may sum over


def tensor_type(tensor) -> str:
    """bool, int or float: what an element of a captured tensor is in the language."""
    dtype = str(tensor.dtype).rsplit(".", 1)[-1]
    if dtype == "bool":
        return "bool"
    if "complex" in dtype or dtype.startswith("q"):
        fail(f"got a captured tensor of {dtype}, expected bool, int or float")
    return "int" if "int" in dtype else "float"


class Tracer:
    """The text being written and what it captures."""

    def __init__(self, kind: str):
        self.kind = kind
        self.definitions: list[str] = []
        self.lines: list[str] = []
        self.captures: list[tuple[str, object]] = []  # name, tensor or number
        self._names: dict[int, str] = {}
        self._seen: dict[str, str] = {}
        self.uses_shapes = False  # the text holds sizes of captured tensors
        self.volatile = False  # the text holds values of captured tensors
        self.inside = 0  # depth of our own work, whose look at tensors is no use by the mod
        self.lifted_used = False

    def local(self, text: str, type: str, nonneg: bool = False) -> "Traced":
        name = self._seen.get(text)
        if name is None:
            name = self._seen[text] = f"t{len(self.lines)}"
            self.lines.append(f"{name} = {text};")
        return Traced(self, name, type, nonneg)

    def capture(self, value) -> str:
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"{self.kind}{len(self.captures)}"
            self.captures.append((name, value))
        return name

    def inline(self, text: str, free, captures: dict, indices: dict, kind: str) -> "Traced":
        """Language text as a function of this text; free: its (name, rank)s."""
        name = f"inline{len(self.definitions)}"
        moved = " ".join(f"{n} = {n}_in;" for n in indices)
        params = [f"{n}_in" for n in indices] + [n + "[]" * (rank > 0) for n, rank in free]
        missing = [n for n, _ in free if n not in captures]
        if missing:
            fail(f"got text that names {missing[0]}, expected a value for it")
        self.definitions.append(f"{kind} {name}({', '.join(params)}) = {{ {moved} {text} }};")
        given = [v.name for v in indices.values()] + [
            self.value(captures[n]).name if rank == 0 else self.capture(captures[n])
            for n, rank in free
        ]
        return self.local(f"{name}({', '.join(given)})", "bool" if kind == "mask" else "float")

    def text(self, result: "Traced") -> str:
        return " ".join(self.definitions + self.lines + [result.name])

    def value(self, x) -> "Traced":
        """Anything a mod may compute with, as Traced."""
        if isinstance(x, Traced):
            return x
        if isinstance(x, Lifted):
            self.lifted_used = True
            return Traced(self, self.capture(x), x.type, False)
        if isinstance(x, bool):
            return Traced(self, "true" if x else "false", "bool")
        if isinstance(x, int):
            if not _INT32[0] <= x <= _INT32[1]:
                fail(f"got the integer {x}, expected one that fits 32 bits")
            return Traced(self, str(x) if x >= 0 else f"({x})", "int", x >= 0, x)
        if isinstance(x, float):
            return Traced(self, _float_text(x), "float", x >= 0, x)
        if hasattr(x, "dtype") and hasattr(x, "shape"):
            if not hasattr(x, "stride") and x.shape == ():  # a NumPy scalar
                return self.value(x.item())
            if len(x.shape) == 0:
                if getattr(x, "is_cuda", False):  # read where it lies, as one element
                    return self.local(f"{self.capture(x)}[0]", tensor_type(x))
                return Traced(self, self.capture(x), tensor_type(x))
            self.uses_shapes = True
            if all(n == 1 for n in x.shape):
                zeros = ", ".join("0" for _ in x.shape)
                return self.local(f"{self.capture(x)}[{zeros}]", tensor_type(x))
            fail(
                f"got a whole captured tensor of shape {tuple(x.shape)}, expected one element: "
                "index it with b, h, q_idx or kv_idx"
            )
        if isinstance(x, Rows):
            fail(f"got a captured tensor with {x.rank} index(es) missing, expected one element")
        fail(f"got a {type(x).__name__}, expected a number, a tensor element or a traced value")


def _float_text(x: float) -> str:
    if math.isnan(x):
        return "(inf - inf)"
    if math.isinf(x):
        return "inf" if x > 0 else "(-inf)"
    text = repr(x)
    text = text if "." in text or "e" in text else text + ".0"
    return text if math.copysign(1, x) > 0 else f"({text})"


def apply(tracer: Tracer, name: str, arguments, options):
    """One torch call on traced values."""
    tracer.inside += 1
    try:
        return _apply(tracer, name, arguments, options)
    finally:
        tracer.inside -= 1


def _apply(tracer, name, arguments, options):
    if name.strip("_") == "getitem":
        return _index(tracer, arguments[0], arguments[1])
    if name.strip("_") == "setitem":
        fail("got an assignment to an element; mods only compute, they change nothing")
    found = _ops.operator(name)
    if any(isinstance(a, (Rows, Vector)) for a in arguments):
        return _vector_call(tracer, name, found, arguments, options)
    if found is None:
        fail(
            f"got torch.{name.strip('_')}, which has no meaning for one score; expected "
            "arithmetic, comparisons, torch.where and other pointwise functions"
        )
    handler, arity, swap = found
    if name.endswith("_") and not name.endswith("__"):
        fail(f"got {name}, which changes its argument; write {name[:-1]} and use its result")
    options = {
        k: v
        for k, v in options.items()
        if k in ("min", "max", "rounding_mode", "dtype", "fill_value", "alpha")
        and v is not None
    }
    if arity == 2 and options.pop("alpha", 1) != 1:
        fail("got alpha, expected a plain sum")
    keep = ("min", "max") if handler is _ops.clamp else ()
    values = [
        (
            tracer.value(a)
            if not (
                not arity
                and (
                    a is None
                    or str(a).startswith("torch.")
                    or isinstance(a, (str, tuple, list))
                    or (keep and i > 0)
                )
            )
            else a
        )
        for i, a in enumerate(arguments)
    ]
    if arity == 2 and len(values) == 1:
        fail(f"got {name} of one value, expected two")
    if swap:
        values[:2] = values[1::-1]
    if arity:
        options.pop("dtype", None)
        return handler(tracer, *values[:arity])
    return handler(tracer, *values, **options)


# ---- captured tensors ----


class Rows:
    """A captured tensor with its first indices given and some still missing."""

    def __init__(self, tracer, tensor, indices):
        self.tracer, self.tensor, self.indices = tracer, tensor, indices

    @property
    def rank(self):
        return len(self.tensor.shape) - len(self.indices)

    @property
    def shape(self):
        self.tracer.uses_shapes = True
        return self.tensor.shape[len(self.indices) :]

    dtype = property(lambda self: self.tensor.dtype)

    def __getitem__(self, index):
        return apply(self.tracer, "getitem", (self, index), {})

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def __len__(self):
        return self.shape[0]

    def elements(self) -> "Vector":
        if self.rank != 1 or self.shape[0] > MAX_VECTOR:
            fail(
                f"got a captured slice of shape {tuple(self.shape)}, expected one element or a "
                f"row of at most {MAX_VECTOR}"
            )
        self.tracer.uses_shapes = True
        return Vector(self.tracer, [self[i] for i in range(self.shape[0])])

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.elements(), name)


class Vector:
    """A few traced values side by side, for sums over a captured row."""

    def __init__(self, tracer, items):
        self.tracer, self.items = tracer, items

    def _fold(self, op):
        total = self.items[0]
        for x in self.items[1:]:
            total = op(self.tracer, total, x)
        return total

    def sum(self, *_, **__):
        return self._fold(_ops.arith("+"))

    def any(self, *_, **__):
        return self._fold(_ops.logical("||"))

    def all(self, *_, **__):
        return self._fold(_ops.logical("&&"))

    def mean(self, *_, **__):
        return self.sum() / float(len(self.items))

    def amax(self, *_, **__):
        return self._fold(_ops.extreme("max"))

    def amin(self, *_, **__):
        return self._fold(_ops.extreme("min"))

    def norm(self, *_, **__):
        return Vector(self.tracer, [x * x for x in self.items]).sum().sqrt()

    def dot(self, other):
        return (self * other).sum()

    @property
    def shape(self):
        return (len(self.items),)

    def __getattr__(self, name):
        found = None if name.startswith("__") else _ops.operator(name)
        if found is None:
            raise AttributeError(name)
        return lambda *a, **o: _vector_call(self.tracer, name, found, (self, *a), o)


_REDUCTIONS = {
    "sum",
    "any",
    "all",
    "mean",
    "amax",
    "amin",
    "norm",
    "dot",
    "vector_norm",
    "vdot",
    "inner",
}


def _vector_call(tracer, name, found, arguments, options):
    plain = name.strip("_")
    parts = [a.elements() if isinstance(a, Rows) else a for a in arguments]
    if plain in _REDUCTIONS:
        method = {"vector_norm": "norm", "vdot": "dot", "inner": "dot"}.get(plain, plain)
        return getattr(parts[0], method)(*parts[1:])
    if found is None:
        fail(f"got torch.{plain} of a captured row, expected pointwise functions and sums")
    lengths = {len(p.items) for p in parts if isinstance(p, Vector)}
    if len(lengths) != 1:
        fail(f"got captured rows of lengths {sorted(lengths)}, expected one length")
    return Vector(
        tracer,
        [
            apply(
                tracer,
                name,
                [p.items[i] if isinstance(p, Vector) else p for p in parts],
                options,
            )
            for i in range(lengths.pop())
        ],
    )


def _one_index(tracer, tensor, dim, index) -> str:
    size = int(tensor.shape[dim])
    if isinstance(index, (Traced, Lifted)) or hasattr(index, "dtype"):
        x = tracer.value(index)
        if x.type == "bool" or x.type == "float":
            fail(f"got a {x.type} as an index, expected int: convert it with .int()")
        if x.nonneg:
            return x.name
        tracer.uses_shapes = True
        return tracer.local(f"({x.name} < 0 ? {x.name} + {size} : {x.name})", "int").name
    if isinstance(index, int) and not isinstance(index, bool):
        if not -size <= index < size:
            fail(f"got index {index} in dimension {dim}, expected {-size} to {size - 1}")
        tracer.uses_shapes |= index < 0
        return str(index % size)
    fail(
        f"got a {type(index).__name__} as an index, expected b, h, q_idx, kv_idx or an integer "
        "made from them"
    )


def _index(tracer, tensor, index):
    index = index if isinstance(index, tuple) else (index,)
    if isinstance(tensor, Traced):
        fail("got an index on a traced scalar, expected a captured tensor")
    base, given = (tensor.tensor, tensor.indices) if isinstance(tensor, Rows) else (tensor, ())
    if isinstance(tensor, Vector):
        fail("got an index on a computed row, expected one on the captured tensor")
    if any(i is Ellipsis or i is None or isinstance(i, slice) for i in index):
        whole = all(i is Ellipsis or i == slice(None) for i in index[len(index) - 1 :])
        if not whole or any(
            i is Ellipsis or i is None or isinstance(i, slice) for i in index[:-1]
        ):
            fail("got a slice or None as an index, expected integers")
        index = index[:-1]
    if len(given) + len(index) > len(base.shape):
        fail(
            f"got {len(given) + len(index)} indices, expected {len(base.shape)} for a captured "
            f"tensor of shape {tuple(base.shape)}"
        )
    names = given + tuple(
        _one_index(tracer, base, len(given) + i, x) for i, x in enumerate(index)
    )
    if len(names) < len(base.shape):
        return Rows(tracer, base, names)
    return tracer.local(f"{tracer.capture(base)}[{', '.join(names)}]", tensor_type(base))


# ---- values ----


class Lifted:
    """A Python number of the user's closure, turned into a scalar capture."""

    def __init__(self, tracer, value, leaf):
        self.tracer, self.value, self.leaf = tracer, value, leaf
        self.type = "int" if isinstance(value, int) else "float"


class Traced:
    """One local of the text. Behaves as a 0-d tensor; its value is never known."""

    __slots__ = ("tracer", "name", "type", "nonneg", "constant")

    def __init__(self, tracer, name, type, nonneg=False, constant=None):
        self.tracer, self.name, self.type = tracer, name, type
        self.nonneg, self.constant = nonneg, constant

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        tracer = _find_tracer(args, kwargs)
        return apply(tracer, getattr(func, "__name__", str(func)), args, kwargs or {})

    shape = property(lambda self: ())
    ndim = property(lambda self: 0)
    device = property(lambda self: "cpu")

    def __bool__(self):
        fail(
            "got if, and, or, not or a chained comparison on a value that differs from score "
            "to score; write torch.where(condition, a, b), &, | and ~ (torch.maximum and "
            "torch.minimum for max and min)",
            self._kind(),
        )

    def _kind(self):
        return NeedsConstant if self.tracer.lifted_used else TraceError

    def _number(self):
        fail(
            "got a traced value where Python needs a number (the count of a loop, a bound of a "
            "slice, item()); it differs from score to score: write arithmetic, torch.where and "
            "tensor[index] with it",
            self._kind(),
        )

    __index__ = __int__ = __float__ = __complex__ = lambda self: self._number()
    __round__ = __trunc__ = __floor__ = __ceil__ = lambda self, *_: self._number()

    def item(self):
        self._number()

    def tolist(self):
        self._number()

    def __iter__(self):
        fail("got a loop over a traced value, expected a scalar")

    def __len__(self):
        fail("got len of a traced value, expected a scalar")

    def __setitem__(self, index, value):
        fail("got an assignment to an element; mods only compute, they change nothing")

    def __getitem__(self, index):
        if index is Ellipsis or index == ():
            return self
        return _index(self.tracer, self, index)

    def __getattr__(self, name):
        if name.startswith("__") or _ops.operator(name) is None:
            raise AttributeError(f"a traced value has no {name}")
        return lambda *a, **o: apply(self.tracer, name, (self, *a), o)

    __hash__ = object.__hash__
    __pos__ = lambda self: self  # noqa: E731


def _find_tracer(args, kwargs):
    for a in list(args) + list((kwargs or {}).values()):
        if isinstance(a, (Traced, Rows, Vector, Lifted)):
            return a.tracer
        if isinstance(a, (tuple, list)):
            inner = _find_tracer(a, None)
            if inner is not None:
                return inner
    return None


def _method(name):
    return lambda self, *others: apply(self.tracer, name, (self, *others), {})


_DUNDERS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "and rand or ror xor rxor lshift rlshift rshift rrshift lt le gt ge eq ne neg abs "
    "invert"
).split()
_symbols: tuple[Any, ...] = (Traced, Rows, Vector, Lifted)
for _cls in _symbols:
    for _name in _DUNDERS:
        setattr(_cls, f"__{_name}__", _method(f"__{_name}__"))
    if _cls is not Traced:
        _cls.__torch_function__ = Traced.__torch_function__
        _cls.__hash__ = object.__hash__
for _name in "bool index int float complex round trunc floor ceil".split():
    setattr(
        Lifted,
        f"__{_name}__",
        lambda self, *_: fail("got a captured number where its value is needed", NeedsConstant),
    )

_SHAPES = frozenset(
    "shape ndim size dim numel nelement stride ndimension __len__ is_contiguous".split()
)
_HARMLESS = frozenset(
    "dtype device is_cuda is_cpu layout requires_grad is_leaf is_floating_point element_size "
    "is_complex grad_fn get_device itemsize names __hash__ is_signed is_nested is_sparse "
    "is_quantized is_meta is_mkldnn is_mps is_xpu __format__".split()
)
_VIEWS = frozenset(  # the result is the tensor's own memory
    "view transpose permute t T mT swapaxes swapdims movedim unsqueeze squeeze expand "
    "expand_as select narrow detach unbind split chunk view_as broadcast_to diagonal".split()
)


_AUGMENTED = frozenset(
    f"__i{n}__" for n in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
)


def _changes_its_argument(name: str) -> bool:
    if name.startswith("__"):
        return name in _AUGMENTED or name == "__setitem__"
    return name.endswith("_")


def _has_tensor(arguments) -> bool:
    return any(
        _has_tensor(a) if isinstance(a, (tuple, list)) else hasattr(a, "stride")
        for a in arguments
    )


def _is_view(name, args) -> bool:
    if name in _VIEWS:
        return True
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index)


def _watching(tracer: Tracer):
    """Notes what the mod reads of real tensors besides elements at traced indices."""
    from torch.overrides import TorchFunctionMode

    own: dict[int, object] = {}  # what the mod itself made; it may change that

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if not tracer.inside and _find_tracer(args, kwargs) is None:
                name = getattr(func, "__name__", "")
                if name == "__get__":
                    name = getattr(func.__self__, "__name__", "")
                if name in _SHAPES:
                    tracer.uses_shapes = True
                elif _changes_its_argument(name) and id(args[0]) not in own:
                    fail(
                        f"got {name}, which changes a captured tensor; mods only compute, they "
                        "change nothing: clone() it, or compute it outside of the mod"
                    )
                elif name not in _HARMLESS:
                    is_view = _is_view(name, args)
                    if not is_view:
                        tracer.volatile |= _has_tensor(args) or _has_tensor(kwargs.values())
                    result = func(*args, **kwargs)
                    if not is_view or id(args[0]) in own:
                        own[id(result)] = result
                    return result
            return func(*args, **kwargs)

    return Watching()


def _definition(fn) -> str:
    """Where a mod is written, for what its result is wrong about."""
    code = getattr(getattr(fn, "func", fn), "__code__", None)
    if code is None:
        return ""
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"{code.co_filename}:{code.co_firstlineno}: {line}\n    "


def run(fn, kind: str, tracer: Tracer | None = None) -> tuple[str, list[tuple[str, object]]]:
    """Text and captures of one callable; kind is "score" (5 arguments) or "mask" (4)."""
    t = tracer or Tracer(kind)
    indices = [Traced(t, n, "int", True) for n in ("b", "h", "q", "kv")]
    first = [Traced(t, "score", "float")] if kind == "score" else []
    with _watching(t):
        result = fn(*first, *indices)
    t.inside += 1
    where = _definition(fn)
    if result is None or isinstance(result, (Rows, Vector)):
        got = "nothing" if result is None else "a row"
        raise TraceError(f"{where}got {got} as the result, expected one value")
    result = t.value(result)
    if kind == "mask" and result.type != "bool":
        raise TraceError(
            f"{where}got a {result.type} as the mask, expected bool: write a comparison"
        )
    if kind == "score":
        result = _ops.convert(t, result, "float")
    return t.text(result), t.captures
