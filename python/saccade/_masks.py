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

from . import _core, _lib
from ._mods import AnyMod, Resolved, captured

_DEFAULT = 128
_Block = int | tuple[int, int]
_Mod = Callable[..., Any] | str | AnyMod  # callable (b, h, q_idx, kv_idx) -> bool
_numbers = itertools.count(1)
numbered: "weakref.WeakValueDictionary[int, BlockMask]" = weakref.WeakValueDictionary()


def _pair(block: _Block) -> tuple[int, int]:
    return (block, block) if isinstance(block, int) else (block[0], block[1])


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Every position is live."""
    return True


def and_masks(*mask_mods: _Mod) -> Callable[..., Any]:
    """One mask that is live where all are; of none, everywhere."""
    return _combine(mask_mods, lambda x, y: x & y, True)


def or_masks(*mask_mods: _Mod) -> Callable[..., Any]:
    """One mask that is live where any is; of none, nowhere."""
    return _combine(mask_mods, lambda x, y: x | y, False)


def _combine(mods, join, empty):
    for m in mods:
        if not callable(m) and not isinstance(m, (str, AnyMod)):
            raise RuntimeError(
                f"got a {type(m).__name__} as a mask, expected a callable or text"
            )
    callables = tuple(captured.callable_of(m) for m in mods)

    def combined(b, h, q_idx, kv_idx):
        result = empty
        for i, m in enumerate(callables):
            value = m(b, h, q_idx, kv_idx)
            result = value if i == 0 else join(result, value)
        return result

    return combined


def _marks(lists):
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


class BlockMask:
    """Which blocks of [Q, KV] are live, and the mod inside PARTIAL ones.

    kv_num_blocks [B, H, rows], kv_indices [B, H, rows, columns] list PARTIAL blocks of each
    block row, full_kv_* the FULL ones, q_* and full_q_* the transposes; int32, on `device`.
    Entries past the count are in order but mean nothing. B and H may be 1 (broadcast).
    """

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
        BLOCK_SIZE: _Block = _DEFAULT,
        mask_mod: _Mod | None = None,
        *,
        _handle: Any = None,
        _device: torch.device | str = "cpu",
    ) -> None:
        if (kv_num_blocks is None) != (kv_indices is None):
            raise AssertionError("kv_num_blocks and kv_indices: got one, expected both")
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise AssertionError(
                "full_kv_num_blocks and full_kv_indices: got one, expected both"
            )
        if kv_indices is not None and kv_indices.dim() < 2:
            raise RuntimeError(
                "kv_indices: got fewer than 2 dimensions, expected [.., rows, " "columns]"
            )
        self._handle, self._device = _handle, torch.device(_device)
        self._seq_lengths = (seq_lengths[0], seq_lengths[1])
        self._mask_mod: Any = mask_mod or noop_mask
        self.BLOCK_SIZE = _pair(BLOCK_SIZE)
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
        self._dims: tuple[int, ...] | None = None
        self.number = next(_numbers)  # what stands for this mask in a compiled graph
        numbered[self.number] = self
        self._stamp = object()
        self._marks = _marks(self._forward)

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: torch.Tensor | None = None,
        full_kv_indices: torch.Tensor | None = None,
        BLOCK_SIZE: _Block = _DEFAULT,
        mask_mod: _Mod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
    ) -> "BlockMask":
        """From index tensors. seq_lengths defaults to whole blocks; transposes are made when
        asked for (compute_q_blocks is accepted for compatibility)."""
        if kv_indices.dim() < 2:
            raise RuntimeError(
                "kv_indices: got fewer than 2 dimensions, expected [.., rows, " "columns]"
            )
        block = _pair(BLOCK_SIZE)
        if seq_lengths is None:
            seq_lengths = (kv_indices.shape[-2] * block[0], kv_indices.shape[-1] * block[1])
        return cls(
            seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            BLOCK_SIZE=block,
            mask_mod=mask_mod,
            _device=kv_indices.device,
        )

    # ---- the C object ----

    def _dimensions(self):
        if self._dims is None:
            if self._forward is not None:
                lead = tuple(self._forward[1].shape[:-2])
                self._dims = (1,) * (2 - len(lead)) + lead
            else:
                i = _lib.BlockIndices()
                _lib.call("block_mask_export", self.handle().handle, 0, C.byref(i))
                self._dims = (i.B, i.H)
        return self._dims

    @property
    def version(self):
        """Another object whenever the mask is changed by hand, its tensors included."""
        if self._marks is not None and self._marks != _marks(self._forward):
            self._replaced()
        return self._stamp

    def _replaced(self):
        """The index tensors are now what counts."""
        self._marks = _marks(self._forward)
        self._handle, self._transpose, self._dims = None, None, None
        self._stamp = object()

    def handle(self) -> _core.BlockMaskHandle:
        """The C block mask, imported from the index tensors where they came first."""
        self.version
        if self._handle is None:
            self._handle = self._import()
        return self._handle

    def _import(self):
        num, idx, fnum, fidx = [
            None if t is None else t.to("cpu", torch.int32).contiguous() for t in self._forward
        ]
        num, idx = num.expand(idx.shape[:-1]).contiguous(), idx
        lead = (1,) * (4 - idx.dim()) + tuple(idx.shape)
        i = _lib.BlockIndices(
            *lead,
            *self.BLOCK_SIZE,
            num.data_ptr(),
            idx.data_ptr(),
            fnum.data_ptr() if fnum is not None else None,
            fidx.data_ptr() if fidx is not None else None,
        )
        sizes = (lead[0], lead[1], lead[1], *self._seq_lengths, 1, 1)
        if self._mask_mod is noop_mask:
            return _core.block_mask_import(i, None, [], sizes, None)
        found = Resolved(self._mask_mod, "mask", "cpu")
        return _core.block_mask_import(i, found.bound, found.views, sizes, found.tensors)

    def _exported(self):
        """Dense PARTIAL and FULL of blocks, as the C mask has them."""
        i = _lib.BlockIndices()
        h = self.handle().handle
        _lib.call("block_mask_export", h, 0, C.byref(i))
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
        _lib.call("block_mask_export", h, 0, C.byref(i))
        return _dense(*made[:2]), _dense(*made[2:])

    def _export(self):
        """FlexAttention's lists. It calls no block FULL that reaches beyond the lengths."""
        partial, full = self._exported()
        over = torch.zeros_like(full)
        if self._seq_lengths[0] % self.BLOCK_SIZE[0]:
            over[..., -1, :] = 1
        if self._seq_lengths[1] % self.BLOCK_SIZE[1]:
            over[..., -1] = 1
        lists = _ordered(partial | (full & over)) + _ordered(full & (1 - over))
        lead = self._dims or full.shape[:2]  # one list serves all if the mod names no b or h
        return tuple(t.to(self._device).expand(*lead, *t.shape[2:]) for t in lists)

    def _transposed(self):
        num, idx, fnum, fidx = self._lists(False)
        columns = -(-self._seq_lengths[1] // self.BLOCK_SIZE[1])
        made = _ordered(_dense(num, idx)[..., :columns].mT)
        if fnum is None:
            return (*made, None, None)
        return made + _ordered(_dense(fnum, fidx)[..., :columns].mT)

    def _lists(self, transposed):
        if transposed:
            if self._transpose is None:
                self._transpose = self._transposed()
            return self._transpose
        if self._forward is None:
            self._forward = self._export()
            self._marks = _marks(self._forward)
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
    def mask_mod(self, value: _Mod | None) -> None:
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

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        block = self.BLOCK_SIZE if flatten else (self.BLOCK_SIZE,)
        lengths = self._seq_lengths if flatten else (self._seq_lengths,)
        return (*lengths, *self._lists(False), *self._lists(True), *block, self._mask_mod)

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
        )
        for name in ("_forward", "_transpose"):
            lists = getattr(self, name)
            setattr(
                made, name, lists and tuple(t if t is None else t.to(device) for t in lists)
            )
        return made

    def to_dense(self) -> torch.Tensor:
        """[B, H, rows, columns] int32, 1 for PARTIAL and FULL blocks."""
        num, idx, fnum, fidx = self._lists(False)
        dense = _dense(num, idx)
        return dense if fnum is None else (dense | _dense(fnum, fidx))

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
            f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n"
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

    # ---- slices and crops ----

    def _adjust(self, new_q_len: int, new_kv_len: int) -> "BlockMask":
        """The upper-left [new_q_len, new_kv_len] of this mask; longer lengths grow it."""
        made = BlockMask(
            (new_q_len, new_kv_len),
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=self._mask_mod,
            _handle=self.handle().window(0, new_q_len, 0, new_kv_len),
            _device=self._device,
        )
        made._dims = self._dimensions()
        return made

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
        )

    def _moved(self, maps, shape):
        moves = [
            None if m.tolist() == list(range(n)) else m.to(torch.int32)
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

    def __reduce__(self):
        lists = tuple(None if t is None else t.cpu() for t in self._lists(False))
        return (
            _unpickle,
            (self._seq_lengths, lists, self.BLOCK_SIZE, self._mask_mod, str(self._device)),
        )


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


def _cell(part) -> str:
    live = float(part.float().mean())
    return "█" if live == 1 else " " if live == 0 else "░"


def _ordered(dense):
    """[.., rows, columns] 0 or 1 to FlexAttention's (counts, live columns and then others)."""
    live = dense.bool()
    count = live.sum(-1, dtype=torch.int32)
    after = count.unsqueeze(-1) + (~live).cumsum(-1, dtype=torch.int32)
    place = torch.where(live, live.cumsum(-1, dtype=torch.int32), after) - 1
    columns = torch.arange(live.shape[-1], dtype=torch.int32, device=dense.device)
    made = torch.empty(live.shape, dtype=torch.int32, device=dense.device)
    return count, made.scatter_(-1, place.long(), columns.expand_as(made))


def _dense(num, idx):
    columns = idx.shape[-1]
    live = torch.arange(columns, device=idx.device) < num.unsqueeze(-1)
    dense = torch.zeros((*idx.shape[:-1], columns + 1), dtype=torch.int32, device=idx.device)
    dense.scatter_(-1, torch.where(live, idx.long(), columns), 1)
    return dense[..., :columns].contiguous()


def _device():
    """FlexAttention's default: the accelerator where there is one."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.get_default_device()


def create_block_mask(
    mask_mod: _Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: _Block = _DEFAULT,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool | None = None,
) -> BlockMask:
    """Proves which blocks are live; time and memory follow the boundary, not Q_LEN x KV_LEN.

    mask_mod: callable (b, h, q_idx, kv_idx) -> bool, language text, or a saccade mask.
    B, H: None or 1 broadcast. device: where index tensors appear (default: the current one).
    _compile and the dq arguments are accepted and not needed.
    """
    del _compile, compute_dq_write_order, dq_kv_order
    sizes = (B, H, Q_LEN, KV_LEN)
    return _proven(mask_mod, sizes, _pair(BLOCK_SIZE), device, separate_full_blocks)


@torch.compiler.disable  # around what is called: torch.compile(f) goes into an f it is around
def _proven(mask_mod, sizes, block, device, has_full):
    found = Resolved(mask_mod, "mask", "cpu")
    made = block_mask_of(found, *sizes, mask_mod, block, device)
    return made if has_full else _all_partial(made)


def block_mask_of(
    found: Resolved, B, H, Q, KV, mask_mod=None, block=(_DEFAULT, _DEFAULT), device=None
) -> BlockMask:
    """A block mask of a mod that was resolved on the host."""
    if Q < 1 or KV < 1:
        raise ValueError(f"got Q_LEN {Q}, KV_LEN {KV}, expected 1 or more")
    sizes = (B or 1, H or 1, H or 1, Q, KV, 1, 1)
    block_q, block_kv = block
    handle = _core.block_mask_create(
        found.bound, found.views, sizes, block_q, block_kv, found.tensors
    )
    device = device if device is not None else _device()
    made = BlockMask(
        (Q, KV), BLOCK_SIZE=block, mask_mod=mask_mod, _handle=handle, _device=device
    )
    made._dims = (B or 1, H or 1)
    return made


_taken: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def adopted(mask) -> BlockMask | None:
    """A BlockMask of torch.nn.attention.flex_attention as ours; None for anything else."""
    if mask is None or not hasattr(mask, "full_kv_indices") or not hasattr(mask, "mask_mod"):
        return None
    lists = (
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
    )
    now = (*map(id, lists), _marks(lists), mask.mask_mod, mask.seq_lengths)
    known = _taken.get(mask)
    if known is None or known[0] != now:
        mod = mask.mask_mod
        mod = None if getattr(mod, "__name__", "") == "noop_mask" else mod
        made = BlockMask(
            mask.seq_lengths,
            *lists,
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=mod,
            _device=mask.kv_indices.device,
        )
        known = _taken[mask] = (now, made)
    return known[1]


def _all_partial(mask):
    return BlockMask(
        mask.seq_lengths,
        *_ordered(mask.to_dense()),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        _device=mask.device,
    )


def create_mask(
    mod_fn: _Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Dense bool [B, H, Q_LEN, KV_LEN]. A score mod is live where it does not give -inf."""
    return _dense_mask(mod_fn, B, H, Q_LEN, KV_LEN, device)


@torch.compiler.disable
def _dense_mask(mod_fn, B, H, Q_LEN, KV_LEN, device):
    kind = captured.kind_of(mod_fn)
    if kind == "score" and not callable(mod_fn):
        raise ValueError("mod_fn: got a score in text, expected a mask, or a callable")
    if kind == "score":
        inner = captured.callable_of(mod_fn)
        finite = lambda b, h, q, kv: inner(0.0, b, h, q, kv) != -float("inf")  # noqa: E731
        return _dense_mask(finite, B, H, Q_LEN, KV_LEN, device)
    made = create_block_mask(mod_fn, B, H, Q_LEN, KV_LEN, device="cpu")
    dense = torch.empty((B or 1, H or 1, Q_LEN, KV_LEN), dtype=torch.uint8, device="cpu")
    _lib.call("block_mask_to_dense", made.handle().handle, dense.data_ptr())
    device = device if device is not None else _device()
    return dense.to(torch.bool).to(device)
