"""One forward-mode call of the C library: how out and lse change with their inputs."""

from __future__ import annotations

from typing import List

import torch

from ..c import backward
from .calls import new_call, output_like, prepared, stats_dtype, workspace
from .checks import backend_of, proven_for
from .masks import mask_of_tensors, mask_or_mod
from .mods import Resolved, view


def check_device(q):
    if q.is_cuda:
        raise NotImplementedError(
            "saccade: forward mode (jvp) on cuda, expected tensors on the cpu"
        )


def tangents(score, mask, scale, options, names, moves, given, rates):
    """(rates of out, of lse). score: None, or a mod whose captures `names` are tensors; given:
    query, key and value, moves: which of these change; rates: theirs and those of the captures
    named."""
    q, k, v = given
    made = None
    if score is not None:
        made = Resolved(score, "score", "cpu", q.dtype is torch.float64)
    mask, mod = mask_or_mod(mask)
    if mod is not None:
        mask = mask_of_tensors(Resolved(mod, "mask", "cpu"), q, k, v)
    elif mask is not None:
        mask = proven_for(mask, q, k, v)
    call = new_call(q, k, v, made, mask, scale, backend_of(options), True, False)
    out_dot = output_like(q, v.shape[3])
    lse_dot = q.new_empty(q.shape[:3], dtype=stats_dtype(q))
    q, k, v = prepared(q, k, v)
    tensors = dict(q=q, k=k, v=v, out_dot=out_dot, lse_dot=lse_dot)
    found = zip(("q_dot", "k_dot", "v_dot"), prepared(*rates[:3]), moves)
    tensors.update((name, t) for name, t, is_there in found if is_there)
    pairs: dict = {"captures_dot": [], "bindings": []}
    keep: List[torch.Tensor] = []
    if made is not None:
        rate_of = dict(zip(names, rates[3:]))
        called = call.runner.names  # apart from the mask's
        for own, name, t in zip(made.names, called, made.tensors):
            pairs["bindings"].append((name, view(t)))
            rate = rate_of.get(own)
            if rate is not None and t.dtype.is_floating_point:
                keep.append(rate.to(lse_dot.dtype).reshape(t.shape).contiguous().resolve_neg())
                pairs["captures_dot"].append((name, view(keep[-1])))
    views = {n: view(t) for n, t in tensors.items()}
    plan, (B, H, Q, D) = call.runner.plan_of_tangents(), q.shape
    n_bytes = plan.tangent_workspace(B, H, k.shape[1], Q, k.shape[2], D, v.shape[3])
    room = workspace(n_bytes, q, False) if n_bytes else None
    place = (room.data_ptr() + 63) & ~63 if room is not None else 0
    backward.tangent(plan, call.runner.handle, views, pairs, place, n_bytes)
    return out_dot, lse_dot
