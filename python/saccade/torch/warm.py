"""Warm calls: arguments written once for a layout, for the extension that fills in addresses.

`extension` is None where there is none; then `run_of` gives None, and all calls take the way
through calls.py and gradients.py.
"""

from __future__ import annotations

import torch

from ..c import extension as built

extension = built.begin(torch.Tensor, torch.nn.Parameter, torch.empty_like)


def run_of(function, plan, words, links, inputs, outputs, room, places, may_keep=True):
    """A call as the extension has it, or None where it cannot have it. inputs: (tensor, word);
    outputs, of `result`: (word, input that it is like, its dtype if that is another), or (word,
    -1, model); room: of a workspace, None for a thread's own; places: words of the tail, the
    workspace, the stream and dropout's tensor. may_keep: whether a workspace on a GPU may stay
    for the next call."""
    if extension is None:
        return None
    try:
        return extension.Run(
            function, plan, words, tuple(links), tuple(inputs), tuple(outputs), *room, places,
            may_keep,
        ).run
    except (TypeError, ValueError):  # tensors that are not plain, more than there is room for
        return None


NOTHING = (-1, -1, None)
_seeds: dict = {}  # by dtype and device


def seed_of(dtype, device):
    """The element that all models of this dtype and device are views of: a pool of CUDA graphs,
    which forbids that anything in it is kept, holds none if it was made before."""
    found = _seeds.get((dtype, device))
    if found is None:
        found = _seeds[dtype, device] = torch.empty((), dtype=dtype, device=device)
    return found


def result(word, like, strides, index=-1, dtype=None):
    """The output of these strides: like the input `index`, or contiguous, or None where
    empty_like makes neither. dtype: other than that of `like`."""
    if index >= 0 and torch.empty_like(like, dtype=dtype).stride() == strides:
        return word, index, dtype
    model = seed_of(dtype or like.dtype, like.device).expand(like.shape)
    return (word, -1, model) if torch.empty_like(model).stride() == strides else None


def room_of(n, q, small):
    """(bytes of a workspace, what it is like): None for a thread's own memory on the host."""
    if not n or (not q.is_cuda and n <= small):
        return n, None
    return n, seed_of(torch.uint8, q.device).expand(n + 64)


def tensors_of(tensors):
    """Some tensors held weakly, as they are now: `now()` has them if they still are so. None
    where that cannot be seen."""
    if extension is None:
        return None
    try:
        return extension.Tensors(*tensors)
    except TypeError:
        return None
