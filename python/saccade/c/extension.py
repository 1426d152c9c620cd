"""The extension that makes warm calls cheap, where it was built and can read this PyTorch.

It does what torch/calls.py and torch/gradients.py do through ctypes, for tensors of one layout;
without it they do all calls.
"""

from __future__ import annotations

import ctypes as C
import importlib.machinery
import importlib.util
import os
from pathlib import Path
from typing import Any

from . import abi


def _load() -> Any:
    """From beside the library; None where there is none. A library that was found by its bare
    name lies in a folder that is not known; a Python without the GIL has no stable ABI."""
    folder = os.path.dirname(abi.lib._name)
    if not folder or ".abi3.so" not in importlib.machinery.EXTENSION_SUFFIXES:
        return None
    path = Path(folder) / "saccade_warm.abi3.so"
    if not path.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader("saccade_warm", str(path))
    spec = importlib.util.spec_from_loader("saccade_warm", loader)
    try:
        return importlib.util.module_from_spec(spec) if spec is not None else None
    except ImportError:  # a Python without the stable ABI
        return None


def _raise(status: int, error: bytes) -> None:
    abi.check(status, abi.Error.from_buffer_copy(error))


def begin(plain, parameter, empty_like) -> Any:
    """The extension, ready for tensors of these types, or None."""
    found = _load()
    if found is None or not found.begin(plain, parameter, empty_like, _raise):
        return None
    return found


FORWARD, BACKWARD, PAGES_CHECK = (
    C.cast(f, C.c_void_p).value
    for f in (abi.lib.saccade_forward, abi.lib.saccade_backward, abi.lib.saccade_pages_check)
)
