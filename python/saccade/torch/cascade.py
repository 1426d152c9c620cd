"""Sequences that begin alike: what they share is read once for all of them."""

from __future__ import annotations

import re
from typing import Any, Optional

import torch

from .flex import MaskMod, ScoreMod
from .mods import Resolved
from .serving import cached_attention, no_gradients

# functions of a score's text that see nothing but what they are given
_PURE = set(
    "softcap exp exp2 log log2 tanh sqrt rsqrt abs min max floor ceil float int sin cos".split()
)
_PACKED = 64  # queries times heads of a group that a GPU's decode kernel takes at a time


class SharedPrefix:
    """Tables of sequences in groups whose first keys are the same, for a step of decoding.

    block_table [B, most] and seq_lens [B] as cached_attention takes them, of pools with pages
    of `page` keys. Sequences cu_groups[g] to cu_groups[g + 1] (int32 [G + 1], 0 to B) begin
    with the same shared_lens[g] keys (int32 [G]: whole pages, at most max_shared), which lie in
    the pages that the group's first sequence names; other rows of the table are not read there.
    rows: queries of each sequence, its last positions. heads: H // Hkv. All tensors lie on one
    device; nothing is waited for, and a CUDA graph can hold it. Made once a step, for all
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
        heads: int = 1,
    ):
        _check(block_table, seq_lens, cu_groups, shared_lens, max_shared, page)
        self.B, self.rows, self.page = block_table.shape[0], rows, page
        self._share(block_table, cu_groups, shared_lens, max_shared // page, heads)
        self._follow(block_table, seq_lens, cu_groups, shared_lens)

    def _share(self, table, cu, shared, pages, heads):
        """Groups as ragged sequences of queries, cut into what one tile of decode takes."""
        n, G = self.B * self.rows, shared.shape[0]
        self.chunk = max(1, _PACKED // heads)
        begin = cu * self.rows
        ends = ((begin.diff() + self.chunk - 1) // self.chunk).cumsum(0)
        number = torch.arange(n // self.chunk + G, device=table.device)
        of = torch.searchsorted(ends, number, right=True)
        group = of.clamp(max=G - 1)
        before = torch.where(group > 0, ends[group - 1], 0)
        start = begin[group] + (number - before) * self.chunk
        start = torch.where(of < G, start, n).int()
        self.cu = torch.cat((start, begin[-1:])).contiguous()
        self.table = table[cu[:-1][group].clamp(max=self.B - 1).long(), :pages].contiguous()
        self.lengths = shared[group].contiguous()

    def _follow(self, table, lengths, cu, shared):
        """What each sequence has of its own: its table from there on."""
        sequence = torch.arange(self.B, device=table.device)
        group = torch.searchsorted(cu[1:].contiguous(), sequence, right=True)
        self.begin = shared[group.clamp(max=shared.shape[0] - 1)].contiguous()
        most = table.shape[1]
        at = torch.arange(most, device=table.device) + (self.begin // self.page)[:, None]
        self.own_table = table.gather(1, at.clamp_(max=most - 1))
        self.own_lengths = lengths - self.begin
        self.q_offset = lengths - self.rows

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Optional[MaskMod] = "causal()",
        score: Optional[ScoreMod] = None,
        *,
        scale: Optional[float] = None,
        sinks: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        kernel_options: Optional[dict[str, Any]] = None,
    ) -> Any:
        """cached_attention of query [B, H, rows, D] over pools of pages [pages, Hkv, page, D].

        Shared keys are one run, in which the queries of a group are rows of one sequence; what
        follows them is another; both in float32, merged by lse. mask is not evaluated over
        shared keys: every query must see all of them. score may read neither b nor q. Returns
        out, or (out, lse).
        """
        B, H, Q, D = query.shape
        if (B, Q, key.shape[2]) != (self.B, self.rows, self.page):
            raise ValueError(
                f"query: got {B} sequences of {Q} rows, pages of {key.shape[2]}, expected "
                f"{self.B} of {self.rows}, pages of {self.page}"
            )
        _check_score(score)
        no_gradients(query=query, key=key, value=value, sinks=sinks)
        options: dict[str, Any] = dict(scale=scale, kernel_options=kernel_options)
        options["return_lse"] = True
        kind = query.dtype if query.dtype is torch.float64 else torch.float32
        Dv = value.shape[3] * (2 if value.dtype is torch.uint8 else 1)
        rows = query.transpose(1, 2).reshape(B * Q, H, D)
        over, over_lse = cached_attention(
            rows, key, value, None, score, q_offset=0, block_table=self.table,
            seq_lens=self.lengths, cu_seqlens_q=self.cu, max_seqlen_q=self.chunk,
            out=rows.new_empty((B * Q, H, Dv), dtype=kind), **options,
        )  # fmt: skip
        own, own_lse = cached_attention(
            query, key, value, mask, score, q_offset=self.q_offset, kv_offset=self.begin,
            block_table=self.own_table, seq_lens=self.own_lengths, sinks=sinks,
            out=query.new_empty((B, H, Q, Dv), dtype=kind), **options,
        )  # fmt: skip
        over = over.view(B, Q, H, Dv).transpose(1, 2)
        over_lse = over_lse.view(B, Q, H).transpose(1, 2)
        lse = torch.logaddexp(over_lse, own_lse)
        weight = torch.exp(over_lse - lse).nan_to_num_(0.0)[..., None]  # both -inf: no key
        # no lerp, whose difference of parts makes NaN of an infinity; a part without keys is 0
        out = torch.addcmul(own * (1 - weight), over, weight).to(query.dtype)
        return (out, lse) if return_lse else out


def _check(table, lengths, groups, shared, most, page):
    for name, t, rank in (("block_table", table, 2), ("seq_lens", lengths, 1),
                          ("cu_groups", groups, 1), ("shared_lens", shared, 1)):  # fmt: skip
        if not isinstance(t, torch.Tensor) or t.dtype is not torch.int32 or t.dim() != rank:
            raise ValueError(f"{name}: expected an int32 tensor of rank {rank}")
        if t.device != table.device:
            raise ValueError(f"{name}: got device {t.device}, expected {table.device}")
    if groups.shape[0] != shared.shape[0] + 1 or groups.shape[0] < 2:
        raise ValueError(
            f"cu_groups: got {groups.shape[0]} numbers beside {shared.shape[0]} shared_lens, "
            "expected one more"
        )
    if most < page or most % page or most > table.shape[1] * page:
        raise ValueError(
            f"max_shared: got {most}, expected whole pages of {page}, at most {table.shape[1]}"
        )


def _check_score(score):
    """In the run over shared keys a row's b and q are others."""
    if score is None:
        return
    text = Resolved(score, "score", "cpu").bound.text
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    called = set(re.findall(r"([A-Za-z_]\w*)\s*\(", text))
    if words & {"b", "q", "B", "Q", "KV"} or called - _PURE:
        raise ValueError(f"score: got {text!r}, expected one that reads neither b nor q")
