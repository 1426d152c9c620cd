"""What calls are inside of: the context_parallel of this process, if any, and transforms; apart
from it, so that flex_attention need not import torch.distributed."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad

parallel: Any = None

_is_transformed = torch._C._are_functorch_transforms_active


def has_rates() -> bool:
    """Whether a transform of torch.func, or forward mode, is on."""
    return _is_transformed() or forward_ad._current_level >= 0


# Layouts of calls over ranks that torch.utils.checkpoint computes again in backward. It does
# so wherever backward is called, and outside of the context the same call is another.
checkpointed: set = set()
_MOST = 1 << 12  # of them
_CHECKPOINTS = torch.utils.checkpoint.__file__
_task_of = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def _layout(*tensors) -> tuple:
    return tuple([(getattr(t, "shape", None), getattr(t, "dtype", None)) for t in tensors])


def note_checkpointed(q, k, v) -> None:
    """Of a call over ranks: whether torch.utils.checkpoint is among its callers."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINTS:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None and len(checkpointed) < _MOST:
        checkpointed.add(_layout(q, k, v))


def check_recomputed(q, k, v) -> None:
    """Of a call without ranks: raises where backward makes a call again that was over ranks."""
    if _task_of() >= 0 and _layout(q, k, v) in checkpointed:
        raise RuntimeError(
            "saccade: got a checkpointed call of context_parallel again, in backward outside "
            "of the context, expected backward inside of `with`"
        )
