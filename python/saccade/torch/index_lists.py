"""FlexAttention's index tensors: counts of live blocks and their columns, to dense and back."""

from __future__ import annotations

import torch


def ordered(dense):
    """[.., rows, columns] 0 or 1 to FlexAttention's (counts, live columns and then others)."""
    live = dense.bool()
    count = live.sum(-1, dtype=torch.int32)
    after = count.unsqueeze(-1) + (~live).cumsum(-1, dtype=torch.int32)
    place = torch.where(live, live.cumsum(-1, dtype=torch.int32), after) - 1
    columns = torch.arange(live.shape[-1], dtype=torch.int32, device=dense.device)
    made = torch.empty(live.shape, dtype=torch.int32, device=dense.device)
    return count, made.scatter_(-1, place.long(), columns.expand_as(made))


def dense_of(num, idx, columns):
    """[.., rows, columns], 1 for the listed ones."""
    live = torch.arange(idx.shape[-1], device=idx.device) < num.unsqueeze(-1)
    dense = torch.zeros((*idx.shape[:-1], columns + 1), dtype=torch.int32, device=idx.device)
    dense.scatter_(-1, torch.where(live, idx.long(), columns), 1)
    return dense[..., :columns].contiguous()
