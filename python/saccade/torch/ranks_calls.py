"""One call of flex_attention over ranks, forward and backward, in three ways: the C library
gathers keys (Exchanged), torch's collectives do (Gathered), or rows are exchanged for heads
(Spread)."""

from __future__ import annotations

import torch

from ..c import abi
from .agreement import digest
from .calls import current_stream, keeps_f32, kept_f32, output_like, prepared
from .checks import NO_SECOND_OF
from .memory import check_stays
from .mods import dtype_name, view
from .once import last
from .recording import is_recorded

_SAVED = 6  # tensors, or None, that a call leaves for its backward


class _Call:
    """What forward and backward of one call share."""

    def __init__(self, cp, index, mask, score, scale):
        self.cp, self.index, self.mask, self.score, self.scale = cp, index, mask, score, scale
        self.names = score.names if score is not None else []
        self.views = score.views if score is not None else []

    def count(self, q, k, v, is_backward):
        """For FlopCounterMode. Over heads backward has fewer of them, of more rows."""
        if is_recorded():
            torch.ops.saccade.over_ranks(q, k, v, self.cp.length, is_backward)

    def open(self, q, k, v, needs):
        """Before the first run, with the tensors that the library computes on."""
        tensors = iter(needs[3:])
        values = self.score.values if self.score is not None else []
        flags = [isinstance(x, torch.Tensor) and next(tensors) for x in values]
        self.wanted = tuple(n for n, w in zip(self.names, flags) if w)
        bits = sum(1 << i for i, wanted in enumerate(needs[:3]) if wanted)
        bits |= abi.GRADIENT_CAPTURES if self.wanted else 0
        more = self.cp.of_mask(self.mask)
        self.all_names = [*self.names, *[n for n, _ in more]]
        self.all_views = [*self.views, *[x for _, x in more]]
        self.bits = self._bits(bits)
        keeps = keeps_f32(q.dtype, self.score and self.score.bound, self.wanted)
        self.out_dtype = torch.float32 if keeps else q.dtype
        self.dist, self.told = self.cp.made(
            self.index, self.mask, self.score, q, k, v, self.scale, self.bits, self.wanted,
            kept_f32(dtype_name(q)) if keeps else (),
        )  # fmt: skip
        # by which the others notice a number that is not theirs
        self.number = self.cp.call = digest([self.cp.call, *numbers_of(self.score)])

    def _bits(self, bits):
        return bits

    def follow(self):
        """Before the backward pass: tensors may have moved in memory since the first run."""
        check_stays(self.mask)
        if self.score is not None:
            self.all_views[: len(self.names)] = self.score.again().views

    def _captured(self):
        """Room for gradients of captures, by name."""
        tensors = self.score.tensors if self.score else ()
        return {
            n: torch.empty(t.shape, dtype=torch.float32, device=self.cp.device)
            for n, t in zip(self.names, tensors)
            if n in self.wanted
        }


class Exchanged(_Call):
    """The library's gather and staged modes. On GPUs keys that were gathered for forward are
    kept for backward."""

    def forward(self, q, k, v, needs):
        self.open(q, k, v, needs)
        out = output_like(q, v.shape[3], self.out_dtype)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        room, at, n = _memory(self.dist.workspace(q.shape[0]), q.device)
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        kept = None
        if q.is_cuda and any(needs) and self.cp.keep and self.cp.mode == "gather":
            size = self.dist.received(q.shape[0])
            kept = torch.empty(size + 1, dtype=torch.uint8, device=q.device)
            self._keep(q, kept)
        self.dist.forward(
            _views(given), self.mask, self.all_names, self.all_views, at, n, _stream(q)
        )
        del room
        return out, lse, (q, k, v, out, lse, kept)

    def _keep(self, q, kept):
        self.dist.keep(q.shape[0], q.get_device(), kept.data_ptr())

    def backward(self, q, k, v, out, lse, kept, d_out, d_lse, needs):
        made = {"d_" + n: _like(t) for n, t, w in zip("qkv", (q, k, v), needs) if w}
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **made}
        given["d_out"] = d_out if d_out is not None else torch.zeros_like(out, dtype=q.dtype)
        given["d_lse"] = d_lse
        captured = self._captured()
        rooms = []

        def memory(size):
            rooms.append(_memory(size, q.device))
            if kept is not None:  # nothing that fails may come between it and the run
                self._keep(q, kept)
            return rooms[-1][1]

        self.dist.backward(
            _views(given),
            self.mask,
            self.all_names,
            self.all_views,
            [(n, view(t)) for n, t in captured.items()],
            memory,
            _stream(q),
        )
        return [made.get("d_" + n) for n in "qkv"], captured


class _Local(_Call):
    """Keys lie here, of the whole sequence, when the library runs."""

    def run(self, q, k, v):
        out = output_like(q, v.shape[3], self.out_dtype)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        if q.shape[2]:
            room, at, n = _memory(self.dist.local_workspace(q.shape[0]), q.device)
            given = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
            self.dist.forward_local(
                _views(given), self.mask, self.all_names, self.all_views, at, n, _stream(q)
            )
            del room
        return out, lse

    def run_back(self, given, made, captured):
        q = given["q"]
        if not q.shape[2]:
            for t in (*made.values(), *captured.values()):
                t.zero_()
            return
        rooms = []

        def memory(size):
            rooms.append(_memory(size, q.device))
            return rooms[-1][1]

        self.dist.backward_local(
            _views({**given, **made}),
            self.mask,
            self.all_names,
            self.all_views,
            [(n, view(t)) for n, t in captured.items()],
            memory,
            _stream(q),
        )


class Gathered(_Local):
    """Keys that rows here touch come by torch's collectives, and their gradients go back."""

    def _bits(self, bits):
        both = abi.GRADIENT_K | abi.GRADIENT_V
        return bits | both if bits & both else bits

    def forward(self, q, k, v, needs):
        self.open(q, k, v, needs)
        pools = self.cp.pools(self.index, k, v)
        self.cp.gathering(self.index).gather(k, v, *pools)
        out, lse = self.run(q, *pools)
        return out, lse, (q, k, v, out, lse, None)

    def backward(self, q, k, v, out, lse, _, d_out, d_lse, needs):
        pools = self.cp.pools(self.index, k, v)
        way = self.cp.gathering(self.index)
        way.gather(k, v, *pools)
        made = {"d_q": _like(q)} if needs[0] else {}
        if needs[1] or needs[2]:
            made["d_k"], made["d_v"] = (
                torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in pools
            )
        captured = self._captured()
        given = {"q": q, "k": pools[0], "v": pools[1], "out": out, "lse": lse, "d_lse": d_lse}
        given["d_out"] = d_out if d_out is not None else torch.zeros_like(out, dtype=q.dtype)
        self.run_back(given, made, captured)
        d_k = d_v = None
        if needs[1] or needs[2]:
            d_k, d_v = (
                t.to(of.dtype) if w else None
                for t, of, w in zip(way.scatter(made["d_k"], made["d_v"]), (k, v), needs[1:3])
            )
        return [made.get("d_q"), d_k, d_v], way.summed(captured)


class Spread(_Local):
    """All rows of some heads, in exchange for some rows of all heads."""

    def _digest(self):
        """What every exchange tells: of what kind the call is, and which."""
        return (self.told + self.cp.call) % (1 << 63)

    def forward(self, q, k, v, needs):
        way = self.cp.spreading()
        self.open(*(t[:, : t.shape[1] // self.cp.ranks] for t in (q, k, v)), needs)
        told = self._digest()
        q, k, v = way.to_heads(told, q, k, v)
        out, lse = self.run(q, k, v)
        saved = q, k, v, out, lse, None
        (lse,) = way.to_rows(told, lse.unsqueeze(3))
        return way.to_rows(told, out.to(q.dtype))[0], lse.squeeze(3), saved

    def backward(self, q, k, v, out, lse, _, d_out, d_lse, needs):
        way = self.cp.spreading()
        told = self._digest()
        if d_out is None:
            d_out = torch.zeros_like(out, dtype=q.dtype)
        else:
            (d_out,) = way.to_heads(told, d_out)
        if d_lse is not None:
            d_lse = way.to_heads(told, d_lse.unsqueeze(3))[0].squeeze(3)
        made = {"d_" + n: _like(t) for n, t, w in zip("qkv", (q, k, v), needs) if w}
        captured = self._captured()
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out}
        self.run_back({**given, "d_lse": d_lse}, made, captured)
        rows = dict(zip(made, way.to_rows(told, *made.values()))) if made else {}
        return [rows.get("d_" + n) for n in "qkv"], way.summed(captured)


class Attention(torch.autograd.Function):
    """call: one of the three above. linked: of q, k, v and what is captured (once.link). What
    is saved first is like nothing that attention without ranks saves, so that checkpointing
    notices where it computes that instead."""

    @staticmethod
    def forward(ctx, call, linked, q, k, v, *captured):
        ctx.set_materialize_grads(False)
        q, k, v = (t.contiguous() for t in prepared(q, k, v))
        call.count(q, k, v, False)
        with torch.cuda.device_of(q):
            out, lse, saved = call.forward(q, k, v, ctx.needs_input_grad[2:])
            out = out.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(linked, *saved, *captured)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        with ctx.call.cp.guarded():
            linked, *saved = ctx.saved_tensors  # once: checkpointing makes them for one look
            with torch.no_grad():
                made = Attention._gradients(ctx, saved, d_out, d_lse)
        message = NO_SECOND_OF.format("context_parallel")
        return None, None, *last(message, made, (d_out, d_lse, linked))

    @staticmethod
    def _gradients(ctx, saved, d_out, d_lse):
        (q, *_), captured = saved[:_SAVED], saved[_SAVED:]
        needs = ctx.needs_input_grad[2:]
        d_out = d_out.contiguous().resolve_neg() if d_out is not None else None
        d_lse = d_lse.resolve_neg() if d_lse is not None else None
        ctx.call.count(*saved[:3], True)
        ctx.call.cp.call = digest([ctx.call.number, "backward"])
        ctx.call.follow()
        with torch.cuda.device_of(q):
            made, by_name = ctx.call.backward(*saved[:_SAVED], d_out, d_lse, needs)
        names = iter(ctx.call.wanted)
        more = [
            by_name[next(names)].to(t.dtype).view(t.shape) if w else None
            for t, w in zip(captured, needs[3:])
        ]
        return *made, *more


def numbers_of(score):
    """What a score captures by value."""
    return [t for t in score.tensors if not t.dim()] if score is not None else []


def _like(t):
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _stream(t):
    return current_stream(t.get_device()) if t.is_cuda else None


def _memory(size, device):
    """(owner, aligned address, bytes)"""
    room = torch.empty(size + 64, dtype=torch.uint8, device=device)
    return room, (room.data_ptr() + 63) & ~63, size


def _views(tensors):
    return {n: view(t) if t is not None and t.numel() else None for n, t in tensors.items()}
