"""cached_attention over quantised caches, against attention over the numbers they stand for."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from saccade.c.abi import SaccadeError  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
B, H, HKV, KV, D, DV = 2, 4, 2, 48, 32, 16
GROUPS = [dict(tokens=0), dict(tokens=0, shared=True), dict(tokens=1), dict(tokens=16),
          dict(tokens=0, channels=1), dict(tokens=8, channels=4)]


def numbers(codes, scale, dtype):
    """What codes and scales stand for, made by PyTorch alone."""
    if dtype == "i4":
        x = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()
        x = torch.where(x > 7, x - 16, x)
    else:
        x = codes
    x = x.float()
    by = scale.float()
    by = by.repeat_interleave(x.shape[2] // by.shape[2], 2)
    return x * by.repeat_interleave(x.shape[3] // by.shape[3], 3)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "i8", "i4"])
def test_attention_is_that_over_the_numbers(dtype):
    torch.manual_seed(3)
    q = torch.randn(B, H, 3, D)
    for groups in GROUPS:
        k, v = torch.randn(B, HKV, KV, D), torch.randn(B, HKV, KV, DV)
        (kc, ks), (vc, vs) = (st.quantize(x, dtype, **groups) for x in (k, v))
        out = st.cached_attention(q, kc, vc, k_scale=ks, v_scale=vs)
        k2, v2 = numbers(kc, ks, dtype), numbers(vc, vs, dtype)
        want = st.cached_attention(q, k2, v2)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        bits = {"e4m3": 4, "e5m2": 3, "i8": 7, "i4": 3}[dtype]
        assert (k2 - k).abs().max() <= k.abs().max() * 2.0**-bits


def test_pages():
    torch.manual_seed(4)
    page, lengths = 16, torch.tensor([48, 33], dtype=torch.int32)
    q = torch.randn(B, H, 1, D, dtype=torch.bfloat16)
    k, v = torch.randn(B, HKV, KV, D), torch.randn(B, HKV, KV, DV)
    (kc, ks), (vc, vs) = (st.quantize(x, "i8", scale_dtype=torch.float16) for x in (k, v))
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)

    def pooled(x):
        pool = torch.zeros(6, HKV, page, x.shape[3], dtype=x.dtype)
        for b in range(B):
            for i in range(3):
                pool[table[b, i]] = x[b, :, i * page : (i + 1) * page]
        return pool

    want = st.cached_attention(q, kc, vc, seq_lens=lengths, k_scale=ks, v_scale=vs)
    got = st.cached_attention(q, pooled(kc), pooled(vc), seq_lens=lengths, block_table=table,
                              k_scale=pooled(ks), v_scale=pooled(vs))
    assert torch.equal(got, want)


def test_scales_that_are_given():
    x = torch.randn(1, 1, 4, 8)
    codes, scale = st.quantize(x, "i8", tokens=0)
    again, same = st.quantize(x[:, :, 2:], "i8", tokens=0, scale=scale)
    assert same is scale and torch.equal(again, codes[:, :, 2:])


@pytest.mark.parametrize("dtype", ["e4m3", "i4"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_view_of_the_keys(dtype, device):
    """V as the first columns of K, as MLA has it, with K's scales and with its own."""
    torch.manual_seed(5)
    q, k = torch.randn(1, 16, 1, 576), torch.randn(1, 1, 60, 576)
    kc, ks = st.quantize(k, dtype)
    k2 = numbers(kc, ks, dtype)
    vc, by = kc[..., : 256 if dtype == "i4" else 512], 1e-5
    if device == "cuda":
        q, by = q.bfloat16(), 2e-2
    for own in (ks, ks * 1.5):
        cache = [x.to(device) for x in (kc, vc, ks, own)]
        got = st.cached_attention(q.to(device), *cache[:2], k_scale=cache[2], v_scale=cache[3])
        want = st.cached_attention(q.float(), k2, k2[..., :512] * (own / ks))
        torch.testing.assert_close(got.float().cpu(), want, rtol=by, atol=by)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("device", DEVICES)
def test_latent_heads_over_pages(page, device):
    """Ragged queries over pages of keys of which V is a view."""
    torch.manual_seed(6)
    n = 256 // page
    k = torch.randn(2 * n, 1, page, 576)
    kc, ks = st.quantize(k, "e4m3")
    k2 = numbers(kc, ks, "e4m3")
    table = torch.randperm(2 * n, dtype=torch.int32).view(2, n)
    lengths = torch.tensor([250, 97], dtype=torch.int32)
    q = torch.randn(8, 16, 576, dtype=torch.bfloat16)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    there = [x.to(device) for x in (q, kc, ks, table, lengths, starts)]
    got = st.cached_attention(there[0], there[1], there[1][..., :512], k_scale=there[2],
                              v_scale=there[2], block_table=there[3], seq_lens=there[4],
                              cu_seqlens_q=there[5], max_seqlen_q=5)  # fmt: skip
    for b, (begin, end) in enumerate(((0, 3), (3, 8))):
        own = q[begin:end].transpose(0, 1)[None].float()
        want = st.cached_attention(own, k2, k2[..., :512], block_table=table[b : b + 1],
                                   seq_lens=lengths[b : b + 1])[0].transpose(0, 1)  # fmt: skip
        torch.testing.assert_close(got[begin:end].float().cpu(), want, rtol=3e-2, atol=3e-2)


def test_what_does_not_fit():
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 12, 8)
    kc, ks = st.quantize(k, "i8")
    with pytest.raises(ValueError, match="scale: got 5 groups of keys"):
        st.cached_attention(q, kc, kc, k_scale=ks[:, :, :5], v_scale=ks)
    with pytest.raises(SaccadeError, match="got 1 with kv_dtype f32"):
        st.cached_attention(q, k, k, k_scale=ks)
    with pytest.raises(ValueError, match="dtype: got 'fp8', expected one of"):
        st.quantize(k, "fp8")


def test_groups_divide():
    with pytest.raises(ValueError, match="tokens: got 64, expected 0 or a divisor of 100"):
        st.quantize(torch.randn(1, 1, 100, 8), tokens=64)


@pytest.mark.parametrize("dtype", ["e4m3", "i8", "i4"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "groups", [dict(tokens=0, channels=1), dict(tokens=8), dict(tokens=4, channels=8)]
)
def test_ragged_queries_over_pages(dtype, device, query_dtype, groups):
    """Scales that keys of a page share, as those of channels."""
    torch.manual_seed(5)
    page, dim = 16, 64
    k, v = (torch.randn(8, HKV, page, dim) for _ in range(2))
    (kc, ks), (vc, vs) = (st.quantize(x, dtype, **groups) for x in (k, v))
    cache = [x.to(device) for x in (kc, vc)]
    scales = dict(k_scale=ks.to(device), v_scale=vs.to(device))
    table = torch.tensor([[5, 0, 3], [1, 4, 2], [6, 7, 6]], dtype=torch.int32, device=device)
    lengths = torch.tensor([48, 33, 20], dtype=torch.int32, device=device)
    counts, ends = (9, 1, 4), [0, 9, 10, 14]
    q = torch.randn(14, H, dim, dtype=query_dtype).to(device)
    starts = torch.tensor(ends, dtype=torch.int32, device=device)
    got = st.cached_attention(q, *cache, block_table=table, seq_lens=lengths,
                              cu_seqlens_q=starts, max_seqlen_q=9, **scales)  # fmt: skip
    numbers_of = [numbers(*x, dtype).to(device) for x in ((kc, ks), (vc, vs))]
    for b, n in enumerate(counts):
        own = q[ends[b] : ends[b + 1]].transpose(0, 1)[None]
        places = dict(block_table=table[b : b + 1], seq_lens=lengths[b : b + 1])
        alone = st.cached_attention(own, *cache, **places, **scales)[0].transpose(0, 1)
        exact = st.cached_attention(own.float(), *numbers_of, **places)[0].transpose(0, 1)
        by = 1e-5 if query_dtype is torch.float32 else 4e-2
        for want in (alone, exact):
            torch.testing.assert_close(got[ends[b] : ends[b + 1]].float(), want.float(),
                                       rtol=by, atol=by)  # fmt: skip
