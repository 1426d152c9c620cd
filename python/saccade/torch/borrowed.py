"""The rest of what torch.nn.attention.flex_attention offers, for code that imports it by name.

Types, constants and helpers on tensors are torch's own; what makes a BlockMask makes one of
ours. Nothing here runs torch's attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import flex_attention as theirs

from .block_mask import BlockMask, noop_mask
from .masks import adopted, create_block_mask


def _create_empty_block_mask(query: torch.Tensor, key: torch.Tensor) -> BlockMask:
    """Every block of these lengths, live."""
    lengths = query.shape[-2], key.shape[-2]
    return create_block_mask(noop_mask, None, None, *lengths, device=query.device)


def _create_sparse_block_from_block_mask(*arguments: Any, **options: Any) -> BlockMask:
    """From dense PARTIAL and FULL blocks."""
    made = adopted(theirs._create_sparse_block_from_block_mask(*arguments, **options))
    assert made is not None
    return made


_OWN = {f.__name__: f for f in (_create_empty_block_mask, _create_sparse_block_from_block_mask)}


def borrowed(name: str) -> Any:
    """What this name is in FlexAttention's module; AttributeError where it is nothing."""
    if name in _OWN:
        return _OWN[name]
    if name != "FlexKernelOptions" and (name[:1] != "_" or name[:2] == "__"):
        raise AttributeError(f"module 'saccade.torch' has no attribute {name!r}")
    if name == "FlexKernelOptions":  # older versions of torch have none
        return getattr(theirs, name, dict[str, Any])
    return getattr(theirs, name)
