"""The C library by ctypes: structs as in include/saccade.h, errors as exceptions.

Nothing here knows tensors of any framework; views are (pointer, dtype, device, shape, stride).
"""

from __future__ import annotations

import ctypes as C
import os
import struct
from pathlib import Path

OK = 0
STATUS = {
    10: "EINVAL",
    20: "EPARSE",
    21: "ETYPE",
    22: "ELIMIT",
    23: "EVALUE",
    30: "ENOMEM",
    40: "EBACKEND",
    50: "EIO",
    90: "EINTERNAL",
}
MASK, SCORE = 1, 2
CPU, CUDA = 0, 1
DTYPES = {
    "bool": 1,
    "u8": 2,
    "i8": 3,
    "u16": 4,
    "i16": 5,
    "u32": 6,
    "i32": 7,
    "u64": 8,
    "i64": 9,
    "f16": 20,
    "bf16": 21,
    "f32": 22,
    "f64": 23,
}
MAX_RANK = 8


class SaccadeError(RuntimeError):
    """A call the library refused. `status` is its name; `line`, `column` place it in a text."""

    def __init__(self, status: str, message: str, line: int = 0, column: int = 0):
        super().__init__(message)
        self.status, self.line, self.column = status, line, column


class BadValue(SaccadeError, ValueError):
    """The caller's mistake: shapes, dtypes, names, text."""


class Error(C.Structure):
    _fields_ = [
        ("status", C.c_int32),
        ("line", C.c_int32),
        ("column", C.c_int32),
        ("where", C.c_char * 64),
        ("message", C.c_char * 448),
        ("excerpt", (C.c_char * 96) * 2),
    ]


class Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("dtype", C.c_int32),
        ("device_kind", C.c_int32),
        ("device_index", C.c_int32),
        ("rank", C.c_int32),
        ("shape", C.c_int64 * MAX_RANK),
        ("stride", C.c_int64 * MAX_RANK),
    ]


class Capture(C.Structure):
    _fields_ = [("name", C.c_char_p), ("dtype", C.c_int32), ("rank", C.c_int32)]


class Binding(C.Structure):
    _fields_ = [("name", C.c_char_p), ("tensor", Tensor)]


class Sizes(C.Structure):
    _fields_ = [(n, C.c_int64) for n in ("B", "H", "Hkv", "Q", "KV", "D", "Dv")]


class Positions(C.Structure):
    _fields_ = [("q_offset", Tensor), ("kv_offset", Tensor), ("kv_len", Tensor)]


class ContextOptions(C.Structure):
    _fields_ = [("threads", C.c_int32), ("level", C.c_char_p), ("reserved", C.c_uint8 * 48)]


class BlockMaskOptions(C.Structure):
    _fields_ = [
        ("block_q", C.c_int32),
        ("block_kv", C.c_int32),
        ("evaluation_budget", C.c_int64),
        ("reserved", C.c_uint8 * 48),
    ]


class BlockMaskStats(C.Structure):
    _fields_ = [
        (n, C.c_int64)
        for n in (
            "blocks",
            "full",
            "partial",
            "proven",
            "evaluated",
            "unknown",
            "evaluated_positions",
            "runs",
            "bytes",
        )
    ] + [("seconds", C.c_double), ("sparsity", C.c_double)]


class BlockIndices(C.Structure):
    _fields_ = (
        [(n, C.c_int64) for n in ("B", "H", "rows", "columns")]
        + [("block_q", C.c_int32), ("block_kv", C.c_int32)]
        + [
            (n, C.c_void_p)
            for n in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        ]
    )


class Problem(C.Structure):
    _fields_ = [
        ("sizes", Sizes),
        ("dtype", C.c_int32),
        ("kv_dtype", C.c_int32),
        ("scale", C.c_float),
        ("score", C.c_void_p),
        ("mask", C.c_void_p),
        ("backend", C.c_char_p),
        ("arch", C.c_char_p),
        ("reserved", C.c_uint8 * 56),
    ]


class ForwardArgs(C.Structure):
    _fields_ = [
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", Tensor),
        ("row_max", Tensor),
        ("positions", Positions),
        ("block_mask", C.c_void_p),
        ("bindings", C.POINTER(Binding)),
        ("n_bindings", C.c_int32),
        ("workspace", C.c_void_p),
        ("workspace_bytes", C.c_size_t),
        ("stream", C.c_void_p),
        ("reserved", C.c_uint8 * 64),
    ]


class PreludeEntry(C.Structure):
    _fields_ = [
        ("name", C.c_char_p),
        ("signature", C.c_char_p),
        ("comment", C.c_char_p),
        ("kind", C.c_int32),
    ]


# One tensor as struct.pack sees it, for filling ForwardArgs without ctypes attribute costs.
PACK_TENSOR = struct.Struct("=Qiiii16q")
assert PACK_TENSOR.size == C.sizeof(Tensor)


def _candidates():
    here = Path(__file__).resolve().parent
    if os.environ.get("SACCADE_LIBRARY"):
        yield os.environ["SACCADE_LIBRARY"]
        return
    for folder in (here, here / "lib", here.parents[1] / "build"):
        yield from (str(p) for p in sorted(folder.glob("libsaccade.*")) if p.suffix != ".a")
    yield "libsaccade.so"


def _load() -> C.CDLL:
    tried = []
    for path in _candidates():
        try:
            return C.CDLL(path)
        except OSError as reason:
            tried.append(f"{path} ({reason})")
    raise ImportError(
        "saccade: library not found, tried "
        + "; ".join(tried)
        + "; set SACCADE_LIBRARY to its path"
    )


lib = _load()

_P, _E = C.c_void_p, C.POINTER(Error)


def _declare(name, result, *arguments):
    f = getattr(lib, "saccade_" + name)
    f.restype, f.argtypes = result, list(arguments)
    return f


_S = C.c_int32
_declare("version", C.c_char_p)
_declare("mod_parse", _S, _S, C.c_char_p, C.c_size_t, C.POINTER(_P), _E)
_declare("mod_bind", _S, _P, C.POINTER(Capture), C.c_int32, C.POINTER(_P), _E)
_declare("mod_chain", _S, _P, _P, C.POINTER(_P), _E)
_declare("mod_kind", _S, _P)
_declare("mod_capture_count", C.c_int32, _P)
_declare("mod_capture", Capture, _P, C.c_int32)
_declare("mod_print", C.c_size_t, _P, C.c_char_p, C.c_size_t)
_declare("mod_destroy", None, _P)
_declare("prelude", C.POINTER(PreludeEntry), C.c_int32)
_declare("context_create", _S, C.POINTER(ContextOptions), C.POINTER(_P), _E)
_declare("context_destroy", None, _P)
_declare(
    "block_mask_create",
    _S,
    _P,
    _P,
    C.POINTER(Sizes),
    C.POINTER(Positions),
    C.POINTER(Binding),
    C.c_int32,
    C.POINTER(BlockMaskOptions),
    C.POINTER(_P),
    _E,
)
_declare(
    "block_mask_import",
    _S,
    _P,
    C.POINTER(BlockIndices),
    _P,
    C.POINTER(Sizes),
    C.POINTER(Positions),
    C.POINTER(Binding),
    C.c_int32,
    C.POINTER(_P),
    _E,
)
_declare(
    "block_mask_window", _S, _P, C.c_int64, C.c_int64, C.c_int64, C.c_int64, C.POINTER(_P), _E
)
_declare("block_mask_update", _S, _P, _E)
_declare("block_mask_is_stale", C.c_int, _P)
_declare("block_mask_mod", _P, _P)
_declare("block_mask_get_stats", BlockMaskStats, _P)
_declare("block_mask_export", _S, _P, C.c_int, C.POINTER(BlockIndices), _E)
_declare("block_mask_to_dense", _S, _P, C.c_void_p, _E)
_declare(
    "block_mask_render",
    _S,
    _P,
    C.c_int64,
    C.c_int64,
    _S,
    C.c_int32,
    C.POINTER(_P),
    C.POINTER(C.c_size_t),
    _E,
)
_declare("block_mask_destroy", None, _P)
_declare("free", None, _P)
_declare("plan_create", _S, _P, C.POINTER(Problem), C.POINTER(_P), _E)
_declare("plan_workspace", C.c_size_t, _P, C.POINTER(Sizes))
_declare("plan_prepare", _S, _P, _P, _E)
_declare("plan_explain", _S, _P, C.POINTER(_P), _E)
_declare("plan_destroy", None, _P)
_declare("forward", _S, _P, C.c_void_p, _E)


def message_of(e: Error) -> str:
    where = e.where.decode("utf-8", "replace")
    place = f"{e.line}:{e.column}: " if e.line else f"{where}: " if where else ""
    lines = [place + e.message.decode("utf-8", "replace")]
    lines += [x.value.decode("utf-8", "replace") for x in e.excerpt if x.value]
    return "\n".join(lines)


def check(status: int, e: Error) -> None:
    """Raises what a failed call reported."""
    if status == OK:
        return
    name = STATUS.get(status, str(status))
    if name == "ENOMEM":
        raise MemoryError(message_of(e))
    kind = BadValue if status < 30 else SaccadeError
    raise kind(name, message_of(e), e.line, e.column)


def call(name: str, *arguments) -> None:
    """Calls saccade_<name>(*arguments, &error) and raises on failure."""
    e = Error()
    check(getattr(lib, "saccade_" + name)(*arguments, C.byref(e)), e)


def create(name: str, *arguments) -> int:
    """The same for calls that end in (..., &out, &error); gives the new object."""
    out, e = _P(), Error()
    check(getattr(lib, "saccade_" + name)(*arguments, C.byref(out), C.byref(e)), e)
    assert out.value is not None
    return out.value
