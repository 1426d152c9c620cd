"""One backward call of the C library: which gradients, of what layout, and its arguments."""

from __future__ import annotations

import threading

import torch

from ..c import backward, extension, objects
from .calls import HALVES, SMALL, current_stream, prepared, whole_rows, workspace
from .memory import check_stays
from .mods import view
from .warm import NOTHING, result, room_of, run_of

_lock = threading.Lock()


class _Layout:
    """Everything of the C arguments but addresses, for inputs of one layout and one choice of
    gradients. needs: of q, k and v, then of each capture of the score. sinks: where sinks and
    their gradient lie."""

    def __init__(self, call, needs, inputs, captures, sinks):
        runner, (q, k, v) = call.runner, inputs[:3]
        with torch.cuda.device_of(q), _lock:
            self.plan = runner.plan_for(needs, sinks[1] != 0)
        B, H, Q, D = q.shape
        self.room = self.plan.backward_workspace(B, H, k.shape[1], Q, k.shape[2], D, v.shape[3])
        self.makers = [_maker(t) if w else None for t, w in zip((q, k, v), needs)]
        sums = torch.float64 if q.dtype is torch.float64 else torch.float32
        self.device, self.bindings = q.device, runner.bindings
        known = backward.split_bindings(runner.bindings, runner.n_bindings)
        n, names = len(captures), [name for name, _ in known]
        # Sums are rounded once, to 16 bits too.
        self.dtypes = [t.dtype if t.dtype in HALVES else sums for t in captures]
        wanted = [
            (x, (t.shape, d))
            for x, t, d, w in zip(names, captures, self.dtypes, needs[3:])
            if w
        ]
        self.captured = [shape for _, shape in wanted]  # and dtype
        made = [f(t) if f else None for f, t in zip(self.makers, (q, k, v))]
        self.arguments = backward.Arguments(
            self.plan.handle,
            [None if t is None else objects.pack(view(t)) for t in (*inputs, *made)],
            [(x, objects.pack(view(self.empty(*like)))) for x, like in wanted],
            [(x, objects.pack(view(t))) for x, t in zip(names, captures)],
            known[n:],
            runner.handle,
            self.room,
        )
        self.call, self.wants_lse, self.is_new = call, inputs[6] is not None, True
        if call.cuda >= 0 or wanted:  # what results hold meanwhile, sums of captures' shapes
            self.room = self.arguments.room = backward.workspace(
                self.arguments, call.dropout, sinks
            )

    def warm(self, needs, saved, d_out, captures):
        """The same by the extension for what autograd saved, in its order: q, k, v, out, lse,
        the captured tensors, the mask's, or None. needs: of what saved begins with."""
        n, given = len(captures), saved[5 : 5 + len(captures)]
        is_plain = all(
            (t.dtype == d or not w) and t.data_ptr() == c.data_ptr() and t.shape == c.shape
            for t, c, d, w in zip(given, captures, self.dtypes, needs[3:])
        )
        if self.wants_lse or not is_plain or len(needs) != 3 + n:
            return None
        words = iter(self.arguments.places)
        at = [next(words) for _ in range(6)]  # of q k v out lse d_out
        made = [
            result(next(words), t, f(t).stride(), i) if f else NOTHING
            for i, (t, f) in enumerate(zip(saved, self.makers))
        ]
        made += [
            result(next(words), t, self.empty(t.shape, t.dtype).stride()) if w else NOTHING
            for t, w in zip(given, needs[3:])
        ]
        if None in made:
            return None
        of_mask = self.call.of_mask  # themselves, and not what hooks of saved tensors made
        places = [*at[:5], *[next(words) for _ in given], *[-1] * len(of_mask), at[5]]
        a, room = self.arguments, room_of(self.room, saved[0], SMALL)
        inputs = zip((*saved[: 5 + n], *of_mask, d_out), places)
        text = a.image(0), a.links()
        made = [NOTHING, *made]  # of the entry, which is an input of the node
        return run_of(
            extension.BACKWARD, a.plan, *text, inputs, made, room, backward.PLACES
        )

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype, device=self.device)


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


def gradients(call, needs, q, k, v, out, lse, d_out, d_lse, captures, sinks=(0, 0)):
    """Gradients of q, k and v, None where needs says so, then those of the captures that it
    names; and the layout that they were made by, which may not be call.layout any more: other
    threads run meanwhile. captures: what the score's captures are now, by its names, ready for
    the kernel. sinks: where the saccade_tensors of sinks and of their gradient lie, or 0."""
    check_stays(call.runner.mask)
    given = q, k, v
    if call.copies:
        q, k, v = prepared(q, k, v)
    if d_out is None:
        d_out = torch.zeros_like(out, dtype=q.dtype)
    else:
        d_out = whole_rows(d_out)
    d_lse = None if d_lse is None else d_lse.resolve_neg()
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
        sinks[1] != 0,
        [t.stride() for t in captures],
    )
    known = call.layout
    if known is None or known[0] != key:
        known = call.layout = key, _Layout(call, needs, inputs, captures, sinks)
    made = _run(call, known[1], inputs, captures, sinks)
    if call.copies:
        made[:3] = [_summed(d, t) for d, t in zip(made, given)]
    return made, known[1]


def _summed(gradient, t):
    """Over the batch where forward spread t over it."""
    if gradient is None or gradient.shape == t.shape:
        return gradient
    return gradient.sum(0, keepdim=True)


def _run(call, layout, inputs, captures, sinks):
    made = [f(t) if f else None for f, t in zip(layout.makers, inputs)]
    places = [t.data_ptr() for t in inputs if t is not None]
    places += [t.data_ptr() for t in made if t is not None]
    if captures:
        more = [layout.empty(*like) for like in layout.captured]
        places += [t.data_ptr() for t in more]
        places += [t.data_ptr() for t in captures]
        made += more
    room_at = stream = 0
    if layout.room:
        room = workspace(layout.room, inputs[0], call.cuda >= 0)
        room_at = (room.data_ptr() + 63) & ~63
    if call.cuda >= 0:
        stream = current_stream(call.cuda)
    backward.run(layout.arguments, places, room_at, stream, call.dropout, sinks)
    return made


def second(call, needs, q, k, v, d_out, d_lse, captures, rates):
    """The gradient of `gradients` in the direction of rates, by d_out, d_lse, q, k, v and the
    captures that needs names: forward mode of the same, whose derivative is symmetric."""
    check_stays(call.runner.mask)
    given = q, k, v
    q_dot, k_dot, v_dot = (
        torch.zeros_like(t) if r is None else r for t, r in zip(given, rates[:3])
    )
    rates = [None if r is None else r.resolve_neg() for r in rates]
    q, k, v = prepared(*given)
    dots = prepared(q_dot, k_dot, v_dot)
    rows = q.new_empty(q.shape[:3])
    d_out = q.new_zeros((*q.shape[:3], v.shape[3])) if d_out is None else d_out.contiguous()
    d_out = d_out.resolve_neg()
    made = [d_out.new_empty(d_out.shape), rows, *(_empty_dense(t) for t in (q, k, v))]
    tensors = dict(q=q, k=k, v=v, q_dot=dots[0], k_dot=dots[1], v_dot=dots[2], d_out=d_out)
    results = ("out_dot", "lse_dot", "d_q_dot", "d_k_dot", "d_v_dot")
    tensors.update(zip(results, made))
    if d_lse is not None:
        tensors["d_lse"] = d_lse.resolve_neg()
    if call.dropout:
        tensors["dropout"] = call.state
    named = [(n, t) for n, t, w in zip(call.runner.names, captures, needs[3:]) if w]
    more = [q.new_empty(t.shape) for _, t in named]
    dot = [
        q.new_zeros(t.shape) if r is None else r.to(q.dtype).reshape(t.shape).contiguous()
        for (_, t), r in zip(named, rates[3:])
    ]
    pairs = {
        "captures_dot": [(n, view(t)) for (n, _), t in zip(named, dot)],
        "d_captures_dot": [(n, view(t)) for (n, _), t in zip(named, more)],
        "bindings": [(n, view(t)) for n, t in zip(call.runner.names, captures)],
    }
    views = {n: view(t) for n, t in tensors.items()}
    backward.tangent(call.runner.plan, call.runner.handle, views, pairs)
    return [*made[:2], *(_summed(d, t) for d, t in zip(made[2:], given)), *more]
