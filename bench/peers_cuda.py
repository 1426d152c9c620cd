"""The CUDA half of peers_torch.py: Saccade, cuDNN, FlashAttention-2, FlexAttention on one GPU.

All contenders of a case get the same random tensors in one process. Saccade gets its own text
of a variant, or with --traced the Python functions that FlexAttention gets. Rounds are
shuffled; before each run L2 is overwritten and the GPU kept busy until the run's launches are
queued, so that no host time is in the figure. Medians of CUDA events. Rates count 2 (D + Dv)
flops a live score, 6 D + 4 Dv for backward, for decode bytes of K and V. Backward is timed
alone, by autograd over a forward that has run: everything that either side launches for it.
With --back-to-back nothing lies between runs, as in training: at its power limit a GPU's clock
is then lower, and the less a kernel burns the faster it is.
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
BACKWARD_CYCLES = 3_000_000  # autograd queues more, and from a thread of its own
WINDOW, PREFIX, CAP, DOCUMENTS = 1024, 2048, 20.0, 12
CANVAS, KERNEL, TILE = 128, 13, 8  # of neighbourhoods in a picture

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
# Runs that take less than a millisecond, a graph of IN_A_ROW each, as a model's layers follow
# one another: at least SHORT_FLOOR times cuDNN.
SHORT = [(1, 8, 8, 128, 64), (8, 12, 12, 384, 64), (32, 16, 16, 512, 64), (1, 16, 16, 1024, 64),
         (1, 16, 16, 2048, 64), (8, 16, 16, 2048, 64), (1, 16, 16, 512, 128),
         (4, 32, 8, 512, 128), (2, 16, 16, 1024, 128), (1, 32, 8, 1024, 128),
         (16, 16, 16, 1024, 128), (1, 8, 8, 2048, 128), (1, 32, 8, 2048, 128)]
SHORT_DECODE = [(1, 32, 8, 1024, 128), (1, 32, 8, 4096, 128), (1, 32, 8, 16384, 128),
                (8, 32, 8, 1024, 128), (4, 32, 8, 2048, 128), (64, 32, 4, 3000, 128),
                (256, 16, 2, 2048, 128)]
IN_A_ROW = 20
SHORT_FLOOR = 1.0
# (name, shape), then at least this many times FlexAttention
SPARSE = [("documents 12", (1, 16, 16, 32768, 64), 1.6),
          ("documents 12", (1, 16, 16, 32768, 128), 2.0),
          ("documents 200", (1, 16, 16, 32768, 64), 2.0),
          ("documents 200", (1, 16, 16, 32768, 128), 2.0),
          ("documents 2000", (1, 16, 16, 32768, 64), 2.0),
          ("documents 2000", (1, 16, 16, 32768, 128), 2.0),
          ("window 128", (1, 64, 8, 8192, 64), 1.3),
          ("natten naive", (1, 16, 16, CANVAS * CANVAS, 64), 1.3),
          ("natten naive", (1, 16, 16, CANVAS * CANVAS, 128), 1.3)]
# (B, H, Hkv, N, D, Dv), then at least this many times cuDNN (full, causal)
BACKWARD = [
    ((1, 32, 32, 16384, 64, 64), (1.27, 1.33)),
    ((1, 16, 16, 16384, 128, 128), (1.16, 1.21)),
    ((1, 16, 16, 8192, 128, 128), (1.16, 1.21)),
    ((1, 32, 8, 8192, 128, 128), (1.16, 1.21)),
    ((1, 32, 8, 16384, 128, 128), (1.16, 1.21)),
    ((8, 16, 16, 4096, 128, 128), (1.10, 1.16)),
    ((2, 8, 8, 8192, 256, 256), (1.08, 1.08)),
    ((1, 16, 16, 8192, 80, 80), (1.15, 1.15)),
    ((1, 16, 16, 8192, 96, 96), (1.15, 1.15)),
    ((1, 16, 16, 8192, 192, 128), (1.15, 1.15)),
    ((1, 16, 16, 2048, 64, 64), None),
    ((1, 16, 16, 512, 128, 128), None),
]
# at least this many times FlexAttention
BACKWARD_FLOORS = {"full": 1.5, "causal": 1.5, "relative_bias": 1.5, "alibi": 1.6,
                   "sliding_window": 1.5, "prefix_lm": 1.5, "softcap": 3.0, "document": 1.5}
COPY_FLOOR = 0.90  # of the copy's bandwidth, where K and V take LARGE bytes
VARIANT_OF_PLAIN = 0.90
LARGE = 1 << 30

SUSTAINED_MS = 60

_flush = None
_is_back_to_back = False
_floors = [0, 0, 0]  # held, asked; results that are not the same


def causal(b, h, q, kv):
    return q >= kv


def documents(n, count=DOCUMENTS):
    generator = torch.Generator().manual_seed(1)
    cuts = torch.sort(torch.randperm(n - 1, generator=generator)[:count - 1] + 1).values
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
    b, h, hkv, n, d, dv = (*shape, shape[4])[:6]
    return tuple(torch.randn(b, heads, m, dim, device="cuda", dtype=torch.bfloat16)
                 for heads, m, dim in ((h, rows, d), (hkv, n, d), (hkv, n, dv)))


def medians(runs, rounds, busy=BUSY_CYCLES):
    """name: callable -> name: median ms."""
    global _flush
    if _is_back_to_back:
        return back_to_back(runs, rounds)
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
            torch.cuda._sleep(busy)
            begin.record()
            runs[name]()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for b, e in pairs)
            for name, pairs in events.items()}


def back_to_back(runs, rounds):
    """The same without pauses: a time is a mean over SUSTAINED_MS of one contender's runs."""
    counts, times, names = {}, {name: [] for name in runs}, list(runs)
    for name, run in runs.items():
        run()
        counts[name] = max(1, round(SUSTAINED_MS / elapsed(run, 2)))
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            times[name].append(elapsed(runs[name], counts[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def elapsed(run, n):
    """ms of one of n runs in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(n):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / n


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
    mine = results(runs["saccade"])
    for name in peers:
        for which, (x, y) in enumerate(zip(mine, results(runs[name]))):
            error = ((x.float() - y.float()).norm() / y.float().norm()).item()
            if not error < 0.02:
                print(f"{label}: Saccade's and {name}'s result {which} differ by {error:.3g}")
                _floors[2] += 1


def results(run):
    made = run()
    return made if isinstance(made, tuple) else (made,)


def verdict(ratio, floor):
    if floor is None:
        return f"{ratio:5.2f}       "
    _floors[0] += ratio >= floor
    _floors[1] += 1
    return f"{ratio:5.2f} {'>=' if ratio >= floor else '< '} {floor:<4g}"


def peer_cells(mine, theirs, floor, digits=1):
    """The peer's time and what it is of mine; nothing where there is no peer."""
    return f"{theirs:8.{digits}f}   {verdict(theirs / mine, floor)}" if theirs else ""


def label_of(name, shape, rows=None):
    b, h, hkv, n, d, dv = (*shape, shape[4])[:6]
    heads = f"h{h}" if h == hkv else f"h{h}/{hkv}"
    return f"{name:15} b{b} {heads} q{rows or n} kv{n} d{d}" + (f" dv{dv}" if d != dv else "")


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


def backward_of(forward, leaves, d_out):
    """The run of backward alone, or None where it is refused."""
    try:
        with torch.enable_grad():
            out = forward()

        def run():
            return torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        run()
    except RuntimeError as reason:
        print(f"refused: {str(reason).splitlines()[0][:120]}")
        return None
    return run


def leaves_of(shape):
    leaves = tuple(t.requires_grad_() for t in tensors(shape, shape[3]))
    b, h, _, n, d, dv = (*shape, shape[4])[:6]
    return leaves, torch.randn(b, h, n, dv, device="cuda", dtype=torch.bfloat16)


def backward_flops(shape, live):
    b, h, _, _, d, dv = (*shape, shape[4])[:6]
    return (6 * d + 4 * dv) * b * h * live


def backward(options):
    print(f"{'backward, TFLOP/s':44} {'saccade':>8} {'cudnn':>6} {'fa2':>6} {'flex':>6}   "
          "x cudnn      x fa2   x flex")
    for shape, floors in BACKWARD:
        for i, name in enumerate(("full", "causal")):
            label = label_of(name, shape)
            if options.only not in label:
                continue
            leaves, d_out = leaves_of(shape)
            mask, n = causal if i else None, shape[3]
            calls = {"saccade": saccade(*leaves, None, mask)}
            with torch.no_grad():
                calls["cudnn"] = sdpa(*leaves, SDPBackend.CUDNN_ATTENTION, bool(i))
                calls["fa2"] = sdpa(*leaves, SDPBackend.FLASH_ATTENTION, bool(i))
            if not options.no_flex:
                calls["flex"] = flex(*leaves, None, mask)
            runs = {key: call and backward_of(call, leaves, d_out)
                    for key, call in calls.items()}
            runs = {key: run for key, run in runs.items() if run}
            check_same(label, runs, [key for key in runs if key != "saccade"])
            ms = medians(runs, options.rounds, BACKWARD_CYCLES)
            flops = backward_flops(shape, n * (n + 1) // 2 if i else n * n)
            rates = [f"{flops / ms[key] / 1e9:6.0f}" if key in ms else " " * 6
                     for key in ("saccade", "cudnn", "fa2", "flex")]
            ratios = [verdict(ms[key] / ms["saccade"], key == "cudnn" and floors and floors[i]
                              or None) if key in ms else "" for key in ("cudnn", "fa2", "flex")]
            print(f"{label:44}  {rates[0]:>7} {' '.join(rates[1:])}   {' '.join(ratios)}",
                  flush=True)


def backward_variants(options):
    print(f"{'backward variants, TFLOP/s of live scores':44} {'saccade':>8} {'flex':>6}   "
          "x flex       of own full")
    for shape in VARIANTS:
        b, h, hkv, n, d = shape
        doc = documents(n)
        full = None
        for name, (score, mask, live) in variants(h, n, doc).items():
            label = label_of(name, shape)
            if options.only not in label:
                continue
            leaves, d_out = leaves_of(shape)
            mine = (score, mask) if options.traced else texts()[name]
            calls = {"saccade": saccade(*leaves, *mine, doc)}
            if not options.no_flex:
                calls["flex"] = flex(*leaves, score, mask)
            runs = {key: backward_of(call, leaves, d_out) for key, call in calls.items()}
            check_same(label, runs, [key for key in runs if key != "saccade"])
            ms = medians(runs, options.rounds, BACKWARD_CYCLES)
            rates = {key: backward_flops(shape, live) / t / 1e9 for key, t in ms.items()}
            full = rates["saccade"] if name == "full" else full
            cells = [f"{rates[key]:6.0f}" if key in rates else " " * 6
                     for key in ("saccade", "flex")]
            ratio = verdict(ms["flex"] / ms["saccade"], BACKWARD_FLOORS[name]) \
                if "flex" in ms else " " * 12
            share = f"{100 * rates['saccade'] / full:5.0f} %" if full else ""
            print(f"{label:44}  {cells[0]:>7} {cells[1]}   {ratio} {share}", flush=True)


def even_bits(x):
    x = x & 0x55555555
    for shift, mask in ((1, 0x33333333), (2, 0x0f0f0f0f), (4, 0x00ff00ff), (8, 0xffff)):
        x = (x | (x >> shift)) & mask
    return x


# row and column of a token, by the order of tokens
ORDERS = {
    "natten naive": lambda i: (i // CANVAS, i % CANVAS),
    "natten tiled": lambda i: (
        i // (TILE * TILE) // (CANVAS // TILE) * TILE + i % (TILE * TILE) // TILE,
        i // (TILE * TILE) % (CANVAS // TILE) * TILE + i % (TILE * TILE) % TILE),
    "natten morton": lambda i: (even_bits(i >> 1), even_bits(i)),
}


def near(place):
    half = KERNEL // 2

    def live(b, h, q, kv):
        (y, x), (row, column) = place(q), place(kv)
        y, x = (torch.clamp(c, half, CANVAS - 1 - half) for c in (y, x))
        return ((y - row).abs() <= half) & ((x - column).abs() <= half)
    return live


NATTEN = f"({CANVAS}, {CANVAS}, {KERNEL}, {KERNEL}"
NATTEN_TEXTS = {"natten naive": f"natten_2d{NATTEN})",
                "natten morton": f"natten_morton{NATTEN})",
                "natten tiled": f"natten_tiled{NATTEN}, {TILE}, {TILE})"}


def sparse_mask(name, n):
    """A mask of short runs for FlexAttention, its text, and the documents that both read."""
    if name in ORDERS:
        return near(ORDERS[name]), NATTEN_TEXTS[name], None
    kind, count = name.split()
    if kind == "window":
        window = int(count)
        return (lambda b, h, q, kv: (q >= kv) & (q - kv <= window),
                f"sliding_window({window})", None)
    doc = documents(n, int(count))
    return (lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]),
            "document(doc) && causal()", doc)


def masks(options):
    """Forward of the same masks, whose tiles see few keys."""
    print(f"{'forward of sparse masks, us':44} {'saccade':>8} {'flex':>8}   x flex")
    for name, shape, floor in SPARSE:
        label = label_of(name, shape)
        if options.only not in label:
            continue
        q, k, v = tensors(shape, shape[3])
        mask, text, doc = sparse_mask(name, shape[3])
        runs = {"saccade": saccade(q, k, v, None, mask if options.traced else text, doc)}
        if not options.no_flex:
            runs["flex"] = flex(q, k, v, None, mask)
            check_same(label, runs, ["flex"])
        us = {key: 1e3 * t for key, t in medians(runs, options.rounds).items()}
        peer = peer_cells(us["saccade"], us.get("flex"), floor)
        print(f"{label:44} {us['saccade']:8.1f} {peer}", flush=True)


def recorded(run, times=1):
    """A CUDA graph of so many runs, one behind the other."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay


def short(options):
    """Runs so short that starting them counts, and short decodes."""
    print(f"{f'in graphs of {IN_A_ROW}, us each':44} {'saccade':>8} {'cudnn':>8}   x cudnn")
    rows = [(name, shape, shape[3]) for shape in SHORT for name in ("full", "causal")]
    rows += [("decode", shape, 1) for shape in SHORT_DECODE]
    for name, shape, n in rows:
        label = label_of(name, shape, n)
        if options.only not in label:
            continue
        q, k, v = tensors(shape, n)
        is_causal = name == "causal"
        runs = {"saccade": saccade(q, k, v, None, causal if is_causal else None),
                "cudnn": sdpa(q, k, v, SDPBackend.CUDNN_ATTENTION, is_causal)}
        runs = {key: run for key, run in runs.items() if run}
        check_same(label, runs, [key for key in runs if key != "saccade"])
        ms = medians({key: recorded(run, IN_A_ROW) for key, run in runs.items()},
                     options.rounds)
        us = {key: 1e3 * t / IN_A_ROW for key, t in ms.items()}
        peer = peer_cells(us["saccade"], us.get("cudnn"), SHORT_FLOOR)
        print(f"{label:44} {us['saccade']:8.1f} {peer}", flush=True)


def backward_masks(options):
    """Masks of many short runs: small documents, neighbourhoods in three orders of tokens."""
    print(f"{'backward of sparse masks, ms':44} {'saccade':>8} {'flex':>8}   x flex")
    shape = (4, 16, 16, CANVAS * CANVAS, 64)
    for name in (*ORDERS, "documents 200", "documents 2000"):
        label = label_of(name, shape)
        if options.only not in label:
            continue
        leaves, d_out = leaves_of(shape)
        mask, text, doc = sparse_mask(name, shape[3])
        text = mask if options.traced else text
        calls = {"saccade": saccade(*leaves, None, text, doc)}
        if not options.no_flex:
            calls["flex"] = flex(*leaves, None, mask)
        runs = {key: backward_of(call, leaves, d_out) for key, call in calls.items()}
        check_same(label, runs, [key for key in runs if key != "saccade"])
        ms = medians(runs, options.rounds, BACKWARD_CYCLES)
        peer = peer_cells(ms["saccade"], ms.get("flex"), 1.3, digits=3)
        print(f"{label:44} {ms['saccade']:8.3f} {peer}", flush=True)


def backward_parts(options):
    """Backward where some of the gradients are not wanted."""
    print(f"{'gradients wanted, ms':44} {'all':>8} {'dq':>8} {'dk, dv':>8}")
    for shape in ((1, 32, 32, 16384, 64), (1, 16, 16, 8192, 128)):
        label = label_of("full", shape)
        if options.only not in label:
            continue
        leaves, d_out = leaves_of(shape)
        call = saccade(*leaves, None, None)
        runs = {"all": backward_of(call, leaves, d_out)}
        for key, wanted in (("dq", leaves[:1]), ("dk, dv", leaves[1:])):
            for t in leaves:
                t.requires_grad_(any(t is w for w in wanted))
            runs[key] = backward_of(call, wanted, d_out)
        ms = medians(runs, options.rounds, BACKWARD_CYCLES)
        print(f"{label:44} {ms['all']:8.3f} {ms['dq']:8.3f} {ms['dk, dv']:8.3f}", flush=True)


# score, shape of what it reads
CAPTURES = {
    "t[h] * score": ("score * t[h]", lambda h, n: (h,)),
    "t[h, q - kv]": ("score + t[h, q - kv + N]", lambda h, n: (h, 2 * n)),
    "T5 buckets": ("score + t[h, clamp(q - kv, -16, 15) + 16]", lambda h, n: (h, 32)),
    "t[h] * (kv - q)": ("score + t[h] * (kv - q)", lambda h, n: (h,)),
    "t[b, h, q, kv]": ("score + t[b, h, q, kv]", lambda h, n: (2, h, n, n)),
    "bf16 t[b,h,q,kv]": ("score + t[b, h, q, kv]", lambda h, n: (2, h, n, n)),
}


def captures(options):
    """What the gradient of a captured tensor adds to backward's time."""
    print(f"{'gradients of captures, ms':44} {'with':>8} {'without':>8}   ratio")
    for name, (text, shape_of) in CAPTURES.items():
        shape = (2, 16, 16, 2048 if "t[b" in name else 4096, 64)
        label = label_of(name, shape)
        if options.only not in label:
            continue
        (q, k, v), d_out = leaves_of(shape)
        runs = {}
        for key in ("with", "without"):
            t = 0.1 * torch.randn(*shape_of(16, shape[3]), device="cuda")
            t = t.bfloat16() if "bf16" in name else t
            mod = ours.score(text, t=t, **({"N": shape[3]} if "N" in text else {}))
            leaves = (q, k, v)
            if key == "with":
                t.requires_grad_()
                leaves += (t,)
            runs[key] = backward_of(lambda mod=mod: ours.flex_attention(q, k, v, mod), leaves,
                                    d_out)
        if None in runs.values():
            continue
        ms = medians(runs, options.rounds, BACKWARD_CYCLES)
        print(f"{label:44} {ms['with']:8.2f} {ms['without']:8.2f}   "
              f"{ms['with'] / ms['without']:5.2f}", flush=True)


PARTS = {"forward": forward, "variants": all_variants, "masks": masks, "short": short,
         "decode": decode, "backward": backward,
         "backward_variants": backward_variants, "backward_masks": backward_masks,
         "backward_parts": backward_parts,
         "captures": captures}


def main(options):
    global _is_back_to_back
    _is_back_to_back = options.back_to_back
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
    if _floors[2]:
        sys.exit(f"{_floors[2]} results differ")
