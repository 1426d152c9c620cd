"""What a Python callable is made of: code, captured tensors, captured numbers.

`Walk` goes through closures, defaults, globals and attributes that the code names, partials,
bound methods and callable objects. Two callables of equal `key` run the same text; only the
leaves' values differ, so a trace made for one serves the other. Numbers become scalar captures
(new values, same text) unless the mod needs them as constants. What can't be seen through
(attributes made up by __getattr__, say) makes a walk opaque: such a mod is traced every time.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
import weakref
from typing import Any, Callable, Iterable

from . import symbols
from . import tracer as tracing
from .errors import TraceError
from .watching import NO_DRAWS, draws

_PLAIN = (bool, str, bytes, type(None), type(Ellipsis), complex, slice, range)
_TRUSTED = frozenset(
    "torch math cmath operator functools itertools numpy typing builtins saccade einops "
    "enum collections dataclasses abc contextlib warnings sys os".split()
)
_LONGEST = 4096  # items of a container that are looked at
_GONE = object()
_DESCRIPTORS = ("method_descriptor", "wrapper_descriptor", "method-wrapper", "builtin_method")
_DATA = ("_parameters", "_buffers", "_modules")  # where torch.nn.Module keeps attributes
_UNSEEN = frozenset("vars eval exec globals locals getattr __dict__ asdict attrgetter".split())
_UNUSED_METHODS = frozenset(
    "__init__ __new__ __repr__ __str__ __eq__ __hash__ __del__ __reduce__ __reduce_ex__ "
    "__setattr__ __delattr__ __setstate__ __getstate__ __init_subclass__ __class_getitem__ "
    "__post_init__ __format__ __sizeof__ __dir__ __subclasshook__".split()
)


def is_tensor(x: object) -> bool:
    kind = type(x)  # an instance may make up attributes
    return hasattr(kind, "dtype") and hasattr(kind, "shape") and hasattr(kind, "stride")


def _trusted(module_name: object) -> bool:
    """Modules whose functions and constants are taken as they are."""
    return isinstance(module_name, str) and module_name.partition(".")[0] in _TRUSTED


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _GONE


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Globals and attributes that the code, or code inside it, may name, getattr's included."""
    found = set(code.co_names)
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            found.update(_names(c))
        elif isinstance(c, str) and c.isidentifier():
            found.add(c)
    return tuple(sorted(found))


class Slots:
    """Places that a walk read, each with what it held."""

    __slots__ = ("functions", "cells", "entries", "attributes", "lists", "dicts", "sets")

    def __init__(self) -> None:
        self.functions: list[tuple] = []
        self.cells: list[tuple] = []
        self.entries: list[tuple] = []
        self.attributes: list[tuple] = []
        self.lists: list[tuple] = []
        self.dicts: list[tuple] = []
        self.sets: list[tuple] = []

    def is_empty(self) -> bool:
        return not any(getattr(self, name) for name in self.__slots__)

    def unchanged(self) -> bool:
        for ref, code, defaults, named in self.functions:
            f = ref()
            if (
                f is None
                or f.__code__ is not code
                or f.__defaults__ is not defaults
                or f.__kwdefaults__ is not named
            ):
                return False
        for cell, value in self.cells:
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:
                if value is not _GONE:
                    return False
        for table, name, value in self.entries:
            if table.get(name, _GONE) is not value:
                return False
        if self.attributes or self.lists or self.dicts or self.sets:
            return self._containers_unchanged()
        return True

    def _containers_unchanged(self) -> bool:
        for x, name, value in self.attributes:
            if getattr(x, name, _GONE) is not value:
                return False
        for sequence, items in self.lists:
            if len(sequence) != len(items):
                return False
            for a, b in zip(sequence, items):
                if a is not b:
                    return False
        for table, keys, values in self.dicts:
            if len(table) != len(keys):
                return False
            for a, b, k in zip(table.values(), values, table):
                if a is not b or k not in keys:
                    return False
        return all(s == kept for s, kept in self.sets)


class Walk:
    """key: hashable identity of the code; leaves: tensors and numbers in walking order; slots:
    what to look at to know that nothing changed; new: fn with lift(number, leaf index) in
    place of its numbers, where lift is given."""

    def __init__(
        self,
        fn: Any,
        constants: bool = False,
        lift: Callable[[Any, int], Any] | None = None,
    ):
        self.constants, self.lift = constants, lift
        root = getattr(fn, "__code__", type(fn))
        known = _attributes.get(root, frozenset())
        while True:
            self.attributes = set(known)
            self._sorted = sorted(known)
            self.leaves: list = []
            self.keep: list = []  # what the key knows by id
            self._alive: list = []  # temporaries whose ids the walk still compares
            self.slots = Slots()
            self.opaque = False
            self._seen: dict[int, list] = {}
            self.cell_of: dict[int, int] = {}  # leaves that are in fn's own closure
            self._first: dict[int, int] = {}  # tensors, by where they came first
            self.key, self.new = self._visit(fn, constants)
            self._alive.clear()
            self._seen.clear()
            if self.attributes == known:
                break
            known = frozenset(self.attributes)
            if len(_attributes) > 4096:
                _attributes.clear()
            _attributes[root] = known

    @property
    def has_numbers(self) -> bool:
        return any(isinstance(x, (int, float)) for x in self.leaves)

    def name_of(self, value: Any) -> str:
        """What the code calls a value that it captures, for messages; "" if that is unknown."""
        name = self._variable(value)
        if name:
            return name
        held = [(x, range(len(items)), items) for x, items in self.slots.lists]
        held += [(x, x, values) for x, _, values in self.slots.dicts]
        for container, keys, items in held:
            found = [f"[{key!r}]" for key, x in zip(keys, items) if x is value]
            if found and self._variable(container):
                return self._variable(container) + found[0]
        return ""

    def _variable(self, value: Any) -> str:
        """A variable, default or attribute that holds it."""
        for ref, code, defaults, _ in self.slots.functions:
            cells = getattr(ref(), "__closure__", None) or ()
            places = [*zip(code.co_freevars, map(_content, cells))]
            if defaults:
                last = code.co_varnames[: code.co_argcount][-len(defaults) :]
                places += zip(last, defaults)
            for name, x in places:
                if x is value:
                    return name
        return next((name for _, name, x in self.slots.entries if x is value), "")

    # ---- one value ----

    def _visit(self, x: Any, fixed: bool) -> tuple[Any, Any]:
        kind = type(x)
        if kind in _PLAIN:
            return (kind, x if kind is not slice else repr(x)), x
        if isinstance(x, (int, float)):
            if fixed:
                return (kind, x.hex() if isinstance(x, float) else x), x
            self.leaves.append(x)
            return kind, self.lift(x, len(self.leaves) - 1) if self.lift else x
        if is_tensor(x):
            first = self._first.setdefault(id(x), len(self.leaves))
            self.leaves.append(x)
            return ("tensor", x.dtype, x.ndim, getattr(x, "device", None), first), x
        seen = self._seen.get(id(x))
        if seen is not None:
            return ("again", seen[0]), seen[1]
        memo = self._seen[id(x)] = [len(self._seen), x]
        self._alive.append(x)
        key, memo[1] = self._parts(x, fixed, memo)
        return key, memo[1]

    def _id(self, x: Any) -> int:
        self.keep.append(x)
        return id(x)

    def _parts(self, x: Any, fixed: bool, memo: list) -> tuple[Any, Any]:
        if isinstance(x, types.FunctionType):
            return self._function(x, fixed, memo)
        if isinstance(x, functools.partial):
            return self._partial(x, fixed)
        if isinstance(x, types.MethodType):
            f, f_new = self._visit(x.__func__, fixed)
            s, s_new = self._visit(x.__self__, fixed)
            return ("method", f, s), types.MethodType(f_new, s_new) if self.lift else x
        if isinstance(x, (tuple, list)):
            return self._sequence(x, fixed)
        if isinstance(x, dict):
            return self._dict(x, fixed)
        if isinstance(x, (set, frozenset)):
            self.slots.sets.append((x, frozenset(x)))
            return (type(x), frozenset(self._visit(i, True)[0] for i in x)), x
        if isinstance(x, types.ModuleType):
            if _trusted(x.__name__):
                return ("module", x.__name__), x
            return ("module", self._id(x), self._named(vars(x))), x
        if isinstance(x, type):
            return ("class", x, self._class_entries(x, None)), x
        return self._object(x, fixed)

    def _function(self, f: types.FunctionType, fixed: bool, memo: list) -> tuple[Any, Any]:
        code, used = f.__code__, []
        if not _trusted(f.__globals__.get("__name__")):
            used = [n for n in _names(code) if n in f.__globals__]
            self.attributes.update(_names(code))
            self.opaque |= not _UNSEEN.isdisjoint(_names(code))
        self.slots.functions.append((weakref.ref(f), code, f.__defaults__, f.__kwdefaults__))
        g, names, cells = f, f.__globals__, [types.CellType() for _ in f.__closure__ or ()]
        if self.lift and not fixed:
            names = dict(names) if used else names
            g = types.FunctionType(code, names, f.__name__, f.__defaults__, tuple(cells))
            memo[1] = g  # a recursive function finds its copy
        key: list = [code]
        held = [_content(cell) for cell in f.__closure__ or ()]
        self.slots.cells += zip(f.__closure__ or (), held)
        for i, (value, made) in enumerate(zip(held, cells)):
            if memo[0] == 0 and (type(value) in (int, float) or is_tensor(value)):
                self.cell_of[len(self.leaves)] = i
            if value is not _GONE:
                part, made.cell_contents = self._visit(value, fixed)
                key.append(part)
        defaults, named = f.__defaults__, f.__kwdefaults__
        if defaults or named:
            extra, defaults = self._visit(defaults or (), fixed)
            more, named = self._visit(named or {}, fixed)
            key += [extra, more]
        for n in used:
            value = f.__globals__[n]
            if isinstance(value, types.ModuleType) and _trusted(value.__name__):
                continue
            self.slots.entries.append((f.__globals__, n, value))
            part, new = self._visit(value, fixed)
            key.append((n, part))
            if g is not f:
                names[n] = new
        own = self._named(f.__dict__) if f.__dict__ else ()
        if g is not f:
            g.__defaults__, g.__kwdefaults__ = defaults or None, named or None
            g.__dict__.update(f.__dict__)
        return (*key, own), g

    def _partial(self, x: functools.partial, fixed: bool) -> tuple[Any, Any]:
        f, f_new = self._visit(x.func, fixed)
        args = [self._visit(a, fixed) for a in x.args]
        named = [(k, *self._visit(v, fixed)) for k, v in sorted(x.keywords.items())]
        self.slots.entries += [(x.keywords, k, v) for k, v in x.keywords.items()]
        key = ("partial", f, tuple(a for a, _ in args), tuple((k, a) for k, a, _ in named))
        if not self.lift:
            return key, x
        return key, functools.partial(
            f_new, *(n for _, n in args), **{k: n for k, _, n in named}
        )

    # ---- containers ----

    def _too_long(self, x: Any) -> bool:
        if len(x) <= _LONGEST:
            return False
        self.opaque = True
        return True

    def _sequence(self, x: Any, fixed: bool) -> tuple[Any, Any]:
        if self._too_long(x):
            return ("long", self._id(x)), x
        if isinstance(x, list):
            self.slots.lists.append((x, tuple(x)))
        made = [self._visit(i, fixed or type(x) not in (tuple, list)) for i in x]
        key = (type(x), tuple(k for k, _ in made))
        if self.lift and type(x) in (tuple, list):
            return key, type(x)(n for _, n in made)
        return key, x

    def _dict(self, x: dict, fixed: bool) -> tuple[Any, Any]:
        if self._too_long(x):
            return ("long", self._id(x)), x
        self.slots.dicts.append((x, frozenset(x), tuple(x.values())))
        made = [
            (k, self._visit(k, True)[0], *self._visit(v, fixed or type(x) is not dict))
            for k, v in x.items()
        ]
        key = (type(x), tuple((a, b) for _, a, b, _ in made))
        if self.lift and type(x) is dict:
            return key, {k: n for k, _, _, n in made}
        return key, x

    def _named(self, table: Any) -> tuple:
        """Entries of a namespace that the code may name, as constants."""
        found = []
        for n in self._sorted:
            value = table.get(n, _GONE)
            if value is not _GONE:
                self.slots.entries.append((table, n, value))
                found.append((n, self._visit(value, True)[0]))
        return tuple(found)

    # ---- classes and objects ----

    def _class_entries(self, cls: type, shadow: dict | None) -> tuple:
        """Methods and class attributes that may run; shadow: the instance's own attributes."""
        found = []
        for c in cls.__mro__:
            if c is object or _trusted(c.__module__):
                continue
            made_up = [c.__dict__.get(n) for n in ("__getattr__", "__getattribute__")]
            self.opaque |= any(isinstance(f, types.FunctionType) for f in made_up)
            wanted = [n for n in self._sorted if n in c.__dict__]
            wanted += [
                n
                for n, v in c.__dict__.items()
                if n.startswith("__")
                and n not in _UNUSED_METHODS
                and isinstance(v, types.FunctionType)
            ]
            for n in wanted:
                value = c.__dict__[n]
                self.slots.entries.append((c.__dict__, n, value))
                if shadow is not None and n not in shadow:
                    self.slots.entries.append((shadow, n, _GONE))
                for part in _underlying(value):
                    found.append((n, self._visit(part, True)[0]))
        return tuple(found)

    def _object(self, x: Any, fixed: bool) -> tuple[Any, Any]:
        cls, own = type(x), getattr(x, "__dict__", None)
        if isinstance(x, types.BuiltinFunctionType) or cls.__name__ in _DESCRIPTORS:
            return ("builtin", self._id(x)), x
        if isinstance(x, enum.Enum):
            return ("enum", cls, x.name), x
        if _trusted(cls.__module__) and not (own and _DATA[0] in own):
            return self._foreign(x, cls, own), x
        if not isinstance(own, dict):
            return self._slotted(x, cls)
        fixed = fixed or not _copyable(cls)
        entries, changed = [], {}
        for n in self._sorted:
            value = own.get(n, _GONE)
            if value is not _GONE:
                self.slots.entries.append((own, n, value))
                key, new = self._visit(value, fixed)
                entries.append((n, key))
                changed[n] = new
        for table in (own[d] for d in _DATA if isinstance(own.get(d), dict)):
            entries.append(self._named(table))
        entries.append(self._class_entries(cls, own))
        key = (cls, tuple(entries))
        if not self.lift or fixed or all(own[n] is v for n, v in changed.items()):
            return key, x
        y = copy.copy(x)
        y.__dict__.update(changed)
        return key, y

    def _foreign(self, x: Any, cls: type, own: Any) -> tuple:
        """Objects of torch, NumPy and the standard library: small constants, or unknown."""
        if any(c.__name__ == "_DecoratorContextManager" for c in cls.__mro__):
            return ("value", cls, repr(own))  # torch.no_grad and its kin, which clone it
        shown = "" if own or getattr(x, "shape", ()) else repr(x)
        if shown and " at 0x" not in shown:
            return ("value", cls, shown)
        self.opaque = True
        return ("unknown", self._id(x))

    def _slotted(self, x: Any, cls: type) -> tuple[Any, Any]:
        """Objects without __dict__: their slots by name, or nothing that can be seen."""
        found = [n for c in cls.__mro__ for n in _strings(c.__dict__.get("__slots__", ()))]
        found = [n for n in found if n not in ("__weakref__", "__dict__")]
        if not found and not any("__slots__" in c.__dict__ for c in cls.__mro__):
            self.opaque = True
            return ("opaque", self._id(x)), x
        entries = []
        for n in found:
            value = getattr(x, n, _GONE)
            self.slots.attributes.append((x, n, value))
            if value is not _GONE:
                entries.append((n, self._visit(value, True)[0]))
        return (cls, tuple(entries), self._class_entries(cls, None)), x


_attributes: dict = {}


def _strings(names: Any) -> Iterable[str]:
    return (names,) if isinstance(names, str) else tuple(names)


def _copyable(cls: type) -> bool:
    """copy.copy makes another object of the same attributes and does nothing else."""
    module = any(c.__name__ == "Module" and _trusted(c.__module__) for c in cls.__mro__)
    plain = cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__
    return (
        plain
        and not hasattr(cls, "__copy__")
        and (module or not hasattr(cls, "__setstate__"))
        and not any(c.__dict__.get("__slots__") for c in cls.__mro__)
    )


def _underlying(value: Any) -> tuple:
    """The functions behind a class attribute, or the attribute itself."""
    if isinstance(value, property):
        return tuple(f for f in (value.fget,) if f is not None)
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
        return ()
    return (value,)


class Traced:
    """A trace: text, and for each capture where its value is found again. `volatile` traces
    read values of captured tensors and hold for one call."""

    def __init__(self, text: str, captures: list, leaves: list, tracer: tracing.Tracer):
        self.text, self.volatile = text, tracer.volatile
        self.uses_shapes = tracer.uses_shapes
        self.names = [name for name, _ in captures]
        self.sources = [self._source(value, leaves) for _, value in captures]

    @staticmethod
    def _source(value: Any, leaves: list) -> Any:
        if isinstance(value, symbols.Lifted):
            return value.leaf
        for i, leaf in enumerate(leaves):
            if leaf is value:
                return i
        return (value,)  # made inside the mod: held as it is

    @property
    def reusable(self) -> bool:
        return not self.volatile and all(isinstance(s, int) for s in self.sources)

    def values(self, leaves: list) -> list:
        return [leaves[s] if isinstance(s, int) else s[0] for s in self.sources]


_cache: dict = {}
_CACHE_LIMIT = 4096


def trace(
    fn: Any, kind: str, is_double: bool = False, is_signed: bool = False
) -> tuple[Traced, list, Walk]:
    """Traces fn, or finds the trace of an equal one; gives it with its captured values.
    is_double: for a score of a float64 problem. is_signed: positions may be negative."""
    for constants in (False, True):
        walk = Walk(fn, constants)
        key = (kind, is_double, is_signed, constants, walk.key)
        found = _lookup(key, walk)
        if found is None and not constants and _lookup((kind, "needs", walk.key), walk):
            continue
        if found is None:
            try:
                found = _run(fn, kind, walk, is_double, is_signed)
            except Exception:  # Python may want a number's value in any way it likes
                if constants or not walk.has_numbers:
                    raise
                _store((kind, "needs", walk.key), (True, None, walk.keep))
                continue
            if found.reusable and not walk.opaque:
                shapes = _shapes(walk) if found.uses_shapes else None
                if shapes is None or _env_of(walk) is None:
                    _store(key, (found, shapes, walk.keep))
        return found, found.values(walk.leaves), walk
    raise AssertionError("unreachable")


def _shapes(walk: Walk) -> list:
    return [tuple(x.shape) for x in walk.leaves if is_tensor(x)]


def _lookup(key: Any, walk: Walk) -> Any:
    try:
        entry = _cache.get(key)
    except TypeError:
        return None
    if entry is None:
        return None
    found, shapes, _ = entry
    if shapes is None:
        return found
    return found if _env_of(walk) is None and shapes == _shapes(walk) else None


def _store(key: Any, entry: tuple) -> None:
    if len(_cache) >= _CACHE_LIMIT:
        _cache.clear()
    try:
        _cache[key] = entry
    except TypeError:
        pass


def _run(fn: Any, kind: str, walk: Walk, is_double: bool, is_signed: bool) -> Traced:
    def lifted(tracer: tracing.Tracer) -> Any:
        if walk.constants:
            return fn
        return Walk(fn, False, lambda v, leaf: symbols.Lifted(tracer, v, leaf)).new

    make = lambda: tracing.Tracer(kind, is_double, is_signed)  # noqa: E731
    before = draws()
    text, captures, tracer = tracing.run_in_graph(lifted, kind, make, _env_of(walk))
    if draws() != before:  # by the mod, or by another thread
        again, _, _ = tracing.run_in_graph(lifted, kind, make, _env_of(walk))
        if again != text:
            raise TraceError(tracing.definition_of(fn) + NO_DRAWS.format("a random number"))
    return Traced(text, captures, walk.leaves, tracer)


def _env_of(walk: Walk) -> Any:
    """The ShapeEnv of a graph that takes a captured tensor in any size; None if none does."""
    sizes = (n for x in walk.leaves if is_tensor(x) for n in x.shape)
    return next((n.node.shape_env for n in sizes if isinstance(n, symbols.SYMBOLIC)), None)
