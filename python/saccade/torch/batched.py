"""Passes of several gradients or tangents at once: is_grads_batched, jacobian and hessian with
vectorize=True, and vmap around torch.autograd.grad. They follow one after the other."""

from __future__ import annotations

import torch

from .memory import is_batched_by_autograd as _is_old

NO_SECOND_BATCHED = (
    "saccade: got a backward pass through gradients batched by torch.func.vmap, expected "
    "create_graph=False, is_grads_batched=True, or torch.func.jacrev and hessian"
)


def is_batched(*tensors) -> bool:
    """Whether one of these stands for many."""
    return torch._C._are_functorch_transforms_active() or is_many(*tensors)


def is_many(*tensors) -> bool:
    """Whether one of these stands for many under torch.autograd's own vmap."""
    return any(map(_is_old, tensors))


def of_each(run, *tensors):
    """run(*tensors), a tuple, for each that they stand for under torch.autograd's own vmap, one
    after the other: operators in between are seen by autograd, as nodes under it are not."""
    are_many = list(map(_is_old, tensors))
    level = _level_of(tensors[are_many.index(True)])
    rows = [
        torch._remove_batch_dim(t, level, 1, 0) if many else t
        for t, many in zip(tensors, are_many)
    ]
    n = max(t.shape[0] for t, many in zip(rows, are_many) if many)
    made = []
    for i in range(n):
        made.append(run(*[t[i] if many else t for t, many in zip(rows, are_many)]))
    stacked = [None if ts[0] is None else torch.stack(ts) for ts in zip(*made)]
    return tuple(None if t is None else torch._add_batch_dim(t, 0, level) for t in stacked)


_MOST_LEVELS = 8  # of vmaps around each other


def _level_of(t):
    """The innermost vmap that t stands for many under. The count of them is this thread's, and
    gradients on a GPU are made in a thread that autograd has for it, whose count is 0."""
    here = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    for level in [here] if here else range(_MOST_LEVELS, 0, -1):
        sizes = {torch._remove_batch_dim(t, level, n, 0).shape[0] for n in (2, 3)}
        if len(sizes) == 1:  # what there is, and not what was asked for
            return level
    raise AssertionError("a batched tensor of no level")


def gradients_of_each(run, needs, d_out, d_lse, saved):
    """run(d_out, d_lse, saved), for all that d_out and d_lse stand for; None where needs says
    so."""
    if is_many(d_out, d_lse):
        return of_each(lambda *gradients: run(*gradients, saved), d_out, d_lse)
    made = Batched.apply(run, d_out, d_lse, *saved)
    return tuple(t if w else None for t, w in zip(made, needs))


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
        raise NotImplementedError(NO_SECOND_BATCHED)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(NO_SECOND_BATCHED)

    @staticmethod
    def vmap(info, dims, run, *tensors):
        made = []
        for i in range(info.batch_size):
            one = [t if d is None else t.select(d, i) for t, d in zip(tensors, dims[1:])]
            made.append(Batched.apply(run, *one))
        return tuple(map(torch.stack, zip(*made))), (0,) * len(made[0])
