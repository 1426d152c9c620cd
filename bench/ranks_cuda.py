"""Attention of one sequence over the GPUs of this host against one GPU, and beside PyTorch's
own flex context parallelism.

    python bench/ranks_cuda.py [--ranks 2] [--only causal,window] [--torch docs12] [--warm]

Rows: forward and backward in microseconds on one GPU (rank 0, the others wait) and on all (the
slowest rank's), runs back to back, medians of three, one and all by turns; b1 h32/8 d128 bf16;
the floor: 1.85 times one GPU where it needs 4 ms, below that half its time + 100 us. Out is
compared bit for bit, gradients by the norm of the difference over the norm. A case that fails
or takes too long is told of, with where it was, and the next goes on in new processes. --warm
runs each case once, so that what it compiles is there; --device cpu tries the program over gloo
where no GPU is.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback

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


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def times(run, repeats):
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
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


def measure(world, alone, spread, repeats, is_warm):
    """Medians of one and all, by turns: [forward, backward] each."""
    rank, device = world
    one, every = [[], []], [[], []]
    for turn in range(4):
        if is_warm:
            repeats = 1
        for i in range(2):
            dist.barrier()
            if rank == 0 and alone:
                one[i].append(times(alone[i], repeats))
            dist.barrier()
            took = torch.tensor([times(spread[i], repeats)], device=device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            every[i].append(float(took))
        if is_warm:
            break
        if turn == 0:  # to warm up
            one, every = [[], []], [[], []]
    return [statistics.median(x) if x else 0.0 for x in (*one, *every)]


def told_of(cp, memory):
    """Keys that rank 0 gets, how even the deal is, and the memory that runs took."""
    stats = cp.statistics()
    return (
        f"keys {stats[0].received} imbalance {stats[0].imbalance:.3f} "
        f"MiB {(memory - free_memory()) / 2**20:.0f}"
    )


def free_memory():
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def floor(one, every):
    """Time asked over the time that it took: 1 and more is reached."""
    asked = one / 1.85 if one >= 4000 else one / 2 + 100
    return asked / every


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
    for mode in options.mode:
        for keep in options.keep:
            memory = free_memory()
            with context_parallel(
                None,
                (B, H, N, D),
                [mask],
                kv_heads=HKV,
                dtype=q.dtype,
                device=device,
                mode=mode,
                by="torch" if options.collectives else "nccl",
                keep=keep,
                stage_keys=options.stage_keys if mode == "staged" else 0,
                seconds=30,
            ) as cp:
                own = [cp.shard(t) for t in (q, k, v, d_out)]
                every = calls(attend, *own)
                t = measure(world, one, every, repeats, options.warm)
                out = cp.unshard(every[2])
                grads = [cp.unshard(g) for g in every[1]()]
                again = [cp.unshard(g) for g in every[1]()]
                by = "collectives" if cp.local else "library"
                told = told_of(cp, memory)
            same = all(torch.equal(a, b) for a, b in zip(grads, again))
            if rank or options.warm:
                continue
            far_off = " ".join(f"{far(a, b):.1e}" for a, b in zip(grads, one[1]()))
            both = t[0] + t[1], t[2] + t[3]
            print(
                f"{N:7d} {name:8s} {mode} {by} keep {int(keep)}  "
                f"fwd {t[0]:9.0f} {t[2]:9.0f} {t[0] / t[2]:.2f}  "
                f"bwd {t[1]:9.0f} {t[3]:9.0f} {t[1] / t[3]:.2f}  "
                f"both {both[0] / both[1]:.2f}  floor x {floor(t[0], t[2]):.2f} "
                f"{floor(t[1], t[3]):.2f}  out equal {torch.equal(out, one[2])} "
                f"({far(out, one[2]):.1e}) again {same} {far_off}  {told}",
                flush=True,
            )
    return one[2] if one else None


def balancers(name, N, ranks, mask, device):
    """PyTorch's ways to deal rows under this mask; the second is for those that are uneven."""
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as b

    yield "head-tail", lambda: b._HeadTailLoadBalancer(N, ranks, device)
    if hasattr(b, "_PTRRLoadBalancer") and name.startswith("docs"):
        yield "ptrr", lambda: b._PTRRLoadBalancer(mask, ranks)


def by_torch(world, N, name, right, options):
    """PyTorch's flex context parallelism, all of it private there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as a
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rank, device = world
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    q, k, v, d_out = made(N, device)
    compiled = torch.compile(flex_attention, dynamic=False)
    whole = create_block_mask(mask_mod(name, N, device), 1, 1, N, N, device=device)

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
    for kind, new in balancers(name, N, ranks, whole, device):
        balancer = new()
        mask = a._context_parallel_shard(mesh, [whole], [2], load_balancer=balancer)[0]
        own = a._context_parallel_shard(mesh, [q, k, v, d_out], [2] * 4, balancer)
        every = calls(lambda *t, mask=mask: module(*t, score_mod=score, block_mask=mask), *own)
        t = measure(world, None, every, 5, options.warm)
        out = a.context_parallel_unshard(mesh, [every[2].detach()], [2], balancer)[0]
        if rank == 0 and not options.warm:
            print(
                f"{N:7d} {name:8s} PyTorch's own, {kind}  fwd {t[2]:9.0f}  bwd {t[3]:9.0f}"
                f"  both {t[2] + t[3]:9.0f}; out is off by {far(out, right):.1e} of one GPU's",
                flush=True,
            )


# ---- processes ----


def worker(options):
    rank, is_cuda = options.rank, options.device == "cuda"
    device = torch.device("cuda", rank + options.first) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=dist.FileStore(options.store, options.ranks),
        rank=rank,
        world_size=options.ranks,
        **({"device_id": device} if is_cuda else {}),
    )
    for i, (N, name) in enumerate(cases_of(options)):
        if i < options.begin:
            continue
        print(f"{MARK} {i}", flush=True)
        begin = time.perf_counter()
        faulthandler.dump_traceback_later(0.9 * options.seconds)
        right = case((rank, device), N, name, options)
        if name in options.torch:
            by_torch((rank, device), N, name, right, options)
        faulthandler.cancel_dump_traceback_later()
        del right
        if is_cuda:
            torch.cuda.empty_cache()
        if rank == 0:
            print(f"        {name} took {time.perf_counter() - begin:.1f} s", flush=True)
    dist.barrier()
    print(f"{MARK} end", flush=True)
    os._exit(0)  # whatever the ends of communicators may wait for


MARK = "#case"


def cases_of(options):
    return [(N, name) for N in options.lengths for name in options.only]


class Rank:
    """One process, its output passed on; which case it is at."""

    def __init__(self, rank, begin, store):
        command = [sys.executable, "-u", __file__, *sys.argv[1:], "--rank", str(rank)]
        self.at, self.is_done = begin, False
        self.run = subprocess.Popen(
            [*command, "--store", store, "--begin", str(begin)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "NCCL_NVLS_ENABLE": "0"},
        )
        self.reader = threading.Thread(target=self.read, args=(rank,), daemon=True)
        self.reader.start()

    def read(self, rank):
        for line in self.run.stdout:
            if not line.startswith(MARK):
                print(f"[{rank}] " * bool(rank) + line, end="", flush=True)
            elif line.split()[1] == "end":
                self.is_done = True
            else:
                self.at = int(line.split()[1])


def run_from(begin, options, until):
    """Cases from this one on; the one to go on with after a failure, None: all are done."""
    store = tempfile.mktemp()
    ranks = [Rank(r, begin, store) for r in range(options.ranks)]
    at, since, dead = begin, time.monotonic(), None
    while any(r.run.poll() is None for r in ranks):
        time.sleep(0.1)
        now = time.monotonic()
        if max(r.at for r in ranks) != at:
            at, since = max(r.at for r in ranks), now
        if dead is None and any(r.run.poll() not in (None, 0) for r in ranks):
            dead = now
        is_late = now - since > options.seconds + (20 if at == begin else 0) or now > until
        if is_late or (dead and now - dead > 3):
            print(f"case {at}: {'took too long' if is_late else 'failed'}", flush=True)
            for r in ranks:
                r.run.kill()
    for r in ranks:
        r.reader.join(5)
    return None if all(r.is_done for r in ranks) else max(r.at for r in ranks) + 1


def words(text):
    return [w for w in text.split(",") if w]


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
    p.add_argument("--mode", type=words, default=["gather"])
    p.add_argument("--stage-keys", type=int, default=0, help="of a window in staged mode")
    p.add_argument("--collectives", action="store_true", help="keys travel by torch's")
    p.add_argument("--torch", type=words, default=[], help="cases also run by PyTorch's own")
    p.add_argument("--warm", action="store_true")
    p.add_argument("--device", default="cuda")
    p.add_argument("--first", type=int, default=0, help="the first rank's GPU")
    p.add_argument("--seconds", type=float, default=60, help="a case may take")
    p.add_argument("--all-seconds", type=float, default=3600, help="all of them")
    p.add_argument("--begin", type=int, default=0)
    p.add_argument("--rank", type=int, default=-1)
    p.add_argument("--store", default="")
    options = p.parse_args()
    if options.rank >= 0:
        try:
            worker(options)
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
    begin, until = 0, time.monotonic() + options.all_seconds
    while begin is not None and begin < len(cases_of(options)) and time.monotonic() < until:
        begin = run_from(begin, options, until)


if __name__ == "__main__":
    main()
