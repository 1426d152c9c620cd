"""Attention of one sequence over the GPUs of this host against one GPU, and beside PyTorch's
own flex context parallelism.

    python bench/ranks_cuda.py [--ranks 2] [--only causal,window] [--torch] [--compile-first]

Rows: forward and backward in microseconds on one GPU (rank 0, the others wait) and on all (the
slowest rank's), runs back to back, medians of three, one and all by turns; b1 h32/8 d128 bf16.
Out is compared bit for bit, gradients by the norm of the difference over the norm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

B, H, HKV, D = 1, 32, 8, 128
TEXT = {"alibi": "alibi()", "softcap": "softcap(50.0)"}


def documents(N, count):
    """Which document each row is of: random lengths, the same everywhere."""
    g = torch.Generator().manual_seed(count)
    cuts = torch.randperm(N - 1, generator=g)[: count - 1] + 1
    starts = torch.zeros(N, dtype=torch.int32)
    starts[cuts] = 1
    return starts.cumsum(0).to(torch.int32)


def mask_mod(name, N, device):
    if name.startswith("docs"):
        doc = documents(N, int(name[4:])).to(device)
        return lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv])
    if name == "window":
        return lambda b, h, q, kv: (q >= kv) & (q - kv < 1024)
    if name == "prefix":
        return lambda b, h, q, kv: (q >= kv) | (kv < N // 8)
    return lambda b, h, q, kv: q >= kv


def plain_score(name):
    """The same score as a callable, for PyTorch."""
    if name == "alibi":
        return lambda s, b, h, q, kv: s + torch.exp2(-(h + 1) * 8.0 / H) * (kv - q)
    if name == "softcap":
        return lambda s, b, h, q, kv: 50.0 * torch.tanh(s / 50.0)
    return None


def made(rows, device):
    g = torch.Generator(device).manual_seed(1)
    shapes = [(B, n, rows, D) for n in (H, HKV, HKV, H)]
    return [
        torch.randn(s, generator=g, device=device, dtype=torch.bfloat16) * 0.5 for s in shapes
    ]


def times(run, repeats):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / repeats


def calls(attend, q, k, v, d_out):
    """Forward alone as training has it, and backward alone of a graph that stays."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]

    def forward():
        return attend(*leaves)

    out = forward()

    def backward():
        return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    return forward, backward, out


def far(a, b):
    a, b = a.float(), b.float()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def measure(world, alone, spread, repeats):
    """Medians of one and all, by turns: [forward, backward] each."""
    rank, device = world
    one, every = [[], []], [[], []]
    for turn in range(4):
        for i in range(2):
            dist.barrier()
            if rank == 0 and alone:
                one[i].append(times(alone[i], repeats))
            dist.barrier()
            took = torch.tensor([times(spread[i], repeats)], device=device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            every[i].append(float(took))
        if turn == 0:  # warm
            one, every = [[], []], [[], []]
    return [statistics.median(x) if x else 0.0 for x in (*one, *every)]


def case(world, N, name, options):
    from saccade.torch import active, context_parallel, create_block_mask, flex_attention

    rank, device = world
    mask = create_block_mask(mask_mod(name, N, "cpu"), None, None, N, N)
    score = TEXT.get(name)
    q, k, v, d_out = made(N, device)

    def attend(q, k, v):
        return flex_attention(q, k, v, score, mask, enable_gqa=True)

    def attend_alone(q, k, v):
        over, active.parallel = active.parallel, None
        try:
            return attend(q, k, v)
        finally:
            active.parallel = over

    repeats = 1 if N > 65536 and name not in ("window", "docs200") else 10
    one = calls(attend_alone, q, k, v, d_out) if rank == 0 else None
    results = {}
    for keep in options.keep:
        with context_parallel(
            None,
            (B, H, N, D),
            [mask],
            kv_heads=HKV,
            dtype=q.dtype,
            device=device,
            by="torch" if options.collectives else "nccl",
            keep=keep,
        ) as cp:
            own = [cp.shard(t) for t in (q, k, v, d_out)]
            every = calls(attend, *own)
            t = measure(world, one, every, repeats)
            out = cp.unshard(every[2])
            grads = [cp.unshard(g) for g in every[1]()]
            again = [cp.unshard(g) for g in every[1]()]
            by = "collectives" if cp.local else "nccl"
        same = all(torch.equal(a, b) for a, b in zip(grads, again))
        if rank == 0:
            want = one[1]()
            note = f"out equal {torch.equal(out, one[2])} again {same} " + " ".join(
                f"{far(a, b):.1e}" for a, b in zip(grads, want)
            )
            x = [t[0] / t[2], t[1] / t[3], (t[0] + t[1]) / (t[2] + t[3])]
            print(
                f"{N:7d} {name:8s} {by:11s} keep {int(keep)}  "
                f"fwd {t[0]:9.0f} {t[2]:9.0f} {x[0]:.2f}  bwd {t[1]:9.0f} {t[3]:9.0f} "
                f"{x[1]:.2f}  both {x[2]:.2f}  {note}",
                flush=True,
            )
            results["ours"] = t[2] + t[3], one[2]
    return results


def by_torch(world, N, name, ours):
    """PyTorch's flex context parallelism, all of it private there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as a
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as b
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rank, device = world
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,))
    q, k, v, d_out = made(N, device)
    compiled = torch.compile(flex_attention, dynamic=False)
    balancer = b._HeadTailLoadBalancer(N, ranks, torch.device("cuda"))
    whole = create_block_mask(mask_mod(name, N, device), 1, 1, N, N, device=device)
    mask = a._context_parallel_shard(mesh, [whole], [2], load_balancer=balancer)[0]
    own = a._context_parallel_shard(mesh, [q, k, v, d_out], [2] * 4, load_balancer=balancer)

    class Attend(torch.nn.Module):
        def forward(self, q, k, v, score_mod=None, block_mask=None):
            return compiled(
                q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True
            )

    module = Attend()
    a._ContextParallel(seq_dim=2, attention_type=a._ContextParallel.AttentionType.FLEX)._apply(
        module, mesh
    )
    score = plain_score(name)
    every = calls(lambda *t: module(*t, score_mod=score, block_mask=mask), *own)
    t = measure(world, None, every, 5)
    out = a.context_parallel_unshard(mesh, [every[2].detach()], [2], balancer)[0]
    if rank == 0:
        both = t[2] + t[3]
        total, right = ours
        print(
            f"{N:7d} {name:8s} PyTorch's own     fwd {t[2]:9.0f}  bwd {t[3]:9.0f}  ours is "
            f"{both / total:.2f} x as fast; its out is off by {far(out, right):.1e} of one "
            "GPU's",
            flush=True,
        )


def worker(options):
    rank = options.rank
    torch.cuda.set_device(rank)
    world = rank, torch.device("cuda", rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(options.store, options.ranks),
        rank=rank,
        world_size=options.ranks,
        device_id=world[1],
    )
    for N in options.lengths:
        for name in options.only:
            begin = time.perf_counter()
            results = case(world, N, name, options)
            if options.torch and name in options.torch:
                try:
                    by_torch(world, N, name, results.get("ours"))
                except Exception as e:  # noqa: BLE001 (private there: say so and go on)
                    print(f"rank {rank}: PyTorch's own: {type(e).__name__}: {e}"[:600])
            torch.cuda.empty_cache()
            if rank == 0:
                print(f"        {time.perf_counter() - begin:.1f} s", flush=True)
    dist.destroy_process_group()


def compile_all(options):
    """What all cases compile, by a process each on GPU 0, so that timed ones find it made."""
    command = [
        sys.executable,
        __file__,
        "--rank",
        "0",
        "--ranks",
        "1",
        "--lengths",
        "4096",
    ]
    runs = []
    for name in options.only:
        store = tempfile.mktemp()
        runs.append(
            subprocess.Popen(
                [*command, "--only", name, "--store", store, "--keep", "1"],
                stdout=subprocess.DEVNULL,
            )
        )
    for run in runs:
        run.wait()


def words(text):
    return text.split(",")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument(
        "--only",
        type=words,
        default=words("causal,window,docs12,docs200,prefix,alibi,softcap"),
    )
    p.add_argument("--lengths", type=lambda t: [int(x) for x in words(t)], default=[32768])
    p.add_argument("--keep", type=lambda t: [bool(int(x)) for x in words(t)], default=[True])
    p.add_argument("--collectives", action="store_true", help="keys travel by torch's")
    p.add_argument("--torch", type=words, default=[], help="cases also run by PyTorch's own")
    p.add_argument("--compile-first", action="store_true")
    p.add_argument("--rank", type=int, default=-1)
    p.add_argument("--store", default="")
    options = p.parse_args()
    if options.rank >= 0:
        worker(options)
        return
    if options.compile_first:
        begin = time.perf_counter()
        compile_all(options)
        print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    store = tempfile.mktemp()
    runs = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                *sys.argv[1:],
                "--rank",
                str(r),
                "--store",
                store,
            ],
            env={**os.environ, "NCCL_NVLS_ENABLE": "0"},
        )
        for r in range(options.ranks)
    ]
    sys.exit(max(r.wait() for r in runs))


if __name__ == "__main__":
    main()
