"""Gradients through flex_attention against dense PyTorch, and how they behave in autograd."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402

B, H, N, D = 2, 4, 21, 8


def tensors(dtype=torch.float64, heads=H, seed=1, grad=True):
    g = torch.Generator().manual_seed(seed)
    shapes = (B, H, N, D), (B, heads, N, D), (B, heads, N, D)
    return [torch.randn(*s, generator=g).to(dtype).requires_grad_(grad) for s in shapes]


def dense(q, k, v, score=None, mask=None):
    """(out, lse) by plain operations; score and mask are dense functions of i and j."""
    i, j = torch.arange(q.shape[2]).view(-1, 1), torch.arange(k.shape[2]).view(1, -1)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT / q.shape[3] ** 0.5
    s = s if score is None else score(s, i, j)
    s = s if mask is None else s.masked_fill(~mask(i, j), -float("inf"))
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def close(got, want, error=1e-12):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all()
        assert (a - b).abs().max() <= error * max(1, b.abs().max())


def loss(out, lse=None):
    """Something whose gradient is not constant."""
    made = (out.double().sin() * torch.arange(D).cos()).sum()
    return made if lse is None else made + (lse.double() * 0.3).cos().sum()


BIAS = torch.randn(H, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
TABLE = torch.randn(2, 2 * N, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
PAIR = torch.randn(H, N, N, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
COL = (H, 1, 1)
CASES = {
    "none": ((), lambda: None, lambda: None),
    "bias read twice": (
        (BIAS,),
        lambda b_: lambda s, b, h, i, j: s * b_[h] + b_[h] * (i - j),
        lambda b_: lambda s, i, j: s * b_.view(COL) + b_.view(COL) * (i - j),
    ),
    "scalar": (
        (torch.tensor(0.7, dtype=torch.float64),),
        lambda w: lambda s, b, h, i, j: torch.tanh(s * w) / w,
        lambda w: lambda s, i, j: torch.tanh(s * w) / w,
    ),
    "rows and columns": (
        (TABLE,),
        lambda t: lambda s, b, h, i, j: s + t[0, i] * t[1, j],
        lambda t: lambda s, i, j: s + t[0][i] * t[1][j],
    ),
    "diagonals": (
        (TABLE,),
        lambda t: lambda s, b, h, i, j: s + t[h % 2, i - j + N],
        lambda t: lambda s, i, j: s + t[torch.arange(H) % 2][:, i - j + N],
    ),
    "pair": (
        (PAIR,),
        lambda t: lambda s, b, h, i, j: s + t[h, i, j],
        lambda t: lambda s, i, j: s + t,
    ),
    "view made inside": (
        (TABLE,),
        lambda t: lambda s, b, h, i, j: s + t[:, 3:][1][i] + t.mT[j][0],
        lambda t: lambda s, i, j: s + t[1][i + 3] + t[0][j],
    ),
    "computed inside": (
        (BIAS,),
        lambda b_: lambda s, b, h, i, j: s + b_.exp()[h] * j,
        lambda b_: lambda s, i, j: s + b_.exp().view(COL) * j,
    ),
    "buckets": (
        (TABLE, torch.arange(N) % 5),
        lambda t, at: lambda s, b, h, i, j: s + t[0, at[i] + at[j]],
        lambda t, at: lambda s, i, j: s + t[0][at[i] + at[j]],
    ),
}


def case(name, dtype=torch.float64):
    values, ours, theirs = CASES[name]
    values = [t.to(dtype) if t.is_floating_point() else t for t in values]
    values = [t.clone().requires_grad_(t.is_floating_point()) for t in values]
    floats = [t for t in values if t.requires_grad]
    return floats, ours(*values), theirs(*values)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_against_dense(name, dtype):
    """lse's gradient too, with grouped heads and a mask that leaves no row dead."""
    x = tensors(dtype, heads=2)
    floats, ours, theirs = case(name, dtype)
    mask = st.create_block_mask(lambda b, h, i, j: i + 3 >= j, None, None, N, N)
    got = st.flex_attention(*x, ours, mask, enable_gqa=True, return_lse=True)
    want = dense(*x, theirs, lambda i, j: i + 3 >= j)
    close(got, want, 1e-12 if dtype is torch.float64 else 1e-5)
    x += floats
    close(
        torch.autograd.grad(loss(*got), x),
        torch.autograd.grad(loss(*want), x),
        1e-11 if dtype is torch.float64 else 1e-4,
    )


@pytest.mark.parametrize("name", ["none", "bias read twice", "diagonals", "computed inside"])
def test_gradcheck(name):
    x = [t[:1, :, :5, :3].detach().requires_grad_() for t in tensors()]
    floats, ours, _ = case(name)

    def f(*_):
        return st.flex_attention(*x, ours, "q + 1 >= kv", return_lse=True)

    assert torch.autograd.gradcheck(f, (*x, *floats), check_batched_grad=True)


@pytest.mark.parametrize("name", ["none", "bias read twice", "scalar"])
def test_gradgradcheck(name):
    """In f64, by the reference; lse's part too, and keys that all batches share."""
    x = [t[:, :2, :4, :2].detach().requires_grad_() for t in tensors()]
    x[1] = x[1][:1].detach().requires_grad_()
    floats, ours, _ = case(name)

    def f(*_):
        return st.flex_attention(*x, ours, "q + 1 >= kv", return_lse=True)

    assert torch.autograd.gradgradcheck(f, (*x, *floats), check_batched_grad=True)


def test_gradcheck_forward():
    """Tangents too, one by one and batched, and forward mode of gradients."""
    x = [t[:1, :2, :4, :2].detach().requires_grad_() for t in tensors()]
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def f(q, k, v, bias):
        return st.flex_attention(q, k, v, lambda s, b, h, i, j: s * bias[j].sin(), "q >= kv")

    given = (*x, bias)
    options = dict(check_forward_ad=True, check_batched_forward_grad=True)
    assert torch.autograd.gradcheck(f, given, check_batched_grad=True, **options)
    assert torch.autograd.gradgradcheck(f, given, check_fwd_over_rev=True)


def test_second_derivatives_say_that_there_are_none():
    q, k, v = tensors(torch.float32)
    (g,) = torch.autograd.grad(st.flex_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="in float64 on the CPU only"):
        g.sum().backward()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)])
def test_only_what_requires_a_gradient(wanted):
    """Where requires_grad says so, and where autograd.grad asks for less."""
    want = None
    for is_asked in (True, False):
        x = [*tensors(), BIAS.clone().requires_grad_()]
        for i in range(4):
            x[i].requires_grad_(is_asked or i in wanted)
        out = st.flex_attention(*x[:3], lambda s, b, h, i, j: s * x[3][h])
        got = torch.autograd.grad(loss(out), [x[i] for i in wanted])
        want = want or got
        close(got, want)


def test_results_that_no_loss_depends_on():
    q, k, v = tensors()
    lses = st.flex_attention(q, k, v, return_lse=True)[1], dense(q, k, v)[1]
    got, want = (torch.autograd.grad(loss(q.new_zeros(D), x), (q, k)) for x in lses)
    close(got, want)
    (dv,) = torch.autograd.grad(st.flex_attention(q, k, v, return_lse=True)[1].sum(), v)
    assert not dv.any()
    out, aux = st.flex_attention(q, k, v, return_aux=st.AuxRequest(max_scores=True))
    assert out.requires_grad and not aux.max_scores.requires_grad and aux.lse is None


def test_flags_that_change():
    """requires_grad of what a warm call captures, grad mode, detach."""
    q, k, v = tensors(torch.float32, grad=False)
    bias = torch.rand(H)
    f = lambda: st.flex_attention(q, k, v, mod)  # noqa: E731

    def mod(s, b, h, i, j):
        return s * bias[h]

    for _ in range(2):
        for t in (bias, q, v):
            assert not f().requires_grad
            t.requires_grad_()
            assert torch.autograd.grad(f().sin().sum(), t)[0].any()
            with torch.no_grad():
                assert not f().requires_grad
            with torch.inference_mode():
                assert f().is_inference()
            t.requires_grad_(False)
    new = bias.clone().requires_grad_()
    again = lambda w: st.flex_attention(q, k, v, lambda s, b, h, i, j: s * w[h])  # noqa: E731
    assert not again(bias).requires_grad and again(new).requires_grad
    assert not again(new.detach()).requires_grad and again(new.exp()).requires_grad


def test_results_of_modules():
    """A capture that is not a leaf, made anew for each call."""
    q, k, v = tensors(torch.float32, grad=False)
    linear = torch.nn.Linear(3, H)
    x = torch.randn(N, 3)
    made = []
    for is_dense in (True, False):
        for _ in range(3):
            bias = linear(x)
            if is_dense:
                row = bias.mT.view(H, 1, N)
                out = dense(q, k, v, lambda s, i, j, row=row: s + row)[0]
            else:
                mod = lambda s, b, h, i, j: s + bias[j, h]  # noqa: B023, E731
                out = st.flex_attention(q, k, v, mod)
            loss(out).backward()
        made.append([p.grad for p in linear.parameters()])
        linear.zero_grad()
    close(*made, 1e-4)


def test_hooks_graphs_and_what_is_freed():
    q, k, v = tensors(torch.float32)
    seen = []
    q.register_hook(lambda g: seen.append(g.clone()))
    out = st.flex_attention(q, k, v)
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    assert torch.equal(q.grad, once + seen[1]) and torch.equal(seen[0], seen[1])
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    kept = weakref.ref(out)
    x = k.detach().clone().requires_grad_()
    held = weakref.ref(x)
    out = st.flex_attention(q, x, v)
    del out, x
    gc.collect()
    assert kept() is None and held() is None


@pytest.mark.parametrize("place", ["query", "out", "bias", "mask"])
def test_what_is_saved_may_not_change(place):
    q, k, v = (t.clone() for t in tensors(torch.float32))
    bias, ids = torch.rand(H), torch.arange(N) // 4
    mask = st.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, N, N)
    out = st.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h], mask)
    {"query": q, "out": out, "bias": bias, "mask": ids}[place].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def layouts():
    x = tensors(torch.float32, grad=False)
    q, k, v = x
    yield "transposed", [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    yield "expanded", [q, k[:, :1].expand(-1, H, -1, -1), v[:1].expand(B, -1, -1, -1)]
    yield "batch of 1", [q, k[:1], v[:1]]
    yield "columns", [t.mT.contiguous().mT for t in x]
    yield "slices", list(torch.cat(x, 3).chunk(3, 3))
    yield "one query", [q[:, :, :1], k, v]


@pytest.mark.parametrize("name,x", list(layouts()), ids=[name for name, _ in layouts()])
def test_layouts(name, x):
    x = [t.detach().requires_grad_() for t in x]
    got = torch.autograd.grad(loss(st.flex_attention(*x)), x)
    k, v = (t.expand(B, -1, -1, -1) for t in x[1:])
    close(got, torch.autograd.grad(loss(dense(x[0], k, v)[0]), x), 1e-4)
    if name == "transposed":
        assert [g.stride() for g in got] == [t.stride() for t in x]
    out = st.flex_attention(*x)
    for d_out in (torch.ones(()).expand_as(out), torch.ones_like(out).mT.contiguous().mT):
        a = torch.autograd.grad(out, x[0], d_out, retain_graph=True)
        close(a, torch.autograd.grad(out, x[0], torch.ones_like(out), retain_graph=True), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Gradients come in the dtypes of the inputs, as those of SDPA do."""
    x = tensors(torch.float32)
    bias = torch.rand(H, requires_grad=True)
    with torch.autocast("cpu", dtype):
        out = st.flex_attention(*x, lambda s, b, h, i, j: s + bias[h] * j)
        want = torch.nn.functional.scaled_dot_product_attention(*x)
    assert out.dtype is want.dtype is dtype
    got = torch.autograd.grad(loss(out), [*x, bias])
    want = dense(*x, lambda s, i, j: s + bias.view(COL) * j)[0]
    close(got, torch.autograd.grad(loss(want), [*x, bias]), 0.05)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    x = tensors(torch.float32)
    bias = torch.rand(H, requires_grad=True)

    def f(q, k, v):
        return st.flex_attention(q * 2, k, v, lambda s, b, h, i, j: s + bias[h] * j, "q >= kv")

    want = torch.autograd.grad(loss(f(*x)), [*x, bias])
    loss(checkpoint(f, *x, use_reentrant=reentrant)).backward()
    for t, g in zip([*x, bias], want):
        assert torch.equal(t.grad, g)


def test_saved_elsewhere():
    """Hooks may hand back other tensors, of other strides."""
    x = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors(torch.float32)]
    x = [t.detach().requires_grad_() for t in x]
    bias = torch.rand(N, H).t().requires_grad_()
    mod = lambda s, b, h, i, j: s + bias[h, j]  # noqa: E731
    want = torch.autograd.grad(loss(st.flex_attention(*x, mod)), [*x, bias])
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().contiguous().numpy(), lambda a: torch.from_numpy(a.copy())
    ):
        out = st.flex_attention(*x, mod)
    close(torch.autograd.grad(loss(out), [*x, bias]), want, 1e-6)


def test_deterministic():
    """Bit for bit, in deterministic mode, over thread counts."""
    x = tensors(torch.float32)
    table = torch.rand(2 * N, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    threads = torch.get_num_threads()
    try:
        made = []
        for n in (1, 2, 2):
            torch.set_num_threads(n)
            out = st.flex_attention(*x, lambda s, b, h, i, j: s + table[i - j + N])
            made.append(torch.autograd.grad(loss(out), [*x, table]))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    for other in made[1:]:
        assert all(map(torch.equal, made[0], other))


def test_rows_without_a_key():
    """Exactly 0, also where the score has no value and lse counts."""
    x = tensors(torch.float32)
    mod = lambda s, b, h, i, j: torch.where(j > i, torch.log(s * 0 - 1), s)  # noqa: E731
    out, lse = st.flex_attention(*x, mod, "q >= kv && q % 3 != 1", return_lse=True)
    live = torch.arange(N) % 3 != 1
    got = torch.autograd.grad(loss(out) + lse[:, :, live].sum(), x)
    assert all(g.isfinite().all() for g in got)
    assert not got[0][:, :, ~live].any() and not out[:, :, ~live].any()


def test_two_halves_merged():
    """The gradient of lse makes attention over two parts of the keys attention over all."""
    x = tensors()
    parts = [
        st.flex_attention(*x, None, m, return_lse=True)
        for m in ("q >= kv && kv < 9", "q >= kv && kv >= 9")
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(o * (one - lse).exp().unsqueeze(-1) for o, one in parts)
    got = torch.autograd.grad(loss(out), x)
    close(got, torch.autograd.grad(loss(dense(*x, None, lambda i, j: i >= j)[0]), x), 1e-10)


def test_meta_tensors():
    x = [t.to("meta").requires_grad_() for t in tensors(torch.float32, grad=False)]
    got = torch.autograd.grad(st.flex_attention(*x).sum(), x)
    assert [g.shape for g in got] == [t.shape for t in x]


def test_an_index_that_varies_with_the_score():
    x = tensors()
    table = torch.rand(9, dtype=torch.float64, requires_grad=True)
    at = lambda s: torch.clamp((4 * s).to(torch.int32), 0, 8)  # noqa: E731
    out = st.flex_attention(*x, lambda s, b, h, i, j: s + table[at(s)])
    want = dense(*x, lambda s, i, j: s + table[at(s)])[0]
    x.append(table)
    close(torch.autograd.grad(loss(out), x), torch.autograd.grad(loss(want), x), 1e-11)


def test_second_derivative_of_lse_alone():
    torch.manual_seed(6)
    x, y, z = (torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    found = []
    for lse in (
        st.flex_attention(x, y, z, return_lse=True)[1],
        torch.logsumexp(x @ y.transpose(-1, -2) / 8**0.5, -1),
    ):
        (g,) = torch.autograd.grad(lse.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [x, y]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tensors_whose_memory_holds_the_negatives(dtype):
    """As z.conj().imag: inputs, a capture, the gradient of out; warm calls too."""
    torch.manual_seed(7)
    x = [torch._neg_view(t.detach()).requires_grad_() for t in tensors(dtype)]
    bias = torch._neg_view(torch.rand(H, dtype=dtype)).requires_grad_()
    d_out = torch._neg_view(torch.randn(B, H, N, D, dtype=dtype))
    mod = lambda s, b, h, i, j: s + bias[h] * (j - i)  # noqa: E731
    assert all(t.is_neg() for t in (*x, bias, d_out))

    def made(x, bias, d_out, mod):
        out = st.flex_attention(*x, mod, "q >= kv")
        return [out, *torch.autograd.grad(out, [*x, bias], d_out)]

    plain = [t.detach().resolve_neg().clone().requires_grad_() for t in (*x, bias)]
    other = lambda s, b, h, i, j: s + plain[3][h] * (j - i)  # noqa: E731
    want = made(plain[:3], plain[3], d_out.resolve_neg(), other)
    for _ in range(3):
        assert all(map(torch.equal, made(x, bias, d_out, mod), want))
        assert all(map(torch.equal, made(plain[:3], plain[3], d_out, other), want))
        assert all(map(torch.equal, made(x, plain[3], d_out, other), want))
    with torch.no_grad():
        for _ in range(2):
            a = st.flex_attention(*plain[:3])
            assert torch.equal(st.flex_attention(*x), a)
        bias.neg_()
        again = lambda s, b, h, i, j: s - plain[3][h] * (j - i)  # noqa: E731
        want = st.flex_attention(*x, again, "q >= kv")
        assert torch.equal(st.flex_attention(*x, mod, "q >= kv"), want)
        got = st.cached_attention(x[0].float(), x[1].float(), x[2].float())
        assert torch.equal(got, st.cached_attention(*(t.float() for t in plain[:3])))


def test_negative_second_derivatives():
    x = [torch._neg_view(t.detach()).requires_grad_() for t in tensors()]
    out = st.flex_attention(*x)
    d = torch.randn_like(out).requires_grad_()
    (g,) = torch.autograd.grad(out, x[0], torch._neg_view(d), create_graph=True)
    got = torch.autograd.grad(g, [*x, d], torch._neg_view(torch.ones_like(g)))
    y = [t.detach().resolve_neg().clone().requires_grad_() for t in x]
    (g,) = torch.autograd.grad(dense(*y)[0], y[0], -d, create_graph=True)
    close(got, torch.autograd.grad(g, [*y, d], -torch.ones_like(g)))


def test_negative_arrays():
    import saccade

    q = tensors(torch.float32, grad=False)[0]
    x = torch._neg_view(q)
    assert torch.equal(saccade.attention(x, q, q), saccade.attention(-q, q, q))


def test_third_derivatives_are_refused():
    x = torch.randn(1, 1, 6, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    q = x * w
    (g,) = torch.autograd.grad(st.flex_attention(q, q, q).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no third derivatives"):
        torch.autograd.grad(gg.square().sum(), w)


def test_hooks_that_give_back_another_layout():
    q, k, v = tensors(torch.float32)
    st.flex_attention(q, k, v).square().sum().backward()
    want = [t.grad.clone() for t in (q, k, v)]
    turned = lambda t: t.mT.contiguous().mT if t.dim() == 4 else t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned):
        out = st.flex_attention(q, k, v)
    for t in (q, k, v):
        t.grad = None
    out.square().sum().backward()
    for t, x in zip((q, k, v), want):
        assert torch.equal(t.grad, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["root", "power", "batch"])
def test_captures_whose_rows_are_masked(dtype, way):
    """An infinite or undefined derivative of what no live score reads is 0 all the same."""
    torch.manual_seed(4)
    q = torch.randn(2, 2, 5, 8, dtype=dtype, requires_grad=True)
    k, v = torch.randn(2, 2, 9, 8, dtype=dtype), torch.randn(2, 2, 9, 8, dtype=dtype)
    f = torch.tensor([2.0, 0.0 if way == "power" else -1.0], dtype=dtype, requires_grad=True)
    which = (lambda b, h: b) if way == "batch" else (lambda b, h: h)
    root = (lambda x: torch.pow(x, 0.5)) if way == "power" else torch.sqrt
    live = st.create_block_mask(lambda b, h, i, j: which(b, h) != 1, 2, 2, 5, 9, device="cpu")
    out = st.flex_attention(q, k, v, lambda s, b, h, i, j: s + root(f[which(b, h)]), live)
    (made,) = torch.autograd.grad(out.sum(), f)
    assert made[1] == 0 and made[0].abs() < 1e-5


@pytest.mark.parametrize("low", [-1e9, float(torch.finfo(torch.float32).min)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_whose_keys_are_all_padding(dtype, low):
    """A bias that stands for a mask, at every key: f32 does not tell their weights."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(2, 2, 96, 32).to(dtype).requires_grad_() for _ in range(3))
    bias = torch.randn(2, 96, 96, requires_grad=True)
    pad = torch.zeros(2, 96)
    pad[1] = low
    d_out = torch.randn(2, 2, 96, 32).to(dtype)

    def gradients(d_out):
        out = st.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j] + pad[b, j])
        return torch.autograd.grad(out, [q, k, v, bias], d_out)

    *made, d_bias = gradients(d_out)
    assert all(t[1].abs().max() == 0 and t[0].abs().max() > 0.1 for t in made)
    d_out[1] = 0
    assert torch.equal(d_bias, gradients(d_out)[3])


@pytest.mark.parametrize("shape", ["hqk", "bqk", "qk", "hkq", "qkh", "bhqk", "bqk+hqk"])
def test_shared_biases_over_threads(shape):
    """Batches or heads add to elements in one order, whichever of them run at once."""
    torch.manual_seed(6)
    sizes = {"b": 3, "h": 4, "q": 70, "k": 210}
    q = torch.randn(3, 4, 70, 16, requires_grad=True)
    k, v = (torch.randn(3, 2, 210, 16, requires_grad=True) for _ in range(2))
    names = shape.split("+")
    biases = [torch.randn([sizes[c] for c in n], requires_grad=True) for n in names]
    reads = [f"t{i}[{', '.join(n).replace('k', 'kv')}]" for i, n in enumerate(names)]
    text = " + ".join(["score", *reads])
    score = st.score(text, **{f"t{i}": t for i, t in enumerate(biases)})
    full = [t.permute(*[n.find(c) for c in "bhqk" if c in n]) for t, n in zip(biases, names)]
    full = [t[:, None] if "b" in n and "h" not in n else t for t, n in zip(full, names)]
    want, _ = dense(q, k, v, lambda s, i, j: sum(full, s))
    d_out = torch.randn(want.shape)
    inputs = [q, k, v, *biases]
    made = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        out = st.flex_attention(q, k, v, score, enable_gqa=True)
        made.append(torch.autograd.grad(out, inputs, d_out))
    torch.set_num_threads(before)
    close(made[0], torch.autograd.grad(want, inputs, d_out), 1e-5)
    for others in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], others, strict=True))


@pytest.mark.parametrize("n", [39, 30])  # inside, and below 0, which counts from the end
@pytest.mark.parametrize("shape", [(2, 2, 40, 80), (2, 40, 80), (40, 80)])
def test_distances_of_each_query(shape, n):
    """An element for each position, on lines of kv - q whose negative indices are Python's."""
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 2, 40, D, generator=g) for _ in range(3))
    t, w = torch.randn(shape, generator=g), torch.randn(2, 2, 40, D, generator=g)

    def own(b, h):
        return t[b, h] if t.ndim == 4 else t[h] if t.ndim == 3 else t

    def score(s, b, h, i, j):
        return s + own(b, h)[i, j - i + n]

    t.requires_grad_()
    got = torch.autograd.grad((st.flex_attention(q, k, v, score) * w).sum(), t)
    place = (torch.arange(40) - torch.arange(40)[:, None] + n) % 80
    bias = t.gather(-1, place.expand(*shape[:-1], 40))
    out, _ = dense(q.double(), k.double(), v.double(), lambda s, i, j: s + bias.double())
    want = torch.autograd.grad((out * w).sum(), t)
    close(got, want, 1e-5)
