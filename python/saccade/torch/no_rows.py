"""A call whose batch is empty, or that has no queries: shapes, and gradients that are zero."""

from __future__ import annotations

import torch

from .calls import stats_dtype
from .mods import Resolved


def of_no_rows(q, k, v, score_mod, want_lse, want_max):
    """What run returns. Every tensor that the score captures is a part of it, so that its
    gradient is zero, which DistributedDataParallel waits for, and not absent."""
    heads = q.unflatten(1, (k.shape[1], -1))
    scores = heads @ k.unsqueeze(2).mT
    out = (scores @ v.unsqueeze(2)).flatten(1, 2)
    scores = scores.to(stats_dtype(q)).flatten(1, 2)
    if score_mod is not None:
        found = Resolved(score_mod, "score", q.device.type, q.dtype is torch.float64)
        for t in found.captured:
            out = out + t.sum().to(out.dtype)
    lse = scores.logsumexp(-1) if want_lse else None
    return out, lse, scores.detach().amax(-1) if want_max else None
