"""What a mod computes with while it is traced: values of which only the name is known.

Operators and torch functions on a symbol are handed to its tracer, which writes them down.
"""

from __future__ import annotations

import math

import torch

from .dtypes import DEFAULT_DTYPE
from .errors import NeedsConstant, NoSuchMethod, TraceError, fail


class Symbol:
    """Hands whatever is done to it to its tracer."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        tracer = find_tracer(args, kwargs)
        name = getattr(func, "__name__", str(func)).partition(".")[0]  # aten's: "mul.Tensor"
        if name == "__get__":
            return _attribute(args[0], func.__self__.__name__)
        if hasattr(func, "__objclass__"):
            name = method_name(name)
        return tracer.apply(name, args, kwargs or {})


def _attribute(symbol, name: str):
    """What torch's own descriptor of an attribute was asked for."""
    if name.startswith("_"):
        raise AttributeError(f"a traced value has no {name}")
    return getattr(symbol, name)


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


_ARITHMETIC = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
for _name in _ARITHMETIC.split():
    setattr(Symbol, f"__{_name}__", _method(f"__{_name}__"))
    setattr(Symbol, f"__r{_name}__", _method(f"__r{_name}__"))
    setattr(Symbol, f"__i{_name}__", _method(f"__{_name}__"))  # x += y gives x another value
for _name in "lt le gt ge eq ne neg abs invert divmod rdivmod".split():
    setattr(Symbol, f"__{_name}__", _method(f"__{_name}__"))
Symbol.__hash__ = object.__hash__  # type: ignore[method-assign]


class Lifted(Symbol):
    """A Python number of the user's closure, turned into a scalar capture."""

    def __init__(self, tracer, value, leaf):
        self.tracer, self.value, self.leaf = tracer, value, leaf
        self.kind = "int" if isinstance(value, int) else "float"

    def _needed(self, *_):
        fail("got a captured number where its value is needed", NeedsConstant)

    __bool__ = __index__ = __int__ = __float__ = __complex__ = _needed
    __round__ = __trunc__ = __floor__ = __ceil__ = __hash__ = __repr__ = __format__ = _needed
    __class__ = property(lambda self: type(self.value))  # for isinstance

    def __getattr__(self, name):
        self._needed()


SYMBOLIC = torch.SymInt, torch.SymFloat


def as_tensor(x, is_double: bool):
    """Numbers of graphs, which differ from call to call, are captured as tensors are."""
    if not isinstance(x, SYMBOLIC):
        return x
    dtype = torch.float64 if is_double else torch.float32
    dtype = torch.int32 if isinstance(x, torch.SymInt) else dtype
    return torch.scalar_tensor(x, dtype=dtype, device="cpu")


_CPU = torch.device("cpu")
_OF_NUMPY = {"power": "pow", "float_power": "pow", "equal": "eq", "rint": "round"}
_OF_NUMPY |= {"left_shift": "lshift", "right_shift": "rshift"}


class TensorSymbol(Symbol, torch.Tensor):
    """A symbol that is a tensor to isinstance, and to what of torch asks no
    __torch_function__: there it ends in an error, as it has no value.

    It requires a gradient where it is a float: that is how one finds what an autograd.Function
    made of it (grad_mode.py)."""

    @staticmethod
    def wrapper(cls, is_float: bool, size=()):
        dtype = torch.float32 if is_float else torch.int32
        return torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=_CPU, requires_grad=is_float
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        fail(
            f"got {func} of a traced value, as by torch.func inside of the mod or by "
            "torch.Tensor(x), expected torch's functions and methods on it",
            RuntimeError,  # operators take a TypeError for an operand that they don't know
        )

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        """NumPy's functions of numbers and symbols are torch's."""
        if method != "__call__" or options:
            fail(f"got numpy.{ufunc.__name__}.{method} of a traced value, expected torch's")
        name = _OF_NUMPY.get(ufunc.__name__, ufunc.__name__)
        return self.tracer.apply(name, inputs, {})

    def _number(self, *_):
        fail(
            "got a traced value where Python needs a number (the count of a loop, a bound of a "
            "slice, an index of a list or array, item(), a function of math); it differs from "
            "score to score: write arithmetic, torch.where, torch's functions, tensor[index]",
            self._error(),
        )

    def _error(self):
        return NeedsConstant if self.tracer.lifted_used else TraceError

    __index__ = __int__ = __float__ = __complex__ = item = tolist = _number
    __round__ = __trunc__ = __floor__ = __ceil__ = _number
    __array__ = numpy = _number  # type: ignore[assignment]

    def __bool__(self):
        fail(
            "got if, and, or, not or a chained comparison on a value that differs from score "
            "to score; write torch.where(condition, a, b), &, | and ~ (torch.maximum and "
            "torch.minimum for max and min)",
            self._error(),
        )

    def __contains__(self, x):
        fail(
            "got in of a captured row, expected torch.isin(value, row) or (row == value).any()"
        )

    def __setitem__(self, index, value):
        fail("got an assignment to an element; mods only compute, they change nothing")

    def __getitem__(self, index):
        return self.tracer.apply("getitem", (self, index), {})

    def __getattr__(self, name):
        if name.startswith("_") or name == "tracer":
            raise AttributeError(f"{self.noun} has no {name}")
        if not self.tracer.knows(name):
            fail(f"{self.noun} has no {name}, expected {self.may}", NoSuchMethod)
        return lambda *a, **o: self.tracer.apply(method_name(name), (self, *a), o)

    def __repr__(self):
        return f"<{self.noun[2:]} of {self.dtype}, shape {tuple(self.shape)}>"

    noun, may = "a traced value", "arithmetic, comparisons and torch's pointwise functions"
    device = property(lambda self: _CPU)
    ndim = property(lambda self: len(self.shape))
    is_cuda = property(lambda self: False)
    requires_grad = property(lambda self: self.is_floating_point())
    data = property(lambda self: self.detach())
    __dir__ = object.__dir__
    __format__ = object.__format__
    __pos__ = lambda self: self  # type: ignore[assignment, return-value]  # noqa: E731

    def size(self, dim=None):
        if dim is not None and not -self.ndim <= dim < self.ndim:
            fail(f"got size({dim}) of {self.noun} of {self.ndim} dimensions")
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return self.ndim

    def numel(self):
        return math.prod(self.shape)

    ndimension, nelement = dim, numel

    def is_floating_point(self):
        return self.dtype.is_floating_point

    def is_complex(self):
        return False


class _Unlisted:
    """A public attribute of torch's tensors that symbols leave to __getattr__."""

    def __init__(self, name):
        self.name = name

    def __get__(self, symbol, cls):
        return self if symbol is None else symbol.__getattr__(self.name)


for _name in dir(torch.Tensor):
    if not _name.startswith("_") and _name not in vars(TensorSymbol):
        setattr(TensorSymbol, _name, _Unlisted(_name))


class Traced(TensorSymbol):
    """One local of the text. Behaves as a 0-d tensor; its value is never known."""

    def __new__(cls, tracer, name, kind, *_, **__):
        return cls.wrapper(cls, kind == "float")

    def __init__(self, tracer, name, kind, nonneg=False, constant=None, dtype=None):
        self.tracer, self.name, self.kind = tracer, name, kind
        self.nonneg, self.constant, self.dtype_name = nonneg, constant, dtype

    shape = sizes = property(lambda self: torch.Size(()))
    T = mT = H = mH = real = property(lambda self: self)

    @property
    def dtype(self):
        return getattr(torch, self.dtype_name or DEFAULT_DTYPE[self.kind])

    def __iter__(self):
        fail("got a loop over a traced value, expected a scalar")

    def __len__(self):
        fail("got len of a traced value, expected a scalar")
