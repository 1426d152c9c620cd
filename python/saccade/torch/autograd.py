"""flex_attention as a node of autograd's graph."""

from __future__ import annotations

import ctypes as C
import functools

import torch
from torch.autograd import forward_ad

from ..c import objects
from .batched import NO_SECOND_BATCHED, gradients_of_each, is_batched, is_many, of_each
from .calls import FakeCall, rounded
from .checks import NO_SECOND, NO_SECOND_OF, NO_THIRD, SELECT_CHANGES
from .gradients import gradients, second
from .memory import NO_VMAP
from .mods import place, view
from .once import last
from .warm import extension

_unpack = torch._VF._unpack_dual


class Attention(torch.autograd.Function):
    """Inputs are query, key, value and the tensors that the score captures. They are saved with
    out, as the call made it, lse and what the mask captures, so that a change of any in place
    is an error."""

    @staticmethod
    def forward(ctx, entry, query, key, value, *captured):
        call = entry.call
        out, lse, row_max = call(query, key, value, entry.tail)
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        ctx.save_for_backward(query, key, value, out, lse, *captured, *call.of_mask)
        if row_max is not None:
            ctx.mark_non_differentiable(row_max)
        return rounded(out, call.narrow), lse if entry.shows_lse else None, row_max

    @staticmethod
    def backward(ctx, d_out, d_lse, _):
        if d_out is None and d_lse is None:
            return None, *[None] * (len(ctx.needs_input_grad) - 1)
        return _backward(ctx, d_out, d_lse)


class Out(torch.autograd.Function):
    """The same where out is all that is asked for."""

    @staticmethod
    def forward(ctx, entry, query, key, value, *captured):
        call = entry.call
        out, lse, _ = call(query, key, value, entry.tail)
        ctx.entry = entry
        ctx.save_for_backward(query, key, value, out, lse, *captured, *call.of_mask)
        return rounded(out, call.narrow)

    @staticmethod
    def backward(ctx, d_out):
        entry, d_out = ctx.entry, d_out.resolve_neg()
        needs, run, _ = entry.call.warm_backward
        if needs == ctx.needs_input_grad and not _is_watched():
            made = run(None, entry.call.dropout, *_saved(ctx), d_out)
            if made is not None:
                return made
        return _backward(ctx, d_out, None)


class WithSinks(torch.autograd.Function):
    """Attention with sinks, an input of the node too."""

    @staticmethod
    def forward(ctx, entry, query, key, value, sinks, *captured):
        call = entry.call
        out, lse, row_max = call(query, key, value, entry.tail)
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        ctx.save_for_backward(query, key, value, out, lse, *captured, *call.of_mask, sinks)
        if row_max is not None:
            ctx.mark_non_differentiable(row_max)
        return rounded(out, call.narrow), lse, row_max

    @staticmethod
    def backward(ctx, d_out, d_lse, _):
        check_rates(d_out, d_lse)
        saved, (_, *needs) = _saved(ctx), ctx.needs_input_grad
        if d_out is None and d_lse is None:
            return None, *[None] * len(needs)
        one = functools.partial(_with_sinks, ctx.entry, needs)
        if is_batched(d_out, d_lse):
            return None, *gradients_of_each(one, needs, d_out, d_lse, saved)
        return None, *one(d_out, d_lse, saved)


def _with_sinks(entry, needs, d_out, d_lse, saved):
    """For each of needs: the gradients of query, key, value, sinks and the captured tensors."""
    *others, sinks = saved
    d_sinks = torch.empty_like(sinks) if needs[3] else None
    held = [objects.c_tensor(view(t)) for t in (sinks, d_sinks) if t is not None]
    at = C.addressof(held[0]), C.addressof(held[1]) if needs[3] else 0
    with torch.no_grad():
        made = _gradients(entry, (*needs[:3], *needs[4:]), d_out, d_lse, others, at)
    made = (*made[:3], d_sinks, *made[3:])
    return last(NO_SECOND_OF.format("flex_attention with sinks"), made, (d_out, d_lse, *saved))


def _is_watched():
    """Whether a backward pass may be differentiated."""
    return forward_ad._current_level >= 0 or torch.is_grad_enabled()


def check_rates(*gradients):
    """Raises where what comes in changes, as forward mode has it: what goes out would not."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and _unpack(t, level=0)[1] is not None for t in gradients):
        raise NotImplementedError(
            "saccade: got a gradient with a tangent for a call made before forward mode was "
            "on, expected the call inside of dual_level too"
        )


def _saved(ctx):
    try:
        return ctx.saved_tensors
    except RuntimeError as reason:
        if getattr(ctx.entry.call, "times", None) is None or "inplace" not in str(reason):
            raise
        raise RuntimeError(f"{SELECT_CHANGES} ({str(reason).splitlines()[0]})") from None


def _backward(ctx, d_out, d_lse):
    check_rates(d_out, d_lse)
    saved, needs, entry = _saved(ctx), ctx.needs_input_grad[1:], ctx.entry
    if is_batched(d_out, d_lse):
        one = functools.partial(_gradients, entry, needs)
        if torch.is_grad_enabled() and is_many(d_out, d_lse):
            one = lambda d_out, d_lse, saved: Gradient.apply(  # noqa: E731
                entry, needs, d_out, d_lse, *saved
            )
        return None, *gradients_of_each(one, needs, d_out, d_lse, saved)
    if torch.is_grad_enabled():
        return None, *Gradient.apply(entry, needs, d_out, d_lse, *saved)
    return None, *_gradients(entry, needs, d_out, d_lse, saved)


class Gradient(torch.autograd.Function):
    """Backward where a second derivative might follow, which the reference has in float64."""

    @staticmethod
    def forward(ctx, entry, needs, d_out, d_lse, *saved):
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.needs = entry, needs
        ctx.save_for_backward(d_out, d_lse, *saved)
        return _gradients(entry, needs, d_out, d_lse, saved)

    @staticmethod
    def backward(ctx, *rates):
        check_rates(*rates)
        kept = ctx.saved_tensors
        if is_many(*rates):
            return of_each(lambda *one: Gradient._second(ctx, kept, one), *rates)
        return Gradient._second(ctx, kept, rates)

    @staticmethod
    def _second(ctx, kept, rates):
        with torch.no_grad():
            made = Gradient._made(ctx, kept, rates)
        return last(NO_THIRD, made, (*rates, *kept))

    @staticmethod
    def _made(ctx, kept, rates):
        (d_out, d_lse, *saved), needs, slots = kept, ctx.needs, ctx.entry.slots
        if saved[0].dtype is not torch.float64 or saved[0].is_cuda:
            raise NotImplementedError(NO_SECOND)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(NO_SECOND_BATCHED)
        given = saved[5 : 2 + len(needs)]
        captures = slots.placed(given, "cpu") if slots else ()
        rates = [*rates[:3], *[r for r, w in zip(rates[3:], needs[3:]) if w]]
        wanted = needs if slots is None else slots.by_name(needs)
        made = second(ctx.entry.call, wanted, *saved[:3], d_out, d_lse, captures, rates)
        more = Slots.as_captured(given, needs[3:], iter(made[5:]))
        lse = made[1] if d_lse is not None else None
        rest = len(saved) - 2 - len(needs)
        out = made[0] if d_out is not None else None
        return None, None, out, lse, *made[2:5], None, None, *more, *[None] * rest


def _gradients(entry, needs, d_out, d_lse, saved, sinks=(0, 0)):
    """For each of needs: those of query, key, value and the captured tensors."""
    slots = entry.slots
    if isinstance(entry.call, FakeCall):
        return tuple(torch.empty_like(t) if w else None for t, w in zip(saved, needs))
    saved = (*map(_in_rows, saved[:4]), *saved[4:])
    given = saved[5 : 2 + len(needs)]
    captures = slots.placed(given, saved[0].device.type) if slots else ()
    wanted = needs if slots is None else slots.by_name(needs)
    made, layout = gradients(entry.call, wanted, *saved[:5], d_out, d_lse, captures, sinks)
    if not sinks[0]:
        _keep_warm(entry, layout, needs, saved, d_out, captures)
    if len(needs) == 3:
        return tuple(made)
    return *made[:3], *slots.as_captured(given, needs[3:], iter(made[3:]))


def _in_rows(t):
    """Hooks of saved tensors may give them back in another layout."""
    return t if t.stride(3) == 1 else t.contiguous()


def _keep_warm(entry, layout, needs, saved, d_out, captures):
    """The next backward call of the same layout goes by the extension, if it can."""
    call = getattr(entry.call, "call", entry.call)  # of what drops weights: what it is for all
    if not layout.is_new or call.copies or d_out is None or d_out.stride(3) != 1:
        return
    layout.is_new, run = False, None
    if entry.slots is None or None not in entry.slots.places:
        run = layout.warm(needs, saved, d_out, captures)
    if run is not None:
        call.warm_backward = (False, *needs), run, layout


class Slots:
    """Which of a score's captures are which of the tensors that autograd knows; the others are
    numbers, `fixed`."""

    __slots__ = ("places", "fixed", "is_flat")

    def __init__(self, values, fixed, is_flat):
        tensors = iter(range(len(values)))
        self.places = [next(tensors) if isinstance(x, torch.Tensor) else None for x in values]
        # what an entry holds is not to keep alive whose end is to end it
        self.fixed = [t if i is None else None for i, t in zip(self.places, fixed)]
        self.is_flat = is_flat

    def placed(self, captured, device):
        """The captures in the order of the score's names, where the kernel reads them."""
        found = []
        for i, t in zip(self.places, self.fixed):
            if i is not None:
                t = captured[i]
                if t.is_cuda or t.device.type != device or t.is_neg():
                    t = place(t, device, self.is_flat)
            found.append(t)
        return found

    def by_name(self, needs):
        if len(needs) == 3 + len(self.places):  # no numbers: the tensors are all there is
            return needs
        return (*needs[:3], *[i is not None and needs[3 + i] for i in self.places])

    @staticmethod
    def as_captured(captured, needs, made):
        """Gradients in the shapes, dtypes and places of the captured tensors."""
        return [_like(next(made), t) if w else None for t, w in zip(captured, needs)]


def _like(gradient, t):
    if gradient.dtype is not t.dtype or gradient.device != t.device:
        gradient = gradient.to(t.device, t.dtype)
    return gradient if gradient.shape == t.shape else gradient.view(t.shape)


class Warm(Out):
    """The same by the extension, for calls whose layout was seen before."""

    if extension is not None:
        forward = staticmethod(extension.forward)


# Function.apply without what it does for function transforms and dead wrappers of theirs
_all_of = super(torch.autograd.Function, Attention).apply
out_of = super(torch.autograd.Function, Out).apply
if extension is not None:
    extension.nodes(Warm._backward_cls, Out.forward, Out.backward, _is_watched)
    out_of = super(torch.autograd.Function, Warm).apply


def node(entry, query, key, value, captured):
    """A call that is a node of the graph: out, lse, row maxima."""
    if entry.shows_lse or entry.call.row_max:
        return _all_of(entry, query, key, value, *captured)
    return out_of(entry, query, key, value, *captured), None, None


def apply(entry, query, key, value, captured, sinks=None):
    """The same for tensors that may be anything."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(NO_VMAP)
    if sinks is not None:
        out, lse, row_max = WithSinks.apply(entry, query, key, value, sinks, *captured)
        return out, lse if entry.shows_lse else None, row_max
    if entry.shows_lse or entry.call.row_max:
        return Attention.apply(entry, query, key, value, *captured)
    return Out.apply(entry, query, key, value, *captured), None, None
