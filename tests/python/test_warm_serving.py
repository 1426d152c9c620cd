"""Warm calls of cached_attention: the bits of calls in full, with every number looked at."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from saccade.torch import warm, warm_serving  # noqa: E402

if warm.extension is None:
    pytest.skip("the extension is not built, or this PyTorch is older", allow_module_level=True)

B, H, HKV, D, PAGE, MOST = 2, 4, 2, 16, 16, 3


@pytest.fixture(autouse=True)
def fresh():
    warm_serving._known.clear()


def kept():
    """The one call that is kept, which can be made again."""
    (found,) = warm_serving._known.values()
    assert found.run is not None
    return found


def inputs(seed, rows=1, dim=D, keys=PAGE * MOST, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    sizes = (H, rows, D), (HKV, keys, D), (HKV, keys, dim)
    return [torch.randn(B, *size, generator=g).to(dtype) for size in sizes]


def in_full(*args, **options):
    """The same by the way that every first call takes."""
    warm_serving._known.clear()
    return st.cached_attention(*args, **options)


def lens(*n):
    return torch.tensor(n, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [D, 24])
@pytest.mark.parametrize("return_lse", [False, True])
def test_calls_of_one_layout(dtype, dim, return_lse):
    for lengths in ([3, 44, 48], [lens(40, 7), lens(48, 2), lens(5, 5)], [None] * 3):
        warm_serving._known.clear()
        calls = []
        for seed, n in enumerate(lengths):
            args = inputs(seed, 2, dim, dtype=dtype)
            found = st.cached_attention(*args, seq_lens=n, return_lse=return_lse)
            calls.append((args, n, found))
            kept()
        for args, n, found in calls:
            want = in_full(*args, seq_lens=n, return_lse=return_lse)
            for a, b in zip(*((x,) if not return_lse else x for x in (found, want))):
                assert torch.equal(a, b) and a.stride() == b.stride()


def test_the_second_call_is_warm(monkeypatch):
    table, pools = torch.randperm(B * MOST).view(B, MOST).int(), inputs(5)[1:]
    pools = [x.reshape(B * MOST, HKV, PAGE, D) for x in pools]
    calls = []
    for seed in range(3):
        q = inputs(seed)[0]
        options = dict(block_table=table, seq_lens=lens(20 + seed, 48))
        calls.append((q, options, st.cached_attention(q, *pools, **options)))
        kept()
        monkeypatch.setattr(st.serving, "_form_of", None)  # a call in full would fail
    monkeypatch.undo()
    for q, options, found in calls:
        assert torch.equal(found, in_full(q, *pools, **options))


@pytest.mark.parametrize("is_paged", [False, True])
def test_sequences_side_by_side(is_paged, monkeypatch):
    table, calls = torch.randperm(B * MOST).view(B, MOST).int(), []
    _, *pools = inputs(5)
    pools = [x.reshape(B * MOST, HKV, PAGE, D) for x in pools]
    packed = [x.transpose(1, 2).reshape(-1, HKV, D) for x in pools]
    for seed, ends in enumerate([(0, 3, 8), (0, 8, 8), (0, 1, 8)]):
        q = torch.randn(8, H, D)
        options = dict(cu_seqlens_q=lens(*ends), max_seqlen_q=8, return_lse=True)
        if is_paged:
            args, more = (q, *pools), dict(block_table=table, seq_lens=lens(20 + seed, 48))
        else:
            args, more = (q, *packed), dict(cu_seqlens_k=lens(0, 40 + seed, 96))
        options |= more
        calls.append((args, options, st.cached_attention(*args, **options)))
        kept()
        monkeypatch.setattr(st.serving, "_form_of", None)
    monkeypatch.undo()
    for args, options, found in calls:
        for a, b in zip(found, in_full(*args, **options)):
            assert torch.equal(a, b)
    for ends in ((0, 9, 8), (0, -1, 8), (0, 3, 9)):
        with pytest.raises(ValueError, match="cu_seqlens"):
            st.cached_attention(*args, **{**options, "cu_seqlens_q": lens(*ends)})
    if is_paged:
        with pytest.raises(ValueError, match="seq_lens"):
            st.cached_attention(*args, **{**options, "seq_lens": lens(48, 49)})
        absent = table.clone()
        absent[1, 2] = -1
        with pytest.raises(ValueError, match="block_table: got -1 in entry 2 of batch 1"):
            st.cached_attention(*args, **{**options, "block_table": absent})


def test_what_differs_is_not_taken_for_it():
    q, k, v = inputs(0)
    n = lens(40, 9)
    st.cached_attention(q, k, v, seq_lens=n)
    ways = [
        ((q, k, v, None), dict(seq_lens=n)),
        ((q, k, v, "q >= kv && kv > 3"), dict(seq_lens=n)),
        ((q, k, v, "causal()", "score * 2"), dict(seq_lens=n)),
        ((q, k, v), dict(seq_lens=n, scale=0.25)),
        ((q, k, v), dict(seq_lens=n, sinks=torch.ones(H))),
        ((q, k, v), dict(seq_lens=n, q_offset=lens(5, 6))),
        ((q, k, v), dict(seq_lens=40)),
        ((q.double(), k.double(), v.double()), dict(seq_lens=n)),
        ((q, k.transpose(1, 2).contiguous().transpose(1, 2), v), dict(seq_lens=n)),
        ((q.expand(B, H, 1, D), k[:1].expand(B, -1, -1, -1), v), dict(seq_lens=n)),
        ((q.repeat(1, 1, 1, 2)[..., :D], k, v), dict(seq_lens=n)),
    ]
    for args, options in ways:
        found = st.cached_attention(*args, **options)
        assert torch.equal(st.cached_attention(*args, **options), found)
        known = dict(warm_serving._known)
        assert torch.equal(in_full(*args, **options), found)
        warm_serving._known.update(known)


def test_sinks_and_scales():
    q, k, v = inputs(1)
    (kq, ks), (vq, vs) = (st.quantize(x, "i8") for x in (k, v))
    for sinks in (torch.ones(H), -torch.ones(H)):
        for factor in (1, 2):
            options = dict(seq_lens=30, sinks=sinks, k_scale=ks * factor, v_scale=vs)
            found = st.cached_attention(q, kq, vq, **options)
            assert torch.equal(found, in_full(q, kq, vq, **options))
            st.cached_attention(q, kq, vq, **options)


def test_numbers_are_looked_at_each_time():
    table = torch.arange(B * MOST).view(B, MOST).int()
    q, *pools = inputs(2)
    pools = [x.reshape(B * MOST, HKV, PAGE, D) for x in pools]

    def call(n, table=table, q=q, **options):
        return st.cached_attention(q, *pools, block_table=table, seq_lens=n, **options)

    call(lens(48, 48))
    kept()
    with pytest.raises(ValueError, match="seq_lens: got 49 for batch 1, expected 0 to 48"):
        call(lens(48, 49))
    with pytest.raises(ValueError, match="block_table: .*got 6"):
        call(lens(48, 48), torch.tensor([[0, 1, 2], [3, 4, 6]]).int())
    with pytest.raises(ValueError, match="block_table: got -1 in entry 1 of batch 1"):
        call(lens(48, 48), torch.tensor([[0, 1, 2], [3, -1, 5]]).int())
    with pytest.raises(ValueError, match="seq_lens"):
        call(torch.tensor([48, 48]))
    with pytest.raises(ValueError, match="query: requires grad"):
        call(lens(48, 48), q=q.clone().requires_grad_())
    with pytest.raises(ValueError, match="query"):
        call(lens(48, 48), q=None)
    with torch.no_grad():
        call(lens(48, 48), q=q.clone().requires_grad_())
    call(48)
    with pytest.raises(ValueError, match="seq_lens: got 49, expected 0 to 48"):
        call(49)
    with pytest.raises(ValueError, match="seq_lens: got -1, expected 0 to 48"):
        call(-1)


def test_a_tensor_of_negatives_is_read_as_its_values():
    q, k, v = inputs(3)
    st.cached_attention(q, k, v, seq_lens=20)
    z = torch._neg_view(-q)
    assert z.is_neg() and torch.equal(z, q)
    assert torch.equal(st.cached_attention(z, k, v, seq_lens=20), in_full(q, k, v, seq_lens=20))


def test_tensors_are_not_held():
    table = torch.arange(B * MOST).view(B, MOST).int()
    q, *pools = inputs(2)
    pools = [x.reshape(B * MOST, HKV, PAGE, D).clone() for x in pools]
    n = lens(48, 48)
    for _ in range(2):
        st.cached_attention(q, *pools, block_table=table, seq_lens=n)
    kept()
    refs = [weakref.ref(t) for t in (q, *pools, table, n)]
    del q, pools, table, n
    gc.collect()
    assert not any(r() is not None for r in refs)


def test_no_more_than_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(warm_serving, "_MOST", 3)
    q, k, v = inputs(0, keys=PAGE)
    for n in range(1, 9):
        st.cached_attention(q, k[:, :, :n], v[:, :, :n])
        assert 0 < len(warm_serving._known) <= 3
