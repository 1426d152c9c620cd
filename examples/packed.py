"""Three documents in one sequence: each attends to itself alone, causally, with ALiBi.

usage: PYTHONPATH=python python examples/packed.py
"""

import torch
from saccade.torch import create_block_mask, flex_attention

LENGTHS, HEADS, WIDTH = (700, 90, 1258), 4, 64
TOTAL = sum(LENGTHS)
document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS)


def mask(b, h, q, kv):
    return (document[q] == document[kv]) & (q >= kv)


def alibi(score, b, h, q, kv):
    return score + slopes[h] * (kv - q)


def apart(q, k, v):
    """The same, document by document, by dense attention."""
    at = torch.arange(q.shape[2])
    bias = slopes[:, None, None] * (at - at[:, None])
    bias = bias.masked_fill(at > at[:, None], -torch.inf)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias[None])


query, key, value = (torch.randn(1, HEADS, TOTAL, WIDTH) for _ in range(3))
blocks = create_block_mask(mask, None, None, TOTAL, TOTAL, query.device)
out = flex_attention(query, key, value, alibi, blocks)

parts = zip(*(x.split(LENGTHS, dim=2) for x in (query, key, value)))
error = (out - torch.cat([apart(*part) for part in parts], dim=2)).abs().max()
print(blocks)
print(f"largest difference from attention document by document: {error:.1e}")
assert error < 1e-5
