"""Captured tensors in a mod that is traced: elements, slices and rows of values."""

from __future__ import annotations

import torch

from . import ops
from .dtypes import DEFAULT_DTYPE, highest, joined, language_type, name_of
from .errors import fail, of_name, words_of
from .grad_mode import cut
from .symbols import SYMBOLIC, Lifted, Symbol, TensorSymbol, Traced

MAX_VECTOR = 512  # entries of a captured row that a mod may sum over
_NOUN, _MAY = "a captured row", "an index, pointwise functions, sums and their kin"


def element_of(tensor) -> tuple:
    """(type, whether never negative, constant, dtype) of an element of a captured tensor."""
    dtype = str(tensor.dtype).rsplit(".", 1)[-1]
    if "complex" in dtype or dtype.startswith("q"):
        fail(f"got a captured tensor{of_name(tensor)} of {dtype}, expected bool, int or float")
    dtype = name_of(dtype)
    return language_type(dtype), dtype == "bool", None, dtype


class Rows(TensorSymbol):
    """A captured tensor with some of its indices still missing. places has for each of its
    dimensions the name of an index, or the range of the entries that are left."""

    noun, may = _NOUN, _MAY

    def __new__(cls, tracer, tensor, places=None, *_):
        sizes = map(range, tensor.shape) if places is None else places
        size = [len(p) for p in sizes if isinstance(p, range)]
        return cls.wrapper(cls, tensor.is_floating_point(), size)

    def __init__(self, tracer, tensor, places=None, is_cut=False):
        self.tracer, self.tensor, self.is_cut = tracer, tensor, is_cut
        self.places = tuple(map(range, tensor.shape)) if places is None else places

    @property
    def left(self):
        """The dimensions without an index."""
        return [d for d, p in enumerate(self.places) if isinstance(p, range)]

    @property
    def shape(self):
        return torch.Size([self._size(d) for d in self.left])

    @property
    def sizes(self):
        """The shape as it is now, which the text is to hold."""
        for d in self.left:
            self._hold_size(d)
        return torch.Size([len(self.places[d]) for d in self.left])

    def _size(self, d: int):
        """How many entries a dimension has: a number of the graph's where it takes any."""
        entries, size = self.places[d], self.tensor.shape[d]
        if isinstance(size, torch.SymInt) and entries == range(size):
            self.tracer.uses_shapes = True
            return size
        self._hold_size(d)
        return len(entries)

    def _hold_size(self, d: int) -> None:
        self.tracer.uses_shapes = True
        self.tracer.is_fixed |= isinstance(self.tensor.shape[d], torch.SymInt)

    ndim = property(lambda self: len(self.left))
    dtype = property(lambda self: self.tensor.dtype)

    def detached(self):
        return Rows(self.tracer, self.tensor, self.places, True)

    def __len__(self):
        return self.sizes[0]

    def __iter__(self):
        return iter(unbind(self.tracer, self))

    def elements(self) -> "Vector":
        if self.ndim != 1 or self.sizes[0] > MAX_VECTOR:
            of = of_name(self.tensor)
            if self.ndim == len(self.places):
                fail(
                    f"got a whole captured tensor{of} of shape {tuple(self.sizes)}, expected "
                    "one element: index it with b, h, q_idx or kv_idx"
                )
            of = f" of{of}" if of else ""
            fail(
                f"got a captured slice{of} of shape {tuple(self.sizes)}, expected one element "
                f"or a row of at most {MAX_VECTOR}"
            )
        return Vector(self.tracer, [self.at((i,)) for i in range(self.sizes[0])])

    def at(self, index: tuple):
        """The element, or the rows, at an index of integers, symbols and slices."""
        places = list(self.places)
        for d, i in zip(self.left, self._of_each(index), strict=True):
            places[d] = self._place(d, i)
        if any(isinstance(p, range) for p in places):
            return Rows(self.tracer, self.tensor, tuple(places), self.is_cut)
        text = f"{self.tracer.capture(self.tensor)}[{', '.join(places)}]"
        found = self.tracer.element(text, self.tensor)
        return cut(self.tracer, found) if self.is_cut else found

    def _of_each(self, index: tuple) -> tuple:
        """An index for each dimension that is left."""
        dots = [n for n, i in enumerate(index) if i is Ellipsis]
        rank = self.ndim
        if len(dots) > 1 or any(i is None for i in index):
            fail("got None or a second ... as an index, expected integers and slices")
        n, missing = dots[0] if dots else len(index), rank - len(index) + len(dots)
        if missing < 0:
            fail(
                f"got {len(self.places) - missing} indices, expected {len(self.places)} for a "
                f"captured tensor{of_name(self.tensor)} of shape {tuple(self.tensor.shape)}"
            )
        return index[:n] + (slice(None),) * missing + index[n + len(dots) :]

    def _place(self, d: int, index):
        t, entries = self.tracer, self.places[d]
        if isinstance(index, slice):
            if index.start is index.stop is index.step is None:
                return entries
            self._hold_size(d)
            if index.step is not None and index.step < 1:
                fail(f"got a slice of step {index.step}, expected 1 or more")
            return entries[index]
        if isinstance(index, (Traced, Lifted, *SYMBOLIC)) or hasattr(index, "dtype"):
            x = t.value(index)
            if x.kind == "bool" or x.kind == "float":
                fail(f"got a {x.kind} as an index, expected int: convert it with .int()")
            if not x.nonneg and x.name not in ("q", "kv"):  # positions are clamped
                text = f"({x.name} < 0 ? {x.name} + {t.value(self._size(d)).name} : {x.name})"
                x = t.local(text, "int")
            if entries.start != 0 or entries.step != 1:
                x = t.local(f"({entries.start} + {entries.step} * {x.name})", "int")
            return x.name
        if isinstance(index, int) and not isinstance(index, bool):
            n = len(entries)
            if not -n <= index < n:
                fail(
                    f"got index {index} in dimension {d}, expected {-n} to {n - 1} for a "
                    f"captured tensor{of_name(self.tensor)} of shape "
                    f"{tuple(self.tensor.shape)}"
                )
            if index < 0:
                self._hold_size(d)
            return str(entries[index])
        fail(
            f"got {words_of(index)} as an index, expected b, h, q_idx, kv_idx or an integer "
            "made from them"
        )


class Vector(TensorSymbol):
    """A few traced values side by side, as the entries of a captured row."""

    noun, may = _NOUN, _MAY

    def __new__(cls, tracer, items):
        return cls.wrapper(cls, any(x.kind == "float" for x in items), (len(items),))

    def __init__(self, tracer, items):
        self.tracer, self.items = tracer, items

    shape = sizes = property(lambda self: torch.Size((len(self.items),)))

    @property
    def dtype(self):
        kind = highest([x.kind for x in self.items] or ["float"])
        dtype = joined([x.dtype_name for x in self.items], kind)
        return getattr(torch, dtype or DEFAULT_DTYPE[kind])

    def fold(self, op):
        total = self.items[0]
        for x in self.items[1:]:
            total = op(self.tracer, total, x)
        return total

    def detached(self):
        return Vector(self.tracer, [cut(self.tracer, x) for x in self.items])

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)


def is_row(x) -> bool:
    """Whether it is a captured row, or a whole captured tensor that can be one."""
    if isinstance(x, Symbol):
        return isinstance(x, (Rows, Vector))
    return hasattr(x, "stride") and any(n != 1 for n in x.shape)


def _part_of(t, x):
    """Of a captured tensor the symbol of all of it; of a symbol itself."""
    return x if isinstance(x, TensorSymbol) else Rows(t, x)


def row_of(t, x):
    """Of a row its entries; anything else as it is."""
    return _part_of(t, x).elements() if is_row(x) and not isinstance(x, Vector) else x


def vector_of(t, x) -> Vector:
    """A row among the arguments, however it was given, also of one element or of none."""
    if isinstance(x, Vector):
        return x
    if not isinstance(x, Rows) and len(getattr(x, "shape", ())) != 1:
        fail(f"got {words_of(x)}, expected a captured row")
    return _part_of(t, x).elements()


# ---- indices ----


def _is_all(index) -> bool:
    """Whether an index leaves a tensor of one value what it is."""
    if isinstance(index, slice):
        return index.start is index.stop is index.step is None
    return index is None or index is Ellipsis or (type(index) is int and index in (0, -1))


def _entry(t, row: Vector, index: tuple):
    """An entry, or a slice, of a row that was computed."""
    index = tuple(i for i in index if i is not Ellipsis) or (slice(None),)
    if len(index) != 1 or index[0] is None:
        fail("got None or two indices of a computed row, expected one entry or a slice of it")
    i, n = index[0], len(row.items)
    if isinstance(i, slice):
        return Vector(t, row.items[i])
    if isinstance(i, int) and not isinstance(i, (bool, Lifted)):
        if not -n <= i < n:
            fail(f"got index {i} of a row, expected {-n} to {n - 1}")
        return row.items[i]
    i = t.value(i)
    if i.kind != "int":
        fail(f"got a {i.kind} as an index, expected int: convert it with .int()")
    found = row.items[0]
    for k, x in enumerate(row.items[1:], 1):
        found = t.apply("where", ((i == k) | (i == k - n), x, found), {})
    return found


def index_of(t, tensor, index):
    index = index if isinstance(index, tuple) else (index,)
    if isinstance(tensor, Traced):
        if all(map(_is_all, index)):
            return tensor
        fail("got an index on a traced scalar, expected a captured tensor")
    if isinstance(tensor, Vector):
        return _entry(t, tensor, index)
    return _part_of(t, tensor).at(index)


_PICKS = {  # the arguments between the tensor and the index, by their names
    "select": ("dim", "index"),
    "index_select": ("dim", "index"),
    "gather": ("dim", "index"),
    "take": ("index",),
    "take_along_dim": ("indices", "dim"),
}


def _pick(plain):
    """One entry of a captured row, or row of a captured tensor, by functions that take a tensor
    of indices, here of one."""

    def op(t, tensor, *arguments, **options):
        given = {**dict(zip(_PICKS[plain], arguments)), **options}
        index = given.pop("index", None) if "indices" not in given else given.pop("indices")
        dim, rank = given.pop("dim", 0), len(tensor.shape)
        given.pop("sparse_grad", None)
        if plain == "select" and not given and index is not None:
            return index_of(t, tensor, (*_before(dim, rank), index))
        is_of_rows = plain == "index_select"
        if given or index is None or dim not in (0, -rank) or (rank != 1 and not is_of_rows):
            fail(f"got {plain} of {rank} dimensions along {dim}, expected an index: tensor[i]")
        return index_of(t, tensor, index)

    return op


# ---- parts of rows, and rows of parts ----


def _before(dim: int, rank: int) -> tuple:
    """The index of all entries of the dimensions before one."""
    if not -rank <= dim < rank:
        fail(f"got dimension {dim} of {rank}")
    return (slice(None),) * (dim % rank)


def unbind(t, x, dim=0):
    x = _part_of(t, x)
    lead = _before(dim, x.ndim)
    if x.sizes[dim] > MAX_VECTOR:
        fail(f"got {x.sizes[dim]} entries of a captured tensor, expected {MAX_VECTOR} at most")
    return tuple(index_of(t, x, (*lead, k)) for k in range(x.sizes[dim]))


def _narrow(t, x, dim, start, length):
    x = _part_of(t, x)
    return index_of(t, x, (*_before(dim, x.ndim), slice(start, start + length)))


def _split(t, x, split_size_or_sections=None, dim=0, split_size=None):
    x = _part_of(t, x)
    _before(dim, x.ndim)
    n, sizes = x.sizes[dim], split_size_or_sections or split_size
    if isinstance(sizes, int):
        sizes = [min(sizes, n - at) for at in range(0, n, sizes)]
    if sum(sizes) != n:
        fail(f"got a split into {list(sizes)}, expected a sum of {n}")
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple(_narrow(t, x, dim, at, size) for at, size in zip(starts, sizes))


def _chunk(t, x, chunks, dim=0):
    x = _part_of(t, x)
    _before(dim, x.ndim)
    return _split(t, x, max(1, -(-x.sizes[dim] // chunks)), dim)


def _joined(plain):
    """stack of values, cat of rows."""

    def op(t, tensors, dim=0):
        items: list = []
        for x in tensors:
            x = row_of(t, x)
            if isinstance(x, Vector) == (plain == "stack"):
                expected = "values" if plain == "stack" else "rows"
                fail(f"got {plain} of {words_of(x)}, expected one of {expected}")
            items += x.items if isinstance(x, Vector) else [t.value(x)]
        if dim not in (0, -1) or not items:
            fail(f"got {plain} along {dim}, expected one row of entries")
        xs, _, dtype = ops.promoted(t, items)
        return Vector(t, [t.with_dtype(x, dtype) for x in xs])

    return op


def _tensor(t, data, dtype=None, device=None, **_):
    """torch.as_tensor of symbols."""
    if isinstance(data, (tuple, list)):
        data = _joined("stack")(t, data)
    data = row_of(t, data)
    if not isinstance(data, Vector):
        data = t.value(data)
    return data if dtype is None else t.apply("to", (data,), {"dtype": dtype})


PARTS = {  # operations that tell a captured tensor from its entries
    "getitem": index_of,
    **{name: _pick(name) for name in _PICKS},
    "unbind": unbind,
    "narrow": _narrow,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _chunk,
    "stack": _joined("stack"),
    **{name: _joined("cat") for name in ("cat", "concat", "concatenate")},
    "as_tensor": _tensor,
    "asarray": _tensor,
    "scalar_tensor": _tensor,
    "tensor": lambda t, *a, **o: cut(t, _tensor(t, *a, **o)),
    "detach": lambda t, x: cut(t, _part_of(t, x)),
}
