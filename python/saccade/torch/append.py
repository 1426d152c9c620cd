"""New keys and values into the pools of a cache, cast or quantised, in one launch."""

from __future__ import annotations

import ctypes as C
from typing import Optional

import torch

from ..c import abi, objects
from .calls import current_stream
from .checks import brief, check_here, check_plain, check_rows, no_gradients
from .graph_breaks import out_of_graphs
from .mods import in_names_of, view, written
from .serving import ARGUMENTS, cache_view


@out_of_graphs
def append_keys(
    key: torch.Tensor,
    value: Optional[torch.Tensor],
    key_pool: torch.Tensor,
    value_pool: Optional[torch.Tensor],
    *,
    slots: Optional[torch.Tensor] = None,
    seq_lens: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    indptr: Optional[torch.Tensor] = None,
    indices: Optional[torch.Tensor] = None,
    last_page_len: Optional[torch.Tensor] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
) -> None:
    """Writes key [T, Hkv, D] or [B, Hkv, N, D], and value, into pools [pages, Hkv, page, D] as
    cached_attention takes them, on the CPU or on CUDA, cast or quantised on the way.

    slots: int32 or int64 [T], page * page size + key of the page. Else a batch's new keys are
    the last of its seq_lens [B] keys, in block_table [B, most], or in indptr, indices and
    last_page_len, or without tables in pool[b]; cu_seqlens [B + 1] says which new keys are
    whose where batches have unequal numbers. All are read when the launch is there, so that a
    CUDA graph can hold it. Slots and pages of -1, or outside of the pool, take nothing.
    k_scale, v_scale: [pages, Hkv, page, groups of channels] are made and written; scales of
    several keys are used as they are. None for value and value_pool: V is a view of K. No new
    keys need no place, and do nothing.
    Errors: ValueError for what does not fit together, SaccadeError for what the library
    refuses."""
    no_gradients(key=key, value=value, key_pool=key_pool, value_pool=value_pool)
    args, keep = abi.AppendArgs(), []

    def give(record, name, t, of=view):
        if t is None:
            return
        check_here(ARGUMENTS.get(name, name), t, key.device)
        made = objects.c_tensor(of(t))
        keep.append((made, t))
        setattr(record, name, C.pointer(made))

    if (value is None) != (value_pool is None):
        absent = "value" if value is None else "value_pool"
        raise ValueError(f"{absent}: got None, expected both value and value_pool, or neither")
    rows = {"k": _rows("key", key), "v": None if value is None else _rows("value", value)}
    _check_fit(key, value, key_pool, value_pool)
    _check_places(rows["k"].shape[0], slots, seq_lens, indptr, indices, last_page_len)
    for name, t in rows.items():
        give(args, name, None if t is None else t.resolve_neg())
    give(args, "k_pool", key_pool, cache_view)
    give(args, "v_pool", value_pool, cache_view)
    for name, scale, pool in (("k_scale", k_scale, key_pool), ("v_scale", v_scale, value_pool)):
        if scale is not None:
            give(args, name, scale)
            tokens, channels = _groups(name, scale, pool)
            setattr(args, f"{name}_tokens", tokens)
            setattr(args, f"{name}_channels", channels)
    give(args, "slots", slots)
    give(args, "kv_len", seq_lens)
    give(args, "cu_seqlens", cu_seqlens)
    if (block_table is not None) and (indices is not None):
        raise ValueError("got both block_table and indices, expected one")
    if block_table is not None or indices is not None:
        pages = abi.Pages()
        give(pages, "table", block_table if indices is None else indices)
        give(pages, "indptr", indptr)
        give(pages, "last_page_len", last_page_len)
        args.pages = C.pointer(pages)
        keep.append(pages)
    if key.is_cuda:
        args.stream = current_stream(key.get_device())
    threads = objects.context(0 if key.is_cuda else -torch.get_num_threads())
    try:
        abi.call("append", threads, C.byref(args))
    except abi.BadValue as reason:
        raise in_names_of(reason, (), ARGUMENTS) from None
    written(key_pool, value_pool, k_scale, v_scale)


def _check_fit(key, value, key_pool, value_pool):
    """Raises where rows are not those of their pool, before the library knows both by other
    names."""
    for name, t, pool in (("key", key, key_pool), ("value", value, value_pool)):
        if t is None:
            continue
        check_here(f"{name}_pool", pool, key.device)
        if pool.dim() != 4:
            raise ValueError(
                f"{name}_pool: got {brief(pool)}, expected [pages, Hkv, page, D] of rank 4"
            )
        wide = 2 if pool.dtype is torch.uint8 else 1
        if t.shape[1] != pool.shape[1] or t.shape[-1] != wide * pool.shape[3]:
            raise ValueError(
                f"{name}: got {tuple(t.shape)}, expected {pool.shape[1]} heads of "
                f"{wide * pool.shape[3]} channels, as {name}_pool has them"
            )
    if value is not None and (value.dim() != key.dim() or value.shape[:-1] != key.shape[:-1]):
        raise ValueError(
            f"value: got {tuple(value.shape)}, expected {tuple(key.shape[:-1])} and channels, "
            "as key"
        )


def _check_places(keys, slots, seq_lens, indptr, indices, last_page_len):
    for name, t in (("indptr", indptr), ("last_page_len", last_page_len)):
        if t is not None and indices is None:
            raise ValueError(f"{name}: got a tensor without indices, expected it beside them")
    if keys and slots is None and seq_lens is None and last_page_len is None:
        raise ValueError("slots: got None, expected them, seq_lens or last_page_len")


def _rows(name, t):
    """[T, Hkv, D] of either form, without a copy where a batch has one key."""
    check_plain(name, t)
    if t.dim() == 4:
        t = t[:, :, 0] if t.shape[2] == 1 else t.transpose(1, 2).flatten(0, 1)
    check_rows(name, t, 3)
    return t


def _groups(name, scale, pool):
    """(keys, channels) that share a number; 0: all."""
    if scale.dim() != 4 or pool is None:
        got = brief(scale) if pool is not None else "it without a pool"
        raise ValueError(f"{name}: got {got}, expected a tensor of rank 4, and a pool")
    dim = pool.shape[-1] * (2 if pool.dtype is torch.uint8 else 1)
    found = []
    rows = scale.shape[2], pool.shape[2]
    for what, (n, of) in (("keys", rows), ("channels", (scale.shape[3], dim))):
        if n == 0 or n > of or of % n:
            raise ValueError(f"{name}: got {n} groups of {what}, expected a divisor of {of}")
        found.append(0 if n == 1 else of // n)
    if scale.shape[:3] == pool.shape[:3]:
        found[0] = 1
    return found
