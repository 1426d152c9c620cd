"""Shard plans and attention over ranks (include/saccade_dist.h), for any framework."""

from __future__ import annotations

import ctypes as C
import sys
from typing import Callable, NamedTuple, Sequence

from . import abi, objects
from .abi import lib
from .interrupts import noting_dropped

_EXCHANGE = C.CFUNCTYPE(
    C.c_int,
    C.c_void_p,
    C.POINTER(abi.Message),
    C.c_int32,
    C.POINTER(abi.Message),
    C.c_int32,
    C.c_double,
)
_ABORT = C.CFUNCTYPE(None, C.c_void_p)


class ShardStats(NamedTuple):
    """saccade_shard_stats: rows and keys held, live positions, keys that travel, peers that
    something comes from, the mean of live positions over ranks, their largest over the mean,
    and the time that the plan took."""

    rows: int
    keys: int
    area: float
    received: int
    sent: int
    peers: int
    mean_area: float
    imbalance: float
    seconds: float


class ShardPlan:
    """Which rank holds which rows; the same on every rank."""

    def __init__(self, ranks: int, tile: int, Q: int, masks: Sequence, layers: Sequence[int]):
        self.handle = None
        handles = (C.c_void_p * max(1, len(masks)))(*(m.handle for m in masks))
        counts = (C.c_int32 * max(1, len(masks)))(*layers)
        o = abi.ShardOptions(
            ranks=ranks, tile=tile, Q=Q, KV=Q, masks=handles, layers=counts, n_masks=len(masks)
        )
        self.handle = abi.create("shard_plan_create", C.byref(o))

    def rows(self, rank: int) -> list[tuple[int, int]]:
        """(first, count) of the rows that a rank holds, rising."""
        at = C.POINTER(abi.Range)()
        n = lib.saccade_shard_rows(self.handle, rank, C.byref(at))
        return [(at[i].first, at[i].count) for i in range(n)]

    def keys(self, rank: int) -> list[tuple[int, int]]:
        """Likewise of the keys."""
        at = C.POINTER(abi.Range)()
        n = lib.saccade_shard_keys(self.handle, rank, C.byref(at))
        return [(at[i].first, at[i].count) for i in range(n)]

    def stats(self, rank: int) -> ShardStats:
        """What a rank holds, computes, gets and gives, summed over masks and their layers."""
        s = abi.ShardStats()
        abi.call("shard_get_stats", self.handle, rank, C.byref(s))
        return ShardStats(*(getattr(s, name) for name in ShardStats._fields))

    def needs(self, mask: int, rank: int, peer: int) -> list[tuple[int, int]]:
        """(first, count) of the keys held by peer that the rows of rank touch, rising."""
        at = C.POINTER(abi.Range)()
        n = lib.saccade_shard_needs(self.handle, mask, rank, peer, C.byref(at))
        return [(at[i].first, at[i].count) for i in range(n)]

    def __del__(self):
        if getattr(self, "handle", None) and lib is not None:
            lib.saccade_shard_plan_destroy(self.handle)


class _State:
    """Of a transport: what failed in Python just now, and whether anything has ended it."""

    failure: BaseException | None = None
    has_failed = False

    def fail(self, reason: BaseException) -> None:
        self.failure, self.has_failed = reason, True


def _calls_of(exchange: Callable, state: _State):
    """The two functions of a transport in Python. They hold nothing of what holds them."""

    def call(_, sends, n_sends, receives, n_receives, limit):
        try:
            if state.has_failed:
                raise RuntimeError("the transport has ended")
            exchange(
                [(m.data, m.bytes, m.peer) for m in sends[:n_sends]],
                [(m.data, m.bytes, m.peer) for m in receives[:n_receives]],
                limit,
            )
        except BaseException as reason:  # goes on through C as a status
            state.fail(reason)
            return 1
        return 0

    def abort(_):
        state.has_failed = True

    return _EXCHANGE(call), _ABORT(abort)


def _told(error: abi.SaccadeError, failure: BaseException) -> abi.SaccadeError:
    """The library's error, which knows of a status alone, with the reason."""
    reason = str(failure).partition("\n")[0]
    text = f"{error}: {type(failure).__name__}: {reason}"
    return type(error)(error.status, text, error.line, error.column)


class Transport:
    """exchange(sends, receives, seconds): lists of (address, bytes, peer); raises to fail.
    After a failure there is no exchange any more."""

    def __init__(self, rank: int, ranks: int, seconds: float, exchange: Callable):
        self._state = _State()
        self._calls = _calls_of(exchange, self._state)
        at = [C.cast(call, C.c_void_p) for call in self._calls]
        self.struct = abi.Transport(
            rank=rank, ranks=ranks, exchange=at[0], abort=at[1], seconds=seconds
        )

    has_failed = property(lambda self: self._state.has_failed)

    def abort(self) -> None:
        self._state.has_failed = True

    def run(self, name: str, *arguments) -> None:
        """A call that may exchange; what failed in Python is the reason of its error, or, as
        Ctrl-C, the error itself. One that leaves the transport as it was is a refusal on all
        ranks (error.is_shared)."""
        self._state.failure = None
        error: abi.SaccadeError | None = None
        try:
            with noting_dropped(self._state.fail):
                abi.call(name, *arguments)
        except abi.SaccadeError as reason:
            error = reason
        failure, self._state.failure = self._state.failure, None
        if failure is not None and (error is None or not isinstance(failure, Exception)):
            raise failure.with_traceback(None)
        if error is None:
            return
        error.is_shared = not self.has_failed
        if failure is None:
            raise error
        raise _told(error, failure) from failure


NCCL_ID_BYTES = 128


def nccl_id() -> bytes:
    """What one rank makes and gives to the others, before all make a NcclTransport."""
    room = C.create_string_buffer(NCCL_ID_BYTES)
    abi.call("nccl_make_id", room)
    return room.raw


class NcclTransport:
    """Messages between GPUs by the library's own NCCL communicator. It is to end on all ranks
    at about the same time, or with the process."""

    def __init__(self, made: bytes, rank: int, ranks: int, device: int, seconds: float):
        self.struct = abi.Transport(rank=rank, ranks=ranks, seconds=seconds)
        self.has_failed = False
        abi.call("nccl_create", made, rank, ranks, device, C.byref(self.struct))

    def run(self, name: str, *arguments) -> None:
        try:
            abi.call(name, *arguments)
        except (abi.SaccadeError, MemoryError):
            self.has_failed = True
            raise

    def abort(self) -> None:
        """Ends the communicator, on this rank."""
        self.has_failed = True
        if self.struct.abort:
            C.cast(self.struct.abort, _ABORT)(self.struct.user)

    def __del__(self):
        if self.struct.user and lib is not None and not sys.is_finalizing():
            lib.saccade_nccl_destroy(C.byref(self.struct))


class Dist:
    """One rank's part of a plan. All ranks make it, and call it, at the same time."""

    def __init__(
        self,
        context,
        problem,
        shards: ShardPlan,
        mask: int,
        transport: Transport | NcclTransport,
        window: int | None = None,
    ):
        """window: in staged mode, keys that are taken at a time; 0: chosen."""
        self.handle = None
        self._held = shards, transport
        self.transport = transport
        p, self._named = objects.problem(*problem)
        out = C.c_void_p()
        is_staged = window is not None
        transport.run(
            "dist_create_staged" if is_staged else "dist_create",
            context,
            C.byref(p),
            shards.handle,
            mask,
            *([window] if is_staged else []),
            C.byref(transport.struct),
            C.byref(out),
        )
        self.handle = out.value
        self._prepared: set = set()

    def prepare(self, mask) -> None:
        if mask not in self._prepared:
            try:
                abi.call("dist_prepare", self.handle, mask.handle if mask is not None else None)
            except abi.BadValue as error:
                error.is_shared = True  # as saccade_dist_prepare has it
                raise
            self._prepared.add(mask)

    def workspace(self, B: int) -> int:
        return lib.saccade_dist_workspace(self.handle, B)

    def received(self, B: int) -> int:
        """Bytes of the keys that a run gets from others."""
        return lib.saccade_dist_received(self.handle, B)

    def keep(self, B: int, device: int, memory: int) -> None:
        """The next run leaves them there or, if it is a backward run, finds them there."""
        abi.call("dist_keep", self.handle, B, device, memory)

    def forward(
        self, tensors: dict, mask, names, views, room: int, room_bytes: int, stream=None
    ) -> None:
        """tensors: views by member, None: absent."""
        a = abi.ForwardArgs(workspace=room, workspace_bytes=room_bytes, stream=stream)
        keep = _fill(a, tensors, mask, names, views)
        self.transport.run("dist_forward", self.handle, C.byref(a))
        del keep

    def local_workspace(self, B: int) -> int:
        return lib.saccade_dist_local_workspace(self.handle, B, False)

    def forward_local(self, tensors, mask, names, views, room, room_bytes, stream) -> None:
        """Without an exchange: k and v are of the whole sequence."""
        a = abi.ForwardArgs(workspace=room, workspace_bytes=room_bytes, stream=stream)
        keep = _fill(a, tensors, mask, names, views)
        abi.call("dist_forward_local", self.handle, C.byref(a))
        del keep

    def backward_local(
        self, tensors, mask, names, views, gradients, memory: Callable, stream=None
    ) -> None:
        """gradients, memory: as backward's."""
        a, keep = _backward_args(tensors, mask, names, views, gradients, stream)
        self._take_room("dist_local_backward_workspace", a, memory)
        abi.call("dist_backward_local", self.handle, C.byref(a))
        del keep

    def backward(
        self, tensors, mask, names, views, gradients, memory: Callable, stream=None
    ) -> None:
        """gradients: (name, view) of captures; memory(bytes): an address."""
        a, keep = _backward_args(tensors, mask, names, views, gradients, stream)
        self._take_room("dist_backward_workspace", a, memory)
        self.transport.run("dist_backward", self.handle, C.byref(a))
        del keep

    def _take_room(self, name, a, memory):
        n = C.c_size_t()
        abi.call(name, self.handle, C.byref(a), C.byref(n))
        a.workspace, a.workspace_bytes = memory(n.value), n.value

    def __del__(self):
        if getattr(self, "handle", None) and lib is not None:
            lib.saccade_dist_destroy(self.handle)


def _backward_args(tensors, mask, names, views, gradients, stream):
    a = abi.BackwardArgs(stream=stream)
    keep = _fill(a, tensors, mask, names, views)
    a.d_captures = objects.bindings([n for n, _ in gradients], [v for _, v in gradients])
    a.n_d_captures = len(gradients)
    return a, keep


def _fill(a, tensors, mask, names, views):
    keep: list = []
    for member, v in tensors.items():
        if v is not None:
            keep.append(objects.c_tensor(v))
            setattr(a, member, C.pointer(keep[-1]))
    a.block_mask = mask.handle if mask is not None else None
    a.bindings = objects.bindings(names, views)
    a.n_bindings = len(names)
    return keep
