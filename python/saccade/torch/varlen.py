"""Attention over sequences of unequal lengths that lie one after the other."""

from __future__ import annotations

import ctypes as C
from typing import Any, Optional

import torch

from ..c import abi, objects
from . import warm_serving
from .autograd import Slots, check_rates
from .batched import gradients_of_each, is_batched
from .beside import drawn_state
from .calls import (
    autocast,
    autocast_beside,
    keeps_f32,
    kept_f32,
    rounded,
    stats_dtype,
    weight_of,
)
from .checks import (
    MOST_ROWS,
    NO_SECOND_OF,
    brief,
    check_devices,
    check_dropout,
    check_flags,
    check_numbers,
    check_rows,
    check_sinks,
    count_of,
    scale_of,
)
from .entries import is_autocast
from .flex import MaskMod, ScoreMod
from .mods import dtype_name
from .once import last
from .outside import check_apart, in_transforms, is_apart
from .serving import CODES, _Arguments, _backend, _mods, check_fixed, check_keys


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    mask: Optional[MaskMod] = "causal()",
    score: Optional[ScoreMod] = None,
    *,
    scale: Optional[float] = None,
    align: str = "start",
    block_table: Optional[torch.Tensor] = None,
    seq_lens: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    kernel_options: Optional[dict[str, Any]] = None,
    sinks: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
) -> Any:
    """Attention of query [T, H, D] over key [S, Hkv, D] and value [S, Hkv, Dv]; out [T, H, Dv].

    Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], likewise keys by cu_seqlens_k
    (None: as cu_seqlens_q); int32 [B + 1], where query lies. max_seqlen_*: no sequence is
    longer; on the GPU they are needed, on the CPU 0 finds them. Any lengths, 0 too: prefill
    beside decode. mask, score: as in cached_attention; q and kv count within the sequence, b is
    its number. align: "start", position 0 for each sequence's first query, or "end", its last
    query stands at its last key (as FlashAttention's causal has it). block_table [B, most] and
    seq_lens [B]: keys are in pools of pages instead, as in cached_attention, which autocast
    leaves as they are. sinks [H] and dropout_p: as in flex_attention; which weights are kept
    follows from a sequence's number and from places within it. Gradients of query, key, value,
    sinks and every float tensor that score captures follow, from out and lse; those of pools
    are sums over all places that name a key. Rows before cu_seqlens_q[0] and behind
    cu_seqlens_q[-1], as padding leaves them, are 0, their lse -inf. Returns out, or (out, lse)
    with lse [T, H].
    """
    if not is_apart():
        given = query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, seq_lens
        check_apart("varlen_attention", given, (("score", score), ("mask", mask)))
    warm = None
    is_usual = block_table is seq_lens is kernel_options is None
    if is_usual and type(dropout_p) in (int, float) and not dropout_p:
        tensors = query, key, value, sinks, cu_seqlens_q, cu_seqlens_k
        most = max_seqlen_q, max_seqlen_k
        warm = _warm_of(tensors, (score, mask), scale, most, align, return_lse)
        found = warm_serving.recall(warm[0], warm[1], None) if warm is not None else None
        if found is not None:
            clear_rows_of_none(cu_seqlens_q, *found)
            return found if return_lse else found[0]
    _check(query, key, value, block_table)
    if block_table is None:
        query, key, value = autocast(query, key, value)
    else:
        query = autocast_beside(query, key)
    check_flags(return_lse=return_lse)
    check_dropout(dropout_p, False)
    max_seqlen_q = count_of("max_seqlen_q", max_seqlen_q, most=MOST_ROWS)
    max_seqlen_k = count_of("max_seqlen_k", max_seqlen_k, most=MOST_ROWS)
    if sinks is not None:
        check_sinks(sinks, query.transpose(0, 1)[None])
        if sinks.dim() != 1:
            raise ValueError(f"sinks: got rank {sinks.dim()}, expected one of each head, [Hq]")
    if not isinstance(align, str) or align not in ("start", "end"):
        raise ValueError(f"align: got {brief(align)}, expected 'start' or 'end'")
    if (block_table is None) != (seq_lens is None):
        raise ValueError("got one of block_table and seq_lens, expected both or neither")
    if cu_seqlens_k is None and block_table is None:
        cu_seqlens_k, max_seqlen_k = cu_seqlens_q, max_seqlen_k or max_seqlen_q
    _check_starts("cu_seqlens_q", cu_seqlens_q, query.device)
    if cu_seqlens_k is not None:
        _check_starts("cu_seqlens_k", cu_seqlens_k, query.device)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, align == "end")
    query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()
    if block_table is not None:
        check_keys(key, block_table)
    call = _Call(query, key, value, mask, score, scale, kernel_options)
    call.lengths, call.paged = lengths, (block_table, seq_lens)
    if sinks is not None:
        sinks = sinks.to(stats_dtype(query)).resolve_neg()
    if dropout_p:
        call.weight, call.state = weight_of(float(dropout_p)), drawn_state(query)
    check_fixed(call.mods[1:])
    inputs = (query, key, value, sinks, *(t for _, t, _ in call.learned))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(in_transforms("varlen_attention"))
        out, lse = _Varlen.apply(call, *inputs)
    else:
        out, lse = call.forward(query, key, value, sinks, return_lse, warm)
    return (out, lse) if return_lse else out


def _warm_of(tensors, mods, scale, most, align, return_lse):
    """(key, tensors) of a call without gradients, pages and dropout that later ones may be
    like; None if it can't be kept. On a GPU results are cleared before the run, as only it
    knows which rows are of no sequence."""
    if is_autocast() or type(align) is not str or type(return_lse) is not bool:
        return None
    q, k, v, sinks, cu_q, cu_k = tensors
    if type(q) is not torch.Tensor or q.is_cuda:
        return None
    is_plain = sinks is None or type(sinks) is torch.Tensor
    if not is_plain or (sinks is not None and sinks.dtype is not torch.float32):
        return None
    named = q, k, v, None, None, None, sinks, cu_q, cu_q if cu_k is None else cu_k
    key = warm_serving.key_of(named, mods, scale, None, most, return_lse)
    return None if key is None else ((*key, cu_k is None, align), named)


def _check_starts(name, t, device):
    check_numbers(name, t, 1)
    if t.shape[0] < 2:
        raise ValueError(f"{name}: got {t.shape[0]} numbers, expected 2 or more")
    if t.device != device:
        raise ValueError(f"{name}: got device {t.device}, expected {device}")


def _check(q, k, v, table):
    rank = 3 if table is None else 4
    for name, t, dims in (("query", q, 3), ("key", k, rank), ("value", v, rank)):
        check_rows(name, t, dims)
    check_devices(q, k, v)
    if k.dtype in CODES or v.dtype in CODES:
        raise ValueError(
            f"key: got {k.dtype}, expected the dtype of query; cached_attention takes codes"
        )


class _Call:
    """What forward and backward of one call share."""

    lengths: tuple  # cu_seqlens and maxima of queries and of keys, alignment to the end
    paged: tuple  # block_table and seq_lens, or two None
    weight = state = None  # of calls that drop weights: the mod, seed and offset
    keeps = False  # whether out is f32, for backward

    def __init__(self, q, k, v, mask, score, scale, options):
        self.mods = _mods(score, mask, q)
        self.learned = _tensors_of(self.mods[0])
        self.heads = (q.shape[1], k.shape[1])
        self.dims = (q.shape[2], v.shape[-1])
        self.dtypes, self.scale = (dtype_name(q), dtype_name(k)), scale_of(scale)
        self.backend, self.is_invariant = _backend(options, q)

    def plan(self, q, k, sinks, gradients, captures=()):
        page = k.shape[2] if self.paged[0] is not None else 0
        bound = [m.bound if m is not None else None for m in self.mods]
        more = (("page", page), ("ragged", 1), ("batch_invariant", self.is_invariant))
        if sinks is not None:
            more += (("sinks_dtype", abi.DTYPES[dtype_name(sinks)]),)
        if self.weight is not None:
            more += (("weight", self.weight.handle),)
        if self.keeps:
            more += kept_f32(self.dtypes[0])
        with torch.cuda.device_of(q):
            return objects.plan(
                objects.context(0 if q.is_cuda else -torch.get_num_threads()),
                0,
                *self.heads,
                *self.dims,
                *self.dtypes,
                self.scale,
                *bound,
                self.backend,
                gradients,
                captures,
                more,
            )

    def bounds(self, q, k):
        """Sizes that no call of these tensors exceeds."""
        cu_q, _, max_q, max_k, _ = self.lengths
        most = max_q or q.shape[0], max_k or k.shape[0]
        return (cu_q.shape[0] - 1, *self.heads, *most, *self.dims)

    def sizes(self, k):
        cu_q, cu_k, max_q, max_k, _ = self.lengths
        n = cu_q.shape[0] - 1
        if not max_q and not cu_q.is_cuda:
            max_q = max(0, int(cu_q.diff().max()))
        if cu_k is None:
            max_k = self.paged[0].shape[1] * k.shape[2]
        elif not max_k and not cu_k.is_cuda:
            max_k = max(0, int(cu_k.diff().max()))
        return (n, *self.heads, max_q, max_k, *self.dims)

    def arguments(self, kind, device, pool):
        """Arguments with lengths, pages and captures; tensors are the caller's to add."""
        a = _Arguments(device)
        a.args = kind()
        a.ragged(*self.lengths)
        table, seq_lens = self.paged
        if table is not None:
            a.pages(pool, table, None, None, None)
            p = abi.Positions(kv_len=a._table("seq_lens", seq_lens, 1))
            a.lengths, a.first = seq_lens, None if a.at_end else 0
            a.keep.append(p)
            a.args.positions = C.pointer(p)
        a.bind([m.again() for m in self.mods if m is not None])
        if self.state is not None:
            a.tensors(dropout=self.state)
        return a

    def forward(self, q, k, v, sinks, wants_lse, warm=None):
        """warm: of _warm_of, to keep the call by."""
        plan = self.plan(q, k, sinks, 0)
        dtype = torch.float32 if self.keeps else q.dtype
        out = q.new_empty((*q.shape[:2], v.shape[-1]), dtype=dtype)
        lse = q.new_empty(q.shape[:2], dtype=stats_dtype(q)) if wants_lse else None
        clear_rows_of_none(self.lengths[0], out, lse)
        a = self.arguments(abi.ForwardArgs, q.device, k)
        a.tensors(q=q, k=k, v=v, out=out, lse=lse, sinks=sinks)
        if self.paged[0] is not None and not q.is_cuda:
            a.check_tables(plan, k, self.mods[1], self.lengths[0].diff())
        is_new = warm is not None and not warm_serving.is_kept(warm[0])
        room = plan.workspace(*(self.bounds(q, k) if is_new else self.sizes(k)))
        a.run(plan, room, q)
        if is_new:
            sizes = warm_serving.Sizes(room, 0, 0)
            a.keep_warm(warm[0], plan, sizes, warm[1], (out, lse), self.mods[1])
        return out, lse

    def backward(self, given, needs, d_out, d_lse):
        """needs: of q, k, v, sinks and then of what the score captures."""
        q, k, v, out, lse, sinks = given
        learned = [x for x, wanted in zip(self.learned, needs[4:]) if wanted]
        bits = sum(1 << i for i, wanted in enumerate(needs[:3]) if wanted)
        bits |= abi.GRADIENT_CAPTURES if learned else 0
        bits |= abi.GRADIENT_SINKS if needs[3] else 0
        plan = self.plan(q, k, sinks, bits, tuple(name for name, _, _ in learned))
        of_q, of_k = self.lengths[:2]
        if self.paged[0] is not None:
            of_k = None  # pools have no rows of no sequence
        each = zip((q, k, v), (of_q, of_k, of_k), needs)
        made = [gradient_of(t, starts) if w else None for t, starts, w in each]
        a = self.arguments(abi.BackwardArgs, q.device, k)
        a.tensors(q=q, k=k, v=v, out=out, lse=lse, d_out=d_out.contiguous().resolve_neg())
        a.tensors(d_lse=None if d_lse is None else d_lse.contiguous().resolve_neg())
        made.append(torch.empty_like(sinks) if needs[3] else None)
        a.tensors(d_q=made[0], d_k=made[1], d_v=made[2], sinks=sinks, d_sinks=made[3])
        sums = [q.new_empty(t.shape, dtype=stats_dtype(q)) for _, _, t in learned]
        a.gradients([name for name, _, _ in learned], sums)
        is_told = learned or self.paged[0] is not None  # by the gradients, not by sizes alone
        room = a.backward_room(plan) if is_told else plan.backward_workspace(*self.sizes(k))
        a.run(plan, room, q, "backward")
        return made + Slots.as_captured(
            [t for _, t, _ in self.learned], needs[4:], iter(sums)
        )


def gradient_of(t, starts):
    """A tensor like t for the run to write, in which rows of no sequence are 0."""
    if starts is not None and starts.is_cuda:
        return torch.zeros_like(t)
    made = torch.empty_like(t)
    if starts is not None:
        clear_rows_of_none(starts, made, None)
    return made


def clear_rows_of_none(starts, out, lse):
    """Rows of no sequence are those before the first and behind the last: 0, lse -inf. Only the
    host knows which."""
    if starts.is_cuda:
        first, past = 0, 0
    else:
        first, past = max(0, int(starts[0])), max(0, int(starts[-1]))
    for rows in (slice(first), slice(past, None)) if first or past < out.shape[0] else ():
        out[rows].zero_()
        if lse is not None:
            lse[rows].fill_(-torch.inf)


def _tensors_of(score):
    """(name, what was captured, where the kernel reads it) of a Resolved score's tensors."""
    if score is None:
        return []
    each = zip(score.names, score.values, score.tensors)
    return [x for x in each if isinstance(x[1], torch.Tensor)]


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, q, k, v, sinks, *_):
        score, wanted = call.mods[0], ctx.needs_input_grad[5:]
        names = [n for (n, _, _), w in zip(call.learned, wanted) if w]
        call.keeps = keeps_f32(q.dtype, score and score.bound, names)
        out, lse = call.forward(q, k, v, sinks, True)
        also = [t for t in (*call.lengths[:2], *call.paged) if t is not None]
        captured = [t for m in call.mods if m is not None for t in m.captured]
        ctx.save_for_backward(q, k, v, out, lse, sinks, *also, *captured)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return rounded(out, q.dtype if call.keeps else None), lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        check_rates(d_out, d_lse)
        saved = ctx.saved_tensors  # once: checkpointing makes them again for one look
        needs = ctx.needs_input_grad[1:]

        message = NO_SECOND_OF.format("varlen_attention")

        def one(d_out, d_lse, saved):
            given = saved[:6]  # the others: a change in place is an error
            with torch.no_grad():
                q, out = given[0], given[3]
                d = torch.zeros_like(out, dtype=q.dtype) if d_out is None else d_out
                made = ctx.call.backward(given, needs, d, d_lse)
            return last(message, made, (d_out, d_lse, *saved))

        if is_batched(d_out, d_lse):
            return None, *gradients_of_each(one, needs, d_out, d_lse, saved)
        return None, *one(d_out, d_lse, saved)
