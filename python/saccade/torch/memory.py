"""Which tensors have values in memory that the library can read, and what is said of others."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.bias import CausalBias

from ..trace.errors import words_of

NO_VMAP = (
    "saccade: got tensors inside a torch.func transform (vmap, grad, jvp), expected plain "
    "ones; a mapped dimension folds into batch or heads (query.flatten(0, 1))"
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Of torch.func's grad or jvp.
_is_tracking = getattr(torch._C._functorch, "is_gradtrackingtensor", lambda t: False)
# Batched by torch.func, or by torch.autograd's own vmap.
_is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda t: False)
_BATCHED: Any = torch._C._parse_dispatch_key("Batched")


def is_batched_by_autograd(t) -> bool:
    """Whether it stands for many gradients or rates (is_grads_batched, vectorize=True)."""
    return t is not None and torch._C._dispatch_keys(t).has(_BATCHED)


def is_without_values(t) -> bool:
    """Whether it stands for others inside of a transform."""
    return _is_wrapped(t) or is_batched_by_autograd(t)


def unwrapped(t):
    """The plain tensor that one of torch.func's grad or jvp stands for, with its values; others
    as they are. Nothing is differentiated through it."""
    while t is not None and _is_tracking(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def refuse_wrapped(*tensors):
    """Says which kind of tensor it is that has no memory."""
    for t in tensors:
        if _is_wrapped(t):
            raise NotImplementedError(NO_VMAP) from None
        if type(t) not in _PLAIN and not _has_memory(t):
            raise TypeError(f"saccade: {_got(t)}") from None


def check_memory(name, t):
    """Raises for a tensor whose values are not in its memory; one without elements has none."""
    if _has_memory(t):
        return
    if is_without_values(t):
        raise NotImplementedError(NO_VMAP)
    with torch._C.DisableTorchFunctionSubclass():  # subclasses answer for themselves
        n = t.numel()
    if type(t) not in _PLAIN and n:
        raise TypeError(f"{name}: {_got(t)}")
    if n:
        why = "on device meta" if t.is_meta else "whose storage was resized to 0"
        raise TypeError(
            f"{name}: got a tensor of shape {tuple(t.shape)} {why}, expected one with values"
        )


MOVED = (
    "block_mask: got a captured tensor that lies elsewhere in memory than when the mask was "
    "made (share_memory_, resize_), expected the mask to be made anew"
)


def has_moved(tensors, views) -> bool:
    """Whether one that the library reads in place lies elsewhere than its view says."""
    return any(t.dim() and t.data_ptr() != v.address for t, v in zip(tensors, views))


def check_stays(handle) -> None:
    """Raises where a backward pass would read what a block mask captured where it lay."""
    if handle is not None and has_moved(handle.tensors or (), handle.views):
        raise RuntimeError(
            "block_mask: got a captured tensor that was moved in memory between a call and its "
            "backward pass (share_memory_, resize_), expected it moved before or after both"
        )


def _got(t):
    return f"got {words_of(t)}, which has no memory of its own, expected a plain tensor"


def _has_memory(t):
    if type(t) not in _PLAIN and isinstance(t, (FakeTensor, CausalBias)):
        return False  # whose memory, if there is any, was never written
    try:
        return t.data_ptr() != 0
    except RuntimeError:
        return False
