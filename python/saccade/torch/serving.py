"""Attention over cached keys and over sequences side by side, for those who serve: lengths and
tables may lie on the GPU.

No gradients. A call reads nothing of the GPU on the host and waits for nothing, so it can be
recorded in a CUDA graph; plans are kept by shape of heads, dtypes and mods, never by length.
"""

from __future__ import annotations

import ctypes as C
import functools
import operator
from typing import Any, NamedTuple, Optional, Union

import torch

from ..c import abi, objects
from . import warm_serving
from .calls import autocast_beside, current_stream, stats_dtype, workspace
from .checks import (
    MOST_ROWS,
    backend_of,
    brief,
    check_devices,
    check_flags,
    check_here,
    check_numbers,
    check_plain,
    check_rows,
    count_of,
    no_gradients,
    scale_of,
    way_of,
)
from .entries import is_autocast
from .flex import MaskMod, ScoreMod
from .memory import check_memory
from .mods import Resolved, dtype_name, in_names_of, view, written
from .outside import check_apart, is_apart
from .tables import Keys, check_absent, check_pages

Lengths = Union[int, torch.Tensor]
_T = torch.Tensor
_AT_END = "end"  # the q_offset of calls that are kept
_CAUSAL = ("causal()", "q>=kv", "kv<=q")
CODES = {torch.int8: "i8", torch.uint8: "i4"}
for _name, _theirs in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")):
    if hasattr(torch, _theirs):
        CODES[getattr(torch, _theirs)] = _name


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
    kv_offset: Optional[Lengths] = None,
    block_table: Optional[torch.Tensor] = None,
    indptr: Optional[torch.Tensor] = None,
    indices: Optional[torch.Tensor] = None,
    last_page_len: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    return_max: bool = False,
    prefix: Optional[tuple[torch.Tensor, torch.Tensor, int]] = None,
    kernel_options: Optional[dict[str, Any]] = None,
) -> Any:
    """Attention of query [B, H, Q, D] over a cache, any mask and score; out [B, H, Q, Dv].

    key [B, Hkv, KV, D] and value [B, Hkv, KV, Dv] in one piece, of which the first seq_lens
    (an int, or int32 [B]) are live; or pools of pages [pages, Hkv, page, D] of any strides
    (NHD pools by transpose(1, 2)) with block_table [B, most] and seq_lens, or with indptr
    [B + 1], indices [all] and last_page_len [B]. int32 tensors, where the pool lies.
    Ragged: with cu_seqlens_q [B + 1] query is [T, H, D], out [T, H, Dv] and lse [T, H]; with
    cu_seqlens_k key is [T, Hkv, D] and value [T, Hkv, Dv]. max_seqlen_q and max_seqlen_k: no
    sequence is longer; on the CPU 0 stands for what they are. Rows of no sequence, as padding
    leaves them, are not written: results hold anything there.
    Quantised: key and value in float8_e4m3fn, float8_e5m2, int8, or int4 as uint8 of half the
    width (low half first), with k_scale and v_scale [B|1, Hkv|1, groups of keys, groups of
    channels], f32 or f16; of pools [pages|1, Hkv|1, ..].
    q_offset: the position of the first query; "end": the last query stands at the last key.
    kv_offset: the position of the first key, 0 if not given.
    mask, score: text, saccade.mask and saccade.score, callables; they see logical positions.
    Tensors that they capture and scalars are read when the call runs. sinks: [H], or [B, H, Q]
    with 1 for B or Q (ragged: for Q), a logit of each row in the denominator alone. out:
    written instead of a new tensor; beside 16-bit queries also float32. return_max: also the
    largest live score of each head in all of the call, [H], -inf where there is none. prefix:
    what SharedPrefix makes of groups of sequences that begin alike.
    Under torch.autocast the cache is read as it lies, and its dtype decides: the query is cast
    to it, so that a cache in float32 is computed in float32; over codes to autocast's dtype.
    With out nothing is cast, as in torch's own calls with out.
    Returns out, or (out, lse), (out, max), (out, lse, max). Errors: ValueError for what does
    not fit together, SaccadeError for what the library refuses, on a GPU not for what a table
    holds.
    """
    check_flags(return_lse=return_lse, return_max=return_max)
    return_max = bool(return_max)
    if is_autocast() and out is None and isinstance(query, _T) and isinstance(key, _T):
        query = autocast_beside(query, key)
    tensors = (
        query, key, value, block_table, k_scale, v_scale, sinks, cu_seqlens_q, cu_seqlens_k
    )  # fmt: skip
    rare = kv_offset, indptr, indices, last_page_len, out, prefix, kernel_options
    if not is_apart():
        mods_of = ("score", score), ("mask", mask)
        check_apart("cached_attention", (*tensors, *rare), mods_of)
    warm_key = None
    if not return_max and q_offset is _AT_END and all(x is None for x in rare):
        most = max_seqlen_q, max_seqlen_k
        warm_key = warm_serving.key_of(
            tensors, (score, mask), scale, seq_lens, most, return_lse
        )
    if warm_key is not None:
        found = warm_serving.recall(warm_key, tensors, seq_lens)
        if found is not None:
            return found if return_lse else found[0]
    ragged = cu_seqlens_q is not None, cu_seqlens_k is not None
    paged = block_table is not None or indices is not None
    form = _form_of(query, key, value, ragged, paged)
    _check(query, key, value, form, block_table, indices)
    max_seqlen_q = count_of("max_seqlen_q", max_seqlen_q, most=MOST_ROWS)
    max_seqlen_k = count_of("max_seqlen_k", max_seqlen_k, most=MOST_ROWS)
    query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()
    _check_lengths(q_offset, indices, indptr, last_page_len, max_seqlen_q, max_seqlen_k, ragged)
    no_gradients(sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out)
    mods = _mods(score, mask, query)
    check_fixed(mods)
    is_given = out is not None
    if out is None:
        out = query.new_empty((*query.shape[:-1], form.Dv))
    lse = query.new_empty(query.shape[:-1], dtype=stats_dtype(query)) if return_lse else None
    row_max = head_max = None
    if return_max:
        head_max = query.new_full((1, form.H), -torch.inf, dtype=stats_dtype(query))
        if ragged[0]:  # q may have more rows than sequences
            row_max = query.new_empty(query.shape[:-1], dtype=stats_dtype(query))
    if 0 in query.shape[:-1]:  # no rows: nothing is read
        return _found(out, lse, head_max, return_lse)
    check_keys(key, block_table if indices is None else indices)
    args = _Arguments(query.device)
    for name, t in (("sinks", sinks), ("out", out), ("k_scale", k_scale), ("v_scale", v_scale)):
        if t is not None:
            check_here(name, t, query.device)
    args.tensors(q=query, out=out, lse=lse, row_max=row_max, sinks=sinks, head_max=head_max)
    args.tensors(k_scale=k_scale, v_scale=v_scale)
    args.cache(k=key, v=value)
    longest, B, Q = form.KV, form.B, form.Q
    if paged:
        longest = args.pages(key, block_table, indptr, indices, last_page_len)
        if block_table is not None:
            B = block_table.shape[0]
        elif indptr is not None:
            B = indptr.shape[0] - 1
    if kv_offset is not None and (any(ragged) or isinstance(q_offset, str)):
        raise ValueError("kv_offset: expected q_offset beside it, and no cu_seqlens")
    if seq_lens is not None and last_page_len is not None:
        raise ValueError("last_page_len: got it and seq_lens, expected one of them")
    if indices is not None and seq_lens is None and last_page_len is None:
        raise ValueError("seq_lens: got indices without lengths, expected it or last_page_len")
    if any(ragged):
        at_end = isinstance(q_offset, str)
        B = args.ragged(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, at_end)
        Q, longest = max_seqlen_q or Q, max_seqlen_k or longest
        args.ragged_positions(B, seq_lens, None if at_end else q_offset)
    else:
        held = longest
        is_read = isinstance(q_offset, str) or not query.is_cuda
        if last_page_len is not None and is_read:
            held = _held_keys(indptr, last_page_len, key.shape[2])
        args.positions(B, Q, seq_lens, q_offset, held, kv_offset)
    if prefix is not None:
        if not isinstance(prefix, tuple) or len(prefix) != 3:
            raise ValueError(f"prefix: got {brief(prefix)}, expected what SharedPrefix makes")
        args.prefix(*prefix)
    groups = (
        *_groups("k_scale", k_scale, form.KV, form.D),
        *_groups("v_scale", v_scale, form.KV, form.Dv),
    )
    out_dtype = dtype_name(out) if out.dtype is not query.dtype else None
    kind = paged, any(ragged), groups, out_dtype, return_max, prefix is not None
    plan = _plan(query, form, mods, scale, kernel_options, kind, sinks)
    args.bind([m for m in mods if m is not None])
    room = plan.workspace(B, form.H, form.Hkv, Q, longest, form.D, form.Dv)
    if paged and not query.is_cuda:
        rows = form.Q if cu_seqlens_q is None else cu_seqlens_q.diff()
        args.check_tables(plan, key, mods[1], rows)
    args.run(plan, room, query)
    if is_given:
        written(out)
    if warm_key is not None and not warm_serving.is_kept(warm_key):
        sizes = warm_serving.Sizes(room, Q, longest)
        args.keep_warm(warm_key, plan, sizes, tensors, (out, lse), mods[1])
    return _found(out, lse, head_max, return_lse)


def _found(out, lse, head_max, return_lse):
    found = [out, lse] if return_lse else [out]
    if head_max is not None:
        found.append(head_max[0])
    return tuple(found) if len(found) > 1 else out


class _Form(NamedTuple):
    """Sizes of a call; Q and KV of all sequences together where they are ragged."""

    B: int
    H: int
    Hkv: int
    Q: int
    KV: int
    D: int
    Dv: int
    page: int
    kv_dtype: str


def _form_of(q, k, v, ragged, paged):
    ranks = (3 if ragged[0] else 4), (3 if ragged[1] else 4)
    for name, t, rank in (("query", q, ranks[0]), ("key", k, ranks[1]), ("value", v, ranks[1])):
        check_rows(name, t, rank)
    rows, keys = q.shape[0 if ragged[0] else 2], k.shape[0 if ragged[1] else 2]
    H, Hkv, D = q.shape[1], k.shape[1], q.shape[-1]
    wide = 2 if k.dtype is torch.uint8 else 1
    kv_dtype = CODES.get(k.dtype) or dtype_name(k)
    B = 1 if ragged[0] else q.shape[0]
    page = keys if paged else 0
    if k.dtype is not v.dtype:
        raise ValueError(f"value: got {v.dtype}, expected {k.dtype}, the dtype of key")
    if wide * k.shape[-1] != D or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"got query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}, "
            "expected [.., D], [N, Hkv, n, D], [N, Hkv, n, Dv]"
        )
    return _Form(B, H, Hkv, rows, keys, D, wide * v.shape[-1], page, kv_dtype)


def _check(q, k, v, form, table, indices):
    check_devices(q, k, v)
    no_gradients(query=q, key=k, value=v)
    if 0 in (form.D, form.Dv):
        raise ValueError(f"got head dims {form.D} and {form.Dv}, expected 1 or more")
    if form.page and k.dim() != 4:
        raise ValueError("cu_seqlens_k: got it beside tables of pages, expected one of them")
    if table is not None and indices is not None:
        raise ValueError("got both block_table and indices, expected one")
    if form.Hkv == 0 or form.H % form.Hkv:
        raise ValueError(f"got {form.H} heads over {form.Hkv}, expected a multiple")


def check_keys(key, table):
    """Raises where there are none. table: of the pages of a pool, or None."""
    if key.dim() == 4 and key.shape[2] == 0:
        got = "0 keys" if table is None else "pages of 0 keys"
        raise ValueError(f"key: got {got}, expected 1 or more")
    if table is not None and 0 in (key.shape[0], table.shape[-1]):
        what = "key: got a pool of 0 pages" if key.shape[0] == 0 else "got a table of 0 columns"
        raise ValueError(f"{what}, expected 1 or more")


def _check_lengths(q_offset, indices, indptr, last_page_len, max_q, max_k, ragged):
    if isinstance(q_offset, str) and q_offset != "end":
        raise ValueError(
            f"q_offset: got {brief(q_offset)}, expected 'end', an int or an int32 tensor"
        )
    for name, t in (("indptr", indptr), ("last_page_len", last_page_len)):
        if t is not None and indices is None:
            raise ValueError(f"{name}: got a tensor without indices, expected it beside them")
    for name, n, is_ragged in (("q", max_q, ragged[0]), ("k", max_k, ragged[1])):
        if n and not is_ragged:
            raise ValueError(
                f"max_seqlen_{name}: got {n} without cu_seqlens_{name}, expected both"
            )


def _count(name, x):
    """A tensor as it is, or a number of 32 bits."""
    if isinstance(x, torch.Tensor):
        check_memory(name, x)
        return x
    try:
        n = operator.index(x)
    except TypeError:
        n = 1 << 31
    if not -(1 << 31) <= n < 1 << 31:
        raise ValueError(f"{name}: got {brief(x)}, expected an int32 tensor or number")
    return n


def _check_live(n, most):
    """Raises for numbers of live keys, where the host has them, beyond 0 to most."""
    each = [n]
    if isinstance(n, torch.Tensor):
        each = n.tolist() if n.dim() == 1 and n.dtype is torch.int32 and not n.is_cuda else []
    for b, x in enumerate(each):
        if not 0 <= x <= most:
            where = f" for batch {b}" if n is not x else ""
            raise ValueError(f"seq_lens: got {x}{where}, expected 0 to {most}")


def _held_keys(indptr, last_page_len, page):
    """Keys of each batch, where the tables lie."""
    pages = indptr.diff()
    if last_page_len.shape != pages.shape:
        raise ValueError(
            f"last_page_len: got {last_page_len.shape[0]} numbers, expected {pages.shape[0]}"
        )
    return ((pages - 1) * page + last_page_len).where(pages > 0, 0).int()


@functools.lru_cache(maxsize=256)
def _of_text(text, kind, device):
    return Resolved(text, kind, device)


def resolved(mod, kind, device):
    if not callable(mod) and not isinstance(mod, str):
        raise TypeError(f"{kind}: got {brief(mod)}, expected a callable, or text")
    if type(mod) is str:
        return _of_text(mod, kind, device)
    return Resolved(mod, kind, device, is_signed=True)


def is_causal_text(mask: Resolved) -> bool:
    """Whether it is the causal mask, as far as its text tells at a glance."""
    return mask.bound.text.replace(" ", "") in _CAUSAL


def _mods(score, mask, q):
    """Both, ready to run where q lies; None for what is not given."""
    made = [
        None if m is None else resolved(m, kind, q.device.type)
        for m, kind in ((score, "score"), (mask, "mask"))
    ]
    if None not in made:
        made[0] = made[0].apart(made[1].names)
    return made


def check_fixed(mods):
    """Raises for a captured tensor that requires grad. mods: Resolved ones, or None."""
    for mod in filter(None, mods):
        no_gradients(**dict(zip(mod.called, mod.values)))


def _backend(options, q):
    """The back end, and whether a row's bits are to follow from the row alone."""
    backend, is_invariant = way_of(backend_of(options))
    if backend == "auto":
        backend = "ref" if q.dtype is torch.float64 and not q.is_cuda else q.device.type
    return backend, is_invariant


def _groups(of, scale, keys, dim):
    """(keys, channels) that share one of its numbers; 0: all."""
    if scale is None:
        return 0, 0
    if not isinstance(scale, torch.Tensor) or scale.dim() != 4:
        got = f"rank {scale.dim()}" if isinstance(scale, torch.Tensor) else brief(scale)
        raise ValueError(f"{of}: got {got}, expected a tensor of rank 4")
    found = []
    keys_and_channels = ("keys", scale.shape[-2], keys), ("channels", scale.shape[-1], dim)
    for name, n, extent in keys_and_channels:
        if n == 0 or n > extent or extent % n:
            raise ValueError(f"{of}: got {n} groups of {name}, expected a divisor of {extent}")
        found.append(0 if n == 1 else extent // n)
    return tuple(found)


def _plan(q, form, mods, scale, options, kind, sinks):
    paged, ragged, groups, out_dtype, has_max, has_prefix = kind
    backend, is_invariant = _backend(options, q)
    bound = [m.bound if m is not None else None for m in mods]
    names = "k_scale_tokens", "k_scale_channels", "v_scale_tokens", "v_scale_channels"
    extra = (
        ("page", form.page if paged else 0),
        ("ragged", int(ragged)),
        ("batch_invariant", is_invariant),
        ("sinks_dtype", abi.DTYPES[dtype_name(sinks)] if sinks is not None else 0),
        ("out_dtype", abi.DTYPES[out_dtype] if out_dtype else 0),
        ("head_max", int(has_max)),
        ("shared_prefix", int(has_prefix)),
        *zip(names, groups),
    )
    with torch.cuda.device_of(q):
        return objects.plan(
            objects.context(0 if q.is_cuda else -torch.get_num_threads()),
            form.B if backend == "cuda" else 0,
            form.H,
            form.Hkv,
            form.D,
            form.Dv,
            dtype_name(q),
            form.kv_dtype,
            scale_of(scale),
            *bound,
            backend,
            0,
            (),
            extra,
        )


def cache_view(t):
    """A view of keys or values; int4 as twice as many elements."""
    name = CODES.get(t.dtype)
    if name is None:
        return view(t)
    cuda = t.is_cuda
    shape, stride = tuple(t.shape), tuple(t.stride())
    if name == "i4":
        shape = *shape[:-1], 2 * shape[-1]
        stride = *[2 * s for s in stride[:-1]], 1
    return objects.View(
        t.data_ptr(), name, int(cuda), t.get_device() if cuda else 0, shape, stride
    )


# arguments by the library's names for them
ARGUMENTS = {"q": "query", "k": "key", "v": "value", "table": "block_table"}
ARGUMENTS |= {"k_pool": "key_pool", "v_pool": "value_pool"}
ARGUMENTS |= {"kv_len": "seq_lens", "cu_seqlens_kv": "cu_seqlens_k"}


class _Arguments:
    """saccade_forward_args and what they point to."""

    def __init__(self, device):
        self.args, self.keep, self.device = abi.ForwardArgs(), [], device
        self.mods: list[Resolved] = []
        self.table = ()  # of pages: its name, itself, indptr
        # positions of a sequence: how many keys, its first query (None: the last at the end)
        self.lengths, self.first, self.is_moved, self.at_end = None, 0, False, False
        self.numbers: dict[str, torch.Tensor] = {}  # of positions, by the library's names

    def tensor(self, t, of=view):
        made = objects.c_tensor(of(t))
        self.keep.append((made, t))
        return C.pointer(made)

    def tensors(self, **given):
        for name, t in given.items():
            if t is not None:
                setattr(self.args, name, self.tensor(t))

    def cache(self, **given):
        for name, t in given.items():
            setattr(self.args, name, self.tensor(t, cache_view))

    def _table(self, name, t, rank):
        check_numbers(name, t, rank)
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
            p.KV = most * pool.shape[2]
            if last_page_len is not None:
                p.last_page_len = self._table("last_page_len", last_page_len, 1)
        self.keep.append(p)
        self.args.pages = C.pointer(p)
        name = "indices" if block_table is None else "block_table"
        self.table = name, indices if block_table is None else block_table, indptr
        return most * pool.shape[2]

    def is_causal(self, mask):
        """Whether this mask is; None where absent pages may be those of keys that it hides."""
        is_known = mask is None or is_causal_text(mask)
        is_known &= not self.is_moved and self.lengths is not None
        return mask is not None if is_known and not self.args.prefix else None

    def check_tables(self, plan, pool, mask, rows):
        """Looks at what the tables on the host name. mask: what the queries see all keys by
        which it leaves; rows: queries of each sequence."""
        pages, _, page, _ = pool.shape
        keys, is_causal = Keys(*self.table, self.lengths, page, pages), self.is_causal(mask)
        check_pages(plan, self.args, keys)
        if is_causal is not None:
            check_absent(keys, self.first, rows, is_causal)

    def keep_warm(self, key, plan, sizes, tensors, results, mask):
        """Leaves the call for the next one of this key."""
        pool, pages = tensors[1], None
        if self.table and not pool.is_cuda:
            pages = pool.shape[2], pool.shape[0]
        again = warm_serving.Again(
            plan, self.args, sizes, tensors, self.numbers, results, pages, self.is_causal(mask)
        )
        warm_serving.keep(key, again)

    def prefix(self, groups, lengths, most):
        p = abi.Prefix(max_keys=int(most))
        p.cu_groups = self._table("cu_groups", groups, 1)
        p.lengths = self._table("shared_lens", lengths, 1)
        self.keep.append(p)
        self.args.prefix = C.pointer(p)

    def ragged(self, of_q, of_k, max_q, max_k, at_end):
        """How many sequences there are."""
        self.at_end = at_end
        r = abi.Ragged(max_q=int(max_q), max_kv=int(max_k), align_end=int(at_end))
        for name, member, t in (("cu_seqlens_q", "cu_seqlens_q", of_q),
                                ("cu_seqlens_k", "cu_seqlens_kv", of_k)):  # fmt: skip
            if t is not None:
                setattr(r, member, self._table(name, t, 1))
                if t.shape[0] < 2:
                    raise ValueError(f"{name}: got {t.shape[0]} numbers, expected 2 or more")
        self.keep.append(r)
        self.args.ragged = C.pointer(r)
        return (of_q if of_q is not None else of_k).shape[0] - 1

    def ragged_positions(self, B, seq_lens, q_offset):
        p = abi.Positions()
        if seq_lens is not None:
            self._position(p, "kv_len", seq_lens, B)
        if q_offset is not None:
            self._position(p, "q_offset", q_offset, B)
        self.lengths = seq_lens
        self.first = q_offset if q_offset is not None or self.at_end else 0
        self.keep.append(p)
        self.args.positions = C.pointer(p)

    def positions(self, B, Q, seq_lens, q_offset, longest, kv_offset):
        p = abi.Positions()
        if kv_offset is not None:
            self._position(p, "kv_offset", kv_offset, B)
        length = longest
        if seq_lens is not None:
            length = _count("seq_lens", seq_lens)
            _check_live(length, longest)
            self._position(p, "kv_len", length, B)
        at = length - Q if isinstance(q_offset, str) else q_offset
        self._position(p, "q_offset", at, B)
        self.lengths, self.first, self.is_moved = length, at, kv_offset is not None
        self.keep.append(p)
        self.args.positions = C.pointer(p)

    def _position(self, positions, member, x, B):
        name = ARGUMENTS.get(member, member)
        if isinstance(x, torch.Tensor):
            check_plain(name, x)
            if x.dim() not in (0, 1) or (x.dim() == 1 and x.shape[0] != B):
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected ({B},)")
            made = self._table(name, x, x.dim())
        else:
            x = warm_serving.number(_count(name, x))
            made = self.tensor(x)
        self.numbers[member] = x
        setattr(positions, member, made)

    def bind(self, mods):
        names = [n for m in mods for n in m.names]
        self.mods = mods
        self.args.bindings = objects.bindings(names, [x for m in mods for x in m.views])
        self.args.n_bindings = len(names)

    def gradients(self, names, tensors):
        """Of captures, by their names in the score."""
        self.keep.append(tensors)
        self.args.d_captures = objects.bindings(names, [view(t) for t in tensors])
        self.args.n_d_captures = len(names)

    def backward_room(self, plan):
        n = C.c_size_t()
        abi.call("backward_workspace", plan.handle, C.byref(self.args), C.byref(n))
        return n.value

    def run(self, plan, room, q, call="forward"):
        if room:
            memory = workspace(room, q, q.is_cuda)
            self.keep.append(memory)
            self.args.workspace = (memory.data_ptr() + 63) & ~63
            self.args.workspace_bytes = room
        if q.is_cuda:
            self.args.stream = current_stream(q.get_device())
        try:
            abi.call(call, plan.handle, C.byref(self.args))
        except abi.BadValue as reason:
            raise in_names_of(reason, self.mods, ARGUMENTS) from None
