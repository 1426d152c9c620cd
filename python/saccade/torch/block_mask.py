"""FlexAttention's BlockMask over the C block mask.

Made from a mod, a BlockMask holds the C object and shows index tensors only when asked; made
from index tensors, or changed by hand, it is imported again on its next use. Slices and crops
keep meaning what they meant: positions are mapped back before the mod sees them.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch.utils._pytree import GetAttrKey

from ..c import objects
from . import graph_masks
from .checks import count_of, device_of
from .index_lists import check_lists, columns_of, dense_of, marks_of, transposed_lists
from .mask_pictures import in_characters, in_html, live_of_runs
from .mask_objects import exported, imported, own_dimensions
from .mask_slices import (
    Range,
    are_ranges,
    moved,
    moved_by,
    noop_mask,
    picked,
    picks_of,
    queries_of,
    rows_of,
)
from .memory import MOVED, has_moved
from .mods import AnyMod, view

DEFAULT_BLOCK = 128
BlockSize = int | tuple[int, int]
MaskMod = Callable[..., Any] | str | AnyMod  # callable (b, h, q_idx, kv_idx) -> bool
_ORDERS = ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")
_MOST_PARTS = 16
_is_in_graph = torch.compiler.is_dynamo_compiling


def block_pair(block: BlockSize) -> tuple[int, int]:
    pair = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    if len(pair) != 2:
        raise ValueError(f"BLOCK_SIZE: got {block}, expected an int or two")
    if not _is_in_graph():
        return count_of("BLOCK_SIZE", pair[0], 1), count_of("BLOCK_SIZE", pair[1], 1)
    if min(pair) < 1:
        raise ValueError(f"BLOCK_SIZE: got {block}, expected 1 or more")
    return pair


@functools.lru_cache(maxsize=256)
def _mod_of(text: str) -> AnyMod:
    return AnyMod("mask", text, {})


def _index_tensor(transposed: bool, position: int) -> Any:
    """One of FlexAttention's attributes; setting it makes the index tensors what counts."""

    def get(self):
        return self._lists(transposed)[position]

    def set(self, value):
        lists = list(self._lists(transposed))
        lists[position] = value
        if transposed:  # forward never reads these
            self._transpose = tuple(lists)
        else:
            self._forward = tuple(lists)
            self._replaced()

    return property(get, set)


class BlockMask:
    """Which blocks of [Q, KV] are live, and the mod inside PARTIAL ones.

    kv_num_blocks [B, H, rows], kv_indices [B, H, rows, columns] list PARTIAL blocks of each
    block row, full_kv_* the FULL ones, q_* and full_q_* the transposes; int32, on `device`.
    Entries past the count are in order but mean nothing. B and H may be 1 (broadcast).
    dq_*: an order of sums that torch's FLASH back end needs to be deterministic; kept as given.
    """

    _TENSOR_ATTRS = [f"{full}{axis}_{what}" for axis in ("kv", "q") for full in ("", "full_")
                     for what in ("num_blocks", "indices")]  # fmt: skip
    _CONTEXT_ATTRS = ["seq_lengths", "BLOCK_SIZE", "mask_mod"]

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        full_kv_num_blocks: torch.Tensor | None = None,
        full_kv_indices: torch.Tensor | None = None,
        q_num_blocks: torch.Tensor | None = None,
        q_indices: torch.Tensor | None = None,
        full_q_num_blocks: torch.Tensor | None = None,
        full_q_indices: torch.Tensor | None = None,
        BLOCK_SIZE: BlockSize = DEFAULT_BLOCK,
        mask_mod: MaskMod | None = None,
        *,
        dq_write_order: torch.Tensor | None = None,
        dq_write_order_full: torch.Tensor | None = None,
        dq_kv_order: torch.Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
        _handle: Any = None,
        _device: torch.device | str = "cpu",
        _lead: tuple[int, ...] | None = None,
    ) -> None:
        if (kv_num_blocks is None) != (kv_indices is None):
            raise AssertionError("kv_num_blocks and kv_indices: got one, expected both")
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise AssertionError(
                "full_kv_num_blocks and full_kv_indices: got one, expected both"
            )
        if (full_q_num_blocks is None) != (full_q_indices is None):
            raise AssertionError("full_q_num_blocks and full_q_indices: got one, expected both")
        if kv_indices is not None and kv_indices.dim() < 2:
            raise RuntimeError(
                "kv_indices: got fewer than 2 dimensions, expected [.., rows, columns]"
            )
        if dq_write_order_full is not None and dq_write_order is None:
            raise ValueError("got dq_write_order_full alone, expected dq_write_order too")
        self.dq_write_order, self.dq_write_order_full = dq_write_order, dq_write_order_full
        self.dq_kv_order, self.dq_kv_order_spt = dq_kv_order, dq_kv_order_spt
        self._handle, self._device = _handle, torch.device(_device)
        self._seq_lengths = (seq_lengths[0], seq_lengths[1])
        # no `or`: graphs of PyTorch before 2.15 can't ask a function whether it is true
        self._mask_mod: Any = noop_mask if mask_mod is None else mask_mod
        self.BLOCK_SIZE = block_pair(BLOCK_SIZE)
        self._forward: Any = (
            None
            if kv_indices is None
            else (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        )
        self._transpose = (
            None
            if q_indices is None
            else (q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)
        )
        self._has_transpose = True
        self._check: Any = None  # of indices of what the mask captures, for a call's sizes
        self.is_anywhere = False  # nobody named a device: calls on any take it
        self._is_given = kv_indices is not None  # the index tensors are what counts
        self._dims = _lead
        self._number = 0
        self._stamp: Any = None
        self._marks: Any = None
        self._parts: dict[tuple[Any, ...], tuple[Any, BlockMask]] = {}
        self._part_of: graph_masks.Part | None = None  # of masks that a graph cuts
        if not _is_in_graph():
            self._number = graph_masks.enter(self)
            self._stamp = object()
            self._marks = marks_of(self._forward)

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: torch.Tensor | None = None,
        full_kv_indices: torch.Tensor | None = None,
        BLOCK_SIZE: BlockSize = DEFAULT_BLOCK,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: torch.Tensor | None = None,
        dq_write_order_full: torch.Tensor | None = None,
        dq_kv_order: torch.Tensor | bool | None = None,
    ) -> "BlockMask":
        """From index tensors. seq_lengths defaults to whole blocks; transposes are made when
        asked for, and are None without compute_q_blocks."""
        if kv_indices.dim() < 2:
            raise RuntimeError(
                "kv_indices: got fewer than 2 dimensions, expected [.., rows, columns]"
            )
        block = block_pair(BLOCK_SIZE)
        if seq_lengths is None:
            seq_lengths = (kv_indices.shape[-2] * block[0], kv_indices.shape[-1] * block[1])
        lists = kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices
        if not _is_in_graph():
            check_lists(lists, seq_lengths[1], block[1])
        made = cls(
            seq_lengths,
            *lists,
            BLOCK_SIZE=block,
            mask_mod=mask_mod,
            dq_write_order=dq_write_order,
            dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, torch.Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
            _device=kv_indices.device,
        )
        made._has_transpose = compute_q_blocks
        return made

    def _like(self, lengths, lists, device, mask_mod=None):
        """A mask of other index tensors."""
        return BlockMask(
            lengths,
            *lists,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=self._mask_mod if mask_mod is None else mask_mod,
            _device=device,
        )._after(self)

    def _after(self, other):
        """Itself, with what holds of the mask that it was made from: whether it has
        transposes, and whether its device was left to the default."""
        self._has_transpose, self.is_anywhere = other._has_transpose, other.is_anywhere
        return self

    # ---- in graphs of torch.compile ----

    @property
    def number(self) -> int:
        """What stands for this mask in a compiled graph."""
        if not self._number:
            self._leave_graph()
            self._number = graph_masks.enter(self)
        return self._number

    def after(self, steps: tuple[int, ...]) -> "BlockMask":
        """What a graph means by this mask and steps."""
        return self._part(steps, lambda: graph_masks.follow(self, steps))

    def index_shape(self) -> tuple[int, ...]:
        """Of kv_indices."""
        if self._part_of is not None:
            return self._part_of.shape
        if self._is_given:
            return tuple(self._forward[1].shape)
        sizes = [-(-n // b) for n, b in zip(self._seq_lengths, self.BLOCK_SIZE)]
        return (*self.dimensions(), *sizes)

    def _as_part(self, lengths, mask_mod, *part):
        made = BlockMask(
            lengths, BLOCK_SIZE=self.BLOCK_SIZE, mask_mod=mask_mod, _device=self._device
        )
        made._part_of = graph_masks.part_of(self, *part)
        return made._after(self)

    def _leave_graph(self):
        """Becomes the mask that a graph described."""
        if self._part_of is not None:
            made = self._part_of.of.after(self._part_of.steps)
            self.__dict__.update({**made.__dict__, "_number": self._number, "_parts": {}})

    # ---- the C object ----

    @property
    def selections(self) -> int:
        """How often its blocks were selected."""
        return 0

    def dimensions(self) -> tuple[int, int]:
        """Batches and heads; 1 where the index tensors have no such dimension."""
        if self._dims is None:
            if self._forward is not None:
                lead = tuple(self._forward[1].shape[:-2])
                self._dims = (1,) * (2 - len(lead)) + lead
            else:
                self._dims = self.own_dimensions()
        B, H = self._dims
        return B, H

    def own_dimensions(self) -> tuple[int, int]:
        """Of how many batches and heads the blocks differ."""
        return own_dimensions(self.handle())

    def _part(self, key, make):
        """A mask made from this one, until this one changes."""
        found = self._parts.get(key)
        if found is None or found[0] is not self.version:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            found = self._parts[key] = self.version, make()
        return found[1]

    def first(self, B: int, H: int) -> "BlockMask":
        """The first B batches and H heads."""
        lead = (slice(B), slice(H))[4 - self._lists(False)[1].dim() :]
        return self._part((B, H), lambda: self[lead])

    @property
    def version(self):
        """Another object whenever the mask is changed by hand, its tensors included."""
        if self._stamp is None:  # a graph made it, or changed it
            self._leave_graph()
            self._stamp, self._marks = object(), marks_of(self._forward)
        if self._marks is not None and self._marks != marks_of(self._forward):
            self._replaced()
        if not _is_in_graph() and self._handle is not None and self._handle.tensors:
            self._follow(self._handle)
        return self._stamp

    def _follow(self, handle):
        """What the mask captures may have moved: by share_memory_, as processes do that are
        given a module, or by resize_."""
        if not has_moved(handle.tensors, handle.views):
            return
        made = None
        if not self._is_given:
            made = handle.moved([view(t) for t in handle.tensors])
            if made is None:
                raise RuntimeError(MOVED)
        self._handle, self._stamp = made, object()
        self._parts.clear()

    def _replaced(self):
        """The index tensors are now what counts."""
        self._handle, self._transpose, self._dims = None, None, None
        self._is_given, self._part_of = True, None
        if _is_in_graph():
            self._number, self._stamp, self._marks = 0, None, None
        else:
            self._stamp, self._marks = object(), marks_of(self._forward)

    def handle(self) -> objects.BlockMaskHandle:
        """The C block mask, imported from the index tensors where they came first."""
        self.version
        if self._handle is None:
            self._handle = imported(
                self._forward, self.BLOCK_SIZE, self._seq_lengths, self._mask_mod
            )
        return self._handle

    def proven_for(self, B: int, H: int, Hkv: int, D: int, Dv: int) -> "BlockMask":
        """The mask for a call of these sizes: itself, but where it was proven without some that
        its text reads; b and h count as B and H."""
        self.version
        if self._is_given or self.handle().holds_for(B, H, Hkv, D, Dv):
            return self
        sizes = int(B), int(H), int(Hkv), int(D), int(Dv)
        return self._part(sizes, lambda: self._proven_for(sizes))

    def lacks_sizes(self) -> bool:
        """Whether it was proven for one batch or head and reads which or how many there are."""
        self.version
        if self._is_given:
            return False
        B, H = self.handle().lead
        # how many there are beside one: no call has none
        return not self.handle().holds_for(2 if B == 1 else B, 2 if H == 1 else H, *[0] * 3)

    def _proven_for(self, sizes):
        if self._check is not None:
            B, H, Hkv, D, Dv = sizes
            self._check((B, H, Hkv, *self._seq_lengths, D, Dv))
        return BlockMask(
            self._seq_lengths,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=self._mask_mod,
            _handle=self.handle().proven_for(*sizes),
            _device=self._device,
            _lead=sizes[:2],
        )._after(self)

    def told(self) -> list[Any]:
        """What tells it from another: lengths, text and captured values, index tensors that
        were given, how many blocks are what."""
        made = self.handle()
        stats = made.stats()
        parts: list[Any] = [self._seq_lengths, self.BLOCK_SIZE]
        parts += [stats.blocks, stats.full, stats.partial]
        parts += [made.mod.text, *(made.tensors or ())] if made.mod is not None else []
        if self._is_given:
            parts += [t for t in self._forward if t is not None]
        return parts

    def _lists(self, transposed):
        if _is_in_graph():
            return graph_masks.lists_of(self, transposed)
        self.version
        if transposed:
            if self._transpose is None and self._has_transpose:
                lists, KV, block = self._lists(False), self._seq_lengths[1], self.BLOCK_SIZE[1]
                with torch._C._DisableFuncTorch():  # they stay when a transform is over
                    self._transpose = transposed_lists(lists, KV, block)
            return self._transpose or (None,) * 4
        if self._forward is None:
            made, device = self.handle(), self._device
            with torch._C._DisableFuncTorch():
                self._forward = exported(made, self._seq_lengths, self._dims, device)
            self._marks = marks_of(self._forward)
        return self._forward

    # ---- FlexAttention's attributes ----

    if torch.__version__ < "2.15":

        def __setattr__(self, name: str, value: Any) -> None:
            """By the property's own function: graphs don't call it, and the mask would stay
            what it was."""
            found = type(self).__dict__.get(name)
            if isinstance(found, property) and found.fset is not None:
                found.fset(self, value)
            else:
                object.__setattr__(self, name, value)

    kv_num_blocks = _index_tensor(False, 0)
    kv_indices = _index_tensor(False, 1)
    full_kv_num_blocks = _index_tensor(False, 2)
    full_kv_indices = _index_tensor(False, 3)
    q_num_blocks = _index_tensor(True, 0)
    q_indices = _index_tensor(True, 1)
    full_q_num_blocks = _index_tensor(True, 2)
    full_q_indices = _index_tensor(True, 3)
    device: Any = property(lambda self: self._device)

    @property
    def mask_mod(self) -> Any:
        """What it was made from; a string as a mod that can be called inside of others."""
        if isinstance(self._mask_mod, str) and not _is_in_graph():
            return _mod_of(self._mask_mod)
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, value: MaskMod | None) -> None:
        self._forward = self._lists(False)
        self._mask_mod = noop_mask if value is None else value
        self._replaced()

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return self._seq_lengths

    @seq_lengths.setter
    def seq_lengths(self, value: tuple[int, int]) -> None:
        self._forward = self._lists(False)
        self._seq_lengths = (value[0], value[1])
        self._replaced()

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q, KV)."""
        return (*self.index_shape()[:-2], *self._seq_lengths)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def contiguous(self) -> "BlockMask":
        """Itself: what takes masks for tensors asks for this."""
        return self

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """What the installed torch has in this place, in its order."""
        from torch.nn.attention.flex_attention import BlockMask as theirs

        block = self.BLOCK_SIZE if flatten else (self.BLOCK_SIZE,)
        lengths = self._seq_lengths if flatten else (self._seq_lengths,)
        orders = (getattr(self, name) for name in _ORDERS if name in theirs.__annotations__)
        lists = (*self._lists(False), *self._lists(True), *orders)
        return (*lengths, *lists, *block, self._mask_mod)

    def numel(self) -> int:
        """Positions: B * H * Q * KV."""
        return int(torch.Size(self.shape).numel())

    def sparsity(self) -> float:
        """Percentage of blocks that are not computed."""
        if _is_in_graph():
            live = self.to_dense()
            return 100 - 100 * live.sum().item() / live.numel()
        return 100 * self.handle().stats().sparsity

    def to(self, device: torch.device | str) -> "BlockMask":
        """The same mask with its index tensors on another device."""
        if _is_in_graph():
            lists = [t if t is None else t.to(device) for t in self._lists(False)]
            return self._like(self._seq_lengths, lists, device)
        self.version
        device = device_of(device)
        made = BlockMask(
            self._seq_lengths,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=self._mask_mod,
            _handle=self._handle,
            _device=device,
            _lead=self._dims,
        )
        for name in ("_forward", "_transpose"):
            lists = getattr(self, name)
            setattr(
                made, name, lists and tuple(t if t is None else t.to(device) for t in lists)
            )
        made._is_given, made._marks = self._is_given, marks_of(made._forward)
        made._after(self).is_anywhere = False
        return made

    def to_dense(self) -> torch.Tensor:
        """[B, H, rows, columns] int32, 1 for PARTIAL and FULL blocks."""
        num, idx, fnum, fidx = self._lists(False)
        columns = columns_of(self._seq_lengths[1], self.BLOCK_SIZE[1], idx, fidx)
        dense = dense_of(num, idx, columns)
        return dense if fnum is None else (dense | dense_of(fnum, fidx, columns))

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Picture in characters of up to `limit` (b, h), of about grid_size (rows, columns)
        cells; -1: a cell for each block. Full cells are live, light ones partly so."""
        if _is_in_graph():
            dense = self.to_dense()
            live = lambda place, rows: dense[place][rows.start : rows.stop].sum(0)  # noqa: E731
            return in_characters(live, dense.shape, grid_size, limit)
        shape = self.index_shape()
        return in_characters(live_of_runs(self.handle(), shape[-1]), shape, grid_size, limit)

    def __str__(self) -> str:
        if _is_in_graph():  # whose blocks have no values yet
            return repr(self)
        return (
            f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n"
            + self.to_string().strip()
            + "\n)"
        )

    def __repr__(self) -> str:
        if _is_in_graph():
            return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE})"
        self.version
        B, H = self.dimensions()
        R, Cs = (-(-n // b) for n, b in zip(self._seq_lengths, self.BLOCK_SIZE))
        named = getattr(self._mask_mod, "__name__", self._mask_mod)
        return (
            f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, "
            f"kv_num_blocks=[{B}, {H}, {R}], kv_indices=[{B}, {H}, {R}, {Cs}], "
            f"sparsity={self.sparsity():.2f}%, mask_mod={named}, device={self._device})"
        )

    def _repr_html_(self) -> str:
        """The picture of the first batch and head, for notebooks."""
        return in_html(self)

    # ---- slices and crops ----

    def _adjust(self, new_q_len: int, new_kv_len: int) -> "BlockMask":
        """The upper-left [new_q_len, new_kv_len] of this mask; longer lengths grow it."""
        lengths = new_q_len, new_kv_len
        if _is_in_graph() and graph_masks.has_number(self):
            shape = graph_masks.cropped_shape(self, lengths)
            return self._as_part(lengths, self._mask_mod, (0, *lengths), shape, 4)
        if _is_in_graph():
            return self._like(lengths, graph_masks.cropped(self, lengths), self._device)
        return BlockMask(
            lengths,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=self._mask_mod,
            _handle=self.handle().window(0, new_q_len, 0, new_kv_len),
            _device=self._device,
            _lead=self.dimensions(),
        )._after(self)

    def __getitem__(self, index: Any) -> "BlockMask":
        """Picks batches, heads and rows of blocks; the mod goes on seeing original positions.
        Of four indices, as a dense mask is cut for fewer queries, the third is a slice of
        queries, and the others are whole."""
        if isinstance(index, tuple) and len(index) == 4:
            return self._queries(*queries_of(index, self._seq_lengths[0]))
        shape = self.index_shape()
        picks, block = picks_of(index, shape[:-1]), self.BLOCK_SIZE[0]
        lengths = rows_of(picks[-1], self._seq_lengths[0], block), self._seq_lengths[1]
        mod = moved(self._mask_mod, picks, shape, block)
        if _is_in_graph():
            if are_ranges(picks) and graph_masks.has_number(self):
                shape = (*[p.count for p in picks], shape[-1])
                n = graph_masks.how_many(self)
                return self._as_part(lengths, mod, graph_masks.slices(picks), shape, n)
        elif self.lacks_sizes():  # which its lists lack too
            counts = (p.count if isinstance(p, Range) else len(p) for p in picks)
            lead = tuple(1 if n == 1 else c for n, c in zip(self.handle().lead, counts))
            return _anew(mod, lengths, lead, self.BLOCK_SIZE, self._device)._after(self)
        lists = self._lists(False)
        return self._like(lengths, [picked(t, picks) for t in lists], self._device, mod)

    def _queries(self, first: int, count: int) -> "BlockMask":
        """So many queries from this one on."""
        Q, KV = self._seq_lengths
        if first == 0 and count == Q:
            return self
        mod, lengths = moved_by(self._mask_mod, first, count), (count, KV)
        if _is_in_graph() and graph_masks.has_number(self):
            *lead, _, columns = self.index_shape()
            shape = (*lead, -(-count // self.BLOCK_SIZE[0]), columns)
            return self._as_part(lengths, mod, (4, first, count), shape, 4)
        if _is_in_graph() or not self.handle().is_proven:
            raise ValueError(
                "got queries of a mask that lists of blocks say, expected a mask as "
                "create_block_mask makes it, or rows of blocks: mask[:, :, rows]"
            )
        made = _anew(mod, lengths, self.handle().lead, self.BLOCK_SIZE, self._device)
        return made._after(self)

    # ---- torch's trees ----

    def _flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(index tensors, what else there is), for torch.utils._pytree."""
        with_keys, context = self._flatten_with_keys()
        return tuple(t for _, t in with_keys), context

    def _flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        found = [(name, getattr(self, name)) for name in self._TENSOR_ATTRS]
        absent = tuple(name for name, t in found if t is None)
        leaves = tuple((GetAttrKey(name), t) for name, t in found if t is not None)
        return leaves, (*(getattr(self, name) for name in self._CONTEXT_ATTRS), absent)

    @classmethod
    def _unflatten(cls, leaves: Any, context: tuple[Any, ...]) -> "BlockMask":
        *values, absent = context
        names = [name for name in cls._TENSOR_ATTRS if name not in absent]
        made = cls(**dict(zip(cls._CONTEXT_ATTRS, values)), **dict(zip(names, leaves)))
        made._has_transpose = "q_indices" not in absent
        if made._forward is not None and isinstance(made._forward[1], torch.Tensor):
            made._device = made._forward[1].device
        return made

    def __reduce__(self):
        if self.lacks_sizes():
            lead, device = self.handle().lead, str(self._device)
            return _anew, (self._mask_mod, self._seq_lengths, lead, self.BLOCK_SIZE, device)
        lists = tuple(None if t is None else t.cpu() for t in self._lists(False))
        return (
            _unpickle,
            (self._seq_lengths, lists, self.BLOCK_SIZE, self._mask_mod, str(self._device)),
        )


def reachable(device: str) -> str:
    """The device of what is read where there may be no GPU."""
    is_gpu = torch.device(device).type == "cuda"
    return "cpu" if is_gpu and not torch.cuda.is_available() else device


def _anew(mask_mod, lengths, lead, block, device):
    """A mask proven once more, of one that index tensors do not say all of."""
    from .masks import create_block_mask  # which is made of this

    return create_block_mask(mask_mod, *lead, *lengths, reachable(str(device)), block)


def _unpickle(lengths, lists, block, mask_mod, device):
    device = reachable(device)
    return BlockMask(
        lengths,
        *(None if t is None else t.to(device) for t in lists),
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        _device=device,
    )
