"""What a caller may pass as a mod: a callable, language text, or text with its captures."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import numbers
import types
from typing import Any, Callable, Iterable, Mapping, Optional

import torch

from ..c import abi, objects
from ..trace import closures, symbols
from ..trace.errors import words_of
from ..trace.tracer import with_other_names
from .memory import check_memory, unwrapped

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
_KINDS = {"mask": abi.MASK, "score": abi.SCORE}


def dtype_name(t: torch.Tensor) -> str:
    return name_of_dtype(t.dtype)


def name_of_dtype(dtype: torch.dtype) -> str:
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise ValueError(f"got a tensor of {dtype}, expected bool, int or float") from None


def written(*tensors: torch.Tensor | None) -> None:
    """Tells autograd that the library has written them: what saved one says so then."""
    for t in tensors:
        if t is not None and not t.is_inference():
            torch.autograd.graph.increment_version(t)


def view(t: torch.Tensor) -> objects.View:
    """A C view of a tensor; the tensor must outlive it."""
    if t.is_neg():
        raise ValueError(
            "got a tensor whose memory holds the negatives of its values, expected "
            "tensor.resolve_neg()"
        )
    cuda = t.is_cuda
    return objects.View(
        t.data_ptr(),
        dtype_name(t),
        int(cuda),
        t.get_device() if cuda else 0,
        tuple(t.shape),
        tuple(t.stride()),
    )


class AnyMod:
    """Language text with its captures by name: mask("doc[q] == doc[kv]", doc=ids)."""

    def __init__(
        self, kind: str, text: str, captures: dict[str, Any], signed_text: Optional[str] = None
    ) -> None:
        self._kind, self._text, self.captures = kind, text, dict(captures)
        self._signed_text = signed_text or text

    kind = property(lambda self: self._kind)
    text = property(lambda self: self._text)
    signed_text = property(lambda self: self._signed_text)
    """What it is where positions may be negative: // and % of callables are Python's."""

    def __call__(self, *at: Any) -> Any:
        """In a callable that is being traced, its value there."""
        if not any(isinstance(x, symbols.Traced) for x in at):
            other = "; create_mask evaluates it" if self.kind == "mask" else ""
            raise TypeError(
                f"{self!r}: got a call outside of a traced mod, expected it to be given as a "
                f"mod, or called inside of a callable one{other}"
            )
        if len(at) != _ARGUMENTS[self.kind]:
            raise TypeError(
                f"{self!r}: got {len(at)} arguments, expected {_ARGUMENTS[self.kind]}: "
                f"{_SIGNATURE[self.kind]}"
            )
        return _inline(self.text, self.captures, *at)

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join([repr(self.text), *self.captures])})"


def is_code(mod: Any) -> bool:
    """Whether it is a callable, and no text."""
    return callable(mod) and not isinstance(mod, AnyMod)


def mask(mod: Callable[..., Any] | str, **captures: Any) -> AnyMod:
    """A mask in the language; captures are tensors or numbers by name, and the text uses each.
    Errors of the text are raised here, not by the first call. A callable mask_mod is turned
    into text here and now, with its tensors and numbers as they are: such a mod stays inside of
    torch.compile(fullgraph=True)."""
    return _of_any_position("mask", mod, captures)


def score(mod: Callable[..., Any] | str, **captures: Any) -> AnyMod:
    """A score function in the language; captures and callables as for mask."""
    return _of_any_position("score", mod, captures)


def _of_any_position(kind: str, mod, captures: dict[str, Any]) -> AnyMod:
    """text_of, which also says what a callable is where positions may be negative."""
    if not is_code(mod) and not isinstance(mod, str):
        raise TypeError(f"{kind}: got {words_of(mod)}, expected a callable or text")
    made = text_of(kind, mod, captures)
    if is_code(mod):
        signed = text_of(kind, mod, captures, is_signed=True)
        if list(signed.captures) == list(made.captures):  # else it is another at each call
            made = AnyMod(kind, made.text, made.captures, signed.text)
    elif not torch.compiler.is_dynamo_compiling():
        types = tuple([type_of(name, x) for name, x in captures.items()])
        objects.bound_mod(_KINDS[kind], mod, types)
    return made


def text_of(
    kind: str,
    mod,
    captures: dict[str, Any],
    is_double: bool = False,
    is_signed: bool = False,
    for_once: bool = False,
) -> AnyMod:
    """A callable as text, here and now; text as it is. for_once: the text may hold values that
    the callable reads of what it captures, and the captures tensors that it computes of them.
    """
    if not is_code(mod):
        return AnyMod(kind, mod, captures)
    if captures:
        raise TypeError(f"{kind}: got captures beside a callable, expected its closure's")
    _check_arguments(mod, kind)
    with untraced():
        found, values, _ = closures.trace(mod, kind, is_double, is_signed)
    if found.volatile and not for_once:
        raise ValueError(
            f"{kind}: the callable reads values of its captured tensors, expected only "
            "elements at b, h, q_idx and kv_idx"
        )
    return AnyMod(kind, found.text, dict(zip(found.names, map(as_row, values))))


@contextlib.contextmanager
def untraced():
    """jit.trace, in which shapes are tensors, writes nothing down here."""
    state = torch._C._get_tracing_state()
    if state is None:  # a kernel's own code may not ask for less
        yield
        return
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)


def as_row(x):
    """A scalar on CUDA as the row of one element that a trace reads."""
    return x.view(1) if isinstance(x, torch.Tensor) and x.is_cuda and x.dim() == 0 else x


def tensors_of(kind: str, mod: Any) -> list[Any]:
    """The tensors that a mod captures; of what is no mod none."""
    if is_code(mod):
        mod = text_of(kind, mod, {}, for_once=True)
    values = mod.captures.values() if isinstance(mod, AnyMod) else ()
    return [t for t in values if isinstance(t, torch.Tensor)]


class captured:
    """Turning one form of mod into another."""

    @staticmethod
    def kind_of(mod) -> str:
        if isinstance(mod, AnyMod):
            return mod.kind
        if isinstance(mod, str):
            return _kind_of_text(mod)
        refuse_class("mod_fn", mod)
        n, _ = _counts(mod)
        if n not in (4, 5):
            raise ValueError(f"got a mod of {n} arguments, expected 4 (mask) or 5 (score)")
        return "score" if n == 5 else "mask"

    @staticmethod
    def callable_of(mod):
        """A Python callable with the mod's meaning, for use inside other callables."""
        if is_code(mod):
            return mod
        text = mod if isinstance(mod, str) else mod.text
        captures = {} if isinstance(mod, str) else mod.captures
        return functools.partial(_inline, text, captures)


def _counts(mod) -> tuple[int, float]:
    """How many arguments a callable needs, and how many it takes."""
    if isinstance(mod, types.FunctionType) and not mod.__kwdefaults__:
        code = mod.__code__
        most = math.inf if code.co_flags & inspect.CO_VARARGS else code.co_argcount
        return code.co_argcount - len(mod.__defaults__ or ()) + code.co_kwonlyargcount, most
    if isinstance(mod, types.MethodType):
        least, most = _counts(mod.__func__)
        return max(least - 1, 0), most - 1
    if isinstance(mod, torch.jit.ScriptFunction):
        raise TypeError(
            "got a function of torch.jit.script, expected the Python function it was made from"
        )
    try:
        parameters = inspect.signature(mod).parameters.values()
    except ValueError:  # of C, which says nothing of itself
        return 0, math.inf
    given = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    least = sum(p.default is p.empty for p in (*given, *named))
    return least, math.inf if takes_any else len(given)


def _check_arguments(mod, kind: str) -> None:
    refuse_class(f"{kind}_mod", mod)
    least, most = _counts(mod)
    if not least <= _ARGUMENTS[kind] <= most:
        code = getattr(mod, "__code__", None)
        name = getattr(mod, "__qualname__", type(mod).__name__)
        where = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
        got = least if least > _ARGUMENTS[kind] else most
        raise TypeError(
            f"{kind}_mod: got a callable of {got} arguments, {name}{where}, expected "
            f"{_ARGUMENTS[kind]}: {_SIGNATURE[kind]}"
        )


def refuse_class(name: str, mod) -> None:
    """Calling a class makes an object, which is neither a score nor a mask."""
    if not isinstance(mod, type):
        return
    try:
        where = f" at {inspect.getsourcefile(mod)}:{inspect.findsource(mod)[1] + 1}"
    except (OSError, TypeError):  # of C, or typed in
        where = ""
    raise TypeError(
        f"{name}: got the class {mod.__qualname__}{where}, expected a function, text, or an "
        "object with __call__"
    )


def _kind_of_text(text: str) -> str:
    """mask where the text is one, else score (whose errors are then shown on use)."""
    try:
        objects.free_names(abi.MASK, text)
        return "mask"
    except abi.BadValue:
        return "score"


def _inline(text, captures, *values):
    """Writes language text into the mod being traced, with its index variables replaced."""
    names = ["b", "h", "q", "kv"] if len(values) == 4 else ["score", "b", "h", "q", "kv"]
    tracer = next((v.tracer for v in values if isinstance(v, symbols.Traced)), None)
    if tracer is None:
        raise TypeError(
            f"{text!r}: got a call outside of a traced mod, expected it inside of a callable "
            "one; create_mask evaluates masks"
        )
    kind = "mask" if len(values) == 4 else "score"
    free = objects.free_names(_KINDS[kind], text)
    return tracer.inline(
        text, free, captures, dict(zip(names, map(tracer.value, values))), kind
    )


def type_of(name, x):
    """(name, dtype, rank) of what a text captures."""
    if type(x) is float or (type(x) is int and -(1 << 31) <= x < 1 << 31):
        return name, "f32" if type(x) is float else "i32", 0
    if not isinstance(x, torch.Tensor):
        x = as_tensor(x, name)
    try:
        return name, dtype_name(x), x.dim()
    except ValueError as reason:
        raise ValueError(f"{name}: {reason}") from None


_NUMBER = {int: torch.int32, float: torch.float32, bool: torch.bool}


def as_tensor(value, name, is_double=False):
    """A captured value as a tensor: numbers as one of rank 0 on the host, floats as f64 where
    the problem is."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
        if not -(1 << 31) <= value < 1 << 31:
            raise ValueError(f"{name}: got {value}, expected a value that fits 32 bits")
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = float(value)
    if type(value) not in _NUMBER:
        raise TypeError(
            f"{name}: got {words_of(value)} among the captures, expected a tensor or a number"
        )
    dtype = torch.float64 if is_double and type(value) is float else _NUMBER[type(value)]
    return torch.tensor(value, dtype=dtype, device="cpu")


def place(t, device, is_flat=False, name="a capture"):
    """Captures live where the kernel runs; scalars are passed by value from the host. is_flat:
    a trace reads one-element rows where a scalar is on CUDA."""
    if t.layout is not torch.strided:
        raise TypeError(f"{name}: got a tensor of layout {t.layout}, expected to_dense() of it")
    if t.is_meta and device != "meta":
        raise TypeError(f"{name}: got a tensor on meta, which has no values, expected {device}")
    if device != "meta":
        check_memory(name, t)
    t = t.detach().resolve_neg()
    if is_flat and t.is_cuda and t.dim() == 0:
        t = t.view(1)
    if t.dim() == 0:
        return t.cpu() if t.is_cuda else t
    if t.device.type != device:
        return t.to(device)
    return t


_ARGUMENTS = {"score": 5, "mask": 4}
_SIGNATURE = {"score": "(score, b, h, q_idx, kv_idx)", "mask": "(b, h, q_idx, kv_idx)"}


def in_names_of(
    reason: abi.BadValue, mods: Iterable[Resolved], others: Optional[Mapping[str, str]] = None
) -> abi.BadValue:
    """An error of the library about a captured value, or an argument among `others`, with the
    caller's name for it."""
    name, _, rest = str(reason).partition(": ")
    called = others.get(name) if others else None
    for mod in mods:
        if name in mod.names:
            called = mod.called[mod.names.index(name)]
    if not rest or called is None:
        return reason
    return abi.BadValue(reason.status, f"{called}: {rest}", reason.line, reason.column)


class Resolved:
    """A mod ready to run: bound, with views of its captures and what keeps them valid."""

    def __init__(
        self, mod, kind: str, device: str, is_double: bool = False, is_signed: bool = False
    ):
        text, names, values, self.walk, found = _text_and_values(
            mod, kind, is_double, is_signed
        )
        self.values = values
        self.volatile = found is not None and found.volatile
        if found is not None:
            self.cells = _cells(found, self.walk)
        else:
            self.cells = list(range(len(values)))  # in the order of a text's captures
        self.is_inside = found is not None and not all(
            isinstance(x, int) for x in found.sources
        )  # it computes tensors itself
        self.flags = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in values)
        name_of = self.walk.name_of if self.walk is not None else lambda value: ""
        self.called = [name_of(v) or n for n, v in zip(names, values)]
        given = [as_tensor(v, n, is_double) for n, v in zip(self.called, values)]
        self.is_flat = self.walk is not None
        if kind == "mask":  # of which nothing is differentiated: grad and jvp see none of it
            given = [unwrapped(t) for t in given]
            with torch._C._DisableFuncTorch():
                self._place(given, device)
        else:
            self._place(given, device)
        for n, t in zip(self.called, self.tensors):
            if t.dtype == torch.int64 and t.dim() == 0:
                as_tensor(int(t), n)  # refuses what leaves 32 bits
        types = tuple((n, dtype_name(t), t.dim()) for n, t in zip(names, self.tensors))
        self.bound = objects.bound_mod(_KINDS[kind], text, types)
        self.captured = [t for t in values if isinstance(t, torch.Tensor)]
        self.copied = [
            t
            for t, x, placed in zip(values, given, self.tensors)
            if isinstance(t, torch.Tensor) and x.data_ptr() != placed.data_ptr()
        ]

    def _place(self, given, device):
        self.tensors = [place(t, device, self.is_flat, n) for n, t in zip(self.called, given)]
        self.views = [view(t) for t in self.tensors]

    def again(self) -> "Resolved":
        """Itself, with views of its tensors where they lie now."""
        self.views = [view(t) for t in self.tensors]
        return self

    def apart(self, taken: Iterable[str]) -> "Resolved":
        """Itself, with other names for those of its captures that another mod of the call has
        too: the library knows captures of both by name, and each mod's are its own."""
        mine = self.names
        clash = [n for n in mine if n in taken]
        if not clash:
            return self
        text, called = with_other_names(self.bound.text, clash, (*mine, *taken))
        given = zip([called.get(n, n) for n in mine], self.tensors)
        types = tuple((n, dtype_name(t), t.dim()) for n, t in given)
        made = copy.copy(self)
        made.bound = objects.bound_mod(self.bound.kind, text, types)
        return made

    names = property(lambda self: list(self.bound.names))


def _cells(found, walk):
    """Which cells of the function's closure hold what it captures, None for what lies
    elsewhere; None alone where a tensor lies in two places, or was made inside."""
    cells: list[int | None] = []
    for s in found.sources:
        if not isinstance(s, int):
            return None
        leaf = walk.leaves[s]
        if isinstance(leaf, torch.Tensor) and sum(x is leaf for x in walk.leaves) > 1:
            return None
        cells.append(walk.cell_of.get(s))
    return cells


# What someone means who gives a tensor.
_READERS = {
    "mask": " that reads it: lambda b, h, q_idx, kv_idx: keep[b, h, q_idx, kv_idx]; what is "
    "added to scores goes to score_mod",
    "score": " that reads it: lambda score, b, h, q_idx, kv_idx: "
    "score + t[b, h, q_idx, kv_idx]",
}


def _text_and_values(mod, kind, is_double, is_signed):
    """(text, capture names, captured values, walk, trace) of any form of mod."""
    if isinstance(mod, str):
        return mod, [], [], None, None
    if isinstance(mod, AnyMod):
        if mod.kind != kind:
            raise ValueError(f"got a {mod.kind}, expected a {kind}")
        text = mod.signed_text if is_signed else mod.text
        return text, list(mod.captures), list(mod.captures.values()), None, None
    if not is_code(mod):
        hint = _READERS[kind] if isinstance(mod, torch.Tensor) else ""
        raise TypeError(f"{kind}_mod: got {words_of(mod)}, expected a callable or text{hint}")
    _check_arguments(mod, kind)
    found, values, walk = closures.trace(mod, kind, is_double, is_signed)
    return found.text, found.names, values, walk, found
