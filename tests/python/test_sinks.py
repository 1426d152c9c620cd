"""sinks= of flex_attention against dense softmax with one more column, and gpt-oss."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def dense(q, k, v, sinks, live):
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    s = s.masked_fill(~live, -torch.inf)
    column = sinks.view(1, -1, 1) if sinks.dim() == 1 else sinks
    column = column.expand(q.shape[:3]).unsqueeze(-1)
    p = torch.softmax(torch.cat([s, column], -1), -1)[..., :-1]
    return p @ v, torch.logsumexp(torch.cat([s, column], -1), -1)


def inputs(shape, dtype=torch.float64):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 4, 9, 8, dtype=dtype) for _ in range(3))
    sinks = 2 * torch.randn(shape, dtype=dtype)
    return [t.requires_grad_() for t in (q, k, v, sinks)]


MASK = "q >= kv + 2"  # rows 0 and 1 have no live key


@pytest.mark.parametrize("shape", [(4,), (2, 4, 9), (1, 4, 9), (2, 4, 1)])
def test_against_dense(shape):
    q, k, v, sinks = given = inputs(shape)
    at = torch.arange(9)
    out, lse = st.flex_attention(q, k, v, block_mask=MASK, sinks=sinks, return_lse=True)
    gold, gold_lse = dense(q, k, v, sinks, at[:, None] >= at + 2)
    torch.testing.assert_close(out, gold)
    torch.testing.assert_close(lse, gold_lse)
    w, x = torch.randn_like(out), torch.randn_like(lse)
    mine = torch.autograd.grad((out * w).sum() + (lse * x).sum(), given)
    theirs = torch.autograd.grad((gold * w).sum() + (gold_lse * x).sum(), given)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b)


def test_results_that_are_asked_for():
    q, k, v, sinks = inputs((4,), torch.float32)
    out = st.flex_attention(q, k, v, sinks=sinks)
    more, aux = st.flex_attention(
        q, k, v, sinks=sinks, return_aux=st.AuxRequest(lse=True, max_scores=True)
    )
    assert torch.equal(out, more) and aux.lse.shape == aux.max_scores.shape == (2, 4, 9)
    _, plain = st.flex_attention(q, k, v, return_aux=st.AuxRequest(max_scores=True))
    assert torch.equal(aux.max_scores, plain.max_scores) and plain.lse is None
    none = st.flex_attention(q, k, v, sinks=torch.full((4,), -torch.inf))
    assert torch.equal(none, st.flex_attention(q, k, v))


@pytest.mark.parametrize(
    "sinks, says",
    [
        (torch.zeros(3), r"got shape \(3,\), expected \(4,\)"),
        (torch.zeros(2, 4, 5), r"got shape \(2, 4, 5\)"),
        (torch.zeros(4, dtype=torch.int32), "expected floats"),
        ([0.0] * 4, "expected a tensor"),
    ],
)
def test_mistakes(sinks, says):
    q, k, v, _ = inputs((4,), torch.float32)
    with pytest.raises((ValueError, TypeError), match=says):
        st.flex_attention(q, k, v, sinks=sinks)


def gpt_oss(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    st.register_transformers()
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation=name)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n.endswith("sinks"):
                p.normal_(0.5, 2)
    return model


def test_gpt_oss_generates_the_same_tokens():
    ids = torch.randint(2, 97, (2, 19))
    texts = [
        gpt_oss(name).eval().generate(ids, max_new_tokens=16, do_sample=False)
        for name in ("eager", "saccade")
    ]
    assert torch.equal(*texts)


def test_gpt_oss_trains():
    ids, found = torch.randint(2, 97, (2, 23)), []
    for name in ("eager", "saccade"):
        model = gpt_oss(name).train()
        model(ids, labels=ids).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert sum(n.endswith("sinks") for n in found[0]) == 4
    for n, a in found[0].items():
        torch.testing.assert_close(found[1][n], a, rtol=2e-3, atol=2e-5, msg=n)


@pytest.mark.parametrize("least", [-12.0, -6.0, 0.0, 12.0])
def test_gradients_of_small_and_large_shares(least):
    """The share of a sink, or of the keys, may be 1e-6: its gradient has all digits of f32."""
    torch.manual_seed(7)
    drawn = [torch.randn(1, 2, 200, 16) for _ in range(3)]
    made = []
    for dtype in (torch.float32, torch.float64):
        q, k, v = (t.clone().to(dtype) for t in drawn)
        sinks = torch.full((2,), least, dtype=dtype, requires_grad=True)
        q.requires_grad_()
        st.flex_attention(q, k, v, sinks=sinks).square().sum().backward()
        made.append((sinks.grad, q.grad))
    for ours, exact in zip(*made):
        far = (ours - exact).norm() / exact.norm()
        assert far < 5e-6, float(far)


def test_a_sink_keeps_no_second_output():
    """In half precision a step saves what it does without sinks, and a number for each row."""
    q, k, v = (
        torch.randn(1, 2, 64, 32, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    )
    sizes = []
    for sinks in (None, torch.zeros(2, requires_grad=True)):
        saved = {}

        def keep(t, saved=saved):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = st.flex_attention(q, k, v, sinks=sinks)
        sizes.append(sum(saved.values()))
        del out
    assert sizes[1] - sizes[0] < q.numel() * 2


@pytest.mark.parametrize("shape", [(4,), (1, 4, 37), (2, 4, 1), (2, 4, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [(True,) * 5, (False, False, False, True, False)])
@pytest.mark.parametrize("device", DEVICES)
def test_in_the_run_as_behind_it(shape, dtype, needs, device):
    """In float64 they are added behind the run, by torch."""
    torch.manual_seed(3)
    given = [torch.randn(2, h, 37, 16, dtype=dtype) for h in (4, 2, 2)]
    given += [torch.randn(shape), torch.randn(4, 37)]
    rates = torch.randn(3, 2, 4, 37, 16, dtype=dtype), torch.randn(3, 2, 4, 37)

    def gradients(given, rates, is_batched):
        given = [t.detach().requires_grad_(w) for t, w in zip(given, needs)]
        q, k, v, sinks, x = given
        made = st.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + x[h, j], "causal()", enable_gqa=True,
            sinks=sinks, return_lse=True,
        )  # fmt: skip
        wanted = [t for t in given if t.requires_grad]
        return [*made, *torch.autograd.grad(made, wanted, rates, is_grads_batched=is_batched)]

    for is_batched in (True, False):
        if not is_batched:
            rates = [r[0] for r in rates]
        on_device = [[t.to(device) for t in x] for x in (given, rates)]
        made = gradients(*on_device, is_batched)
        want = gradients([t.double() for t in given], [r.double() for r in rates], is_batched)
        for got, exact in zip(made, want):
            by = 2e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(got.cpu().double(), exact, rtol=by, atol=by)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 3, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_batch_invariant(dtype, heads, device):
    """A batch with sinks has the bits of its sequences alone, and of decoding them."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(16, heads, 32, dtype=dtype).to(device) for _ in range(3))
    sinks, options = torch.randn(heads).to(device), {"BATCH_INVARIANT": True}
    starts = torch.tensor([0, 5, 14, 16], dtype=torch.int32, device=device)
    options = dict(sinks=sinks, kernel_options=options)
    whole = st.varlen_attention(q, k, v, starts, max_seqlen_q=9, **options)
    for i, j in zip(starts[:-1].tolist(), starts[1:].tolist()):
        ends = torch.tensor([0, j - i], dtype=torch.int32, device=device)
        own = q[i:j], k[i:j], v[i:j], ends
        alone = st.varlen_attention(*own, max_seqlen_q=j - i, **options)
        assert torch.equal(whole[i:j], alone)
        four = [t.transpose(0, 1)[None] for t in own[:3]]
        flex = st.flex_attention(*four, None, "causal()", **options)
        assert torch.equal(flex, alone.transpose(0, 1)[None])
        last = st.cached_attention(four[0][:, :, -1:], *four[1:], **options)
        assert torch.equal(last, flex[:, :, -1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinite_sinks_and_rows_without_keys(dtype):
    """The same in the run and behind it."""
    q, k, v = (torch.randn(1, 3, 4, 8, dtype=dtype) for _ in range(3))
    sinks = torch.tensor([torch.inf, -torch.inf, 0.5], dtype=dtype)
    out, lse = st.flex_attention(q, k, v, None, "q >= kv + 2", sinks=sinks, return_lse=True)
    assert torch.equal(out[:, :, :2], torch.zeros(1, 3, 2, 8, dtype=dtype))  # they see none
    assert lse[0, :, :2].isnan().tolist() == [[True] * 2, [False] * 2, [False] * 2]
    assert out[0, 0, 2:].isnan().all() and out[0, 1:].isfinite().all()
    plain = st.flex_attention(q, k, v, None, "q >= kv + 2")
    torch.testing.assert_close(out[0, 1], plain[0, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_hooked", [True, False])
def test_sinks_that_were_saved(dtype, is_hooked):
    """Backward reads what autograd gives back: by checkpointing, and by hooks that move it."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 4, 33, 16) for _ in range(3))
    base = torch.randn(4).to(dtype).requires_grad_()

    def attend(q):
        sinks = base * 2  # which nothing else holds
        return st.flex_attention(q, k, v, None, "causal()", sinks=sinks)

    (want,) = torch.autograd.grad(attend(q).square().sum(), base)
    if is_hooked:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            out = attend(q)
    else:
        out = torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False)
    noise = [torch.full((4,), 7.0) for _ in range(300)]
    (got,) = torch.autograd.grad(out.square().sum(), base)
    assert torch.equal(got, want) and len(noise) == 300
