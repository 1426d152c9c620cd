"""flex_attention, as FlexAttention (arXiv 2412.05496) has it, and explain."""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, Literal, NamedTuple, Optional, Union, overload

import torch
from torch.autograd import forward_ad, profiler

from . import active, flops, rules  # noqa: F401
from .beside import with_sinks
from .block_mask import BlockMask
from .calls import new_call, stats_dtype
from .checks import (
    backend_of,
    check_aux,
    check_call,
    check_dropout,
    check_flags,
    check_sinks,
    proven_for,
    scale_of,
    way_of,
)
from .compiled import in_graph
from .entries import run
from .functional import transformed
from .masks import mask_of_tensors, mask_or_mod
from .mods import AnyMod, Resolved, dtype_name
from .recorded import is_rate_alone
from .recording import is_described, is_recorded

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


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[ScoreMod] = ...,
    block_mask: Union[BlockMask, MaskMod, None] = ...,
    scale: Optional[float] = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Optional[dict[str, Any]] = ...,
    *,
    return_aux: None = ...,
    sinks: Optional[torch.Tensor] = ...,
    dropout_p: float = ...,
) -> torch.Tensor: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[ScoreMod] = ...,
    block_mask: Union[BlockMask, MaskMod, None] = ...,
    scale: Optional[float] = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
    kernel_options: Optional[dict[str, Any]] = ...,
    return_aux: None = ...,
    sinks: Optional[torch.Tensor] = ...,
    dropout_p: float = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[ScoreMod] = ...,
    block_mask: Union[BlockMask, MaskMod, None] = ...,
    scale: Optional[float] = ...,
    enable_gqa: bool = ...,
    *,
    kernel_options: Optional[dict[str, Any]] = ...,
    return_aux: AuxRequest,
    sinks: Optional[torch.Tensor] = ...,
    dropout_p: float = ...,
) -> tuple[torch.Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[ScoreMod] = ...,
    block_mask: Union[BlockMask, MaskMod, None] = ...,
    scale: Optional[float] = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: Optional[dict[str, Any]] = ...,
    *,
    return_aux: Optional[AuxRequest] = ...,
    sinks: Optional[torch.Tensor] = ...,
    dropout_p: float = ...,
) -> Union[
    torch.Tensor, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, AuxOutput]
]: ...
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
    sinks: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
) -> Any:
    """softmax(mask(score_mod(scale * query key^T))) value, fused and exact.

    query [B, Hq, L, E], key [B, Hkv, S, E], value [B, Hkv, S, Ev], one dtype (f32, f16, bf16)
    and device, last dimension contiguous, other strides free; key and value may have batch 1.
    (f64 on the CPU too, by the reference: exact and slow.)
    score_mod: callable (score, b, h, q_idx, kv_idx) -> score, language text, or saccade.score.
    block_mask: a BlockMask, language text, a callable mask_mod, or saccade.mask.
    scale: default 1/sqrt(E). enable_gqa: needed where Hq != Hkv.
    kernel_options: {"BACKEND": "auto" | "cpu" | "cuda" | "ref"}; {"BATCH_INVARIANT": True}: a
    row's bits follow from the row alone, whatever is beside it (not in context_parallel);
    FlexAttention's tuning keys are accepted and not needed. Returns out [B, Hq, L, Ev]; with
    return_lse (out, lse); with return_aux (out, AuxOutput). sinks: a float logit for each head
    [Hq], or [B, Hq, L] with 1 for B or L, that takes part in its rows' sums and has no value;
    lse includes it, and it is differentiable. dropout_p: weights are dropped at this rate and
    the others divided by 1 - dropout_p, whatever the mode, by seed and offset from torch's
    generator. Errors: ValueError for shapes, dtypes, devices, text; TypeError for
    a mod that can't be traced, with its line. Differentiable (once) in query, key, value and in
    every float tensor that score_mod captures; lse is, row maxima and masks are not.
    Source: FlexAttention (arXiv 2412.05496).
    """
    recorded = is_recorded()
    if not (recorded or type(enable_gqa) is type(return_lse) is bool):
        check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    if not (recorded or scale is None):
        scale = scale_of(scale)
    if not (recorded or kernel_options is None or type(kernel_options) is dict):
        backend_of(kernel_options)
    if return_aux is not None:
        check_aux(return_aux)
    if return_lse and return_aux is not None:
        raise ValueError("got both return_lse and return_aux, expected one")
    want_lse = return_lse or (return_aux is not None and return_aux.lse)
    want_max = return_aux is not None and return_aux.max_scores
    if type(dropout_p) is not float:
        check_dropout(dropout_p, False)
    if dropout_p:
        check_dropout(dropout_p, _without_dropout())
    if sinks is not None:
        check_sinks(sinks, query)
        if not _takes_sinks(query):
            given = query, key, value, score_mod, block_mask, scale, enable_gqa
            options = {"kernel_options": kernel_options, "dropout_p": dropout_p}
            made = _behind(sinks, want_max, given, options)
            return _results(*made, return_lse, return_aux)
    if active.parallel is not None:
        return _over_ranks(
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            enable_gqa,
            kernel_options,
            return_lse,
            return_aux,
        )
    if active.has_checkpointed and not recorded:
        active.check_recomputed()
    call: Any = in_graph if recorded else run
    if recorded:
        is_ours = not torch.compiler.is_dynamo_compiling() and _is_transformed()
        if is_ours and not is_rate_alone():
            call = transformed
    elif _is_transformed() or forward_ad._current_level >= 0:
        call = transformed
    if dropout_p:
        call = functools.partial(call, dropout=float(dropout_p))
    if sinks is not None:
        call = functools.partial(call, sinks=sinks.to(stats_dtype(query)).resolve_neg())
    if not recorded and profiler._is_profiler_enabled:  # what is recorded shows its operators
        call = functools.partial(_profiled, call)
    out, lse, row_max = call(
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
    return _results(out, lse, row_max, return_lse, return_aux)


def _profiled(call, *given, **options):
    with profiler.record_function("saccade::flex_attention"):
        return call(*given, **options)


_is_transformed = torch._C._are_functorch_transforms_active


def _without_dropout():
    """What is active that drops no weights, in words; "" for nothing."""
    if active.parallel is not None:
        return "context_parallel"
    if torch.compiler.is_dynamo_compiling():
        return ""
    if _is_transformed():
        return "a transform of torch.func"
    is_forward = forward_ad._current_level >= 0
    return "forward mode (torch.autograd.forward_ad)" if is_forward else ""


def _takes_sinks(query):
    """Whether a call is run, as it is and by the library's own kernels: the reference's
    gradients have a derivative too, which sinks in the run have not."""
    return (
        type(query) is torch.Tensor
        and query.device.type in ("cpu", "cuda")
        and query.dtype is not torch.float64
        and active.parallel is None
        and not (is_recorded() or active.has_rates())
    )


def _behind(sinks, want_max, given, options) -> tuple[Any, Any, Any]:
    """(out, lse, row maxima) with sinks added to what a run without them makes."""
    out, aux = flex_attention(*given, return_aux=AuxRequest(True, want_max), **options)
    return *with_sinks(out, aux.lse, sinks.to(aux.lse.dtype)), aux.max_scores


def _results(out, lse, row_max, return_lse, return_aux):
    """Of what there is what was asked for."""
    if return_aux is None:
        return (out, lse) if return_lse else out
    return out, AuxOutput(lse if return_aux.lse else None, row_max)


@torch.compiler.disable
def _over_ranks(
    q, k, v, score_mod, block_mask, scale, enable_gqa, options, return_lse, return_aux
):
    """Inside of context_parallel. torch.compile breaks its graph here."""
    if active.has_rates():
        raise NotImplementedError(
            "saccade: got torch.func or forward mode inside of context_parallel, expected a "
            "call outside of one of them"
        )
    if is_described():
        raise NotImplementedError(
            "saccade: got a call that is traced, or of fake tensors, inside of "
            "context_parallel, expected tensors with values (torch.compile breaks its graph)"
        )
    backend, invariance = way_of(backend_of(options))
    if invariance:
        raise ValueError(
            "kernel_options: got BATCH_INVARIANT inside of context_parallel, expected a call "
            "outside of it"
        )
    if backend not in ("auto", active.parallel.device.type):
        raise ValueError(
            f"kernel_options: got BACKEND {backend!r} inside of context_parallel, expected "
            f"'auto' or {active.parallel.device.type!r}, where these ranks run"
        )
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("max_scores: not to be had over ranks")
    out, lse = active.parallel.attention(q, k, v, score_mod, block_mask, scale, enable_gqa)
    return _results(out, lse, None, return_lse, return_aux)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[ScoreMod] = None,
    block_mask: Union[BlockMask, MaskMod, None] = None,
    scale: Optional[float] = None,
    kernel_options: Optional[dict[str, Any]] = None,
    *,
    enable_gqa: bool = True,
    verbose: bool = False,
) -> str:
    """What a call with these arguments runs: kernel, method and why, threads, what the mods
    became, how much of the mask is not computed. verbose: typed nodes and generated code too.
    """
    check_call(query, key, value, enable_gqa)
    check_flags(enable_gqa=enable_gqa, verbose=verbose)
    score = None
    if score_mod is not None:
        is_double = query.dtype is torch.float64
        score = Resolved(score_mod, "score", query.device.type, is_double)
    mask, mask_mod = mask_or_mod(block_mask)
    if mask_mod is not None:
        mask = mask_of_tensors(Resolved(mask_mod, "mask", "cpu"), query, key, value)
    elif mask is not None:
        mask = proven_for(mask, query, key, value)
    call = new_call(
        query, key, value, score, mask, scale, backend_of(kernel_options), False, False
    )
    text: str = call.runner.plan.explain()
    summary = "\n".join(_summary(query, key, value, score, mask, text)) + "\n"
    return summary + "\n" + text if verbose else summary


def _summary(query, key, value, score, mask, text):
    (B, H, Q, D), (_, Hkv, KV, Dv) = query.shape, value.shape
    yield f"problem: b{B} h{H}/{Hkv} q{Q} kv{KV} d{D} dv{Dv} {dtype_name(query)}"
    if score is not None:
        yield f"score text: {score.bound.text}"
    if mask is not None:
        mod, stats = mask.handle().mod, mask.handle().stats()
        yield f"mask text: {mod.text if mod else 'index tensors alone'}"
        yield (
            f"blocks: {100 * stats.sparsity:.1f} % not computed; {stats.full} full, "
            f"{stats.partial} partial of {stats.blocks}"
        )
    for line in text.splitlines():  # facts of the plan: what is neither node nor code
        if re.match(r"(?!problem:)[a-z]+( [a-z]+)?: \S", line):
            yield line
