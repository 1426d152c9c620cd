"""Quantised keys and values: codes in tensors that PyTorch has, and their scales.

e4m3 and e5m2 are torch.float8_e4m3fn and float8_e5m2, i8 is torch.int8, and i4 is torch.uint8
with two codes to a byte, the low half first: such a tensor has half as many columns.
"""

from __future__ import annotations

import ctypes as C
from typing import Optional

import torch

from ..c import abi, objects
from .checks import brief, check_flags, check_here, count_of
from .graph_breaks import out_of_graphs
from .memory import check_memory
from .mods import view
from .serving import CODES, cache_view

CODE_TENSORS = {short: dtype for dtype, short in CODES.items()}
_NAMES = ", ".join(CODE_TENSORS)


def check_scale_dtype(dtype):
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float16):
        raise ValueError(f"scale_dtype: got {brief(dtype)}, expected torch.float32 or float16")


@out_of_graphs
def quantize(
    x: torch.Tensor,
    dtype: str = "e4m3",
    *,
    tokens: int = 1,
    channels: int = 0,
    shared: bool = False,
    scale: Optional[torch.Tensor] = None,
    scale_dtype: torch.dtype = torch.float32,
):
    """Codes and scales of x [B, Hkv, N, D] on the host: (codes, scale), as cached_attention
    takes them. dtype: "e4m3", "e5m2", "i8" or "i4". tokens, channels: how many neighbouring
    rows, and channels of a row, share a scale; 0: all. shared: all batches and heads do, too.
    scale: used as it is, for what is appended to a cache. More than one of them must divide the
    rows, or channels, of x: cached_attention reads the sizes of groups off the shape of scale.
    Errors: ValueError for a dtype, a shape or a group that cannot be."""
    check_flags(shared=shared)
    if not isinstance(dtype, str) or dtype not in CODE_TENSORS:
        raise ValueError(f"dtype: got {brief(dtype)}, expected one of {_NAMES}")
    is_plain = isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested
    if not is_plain or x.dim() != 4 or x.device.type != "cpu":
        got = f"rank {x.dim()} on {x.device}" if is_plain else brief(x)
        raise ValueError(f"x: got {got}, expected a tensor of rank 4 on the host")
    check_memory("x", x)
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"x: got {x.dtype}, expected torch.float32, float16 or bfloat16")
    if not x.numel():
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected 1 or more of each dimension")
    B, H, N, D = x.shape
    for name, n, by in (("tokens", N, tokens), ("channels", D, channels)):
        count_of(name, by)
        if 1 < by < n and n % by:
            raise ValueError(f"{name}: got {by}, expected 0 or a divisor of {n}")
    x = x.detach().contiguous().resolve_neg()
    if dtype == "i4" and D % 2:
        raise ValueError(f"x: got {D} channels, expected an even number for i4")
    columns = D // 2 if dtype == "i4" else D
    codes = x.new_empty(B, H, N, columns, dtype=CODE_TENSORS[dtype])
    check_scale_dtype(scale_dtype)
    if scale is not None:
        check_here("scale", scale, x.device)
    if scale is None:
        rows, columns = (-(-n // by) if by else 1 for n, by in ((N, tokens), (D, channels)))
        made = x.new_empty(*((1, 1) if shared else (B, H)), rows, columns, dtype=scale_dtype)
    else:
        made = scale
    tensors = [objects.c_tensor(v) for v in (view(x), cache_view(codes), view(made))]
    args = abi.QuantizeArgs(tokens=tokens, channels=channels, is_given=int(scale is not None))
    for name, t in zip(("from", "to", "scale"), tensors):
        setattr(args, name, C.pointer(t))
    abi.call("quantize", objects.context(-torch.get_num_threads()), C.byref(args))
    return codes, made
