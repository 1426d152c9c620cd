"""What torch's autograd does at the operators: nothing but the call itself where nothing is
recorded and nothing differentiated, so that a call of a compiled graph costs little; forward
mode of saccade::flex; refusals of second derivatives."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._library.autograd import make_autograd_impl

from .checks import NO_DRAWN_RATES, NO_SECOND
from .compiled import flex, flex_backward
from .forward_mode import check_device
from .mod_arguments import Operands
from .recorded import flex_tangent

_KEYS = torch._C.DispatchKey
# (tensor, its rate or None). Graphs of torch.compile enter the level, which there is one of,
# behind torch.autograd.forward_ad's count of it.
_unpack = torch._VF._unpack_dual
_grad_mode = torch.is_grad_enabled
_known: dict[int, bool] = {}  # by the bits of the dispatcher's keys


def _is_plain(keys) -> bool:
    """Whether the kernel of a device is all that is left of the dispatcher's way: no mode, no
    transform, no tensor without memory of its own."""
    bits = keys.raw_repr()
    found = _known.get(bits)
    if found is None:
        rest = (keys & torch._C._after_autograd_keyset).remove(_KEYS.ADInplaceOrView)
        found = _known[bits] = rest.highestPriorityTypeId() in (_KEYS.CPU, _KEYS.CUDA)
    return found


def _trains(tensors) -> bool:
    return _grad_mode() and any([t.requires_grad for t in tensors])


def _no_second(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(NO_SECOND)


def _no_gradient_of_rates(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        f"{NO_SECOND}; forward mode alone, of tensors that require gradients, belongs inside "
        "of torch.no_grad()"
    )


flex_backward.register_autograd(_no_second)
flex_tangent.register_autograd(_no_gradient_of_rates)
_recorded = make_autograd_impl(flex._opoverload, flex)


def _flex(keys, q, k, v, captures, *rest):
    """saccade::flex, whose results have rates where its inputs have."""
    given = [q, k, v, *(captures or ())]
    pairs = [_unpack(t, level=0) for t in given]
    rates = [rate for _, rate in pairs]
    is_moved = any([rate is not None for rate in rates])
    if not is_moved and _is_plain(keys) and not _trains(given):
        return flex._init_fn(q, k, v, captures, *rest)
    if not is_moved:
        return _recorded(keys, q, k, v, captures, *rest)
    plain = [t for t, _ in pairs]  # a node of autograd has no rule for rates
    made = _recorded(keys, *plain[:3], plain[3:], *rest)
    return _with_rates(given, rates, made, (captures, *rest))


def _with_rates(given, rates, made, operands):
    (out, lse, row_max), (x, (want_lse, want_max, *_)) = made, Operands.read(operands)
    check_device(out)
    if x.dropout:
        raise NotImplementedError(NO_DRAWN_RATES)
    if want_max:
        raise NotImplementedError("max_scores: not to be had inside of torch.func's transforms")
    moves = [int(rate is not None) for rate in rates[:3]]
    n = 3 + len(x.mods.score_tensors())
    rates = [torch.zeros_like(t) if rate is None else rate for t, rate in zip(given, rates)]
    with torch._C._AutoDispatchBelowAutograd():
        out_dot, lse_dot = torch.ops.saccade.flex_tangent(
            *given[:3], *x.flat(), rates[:n], moves
        )
    lse = forward_ad.make_dual(lse, lse_dot, level=0) if want_lse else lse
    return forward_ad.make_dual(out, out_dot.to(out.dtype), level=0), lse, row_max


def _refusing(operator):
    """The rule of an operator that has no derivative."""
    recorded = make_autograd_impl(operator._opoverload, operator)

    def rule(keys, *given):
        tensors = [t for x in given for t in (x if isinstance(x, list) else (x,))]
        tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
        if any([_unpack(t, level=0)[1] is not None for t in tensors]):
            raise NotImplementedError(NO_SECOND)
        if _is_plain(keys) and not _trains(tensors):
            return operator._init_fn(*given)
        return recorded(keys, *given)

    return rule


# torch.compile, which is on while a graph of its backend "eager" runs, is not to look in.
_library = torch.library.Library("saccade", "IMPL")
for _name, _rule in (
    ("flex", _flex),
    ("flex_backward", _refusing(flex_backward)),
    ("flex_tangent", _refusing(flex_tangent)),
):
    for _key in ("AutogradCPU", "AutogradCUDA"):
        _library.impl(_name, torch.compiler.disable(_rule), _key, with_keyset=True)
