"""The caller's own mod and shapes against SDPA and FlexAttention, in one run."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import time
from typing import Any

import torch

from .checks import count_of, device_of
from .dense_masks import create_mask
from .flex import flex_attention
from .masks import create_block_mask


def _clock(device):
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def timed(f):
            start.record()
            f()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1e3

        return timed

    def timed(f):
        begin = time.perf_counter()
        f()
        return time.perf_counter() - begin

    return timed


def _contenders(q, k, v, score_mod, mask_mod, compile_flex):
    B, H, Q, KV = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    block = create_block_mask(mask_mod, B, H, Q, KV, device=q.device) if mask_mod else None
    made = {"saccade": lambda: flex_attention(q, k, v, score_mod, block, enable_gqa=True)}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if score_mod is None:
        dense = create_mask(mask_mod, B, H, Q, KV, device=q.device) if mask_mod else None
        made["sdpa"] = lambda: sdpa(q, k, v, attn_mask=dense, enable_gqa=H != k.shape[1])
    if compile_flex and not isinstance(score_mod, str) and not isinstance(mask_mod, str):
        from torch.nn.attention import flex_attention as theirs

        flex = torch.compile(theirs.flex_attention)
        m = (
            theirs.create_block_mask(mask_mod, B, H, Q, KV, device=q.device)
            if mask_mod
            else None
        )
        made["flex"] = lambda: flex(q, k, v, score_mod, m, enable_gqa=H != k.shape[1])
    return made, block


def _live_share(mask_mod, B, H, Q, KV, block):
    """Live positions over all; of long masks, live blocks over all."""
    if B * H * Q * KV > 1 << 27:
        return 1 - block.sparsity() / 100
    return float(create_mask(mask_mod, B, H, Q, KV, device="cpu").float().mean())


def benchmark(
    score_mod: Any = None,
    mask_mod: Any = None,
    *,
    B: int = 1,
    H: int = 8,
    Hkv: int | None = None,
    Q: int = 2048,
    KV: int | None = None,
    D: int = 64,
    Dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    repeats: int = 7,
    compile_flex: bool = True,
    backward: bool = False,
    plot: str | None = None,
) -> list[dict[str, Any]]:
    """Times the caller's mod beside SDPA (where it can) and compiled FlexAttention.

    Random data, one warm-up, then `repeats` shuffled rounds; medians. Returns a list of dicts
    with name, seconds, first_seconds (the first call: tracing and compiling), live_tflops (2
    (D + Dv) per live score) and ratio (seconds over saccade's). backward: gradients of query,
    key and value too, as backward_seconds, backward_tflops (2 (3 D + 2 Dv) per live score) and
    backward_ratio, None for what has none (FlexAttention on the CPU). plot: a file name, needs
    matplotlib.
    """
    Hkv, KV, Dv = Hkv or H, KV or Q, Dv or D
    device, repeats = device_of(device), count_of("repeats", repeats, 1)
    q, k, v = (
        torch.randn(B, h, n, d, device=device).to(dtype)
        for h, n, d in ((H, Q, D), (Hkv, KV, D), (Hkv, KV, Dv))
    )
    made, block = _contenders(q, k, v, score_mod, mask_mod, compile_flex)
    timed, first = _clock(device), {}
    times: dict[str, list[float]] = {name: [] for name in made}
    with torch.no_grad():
        for name, f in made.items():
            first[name] = timed(f)
        for r in range(repeats):
            order = list(made) if r % 2 == 0 else list(made)[::-1]
            for name in order:
                times[name].append(timed(made[name]))
    passes = _backward_times(made, (q, k, v), timed, repeats) if backward else {}
    live = B * H * Q * KV * (_live_share(mask_mod, B, H, Q, KV, block) if block else 1)
    base = statistics.median(times["saccade"])
    rows = [
        {
            "name": name,
            "seconds": statistics.median(t),
            "first_seconds": first[name],
            "live_tflops": 2 * (D + Dv) * live / statistics.median(t) / 1e12,
            "ratio": statistics.median(t) / base,
        }
        for name, t in times.items()
    ]
    for row in rows if backward else ():
        t = passes.get(row["name"])
        row["backward_seconds"] = t
        row["backward_tflops"] = t and 2 * (3 * D + 2 * Dv) * live / t / 1e12
        row["backward_ratio"] = t and t / passes["saccade"]
    if plot:
        problem = f"B{B} H{H}/{Hkv} Q{Q} KV{KV} D{D} {str(dtype)[6:]}"
        when = datetime.date.today().isoformat()
        _plot(rows, plot, f"Attention forward, {problem}\n{_machine(device)}, {when}")
    return rows


def _backward_times(made, inputs, timed, repeats):
    """Medians, of a backward pass alone, by name."""
    times: dict[str, list[float]] = {}
    for t in inputs:
        t.requires_grad_()
    d_out = torch.randn_like(inputs[0][..., :1]).expand(
        *inputs[0].shape[:3], inputs[2].shape[3]
    )
    d_out = d_out.contiguous()
    runs = [n for n in made if n != "flex" or inputs[0].is_cuda]  # on the CPU it has none
    for r in range(repeats + 1):
        for name in runs if r % 2 == 0 else runs[::-1]:
            out = made[name]()
            t = timed(lambda out=out: torch.autograd.grad(out, inputs, d_out))
            if r:  # the first warms up
                times.setdefault(name, []).append(t)
    return {name: statistics.median(t) for name, t in times.items()}


def _plot(rows, path, title):
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as reason:
        raise ImportError(
            "saccade: plot needs matplotlib (pip install './python[plot]')"
        ) from reason
    # a figure of its own: the caller's backend and figures stay as they are
    figure = Figure(figsize=(6, 1.3 + 0.6 * len(rows)))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [r["name"] for r in rows]
    bars = axes.barh(names, [1e3 * r["seconds"] for r in rows], color="#2b6cb0")
    axes.bar_label(
        bars, [f"{1e3 * r['seconds']:.3g} ms  x{r['ratio']:.2f}" for r in rows], padding=4
    )
    axes.set(
        xlabel="milliseconds (median), shorter is better",
        title=title,
        xlim=(0, 1.3e3 * max(r["seconds"] for r in rows) or math.inf),
    )
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


def _machine(device):
    """The processor that ran, by its name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    except OSError:
        names = []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"
