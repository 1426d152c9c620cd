"""saccade.torch against dense float64 in torch, over the catalogue of users' mods."""

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from catalogue import masks, scores  # noqa: E402
from saccade.torch import active  # noqa: E402

B, H, HKV, Q, KV, D = 2, 4, 2, 65, 80, 16


def indices(Q=Q, KV=KV):
    return (
        torch.arange(B).view(B, 1, 1, 1),
        torch.arange(H).view(1, H, 1, 1),
        torch.arange(Q).view(1, 1, Q, 1),
        torch.arange(KV).view(1, 1, 1, KV),
    )


def on_every_score(mod, *first):
    """The mod on all positions by torch's own vmap."""
    from torch.func import vmap

    f = mod
    for axes in (
        (3, (None, None, None, 0)),
        (2, (None, None, 0, None)),
        (1, (None, 0, None, None)),
        (0, (0, None, None, None)),
    ):
        f = vmap(f, in_dims=(0,) * len(first) + axes[1])
    return f(*first, torch.arange(B), torch.arange(H), torch.arange(Q), torch.arange(KV))


def dense(q, k, v, score_mod=None, mask_mod=None, scale=None):
    """out and lse in float64."""
    q, k, v = q.double(), k.double(), v.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    s = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if score_mod:
        s = on_every_score(score_mod, s).double()
    if mask_mod:
        s = s.masked_fill(~on_every_score(mask_mod).expand_as(s), -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None])
    return p @ v, lse, s.amax(-1)


def tensors(dtype=torch.float32, seed=0, **sizes):
    g = torch.Generator().manual_seed(seed)
    n = dict(B=B, H=H, HKV=HKV, Q=Q, KV=KV, D=D) | sizes
    make = lambda h, n_, d: torch.randn(n["B"], h, n_, d, generator=g).to(dtype)  # noqa: E731
    return (
        make(n["H"], n["Q"], n["D"]),
        make(n["HKV"], n["KV"], n["D"]),
        make(n["HKV"], n["KV"], n["D"]),
    )


def close(got, want, dtype):
    rtol = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    bound = rtol * max(1.0, float(want.abs()[want.isfinite()].max()))
    assert torch.equal(got.isinf(), want.isinf())
    keep = want.isfinite()
    assert float((got.double() - want)[keep].abs().max()) <= bound


G = torch.Generator().manual_seed(7)
MASKS, SCORES = masks(B, H, Q, KV, G), scores(B, H, Q, KV, G)


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    q, k, v = tensors()
    block = st.create_block_mask(MASKS[name], B, H, Q, KV, BLOCK_SIZE=(32, 16))
    out, lse = st.flex_attention(q, k, v, block_mask=block, enable_gqa=True, return_lse=True)
    want, want_lse, _ = dense(q, k, v, mask_mod=MASKS[name])
    close(out, want, torch.float32)
    close(lse, want_lse, torch.float32)
    live = on_every_score(MASKS[name]).expand(B, H, Q, KV)
    assert torch.equal(st.create_mask(MASKS[name], B, H, Q, KV), live)
    padded = torch.zeros(B, H, 96, 80, dtype=torch.bool)
    padded[:, :, :Q, :KV] = live
    blocks = padded.view(B, H, 3, 32, 5, 16).transpose(3, 4).flatten(4).any(-1)
    assert torch.equal(block.to_dense().bool().expand(B, H, 3, 5), blocks)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_score(name, dtype):
    q, k, v = tensors(dtype)
    out, aux = st.flex_attention(
        q,
        k,
        v,
        SCORES[name],
        enable_gqa=True,
        return_aux=st.AuxRequest(lse=True, max_scores=True),
    )
    want, lse, row_max = dense(q, k, v, SCORES[name])
    close(out, want, dtype)
    close(aux.lse, lse, torch.float32)
    close(aux.max_scores, row_max, torch.float32)


def test_language_text():
    q, k, v = tensors()
    doc = torch.arange(max(Q, KV)) // 20
    a = st.flex_attention(q, k, v, "score + 0.5 * (kv - q)", "q >= kv", enable_gqa=True)
    want, _, _ = dense(
        q, k, v, lambda s, b, h, i, j: s + 0.5 * (j - i), lambda b, h, i, j: i >= j
    )
    close(a, want, torch.float32)
    both = st.and_masks(st.mask("doc[q] == doc[kv]", doc=doc), MASKS["causal"])
    b = st.flex_attention(
        q, k, v, block_mask=st.create_block_mask(both, None, None, Q, KV), enable_gqa=True
    )
    want, _, _ = dense(q, k, v, None, lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j))
    close(b, want, torch.float32)


def test_numbers_change_without_tracing():
    q, k, v = tensors()
    from saccade.trace import closures

    def make(window, slope):
        return (lambda b, h, i, j: i - j <= window, lambda s, b, h, i, j: s + slope * (j - i))

    first = [closures.trace(m, kind)[0] for m, kind in zip(make(3, 0.5), ("mask", "score"))]
    again = [closures.trace(m, kind)[0] for m, kind in zip(make(30, 0.1), ("mask", "score"))]
    assert first[0] is again[0] and first[1] is again[1]
    m, s = make(30, 0.1)
    out = st.flex_attention(q, k, v, s, m, enable_gqa=True)
    close(out, dense(q, k, v, s, m)[0], torch.float32)


def test_changed_closure_is_seen():
    q, k, v = tensors()
    bias = torch.zeros(H)
    mod = lambda s, b, h, i, j: s * bias[h]  # noqa: E731
    first = st.flex_attention(q, k, v, mod, enable_gqa=True)
    bias += 3
    assert not torch.allclose(first, st.flex_attention(q, k, v, mod, enable_gqa=True))
    bias = torch.zeros(H)
    assert torch.allclose(first, st.flex_attention(q, k, v, mod, enable_gqa=True))


@pytest.mark.parametrize("layout", ["bnhd", "sliced", "expanded"])
def test_strides(layout):
    q, k, v = tensors()
    want, _, _ = dense(q, k, v)
    if layout == "bnhd":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "sliced":
        q, k, v = (torch.cat([t, t * float("nan")], -1)[..., :D] for t in (q, k, v))
    else:
        k, v = k[:1], v[:1]
        want, _, _ = dense(q, k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1))
    out = st.flex_attention(q, k, v, enable_gqa=True)
    close(out, want, torch.float32)
    if layout == "bnhd":
        assert out.stride() == q.stride()


def test_block_mask_views():
    q, k, v = tensors()
    full = st.create_block_mask(MASKS["document_causal"], B, H, Q, KV, BLOCK_SIZE=16)
    cut = full._adjust(40, 64)
    out = st.flex_attention(
        q[:, :, :40], k[:, :, :64], v[:, :, :64], block_mask=cut, enable_gqa=True
    )
    want, _, _ = dense(
        q, k, v, mask_mod=lambda b, h, i, j: MASKS["document_causal"](b, h, i, j) & (j < 64)
    )
    close(out, want[:, :, :40], torch.float32)
    row = full[:, :, 2]
    out = st.flex_attention(q[:, :, 32:48], k, v, block_mask=row, enable_gqa=True)
    close(out, dense(q, k, v, mask_mod=MASKS["document_causal"])[0][:, :, 32:48], torch.float32)
    import io
    import pickle

    text = st.create_block_mask("q >= kv", None, None, Q, KV)
    back = pickle.loads(pickle.dumps(text))
    assert torch.equal(back.kv_indices, text.kv_indices) and back.shape == text.shape
    assert io.StringIO(str(full)).read().startswith("BlockMask(shape=(2, 4, 65, 80)")


def test_from_kv_blocks():
    q, k, v = tensors()
    made = st.create_block_mask(MASKS["causal"], None, None, Q, KV, BLOCK_SIZE=16)
    again = st.BlockMask.from_kv_blocks(
        made.kv_num_blocks,
        made.kv_indices,
        made.full_kv_num_blocks,
        made.full_kv_indices,
        BLOCK_SIZE=16,
        mask_mod=MASKS["causal"],
        seq_lengths=(Q, KV),
    )
    assert torch.equal(again.q_num_blocks, made.q_num_blocks)
    a = st.flex_attention(q, k, v, block_mask=made, enable_gqa=True)
    assert torch.equal(a, st.flex_attention(q, k, v, block_mask=again, enable_gqa=True))


def test_errors():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="enable_gqa"):
        st.flex_attention(q, k, v)
    with pytest.raises(ValueError, match="dtype"):
        st.flex_attention(q, k.double(), v, enable_gqa=True)
    with pytest.raises(ValueError, match="created for a smaller length"):
        st.flex_attention(
            q,
            k,
            v,
            block_mask=st.create_block_mask("q >= kv", None, None, 9, 9),
            enable_gqa=True,
        )

    def branch(b, h, q_idx, kv_idx):
        if q_idx > kv_idx:
            return True
        return False

    with pytest.raises(TypeError, match="torch.where") as caught:
        st.create_block_mask(branch, None, None, Q, KV)
    assert "if q_idx > kv_idx" in str(caught.value)
    with pytest.raises(ValueError, match="1:"):
        st.flex_attention(q, k, v, "score +", enable_gqa=True)
    big = torch.tensor([1 << 40] * Q)
    with pytest.raises(ValueError, match="32-bit"):
        st.flex_attention(q, k, v, lambda s, b, h, i, j: s + big[i], enable_gqa=True)


def test_f64():
    """By the reference, as exact as the dense computation here."""
    q, k, v = (t.double() for t in tensors())
    out, lse = st.flex_attention(
        q, k, v, SCORES["alibi"], "q >= kv", enable_gqa=True, return_lse=True
    )
    want, want_lse, _ = dense(q, k, v, SCORES["alibi"], lambda b, h, i, j: i >= j)
    assert out.dtype is torch.float64 and lse.dtype is torch.float64
    assert float((out - want).abs().max()) < 1e-5
    assert float((lse - want_lse).abs().max()) < 1e-5


def test_create_mask_of_text():
    i, j = torch.arange(9)[:, None], torch.arange(9)
    assert torch.equal(st.create_mask("q >= kv", None, None, 9, 9, "cpu")[0, 0], i >= j)
    with pytest.raises(ValueError, match="got a score in text"):
        st.create_mask("score * 2", None, None, 9, 9)
    with pytest.raises(ValueError, match="1:3: got '=<'.*write <="):
        st.create_mask("q =< kv", None, None, 9, 9)
    with pytest.raises(TypeError, match="'q >= kv': got a call outside of a traced mod"):
        st.and_masks("q >= kv", "kv > 2")(0, 0, i, j)
    cut = lambda s, b, h, q, kv: torch.where(q == kv, -math.inf, s)  # noqa: E731
    assert torch.equal(st.create_mask(cut, None, None, 9, 9, "cpu")[0, 0], i != j)


def test_long_block_mask():
    made = st.create_block_mask(MASKS["sliding"], None, None, 131072, 131072)
    assert made.sparsity() > 99


def test_numbers_of_double_problems_are_double():
    from saccade.torch.mods import Resolved

    c = 0.1
    mod = lambda s, b, h, i, j: s * c  # noqa: E731
    for is_double, dtype in ((False, "f32"), (True, "f64")):
        assert [v.dtype for v in Resolved(mod, "score", "cpu", is_double).views] == [dtype]
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=torch.float64) for _ in range(3))
    for c in (0.1, 0.3, 0.1):  # found again by its layout
        again = lambda s, b, h, i, j, c=c: s * c  # noqa: E731
        for m in (mod, again):
            want = torch.softmax(q @ k.mT / 4 * c, -1) @ v
            assert torch.allclose(st.flex_attention(q, k, v, m), want, rtol=1e-14, atol=1e-14)


def test_scale_of_double_problems_is_double():
    q, k, v = torch.randn(3, 1, 2, 9, 5, dtype=torch.float64)
    for scale in (None, 0.1):
        want = torch.softmax(q @ k.mT * (5**-0.5 if scale is None else scale), -1) @ v
        got = st.flex_attention(q, k, v, scale=scale)
        assert float((got - want).abs().max()) < 1e-14


@pytest.mark.parametrize(
    "f",
    [
        lambda s, t: s * 0.1,
        lambda s, t: s + t / 3,
        lambda s, t: s * t * 1e-3,
        lambda s, t: torch.nn.functional.gelu(s) + torch.atan(t) * 0.7,
        lambda s, t: torch.log1p(s * s) + torch.expm1(t * 1e-9),
        lambda s, t: torch.where(s > 0.3, 1 / 3, s),
    ],
)
def test_double_to_the_end(f):
    """Literals of a traced mod too, which in text are f32."""
    q, k, v = torch.randn(3, 1, 2, 9, 16, dtype=torch.float64)
    t = torch.randn(9, dtype=torch.float64)
    got = st.flex_attention(q, k, v, lambda s, b, h, i, j: f(s, t[j].double()))
    want = torch.softmax(f(q @ k.mT / 4, t.expand(9, 9)), -1) @ v
    assert float((got - want).abs().max()) < 1e-13


def test_refusals_have_pytorchs_words():
    q = torch.randn(1, 1, 16, 16)
    same = "Expected query, key, and value to have the same "
    for other, what in ((q.half(), "dtype"), (q.to("meta"), "device type")):
        with pytest.raises(ValueError, match=f"{same}{what}, but got query.{what[:5]}"):
            st.flex_attention(q, other, other)


def test_options_over_ranks(monkeypatch):
    """What holds in one process only is refused; keys are checked as elsewhere."""
    q = torch.randn(1, 1, 16, 16)
    ranks = SimpleNamespace(
        attention=lambda *given: (given[0], None), device=torch.device("cpu")
    )
    monkeypatch.setattr(active, "parallel", ranks)
    with pytest.raises(ValueError, match="BATCH_INVARIANT inside of context_parallel"):
        st.flex_attention(q, q, q, kernel_options={"BATCH_INVARIANT": True})
    with pytest.raises(ValueError, match="BACKEND 'cuda' inside of context_parallel"):
        st.flex_attention(q, q, q, kernel_options={"BACKEND": "cuda"})
    with pytest.raises(ValueError, match="unknown key 'BLOK_M', did you mean"):
        st.flex_attention(q, q, q, kernel_options={"BLOK_M": 64})
    tuned = {"BLOCK_M": 64, "BATCH_INVARIANT": False}
    assert st.flex_attention(q, q, q, kernel_options=tuned) is q


def test_strides_follow_the_query_where_a_length_is_one():
    """The order of strides, too, where a dimension of one element has an odd one."""
    x = [torch.randn(2, 1, 24, 16).permute(0, 2, 1, 3) for _ in range(3)]
    assert x[0].stride() == (384, 16, 384, 1)
    for _ in range(3):
        assert st.flex_attention(*x).stride() == x[0].stride()
    plain = [t.contiguous().view(2, 1, 24, 16) for t in x]
    assert st.flex_attention(*plain).stride() == plain[0].stride()
    spread = [t[:1].contiguous().view(1, 1, 24, 16).expand(1, 1, 24, 16) for t in x]
    assert st.flex_attention(*spread).is_contiguous()


@pytest.mark.parametrize("code", (torch.float8_e4m3fn, torch.float8_e5m2))
@pytest.mark.parametrize("is_compiled", (False, True))
def test_keys_and_values_in_fp8(code, is_compiled):
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.bfloat16) for _ in range(3))
    k, v = k.to(code), v.to(code)
    call = st.flex_attention
    if is_compiled:
        call = torch.compile(call, fullgraph=True)
    expected = st.flex_attention(q, k.bfloat16(), v.bfloat16(), "softcap(3)")
    assert torch.equal(call(q, k, v, "softcap(3)"), expected)
    with pytest.raises(ValueError, match="same dtype"):
        st.flex_attention(q, k.float(), v)


@pytest.mark.parametrize("B, Q", ((0, 5), (2, 0)))
def test_no_rows_have_gradients_of_zeros(B, Q):
    q, k, v = (
        torch.randn(s, requires_grad=True)
        for s in ((B, 4, Q, 16), (B, 2, 9, 16), (B, 2, 9, 8))
    )
    w = torch.randn(4, requires_grad=True)
    out, aux = st.flex_attention(
        q, k, v, lambda s, b, h, i, j: s * w[h], enable_gqa=True,
        return_aux=st.AuxRequest(True, True),
    )  # fmt: skip
    assert out.shape == (B, 4, Q, 8) and aux.lse.shape == aux.max_scores.shape == (B, 4, Q)
    assert aux.lse.dtype is torch.float32 and not aux.max_scores.requires_grad
    out.sum().backward()
    for t in (q, k, v, w):
        assert torch.equal(t.grad, torch.zeros_like(t))
    with pytest.raises(ValueError, match="multiple"):
        st.flex_attention(q[:, :3], k, v, enable_gqa=True)


def test_options_of_newer_torch():
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    options = {"BACKEND": "TRITON", "FLOAT32_PRECISION": "'ieee'", "PARTITION_SIZE": 64}
    assert torch.equal(
        st.flex_attention(q, k, v, kernel_options=options), st.flex_attention(q, k, v)
    )
