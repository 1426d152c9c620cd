"""Attention over any arrays that speak DLPack: NumPy, JAX, CuPy, PyTorch; torch not needed."""

from __future__ import annotations

import ctypes as C
import math
import numbers
import sys
from collections.abc import Mapping
from typing import Any

from . import dlpack
from .c import abi, objects
from .kv import whole_number
from .trace.errors import words_of

_NUMBERS = {bool: ("bool", C.c_uint8), int: ("i32", C.c_int32), float: ("f32", C.c_float)}


def _number(value, name):
    """A number of Python's or NumPy's as a rank-0 view."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if type(value) not in _NUMBERS:
        raise TypeError(f"{name}: got {words_of(value)}, expected a number or an array")
    if isinstance(value, int) and not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"{name}: got {value!s:.40}, expected a value that fits 32 bits")
    dtype, kind = _NUMBERS[type(value)]
    box = kind(value)
    return objects.View(C.addressof(box), dtype, abi.CPU, 0, (), ()), box


def _capture(value, name):
    return dlpack.view(value, name) if hasattr(value, "__dlpack__") else _number(value, name)


def _bind(kind, text, captures):
    """Bound mod, its (name, view)s and what keeps them alive; of captures, those it names."""
    if text is None:
        return None, [], []
    free = objects.free_names(kind, text)
    for name, _ in free:
        if name not in captures:
            raise ValueError(f"the text names {name}, expected it among the captures")
    made = [_capture(captures[name], name) for name, _ in free]
    types = tuple((n, v.dtype, len(v.shape)) for (n, _), (v, _) in zip(free, made))
    views = [(n, v) for (n, _), (v, _) in zip(free, made)]
    return objects.bound_mod(kind, text, types), views, [keep for _, keep in made]


def _check_text(kind, text):
    """mask and score are text here; says what to do with what else is given."""
    if text is None or isinstance(text, str):
        return
    example = "q >= kv" if kind == "mask" else "score + slope[h] * (kv - q)"
    hint = ""
    if callable(text):
        hint = "; callables are traced by saccade.torch alone"
    elif hasattr(text, "shape"):
        index = ["b", "h", "q", "kv"][-len(text.shape) or 4 :]
        found = f"m[{', '.join(index)}]"
        found = found if kind == "mask" else f"score + {found}"
        hint = f'; an array is captured: {kind}="{found}", captures={{"m": array}}'
    raise TypeError(
        f'{kind}: got {words_of(text)}, expected text in the language, "{example}"{hint}'
    )


def _is_finite(x):
    try:
        return math.isfinite(x)
    except OverflowError:  # an integer that no float holds
        return False


def _check_scale(scale):
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if scale is not None and not (is_number and _is_finite(scale)):
        found = f"{scale!s:.40}" if is_number else words_of(scale)
        raise (ValueError if is_number else TypeError)(
            f"scale: got {found}, expected a finite number, or None for 1 / sqrt(D)"
        )


def _check_arrays(named):
    ma = sys.modules.get("numpy.ma")
    for name, x in named.items():
        if ma is not None and isinstance(x, ma.MaskedArray):
            raise TypeError(
                f"{name}: got a masked array, whose mask is not part of its memory, expected "
                "x.filled(0), and what counts as a mask in text"
            )
        if type(x).__module__.startswith("jax") and type(x).__name__.endswith("Tracer"):
            raise TypeError(
                f"{name}: got a tracer of JAX, expected an array: saccade.attention runs "
                "outside of jax.jit, grad and vmap (inside: jax.pure_callback, which has no "
                "gradient; a mapped axis folds into batch or heads)"
            )


def _name_of(array):
    """Of the library that an array is from, which may be of a class derived from its own."""
    names = [kind.__module__.partition(".")[0] for kind in type(array).__mro__]
    return next((n for n in names if n in ("numpy", "torch", "cupy")), names[0])


def _library(array):
    """The module whose functions make arrays of this kind."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[_name_of(array)]


def _output(like, shape, dtype, device):
    """(view, finish): fresh memory, and what turns it into an array like the query."""
    library = _name_of(like)
    if device is not None:
        array = _empty(like, shape, dtype)
        return dlpack.view(array, "out")[0], lambda: array
    buffer = dlpack.Buffer(shape, dtype)
    if library == "numpy" and dtype != "bf16":  # what it takes by DLPack can't be written to
        return buffer.view(), lambda: buffer.as_numpy(sys.modules["numpy"])
    if library in ("numpy", "torch"):
        return buffer.view(), lambda: sys.modules[library].from_dlpack(buffer)
    if hasattr(like, "__array_namespace__"):
        return buffer.view(), lambda: like.__array_namespace__().from_dlpack(buffer)
    return buffer.view(), lambda: buffer


def _empty(like, shape, dtype):
    """Memory of like's library on like's GPU."""
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "uint8"}
    space = _library(like)
    kind = getattr(space, names[dtype], None) if dtype != _dtype(like) else like.dtype
    if space.__name__ == "cupy":
        with like.device:
            return space.empty(shape, dtype=kind)
    array = space.empty(shape, dtype=kind, device=like.device)
    _wait_for(array)
    return array


def _dtype(array):
    return dlpack.view(array)[0].dtype


def _wait_for(array):
    """JAX computes later than it returns, on streams of its own."""
    if hasattr(array, "block_until_ready"):
        array.block_until_ready()


def _stream_of(q):
    """(stream to run on, whether to wait for it): the one that q's library works on now."""
    library = _name_of(q)
    if library == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr, False
    if library == "torch":
        return sys.modules["torch"].cuda.current_stream(q.device).cuda_stream, False
    return 0, True


def _finish_stream(stream):
    """Waits on the host, for libraries that can't be told of a stream."""
    cuda = C.CDLL("libcuda.so.1")
    code = cuda.cuStreamSynchronize(C.c_void_p(stream))
    if code:
        raise abi.SaccadeError("EBACKEND", f"cuda: cuStreamSynchronize gave {code}")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: str | None = None,
    score: str | None = None,
    captures: dict[str, Any] | None = None,
    scale: float | None = None,
    backend: str = "auto",
    threads: int = 0,
    return_lse: bool = False,
    block_mask: bool = True,
    stream: int | None = None,
) -> Any:
    """softmax(mask(score(scale * q k^T))) v, fused and exact.

    q [B, H, Q, D], k [B, Hkv, KV, D], v [B, Hkv, KV, Dv]: one dtype (f32, f16, bf16), any
    strides but negative ones, the last dimension contiguous, H a multiple of Hkv. mask, score:
    language text (docs/language.md); captures: name to array or number. scale: default
    1/sqrt(D). block_mask=False proves tiles while running instead of before. stream: CUDA
    stream of the work (default: the current one of q's library; JAX has none to name, so its
    calls return when the result is there). Returns an array of q's library [B, H, Q, Dv]; with
    return_lse also lse [B, H, Q] f32. Errors:
    ValueError for the caller's mistakes, SaccadeError otherwise.
    """
    captures = {} if captures is None else captures
    if not isinstance(captures, Mapping):
        raise TypeError(f"captures: got {words_of(captures)}, expected a dict, name to array")
    _check_scale(scale)
    if not isinstance(backend, str):
        raise TypeError(f"backend: got {words_of(backend)}, expected its name")
    threads = whole_number("threads", threads)
    stream = None if stream is None else whole_number("stream", stream, 64)
    _check_text("mask", mask)
    _check_text("score", score)
    _check_arrays({"q": q, "k": k, "v": v, **captures})
    for x in (q, k, v, *captures.values()):
        _wait_for(x)
    (qv, kv, vv), keep = _inputs(q, k, v)
    if qv.dtype == "f64" and backend in ("auto", "cpu", "cuda"):
        raise ValueError(
            "q, k, v: got float64, which no kernel computes in, expected float32, float16 or "
            'bfloat16 (q.astype("float32")), or backend="ref", exact and slow'
        )
    score_mod, score_views, score_keep = _bind(abi.SCORE, score, captures)
    mask_mod, mask_views, mask_keep = _bind(abi.MASK, mask, captures)
    named = dict(score_views) | dict(mask_views)
    unused = set(captures) - set(named)
    if unused:
        raise ValueError(f"captures: got {min(unused)}, which neither text names")
    (B, H, Q, D), (_, Hkv, KV, _), Dv = qv.shape, kv.shape, vv.shape[3]
    sizes = (B, H, Hkv, Q, KV, D, Dv)
    on_gpu, wait = qv.device == abi.CUDA, False
    if on_gpu and stream is None:
        stream, wait = _stream_of(q)
    if backend == "auto":
        backend = "cuda" if on_gpu else "cpu"
    context = objects.context(threads)
    plan = objects.plan(
        context, 0, H, Hkv, D, Dv, qv.dtype, kv.dtype, scale, score_mod, mask_mod, backend
    )
    blocks = None
    if mask_mod is not None and block_mask and not on_gpu:
        borrowed = (keep, mask_keep)
        places = [x for _, x in mask_views]
        blocks = objects.block_mask_create(mask_mod, places, sizes, 0, 0, borrowed, context)
        blocks.prepare(plan)
    device = qv.device_index if on_gpu else None
    out, finish = _output(q, (B, H, Q, Dv), qv.dtype, device)
    lse, finish_lse = _output(q, (B, H, Q), "f32", device) if return_lse else (None, None)
    room, address, n = _workspace(q, plan.workspace(*sizes), on_gpu)
    tensors = [objects.pack(x) if x else None for x in (qv, kv, vv, out, lse)]
    objects.forward(
        plan.handle,
        tensors,
        blocks.handle if blocks else 0,
        objects.bindings(list(named), list(named.values())),
        len(named),
        address,
        n,
        stream or 0,
    )
    if wait:
        _finish_stream(stream)
    del room, score_keep
    return (finish(), finish_lse()) if finish_lse else finish()


def _inputs(q, k, v):
    """Views of q, k, v and what keeps them valid."""
    made = [dlpack.view(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    for name, (x, _) in zip("qkv", made):
        if len(x.shape) != 4:
            raise ValueError(f"{name}: got {len(x.shape)} dimensions, expected 4: [B, H, N, D]")
    return [x for x, _ in made], [keep for _, keep in made]


def _workspace(q, n, on_gpu):
    """(what holds it, 64-byte aligned address, bytes)."""
    if not n:
        return None, 0, 0
    if on_gpu:
        room = _empty(q, (n + 64,), "u8")
        start = dlpack.view(room, "workspace")[0].address
    else:
        room = C.create_string_buffer(n + 64)
        start = C.addressof(room)
    return room, (start + 63) & ~63, n
