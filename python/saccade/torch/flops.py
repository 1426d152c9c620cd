"""What torch.utils.flop_counter counts for the operators: as for FlexAttention, the products of
all of Q x KV, whatever a mask leaves out.

FlopCounterMode is a mode of the dispatcher, under which flex_attention is these operators
(recording.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import compiled  # noqa: F401 - which has the operators


def _product(q: Any, k: Any, width: int) -> int:
    """One of [Q, width] and [width, KV], or of as many, for each batch and head."""
    B, H, Q, _ = q.shape
    return int(2 * B * H * Q * k.shape[2] * width)


def _forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores, and their product with value."""
    return _product(q, k, q.shape[3]) + _product(q, k, v.shape[3])


def _backward(tensors: Any, *_: Any, **__: Any) -> int:
    """Scores again, then the gradients of query, key and value, and of the weights."""
    q, k, v, *_ = tensors
    return 3 * _product(q, k, q.shape[3]) + 2 * _product(q, k, v.shape[3])


@torch.library.custom_op(
    "saccade::over_ranks",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, int keys, bool is_backward) -> Tensor",
)
def over_ranks(q, k, v, keys, is_backward):
    """Stands for a call over ranks where a mode of the dispatcher looks on, which does not see
    the library. keys: of the whole sequence, of which k and v hold this rank's."""
    return q.new_empty(0)


def _over_ranks(q: Any, k: Any, v: Any, keys: int, is_backward: bool, **_: Any) -> int:
    k, v = (torch.empty((*t.shape[:2], keys, t.shape[3]), device="meta") for t in (k, v))
    return _backward((q, k, v)) if is_backward else _forward(q, k, v)


register_flop_formula(torch.ops.saccade.over_ranks, get_raw=True)(_over_ranks)
register_flop_formula(torch.ops.saccade.flex, get_raw=True)(_forward)
register_flop_formula(torch.ops.saccade.flex_backward, get_raw=True)(_backward)
