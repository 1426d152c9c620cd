"""Context parallelism: one sequence over the processes of a torch.distributed group.

    with context_parallel(group, (B, H, N, D), masks=[block_mask]) as cp:
        q, k, v = (cp.shard(t) for t in (q, k, v))       # this rank's rows
        out = flex_attention(q, k, v, score_mod, block_mask)

Masks and scores are those of the whole sequence: they see whole positions, whatever rows lie
here. Runs on CPUs, over gloo.
"""

from __future__ import annotations

import datetime
from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist

from ..c import dist as c_dist
from ..c import abi, objects
from . import active
from .calls import output_like, prepared
from .masks import mask_or_mod
from .mods import Resolved, dtype_name, view


class ContextParallel:
    """What context_parallel gives: the rows of this rank, and attention over all ranks."""

    def __init__(self, group, query_shape, masks, layers, kv_heads, dtype, seconds):
        B, H, N, D = query_shape
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: this process is not in it")
        self.length = N
        self.masks = [_whole(m) for m in masks]
        handles = [m.handle() for m in self.masks]
        self._context = objects.context(torch.get_num_threads())
        plan = objects.plan(
            self._context,
            0,
            H,
            kv_heads or H,
            D,
            D,
            *[dtype_name(torch.empty(0, dtype=dtype))] * 2,
            None,
            None,
            handles[0].mod if handles else None,
            "cpu",
            7,
            (),
        )
        sizes = abi.Sizes(B, H, kv_heads or H, N, N, D, D)
        tile = abi.lib.saccade_plan_row_tile(plan.handle, sizes)
        self.shards = c_dist.ShardPlan(self.ranks, tile, N, handles, layers or [1] * len(masks))
        self._transport = c_dist.Transport(self.rank, self.ranks, seconds, self._exchange)
        self._made: dict = {}
        self._positions = [_expand(self.shards.rows(r)) for r in range(self.ranks)]

    # ---- rows ----

    @property
    def positions(self) -> torch.Tensor:
        """Whole positions of this rank's rows, int64, rising: for rotary embeddings, labels."""
        return self._positions[self.rank]

    def shard(self, tensor: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """This rank's rows of a tensor of all rows; differentiable."""
        if tensor.shape[dim] != self.length:
            raise ValueError(f"got {tensor.shape[dim]} rows, expected all {self.length}")
        return tensor.index_select(dim, self.positions)

    def unshard(self, tensor: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """All rows from each rank's, on every rank; not differentiable."""
        if tensor.shape[dim] != len(self.positions):
            raise ValueError(
                f"got {tensor.shape[dim]} rows, expected this rank's {len(self.positions)}"
            )
        own = tensor.detach().movedim(dim, 0).contiguous()
        most = max(len(p) for p in self._positions)
        padded = own.new_zeros((most, *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(parts, padded, group=self.group)
        whole = own.new_empty((self.length, *own.shape[1:]))
        for at, part in zip(self._positions, parts):
            whole[at] = part[: len(at)]
        return whole.movedim(0, dim)

    # ---- the transport ----

    def _exchange(self, sends, receives, seconds):
        works, seen = [], {}
        for is_send, messages in ((False, receives), (True, sends)):
            for address, size, peer in messages:
                tag = seen[is_send, peer] = seen.get((is_send, peer), -1) + 1
                memory = (abi.C.c_ubyte * size).from_address(address)
                data = torch.frombuffer(memory, dtype=torch.uint8)
                there = dist.get_global_rank(self.group, peer) if self.group else peer
                call = dist.isend if is_send else dist.irecv
                works.append(call(data, there, group=self.group, tag=tag))
        limit = datetime.timedelta(seconds=seconds)
        for work in works:
            work.wait(limit)

    # ---- attention ----

    def attention(self, q, k, v, score_mod, block_mask, scale):
        """(out, lse) of this rank's rows."""
        for name, t in (("query", q), ("key", k), ("value", v)):
            if t.device.type != "cpu":
                raise NotImplementedError(
                    f"{name}: got a tensor on {t.device}; ranks run on CPUs"
                )
            if t.dim() != 4 or t.shape[2] != len(self.positions):
                raise ValueError(
                    f"{name}: got shape {tuple(t.shape)}, expected [B, H, "
                    f"{len(self.positions)}, D] with this rank's rows"
                )
        index, mask = self._mask_of(block_mask)
        score = Resolved(score_mod, "score", "cpu") if score_mod is not None else None
        captured = score.captured if score is not None else []
        return _Attention.apply(_Call(self, index, mask, score, scale), q, k, v, *captured)

    def _mask_of(self, given):
        if given is None and not self.masks:
            return 0, None
        mask, _ = mask_or_mod(given)
        for i, known in enumerate(self.masks):
            if mask is known:
                return i, mask.handle()
        raise ValueError(
            "block_mask: got one that context_parallel was not given among its masks"
        )

    def made(self, index, mask, score, q, k, v, scale, needs, names):
        """The plan of a kind of call, made by all ranks at the first of them."""
        name = dtype_name(q)
        bits = sum(1 << i for i, wanted in enumerate(needs[:3]) if wanted)
        bits |= abi.GRADIENT_CAPTURES if names else 0
        bound = score.bound if score is not None else None
        sizes = (0, q.shape[1], k.shape[1], 0, 0, q.shape[3], v.shape[3])
        problem = (
            sizes,
            name,
            name,
            scale,
            bound,
            mask.mod if mask else None,
            "cpu",
            bits,
            names,
        )
        found = self._made.get((index, problem))
        if found is None:
            found = c_dist.Dist(self._context, problem, self.shards, index, self._transport)
            self._made[index, problem] = found
        found.prepare(mask)
        return found

    def __enter__(self) -> "ContextParallel":
        self._before, active.parallel = active.parallel, self
        return self

    def __exit__(self, *_: Any) -> None:
        active.parallel = self._before


class _Call:
    """What forward and backward of one call share."""

    def __init__(self, cp, index, mask, score, scale):
        self.cp, self.index, self.mask, self.score, self.scale = cp, index, mask, score, scale
        self.names = score.names if score is not None else []
        self.views = score.views if score is not None else []

    def open(self, q, k, v, needs):
        tensors = iter(needs[3:])
        flags = [isinstance(x, torch.Tensor) and next(tensors) for x in self._values()]
        self.wanted = tuple(n for n, w in zip(self.names, flags) if w)
        self.dist = self.cp.made(
            self.index, self.mask, self.score, q, k, v, self.scale, needs, self.wanted
        )

    def _values(self):
        return self.score.values if self.score is not None else []

    def forward(self, q, k, v):
        out = output_like(q, v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        room, at, n = _memory(self.dist.workspace(q.shape[0]))
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        self.dist.forward(_views(given), self.mask, self.names, self.views, at, n)
        del room
        return out, lse

    def backward(self, q, k, v, out, lse, d_out, d_lse, needs):
        made = {
            "d_" + n: torch.empty_like(t, memory_format=torch.contiguous_format)
            for n, t, w in zip("qkv", (q, k, v), needs)
            if w
        }
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **made}
        given["d_out"] = d_out if d_out is not None else torch.zeros_like(out)
        given["d_lse"] = d_lse
        captured = {
            n: torch.empty(t.shape, dtype=torch.float32)
            for n, t in zip(self.names, self.score.tensors if self.score else ())
            if n in self.wanted
        }
        rooms = []

        def memory(size):
            rooms.append(_memory(size))
            return rooms[-1][1]

        self.dist.backward(
            _views(given),
            self.mask,
            self.names,
            self.views,
            [(n, view(t)) for n, t in captured.items()],
            memory,
        )
        return [made.get("d_" + n) for n in "qkv"], captured


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, q, k, v, *captured):
        ctx.set_materialize_grads(False)
        q, k, v = (t.contiguous() for t in prepared(q, k, v))
        call.open(q, k, v, ctx.needs_input_grad[1:])
        out, lse = call.forward(q, k, v)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, *captured)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse, *captured = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        d_out = d_out.contiguous() if d_out is not None else None
        made, by_name = ctx.call.backward(q, k, v, out, lse, d_out, d_lse, needs)
        names = iter(ctx.call.wanted)
        more = [
            by_name[next(names)].to(t.dtype).view(t.shape) if w else None
            for t, w in zip(captured, needs[3:])
        ]
        return None, *made, *more


# ---- the call ----


def context_parallel(
    group: Optional[dist.ProcessGroup],
    query_shape: Sequence[int],
    masks: Sequence[Any] = (),
    *,
    layers: Optional[Sequence[int]] = None,
    kv_heads: Optional[int] = None,
    dtype: torch.dtype = torch.float32,
    seconds: float = 300.0,
) -> ContextParallel:
    """Deals the rows of a sequence to the processes of a group, so that each has as much to
    compute under the masks; called by all of them with equal arguments. Inside of `with` (one
    at a time in a process) flex_attention takes this rank's rows of query, key and value, with
    masks and scores of the whole sequence: block_mask is one of `masks`, or None if there are
    none. Results are one process's bit for bit; gradients are the same bits every time; those
    of tensors that a score captures are whole and the same on every rank.

    query_shape: [B, H, N, D] of the whole query. masks: the BlockMasks of a model's layers,
    [.., N, N]; layers: how many layers have each. seconds: how long a rank waits for others.
    """
    return ContextParallel(group, query_shape, masks, layers, kv_heads, dtype, seconds)


def _whole(given):
    mask, mod = mask_or_mod(given)
    if mask is None or mod is not None:
        raise TypeError(f"masks: got {given!r}, expected BlockMasks")
    return mask


def _expand(ranges):
    if not ranges:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(a, a + n) for a, n in ranges])


def _memory(size):
    """(owner, aligned address, bytes)"""
    room = torch.empty(size + 64, dtype=torch.uint8)
    return room, (room.data_ptr() + 63) & ~63, size


def _views(tensors):
    return {n: view(t) if t is not None and t.numel() else None for n, t in tensors.items()}
