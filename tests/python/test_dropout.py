"""dropout_p of flex_attention: statistics, generators, gradients, Transformers in training."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def inputs(dtype=torch.float32, H=4, L=64, D=16, device="cpu"):
    torch.manual_seed(5)
    made = (torch.randn(2, H, L, D).to(device, dtype) for _ in range(3))
    return [x.requires_grad_() for x in made]


def weights(rate, L=96, device="cpu"):
    """All scores 0 and V the identity: out is the kept weights / L."""
    q = torch.zeros(2, 3, L, 8, device=device)
    v = torch.eye(L, device=device).expand(2, 3, L, L)
    return st.flex_attention(q, q, v, dropout_p=rate) * L


@pytest.mark.parametrize("device", DEVICES)
def test_rate(device):
    torch.manual_seed(0)
    z = weights(0.25, device=device)
    kept = z > 0.5
    torch.testing.assert_close(z[kept], torch.full_like(z[kept], 1 / 0.75))
    assert (z[~kept] == 0).all()
    n = z.numel()
    assert abs(kept.sum().item() - 0.75 * n) < 5 * (0.75 * 0.25 * n) ** 0.5
    assert (weights(1.0, device=device) == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_generator(device):
    torch.manual_seed(1)
    a, b = weights(0.5, device=device), weights(0.5, device=device)
    torch.manual_seed(1)
    assert torch.equal(a, weights(0.5, device=device))
    assert torch.equal(b, weights(0.5, device=device))
    assert not torch.equal(a, b)


def dense(q, k, v, z, live):
    s = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~live, -torch.inf)
    return (z * torch.softmax(s, -1)) @ v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients(dtype, device):
    """Against the dense formula with the weights that the same seed keeps."""
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("f64 is computed on the CPU")
    q, k, v = given = inputs(dtype, H=3, L=48, device=device)
    torch.manual_seed(9)
    probe = torch.zeros(2, 3, 48, 8, dtype=dtype, device=device)
    eye = torch.eye(48, dtype=dtype, device=device).expand(2, 3, 48, 48)
    z = 48 * st.flex_attention(probe, probe, eye, dropout_p=0.3)
    torch.manual_seed(9)
    out = st.flex_attention(q, k, v, block_mask="causal()", dropout_p=0.3)
    at = torch.arange(48, device=device)
    gold = dense(q, k, v, z, at[:, None] >= at)
    torch.testing.assert_close(out, gold)
    w = torch.randn_like(out)
    mine = torch.autograd.grad((out * w).sum(), given)
    theirs = torch.autograd.grad((gold * w).sum(), given)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_checkpoint_makes_the_same_weights():
    from torch.utils.checkpoint import checkpoint

    q, k, v = given = inputs()
    found = []
    for again in (False, True):
        torch.manual_seed(3)

        def call(q, k, v):
            return st.flex_attention(q, k, v, dropout_p=0.4)

        out = checkpoint(call, q, k, v, use_reentrant=False) if again else call(q, k, v)
        found.append([out, *torch.autograd.grad(out.sum(), given)])
    for a, b in zip(*found):
        assert torch.equal(a, b)


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_keeps_the_weights_of_the_cpu(dtype):
    """By the same seed and offset, out and gradients; new ones in each replay of a graph."""
    from saccade.torch import dropout

    state, drawn = torch.tensor([11, 2**40 + 3]), dropout.drawn_state
    found = []
    try:
        dropout.drawn_state = lambda q: state.to(q.device)
        for device in ("cpu", "cuda"):
            q, k, v = given = inputs(dtype, L=200, D=64, device=device)
            out = st.flex_attention(q, k, v, block_mask="causal()", dropout_p=0.2)
            made = torch.autograd.grad(out.float().square().sum(), given)
            found.append([x.float().cpu() for x in (out, *made)])
    finally:
        dropout.drawn_state = drawn
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    q, k, v = (x.detach() for x in given)
    st.flex_attention(q, k, v, dropout_p=0.2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = st.flex_attention(q, k, v, dropout_p=0.2)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_with_sinks():
    q, k, v = inputs()
    torch.manual_seed(4)
    a = st.flex_attention(q, k, v, dropout_p=0.4, sinks=torch.full((4,), -torch.inf))
    torch.manual_seed(4)
    assert torch.equal(a, st.flex_attention(q, k, v, dropout_p=0.4))


def seeded(f, *given):
    """(out, gradients) of f, with the seeds that manual_seed(3) leaves."""
    torch.manual_seed(3)
    out = f(*given)
    return [out, *torch.autograd.grad(out.square().sum(), given)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["aot_eager", "inductor", "checkpoint", "make_fx"])
def test_in_graphs(device, way):
    """The weights that the same seed keeps (inductor has its own generator), others in the next
    call, and in backward those of its call."""
    q, k, v = inputs(device=device)
    slope = torch.rand(4, device=device, requires_grad=True)

    def call(q, k, v, slope):
        def bias(score, b, h, i, j):
            return score + slope[h] * (j - i) * 0.1

        return st.flex_attention(q, k, v, bias, "causal()", dropout_p=0.4)

    if way == "make_fx":
        from torch.fx.experimental.proxy_tensor import make_fx

        with torch.no_grad():
            graph = make_fx(call, pre_dispatch=True)(q, k, v, slope)
            torch.manual_seed(3)
            want = call(q, k, v, slope)
            torch.manual_seed(3)
            assert torch.equal(graph(q, k, v, slope), want)
            assert not torch.equal(graph(q, k, v, slope), want)
        return
    body = call
    if way == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        body = lambda *given: checkpoint(call, *given, use_reentrant=False)  # noqa: E731
    backend = "inductor" if way == "inductor" else "aot_eager"
    compiled = torch.compile(body, backend=backend, fullgraph=True)
    given = q, k, v, slope
    found = seeded(compiled, *given)
    # out is linear in v: what backward adds up is what forward kept
    torch.testing.assert_close((found[3] * v).sum(), 2 * found[0].square().sum())
    assert not torch.equal(compiled(*given), found[0])
    if way == "checkpoint" and device == "cuda":
        return  # PyTorch gives such graphs a generator that manual_seed does not reach
    for a, b in zip(found, seeded(compiled, *given)):
        assert torch.equal(a, b)
    for a, b in zip(found, seeded(call, *given) if way != "inductor" else ()):
        torch.testing.assert_close(a, b)


def test_mistakes():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="dropout_p: got 1.5"):
        st.flex_attention(q, k, v, dropout_p=1.5)
    with pytest.raises(NotImplementedError, match="inside of a transform of torch.func"):
        torch.vmap(lambda q: st.flex_attention(q, q, q, dropout_p=0.1))(torch.stack([q, q]))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), q.detach())
        with pytest.raises(NotImplementedError, match=r"forward mode \(torch.autograd"):
            st.flex_attention(dual, q, q, dropout_p=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_transformers_in_training(device):
    transformers = pytest.importorskip("transformers")
    st.register_transformers()
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=0.3,
    )
    make = transformers.LlamaForCausalLM._from_config
    torch.manual_seed(0)
    model = make(config, attn_implementation="saccade").to(device).train()
    ids = torch.randint(0, 97, (2, 33)).to(device)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1] != losses[2]
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
