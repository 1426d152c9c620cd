"""FlexAttention's BlockMask over the C block mask.

Made from a mod, a BlockMask holds the C object and shows index tensors only when asked; made
from index tensors, or changed by hand, it is imported again on its next use. Slices and crops
keep meaning what they meant: positions are mapped back before the mod sees them.
"""

from __future__ import annotations

import ctypes as C
import itertools
import math
import weakref
from typing import Any, Callable

import torch
from torch.utils._pytree import GetAttrKey

from ..c import abi, objects
from .index_lists import dense_of, ordered
from .mods import AnyMod, Resolved, captured

DEFAULT_BLOCK = 128
BlockSize = int | tuple[int, int]
MaskMod = Callable[..., Any] | str | AnyMod  # callable (b, h, q_idx, kv_idx) -> bool
_ORDERS = ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")
_MOST_PARTS = 16
_numbers = itertools.count(1)
numbered: "weakref.WeakValueDictionary[int, BlockMask]" = weakref.WeakValueDictionary()


def block_pair(block: BlockSize) -> tuple[int, int]:
    pair = (block, block) if isinstance(block, int) else (block[0], block[1])
    if min(pair) < 1:
        raise ValueError(f"BLOCK_SIZE: got {block}, expected 1 or more")
    return pair


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Every position is live."""
    return b.new_ones(size=(), dtype=torch.bool) if hasattr(b, "new_ones") else True


def marks_of(lists):
    """Tells index tensors changed in place from unchanged ones."""
    if lists is None:
        return None
    return tuple(0 if t is None or t.is_inference() else t._version for t in lists)


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


def _mapped(num, idx):
    """Lists without their -1, PyTorch's PagedAttention's word for a page that no key has."""
    counted = torch.arange(idx.shape[-1]) < num.unsqueeze(-1)
    if not bool((counted & (idx == -1)).any()):
        return num, idx
    kept = counted & (idx != -1)
    order = torch.argsort((~kept).to(torch.int8), dim=-1, stable=True)
    return kept.sum(-1, dtype=torch.int32), idx.gather(-1, order)


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
        self._mask_mod: Any = mask_mod or noop_mask
        self.BLOCK_SIZE = block_pair(BLOCK_SIZE)
        self._forward = (
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
        self._dims = _lead
        self.number = next(_numbers)  # what stands for this mask in a compiled graph
        numbered[self.number] = self
        self._stamp = object()
        self._marks = marks_of(self._forward)
        self._parts: dict[tuple[Any, ...], tuple[Any, BlockMask]] = {}

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
        made = cls(
            seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
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

    def _after(self, other):
        """Itself, without transposes if the mask that it was made from has none."""
        self._has_transpose = other._has_transpose
        return self

    # ---- the C object ----

    def _dimensions(self):
        if self._dims is None:
            if self._forward is not None:
                lead = tuple(self._forward[1].shape[:-2])
                self._dims = (1,) * (2 - len(lead)) + lead
            else:
                self._dims = self.own_dimensions()
        return self._dims

    def own_dimensions(self) -> tuple[int, int]:
        """Of how many batches and heads the blocks differ."""
        i = abi.BlockIndices()
        abi.call("block_mask_export", self.handle().handle, 0, C.byref(i))
        return i.B, i.H

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

    def adjusted(self, Q: int, KV: int) -> "BlockMask":
        return self._part(("lengths", Q, KV), lambda: self._adjust(Q, KV))

    @property
    def version(self):
        """Another object whenever the mask is changed by hand, its tensors included."""
        if self._marks is not None and self._marks != marks_of(self._forward):
            self._replaced()
        return self._stamp

    def _replaced(self):
        """The index tensors are now what counts."""
        self._marks = marks_of(self._forward)
        self._handle, self._transpose, self._dims = None, None, None
        self._stamp = object()

    def handle(self) -> objects.BlockMaskHandle:
        """The C block mask, imported from the index tensors where they came first."""
        self.version
        if self._handle is None:
            self._handle = self._import()
        return self._handle

    def _import(self):
        num, idx, fnum, fidx = [
            None if t is None else t.to("cpu", torch.int32).contiguous() for t in self._forward
        ]
        num, idx = _mapped(num, idx)
        if fidx is not None:
            fnum, fidx = _mapped(fnum, fidx)
        columns = self._columns(idx, fidx)
        num, idx = num.expand(idx.shape[:-1]).contiguous(), _widened(idx, columns)
        fidx = None if fidx is None else _widened(fidx, columns)
        lead = (1,) * (4 - idx.dim()) + tuple(idx.shape)
        i = abi.BlockIndices(
            *lead,
            *self.BLOCK_SIZE,
            num.data_ptr(),
            idx.data_ptr(),
            fnum.data_ptr() if fnum is not None else None,
            fidx.data_ptr() if fidx is not None else None,
        )
        sizes = (lead[0], lead[1], lead[1], *self._seq_lengths, 1, 1)
        if self._mask_mod is noop_mask:
            return objects.block_mask_import(i, None, [], sizes, None)
        found = Resolved(self._mask_mod, "mask", "cpu")
        return objects.block_mask_import(i, found.bound, found.views, sizes, found.tensors)

    def _exported(self):
        """Dense PARTIAL and FULL of blocks, as the C mask has them."""
        i = abi.BlockIndices()
        h = self.handle().handle
        abi.call("block_mask_export", h, 0, C.byref(i))
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
        abi.call("block_mask_export", h, 0, C.byref(i))
        return dense_of(*made[:2], i.columns), dense_of(*made[2:], i.columns)

    def _export(self):
        """FlexAttention's lists. It calls no block FULL that reaches beyond the lengths."""
        partial, full = self._exported()
        over = torch.zeros_like(full)
        if self._seq_lengths[0] % self.BLOCK_SIZE[0]:
            over[..., -1, :] = 1
        if self._seq_lengths[1] % self.BLOCK_SIZE[1]:
            over[..., -1] = 1
        lists = ordered(partial | (full & over)) + ordered(full & (1 - over))
        lead = self._dims or full.shape[:2]  # one list serves all if the mod names no b or h
        return tuple(t.to(self._device).expand(*lead, *t.shape[2:]).contiguous() for t in lists)

    def _transposed(self):
        num, idx, fnum, fidx = self._lists(False)
        columns, wide = -(-self._seq_lengths[1] // self.BLOCK_SIZE[1]), self._columns(idx, fidx)
        made = ordered(dense_of(num, idx, wide)[..., :columns].mT)
        if fnum is None:
            return (*made, None, None)
        return made + ordered(dense_of(fnum, fidx, wide)[..., :columns].mT)

    def _columns(self, *indices):
        """Columns of blocks; lists may be cut to those that are used."""
        widths = [t.shape[-1] for t in indices if t is not None]
        return max(-(-self._seq_lengths[1] // self.BLOCK_SIZE[1]), *widths)

    def _lists(self, transposed):
        if transposed:
            if self._transpose is None:
                self._transpose = self._transposed() if self._has_transpose else (None,) * 4
            return self._transpose
        if self._forward is None:
            self._forward = self._export()
            self._marks = marks_of(self._forward)
        return self._forward

    # ---- FlexAttention's attributes ----

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
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, value: MaskMod | None) -> None:
        self._lists(False)
        self._mask_mod = value or noop_mask
        self._replaced()

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return self._seq_lengths

    @seq_lengths.setter
    def seq_lengths(self, value: tuple[int, int]) -> None:
        self._lists(False)
        self._seq_lengths = (value[0], value[1])
        self._replaced()

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q, KV)."""
        if self._forward is not None:
            return (*self._forward[1].shape[:-2], *self._seq_lengths)
        return (*self._dimensions(), *self._seq_lengths)

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
        return 100 * self.handle().stats().sparsity

    def to(self, device: torch.device | str) -> "BlockMask":
        """The same mask with its index tensors on another device."""
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
        made._marks = marks_of(made._forward)
        return made._after(self)

    def to_dense(self) -> torch.Tensor:
        """[B, H, rows, columns] int32, 1 for PARTIAL and FULL blocks."""
        num, idx, fnum, fidx = self._lists(False)
        columns = self._columns(idx, fidx)
        dense = dense_of(num, idx, columns)
        return dense if fnum is None else (dense | dense_of(fnum, fidx, columns))

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Picture in characters of up to `limit` (b, h), of about grid_size (rows, columns)
        cells; -1: a cell for each block. Full cells are live, light ones partly so."""
        dense = self.to_dense()
        lead, (rows, columns) = dense.shape[:-2], dense.shape[-2:]
        wanted = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        down, along = (
            1 if n == -1 else max(1, -(-size // n)) for n, size in zip(wanted, (rows, columns))
        )
        parts: list[str] = []
        for place in itertools.product(*map(range, lead)):
            if len(parts) == limit:
                more = math.prod(lead) - limit
                parts.append(f"... {more} more: to_string(limit=...) or mask[batch, head]")
                break
            text = "".join(
                "".join(2 * _cell(dense[place][r : r + down, c : c + along]) for c in cs) + "\n"
                for cs in [range(0, columns, along)]
                for r in range(0, rows, down)
            )
            parts.append(f"{tuple(place)}\n{text}")
        return "\n".join(parts)

    def __str__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n"
            + self.to_string().strip()
            + "\n)"
        )

    def __repr__(self) -> str:
        B, H = self._dimensions()
        R, Cs = (-(-n // b) for n, b in zip(self._seq_lengths, self.BLOCK_SIZE))
        named = getattr(self._mask_mod, "__name__", self._mask_mod)
        return (
            f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, "
            f"kv_num_blocks=[{B}, {H}, {R}], kv_indices=[{B}, {H}, {R}, {Cs}], "
            f"sparsity={self.sparsity():.2f}%, mask_mod={named}, device={self._device})"
        )

    def _repr_html_(self) -> str:
        """The picture of the first batch and head, for notebooks."""
        picture = self.handle().render(0, 0, abi.SVG, 0).decode()
        return (
            f"<div>BlockMask {tuple(self.shape)}, {self.sparsity():.1f} % of blocks not "
            f'computed</div><div style="width:20em">{picture[picture.index("<svg") :]}</div>'
        )

    # ---- slices and crops ----

    def _adjust(self, new_q_len: int, new_kv_len: int) -> "BlockMask":
        """The upper-left [new_q_len, new_kv_len] of this mask; longer lengths grow it."""
        if torch.compiler.is_dynamo_compiling():
            return Adjusted(self, (new_q_len, new_kv_len))
        return BlockMask(
            (new_q_len, new_kv_len),
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=self._mask_mod,
            _handle=self.handle().window(0, new_q_len, 0, new_kv_len),
            _device=self._device,
            _lead=self._dimensions(),
        )._after(self)

    def __getitem__(self, index: Any) -> "BlockMask":
        """Picks batches, heads and rows of blocks; the mod goes on seeing original
        positions."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 3:
            raise IndexError(f"got {len(index)} indices, expected at most 3: batch, head, row")
        num, idx, fnum, fidx = self._lists(False)
        maps = [torch.arange(n, device="cpu") for n in idx.shape[:-1]]
        exact = True
        for axis, x in enumerate(index):
            x = slice(None) if x is Ellipsis else x
            if isinstance(x, int):
                n = idx.shape[axis]
                if not -n <= x < n:
                    raise IndexError(
                        f"got index {x} in dimension {axis}, expected {-n} to {n - 1}"
                    )
                x = slice(x % n, x % n + 1)
            exact &= axis < 2 or isinstance(x, slice)
            maps[axis] = maps[axis][x.cpu() if isinstance(x, torch.Tensor) else x]

        def pick(t):
            for axis, m in enumerate(maps):
                t = t if t is None else t.index_select(axis, m.to(t.device))
            return t

        rows, block = maps[-1], self.BLOCK_SIZE[0]
        Q = len(rows) * block
        if exact:  # a slice ends where the mask does; rows picked by a tensor are whole blocks
            Q = sum(min(block, self._seq_lengths[0] - int(r) * block) for r in rows)
        return BlockMask(
            (Q, self._seq_lengths[1]),
            pick(num),
            pick(idx),
            pick(fnum),
            pick(fidx),
            BLOCK_SIZE=self.BLOCK_SIZE,
            _device=self._device,
            mask_mod=self._moved(maps, idx.shape),
        )._after(self)

    def _moved(self, maps, shape):
        # The first few see their own positions; a single one may serve any batch or head.
        moves = [
            None
            if m.tolist() == list(range(len(m))) and (len(m) > 1 or n == 1)
            else m.to(torch.int32)
            for m, n in zip(maps, shape)
        ]
        moves = [None] * (3 - len(moves)) + moves
        if all(m is None for m in moves):
            return self._mask_mod
        inner, block = captured.callable_of(self._mask_mod), self.BLOCK_SIZE[0]
        b_map, h_map, rows = moves

        def moved(b, h, q_idx, kv_idx):
            b = b if b_map is None else b_map[b]
            h = h if h_map is None else h_map[h]
            q = q_idx if rows is None else rows[q_idx // block] * block + q_idx % block
            return inner(b, h, q, kv_idx)

        return moved

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
        lists = tuple(None if t is None else t.cpu() for t in self._lists(False))
        return (
            _unpickle,
            (self._seq_lengths, lists, self.BLOCK_SIZE, self._mask_mod, str(self._device)),
        )


class Adjusted(BlockMask):
    """What a graph of torch.compile adjusts a BlockMask to; outside of it, that mask."""

    def __init__(self, of, lengths):
        self.of, self.lengths = of, lengths

    def __getattr__(self, name):  # there is none before it is asked for outside
        if "lengths" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"BlockMask has no attribute {name!r}")
        _adjust_now(self)
        return getattr(self, name)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        if "lengths" in self.__dict__:
            _adjust_now(self)
        return super()._adjust(new_q_len, new_kv_len)


@torch.compiler.disable
def _adjust_now(mask):
    lengths = mask.__dict__.pop("lengths")
    mask.__dict__.update(mask.__dict__.pop("of")._adjust(*lengths).__dict__)
    numbered[mask.number] = mask


def _unpickle(lengths, lists, block, mask_mod, device):
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        device = "cpu"
    return BlockMask(
        lengths,
        *(None if t is None else t.to(device) for t in lists),
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        _device=device,
    )


def _widened(idx, columns):
    return torch.nn.functional.pad(idx, (0, columns - idx.shape[-1]))


def _cell(part) -> str:
    live = float(part.float().mean())
    return "█" if live == 1 else " " if live == 0 else "░"
