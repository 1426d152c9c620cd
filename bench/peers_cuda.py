"""The CUDA half of peers_torch.py: Saccade, cuDNN, FlashAttention-2, FlexAttention on one GPU.

All contenders of a case get the same random tensors in one process. Saccade gets its own text
of a variant, or with --traced the Python functions that FlexAttention gets. Rounds are
shuffled; before each run L2 is overwritten and the GPU kept busy until the run's launches are
queued, so that no host time is in the figure. Medians of CUDA events. Rates count 2 (D + Dv)
flops a live score, for decode bytes of K and V.
"""
import random
import statistics
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import saccade.torch as ours  # noqa: E402

FLUSH_BYTES = 256 << 20
BUSY_CYCLES = 600_000  # about 0.3 ms, in which the launches of a run are queued
WINDOW, PREFIX, CAP, DOCUMENTS = 1024, 2048, 20.0, 12

# (B, H, Hkv, N, D), then at least this many times cuDNN (full, causal) and FlexAttention
FORWARD = [
    ((4, 16, 16, 16384, 64), (1.18, 1.18), 1.3),
    ((2, 16, 16, 16384, 128), (1.10, 1.15), 1.4),
    ((2, 32, 8, 8192, 128), (1.10, 1.15), 1.4),
    ((8, 16, 16, 4096, 128), None, None),
    ((2, 8, 8, 8192, 256), (1.0, 1.0), 1.8),
]
VARIANTS = [(4, 16, 16, 16384, 64), (8, 16, 2, 16384, 64)]
# at least this many times FlexAttention
VARIANT_FLOORS = {"full": 1.15, "causal": 1.15, "relative_bias": 1.15, "alibi": 1.3,
                  "sliding_window": 1.25, "prefix_lm": 1.15, "softcap": 2.5, "document": 1.35}
DECODE = [(1, 32, 8, 131072, 128), (8, 32, 8, 16384, 128), (32, 32, 8, 8192, 128),
          (128, 32, 8, 4096, 128), (16, 32, 32, 8192, 128), (16, 64, 8, 32768, 128)]
DECODE_VARIANTS = ("causal", "alibi", "softcap", "sliding_window")
DECODE_FLOOR = 0.98  # of the better of cuDNN and FlashAttention-2
COPY_FLOOR = 0.90  # of the copy's bandwidth, where K and V take LARGE bytes
VARIANT_OF_PLAIN = 0.90
LARGE = 1 << 30

_flush = None
_floors = [0, 0]  # held, asked


def causal(b, h, q, kv):
    return q >= kv


def documents(n):
    generator = torch.Generator().manual_seed(1)
    cuts = torch.sort(torch.randperm(n - 1, generator=generator)[:DOCUMENTS - 1] + 1).values
    starts = torch.zeros(n, dtype=torch.int32)
    starts[cuts] = 1
    return torch.cumsum(starts, 0).to(torch.int32).cuda()


def variants(heads, n, doc, offset=0, window=WINDOW):
    """name: (score_mod, mask_mod, live scores of a head) as FlexAttention's paper has them.

    doc: the document of each position. offset: the position of query 0, for decode.
    """
    lengths = torch.bincount(doc).double()
    triangle = n * (n + 1) // 2
    capped = min(window, n)

    def at(q):
        return q + offset if offset else q

    def past(b, h, q, kv):
        return at(q) >= kv

    return {
        "full": (None, None, n * n),
        "causal": (None, past, triangle),
        "relative_bias": (lambda s, b, h, q, kv: s + (at(q) - kv), None, n * n),
        "alibi": (lambda s, b, h, q, kv: s + torch.exp2(-8.0 * (h + 1) / heads) * (kv - at(q)),
                  past, triangle),
        "sliding_window": (None, lambda b, h, q, kv: (at(q) >= kv) & (at(q) - kv <= window),
                           sum(min(i, capped) + 1 for i in range(n))),
        "prefix_lm": (None, lambda b, h, q, kv: (kv < PREFIX) | (at(q) >= kv),
                      sum(max(PREFIX, i + 1) for i in range(n))),
        "softcap": (lambda s, b, h, q, kv: CAP * torch.tanh(s / CAP), past, triangle),
        "document": (None, lambda b, h, q, kv: (at(q) >= kv) & (doc[at(q)] == doc[kv]),
                     int((lengths * (lengths + 1) / 2).sum())),
    }


def texts(offset=0, window=WINDOW):
    """name: (score, mask) of the same variants in Saccade's language; doc is a capture."""
    at = f"q = q + {offset}; " if offset else ""
    past = at + "causal()"
    return {
        "full": (None, None),
        "causal": (None, past),
        "relative_bias": (at + "relative_bias()", None),
        "alibi": (at + "alibi()", past),
        "sliding_window": (None, at + f"sliding_window({window})"),
        "prefix_lm": (None, at + f"prefix_lm({PREFIX})"),
        "softcap": (f"softcap({CAP})", past),
        "document": (None, at + "document(doc) && causal()"),
    }


def tensors(shape, rows):
    b, h, hkv, n, d = shape
    return tuple(torch.randn(b, heads, m, d, device="cuda", dtype=torch.bfloat16)
                 for heads, m in ((h, rows), (hkv, n), (hkv, n)))


def medians(runs, rounds):
    """name: callable -> name: median ms."""
    global _flush
    if _flush is None:
        _flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for run in runs.values():
        run()
        run()
    torch.cuda.synchronize()
    events = {name: [] for name in runs}
    names = list(runs)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            _flush.fill_(1)
            torch.cuda._sleep(BUSY_CYCLES)
            begin.record()
            runs[name]()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for b, e in pairs)
            for name, pairs in events.items()}


def sdpa(q, k, v, backend, is_causal=False):
    """The backend's run, or None where it refuses."""
    def run():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
    try:
        run()
    except RuntimeError:
        return None
    return run


def flex(q, k, v, score, mask):
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block = mask and create_block_mask(mask, None, None, q.shape[2], k.shape[2], device="cuda")
    return lambda: compiled(q, k, v, score_mod=score, block_mask=block,
                            enable_gqa=q.shape[1] != k.shape[1])


def saccade(q, k, v, score, mask, doc=None):
    if isinstance(mask, str):
        mask = ours.mask(mask, **({"doc": doc} if "doc" in mask else {}))
    block = mask and ours.create_block_mask(mask, None, None, q.shape[2], k.shape[2],
                                            device="cuda")
    return lambda: ours.flex_attention(q, k, v, score, block,
                                       enable_gqa=q.shape[1] != k.shape[1])


def check_same(label, runs, peers):
    """Outputs that differ by more than rounding make a comparison of times worthless."""
    mine = runs["saccade"]().float()
    for name in peers:
        theirs = runs[name]().float()
        error = ((mine - theirs).norm() / theirs.norm()).item()
        if not error < 0.02:
            sys.exit(f"{label}: Saccade and {name} differ by {error:.3g}")


def verdict(ratio, floor):
    if floor is None:
        return f"{ratio:5.2f}       "
    _floors[0] += ratio >= floor
    _floors[1] += 1
    return f"{ratio:5.2f} {'>=' if ratio >= floor else '< '} {floor:<4g}"


def label_of(name, shape, rows=None):
    b, h, hkv, n, d = shape
    heads = f"h{h}" if h == hkv else f"h{h}/{hkv}"
    return f"{name:15} b{b} {heads} q{rows or n} kv{n} d{d}"


def forward(options):
    print(f"{'forward, TFLOP/s':44} {'saccade':>8} {'cudnn':>6} {'fa2':>6} {'flex':>6}   "
          "x cudnn      x fa2   x flex")
    for shape, cudnn_floors, flex_floor in FORWARD:
        b, h, hkv, n, d = shape
        for i, name in enumerate(("full", "causal")):
            label = label_of(name, shape)
            if options.only not in label:
                continue
            q, k, v = tensors(shape, n)
            mask = causal if i else None
            runs = {"saccade": saccade(q, k, v, None, mask),
                    "cudnn": sdpa(q, k, v, SDPBackend.CUDNN_ATTENTION, bool(i)),
                    "fa2": sdpa(q, k, v, SDPBackend.FLASH_ATTENTION, bool(i))}
            if not options.no_flex:
                runs["flex"] = flex(q, k, v, None, mask)
            runs = {key: run for key, run in runs.items() if run}
            check_same(label, runs, [key for key in runs if key != "saccade"])
            ms = medians(runs, options.rounds)
            flops = 4 * d * b * h * (n * (n + 1) // 2 if i else n * n)
            rates = [f"{flops / ms[key] / 1e9:6.0f}" if key in ms else " " * 6
                     for key in ("saccade", "cudnn", "fa2", "flex")]
            floors = {"cudnn": cudnn_floors and cudnn_floors[i], "flex": flex_floor}
            ratios = [verdict(ms[key] / ms["saccade"], floors.get(key)) if key in ms else ""
                      for key in ("cudnn", "fa2", "flex")]
            print(f"{label:44}  {rates[0]:>7} {' '.join(rates[1:])}   {' '.join(ratios)}",
                  flush=True)


def all_variants(options):
    print(f"{'variants, TFLOP/s of live scores':44} {'saccade':>8} {'flex':>6}   x flex")
    for shape in VARIANTS:
        b, h, hkv, n, d = shape
        doc = documents(n)
        for name, (score, mask, live) in variants(h, n, doc).items():
            label = label_of(name, shape)
            if options.only not in label:
                continue
            q, k, v = tensors(shape, n)
            mine = (score, mask) if options.traced else texts()[name]
            runs = {"saccade": saccade(q, k, v, *mine, doc), "flex": flex(q, k, v, score, mask)}
            check_same(label, runs, ["flex"])
            ms = medians(runs, options.rounds)
            rates = [f"{4 * d * b * h * live / t / 1e9:6.0f}" for t in ms.values()]
            print(f"{label:44}  {rates[0]:>7} {rates[1]}   "
                  f"{verdict(ms['flex'] / ms['saccade'], VARIANT_FLOORS[name])}", flush=True)


def copy_rate(rounds):
    source = torch.randn(1 << 28, device="cuda")
    to = torch.empty_like(source)
    ms = medians({"copy": lambda: to.copy_(source)}, rounds)["copy"]
    return 2 * source.numel() * 4 / ms / 1e6


def decode(options):
    copy = copy_rate(options.rounds)
    names = ("saccade", "cudnn", "fa2", "flex") + DECODE_VARIANTS
    print(f"{'decode, GB/s of K and V; copy %.0f' % copy:44} "
          f"{' '.join('%7s' % x[:7] for x in names)}   x best peer   of copy      "
          "slowest variant of plain")
    for shape in DECODE:
        b, h, hkv, n, d = shape
        label = label_of("", shape, 1).strip()
        if options.only not in label:
            continue
        q, k, v = tensors(shape, 1)
        # a window wider than the cache: a variant that skipped keys would look fast
        doc = documents(n)
        theirs = variants(h, n, doc, offset=n - 1, window=1 << 29)
        mine = theirs if options.traced else texts(offset=n - 1, window=1 << 29)
        runs = {"saccade": saccade(q, k, v, None, None),
                "cudnn": sdpa(q, k, v, SDPBackend.CUDNN_ATTENTION),
                "fa2": sdpa(q, k, v, SDPBackend.FLASH_ATTENTION)}
        if not options.no_flex:
            runs["flex"] = flex(q, k, v, None, None)
        runs = {key: run for key, run in runs.items() if run}
        peers = [key for key in runs if key != "saccade"]
        for name in DECODE_VARIANTS:
            runs[name] = saccade(q, k, v, *mine[name][:2], doc)
        check_same(label, runs, peers)
        ms = medians(runs, options.rounds)
        size = 2 * b * hkv * n * d * 2
        rates = {key: size / t / 1e6 for key, t in ms.items()}
        best = max(rates[key] for key in ("cudnn", "fa2") if key in rates)
        slowest = min(rates[key] for key in DECODE_VARIANTS) / rates["saccade"]
        floor = COPY_FLOOR if size >= LARGE else None
        cells = ["%7.0f" % rates[x] if x in rates else " " * 7 for x in names]
        verdicts = [verdict(rates["saccade"] / best, DECODE_FLOOR),
                    verdict(rates["saccade"] / copy, floor), verdict(slowest, VARIANT_OF_PLAIN)]
        print(f"{label:44} {' '.join(cells)}   {' '.join(verdicts)}", flush=True)


PARTS = {"forward": forward, "variants": all_variants, "decode": decode}


def main(options):
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to compare on")
        return
    print(f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
          f"{torch.cuda.get_device_name()}, bf16, medians of {options.rounds} rounds; ratio: "
          "their time over Saccade's, and the floor asked for")
    with torch.no_grad():
        for name in options.part or PARTS:
            print()
            PARTS[name](options)
    print(f"\n{_floors[0]} of {_floors[1]} floors held")
