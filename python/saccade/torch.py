"""FlexAttention's API for PyTorch tensors, on the CPU and on CUDA.

    from saccade.torch import flex_attention, create_block_mask

is the only line to change. Differences: nothing needs torch.compile, there is no quadratic
fall-back, masks of any length are proven instead of evaluated, Python numbers and tensors in a
mod's closure may change without compiling anything.
"""

from __future__ import annotations

import threading
from typing import Callable, NamedTuple, Optional, Union

import torch

from . import _core
from ._masks import BlockMask, and_masks, create_block_mask, create_mask, noop_mask, or_masks
from ._mods import AnyMod, Watch, dtype_name, mask, resolve, score, view

__all__ = [
    "flex_attention",
    "create_block_mask",
    "create_mask",
    "BlockMask",
    "and_masks",
    "or_masks",
    "noop_mask",
    "AuxRequest",
    "AuxOutput",
    "mask",
    "score",
    "explain",
    "register_transformers",
    "benchmark",
]


ScoreMod = Union[Callable, str, AnyMod]  # (score, b, h, q_idx, kv_idx) -> score
MaskMod = Union[Callable, str, AnyMod]  # (b, h, q_idx, kv_idx) -> bool


class AuxRequest(NamedTuple):
    """What else to return: lse [B, H, Q] and largest score of each row, f32, natural log."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What was asked for; None where it was not."""

    lse: Optional[torch.Tensor] = None
    max_scores: Optional[torch.Tensor] = None


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[ScoreMod] = None,
    block_mask: Union[BlockMask, MaskMod, None] = None,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Optional[dict] = None,
    *,
    return_aux: Optional[AuxRequest] = None,
):
    """softmax(mask(score_mod(scale * query key^T))) value, fused and exact.

    query [B, Hq, L, E], key [B, Hkv, S, E], value [B, Hkv, S, Ev], one dtype (f32, f16, bf16)
    and device, last dimension contiguous, other strides free; key and value may have batch 1.
    score_mod: callable (score, b, h, q_idx, kv_idx) -> score, language text, or saccade.score.
    block_mask: a BlockMask, language text, a callable mask_mod, or saccade.mask.
    scale: default 1/sqrt(E). enable_gqa: needed where Hq != Hkv.
    kernel_options: {"BACKEND": "auto" | "cpu" | "cuda" | "ref"}; FlexAttention's tuning keys
    are accepted and not needed. Returns out [B, Hq, L, Ev]; with return_lse (out, lse); with
    return_aux (out, AuxOutput). Source: FlexAttention (arXiv 2412.05496).
    """
    if return_lse and return_aux is not None:
        raise ValueError("got both return_lse and return_aux, expected one")
    want_lse = return_lse or (return_aux is not None and return_aux.lse)
    want_max = return_aux is not None and return_aux.max_scores
    if torch.compiler.is_compiling():
        from ._compiled import flex

        out, lse, row_max = flex(
            query, key, value, score_mod, block_mask, scale, want_lse, want_max, enable_gqa
        )
    elif torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        out, lse, row_max = _Attention.apply(
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            kernel_options,
            want_lse,
            want_max,
            enable_gqa,
        )
    else:
        out, lse, row_max = _run(
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            kernel_options,
            want_lse,
            want_max,
            enable_gqa,
        )
    if return_aux is not None:
        return out, AuxOutput(lse, row_max)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """Forward as a node of the graph, so that backward has its place."""

    @staticmethod
    def forward(ctx, query, key, value, *arguments):
        out, lse, row_max = _run(query, key, value, *arguments)
        if row_max is not None:
            ctx.mark_non_differentiable(row_max)
        return out, lse, row_max

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(
            "saccade: flex_attention computes no gradients, expected a call under "
            "torch.no_grad() or inputs that do not require them"
        )


def _check(q, k, v, enable_gqa):
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim() != 4:
            raise ValueError(f"{name}: got {t.dim()} dimensions, expected 4: [B, H, N, D]")
    if q.dtype is not k.dtype or q.dtype is not v.dtype:
        raise ValueError(
            f"query, key, value: got dtypes {q.dtype}, {k.dtype}, {v.dtype}, "
            "expected one dtype"
        )
    if q.device != k.device or q.device != v.device:
        raise ValueError(
            f"query, key, value: got devices {q.device}, {k.device}, {v.device}, "
            "expected one device"
        )
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        raise ValueError(
            f"got an empty tensor ({tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}), expected every length greater than 0"
        )
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(
            f"got {q.shape[1]} query heads and {k.shape[1]} key heads, expected "
            "equal numbers, or enable_gqa=True"
        )


class _Runner:
    """Everything a warm call needs that does not change: plan, captures, block mask."""

    def __init__(self, q, k, v, score_mod, block_mask, scale, options):
        self.keep = [score_mod, block_mask]
        self.watch = [
            Watch(m)
            for m in (score_mod, block_mask)
            if callable(m) and not isinstance(m, BlockMask)
        ]
        names, views, bound = [], [], None
        if score_mod is not None:
            bound, views, kept = resolve(score_mod, "score", q.device.type)
            names = list(bound.names)
            self.keep.append(kept)
        self.mask = self._mask(q, k, block_mask)
        self.version = self.mask.version if self.mask else None
        handle = self.mask.handle() if self.mask else None
        if handle and handle.mod:
            extra = self._mask_captures(handle, q.device, names)
            names, views = names + [n for n, _ in extra], views + [v for _, v in extra]
        device, (B, H, Q, D) = q.device.type, q.shape
        backend = (options or {}).get("BACKEND", "auto").lower()
        backend = backend if backend in ("cpu", "cuda", "ref", "plain") else device
        threads = torch.get_num_threads() if device == "cpu" else 0
        name = dtype_name(q)
        self.plan = _core.plan(
            _core.context(threads),
            B if backend == "cuda" else 0,
            H,
            k.shape[1],
            D,
            v.shape[3],
            name,
            name,
            scale,
            bound,
            handle.mod if handle else None,
            backend,
        )
        self.n_bindings, self.bindings = len(names), _core.bindings(names, views)
        self.workspace = self.plan.workspace(B, H, k.shape[1], Q, k.shape[2], D, v.shape[3])
        if handle:
            handle.prepare(self.plan)
        self.handle = handle.handle if handle else 0
        self.keep.append(handle)

    def _mask(self, q, k, block_mask):
        if block_mask is None:
            return None
        if not isinstance(block_mask, BlockMask):
            return create_block_mask(
                block_mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device="cpu"
            )
        _check_mask(block_mask, q, k)
        return block_mask

    def _mask_captures(self, handle, device, score_names):
        """Captures of the mask for the kernel: the block mask has them on the host only."""
        tensors = handle.tensors
        clash = set(score_names) & set(handle.mod.names)
        if clash:
            raise ValueError(
                f"score_mod and block_mask both capture the name {min(clash)}, "
                "expected different names"
            )
        if device.type != "cuda":
            return []
        moved = [t if t.dim() == 0 else t.to(device) for t in tensors]
        self.keep.append(moved)
        return [(n, view(t)) for n, t in zip(handle.mod.names, moved)]

    def current(self) -> bool:
        if self.mask is not None and self.mask.version is not self.version:
            return False
        return all(w.unchanged() for w in self.watch)


def _check_mask(m, q, k):
    B, H, Q, KV = m.shape
    if (Q, KV) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"block_mask was created for lengths ({Q}, {KV}), got "
            f"({q.shape[2]}, {k.shape[2]}); use block_mask._adjust(q_len, kv_len) "
            "or create one for these lengths"
        )
    if B not in (1, q.shape[0]) or H not in (1, q.shape[1]):
        raise ValueError(
            f"block_mask: got batch {B} and {H} heads, expected {q.shape[0]} or 1 "
            f"and {q.shape[1]} or 1"
        )
    if m.device.type != q.device.type:
        raise RuntimeError(
            f"block_mask is on {m.device}, query on {q.device}: expected one "
            "device (block_mask.to(query.device))"
        )


_runners: dict = {}
_RUNNERS = 256
_lock = threading.Lock()
_CODE = {torch.float32: 22, torch.float16: 20, torch.bfloat16: 21, torch.float64: 23}
_POINTER = _core.POINTER.pack
_SMALL = 1 << 20  # bytes of workspace that a thread keeps for its next call


class _Call:
    """A runner for tensors of one layout: everything of the C arguments but addresses."""

    def __init__(self, runner, q, k, v, want_lse, want_max):
        self.runner = runner
        self.width = v.shape[3] if v.shape[3] != q.shape[3] else 0
        self.stats = torch.float64 if q.dtype is torch.float64 else torch.float32
        self.lse, self.row_max = want_lse, want_max
        self.cuda = q.is_cuda
        self.room = runner.workspace
        out = _output(q, v.shape[3])
        rows = q.new_empty(q.shape[:3], dtype=self.stats)
        parts = [_core.pack(view(t))[8:] for t in (q, k, v, out)]
        parts += [
            _core.pack(view(rows))[8:] if w else _core.NO_TENSOR[8:]
            for w in (want_lse, want_max)
        ]
        self.plain_out = out.is_contiguous()
        self.parts = parts
        self.parts[5] += 3 * _core.NO_TENSOR
        self.tail = _core.tail(runner.handle, runner.bindings, runner.n_bindings)

    def __call__(self, q, k, v):
        if self.width or not self.plain_out:
            out = _output(q, v.shape[3])
        else:
            out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=self.stats) if self.lse else None
        row_max = q.new_empty(q.shape[:3], dtype=self.stats) if self.row_max else None
        room, stream = _workspace(self.room, q, self.cuda), 0
        if self.cuda:
            stream = torch.cuda.current_stream(q.device).cuda_stream
        a, b, c, d, e, f = self.parts
        _core.run(
            self.runner.plan.handle,
            b"".join(
                (
                    _POINTER(q.data_ptr()),
                    a,
                    _POINTER(k.data_ptr()),
                    b,
                    _POINTER(v.data_ptr()),
                    c,
                    _POINTER(out.data_ptr()),
                    d,
                    _POINTER(lse.data_ptr() if self.lse else 0),
                    e,
                    _POINTER(row_max.data_ptr() if self.row_max else 0),
                    f,
                    self.tail,
                    _core.ENDING(
                        (room.data_ptr() + 63) & ~63 if self.room else 0, self.room, stream
                    ),
                    _core.RESERVED,
                )
            ),
        )
        return out, lse, row_max


_rooms = threading.local()


def _workspace(n, q, cuda):
    """Memory of n bytes and room to align it; a thread keeps a small one on the host."""
    if cuda or n > _SMALL:
        return torch.empty(n + 64, dtype=torch.uint8, device=q.device)
    room = getattr(_rooms, "room", None)
    if room is None:
        room = _rooms.room = torch.empty(_SMALL + 64, dtype=torch.uint8)
    return room


def _output(q, width):
    """Empty [B, H, L, Ev] whose strides are in the order of the query's."""
    B, H, L, E = q.shape
    if q.is_contiguous():
        return q.new_empty((B, H, L, width))
    order = sorted(range(3), key=lambda d: -q.stride(d)) + [3]
    shape = [(B, H, L, width)[d] for d in order]
    return q.new_empty(shape).permute([order.index(d) for d in range(4)])


def _rows(t):
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


def _prepare(q, k, v):
    """Contiguous rows, and keys and values of batch 1 spread by stride 0."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    if k.shape[0] != q.shape[0]:
        k = k.expand(q.shape[0], -1, -1, -1)
    if v.shape[0] != q.shape[0]:
        v = v.expand(q.shape[0], -1, -1, -1)
    return q, k, v


def _autocast(q, k, v):
    device = q.device.type
    if q.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _run(q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa=True):
    q, k, v = _autocast(q, k, v)
    backend = options.get("BACKEND") if options else None
    key = (
        id(score_mod),
        id(block_mask),
        scale,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        want_lse,
        want_max,
        backend,
        gqa,
        torch.get_num_threads(),
    )
    found = _runners.get(key)
    if found is None or not found.runner.current():
        found = _make(
            key, q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa
        )
    if found.copies:
        q, k, v = _prepare(q, k, v)
    return found(q, k, v)


def _make(key, q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa):
    _check(q, k, v, gqa)
    made_q, made_k, made_v = _prepare(q, k, v)
    runner = _Runner(made_q, made_k, made_v, score_mod, block_mask, scale, options)
    made = _Call(runner, made_q, made_k, made_v, want_lse, want_max)
    made.copies = made_q is not q or made_k is not k or made_v is not v
    with _lock:
        if len(_runners) >= _RUNNERS:
            _runners.pop(next(iter(_runners)))
        _runners[key] = made
    return made


def explain(
    query, key, value, score_mod=None, block_mask=None, scale=None, kernel_options=None
) -> str:
    """What a call with these arguments runs: typed nodes, kernel, why, generated code."""
    return _Runner(
        query, key, value, score_mod, block_mask, scale, kernel_options
    ).plan.explain()


def register_transformers(name: str = "saccade") -> None:
    """Makes attn_implementation="saccade" work in Hugging Face Transformers."""
    from ._transformers import register_transformers as register

    register(name)


def benchmark(score_mod=None, mask_mod=None, **options):
    """Times the caller's mod beside SDPA and FlexAttention; see
    saccade._benchmark.benchmark."""
    from ._benchmark import benchmark as run

    return run(score_mod, mask_mod, **options)
