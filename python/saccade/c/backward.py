"""saccade_backward on packed bytes, as objects.run does it for saccade_forward."""

from __future__ import annotations

import ctypes as C
import threading
from typing import Sequence

from . import abi

_ARGS = abi.packer(abi.BackwardArgs)
_ARGS_BYTES = C.sizeof(abi.BackwardArgs)
_TENSOR_BYTES = abi.PACK_TENSOR.size
_BINDING_BYTES = C.sizeof(abi.Binding)
_MOST_BINDINGS = 128  # a mask's and a score's captures
TENSORS = 10  # q k v out lse d_out d_lse d_q d_k d_v
assert _BINDING_BYTES == 8 + _TENSOR_BYTES
_backward = abi.lib.saccade_backward
_local = threading.local()


class _Frame:
    """A thread's saccade_backward_args, the tensors and bindings behind them, and an error."""

    def __init__(self):
        room = _ARGS_BYTES + TENSORS * _TENSOR_BYTES + 2 * _MOST_BINDINGS * _BINDING_BYTES
        self.memory = C.create_string_buffer(room)
        self.bytes = memoryview(self.memory).cast("B")
        self.address = C.addressof(self.memory)
        self.places = [
            self.address + _ARGS_BYTES + i * _TENSOR_BYTES for i in range(TENSORS + 1)
        ]
        self.heads: dict = {}
        self.error = abi.Error()
        self.error_place = C.byref(self.error)

    def head(self, given, n_bindings, n_gradients, block_mask, room, room_bytes, stream):
        """given: bit i is set where tensor i is there."""
        gradients = self.places[TENSORS]
        return _ARGS.pack(
            _ARGS_BYTES,
            *[p if given >> i & 1 else 0 for i, p in enumerate(self.places[:TENSORS])],
            gradients if n_gradients else 0,
            n_gradients,
            0,
            0,
            block_mask,
            gradients + n_gradients * _BINDING_BYTES if n_bindings else 0,
            n_bindings,
            room,
            room_bytes,
            stream,
        )


def run(
    plan_handle: int,
    given: int,
    parts: Sequence[bytes],
    n_gradients: int,
    n_bindings: int,
    block_mask: int,
    room: int,
    room_bytes: int,
    stream: int,
) -> None:
    """parts: the bytes of ten tensors (absent: objects.NO_TENSOR), then those of the bindings
    of captures' gradients, then those of the captures."""
    try:
        frame = _local.frame
    except AttributeError:
        frame = _local.frame = _Frame()
    head = frame.head(given, n_bindings, n_gradients, block_mask, room, room_bytes, stream)
    text = b"".join((head, *parts))
    frame.bytes[: len(text)] = text
    status = _backward(plan_handle, frame.address, frame.error_place)
    if status:
        abi.check(status, frame.error)


def split_bindings(array, n: int) -> list[tuple[bytes, bytes]]:
    """(name, tensor) of each binding, packed; the names live as long as the array."""
    memory = bytes(array)
    starts = range(0, n * _BINDING_BYTES, _BINDING_BYTES)
    return [(memory[i : i + 8], memory[i + 8 : i + _BINDING_BYTES]) for i in starts]
