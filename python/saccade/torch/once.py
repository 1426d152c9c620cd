"""Gradients that have no derivative of their own: a further derivative is an error, where
once_differentiable of PyTorch leaves out what runs through the tensors that were saved."""

from __future__ import annotations

import torch


class _Last(torch.autograd.Function):
    """The first n tensors as they are; the others are what they depend on."""

    @staticmethod
    def forward(ctx, message, n, *tensors):
        ctx.set_materialize_grads(False)
        ctx.message, ctx.n = message, n
        return tuple(t if t is None else t.view_as(t) for t in tensors[:n])

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(ctx.message)


# Function.apply without what it does for function transforms
_apply = super(torch.autograd.Function, _Last).apply


def last(message, made, depends):
    """made, gradients computed without a graph, for backward to return: if a graph is being
    made of it and one of depends requires a gradient, differentiating them says `message`."""
    if not torch.is_grad_enabled():
        return tuple(made)
    known = [t for t in depends if t is not None]
    if not any(t.requires_grad for t in known):
        return tuple(made)
    return tuple(_apply(message, len(made), *made, *known))


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        ctx.n = len(tensors)
        return tensors[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx, _):
        return (None,) * ctx.n


def link(*tensors):
    """A tensor without elements that depends on these and holds none of their memory: to be
    saved, and given to `last`, where they are not."""
    return _Link.apply(*tensors)
