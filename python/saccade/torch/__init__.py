"""FlexAttention's API for PyTorch tensors, on the CPU and on CUDA.

    from saccade.torch import flex_attention, create_block_mask

is the only line to change. Differences: nothing needs torch.compile, there is no quadratic
fall-back, masks of any length are proven instead of evaluated, Python numbers and tensors in a
mod's closure may change without compiling anything.
"""

from __future__ import annotations

from typing import Any, Optional

from .append import append_keys
from .block_mask import BlockMask, noop_mask
from .bounds import check
from .cascade import SharedPrefix
from .cache import PagedCache
from .dense_masks import create_mask
from .flex import AuxOutput, AuxRequest, MaskMod, ScoreMod, explain, flex_attention
from .masks import and_masks, create_block_mask, or_masks
from .graph_breaks import out_of_graphs as _out_of_graphs
from .mods import mask, score
from .pool import share as _share
from .quantised import quantize
from .sdpa import scaled_dot_product_attention
from .selection import BlockSelection
from .serving import cached_attention as _cached_attention
from .varlen import varlen_attention as _varlen_attention

cached_attention = _out_of_graphs(_cached_attention)
varlen_attention = _out_of_graphs(_varlen_attention)
_share()

__all__ = [
    "flex_attention",
    "scaled_dot_product_attention",
    "cached_attention",
    "SharedPrefix",
    "append_keys",
    "PagedCache",
    "quantize",
    "varlen_attention",
    "create_block_mask",
    "create_mask",
    "BlockMask",
    "BlockSelection",
    "and_masks",
    "or_masks",
    "noop_mask",
    "AuxRequest",
    "AuxOutput",
    "mask",
    "score",
    "explain",
    "check",
    "register_transformers",
    "benchmark",
    "context_parallel",
]


def __getattr__(name: str) -> Any:
    """Private names that FlexAttention's users import too, and FlexKernelOptions."""
    from .borrowed import borrowed

    return borrowed(name)


def register_transformers(
    name: str = "saccade", *, kernel_options: Optional[dict[str, Any]] = None
) -> None:
    """Makes attn_implementation=name work in Hugging Face Transformers."""
    from .transformers import register_transformers as register

    register(name, kernel_options=kernel_options)


def context_parallel(*arguments: Any, **options: Any) -> Any:
    """One sequence over the processes of a torch.distributed group; see
    saccade.torch.parallel.context_parallel."""
    from .parallel import context_parallel as begin

    return begin(*arguments, **options)


def benchmark(
    score_mod: Optional[ScoreMod] = None, mask_mod: Optional[MaskMod] = None, **options: Any
) -> list[dict[str, Any]]:
    """Times the caller's mod beside SDPA and FlexAttention; see
    saccade.torch.compare.benchmark."""
    from .compare import benchmark as run

    return run(score_mod, mask_mod, **options)
