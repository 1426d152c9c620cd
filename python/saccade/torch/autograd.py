"""flex_attention as a node of autograd's graph."""

from __future__ import annotations

import torch

from .checks import NO_BACKWARD, NO_VMAP


class Attention(torch.autograd.Function):
    """Forward as a node of the graph, so that backward has its place: its inputs are query,
    key, value and the captured tensors that require gradients."""

    @staticmethod
    def forward(entry, query, key, value, *captured):
        return entry.call(query, key, value, entry.tail)

    @staticmethod
    def setup_context(ctx, inputs, output):
        if output[2] is not None:
            ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(NO_BACKWARD)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("saccade: flex_attention has no forward-mode derivative")

    @staticmethod
    def vmap(info, in_dims, *arguments):
        raise NotImplementedError(NO_VMAP)
