"""scaled_dot_product_attention, as torch.nn.functional has it."""

from __future__ import annotations

import itertools
from typing import Optional, Sequence

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..trace.errors import words_of
from . import active
from .checks import brief
from .flex import flex_attention
from .mods import AnyMod


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(scale * query key^T + attn_mask) value, fused, with any mask.

    Takes the place of torch.nn.functional.scaled_dot_product_attention, whose source this is:

        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention

    query [..., Hq, L, E], key [..., Hkv, S, E], value [..., Hkv, S, Ev], one dtype (f32, f16,
    bf16; f64 on the CPU) and device, 2 dimensions and more; leading ones are broadcast.
    Returns [..., Hq, L, Ev]. attn_mask: broadcast to [..., Hq, L, S] without being copied,
    bool (True is live) or floats that are added to the scores; floats are differentiable; or
    causal_upper_left and causal_lower_right of torch.nn.attention.bias, of L and S (inside of
    context_parallel of the whole sequence's lengths, as floats and bools are).
    is_causal: query i sees keys 0 to i; not beside attn_mask. scale: default 1/sqrt(E).
    dropout_p: as in flex_attention, in every mode. enable_gqa: Hq may be a multiple of Hkv.
    A row that sees no key is zeros. A mask that follows from positions is faster as block_mask
    of flex_attention, which leaves out what it hides. Errors: ValueError for shapes, dtypes,
    devices and numbers, TypeError for what is no tensor.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, t)
        if t.dim() < 2:
            raise ValueError(f"{name}: got shape {list(t.shape)}, expected [..., L, E]")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal: got True beside attn_mask, expected one of them")
    lead = _leading(query, key, value, enable_gqa)
    q, k, v = (_in_four(t, lead, enable_gqa) for t in (query, key, value))
    mod: AnyMod | str | None = None
    mask = "causal()" if is_causal else None
    if isinstance(attn_mask, CausalBias):
        mask = _causal(attn_mask, *_lengths(q, k))
    elif attn_mask is not None:
        mod = _mod(attn_mask, lead, *_lengths(q, k))
    if mask is not None and active.parallel is not None:  # which has its block masks
        mod, mask = f"{mask} ? score : -inf", None
    if active.parallel is None and any(map(_is_none, (q.shape[1], k.shape[2], v.shape[3]))):
        _check_alike(query, key, value)
        k, v = (t if t.shape[1] == q.shape[1] else t[:, :1] for t in (k, v))
        none = q @ k.mT @ v  # zeros, if it has entries, as its gradients are
        return none if len(lead) == 2 else none.reshape(*lead, *none.shape[-2:])
    if active.parallel is None and _is_none(q.shape[3]):  # all scores are 0
        q, k = (torch.nn.functional.pad(t, (0, 1)) for t in (q, k))
        scale = 1.0
    out: torch.Tensor = flex_attention(
        q,
        k,
        v,
        mod,
        mask,
        scale,
        enable_gqa,
        dropout_p=dropout_p,
    )
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])


def _is_none(size) -> bool:
    """Whether a size is 0, which a graph's own numbers never are."""
    return type(size) is int and size == 0


def _check_tensor(name, t):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: got {brief(t)}, expected a tensor")


def _check_alike(query, key, value):
    for name, t in (("key", key), ("value", value)):
        if (t.dtype, t.device) != (query.dtype, query.device):
            raise ValueError(f"{name}: got {t.dtype} on {t.device}, expected {query.dtype} on "
                             f"{query.device} as query has")  # fmt: skip
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"query, key, value: got shapes {list(query.shape)}, {list(key.shape)} and "
            f"{list(value.shape)}, expected query and key of one last dimension, key and value "
            "of one length"
        )


def _leading(query, key, value, enable_gqa) -> torch.Size:
    """The result's dimensions before its last two."""
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return query.shape[:-2]
    if enable_gqa and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        return query.shape[:-2]  # the common case, of which broadcasting would find the same
    if enable_gqa:  # heads are as they are
        shapes = [t.shape[:-3] for t in (query, key, value)]
        heads = query.shape[-3:-2]
    else:
        shapes = [t.shape[:-2] for t in (query, key, value)]
        heads = torch.Size()
    try:
        return torch.Size((*torch.broadcast_shapes(*shapes), *heads))
    except RuntimeError:
        raise ValueError(
            f"query, key, value: got shapes {list(query.shape)}, {list(key.shape)} and "
            f"{list(value.shape)}, expected leading dimensions that can be broadcast"
            f"{'' if enable_gqa else ', or enable_gqa=True'}"
        ) from None


def _in_four(t, lead, enable_gqa):
    """t as [B, H, rows, columns]."""
    if t.dim() == 4 and (t.shape[:1] == lead[:-1] if enable_gqa else t.shape[:2] == lead):
        return t
    own = (*lead[:-1], *t.shape[-3:-2]) if enable_gqa else lead
    return _four(t.expand(*own, *t.shape[-2:]))


def _four(t):
    """Batches of several dimensions as one, or of none as 1; heads likewise."""
    while t.dim() < 4:
        t = t.unsqueeze(0)
    return t.flatten(0, -4)


def _causal(bias, L, S) -> str:
    """What torch.nn.attention.bias has: a tensor of uninitialised memory with a meaning."""
    made_for = bias.seq_len_q, bias.seq_len_kv
    if made_for != (L, S):
        raise ValueError(
            f"attn_mask: got a causal bias of {made_for[0]} queries and {made_for[1]} keys, "
            f"expected {L} and {S}"
        )
    is_lower = bias.variant == CausalVariant.LOWER_RIGHT
    return f"kv - q <= {S - L}" if is_lower and S != L else "causal()"


def _check_own_meaning(mask):
    """Raises for a class with a __torch_function__ of its own, which torch would ask what
    attention with such a mask is."""
    own = type(mask).__torch_function__
    inherited = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    is_plain = own is torch._C._disabled_torch_function_impl
    if not is_plain and getattr(own, "__func__", None) is not inherited:
        raise TypeError(
            f"attn_mask: got {words_of(mask)}, whose __torch_function__ says what it means, "
            "expected a plain tensor (mask.as_subclass(torch.Tensor))"
        )


def _lengths(q, k):
    """Of the queries and keys that a mask is of: over ranks all of them."""
    if active.parallel is not None:
        return active.parallel.length, active.parallel.length
    return q.shape[2], k.shape[2]


def _mod(mask, lead, L, S) -> AnyMod:
    _check_tensor("attn_mask", mask)
    if type(mask) is not torch.Tensor and not torch.compiler.is_dynamo_compiling():
        _check_own_meaning(mask)
    is_bool = mask.dtype is torch.bool
    if not is_bool and not mask.dtype.is_floating_point:
        raise ValueError(f"attn_mask: got {mask.dtype}, expected torch.bool or floats")
    whole = (*lead, L, S)
    if mask.dim() > len(whole) or not _fits(mask.shape, whole):
        raise ValueError(
            f"attn_mask: got shape {list(mask.shape)}, expected one that is broadcast to "
            f"{list(whole)}"
        )
    if any(n > 1 for n in mask.shape[:-3]):  # batches are numbered as the query's
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    mask = _four(mask)
    text = _TEXTS[is_bool, tuple(n > 1 for n in mask.shape)]
    return AnyMod("score", text, {"attn_mask": mask})


def _fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(whole)))


def _text(is_bool: bool, varies: Sequence[bool]) -> str:
    places = ", ".join(name if v else "0" for name, v in zip(("b", "h", "q", "kv"), varies))
    read = f"attn_mask[{places}]"
    return f"{read} ? score : -inf" if is_bool else f"score + {read}"


# By whether masks are bool, and along which dimensions they have elements of their own.
_TEXTS = {
    (is_bool, varies): _text(is_bool, varies)
    for is_bool in (False, True)
    for varies in itertools.product((False, True), repeat=4)
}
