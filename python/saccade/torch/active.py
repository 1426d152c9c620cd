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


# torch.utils.checkpoint makes calls again wherever backward is called, and outside of the
# context a call over ranks is another. Without reentrance it notices by what is saved. With it
# the node of its graph that a call over ranks is made under is marked.
has_checkpointed = False  # whether any node is
_CHECKPOINTS = torch.utils.checkpoint.__file__
_task_of = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def _nodes():
    """Those of checkpoints, with reentrance, that the caller runs under."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINTS:
            node = frame.f_locals.get("ctx")
            if hasattr(node, "run_function"):
                yield node
        frame = frame.f_back  # type: ignore[assignment]


def note_checkpointed() -> None:
    """Of a call over ranks: marks the checkpoints that it is made under."""
    global has_checkpointed
    for node in _nodes():
        node.is_over_ranks = has_checkpointed = True


def check_recomputed() -> None:
    """Of a call without ranks: raises where backward makes a call again that was over ranks."""
    if _task_of() >= 0 and any(getattr(node, "is_over_ranks", False) for node in _nodes()):
        raise RuntimeError(
            "saccade: got a checkpointed call of context_parallel again, in backward outside "
            "of the context, expected backward inside of `with`"
        )
