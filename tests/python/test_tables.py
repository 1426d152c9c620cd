"""Tables of pages on the host name pages that are there, or the call says which does not."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402

POOL = torch.randn(10, 2, 8, 16)


def numbers(*x):
    return torch.tensor(x, dtype=torch.int32)


def by_table(table, lengths=(16, 9), rows=1, **more):
    given = dict(block_table=numbers(*table).view(2, 2), seq_lens=numbers(*lengths))
    return st.cached_attention(torch.randn(2, 4, rows, 16), POOL, POOL, **given, **more)


def by_indices(indices, **more):
    given = dict(indices=numbers(*indices), indptr=numbers(0, 2, 4))
    given |= dict(last_page_len=numbers(8, 1))
    return st.cached_attention(torch.randn(2, 4, 1, 16), POOL, POOL, **given, **more)


def ragged(table, lengths=(16, 9), call=st.cached_attention, **more):
    given = dict(block_table=numbers(*table).view(2, 2), seq_lens=numbers(*lengths))
    starts = dict(cu_seqlens_q=numbers(0, 3, 5))
    return call(torch.randn(5, 4, 16), POOL, POOL, **starts, **given, **more)


def varlen(table, **more):
    return ragged(table, call=st.varlen_attention, align="end", **more)


CALLS = {"block_table": [by_table, ragged, varlen], "indices": [by_indices]}
EACH = [(name, call) for name, calls in CALLS.items() for call in calls]


@pytest.mark.parametrize("name,call", EACH)
@pytest.mark.parametrize("page", [10, 99, -2, -1])
def test_a_page_that_is_not_there(name, call, page):
    with pytest.raises(ValueError) as found:
        call([0, 1, 9, page])
    text = str(found.value)
    assert text.startswith(f"{name}: got {page} in entry 1 of batch 1") and "\n" not in text
    assert "expected" in text and " 9" in text


@pytest.mark.parametrize("name,call", EACH)
def test_every_key_without_a_mask(name, call):
    with pytest.raises(ValueError, match=f"{name}: got -1 in entry 0 of batch 0"):
        call([-1, 1, 9, 2], mask=None)


def test_a_table_costs_what_its_sequences_hold(monkeypatch):
    """It may have room for the longest sequence that a model takes: no entry past the lengths
    is made a number of Python's, in first calls and in those that follow."""
    read, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: read.append(t.numel()) or tolist(t))
    wide = torch.full((2, 1 << 12), -1, dtype=torch.int32)
    wide[:, :2] = numbers(0, 1, 9, 3).view(2, 2)
    q = torch.randn(2, 4, 1, 16)
    for mask in ("causal()", None):
        for _ in range(2):
            given = dict(block_table=wide, seq_lens=numbers(16, 9))
            out = st.cached_attention(q, POOL, POOL, mask, **given)
        same = st.cached_attention(q, POOL, POOL, mask, **given | dict(block_table=wide[:, :2]))
        assert torch.equal(out, same)
    assert read and max(read) <= 4


def test_entries_past_a_length_mean_nothing():
    whole = by_table([0, 1, 9, 3], (16, 8)).shape
    assert by_table([0, 1, 9, -1], (16, 8)).shape == whole
    assert by_table([0, 1, 9, 99], (16, 8)).shape == whole
    assert ragged([0, 1, 9, -1], (16, 8)).shape == (5, 4, 16)


def test_pages_behind_a_window_may_be_absent():
    window = "q >= kv && q - kv < 8"
    torch.manual_seed(0)
    freed = by_table([-1, 1, 9, 2], (16, 9), mask=window)
    torch.manual_seed(0)
    assert torch.equal(by_table([0, 1, 9, 2], (16, 9), mask=window), freed)


def test_rows_that_stand_before_an_absent_page():
    assert by_table([0, -1, 9, 2], q_offset=numbers(7, 8)).shape == (2, 4, 1, 16)
    with pytest.raises(ValueError, match="entry 1 of batch 0"):
        by_table([0, -1, 9, 2], q_offset=numbers(8, 8))
    with pytest.raises(ValueError, match="entry 1 of batch 0"):
        by_table([0, -1, 9, 2], rows=2, q_offset=numbers(7, 7))


def test_sequences_without_queries_see_nothing():
    starts = dict(cu_seqlens_q=numbers(0, 5, 5))
    table = dict(block_table=numbers(0, 1, -1, -1).view(2, 2), seq_lens=numbers(16, 9))
    out = st.cached_attention(torch.randn(5, 4, 16), POOL, POOL, **starts, **table)
    assert bool(out.isfinite().all())


def test_block_masks_are_for_flex_attention():
    block_mask = st.create_block_mask("q >= kv", None, None, 1, 16, device="cpu")
    with pytest.raises(TypeError, match="mask: got a BlockMask, expected a callable, or text"):
        by_table([0, 1, 9, 2], mask=block_mask)


def test_what_has_no_keys():
    q, empty = torch.randn(2, 4, 1, 16), POOL[:, :, :0]
    with pytest.raises(ValueError, match="key: got pages of 0 keys, expected 1 or more"):
        given = dict(block_table=numbers(0, 1).view(2, 1), seq_lens=numbers(1, 1))
        st.cached_attention(q, empty, empty, **given)
    with pytest.raises(ValueError, match="key: got a pool of 0 pages, expected 1 or more"):
        st.cached_attention(q, POOL[:0], POOL[:0], **given)
    with pytest.raises(ValueError, match="got a table of 0 columns, expected 1 or more"):
        given["block_table"] = numbers().view(2, 0)
        st.cached_attention(q, POOL, POOL, **given)
    with pytest.raises(ValueError, match="key: got 0 keys, expected 1 or more"):
        st.cached_attention(q, POOL[:2, :, :0], POOL[:2, :, :0])
    with pytest.raises(ValueError, match="got head dims 0 and 16, expected 1 or more"):
        st.cached_attention(q[..., :0], POOL[:2, ..., :0], POOL[:2])
    with pytest.raises(ValueError, match="seq_lens: got indices without lengths"):
        st.cached_attention(q, POOL, POOL, indices=numbers(0, 1), indptr=numbers(0, 1, 2))
