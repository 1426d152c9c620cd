"""FlexAttention's API for PyTorch tensors, on the CPU and on CUDA.

    from saccade.torch import flex_attention, create_block_mask

is the only line to change. Differences: nothing needs torch.compile, there is no quadratic
fall-back, masks of any length are proven instead of evaluated, Python numbers and tensors in a
mod's closure may change without compiling anything.
"""

from __future__ import annotations

import difflib
import functools
import threading
import weakref
from typing import Any, Callable, NamedTuple, Optional, Union

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import _core
from ._lib import BadValue
from ._masks import (
    BlockMask,
    adopted,
    and_masks,
    block_mask_of,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)
from ._mods import (
    AnyMod,
    Resolved,
    Watch,
    as_tensor,
    dtype_name,
    identity,
    layout,
    mask,
    owners,
    score,
    view,
)

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


ScoreMod = Union[Callable[..., Any], str, AnyMod]  # (score, b, h, q_idx, kv_idx) -> score
MaskMod = Union[Callable[..., Any], str, AnyMod]  # (b, h, q_idx, kv_idx) -> bool


class AuxRequest(NamedTuple):
    """What else to return: lse [B, H, Q] and largest score of each row, f32, natural log."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What was asked for; None where it was not."""

    lse: Optional[torch.Tensor] = None
    max_scores: Optional[torch.Tensor] = None


# FlexAttention's keys that choose how fast its kernels run, never what they compute. They are
# accepted, with fwd_ or bwd_ before them too, and change nothing: tiles are chosen by the plan.
_TUNING = frozenset(
    "num_warps num_stages BLOCK_M BLOCK_N BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2 PRESCALE_QK "
    "ROWS_GUARANTEED_SAFE BLOCKS_ARE_CONTIGUOUS WRITE_DQ FORCE_USE_FLEX_ATTENTION USE_TMA "
    "kpack matrix_instr_nonkdim waves_per_eu num_consumer_groups num_buffers_warp_spec "
    "SPLIT_KV SKIP_MASK_SCORE IS_DIVISIBLE".split()
)
_BACKENDS = dict.fromkeys(("auto", "triton", "triton_decode", "flash"), "auto")
_BACKENDS |= {name: name for name in ("cpu", "cuda", "ref", "plain")}


def _backend(options):
    """The back end that kernel_options ask for; refuses keys that mean nothing."""
    chosen = "auto"
    for key, value in options.items():
        name = key[4:] if key[:4] in ("fwd_", "bwd_") else key
        if name == "BACKEND":
            chosen = _BACKENDS.get(str(value).lower())
            if chosen is None:
                raise ValueError(
                    f"kernel_options: Invalid BACKEND value {value!r}, expected AUTO, cpu, "
                    "cuda or ref (TRITON, TRITON_DECODE and FLASH mean AUTO)"
                )
        elif name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX"):
            raise ValueError(
                f"kernel_options: got {key}, expected return_aux=AuxRequest(lse=..., "
                "max_scores=...)"
            )
        elif name not in _TUNING:
            near = difflib.get_close_matches(name, [*_TUNING, "BACKEND"], 1)
            raise ValueError(
                f"kernel_options: got unknown key {key!r}"
                + (f", did you mean {near[0]!r}?" if near else "")
            )
    if "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION"):
        raise _bad("kernel_options: got BACKEND and FORCE_USE_FLEX_ATTENTION, expected one")
    return chosen


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[ScoreMod] = None,
    block_mask: Union[BlockMask, MaskMod, None] = None,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Optional[dict[str, Any]] = None,
    *,
    return_aux: Optional[AuxRequest] = None,
) -> Any:
    """softmax(mask(score_mod(scale * query key^T))) value, fused and exact.

    query [B, Hq, L, E], key [B, Hkv, S, E], value [B, Hkv, S, Ev], one dtype (f32, f16, bf16)
    and device, last dimension contiguous, other strides free; key and value may have batch 1.
    (f64 on the CPU too, by the reference: exact and slow.)
    score_mod: callable (score, b, h, q_idx, kv_idx) -> score, language text, or saccade.score.
    block_mask: a BlockMask, language text, a callable mask_mod, or saccade.mask.
    scale: default 1/sqrt(E). enable_gqa: needed where Hq != Hkv.
    kernel_options: {"BACKEND": "auto" | "cpu" | "cuda" | "ref"}; FlexAttention's tuning keys
    are accepted and not needed. Returns out [B, Hq, L, Ev]; with return_lse (out, lse); with
    return_aux (out, AuxOutput). Errors: ValueError for shapes, dtypes, devices, text; TypeError
    for a mod that can't be traced, with its line; NotImplementedError from backward.
    Source: FlexAttention (arXiv 2412.05496).
    """
    if return_lse and return_aux is not None:
        raise ValueError("got both return_lse and return_aux, expected one")
    want_lse = return_lse or (return_aux is not None and return_aux.lse)
    want_max = return_aux is not None and return_aux.max_scores
    run = _run
    if torch.compiler.is_compiling():
        from ._compiled import flex as run
    out, lse, row_max = run(
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


_NO_BACKWARD = (
    "saccade: flex_attention computes no gradients yet, expected a call under "
    "torch.no_grad(), or query, key, value and captured tensors that do not require them"
)


class _Attention(torch.autograd.Function):
    """Forward as a node of the graph, so that backward has its place: its inputs are query,
    key, value and the captured tensors that require gradients."""

    @staticmethod
    def forward(entry, query, key, value, *captured):
        return entry.call(query, key, value, entry.tail)

    @staticmethod
    def setup_context(ctx, inputs, output):
        if output[2] is not None:
            ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(_NO_BACKWARD)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("saccade: flex_attention has no forward-mode derivative")

    @staticmethod
    def vmap(info, in_dims, *arguments):
        raise NotImplementedError(_NO_VMAP)


_NO_VMAP = (
    "saccade: got tensors inside a torch.func transform (vmap, grad, jvp), expected plain "
    "ones; a mapped dimension folds into batch or heads (query.flatten(0, 1))"
)


def _bad(message):
    return BadValue("EINVAL", message)


class _NotFour(BadValue, NotImplementedError):
    """FlexAttention calls this case not implemented."""


def _check(q, k, v, enable_gqa):
    for name, t in (("query", q), ("key", k), ("value", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: got a {type(t).__name__}, expected a tensor")
        if t.is_nested:
            raise NotImplementedError(
                f"{name}: got a NestedTensor, expected a packed tensor with a document mask"
            )
        if t.layout is not torch.strided:
            raise TypeError(f"{name}: got a tensor of layout {t.layout}, expected strided")
    _check_layout(q, k, v)
    if q.device.type not in ("cpu", "cuda"):
        raise _bad(f"query: got device {q.device}, expected cpu or cuda")
    _check_shapes(q, k, v, enable_gqa)


def _check_layout(q, k, v):
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim() != 4:
            raise _NotFour(
                "EINVAL",
                f"{name}: got {t.dim()} dimensions {tuple(t.shape)}, expected 4: [B, H, N, D]",
            )
    if q.dtype is not k.dtype or q.dtype is not v.dtype:
        raise _bad(
            f"query, key, value: got dtypes {q.dtype}, {k.dtype}, {v.dtype}, "
            "expected one dtype"
        )
    if q.device != k.device or q.device != v.device:
        raise _bad(
            f"query, key, value: got devices {q.device}, {k.device}, {v.device}, "
            "expected one device"
        )


def _check_shapes(q, k, v, enable_gqa):
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        raise _bad(f"{shapes}: got an empty tensor, expected every length greater than 0")
    if q.shape[3] != k.shape[3]:
        raise _bad(f"{shapes}: expected query and key to have the same last dimension")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise _bad(f"{shapes}: expected key and value of the same heads and length")
    if k.shape[0] not in (1, q.shape[0]) or v.shape[0] not in (1, q.shape[0]):
        raise _bad(f"{shapes}: expected key and value of query's batch, or of batch 1")
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise _bad(
            f"{shapes}: got {q.shape[1]} query heads and {k.shape[1]} key heads, expected "
            "equal numbers, or enable_gqa=True"
        )
    if q.shape[1] % k.shape[1]:
        raise _bad(
            f"{shapes}: got {q.shape[1]} query heads over {k.shape[1]} key heads, expected a "
            "multiple"
        )


class _Runner:
    """What calls of one problem share: plan, captures, block mask, workspace."""

    def __init__(self, q, k, v, score, mask, scale, backend):
        self.keep = [score.bound] if score is not None else []
        names, views, bound = [], [], None
        if score is not None:
            bound, names, views = score.bound, score.names, list(score.views)
        handle = mask.handle() if mask else None
        if handle and handle.mod:
            extra = self._mask_captures(handle, q.device, names)
            names, views = names + [n for n, _ in extra], views + [v for _, v in extra]
        device, (B, H, Q, D) = q.device.type, q.shape
        if backend == "auto":  # nothing but the reference computes in f64
            backend = "ref" if q.dtype is torch.float64 and device == "cpu" else device
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
            handle.prepare(self.plan, max(q.get_device(), 0))
        self.handle = handle.handle if handle else 0
        self.keep.append(handle)

    def _mask_captures(self, handle, device, score_names):
        """Captures of the mask for the kernel: the block mask has them on the host only."""
        clash = set(score_names) & set(handle.mod.names)
        if clash:
            raise ValueError(
                f"score_mod and block_mask both capture the name {min(clash)}, "
                "expected different names"
            )
        if device.type != "cuda":
            return []
        moved = [t if t.dim() == 0 else t.to(device) for t in handle.tensors]
        self.keep.append(moved)
        return [(n, view(t)) for n, t in zip(handle.mod.names, moved)]


def _check_mask(m, q, k):
    B, H, Q, KV = m.shape
    if (Q, KV) != (q.shape[2], k.shape[2]):
        raise _bad(
            f"block_mask was created for lengths ({Q}, {KV}), got "
            f"({q.shape[2]}, {k.shape[2]}); use block_mask._adjust(q_len, kv_len) "
            "or create one for these lengths"
        )
    if B not in (1, q.shape[0]) or H not in (1, q.shape[1]):
        raise _bad(
            f"block_mask: got batch {B} and {H} heads, expected {q.shape[0]} or 1 "
            f"and {q.shape[1]} or 1"
        )
    if m.device.type != q.device.type:
        raise _bad(
            f"block_mask is on {m.device}, query on {q.device}: expected one "
            "device (block_mask.to(query.device))"
        )


_POINTER = _core.POINTER.pack
_SMALL = 1 << 20  # bytes of workspace that a thread keeps for its next call


class _Call:
    """A runner for tensors of one layout: everything of the C arguments but addresses."""

    def __init__(self, runner, q, k, v, want_lse, want_max):
        self.runner, self.plan = runner, runner.plan.handle
        self.width = v.shape[3] if v.shape[3] != q.shape[3] else 0
        self.stats = torch.float64 if q.dtype is torch.float64 else torch.float32
        self.lse, self.row_max = want_lse, want_max
        self.cuda = q.get_device() if q.is_cuda else -1
        self.room = runner.workspace
        self.copies = False
        self.refs = []
        out = _output(q, v.shape[3])
        rows = q.new_empty(q.shape[:3], dtype=self.stats)
        parts = [_core.pack(view(t))[8:] for t in (q, k, v, out)]
        parts += [
            _core.pack(view(rows))[8:] if w else _core.NO_TENSOR[8:]
            for w in (want_lse, want_max)
        ]
        self.like = out.is_contiguous() and not self.width
        self.parts = parts
        self.parts[5] += 3 * _core.NO_TENSOR

    def bound_to(self, addresses):
        """(arguments for score captures that lie at these addresses, what they point to)."""
        runner = self.runner
        array = type(runner.bindings).from_buffer_copy(runner.bindings)
        for slot, address in zip(array, addresses):
            slot.tensor.data = address
        return _core.tail(runner.handle, array, runner.n_bindings), array

    def __call__(self, q, k, v, tail):
        if self.copies:
            q, k, v = _prepare(q, k, v)
        out = torch.empty_like(q) if self.like else _output(q, v.shape[3])
        lse = row_max = None
        lse_at = max_at = room_at = stream = 0
        if self.lse:
            lse = q.new_empty(q.shape[:3], dtype=self.stats)
            lse_at = lse.data_ptr()
        if self.row_max:
            row_max = q.new_empty(q.shape[:3], dtype=self.stats)
            max_at = row_max.data_ptr()
        if self.room:
            room = _workspace(self.room, q, self.cuda >= 0)
            room_at = (room.data_ptr() + 63) & ~63
        if self.cuda >= 0:
            stream = _current_stream(self.cuda)
        a, b, c, d, e, f = self.parts
        _core.run(
            self.plan,
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
                    _POINTER(lse_at),
                    e,
                    _POINTER(max_at),
                    f,
                    tail,
                    _core.ENDING(room_at, self.room, stream),
                    _core.RESERVED,
                )
            ),
        )
        return out, lse, row_max


class _FakeCall:
    """Shapes and strides of the results, for tensors without data."""

    def __init__(self, want_lse, want_max):
        self.lse, self.row_max = want_lse, want_max

    def __call__(self, q, k, v, tail):
        kind = torch.float64 if q.dtype is torch.float64 else torch.float32
        lse, row_max = (
            q.new_empty(q.shape[:3], dtype=kind) if w else None
            for w in (self.lse, self.row_max)
        )
        return _output(q, v.shape[3]), lse, row_max


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _current_stream(index):
    """The stream's address; torch.cuda.current_stream makes an object around it in 2 us."""
    if _raw_stream is not None:
        return _raw_stream(index)
    return torch.cuda.current_stream(index).cuda_stream


_rooms = threading.local()


def _workspace(n, q, cuda):
    """Memory of n bytes and room to align it; a thread keeps a small one on the host."""
    if cuda or n > _SMALL:
        return torch.empty(n + 64, dtype=torch.uint8, device=q.device)
    room = getattr(_rooms, "room", None)
    if room is None:
        room = _rooms.room = torch.empty(_SMALL + 64, dtype=torch.uint8, device="cpu")
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


class _Entry:
    """A call for one pair of mods and one layout, and how to see that they still hold."""

    __slots__ = ("call", "tail", "keep", "watches", "mask", "version", "floats", "refs")

    def __init__(self, call, tail, keep, watches, mask, used):
        self.call, self.tail, self.keep, self.watches = call, tail, keep, watches
        self.floats = [weakref.ref(t) for t in used if t.is_floating_point()]
        self.mask = weakref.ref(mask) if mask is not None else None
        self.version = mask.version if mask is not None else None
        self.refs = []

    def current(self):
        if self.mask is not None:
            mask = self.mask()
            if mask is None or mask.version is not self.version:
                return False
        for w in self.watches:
            if not w.unchanged():
                return False
        return True

    def captures_gradients(self):
        for ref in self.floats:
            t = ref()
            if t is not None and t.requires_grad:
                return True
        return False


# By identity of the mods, for warm calls; by text and layout of captures, for other mods that
# come to the same; by code and layout of captures, for functions made anew around other tensors
# and numbers. None keeps a mod or a tensor of the caller alive: entries go when what they were
# made from does.
_entries: dict = {}
_calls: dict = {}
_patterns: dict = {}
_ENTRIES = 512
_lock = threading.Lock()


def _run(q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa):
    try:
        found, q, k, v = _find(
            q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa
        )
    except (AttributeError, RuntimeError):
        _check(q, k, v, gqa)  # says what is wrong with them, if anything is
        raise
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or found.captures_gradients()
    ):
        captured = [t for t in (ref() for ref in found.floats) if t.requires_grad]
        return _Attention.apply(found, q, k, v, *captured)
    try:
        return found.call(q, k, v, found.tail)
    except RuntimeError:
        if isinstance(q, FakeTensor):
            return _FakeCall(want_lse, want_max)(q, k, v, None)
        _refuse_wrapped(q, k, v)
        raise


def _find(q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa):
    """The entry of a call, and its tensors as autocast wants them."""
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    key = (
        identity(score_mod),
        identity(block_mask),
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
        _backend(options) if options else "auto",
        gqa,
        torch.get_num_threads(),
    )
    found = _entries.get(key)
    if found is None or not found.current():
        found = _like(key, score_mod, block_mask)
    if found is None:
        found = _make(key, q, k, v, score_mod, block_mask)
    return found, q, k, v


def _refuse_wrapped(*tensors):
    """Says which kind of tensor it is that has no memory."""
    is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda t: False)
    for t in tensors:
        if is_wrapped(t):
            raise NotImplementedError(_NO_VMAP) from None
        if type(t) not in (torch.Tensor, torch.nn.Parameter) and not _has_memory(t):
            raise TypeError(
                f"saccade: got a {type(t).__name__}, which has no memory of its own, expected "
                "a plain tensor"
            ) from None


def _has_memory(t):
    try:
        return t.data_ptr() != 0
    except RuntimeError:
        return False


def _make(key, q, k, v, score_mod, block_mask):
    scale, (want_lse, want_max, backend, gqa) = key[2], key[15:19]
    if q.device.type == "meta" or isinstance(q, FakeTensor):
        _check_layout(q, k, v)
        _check_shapes(q, k, v, gqa)
        return _Entry(_FakeCall(want_lse, want_max), None, None, [], None, [])
    _check(q, k, v, gqa)
    _refuse_wrapped(q, k, v)
    device, watches, parts = q.device.type, [], list(key[2:])
    score = made_mask = None
    if score_mod is not None:
        score = Resolved(score_mod, "score", device)
        watches.append(Watch(score_mod, score, by_value=False))
        parts.append((id(score.bound), tuple(v[1:] for v in score.views)))
    mask = block_mask if isinstance(block_mask, BlockMask) else adopted(block_mask)
    if mask is not None:
        _check_mask(mask, q, k)
        parts.append((mask.number, mask.version))
    elif block_mask is not None:
        made_mask = Resolved(block_mask, "mask", "cpu")
        watches.append(Watch(block_mask, made_mask, by_value=True))
        mask = block_mask_of(made_mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        parts = None  # values of captures went into the proof
    content = tuple(parts) if parts and all(w.fixed for w in watches) else None
    call = _calls.get(content) if content else None
    if call is None:
        call = _new_call(q, k, v, score, mask, scale, backend, want_lse, want_max)
        if content:
            _keep(_calls, content, call, [mask] if mask is not None else [])
    used = score.captured if score is not None else []
    tail, array = call.bound_to([v.address for v in score.views] if score is not None else [])
    keep = array, score.tensors if score is not None else None
    watched = mask if made_mask is None else None
    entry = _Entry(call, tail, keep, watches, watched, used)
    if all(w.fixed for w in watches):
        if made_mask is not None or mask is block_mask:  # not one taken over from torch
            mods = [m for m in (score_mod, block_mask) if m is not None]
            _keep(_entries, key, entry, [x for m in mods for x in owners(m)])
            if made_mask is None and score is not None:
                _make_pattern(key, entry, score_mod, score)
    return entry


class _Pattern:
    """What entries for functions of one code have in common, whatever tensors of one layout
    and numbers their closures hold: `cells` says where, `others` are captures that lie outside
    of the closure."""

    __slots__ = ("call", "cells", "others", "watch", "mask", "version", "last", "refs")

    def __init__(self, entry, score):
        self.call, self.cells = entry.call, score.cells
        others = [x for i, x in zip(score.cells, score.values) if i is None]
        tensors = [x for x in others if isinstance(x, torch.Tensor)]
        self.watch = entry.watches[0].of(tensors)
        self.others = [
            weakref.ref(x) if isinstance(x, torch.Tensor) else lambda x=x: x for x in others
        ]
        self.mask, self.version, self.refs = entry.mask, entry.version, []
        self.last = None, []

    def comes_again(self, identity, tensors):
        """Whether the call before was for the same: most functions made anew come once."""
        before, refs = self.last
        if before == identity and all(r() is t for r, t in zip(refs, tensors)):
            return True
        self.last = identity, [weakref.ref(t) for t in tensors]
        return False


def _make_pattern(key, entry, score_mod, score):
    kind = layout(score_mod)
    wide = any(t.dim() == 0 and t.dtype is torch.int64 for t in score.captured)
    if kind is None or score.cells is None or score.copied or wide:
        return
    mask = [entry.mask()] if entry.mask is not None else []
    held = [x for x in owners(score_mod) if not isinstance(x, torch.Tensor)]
    _keep(_patterns, (kind, *key[1:]), _Pattern(entry, score), held + mask)


def _like(key, score_mod, block_mask):
    """The entry for a function that differs from one seen before in its captures alone."""
    kind = layout(score_mod)
    found = _patterns.get((kind, *key[1:])) if kind is not None else None
    if found is None or not found.watch.unchanged():
        return None
    if found.mask is not None:
        mask = found.mask()
        if mask is not block_mask or mask.version is not found.version:
            return None
    cells, others = score_mod.__closure__, iter(found.others)
    values = [next(others)() if i is None else cells[i].cell_contents for i in found.cells]
    if any(x is None for x in values):  # a tensor that is gone
        return None
    used = [x for x in values if isinstance(x, torch.Tensor)]
    places = [x if isinstance(x, torch.Tensor) else as_tensor(x, "a number") for x in values]
    tail, array = found.call.bound_to([t.data_ptr() for t in places])
    keep = array, [t for t, x in zip(places, values) if t is not x]
    mask = block_mask if found.mask is not None else None
    entry = _Entry(found.call, tail, keep, [], mask, used)
    if found.comes_again(key[0], used):
        entry.watches.append(found.watch.of(used))
        mods = owners(score_mod) + ([mask] if mask is not None else [])
        _keep(_entries, key, entry, mods)
    return entry


def _new_call(q, k, v, score, mask, scale, backend, want_lse, want_max):
    made_q, made_k, made_v = _prepare(q, k, v)
    # plans and copies of block masks are made for the current device
    with torch.cuda.device_of(q):
        runner = _Runner(made_q, made_k, made_v, score, mask, scale, backend)
    call = _Call(runner, made_q, made_k, made_v, want_lse, want_max)
    call.copies = made_q is not q or made_k is not k or made_v is not v
    return call


def _keep(table, key, value, owners):
    """Adds to a bounded table what goes when one of its owners does."""
    forget = functools.partial(_forget, table, key)
    with _lock:
        while len(table) >= _ENTRIES:
            table.pop(next(iter(table)), None)
        table[key] = value
    value.refs = [_reference(o, forget) for o in owners]


def _reference(owner, forget):
    try:
        return weakref.ref(owner, forget)
    except TypeError:  # an object that has none: kept, so that its id stays its own
        return owner


def _forget(table, key, _):
    table.pop(key, None)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[ScoreMod] = None,
    block_mask: Union[BlockMask, MaskMod, None] = None,
    scale: Optional[float] = None,
    kernel_options: Optional[dict[str, Any]] = None,
) -> str:
    """What a call with these arguments runs: typed nodes, kernel, why, generated code."""
    _check(query, key, value, True)
    score = Resolved(score_mod, "score", query.device.type) if score_mod is not None else None
    mask = block_mask if isinstance(block_mask, BlockMask) else adopted(block_mask)
    if mask is None and block_mask is not None:
        made = Resolved(block_mask, "mask", "cpu")
        B, H, Q, _ = query.shape
        mask = block_mask_of(made, B, H, Q, key.shape[2])
    call = _new_call(
        query, key, value, score, mask, scale, _backend(kernel_options or {}), False, False
    )
    text: str = call.runner.plan.explain()
    return text


def register_transformers(name: str = "saccade") -> None:
    """Makes attn_implementation=name work in Hugging Face Transformers."""
    from ._transformers import register_transformers as register

    register(name)


def benchmark(
    score_mod: Optional[ScoreMod] = None, mask_mod: Optional[MaskMod] = None, **options: Any
) -> list[dict[str, Any]]:
    """Times the caller's mod beside SDPA and FlexAttention; see
    saccade._benchmark.benchmark."""
    from ._benchmark import benchmark as run

    return run(score_mod, mask_mod, **options)
