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


def columns_of(KV, block, *indices):
    """Columns of blocks; lists may be cut to those that are used."""
    return max(-(-KV // block), *[t.shape[-1] for t in indices if t is not None])


def transposed_lists(lists, KV, block):
    """Lists of rows for each column."""
    num, idx, fnum, fidx = lists
    columns, wide = -(-KV // block), columns_of(KV, block, idx, fidx)
    made = ordered(dense_of(num, idx, wide)[..., :columns].mT)
    if fnum is None:
        return (*made, None, None)
    return made + ordered(dense_of(fnum, fidx, wide)[..., :columns].mT)


def lists_of_blocks(partial, full, lengths, block):
    """FlexAttention's lists of dense PARTIAL and FULL blocks. It calls no block FULL that
    reaches beyond the lengths."""
    over = torch.zeros_like(full)
    if lengths[0] % block[0]:
        over[..., -1, :] = 1
    if lengths[1] % block[1]:
        over[..., -1] = 1
    return ordered(partial | (full & over)) + ordered(full & (1 - over))


def marks_of(lists):
    """Tells index tensors changed in place from unchanged ones."""
    if lists is None:
        return None
    return tuple(0 if t is None or t.is_inference() else t._version for t in lists)
