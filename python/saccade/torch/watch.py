"""Whether a mod still is what it was: its identity, its layout, and what it reads."""

from __future__ import annotations

import types
import weakref

import torch

from ..trace import closures
from .mods import AnyMod, Resolved
from .warm import tensors_of


def _version(t):
    """Counts in-place changes; inference tensors have none and always differ."""
    return object() if t.is_inference() else t._version


def _layout(t):
    return t.data_ptr(), t.dtype, t.shape, t.stride(), t.device


_BY_VALUE = frozenset((int, float, bool, str, type(None)))
_BY_ID = frozenset((torch.Tensor, torch.nn.Parameter, types.FunctionType))


def _held(f):
    """What a function's closure and defaults hold."""
    held = f.__defaults__ or ()
    if f.__closure__:
        held += tuple([cell.cell_contents for cell in f.__closure__])
    return held


def _parts(mod):
    """What tells a function or a text from others, and what it holds."""
    if type(mod) is AnyMod:
        return [mod.kind, mod.text, mod.signed_text, *mod.captures], mod.captures.values()
    return [id(mod.__code__), id(mod.__globals__)], _held(mod)


def _add_held(key, held):
    """Appends what tells these from others; whether it can be told."""
    for x in held:
        kind = type(x)
        if kind in _BY_ID:
            key.append(id(x))
        elif kind in _BY_VALUE:
            key += kind, (x or repr(x))  # 0.0 is not -0.0
        else:
            return False
    return True


def identity(mod):
    """Equal for mods that are the same object, text, method of one object, or function: of one
    code and holding the same tensors and numbers, as a lambda made anew for each call does. So
    are texts with the same captures."""
    kind = type(mod)
    if kind is types.FunctionType and (mod.__kwdefaults__ or mod.__dict__):
        return id(mod)
    if kind is types.FunctionType or kind is AnyMod:
        try:
            key, held = _parts(mod)
            return tuple(key) if _add_held(key, held) else id(mod)
        except ValueError:  # a cell that is empty
            return id(mod)
    if kind is str:
        return mod
    if kind is types.MethodType:
        return id(mod.__self__), id(mod.__func__)
    return id(mod)


_BY_LAYOUT = frozenset((torch.Tensor, torch.nn.Parameter))


def held_at(mod, places):
    """What the cells of a function's closure, or captures of a text, at these places hold."""
    if type(mod) is AnyMod:
        values = list(mod.captures.values())
        return [values[i] for i in places]
    return [mod.__closure__[i].cell_contents for i in places]


def layout(mod):
    """(kind, numbers): the kind is equal for functions of one code whose closures hold tensors
    of one layout and numbers of the same types, and for equal texts whose captures are so; None
    for what holds more than that. numbers are the values of those numbers."""
    is_text = type(mod) is AnyMod
    if not is_text and (
        type(mod) is not types.FunctionType or mod.__defaults__ or mod.__kwdefaults__
    ):
        return None, ()
    numbers, tensors = [], set()
    try:
        key, held = _parts(mod)
        for x in held:
            kind = type(x)
            if kind in _BY_LAYOUT:
                key += x.dtype, x.shape, x.stride(), x.device
                if id(x) in tensors:
                    return None, ()
                tensors.add(id(x))
            elif kind is int or kind is float:
                key.append(kind)
                numbers.append(x or repr(x))  # 0.0 is not -0.0
            elif kind is types.FunctionType:
                key.append(id(x))
            elif kind in _BY_VALUE:
                key += kind, x
            else:
                return None, ()
    except (ValueError, RuntimeError):  # a cell that is empty, a tensor without strides
        return None, ()
    return (None if not is_text and mod.__dict__ else tuple(key)), tuple(numbers)


def owners(mod):
    """The objects whose ids are in the identity of a mod."""
    if type(mod) in (types.FunctionType, AnyMod) and type(identity(mod)) is tuple:
        code = [] if type(mod) is AnyMod else [mod.__code__]
        return code + [x for x in _parts(mod)[1] if type(x) in _BY_ID]
    if type(mod) is types.MethodType:
        return [mod.__self__]
    return [] if type(mod) is str else [mod]


class Watch:
    """Whether a mod and the tensors it captures still are what they were when resolved, given
    that its identity is. by_value: values of captures were used too, not only their places.
    Tensors are held weakly: what holds a Watch is to go when they do."""

    def __init__(self, mod, found: Resolved, by_value: bool):
        walk = found.walk
        self.fixed = not found.volatile and not (walk is not None and walk.opaque)
        self.slots = walk.slots if walk is not None else None
        is_told = type(identity(mod)) is tuple  # with what it holds
        if isinstance(mod, AnyMod) and not is_told:
            self.slots = closures.Slots()
            c = mod.captures
            self.slots.dicts.append((c, frozenset(c), tuple(c.values())))
        elif type(mod) is types.FunctionType and is_told:
            del walk.slots.functions[:1], walk.slots.cells[: len(mod.__closure__ or ())]
        tensors = found.captured
        if walk is not None:
            tensors = [t for t in walk.leaves if isinstance(t, torch.Tensor)]
        if self.slots is not None and self.slots.is_empty():
            self.slots = None
        self._hold(tensors)
        counted = tensors if by_value else found.copied
        self.versions = [(weakref.ref(t), _version(t)) for t in counted]

    def of(self, tensors) -> "Watch":
        """The same for a function of the same layout that holds these tensors."""
        made = Watch.__new__(Watch)
        made.fixed, made.slots, made.versions = True, self.slots, []
        made._hold(tensors)
        return made

    def _hold(self, tensors):
        """By the extension, if it is there and can see them."""
        self.held = tensors_of(tensors) if tensors else None
        seen = self.held is not None
        self.tensors = [] if seen else [(weakref.ref(t), *_layout(t)) for t in tensors]

    def is_quick(self) -> bool:
        """Whether nothing but what `held` sees can change."""
        return self.fixed and self.slots is None and not self.tensors and not self.versions

    def unchanged(self) -> bool:
        if not self.fixed or (self.slots is not None and not self.slots.unchanged()):
            return False
        if self.held is not None and self.held.now() is None:
            return False
        for ref, pointer, dtype, shape, stride, device in self.tensors:
            t = ref()
            if (
                t is None
                or t.data_ptr() != pointer
                or t.dtype is not dtype
                or t.shape != shape
                or t.stride() != stride
                or t.device != device
            ):
                return False
        for ref, version in self.versions:
            t = ref()
            if t is None or _version(t) != version:
                return False
        return True
