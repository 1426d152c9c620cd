"""A paged cache of all layers of a model: pools on any device, and who holds which page."""

from __future__ import annotations

import operator
from typing import Any, Optional, Sequence, Union

import torch

from ..kv import Cache
from .append import append_keys
from .checks import brief, check_plain, count_of, device_of
from .graph_breaks import out_of_graphs
from .quantised import CODE_TENSORS, check_scale_dtype
from .serving import cached_attention


_PLAIN = torch.float32, torch.float16, torch.bfloat16


def _held(dtype: Union[torch.dtype, str]) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in _PLAIN:
        return dtype
    if not isinstance(dtype, str) or dtype not in CODE_TENSORS:
        names = ", ".join(CODE_TENSORS)
        raise ValueError(
            f"dtype: got {brief(dtype)}, expected torch.float32, float16, bfloat16 or {names}"
        )
    return CODE_TENSORS[dtype]


def _numbers(x: Sequence[Any]) -> torch.Tensor:
    """On the host, whatever torch's default device is."""
    return torch.tensor(x, dtype=torch.int32, device="cpu")


class PagedCache(Cache):
    """Pools of `layers` layers with one table for all of them.

        cache = PagedCache(32, pages=4096, page=16, sequences=8, heads=8, head_dim=128,
                           dtype="e4m3", device="cuda")
        s = cache.add()
        cache.step([s], [prompt_length])              # once a step: room, copies, tables
        for layer in range(32):
            cache.append(layer, key, value)           # [T, Hkv, D] or [B, Hkv, N, D]
            out = cache.attend(layer, query, "causal()")

    dtype: of torch, or "e4m3", "e5m2", "i8", "i4"; then each key of a head has scales of its
    own, one for `channels` neighbouring channels (0: all). most_keys: of a sequence; 0: as many
    as all pages hold. A step's tables lie in block_table, seq_lens and cu_seqlens, at the same
    place each time: a CUDA graph of append and attend for so many sequences stays right.
    """

    def __init__(
        self,
        layers: int,
        *,
        pages: int,
        page: int,
        sequences: int,
        heads: int,
        head_dim: int,
        v_head_dim: int = 0,
        dtype: Union[torch.dtype, str] = torch.float32,
        channels: int = 0,
        scale_dtype: torch.dtype = torch.float32,
        most_keys: int = 0,
        device: Any = None,
    ) -> None:
        layers, heads = count_of("layers", layers, 1), count_of("heads", heads, 1)
        pages, page = count_of("pages", pages, 1), count_of("page", page, 1)
        sequences = count_of("sequences", sequences, 1)
        most_keys = count_of("most_keys", most_keys)
        head_dim = count_of("head_dim", head_dim, 1)
        v_head_dim = count_of("v_head_dim", v_head_dim)
        channels = count_of("channels", channels)
        super().__init__(pages, page, sequences, most_keys)
        is_code = isinstance(dtype, str)
        held = _held(dtype)
        check_scale_dtype(scale_dtype)
        if channels and not is_code:
            raise ValueError(f"channels: got {channels} beside {dtype}, expected 0: no scales")
        self.device = device_of(device if device is not None else "cpu")

        with torch.inference_mode(False):  # else a step outside of it could not write them
            self._make(
                layers,
                (pages, page, heads),
                (head_dim, v_head_dim or head_dim),
                (held, dtype == "i4"),
                (scale_dtype if is_code else None, channels),
            )
            self._make_tables(sequences, most_keys or pages * page)

    def _make(self, layers, sizes, dims, kind, scales):
        """Pools of so many layers. sizes: pages, keys of a page, heads; kind: their dtype,
        whether two elements share a byte; scales: dtype, None for none, channels of one."""
        (held, is_half), (scale_dtype, channels) = kind, scales

        def pools(shape: tuple[int, ...], of: torch.dtype) -> list[torch.Tensor]:
            new = (torch.zeros(shape, dtype=of, device=self.device) for _ in range(layers))
            return [t.transpose(1, 2) for t in new]

        self.pools: list[list[torch.Tensor]] = []
        self.scales: list[list[Optional[torch.Tensor]]] = []
        for dim in dims:
            groups = dim // channels if channels else 1
            if dim % (2 if is_half else 1) or dim % (channels or 1):
                raise ValueError(f"head_dim: got {dim}, expected a multiple of {channels or 2}")
            self.pools.append(pools((*sizes, dim // 2 if is_half else dim), held))
            self.scales.append(
                [*pools((*sizes, groups), scale_dtype)] if scale_dtype else [None] * layers
            )

    def _make_tables(self, sequences, keys):
        columns = -(-keys // self.page)
        whole: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        self._table = torch.full((sequences, columns), -1, **whole)
        self._lengths = torch.zeros(sequences, **whole)
        self._starts = torch.zeros(sequences + 1, **whole)
        self.block_table, self.seq_lens = self._table[:0], self._lengths[:0]
        self.cu_seqlens = self._starts[:1]
        self.most_new = 0
        self._columns = 1  # of the table that were ever written
        self._counts: Optional[list[int]] = None

    def _new_keys(self) -> list[int]:
        if self._counts is None:
            raise RuntimeError("PagedCache: got no step yet, expected one: it says whose keys")
        return self._counts

    @out_of_graphs
    def step(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Room for counts[i] new keys of sequences[i], for all or none; pages that are shared
        and written to are copied. append and attend are of these sequences until the next."""
        _, copies = self.grow(sequences, counts)
        if copies:
            self._copy(copies)
        n = len(sequences)
        columns = self._columns_of(sequences)
        rows, lengths = self.table(sequences, columns)
        self.block_table, self.seq_lens = self._table[:n], self._lengths[:n]
        starts, self._counts = [0], [int(n) for n in counts]
        self.most_new = max(self._counts, default=0)
        for count in self._counts:
            starts.append(starts[-1] + count)
        self.block_table[:, :columns].copy_(_numbers(rows).view(n, columns))
        self.seq_lens.copy_(_numbers(lengths))
        self.cu_seqlens = self._starts[: n + 1]
        self.cu_seqlens.copy_(_numbers(starts))

    def _columns_of(self, sequences: Sequence[int]) -> int:
        """How many columns of the table a step writes: those of its longest sequence, or of one
        before, whose entries become -1. The table has room for far more."""
        longest = max((self.length(s) for s in sequences), default=0)
        self._columns = max(self._columns, -(-longest // self.page))
        return self._columns

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        pairs = torch.tensor(copies, device=self.device)
        sources, targets = pairs[:, 0], pairs[:, 1]
        every: list[Sequence[Optional[torch.Tensor]]] = [*self.pools, *self.scales]
        for tensors in every:
            for t in tensors:
                if t is not None:
                    view = t.view(torch.uint8) if t.element_size() == 1 else t
                    view[targets] = view[sources]

    def _layer(self, layer: int) -> int:
        n = len(self.pools[0])
        try:
            at = operator.index(layer)
        except TypeError:
            at = n
        if not -n <= at < n:
            raise IndexError(f"layer: got {brief(layer)}, expected 0 to {n - 1}")
        return at

    @out_of_graphs
    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The new keys of this step: [T, Hkv, D], sequence by sequence, or [B, Hkv, N, D] where
        each has N. More rows than the step's go nowhere: what a graph pads with."""
        layer = self._layer(layer)
        check_plain("key", key)
        if key.dim() not in (3, 4):
            raise ValueError(f"key: got {brief(key)}, expected [T, Hkv, D] or [B, Hkv, N, D]")
        each = key.shape[2] if key.dim() == 4 else 1
        counts = self._new_keys()
        wanted = sum(counts)
        if key.dim() == 4 and wanted and set(counts) - {each}:
            raise ValueError(
                f"key: got {each} keys of each sequence, expected those of the step: "
                f"{counts!s:.60}"
            )
        if key.shape[0] * each < wanted:
            raise ValueError(
                f"key: got {key.shape[0] * each} keys, expected the {wanted} of the step"
            )
        if not counts:  # a step of no sequences: all rows are more than its own
            return
        append_keys(
            key,
            value,
            self.pools[0][layer],
            self.pools[1][layer],
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            cu_seqlens=self.cu_seqlens,
            k_scale=self.scales[0][layer],
            v_scale=self.scales[1][layer],
        )

    @out_of_graphs
    def attend(
        self, layer: int, query: torch.Tensor, mask: Any = "causal()", **options: Any
    ) -> Any:
        """cached_attention over this layer: query [B, H, Q, D], or [T, H, D] with the rows of
        sequences as their new keys are; results of more rows than these hold anything."""
        layer = self._layer(layer)
        counts = self._new_keys()
        check_plain("query", query)
        table, lengths, starts = self.block_table, self.seq_lens, self.cu_seqlens
        if not counts and query.dim() == 3:  # a batch has a sequence: one of no rows
            table, lengths = self._table[:1], torch.zeros_like(self._lengths[:1])
            starts = torch.zeros_like(self._starts[:2])
        if query.dim() == 3:
            options.setdefault("cu_seqlens_q", starts)
            options.setdefault("max_seqlen_q", self.most_new)
        return cached_attention(
            query,
            self.pools[0][layer],
            self.pools[1][layer],
            mask,
            block_table=table,
            seq_lens=lengths,
            k_scale=self.scales[0][layer],
            v_scale=self.scales[1][layer],
            **options,
        )
