"""Time per token of a decoder of Llama 3.1 8B's shape with random weights, bf16, on a GPU.

usage: python bench/serving_8b.py [--layers 32] [--cases 1x8192,8x32768] [--ways WAY,WAY]
                                  [--replays 10]

One CUDA graph is one token of a batch: embedding, all layers (RMSNorm, products by cuBLAS,
rotary positions, append to a static cache of L tokens, attention over all L, SwiGLU), logits,
argmax. Printed for each batch and length: milliseconds a token, median of replays, and
attention's share: the time of the graph less that of the same graph without attention, over the
former.
Ways: repeat: keys and values repeated for each head, SDPA with a dense mask over the static
cache (gpt-fast's lines); sdpa: SDPA with enable_gqa over the live slice, whose length is then
fixed in the graph; flex: compiled FlexAttention with a block mask for the token; saccade: the
length lies on the GPU; e4m3: the same over a cache of e4m3 codes with a scale for each head.
Caches and weights of all layers are separate, as in a real model.
"""
import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import saccade.torch as st  # noqa: E402

WIDTH, HEADS, KV_HEADS, D, HIDDEN, VOCAB = 4096, 32, 8, 128, 14336, 128256
DEFAULT = "1x2048,1x8192,1x32768,1x131072,8x2048,8x8192,8x32768,32x2048,32x8192,32x16384"


def normal(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)


class Layer:
    def __init__(self):
        self.norm = torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda")
        self.qkv = normal((HEADS + 2 * KV_HEADS) * D, WIDTH)
        self.out = normal(WIDTH, HEADS * D)
        self.gate_up = normal(2 * HIDDEN, WIDTH)
        self.down = normal(WIDTH, HIDDEN)


def rotated(x, cosine, sine):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cosine + turned * sine


def append(cache, at, x):
    """Rows of x into the cache, in its dtype; fp8 (scales are 1 here) as the bytes it is."""
    if cache.dtype is torch.float8_e4m3fn:
        cache, x = cache.view(torch.uint8), x.to(cache.dtype).view(torch.uint8)
    cache.index_copy_(2, at, x)


class Step:
    """One token of B sequences whose cache is full but for it."""

    def __init__(self, layers, embedding, head, B, L, attend):
        self.layers, self.embedding, self.head, self.attend = layers, embedding, head, attend
        self.L, self.B = L, B
        self.at = torch.full((1,), L - 1, dtype=torch.int64, device="cuda")
        self.token = torch.zeros(B, dtype=torch.int64, device="cuda")
        power = torch.arange(0, D, 2, device="cuda") / D
        self.frequency = (500000.0 ** -power).repeat(2)
        self.rows = torch.full((B,), L - 1, dtype=torch.int32, device="cuda")
        self.lengths = self.rows + 1
        self.scales = torch.ones(1, KV_HEADS, 1, 1, device="cuda")

    def __call__(self, caches):
        x = self.embedding[self.token]
        angle = self.at * self.frequency
        self.rows = self.at.int().expand(self.B).contiguous()  # for all layers
        self.lengths = self.rows + 1
        cosine, sine = angle.cos().bfloat16(), angle.sin().bfloat16()
        for layer, (keys, values) in zip(self.layers, caches):
            y = F.rms_norm(x, (WIDTH,), layer.norm)
            qkv = F.linear(y, layer.qkv).view(self.B, HEADS + 2 * KV_HEADS, 1, D)
            q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
            append(keys, self.at, rotated(k, cosine, sine))
            append(values, self.at, v)
            o = self.attend(self, rotated(q, cosine, sine), keys, values)
            x = x + F.linear(o.reshape(self.B, HEADS * D), layer.out)
            y = F.rms_norm(x, (WIDTH,), layer.norm)
            gate, up = F.linear(y, layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        self.token.copy_(F.linear(x, self.head).argmax(-1))


def none(step, q, k, v):
    return q


def repeat(step, q, k, v):
    live = torch.arange(step.L, device="cuda") <= step.at
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, live[None, None, None])


def sdpa(step, q, k, v):
    k, v = k[:, :, : step.L], v[:, :, : step.L]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


_flex = {}


def flex(step, q, k, v):
    from torch.nn.attention import flex_attention as theirs

    if step not in _flex:
        at = step.at

        def live(b, h, q_idx, kv_idx):
            return q_idx + at[0] >= kv_idx

        mask = theirs.create_block_mask(live, None, None, 1, step.L, device="cuda")
        _flex[step] = mask, torch.compile(theirs.flex_attention, dynamic=False)
    mask, run = _flex[step]
    return run(q, k, v, block_mask=mask, enable_gqa=True)


def saccade(step, q, k, v):
    return st.cached_attention(q, k, v, seq_lens=step.lengths, q_offset=step.rows)


def e4m3(step, q, k, v):
    return st.cached_attention(q, k, v, seq_lens=step.lengths, q_offset=step.rows,
                               k_scale=step.scales, v_scale=step.scales)


WAYS = {"repeat": repeat, "sdpa": sdpa, "flex": flex, "saccade": saccade, "e4m3": e4m3}


def recorded(step, caches):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(caches)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(caches)
    return graph


def milliseconds(graph, replays):
    graph.replay()
    found = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def cache_of(way, caches):
    """The caches that a way reads: e4m3 codes of the bf16 ones, or these themselves."""
    if way != "e4m3":
        return caches
    return [[x.to(torch.float8_e4m3fn) for x in layer] for layer in caches]


def checked(steps, caches):
    """Each way's attention of one layer beside SDPA's in f32: largest difference."""
    k, v = caches[0]
    B = k.shape[0]
    q = torch.randn(B, HEADS, 1, D, dtype=torch.bfloat16, device="cuda")
    want = F.scaled_dot_product_attention(q[:1].float(), k[:1].float(), v[:1].float(),
                                          enable_gqa=True)
    return {way: (step.attend(step, q, *cache_of(way, caches[:1])[0])[:1].float()
                  - want).abs().max().item() for way, step in steps.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cases", default=DEFAULT)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--replays", type=int, default=10)
    o = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to measure")
        return
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    layers = [Layer() for _ in range(o.layers)]
    embedding, head = normal(VOCAB, WIDTH), normal(VOCAB, WIDTH)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {o.layers} layers, "
          f"h{HEADS}/{KV_HEADS} d{D} bf16, one CUDA graph a token")
    print(f"{'B':>3} {'L':>7} {'way':>8} {'ms/token':>9} {'attention':>9} {'KV GB/s':>8} "
          f"{'error':>8}", flush=True)
    for case in o.cases.split(","):
        B, L = map(int, case.split("x"))
        begin = time.perf_counter()
        caches = [[normal(B, KV_HEADS, L, D).mul_(50) for _ in range(2)] for _ in layers]
        parts = layers, embedding, head, B, L
        steps = {way: Step(*parts, WAYS[way]) for way in o.ways.split(",")}
        base = milliseconds(recorded(Step(*parts, none), caches), o.replays)
        errors = checked(steps, caches)
        print(f"{B:3d} {L:7d} {'none':>8} {base:9.3f}")
        for way, step in steps.items():
            read = cache_of(way, caches)
            ms = milliseconds(recorded(step, read), o.replays)
            gigabytes = 1e-9 * read[0][0].element_size() * 2 * o.layers * B * KV_HEADS * L * D
            speed = gigabytes / (ms - base) * 1e3 if ms > base else float("nan")
            print(f"{B:3d} {L:7d} {way:>8} {ms:9.3f} {100 * (1 - base / ms):8.1f}% "
                  f"{speed:8.0f} {errors[way]:8.1e}", flush=True)
        del caches, steps, read
        _flex.clear()
        torch.cuda.empty_cache()
        print(f"    ({time.perf_counter() - begin:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
