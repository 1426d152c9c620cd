"""One call of the C library: a problem's plan, and the arguments that calls of it share."""

from __future__ import annotations

import functools
import threading

import torch

from ..c import abi, extension, objects
from .checks import scale_of, way_of
from .mods import dtype_name, view
from .warm import NOTHING, result, room_of, run_of


# Up to so many keys plans on CUDA have kernels for the gradients of many short sequences
# (docs/cuda.md); one plan for all such lengths.
_FEW_KEYS = 320
# And up to the last of these kernels of forward that hold all keys of a head, for each of these
# numbers: from so many queries on, since caches that grow key by key have fewer.
_HELD_KEYS = (32, 48, 64, 80, 96, 128, 160, 192, 240, 256)
_HELD_QUERIES = 65


def _hints(queries, keys, mask):
    """Numbers of keys that a plan is made for, without gradients and with; 0: any number."""
    held = 0
    if keys and queries >= _HELD_QUERIES and not mask:
        held = next((n for n in _HELD_KEYS if n >= keys), 0)
    return held, held or (_FEW_KEYS if keys <= _FEW_KEYS else 0)


class Runner:
    """What calls of one problem share: plan, captures, block mask, workspace. needs: for which
    of q, k, v and the score's captures backward is to make gradients; none: forward only.
    sinks: the dtype of those that runs will have, by its name. keeps: whether out is f32."""

    def __init__(
        self, q, k, v, score, mask, scale, backend, needs=(), dropout=0.0, sinks="", keeps=False
    ):
        handle = mask.handle() if mask else None
        if score is not None and handle and handle.mod:
            score = score.apart(handle.mod.names)
        self.keep = [score.bound] if score is not None else []
        self.more = ()
        if dropout:
            weight = weight_of(dropout)
            self.keep.append(weight)
            self.more = (("weight", weight.handle),)
        self.names = score.names if score is not None else []
        names, views, bound = [], [], None
        if score is not None:
            bound, names, views = score.bound, score.names, list(score.views)
        if handle and handle.mod:
            extra = self._mask_captures(handle, q.device)
            names, views = names + [n for n, _ in extra], views + [v for _, v in extra]
        device, (B, H, Q, D) = q.device.type, q.shape
        backend, is_invariant = way_of(backend)
        if sinks:
            self.more += (("sinks_dtype", abi.DTYPES[sinks]),)
        if is_invariant:
            self.more += (("batch_invariant", is_invariant),)
        if backend == "auto":  # nothing but the reference computes in f64
            backend = "ref" if q.dtype is torch.float64 and device == "cpu" else device
        threads = -torch.get_num_threads() if device == "cpu" else 0  # at most
        name = dtype_name(q)
        self.more += kept_f32(name) if keeps else ()
        self.problem = (
            objects.context(threads),
            B if backend == "cuda" else 0,
            H,
            k.shape[1],
            D,
            v.shape[3],
            name,
            name,
            scale_of(scale),
            bound,
            handle.mod if handle else None,
            backend,
        )
        self.hints = _hints(Q, k.shape[2], handle) if backend == "cuda" else (0, 0)
        self.mask, self.device = handle, q.get_device()
        try:
            self.plan = self.plan_for(needs)
        except abi.SaccadeError as reason:  # forward runs, backward says why it doesn't
            if not needs or reason.status != "EBACKEND":
                raise
            self.plan = self.plan_for(())
        self.n_bindings, self.bindings = len(names), objects.bindings(names, views)
        self.workspace = self.plan.workspace(B, H, k.shape[1], Q, k.shape[2], D, v.shape[3])
        self.handle = handle.handle if handle else 0
        self.keep.append(handle)

    def plan_for(self, needs, trains_sinks=False) -> objects.Plan:
        """The plan that makes these gradients; the block mask is ready for it."""
        bits = sum(1 << i for i, wanted in enumerate(needs[:3]) if wanted)
        bits |= abi.GRADIENT_SINKS if trains_sinks else 0
        wanted = tuple(n for n, w in zip(self.names, needs[3:]) if w)
        bits |= abi.GRADIENT_CAPTURES if wanted else 0
        hint = self.hints[1 if bits else 0]
        made = objects.plan(*self.problem, bits, wanted, self.more, KV=hint)
        if self.mask:
            self.mask.prepare(made, self.device)
        return made

    def plan_of_tangents(self) -> objects.Plan:
        """The plan that saccade_tangent runs with; the reference needs none of its own."""
        if self.problem[-1] == "ref":
            return self.plan
        made = objects.plan(*self.problem, 0, (), (*self.more, ("tangents", 1)))
        if self.mask:
            self.mask.prepare(made, self.device)
        return made

    def _mask_captures(self, handle, device):
        """Captures of the mask for the kernel: the block mask has them on the host only."""
        if device.type != "cuda":
            return []
        moved = [t if t.dim() == 0 else t.to(device) for t in handle.tensors]
        self.keep.append(moved)
        return [(n, view(t)) for n, t in zip(handle.mod.names, moved)]


HALVES = torch.bfloat16, torch.float16


def keeps_f32(dtype, bound, names) -> bool:
    """Whether backward is to have the output in f32, what rounding it takes away included: of
    queries of this dtype and gradients of these captures of a score (docs/limits.md)."""
    return dtype in HALVES and bool(names) and bound.sums_keys(tuple(names))


def kept_f32(name):
    """Members of a problem of this dtype whose output is f32 and comes back so."""
    return (("out_dtype", abi.DTYPES["f32"]), ("d_out_dtype", abi.DTYPES[name]))


@functools.lru_cache(maxsize=None)
def weight_of(rate):
    """The bound mod that drops weights at this rate; kept, as plans are found by its handle."""
    return objects.Mod(abi.WEIGHT, f"dropout({rate!r})", [])


_POINTER = objects.POINTER.pack
# Bytes of workspace that a thread keeps for its next call, at least and at most: memory that is
# new to the process costs a fault for each of its pages.
_LEAST, SMALL = 1 << 20, 64 << 20


class Call:
    """A runner for tensors of one layout: everything of the C arguments but addresses. narrow:
    None, or what the output is to be rounded to, which is f32."""

    dropout = 0  # where seed and offset lie, of calls that drop weights

    def __init__(self, runner, q, k, v, want_lse, want_max, may_keep=True, narrow=None):
        self.runner, self.plan, self.narrow = runner, runner.plan.handle, narrow
        self.out_dtype = q.dtype if narrow is None else torch.float32
        self.width = v.shape[3] if v.shape[3] != q.shape[3] else 0
        self.stats = stats_dtype(q)
        self.lse, self.row_max = want_lse, want_max
        self.cuda = q.get_device() if q.is_cuda else -1
        self.room = runner.workspace
        self.copies = False
        self.layout = None  # of its last backward call
        handle = runner.mask
        tensors = handle.tensors or () if handle is not None else ()
        self.of_mask = [t for t in tensors if t.dim()]
        self.times = getattr(handle, "times", None)  # of a mask whose blocks are selected
        self.of_mask += [self.times] if self.times is not None else []
        self.refs = []
        out = output_like(q, v.shape[3], self.out_dtype)
        rows = q.new_empty(q.shape[:3], dtype=self.stats)
        parts = [objects.pack(view(t))[8:] for t in (q, k, v, out)]
        parts += [
            objects.pack(view(rows))[8:] if w else objects.NO_TENSOR[8:]
            for w in (want_lse, want_max)
        ]
        self.like = out.is_contiguous() and not self.width
        self.parts = parts
        self.wanted = (1 if want_lse else 0) + (2 if want_max else 0)
        self.warm = self._warm(q, k, v, out, rows, may_keep)
        # of the last layout: for which needs, the call, and what holds the call's plan
        self.warm_backward = None, None, None

    def _warm(self, q, k, v, out, rows, may_keep):
        """The same by the extension, or None."""
        tensors = [_POINTER(0) + part for part in self.parts]
        text, links, at = objects.words(self.wanted, self.room, tensors)
        made = [
            result(at[3], out, out.stride()) if self.width else
            result(at[3], q, out.stride(), 0, None if self.narrow is None else out.dtype),
            result(at[4], rows, rows.stride()) if self.lse else NOTHING,
            result(at[5], rows, rows.stride()) if self.row_max else NOTHING,
        ]
        if None in made:
            return None
        inputs = zip((q, k, v), at)
        room = room_of(self.room, q, SMALL)
        places = objects.PLACES
        return run_of(
            extension.FORWARD, self.plan, text, links, inputs, made, room, places, may_keep
        )

    def bound_to(self, addresses):
        """(arguments for score captures that lie at these addresses, what they point to)."""
        runner = self.runner
        array = type(runner.bindings).from_buffer_copy(runner.bindings)
        for slot, address in zip(array, addresses):
            slot.tensor.data = address
        return objects.tail(runner.handle, array, runner.n_bindings), array

    def __call__(self, q, k, v, tail, dropout=0, sinks=0):
        if self.warm is not None and not sinks:
            made = self.warm(tail, dropout, q, k, v)
            if made is not None:
                return made
        if self.copies:
            q, k, v = prepared(q, k, v)
        if self.like:
            out = torch.empty_like(q, dtype=self.out_dtype)
        else:
            out = output_like(q, v.shape[3], self.out_dtype)
        lse = row_max = None
        lse_at = max_at = room_at = stream = 0
        if self.lse:
            lse = q.new_empty(q.shape[:3], dtype=self.stats)
            lse_at = lse.data_ptr()
        if self.row_max:
            row_max = q.new_empty(q.shape[:3], dtype=self.stats)
            max_at = row_max.data_ptr()
        if self.room:
            room = workspace(self.room, q, self.cuda >= 0)
            room_at = (room.data_ptr() + 63) & ~63
        if self.cuda >= 0:
            stream = current_stream(self.cuda)
        a, b, c, d, e, f = self.parts
        objects.run(
            self.plan,
            self.wanted,
            b"".join(
                (
                    tail,
                    objects.ENDING(room_at, self.room, stream),
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
                )
            ),
            dropout,
            sinks,
        )
        return out, lse, row_max


class FakeCall:
    """Shapes and strides of the results, for tensors without data."""

    of_mask, dropout, warm_backward, narrow = (), 0, (None, None, None), None

    def __init__(self, want_lse, want_max):
        self.lse, self.row_max = want_lse, want_max

    def __call__(self, q, k, v, tail):
        lse, row_max = (
            q.new_empty(q.shape[:3], dtype=stats_dtype(q)) if w else None
            for w in (self.lse, self.row_max)
        )
        return output_like(q, v.shape[3]), lse, row_max


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(index):
    """The stream's address; torch.cuda.current_stream makes an object around it in 2 us."""
    if _raw_stream is not None:
        return _raw_stream(index)
    return torch.cuda.current_stream(index).cuda_stream


_rooms = threading.local()


def workspace(n, q, cuda):
    """Memory of n bytes and room to align it; a thread keeps one on the host."""
    if n > 1 << 62:  # what the library says of sizes that no run can have
        raise ValueError("got sizes that no run can have, expected shorter sequences or fewer")
    if cuda or n > SMALL:
        return torch.empty(n + 64, dtype=torch.uint8, device=q.device)
    room = getattr(_rooms, "room", None)
    if room is None or _rooms.bytes < n:
        _rooms.bytes = max(n, _LEAST)
        room = _rooms.room = torch.empty(_rooms.bytes + 64, dtype=torch.uint8, device="cpu")
    return room


def stats_dtype(q: torch.Tensor) -> torch.dtype:
    """What lse and row maxima are given in."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def rounded(out, narrow):
    """What a user is given of a call's output."""
    return out if narrow is None else out.to(narrow)


def output_like(q, width, dtype=None):
    """Empty [B, H, L, Ev] whose strides are in the order of the query's; contiguous where the
    query has to be copied for its rows. dtype: other than the query's."""
    B, H, L, E = q.shape
    is_plain = q.is_contiguous() and (1 not in (B, H, L) or 0 in q.stride())
    if is_plain or q.stride(3) != 1:
        return q.new_empty((B, H, L, width), dtype=dtype)
    order = sorted(range(3), key=lambda d: -q.stride(d)) + [3]
    shape = [(B, H, L, width)[d] for d in order]
    return q.new_empty(shape, dtype=dtype).permute([order.index(d) for d in range(4)])


def whole_rows(t):
    """As the library reads it: rows without holes, signs in memory."""
    t = t.resolve_neg()
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


def prepared(q, k, v):
    """Contiguous rows, and keys and values of batch 1 spread by stride 0."""
    q, k, v = whole_rows(q), whole_rows(k), whole_rows(v)
    if k.shape[0] != q.shape[0]:
        k = k.expand(q.shape[0], -1, -1, -1)
    if v.shape[0] != q.shape[0]:
        v = v.expand(q.shape[0], -1, -1, -1)
    return q, k, v


def autocast(q, k, v):
    device = q.device.type
    if q.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


_FLOATS = torch.float32, torch.float16, torch.bfloat16


def autocast_beside(q, k):
    """The query of a call under autocast over a cache, which is too large to be cast for one
    call: in the dtype of its numbers, and over codes in autocast's."""
    device = q.device.type
    is_cast = q.is_floating_point() and q.dtype is not torch.float64
    if not is_cast or device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q
    if k.dtype in _FLOATS:
        return q.to(k.dtype)
    return q if k.dtype is torch.float64 else q.to(torch.get_autocast_dtype(device))


_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


def decoded(q, k, v):
    """Keys and values in fp8 as the query's dtype, which holds each of them."""
    if q.dtype in _CODES:
        return q, k, v
    return q, *(t.to(q.dtype) if t.dtype in _CODES else t for t in (k, v))


def new_call(
    q, k, v, score, mask, scale, backend, want_lse, want_max, needs=(), dropout=0.0,
    may_keep=True, sinks="", keeps=False,
):  # fmt: skip
    """may_keep: whether the call may keep a workspace on a GPU for the next. keeps: whether the
    output is f32, for backward, and what the user is given is rounded from it."""
    made_q, made_k, made_v = prepared(q, k, v)
    # plans and copies of block masks are made for the current device
    with torch.cuda.device_of(q):
        tensors, weights = (made_q, made_k, made_v), (dropout, sinks)
        runner = Runner(*tensors, score, mask, scale, backend, needs, *weights, keeps)
    narrow = q.dtype if keeps else None
    call = Call(runner, made_q, made_k, made_v, want_lse, want_max, may_keep, narrow)
    call.copies = made_q is not q or made_k is not k or made_v is not v
    if call.copies:
        call.warm = None
    return call
