"""What calls are inside of: the context_parallel of this process, if any, and transforms; apart
from it, so that flex_attention need not import torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

parallel: Any = None

_is_transformed = torch._C._are_functorch_transforms_active


def has_rates() -> bool:
    """Whether a transform of torch.func, or forward mode, is on."""
    return _is_transformed() or forward_ad._current_level >= 0
