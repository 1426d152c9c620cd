"""Warm calls of cached_attention: what one found out, kept for the next of its layout.

Calls that are kept name mods by text and write new tensors. The extension fills in addresses
and runs them (warm.py); without it nothing is kept. Numbers that lie on the host, of keys and
of pages, are looked at by every call.
"""

from __future__ import annotations

import ctypes as C
from typing import Any, NamedTuple, Optional, Sequence

import torch

from ..c import abi, extension, objects
from .calls import SMALL
from .recording import is_recorded
from .tables import Keys, check_absent
from .warm import NOTHING, result, room_of, run_of
from .warm import extension as built

NAMES = (
    "q", "k", "v", "pages.table", "k_scale", "v_scale", "sinks",
    "ragged.cu_seqlens_q", "ragged.cu_seqlens_kv",
)  # fmt: skip
_MOST = 256  # then all are forgotten
_known: dict[tuple[Any, ...], Again] = {}
_is_transformed = torch._C._are_functorch_transforms_active


def key_of(tensors, mods, scale, seq_lens, most, return_lse) -> Optional[tuple[Any, ...]]:
    """What tells such calls apart but strides; None for a call that is not kept. tensors: of
    NAMES, None where there is none; mods: score and mask; most: the longest sequences."""
    if built is None or _is_transformed() or is_recorded():
        return None
    has_graph = torch.is_grad_enabled()
    key: list[Any] = []
    for i, t in enumerate(tensors):
        if t is None and i > 2:
            key.append(None)
        elif type(t) is not torch.Tensor or (has_graph and t.requires_grad) or t.is_neg():
            return None
        else:
            key += t.shape, t.dtype
    for mod in mods:
        if mod is not None and type(mod) is not str:
            return None
    of_lengths = type(seq_lens)
    if of_lengths is torch.Tensor:
        if seq_lens.is_neg():
            return None
        key += seq_lens.shape, seq_lens.dtype
    elif seq_lens is not None and of_lengths is not int:
        return None
    if scale is not None and type(scale) is not float:
        return None
    if type(most[0]) is not int or type(most[1]) is not int:
        return None
    q = tensors[0]
    of_device = q.get_device() if q.is_cuda else (-1, torch.get_num_threads())
    return (*key, *mods, scale, of_lengths, *most, return_lse, of_device)


def recall(key, tensors, seq_lens):
    """(out, lse or None) of a call that is kept, or None."""
    found = _known.get(key)
    return found(tensors, seq_lens) if found is not None else None


def is_kept(key) -> bool:
    """The first of a key stays, so that calls whose strides take turns cost nothing more."""
    return key in _known


def keep(key, call: Again) -> None:
    if len(_known) >= _MOST:
        _known.clear()
    _known[key] = call


class Sizes(NamedTuple):
    """room: bytes of workspace; rows: queries of a batch; longest: keys that it may have."""

    room: int
    rows: int
    longest: int


class Again:
    """Runs a call again. args: the saccade_forward_args that it ran with; numbers: those of its
    positions, by name; pages: (keys of a page, pages) of a pool on the host; is_causal: whether
    its mask is, None where absent pages may be live."""

    def __init__(self, plan, args, sizes, tensors, numbers, results, pages, is_causal):
        self.plan, self.sizes, self.pages, self.is_causal = plan, sizes, pages, is_causal
        self.run = self.check = None
        text, links, places = _image(args)
        q, (out, lse) = tensors[0], results
        like, index = (q, 0) if q.shape == out.shape and q.is_contiguous() else (out, -1)
        outputs = [result(places["out"], like, out.stride(), index), NOTHING]
        if lse is not None:
            outputs[1] = result(places["lse"], lse, lse.stride())
        if None in outputs:
            return
        given = {n: t for n, t in zip(NAMES, tensors) if t is not None}
        given |= {f"positions.{n}": t for n, t in numbers.items() if t is not None}
        call = plan.handle, text, links, [(t, places[n]) for n, t in given.items()]
        room = room_of(sizes.room, q, SMALL)
        self.run = run_of(extension.FORWARD, *call, outputs, room, objects.PLACES)
        if pages is not None:
            none = 0, None
            self.check = run_of(extension.PAGES_CHECK, *call, (), none, objects.PLACES)

    def __call__(self, tensors: Sequence[Optional[torch.Tensor]], seq_lens):
        """None where the call is to be made in full, which says what is wrong with it."""
        if self.run is None:
            return None
        given = [t for t in tensors if t is not None]
        length, first = seq_lens, None
        if tensors[-1] is None and tensors[-2] is None:  # else the library knows their ends
            if not self._are_live(seq_lens):
                return None
            length = self.sizes.longest if seq_lens is None else seq_lens
            first = length - self.sizes.rows
        given += [number(n) for n in (seq_lens, first) if n is not None]
        try:
            if self.pages is not None:
                if self.check is None or self.check(None, 0, *given) is None:
                    return None
                self._check_absent(tensors, length, first)
            return self.run(None, 0, *given)
        except abi.SaccadeError:
            return None

    def _check_absent(self, tensors, length, first) -> None:
        if self.is_causal is None:
            return
        keys = Keys("block_table", tensors[3], None, length, *self.pages)
        rows = self.sizes.rows if tensors[-2] is None else tensors[-2].diff()
        check_absent(keys, first, rows, self.is_causal)

    def _are_live(self, seq_lens) -> bool:
        if seq_lens is None or (type(seq_lens) is torch.Tensor and seq_lens.is_cuda):
            return True
        if type(seq_lens) is int:
            return 0 <= seq_lens <= self.sizes.longest
        lengths = seq_lens.tolist()
        lengths = lengths if seq_lens.dim() else [lengths]
        return all(0 <= n <= self.sizes.longest for n in lengths)


def number(x) -> torch.Tensor:
    """One as the library reads it, of the host or a tensor as it is."""
    return torch.tensor(x, dtype=torch.int32, device="cpu") if type(x) is int else x


def _image(args):
    """A struct of arguments and all that it points to, as the extension takes them: (bytes,
    words that hold offsets into them, the word of the address of each tensor by its name)."""
    blocks: list[bytearray] = []
    links: list[int] = []
    places: dict[str, int] = {}

    def put(record, name) -> int:
        start, size = sum(map(len, blocks)), C.sizeof(record)
        block = bytearray(record) + bytes(-size % 8)
        blocks.append(block)
        if isinstance(record, abi.Tensor):
            places[name] = start // 8
            return start
        for member, kind in record._fields_:
            field = getattr(type(record), member)
            if not hasattr(kind, "contents"):
                continue
            pointer, to = getattr(record, member), 0
            if pointer and member != "bindings":  # texts capture nothing
                to = put(pointer.contents, f"{name}.{member}" if name else member)
                links.append((start + field.offset) // 8)
            block[field.offset : field.offset + 8] = to.to_bytes(8, "little")
        return start

    put(args, "")
    return b"".join(blocks), links, places
