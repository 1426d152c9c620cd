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
    60: "ESTOPPED",
    70: "EPEER",
    90: "EINTERNAL",
}
MASK, SCORE, WEIGHT = 1, 2, 3
TEXT, SVG, PNG = 1, 2, 3  # pictures
GRADIENT_Q, GRADIENT_K, GRADIENT_V, GRADIENT_CAPTURES = 1, 2, 4, 8
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
    "e4m3": 30,
    "e5m2": 31,
    "i4": 32,
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


class Device(C.Structure):
    _fields_ = [("kind", C.c_int32), ("index", C.c_int32)]


class Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("dtype", C.c_int32),
        ("device", Device),
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


class Record(C.Structure):
    """A struct that may grow: its size first, set here; 0 everywhere else."""

    def __init__(self, **members):
        super().__init__(size=C.sizeof(type(self)), **members)


class Positions(Record):
    _fields_ = [("size", C.c_size_t)] + [
        (n, C.POINTER(Tensor)) for n in ("q_offset", "kv_offset", "kv_len")
    ]


class ContextOptions(Record):
    _fields_ = [("size", C.c_size_t), ("threads", C.c_int32), ("level", C.c_char_p)]


class BlockMaskOptions(Record):
    _fields_ = [
        ("size", C.c_size_t),
        ("block_q", C.c_int32),
        ("block_kv", C.c_int32),
        ("evaluation_budget", C.c_int64),
        ("progress", C.c_void_p),
        ("progress_user", C.c_void_p),
    ]


class BlockMaskStats(Record):
    _fields_ = (
        [("size", C.c_size_t)]
        + [
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
        ]
        + [("seconds", C.c_double), ("sparsity", C.c_double)]
    )


class BlockIndices(C.Structure):
    _fields_ = (
        [(n, C.c_int64) for n in ("B", "H", "rows", "columns")]
        + [("block_q", C.c_int32), ("block_kv", C.c_int32)]
        + [
            (n, C.c_void_p)
            for n in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        ]
    )


class SelectionOptions(Record):
    _fields_ = [
        ("size", C.c_size_t),
        ("B", C.c_int64),
        ("Hkv", C.c_int64),
        ("block_q", C.c_int32),
        ("block_kv", C.c_int32),
        ("most", C.c_int32),
    ]


class Problem(Record):
    _fields_ = [
        ("size", C.c_size_t),
        ("sizes", Sizes),
        ("dtype", C.c_int32),
        ("kv_dtype", C.c_int32),
        ("scale", C.c_double),
        ("score", C.c_void_p),
        ("mask", C.c_void_p),
        ("backend", C.c_char_p),
        ("arch", C.c_char_p),
        ("gradients", C.c_uint32),
        ("gradient_captures", C.POINTER(C.c_char_p)),
        ("n_gradient_captures", C.c_int32),
        ("h_offset", C.c_int64),
        ("heads_global", C.c_int64),
        ("out_dtype", C.c_int32),
        ("sinks_dtype", C.c_int32),
        ("k_scale_tokens", C.c_int32),
        ("k_scale_channels", C.c_int32),
        ("v_scale_tokens", C.c_int32),
        ("v_scale_channels", C.c_int32),
        ("page", C.c_int64),
        ("ragged", C.c_int32),
        ("weight", C.c_void_p),
        ("batch_invariant", C.c_int32),
        ("tangents", C.c_int32),
        ("head_max", C.c_int32),
        ("shared_prefix", C.c_int32),
    ]


# Members that the arguments of every run have, and those of runs that work in given memory.
RUN_INPUTS = [
    ("positions", C.POINTER(Positions)),
    ("block_mask", C.c_void_p),
    ("bindings", C.POINTER(Binding)),
    ("n_bindings", C.c_int32),
]
RUN_WORKSPACE = [
    ("workspace", C.c_void_p),
    ("workspace_bytes", C.c_size_t),
    ("stream", C.c_void_p),
]


def _tensors(*names):
    return [(name, C.POINTER(Tensor)) for name in names]


class Pages(Record):
    _fields_ = (
        [("size", C.c_size_t)]
        + _tensors("table", "indptr", "last_page_len")
        + [("chunk", C.c_int64), ("KV", C.c_int64)]
    )


class Ragged(Record):
    _fields_ = (
        [("size", C.c_size_t)]
        + _tensors("cu_seqlens_q", "cu_seqlens_kv")
        + [("max_q", C.c_int64), ("max_kv", C.c_int64), ("align_end", C.c_int32)]
    )


class Prefix(Record):
    _fields_ = (
        [("size", C.c_size_t)] + _tensors("cu_groups", "lengths") + [("max_keys", C.c_int64)]
    )


class ForwardArgs(Record):
    _fields_ = (
        [("size", C.c_size_t)]
        + _tensors("q", "k", "v", "out", "lse", "row_max")
        + RUN_INPUTS
        + RUN_WORKSPACE
        + _tensors("sinks", "k_scale", "v_scale")
        + [("pages", C.POINTER(Pages)), ("ragged", C.POINTER(Ragged))]
        + _tensors("dropout", "head_max")
        + [("prefix", C.POINTER(Prefix))]
    )


class BackwardArgs(Record):
    _fields_ = (
        [("size", C.c_size_t)]
        + _tensors("q", "k", "v", "out", "lse", "d_out", "d_lse", "d_q", "d_k", "d_v")
        + [
            ("d_captures", C.POINTER(Binding)),
            ("n_d_captures", C.c_int32),
            ("accumulate", C.c_uint32),
        ]
        + RUN_INPUTS
        + RUN_WORKSPACE
        + _tensors("sinks", "d_sinks")
        + [("pages", C.POINTER(Pages)), ("ragged", C.POINTER(Ragged))]
        + _tensors("dropout")
    )


class TangentArgs(Record):
    _fields_ = (
        [("size", C.c_size_t)]
        + _tensors("q", "k", "v", "q_dot", "k_dot", "v_dot")
        + [("captures_dot", C.POINTER(Binding)), ("n_captures_dot", C.c_int32)]
        + _tensors("out_dot", "lse_dot", "d_out", "d_lse", "d_q_dot", "d_k_dot", "d_v_dot")
        + [("d_captures_dot", C.POINTER(Binding)), ("n_d_captures_dot", C.c_int32)]
        + RUN_INPUTS
        + _tensors("sinks", "dropout", "out", "lse")
        + RUN_WORKSPACE[:2]
    )


class MergeArgs(Record):
    _fields_ = [
        ("size", C.c_size_t),
        ("outs", C.POINTER(Tensor)),
        ("lses", C.POINTER(Tensor)),
        ("n", C.c_int32),
        ("out", C.POINTER(Tensor)),
        ("lse", C.POINTER(Tensor)),
    ]


class AppendArgs(Record):
    _fields_ = (
        [("size", C.c_size_t)]
        + _tensors("k", "v", "k_pool", "v_pool", "k_scale", "v_scale")
        + [
            (f"{side}_scale_{of}", C.c_int32)
            for side in "kv"
            for of in ("tokens", "channels")
        ]
        + _tensors("slots")
        + [("pages", C.POINTER(Pages))]
        + _tensors("kv_len", "cu_seqlens")
        + [("stream", C.c_void_p)]
    )


class KvOptions(Record):
    _fields_ = [("size", C.c_size_t)] + [
        (n, C.c_int64) for n in ("pages", "page", "sequences", "most_keys")
    ]


class QuantizeArgs(Record):
    _fields_ = (
        [("size", C.c_size_t)]
        + _tensors("from", "to", "scale")
        + [("tokens", C.c_int32), ("channels", C.c_int32), ("is_given", C.c_int32)]
    )


class Range(C.Structure):
    _fields_ = [("first", C.c_int64), ("count", C.c_int64)]


class ShardOptions(Record):
    _fields_ = [
        ("size", C.c_size_t),
        ("ranks", C.c_int32),
        ("tile", C.c_int32),
        ("chunk", C.c_int64),
        ("Q", C.c_int64),
        ("KV", C.c_int64),
        ("masks", C.POINTER(C.c_void_p)),
        ("layers", C.POINTER(C.c_int32)),
        ("n_masks", C.c_int32),
    ]


class ShardStats(Record):
    _fields_ = [
        ("size", C.c_size_t),
        ("rows", C.c_int64),
        ("keys", C.c_int64),
        ("area", C.c_double),
        ("received", C.c_int64),
        ("sent", C.c_int64),
        ("peers", C.c_int32),
        ("mean_area", C.c_double),
        ("imbalance", C.c_double),
        ("seconds", C.c_double),
    ]


class Message(C.Structure):
    _fields_ = [("data", C.c_void_p), ("bytes", C.c_size_t), ("peer", C.c_int32)]


class Transport(Record):
    _fields_ = [
        ("size", C.c_size_t),
        ("rank", C.c_int32),
        ("ranks", C.c_int32),
        ("user", C.c_void_p),
        ("exchange", C.c_void_p),
        ("abort", C.c_void_p),
        ("seconds", C.c_double),
        ("exchange_on", C.c_void_p),
        ("caller_only", C.c_int32),
    ]


class PreludeEntry(C.Structure):
    _fields_ = [
        ("name", C.c_char_p),
        ("signature", C.c_char_p),
        ("comment", C.c_char_p),
        ("kind", C.c_int32),
    ]


class LayoutEntry(C.Structure):
    _fields_ = [
        ("record", C.c_char_p),
        ("member", C.c_char_p),
        ("offset", C.c_int32),
        ("bytes", C.c_int32),
    ]


# The structs of include/saccade.h that are mirrored here, by their names there.
MIRRORS = {
    "saccade_error": Error,
    "saccade_layout_entry": LayoutEntry,
    "saccade_device": Device,
    "saccade_tensor": Tensor,
    "saccade_sizes": Sizes,
    "saccade_positions": Positions,
    "saccade_capture": Capture,
    "saccade_binding": Binding,
    "saccade_prelude_entry": PreludeEntry,
    "saccade_context_options": ContextOptions,
    "saccade_block_mask_options": BlockMaskOptions,
    "saccade_block_mask_stats": BlockMaskStats,
    "saccade_block_indices": BlockIndices,
    "saccade_selection_options": SelectionOptions,
    "saccade_problem": Problem,
    "saccade_pages": Pages,
    "saccade_prefix": Prefix,
    "saccade_ragged": Ragged,
    "saccade_forward_args": ForwardArgs,
    "saccade_backward_args": BackwardArgs,
    "saccade_tangent_args": TangentArgs,
    "saccade_merge_args": MergeArgs,
    "saccade_quantize_args": QuantizeArgs,
    "saccade_kv_options": KvOptions,
    "saccade_append_args": AppendArgs,
    "saccade_range": Range,
    "saccade_shard_options": ShardOptions,
    "saccade_shard_stats": ShardStats,
    "saccade_message": Message,
    "saccade_transport": Transport,
}


def _codes(kind) -> str:
    """What the struct module calls a ctypes type, without padding."""
    if issubclass(kind, C.Array):
        return kind._length_ * _codes(kind._type_)
    if issubclass(kind, C.Structure):
        return "".join(_codes(t) for _, t in kind._fields_)
    if issubclass(kind, C._Pointer) or kind._type_ in "PzLQ":
        return "Q"
    return kind._type_ if kind._type_ in "fd" else "i" if C.sizeof(kind) == 4 else "q"


def packer(record, first: str = "", last: str = "") -> struct.Struct:
    """struct.pack of a mirror's members from first to last: fills arguments without what
    ctypes' attributes cost. Padding takes no argument."""
    names = [name for name, _ in record._fields_]
    begin = names.index(first) if first else 0
    end = names.index(last) + 1 if last else len(names)
    at = getattr(record, names[begin]).offset
    text = "="
    for name, kind in record._fields_[begin:end]:
        place = getattr(record, name)
        text += (place.offset - at) * "x" + _codes(kind)
        at = place.offset + place.size
    stop = getattr(record, names[end]).offset if end < len(names) else C.sizeof(record)
    return struct.Struct(text + (stop - at) * "x")


PACK_TENSOR = packer(Tensor)


def _candidates():
    here = Path(__file__).resolve().parents[1]
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
    try:
        f = getattr(lib, "saccade_" + name)
    except AttributeError:
        raise ImportError(
            f"saccade: the library ({lib._name}) has no saccade_{name}: it and the Python "
            "package are of two versions"
        ) from None
    f.restype, f.argtypes = result, list(arguments)
    return f


_S = C.c_int32
_declare("version", C.c_char_p)
_declare("build", C.c_char_p)
_declare("mod_parse", _S, _S, C.c_char_p, C.c_size_t, C.POINTER(_P), _E)
_declare("mod_bind", _S, _P, C.POINTER(Capture), C.c_int32, C.POINTER(_P), _E)
_declare("mod_chain", _S, _P, _P, C.POINTER(_P), _E)
_declare("mod_kind", _S, _P)
_declare("mod_capture_count", C.c_int32, _P)
_declare("mod_capture", Capture, _P, C.c_int32)
_declare("mod_print", C.c_size_t, _P, C.c_char_p, C.c_size_t)
_declare(
    "mod_check",
    _S,
    _P,
    C.POINTER(Sizes),
    C.POINTER(Positions),
    C.POINTER(Binding),
    C.c_int32,
    C.c_int64,
    _E,
)
_declare("mod_destroy", None, _P)
_declare("prelude", C.POINTER(PreludeEntry), C.c_int32)
_declare("context_create", _S, C.POINTER(ContextOptions), C.POINTER(_P), _E)
_declare("context_destroy", None, _P)
_declare("share_openmp", _S, _P, _P, _P, _E)
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
    "block_mask_create_selected",
    _S,
    _P,
    C.POINTER(SelectionOptions),
    _P,
    C.POINTER(Sizes),
    C.POINTER(Positions),
    C.POINTER(Binding),
    C.c_int32,
    C.POINTER(_P),
    _E,
)
_declare("block_mask_select", _S, _P, C.POINTER(Tensor), C.c_void_p, _E)
_declare(
    "block_mask_window", _S, _P, C.c_int64, C.c_int64, C.c_int64, C.c_int64, C.POINTER(_P), _E
)
_declare("block_mask_update", _S, _P, _E)
_declare("block_mask_is_stale", C.c_int, _P)
_declare("block_mask_mod", _P, _P)
_declare("block_mask_get_stats", _S, _P, C.POINTER(BlockMaskStats), _E)
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
_declare("plan_backward_workspace", C.c_size_t, _P, C.POINTER(Sizes))
_declare("plan_prepare", _S, _P, _P, _E)
_declare("plan_explain", _S, _P, C.POINTER(_P), _E)
_declare("plan_destroy", None, _P)
_declare("forward", _S, _P, C.c_void_p, _E)
_declare("backward", _S, _P, C.c_void_p, _E)
_declare("backward_workspace", _S, _P, C.c_void_p, C.POINTER(C.c_size_t), _E)
_declare("plan_tangent_workspace", C.c_size_t, _P, C.POINTER(Sizes))
_declare("tangent", _S, _P, C.POINTER(TangentArgs), _E)
_declare("append", _S, _P, C.POINTER(AppendArgs), _E)
_declare("append_prepare", _S, C.c_int32, _E)
_declare("quantize", _S, _P, C.POINTER(QuantizeArgs), _E)
_declare("merge", _S, _P, C.POINTER(MergeArgs), _E)
_declare("plan_row_tile", C.c_int64, _P, C.POINTER(Sizes))
_declare("shard_plan_create", _S, C.POINTER(ShardOptions), C.POINTER(_P), _E)
_declare("shard_plan_destroy", None, _P)
_declare("shard_get_stats", _S, _P, C.c_int32, C.POINTER(ShardStats), _E)
_declare("shard_rows", C.c_int32, _P, C.c_int32, C.POINTER(C.POINTER(Range)))
_declare("shard_keys", C.c_int32, _P, C.c_int32, C.POINTER(C.POINTER(Range)))
_declare(
    "shard_needs", C.c_int32, _P, C.c_int32, C.c_int32, C.c_int32, C.POINTER(C.POINTER(Range))
)
_declare(
    "dist_create",
    _S,
    _P,
    C.POINTER(Problem),
    _P,
    C.c_int32,
    C.POINTER(Transport),
    C.POINTER(_P),
    _E,
)
_declare(
    "dist_create_staged",
    _S,
    _P,
    C.POINTER(Problem),
    _P,
    C.c_int32,
    C.c_int64,
    C.POINTER(Transport),
    C.POINTER(_P),
    _E,
)
_declare("dist_destroy", None, _P)
_declare("dist_workspace", C.c_size_t, _P, C.c_int64)
_declare("dist_prepare", _S, _P, _P, _E)
_I32S = C.POINTER(C.c_int32)
_declare("kv_create", _S, C.POINTER(KvOptions), C.POINTER(_P), _E)
_declare("kv_destroy", None, _P)
_declare("kv_add", _S, _P, _I32S, _E)
_declare("kv_fork", _S, _P, C.c_int32, _I32S, _E)
_declare("kv_free", _S, _P, C.c_int32, _E)
_declare("kv_truncate", _S, _P, C.c_int32, C.c_int64, _E)
_declare("kv_drop", _S, _P, C.c_int32, C.c_int64, _E)
_declare("kv_grow", _S, _P, _I32S, _I32S, C.c_int32, _E)
_declare("kv_slots", C.c_int64, _P, C.POINTER(C.c_int64), C.c_int64)
_declare("kv_copies", C.c_int64, _P, _I32S, C.c_int64)
_declare("kv_table", _S, _P, _I32S, C.c_int32, _I32S, C.c_int64, _I32S, _E)
_declare("kv_length", C.c_int64, _P, C.c_int32)
_declare("kv_free_pages", C.c_int64, _P)
_declare("dist_forward", _S, _P, C.POINTER(ForwardArgs), _E)
_declare("dist_backward", _S, _P, C.POINTER(BackwardArgs), _E)
_declare("dist_received", C.c_size_t, _P, C.c_int64)
_declare("dist_keep", _S, _P, C.c_int64, C.c_int32, _P, _E)
_declare("nccl_make_id", _S, C.c_char_p, _E)
_declare("nccl_create", _S, C.c_char_p, *[C.c_int32] * 3, C.POINTER(Transport), _E)
_declare("nccl_destroy", None, C.POINTER(Transport))
_declare("dist_forward_local", _S, _P, C.POINTER(ForwardArgs), _E)
_declare("dist_backward_local", _S, _P, C.POINTER(BackwardArgs), _E)
_declare("dist_local_workspace", C.c_size_t, _P, C.c_int64, C.c_int)
_declare("dist_backward_workspace", _S, _P, C.POINTER(BackwardArgs), C.POINTER(C.c_size_t), _E)
_declare("layout", C.POINTER(LayoutEntry), C.c_int32)


def check_mirrors() -> None:
    """Every mirror has the members of the library's struct, where the library has them. Structs
    that may grow can have more at their end, which the library then takes for absent."""
    there: dict[str, list] = {name: [] for name in MIRRORS}
    i = 0
    while entry := lib.saccade_layout(i):
        name, member, place = entry[0].record.decode(), entry[0].member, entry[0].offset
        i += 1
        if name in there:
            there[name].append((member and member.decode(), place, entry[0].bytes))
    for name, mirror in MIRRORS.items():
        here: list[tuple] = [(None, 0, C.sizeof(mirror))]
        for member, *_ in mirror._fields_:
            field = getattr(mirror, member)
            here.append((member, field.offset, field.size))
        found = there[name]
        if issubclass(mirror, Record):
            here, found = here[1:], found[1 : len(here)]
        if here != found:
            wrong = sorted(set(here) ^ set(found), key=str)[0]
            raise ImportError(
                f"saccade: {name}: {wrong} (member, offset, bytes) is not the same in the "
                f"library ({lib._name}) and in the Python package: they are of two versions"
            )


check_mirrors()


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
