"""flex_attention inside of torch.func: vmap by folding into the batch, grad, and jvp on the
CPU, in float64 by the reference.

Under a transform tensors have no memory of their own. A node of autograd whose rules are told
apart (setup_context, vmap, jvp) is given what they stand for: mods are turned into text first,
so that the tensors they capture are inputs of the node too.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple, Optional

import torch

from ..c import abi, objects
from . import recorded
from .autograd import Slots, _gradients
from .batched import is_many, of_each
from .calls import autocast, keeps_f32
from .checks import NO_SECOND, check_selections
from .compiled import in_graph, unproven
from .entries import PLAIN, _find, run
from .forward_mode import check_device, tangents
from .gradients import second
from .masks import Unproven, mask_or_mod
from .mods import AnyMod, captured, text_of, type_of
from .recording import is_recorded


NO_THIRD = (
    "saccade: flex_attention has first and second derivatives, got a third, expected at most "
    "two of grad, jvp, jacfwd and jacrev around each other"
)
NO_TANGENT_OF_TANGENT = (
    "saccade: got forward mode of flex_attention inside of forward mode (jvp, jacfwd), "
    "expected grad, vjp or jacrev for one of the two, in float64 on the CPU"
)


class _Spec(NamedTuple):
    """Everything of a call but tensors: those that the score captures are named."""

    text: Optional[str]
    names: tuple
    numbers: tuple  # (name, number) of the other captures
    mask: Any
    scale: Optional[float]
    options: Any
    gqa: bool
    keeps: bool = False  # whether Forward's output is f32

    def of_call(self, tensors):
        """score, mask, scale and options."""
        return self.score(tensors), self.mask, self.scale, self.options

    def score(self, tensors):
        if self.text is None:
            return None
        of_name = dict(zip(self.names, tensors))
        return AnyMod("score", self.text, {**of_name, **dict(self.numbers)})


def _is_wrapped(t):
    return isinstance(t, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t)


def _as_text(kind, mod):
    if isinstance(mod, AnyMod):
        return mod
    if isinstance(mod, str):
        return AnyMod(kind, mod, {})
    return text_of(kind, mod, {}, for_once=not is_recorded())


def _apart(mod):
    """(text, names of tensors, numbers, tensors)."""
    if mod is None:
        return None, (), (), ()
    tensors = {n: t for n, t in mod.captures.items() if isinstance(t, torch.Tensor)}
    numbers = tuple((n, x) for n, x in mod.captures.items() if n not in tensors)
    return mod.text, tuple(tensors), numbers, tuple(tensors.values())


def _masked(score, mask):
    """The score where the mask is live, else -inf: what it captures is an input of the node,
    as what a score captures is."""
    live = captured.callable_of(mask)
    change = captured.callable_of(score) if score is not None else lambda s, *_: s

    def both(s, *at):
        return torch.where(live(*at), change(s, *at), -math.inf)

    return text_of("score", both, {}, for_once=not is_recorded())


def transformed(q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa):
    """run, where a transform of torch.func is active."""
    if want_max:
        raise NotImplementedError("max_scores: not to be had inside of torch.func's transforms")
    if q.device.type != "meta":
        q, k, v = autocast(q, k, v)  # outside of the node, which saves what it computes with
    mask = block_mask
    if isinstance(mask, Unproven) and hasattr(mask, "given"):
        mask = unproven(mask.given, q, k)
    if mask is not None and mask_or_mod(mask)[0] is None:
        mask = _as_text("mask", mask)
    score = None if score_mod is None else _as_text("score", score_mod)
    if isinstance(mask, AnyMod) and any(map(_is_wrapped, mask.captures.values())):
        score, mask = _masked(score, mask), None
    text, names, numbers, tensors = _apart(score)
    spec = _Spec(text, names, numbers, mask, scale, options, gqa, _keeps(q, score, tensors))
    out, lse = Forward.apply(spec, q, k, v, *tensors)
    return out.to(q.dtype) if spec.keeps else out, lse if want_lse else None, None


def _keeps(q, score, tensors):
    """keeps_f32 of all floats that the score captures, where gradients may be wanted. What is
    recorded says so itself."""
    if score is None or is_recorded():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    reverse = torch._C._functorch.TransformType.Grad
    floats = [t for t in tensors if t.is_floating_point()]
    if not any(t.requires_grad for t in floats) and all(x.key() != reverse for x in stack):
        return False
    names = [n for n, t in score.captures.items() if any(t is x for x in floats)]
    try:
        types = tuple([type_of(n, x) for n, x in score.captures.items()])
        return keeps_f32(q.dtype, objects.bound_mod(abi.SCORE, score.text, types), names)
    except ValueError:  # which the call says
        return False


# ---- folding ----


def _first(t, dim, n):
    """[n, ...]: t with its mapped dimension first, or spread where it has none."""
    return t.unsqueeze(0).expand(n, *t.shape) if dim is None else t.movedim(dim, 0)


def _fold(t, dim, n):
    if t is None:
        return None
    t = _first(t, dim, n)
    return t.reshape(n * t.shape[1], *t.shape[2:])


def _unfold(t, n):
    return None if t is None else t.unflatten(0, (n, -1))


def _differ(spec, dims, wants=()):
    """Whether calls can't be one of a larger batch: what the score captures, or its rate, has a
    dimension of vmap's, its gradients are wanted for each, the block mask has a batch, or a
    text reads how many there are."""
    mask = spec.mask
    texts = [spec.text or "", mask.text if isinstance(mask, AnyMod) else ""]
    has_batch = any(re.search(r"\bB\b", t) for t in texts)
    if mask is not None and not isinstance(mask, AnyMod):
        whole = mask_or_mod(mask)[0]
        has_batch = whole.dimensions()[0] != 1 or whole.lacks_sizes()
    return has_batch or True in wants or any(d is not None for d in dims)


def _each(node, n, head, tensors, dims):
    """The n calls one after the other."""
    made = []
    for i in range(n):
        one = [t if d is None else t.select(d, i) for t, d in zip(tensors, dims)]
        made.append(node.apply(*head, *one))
    return tuple(map(torch.stack, zip(*made))), (0,) * len(made[0])


def _folded(spec, n, B, tensors):
    """(spec, tensors) of a call whose batch is n times as large: mods see b as before."""
    score, mask = spec.score(tensors), spec.mask
    if score is not None:
        change = captured.callable_of(score)
        score = text_of("score", lambda s, b, h, q, kv: change(s, b % B, h, q, kv), {})
    if isinstance(mask, AnyMod):
        live = captured.callable_of(mask)
        mask = text_of("mask", lambda b, h, q, kv: live(b % B, h, q, kv), {})
    text, names, numbers, tensors = _apart(score)
    return spec._replace(text=text, names=names, numbers=numbers, mask=mask), tensors


# ---- the nodes ----


class Forward(torch.autograd.Function):
    """(out, lse) of query, key, value and what the score captures."""

    @staticmethod
    def forward(spec, q, k, v, *tensors):
        given = q, k, v, *spec.of_call(tensors), True, False, spec.gqa
        with torch.no_grad():
            made = in_graph(*given) if is_recorded() else run(*given, keeps=spec.keeps)
            return made[:2]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.spec = inputs[0]
        ctx.selections = getattr(ctx.spec.mask, "selections", 0)
        ctx.save_for_backward(*inputs[1:4], *output, *inputs[4:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx, d_out, d_lse):
        check_selections(ctx.spec.mask, ctx.selections)
        needs, saved = tuple(ctx.needs_input_grad[1:]), ctx.saved_tensors
        run = lambda *one: Backward.apply(ctx.spec, needs, *one, *saved)  # noqa: E731
        made = _one_or_many(run, d_out, d_lse)
        return None, *[t if w else None for t, w in zip(made, needs)]

    @staticmethod
    def jvp(ctx, _, *rates):
        inputs = ctx.saved_tensors
        moves = tuple(r is not None for r in rates[:3])
        rates = [torch.zeros_like(t) if r is None else r for t, r in zip(inputs, rates)]
        run = lambda *one: Tangent.apply(ctx.spec, moves, *inputs, *one)  # noqa: E731
        out_dot, lse_dot = _one_or_many(run, *rates)
        return out_dot.float() if ctx.spec.keeps else out_dot, lse_dot

    @staticmethod
    def vmap(info, dims, spec, q, k, v, *tensors):
        n = info.batch_size
        if _differ(spec, dims[4:]):
            return _each(Forward, n, (spec,), (q, k, v, *tensors), dims[1:])
        B = q.shape[0 if dims[1] is None or dims[1] > 0 else 1]
        spec, tensors = _folded(spec, n, B, tensors)
        q, k, v = (_fold(t, d, n) for t, d in zip((q, k, v), dims[1:4]))
        made = Forward.apply(spec, q, k, v, *tensors)
        return tuple(_unfold(t, n) for t in made), (0, 0)


def _one_or_many(run, *tensors):
    """run(*tensors); one after the other where they stand for many."""
    return of_each(run, *tensors) if is_many(*tensors) else run(*tensors)


def _with_leaves(spec, given, needs):
    """(leaves, entry) of a call whose gradients are wanted."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(w) for t, w in zip(given, needs)]
        score = spec.score(leaves[3:])
        settings = spec.scale, spec.options, True, False, spec.gqa, (*PLAIN[:3], spec.keeps)
        return leaves, _find(*leaves[:3], score, spec.mask, *settings)[0]


class Backward(torch.autograd.Function):
    """Gradients of Forward's tensors; empty ones where none is wanted."""

    @staticmethod
    def forward(spec, needs, d_out, d_lse, q, k, v, out, lse, *tensors):
        if is_recorded():
            saved = d_out, d_lse, q, k, v, out, lse
            return recorded.backward(*spec.of_call(tensors), needs, *saved)
        given = q, k, v, *tensors
        leaves, found = _with_leaves(spec, given, needs)
        if not found.needs:
            return tuple(t.new_empty(0) for t in given)
        with torch.no_grad():
            saved = *leaves[:3], out, lse, *leaves[3:]
            d_out = d_out.to(q.dtype) if spec.keeps and d_out is not None else d_out
            made = _gradients(found, tuple(needs), d_out, d_lse, saved)
        return tuple(t.new_empty(0) if g is None else g for t, g in zip(given, made))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.spec, ctx.needs = inputs[:2]
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx, *rates):
        d_out, d_lse, q, k, v, _, _, *tensors = ctx.saved_tensors
        rates = _spread(rates, (q, k, v, *tensors), ctx.needs)
        wants = tuple(ctx.needs_input_grad[9:])
        given = d_out, d_lse, q, k, v, *tensors
        run = lambda *one: Second.apply(ctx.spec, wants, *given, *one)  # noqa: E731
        made = list(_one_or_many(run, *rates))
        more = [t if w else None for t, w in zip(made[5:], wants)]
        return None, None, *made[:5], None, None, *more

    @staticmethod
    def jvp(ctx, _, __, *rates):
        saved = ctx.saved_tensors
        run = lambda *one: Backward._tangent(ctx, saved, *one)  # noqa: E731
        return _one_or_many(run, *rates)

    @staticmethod
    def _tangent(ctx, saved, d_out_dot, d_lse_dot, *rates):
        d_out, d_lse, q, k, v, out, lse, *tensors = saved
        given, needs = (q, k, v, *tensors), ctx.needs
        rates = _spread((*rates[:3], *rates[5:]), given, (True,) * len(given))
        made = Second.apply(ctx.spec, needs[3:], d_out, d_lse, *given, *rates)[2:]
        if d_out_dot is not None or d_lse_dot is not None:
            d_out_dot = torch.zeros_like(d_out) if d_out_dot is None else d_out_dot
            d_lse_dot = torch.zeros_like(d_lse) if d_lse_dot is None else d_lse_dot
            more = Backward.apply(ctx.spec, needs, d_out_dot, d_lse_dot, q, k, v, out, lse,
                                  *tensors)  # fmt: skip
            made = [a + b if w else b for a, b, w in zip(made, more, needs)]
        return tuple(t if w else t.new_empty(0) for t, w in zip(made, needs))

    @staticmethod
    def vmap(info, dims, spec, needs, d_out, d_lse, q, k, v, out, lse, *tensors):
        n, rows = info.batch_size, (d_out, d_lse, q, k, v, out, lse)
        if _differ(spec, dims[9:], needs[3:]):
            return _each(Backward, n, (spec, needs), (*rows, *tensors), dims[2:])
        B = q.shape[0 if dims[4] is None or dims[4] > 0 else 1]
        spec, tensors = _folded(spec, n, B, tensors)
        rows = [_fold(t, d, n) for t, d in zip(rows, dims[2:9])]
        needs = (*needs[:3], *[False] * len(tensors))
        made = Backward.apply(spec, needs, *rows, *tensors)
        found = [_unfold(t, n) if t.numel() else t for t in made[:3]]
        found += [t.new_empty(0) for t in tensors]
        return tuple(found), tuple(0 if t.numel() else None for t in found)


def _spread(rates, given, needs):
    """A rate for each of these, 0 where nothing is known to change."""
    return [
        r if w and r is not None else torch.zeros_like(t)
        for r, t, w in zip(rates, given, needs)
    ]


class Second(torch.autograd.Function):
    """How out and lse, and gradients, change where query, key, value and what the score
    captures change at these rates: what Backward's derivative is, forward and backward, since
    it is symmetric. wants: for which captures."""

    @staticmethod
    def forward(spec, wants, d_out, d_lse, q, k, v, *rest):
        if q.dtype is not torch.float64 or q.is_cuda or is_recorded():
            raise NotImplementedError(NO_SECOND)
        n = len(spec.names)
        tensors, rates = rest[:n], rest[n:]
        are_floats = [t.is_floating_point() for t in tensors]
        leaves, found = _with_leaves(spec, (q, k, v, *tensors), (True, True, True, *are_floats))
        with torch.no_grad():
            captures = found.slots.placed(leaves[3:], "cpu") if found.slots else ()
            needs = (True, True, True, *are_floats)
            of_call = found.slots.by_name(needs) if found.slots else needs
            rates = [*rates[:3], *[r for r, w in zip(rates[3:], are_floats) if w]]
            given = q, k, v, d_out, d_lse
            made = second(found.call, of_call, *given, captures, rates)
            more = Slots.as_captured(leaves[3:], are_floats, iter(made[5:]))
        shown = [g if w and g is not None else t.new_empty(0)
                 for g, t, w in zip(more, tensors, wants)]  # fmt: skip
        return *made[:5], *shown

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(NO_THIRD)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(NO_THIRD)

    @staticmethod
    def vmap(info, dims, spec, wants, d_out, d_lse, q, k, v, *rest):
        n, size, rows = len(spec.names), info.batch_size, (d_out, d_lse, q, k, v)
        if _differ(spec, (*dims[7 : 7 + n], *dims[7 + n + 3 :]), wants):
            return _each(Second, size, (spec, wants), (*rows, *rest), dims[2:])
        B = q.shape[0 if dims[4] is None or dims[4] > 0 else 1]
        inner, tensors = _folded(spec, size, B, rest[:n])
        rows = [_fold(t, d, size) for t, d in zip(rows, dims[2:7])]
        rates = [_fold(t, d, size) for t, d in zip(rest[n : n + 3], dims[7 + n :])]
        still = [torch.zeros_like(t) for t in tensors]
        made = Second.apply(inner, (False,) * len(tensors), *rows, *tensors, *rates, *still)
        found = [_unfold(t, size) for t in made[:5]] + [t.new_empty(0) for t in rest[:n]]
        return tuple(found), tuple(0 if i < 5 else None for i in range(len(found)))


class Tangent(torch.autograd.Function):
    """How out and lse change where the inputs change at these rates; moves: which of query, key
    and value do."""

    @staticmethod
    def forward(spec, moves, *both):
        half = len(both) // 2
        (q, k, v, *tensors), rates = both[:half], both[half:]
        check_device(q)
        if is_recorded():
            return recorded.tangent(*spec.of_call(tensors), moves, q, k, v, rates)
        return tangents(*spec.of_call(tensors), spec.names, moves, (q, k, v), rates)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.spec = inputs[0]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx, d_out, d_lse):
        half, needs = len(ctx.saved_tensors) // 2, ctx.needs_input_grad[2:]
        given, rates = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        made, of_rates = (None,) * half, (None,) * half
        if True in needs[:half]:
            wants = tuple(needs[3:half])
            made = Second.apply(ctx.spec, wants, d_out, d_lse, *given, *rates)[2:]
        if True in needs[half:]:  # in which the tangents are linear
            saved = *given[:3], *Forward.apply(ctx.spec, *given), *given[3:]
            of_rates = Backward.apply(ctx.spec, tuple(needs[half:]), d_out, d_lse, *saved)
        return None, None, *[t if w else None for t, w in zip((*made, *of_rates), needs)]

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(NO_TANGENT_OF_TANGENT)

    @staticmethod
    def vmap(info, dims, spec, moves, *both):
        n, half, dims = info.batch_size, len(both) // 2, dims[2:]
        if _differ(spec, (*dims[3:half], *dims[half + 3 :])):
            return _each(Tangent, n, (spec, moves), both, dims)
        B = both[0].shape[0 if dims[0] is None or dims[0] > 0 else 1]
        inner, tensors = _folded(spec, n, B, both[3:half])
        rates = dict(zip(spec.names, both[half + 3 :]))
        of = {id(t): n for n, t in zip(spec.names, both[3:half])}
        rates = [rates[of[id(t)]] for t in tensors]
        q, k, v = (_fold(t, d, n) for t, d in zip(both[:3], dims[:3]))
        dots = [_fold(t, d, n) for t, d in zip(both[half : half + 3], dims[half:])]
        made = Tangent.apply(inner, moves, q, k, v, *tensors, *dots, *rates)
        return tuple(_unfold(t, n) for t in made), (0, 0)
