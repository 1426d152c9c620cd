"""attention-gym's recipes that are more than one mod: paged caches, merged parts, undone
activations; each against dense attention in float64."""

import math

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from catalogue import masks, scores  # noqa: E402

B, H, HKV, Q, KV, D = 2, 6, 2, 37, 96, 16
G = torch.Generator().manual_seed(5)
q, k, v = (torch.randn(B, h, n, D, generator=G) for h, n in ((H, Q), (HKV, KV), (HKV, KV)))


def dense(score_mod=None, mask_mod=None, kv_len=(KV,) * B):
    """out and lse in float64."""
    i, j = torch.arange(Q)[:, None], torch.arange(KV)[None]
    s = q.double() @ k.double().repeat_interleave(H // HKV, 1).mT / math.sqrt(D)
    for b in range(B):
        for h in range(H):
            at = (torch.tensor(b), torch.tensor(h), i, j)
            if score_mod is not None:
                s[b, h] = score_mod(s[b, h], *at)
            if mask_mod is not None:
                s[b, h].masked_fill_(~mask_mod(*at), -math.inf)
            s[b, h, :, kv_len[b] :] = -math.inf
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse.isinf(), 0, lse)[..., None])
    return p @ v.double().repeat_interleave(H // HKV, 1), lse


def attend(*arguments, **options):
    return st.flex_attention(*arguments, enable_gqa=True, return_lse=True, **options)


def close(got, want, bound=1e-4):
    assert torch.equal(got.isinf(), want.isinf())
    got, want = (torch.where(want.isinf(), 0, x) for x in (got.double(), want))
    assert float((got - want).abs().max()) < bound * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("name", ["causal", "sliding", "document_causal"])
@pytest.mark.parametrize("score", [None, "alibi", "bias_kv"])
def test_paged_cache(name, score):
    """torch's own PagedAttention over our attention: mods and masks of physical positions."""
    paged = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    page, lengths = 16, (96, 51)
    mask = masks(B, H, Q, KV, torch.Generator().manual_seed(1))[name]
    mod = score and scores(B, H, Q, KV, torch.Generator().manual_seed(1))[score]
    cache = paged.PagedAttention(24, page, B, device="cpu")
    for b in (1, 0):  # so that pages lie in another order than positions
        cache.reserve(torch.tensor(b), torch.tensor(lengths[b]))
    k_cache, v_cache = (torch.full((1, HKV, 24 * page, D), 3.0) for _ in range(2))
    at = torch.arange(KV)
    for b in range(B):
        some = (torch.tensor([b]), at[None, : lengths[b]])
        n = lengths[b]
        cache.assign(*some, k[b : b + 1, :, :n], v[b : b + 1, :, :n], k_cache, v_cache)
    kv_len = torch.tensor(lengths)
    logical = st.create_block_mask(mask, B, None, Q, KV, BLOCK_SIZE=page, device="cpu")
    try:
        converted = cache.convert_logical_block_mask(logical, kv_len=kv_len)
    except TypeError:  # torch before kv_len
        pytest.skip("this PagedAttention knows no kv_len")
    converted.mask_mod = cache.get_mask_mod(mask, kv_len=kv_len)
    converted.seq_lengths = (Q, 24 * page)
    got = attend(q, k_cache, v_cache, cache.get_score_mod(mod, kv_len=kv_len), converted)
    want = dense(mod, mask, lengths)
    for a, b in zip(got, want):
        close(a, b)


def test_parts_merge_by_lse():
    """A shared prefix and the rest, attended to apart and merged."""
    mask = lambda b, h, i, j: i + 40 >= j  # noqa: E731
    cut, want = 48, dense(None, mask)
    parts = []
    for first, end in ((0, cut), (cut, KV)):
        moved = lambda b, h, i, j: mask(b, h, i, j + first)  # noqa: E731, B023
        block = st.create_block_mask(moved, None, None, Q, end - first)
        parts.append(attend(q, k[:, :, first:end], v[:, :, first:end], None, block))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(o * torch.exp(part - lse)[..., None] for o, part in parts)
    close(lse, want[1])
    close(out, want[0])


def test_activation_attention_undone():
    """relu(s) v, not normalised: softmax of log(relu(s) + c), times exp(lse), less c sum(v)."""
    mod = scores(B, H, Q, KV, G)["activation"]
    out, lse = attend(q, k, v, mod)
    got = out * lse.exp()[..., None] - 1e-3 * v.repeat_interleave(3, 1).sum(2, keepdim=True)
    s = q.double() @ k.double().repeat_interleave(3, 1).mT / math.sqrt(D)
    close(got, torch.relu(s) @ v.double().repeat_interleave(3, 1))


def test_sink():
    """One more logit per head in the denominator, from lse."""
    sink = torch.randn(H, generator=G)
    out, lse = attend(q, k, v, None, "q >= kv")
    got = out * torch.sigmoid(lse - sink[:, None])[..., None]
    want, want_lse = dense(None, lambda b, h, i, j: i >= j)
    full = torch.logaddexp(want_lse, sink.double()[:, None])
    close(got, want * torch.exp(want_lse - full)[..., None])


def test_named_variants():
    """Variants of the prelude by name, captures as arguments."""
    doc = torch.arange(KV) // 20
    out = attend(q, k, v, "softcap(20.0)", st.mask("document(doc) && causal()", doc=doc))
    want = dense(
        lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
        lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j),
    )
    for a, b in zip(out, want):
        close(a, b)
    out = attend(q, k, v, "alibi()", "sliding_window(9)")
    want = dense(
        lambda s, b, h, i, j: s + torch.exp2(-8.0 * (h + 1) / H) * (j - i),
        lambda b, h, i, j: (i >= j) & (i - j <= 9),
    )
    for a, b in zip(out, want):
        close(a, b)


def test_example(capsys):
    import runpy
    from pathlib import Path

    runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "packed.py"))
    assert "largest difference" in capsys.readouterr().out
