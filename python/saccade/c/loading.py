"""Finds the C library and declares its functions, by ctypes.

SACCADE_LIBRARY names the library; without it the package's own folder, its lib/ and the build
folder beside it are looked through, then what the system's loader finds.
"""

from __future__ import annotations

import ctypes as C
import os
from pathlib import Path

from .structs import (
    MIRRORS,
    AppendArgs,
    BackwardArgs,
    Binding,
    BlockIndices,
    BlockMaskOptions,
    BlockMaskStats,
    Capture,
    ContextOptions,
    Error,
    ForwardArgs,
    KvOptions,
    LayoutEntry,
    MergeArgs,
    Positions,
    PreludeEntry,
    Problem,
    QuantizeArgs,
    Range,
    Record,
    SelectionOptions,
    ShardOptions,
    ShardStats,
    Sizes,
    TangentArgs,
    Tensor,
    Transport,
)


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
# what mods and masks are asked about: sizes, positions, captures and how many
_WHERE = (C.POINTER(Sizes), C.POINTER(Positions), C.POINTER(Binding), C.c_int32)
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
    *_WHERE,
    C.c_int64,
    _E,
)
_declare(
    "mod_sums_keys",
    _S,
    _P,
    C.POINTER(C.c_char_p),
    C.c_int32,
    C.POINTER(C.c_int32),
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
    *_WHERE,
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
    *_WHERE,
    C.POINTER(_P),
    _E,
)
_declare(
    "block_mask_create_selected",
    _S,
    _P,
    C.POINTER(SelectionOptions),
    _P,
    *_WHERE,
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
_declare("block_mask_row", C.c_int64, _P, *3 * [C.c_int64], C.c_int, C.POINTER(_P))
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
_declare("pages_check", _S, _P, C.POINTER(ForwardArgs), _E)
_declare("dist_keep", _S, _P, C.c_int64, C.c_int32, _P, _E)
_declare("nccl_make_id", _S, C.c_char_p, _E)
_declare("nccl_create", _S, C.c_char_p, *[C.c_int32] * 3, C.POINTER(Transport), _E)
_declare("nccl_destroy", None, C.POINTER(Transport))
_declare("dist_forward_local", _S, _P, C.POINTER(ForwardArgs), _E)
_declare("dist_backward_local", _S, _P, C.POINTER(BackwardArgs), _E)
_declare("dist_local_workspace", C.c_size_t, _P, C.c_int64, C.c_int)
for _each in ("dist_backward_workspace", "dist_local_backward_workspace"):
    _declare(_each, _S, _P, C.POINTER(BackwardArgs), C.POINTER(C.c_size_t), _E)
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
