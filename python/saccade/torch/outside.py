"""What cached_attention and varlen_attention are not called inside of."""

from __future__ import annotations

from typing import Any, Iterable

import torch

from . import active
from .memory import is_without_values
from .mods import tensors_of

_unpack = torch._VF._unpack_dual


def is_apart() -> bool:
    """Whether neither context_parallel nor a transform nor forward mode is on."""
    return active.parallel is None and not active.has_rates()


def check_apart(call: str, tensors: Iterable[Any], mods: Iterable[Any]) -> None:
    """Raises where it is not, and the call's tensors are part of it. mods: (kind, mod)."""
    if active.parallel is not None:
        raise NotImplementedError(
            f"saccade: got {call} inside of context_parallel, expected it outside, or "
            "flex_attention, which is divided over the ranks"
        )
    given = [t for t in tensors if isinstance(t, torch.Tensor)]
    for kind, mod in mods:
        given += tensors_of(kind, mod)
    if any(map(is_without_values, given)):
        raise NotImplementedError(in_transforms(call))
    if any(_unpack(t, level=0)[1] is not None for t in given):
        raise NotImplementedError(
            f"saccade: got {call} of tensors with tangents (forward mode, jvp), expected "
            "flex_attention, which has forward mode on the CPU"
        )


def in_transforms(call: str) -> str:
    """What is said there."""
    return (
        f"saccade: got {call} inside of torch.func's transforms (vmap, grad, jvp), expected it "
        "outside of them, or flex_attention, which they take"
    )
