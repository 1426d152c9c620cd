"""Whether calls of operators are written down, by torch.compile, torch.export, make_fx or
jit.trace."""

from __future__ import annotations

import torch
from torch._ops import _get_dispatch_mode_pre_dispatch as _early_mode_of

_modes, _is_tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
_mode_of, _KEYS = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_has_key = torch._C._dispatch_tls_is_dispatch_key_included
_EARLY = torch._C.DispatchKey.PreDispatch  # of what make_fx(pre_dispatch=True) records by


def is_recorded() -> bool:
    """Whether calls of operators are written down, or done by something else than torch."""
    if torch.compiler.is_compiling():  # which can't look into the rest
        return True
    return _modes() > 0 or _is_tracing() or _has_key(_EARLY)


def is_traced() -> bool:
    """Whether make_fx, torch.export or torch.jit.trace writes calls down."""
    if _is_tracing() or _mode_of(_KEYS.PROXY) is not None:
        return True
    return _has_key(_EARLY) and _early_mode_of(_KEYS.PROXY) is not None


def fake_mode():
    """The FakeTensorMode that is on, or None."""
    return _mode_of(_KEYS.FAKE)


def is_described() -> bool:
    """Whether calls are written down or done on tensors without values, by something else than
    torch.compile."""
    return is_traced() or fake_mode() is not None
