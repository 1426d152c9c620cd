"""Calls that torch.compile leaves out of its graphs, and goes on behind."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, ParamSpec, TypeVar

import torch

from .recording import is_traced

_P = ParamSpec("_P")
_R = TypeVar("_R")


_takes_reason = "reason" in inspect.signature(torch.compiler.disable).parameters


def disabled(call: Callable[_P, _R], reason: str) -> Callable[_P, _R]:
    """torch.compiler.disable with the reason that a full graph shows, from PyTorch 2.7 on."""
    options: dict[str, Any] = {"reason": reason} if _takes_reason else {}
    made: Callable[_P, _R] = torch.compiler.disable(call, **options)
    return made


def out_of_graphs(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """The call, which breaks a graph of torch.compile in two around it. In a full graph, which
    can't be broken, that is an error with the reason; it is one too where make_fx or jit.trace
    records, which would record none of it."""
    outside = disabled(
        call,
        f"saccade: {call.__name__} runs between graphs of torch.compile, got it inside of "
        "fullgraph=True; expected fullgraph=False, which breaks the graph around it, or "
        "flex_attention, which stays in one",
    )

    @functools.wraps(call)
    def either(*arguments: _P.args, **options: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():
            return outside(*arguments, **options)
        if is_traced():
            raise NotImplementedError(
                f"saccade: got {call.__name__} inside of make_fx or jit.trace, which record "
                "nothing of it, expected it outside, or flex_attention, which they record"
            )
        return call(*arguments, **options)

    return either
