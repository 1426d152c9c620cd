"""`saccade run` on files that NumPy wrote, against attention in float64 NumPy.

usage: against_numpy.py PROGRAM

Every named variant (a new one without a case here fails), texts that are in no prelude, all
dtypes, layouts, positions. Nothing here knows how Saccade works: masks are formulas over whole
index arrays. Tolerance: twice the error of a plain computation in the files' dtype, and two
units in the last place.
"""
import os
import subprocess
import sys
import tempfile

import numpy as np

PROGRAM = os.path.abspath(sys.argv[1])
rng = np.random.default_rng(2026)


class Index:
    """Index arrays that broadcast to [B, H, Q, KV], and sizes."""

    def __init__(self, B, H, Q, KV, q_offset=0):
        self.B, self.H, self.Q, self.KV = B, H, Q, KV
        self.b = np.arange(B).reshape(B, 1, 1, 1)
        self.h = np.arange(H).reshape(1, H, 1, 1)
        self.q = np.arange(Q).reshape(1, 1, Q, 1) + np.reshape(q_offset, (-1, 1, 1, 1))
        self.kv = np.arange(KV).reshape(1, 1, 1, KV)


# ---- dtypes ----

def to_bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


ROUND = {
    "f32": lambda x: np.asarray(x, np.float32),
    "f16": lambda x: np.asarray(x, np.float32).astype(np.float16).astype(np.float32),
    "bf16": to_bf16,
}
MANTISSA = {"f32": 23, "f16": 10, "bf16": 7}


def save(path, x, dtype):
    """x is exactly representable."""
    if dtype == "bf16":
        bits = (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        np.save(path, bits.view(np.dtype("V2")))
    else:
        np.save(path, x.astype({"f32": np.float32, "f16": np.float16}[dtype]))


def load(path):
    x = np.load(path)
    if x.dtype.kind == "V":
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


# ---- attention ----

def products(q, k):
    """Q K^T, each sum in the order of d as a plain loop has it. How many partial sums einsum
    keeps is a matter of NumPy's version and the machine, and its error for large d another."""
    return np.add.accumulate(q[:, :, :, None] * k[:, :, None], -1)[..., -1]


def attention(q, k, v, index, mask, score, t, round_p):
    """In the arithmetic of t; returns out and lse."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(t) for x in (q, np.repeat(k, group, 1), np.repeat(v, group, 1)))
    s = products(q, k) * t(1 / np.sqrt(np.float64(q.shape[-1])))
    with np.errstate(all="ignore"):
        s = np.asarray(score(s, index, t), t) if score else s
        live = np.broadcast_to(mask(index) if mask else True, s.shape)
        s = np.where(live, s, t(-np.inf))
        m = s.max(-1, keepdims=True)
        p = np.where(live, np.exp(s - np.where(np.isfinite(m), m, 0)), t(0))
        total = p.sum(-1, keepdims=True)
        lse = np.where(total > 0, np.where(np.isfinite(m), m, 0) + np.log(total), -np.inf)
        out = np.einsum("bhqk,bhkd->bhqd", round_p(p).astype(t), v)
        return np.where(total > 0, out / np.where(total > 0, total, 1), t(0)), lse[..., 0]


def ulp(x, bits):
    return 2.0 ** (np.floor(np.log2(x)) - bits) if x > 0 else 0.0


def worst(x, gold):
    same = (x == gold) | (np.isnan(x) & np.isnan(gold))
    with np.errstate(invalid="ignore"):
        away = np.where(np.isfinite(x - gold), np.abs(x - gold), np.inf)
        return np.max(np.where(same, 0, away))


# ---- running ----

def saccade(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"FAILED: saccade {' '.join(map(str, arguments))}\n{done.stderr}")
    return done.stdout


def check(name, mask_text=None, mask=None, scores=(), score=None, bind={}, dtype="f32",
          shape=(2, 4, 2, 64, 64, 16, 16), layout="bhnd", options=(), q_offset=0):
    B, H, Hkv, Q, KV, D, Dv = shape
    index = Index(B, H, Q, KV, q_offset)
    q, k, v = (ROUND[dtype](rng.standard_normal(s)) for s in
               ((B, H, Q, D), (B, Hkv, KV, D), (B, Hkv, KV, Dv)))
    turn = (lambda x: x.transpose(0, 2, 1, 3)) if layout == "bnhd" else (lambda x: x)
    with tempfile.TemporaryDirectory() as folder:
        path = lambda n: os.path.join(folder, n + ".npy")
        arguments = ["run", "-o", path("o"), "--lse", path("lse"), "--layout", layout]
        for letter, x in zip("qkv", (q, k, v)):
            save(path(letter), turn(x), dtype)
            arguments += ["-" + letter, path(letter)]
        if mask_text:
            arguments += ["--mask", mask_text]
        for text in scores:
            arguments += ["--score", text]
        for key, value in bind.items():
            if np.ndim(value):
                np.save(path("bind_" + key), value)
                value = path("bind_" + key)
            arguments += ["--bind", f"{key}={value}"]
        saccade(*arguments, *options)
        out, lse = turn(load(path("o"))), load(path("lse"))
    gold, gold_lse = attention(q, k, v, index, mask, score, np.float64, lambda p: p)
    plain, plain_lse = attention(q, k, v, index, mask, score, np.float32, ROUND[dtype])
    plain = ROUND[dtype](plain)
    most = np.max(np.abs(gold))
    allowed = 2 * worst(plain, gold) + 2 * ulp(most, MANTISSA[dtype])
    most = np.max(np.abs(gold_lse[np.isfinite(gold_lse)]), initial=0)
    allowed_lse = 2 * worst(plain_lse, gold_lse) + 4 * ulp(most, 23)
    error, lse_error = worst(out, gold), worst(lse, gold_lse)
    is_good = error <= allowed and lse_error <= allowed_lse
    print(f"{'ok' if is_good else 'FAILED':7}{name:34}{dtype:6}{error:10.2e} of {allowed:8.2e}"
          f"   lse {lse_error:8.2e} of {allowed_lse:8.2e}")
    return is_good


# ---- the named variants: text, binds, and the formula again in NumPy ----

def canvas(n, columns):
    return n // columns, n % columns


def near(at, other, n, kernel):
    return abs(np.clip(at, kernel // 2, n - 1 - kernel // 2) - other) <= kernel // 2


def natten(q, kv, rows=8, columns=8, kernel=3):
    (y, x), (v, u) = canvas(q, columns), canvas(kv, columns)
    return near(y, v, rows, kernel) & near(x, u, columns, kernel)


def tiled(n):
    """Token of an 8 x 8 canvas in order of 4 x 2 tiles, to its place by rows."""
    order = np.array([8 * (4 * (t // 4) + i // 2) + 2 * (t % 4) + i % 2
                      for t in range(8) for i in range(8)])
    return order[n]


def morton(n):
    bits = lambda n, first: sum((n >> (2 * i + first) & 1) << i for i in range(8))
    return 8 * bits(n, 1) + bits(n, 0)


def window(t, other, n, size):
    start = np.clip(t, size // 2, n - 1 - (size - 1) // 2) - size // 2
    return (other >= start) & (other < start + size)


def sta(q, kv, tiles, windows, tile):
    live = True
    for n, size in reversed(list(zip(tiles, windows))):
        a, b = (q // tile, kv // tile) if tile else (q, kv)
        live = live & window(a % n, b % n, n, size)
        q, kv, tile = a // n, b // n, 0
    return live


def t5_bucket(i, n, far, both):
    d = i.kv - i.q
    side = 0
    if both:
        n //= 2
        side, d = np.where(d > 0, n, 0), abs(d)
    else:
        d = np.maximum(-d, 0)
    exact = n // 2
    f = np.float32
    with np.errstate(divide="ignore"):
        log = np.log2(d.astype(f) / f(exact)) / np.log2(f(far) / f(exact)) * f(n - exact)
    large = exact + np.where(np.isfinite(log), log, 0).astype(int)
    return side + np.where(d < exact, d, np.minimum(large, n - 1))


N = 64
doc = np.sort(rng.integers(0, 5, N)).astype(np.int32)
doc = np.unique(doc, return_inverse=True)[1].astype(np.int32)
start = np.searchsorted(doc, np.arange(doc.max() + 2)).astype(np.int64)
shared = np.minimum(np.arange(doc.max() + 1), 1).astype(np.int32)
is_global = rng.random(N) < 0.1
image = np.minimum(np.arange(N) // 16, 3).astype(np.int32)
seen = np.array([[0, 64], [10, 40], [20, 64], [63, 64]], np.int32)
span = np.array([[4, 20], [40, 47]], np.int32)
ancestor = np.tril(rng.random((16, 16)) < 0.4) | np.eye(16, dtype=bool)
table = rng.standard_normal((32, 4)).astype(np.float32)
by_head = rng.standard_normal((4, 225)).astype(np.float32)
gain = rng.standard_normal(4).astype(np.float32)
spatial = rng.integers(0, 9, (2, N, N)).astype(np.int16)
prefix = np.array([5, 40], np.int32)
tile = rng.integers(0, 8, (2, 4, 8, 3)).astype(np.int32)

MASKS = {
    "noop": ("noop()", lambda i: True),
    "causal": ("causal()", lambda i: i.q >= i.kv),
    "inverse_causal": ("inverse_causal()", lambda i: i.q <= i.kv),
    "sliding_window": ("sliding_window(W)", lambda i: (i.q >= i.kv) & (i.q - i.kv <= 9),
                       {"W": 9}),
    "last_keys": ("last_keys(n)", lambda i: (i.q >= i.kv) & (i.q - i.kv < 9), {"n": 9}),
    "dilated_window": ("dilated_window(12, 3)",
                       lambda i: (abs(i.q - i.kv) <= 12) & ((i.q - i.kv) % 3 == 0)),
    "global_window": ("global_window(4, is_global)",
                      lambda i: (abs(i.q - i.kv) <= 4) | is_global[i.q] | is_global[i.kv],
                      {"is_global": is_global}),
    "prefix_lm": ("prefix_lm(P)", lambda i: (i.kv < 20) | (i.q >= i.kv), {"P": 20}),
    "prefix_lm_batch": ("prefix_lm_batch(prefix)",
                        lambda i: (i.kv < prefix[i.b]) | (i.q >= i.kv), {"prefix": prefix}),
    "document": ("document(doc)", lambda i: doc[i.q] == doc[i.kv], {"doc": doc}),
    "document_causal": ("document_causal(doc)",
                        lambda i: (doc[i.q] == doc[i.kv]) & (i.q >= i.kv), {"doc": doc}),
    "packed_causal": ("packed_causal(doc, start)",
                      lambda i: (doc[i.q] == doc[i.kv]) & (i.q >= i.kv),
                      {"doc": doc, "start": start}),
    "shared_prefix": ("shared_prefix(doc, start, prefix)",
                      lambda i: ((doc[i.q] == doc[i.kv]) & (i.q >= i.kv))
                      | ((doc[i.kv] == shared[doc[i.q]]) & (doc[i.q] != shared[doc[i.q]])),
                      {"doc": doc, "start": start, "prefix": shared}),
    "batchify": ("batchify(10)", lambda i: (i.q // 10 == i.kv // 10) & (i.q >= i.kv)),
    "flamingo": ("flamingo(image, seen)",
                 lambda i: (i.q >= seen[image[i.kv], 0]) & (i.q < seen[image[i.kv], 1]),
                 {"image": image, "seen": seen}),
    "natten_2d": ("natten_2d(8, 8, 3, 3)", lambda i: natten(i.q, i.kv)),
    "natten_tiled": ("natten_tiled(8, 8, 3, 3, 4, 2)",
                     lambda i: natten(tiled(i.q), tiled(i.kv))),
    "natten_morton": ("natten_morton(8, 8, 3, 3)",
                      lambda i: natten(morton(i.q), morton(i.kv))),
    "sta_axis": ("sta_axis(q, kv, 64, 7)", lambda i: window(i.q, i.kv, 64, 7)),
    "sta_2d": ("sta_2d(8, 8, 2, 4, 3, 1)", lambda i: sta(i.q, i.kv, (4, 2), (3, 1), 8)),
    "sta_3d": ("sta_3d(4, 4, 4, 2, 1, 2, 1, 3, 1)",
               lambda i: sta(i.q, i.kv, (2, 4, 2), (1, 3, 1), 4)),
    "sta_3d_text": ("sta_3d_text(3, 4, 4, 1, 2, 2, 3, 1, 1)",
                    lambda i: (i.q >= 48) | (i.kv >= 48)
                    | sta(i.q, i.kv, (3, 2, 2), (3, 1, 1), 4)),
    "block_causal": ("block_causal(7)", lambda i: i.q // 7 >= i.kv // 7),
    "block_diffusion": ("block_diffusion(32, 8)", lambda i: np.where(
        i.q < 32,
        np.where(i.kv < 32, i.q // 8 == i.kv // 8, i.q // 8 > (i.kv - 32) // 8),
        (i.kv >= 32) & (i.q // 8 >= i.kv // 8))),
    "speculative_tree": ("speculative_tree(48, ancestor)",
                         lambda i: (i.kv < 48) | ancestor[i.q, np.maximum(i.kv - 48, 0)],
                         {"ancestor": ancestor}, (2, 4, 2, 16, 64, 16, 16)),
    "transfusion": ("transfusion(2, span)", lambda i: (i.q >= i.kv) | np.any(
        [(i.q >= a) & (i.q < z) & (i.kv >= a) & (i.kv < z) for a, z in span], 0),
        {"span": span}),
    "svg_spatial": ("svg_spatial(5, 9, 1.2, 10)",
                    lambda i: (i.kv < 5) | (i.q < 9) | (abs(i.q - i.kv) < 12)),
    "svg_temporal": ("svg_temporal(4, 2, 6, 10)",
                     lambda i: (i.kv < 4) | (i.q < 4)
                     | (abs((i.q - 4) % 10 - (i.kv - 4) % 10) < 3)),
    "top_tiles": ("top_tiles(tile, 8, 3)", lambda i: np.any(
        [tile[i.b, i.h, i.q // 8, n] == i.kv // 8 for n in range(3)], 0), {"tile": tile}),
}
SCORES = {
    "relative_bias": ("relative_bias()", lambda s, i, t: s + (i.q - i.kv).astype(t)),
    "alibi": ("alibi()", lambda s, i, t:
              s + np.exp2(-8 * (i.h + 1) / i.H).astype(t) * (i.kv - i.q).astype(t)),
    "softcap": ("softcap(c)", lambda s, i, t: t(1.5) * np.tanh(s / t(1.5)), {"c": 1.5}),
    "t5_bias": ("t5_bias(table, 32, 40)",
                lambda s, i, t: s + table[t5_bucket(i, 32, 40, True), i.h].astype(t),
                {"table": table}),
    "t5_causal_bias": ("t5_causal_bias(table, 32, 40)",
                       lambda s, i, t: s + table[t5_bucket(i, 32, 40, False), i.h].astype(t),
                       {"table": table}),
    "relative_table": ("relative_table(table, 20)",
                       lambda s, i, t:
                       s + by_head[i.h, np.clip(i.q - i.kv, -20, 20) + 20].astype(t),
                       {"table": by_head}),
    "relative_table_2d": ("relative_table_2d(table, 8, 8)", lambda s, i, t: s + by_head[
        i.h, (i.q // 8 - i.kv // 8 + 7) * 15 + i.q % 8 - i.kv % 8 + 7].astype(t),
        {"table": by_head}),
    "head_scale": ("head_scale(gain)", lambda s, i, t: s * gain[i.h].astype(t),
                   {"gain": gain}),
    "distance_decay": ("distance_decay(0.01)", lambda s, i, t:
                       s / (t(1) + t(0.01) * ((i.q - i.kv) ** 2).astype(t))),
    "sandwich": ("sandwich(3)", lambda s, i, t: s + (sum(
        np.cos((i.q - i.kv).astype(np.float32)
               / np.power(np.float32(1e4), np.float32((n + 1) / 3)))
        for n in range(3)) * i.H / (8.0 * (i.h + 1))).astype(t)),
    "graphormer": ("graphormer(bias, distance)",
                   lambda s, i, t: s + by_head[i.h, spatial[i.b, i.q, i.kv]].astype(t),
                   {"bias": by_head, "distance": spatial}),
}


def named_variants():
    good = True
    for line in saccade("prelude").splitlines():
        kind, name = line.split("(")[0].split()
        case = (MASKS if kind == "mask" else SCORES).get(name)
        if case is None:
            print(f"FAILED {name} is in the prelude and has no case here")
            good = False
            continue
        text, formula = case[:2]
        bind = case[2] if len(case) > 2 else {}
        shape = case[3] if len(case) > 3 else (2, 4, 2, 64, 64, 16, 16)
        for dtype in ("f32", "bf16"):
            if kind == "mask":
                good &= check(name, text, formula, bind=bind, shape=shape, dtype=dtype)
            else:
                good &= check(name, None, None, [text], formula, bind, dtype, shape)
    return good


def other_texts():
    good = check("checkerboard", "(q / 3 + kv / 5) % 2 == 0",
                 lambda i: (i.q // 3 + i.kv // 5) % 2 == 0)
    good &= check("per head and batch", "kv <= q + h || b == 1 && kv % 4 == 0",
                  lambda i: (i.kv <= i.q + i.h) | ((i.b == 1) & (i.kv % 4 == 0)))
    good &= check("xor of bits", "popcount = (q ^ kv) & 7; popcount < 4",
                  lambda i: ((i.q ^ i.kv) & 7) < 4)
    good &= check("rows without keys", "kv < q - 5", lambda i: i.kv < i.q - 5)
    good &= check("own definition", "mask band(lo, hi) = q - kv >= lo && q - kv < hi;\n"
                  "band(2, 9) || band(-9, -1)",
                  lambda i: ((i.q - i.kv >= 2) & (i.q - i.kv < 9))
                  | ((i.q - i.kv >= -9) & (i.q - i.kv < -1)))
    good &= check("chained scores", "causal()", lambda i: i.q >= i.kv,
                  ["alibi()", "softcap(2.0)", "score * gain[h]"],
                  lambda s, i, t: t(2) * np.tanh(
                      (s + np.exp2(-8 * (i.h + 1) / i.H).astype(t) * (i.kv - i.q).astype(t))
                      / t(2)) * gain[i.h].astype(t), {"gain": gain})
    good &= check("score that masks", None, None, ["kv % 3 == 1 ? -inf : sigmoid(score)"],
                  lambda s, i, t: np.where(i.kv % 3 == 1, t(-np.inf), 1 / (1 + np.exp(-s))))
    return good


def shapes_and_positions():
    causal = ("causal()", lambda i: i.q >= i.kv)
    good = True
    for dtype in ("f32", "f16", "bf16"):
        good &= check("odd sizes", *causal, dtype=dtype, shape=(1, 6, 2, 37, 131, 23, 41))
        good &= check("bnhd", *causal, dtype=dtype, layout="bnhd")
        good &= check("one query, one key", dtype=dtype, shape=(1, 1, 1, 1, 1, 1, 1))
        good &= check("large head dim", *causal, dtype=dtype, shape=(1, 2, 1, 70, 70, 256, 200))
    good &= check("decode at the end", *causal, shape=(2, 8, 2, 3, 200, 32, 32),
                  options=("--q-offset", "end"), q_offset=197)
    good &= check("offset", *causal, options=("--q-offset", 7), q_offset=7)
    good &= check("live length", "kv < 50", lambda i: i.kv < 50)
    good &= check("block size", *causal, options=("--block", "32x64"))
    for backend in ("ref", "plain"):
        good &= check("back end " + backend, *causal, options=("--backend", backend))
    return good


def live_length_equals_a_mask():
    """--kv-len per batch, against the same as a mask."""
    with tempfile.TemporaryDirectory() as folder:
        path = lambda n: os.path.join(folder, n + ".npy")
        for letter in "qkv":
            np.save(path(letter), rng.standard_normal((2, 2, 20, 8)).astype(np.float32))
        np.save(path("len"), np.array([7, 20], np.int64))
        files = ["-q", path("q"), "-k", path("k"), "-v", path("v")]
        saccade("run", *files, "-o", path("a"), "--kv-len", path("len"))
        saccade("run", *files, "-o", path("b"), "--mask", "kv < len[b]",
                "--bind", "len=" + path("len"))
        good = worst(load(path("a")), load(path("b"))) < 1e-6
    print(("ok     " if good else "FAILED ") + "live length per batch")
    return good


def file_forms():
    """Big-endian files, missing dimensions, dtype conversion."""
    good = True
    with tempfile.TemporaryDirectory() as folder:
        path = lambda n: os.path.join(folder, n + ".npy")
        x = {n: rng.standard_normal((3, 30, 8)).astype(np.float32) for n in "qkv"}
        files = sum((["-" + n, path(n)] for n in "qkv"), [])
        forms = {
            "row-major": lambda a: a,
            "big-endian": lambda a: a.astype(">f4"),
            "with a batch": lambda a: a[None],
        }
        results = {}
        for form, change in forms.items():
            for n in "qkv":
                np.save(path(n), change(x[n]))
            saccade("run", *files, "-o", path("o"))
            results[form] = np.load(path("o"))
            same = np.array_equal(results[form].reshape(x["q"].shape), results["row-major"])
            rank_is_kept = results[form].ndim == (4 if form == "with a batch" else 3)
            print(("ok     " if same and rank_is_kept else "FAILED ") + form)
            good &= same and rank_is_kept
        np.save(path("q"), x["q"].astype(np.float64))
        np.save(path("k"), x["k"].astype(np.float16))
        np.save(path("v"), x["v"])
        saccade("run", *files, "-o", path("o"), "--dtype", "f32")
        converted = np.load(path("o"))
        is_good = converted.dtype == np.float64 and worst(
            converted, results["row-major"].reshape(3, 30, 8)) < 1e-2
        print(("ok     " if is_good else "FAILED ") + "mixed dtypes converted")
        return good and is_good


def quantised_keys():
    """--kv-dtype: near what full keys give, and the nearer the more bits a code has. Rows of an
    odd number of i4 end in half a byte."""
    good = True
    for D in (16, 15):
        with tempfile.TemporaryDirectory() as folder:
            path = lambda n: os.path.join(folder, n + ".npy")
            for n in "qkv":
                np.save(path(n), rng.standard_normal((2, 60, D)).astype(np.float32))
            files = sum((["-" + n, path(n)] for n in "qkv"), [])
            saccade("run", *files, "-o", path("o"))
            full = np.load(path("o"))
            for code, most in (("i8", 0.02), ("e4m3", 0.1), ("e5m2", 0.25), ("i4", 0.4)):
                for scale in ("row", "head", "channel", "tensor"):
                    how = ["--kv-dtype", code, "--kv-scale", scale]
                    saccade("run", *files, "-o", path("c"), *how)
                    off = np.abs(np.load(path("c")) - full).max()
                    is_good = bool(0 < off < most)
                    print(f"{'ok' if is_good else 'FAILED':7}D {D} {' '.join(how)}")
                    good &= is_good
    return good


def gradients_of_slopes():
    """--grad-of what sums over a row's keys, in 16 bits beside values with a mean: the output
    that backward reads is not rounded, by back ends that need it; the file's is, as without."""
    H, N, D = 4, 192, 32
    slopes = (2.0 ** -np.arange(1, H + 1)).astype(np.float32)
    far = np.arange(N) - np.arange(N)[:, None]
    good = True
    for backend in ("cpu", "plain"):
        for dtype, layout in (("bf16", "bhnd"), ("bf16", "bnhd"), ("f16", "bnhd")):
            most = 0.05 if dtype == "bf16" else 0.01
            off, is_same = [], True
            turn = (lambda x: x.transpose(0, 2, 1, 3)) if layout == "bnhd" else (lambda x: x)
            for seed in range(4):
                own = np.random.default_rng(seed)
                x = {n: ROUND[dtype](own.standard_normal((1, H, N, D)) + mean)
                     for n, mean in (("q", 0), ("k", 0), ("v", 10), ("do", 0))}
                with tempfile.TemporaryDirectory() as folder:
                    path = lambda n: os.path.join(folder, n + ".npy")
                    for n in x:
                        save(path(n), turn(x[n]), dtype)
                    np.save(path("slope"), slopes)
                    given = ["run", "-q", path("q"), "-k", path("k"), "-v", path("v"),
                             "--layout", layout, "--mask", "causal()", "--backend", backend,
                             "--score", "score + slope[h] * (kv - q)",
                             "--bind", "slope=" + path("slope")]
                    saccade(*given, "-o", path("a"))
                    saccade(*given, "-o", path("o"), "--grad", path("do"), "--grad-of", "slope")
                    is_same &= np.array_equal(load(path("a")), load(path("o")))
                    got = load(path("o.dslope"))
                q, k, v, do = (a[0].astype(np.float64) for a in x.values())
                s = q @ k.transpose(0, 2, 1) / np.sqrt(D) + slopes[:, None, None] * far
                p = np.where(far <= 0, np.exp(s), 0)
                p /= p.sum(-1, keepdims=True)
                dp = do @ v.transpose(0, 2, 1)
                want = (p * (dp - (p * dp).sum(-1, keepdims=True)) * far).sum((1, 2))
                off.append(np.linalg.norm(got - want) / np.linalg.norm(want))
            is_good = bool(np.mean(off) < most and is_same)
            print(f"{'ok' if is_good else 'FAILED':7}slopes, {backend} {dtype} {layout}: "
                  f"{np.mean(off):.1e} of {most}{'' if is_same else ', another output'}")
            good &= is_good
    return good


if __name__ == "__main__":
    parts = [named_variants(), other_texts(), shapes_and_positions(),
             live_length_equals_a_mask(), file_forms(), quantised_keys(),
             gradients_of_slopes()]
    sys.exit(0 if all(parts) else 1)
