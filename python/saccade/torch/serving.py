"""Attention over cached keys, for those who serve: lengths and tables may lie on the GPU.

No gradients. A call reads nothing of the GPU on the host and waits for nothing, so it can be
recorded in a CUDA graph; plans are kept by shape of heads, dtypes and mods, never by length.
"""

from __future__ import annotations

import ctypes as C
import functools
from typing import Any, Optional, Union

import torch

from ..c import abi, objects
from .calls import current_stream, stats_dtype, workspace
from .checks import backend_of
from .flex import MaskMod, ScoreMod
from .mods import Resolved, dtype_name, view

Lengths = Union[int, torch.Tensor]


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[MaskMod] = "causal()",
    score: Optional[ScoreMod] = None,
    *,
    scale: Optional[float] = None,
    seq_lens: Optional[Lengths] = None,
    q_offset: Union[Lengths, str] = "end",
    block_table: Optional[torch.Tensor] = None,
    indptr: Optional[torch.Tensor] = None,
    indices: Optional[torch.Tensor] = None,
    last_page_len: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    kernel_options: Optional[dict[str, Any]] = None,
) -> Any:
    """Attention of query [B, H, Q, D] over a cache, any mask and score; out [B, H, Q, Dv].

    key [B, Hkv, KV, D] and value [B, Hkv, KV, Dv] in one piece, of which the first seq_lens
    (an int, or int32 [B]) are live; or pools of pages [pages, Hkv, page, D] of any strides
    (NHD pools by transpose(1, 2)) with block_table [B, most] and seq_lens, or with indptr
    [B + 1], indices [all] and last_page_len [B]. int32 tensors, where the pool lies.
    q_offset: the position of the first query; "end": the last query stands at the last key.
    mask, score: text, saccade.mask and saccade.score, callables; they see logical positions.
    Tensors that they capture and scalars are read when the call runs. sinks [H]: as in
    flex_attention. out: written instead of a new tensor. Returns out, or (out, lse).
    """
    _check(query, key, value, block_table, indices)
    paged = block_table is not None or indices is not None
    device = query.device.type
    mods = [
        None if m is None else _resolved(m, kind, device)
        for m, kind in ((score, "score"), (mask, "mask"))
    ]
    plan = _plan(query, key, value, mods, scale, kernel_options, paged, sinks)
    if out is None:
        out = query.new_empty((*query.shape[:3], value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=stats_dtype(query)) if return_lse else None
    args = _Arguments(query.device)
    args.tensors(q=query, k=key, v=value, out=out, lse=lse, sinks=sinks)
    longest = key.shape[2]
    if paged:
        longest = args.pages(key, block_table, indptr, indices, last_page_len)
    args.positions(query, seq_lens, q_offset, longest, paged and last_page_len is not None)
    args.bind([m for m in mods if m is not None])
    B, H, Q, D = query.shape
    sizes = (B, H, key.shape[1], Q, longest, D, value.shape[3])
    args.run(plan, plan.workspace(*sizes), query)
    return (out, lse) if return_lse else out


def _check(q, k, v, table, indices):
    for name, t in (("query", q), ("key", k), ("value", v)):
        if not isinstance(t, torch.Tensor) or t.dim() != 4 or t.stride(3) != 1:
            raise ValueError(f"{name}: expected a tensor of rank 4 with contiguous rows")
        if t.device != q.device:
            raise ValueError(f"{name}: got device {t.device}, expected {q.device}")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: requires grad, expected none: flex_attention has gradients"
            )
    if table is not None and indices is not None:
        raise ValueError("got both block_table and indices, expected one")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"got {q.shape[1]} heads over {k.shape[1]}, expected a multiple")
    if q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"got query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}, "
            "expected [.., D], [N, Hkv, n, D], [N, Hkv, n, Dv]"
        )


@functools.lru_cache(maxsize=256)
def _of_text(text, kind, device):
    return Resolved(text, kind, device)


def _resolved(mod, kind, device):
    return _of_text(mod, kind, device) if type(mod) is str else Resolved(mod, kind, device)


def _plan(q, k, v, mods, scale, options, paged, sinks):
    backend = backend_of(options) if options else "auto"
    device = q.device.type
    if backend == "auto":
        backend = "ref" if q.dtype is torch.float64 and device == "cpu" else device
    B, H, _, D = q.shape
    bound = [m.bound if m is not None else None for m in mods]
    extra = (
        ("page", k.shape[2] if paged else 0),
        ("sinks_dtype", abi.DTYPES[dtype_name(sinks)] if sinks is not None else 0),
    )
    with torch.cuda.device_of(q):
        return objects.plan(
            objects.context(torch.get_num_threads() if device == "cpu" else 0),
            B if backend == "cuda" else 0,
            H,
            k.shape[1],
            D,
            v.shape[3],
            dtype_name(q),
            dtype_name(k),
            scale,
            *bound,
            backend,
            0,
            (),
            extra,
        )


class _Arguments:
    """saccade_forward_args and what they point to."""

    def __init__(self, device):
        self.args, self.keep, self.device = abi.ForwardArgs(), [], device

    def tensor(self, t):
        made = objects.c_tensor(view(t))
        self.keep.append((made, t))
        return C.pointer(made)

    def tensors(self, **given):
        for name, t in given.items():
            if t is not None:
                setattr(self.args, name, self.tensor(t))

    def _table(self, name, t, rank):
        if not isinstance(t, torch.Tensor) or t.dtype is not torch.int32 or t.dim() != rank:
            raise ValueError(f"{name}: expected an int32 tensor of rank {rank}")
        if t.device != self.device:
            raise ValueError(f"{name}: got device {t.device}, expected {self.device}")
        return self.tensor(t)

    def pages(self, pool, block_table, indptr, indices, last_page_len):
        """How many keys a batch may have, by the shape of its table."""
        p = abi.Pages()
        if block_table is not None:
            p.table, most = self._table("block_table", block_table, 2), block_table.shape[1]
        else:
            p.table, most = self._table("indices", indices, 1), indices.shape[0]
            p.indptr = self._table("indptr", indptr, 1)
            if last_page_len is not None:
                p.last_page_len = self._table("last_page_len", last_page_len, 1)
        self.keep.append(p)
        self.args.pages = C.pointer(p)
        return most * pool.shape[2]

    def positions(self, q, seq_lens, q_offset, longest, by_pages):
        p, B, Q = abi.Positions(), q.shape[0], q.shape[2]
        length = seq_lens if seq_lens is not None else longest
        if by_pages and seq_lens is None:
            if isinstance(q_offset, str):
                raise ValueError(
                    'q_offset: got "end" beside last_page_len, expected seq_lens too, or where '
                    "the first queries stand"
                )
        elif seq_lens is not None:
            p.kv_len = self._length("seq_lens", seq_lens, B)
        at = length - Q if isinstance(q_offset, str) else q_offset
        p.q_offset = self._length("q_offset", at, B)
        self.keep.append(p)
        self.args.positions = C.pointer(p)

    def _length(self, name, x, B):
        if isinstance(x, torch.Tensor):
            if x.dim() not in (0, 1) or (x.dim() == 1 and x.shape[0] != B):
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected ({B},)")
            return self._table(name, x, x.dim())
        return self.tensor(torch.tensor(int(x), dtype=torch.int32, device="cpu"))

    def bind(self, mods):
        names = [n for m in mods for n in m.names]
        if len(set(names)) != len(names):
            raise ValueError("score and mask capture one name, expected different names")
        self.keep.append([m.tensors for m in mods])
        self.args.bindings = objects.bindings(names, [x for m in mods for x in m.views])
        self.args.n_bindings = len(names)

    def run(self, plan, room, q):
        if room:
            memory = workspace(room, q, q.is_cuda)
            self.keep.append(memory)
            self.args.workspace = (memory.data_ptr() + 63) & ~63
            self.args.workspace_bytes = room
        if q.is_cuda:
            self.args.stream = current_stream(q.get_device())
        abi.call("forward", plan.handle, C.byref(self.args))
