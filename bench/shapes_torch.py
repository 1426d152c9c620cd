"""The suite shapes beside PyTorch on this CPU, by turns in one process. Only ratios count.

usage: python bench/shapes_torch.py [--program build/saccade] [--threads N] [--only TEXT]
                                    [--seconds 1] [--flex] [--no-scaling]

`saccade bench --suite shapes` names the shapes and times how rates grow with threads, whose
of_ceiling is the parallel efficiency beside the machine's own products. Then every shape is
run by saccade.torch.flex_attention, scaled_dot_product_attention and, with --flex,
FlexAttention, compiled for it (half a minute each the first time): by turns, one run untimed
and four timed, as many turns as fit into --seconds. Printed are medians, and PyTorch's over
Saccade's. SACCADE_LIBRARY names the library, if it is not build/libsaccade.so;
SACCADE_OPENMP=0 keeps PyTorch's threads and Saccade's apart. Without PyTorch it says so and
stops with status 0.
"""
import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
except ImportError:
    print("no PyTorch (2.5 or later) here: nothing to compare with")
    sys.exit(0)

import saccade.torch as ours
from peers_torch import beside, read_problem

MASKS = {"causal": "causal()", "window 512": "sliding_window(512)"}


def rows_of(arguments):
    """(variant, problem, threads, of_ceiling) of the suite, each shape once for each count."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.csv")
        command = [arguments.program, "bench", "--suite", "shapes", "--csv", path, "--threads",
                   str(arguments.threads), "--repeats", "5"]
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if status:  # the program has said why
            sys.exit(status)
        with open(path, newline="") as file:
            return list(csv.DictReader(file))


def print_scaling(rows, threads):
    """Rows of few threads belong to the scaling; so do those that follow them."""
    first = next((i for i, row in enumerate(rows) if int(row["threads"]) < threads), len(rows))
    if first < len(rows):
        print(f"{'variant':12} {'problem':36} {'threads':>7} {'GFLOP/s':>8} {'efficiency':>10}")
    for row in rows[first:]:
        of = f"{100 * float(row['of_ceiling']):.0f} %" if row["of_ceiling"] else ""
        print(f"{row['variant']:12} {row['problem']:36} {row['threads']:>7} "
              f"{float(row['gflops']):8.0f} {of:>10}")
    print()
    return rows[:first]


def mask_mod(name):
    return {
        "causal": lambda b, h, q, kv: q >= kv,
        "window 512": lambda b, h, q, kv: (q >= kv) & (q - kv <= 512),
    }.get(name)


def contenders(name, s, with_flex):
    """What computes the shape, by name. SDPA gets no mask but causal."""
    q, k, v = (torch.randn(s["b"], heads, n, d, dtype=s["dtype"]) for heads, n, d in
               ((s["h"], s["q"], s["d"]), (s["hkv"], s["kv"], s["d"]),
                (s["hkv"], s["kv"], s["dv"])))
    is_grouped = s["h"] != s["hkv"]
    run = {"saccade": lambda: ours.flex_attention(q, k, v, None, MASKS.get(name),
                                                  enable_gqa=is_grouped)}
    if name == "causal" or name not in MASKS:
        run["sdpa"] = lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=name == "causal", enable_gqa=is_grouped)
    if with_flex:
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        mod = mask_mod(name)
        block = mod and create_block_mask(mod, None, None, s["q"], s["kv"], device="cpu")
        run["flex"] = lambda: compiled(q, k, v, block_mask=block, enable_gqa=is_grouped)
    return run


def medians(run, seconds):
    times = {name: [] for name in run}
    for compute in run.values():
        compute()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, compute in run.items():
            compute()
            for _ in range(4):
                begin = time.perf_counter()
                compute()
                times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(all) for name, all in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/saccade")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--no-scaling", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    rows = rows_of(arguments)
    if arguments.no_scaling:
        rows = rows[:next((i for i, row in enumerate(rows)
                           if int(row["threads"]) < arguments.threads), len(rows))]
    rows = print_scaling(rows, arguments.threads)
    print(f"PyTorch {torch.__version__}, {arguments.threads} threads, medians by turns\n"
          f"{'variant':12} {'problem':36} {'saccade ms':>10} {'sdpa ms':>9} {'flex ms':>9} "
          f"{'sdpa':>7} {'flex':>7}")
    n_rows = 0
    for row in rows:
        if arguments.only not in f"{row['variant']} {row['problem']}":
            continue
        n_rows += 1
        with torch.no_grad():
            ms = medians(contenders(row["variant"], read_problem(row["problem"]),
                                    arguments.flex), arguments.seconds)
        own = ms["saccade"]
        print(f"{row['variant']:12} {row['problem']:36} {own:10.4g} "
              f"{beside(own, [ms.get('sdpa'), ms.get('flex')])}", flush=True)
    if n_rows == 0:
        sys.exit(f"--only: got '{arguments.only}', expected a part of a row's label")


if __name__ == "__main__":
    main()
