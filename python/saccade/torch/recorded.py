"""Derivatives of flex_attention where calls are recorded: as operators, as compiled.py has it.

functional.py's nodes run these instead of the library while a transform of torch.func is
written down. Where all transforms are forward mode, or in a graph of torch.compile, the
operator saccade::flex itself is under them, so that it has a rule for that here: jit.trace and
torch.export don't record nodes.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch._library.autograd import make_autograd_impl

from .calls import decoded, output_like, stats_dtype
from .checks import INVARIANCE, NO_SECOND, backend_of, way_of
from .compiled import _flex, _flex_backward, described, mask_of
from .forward_mode import check_device, tangents
from .graph_masks import of_number
from .mod_arguments import ModArguments
from .mods import AnyMod


def is_rate_alone() -> bool:
    """Whether forward mode is the only transform of torch.func that is active."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return all(x.key() == torch._C._functorch.TransformType.Jvp for x in stack)


class _Operands(NamedTuple):
    """What an operator is given beside query, key and value."""

    mods: ModArguments
    lists: List[torch.Tensor]
    block: List[int]
    scale: Optional[float]
    backend: str


def _operands(q, k, score, mask, scale, options) -> _Operands:
    backend = backend_of(options) if options else "auto"
    return _Operands(*described(q, k, score, mask), scale, backend)


def backward(score, mask, scale, options, needs, d_out, d_lse, q, k, v, out, lse):
    """Gradients of q, k, v and the tensors that the score captures; needs: which."""
    q, k, v = decoded(q, k, v)
    given = _operands(q, k, score, mask, scale, options)
    wanted = [*needs, *[False] * (3 + len(given.mods.captures) - len(needs))]
    made = torch.ops.saccade.flex_backward(
        [q, k, v, out, lse, d_out],
        d_lse,
        wanted,
        *given.mods,
        0,
        given.lists,
        given.block,
        given.scale,
        given.backend,
        False,
    )
    return tuple(made[: len(needs)])


def tangent(score, mask, scale, options, moves, q, k, v, rates):
    """How (out, lse) change at these rates of q, k, v and the tensors that the score captures;
    moves: which of query, key and value do."""
    q, k, v = decoded(q, k, v)
    given = _operands(q, k, score, mask, scale, options)
    return torch.ops.saccade.flex_tangent(
        q, k, v, *given.mods, 0, given.lists, given.block, given.scale, given.backend,
        list(rates), [int(x) for x in moves],
    )  # fmt: skip


@torch.library.custom_op("saccade::flex_tangent", mutates_args=())
def _flex_tangent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: List[torch.Tensor],
    numbers: List[float],
    names: str,
    score: str,
    mask: str,
    block_mask: int,
    lists: List[torch.Tensor],
    block: List[int],
    scale: Optional[float],
    backend: str,
    rates: List[torch.Tensor],
    moves: List[int],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """rates: of q, k, v and the tensors that the score captures, which captures begin with."""
    mods = ModArguments(captures or [], numbers or [], names, score, mask)
    for_score, for_mask = mods.named()
    live = of_number(block_mask, block) if block_mask else None
    if live is None:
        live = mask_of(mods, for_mask, lists, block)
    of = AnyMod("score", score, for_score) if score else None
    tensors = [n for n, c in for_score.items() if isinstance(c, torch.Tensor)]
    name, is_invariant = way_of(backend)
    options = {"BACKEND": name, "BATCH_INVARIANT": INVARIANCE[is_invariant]}
    return tangents(of, live, scale, options, tensors, moves, (q, k, v), rates)


@_flex_tangent.register_fake
def _(q, k, v, *_: Any):
    return output_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=stats_dtype(q))


def _no_second(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(NO_SECOND)


_flex_tangent.register_autograd(_no_second)

# ---- saccade::flex in forward mode ----

# (tensor, its rate or None). Graphs of torch.compile enter the level, which there is one of,
# behind torch.autograd.forward_ad's count of it.
_unpack = torch._VF._unpack_dual


def _with_rates(keys, q, k, v, captures, *rest):
    """The operator's rule of autograd, with rates of its results where its inputs have some."""
    given = [q, k, v, *(captures or [])]
    rates = [_unpack(t, level=0)[1] for t in given]
    made = _plain(keys, q, k, v, captures, *rest)
    if all(rate is None for rate in rates):
        return made
    check_device(q)
    (out, lse, row_max), names, (want_lse, want_max) = made, rest[1], rest[-3:-1]
    if want_max:
        raise NotImplementedError("max_scores: not to be had inside of torch.func's transforms")
    moves = [int(rate is not None) for rate in rates[:3]]
    n = 3 + len([word for word in names.partition("|")[0].split() if ":" not in word])
    rates = [torch.zeros_like(t) if rate is None else rate for t, rate in zip(given, rates)]
    with torch._C._AutoDispatchBelowAutograd():
        out_dot, lse_dot = torch.ops.saccade.flex_tangent(
            q, k, v, given[3:], *rest[:9], rates[:n], moves
        )
    lse = forward_ad.make_dual(lse, lse_dot, level=0) if want_lse else lse
    return forward_ad.make_dual(out, out_dot, level=0), lse, row_max


def _refusing(operator):
    """The rule of an operator that has no derivative in forward mode."""
    plain = make_autograd_impl(operator._opoverload, operator)

    def rule(keys, *given):
        tensors = [t for x in given for t in (x if isinstance(x, list) else (x,))]
        tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
        if any(_unpack(t, level=0)[1] is not None for t in tensors):
            raise NotImplementedError(NO_SECOND)
        return plain(keys, *given)

    return rule


_plain = make_autograd_impl(_flex._opoverload, _flex)
_rules = {
    "flex": _with_rates,
    "flex_backward": _refusing(_flex_backward),
    "flex_tangent": _refusing(_flex_tangent),
}
_library = torch.library.Library("saccade", "IMPL")
for _name, _rule in _rules.items():
    for _key in ("AutogradCPU", "AutogradCUDA"):
        _library.impl(_name, _rule, _key, with_keyset=True)
