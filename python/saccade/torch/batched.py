"""Backward passes of several gradients at once: is_grads_batched, jacobian(vectorize=True) and
vmap around torch.autograd.grad. The gradients follow one after the other."""

from __future__ import annotations

import torch

from .memory import is_batched_by_autograd as _is_old

_NO_SECOND = (
    "saccade: got a backward pass through batched gradients (is_grads_batched, "
    "vectorize=True), expected create_graph=False, or torch.func.jacrev and hessian"
)


def is_batched(*tensors) -> bool:
    """Whether one of these stands for many."""
    return torch._C._are_functorch_transforms_active() or any(map(_is_old, tensors))


def gradients_of_each(run, needs, d_out, d_lse, saved):
    """run(d_out, d_lse, saved), for all that d_out and d_lse stand for; None where needs says
    so."""
    if not (_is_old(d_out) or _is_old(d_lse)):
        made = Batched.apply(run, d_out, d_lse, *saved)
        return [t if w else None for t, w in zip(made, needs)]
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    rows = [
        torch._remove_batch_dim(t, level, 1, 0) if _is_old(t) else t for t in (d_out, d_lse)
    ]
    n = max(t.shape[0] for t, x in zip(rows, (d_out, d_lse)) if _is_old(x))
    made = []
    for i in range(n):
        one = [t[i] if _is_old(x) else t for t, x in zip(rows, (d_out, d_lse))]
        made.append(run(*one, saved))
    stacked = [None if ts[0] is None else torch.stack(ts) for ts in zip(*made)]
    return [None if t is None else torch._add_batch_dim(t, 0, level) for t in stacked]


class Batched(torch.autograd.Function):
    """Under torch.func.vmap; empty where no gradient is wanted."""

    @staticmethod
    def forward(run, d_out, d_lse, *saved):
        made = run(None if d_out is None else d_out.resolve_neg(), d_lse, saved)
        return tuple(saved[0].new_empty(0) if t is None else t for t in made)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(_NO_SECOND)

    @staticmethod
    def vmap(info, dims, run, *tensors):
        made = []
        for i in range(info.batch_size):
            one = [t if d is None else t.select(d, i) for t, d in zip(tensors, dims[1:])]
            made.append(Batched.apply(run, *one))
        return tuple(map(torch.stack, zip(*made))), (0,) * len(made[0])
