"""Names of captures in texts are each mod's own: a mask and a score may use one name, for one
tensor or for two."""

import pytest

torch = pytest.importorskip("torch")
import saccade.torch as st  # noqa: E402

H, N, D = 2, 48, 16
MASK = "doc[q] == doc[kv] && gain[h] > 0"
SCORE = """mask same(gain) = doc[q] == doc[kv] && gain > 0;  // doc and gain, captured
score kept(doc) = { doc = doc * 2; doc / 2 };
kept(score) + gain[h] * (kv - q) + (same(1) ? 0.5 : 0.0)"""


def tensors(dtype=torch.float32):
    torch.manual_seed(4)
    return [torch.randn(1, H, N, D, dtype=dtype) for _ in range(3)]


def captured(is_one):
    """(the mask's doc and gain, the score's)."""
    doc, gain = torch.arange(N) // 20, torch.tensor([0.25, 0.5])
    if is_one:
        return (doc, gain), (doc, gain)
    return (doc, gain), (torch.arange(N) % 3, torch.tensor([-0.125, 0.0625]))


def plain(q, k, v, of_mask, of_score):
    """In float64."""
    doc, gain = of_mask
    i = torch.arange(N)
    live = (doc[:, None] == doc) & (gain > 0)[:, None, None]
    doc, gain = of_score
    s = q.double() @ k.double().mT / D**0.5
    s = s + gain.double()[:, None, None] * (i - i[:, None])
    s = s + 0.5 * (doc[:, None] == doc)
    return torch.softmax(s.masked_fill(~live, -torch.inf), -1) @ v.double()


def mods(of_mask, of_score):
    mask = st.mask(MASK, doc=of_mask[0], gain=of_mask[1])
    return mask, st.score(SCORE, doc=of_score[0], gain=of_score[1])


def flex(q, k, v, mask, score):
    return st.flex_attention(q, k, v, score, st.create_block_mask(mask, None, H, N, N))


def compiled(q, k, v, mask, score):
    return torch.compile(flex, backend="aot_eager", fullgraph=True)(q, k, v, mask, score)


def cached(q, k, v, mask, score):
    return st.cached_attention(q, k, v, mask, score)


def ragged(q, k, v, mask, score):
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    starts = torch.tensor([0, N], dtype=torch.int32)
    out = st.varlen_attention(q, k, v, starts, starts, N, N, mask, score)
    return out.transpose(0, 1)[None]


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("call", [flex, compiled, cached, ragged])
def test_a_mask_and_a_score_have_names_of_their_own(call, is_one):
    q, k, v = tensors()
    for _ in range(2):  # the second is warm
        found = captured(is_one)
        out = call(q, k, v, *mods(*found))
        assert (out - plain(q, k, v, *found)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("call", [flex, compiled, ragged])
def test_gradients_are_those_of_the_score(call, dtype):
    if dtype is torch.float64 and call is ragged:
        pytest.skip("no gradients of ragged batches in float64")
    inputs = [t.requires_grad_() for t in tensors(dtype)]
    (doc, gain), (other, _) = captured(False)
    gain.requires_grad_()
    weight = torch.randn(1, H, N, D)
    (call(*inputs, *mods((doc, gain.detach()), (other, gain))) * weight).sum().backward()
    got = [t.grad for t in (*inputs, gain)]
    for t in (*inputs, gain):
        t.grad = None
    (plain(*inputs, (doc, gain.detach()), (other, gain)) * weight).sum().backward()
    most = 0.05 if dtype is torch.bfloat16 else 1e-4
    for a, b in zip(got, (*inputs, gain)):
        assert (a.double() - b.grad.double()).norm() < most * b.grad.double().norm()


def test_forward_mode_and_transforms():
    q, k, v = tensors(torch.float64)
    (doc, gain), (other, slope) = captured(False)

    def ours(slope):
        return flex(q, k, v, *mods((doc, gain), (other, slope)))

    def theirs(slope):
        return plain(q, k, v, (doc, gain), (other, slope))

    slope, rate = slope.double(), torch.ones(H, dtype=torch.float64)
    for got, want in zip(
        torch.func.jvp(ours, (slope,), (rate,)), torch.func.jvp(theirs, (slope,), (rate,))
    ):
        assert (got - want).abs().max() < 1e-9
    of = lambda f: torch.func.grad(lambda x: f(x).sin().sum())(slope)  # noqa: E731
    got, want = of(ours), of(theirs)
    assert (got - want).abs().max() < 1e-9


def test_explain_and_errors_have_the_names_that_were_given():
    q, k, v = tensors()
    mask, score = mods(*captured(False))
    assert "score text: mask same(gain) = doc[q]" in st.explain(q, k, v, score, mask)
    wide = torch.full((N,), 1 << 40)
    with pytest.raises(ValueError, match="^doc: "):
        cached(q, k, v, mask, st.score("score + 0.0 * doc[q]", doc=wide))
    with pytest.raises(ValueError, match="^score_mod: doc: "):
        flex(q, k, v, mask, st.score("score + 0.0 * doc[q]", doc=wide))


def test_new_names_are_nobody_elses():
    """Such as doc_2, or one that has no room behind it."""
    q, k, v = tensors()
    first, second, third = torch.arange(N) // 20, torch.arange(N) % 2, torch.arange(N) % 5
    mask = st.mask("doc[q] == doc[kv] && doc_3[kv] < 4", doc=first, doc_3=third)
    score = st.score("doc_2 = 1.0; score + doc_2 * doc[kv]", doc=second)
    live = (first[:, None] == first) & (third < 4)
    s = q.double() @ k.double().mT / D**0.5 + second
    want = torch.softmax(s.masked_fill(~live, -torch.inf), -1) @ v.double()
    for call in flex, cached:
        assert (call(q, k, v, mask, score) - want).abs().max() < 1e-5
    long = "n" * 63
    mask = st.mask(f"kv <= {long}[q]", **{long: torch.arange(N)})
    score = st.score(f"score + {long}[kv]", **{long: second})
    assert torch.isfinite(cached(q, k, v, mask, score)).all()
