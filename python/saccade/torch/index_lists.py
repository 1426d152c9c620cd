"""FlexAttention's index tensors: counts of live blocks and their columns, to dense and back."""

from __future__ import annotations

import torch


def check_lists(lists, KV, block):
    """ValueError for a count or a listed column of blocks that is none; -1, a page without
    keys, may be listed. Looks at tensors on the CPU alone."""
    columns = columns_of(KV, block, lists[1], lists[3])
    for kind, num, idx in (("", *lists[:2]), ("full_", *lists[2:])):
        if all(type(t) is torch.Tensor and t.device.type == "cpu" for t in (num, idx)):
            _check_lists(kind, num, idx, columns)


def _check_lists(kind, num, idx, columns):
    if not _spreads(num.shape, idx.shape[:-1]):
        raise ValueError(
            f"{kind}kv_num_blocks: got shape {tuple(num.shape)}, expected "
            f"{tuple(idx.shape[:-1])}, that of {kind}kv_indices but for its columns"
        )
    most = idx.shape[-1]
    _refuse(f"{kind}kv_num_blocks", num, (num < 0) | (num > most), 0, most)
    wrong = counted(num, idx) & ((idx < -1) | (idx >= columns))
    _refuse(f"{kind}kv_indices", idx, wrong, 0, columns - 1)


def _spreads(shape, to):
    """Whether it expands to the other."""
    return len(shape) <= len(to) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(to))
    )


def _refuse(name, tensor, wrong, low, high):
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        got = tensor[tuple(at)].item()
        raise ValueError(f"{name}: got {got} at {at}, expected {low} to {high}")


def counted(num, idx):
    """Which entries of lists are in use."""
    return torch.arange(idx.shape[-1], device=idx.device) < num.unsqueeze(-1)


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
    live = counted(num, idx)
    dense = torch.zeros((*idx.shape[:-1], columns + 1), dtype=torch.int32, device=idx.device)
    dense.scatter_(-1, torch.where(live & (idx >= 0), idx.long(), columns), 1)
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
