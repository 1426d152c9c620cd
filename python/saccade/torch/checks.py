"""What a call may be given: shapes, dtypes, devices and options; every refusal says what it got
and what it expected."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Mapping

import torch

from ..c import objects
from ..c.abi import BadValue
from ..trace.errors import words_of
from .memory import check_memory
from .mods import in_names_of


NO_DRAWN_RATES = (
    "saccade: got forward mode of a call with dropout_p, expected it without: weights are "
    "drawn anew by each call"
)
NO_SECOND = (
    "saccade: flex_attention has second derivatives in float64 on the CPU only, by the "
    "reference, and not where calls are recorded; got a derivative of a derivative; "
    "expected create_graph=False, or query, key and value in float64 outside of torch.compile"
)
NO_THIRD = "saccade: flex_attention has no third derivatives; expected create_graph=False"
NO_SECOND_OF = "saccade: {} has no second derivatives; expected create_graph=False"


# FlexAttention's keys that choose how fast its kernels run, never what they compute. They are
# accepted, with fwd_ or bwd_ before them too, and change nothing: tiles are chosen by the plan.
_TUNING = frozenset(
    "num_warps num_stages BLOCK_M BLOCK_N BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2 PRESCALE_QK "
    "ROWS_GUARANTEED_SAFE BLOCKS_ARE_CONTIGUOUS WRITE_DQ FORCE_USE_FLEX_ATTENTION USE_TMA "
    "kpack matrix_instr_nonkdim waves_per_eu num_consumer_groups num_buffers_warp_spec "
    "SPLIT_KV SKIP_MASK_SCORE IS_DIVISIBLE FLOAT32_PRECISION PARTITION_SIZE".split()
)
INVARIANCE = (False, True, "short")  # by the number that the library has for it
_BACKENDS = dict.fromkeys(("auto", "triton", "triton_decode", "flash"), "auto")
_BACKENDS |= {name: name for name in ("cpu", "cuda", "ref", "plain")}


def backend_of(options):
    """The way that kernel_options ask for: a back end, and "+" behind it where a row's bits are
    to follow from the row alone, "++" where those of short runs may be others; way_of takes it
    apart. Refuses keys that mean nothing."""
    if options is None:
        return "auto"
    if not isinstance(options, Mapping):
        raise TypeError(f"kernel_options: got {brief(options)}, expected a dict or None")
    chosen, asked = "auto", options.get("BATCH_INVARIANT", False)
    if not isinstance(asked, (bool, str)) or asked not in INVARIANCE:
        raise ValueError(
            f"kernel_options: got BATCH_INVARIANT {brief(asked)}, expected True, False or "
            "'short'"
        )
    invariance = INVARIANCE.index(asked)
    for key, value in options.items():
        if not isinstance(key, str):
            raise TypeError(f"kernel_options: got the key {brief(key)}, expected a string")
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
        elif name not in _TUNING and key != "BATCH_INVARIANT":
            known = [*_TUNING, "BACKEND", "BATCH_INVARIANT"]
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(
                f"kernel_options: got unknown key {key!r}"
                + (f", did you mean {near[0]!r}?" if near else "")
            )
    if "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION"):
        raise _bad("kernel_options: got BACKEND and FORCE_USE_FLEX_ATTENTION, expected one")
    return chosen + "+" * invariance


def way_of(way):
    """(back end, the problem's batch_invariant)."""
    return way.rstrip("+"), way.count("+")


def _bad(message):
    return BadValue("EINVAL", message)


class OutsideTensor(BadValue, IndexError):
    """A mod reads outside of a tensor; PyTorch's own indexing calls it an IndexError."""


def check_indices(kind, found, sizes, budget, at=None):
    """found: a mod whose captures lie on the host; see objects.check_indices."""
    try:
        objects.check_indices(found.bound, found.views, sizes, budget, at)
    except BadValue as reason:
        error = OutsideTensor if reason.line else BadValue  # an index, or a captured value
        text = f"{kind}_mod: {in_names_of(reason, [found])}"
        raise error(reason.status, text, reason.line, reason.column) from None


SELECT_CHANGES = (
    "saccade: select() of a BlockSelection, too, changes what a call saved for its backward "
    "pass: a layer needs a mask of its own"
)


def check_selections(mask, known):
    """Raises where a call's blocks were selected anew since it ran."""
    if getattr(mask, "selections", 0) != known:
        raise RuntimeError(SELECT_CHANGES)


class NoRows(BadValue):
    """Nothing is wrong with a call but that it has no batch or no queries."""


class _NotFour(BadValue, NotImplementedError):
    """FlexAttention calls this case not implemented."""


def brief(x):
    """A value on one line, for messages."""
    if isinstance(x, torch.Tensor):
        return "a NestedTensor" if x.is_nested else f"{x.dtype} of shape {tuple(x.shape)}"
    parts = x if isinstance(x, (list, tuple)) else [x]
    is_plain = all(p is None or isinstance(p, (int, float, str, torch.dtype)) for p in parts)
    return repr(x) if is_plain and len(repr(x)) <= 40 else words_of(x)


def scale_of(x):
    """What scores are multiplied by; None: 1 / sqrt(D), for which NaN stands in C."""
    if type(x) is float and math.isfinite(x):
        return x
    if isinstance(x, torch.Tensor) and x.dim() == 0 and x.is_cpu and not x.requires_grad:
        x = x.item()
    if x is None:
        return None
    if not isinstance(x, numbers.Real) or isinstance(x, bool):
        raise TypeError(
            f"scale: got {brief(x)}, expected a number or None; a tensor that changes or "
            "learns is for score_mod to capture"
        )
    if not math.isfinite(x):
        raise _bad(f"scale: got {float(x)}, expected a finite number, or None for 1 / sqrt(D)")
    return float(x)


def check_flags(**flags):
    """Raises for what is neither true nor false on its own, as a tensor."""
    for name, x in flags.items():
        if x is not None and not isinstance(x, int) and type(x).__name__ not in _BOOLS:
            raise TypeError(f"{name}: got {brief(x)}, expected True or False")


_BOOLS = ("bool", "bool_")  # NumPy's names for its own


MOST_ROWS = 1 << 30  # rows or keys that a tensor may have


def count_of(name, x, least=0, most=(1 << 31) - 1):
    """A whole number."""
    try:
        n = operator.index(x)
    except TypeError:
        n = None
    is_tensor = isinstance(x, torch.Tensor) and (x.dtype is torch.bool or x.dim())
    if n is None or is_tensor or isinstance(x, bool) or not least <= n <= most:
        limit = f"{least} or more" if n is None or n < least else f"{least} to {most}"
        raise ValueError(f"{name}: got {brief(x)}, expected {limit}, a whole number")
    return n


def device_of(given, name="device"):
    """A device that the caller named in any of torch's ways."""
    if isinstance(given, torch.device):
        return given
    try:
        if isinstance(given, (str, int)):
            return torch.device(given)
    except RuntimeError:  # a name that is none, or a number below 0
        pass
    raise _bad(
        f"{name}: got {brief(given)}, expected a torch.device, 'cpu', 'cuda' or 'cuda:0'"
    )


def check_aux(request):
    if not hasattr(request, "lse") or not hasattr(request, "max_scores"):
        raise TypeError(
            f"return_aux: got {brief(request)}, expected AuxRequest(lse=..., max_scores=...)"
        )


def check_plain(name, t):
    """Raises for what is no tensor with an element at each place of its shape."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: got {words_of(t)}, expected a tensor")
    if t.is_nested:
        raise NotImplementedError(
            f"{name}: got a NestedTensor, expected a packed tensor with a document mask"
        )
    if t.layout is not torch.strided:
        raise TypeError(f"{name}: got a tensor of layout {t.layout}, expected strided")


def no_gradients(**tensors):
    """Raises for one that requires grad: nothing here would give it any."""
    for name, t in tensors.items():
        if isinstance(t, torch.Tensor) and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: requires grad, expected none: flex_attention has gradients"
            )


def check_rows(name, t, rank):
    """Raises for what is no tensor of that rank whose last dimension lies in one piece."""
    if not isinstance(t, torch.Tensor) or t.is_nested or t.layout is not torch.strided:
        got = brief(t) if getattr(t, "layout", torch.strided) is torch.strided else t.layout
    elif t.dim() != rank or t.stride(-1) != 1:
        got = f"rank {t.dim()} of strides {t.stride()}"
    else:
        check_memory(name, t)
        return
    wanted = f"a tensor of rank {rank} with contiguous rows"
    raise ValueError(f"{name}: got {got}, expected {wanted}")


def check_numbers(name, t, rank):
    """Raises for what is no int32 tensor of that rank."""
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"{name}: got {brief(t)}, expected an int32 tensor of rank {rank}")
    check_plain(name, t)
    if t.dtype is not torch.int32 or t.dim() != rank:
        raise ValueError(
            f"{name}: got {t.dtype} of rank {t.dim()}, expected an int32 tensor of rank {rank}"
        )
    check_memory(name, t)


def _check_device(q):
    if q.device.type not in ("cpu", "cuda"):
        raise _bad(f"query: got device {q.device}, expected cpu or cuda")


def check_devices(q, k, v):
    """Raises where query, key and value do not lie on one device that the library has."""
    _check_device(q)
    for name, t in (("key", k), ("value", v)):
        if t.device != q.device:
            raise ValueError(f"{name}: got device {t.device}, expected {q.device}")


def check_here(name, t, device):
    """Raises for what is no strided tensor on this device."""
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"{name}: got {brief(t)}, expected a tensor")
    check_plain(name, t)
    check_memory(name, t)
    if t.device != device:
        raise ValueError(f"{name}: got device {t.device}, expected {device}")


def check_call(q, k, v, enable_gqa):
    for name, t in (("query", q), ("key", k), ("value", v)):
        check_plain(name, t)
    check_layout(q, k, v)
    _check_device(q)
    check_shapes(q, k, v, enable_gqa)


def check_dropout(rate, inside):
    """inside: what is active that can't draw weights, in words, if anything."""
    if not isinstance(rate, (int, float, torch.SymFloat)) or not 0 <= rate <= 1:
        raise _bad(f"dropout_p: got {brief(rate)}, expected a number from 0 to 1")
    if inside:
        raise NotImplementedError(
            f"dropout_p: got one inside of {inside}, expected a call outside of it"
        )


def check_sinks(sinks, q):
    check_plain("sinks", sinks)
    check_plain("query", q)
    _check_four("query", q)
    (B, H, L), shape = q.shape[:3], tuple(sinks.shape)
    fits = shape == (H,)
    if len(shape) == 3:
        fits = shape[0] in (1, B) and shape[1] == H and shape[2] in (1, L)
    if not fits:
        raise _bad(
            f"sinks: got shape {shape}, expected ({H},), or ({B}, {H}, {L}) with 1 for "
            "batch or queries"
        )
    if not sinks.dtype.is_floating_point:
        raise _bad(f"sinks: got dtype {sinks.dtype}, expected floats")
    if sinks.device != q.device:
        raise _bad(f"sinks: got device {sinks.device}, expected the query's, {q.device}")


def _check_four(name, t):
    if t.dim() != 4:
        raise _NotFour(
            "EINVAL",
            f"{name}: got {t.dim()} dimensions {tuple(t.shape)}, expected 4: [B, H, N, D]",
        )


def check_layout(q, k, v):
    """In FlexAttention's words, where its users match on them."""
    for name, t in (("query", q), ("key", k), ("value", v)):
        _check_four(name, t)
    if q.dtype is not k.dtype or q.dtype is not v.dtype:
        raise _bad(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{q.dtype}, key.dtype: {k.dtype}, and value.dtype: {v.dtype} instead."
        )
    if q.device != k.device or q.device != v.device:
        raise _bad(
            "Expected query, key, and value to have the same device type, but got "
            f"query.device: {q.device}, key.device: {k.device}, and value.device: "
            f"{v.device} instead."
        )


def check_groups(shapes, q, k, enable_gqa):
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise _bad(
            f"{shapes}: got {q.shape[1]} query heads and {k.shape[1]} key heads, expected "
            "equal numbers, or enable_gqa=True"
        )


def check_shapes(q, k, v, enable_gqa):
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if 0 in k.shape[1:] or 0 in v.shape[1:] or not q.shape[1] * q.shape[3]:
        raise _bad(f"{shapes}: got an empty tensor, expected every length greater than 0")
    if q.shape[3] != k.shape[3]:
        raise _bad(f"{shapes}: expected query and key to have the same last dimension")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise _bad(f"{shapes}: expected key and value of the same heads and length")
    if k.shape[0] not in (1, q.shape[0]) or v.shape[0] not in (1, q.shape[0]):
        raise _bad(f"{shapes}: expected key and value of query's batch, or of batch 1")
    check_groups(shapes, q, k, enable_gqa)
    if q.shape[1] % k.shape[1]:
        raise _bad(
            f"{shapes}: got {q.shape[1]} query heads over {k.shape[1]} key heads, expected a "
            "multiple"
        )
    if not q.shape[0] * q.shape[2]:
        raise NoRows("EINVAL", f"{shapes}: got no rows, expected one or more")


def proven_for(mask, q, k, v):
    """The block mask for a call of these tensors, whose sizes its text may read."""
    return mask.proven_for(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3])


def mask_of_call(m, q, k, v):
    """The mask that a call uses: of one for more batches or heads the first ones, and proven
    for the call's sizes where its text reads them."""
    (B, H), (Q, KV) = m.dimensions(), m.seq_lengths
    if (Q, KV) != (q.shape[2], k.shape[2]):
        is_small = Q < q.shape[2] or KV < k.shape[2]
        raise _bad(
            f"block_mask was created for block_mask.shape={m.shape} but got "
            f"q_len={q.shape[2]} and kv_len={k.shape[2]}: block_mask was created for a "
            f"{'smaller' if is_small else 'larger'} length than you're using it for, expected "
            "one for these lengths, or block_mask._adjust(q_len, kv_len)"
        )
    if B not in (1, q.shape[0]) or H not in (1, q.shape[1]):
        own = m.own_dimensions()
        taken = [_taken(*x) for x in zip((B, H), own, q.shape[:2])]
        check_mask_heads(*taken, q)
    else:
        taken = None
    if m.device.type != q.device.type and not m.is_anywhere:
        raise _bad(
            f"block_mask is on {m.device}, query on {q.device}: expected one "
            "device (block_mask.to(query.device))"
        )
    made = proven_for(m, q, k, v)
    return m.first(*taken) if taken and made is m else made


def _taken(given, own, wanted):
    """How many batches or heads of a mask a call takes; own: of how many its blocks differ."""
    if own == 1 and given != wanted:
        return 1
    return min(given, wanted)


def check_mask_heads(B, H, q):
    if B not in (1, q.shape[0]) or H not in (1, q.shape[1]):
        raise _bad(
            f"block_mask: got batch {B} and {H} heads, expected {q.shape[0]} or more, or 1, "
            f"and {q.shape[1]} or more, or 1"
        )
