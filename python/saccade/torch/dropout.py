"""A call whose weights are dropped: an entry with seed and offset drawn for this call alone.

They come from PyTorch's generator of the query's device, so that manual_seed repeats them, and
checkpointing, which restores the generator, makes the same weights again."""

from __future__ import annotations

import ctypes as C

import torch

from ..c import objects
from .calls import FakeCall
from .mods import view


def drawn_state(q):
    """Seed and offset of one call."""
    return torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)


class DrawnCall:
    """A call with its random numbers; all else is the call's."""

    def __init__(self, call, state):
        self.call, self.state = call, state
        self.tensor = objects.c_tensor(view(state))
        self.dropout = C.addressof(self.tensor)

    def __call__(self, q, k, v, tail):
        return self.call(q, k, v, tail, self.dropout)

    def __getattr__(self, name):
        return getattr(self.call, name)

    @property
    def layout(self):
        return self.call.layout

    @layout.setter
    def layout(self, value):
        self.call.layout = value


class Drawn:
    """An entry for one call."""

    def __init__(self, entry, q):
        self.entry, self.call = entry, entry.call
        if not isinstance(self.call, FakeCall):
            self.call = DrawnCall(self.call, drawn_state(q))

    def __getattr__(self, name):
        return getattr(self.entry, name)
