"""What Python pays around the kernel: warm calls, first calls of a new mod, block masks.

usage: python bench/python_overhead.py [--device cpu|cuda] [--rounds 31] [--first 3] [--no-flex]
                                       [--threads N] [--no-first]

Warm: CPU time of a call on tiny tensors, Saccade and compiled FlexAttention in one process,
turn by turn, medians of rounds; then forward and backward beside an empty autograd.Function,
also by the clock (on CUDA autograd runs backward in a thread of its own).
First: the first call of each of several new mods, in a process of its own with fresh cache
folders, then in another process that finds the folders filled.
Block masks: create_block_mask of 131,072 x 131,072, where FlexAttention is asked for what its
dense evaluation (16 GiB of bool, 128 of the positions that it makes) leaves possible.
SACCADE_LIBRARY names the library.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    import torch
    from torch.nn.attention import flex_attention as theirs
except ImportError:
    print("no PyTorch (2.5 or later) here: nothing to measure")
    sys.exit(0)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import saccade.torch as ours  # noqa: E402

B, H, N, D = 1, 2, 16, 16
CALLS = 50  # of a round
LONG, SHORT = 131072, 8192
MODS = [  # of the first-call row: text differs, so that nothing made for one serves another
    "lambda s, b, h, i, j: s + bias[h] * (j - i) * {0}.5",
    "lambda s, b, h, i, j: {0}.25 * torch.tanh(s / {0}.25) + bias[h]",
    "lambda s, b, h, i, j: torch.where((i - j).abs() <= {0}, s * 1.5, s - bias[h])",
    "lambda s, b, h, i, j: s * torch.sigmoid(bias[h] + {0}) - (i - j).abs() / 7",
]


def tensors(device, n=N):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    d = 64 if device == "cuda" else D
    return [torch.randn(B, H, n, d, device=device).to(dtype) for _ in range(3)]


def host_us(call):
    begin = time.thread_time()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.thread_time() - begin) / CALLS


def finish(device):
    if device == "cuda":
        torch.cuda.synchronize()


def wall_us(call):
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - begin) / CALLS


def by_turns(calls, rounds, device, clock=host_us):
    """Median microseconds of each call, and the least and the most."""
    found = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for turn in range(rounds):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            finish(device)
            found[name].append(clock(calls[name]))
            finish(device)
    return {name: (statistics.median(t), min(t), max(t)) for name, t in found.items()}


def causal(b, h, q, kv):
    return q >= kv


def warm_calls(device, with_flex):
    q, k, v = tensors(device)
    bias = torch.rand(H, device=device)

    def mod(s, b, h, i, j):
        return s + bias[h] * (j - i)

    def renewed(attend, block_mask):
        new = bias + 1
        return attend(q, k, v, lambda s, b, h, i, j: s + new[h] * (j - i), block_mask)

    mask = ours.create_block_mask(causal, None, None, N, N, device=device)
    text = ours.score("score + bias[h] * (kv - q)", bias=bias)
    calls = {
        "saccade, plain": lambda: ours.flex_attention(q, k, v),
        "saccade, callable and block mask": lambda: ours.flex_attention(q, k, v, mod, mask),
        "saccade, callable defined anew": lambda: ours.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + bias[h] * (j - i), mask
        ),
        "saccade, callable with a new tensor": lambda: renewed(ours.flex_attention, mask),
        "saccade, text": lambda: ours.flex_attention(q, k, v, text, mask),
    }
    if with_flex:
        flex = torch.compile(theirs.flex_attention, dynamic=False)
        m = theirs.create_block_mask(causal, None, None, N, N, device=device)
        calls["flex compiled, plain"] = lambda: flex(q, k, v)
        calls["flex compiled, callable and block mask"] = lambda: flex(q, k, v, mod, m)
        calls["flex compiled, callable defined anew"] = lambda: flex(
            q, k, v, lambda s, b, h, i, j: s + bias[h] * (j - i), m
        )
        calls["flex compiled, callable with a new tensor"] = lambda: renewed(flex, m)
    return calls


class Empty(torch.autograd.Function):
    """What autograd itself costs around tensors like these."""

    @staticmethod
    def forward(ctx, *inputs):
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        return (gradient,) * 3 + (gradient[0, :, 0, 0],) * (len(ctx.needs_input_grad) - 3)


def training_calls(device, with_flex):
    """Forward and backward."""
    x = [t.requires_grad_() for t in tensors(device)]
    bias = torch.rand(H, device=device, requires_grad=True)
    mask = ours.create_block_mask(causal, None, None, N, N, device=device)
    d_out = torch.randn_like(x[0])
    captures_train = makes_gradients_of_captures(x, bias)

    def step(attend, *inputs):
        return lambda: torch.autograd.grad(attend(), inputs, d_out)

    def mod(s, b, h, i, j):
        return s + bias[h] * (j - i)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "train: empty Function": step(lambda: Empty.apply(*x), *x),
        "train: empty Function, one capture": step(lambda: Empty.apply(*x, bias), *x, bias),
        "train: sdpa": step(lambda: sdpa(*x), *x),
        "train: saccade, plain": step(lambda: ours.flex_attention(*x), *x),
        "train: saccade, callable and block mask": step(
            lambda: ours.flex_attention(*x, mod, mask), *x, bias),
        "train: saccade, callable defined anew": step(
            lambda: ours.flex_attention(*x, lambda s, b, h, i, j: s + bias[h] * (j - i), mask),
            *x, bias),
    }
    if with_flex and device == "cuda":  # it has no backward on CPUs
        flex = torch.compile(theirs.flex_attention, dynamic=False)
        m = theirs.create_block_mask(causal, None, None, N, N, device=device)
        calls["train: flex compiled, plain"] = step(lambda: flex(*x), *x)
        calls["train: flex compiled, callable and block mask"] = step(
            lambda: flex(*x, mod, m), *x, bias)
    return calls if captures_train else {n: c for n, c in calls.items() if "callable" not in n}


def makes_gradients_of_captures(x, bias):
    """Says why, where the device's back end does not."""
    try:
        ours.flex_attention(*x, lambda s, b, h, i, j: s + bias[h]).sum().backward()
    except RuntimeError as reason:
        print(f"\nwithout gradients of captures: {reason}")
        return False
    return True


def first_steps(device, n):
    """Milliseconds of forward and backward of n new mods; on the host CPU time."""
    clock = time.perf_counter if device == "cuda" else time.thread_time
    x = [t.requires_grad_() for t in tensors(device, 128)]
    bias = torch.rand(H, device=device, requires_grad=True)
    torch.autograd.grad(ours.flex_attention(*x).sum(), x)
    bias.requires_grad_(makes_gradients_of_captures(x, bias))
    wanted = [*x, bias] if bias.requires_grad else x
    found = []
    for i in range(n):
        mod = eval(MODS[i % len(MODS)].format(i + 102), {"torch": torch, "bias": bias})
        begin = clock()
        torch.autograd.grad(ours.flex_attention(*x, mod).sum(), wanted)
        finish(device)
        found.append(1e3 * (clock() - begin))
    return found


def first_calls(device, library, n):
    """Milliseconds of the first call of n new mods; one process is one state of the caches."""
    q, k, v = tensors(device, 128)
    bias = torch.rand(H, device=device)
    if library == "saccade":
        call = ours.flex_attention
    else:
        call = torch.compile(theirs.flex_attention, dynamic=False)
    call(q, k, v)  # the library itself: loading, contexts, dynamo's own start
    finish(device)
    found = []
    for i in range(n):
        mod = eval(MODS[i % len(MODS)].format(i + 2), {"torch": torch, "bias": bias})
        begin = time.perf_counter()
        call(q, k, v, mod)
        finish(device)
        found.append(1e3 * (time.perf_counter() - begin))
    return found


def first_in_processes(arguments, library):
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, SACCADE_CACHE_DIR=folder + "/saccade",
                           TORCHINDUCTOR_CACHE_DIR=folder + "/inductor",
                           TRITON_CACHE_DIR=folder + "/triton")
        for state in ("caches empty", "caches filled"):
            command = [sys.executable, __file__, "--device", arguments.device, "--only-first",
                       library, "--first", str(arguments.first)]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            times = json.loads(done.stdout.splitlines()[-1])
            print(f"{library + ', ' + state:44} {statistics.median(times):10.1f} ms   "
                  + " ".join(f"{t:.1f}" for t in times), flush=True)


def window(b, h, q, kv):
    return (q >= kv) & (q - kv <= 4096)


def milliseconds(make, device, repeats=5):
    make()
    found = []
    for _ in range(repeats):
        finish(device)
        begin = time.perf_counter()
        make()
        finish(device)
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


def block_masks(device, with_flex):
    doc = torch.arange(LONG, device=device) // 1500

    def document(b, h, q, kv):
        return (doc[q] == doc[kv]) & (q >= kv)

    compiled = None
    if with_flex and device == "cuda":
        compiled = torch.compile(theirs.create_block_mask, dynamic=False)
    for n in (SHORT, LONG):
        for mod in (causal, window, document):
            cells = [("saccade", lambda: ours.create_block_mask(
                mod, None, None, n, n, device=device))]
            if with_flex:
                cells.append(("flex", lambda: theirs.create_block_mask(
                    mod, None, None, n, n, device=device)))
            if compiled:
                cells.append(("flex compiled", lambda: compiled(
                    mod, None, None, n, n, device=device)))
            for library, make in cells:
                label = f"{library}, {mod.__name__}, {n}"
                if library == "flex" and n == LONG and device == "cpu":
                    print(f"{label:44} not run: evaluates {n * n >> 30} Gi positions at once")
                    continue
                try:
                    print(f"{label:44} {milliseconds(make, device):10.2f} ms", flush=True)
                except torch.OutOfMemoryError as reason:
                    print(f"{label:44} {str(reason).splitlines()[0][:70]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--no-first", action="store_true", help="warm calls and steps only")
    parser.add_argument("--only-first", choices=["saccade", "flex"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    device = arguments.device
    if arguments.only_first:
        print(json.dumps(first_calls(device, arguments.only_first, arguments.first)))
        return
    with_flex = not arguments.no_flex
    name = torch.cuda.get_device_name() if device == "cuda" else f"{arguments.threads} threads"
    print(f"PyTorch {torch.__version__}, {device}, {name}, B{B} H{H} N{N}")
    print("\nwarm call, CPU time of its thread: median (least to most) of rounds")
    rows = by_turns(warm_calls(device, with_flex), arguments.rounds, device)
    for label, (middle, least, most) in rows.items():
        print(f"{label:44} {middle:10.1f} us   ({least:.1f} to {most:.1f})")
    with torch.enable_grad():
        calls = training_calls(device, with_flex)
        rows = by_turns(calls, arguments.rounds, device)
        walls = by_turns(calls, arguments.rounds, device, wall_us)
        first = first_steps(device, 4 * arguments.first)
    print("\nforward and backward, CPU time of the thread, as above; by the clock")
    for label, (middle, least, most) in rows.items():
        print(f"{label:44} {middle:10.1f} us   ({least:.1f} to {most:.1f})"
              f"   {walls[label][0]:10.1f} us")
    label = "first forward and backward of a new mod"
    print(f"{label:44} {statistics.median(first):10.1f} ms   "
          + " ".join(f"{t:.1f}" for t in first))
    if arguments.no_first:
        return
    print("\nfirst call of a new mod: median, then each")
    for library in ("saccade", "flex") if with_flex else ("saccade",):
        first_in_processes(arguments, library)
    print("\ncreate_block_mask: median of 5")
    block_masks(device, with_flex)


if __name__ == "__main__":
    main()
