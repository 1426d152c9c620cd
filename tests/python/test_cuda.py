"""CUDA tensors: in place, on the current stream, in graphs; against float64 there too."""

import math
import threading

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from catalogue import masks, scores  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

B, H, HKV, N, D = 2, 4, 2, 200, 64
G = torch.Generator().manual_seed(11)
MASKS, SCORES = masks(B, H, N, N, G), scores(B, H, N, N, G)


def tensors(dtype=torch.bfloat16, H=H, HKV=HKV, Q=N, KV=N, D=D, Dv=None):
    g = torch.Generator().manual_seed(4)
    shapes = ((B, H, Q, D), (B, HKV, KV, D), (B, HKV, KV, Dv or D))
    return [torch.randn(*s, generator=g).to(dtype).cuda() for s in shapes]


def on_every_score(mod, *first):
    """The mod on all positions, on the host."""
    from torch.func import vmap

    f = mod
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
        f = vmap(f, in_dims=(0,) * len(first) + axes)
    f = vmap(f, in_dims=(0,) * len(first) + (0, None, None, None))
    return f(*first, torch.arange(B), torch.arange(H), torch.arange(N), torch.arange(N))


def dense(q, k, v, score_mod=None, mask_mod=None):
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if score_mod:
        s = on_every_score(score_mod, s.cpu()).double().cuda()
    if mask_mod:
        s = s.masked_fill(~on_every_score(mask_mod).cuda().expand_as(s), -math.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None]) @ v, lse


def close(out, want, bound=3e-2):
    assert torch.isfinite(out).all()
    assert float((out.double() - want).abs().max()) <= bound * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    q, k, v = tensors()
    mask = st.create_block_mask(MASKS[name], B, H, N, N, device="cuda")
    out, lse = st.flex_attention(q, k, v, None, mask, enable_gqa=True, return_lse=True)
    want, want_lse = dense(q, k, v, None, MASKS[name])
    close(out, want)
    assert torch.equal(lse.isinf(), want_lse.isinf())


@pytest.mark.parametrize("name", SCORES)
def test_score(name):
    q, k, v = tensors()
    out = st.flex_attention(q, k, v, SCORES[name], enable_gqa=True)
    close(out, dense(q, k, v, SCORES[name])[0])


@pytest.mark.parametrize("D, Dv", [(32, 32), (64, 128), (72, 40), (128, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dims(D, Dv, dtype):
    q, k, v = tensors(dtype, D=D, Dv=Dv)
    out = st.flex_attention(q, k, v, None, "q >= kv", enable_gqa=True)
    want, _ = dense(q, k, v, None, lambda b, h, i, j: i >= j)
    close(out, want)


@pytest.mark.parametrize("Q", [1, 7])
def test_decode(Q):
    q, k, v = tensors(H=8, HKV=2, Q=Q, KV=1000)
    out = st.flex_attention(q, k, v, "score + 0.01 * (kv - q)", enable_gqa=True)
    k2, v2 = (t.repeat_interleave(4, 1).double() for t in (k, v))
    s = q.double() @ k2.mT / 8 + 0.01 * (
        torch.arange(1000, device="cuda") - torch.arange(Q, device="cuda")[:, None]
    )
    close(out, torch.softmax(s, -1) @ v2)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("Q", [1, 300])
def test_lists_without_a_mod(Q, D):
    """Blocks chosen by hand, other ones for each head of a group."""
    q, k, v = tensors(H=8, HKV=2, Q=Q, KV=600, D=D)
    g = torch.Generator().manual_seed(Q + D)
    chosen = torch.rand(B, 8, -(-Q // 128), 5, generator=g) < 0.6
    num = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(~chosen, dim=-1, stable=True).to(torch.int32)
    mask = st.BlockMask.from_kv_blocks(num.cuda(), order.cuda(), seq_lengths=(Q, 600))
    out = st.flex_attention(q, k, v, None, mask, enable_gqa=True)
    live = chosen.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :Q, :600].cuda()
    k2, v2 = (t.repeat_interleave(4, 1).double() for t in (k, v))
    s = (q.double() @ k2.mT / math.sqrt(D)).masked_fill(~live, -math.inf)
    close(out, torch.softmax(s, -1).nan_to_num(0) @ v2)


def test_stream_and_graph():
    q, k, v = tensors()
    mask = st.create_block_mask("q >= kv", None, None, N, N, device="cuda")
    want = st.flex_attention(q, k, v, None, mask, enable_gqa=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            out = st.flex_attention(q, k, v, None, mask, enable_gqa=True)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = st.flex_attention(q, k, v, None, mask, enable_gqa=True)
    q.mul_(0.5)
    graph.replay()
    assert torch.equal(out, st.flex_attention(q, k, v, None, mask, enable_gqa=True))


def test_a_kept_workspace_serves_one_call_at_a_time():
    """Warm calls of one layout: by threads, on two streams, beside a captured graph."""
    q, k, v = tensors()
    call = lambda: st.flex_attention(q, k, v, enable_gqa=True)  # noqa: E731
    want = [call() for _ in range(3)][-1]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    seen = []

    def work():
        seen.extend(call() for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for _ in range(3):
        captured.zero_()
        graph.replay()
        with torch.cuda.stream(side):
            seen.append(call())
    torch.cuda.synchronize()
    assert len(seen) == 63 and all(torch.equal(out, want) for out in [captured, *seen])


def test_graph_reads_captures_anew():
    """A captured graph runs the mod on what its captures hold at each replay."""
    q, k, v = tensors()
    bias = torch.zeros(H, device="cuda")
    mod = lambda s, b, h, i, j: s + bias[h] * (j - i)  # noqa: E731
    st.flex_attention(q, k, v, mod, enable_gqa=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = st.flex_attention(q, k, v, mod, enable_gqa=True)
    for x in (0.0, 0.5):
        bias.fill_(x)
        graph.replay()
        assert torch.equal(out, st.flex_attention(q, k, v, mod, enable_gqa=True))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    """Language text in one graph, by CUDA graphs of torch's own too."""
    pytest.importorskip("triton")
    q, k, v = tensors()
    mask = st.create_block_mask("q >= kv", None, None, N, N, device="cuda")
    mod = st.score("score + slope[h] * (kv - q)", slope=torch.rand(H, device="cuda"))

    def f(q, k, v):
        out = st.flex_attention(q * 0.5, k, v, mod, mask, enable_gqa=True)
        return out + 1

    g = torch.compile(f, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(g(q, k, v), f(q, k, v))
            q = q + 0.25


def test_operator():
    import saccade.torch.compiled  # noqa: F401

    q, k, v = tensors()
    slope = torch.rand(H, device="cuda")
    mods = ([slope], [2.0], "slope w:float |", "score + slope[h] * w", "", 0, [], [])
    arguments = (q, k, v, *mods, None, "auto", 0.0, None, True, True, True)
    torch.library.opcheck(torch.ops.saccade.flex.default, arguments)


def test_threads_on_their_streams():
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = tensors()
    biases = [torch.rand(H, device="cuda") for _ in range(4)]
    call = lambda n: st.flex_attention(  # noqa: E731
        q, k, v, lambda s, b, h, i, j: s + biases[n][h] * (j - i), "q >= kv", enable_gqa=True
    )
    wants = [call(n) for n in range(4)]
    torch.cuda.synchronize()

    def work(n):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            out = call(n % 4)
        stream.synchronize()
        return torch.equal(out, wants[n % 4])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_tensors_elsewhere_than_the_current_device():
    mask = st.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device="cuda:0")
    for used in (1, 0):
        q, k, v = (t.to(f"cuda:{used}") for t in tensors())
        wants = []
        for current in (used, 1 - used):
            with torch.cuda.device(current):
                for m in (mask, "q >= kv"):
                    wants.append(st.flex_attention(q, k, v, None, m, enable_gqa=True))
        assert all(w.device == q.device and torch.equal(w, wants[0]) for w in wants)
        want, _ = dense(*tensors(), None, lambda b, h, i, j: i >= j)
        close(wants[0].cuda(), want)


def test_functions_made_anew():
    """Other tensors and numbers in the closure of one code, on the device and on the host."""
    q, k, v = tensors()
    text = "score + t[h] * (kv - q) * n + x"
    for n in (1, 2.5, 2, -3, 0.5):
        for x in (torch.tensor(0.5), torch.tensor(2.0, device="cuda"), torch.tensor(3)):
            for t in (
                torch.rand(H, device="cuda"),
                torch.rand(H),
                torch.rand(H).cuda()[:, None],
            ):
                if t.dim() == 2:
                    t = t[:, 0]
                mod = lambda s, b, h, i, j: s + t[h] * (j - i) * n + x  # noqa: E731, B023
                got = st.flex_attention(q, k, v, mod, enable_gqa=True)
                want = st.score(text, t=t, n=n, x=x)
                assert torch.equal(got, st.flex_attention(q, k, v, want, enable_gqa=True))


def test_device_memory_does_not_grow():
    q, k, v = tensors()

    def some(n):
        for _ in range(n):
            new = torch.rand(H, device="cuda")
            st.flex_attention(q, k, v, lambda s, b, h, i, j: s + new[h], enable_gqa=True)
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    free = some(1500)
    assert free - some(5000) < 8 << 20


@pytest.mark.parametrize("name", SCORES)
def test_f32(name):
    q, k, v = tensors(torch.float32)
    out = st.flex_attention(q, k, v, SCORES[name], enable_gqa=True)
    close(out, dense(q, k, v, SCORES[name])[0], 1e-5)


def test_devices_must_agree():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="same device type"):
        st.flex_attention(q, k.cpu(), v, enable_gqa=True)
    with pytest.raises(RuntimeError, match="block_mask is on cpu"):
        st.flex_attention(
            q,
            k,
            v,
            None,
            st.create_block_mask("q >= kv", None, None, N, N, device="cpu"),
            enable_gqa=True,
        )


@pytest.mark.parametrize("rows", [1, 5])
def test_cached_attention_with_lengths_on_the_device(rows):
    q, k, v = tensors(Q=rows)
    lengths = torch.tensor([200, 77], dtype=torch.int32, device="cuda")
    out = st.cached_attention(q, k, v, seq_lens=lengths)
    for b, n in enumerate(lengths.tolist()):
        def live(_, h, i, j, n=n):
            return (i + n - rows >= j) & (j < n)

        close(out[b], dense_of(q[b : b + 1], k[b : b + 1], v[b : b + 1], live)[0])


def dense_of(q, k, v, live):
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q.double() @ k.mT / math.sqrt(q.shape[-1])
    i, j = (torch.arange(n, device="cuda") for n in s.shape[-2:])
    s = s.masked_fill(~live(0, 0, i[:, None], j[None]), -math.inf)
    return torch.softmax(s, -1) @ v


def test_runs_behind_kernels_that_write_their_inputs():
    """A run may be placed while the kernel before it runs, and still sees all that it wrote."""
    B, steps = 3, 64
    q, k, v = tensors(H=8, HKV=2, Q=1, KV=N)
    q, k, v = (t[:1].repeat(B, 1, 1, 1) for t in (q, k, v))

    def walk(waits):
        lengths = torch.full((B,), 1, dtype=torch.int32, device="cuda")
        x, outs = q.clone(), []
        for _ in range(steps):
            lengths.add_(1)
            x = x.roll(1, 3).mul_(1.01)
            if waits:
                torch.cuda.synchronize()
            outs.append(st.cached_attention(x, k, v, seq_lens=lengths))
            x = x + outs[-1]
        return torch.stack(outs)

    assert torch.equal(walk(True), walk(False))


def test_cached_attention_in_a_graph_sees_new_lengths():
    q, k, v = tensors(Q=1)
    lengths = torch.tensor([3, 9], dtype=torch.int32, device="cuda")
    slope = torch.rand(H, device="cuda")
    score = st.score("score + slope[h] * (kv - q)", slope=slope)

    def step():
        return st.cached_attention(q, k, v, "sliding_window(64)", score, seq_lens=lengths)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for new in ([3, 9], [200, 1], [65, 130]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(out, step())


CAPTURED = {
    "a number of each head": (
        "score * t[h]",
        lambda s, i, j, t: s * t.view(-1, 1, 1),
        [(H,)],
    ),
    "diagonals": (
        "score + t[h, q - kv + 200]",
        lambda s, i, j, t: s + t[:, i - j + 200],
        [(H, 2 * N)],
    ),
    "pairs": ("score + t[h, q, kv]", lambda s, i, j, t: s + t, [(H, N, N)]),
    "rows and columns": (
        "score * t[q] + u[kv]",
        lambda s, i, j, t, u: s * t[:, None] + u,
        [(N,), (N,)],
    ),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_captures(name):
    """Against autograd of dense float64, and the same bits twice."""
    text, score, shapes = CAPTURED[name]
    g = torch.Generator().manual_seed(7)
    captured = [torch.randn(*s, generator=g).cuda() for s in shapes]
    leaves = [t.requires_grad_() for t in tensors() + captured]
    d_out = torch.randn(leaves[0].shape, generator=g).to(leaves[0].dtype).cuda()

    def run():
        mod = st.score(text, **dict(zip("tu", captured)))
        out = st.flex_attention(*leaves[:3], mod, "causal()", enable_gqa=True)
        return torch.autograd.grad(out, leaves, d_out)

    exact = [t.detach().double().requires_grad_() for t in leaves]
    q, k, v = exact[:3]
    k, v = (t.repeat_interleave(H // HKV, 1) for t in (k, v))
    i = torch.arange(N, device="cuda")[:, None]
    s = score(q @ k.mT / math.sqrt(D), i, i.T, *exact[3:])
    out = torch.softmax(s.masked_fill(i < i.T, -math.inf), -1) @ v
    want = torch.autograd.grad(out, exact, d_out.double())
    made = run()
    for a, b, again in zip(made, want, run()):
        assert float((a.double() - b).norm()) <= 2e-2 * float(b.norm())
        assert torch.equal(a, again)


ROUNDED = {  # shapes, from batch, heads, queries, keys
    "score + t[h, q, kv]": (H, N, N),
    "score + t[h % 2, q, kv]": (2, N, N),
    "score + t[q - kv + 199]": (2 * N - 1,),
    "score + t[b, h, q, kv / 8]": (B, H, N, N // 8),
    "score * t[h]": (H,),
}


@pytest.mark.parametrize("text", ROUNDED)
def test_gradients_of_captures_are_rounded_once(text):
    g = torch.Generator().manual_seed(3)
    t = torch.randn(ROUNDED[text], generator=g).bfloat16().cuda().requires_grad_()
    wide = t.detach().float().requires_grad_()
    x, d_out = tensors(), torch.randn(B, H, N, D, generator=g).bfloat16().cuda()

    def gradient(t):
        mod = st.score(text, t=t)
        out = st.flex_attention(*(a.requires_grad_() for a in x), mod, enable_gqa=True)
        return torch.autograd.grad(out, [*x, t], d_out)[3]

    want = gradient(wide)
    bound = want.abs() / 256 + want.abs().max() / 4096  # forward's offsets may differ
    for _ in range(3):  # the third is a warm call
        assert ((gradient(t) - want).abs() <= bound).all()


@pytest.mark.parametrize("mask", [None, "causal()"])
@pytest.mark.parametrize("KV", [64, 320, 328])
def test_gradients_of_many_short_sequences(KV, mask):
    """Runs of few keys have kernels of their own, whose plan is another."""
    g = torch.Generator().manual_seed(5)
    x = [torch.randn(96, 3, KV, 32, generator=g).bfloat16().cuda() for _ in range(4)]
    *leaves, d_out = [t.requires_grad_() for t in x]
    out = st.flex_attention(*leaves, None, mask)
    made = torch.autograd.grad(out, leaves, d_out)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    s = exact[0] @ exact[1].mT / math.sqrt(32)
    if mask:
        s = s.masked_fill(torch.ones(KV, KV, device="cuda").triu(1).bool(), -math.inf)
    want = torch.autograd.grad(torch.softmax(s, -1) @ exact[2], exact, d_out.double())
    for a, b in zip(made, want):
        assert float((a.double() - b).norm()) <= 2e-2 * float(b.norm())


def test_bias_of_a_row_follows_lse():
    """Softmax does not see it, so its gradient is what lse's is, and 0 without."""
    q, k, v = tensors()
    t = torch.randn(H, N, device="cuda", requires_grad=True)
    score = st.score("score + t[h, q]", t=t)
    out, lse = st.flex_attention(q, k, v, score, enable_gqa=True, return_lse=True)
    w = torch.randn_like(lse)
    (g,) = torch.autograd.grad((lse * w).sum() + out.float().sum(), t)
    assert torch.allclose(g, w.sum(0), rtol=0.02, atol=0.05)
    out = st.flex_attention(q, k, v, score, enable_gqa=True)
    (g,) = torch.autograd.grad(out.float().pow(2).sum(), t)
    assert g.abs().max() < 0.05


@pytest.mark.parametrize(
    "dtype,d",
    [(torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 192), (torch.float32, 64),
     (torch.bfloat16, 61)],
)  # fmt: skip
@pytest.mark.parametrize("text", ["kv <= q", "(q * 7 + kv) % 3 != 0"])
def test_full_blocks_of_lists_hide_nothing(dtype, d, text):
    """Forward and all gradients, where the keys end in a full block; as on the CPU."""
    n = 300  # two blocks of 128 and a part of one
    none = torch.zeros(1, 1, 3, dtype=torch.int32)
    columns = torch.tensor([[0, 1, 2], [1, 2, 0], [0, 2, 1]], dtype=torch.int32)[None, None]
    full = torch.tensor([[[3, 2, 2]]], dtype=torch.int32)
    made = st.BlockMask.from_kv_blocks(
        none, torch.zeros_like(columns), full, columns, 128, st.mask(text), (n, n)
    )
    results = []
    for device in ("cpu", "cuda"):
        g = torch.Generator().manual_seed(9)
        q, k, v, w = (torch.randn(2, h, n, d, generator=g) for h in (4, 2, 2, 4))
        bias = torch.randn(4, n, n, generator=g).to(device).requires_grad_()
        leaves = [t.to(device, dtype).requires_grad_() for t in (q, k, v)]
        score = st.score("score + bias[h, q, kv]", bias=bias)
        out = st.flex_attention(*leaves, score, made.to(device), enable_gqa=True)
        found = torch.autograd.grad((out.float() * w.to(device)).sum(), [*leaves, bias])
        results.append([out.detach(), *found])
    for a, b in zip(*results):
        scale = a.float().abs().max()
        assert (a.float() - b.float().cpu()).abs().max() < 0.02 * scale
