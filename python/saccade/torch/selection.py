"""Block masks whose blocks a model selects while it runs, as by a top-k over block scores."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch.autograd.graph import increment_version

from ..c import abi, objects
from .block_mask import (
    DEFAULT_BLOCK,
    BlockMask,
    BlockSize,
    MaskMod,
    block_pair,
    noop_mask,
    reachable,
)
from .calls import current_stream
from .checks import brief, count_of, device_of
from .graph_breaks import out_of_graphs
from .memory import check_memory, unwrapped
from .mods import Resolved, view


class BlockSelection(BlockMask):
    """A BlockMask over [Q, KV] that `select` gives its blocks: at first none.

        blocks = BlockSelection(B, H, Q, KV, kv_heads=Hkv, most=16)
        blocks.select(scores.topk(16).indices.int())      # [B, Hkv, rows, k], on q's device
        out = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)

    Each KV head has a list for each row of blocks of queries, which its group shares; B or
    kv_heads of 1 is one list for all. mask_mod says what is live inside the blocks (None: all).
    On CUDA the lists are made on the device, transposed ones for gradients too: nothing waits,
    nothing is allocated, and a CUDA graph can hold it once a call was made outside of one.
    Forward and backward of a call must see the same selection, else backward is an error: a
    layer needs a mask of its own where several layers have gradients. BLOCK_SIZE is on CUDA a
    multiple of the kernel's tiles, (128, 128) always is; where Q is no more than a block, any
    number of queries is one row.
    """

    def __init__(
        self,
        B: int,
        H: int,
        Q: int,
        KV: int,
        *,
        kv_heads: Optional[int] = None,
        most: int,
        BLOCK_SIZE: BlockSize = DEFAULT_BLOCK,
        mask_mod: Optional[MaskMod] = None,
        groups: Optional[int] = None,
        device: Any = "cpu",
    ) -> None:
        block = block_pair(BLOCK_SIZE)
        heads, most = kv_heads if kv_heads is not None else H, count_of("most", most, 1)
        options = abi.SelectionOptions(
            B=B,
            Hkv=groups if groups is not None else heads,
            block_q=block[0],
            block_kv=block[1],
            most=most,
        )
        sizes = (B, H, heads, Q, KV, 1, 1)
        found = None if mask_mod is None else Resolved(mask_mod, "mask", "cpu")
        bound, views = (found.bound, found.views) if found else (None, [])
        keep = found.tensors if found else None
        handle = objects.block_mask_selected(options, bound, views, sizes, keep)
        super().__init__(
            (Q, KV),
            BLOCK_SIZE=block,
            mask_mod=mask_mod or noop_mask,
            _handle=handle,
            _device=device_of(device),
            _lead=(B, 1 if options.Hkv == 1 else H),
        )
        with torch.inference_mode(False):
            handle.times = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._selected = handle
        self._last: Optional[torch.Tensor] = None
        self._made_by = (B, H, Q, KV), dict(
            kv_heads=kv_heads, most=most, BLOCK_SIZE=block, mask_mod=mask_mod, groups=groups
        )

    @out_of_graphs
    def select(self, blocks: torch.Tensor) -> None:
        """From now on these blocks: int32 [B, kv_heads, rows, up to `most`], where q lies.
        Entries that are no blocks, as -1, are none; one that comes twice is one. On CUDA the
        tensor is kept until the next call."""
        if not isinstance(blocks, torch.Tensor):
            raise TypeError(f"blocks: got {brief(blocks)}, expected an int32 tensor")
        blocks = unwrapped(blocks)
        check_memory("blocks", blocks)
        self._last = blocks
        increment_version(self._selected.times)  # which backward asks for
        self._parts.clear()  # what was made of the blocks selected before
        self._selected.again = self._apply if blocks.is_cuda else None
        if not blocks.is_cuda and self._selected.is_on_devices:
            self._stamp = object()  # calls that are kept are made anew, which prepares it again
        if not blocks.is_cuda or self._selected.is_prepared_on(blocks.get_device()):
            self._apply()

    @property
    def selections(self) -> int:
        return self._selected.times._version

    def first(self, B: int, H: int) -> BlockMask:
        raise ValueError(
            f"block_mask: got a selection of {self.shape[:2]} batches and heads, expected the "
            "query's"
        )

    def _apply(self) -> None:
        blocks = self._last
        assert blocks is not None
        stream = current_stream(blocks.get_device()) if blocks.is_cuda else None
        self._selected.select(view(blocks), stream, blocks.get_device())

    def __reduce__(self) -> Any:
        """Copies have the same blocks, and a selection of their own."""
        if self._handle is not self._selected:
            return super().__reduce__()
        last = None if self._last is None else self._last.cpu()
        return _again, (*self._made_by, str(self._device), last)

    def _lists(self, transposed: bool) -> Any:
        """FlexAttention's lists of what was selected on the host; once they are changed by
        hand, they are the mask's own."""
        if self._handle is self._selected:
            if self._last is not None and self._last.is_cuda:
                raise ValueError("got a selection on a GPU, whose lists are known there alone")
            self._forward = self._transpose = self._marks = None
        return super()._lists(transposed)


def _again(sizes, how, device, last):
    device = reachable(device)
    made = BlockSelection(*sizes, **how, device=device)
    if last is not None:
        made.select(last.to(device))
    return made
