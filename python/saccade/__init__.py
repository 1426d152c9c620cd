"""Saccade: exact, fused attention with your own masks and scores.

import saccade.torch   FlexAttention's API for PyTorch tensors
saccade.attention      NumPy, JAX, CuPy and anything else that speaks DLPack, without torch
"""

from .arrays import attention
from .c.abi import BadValue, SaccadeError
from .c.abi import lib as _clib
from .config import show_config

__version__ = _clib.saccade_version().decode()
__all__ = ["attention", "BadValue", "SaccadeError", "prelude", "show_config", "__version__"]


def prelude() -> dict[str, tuple[str, str, str]]:
    """The named variants: name to (kind, signature, comment with formula and source)."""
    found: dict[str, tuple[str, str, str]] = {}
    i = 0
    while True:
        entry = _clib.saccade_prelude(i)
        if not entry:
            return found
        e = entry.contents
        found[e.name.decode()] = (
            "mask" if e.kind == 1 else "score",
            e.signature.decode(),
            e.comment.decode(),
        )
        i += 1
