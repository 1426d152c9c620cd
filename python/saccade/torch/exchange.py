"""Rows of keys between the ranks of a process group, by torch's collectives: on CUDA they run
on its streams, in the order of the calls.

What rank r's rows touch of peer p's keys is one piece of a message: [B, Hkv, rows, dim] of K,
then of V. Gradients go the way back and are added up in one order, in float32.
"""

from __future__ import annotations

import contextlib
from typing import Sequence

import torch
import torch.distributed as dist

from .agreement import Differs, Limit, agree_on_counts, wait

Ranges = Sequence[tuple[int, int]]

_FEW = 4  # ranges that are copied one by one


class Rows:
    """Rows of one tensor that stand for rows of another: places[i] of the one are those of
    others[i] of the other."""

    def __init__(self, here: Ranges, there: Ranges, device):
        self.count = sum(n for _, n in here)
        self.few = list(zip(here, there)) if len(here) <= _FEW else None
        if self.few is None:
            self.here, self.there = expand(here).to(device), expand(there).to(device)
            self.are_packed = list(here) == packed(here), list(there) == packed(there)

    def _here(self, t):
        """The list of rows `here` of t; None where they are all of its rows, in order."""
        return None if self.are_packed[0] and t.shape[2] == self.count else self.here

    def _there(self, t):
        return None if self.are_packed[1] and t.shape[2] == self.count else self.there

    def copy(self, source, target):
        """Rows `here` of source to rows `there` of target, both [B, Hkv, rows, dim]."""
        if self.few is None:
            _copy_rows(source, self._here(source), target, self._there(target))
            return
        for (a, n), (b, _) in self.few:
            target[:, :, b : b + n].copy_(source[:, :, a : a + n])

    def take(self, source, target):
        """Rows `there` of source to rows `here` of target."""
        if self.few is None:
            _copy_rows(source, self._there(source), target, self._here(target))
            return
        for (a, n), (b, _) in self.few:
            target[:, :, a : a + n].copy_(source[:, :, b : b + n])

    def add(self, source, target):
        """Adds rows `there` of source to rows `here` of target; no row comes twice."""
        if self.few is None:
            at = self._there(source)
            target.index_add_(
                2, self.here, source if at is None else source.index_select(2, at)
            )
            return
        for (a, n), (b, _) in self.few:
            target[:, :, a : a + n] += source[:, :, b : b + n]


def _copy_rows(source, of, target, to):
    """Rows `of` of source to rows `to` of target; None: all of them, in order."""
    source, target = _wide(source, target)
    if of is not None:
        if to is None and target.is_contiguous():
            torch.index_select(source, 2, of, out=target)
            return
        source = source.index_select(2, of)
    if to is None:
        target.copy_(source)
    else:
        target.index_copy_(2, to, source)


def _wide(source, target):
    """The same rows in elements of 16 bytes where they are whole ones: torch moves elements
    one by one, whatever their size."""
    fits = all(
        t.is_contiguous() and t.shape[3] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
        for t in (source, target)
    )
    if not fits:
        return source, target
    return source.view(torch.complex128), target.view(torch.complex128)


def expand(ranges: Ranges) -> torch.Tensor:
    """The numbers in these ranges, int64."""
    if not ranges:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(a, a + n) for a, n in ranges])


def packed(ranges: Ranges) -> list[tuple[int, int]]:
    """The same lengths, one after the other from 0."""
    made, at = [], 0
    for _, n in ranges:
        made.append((at, n))
        at += n
    return made


def _local(ranges: Ranges, held: Ranges) -> list[tuple[int, int]]:
    """Where ranges of the sequence lie among those that a rank holds; each lies in one."""
    made = []
    for first, n in ranges:
        before = 0
        for a, m in held:
            if a <= first < a + m:
                made.append((before + first - a, n))
                break
            before += m
    return made


def _exchange(outgoing, counts_out, counts_in, width, group, limit, told=0):
    """One all-to-all of so many rows of `width` elements to and from each rank: what comes, and
    what to wait for. told: a digest of the call, where ranks have not agreed on it."""
    incoming = outgoing.new_empty(sum(counts_in) * width)
    if outgoing.device.type == "cpu":
        each = width * outgoing.element_size()
        agree_on_counts(counts_out, counts_in, each, told, group, limit)
    work = dist.all_to_all_single(
        incoming,
        outgoing,
        [n * width for n in counts_in],
        [n * width for n in counts_out],
        group=group,
        async_op=True,
    )
    return incoming, work


@contextlib.contextmanager
def _answered():
    """Around an exchange: says of torch's errors what they mean here."""
    try:
        yield
    except (Differs, torch.OutOfMemoryError):
        raise
    except RuntimeError as reason:
        raise RuntimeError(
            f"context_parallel: another rank failed, or did not answer: {reason}"
        ) from None


def _summed(captured, ranks, group, limit):
    """Each rank's part of gradients, float32 by name, as sums over ranks in their order, in
    double, rounded once."""
    if not captured:
        return captured
    flat = torch.cat([t.reshape(-1) for t in captured.values()])
    parts = [torch.empty_like(flat) for _ in range(ranks)]
    wait(dist.all_gather(parts, flat, group=group, async_op=True), limit)
    total = torch.zeros_like(flat, dtype=torch.float64)
    for part in parts:
        total += part
    made = total.float().split([t.numel() for t in captured.values()])
    return {n: x.view(t.shape) for (n, t), x in zip(captured.items(), made)}


class Gathering:
    """Which rows of keys come and go for one mask, and how."""

    def __init__(self, shards, index: int, rank: int, ranks: int, group, device, limit: Limit):
        self.rank, self.ranks, self.group, self.limit = rank, ranks, group, limit
        held = shards.keys(rank)
        self.held = sum(n for _, n in held)
        # by peer: rows held here that it needs, packed; rows that come, to where they stand
        self.sent, self.got = [], []
        for p in range(ranks):
            gives, takes = shards.needs(index, p, rank), shards.needs(index, rank, p)
            self.sent.append(Rows(_local(gives, held), packed(gives), device))
            self.got.append(Rows(packed(takes), takes, device))
        takes = shards.needs(index, rank, rank)
        self.own = Rows(_local(takes, held), takes, device)

    def _parts(self, flat, rows, shape, dims):
        """(peer, views of K's and V's rows) of a message buffer."""
        B, heads = shape
        at = 0
        for p, x in enumerate(rows):
            if p == self.rank or not x.count:
                continue
            made = []
            for dim in dims:
                size = B * heads * x.count * dim
                made.append(flat[at : at + size].view(B, heads, x.count, dim))
                at += size
            yield p, made

    def _counts(self, rows):
        return [0 if p == self.rank else x.count for p, x in enumerate(rows)]

    def gather(self, k, v, k_pool, v_pool):
        """Keys that rows here touch into pools of the whole sequence; the rest stays."""
        shape, dims = k.shape[:2], (k.shape[3], v.shape[3])
        width = shape[0] * shape[1] * sum(dims)
        counts = self._counts(self.sent), self._counts(self.got)
        outgoing = k.new_empty(sum(counts[0]) * width)
        for p, (to_k, to_v) in self._parts(outgoing, self.sent, shape, dims):
            self.sent[p].copy(k, to_k)
            self.sent[p].copy(v, to_v)
        incoming, work = _exchange(outgoing, *counts, width, self.group, self.limit)
        self.own.copy(k, k_pool)  # while the others' travel
        self.own.copy(v, v_pool)
        wait(work, self.limit)
        for p, (of_k, of_v) in self._parts(incoming, self.got, shape, dims):
            self.got[p].copy(of_k, k_pool)
            self.got[p].copy(of_v, v_pool)

    def scatter(self, d_k, d_v):
        """Gradients, float32, of the whole sequence's keys that rows here touch, to the ranks
        that hold the keys: for those held here this rank's part, and the others' added to it
        in the order of ranks."""
        shape, dims = d_k.shape[:2], (d_k.shape[3], d_v.shape[3])
        width = shape[0] * shape[1] * sum(dims)
        counts = self._counts(self.got), self._counts(self.sent)
        outgoing = d_k.new_empty(sum(counts[0]) * width)
        for p, (to_k, to_v) in self._parts(outgoing, self.got, shape, dims):
            self.got[p].take(d_k, to_k)
            self.got[p].take(d_v, to_v)
        incoming, work = _exchange(outgoing, *counts, width, self.group, self.limit)
        fill = d_k.new_empty if self.own.count == self.held else d_k.new_zeros
        made = [fill((*shape, self.held, dim)) for dim in dims]
        for of, to in zip((d_k, d_v), made):  # while the others' travel
            self.own.take(of, to)
        wait(work, self.limit)
        for p, parts in self._parts(incoming, self.sent, shape, dims):
            for part, to in zip(parts, made):
                self.sent[p].add(part, to)
        return made

    def summed(self, captured):
        return _summed(captured, self.ranks, self.group, self.limit)


class Heads:
    """Rows of all heads for all rows of some heads, and back: rank r has heads r H / ranks and
    on of each tensor. What goes from a rank to another is [B, heads, rows, dim] of each."""

    def __init__(
        self, rows: Sequence[Ranges], rank: int, length: int, group, device, limit: Limit
    ):
        self.rank, self.ranks, self.length = rank, len(rows), length
        self.group, self.limit = group, limit
        self.rows = [Rows(packed(x), x, device) for x in rows]
        self.counts = [x.count for x in self.rows]

    def to_heads(self, told, *tensors):
        """[B, H, rows here, dim] of one dtype to [B, H / ranks, all rows, dim]. told: a digest
        of the call."""
        sizes = [(t.shape[0], t.shape[1] // self.ranks, t.shape[3]) for t in tensors]
        width = sum(B * n * dim for B, n, dim in sizes)
        own = self.counts[self.rank]
        outgoing = torch.cat(
            [
                t[:, r * n : (r + 1) * n].reshape(-1)
                for r in range(self.ranks)
                for t, (_, n, _) in zip(tensors, sizes)
            ]
        )
        counts = [own] * self.ranks, self.counts
        with _answered():
            incoming, work = _exchange(outgoing, *counts, width, self.group, self.limit, told)
            wait(work, self.limit)
        made = [t.new_empty((B, n, self.length, dim)) for t, (B, n, dim) in zip(tensors, sizes)]
        at = 0
        for count, rows in zip(self.counts, self.rows):
            for (B, n, dim), to in zip(sizes, made):
                size = B * n * count * dim
                if count:
                    rows.copy(incoming[at : at + size].view(B, n, count, dim), to)
                at += size
        return made

    def to_rows(self, told, *tensors):
        """The way back: [B, heads here, all rows, dim] to [B, H, rows here, dim]."""
        sizes = [(t.shape[0], t.shape[1], t.shape[3]) for t in tensors]
        width = sum(B * n * dim for B, n, dim in sizes)
        own = self.counts[self.rank]
        outgoing = tensors[0].new_empty(self.length * width)
        at = 0
        for count, rows in zip(self.counts, self.rows):
            for (B, n, dim), of in zip(sizes, tensors):
                size = B * n * count * dim
                if count:
                    rows.take(of, outgoing[at : at + size].view(B, n, count, dim))
                at += size
        counts = self.counts, [own] * self.ranks
        with _answered():
            incoming, work = _exchange(outgoing, *counts, width, self.group, self.limit, told)
            wait(work, self.limit)
        made = [
            t.new_empty((B, n * self.ranks, own, dim)) for t, (B, n, dim) in zip(tensors, sizes)
        ]
        at = 0
        for r in range(self.ranks):
            for (B, n, dim), to in zip(sizes, made):
                size = B * n * own * dim
                to[:, r * n : (r + 1) * n] = incoming[at : at + size].view(B, n, own, dim)
                at += size
        return made

    def summed(self, captured):
        return _summed(captured, self.ranks, self.group, self.limit)
