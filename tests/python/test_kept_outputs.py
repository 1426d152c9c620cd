"""Training runs in 16 bits whose captures' gradients add keys up keep their output in f32:
errors beside float64 and PyTorch's eager code where V has a mean, and what is saved."""

import math

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from saccade.torch.compiled import masks as compiled_masks  # noqa: E402

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
DTYPES = [torch.bfloat16, torch.float16]
H, N, D, MEAN, NEAR = 4, 256, 64, 10, 32


def slopes(t):
    return lambda s, b, h, i, j: s + t[h] * (j - i)


def distances(t):
    return lambda s, b, h, i, j: s + t[h, (i - j).clamp(0, NEAR - 1)]


def buckets(t):  # of T5: each distance at first, then some by their logarithm
    def score(s, b, h, i, j):
        far = 8 + torch.log((i - j).clamp(min=8) / 8) * (8 / math.log(16))
        return s + t[torch.where(i - j < 8, (i - j).clamp(min=0), far.to(torch.int32)), h]

    return score


SCORES = {
    "slopes": (slopes, lambda g: 2.0 ** -torch.arange(1.0, H + 1)),
    "distances": (distances, lambda g: torch.randn(H, NEAR, generator=g) / 2),
    "buckets": (buckets, lambda g: torch.randn(32, H, generator=g) / 2),
}


def inputs(device="cpu", dtype=torch.bfloat16):
    """q, k, v and the gradient of out."""
    g = torch.Generator().manual_seed(3)
    q, k, v, d = (torch.randn(1, H, N, D, generator=g) for _ in range(4))
    return [t.to(device, dtype) for t in (q, k, v + MEAN, d)]


def capture(name):
    return SCORES[name][1](torch.Generator().manual_seed(1))


def by_plain_steps(name, tensors, t, sinks=None):
    """The gradient of t in the dtype of the tensors."""
    q, k, v, d = tensors
    t = t.to(q.device, q.dtype).requires_grad_()
    i, j = torch.arange(N, device=q.device).view(-1, 1), torch.arange(N, device=q.device)
    h = torch.arange(H, device=q.device).view(-1, 1, 1)
    s = SCORES[name][0](t)(q @ k.mT / D**0.5, 0, h, i, j).masked_fill(j > i, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s).view(1, H, 1, 1).expand(1, H, N, 1)], 3)
    (torch.softmax(s.to(q.dtype), 3)[..., :N] @ v).backward(d)
    return t.grad.double()


def error(got, gold):
    return float((got.double() - gold).norm() / gold.norm())


def check(name, tensors, t, got, sinks=None):
    gold = by_plain_steps(name, [x.double() for x in tensors], t, sinks)
    eager = error(by_plain_steps(name, tensors, t, sinks), gold)
    assert error(got, gold) <= max(2 * eager, 0.01), (error(got, gold), eager)


def train(name, attention, tensors, **options):
    """(out, the gradient of what the score captures) of the second call of a layout, and dtypes
    of what is saved of out's shape."""
    q, k, v, d = tensors
    t = capture(name).to(q.device)
    mask = st.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device=q.device)
    for _ in range(3):
        learned = t.clone().requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.append(x) or x, lambda x: x
        ):
            made = attention(q, k, v, SCORES[name][0](learned), mask, **options)
        out = made[0] if isinstance(made, tuple) else made
        assert out.dtype is q.dtype
        out.backward(d)
    return out, learned.grad, [x.dtype for x in saved if x.dtype is torch.float32]


WAYS = {
    "alone": {},
    "lse": {"return_lse": True},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("way", WAYS)
def test_beside_eager(way, name, dtype, device):
    tensors, options = inputs(device, dtype), dict(WAYS[way])
    sinks = torch.linspace(-1, 1, H, device=device) if "sinks" in options else None
    if sinks is not None:
        options["sinks"] = sinks
    out, got, _ = train(name, st.flex_attention, tensors, **options)
    check(name, tensors, capture(name), got, sinks)
    with torch.no_grad():
        mask = st.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device=device)
        score = SCORES[name][0](capture(name).to(device))
        same = st.flex_attention(*tensors[:3], score, mask, sinks=sinks)
    torch.testing.assert_close(out, same, rtol=2**-7, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_that_lie_row_by_row(device):
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(device)]
    out, got, _ = train("slopes", st.flex_attention, tensors)
    check("slopes", tensors, capture("slopes"), got)
    assert out.stride() == tensors[0].stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SCORES)
def test_compiled(name, device):
    if not compiled_masks.graphs_take_callables:
        pytest.skip("torch of old graphs")
    tensors = inputs(device)
    attention = torch.compile(st.flex_attention, fullgraph=True, backend="aot_eager")
    _, got, _ = train(name, attention, tensors)
    check(name, tensors, capture(name), got)
    assert torch.equal(got, train(name, st.flex_attention, tensors)[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pages", [False, True])
def test_sequences(pages, device):
    """Two of unequal lengths, whose gradients add up; keys in one piece and in pages of 32."""
    tensors, lengths, t = inputs(device), [N, 96], capture("slopes").to(device)
    gold = eager = 0
    for n in lengths:
        cut = [x[:, :, :n] for x in tensors]
        wide = [torch.cat([x, x.new_zeros(1, H, N - n, D)], 2) for x in cut]
        gold = gold + by_plain_steps("slopes", [x.double() for x in wide], t)
        eager = eager + by_plain_steps("slopes", wide, t)
    q, k, v, d = (torch.cat([x[0, :, :n].transpose(0, 1) for n in lengths]) for x in tensors)
    starts = torch.tensor([0, N, N + 96], dtype=torch.int32, device=device)
    given = {"cu_seqlens_k": starts, "max_seqlen_k": N}
    if pages:
        k, v = (x.view(-1, 32, H, D).transpose(1, 2) for x in (k, v))
        table = torch.tensor([[*range(8)], [8, 9, 10, *[0] * 5]], dtype=torch.int32)
        lengths_there = torch.tensor(lengths, dtype=torch.int32, device=device)
        given = {"block_table": table.to(device), "seq_lens": lengths_there}
    learned = t.clone().requires_grad_()
    score = st.score("score + slope[h] * (kv - q)", slope=learned)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = st.varlen_attention(
            q, k, v, cu_seqlens_q=starts, max_seqlen_q=N, score=score, **given
        )
    assert out.dtype is torch.bfloat16
    assert sum(x.shape == out.shape and x.dtype is torch.float32 for x in saved) == 1
    out.backward(d)
    assert error(learned.grad, gold) <= max(2 * error(eager, gold), 0.01)


def outputs_kept(score, q_grad=False, dtype=torch.bfloat16):
    """Whether what is saved of out's shape is f32."""
    q, k, v, _ = inputs(dtype=dtype)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = st.flex_attention(q.requires_grad_(q_grad), k, v, score)
    assert out.dtype is dtype and out.requires_grad
    return any(x.dtype is torch.float32 for x in saved if x.shape == q.shape)


def test_what_is_kept():
    """In f32 only where gradients that are wanted add keys up."""
    slope, pair = capture("slopes"), torch.randn(N, N)
    bias = lambda t: lambda s, b, h, i, j: s + t[i, j]  # noqa: E731
    both = lambda s, b, h, i, j: s + slope[h] * (j - i) + pair[i, j]  # noqa: E731
    assert not outputs_kept(slopes(slope), q_grad=True)
    assert not outputs_kept(bias(pair.requires_grad_()))
    assert not outputs_kept(both)
    slope.requires_grad_()
    assert outputs_kept(both) and outputs_kept(slopes(slope)) and outputs_kept(both, True)
    assert outputs_kept(slopes(slope), dtype=torch.float16)


def test_gradients_of_some_inputs_and_of_lse_alone():
    """With a plan of other gradients than the call's, and without a gradient of out."""
    q, k, v, d = inputs()
    q.requires_grad_(), (slope := capture("slopes")).requires_grad_()
    out, lse = st.flex_attention(q, k, v, slopes(slope), return_lse=True)
    (of_q,) = torch.autograd.grad(out, q, d, retain_graph=True)
    whole = torch.autograd.grad(out, (q, slope), d, retain_graph=True)
    torch.testing.assert_close(of_q, whole[0], rtol=2**-7, atol=1e-3)
    of_lse = torch.autograd.grad(lse.sum(), (q, slope), retain_graph=True)
    assert of_lse[0].dtype is torch.bfloat16 and of_lse[1].isfinite().all()
    made = torch.autograd.grad(out, slope, torch.stack([d, d]), is_grads_batched=True)[0]
    assert torch.equal(made[0], made[1])


@pytest.mark.parametrize("device", DEVICES)
def test_function_transforms(device):
    """grad, vmap around it and vjp have autograd's bits, forward mode the caller's dtype."""
    tensors = q, k, v, d = inputs(device)
    t = capture("slopes").to(device)
    mask = st.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device=device)
    attend = lambda t, q=q: st.flex_attention(q, k, v, slopes(t), mask)  # noqa: E731
    want = train("slopes", st.flex_attention, tensors)[1]
    got = torch.func.grad(lambda t: (attend(t) * d).sum())(t)
    assert torch.equal(got, want)
    out, back = torch.func.vjp(attend, t)
    assert out.dtype is q.dtype and torch.equal(back(d)[0], want)
    of_each = torch.func.vmap(torch.func.grad(lambda t: (attend(t) * d).sum()))
    each = of_each(torch.stack([t, t]))
    assert torch.equal(each[0], want) and torch.equal(each[1], want)
    both = torch.func.vmap(torch.func.grad(lambda q: (attend(t, q) * d).sum()))
    assert both(torch.stack([q, q])).dtype is q.dtype
    if device == "cpu":
        rate = torch.func.jvp(lambda q: torch.func.vjp(attend, t)[0] + attend(t, q), (q,), (d,))
        assert [x.dtype for x in rate] == [q.dtype] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_function_transforms_under_autocast(device):
    """Of f32, which autocast makes 16 bits: gradients are in the dtypes of what was given."""
    tensors = q, k, v, d = inputs(device)
    t = capture("slopes").to(device)
    mask = st.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device=device)

    def loss(q, t):
        with torch.autocast(device, torch.bfloat16):
            out = st.flex_attention(q, k.float(), v.float(), slopes(t), mask)
        assert out.dtype is torch.bfloat16
        return (out * d).sum()

    of_q, of_t = torch.func.grad(loss, argnums=(0, 1))(q.float(), t)
    assert of_q.dtype is torch.float32
    check("slopes", tensors, capture("slopes"), of_t)
    if device == "cpu":  # on CUDA another program makes gradients of q too
        assert torch.equal(of_t, train("slopes", st.flex_attention, tensors)[1])
