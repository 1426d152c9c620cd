"""Whether mods read inside of the tensors that they capture. Kernels clamp an index that leads
out, so that swapped ones, tab[i, h] for tab[h, i], would give numbers and no error."""

from __future__ import annotations

import math

import torch

from ..c import abi
from ..c.abi import BadValue
from .block_mask import BlockMask
from .checks import check_indices, check_plain, count_of, proven_for
from .masks import mask_of_tensors, mask_or_mod
from .mods import Resolved

_ROW = 1 << 20  # largest row of a dense mask that a first call lays out


def check_score(
    found: Resolved, mask: BlockMask | None, q: torch.Size, k: torch.Size, rows=3, keys=2
) -> None:
    """Of a score some positions that are live for all heads: what it reads for others is not
    used. q, k: shapes of query and key. rows, keys: how many of each, ends first."""
    if not any(v.shape for v in found.views) or any(v.device for v in found.views):
        return
    (B, H, Q, D), (_, Hkv, KV, _) = q, k
    if mask is not None and KV * math.prod(mask.handle().lead) > _ROW:
        return
    for i in _spread(Q, rows):
        i, live = _live(mask, i, KV, keys)
        for j in live:
            check_indices("score", found, (B, H, Hkv, 1, 1, D, D), 0, (i, j))


def _spread(n, count):
    return sorted({i * (n - 1) // max(1, count - 1) for i in range(count)})


def _live(mask, row, KV, count):
    """The row, and keys that are live for all its batches and heads."""
    if mask is None:
        return row, _spread(KV, count)
    handle = mask.handle()
    try:
        window = handle.window(row, 1, 0, KV)
        first = row
    except BadValue:  # of an imported mask, whose windows begin where a block does
        first = row - row % mask.BLOCK_SIZE[0]
        row = min(row, first + max(1, _ROW // (KV * math.prod(handle.lead))) - 1)
        window = handle.window(first, row - first + 1, 0, KV)
    B, H = window.lead
    dense = torch.empty((B * H, row - first + 1, KV), dtype=torch.uint8, device="cpu")
    abi.call("block_mask_to_dense", window.handle, dense.data_ptr())
    live = dense[:, -1].all(0).nonzero().flatten().tolist()
    return row, [live[i] for i in _spread(len(live), count)] if live else []


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    score_mod=None,
    block_mask=None,
    *,
    budget: int = 0,
) -> None:
    """Raises IndexError where a mod reads outside of a tensor that it captures; the message
    says which index of which tensor, and where. Of a mask every position is looked at up to
    `budget` (0: 2^26), then an even sample; of a score, in all batches and heads, up to 64 keys
    of each of up to 64 rows, where they are live for all of those. The first call of a mod on
    the CPU looks at two keys of each of three rows.
    """
    for name, t in (("query", query), ("key", key)):
        check_plain(name, t)
        if t.dim() != 4:
            raise ValueError(f"{name}: got {tuple(t.shape)}, expected 4: [B, H, N, D]")
    budget = count_of("budget", budget, most=(1 << 63) - 1)
    B, H, Q, D = query.shape
    Hkv, KV = key.shape[1], key.shape[2]
    mask, mask_mod = mask_or_mod(block_mask)
    if mask is not None and mask.mask_mod is not None and not mask_mod:
        mask_mod = mask.mask_mod
    if mask_mod is not None:
        found = Resolved(mask_mod, "mask", "cpu")
        check_indices("mask", found, (B, H, Hkv, Q, KV, D, D), budget)
        if mask is None:
            mask = mask_of_tensors(found, query, key, key)
    if mask is not None:
        mask = proven_for(mask, query, key, key)
    if score_mod is not None:
        found = Resolved(score_mod, "score", "cpu")
        check_score(found, mask, query.shape, key.shape, 64, 64)
