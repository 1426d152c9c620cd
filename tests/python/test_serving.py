"""cached_attention: keys in one piece and in pages, lengths of each batch, in tensors."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402

B, H, HKV, D, DV = 3, 4, 2, 16, 24
LENGTHS = [13, 1, 40]


def plain(q, k, v, live, change=lambda s, at, q0: s):
    """Batch by batch in f64. live: keys of each; the last query stands at the last."""
    out, lse = [], []
    for i, n in enumerate(live):
        kk, vv = (x[i, :, :n].double().repeat_interleave(H // HKV, 0) for x in (k, v))
        s = q[i].double() @ kk.transpose(1, 2) / D**0.5
        rows = torch.arange(q.shape[2])[:, None] + n - q.shape[2]
        s = change(s, torch.arange(n)[None], rows)
        s = s.masked_fill(torch.arange(n)[None] > rows, -torch.inf)
        lse.append(s.logsumexp(-1))
        out.append(torch.softmax(s, -1).nan_to_num() @ vv)
    return torch.stack(out), torch.stack(lse)


def given(rows, keys):
    torch.manual_seed(1)
    return [torch.randn(B, h, n, d) for h, n, d in
            ((H, rows, D), (HKV, keys, D), (HKV, keys, DV))]


def in_pages(k, v, page, absent=-1):
    """Pools in one tensor [pages, K|V side by side, page], tables in random order."""
    most = -(-max(LENGTHS) // page)
    need = sum(-(-n // page) for n in LENGTHS)
    pool = torch.full((2 * need, HKV, page, D + DV), torch.nan)
    order, table = torch.randperm(2 * need).tolist(), torch.full((B, most), absent)
    for b, n in enumerate(LENGTHS):
        for i in range(-(-n // page)):
            at, rows = order.pop(), min(page, n - i * page)
            table[b, i] = at
            pool[at, :, :rows, :D] = k[b, :, i * page : i * page + rows]
            pool[at, :, :rows, D:] = v[b, :, i * page : i * page + rows]
    return pool[..., :D], pool[..., D:], table.int()


@pytest.mark.parametrize("rows", [1, 3])
def test_lengths_of_each_batch(rows):
    q, k, v = given(rows, 50)
    k[0, :, 13:] = torch.nan  # past the length: never read
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = st.cached_attention(q, k, v, seq_lens=lengths, return_lse=True)
    want, want_lse = plain(q, k.nan_to_num(), v, LENGTHS)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    into = torch.empty_like(out)
    assert st.cached_attention(q, k, v, seq_lens=lengths, out=into) is into
    assert torch.equal(into, out)


@pytest.mark.parametrize("page", [1, 5, 16])
def test_pages_are_bit_equal_to_one_piece(page):
    q, k, v = given(2, 40)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    slope = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    score = st.score("score - slope[h] * (q - kv)", slope=slope)
    options = dict(score=score, seq_lens=lengths, return_lse=True)
    whole = st.cached_attention(q, k, v, **options)
    keys, values, table = in_pages(k, v, page)
    paged = st.cached_attention(q, keys, values, block_table=table, **options)
    assert torch.equal(whole[0], paged[0]) and torch.equal(whole[1], paged[1])
    used = [-(-n // page) for n in LENGTHS]
    indices = torch.cat([table[b, :n] for b, n in enumerate(used)])
    indptr = torch.tensor([0, *used]).cumsum(0).int()
    last = torch.tensor([n - (p - 1) * page for n, p in zip(LENGTHS, used)]).int()
    by_last = {"seq_lens": None, "last_page_len": last}
    for more in ({}, by_last, {**by_last, "q_offset": lengths - 2}):
        again = st.cached_attention(
            q, keys, values, indices=indices, indptr=indptr, **{**options, **more}
        )
        assert torch.equal(whole[0], again[0])

    def change(s, at, rows):
        return s - slope.double()[:, None, None] * (rows - at)

    want = plain(q, k, v, LENGTHS, change)[0]
    torch.testing.assert_close(whole[0].double(), want, rtol=1e-5, atol=1e-5)


def test_windows_sinks_and_callables():
    q, k, v = given(1, 40)
    table_of = torch.arange(40) // 7
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    keys, values, table = in_pages(k, v, 4)
    by_text = st.mask("causal() && doc[kv] + 1 >= doc[q]", doc=table_of)
    options = dict(seq_lens=lengths, sinks=torch.arange(H).float())
    a = st.cached_attention(q, k, v, by_text, **options)
    b = st.cached_attention(
        q, keys, values, lambda b, h, q, kv: (q >= kv) & (table_of[kv] + 1 >= table_of[q]),
        block_table=table, **options,
    )
    assert torch.equal(a, b)
    none = st.cached_attention(q, k, v, by_text, seq_lens=lengths)
    assert not torch.allclose(a, none)


def packed(x, counts):
    """[B, heads, n, dim] to [T, heads, dim] of the first counts of each."""
    return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(counts)])


def cumulative(counts):
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.parametrize("rows", [[3, 1, 5], [0, 1, 40]])
def test_ragged_is_a_loop(rows):
    q, k, v = given(40, 40)
    of_q, of_k = cumulative(rows), cumulative(LENGTHS)
    packed_q = torch.cat([q[b, :, 40 - n :].transpose(0, 1) for b, n in enumerate(rows)])
    ids = torch.arange(40) // 9
    live = st.mask("causal() && doc[kv] + 2 > doc[q]", doc=ids)
    out, lse = st.cached_attention(
        packed_q, packed(k, LENGTHS), packed(v, LENGTHS), live, cu_seqlens_q=of_q,
        cu_seqlens_k=of_k, return_lse=True,
    )
    keys, values, table = in_pages(k, v, 8)
    lengths = torch.tensor(LENGTHS).int()
    paged = st.cached_attention(
        packed_q, keys, values, live, cu_seqlens_q=of_q, block_table=table, seq_lens=lengths
    )
    for b, (n, m) in enumerate(zip(rows, LENGTHS)):
        if n:
            one = slice(b, b + 1), slice(None)
            want, want_lse = st.cached_attention(
                q[one][:, :, 40 - n :], k[one][:, :, :m], v[one][:, :, :m], live,
                return_lse=True,
            )
            at = slice(of_q[b], of_q[b + 1])
            for x, y in ((out, want), (paged, want), (lse[..., None], want_lse[..., None])):
                torch.testing.assert_close(x[at].transpose(0, 1), y[0], rtol=1e-5, atol=1e-5)


def test_quantised_keys_and_values():
    q, k, v = given(2, 40)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)

    def as_codes(x, most):  # a scale for each key and head
        scale = x.abs().amax(-1, keepdim=True) / most
        return x / scale, scale

    def attend(k, v, k_scale=None, v_scale=None):
        return st.cached_attention(q, k, v, seq_lens=lengths, k_scale=k_scale, v_scale=v_scale)

    for dtype, most in ((torch.int8, 127), (torch.float8_e4m3fn, 448), (torch.uint8, 7)):
        made = []
        for x in (k, v):
            codes, scale = as_codes(x, most)
            if dtype is torch.float8_e4m3fn:
                codes = codes.to(dtype)
                made.append((codes, scale, codes.float() * scale))
                continue
            codes = codes.round()
            plain_codes = codes * scale
            if dtype is torch.uint8:
                halves = codes.int() & 15
                codes = halves[..., ::2] | halves[..., 1::2] << 4
            made.append((codes.to(dtype), scale, plain_codes))
        (kc, ks, kp), (vc, vs, vp) = made
        found, want = attend(kc, vc, ks, vs), attend(kp, vp)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found, attend(k, v), atol=1e-5)


def test_what_is_refused():
    q, k, v = given(1, 40)
    keys, values, table = in_pages(k, v, 4)
    for options, words in [
        (dict(block_table=table.long(), seq_lens=3), "block_table: got torch.int64 of rank 2"),
        (dict(block_table=table, indices=table[0], seq_lens=3), "both block_table and indices"),
        (dict(seq_lens=torch.tensor([1, 2]).int()), r"seq_lens: got shape \(2,\)"),
        (dict(indices=table[0], last_page_len=table[0]), "indptr: got None, expected an int32"),
    ]:
        with pytest.raises(ValueError, match=words):
            st.cached_attention(q, keys, values, **options)
    with pytest.raises(ValueError, match="requires grad"):
        st.cached_attention(q.requires_grad_(), k, v)
    with pytest.raises(ValueError, match="expected a multiple"):
        st.cached_attention(torch.randn(1, 3, 1, D), k, v)


def test_what_does_not_fit_together():
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match="q_offset: got 'start', expected 'end'"):
        st.cached_attention(q, k, k, q_offset="start")
    with pytest.raises(ValueError, match="last_page_len: got a tensor without indices"):
        st.cached_attention(q, k, k, last_page_len=torch.ones(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="max_seqlen_k: got 3 without cu_seqlens_k"):
        st.cached_attention(q, k, k, max_seqlen_k=3)
    with pytest.raises(ValueError, match="sinks: requires grad"):
        st.cached_attention(q, k, k, sinks=torch.zeros(4, requires_grad=True))
    for options, words in [
        (dict(query=q[0]), r"query: got rank 3 of strides \(8, 8, 1\), expected a tensor of"),
        (dict(key=None), "key: got None, expected a tensor of rank 4"),
        (dict(seq_lens=2.5), "seq_lens: got 2.5, expected an int32 tensor or number"),
        (dict(seq_lens=2**40), "seq_lens: got 1099511627776, expected"),
        (dict(seq_lens=[3]), r"seq_lens: got \[3\], expected"),
        (dict(q_offset=2**31), "q_offset: got 2147483648, expected"),
        (dict(value=k.bfloat16()), "value: got torch.bfloat16, expected torch.float32"),
    ]:
        with pytest.raises(ValueError, match=words):
            st.cached_attention(**{**dict(query=q, key=k, value=k), **options})
    one = torch.tensor([0], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q: got 1 numbers, expected 2"):
        st.cached_attention(q[0].transpose(0, 1), k, k, cu_seqlens_q=one)
    with pytest.raises(ValueError, match="last_page_len: got it and seq_lens"):
        st.cached_attention(
            q, k, k, indices=one, indptr=one, last_page_len=one, seq_lens=3
        )
    with pytest.raises(ValueError, match="k_scale: got rank 1, expected a tensor of rank 4"):
        st.cached_attention(q, k, k, k_scale=torch.ones(2))


def test_batch_invariant_rows_have_bits_of_their_own():
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, n, 300, 32) for n in (4, 2, 2))
    options = {"BATCH_INVARIANT": True}

    def run(q, k, v, **more):
        mask = "q >= kv && q - kv < 90"
        return st.cached_attention(q, k, v, mask, kernel_options=options, **more)

    whole = run(q, k, v)
    for b, i0, i1 in ((0, 7, 8), (1, 0, 33), (1, 280, 300)):
        rows, keys = slice(b, b + 1), slice(0, i1)
        some = run(q[rows, :, i0:i1], k[rows, :, keys], v[rows, :, keys], q_offset=i0)
        assert torch.equal(some, whole[rows, :, i0:i1])
    same = st.flex_attention(
        q, k, v, block_mask="q >= kv && q - kv < 90", enable_gqa=True, kernel_options=options
    )
    assert torch.equal(same, whole)
    with pytest.raises(ValueError, match="got BATCH_INVARIANT 1, expected True, False or"):
        st.cached_attention(q, k, v, kernel_options={"BATCH_INVARIANT": 1})


def test_the_largest_score_of_each_head():
    q, k, v = given(3, 50)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    s = q @ k.repeat_interleave(H // HKV, 1).transpose(2, 3) / D**0.5
    rows = lengths[:, None] - 3 + torch.arange(3)
    hidden = torch.arange(50) > rows[:, None, :, None]
    want = s.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    out, found = st.cached_attention(q, k, v, seq_lens=lengths, return_max=True)
    torch.testing.assert_close(found, want)
    cu = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    some = q[0].transpose(0, 1).contiguous()
    _, lse, found = st.cached_attention(
        some, k, v, None, cu_seqlens_q=cu, seq_lens=lengths, return_lse=True, return_max=True
    )
    own = torch.einsum("thd,hnd->thn", some[:2], k[0].repeat_interleave(2, 0)[:, :13])
    last = torch.einsum("hd,hnd->hn", some[2], k[2].repeat_interleave(2, 0)[:, :40])
    want = torch.maximum(own.amax((0, 2)), last.amax(1)) / D**0.5
    torch.testing.assert_close(found, want)
    assert lse.shape == (3, H)


@pytest.mark.parametrize("form", [lambda mod, make: mod, lambda mod, make: make(mod)])
def test_positions_before_the_first_key_divide_as_python_does(form):
    """More queries than keys: the first ones stand at negative positions."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 1, n, 8) for n in (4, 2, 2))
    at, keys = torch.arange(4)[:, None] - 2, torch.arange(2)
    s = q @ k.mT / 8**0.5 + (at % 3) * keys + (at // 2)
    score = form(lambda s, b, h, i, j: s + (i % 3) * j + i // 2, st.score)
    out, lse = st.cached_attention(q, k, v, None, score, seq_lens=2, return_lse=True)
    torch.testing.assert_close(out, torch.softmax(s, -1) @ v)
    torch.testing.assert_close(lse, s.logsumexp(-1))
    ends = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    ragged = st.varlen_attention(*rows, *ends, mask=None, score=score, align="end")
    torch.testing.assert_close(ragged.transpose(0, 1)[None], out)
    mask = form(lambda b, h, i, j: i // 2 == j - 1, st.mask)
    _, lse = st.cached_attention(q, k, v, mask, None, seq_lens=2, return_lse=True)
    live = (at // 2) == keys - 1
    plain = (q @ k.mT / 8**0.5).masked_fill(~live, -torch.inf)
    torch.testing.assert_close(lse, plain.logsumexp(-1))


def test_errors_name_arguments_as_they_were_given():
    q, k, v = given(1, 16)
    with pytest.raises(ValueError, match="^seq_lens: got 17"):
        st.cached_attention(q, k, v, seq_lens=17)


def paged(**options):
    return st.PagedCache(1, pages=8, page=4, sequences=2, heads=2, head_dim=8, **options)


def test_what_is_written_is_known_to_autograd():
    k = torch.randn(1, 2, 8)
    q = torch.randn(3, 2, 8, requires_grad=True)
    pool = torch.randn(2, 2, 4, 8)
    table, ends = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0, 3]).int()
    lens = torch.tensor([5], dtype=torch.int32)
    call = dict(block_table=table, seq_lens=lens, max_seqlen_k=8)
    out = st.varlen_attention(q, pool, pool, ends, **call)
    st.append_keys(k, k, pool, pool, slots=torch.tensor([0]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    w, o = torch.ones(3, requires_grad=True), torch.zeros(1, 2, 1, 8)
    y = w[0] * o
    st.cached_attention(torch.randn(1, 2, 1, 8), *2 * [torch.randn(1, 2, 3, 8)], out=o)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    for name, given in (("out", o.requires_grad_()), ("key_pool", pool.requires_grad_())):
        with pytest.raises(ValueError, match=f"{name}: requires grad"):
            if name == "out":
                st.cached_attention(*3 * [torch.randn(1, 2, 1, 8)], out=given)
            else:
                st.append_keys(k, k, given, given, slots=torch.tensor([0]))


def test_lengths_are_named_as_they_were_given():
    q, k = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 12, 8)
    for n in (-(2**31), -1, 13, 2**30 + 5, 2**31 - 1):
        given = torch.tensor([12, n], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"seq_lens: got {n} for batch 1, expected 0 to"):
            st.cached_attention(q, k, k, seq_lens=given)
        with pytest.raises(ValueError, match=f"seq_lens: got {n}, expected 0 to 12"):
            st.cached_attention(q, k, k, seq_lens=n)
    ends = torch.tensor([0, 2], dtype=torch.int32)
    rows = torch.randn(2, 2, 8)
    with pytest.raises(ValueError, match="max_seqlen_q: got .*, expected 0 to 1073741824"):
        st.varlen_attention(rows, rows, rows, ends, max_seqlen_q=2**30 + 1)


def test_no_rows_are_no_error():
    k = torch.randn(2, 2, 12, 8)
    for shape in ((0, 2, 1, 8), (2, 2, 0, 8)):
        out, lse = st.cached_attention(torch.randn(shape), k[: shape[0]], k[: shape[0]],
                                       return_lse=True)  # fmt: skip
        assert out.shape == shape and lse.shape == shape[:3]
    cache = paged()
    with pytest.raises(RuntimeError, match="got no step yet"):
        cache.attend(0, torch.randn(1, 2, 1, 8))
    cache.step([], [])
    cache.append(0, *2 * [torch.empty(0, 2, 8)])
    assert cache.attend(0, torch.empty(0, 2, 8)).shape == (0, 2, 8)


def test_caches_of_what_they_cannot_hold():
    for dtype in (torch.int8, torch.uint8, torch.float64, torch.bool, "f8"):
        with pytest.raises(ValueError, match="dtype: got"):
            paged(dtype=dtype)
    with pytest.raises(ValueError, match="channels: got 4 beside torch.float32"):
        paged(channels=4)
    with pytest.raises(ValueError, match="most: got"):
        st.BlockSelection(1, 2, 64, 64, most=2**32 + 1)
    with torch.inference_mode():
        cache = paged()
    cache.step([cache.add()], [2])
    cache.append(0, *2 * [torch.randn(2, 2, 8)])


def test_serving_between_graphs():
    """None of it is traced into: a graph breaks around each call."""
    cache = paged()
    cache.step([cache.add()], [3])
    k = torch.randn(3, 2, 8)
    q = torch.randn(3, 2, 8)

    def step(q, k):
        cache.append(0, k * 1, k)
        return cache.attend(0, q * 2) + 1

    want, graphs = step(q, k), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    made = torch.compile(step, backend=backend)(q, k)
    assert torch.equal(made, want) and len(graphs) <= 3


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_under_autocast_the_dtype_of_the_cache_decides(autocast):
    """Which is not cast; over codes the query takes autocast's. With out nothing is cast."""
    q, k, v = (torch.randn(2, 2, 9, 16) for _ in range(3))
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    lens = torch.tensor([9, 7], dtype=torch.int32)
    in_pages = dict(block_table=table, seq_lens=lens)
    cases = [(x, x) for x in (torch.float32, torch.bfloat16, torch.float16)]
    cases += [(torch.int8, autocast), (torch.float8_e4m3fn, autocast)]
    for dtype, wanted in cases:
        cache = k.to(dtype), v.to(dtype)
        for options in {}, in_pages:
            for given in torch.float32, torch.bfloat16:
                with torch.autocast("cpu", autocast):
                    out = st.cached_attention(q.to(given), *cache, **options)
                want = st.cached_attention(q.to(given).to(wanted), *cache, **options)
                assert out.dtype is wanted and torch.equal(out, want)
    rows = q.transpose(1, 2).flatten(0, 1).contiguous()
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    pools = k.bfloat16(), v.bfloat16()
    with torch.autocast("cpu", autocast):
        out = torch.empty_like(q)
        st.cached_attention(q, k, v, out=out)
        st.cached_attention(*(t.half() for t in (q, k, v)), out=torch.empty_like(q).half())
        assert st.cached_attention(*(t.double() for t in (q, k, v))).dtype is torch.float64
        ragged = st.varlen_attention(rows, *pools, starts, None, 9, 9, **in_pages)
    assert torch.equal(out, st.cached_attention(q, k, v))
    want = st.varlen_attention(rows.bfloat16(), *pools, starts, None, 9, 9, **in_pages)
    assert ragged.dtype is torch.bfloat16 and torch.equal(ragged, want)
