"""Derivatives of flex_attention where calls are recorded: as operators, as compiled.py has it.

functional.py's nodes run these instead of the library while a transform of torch.func is
written down. Where all transforms are forward mode, or in a graph of torch.compile, the
operator saccade::flex itself is under them (rules.py): jit.trace and torch.export don't record
nodes.
"""

from __future__ import annotations

from typing import Any

import torch

from .calls import decoded, output_like, stats_dtype
from .checks import INVARIANCE, backend_of, way_of
from .compiled import described, mask_of
from .forward_mode import tangents
from .mod_arguments import OPERANDS, Operands
from .mods import AnyMod


def is_rate_alone() -> bool:
    """Whether forward mode is the only transform of torch.func that is active."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return all(x.key() == torch._C._functorch.TransformType.Jvp for x in stack)


def _operands(q, k, score, mask, scale, options) -> Operands:
    backend = backend_of(options) if options else "auto"
    mods, lists, block = described(q, k, score, mask)
    return Operands(mods, 0, lists, block, scale, backend)


def backward(score, mask, scale, options, needs, d_out, d_lse, q, k, v, out, lse):
    """Gradients of q, k, v and the tensors that the score captures; needs: which."""
    q, k, v = decoded(q, k, v)
    given = _operands(q, k, score, mask, scale, options)
    wanted = [*needs, *[False] * (3 + len(given.mods.captures) - len(needs))]
    tensors = [q, k, v, out, lse, d_out]
    made = torch.ops.saccade.flex_backward(tensors, d_lse, wanted, *given.flat(), False)
    return tuple(made[: len(needs)])


def tangent(score, mask, scale, options, moves, q, k, v, rates):
    """How (out, lse) change at these rates of q, k, v and the tensors that the score captures;
    moves: which of query, key and value do."""
    q, k, v = decoded(q, k, v)
    given = _operands(q, k, score, mask, scale, options)
    moves = [int(x) for x in moves]
    return torch.ops.saccade.flex_tangent(q, k, v, *given.flat(), list(rates), moves)


@torch.library.custom_op(
    "saccade::flex_tangent",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPERANDS}, Tensor[] rates, SymInt[] moves) -> "
    "(Tensor, Tensor)",
)
def flex_tangent(q, k, v, *given):
    """rates: of q, k, v and the tensors that the score captures, which captures begin with."""
    x, (rates, moves) = Operands.read(given)
    for_score, for_mask = x.mods.named()
    score = AnyMod("score", x.mods.score, for_score) if x.mods.score else None
    name, is_invariant = way_of(x.backend)
    options = {"BACKEND": name, "BATCH_INVARIANT": INVARIANCE[is_invariant]}
    of_call = score, mask_of(x, for_mask), x.scale, options
    return tangents(*of_call, x.mods.score_tensors(), moves, (q, k, v), rates)


@flex_tangent.register_fake
def _(q, k, v, *_: Any):
    return output_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=stats_dtype(q))
