"""Derivatives of flex_attention where calls are recorded: as operators, as compiled.py has it.

functional.py's nodes run these instead of the library while a transform of torch.func is
written down. Where all transforms are forward mode, or in a graph of torch.compile, the
operator saccade::flex itself is under them (rules.py): jit.trace and torch.export don't record
nodes.
"""

# Annotations are objects here: PyTorch 2.5 can't read an operator's types from text.

from typing import Any, List, NamedTuple, Optional, Tuple

import torch

from .calls import decoded, output_like, stats_dtype
from .checks import INVARIANCE, backend_of, way_of
from .compiled import described, mask_of
from .forward_mode import tangents
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
    mods, lists, block = described(q, k, score, mask)
    return _Operands(mods, lists, block, scale, backend)


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
def flex_tangent(
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


@flex_tangent.register_fake
def _(q, k, v, *_: Any):
    return output_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=stats_dtype(q))
