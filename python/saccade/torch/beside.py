"""What a call is given beside its tensors: random numbers that drop weights, and sinks. An
entry with them stands for one call alone.

Random numbers come from PyTorch's generator of the query's device, so that manual_seed repeats
them, and checkpointing, which restores the generator, makes the same weights again."""

from __future__ import annotations

import ctypes as C

import torch

from ..c import objects
from .calls import FakeCall
from .mods import view


def drawn_state(q):
    """Seed and offset of one call."""
    return torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)


def with_sinks(out, lse, sinks):
    """out [B, H, Q, Ev] and lse [B, H, Q] of rows without sinks, with them: a row's out times
    sigmoid(lse - sink). sinks: [H], or [B, H, Q] with 1 for B or Q, in the dtype of lse."""
    sink = sinks.view(1, -1, 1) if sinks.dim() == 1 else sinks
    sink = sink.masked_fill(sink == torch.inf, torch.nan)  # as the library counts it
    is_dead = lse == -torch.inf
    alive = lse.masked_fill(is_dead, 0.0)
    more = alive - sink
    least = torch.sigmoid(torch.where(more < 0, more, -more))  # of the two shares
    kept = torch.where(more < 0, least, 1 - least)  # both to the last digit
    kept = kept.masked_fill(is_dead, 0.0).unsqueeze(-1)
    out = (out * kept).to(out.dtype)
    return out, torch.where(is_dead, sink, torch.logaddexp(alive, sink))


class CallBeside:
    """A call with its random numbers (state) and sinks, or None; all else is the call's."""

    def __init__(self, call, state, sinks=None):
        self.call, self.state, tensors = call, state, (state, sinks)
        made = [None if t is None else objects.c_tensor(view(t)) for t in tensors]
        self.keep = made, tensors
        self.dropout, self.sinks = (0 if t is None else C.addressof(t) for t in made)

    def __call__(self, q, k, v, tail):
        return self.call(q, k, v, tail, self.dropout, self.sinks)

    def __getattr__(self, name):
        return getattr(self.call, name)

    @property
    def layout(self):
        return self.call.layout

    @layout.setter
    def layout(self, value):
        self.call.layout = value


class Beside:
    """An entry for one call."""

    def __init__(self, entry, q, drops, sinks):
        self.entry, self.call = entry, entry.call
        if not isinstance(self.call, FakeCall):
            state = drawn_state(q) if drops else None
            self.call = CallBeside(self.call, state, None if sinks is None else sinks.detach())

    def __getattr__(self, name):
        return getattr(self.entry, name)
