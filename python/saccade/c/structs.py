"""The structs and numbers of the public headers, as ctypes has them.

Members, their order and sizes are include/saccade*.h's; `loading.check_mirrors` holds them
against the library's own table when the package is imported.
"""

from __future__ import annotations

import ctypes as C
import struct

MASK, SCORE, WEIGHT = 1, 2, 3
EVALUATE_NONE = -1  # a budget
TEXT, SVG, PNG = 1, 2, 3  # pictures
GRADIENT_Q, GRADIENT_K, GRADIENT_V, GRADIENT_CAPTURES, GRADIENT_SINKS = 1, 2, 4, 8, 16
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
        ("d_out_dtype", C.c_int32),
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
