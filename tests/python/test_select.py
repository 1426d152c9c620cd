"""BlockSelection: the blocks that a tensor names, against the same ones as lists; forward and
gradients, on a GPU in a CUDA graph, too."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

import saccade.torch as st  # noqa: E402

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
B, H, HKV, Q, KV, D, BLOCK, MOST = 2, 4, 2, 300, 500, 64, 128, 3
ROWS, COLUMNS = -(-Q // BLOCK), -(-KV // BLOCK)


def given(device, dtype, queries=Q):
    torch.manual_seed(3)
    make = dict(device=device, dtype=dtype, requires_grad=True)
    return (torch.randn(B, H, queries, D, **make), torch.randn(B, HKV, KV, D, **make),
            torch.randn(B, HKV, KV, D, **make))


def chosen(seed, rows=ROWS, columns=COLUMNS):
    """Entries with twins and numbers of no block."""
    torch.manual_seed(seed)
    x = torch.randint(-2, columns + 2, (B, HKV, rows, MOST), dtype=torch.int32)
    x[0, 0, 0] = -1
    return x


def lists(x, rows, columns, block, mask, queries=Q, device="cpu"):
    """The same blocks as FlexAttention's lists of query heads."""
    dense = torch.zeros(B, HKV, rows, columns, dtype=torch.bool)
    for b, h, r, entry in [(*i, int(v)) for i, v in _entries(x)]:
        if 0 <= entry < columns:
            dense[b, h, r, entry] = True
    dense = dense.repeat_interleave(H // HKV, 1)
    order = torch.argsort((~dense).int(), dim=-1, stable=True).int()
    num, none = dense.sum(-1).int(), torch.zeros_like(order)
    num, none, order = (t.to(device) for t in (num, none, order))
    if mask is None:  # all live: FULL
        return st.BlockMask.from_kv_blocks(0 * num, none, num, order, BLOCK_SIZE=block,
                                           seq_lengths=(queries, KV))
    return st.BlockMask.from_kv_blocks(num, order, BLOCK_SIZE=block, mask_mod=mask,
                                       seq_lengths=(queries, KV))


def _entries(x):
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            for r in range(x.shape[2]):
                for v in x[b, h, r].tolist():
                    yield (b, h, r), v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", [None, "q + 100 >= kv"])
def test_selected_blocks_are_those_of_lists(mask, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = given(device, dtype)
    d_out = torch.randn_like(q)
    blocks = st.BlockSelection(B, H, Q, KV, kv_heads=HKV, most=MOST, mask_mod=mask,
                               device=device)
    for seed in range(3):
        x = chosen(seed)
        blocks.select(x.to(device))
        same = lists(x, ROWS, COLUMNS, BLOCK, mask, device=device)
        got, want = (st.flex_attention(q, k, v, block_mask=m, enable_gqa=True)
                     for m in (blocks, same))
        assert torch.equal(got, want)
        for a, b in zip(torch.autograd.grad(got, (q, k, v), d_out),
                        torch.autograd.grad(want, (q, k, v), d_out)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_one_query_selects_for_its_group(device):
    q, k, v = (t.detach() for t in given(device, torch.float32, 1))
    columns = -(-KV // 64)
    blocks = st.BlockSelection(B, H, 1, KV, kv_heads=HKV, most=MOST, BLOCK_SIZE=(1, 64),
                               device=device)
    for seed in range(2):
        x = chosen(seed, 1, columns)
        blocks.select(x.to(device))
        got = st.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
        live = torch.zeros(B, HKV, columns, dtype=torch.bool)
        for (b, h, _), entry in _entries(x):
            if 0 <= entry < columns:
                live[b, h, entry] = True
        live = live.repeat_interleave(64, -1)[..., :KV].repeat_interleave(H // HKV, 1)
        s = q.double() @ k.double().repeat_interleave(H // HKV, 1).mT / D**0.5
        s = s.masked_fill(~live[:, :, None].to(device), -torch.inf)
        want = s.softmax(-1).nan_to_num() @ v.double().repeat_interleave(H // HKV, 1)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_lists_are_those_of_the_host():
    blocks = st.BlockSelection(B, H, Q, KV, kv_heads=HKV, most=MOST)
    assert not blocks.full_kv_num_blocks.any() and not blocks.kv_num_blocks.any()
    x = chosen(1)
    blocks.select(x)
    same = lists(x, ROWS, COLUMNS, BLOCK, None)
    assert torch.equal(blocks.to_dense(), same.to_dense())
    with pytest.raises(Exception, match="blocks"):
        blocks.select(chosen(1)[:, :1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_holds_the_selection():
    q, k, v = (t.detach() for t in given("cuda", torch.bfloat16))
    blocks = st.BlockSelection(B, H, Q, KV, kv_heads=HKV, most=MOST, device="cuda")
    x = chosen(0).cuda()

    def once():
        blocks.select(x)
        return st.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = once()
    for seed in range(1, 4):
        x.copy_(chosen(seed))
        graph.replay()
        assert torch.equal(out, once())


def test_a_selection_of_the_host_drops_copies_on_devices():
    """What was prepared on a device is prepared again; a tensor of another device waits."""
    blocks = st.BlockSelection(B, H, Q, KV, kv_heads=HKV, most=MOST, BLOCK_SIZE=BLOCK)
    q, k, v = given("cpu", torch.float32)
    blocks.select(chosen(1))
    st.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    assert not any(blocks._selected.is_prepared_on(device) for device in (0, 1))
    blocks._selected._prepared.add(("a plan", 0))
    assert blocks._selected.is_prepared_on(0) and not blocks._selected.is_prepared_on(1)
    blocks.select(chosen(2))
    assert not blocks._selected.is_prepared_on(0)


def test_a_kept_call_prepares_again_what_a_selection_dropped():
    blocks = st.BlockSelection(B, H, Q, KV, kv_heads=HKV, most=MOST, BLOCK_SIZE=BLOCK)
    q, k, v = (t.detach() for t in given("cpu", torch.float32))
    blocks.select(chosen(1))
    st.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    blocks._selected._prepared.add(("a plan", 0))  # as a call on a device does
    blocks.select(chosen(2))
    st.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    assert blocks._selected._prepared


def small():
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3))
    blocks = st.BlockSelection(1, 2, 256, 256, most=1, mask_mod="q + 256 >= kv")
    return q, k, v, blocks, [torch.full((1, 2, 2, 1), n, dtype=torch.int32) for n in (0, 1)]


def test_backward_of_another_selection_is_an_error():
    q, k, v, blocks, (first, second) = small()
    blocks.select(first)
    sinks, d_out = torch.zeros(2, requires_grad=True), torch.randn(q.shape)
    plain = lambda: st.flex_attention(q, k, v, block_mask=blocks)  # noqa: E731
    for call in (
        plain,
        torch.compile(plain, backend="aot_eager"),
        lambda: st.flex_attention(q, k, v, block_mask=blocks, return_lse=True)[0],
        lambda: st.flex_attention(q, k, v, block_mask=blocks, sinks=sinks),
    ):
        for _ in range(3):  # known layouts go by the extension
            want = torch.autograd.grad(call(), (q, k, v), d_out)
        out = call()
        blocks.select(second)
        with pytest.raises(RuntimeError, match=r"select\(\) of a BlockSelection"):
            torch.autograd.grad(out, (q, k, v), d_out)
        blocks.select(first)
        for a, b in zip(torch.autograd.grad(call(), (q, k, v), d_out), want):
            assert torch.equal(a, b)
        out = call()
        with torch.no_grad():
            q.add_(0)
        with pytest.raises(RuntimeError, match="inplace|view"):
            torch.autograd.grad(out, (q, k, v), d_out)
    out, vjp = torch.func.vjp(lambda q: st.flex_attention(q, k, v, block_mask=blocks), q)
    blocks.select(second)
    with pytest.raises(RuntimeError, match=r"select\(\) of a BlockSelection"):
        vjp(torch.ones_like(out))


def test_checkpointed_layers_select_again():
    """Of one mask: what is computed again selects again."""
    q, k, v, blocks, choices = small()

    def layer(x, choice):
        blocks.select(choice)
        return st.flex_attention(x, k, v, block_mask=blocks)

    def grads(of):
        x = q
        for choice in choices:
            x = of(x, choice)
        return torch.autograd.grad(x.sum(), (q, k, v))

    own = [st.BlockSelection(1, 2, 256, 256, most=1) for _ in choices]
    x = q
    for mask, choice in zip(own, choices):
        mask.select(choice)
        x = st.flex_attention(x, k, v, block_mask=mask)
    want = torch.autograd.grad(x.sum(), (q, k, v))
    got = grads(lambda *x: checkpoint(layer, *x, use_reentrant=False))
    assert all(map(torch.equal, got, want))


def test_copies_of_a_selection_select():
    q, k, v, blocks, (first, second) = small()
    blocks.select(first)
    read = pickle.loads(pickle.dumps(blocks))
    for copied in (copy.deepcopy(blocks), read, copy.copy(blocks)):
        assert type(copied) is st.BlockSelection and copied.shape == blocks.shape
        assert torch.equal(copied.to_dense(), blocks.to_dense())
        copied.select(second)
        out = st.flex_attention(q, k, v, block_mask=copied)
        assert not torch.equal(out, st.flex_attention(q, k, v, block_mask=blocks))
        blocks.select(second)
        assert torch.equal(out, st.flex_attention(q, k, v, block_mask=blocks))
        blocks.select(first)
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    layers.blocks = st.BlockSelection(1, 2, 256, 256, most=1)
    assert type(copy.deepcopy(layers).blocks) is st.BlockSelection  # nothing selected yet


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_selections_of_the_host_between_calls_on_a_device():
    blocks = st.BlockSelection(B, H, Q, KV, kv_heads=HKV, most=MOST, device="cuda")
    q, k, v = (t.detach() for t in given("cuda", torch.bfloat16))
    for seed, where in [(1, "cuda"), (2, "cpu"), (3, "cuda"), (4, "cpu"), (5, "cpu")]:
        x = chosen(seed)
        blocks.select(x.to(where))
        got = st.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
        same = lists(x, ROWS, COLUMNS, BLOCK, None, device="cuda")
        want = st.flex_attention(q, k, v, block_mask=same, enable_gqa=True)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_one_list_of_blocks_under_a_score_of_heads():
    """One KV head's list serves all heads: what a first call lays out has all of them."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, h, 64, 8) for h in (5, 1, 1))
    slope = torch.randn(5)
    blocks = st.BlockSelection(1, 5, 64, 64, kv_heads=1, most=1)
    blocks.select(torch.zeros(1, 1, 1, 1, dtype=torch.int32))
    assert blocks.shape[:2] == (1, 1) and blocks.handle().lead == (1, 5)
    out = st.flex_attention(q, k, v, lambda s, b, h, i, j: s + slope[h] * j, blocks,
                            enable_gqa=True)
    s = q @ k.mT / 8**0.5 + slope.view(1, 5, 1, 1) * torch.arange(64)
    torch.testing.assert_close(out, torch.softmax(s, -1) @ v)
    st.check(q, k, lambda s, b, h, i, j: s + slope[h], blocks)
    with pytest.raises(TypeError, match="blocks: got .*expected an int32 tensor"):
        blocks.select([[0]])
