"""The C block mask of index tensors, and index tensors of the C block mask."""

from __future__ import annotations

import ctypes as C

import torch

from ..c import abi, objects
from .index_lists import columns_of, counted, dense_of, lists_of_blocks
from .mask_slices import noop_mask
from .memory import unwrapped
from .mods import Resolved


def imported(lists, block, lengths, mask_mod) -> objects.BlockMaskHandle:
    """lists: kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices."""
    with torch._C._DisableFuncTorch():  # their values, also of those made inside of grad or jvp
        num, idx, fnum, fidx = _whole([unwrapped(t) for t in lists], lengths[1], block[1])
    lead = (1,) * (4 - idx.dim()) + tuple(idx.shape)
    i = abi.BlockIndices(
        *lead,
        *block,
        num.data_ptr(),
        idx.data_ptr(),
        fnum.data_ptr() if fnum is not None else None,
        fidx.data_ptr() if fidx is not None else None,
    )
    sizes = (lead[0], lead[1], lead[1], *lengths, 1, 1)
    if mask_mod is noop_mask:
        return objects.block_mask_import(i, None, [], sizes, None)
    found = Resolved(mask_mod, "mask", "cpu")
    return objects.block_mask_import(i, found.bound, found.views, sizes, found.tensors)


def _whole(lists, length, block):
    """On the host, contiguous, without absent pages, and as wide as the keys."""
    num, idx, fnum, fidx = [
        None if t is None else t.to("cpu", torch.int32).contiguous() for t in lists
    ]
    num, idx = _mapped(num, idx)
    if fidx is not None:
        fnum, fidx = _mapped(fnum, fidx)
    columns = columns_of(length, block, idx, fidx)
    num, idx = num.expand(idx.shape[:-1]).contiguous(), _widened(idx, columns)
    return num, idx, fnum, None if fidx is None else _widened(fidx, columns)


def _mapped(num, idx):
    """Lists without their -1, PyTorch's PagedAttention's word for a page that no key has."""
    used = counted(num, idx)
    if not bool((used & (idx == -1)).any()):
        return num, idx
    kept = used & (idx != -1)
    order = torch.argsort((~kept).to(torch.int8), dim=-1, stable=True)
    return kept.sum(-1, dtype=torch.int32), idx.gather(-1, order)


def _widened(idx, columns):
    return torch.nn.functional.pad(idx, (0, columns - idx.shape[-1]))


def own_dimensions(handle: objects.BlockMaskHandle) -> tuple[int, int]:
    """Of how many batches and heads the blocks differ."""
    i = abi.BlockIndices()
    abi.call("block_mask_export", handle.handle, 0, C.byref(i))
    return i.B, i.H


def _dense(handle):
    """PARTIAL and FULL of blocks, as the C mask has them."""
    i = abi.BlockIndices()
    abi.call("block_mask_export", handle.handle, 0, C.byref(i))
    rows = (i.B, i.H, i.rows)
    made = [
        torch.zeros(
            rows if k % 2 == 0 else rows + (i.columns,), dtype=torch.int32, device="cpu"
        )
        for k in range(4)
    ]
    for name, t in zip(
        ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"), made
    ):
        setattr(i, name, t.data_ptr())
    abi.call("block_mask_export", handle.handle, 0, C.byref(i))
    block = i.block_q, i.block_kv
    return dense_of(*made[:2], i.columns), dense_of(*made[2:], i.columns), block


def exported(handle, lengths, lead, device):
    """FlexAttention's lists."""
    partial, full, block = _dense(handle)
    lists = lists_of_blocks(partial, full, lengths, block)
    lead = lead or full.shape[:2]  # one list serves all if the mod names no b or h
    return tuple(t.to(device).expand(*lead, *t.shape[2:]).contiguous() for t in lists)
