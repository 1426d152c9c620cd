"""What a caller may pass as a mod: a callable, language text, or text with its captures."""

from __future__ import annotations

import functools
import inspect
import weakref

import torch

from . import _callables, _core, _lib, _trace

_DTYPES = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
for _name in ("uint16", "uint32", "uint64"):
    if hasattr(torch, _name):
        _DTYPES[getattr(torch, _name)] = "u" + _name[4:]
_KINDS = {"mask": _lib.MASK, "score": _lib.SCORE}


def dtype_name(t: torch.Tensor) -> str:
    try:
        return _DTYPES[t.dtype]
    except KeyError:
        raise ValueError(f"got a tensor of {t.dtype}, expected bool, int or float") from None


def view(t: torch.Tensor) -> _core.View:
    """A C view of a tensor; the tensor must outlive it."""
    cuda = t.is_cuda
    return _core.View(
        t.data_ptr(),
        dtype_name(t),
        int(cuda),
        t.get_device() if cuda else 0,
        tuple(t.shape),
        tuple(t.stride()),
    )


class AnyMod:
    """Language text with its captures by name: mask("doc[q] == doc[kv]", doc=ids)."""

    def __init__(self, kind: str, text: str, captures: dict):
        self.kind, self.text, self.captures = kind, text, dict(captures)

    def __repr__(self):
        return f"{self.kind}({self.text!r}, {', '.join(self.captures)})"


def mask(text: str, **captures) -> AnyMod:
    """A mask in the language; captures are tensors or numbers by name."""
    return AnyMod("mask", text, captures)


def score(text: str, **captures) -> AnyMod:
    """A score function in the language; captures are tensors or numbers by name."""
    return AnyMod("score", text, captures)


class captured:
    """Turning one form of mod into another."""

    @staticmethod
    def kind_of(mod) -> str:
        if isinstance(mod, AnyMod):
            return mod.kind
        if isinstance(mod, str):
            return _kind_of_text(mod)
        names = [
            p
            for p in inspect.signature(mod).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
        if len(names) not in (4, 5):
            raise ValueError(
                f"got a mod of {len(names)} arguments, expected 4 (mask) or 5 (score)"
            )
        return "score" if len(names) == 5 else "mask"

    @staticmethod
    def callable_of(mod):
        """A Python callable with the mod's meaning, for use inside other callables."""
        if callable(mod):
            return mod
        text = mod if isinstance(mod, str) else mod.text
        captures = {} if isinstance(mod, str) else mod.captures
        return functools.partial(_inline, text, captures)


def _kind_of_text(text: str) -> str:
    """mask where the text is one, else score (whose errors are then shown on use)."""
    try:
        _core.free_names(_lib.MASK, text)
        return "mask"
    except _lib.BadValue:
        return "score"


def _inline(text, captures, *values):
    """Writes language text into the mod being traced, with its index variables replaced."""
    names = ["b", "h", "q", "kv"] if len(values) == 4 else ["score", "b", "h", "q", "kv"]
    tracer = next(v.tracer for v in values if isinstance(v, _trace.Traced))
    kind = "mask" if len(values) == 4 else "score"
    free = _core.free_names(_KINDS[kind], text)
    return tracer.inline(
        text, free, captures, dict(zip(names, map(tracer.value, values))), kind
    )


_NUMBER = {int: torch.int32, float: torch.float32, bool: torch.bool}


def _tensor(value, device):
    if isinstance(value, torch.Tensor):
        return value
    if type(value) not in _NUMBER:
        raise TypeError(f"got a captured {type(value).__name__}, expected a tensor or a number")
    return torch.tensor(value, dtype=_NUMBER[type(value)])


def _bound(kind, text, names, tensors):
    types = tuple((n, dtype_name(t), t.dim()) for n, t in zip(names, tensors))
    return _core.bound_mod(_KINDS[kind], text, types)


def _place(t, device):
    """Captures live where the kernel runs; scalars are passed by value from the host."""
    if t.dim() == 0:
        return t.cpu() if t.is_cuda else t
    if t.device.type != torch.device(device).type:
        return t.to(device)
    return t


def text_and_values(mod, kind):
    """(text, capture names, captured values) of any form of mod."""
    if isinstance(mod, str):
        return mod, [], []
    if isinstance(mod, AnyMod):
        if mod.kind != kind:
            raise ValueError(f"got a {mod.kind}, expected a {kind}")
        return mod.text, list(mod.captures), list(mod.captures.values())
    if not callable(mod):
        raise TypeError(
            f"got a {type(mod).__name__} as {kind}_mod, expected a callable or text"
        )
    found, values = _callables.trace(mod, kind)
    return found.text, found.names, values


def resolve(mod, kind: str, device: str):
    """Bound mod, views of its captures, and the tensors that the views borrow."""
    text, names, values = text_and_values(mod, kind)
    tensors = [_place(_tensor(v, device), device) for v in values]
    for n, t in zip(names, tensors):
        if t.dtype == torch.int64 and not t.is_cuda and t.dim() == 0:
            _check_int32(n, t)
    return _bound(kind, text, names, tensors), [view(t) for t in tensors], tensors


def _check_int32(name, t):
    if not -(1 << 31) <= int(t) < 1 << 31:
        raise ValueError(f"{name}: got {int(t)}, expected a value that fits 32 bits")


class Watch:
    """Whether a callable still is what it was: its closure cells and used globals, by
    identity."""

    def __init__(self, mod):
        self.mod = weakref.ref(mod) if callable(mod) else None
        self.cells, self.names, self.simple = [], [], True
        if callable(mod):
            self._add(mod, set())

    def _add(self, f, seen):
        if id(f) in seen:
            return
        seen.add(id(f))
        if isinstance(f, functools.partial):
            self.simple &= not any(isinstance(a, (list, dict)) for a in f.args)
            for part in (f.func, *f.args, *f.keywords.values()):
                if callable(part):
                    self._add(part, seen)
            return
        code = getattr(f, "__code__", None)
        if code is None or not hasattr(f, "__globals__"):
            self.simple &= isinstance(f, type) or torch.is_tensor(f)
            return
        for c in f.__closure__ or ():
            value = _callables._content(c)
            self.cells.append((c, value))
            self._follow(value, seen)
        for n in code.co_names:
            value = f.__globals__.get(n)
            if _callables._is_mod_global(value):
                self.names.append((f.__globals__, n, value))
                self._follow(value, seen)

    def _follow(self, value, seen):
        if isinstance(value, (list, dict, tuple, set)):
            self.simple = False
        elif callable(value) and not isinstance(value, type):
            self._add(value, seen)

    def unchanged(self) -> bool:
        if not self.simple:
            return False
        for cell, value in self.cells:
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:
                return False
        for table, name, value in self.names:
            if table.get(name) is not value:
                return False
        return True
