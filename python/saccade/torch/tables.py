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
        abi.call("pages_check", C.c_void_p(plan.handle), C.byref(args))
    except abi.BadValue as reason:
        text = str(reason)
        if text.startswith("table: "):
            text = keys.name + text[len("table") :]
        raise abi.BadValue(reason.status, text) from None


def check_absent(keys: Keys, last: Union[None, int, torch.Tensor]) -> None:
    """BadValue for the first page of -1 among keys that a causal row at `last` sees, or, for
    None, any row. What other masks see is not looked at."""
    if keys.indptr is None:
        place = torch.arange(keys.table.shape[1], dtype=torch.int32)
        lengths = _column(keys.lengths)
        ends = None if last is None else _column(last)
        is_absent = keys.table == -1
    else:
        at = torch.arange(keys.table.shape[0], dtype=torch.int32)
        of = torch.bucketize(at, keys.indptr[1:], right=True, out_int32=True)
        of = of.clamp_(max=keys.indptr.shape[0] - 2)
        place = at - keys.indptr[of]
        lengths = _of_each(keys.lengths, of)
        ends = None if last is None else _of_each(last, of)
        is_absent = (keys.table == -1) & (place >= 0)
    first = place * keys.page
    is_absent = is_absent & (first < lengths)
    if ends is not None:
        is_absent &= first <= ends
    if not bool(is_absent.any()):
        return
    found = is_absent.nonzero()[0].tolist()
    b = found[0] if keys.indptr is None else int(of[found[0]])
    entry = found[-1] if keys.indptr is None else int(place[found[0]])
    raise abi.BadValue(
        "EVALUE",
        f"{keys.name}: got -1 in entry {entry} of batch {b}, whose keys are live, expected 0 "
        f"to {keys.pages - 1}",
    )


def _column(x):
    return x.view(-1, 1) if isinstance(x, torch.Tensor) else x


def _of_each(x, of):
    return x[of] if isinstance(x, torch.Tensor) and x.dim() else x
