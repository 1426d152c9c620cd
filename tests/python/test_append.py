"""append_keys and PagedCache: what lies in pools is what quantize and rounding make of new
keys, and attention over it is that over keys in one piece; on a GPU in a CUDA graph, too."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
HKV, D, PAGE = 2, 32, 4


def keys(n, device="cpu", dtype=torch.float32):
    torch.manual_seed(n)
    return [torch.randn(n, HKV, D).to(device, dtype) for _ in range(2)]


def whole(x, dtype, channels=0):
    """x [T, Hkv, D] as one batch's keys in one piece: (codes, scale)."""
    x = x.transpose(0, 1)[None].contiguous()
    return st.quantize(x, dtype, channels=channels)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "i8", "i4"])
def test_codes_are_those_of_quantize(dtype, device):
    k, v = keys(11, device, torch.bfloat16)
    wide = D // 2 if dtype == "i4" else D
    held = whole(k.cpu(), dtype)[0].dtype
    pools = [torch.zeros(5, HKV, PAGE, wide, dtype=held, device=device) for _ in "kv"]
    scales = [torch.zeros(5, HKV, PAGE, 2, device=device) for _ in "kv"]
    slots = torch.tensor([3, 2, 19, -1, 0, 8, 9, 10, 11, 99, 7], device=device)
    st.append_keys(k, v, *pools, slots=slots, k_scale=scales[0], v_scale=scales[1])
    for x, pool, scale in zip((k, v), pools, scales):
        codes, wanted = whole(x.cpu(), dtype, D // 2)
        pool = pool.cpu().view(torch.uint8).transpose(1, 2).reshape(5 * PAGE, HKV, wide)
        scale = scale.cpu().transpose(1, 2).reshape(5 * PAGE, HKV, 2)
        for t, slot in enumerate(slots.tolist()):
            if 0 <= slot < 5 * PAGE:
                assert torch.equal(pool[slot], codes.view(torch.uint8)[0, :, t])
                assert torch.equal(scale[slot], wanted[0, :, t])
                pool[slot], scale[slot] = 0, 0
        assert not pool.any() and not scale.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, "e4m3", "i4"])
def test_a_cache_of_two_layers(dtype, device):
    """Prompts of unequal lengths, a fork, single keys: each step against keys in one piece."""
    cache = st.PagedCache(2, pages=24, page=PAGE, sequences=3, heads=HKV, head_dim=D,
                          dtype=dtype, channels=16 if dtype == "i4" else 0, device=device)
    a, b = cache.add(), cache.add()
    held = {a: [[], []], b: [[], []]}

    def step(sequences, counts, seed):
        cache.step(sequences, counts)
        for layer in range(2):
            k, v = keys(sum(counts) + 100 * seed + layer)
            k, v = k[: sum(counts)].to(device), v[: sum(counts)].to(device)
            cache.append(layer, k, v)
            q = torch.randn(sum(counts), 4, D, device=device)
            q = q if isinstance(dtype, str) else q.to(dtype)
            out = cache.attend(layer, q)
            at = 0
            for s, n in zip(sequences, counts):
                held[s][layer].append((k[at : at + n], v[at : at + n]))
                parts = [torch.cat(x) for x in zip(*held[s][layer])]
                own = [x.transpose(0, 1)[None].contiguous() for x in parts]
                more = {}
                if isinstance(dtype, str):
                    made = [st.quantize(x.cpu(), dtype, channels=16 if dtype == "i4" else 0)
                            for x in own]
                    own = [x.to(device) for x, _ in made]
                    more = {n: x.to(device) for n, (_, x) in zip(("k_scale", "v_scale"), made)}
                else:
                    own = [x.to(dtype) for x in own]
                rows = q[at : at + n].transpose(0, 1)[None].contiguous()
                want = st.cached_attention(rows, *own, "causal()", **more)
                near = 1e-3 if q.dtype is torch.float16 else 1e-5
                torch.testing.assert_close(out[at : at + n].transpose(0, 1)[None], want,
                                           rtol=near, atol=near)
                at += n

    step([a, b], [7, 3], 1)
    c = cache.fork(a)
    held[c] = [list(x) for x in held[a]]
    step([c, a], [1, 2], 2)  # both write to the page that they share
    step([a, b, c], [1, 1, 1], 3)
    step([b], [9], 4)
    cache.step([], [])  # a server with nothing to do
    step([c], [1], 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_serves_every_step():
    cache = st.PagedCache(1, pages=64, page=PAGE, sequences=2, heads=HKV, head_dim=D,
                          dtype="e4m3", device="cuda")
    pair = [cache.add(), cache.add()]
    cache.step(pair, [5, 9])
    k, v = keys(14, "cuda", torch.bfloat16)
    cache.append(0, k, v)
    cache.step(pair, [1, 1])
    k = torch.randn(2, HKV, 1, D, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 4, 1, D, device="cuda", dtype=torch.bfloat16)

    def once():
        cache.append(0, k, k)
        return cache.attend(0, q)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = once()
    for _ in range(3):
        cache.step(pair, [1, 1])
        k.normal_()
        graph.replay()
        assert torch.equal(out, once())


def test_rows_past_the_batch_go_nowhere():
    """What a graph pads its batch with, also before there are new keys."""
    cache = st.PagedCache(1, pages=4, page=PAGE, sequences=2, heads=HKV, head_dim=D)
    pair = [cache.add(), cache.add()]
    cache.step(pair, torch.tensor([2, 2]))
    k = torch.randn(4, HKV, 2, D)
    cache.append(0, k, k)
    held = cache.pools[0][0].clone()
    for s, page in enumerate(cache.block_table[:, 0].tolist()):
        assert torch.equal(held[page][:, :2], k[s]) and not held[page][:, 2:].any()
    with pytest.raises(ValueError, match="key: got 2 keys, expected the 4 of the step"):
        cache.append(0, k[:1], k[:1])
    cache.step(pair, [0, 0])
    cache.append(0, k[:2, :, :1], k[:2, :, :1])
    cache.step([], [])
    cache.append(0, k, k)
    assert torch.equal(cache.pools[0][0], held)


def test_a_step_writes_the_columns_of_its_sequences(monkeypatch):
    """Not all that the table has room for; of a longer step before nothing is left in rows of
    sequences that it held."""
    cache = st.PagedCache(1, pages=1 << 12, page=PAGE, sequences=3, heads=HKV, head_dim=D)
    asked, table = [], type(cache).table
    monkeypatch.setattr(
        type(cache), "table", lambda *given: asked.append(given[2]) or table(*given)
    )
    a, b, c = (cache.add() for _ in range(3))
    cache.step([a], [1])
    cache.step([b, a, c], [5 * PAGE, 1, 3])
    cache.free(b)
    cache.step([c, a], [1, 1])
    held = cache.block_table
    assert asked == [1, 5, 5] and held.shape == (2, 1 << 12)
    assert (held[:, :1] >= 0).all() and (held[:, 1:] == -1).all()
    cache.step([a, c, cache.add()], [1, 1, 0])
    assert (cache.block_table[2] == -1).all()


def test_counts_are_numbers_of_any_kind():
    """What a step takes its attend takes."""
    cache = st.PagedCache(1, pages=4, page=PAGE, sequences=2, heads=HKV, head_dim=D)
    pair = [cache.add(), cache.add()]
    k, q = torch.randn(2, HKV, D), torch.randn(2, 2 * HKV, D)
    for counts in ([True, True], torch.ones(2, dtype=torch.uint8)):
        cache.step(pair, counts)
        cache.append(0, k, k)
        assert type(cache.most_new) is int and cache.attend(0, q).shape == q.shape
    cache.step([], [])  # and rows that a batch is padded with
    out, lse = cache.attend(0, q, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:2]


@pytest.mark.parametrize("shape", [(0, HKV, D), (2, HKV, 0, D), (0, HKV, 1, D)])
def test_no_keys_go_nowhere(shape):
    pools = [torch.full((5, HKV, PAGE, D), 7.0) for _ in "kv"]
    none = torch.empty(shape)
    st.append_keys(none, none, *pools)
    st.append_keys(none, none, *pools, slots=torch.empty(0, dtype=torch.int32))
    assert all((pool == 7).all() for pool in pools)


def test_what_does_not_fit_is_refused():
    k, v = keys(4)
    pool = torch.zeros(3, HKV, PAGE, D)
    with pytest.raises(ValueError, match="slots: got None, expected them, seq_lens"):
        st.append_keys(k, v, pool, pool.clone())
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="last_page_len: got a tensor without indices"):
        st.append_keys(k, v, pool, pool.clone(), last_page_len=one)
    with pytest.raises(ValueError, match="seq_lens: got 5, expected a tensor"):
        st.append_keys(k, v, pool, pool.clone(), block_table=one[None], seq_lens=5)
    with pytest.raises(ValueError, match="^seq_lens: got dtype i64"):
        st.append_keys(k, v, pool, pool.clone(), block_table=one[None], seq_lens=one.long())
    cache = st.PagedCache(1, pages=2, page=PAGE, sequences=1, heads=HKV, head_dim=D)
    cache.step([cache.add()], [1])
    with pytest.raises(ValueError, match=r"key: got 2 keys of each sequence, .* step: \[1\]"):
        cache.append(0, torch.zeros(1, HKV, 2, D), torch.zeros(1, HKV, 2, D))
    with pytest.raises(ValueError, match="key: got 0 keys, expected the 1 of the step"):
        cache.append(0, torch.zeros(0, HKV, D), torch.zeros(0, HKV, D))
    with pytest.raises(ValueError, match="value_pool"):
        st.append_keys(k, v, pool, None, slots=torch.arange(4))
    with pytest.raises(Exception, match="slots"):
        st.append_keys(k, v, pool, pool.clone(), slots=torch.arange(3))
    with pytest.raises(ValueError, match="dtype"):
        st.PagedCache(1, pages=2, page=2, sequences=1, heads=1, head_dim=8, dtype="f4")
    with pytest.raises(ValueError, match="requires grad"):
        st.append_keys(k.requires_grad_(), v, pool, pool.clone(), slots=torch.arange(4))
