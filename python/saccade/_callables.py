"""What a Python callable is made of: code, captured tensors, captured numbers.

`Shape` walks closures, defaults, partials, bound methods and callable objects. Two callables of
equal `key` run the same text; only the leaves' values differ, so a trace made for one serves
the other. Numbers become scalar captures (new values, same text) unless the mod needs them as
constants.
"""

from __future__ import annotations

import copy
import functools
import types

from . import _trace

_ATOMS = (int, float)


def _is_tensor(x) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape") and hasattr(x, "stride")


class Shape:
    """key: hashable identity of the code; leaves: tensors and numbers in walking order."""

    def __init__(self, fn, constants: bool):
        self.constants = constants
        self.leaves: list = []
        self._seen: dict[int, int] = {}
        self.key = self._walk(fn)

    def _walk(self, x):
        if isinstance(x, bool) or x is None or isinstance(x, (str, bytes)):
            return x
        if isinstance(x, _ATOMS):
            if self.constants:
                return (type(x), x)
            self.leaves.append(x)
            return type(x)
        if _is_tensor(x):
            self.leaves.append(x)
            return ("tensor", str(x.dtype), len(x.shape), str(getattr(x, "device", "cpu")))
        if id(x) in self._seen:
            return ("again", self._seen[id(x)])
        self._seen[id(x)] = len(self._seen)
        return self._walk_parts(x)

    def _walk_parts(self, x):
        if isinstance(x, functools.partial):
            return (
                "partial",
                self._walk(x.func),
                tuple(map(self._walk, x.args)),
                tuple((k, self._walk(v)) for k, v in sorted(x.keywords.items())),
            )
        if isinstance(x, types.MethodType):
            return ("method", self._walk(x.__func__), self._walk_object(x.__self__))
        if isinstance(x, types.FunctionType):
            cells = tuple(self._walk(_content(c)) for c in x.__closure__ or ())
            defaults = tuple(map(self._walk, x.__defaults__ or ()))
            used = tuple(
                (n, self._walk(x.__globals__[n]))
                for n in x.__code__.co_names
                if _is_mod_global(x.__globals__.get(n))
            )
            return (x.__code__, cells, defaults, used)
        if isinstance(x, (tuple, list)):
            return (type(x), tuple(map(self._walk, x)))
        if isinstance(x, dict):
            return (dict, tuple((k, self._walk(v)) for k, v in x.items()))
        if (
            callable(x)
            and not isinstance(x, (type, types.BuiltinFunctionType))
            and hasattr(x, "__dict__")
            and not isinstance(x, types.ModuleType)
        ):
            return self._walk_object(x)
        return id(x)

    def _walk_object(self, x):
        attributes = sorted(getattr(x, "__dict__", {}).items())
        return (type(x), tuple((k, self._walk(v)) for k, v in attributes))


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_mod_global(x) -> bool:
    return (
        (isinstance(x, _ATOMS) and not isinstance(x, bool))
        or _is_tensor(x)
        or isinstance(x, (types.FunctionType, functools.partial))
    )


def replace(fn, lift):
    """A copy of fn in which lift(number) stands for each number that Shape calls a leaf."""
    seen: dict[int, object] = {}

    def walk(x):
        if isinstance(x, _ATOMS) and not isinstance(x, bool):
            return lift(x)
        if id(x) in seen:
            return seen[id(x)]
        made = parts(x)
        seen[id(x)] = made
        return made

    def parts(x):
        if isinstance(x, functools.partial):
            return functools.partial(
                walk(x.func),
                *map(walk, x.args),
                **{k: walk(v) for k, v in sorted(x.keywords.items())},
            )
        if isinstance(x, types.MethodType):
            return types.MethodType(walk(x.__func__), object_copy(x.__self__))
        if isinstance(x, types.FunctionType):
            return function_copy(x)
        if isinstance(x, (tuple, list)):
            return type(x)(map(walk, x)) if type(x) in (tuple, list) else x
        if type(x) is dict:
            return {k: walk(v) for k, v in x.items()}
        if (
            callable(x)
            and hasattr(x, "__dict__")
            and not _is_tensor(x)
            and not isinstance(x, (type, types.BuiltinFunctionType, types.ModuleType))
        ):
            return object_copy(x)
        return x

    def function_copy(f):
        seen[id(f)] = f  # a recursive function keeps calling its original
        cells = tuple(types.CellType(walk(_content(c))) for c in f.__closure__ or ()) or None
        names = dict(f.__globals__)
        defaults = tuple(map(walk, f.__defaults__)) if f.__defaults__ else None
        for n in f.__code__.co_names:
            if _is_mod_global(names.get(n)):
                names[n] = walk(names[n])
        g = types.FunctionType(f.__code__, names, f.__name__, defaults, cells)
        g.__kwdefaults__ = f.__kwdefaults__
        return g

    def object_copy(x):
        y = copy.copy(x)
        for k, v in sorted(vars(y).items()):
            try:
                object.__setattr__(y, k, walk(v))
            except (AttributeError, TypeError):
                pass
        return y

    return walk(fn)


class Traced:
    """A trace: text, and for each capture where its value is found again."""

    def __init__(self, text, captures, leaves, constants):
        self.text, self.constants = text, constants
        self.names = [name for name, _ in captures]
        self.sources = [self._source(value, leaves) for _, value in captures]

    @staticmethod
    def _source(value, leaves):
        if isinstance(value, _trace.Lifted):
            return value.leaf
        for i, leaf in enumerate(leaves):
            if leaf is value:
                return i
        return value  # made inside the mod or hidden in an object: held as it is

    @property
    def reusable(self) -> bool:
        return all(isinstance(s, int) for s in self.sources)

    def values(self, leaves) -> list:
        return [leaves[s] if isinstance(s, int) else s for s in self.sources]


_cache: dict = {}
_CACHE_LIMIT = 4096


def trace(fn, kind: str) -> tuple[Traced, list]:
    """Traces fn, or finds the trace of an equal one; gives it with its captured values."""
    for constants in (False, True):
        shape = Shape(fn, constants)
        key = (kind, constants, shape.key)
        found = _lookup(key, shape)
        if found is None and not constants and _lookup((kind, "needs", shape.key), shape):
            continue
        if found is None:
            try:
                found = _run(fn, kind, shape, constants)
            except _trace.NeedsConstant:
                if constants:
                    raise
                _store((kind, "needs", shape.key), True)
                continue
            if found.reusable:
                _store(key, (found, _shapes(shape, found)))
        return found, found.values(shape.leaves)
    raise AssertionError("unreachable")


def _shapes(shape, found):
    return (
        [tuple(x.shape) for x in shape.leaves if _is_tensor(x)] if found.uses_shapes else None
    )


def _lookup(key, shape):
    try:
        entry = _cache.get(key)
    except TypeError:
        return None
    if entry is None or entry is True:
        return entry
    found, shapes = entry
    if shapes is not None and shapes != [tuple(x.shape) for x in shape.leaves if _is_tensor(x)]:
        return None
    return found


def _store(key, value):
    if len(_cache) >= _CACHE_LIMIT:
        _cache.clear()
    try:
        _cache[key] = value
    except TypeError:
        pass


def _run(fn, kind, shape, constants) -> Traced:
    tracer = _trace.Tracer(kind)
    target = fn
    if not constants:
        numbers = iter([i for i, x in enumerate(shape.leaves) if isinstance(x, _ATOMS)])
        target = replace(fn, lambda v: _trace.Lifted(tracer, v, next(numbers)))
    text, captures = _trace.run(target, kind, tracer)
    made = Traced(text, captures, shape.leaves, constants)
    made.uses_shapes = tracer.uses_shapes
    return made
