"""Warm calls: arguments written once for a layout, for the extension that fills in addresses.

`extension` is None where there is none; then `run_of` gives None, and all calls take the way
through calls.py and gradients.py.
"""

from __future__ import annotations

import torch

from ..c import extension as built

extension = built.begin(torch.Tensor, torch.nn.Parameter, torch.empty_like)


def run_of(function, plan, words, links, inputs, outputs, room, places):
    """A call as the extension has it, or None where it cannot have it. inputs: (tensor, word);
    outputs: (word, input that it is like, model), of `result`; room: of a workspace, None for a
    thread's own; places: words of the tail, the workspace, the stream and dropout's tensor."""
    if extension is None:
        return None
    try:
        return extension.Run(
            function, plan, words, tuple(links), tuple(inputs), tuple(outputs), *room, places
        ).run
    except (TypeError, ValueError):  # tensors that are not plain, more than there is room for
        return None


NOTHING = (-1, -1, None)


def result(word, like, strides, index=-1):
    """The output of these strides: like the input `index`, or contiguous, or None where
    empty_like makes neither."""
    if index >= 0 and torch.empty_like(like).stride() == strides:
        return word, index, None
    model = like.new_empty(()).expand(like.shape)
    return (word, -1, model) if torch.empty_like(model).stride() == strides else None


def room_of(n, q, small):
    """(bytes of a workspace, what it is like): None for a thread's own memory on the host."""
    if not n or (not q.is_cuda and n <= small):
        return n, None
    return n, torch.empty((), dtype=torch.uint8, device=q.device).expand(n + 64)


def tensors_of(tensors):
    """Some tensors held weakly, as they are now: `now()` has them if they still are so. None
    where that cannot be seen."""
    if extension is None:
        return None
    try:
        return extension.Tensors(*tensors)
    except TypeError:
        return None
