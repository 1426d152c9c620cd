"""Python callables to language text, by running them once on symbols.

Each operator or torch function on a symbol appends one local to the text; indexing a real
tensor with a symbol captures the tensor. Nothing is compiled by torch and no value is ever
computed.
"""

from __future__ import annotations

import itertools
import math
import re
import struct

import torch

from .dtypes import DEFAULT_DTYPE
from .errors import TraceError, fail, of_name, shown, words_of
from .functions import bound, operator
from .grad_mode import (
    function_of,
    gradients_on,
    made_without,
    refusal_of,
    refuse_functions,
)
from .ops import convert
from .reductions import is_of_rows, is_reduction, vector_call
from .rows import PARTS, Rows, Vector, element_of, index_of, is_row
from .symbols import SYMBOLIC, Lifted, Traced, as_tensor
from .watching import watching

_LARGEST_F32 = 3.4028234663852886e38
_NOTHING_F32 = 2.0**-150  # this and less is 0 in f32, and no literal
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DEFINES = re.compile(r"\b(mask|score)\s+[A-Za-z_]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_NUMBER_OR_NAME = re.compile(r"\d[\w.]*|\.\d\w*|(?P<name>[A-Za-z_]\w*)(?P<call>\s*\()?")
_STEM = 48  # characters of a name that another is made from: the language has 63
_INT32 = (-(1 << 31), (1 << 31) - 1)


class Tracer:
    """The text being written and what it captures."""

    def __init__(self, kind: str, is_double: bool = False, is_signed: bool = False):
        """is_signed: positions may be negative, as those of queries before the first key."""
        self.kind, self.is_double, self.is_signed = kind, is_double, is_signed
        self.definitions: list[str] = []
        self.lines: list[str] = []
        self.captures: list[tuple[str, object]] = []  # name, tensor or number
        self._names: dict[int, str] = {}
        self._seen: dict[str, str] = {}
        self._expressions: dict[object, torch.Tensor] = {}  # of numbers of graphs
        self.uses_shapes = False  # the text may hold sizes of captured tensors
        self.is_fixed = False  # it does, of those that a graph takes in any size too
        self.volatile = False  # the text holds values of captured tensors
        self.inside = 0  # depth of our own work, whose look at tensors is no use by the mod
        self.lifted_used = False
        self.cut: set[str] = set()  # locals of which nothing is differentiated
        self.of_score = {"score"}  # names of what is computed from it

    def local(
        self, text: str, type: str, nonneg: bool = False, dtype: str | None = ""
    ) -> "Traced":
        """A local of this text; dtype: torch's, "" for bool, int64 or float32, None for what
        is a Python number."""
        name = self._seen.get(text)
        if name is None:
            name = self._seen[text] = f"t{len(self.lines)}"
            self.lines.append(f"{name} = {text};")
            if not self.of_score.isdisjoint(_NAME.findall(text)):
                self.of_score.add(name)
        return self.named(name, type, dtype, nonneg)

    def named(self, name: str, type: str, dtype: str | None, nonneg=False) -> "Traced":
        return Traced(
            self, name, type, nonneg, None, DEFAULT_DTYPE[type] if dtype == "" else dtype
        )

    def literal(self, x: float) -> str:
        """A float in the language, whose literals are f32: one of double is a sum of those."""
        text = _float_text(x)
        if not self.is_double or not math.isfinite(x) or abs(x) > _LARGEST_F32:
            return text
        parts: list[str] = []
        while x != _f32(x) and len(parts) < 3:
            parts.append(_float_text(_f32(x)))
            x -= _f32(x)
        return f"({' + '.join([*parts, _float_text(_f32(x))])})" if parts else text

    def knows(self, name: str) -> bool:
        return operator(name) is not None or is_reduction(name) or name in PARTS

    def element(self, text: str, tensor) -> "Traced":
        type, nonneg, _, dtype = element_of(tensor)
        return self.local(text, type, nonneg, dtype)

    def with_dtype(self, x: "Traced", dtype: str | None) -> "Traced":
        """x as it is, known to be of another dtype of its type."""
        return Traced(self, x.name, x.kind, x.nonneg, x.constant, dtype)

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
        missing = [n for n, _ in free if n not in captures]
        if missing:
            fail(f"got text that names {missing[0]}, expected a value for it")
        text = _COMMENT.sub(" ", text)
        if _DEFINES.search(text):  # its definitions stand before what moves the indices
            text, free = self._with_own_names(text, free, captures), []
            moved = f"{kind} {name}_body() = {{ {text} }}; {moved}"
            text = f"{name}_body()"
        params = [f"{n}_in" for n in indices] + [n + "[]" * (rank > 0) for n, rank in free]
        self.definitions.append(f"{kind} {name}({', '.join(params)}) = {{ {moved} {text} }};")
        given = [v.name for v in indices.values()] + [
            self.value(captures[n]).name if rank == 0 else self.capture(captures[n])
            for n, rank in free
        ]
        return self.local(f"{name}({', '.join(given)})", "bool" if kind == "mask" else "float")

    def _with_own_names(self, text: str, free, captures: dict) -> str:
        """Text with captures called as they are in this text: definitions inside of it see
        captures, but no parameter of what is around them. Its locals and functions of such
        names change."""
        names = {n: self._own_name(captures[n], rank) for n, rank in free}
        for n in (n for n, own in names.items() if own.endswith("]") and _binds(text, n)):
            fail(
                f"got {n} as a scalar read where it lies, and as a parameter or local of its "
                "text too, expected another name for one of them"
            )
        there, suffix = {at["name"] for at in _NUMBER_OR_NAME.finditer(text)}, "_own"
        while any(x + suffix in there for x, _ in self.captures):
            suffix += "_own"
        called = {x: x + suffix for x, _ in self.captures}
        names = called | names

        def own(at):
            name, call = at["name"], at["call"] or ""
            return (called if call else names).get(name, name) + call if name else at[0]

        return _NUMBER_OR_NAME.sub(own, text)

    def _own_name(self, value, rank: int) -> str:
        """What a capture is called in this text: where its text reads a scalar, the one element
        of a tensor that is read where it lies."""
        if isinstance(value, Lifted):
            self.lifted_used = True
            return self.capture(value)
        shape = getattr(value, "shape", ())
        if rank > 0 or not (len(shape) or getattr(value, "is_cuda", False)):
            return self.capture(value)
        self.value(value)  # which refuses other shapes
        return f"{self.capture(value)}[{', '.join('0' for _ in shape or (1,))}]"

    def text(self, result: "Traced") -> str:
        return " ".join(self.definitions + self.lines + [result.name])

    def value(self, x) -> "Traced":
        """Anything a mod may compute with, as Traced."""
        if isinstance(x, Traced):
            return x
        if isinstance(x, Lifted):
            self.lifted_used = True
            return Traced(self, self.capture(x), x.kind)
        if isinstance(x, bool):
            return Traced(self, "true" if x else "false", "bool", constant=x)
        if isinstance(x, int):
            if not _INT32[0] <= x <= _INT32[1]:
                fail(f"got the integer {x}, expected one that fits 32 bits")
            return Traced(self, str(x) if x >= 0 else f"({x})", "int", x >= 0, x)
        if isinstance(x, float):
            x = float(x)  # NumPy's are floats that show another text
            return Traced(self, self.literal(x), "float", x >= 0, x)
        if isinstance(x, SYMBOLIC):
            return self._symbolic(x)
        if isinstance(x, torch.SymBool):
            self.fix_sizes()
            return self.value(bool(x))
        if isinstance(x, (Rows, Vector)):
            fail(f"got a captured row with {x.ndim} index(es) missing, expected one element")
        if hasattr(x, "dtype") and hasattr(x, "shape"):
            if not hasattr(x, "stride") and x.shape == ():  # a NumPy scalar
                return self.value(x.item())
            if len(x.shape) == 0:
                if getattr(x, "is_cuda", False):  # read where it lies, as one element
                    return self.element(f"{self.capture(x)}[0]", x)
                return Traced(self, self.capture(x), *element_of(x))
            self.fix_sizes()
            if all(n == 1 for n in x.shape):
                zeros = ", ".join("0" for _ in x.shape)
                return self.element(f"{self.capture(x)}[{zeros}]", x)
            fail(
                f"got a whole captured tensor{of_name(x)} of shape {tuple(x.shape)}, expected "
                "one element: index it with b, h, q_idx or kv_idx"
            )
        fail(
            f"got {words_of(x)}{of_name(x)}, expected a number, a tensor element or a traced "
            "value"
        )

    def fix_sizes(self) -> None:
        """The text is to hold sizes as they are now."""
        self.uses_shapes = self.is_fixed = True

    def _symbolic(self, x) -> "Traced":
        """A number that a graph knows by its expression: captured, as it differs from call to
        call, each expression once."""
        expression = x.node.expr
        if expression.is_number:
            return self.value(int(x) if isinstance(x, torch.SymInt) else float(x))
        held = self._expressions.get(expression)
        if held is None:
            self.inside += 1
            held = self._expressions[expression] = as_tensor(x, self.is_double)
            self.inside -= 1
        kind = "int" if isinstance(x, torch.SymInt) else "float"
        return Traced(self, self.capture(held), kind)

    def apply(self, name: str, arguments, options):
        """One torch call on symbols."""
        if self.inside:
            return _apply(self, name, arguments, options)
        refuse_functions(name, arguments)
        self.inside += 1
        try:
            made = _apply(self, name, arguments, options)
            if torch.is_grad_enabled():
                return made
            return made_without(self, name.strip("_"), made, arguments)
        finally:
            self.inside -= 1


def _binds(text: str, name: str) -> bool:
    """Whether a text with definitions has a parameter or a local of this name."""
    in_list = rf"\b(?:mask|score)\s+\w+\s*\([^)]*\b{name}\b[^)]*\)\s*="
    return re.search(rf"{in_list}|\b{name}\s*=(?!=)", text) is not None


def with_other_names(text: str, names, taken) -> tuple[str, dict[str, str]]:
    """A text in which these captures are called otherwise, by names that are neither its own
    nor taken; and the new names by the old ones. Its locals and parameters of an old name
    change with it, which leaves what hides what as it was; its definitions keep theirs."""
    used = {at["name"] for at in _NUMBER_OR_NAME.finditer(text)} | set(taken)
    called = {}
    for old in names:
        tries = (f"{old[:_STEM]}_{i}" for i in itertools.count(2))
        called[old] = next(x for x in tries if x not in used)
        used.add(called[old])

    def other(at):
        is_capture = at["name"] in called and not at["call"]
        return called[at["name"]] if is_capture else at[0]

    return _NUMBER_OR_NAME.sub(other, text), called


def _f32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def _float_text(x: float) -> str:
    if math.isnan(x):
        return "(inf - inf)"
    if math.isinf(x):
        return "inf" if x > 0 else "(-inf)"
    if abs(x) <= _NOTHING_F32:
        x = math.copysign(0.0, x)
    text = repr(x)
    text = text if "." in text or "e" in text else text + ".0"
    return text if math.copysign(1, x) > 0 else f"({text})"


_OF_MATRICES = ("linear", "matmul", "rmatmul", "mv", "mm")
_ABOUT = ("dim", "numel", "size", "is_floating_point", "is_complex")


def _embedding(tracer, input, weight, padding_idx=None, max_norm=None, *, sparse=False, **more):
    """A row of a table; sparse says how its gradient is held, which here is dense."""
    if isinstance(weight, Traced):  # torch.embedding has the table first, -1 for no padding
        input, weight, padding_idx = weight, input, None if padding_idx == -1 else padding_idx
    if padding_idx is not None or max_norm is not None or more.get("scale_grad_by_freq"):
        fail(
            "got an embedding with padding_idx, max_norm or scale_grad_by_freq, expected the "
            "table's rows as they are, weight[index]"
        )
    return index_of(tracer, weight, input)


def _apply(tracer, name, arguments, options):
    plain = name.strip("_")
    if plain == "embedding":
        return _embedding(tracer, *arguments, **options)
    if plain in PARTS:
        return PARTS[plain](tracer, *arguments, **options)
    if plain in _ABOUT:
        return getattr(arguments[0], plain)(*arguments[1:], **options)
    if plain == "setitem":
        fail("got an assignment to an element; mods only compute, they change nothing")
    found = operator(name)
    if plain in ("to", "type_as") and not is_row(arguments[0]):  # of a row its dtype counts
        arguments = [a.dtype if is_row(a) else a for a in arguments]
        found = operator("to")
    if plain in _OF_MATRICES and any(len(getattr(a, "shape", ())) > 1 for a in arguments):
        fail(
            f"got {plain} of a captured matrix, which gives a row, expected its entries one by "
            "one: (w[n] * x).sum() for entry n, + bias[n]"
        )
    if is_of_rows(plain, arguments):
        return vector_call(tracer, plain, found, arguments, options)
    if found is None:
        fail(
            f"got torch.{plain}, which has no meaning for one score, or is not traced; "
            "expected arithmetic, comparisons, torch.where and other pointwise functions, or "
            "its values in a table made outside of the mod: table[index]"
        )
    if name.endswith("_") and not name.endswith("__"):
        fail(f"got {name}, which changes its argument; write {plain} and use its result")
    op, swap = found
    values, rest, given = bound(op, plain, arguments, options)
    values = [tracer.value(v) for v in (values[::-1] if swap else values)]
    return op.run(tracer, *values, *rest, **given)


# An index that a smaller tensor might not have.
_FIXED_INDEX = re.compile(r"\[(?:[^\]]*, )?[1-9]\d*[,\]]")


def run_in_graph(of, kind: str, make, env) -> tuple[str, list[tuple[str, object]], Tracer]:
    """run(of(tracer), kind, tracer), and the tracer, which make makes. Where a graph takes
    tensors of any size, env: its ShapeEnv; it is to take them still, if the text does."""
    tracer = make()
    if env is not None:
        with env.suppress_guards():
            text, captures = run(of(tracer), kind, tracer)
        if not (tracer.is_fixed or _FIXED_INDEX.search(text)):
            return text, captures, tracer
        tracer = make()  # the text holds for these sizes alone
    return *run(of(tracer), kind, tracer), tracer


def definition_of(fn) -> str:
    """Where a mod is written, for what its result is wrong about."""
    code = getattr(getattr(fn, "func", fn), "__code__", None)
    if code is None:
        return ""
    return shown(code, code.co_firstlineno)


def run(fn, kind: str, tracer: Tracer | None = None) -> tuple[str, list[tuple[str, object]]]:
    """Text and captures of one callable; kind is "score" (5 arguments) or "mask" (4)."""
    t = tracer or Tracer(kind)
    nonneg = {"b": True, "h": True, "q": not t.is_signed, "kv": not t.is_signed}
    indices = [Traced(t, n, "int", known, dtype="int32") for n, known in nonneg.items()]
    dtype = "float64" if t.is_double else "float32"
    first = [Traced(t, "score", "float", dtype=dtype)] if kind == "score" else []
    with gradients_on() as of_caller, watching(t, of_caller):
        result = fn(*first, *indices)
    t.inside += 1
    where = definition_of(fn)
    if function_of(result):
        raise TraceError(where + refusal_of(function_of(result)))
    if result is None:
        raise TraceError(f"{where}got nothing as the result, expected one value")
    if isinstance(result, (Rows, Vector)):
        raise TraceError(
            f"{where}got a row of a captured tensor as the result, expected one value: index "
            "it with b, h, q_idx or kv_idx, or sum over it"
        )
    result = t.value(result)
    if kind == "mask" and result.kind != "bool":
        raise TraceError(
            f"{where}got a {result.kind} as the mask, expected bool: write a comparison"
        )
    if kind == "score":
        result = convert(t, result, "float")
    return t.text(result), t.captures
