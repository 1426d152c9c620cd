"""create_mask: dense masks, also as parts of torch.compile's graphs."""

from __future__ import annotations

from typing import Any, List

import torch
from torch.nn.attention import flex_attention as theirs

from ..c import abi, objects
from . import masks
from .block_mask import MaskMod
from .checks import brief, device_of
from .mod_arguments import ModArguments
from .mods import AnyMod, captured, is_code


def create_mask(
    mod_fn: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Dense bool [B, H, Q_LEN, KV_LEN]. A score mod is live where it does not give -inf."""
    if torch.compiler.is_dynamo_compiling() and masks.graphs_take_callables:
        return _in_graph(mod_fn, [B or 1, H or 1, Q_LEN, KV_LEN], device or masks._device())
    if masks.is_transformed() and is_code(mod_fn) and captured.kind_of(mod_fn) == "mask":
        if masks.captures_wrapped(mod_fn):
            return _in_graph(mod_fn, [B or 1, H or 1, Q_LEN, KV_LEN], device or "cpu")
    return _dense_mask(mod_fn, B, H, Q_LEN, KV_LEN, device)


def _in_graph(mod_fn: Any, sizes: List[int], device: Any) -> torch.Tensor:
    """A callable becomes a part of the graph, evaluated at all positions at once; text is one
    operator."""
    if is_code(mod_fn):
        B, H, Q, KV = sizes
        found: torch.Tensor = theirs.create_mask(mod_fn, B, H, Q, KV, device)
        return found
    mods = ModArguments.of(None, mod_fn)
    made: torch.Tensor = torch.ops.saccade.dense_mask(
        mods.captures, mods.numbers, mods.names, mods.mask, sizes, torch.device(device)
    )
    return made


@torch.library.custom_op("saccade::dense_mask", mutates_args=())
def _of_text(
    captures: List[torch.Tensor],
    numbers: List[float],
    names: str,
    text: str,
    sizes: List[int],
    device: torch.device,
) -> torch.Tensor:
    mods = ModArguments(captures or [], numbers or [], names, "", text)
    mod: MaskMod = AnyMod("mask", text, mods.named()[1]) if names.strip(" |") else text
    return _dense_mask(mod, *sizes, device)


@_of_text.register_fake
def _(captures, numbers, names, text, sizes, device):
    return torch.empty(sizes, dtype=torch.bool, device=device)


@torch.compiler.disable
def _dense_mask(mod_fn, B, H, Q_LEN, KV_LEN, device):
    if not callable(mod_fn) and not isinstance(mod_fn, str):
        raise TypeError(f"mod_fn: got {brief(mod_fn)}, expected a callable, or text")
    kind = captured.kind_of(mod_fn)
    if kind == "score" and not is_code(mod_fn):
        if isinstance(mod_fn, str):
            objects.free_names(abi.SCORE, mod_fn)  # an error, if it is neither
        raise ValueError("mod_fn: got a score in text, expected a mask, or a callable")
    device = device_of(device) if device is not None else masks._device()
    if kind == "score":
        inner = captured.callable_of(mod_fn)
        finite = lambda b, h, q, kv: inner(0.0, b, h, q, kv) != -float("inf")  # noqa: E731
        return _dense_mask(finite, B, H, Q_LEN, KV_LEN, device)
    made = masks.create_block_mask(mod_fn, B, H, Q_LEN, KV_LEN, device="cpu")
    handle = made.handle()
    unknown = sorted(handle.mod.reads & {"Hkv", "D", "Dv"})
    if unknown:
        raise ValueError(f"mod_fn: got a text that reads {unknown[0]}, which is a call's, "
                         "expected one that does not")
    with torch._C._DisableFuncTorch():  # inside of grad and jvp new tensors have no memory
        dense = torch.empty((*handle.lead, Q_LEN, KV_LEN), dtype=torch.uint8, device="cpu")
        abi.call("block_mask_to_dense", handle.handle, dense.data_ptr())
        return dense.to(torch.bool).to(device)
