"""Mods, plans and runs on top of the C calls, for any framework.

A framework gives views: (address, dtype name, device kind, device index, shape, stride).
Objects own their C handles; plans and bound mods are cached by what they are made from, so
that a warm call only fills in addresses.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import functools
import math
import re
import struct
import threading
from typing import Any, NamedTuple, Sequence

from . import abi
from .abi import DTYPES, lib
from .interrupts import watching_signals


class View(NamedTuple):
    """A strided array somewhere: element counts, not bytes."""

    address: int
    dtype: str
    device: int  # abi.CPU or abi.CUDA
    device_index: int
    shape: tuple
    stride: tuple


_ZEROS = (0,) * abi.MAX_RANK
NO_TENSOR = bytes(abi.PACK_TENSOR.size)


def pack(v: View) -> bytes:
    """The bytes of a saccade_tensor."""
    rank = len(v.shape)
    pad = _ZEROS[rank:]
    return abi.PACK_TENSOR.pack(
        v.address,
        DTYPES[v.dtype],
        v.device,
        v.device_index,
        rank,
        *v.shape,
        *pad,
        *v.stride,
        *pad,
    )


def c_tensor(v: View) -> abi.Tensor:
    return abi.Tensor.from_buffer_copy(pack(v))


class Mod:
    """A bound mask or score: the C object, its kind and the names it captures."""

    def __init__(self, kind: int, text: str, captures: Sequence[tuple[str, str, int]]):
        self.handle = None
        self.kind, self.text = kind, text
        self.names = [name for name, _, _ in captures]
        data = text.encode()
        generic = abi.create("mod_parse", kind, data, len(data))
        try:
            array = (abi.Capture * max(1, len(captures)))()
            for slot, (name, dtype, rank) in zip(array, captures):
                slot.name, slot.dtype, slot.rank = name.encode(), DTYPES[dtype], rank
            self.handle = abi.create("mod_bind", generic, array, len(captures))
        finally:
            lib.saccade_mod_destroy(generic)

    def print(self) -> str:
        """Text that parses back to this mod."""
        n = lib.saccade_mod_print(self.handle, None, 0)
        buffer = C.create_string_buffer(n + 1)
        lib.saccade_mod_print(self.handle, buffer, n + 1)
        return buffer.value.decode()

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """What it names, its calls written out: index variables, sizes, captures."""
        return frozenset(re.findall(r"[A-Za-z_]\w*", self.print()))

    @functools.lru_cache(maxsize=256)  # noqa: B019 - mods live as long as their cache
    def sums_keys(self, names: tuple[str, ...]) -> bool:
        """Whether gradients of these captures add terms of several keys of a row up."""
        array = (C.c_char_p * max(1, len(names)))(*[n.encode() for n in names])
        found = C.c_int32()
        abi.call("mod_sums_keys", self.handle, array, len(names), C.byref(found))
        return bool(found.value)

    def __del__(self):
        if getattr(self, "handle", None) and lib is not None:
            lib.saccade_mod_destroy(self.handle)


@functools.lru_cache(maxsize=1024)
def bound_mod(kind: int, text: str, captures: tuple) -> Mod:
    """captures: ((name, dtype, rank), ...)."""
    return Mod(kind, text, captures)


def free_names(kind: int, text: str) -> list[tuple[str, int]]:
    """Names and ranks that a text captures."""
    data = text.encode()
    generic = abi.create("mod_parse", kind, data, len(data))
    try:
        found = [
            lib.saccade_mod_capture(generic, i)
            for i in range(lib.saccade_mod_capture_count(generic))
        ]
        return [(c.name.decode(), c.rank) for c in found]
    finally:
        lib.saccade_mod_destroy(generic)


def bindings(names: Sequence[str], views: Sequence[View]):
    """A C array of bindings; keep it while it is used."""
    array = (abi.Binding * max(1, len(names)))()
    for slot, name, view in zip(array, names, views):
        slot.name = name.encode()
        slot.tensor = c_tensor(view)
    return array


def problem(
    sizes, dtype, kv_dtype, scale, score, mask, backend, gradients, captures, more=()
):
    """A saccade_problem, and what it points to. more: (member, number) of others."""
    p = abi.Problem()
    for member, number in more:
        setattr(p, member, number)
    p.sizes = abi.Sizes(*sizes)
    p.dtype, p.kv_dtype = DTYPES[dtype], DTYPES[kv_dtype]
    p.scale = math.nan if scale is None else scale
    p.score = score.handle if score else None
    p.mask = mask.handle if mask else None
    p.backend = backend.encode()
    p.gradients = gradients
    names = (C.c_char_p * max(1, len(captures)))(*(n.encode() for n in captures))
    if captures:
        p.gradient_captures, p.n_gradient_captures = names, len(captures)
    return p, (names, score, mask)


def check_indices(mod: Mod, views, sizes, budget: int = 0, at=None) -> None:
    """BadValue where the mod reads outside of a tensor, of host memory; at: (q, kv) of the
    first row and key."""
    array = bindings(mod.names, views)
    place = None
    if at is not None:
        boxes = [C.c_int32(x) for x in at]
        q, kv = (c_tensor(View(C.addressof(x), "i32", abi.CPU, 0, (), ())) for x in boxes)
        place = C.byref(abi.Positions(q_offset=C.pointer(q), kv_offset=C.pointer(kv)))
    n = len(mod.names)
    abi.call("mod_check", mod.handle, C.byref(abi.Sizes(*sizes)), place, array, n, budget)


class Plan:
    """A C plan and the mods it was made from. gradients: bits of abi.GRADIENT_*; captures: the
    names whose gradients saccade_backward is to make."""

    def __init__(
        self,
        context,
        sizes,
        dtype,
        kv_dtype,
        scale,
        score,
        mask,
        backend,
        gradients=0,
        captures=(),
        more=(),
    ):
        self.handle = None
        p, self.keep = problem(
            sizes, dtype, kv_dtype, scale, score, mask, backend, gradients, captures, more
        )
        self.score, self.mask = score, mask
        self.handle = abi.create("plan_create", context, C.byref(p))

    @functools.lru_cache(maxsize=64)  # noqa: B019 - plans live as long as their cache
    def workspace(self, *sizes) -> int:
        return lib.saccade_plan_workspace(self.handle, C.byref(abi.Sizes(*sizes)))

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def backward_workspace(self, *sizes) -> int:
        return lib.saccade_plan_backward_workspace(self.handle, C.byref(abi.Sizes(*sizes)))

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def tangent_workspace(self, *sizes) -> int:
        return lib.saccade_plan_tangent_workspace(self.handle, C.byref(abi.Sizes(*sizes)))

    def explain(self) -> str:
        text, e = C.c_void_p(), abi.Error()
        abi.check(lib.saccade_plan_explain(self.handle, C.byref(text), C.byref(e)), e)
        try:
            return C.string_at(text.value or 0).decode()
        finally:
            lib.saccade_free(text)

    def __del__(self):
        if getattr(self, "handle", None) and lib is not None:
            lib.saccade_plan_destroy(self.handle)


@functools.lru_cache(maxsize=512)
def plan(context, B, H, Hkv, D, Dv, *rest, KV=0) -> Plan:
    """B, KV: 0 where the back end needs no hint of them (CUDA orders the work of masks by B,
    and has kernels of their own for the gradients of few keys). rest: as Plan takes them, from
    dtype on."""
    return Plan(context, (B, H, Hkv, 0, KV, D, Dv), *rest)


POINTER = struct.Struct("=Q")
_HEAD = abi.packer(abi.ForwardArgs, "size", "positions")
_TAIL = abi.packer(abi.ForwardArgs, "block_mask", "n_bindings")
_ARGS_BYTES = C.sizeof(abi.ForwardArgs)
# the members after the stream, which these runs leave out, are zeros
_LAST = abi.packer(abi.ForwardArgs, "workspace", "stream")
_ENDING = struct.Struct(
    _LAST.format + (_ARGS_BYTES - _HEAD.size - _TAIL.size - _LAST.size) * "x"
)
ENDING = _ENDING.pack
_DROPOUT, _SINKS = (getattr(abi.ForwardArgs, n).offset // 8 for n in ("dropout", "sinks"))
assert _HEAD.size + _TAIL.size + _ENDING.size == _ARGS_BYTES
_WORKSPACE, _STREAM = (
    getattr(abi.ForwardArgs, n).offset // 8 for n in ("workspace", "stream")
)
_forward = lib.saccade_forward
_local = threading.local()


class _Frame:
    """A thread's saccade_forward_args, the tensors they point to behind them, and an error."""

    def __init__(self):
        n = abi.PACK_TENSOR.size
        self.memory = C.create_string_buffer(_ARGS_BYTES + 6 * n)
        self.bytes = memoryview(self.memory).cast("B")
        self.words = self.bytes[:_ARGS_BYTES].cast("Q")
        self.address = C.addressof(self.memory)
        places = [self.address + _ARGS_BYTES + i * n for i in range(6)]
        # by which of lse (1) and row_max (2) are wanted; others' tensors are not pointed to
        self.heads = [
            _HEAD.pack(
                _ARGS_BYTES,
                *places[:4],
                places[4] if wanted & 1 else 0,
                places[5] if wanted & 2 else 0,
                0,
            )
            for wanted in range(4)
        ]
        self.error = abi.Error()
        self.error_place = C.byref(self.error)


PLACES = _HEAD.size // 8, _WORKSPACE, _STREAM, _DROPOUT  # of the tail and these, in words


def words(wanted: int, room: int, tensors: Sequence[bytes]):
    """All that `run` hands over but addresses and the tail, with addresses that count from its
    start: (bytes, words that are such addresses, words of the addresses of the tensors)."""
    n = abi.PACK_TENSOR.size
    starts = [_ARGS_BYTES + i * n for i in range(6)]
    there = [True] * 4 + [wanted & 1 > 0, wanted & 2 > 0]
    head = _HEAD.pack(_ARGS_BYTES, *[at if x else 0 for at, x in zip(starts, there)], 0)
    text = head + bytes(_TAIL.size) + ENDING(0, room, 0) + b"".join(tensors)
    links = [1 + i for i, x in enumerate(there) if x]
    return text, links, [at // 8 for at in starts]


def tail(block_mask, binding_array, n_bindings) -> bytes:
    """What follows the addresses in a saccade_forward_args, up to the workspace."""
    return _TAIL.pack(
        block_mask or 0, C.addressof(binding_array) if n_bindings else 0, n_bindings
    )


def run(plan_handle, wanted: int, rest: bytes, dropout: int = 0, sinks: int = 0) -> None:
    """saccade_forward. wanted: 1 lse, 2 row_max; rest: the bytes of a saccade_forward_args
    after the addresses, then those of q k v out lse row_max (absent: NO_TENSOR); dropout,
    sinks: where the saccade_tensor of seed and offset, and that of sinks, lie."""
    try:
        frame = _local.frame
    except AttributeError:
        frame = _local.frame = _Frame()
    frame.bytes[:] = frame.heads[wanted] + rest
    if dropout:
        frame.words[_DROPOUT] = dropout
    if sinks:
        frame.words[_SINKS] = sinks
    status = _forward(plan_handle, frame.address, frame.error_place)
    if status:
        abi.check(status, frame.error)


def forward(
    plan_handle,
    tensors: Sequence[bytes | None],
    block_mask,
    binding_array,
    n_bindings,
    workspace,
    workspace_bytes,
    stream,
) -> None:
    """tensors: q k v out lse, packed; lse None: not wanted."""
    *given, lse = (t or NO_TENSOR for t in tensors)
    run(
        plan_handle,
        0 if lse is NO_TENSOR else 1,
        tail(block_mask, binding_array, n_bindings)
        + ENDING(workspace, workspace_bytes, stream)
        + b"".join(given)
        + lse
        + NO_TENSOR,
    )


# What a text names where it depends on a run's B, H, Hkv, D and Dv.
_NAMES = ("b", "B"), ("h", "H"), ("Hkv",), ("D",), ("Dv",)


class BlockMaskHandle:
    """A C block mask with what it borrows: bound mod, captured arrays, positions."""

    def __init__(
        self, handle, mod, tensors, keep, lead, views, made_for=(), remade=None, again=None
    ):
        """lead: batches and heads of the C mask, as block_mask_to_dense fills them. views: of
        tensors, where they lay. made_for: B, H, Hkv, D and Dv that the proof knew, remade: what
        proves it for others, again: for these with other views; none of a mask whose lists were
        given."""
        self.handle, self.mod, self.tensors, self.keep = handle, mod, tensors, keep
        self.lead, self._made_for, self._remade = lead, made_for, remade
        self.views, self._again = views, again
        self._prepared = set()

    @functools.cached_property
    def _knew(self) -> tuple[int, ...]:
        """Which of B, H, Hkv, D and Dv the proof read. Others are not compared: sizes that a
        graph leaves open stay so."""
        return tuple(i for i, n in enumerate(_NAMES) if not self.mod.reads.isdisjoint(n))

    @property
    def is_proven(self) -> bool:
        """Whether it is all that its mod says, and no list of blocks was given."""
        return self._remade is not None

    def holds_for(self, *sizes: int) -> bool:
        """Whether the proof is one for these B, H, Hkv, D and Dv: it read none that differs."""
        if self._remade is None:
            return True
        return all(self._made_for[i] == sizes[i] for i in self._knew)

    def proven_for(self, *sizes: int) -> "BlockMaskHandle":
        """The same mask for these B, H, Hkv, D and Dv."""
        return self if self.holds_for(*sizes) else self._remade(*sizes)

    def moved(self, views) -> "BlockMaskHandle | None":
        """The same mask of tensors that lie elsewhere; None where that cannot be had."""
        return None if self._again is None else self._again(views)

    def prepare(self, p: Plan, device: int = 0) -> None:
        """device: the one whose context is current, which the runs are copied to; -1: none."""
        if (p, device) not in self._prepared:
            abi.call("plan_prepare", p.handle, self.handle)
            self._prepared.add((p, device))

    def update(self) -> None:
        abi.call("block_mask_update", self.handle)
        self._prepared.clear()

    def stats(self) -> abi.BlockMaskStats:
        stats = abi.BlockMaskStats()
        abi.call("block_mask_get_stats", self.handle, C.byref(stats))
        return stats

    def window(self, q0, Q, kv0, KV) -> "BlockMaskHandle":
        h = abi.create("block_mask_window", self.handle, q0, Q, kv0, KV)
        remade = again = None
        if self._remade is not None:
            remade = functools.partial(_window_of, self._remade, (q0, Q, kv0, KV))
            again = functools.partial(_window_of, self._again, (q0, Q, kv0, KV))
        how = self._made_for, remade, again
        return BlockMaskHandle(
            h, self.mod, self.tensors, (self.keep, self), self.lead, self.views, *how
        )

    def row(self, b: int, h: int, row: int):
        """Runs of live blocks of a row of blocks: (first, count, whether they are full), as
        int32 one after the other; held by the mask."""
        runs = C.c_void_p()
        n = lib.saccade_block_mask_row(self.handle, b, h, row, 0, C.byref(runs))
        if n < 0:
            raise MemoryError("block mask: out of memory")
        return (C.c_int32 * (3 * n)).from_address(runs.value or 0)

    def render(self, b, h, format, columns) -> bytes:
        data, n, e = C.c_void_p(), C.c_size_t(), abi.Error()
        abi.check(
            lib.saccade_block_mask_render(
                self.handle, b, h, format, columns, C.byref(data), C.byref(n), C.byref(e)
            ),
            e,
        )
        try:
            return C.string_at(data.value or 0, n.value)
        finally:
            lib.saccade_free(data)

    def __del__(self):
        if getattr(self, "handle", None) and lib is not None:
            lib.saccade_block_mask_destroy(self.handle)


def _window_of(make, window, *given):
    return make(*given).window(*window)


_LONG = 1 << 20  # positions, which might take longer than a look at signals


def block_mask_create(
    mod: Mod, views, sizes, block_q, block_kv, keep, context=None, budget=0, positions=None
) -> BlockMaskHandle:
    """positions: abi.Positions, or None."""
    array = bindings(mod.names, views)
    o = abi.BlockMaskOptions(block_q=block_q, block_kv=block_kv, evaluation_budget=budget)
    B, H, Hkv, Q, KV, D, Dv = sizes
    is_long = B * H * Q * KV >= _LONG
    with watching_signals(o) if is_long else contextlib.nullcontext():
        h = abi.create(
            "block_mask_create",
            context,
            mod.handle,
            C.byref(abi.Sizes(*sizes)),
            None if positions is None else C.byref(positions),
            array,
            len(mod.names),
            C.byref(o),
        )

    def remade(B, H, Hkv, D, Dv):
        sizes = B, H, Hkv, Q, KV, D, Dv
        rest = keep, context, 0, positions
        return block_mask_create(mod, views, sizes, block_q, block_kv, *rest)

    def again(views):
        rest = keep, context, budget, positions
        return block_mask_create(mod, views, sizes, block_q, block_kv, *rest)

    made_for = B, H, Hkv, D, Dv
    return BlockMaskHandle(h, mod, keep, array, sizes[:2], views, made_for, remade, again)


def block_mask_import(
    indices: abi.BlockIndices, mod: Mod | None, views, sizes, keep, context=None
) -> BlockMaskHandle:
    names = mod.names if mod else []
    array = bindings(names, views)
    h = abi.create(
        "block_mask_import",
        context,
        C.byref(indices),
        mod.handle if mod else None,
        C.byref(abi.Sizes(*sizes)),
        None,
        array,
        len(names),
    )
    return BlockMaskHandle(h, mod, keep, array, sizes[:2], views)


class SelectedHandle(BlockMaskHandle):
    """One whose blocks are selected while a model runs. A plan's copy of its lists on a device
    is made when the mask is prepared, and then filled with what was selected last."""

    def __init__(self, handle, mod, tensors, keep, lead, views):
        super().__init__(handle, mod, tensors, keep, lead, views)
        self.again = None  # selects what was selected last once more
        self.times: Any = None  # a tensor that counts as changed in place by a selection

    def prepare(self, p: Plan, device: int = 0) -> None:
        known = len(self._prepared)
        super().prepare(p, device)
        if len(self._prepared) > known and self.again is not None:
            self.again()

    def is_prepared_on(self, device: int) -> bool:
        return any(known == device for _, known in self._prepared)

    @property
    def is_on_devices(self) -> bool:
        return any(known >= 0 for _, known in self._prepared)

    def select(self, tensor, stream, device: int) -> None:
        """device: where the tensor lies; -1, the host, whose selection drops all copies."""
        abi.call("block_mask_select", self.handle, C.byref(c_tensor(tensor)), stream)
        if device < 0:
            self._prepared.clear()


def block_mask_selected(options, mod: Mod | None, views, sizes, keep) -> SelectedHandle:
    names = mod.names if mod else []
    array = bindings(names, views)
    h = abi.create(
        "block_mask_create_selected",
        None,
        C.byref(options),
        mod.handle if mod else None,
        C.byref(abi.Sizes(*sizes)),
        None,
        array,
        len(names),
    )
    return SelectedHandle(h, mod, keep, array, sizes[:2], views)


@functools.lru_cache(maxsize=None)
def context(threads: int = 0, level: str | None = None) -> int:
    """A C context; lives as long as the process."""
    o = abi.ContextOptions(threads=threads, level=level.encode() if level else None)
    return abi.create("context_create", C.byref(o))
