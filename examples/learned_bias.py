"""A relative position bias that is learned (T5's table of buckets by head), with the gradient
of the table against dense PyTorch, and a task that only the right table solves.

usage: PYTHONPATH=python python examples/learned_bias.py [--steps N]
"""

import argparse
import sys

import torch

from saccade.torch import flex_attention, score

options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
options.add_argument("--steps", type=int, default=120)
steps = options.parse_args().steps

H, N, D, BUCKETS, FAR = 4, 96, 16, 32, 64
torch.manual_seed(0)
q, k, v = (torch.randn(2, H, N, D) for _ in range(3))


def buckets():
    """T5's bucket of each (query, key), by its published formula."""
    distance = torch.arange(N) - torch.arange(N).view(-1, 1)
    half, near = BUCKETS // 2, BUCKETS // 4
    far = near + (
        torch.log(distance.abs().clamp(min=1) / near)
        / torch.log(torch.tensor(FAR / near))
        * (half - near)
    ).to(torch.long)
    found = torch.where(distance.abs() < near, distance.abs(), far.clamp(max=half - 1))
    return found + half * (distance > 0)


def fused(table):
    mod = score("t5_bias(table, n, far)", table=table, n=BUCKETS, far=FAR)
    return flex_attention(q, k, v, mod)


def dense(table):
    s = q @ k.mT / D**0.5 + table[buckets()].permute(2, 0, 1)
    return torch.softmax(s, -1) @ v


table = torch.randn(BUCKETS, H, requires_grad=True)
weight = torch.randn(2, H, N, D)
(got,) = torch.autograd.grad((fused(table) * weight).sum(), table)
(want,) = torch.autograd.grad((dense(table) * weight).sum(), table)
error = ((got - want).abs().max() / want.abs().max()).item()
print(f"gradient of the table: largest relative difference from dense PyTorch {error:.1e}")
assert error < 1e-5

goal = dense(torch.randn(BUCKETS, H) * 2).detach()
learned = torch.zeros(BUCKETS, H, requires_grad=True)
optimizer = torch.optim.Adam([learned], 0.1)
losses = []
for step in range(steps):
    loss = (fused(learned) - goal).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if sys.stderr.isatty() or step + 1 == steps:
        bar = "#" * (30 * (step + 1) // steps)
        print(f"\r[{bar:30}] loss {losses[-1]:.2e} ", end="", file=sys.stderr)
print(file=sys.stderr)
print(f"attention to a hidden table: loss {losses[0]:.2e} before, {losses[-1]:.2e} after")
assert losses[-1] < losses[0] * (0.05 if steps >= 100 else 1)
