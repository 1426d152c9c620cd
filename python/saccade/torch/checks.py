"""What a call may be given: shapes, dtypes, devices and options; every refusal says what it got
and what it expected."""

from __future__ import annotations

import difflib

import torch

from ..c import objects
from ..c.abi import BadValue
from ..trace.errors import words_of

NO_VMAP = (
    "saccade: got tensors inside a torch.func transform (vmap, grad, jvp), expected plain "
    "ones; a mapped dimension folds into batch or heads (query.flatten(0, 1))"
)


NO_SECOND = (
    "saccade: flex_attention has second derivatives in float64 on the CPU only, by the "
    "reference, got a backward pass through its backward pass; expected create_graph=False, or "
    "query, key and value in float64 (outside of torch.compile)"
)


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
    chosen, asked = "auto", options.get("BATCH_INVARIANT", False)
    if asked not in INVARIANCE or isinstance(asked, int) != isinstance(asked, bool):
        raise ValueError(
            f"kernel_options: got BATCH_INVARIANT {asked!r}, expected True, False or 'short'"
        )
    invariance = INVARIANCE.index(asked)
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
        raise OutsideTensor(
            reason.status, f"{kind}_mod: {reason}", reason.line, reason.column
        ) from None


class NoRows(BadValue):
    """Nothing is wrong with a call but that it has no batch or no queries."""


class _NotFour(BadValue, NotImplementedError):
    """FlexAttention calls this case not implemented."""


def check_call(q, k, v, enable_gqa):
    for name, t in (("query", q), ("key", k), ("value", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: got {words_of(t)}, expected a tensor")
        if t.is_nested:
            raise NotImplementedError(
                f"{name}: got a NestedTensor, expected a packed tensor with a document mask"
            )
        if t.layout is not torch.strided:
            raise TypeError(f"{name}: got a tensor of layout {t.layout}, expected strided")
    check_layout(q, k, v)
    if q.device.type not in ("cpu", "cuda"):
        raise _bad(f"query: got device {q.device}, expected cpu or cuda")
    check_shapes(q, k, v, enable_gqa)


def check_dropout(rate, is_elsewhere):
    if not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise _bad(f"dropout_p: got {rate!r}, expected a number from 0 to 1")
    if is_elsewhere:
        raise NotImplementedError(
            "dropout_p: got one in torch.compile, torch.func or context_parallel, expected a "
            "call outside of them"
        )


def check_sinks(sinks, q):
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks: got {words_of(sinks)}, expected a tensor")
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


def check_layout(q, k, v):
    """In FlexAttention's words, where its users match on them."""
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim() != 4:
            raise _NotFour(
                "EINVAL",
                f"{name}: got {t.dim()} dimensions {tuple(t.shape)}, expected 4: [B, H, N, D]",
            )
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
    if not q.shape[0] * q.shape[2]:
        raise NoRows("EINVAL", f"{shapes}: got no rows, expected one or more")


def mask_of_call(m, q, k):
    """The mask that a call uses: of one for more batches or heads the first ones."""
    B, H, Q, KV = m.shape
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
        m = m.first(*taken)
    if m.device.type != q.device.type:
        raise _bad(
            f"block_mask is on {m.device}, query on {q.device}: expected one "
            "device (block_mask.to(query.device))"
        )
    return m


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


def refuse_wrapped(*tensors):
    """Says which kind of tensor it is that has no memory."""
    is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda t: False)
    for t in tensors:
        if is_wrapped(t):
            raise NotImplementedError(NO_VMAP) from None
        if type(t) not in (torch.Tensor, torch.nn.Parameter) and not _has_memory(t):
            raise TypeError(
                f"saccade: got {words_of(t)}, which has no memory of its own, expected "
                "a plain tensor"
            ) from None


def _has_memory(t):
    try:
        return t.data_ptr() != 0
    except RuntimeError:
        return False
