"""Sequences that begin alike: what they share is read once for all of them."""

from __future__ import annotations

import ctypes as C
from typing import Any, Optional

import torch

from ..c import abi, objects
from .checks import check_numbers, check_plain, count_of
from .flex import MaskMod, ScoreMod
from .graph_breaks import out_of_graphs
from .mask_objects import own_dimensions
from .mods import Resolved, view
from .serving import cached_attention, is_causal_text, resolved
from .tables import Keys, check_absent


class SharedPrefix:
    """Tables of sequences in groups whose first keys are the same, for a step of decoding.

    block_table [B, most] and seq_lens [B] as cached_attention takes them, of pools with pages
    of `page` keys. Sequences cu_groups[g] to cu_groups[g + 1] (int32 [G + 1], 0 to B) begin
    with the same shared_lens[g] keys (int32 [G]: whole pages, at most max_shared), which lie in
    the pages that the group's first sequence names; other rows of the table are not read there.
    rows: queries of each sequence, its last positions. All tensors lie on one device and are
    read when a run is there, so that a CUDA graph can hold it. Made once a step, for all
    layers.
    """

    def __init__(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_groups: torch.Tensor,
        shared_lens: torch.Tensor,
        *,
        page: int,
        max_shared: int,
        rows: int = 1,
    ):
        page, rows = count_of("page", page, 1), count_of("rows", rows, 1)
        max_shared = count_of("max_shared", max_shared)
        _check(block_table, seq_lens, cu_groups, shared_lens, max_shared, page)
        self.B, self.rows, self.page = block_table.shape[0], rows, page
        self.table, self.lengths = block_table, seq_lens
        self.shared = cu_groups, shared_lens, max_shared

    @out_of_graphs
    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Optional[MaskMod] = "causal()",
        score: Optional[ScoreMod] = None,
        *,
        scale: Optional[float] = None,
        k_scale: Optional[torch.Tensor] = None,
        v_scale: Optional[torch.Tensor] = None,
        sinks: Optional[torch.Tensor] = None,
        out: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        return_max: bool = False,
        kernel_options: Optional[dict[str, Any]] = None,
    ) -> Any:
        """cached_attention of query [B, H, rows, D] over pools of pages [pages, Hkv, page, D].

        Shared keys are one run, in which the queries of a group are rows of one sequence; what
        follows them is another; both in float32, merged by lse (saccade_prefix in C). mask is
        not evaluated over shared keys: every query must see all of them. On the CPU a mask
        that hides one is a ValueError; on a GPU nothing looks, and the result would be that of
        a mask that hides none. score may read neither b nor q. The others are those of
        cached_attention, and so is what returns.
        """
        for name, t in (("query", query), ("key", key)):
            check_plain(name, t)
            if t.dim() != 4:
                raise ValueError(f"{name}: got a tensor of rank {t.dim()}, expected 4")
        B, Q = query.shape[0], query.shape[2]
        if (B, Q, key.shape[2]) != (self.B, self.rows, self.page):
            raise ValueError(
                f"query: got {B} sequences of {Q} rows, pages of {key.shape[2]}, expected "
                f"{self.B} of {self.rows}, pages of {self.page}"
            )
        shared = self._shared_lengths() if query.device.type == "cpu" else None
        if shared is not None:
            found = None if mask is None else resolved(mask, "mask", "cpu")
            self._check_present(shared, found, key.shape[0])
            if found is not None:
                self._check_seen(shared, found, (query.shape[1], key.shape[1]), query.shape[3])
        if Q > 1:  # rows of all sequences at one stride
            query = query.transpose(1, 2).contiguous().transpose(1, 2)
        return cached_attention(
            query, key, value, mask, score, scale=scale, seq_lens=self.lengths,
            block_table=self.table, k_scale=k_scale, v_scale=v_scale, sinks=sinks, out=out,
            prefix=self.shared, return_lse=return_lse, return_max=return_max,
            kernel_options=kernel_options,
        )  # fmt: skip

    def _shared_lengths(self):
        """Shared keys of each sequence; None for tables that can't be, which the library
        refuses."""
        groups, lengths, _ = self.shared
        counts = groups.diff()
        if groups[0] or int(counts.sum()) != self.B or bool((counts < 0).any()):
            return None
        shared = lengths.repeat_interleave(counts)
        if self.lengths.shape != shared.shape or bool((self.lengths < shared).any()):
            return None
        return shared

    def _check_present(self, shared, mask: Optional[Resolved], pages):
        """Raises for a page of -1 that holds shared keys, which all queries see, or with no
        mask or a causal one a sequence's own."""
        held = -(-max(self.lengths.tolist(), default=0) // self.page)
        table = self.table[:, :held].clone()
        first = self.shared[0][:-1][self.shared[0].diff() > 0]
        columns = torch.arange(table.shape[1], device=table.device)
        of_shared = columns < (shared // self.page)[:, None]
        others = table.new_ones(self.B, dtype=torch.bool)
        others[first.long()] = False
        table[others[:, None] & of_shared] = 0  # not read
        seen = self.lengths if mask is None or is_causal_text(mask) else shared
        keys = Keys("block_table", table, None, seen, self.page, pages)
        check_absent(keys, None, self.rows, False)

    def _check_seen(self, shared, mask: Resolved, heads, D):
        """Raises where the mask hides a shared key of a query."""
        first = self.lengths - self.rows
        if is_causal_text(mask):
            seen = torch.minimum(shared, (first + 1).clamp(min=0)).tolist()
        else:
            seen = self._seen(mask, first, shared, heads, D)
        for b, (n, wanted) in enumerate(zip(seen, shared.tolist())):
            if n < wanted:
                raise ValueError(
                    f"mask: got one that hides keys of sequence {b} from {n} on, expected "
                    f"every query to see the {wanted} keys that its group shares"
                )

    def _seen(self, mask: Resolved, first, shared, heads, D) -> list[int]:
        """With how many keys each sequence begins that all of its queries and heads see,
        counted in pages, and no further than what is shared."""
        first, lengths = first.contiguous(), self.lengths.contiguous()
        q, n = (objects.c_tensor(view(t)) for t in (first, lengths))
        positions = abi.Positions(q_offset=C.pointer(q), kv_len=C.pointer(n))
        keys = self.table.shape[1] * self.page
        made = objects.block_mask_create(
            mask.bound, mask.views, (self.B, *heads, self.rows, keys, D, D), self.rows,
            self.page, mask.tensors, positions=positions,
        )  # fmt: skip
        B, H = own_dimensions(made)
        each = [min(_full(made.row(b, h, 0)) for h in range(H)) for b in range(B)]
        pages = (shared // self.page).tolist()
        return [min(each[b % B], n) * self.page for b, n in enumerate(pages)]


def _full(runs) -> int:
    """How many blocks from the first on are full in a row of blocks."""
    n = 0
    for first, count, is_full in zip(runs[::3], runs[1::3], runs[2::3]):
        if first != n or not is_full:
            break
        n += count
    return n


def _check(table, lengths, groups, shared, most, page):
    for name, t, rank in (("block_table", table, 2), ("seq_lens", lengths, 1),
                          ("cu_groups", groups, 1), ("shared_lens", shared, 1)):  # fmt: skip
        check_numbers(name, t, rank)
        if t.device != table.device:
            raise ValueError(f"{name}: got device {t.device}, expected {table.device}")
    if groups.shape[0] != shared.shape[0] + 1 or groups.shape[0] < 2:
        raise ValueError(
            f"cu_groups: got {groups.shape[0]} numbers beside {shared.shape[0]} shared_lens, "
            "expected one more"
        )
    held = table.shape[1] * page
    if most < page or most % page or most > held:
        raise ValueError(
            f"max_shared: got {most}, expected whole pages of {page}, {page} to {held} keys"
        )
