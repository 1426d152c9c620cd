"""Forward and backward of one LLaMA-shaped block's attention on packed documents: tokens per
second over the length, beside PyTorch's SDPA with a dense mask, compiled FlexAttention, and
torch.nn.attention.varlen, where each runs.

usage: PYTHONPATH=python python examples/packed_block.py [--lengths 2048 4096 ...] [--repeats N]
                                                         [--memory 131072]

--memory: on a GPU, what forward and backward hold at most beside the inputs, instead of times.
By default 2k to 32k with 32 heads of 128 on a GPU, 512 to 2k with 4 heads of 64 on the CPU.
"""

import argparse
import inspect
import statistics
import time

import torch

from saccade.torch import create_block_mask, create_mask, flex_attention

cuda = torch.cuda.is_available()
options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
options.add_argument("--lengths", type=int, nargs="+")
options.add_argument("--repeats", type=int, default=7 if cuda else 3)
options.add_argument("--document", type=int, default=1500, help="mean bytes of a document")
options.add_argument("--memory", type=int, metavar="N", help="peak memory at this length")
o = options.parse_args()
device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
H, Hkv, D = (32, 8, 128) if cuda else (4, 2, 64)
lengths = o.lengths or ([2048 << i for i in range(5)] if cuda else [512, 1024, 2048])


def documents(n):
    """Ends of documents of random lengths around the mean."""
    random = torch.Generator().manual_seed(n)
    parts = torch.randint(o.document // 3, 5 * o.document // 3, (n,), generator=random)
    ends = [x for x in parts.cumsum(0).tolist() if x < n]
    return [0, *ends, n]


def contenders(q, k, v, ends):
    """Name to a function that makes the output [1, H, N, D]."""
    n = q.shape[2]
    edges = torch.tensor(ends, device=device)
    doc = torch.repeat_interleave(torch.arange(len(ends) - 1, device=device), edges.diff())
    live = lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j)  # noqa: E731
    blocks = create_block_mask(live, None, None, n, n, device)
    made = {"saccade": lambda: flex_attention(q, k, v, None, blocks, enable_gqa=True)}
    if n <= 16384:
        dense = create_mask(live, None, None, n, n, device)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        made["sdpa, dense mask"] = lambda: sdpa(q, k, v, dense, enable_gqa=True)
    if cuda:
        from torch.nn.attention import flex_attention as theirs

        flex = torch.compile(theirs.flex_attention, dynamic=False)
        make = theirs.create_block_mask  # evaluates all positions at once unless compiled
        make = make if n <= 32768 else torch.compile(make)
        mask = make(live, None, None, n, n, device=device)
        made["flex"] = lambda: flex(q, k, v, None, mask, enable_gqa=True)
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return made
        at, most = edges.int(), int(edges.diff().max())
        groups = H // Hkv
        older = "is_causal" in inspect.signature(varlen_attn).parameters
        causal = {"is_causal": True} if older else {"window_size": (-1, 0)}

        def varlen():
            rows = [q[0], *(t[0].repeat_interleave(groups, 0) for t in (k, v))]
            rows = [t.transpose(0, 1) for t in rows]
            out = varlen_attn(*rows, at, at, most, most, **causal)
            return out.transpose(0, 1)[None]

        made["varlen"] = varlen
    return made


def seconds(f, x, d_out):
    """Of one forward and backward."""
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    torch.autograd.grad(f(), x, d_out)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def inputs(n):
    shapes = (1, H, n, D), (1, Hkv, n, D), (1, Hkv, n, D)
    x = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    return x, torch.randn(1, H, n, D, device=device).to(dtype)


def peak(f, x, d_out):
    """Most bytes of one forward and backward beyond what was there."""
    torch.autograd.grad(f(), x, d_out)  # what is made once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(f(), x, d_out)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def memory(n):
    x, d_out = inputs(n)
    made = contenders(*x, documents(n))
    for name in made:
        used = peak(made[name], x, d_out)
        each = used / x[0].numel()
        print(f"N {n}  {name:8} {used / 2**20:8.0f} MiB, {each:.2f} bytes an element of q")


print(f"{device} {str(dtype)[6:]} H{H}/{Hkv} D{D}, documents of {o.document} on average")
if o.memory:
    memory(o.memory)
    lengths = []
for n in lengths:
    x, d_out = inputs(n)
    made = contenders(*x, documents(n))
    want = [t.float() for t in torch.autograd.grad(made["saccade"](), x, d_out)]
    for name, f in made.items():  # a first call, and whether it computes the same
        for a, b in zip(torch.autograd.grad(f(), x, d_out), want):
            error = (a.float() - b).norm() / b.norm()
            assert error < 2e-2, f"{name}: {error:.1e}"
    times = {name: [] for name in made}
    for _ in range(o.repeats):
        for name, f in made.items():
            times[name].append(seconds(f, x, d_out))
    shown = [f"{name} {n / statistics.median(t):11,.0f}" for name, t in times.items()]
    print(f"N {n:6}  tokens/s: " + "   ".join(shown), flush=True)
