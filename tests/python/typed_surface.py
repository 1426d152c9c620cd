"""What a type checker knows of the public calls; checked by mypy, never run."""

from typing import assert_type

import torch

from saccade.torch import AuxOutput, AuxRequest, BlockMask, create_block_mask, explain
from saccade.torch import flex_attention


def calls(q: torch.Tensor) -> None:
    mask = create_block_mask("q >= kv", None, None, 8, 8)
    assert_type(mask, BlockMask)
    assert_type(flex_attention(q, q, q), torch.Tensor)
    assert_type(flex_attention(q, q, q, "score", mask, 0.5), torch.Tensor)
    assert_type(flex_attention(q, q, q, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    aux = AuxRequest(lse=True)
    assert_type(flex_attention(q, q, q, return_aux=aux), tuple[torch.Tensor, AuxOutput])
    assert_type(explain(q, q, q, verbose=True), str)
