"""Whether tables of pages on the host name pages that are there. On a GPU nobody looks: that
would wait for it, and nothing outside of a pool is read there either."""

from __future__ import annotations

import ctypes as C
from typing import NamedTuple, Optional, Union

import torch

from ..c import abi


class Keys(NamedTuple):
    """Where the keys of each sequence lie, and how many there are."""

    name: str  # of the argument that names pages
    table: torch.Tensor  # [B, most], or [all] beside indptr
    indptr: Optional[torch.Tensor]
    lengths: Union[int, torch.Tensor]
    page: int
    pages: int


def check_pages(plan, args, keys: Keys) -> None:
    """BadValue for the first entry before a sequence's length that is no page of the pool."""
    try:
        abi.call("pages_check", plan.handle, C.byref(args))
    except abi.BadValue as reason:
        text = str(reason)
        for theirs, name in (("table", keys.name), ("kv_len", "seq_lens")):
            if text.startswith(f"{theirs}: "):
                text = name + text[len(theirs) :]
        raise abi.BadValue(reason.status, text) from None


def check_absent(keys: Keys, first, rows, is_causal: bool) -> None:
    """BadValue for a page of -1 whose keys are live: those that a sequence's last query sees
    in a causal mask, or all. first: positions of sequences' first queries, None: the last
    query stands at the last key; rows: how many queries."""
    n = (keys.table if keys.indptr is None else keys.indptr[1:]).shape[0]
    lengths, rows, first = _each(keys.lengths, n), _each(rows, n), _each(first, n)
    entries, name = _entries(keys, max(lengths, default=0)), keys.name
    for b, (own, seen, count, at) in enumerate(zip(entries, lengths, rows, first)):
        if is_causal and at is not None:
            seen = min(seen, at + count)
        used = own[: -(-seen // keys.page)] if count and seen > 0 else ()
        if -1 in used:
            raise abi.BadValue(
                "EVALUE",
                f"{name}: got -1 in entry {used.index(-1)} of batch {b}, whose keys are live, "
                f"expected 0 to {keys.pages - 1}",
            )


def _entries(keys: Keys, longest: int) -> list[list[int]]:
    """Those of each sequence, as lists: torch's calls take longer. A table [B, most] may have
    many more than any sequence has keys."""
    if keys.indptr is None:
        return keys.table[:, : max(0, -(-longest // keys.page))].tolist()
    entries, starts = keys.table.tolist(), keys.indptr.tolist()
    return [entries[a:b] for a, b in zip(starts, starts[1:])]


def _each(x, n):
    """A number of each sequence."""
    if isinstance(x, torch.Tensor) and x.dim():
        return x.tolist()
    return [int(x) if isinstance(x, torch.Tensor) else x] * n
