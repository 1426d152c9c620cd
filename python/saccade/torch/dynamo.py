"""Python callables inside of torch.compile's graphs.

torch.compile can't run our tracer. It can turn a callable into a graph of its own, whose inputs
are the scores, the indices and what the callable captures, as it does for FlexAttention: that
graph is what is traced here, when torch differentiates and lowers the whole. What remains is
the operator saccade::flex with text and tensors, so there is no graph break in either pass.

This leans on how torch.compile knows FlexAttention (torch._dynamo.variables.higher_order_ops),
which no version promises. Where it is another, `flex` is None, and a callable breaks the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator

from ..trace import symbols
from ..trace import tracer as tracing
from .mods import AnyMod, as_row

_NAME = "saccade_flex"


class _Flex(HigherOrderOperator):
    """flex_attention of the graphs of two mods, either of which may be None.

    score_with, mask_with: what they capture. mods: those that are text, as saccade::flex takes
    them; rest: its other arguments. call: what takes all of them; outside: what takes the
    callables themselves, where torch.compile could not make graphs of them."""

    def __init__(self):
        super().__init__(_NAME)
        self.call: Any = None
        self.outside: Any = None

    def __call__(self, q, k, v, score, mask, *others):
        if len(others) == 2:
            return self.outside(q, k, v, score, mask, *others)
        score_with, mask_with, mods, rest = others
        found = []
        for kind, graph, held in (("score", score, score_with), ("mask", mask, mask_with)):
            if graph is not None:
                found.append(_text_of(kind, graph, held, q.dtype is torch.float64))
            else:
                found.append(None)
        return self.call(q, k, v, found, mods, *rest)


def _text_of(kind, graph, held, is_double):
    """A mod's graph as text with its captures."""
    held = [symbols.as_tensor(x, is_double) for x in held]
    run = torch.fx.Interpreter(graph).run

    def mod(*symbols):
        result = run(*symbols, *held, enable_io_processing=False)
        return result[0] if isinstance(result, (tuple, list)) else result

    mode = detect_fake_mode(held)
    env = None if mode is None else mode.shape_env
    make = lambda: tracing.Tracer(kind, is_double)  # noqa: E731
    text, captures, _ = tracing.run_in_graph(lambda _: mod, kind, make, env)
    return AnyMod(kind, text, {n: as_row(x) for n, x in captures})


def _known_to_dynamo():
    """The operator, if torch.compile can be told how to trace it."""
    try:
        from torch._dynamo.variables import higher_order_ops as theirs
        from torch._dynamo.variables.builder import wrap_fx_proxy

        table, base = (
            theirs._hop_name_to_variable_class,
            theirs.FlexAttentionHigherOrderVariable,
        )
        proxies = theirs.proxy_args_kwargs
        base.create_wrapped_node  # noqa: B018
    except (ImportError, AttributeError):
        return None

    class Variable(base):
        _HOP_NAME = "saccade.torch.flex_attention"
        _ALLOW_FALLBACK_TO_EAGER = True

        def _call_function(self, tx, args, kwargs):
            q, k, v, score, mask, mods, rest = args
            given, _ = proxies([q, k, v, mods, rest], {})
            graphs, held = [], []
            for fn, name in ((score, "score_mod"), (mask, "mask_fn")):
                if fn.is_python_constant() and fn.as_python_constant() is None:
                    graphs.append(None)
                    held.append(())
                else:
                    node, lifted = self.create_wrapped_node(tx, q, fn, name)
                    graphs.append(node)
                    held.append(lifted)
            proxy = tx.output.create_proxy(
                "call_function", self.value, (*given[:3], *graphs, *held, *given[3:]), {}
            )
            return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)

    table[_NAME] = Variable
    return _Flex()


flex = _known_to_dynamo()
