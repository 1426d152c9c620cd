"""Where gradients flow in a mod: torch.no_grad and its kin, detach, autograd.Function.

A mod runs with gradients on, whatever its caller's mode is, so that one text serves training
and inference. What it makes with gradients off goes through detach(x) of the language.
"""

from __future__ import annotations

import contextlib

import torch

from .errors import fail
from .symbols import TensorSymbol, Traced

_ITSELF = frozenset(  # give their argument itself where there is nothing to do
    "to type type_as float double half bfloat16 contiguous dropout as_tensor asarray cpu "
    "cuda".split()
)
_AS_OPERATORS = ("custom_function_call", "autograd_function_apply")  # inside of torch's graphs
_grad_fn = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]


def _switch(is_on: bool):
    """torch.set_grad_enabled, which graphs that are being recorded do not see."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(is_on)


@contextlib.contextmanager
def gradients_on():
    """Turns gradients on, and back at the end; gives the caller's mode."""
    was_on = torch.is_grad_enabled()
    is_inference = torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if is_inference else contextlib.nullcontext():
        _switch(True)
        try:
            yield was_on
        finally:
            _switch(was_on and not is_inference)


def of_caller(was_on: bool, function, args, kwargs):
    """A function of real tensors, without gradients where the caller or the mod has none."""
    if was_on or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    _switch(False)
    try:
        return function(*args, **kwargs)
    finally:
        _switch(True)


def cut(t, x):
    """x, of which nothing is differentiated."""
    if isinstance(x, Traced):
        if x.kind != "float" or x.constant is not None or x.name in t.cut:
            return x
        made = t.local(f"detach({x.name})", "float", x.nonneg, dtype=x.dtype_name)
        t.cut.add(made.name)
        return made
    if isinstance(x, (tuple, list)):
        return type(x)(cut(t, i) for i in x)
    return x.detached() if hasattr(x, "detached") else x


def made_without(t, name: str, made, arguments):
    """What a call gives where gradients are off."""
    if name in _ITSELF and arguments and made is arguments[0]:
        return made
    return cut(t, made)


def function_of(x) -> str:
    """The autograd.Function that made a symbol, or one inside of a list; "" where none did."""
    if isinstance(x, (tuple, list)):
        return next(filter(None, map(function_of, x)), "")
    if not isinstance(x, TensorSymbol):
        return ""
    with torch._C.DisableTorchFunction():
        node = _grad_fn(x)
    name = "" if node is None else getattr(type(node), "_forward_cls", type(node)).__name__
    return "Function" if name == "ApplyTemplate" else name  # torch.compile's, of any class


def refusal_of(function: str) -> str:
    return (
        f"got a result of {function}.apply, an autograd.Function, whose backward can't be "
        "traced; write what its forward computes, f(x), with detach: x + (f(x) - x).detach() "
        "has the value of f and the gradient of x"
    )


def refuse_functions(name: str, arguments):
    """An error for what an autograd.Function made of a symbol: its backward is its own."""
    found = function_of(arguments)
    if name in _AS_OPERATORS:
        found = getattr(arguments[0], "__name__", "Function")
    if found:
        fail(refusal_of(found))
