"""One backward call of the C library: which gradients, of what layout, and its arguments."""

from __future__ import annotations

import threading

import torch

from ..c import backward, objects
from .calls import current_stream, prepared, workspace
from .mods import view

_POINTER = objects.POINTER.pack
_lock = threading.Lock()


class _Layout:
    """Everything of the C arguments but addresses, for inputs of one layout and one choice of
    gradients. needs: of q, k and v, then of each capture of the score."""

    def __init__(self, call, needs, inputs, captures):
        runner, (q, k, v, out, lse, d_out, d_lse) = call.runner, inputs
        with torch.cuda.device_of(q), _lock:
            self.plan = runner.plan_for(needs)
        B, H, Q, D = q.shape
        self.room = self.plan.backward_workspace(B, H, k.shape[1], Q, k.shape[2], D, v.shape[3])
        self.makers = [_maker(t) if w else None for t, w in zip((q, k, v), needs)]
        made = [f(t) if f else None for f, t in zip(self.makers, (q, k, v))]
        shown = *inputs, *made
        self.given = sum(1 << i for i, t in enumerate(shown) if t is not None)
        self.tensors = [_after_address(t) for t in shown]
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        self.dtype, self.device = dtype, q.device
        bindings = backward.split_bindings(runner.bindings, runner.n_bindings)
        names = [name for name, _ in bindings]
        self.captures = [(n, _after_address(t)) for n, t in zip(names, captures)]
        self.of_mask = [x for pair in bindings[len(captures) :] for x in pair]
        self.wanted = [
            (n, t.shape, _after_address(self.empty(t.shape)))
            for n, t, w in zip(names, captures, needs[3:])
            if w
        ]

    def empty(self, shape):
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def _after_address(t) -> bytes:
    return objects.NO_TENSOR[8:] if t is None else objects.pack(view(t))[8:]


def _maker(t):
    """What makes a gradient of t: with its order of strides, and rows without holes."""
    is_dense = 0 not in t.stride() and torch.empty_like(t).stride(3) == 1
    return torch.empty_like if is_dense else _empty_dense


def _empty_dense(t):
    return t.new_empty(t.shape)


def gradient_like(t, batch):
    """An empty tensor of the shape and the strides that the gradient of t has."""
    is_copied = t.shape[0] != batch or (t.stride(3) != 1 and t.shape[3] != 1)
    return (_empty_dense if is_copied else _maker(t))(t)


def gradients(call, needs, q, k, v, out, lse, d_out, d_lse, captures):
    """Gradients of q, k and v, None where needs says so, then those of the captures that it
    names. captures: what the score's captures are now, by its names, ready for the kernel."""
    given = q, k, v
    if call.copies:
        q, k, v = prepared(q, k, v)
    if d_out is None:
        d_out = torch.zeros_like(out)
    elif d_out.stride(3) != 1:
        d_out = d_out.contiguous()
    inputs = q, k, v, out, lse, d_out, d_lse
    key = (
        needs,
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        lse.stride(),
        d_out.stride(),
        d_lse is not None and d_lse.stride(),
        [t.stride() for t in captures],
    )
    known = call.layout
    if known is None or known[0] != key:
        known = call.layout = key, _Layout(call, needs, inputs, captures)
    made = _run(call, known[1], inputs, captures)
    if call.copies:
        made[:3] = [_summed(d, t) for d, t in zip(made, given)]
    return made


def _summed(gradient, t):
    """Over the batch where forward spread t over it."""
    if gradient is None or gradient.shape == t.shape:
        return gradient
    return gradient.sum(0, keepdim=True)


def _run(call, layout, inputs, captures):
    made = [f(t) if f else None for f, t in zip(layout.makers, inputs)]
    parts = []
    for t, rest in zip((*inputs, *made), layout.tensors):
        parts += _POINTER(0 if t is None else t.data_ptr()), rest
    for name, shape, rest in layout.wanted:
        t = layout.empty(shape)
        made.append(t)
        parts += name, _POINTER(t.data_ptr()), rest
    for t, (name, rest) in zip(captures, layout.captures):
        parts += name, _POINTER(t.data_ptr()), rest
    parts += layout.of_mask
    room_at = stream = 0
    if layout.room:
        room = workspace(layout.room, inputs[0], call.cuda >= 0)
        room_at = (room.data_ptr() + 63) & ~63
    if call.cuda >= 0:
        stream = current_stream(call.cuda)
    backward.run(
        layout.plan.handle,
        layout.given,
        parts,
        len(layout.wanted),
        call.runner.n_bindings,
        call.runner.handle,
        room_at,
        layout.room,
        stream,
    )
    return made
