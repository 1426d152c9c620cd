"""The context_parallel that this process is in, if any; apart from it, so that flex_attention
need not import torch.distributed."""

from __future__ import annotations

from typing import Any

parallel: Any = None
