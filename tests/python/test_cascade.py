"""SharedPrefix: what groups of sequences share is read once, and the result is the same."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from saccade.c.abi import SaccadeError  # noqa: E402

HKV, D = 2, 16


def case(groups, shared, rows, page, H, dtype=torch.float32):
    """Sequences of these groups: tables, lengths, queries and pools."""
    torch.manual_seed(4)
    lengths = [shared[g] + rows + 7 * i for g, n in enumerate(groups) for i in range(n)]
    B, most = len(lengths), -(-max(lengths) // page)
    table = torch.randperm(B * most).view(B, most).int()
    whole, first = table.clone(), 0
    for g, n in enumerate(groups):
        pages = shared[g] // page
        whole[first : first + n, :pages] = table[first : first + 1, :pages]
        table[first + 1 : first + n, :pages] = -1  # only the first sequence's are read
        first += n
    q = torch.randn(B, H, rows, D, dtype=dtype)
    k, v = (torch.randn(B * most, HKV, page, D, dtype=dtype) for _ in range(2))
    cu = torch.tensor([0, *groups]).cumsum(0).int()
    lengths, shared = (torch.tensor(x, dtype=torch.int32) for x in (lengths, shared))
    prefix = st.SharedPrefix(table, lengths, cu, shared, page=page, rows=rows,
                             max_shared=int(shared.max()))  # fmt: skip
    return prefix, (q, k, v), dict(block_table=whole, seq_lens=lengths)


@pytest.mark.parametrize(
    "groups,shared,rows,page,H",
    [([3, 1, 2], [64, 0, 128], 1, 16, 4), ([2, 0], [32, 0], 1, 8, 2),
     ([2, 3], [40, 64], 3, 8, 2), ([9], [96], 2, 32, 32)],
)
def test_as_without(groups, shared, rows, page, H):
    prefix, qkv, paged = case(groups, shared, rows, page, H)
    sinks = torch.randn(H)
    for more in (
        dict(score="softcap(15.0)"),
        dict(mask="q >= kv && (kv < 128 || kv % 3 != 1)", sinks=sinks),
        dict(score=st.score("score + t[h] * kv", t=torch.randn(H) / 50)),
    ):
        want, want_lse = st.cached_attention(*qkv, **more, **paged, return_lse=True)
        got, lse = prefix.attention(*qkv, **more, return_lse=True)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_lengths_are_read_in_each_call():
    prefix, qkv, paged = case([2, 1], [32, 16], 1, 8, 4)
    prefix.attention(*qkv)
    paged["seq_lens"][0] += 5  # the tensor that the object has
    torch.testing.assert_close(prefix.attention(*qkv), st.cached_attention(*qkv, **paged))


def test_checks_cost_what_sequences_hold(monkeypatch):
    """The table may have room for the longest sequence that a model takes."""
    prefix, qkv, paged = case([2, 1], [32, 16], 1, 8, 4)
    wide = torch.full((3, 1 << 12), -1, dtype=torch.int32)
    wide[:, : prefix.table.shape[1]] = prefix.table
    prefix.table, copied, clone = wide, [], torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t: copied.append(t.numel()) or clone(t))
    torch.testing.assert_close(prefix.attention(*qkv), st.cached_attention(*qkv, **paged))
    assert copied and max(copied) < 100


def test_no_sequences():
    none, ends = torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    prefix = st.SharedPrefix(none.view(0, 3), none, ends, ends[:1], page=8, max_shared=8)
    pool = torch.randn(2, HKV, 8, D)
    assert prefix.attention(torch.randn(0, 4, 1, D), pool, pool).shape == (0, 4, 1, D)


def test_parts_are_not_rounded():
    prefix, qkv, paged = case([5], [320], 1, 16, 4, torch.bfloat16)
    want = st.cached_attention(*(x.double() for x in qkv), **paged)
    usual = (st.cached_attention(*qkv, **paged).double() - want).abs().max()
    assert (prefix.attention(*qkv).double() - want).abs().max() <= 1.5 * usual


def test_infinity_of_a_sequence_stays():
    prefix, (q, k, v), paged = case([1, 1], [0, 8], 1, 8, 2)
    v[:] = float("inf")
    assert torch.equal(prefix.attention(q, k, v), st.cached_attention(q, k, v, **paged))


def test_bad_calls():
    prefix, (q, k, v), _ = case([2], [32], 1, 16, 4)
    with pytest.raises(SaccadeError, match="got one that reads b, q"):
        prefix.attention(q, k, v, score="alibi()")
    with pytest.raises(ValueError, match="got 1 sequences of 1 rows, pages of 16, expected 2"):
        prefix.attention(q[:1], k, v)
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_groups: got 2 numbers beside 2 shared_lens"):
        st.SharedPrefix(table, lengths, lengths, lengths, page=16, max_shared=16)
    with pytest.raises(ValueError, match="max_shared: got 20, .* of 16, 16 to 48 keys"):
        st.SharedPrefix(table, lengths, lengths, lengths[:1], page=16, max_shared=20)
    with pytest.raises(ValueError, match="page: got 0, expected 1 or more"):
        st.SharedPrefix(table, lengths, lengths, lengths[:1], page=0, max_shared=16)
    with pytest.raises(ValueError, match="query: got a tensor of rank 3, expected 4"):
        prefix.attention(q[0], k, v)


@pytest.mark.parametrize(
    "mask",
    ["kv < KV", "q - kv < 200", lambda b, h, q, kv: q + 1 > kv, "q >= kv && kv + h < 200"],
)
def test_masks_that_leave_what_is_shared(mask):
    prefix, qkv, paged = case([3, 1], [48, 0], 2, 16, 4)
    found = prefix.attention(*qkv, mask)
    torch.testing.assert_close(found, st.cached_attention(*qkv, mask, **paged))


def test_masks_that_hide_what_is_shared():
    prefix, qkv, paged = case([3, 1], [48, 0], 2, 16, 4)
    far = torch.tensor([200, 200, 20, 0])
    for mask, sequence, key in (
        (st.mask("last_keys(n)", n=20), 0, 0),
        ("q - kv < 40", 0, 0),
        ("kv != 17", 0, 16),
        ("h < 3 || kv < 32", 0, 32),
        (st.mask("q - kv < far[b]", far=far), 2, 0),
        (lambda b, h, q, kv: q - kv < far[b], 2, 0),
    ):
        text = f"mask: got one that hides keys of sequence {sequence} from {key} on, .* the 48"
        with pytest.raises(ValueError, match=text):
            prefix.attention(*qkv, mask)
    far[2] = 200
    st.SharedPrefix.attention(prefix, *qkv, st.mask("q - kv < far[b]", far=far))
    short = st.SharedPrefix(paged["block_table"][:1], torch.tensor([48]).int(),
                            torch.tensor([0, 1]).int(), torch.tensor([48]).int(), page=16,
                            rows=2, max_shared=48)  # fmt: skip
    with pytest.raises(ValueError, match="mask: .* sequence 0 from 47 on"):
        short.attention(qkv[0][:1], *qkv[1:])


def test_codes_and_the_largest_score():
    prefix, (q, k, v), paged = case([3], [32], 2, 16, 4)
    (k, ks), (v, vs) = (st.quantize(x, "i8") for x in (k, v))
    more = dict(k_scale=ks, v_scale=vs, return_max=True, out=torch.empty_like(q))
    found, largest = prefix.attention(q, k, v, **more)
    want, of_all = st.cached_attention(q, k, v, **paged, **{**more, "out": None})
    assert found.data_ptr() == more["out"].data_ptr() and largest.shape == (4,)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(largest, of_all)


def test_absent_pages():
    """Shared keys are seen by all queries; own ones too, where the mask tells."""
    prefix, qkv, _ = case([2, 1], [32, 16], 1, 16, 4)
    window = "q >= kv && q - kv < 1000"
    prefix.table[2, 1] = -1
    with pytest.raises(ValueError, match="block_table: got -1 in entry 1 of batch 2"):
        prefix.attention(*qkv)
    prefix.attention(*qkv, mask=window)
    prefix.table[0, 1] = -1
    for mask in ("causal()", None, window):
        with pytest.raises(ValueError, match="block_table: got -1 in entry 1 of batch 0"):
            prefix.attention(*qkv, mask=mask)
