"""PyTorch beside Saccade on the same shapes, in one run. Only the ratios mean something.

usage: python bench/peers_torch.py [--program build/saccade] [--threads N]
                                   [--suite paper] [--suite dense] [--suite decode]
                                   [--only TEXT] [--repeats 5] [--no-flex]
       python bench/peers_torch.py --device cuda [--part forward|variants|masks|short|decode]...
                                   [--part backward|backward_variants|backward_masks]...
                                   [--part backward_parts|captures]...
                                   [--only TEXT] [--rounds 15] [--traced] [--no-flex]

On the CPU every row of the suites (all three) is timed by `saccade bench`, then by
scaled_dot_product_attention, which takes masks and biases as a dense tensor (made before the
clock starts; a soft cap is none, causal has its own flag), and by FlexAttention, compiled for
the variant (which takes a minute the first time). On CUDA all are timed by turns in this
process: see peers_cuda.py. --only keeps the rows whose label holds a text, as in --only d64 or
--only alibi. SACCADE_LIBRARY names the library, if it is not build/libsaccade.so. Without
PyTorch it says so and stops with status 0.
"""
import argparse
import csv
import functools
import os
import re
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

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def read_problem(text):
    """b2 h16/4 q4096 kv4096 d128 dv64 bf16"""
    sizes = {key: int(n) for key, n in re.findall(r"\b(kv|dv|b|h|q|d)(\d+)", text)}
    group = re.search(r"h\d+/(\d+)", text)
    sizes["hkv"] = int(group.group(1)) if group else sizes["h"]
    sizes.setdefault("dv", sizes["d"])
    sizes["dtype"] = DTYPES[text.split()[-1]]
    return sizes


@functools.lru_cache(maxsize=2)
def document_ids(n, documents):
    """Those of saccade's `doc=i32[KV]:docs(12)`: splitmix64, seeded by the name."""
    whole, seed = (1 << 64) - 1, 0xCBF29CE484222325
    for letter in b"doc":
        seed = (seed ^ letter) * 0x100000001B3 & whole
    ids, cuts = [0], documents - 1
    for i in range(1, n):
        seed = seed + 0x9E3779B97F4A7C15 & whole
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & whole
        z = (z ^ z >> 27) * 0x94D049BB133111EB & whole
        is_cut = ((z ^ z >> 31) >> 11) * 2.0 ** -53 * (n - i) < cuts
        cuts -= is_cut
        ids.append(ids[-1] + is_cut)
    return torch.tensor(ids, dtype=torch.int32)


def variant_mods(name, s):
    """mask_mod and score_mod of the eight variants as saccade bench has them: few queries are
    the last positions."""
    begin, prefix, heads = s["kv"] - s["q"], s["kv"] // 4, s["h"]
    doc = document_ids(s["kv"], 12) if name == "document" else None

    def at(q):
        return q + begin if begin else q

    def causal(b, h, q, kv):
        return at(q) >= kv

    return {
        "full": (None, None),
        "causal": (causal, None),
        "relative_bias": (None, lambda score, b, h, q, kv: score + (at(q) - kv)),
        "alibi": (causal, lambda score, b, h, q, kv:
                  score + torch.exp2(-8.0 * (h + 1) / heads) * (kv - at(q))),
        "sliding_window": (lambda b, h, q, kv: (at(q) >= kv) & (at(q) - kv <= 256), None),
        "prefix_lm": (lambda b, h, q, kv: (kv < prefix) | (at(q) >= kv), None),
        "softcap": (causal, lambda score, b, h, q, kv: 20.0 * torch.tanh(score / 20.0)),
        "document": (lambda b, h, q, kv: doc[at(q)] == doc[kv], None),
    }[name]


def dense_mask(mask, score, s):
    """What SDPA adds to the scores, [1, 1 or H, Q, KV]; None where that is nothing."""
    h = torch.arange(s["h"])[:, None, None]
    q = torch.arange(s["q"])[:, None]
    kv = torch.arange(s["kv"])
    dense = mask(0, h, q, kv) if mask else torch.tensor(True)
    if score:
        bias = score(torch.zeros(()), 0, h, q, kv).to(s["dtype"])
        dense = torch.where(dense, bias, -torch.inf)
    elif dense.all():
        return None
    heads = s["h"] if dense.dim() == 3 else 1
    return dense.expand(1, heads, s["q"], s["kv"]).contiguous()


def median_ms(run, repeats, keys):
    """Few queries find K and V read once in between, as `saccade bench` reads them."""
    run()
    seconds = []
    for _ in range(repeats):
        for tensor in keys:
            tensor.view(torch.int32).sum()
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


def time_sdpa(name, q, k, v, s, repeats, keys):
    if name == "softcap":
        return None
    is_causal = name == "causal" and s["q"] == s["kv"]
    mask = None if is_causal else dense_mask(*variant_mods(name, s), s)
    return median_ms(lambda: F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, enable_gqa=s["h"] != s["hkv"]), repeats, keys)


def time_flex(name, q, k, v, s, repeats, keys):
    mask, score = variant_mods(name, s)
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block = mask and create_block_mask(mask, None, None, s["q"], s["kv"], device="cpu")
    try:
        return median_ms(lambda: compiled(q, k, v, score_mod=score, block_mask=block,
                                          enable_gqa=s["h"] != s["hkv"]), repeats, keys)
    except Exception as error:  # a variant PyTorch cannot compile is a result too
        reason = str(error).splitlines()[0][:80]
        print(f"# FlexAttention, {name}: {reason}", file=sys.stderr)
        return None


@functools.lru_cache(maxsize=1)
def random_tensors(problem):
    s = read_problem(problem)
    return tuple(torch.randn(s["b"], heads, n, d, dtype=s["dtype"]) for heads, n, d in
                 ((s["h"], s["q"], s["d"]), (s["hkv"], s["kv"], s["d"]),
                  (s["hkv"], s["kv"], s["dv"])))


def time_torch(name, problem, repeats, with_flex):
    """ms of SDPA and of FlexAttention; None where one cannot."""
    s = read_problem(problem)
    q, k, v = random_tensors(problem)
    keys = (k, v) if s["q"] <= 16 else ()
    with torch.no_grad():
        return (time_sdpa(name, q, k, v, s, repeats, keys),
                time_flex(name, q, k, v, s, repeats, keys) if with_flex else None)


def saccade_rows(arguments):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.csv")
        command = [arguments.program, "bench", "--csv", path, "--threads",
                   str(arguments.threads), "--repeats", str(arguments.repeats)]
        for suite in arguments.suite or ["paper", "dense", "decode"]:
            command += ["--suite", suite]
        try:
            status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        except OSError as error:
            sys.exit(f"--program: {error.filename}: {error.strerror}")
        if status:  # the program has said why
            sys.exit(status)
        with open(path, newline="") as file:
            return list(csv.DictReader(file))


def beside(ours, theirs):
    """Cells of their times, and of how often ours goes into them; None is blank."""
    cells = [f"{ms:9.4g}" if ms else " " * 9 for ms in theirs]
    ratios = [f"{ms / ours:6.2f}x" if ms else " " * 7 for ms in theirs]
    return " ".join(cells + ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--part", action="append",
                        choices=["forward", "variants", "masks", "short", "decode", "backward",
                                 "backward_variants", "backward_masks", "backward_parts",
                                 "captures"])
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--traced", action="store_true")
    parser.add_argument("--program", default="build/saccade")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--suite", action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--back-to-back", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        import peers_cuda
        peers_cuda.main(arguments)
        return
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    print(f"PyTorch {torch.__version__}, {arguments.threads} threads, medians of "
          f"{arguments.repeats}, forward; ratio: PyTorch's time over Saccade's\n")
    print(f"{'variant':16} {'problem':36} {'saccade ms':>10} {'rate':>12} {'of limit':>8} "
          f"{'sdpa ms':>9} {'flex ms':>9} {'sdpa':>7} {'flex':>7}")
    n_rows = 0
    for row in saccade_rows(arguments):
        sizes = read_problem(row["problem"])
        is_decode = row["suite"] == "decode"
        if arguments.only not in f"{row['variant']} {row['problem']}":
            continue
        if is_decode and sizes["b"] > 1:
            continue  # has lengths of its own
        if not is_decode and (sizes["q"] != sizes["kv"] or sizes["q"] > 16384):
            continue
        n_rows += 1
        ours = float(row["ms"])
        rate = f"{float(row['gbytes_per_s']):.1f} GB/s" if row["gbytes_per_s"] else \
            f"{float(row['gflops']):.0f} GFLOP/s"
        limit = f"{100 * float(row['of_ceiling']):.0f} %" if row["of_ceiling"] else ""
        theirs = time_torch(row["variant"], row["problem"], arguments.repeats,
                            not arguments.no_flex)
        print(f"{row['variant']:16} {row['problem']:36} {ours:10.4g} {rate:>12} {limit:>8} "
              f"{beside(ours, theirs)}", flush=True)
    if n_rows == 0:
        sys.exit(f"--only: got '{arguments.only}', expected a part of a row's label")


if __name__ == "__main__":
    main()
