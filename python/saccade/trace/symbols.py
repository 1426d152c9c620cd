"""What a mod computes with while it is traced: values of which only the name is known.

Operators and torch functions on a symbol are handed to its tracer, which writes them down.
"""

from __future__ import annotations

from .dtypes import DEFAULT_DTYPE
from .errors import NeedsConstant, NoSuchMethod, TraceError, fail


class Symbol:
    """Hands whatever is done to it to its tracer."""

    __slots__ = ("tracer",)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        tracer = find_tracer(args, kwargs)
        name = getattr(func, "__name__", str(func))
        if hasattr(func, "__objclass__"):
            name = method_name(name)
        return tracer.apply(name, args, kwargs or {})


def method_name(name: str) -> str:
    """The name of a tensor's method, where torch's function of that name takes other places."""
    return "Tensor.where" if name == "where" else name


def find_tracer(args, kwargs):
    """The tracer of the first symbol among the arguments; None if there is none."""
    for a in list(args) + list((kwargs or {}).values()):
        if isinstance(a, Symbol):
            return a.tracer
        if isinstance(a, (tuple, list)):
            inner = find_tracer(a, None)
            if inner is not None:
                return inner
    return None


def _method(name):
    return lambda self, *others: self.tracer.apply(name, (self, *others), {})


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "and rand or ror xor rxor lshift rlshift rshift rrshift lt le gt ge eq ne neg abs "
    "invert matmul rmatmul"
).split():
    setattr(Symbol, f"__{_name}__", _method(f"__{_name}__"))
Symbol.__hash__ = object.__hash__  # type: ignore[method-assign]


class Lifted(Symbol):
    """A Python number of the user's closure, turned into a scalar capture."""

    def __init__(self, tracer, value, leaf):
        self.tracer, self.value, self.leaf = tracer, value, leaf
        self.type = "int" if isinstance(value, int) else "float"

    def _needed(self, *_):
        fail("got a captured number where its value is needed", NeedsConstant)

    __bool__ = __index__ = __int__ = __float__ = __complex__ = _needed
    __round__ = __trunc__ = __floor__ = __ceil__ = __hash__ = __repr__ = __format__ = _needed
    __class__ = property(lambda self: type(self.value))  # for isinstance

    def __getattr__(self, name):
        self._needed()


class Traced(Symbol):
    """One local of the text. Behaves as a 0-d tensor; its value is never known."""

    __slots__ = ("name", "type", "nonneg", "constant", "dtype_name")

    def __init__(self, tracer, name, type, nonneg=False, constant=None, dtype=None):
        self.tracer, self.name, self.type = tracer, name, type
        self.nonneg, self.constant, self.dtype_name = nonneg, constant, dtype

    shape = property(lambda self: ())
    ndim = property(lambda self: 0)
    device = property(lambda self: "cpu")

    @property
    def dtype(self):
        import torch

        return getattr(torch, self.dtype_name or DEFAULT_DTYPE[self.type])

    def dim(self):
        return 0

    def numel(self):
        return 1

    def size(self, dim=None):
        return () if dim is None else fail("got size(dim) of a traced value, expected size()")

    def is_floating_point(self):
        return self.type == "float"

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
        fail("got an index on a traced scalar, expected a captured tensor")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(f"a traced value has no {name}")
        if not self.tracer.knows(name):
            fail(
                f"a traced value has no {name}, expected arithmetic, comparisons and torch's "
                "pointwise functions",
                NoSuchMethod,
            )
        return lambda *a, **o: self.tracer.apply(method_name(name), (self, *a), o)

    __pos__ = lambda self: self  # noqa: E731
