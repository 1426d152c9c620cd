"""flex_attention inside torch.compile: a custom operator that dynamo sees through.

The operator's arguments are tensors and text: Q, K, V, a list of captured tensors, the mod's
text and the number of a block mask. Mods given as language text (strings, saccade.torch.score)
stay in the graph; a Python callable has to be run on symbols first, which dynamo can't follow,
so such a call breaks the graph once and runs as it does outside of torch.compile.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch

from . import torch as front
from ._masks import BlockMask, numbered
from ._mods import AnyMod


def _score(text: str, names: str, captures: List[torch.Tensor]):
    if not text:
        return None
    return AnyMod("score", text, dict(zip(names.split(), captures)))


@torch.library.custom_op("saccade::flex", mutates_args=())
def _flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: List[torch.Tensor],
    names: str,
    score: str,
    mask: str,
    block_mask: int,
    scale: Optional[float],
    want_lse: bool,
    want_max: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    live = numbered[block_mask] if block_mask else (mask or None)
    out, lse, row_max = front._run(
        q, k, v, _score(score, names, captures), live, scale, None, want_lse, want_max
    )
    none = q.new_empty((0,), dtype=torch.float32)
    return out, none if lse is None else lse, none.clone() if row_max is None else row_max


@_flex.register_fake
def _(q, k, v, captures, names, score, mask, block_mask, scale, want_lse, want_max):
    def rows(wanted):
        return q.new_empty(q.shape[:3] if wanted else (0,), dtype=torch.float32)

    return front._output(q, v.shape[3]), rows(want_lse), rows(want_max)


@torch.compiler.disable
def _outside(*arguments):
    return front._run(*arguments)


def flex(q, k, v, score_mod, block_mask, scale, want_lse, want_max, gqa):
    """_run for a graph; falls out of it only for Python callables."""
    is_text = score_mod is None or isinstance(score_mod, (str, AnyMod))
    if not is_text or not (block_mask is None or isinstance(block_mask, (str, BlockMask))):
        return _outside(q, k, v, score_mod, block_mask, scale, None, want_lse, want_max, gqa)
    names, captures, text = "", [], ""
    if isinstance(score_mod, AnyMod):
        text = score_mod.text
        names = " ".join(score_mod.captures)
        captures = [
            c if torch.is_tensor(c) else torch.tensor(c) for c in score_mod.captures.values()
        ]
    elif score_mod is not None:
        text = score_mod
    number = block_mask.number if isinstance(block_mask, BlockMask) else 0
    mask = block_mask if isinstance(block_mask, str) else ""
    out, lse, row_max = torch.ops.saccade.flex(
        q, k, v, captures, names, text, mask, number, scale, want_lse, want_max
    )
    return out, lse if want_lse else None, row_max if want_max else None
