"""flex_attention inside torch.compile: a custom operator that dynamo sees through.

The operator's arguments are tensors, numbers and text: Q, K, V, a list of captured tensors, the
mod's text and the number of a block mask. Mods given as language text (strings,
saccade.torch.score) stay in the graph; a Python callable has to be run on symbols first, which
dynamo can't follow, so such a call breaks the graph once and runs as it does outside of
torch.compile. saccade.torch.score(callable), made outside, is text and stays in.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch

from . import _core
from . import torch as front
from ._masks import BlockMask, block_mask_of, numbered
from ._mods import AnyMod, Resolved

_calls: dict = {}


class _OpCall:
    """A call whose captured tensors come with each run; it holds none of them."""

    def __init__(self, q, k, v, score: Optional[AnyMod], n_tensors, mask, how):
        scale, backend, want_lse, want_max = how
        found = Resolved(score, "score", q.device.type) if score is not None else None
        self.reusable = found is None or not found.copied
        self.call = front._new_call(q, k, v, found, mask, scale, backend, want_lse, want_max)
        self.addresses = [v.address for v in found.views] if found is not None else []
        self.keep = found.tensors[n_tensors if self.reusable else 0 :] if found else []

    def __call__(self, q, k, v, captures):
        places = self.addresses
        if self.reusable:
            new = [t.data_ptr() if t.dim() else a for t, a in zip(captures, places)]
            places = new + places[len(new) :]
        tail, array = self.call.bound_to(places)
        return self.call(q, k, v, tail)


def _layout(t: torch.Tensor) -> tuple:
    return t.dtype, t.shape, t.stride(), t.device


def _op_call(q, k, v, captures, numbers, names, score, mask, block_mask, how) -> _OpCall:
    live = _block_mask(block_mask) if block_mask else None
    key = (
        tuple(map(_layout, (q, k, v, *captures))),
        tuple(numbers),
        names,
        score,
        mask,
        block_mask,
        live.version if live is not None else None,
        how,
        torch.get_num_threads(),
    )
    found = _calls.get(key)
    if found is None or any(t.dim() == 0 for t in captures):
        front._check(q, k, v, True)
        if live is not None:
            front._check_mask(live, q, k)
        elif mask:
            B, H, Q, _ = q.shape
            live = block_mask_of(Resolved(mask, "mask", "cpu"), B, H, Q, k.shape[2])
        words = names.split()
        values = list(captures) + [
            int(x) if w.endswith(":int") else x for w, x in zip(words[len(captures) :], numbers)
        ]
        made = None
        if score:
            made = AnyMod("score", score, dict(zip((w.split(":")[0] for w in words), values)))
        found = _OpCall(q, k, v, made, len(captures), live, how)
        if len(_calls) >= 512:
            _calls.clear()
        if found.reusable:
            _calls[key] = found
    return found


def _block_mask(number: int) -> BlockMask:
    try:
        return numbered[number]
    except KeyError:
        raise RuntimeError(
            "saccade: the BlockMask of a compiled graph is gone, expected it to live as long "
            "as the compiled function is called"
        ) from None


@torch.library.custom_op("saccade::flex", mutates_args=())
def _flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: List[torch.Tensor],
    numbers: List[float],
    names: str,
    score: str,
    mask: str,
    block_mask: int,
    scale: Optional[float],
    backend: str,
    want_lse: bool,
    want_max: bool,
    enable_gqa: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    how = (scale, backend, want_lse, want_max)
    found = _op_call(q, k, v, captures, numbers, names, score, mask, block_mask, how)
    out, lse, row_max = found(q, k, v, captures)
    none = q.new_empty((0,), dtype=_stats(q))
    return out, none if lse is None else lse, none.clone() if row_max is None else row_max


def _stats(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


@_flex.register_fake
def _(
    q,
    k,
    v,
    captures,
    numbers,
    names,
    score,
    mask,
    block_mask,
    scale,
    backend,
    want_lse,
    want_max,
    enable_gqa,
):
    def rows(wanted):
        return q.new_empty(q.shape[:3] if wanted else (0,), dtype=_stats(q))

    front._check_layout(q, k, v)
    front._check_shapes(q, k, v, enable_gqa)
    return front._output(q, v.shape[3]), rows(want_lse), rows(want_max)


def _backward(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(front._NO_BACKWARD)


def _vmap(*arguments: Any) -> Any:
    raise NotImplementedError(front._NO_VMAP)


_flex.register_autograd(_backward)
_flex.register_vmap(_vmap)


def _outside(*arguments: Any) -> Any:
    return front._run(*arguments)


try:
    _outside = torch.compiler.disable(
        _outside,
        reason="saccade: a Python mod is run on symbols outside of the graph; for fullgraph "
        "make it text by saccade.torch.score(score_mod) or create_block_mask(mask_mod)",
    )
except TypeError:  # torch before 2.8 takes no reason
    _outside = torch.compiler.disable(_outside)


def flex(q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa):
    """_run for a graph; falls out of it only for Python callables."""
    is_text = score_mod is None or isinstance(score_mod, (str, AnyMod))
    if not is_text or not (block_mask is None or isinstance(block_mask, (str, BlockMask))):
        return _outside(q, k, v, score_mod, block_mask, scale, options, want_lse, want_max, gqa)
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = front._autocast(q, k, v)
    names: List[str] = []
    captures: List[torch.Tensor] = []
    words: List[str] = []
    numbers: List[float] = []
    text = ""
    if isinstance(score_mod, AnyMod):
        text = score_mod.text
        for name, c in score_mod.captures.items():
            if isinstance(c, torch.Tensor):
                names.append(name)
                captures.append(c)
            else:
                words.append(name + (":int" if isinstance(c, int) else ":float"))
                numbers.append(float(c))
    elif score_mod is not None:
        text = score_mod
    out, lse, row_max = torch.ops.saccade.flex(
        q,
        k,
        v,
        captures,
        numbers,
        " ".join(names + words),
        text,
        block_mask if isinstance(block_mask, str) else "",
        block_mask.number if isinstance(block_mask, BlockMask) else 0,
        scale,
        front._backend(options) if options else "auto",
        want_lse,
        want_max,
        gqa,
    )
    return out, lse if want_lse else None, row_max if want_max else None
