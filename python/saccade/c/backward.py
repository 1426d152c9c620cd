"""saccade_backward on packed bytes, as objects.run does it for saccade_forward."""

from __future__ import annotations

import ctypes as C
import threading
from typing import Sequence

from . import abi, objects

_ARGS = abi.packer(abi.BackwardArgs)
_ARGS_BYTES = C.sizeof(abi.BackwardArgs)
_TENSOR_BYTES = abi.PACK_TENSOR.size
_BINDING_BYTES = C.sizeof(abi.Binding)
_MOST_BINDINGS = 128  # a mask's and a score's captures
_TENSORS = 10  # q k v out lse d_out d_lse d_q d_k d_v
_ROOM, _STREAM, _DROPOUT, _SINKS, _D_SINKS = (
    getattr(abi.BackwardArgs, n).offset // 8
    for n in ("workspace", "stream", "dropout", "sinks", "d_sinks")
)
_D_CAPTURES, _BINDINGS = (
    getattr(abi.BackwardArgs, n).offset // 8 for n in ("d_captures", "bindings")
)
PLACES = 0, _ROOM, _STREAM, _DROPOUT  # of nothing, the workspace and these, in words
_backward = abi.lib.saccade_backward
_local = threading.local()
assert _BINDING_BYTES == 8 + _TENSOR_BYTES and abi.Tensor.data.offset == 0


class Arguments:
    """All of saccade_backward_args but the addresses of tensors, workspace and stream."""

    def __init__(
        self,
        plan: int,
        tensors: Sequence[bytes | None],
        gradients: Sequence[tuple[bytes, bytes]],
        captures: Sequence[tuple[bytes, bytes]],
        of_mask: Sequence[tuple[bytes, bytes]],
        block_mask: int,
        room: int,
    ):
        """tensors: the ten, packed. The others are bindings, as split_bindings has them: of
        the captures' gradients, of the score's captures, and of the mask's."""
        self.plan, self.block_mask, self.room = plan, block_mask, room
        self.given = [t is not None for t in tensors]
        self.n_gradients, self.n_bindings = len(gradients), len(captures) + len(of_mask)
        bindings = [x for pair in (*gradients, *captures, *of_mask) for x in pair]
        self.bytes = b"".join([t or bytes(_TENSOR_BYTES) for t in tensors] + bindings)
        starts = [_ARGS_BYTES + i * _TENSOR_BYTES for i, t in enumerate(tensors) if t]
        after = _ARGS_BYTES + _TENSORS * _TENSOR_BYTES + 8
        n = len(gradients) + len(captures)
        starts += [after + i * _BINDING_BYTES for i in range(n)]
        self.places = [i // 8 for i in starts]  # where the addresses go, in words

    def image(self, base: int) -> bytes:
        """As the call reads it where it lies at this address."""
        places = [base + _ARGS_BYTES + i * _TENSOR_BYTES for i in range(_TENSORS + 1)]
        gradients = places.pop()
        head = _ARGS.pack(
            _ARGS_BYTES,
            *[p if given else 0 for p, given in zip(places, self.given)],
            gradients if self.n_gradients else 0,
            self.n_gradients,
            0,
            0,
            self.block_mask,
            gradients + self.n_gradients * _BINDING_BYTES if self.n_bindings else 0,
            self.n_bindings,
            0,
            self.room,
            0,
            *[0] * 5,  # sinks and what else these runs leave out
        )
        return head + self.bytes

    def links(self) -> list[int]:
        """Which words of an image are addresses inside of it."""
        there = [1 + i for i, given in enumerate(self.given) if given]
        there += [_D_CAPTURES] if self.n_gradients else []
        return there + ([_BINDINGS] if self.n_bindings else [])


class _Frame:
    """A thread's saccade_backward_args, the tensors and bindings behind them, and an error."""

    def __init__(self):
        room = _ARGS_BYTES + _TENSORS * _TENSOR_BYTES + 2 * _MOST_BINDINGS * _BINDING_BYTES
        self.memory = C.create_string_buffer(room)
        self.bytes = memoryview(self.memory).cast("B")
        self.words = self.bytes.cast("Q")
        self.address = C.addressof(self.memory)
        self.loaded = None
        self.error = abi.Error()
        self.error_place = C.byref(self.error)

    def load(self, a: Arguments) -> None:
        text = a.image(self.address)
        self.bytes[: len(text)] = text
        self.loaded = a


def workspace(a: Arguments, dropout: int = 0, sinks: tuple[int, int] = (0, 0)) -> int:
    """Bytes for a run of these arguments, which hold the addresses of their tensors."""
    frame, n = _Frame(), C.c_size_t()
    frame.load(a)
    words = frame.words
    words[_DROPOUT], words[_SINKS], words[_D_SINKS] = dropout, *sinks
    _call = abi.lib.saccade_backward_workspace
    abi.check(_call(a.plan, frame.address, C.byref(n), frame.error_place), frame.error)
    return n.value


def run(
    a: Arguments,
    addresses: Sequence[int],
    room: int,
    stream: int,
    dropout: int = 0,
    sinks: tuple[int, int] = (0, 0),
) -> None:
    """addresses: of those of the ten tensors that are there, of captures' gradients, and of
    the score's captures; dropout: as objects.run has it; sinks: where the saccade_tensors of
    sinks and of their gradient lie."""
    try:
        frame = _local.frame
    except AttributeError:
        frame = _local.frame = _Frame()
    if frame.loaded is not a:
        frame.load(a)
    words = frame.words
    for place, address in zip(a.places, addresses):
        words[place] = address
    words[_ROOM], words[_STREAM], words[_DROPOUT] = room, stream, dropout
    words[_SINKS], words[_D_SINKS] = sinks
    status = _backward(a.plan, frame.address, frame.error_place)
    if status:
        abi.check(status, frame.error)


def split_bindings(array, n: int) -> list[tuple[bytes, bytes]]:
    """(name, tensor) of each binding, packed; the names live as long as the array."""
    memory = bytes(array)
    starts = range(0, n * _BINDING_BYTES, _BINDING_BYTES)
    return [(memory[i : i + 8], memory[i + 8 : i + _BINDING_BYTES]) for i in starts]


def tangent(
    plan: objects.Plan,
    block_mask: int,
    tensors: dict,
    bindings: dict,
    room: int = 0,
    n_bytes: int = 0,
) -> None:
    """saccade_tangent: views by member, and (name, view) pairs by member for the others."""
    a = abi.TangentArgs(block_mask=block_mask or None)
    a.workspace, a.workspace_bytes = room or None, n_bytes
    keep = []
    for member, v in tensors.items():
        keep.append(objects.c_tensor(v))
        setattr(a, member, C.pointer(keep[-1]))
    for member, pairs in bindings.items():
        keep.append(objects.bindings([n for n, _ in pairs], [v for _, v in pairs]))
        setattr(a, member, keep[-1])
        setattr(a, "n_" + member, len(pairs))
    abi.call("tangent", plan.handle, C.byref(a))
