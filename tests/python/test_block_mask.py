"""BlockMask against torch's own, attribute by attribute, and what slices and crops mean."""

import copy
import io
import signal
import time

import pytest

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("torch.nn.attention.flex_attention")

import saccade.torch as st  # noqa: E402
from saccade.torch.mods import AnyMod  # noqa: E402
from saccade.trace import closures  # noqa: E402

Q, KV, BLOCK = 100, 77, (16, 32)
DOC = torch.arange(128) // 13
MASKS = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() < 9,
    "document": lambda b, h, i, j: DOC[i] == DOC[j],
    "heads": lambda b, h, i, j: (i >= j) & (h > 0),
    "batches": lambda b, h, i, j: (i >= j) | (b == 1),
    "everything": st.noop_mask,
    "nothing": lambda b, h, i, j: i < 0,
}
LISTS = [
    prefix + name
    for prefix in ("", "full_")
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")
]


def pair(name, B=2, H=3, lengths=(Q, KV), block=BLOCK):
    mod = theirs.noop_mask if name == "everything" else MASKS[name]
    a = theirs.create_block_mask(mod, B, H, *lengths, device="cpu", BLOCK_SIZE=block)
    return a, st.create_block_mask(MASKS[name], B, H, *lengths, device="cpu", BLOCK_SIZE=block)


def same(a, b, lists=LISTS):
    assert tuple(a.shape) == tuple(b.shape)
    # torch 2.11 counts scores there, 2.15 blocks, as its own documentation says
    skipped = 100 * (1 - a.to_dense().double().mean().item())
    assert b.sparsity() == pytest.approx(skipped, abs=1e-4)
    assert a.numel() == b.numel() and a.BLOCK_SIZE == b.BLOCK_SIZE
    assert torch.equal(a.to_dense(), b.to_dense()) and a.to_dense().dtype == b.to_dense().dtype
    for name in lists:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or (torch.equal(x, y) and x.dtype == y.dtype), name


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("B, H", [(None, None), (2, 3), (1, 1)])
@pytest.mark.parametrize(
    "lengths, block", [((100, 77), (16, 32)), ((64, 128), 32), ((3, 5), 128)]
)
def test_lists(name, B, H, lengths, block):
    same(*pair(name, B, H, lengths, block))


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        (1, 2),
        slice(0, 1),
        (slice(None), slice(1, 3)),
        (slice(None), slice(None), 2),
        (slice(None), slice(None), -1),
        (slice(None), slice(None), slice(2, 7)),
        (0, 0, -1),
        (slice(None), torch.tensor([2, 0])),
        (slice(None), slice(None), torch.tensor([6, 0])),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["heads", "batches", "document"])
def test_indexing(name, index):
    a, b = (made[index] for made in pair(name))
    if not hasattr(theirs.BlockMask, "_query_length_for_sliced_blocks"):
        a.seq_lengths = b.seq_lengths  # torch 2.11 leaves those of the whole mask
    same(a, b)


def test_index_errors():
    _, b = pair("heads")
    with pytest.raises(IndexError, match="expected -2 to 1"):
        b[2]
    with pytest.raises(IndexError, match="at most 3"):
        b[0, 0, 0, 0]
    with pytest.raises(IndexError, match="slice of step 1"):
        b[:, :, 3, :]
    with pytest.raises(ValueError, match="lists of blocks"):
        b[:, :, 1:4][:, :, 5:9, :]


def test_slices_keep_their_meaning():
    """A slice's mod goes on seeing the positions it was made for."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=g) for n in (Q, KV, KV))
    for name in ("causal", "heads", "document"):
        full = st.create_block_mask(MASKS[name], 2, 3, Q, KV, BLOCK_SIZE=BLOCK)
        want = st.flex_attention(q, k, v, None, full)
        for rows in (slice(0, 1), slice(2, 5), slice(6, 7)):
            cut = slice(rows.start * 16, min(rows.stop * 16, Q))
            got = st.flex_attention(q[:, :, cut], k, v, None, full[:, :, rows])
            torch.testing.assert_close(got, want[:, :, cut])
        got = st.flex_attention(q[1:, 2:], k[1:, 2:], v[1:, 2:], None, full[1, 2])
        torch.testing.assert_close(got, want[1:, 2:])
        cropped = full._adjust(50, 40)
        got = st.flex_attention(q[:, :, :50], k[:, :, :40], v[:, :, :40], None, cropped)
        again = st.create_block_mask(MASKS[name], 2, 3, 50, 40, BLOCK_SIZE=BLOCK)
        want = st.flex_attention(q[:, :, :50], k[:, :, :40], v[:, :, :40], None, again)
        torch.testing.assert_close(got, want)
        same(again, cropped)


@pytest.mark.parametrize("name", ["causal", "heads", "document"])
@pytest.mark.parametrize("rows", [slice(-1, None), slice(21, 40), slice(16, None)])
def test_queries_of_a_mask(name, rows):
    """Four indices cut queries, wherever blocks begin, as of a dense mask."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=g) for n in (Q, KV, KV))
    full = st.create_block_mask(MASKS[name], 2, 3, Q, KV, BLOCK_SIZE=BLOCK)
    cut = lambda q, k, v, mask: st.flex_attention(  # noqa: E731
        q[:, :, rows], k, v, None, mask[:, :, rows, :]
    )
    want = st.flex_attention(q, k, v, None, full)[:, :, rows]
    torch.testing.assert_close(cut(q, k, v, full), want)
    part = full[:, :, rows, :]
    torch.testing.assert_close(
        st.create_mask(part.mask_mod, 2, 3, want.shape[2], KV),
        st.create_mask(MASKS[name], 2, 3, Q, KV)[:, :, rows],
    )
    assert full[:, :, :, :] is full
    torch._dynamo.reset()
    compiled = torch.compile(cut, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, full), want)


def test_queries_of_a_mask_that_a_graph_makes():
    q = torch.randn(1, 1, 40, 16)

    def inside(q):
        mask = st.create_block_mask("causal()", None, None, 40, 40)
        return st.flex_attention(q[:, :, 7:], q, q, None, mask[:, :, 7:, :])

    torch._dynamo.reset()
    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
    want = st.flex_attention(q, q, q, None, "causal()")[:, :, 7:]
    torch.testing.assert_close(compiled(q), want)


def test_a_call_of_fewer_batches_takes_the_first_of_a_mask():
    """The last batch of an epoch, as with torch; what names no batch serves any."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (6, 48), generator=g).sort(1).values
    mod = lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i - h >= j)  # noqa: E731
    made = st.create_block_mask(mod, 6, 4, 48, 48, BLOCK_SIZE=16)
    same_for_all = st.create_block_mask("q >= kv", 2, 3, 48, 48, BLOCK_SIZE=16)
    for B in (4, 6, 1, 4):
        q, k, v = (torch.randn(B, 2, 48, 16, generator=g, requires_grad=True) for _ in range(3))
        for mask, own in ((made, mod), (same_for_all, "q >= kv")):
            want = st.flex_attention(q, k, v, None, own)
            got = st.flex_attention(q, k, v, None, mask)
            torch.testing.assert_close(got, want)
            got, want = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (got, want))
            torch.testing.assert_close(got, want)
    ids[:] = 0
    changed = st.create_block_mask(mod, 6, 4, 48, 48, BLOCK_SIZE=16)
    made.kv_indices, made.kv_num_blocks = changed.kv_indices, changed.kv_num_blocks
    made.full_kv_indices, made.full_kv_num_blocks = (
        changed.full_kv_indices,
        changed.full_kv_num_blocks,
    )
    q = torch.randn(4, 2, 48, 16, generator=g)
    got, want = (st.flex_attention(q, q, q, None, m) for m in (made, mod))
    torch.testing.assert_close(got, want)
    q = torch.randn(8, 2, 48, 16, generator=g)
    with pytest.raises(ValueError, match="got batch 6 and 2 heads, expected 8 or more"):
        st.flex_attention(q, q, q, None, made)


def test_a_slice_of_one_serves_all():
    """One batch or head of several, the first too, is one mask wherever it is broadcast."""
    torch.manual_seed(0)
    ids = torch.randint(0, 3, (4, 48)).sort(1).values
    q = torch.randn(4, 2, 48, 16)
    mask = st.create_block_mask(
        lambda b, h, i, j: (ids[b, i] == ids[b, j]) & ((h > 0) | (i >= j)),
        4, 2, 48, 48, BLOCK_SIZE=16,
    )  # fmt: skip
    for n in (0, 1):
        same = ids[n, :, None] == ids[n]
        live = torch.stack([same & torch.ones(48, 48).tril().bool(), same])
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q, live)
        for part in (mask[n], mask[n : n + 1], mask[[n]]):
            assert torch.allclose(st.flex_attention(q, q, q, None, part), want, atol=1e-5)
        live = (ids[:, :, None] == ids[:, None])[:, None]
        live = live & torch.ones(48, 48).tril().bool() if n == 0 else live
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q, live)
        out = st.flex_attention(q, q, q, None, mask[:, n : n + 1])
        assert torch.allclose(out, want, atol=1e-5)


def test_adjust_keeps_no_column_out_of_range():
    """Live blocks {3, 10} cropped to 8 columns are {3}."""
    bands = lambda b, h, i, j: (j // 16 == 3) | (j // 16 == 10)  # noqa: E731
    made = st.create_block_mask(bands, None, None, 32, 16 * 12, BLOCK_SIZE=16)._adjust(32, 128)
    assert made.to_dense()[0, 0].tolist() == [[0, 0, 0, 1, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("full", [True, False])
def test_from_kv_blocks(lead, full):
    made = pair("heads")[0]
    pick = (0,) * (2 - len(lead))
    lists = [made.kv_num_blocks[pick], made.kv_indices[pick]]
    if full:
        lists += [made.full_kv_num_blocks[pick], made.full_kv_indices[pick]]
    for lengths in (None, (Q, KV)):
        a, b = (
            kind.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, seq_lengths=lengths)
            for kind in (theirs.BlockMask, st.BlockMask)
        )
        same(a, b)


def test_torch_block_masks_are_taken_as_they_are():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=g) for n in (Q, KV, KV))
    for name in MASKS:
        a, b = pair(name)
        x, y = (st.flex_attention(q, k, v, None, m) for m in (a, b))
        torch.testing.assert_close(x, y)
    assert torch.equal(
        x,
        st.flex_attention(
            q,
            k,
            v,
            None,
            theirs.create_block_mask(lambda b, h, i, j: i < 0, None, None, Q, KV, device="cpu"),
        ),
    )


def test_all_partial():
    a = (
        theirs.create_block_mask(
            MASKS["causal"], None, None, Q, KV, device="cpu", separate_full_blocks=False
        )
        if "separate_full_blocks" in theirs.create_block_mask.__code__.co_varnames
        else None
    )
    b = st.create_block_mask(
        MASKS["causal"], None, None, Q, KV, device="cpu", separate_full_blocks=False
    )
    assert b.full_kv_indices is None and b.full_q_num_blocks is None
    if a is not None:
        same(a, b)


def test_composition():
    i, j = torch.arange(9)[:, None], torch.arange(9)
    masks = st.and_masks(MASKS["causal"], "kv > 2", st.mask("q < n", n=7))
    got = st.create_mask(masks, None, None, 9, 9, "cpu")[0, 0]
    assert torch.equal(got, (i >= j) & (j > 2) & (i < 7))
    assert st.create_mask(st.and_masks(), None, None, 9, 9, "cpu").all()
    assert not st.create_mask(st.or_masks(), None, None, 9, 9, "cpu").any()
    either = st.or_masks(MASKS["causal"], lambda b, h, i, j: j == 8)
    assert torch.equal(
        st.create_mask(either, None, None, 9, 9, "cpu")[0, 0], (i >= j) | (j == 8)
    )
    with pytest.raises(RuntimeError, match="expected a callable"):
        st.or_masks(MASKS["causal"], 3)


def test_masks_of_text_that_defines_functions():
    near = torch.tensor([3, 5])
    text = "mask win(n) = q - kv <= n; // a window\nwin(near[h]) && q >= kv // causal"
    i, j = torch.arange(9)[:, None], torch.arange(9)
    want = (i - j <= near[:, None, None]) & (i >= j)
    own = st.mask(text, near=near)
    every = st.and_masks(own, "kv >= 0 // all")
    for mask in (own, every, st.and_masks(st.or_masks(own, every), own)):
        assert torch.equal(st.create_mask(mask, None, 2, 9, 9, "cpu")[0], want)


def test_masks_of_text_whose_definitions_name_captures():
    i, j = torch.arange(9)[:, None], torch.arange(9)
    doc = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    near, same, causal = (i - j).abs() <= 3, doc[:, None] == doc, i >= j
    texts = [
        ("mask near() = abs(q - kv) <= W;\nnear()", {"W": 3}, near),
        ("mask /* of */ near() = abs(q - kv) <= W; near()", {"W": 3}, near),
        ("mask near() = abs(q - kv) <= mask0; near()", {"mask0": 3}, near),
        ("mask near(mask1) = abs(q - kv) <= mask1 + n[0]; near(3)", {"n": [0]}, near),
        ("mask near() = abs(q - kv) <= W; near()", {"W": torch.tensor(3)}, near),
        ("mask same() = doc[q] == doc[kv];\nsame() // and doc", {"doc": doc}, same),
        ("mask of(x[]) = x[q] == x[kv]; mask doc() = of(doc); doc()", {"doc": doc}, same),
    ]
    for text, captures, want in texts:
        given = {n: torch.tensor(x) if isinstance(x, list) else x for n, x in captures.items()}
        own = st.mask(text, **given)
        assert torch.equal(st.create_mask(own, None, 1, 9, 9, "cpu")[0, 0], want), text
        every = st.and_masks(own, "q >= kv")
        for mask in (every, st.and_masks(st.or_masks(every, every), own)):
            got = st.create_mask(mask, None, 1, 9, 9, "cpu")[0, 0]
            assert torch.equal(got, want & causal), text


def test_numbers_of_texts_that_define_functions_stay_arguments():
    """A trace with such a text serves other numbers, and calls find it again."""
    near = st.mask("mask near(n) = abs(q - kv) <= n; near(W)", W=3)
    found, _, walk = closures.trace(st.and_masks(near, "q >= kv"), "mask")
    assert found.reusable and any(x == 3 for x in walk.leaves)
    text = "mask near(W) = abs(q - kv) <= W; near(W)"
    read = AnyMod("mask", text, {"W": torch.tensor([3])})  # as of a scalar on CUDA
    with pytest.raises(TypeError, match="another name"):
        st.create_mask(st.and_masks(read, "q >= kv"), None, 1, 9, 9, "cpu")


def test_mods_in_text_are_called_inside_of_callables():
    causal = st.create_block_mask("q >= kv", None, None, 9, 9, device="cpu").mask_mod
    near = st.mask("q - kv < w[h]", w=torch.tensor([3, 1]))
    both = lambda b, h, i, j: causal(b, h, i, j) & near(b, h, i, j)  # noqa: E731
    apart = torch.arange(9)[:, None] - torch.arange(9)
    for width in (1, 2):
        near.captures["w"] = torch.tensor([3, width])
        want = torch.stack([(apart >= 0) & (apart < n) for n in (3, width)])
        assert torch.equal(st.create_mask(both, None, 2, 9, 9, "cpu")[0], want)
    slope = torch.tensor(0.5, requires_grad=True)
    tilted = st.score("score + slope * (kv - q)", slope=slope)
    x = [torch.randn(1, 2, 9, 4) for _ in range(3)]
    found = st.flex_attention(*x, lambda s, b, h, i, j: 2 * tilted(s, b, h, i, j), causal)
    want = st.flex_attention(*x, lambda s, b, h, i, j: 2 * (s + slope * (j - i)), "q >= kv")
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(
        *(torch.autograd.grad(out.sum(), slope)[0] for out in (found, want))
    )


def test_calls_of_text_elsewhere_are_refused():
    with pytest.raises(TypeError, match=r"mask\('q >= kv'\): got a call outside .*create_mask"):
        st.create_block_mask("q >= kv", None, None, 9, 9, device="cpu").mask_mod(0, 0, 1, 2)
    with pytest.raises(
        TypeError, match="score.*: got a call outside of a traced mod"
    ):
        st.score("alibi()")(torch.zeros(()), 0, 0, 1, 2)
    with pytest.raises(TypeError, match="got 4 arguments, expected 5"):
        st.create_mask(lambda b, h, i, j: st.score("score")(b, h, i, j) > 0, 1, 1, 9, 9, "cpu")


@pytest.mark.parametrize(
    "text",
    [
        "mask f(n) = {mask0 = n; mask0_own = 1; q - kv < mask0 + mask0_own - 1}; f(W)",
        "mask mask0(n) = q - kv < n; mask0(W)",
        "mask mask0() = q - kv < W; mask0()",
    ],
)
def test_texts_that_name_what_a_trace_names(text):
    """A trace calls its captures mask0 and so on; texts have functions and locals so called."""
    every = st.and_masks(st.mask(text, W=2), "q >= kv")
    i = torch.arange(9)
    want = (i[:, None] >= i) & (i[:, None] - i < 2)
    assert torch.equal(st.create_mask(every, None, 1, 9, 9, "cpu")[0, 0], want)


def test_pictures():
    for name in ("causal", "heads"):
        a, b = pair(name, None, None)
        for grid in ((20, 20), (2, 3), 3, 1):
            assert a.to_string(grid_size=grid) == b.to_string(grid_size=grid)
    b = pair("heads")[1]
    assert "5 more" in b.to_string(limit=1) and str(b).count("\n\n") == 4
    assert b.to_string(-1, limit=6).count("\n") == 6 * 8 + 5
    assert repr(b).startswith("BlockMask(shape=(2, 3, 100, 77), BLOCK_SIZE=(16, 32)")


def test_pictures_of_long_sequences():
    """No list of a million tokens' blocks is made for a picture."""
    long = st.create_block_mask("q >= kv", None, None, 1 << 20, 1 << 20, "cpu")
    short = st.create_block_mask("q >= kv", None, None, 40 * 128, 40 * 128, "cpu")
    assert long.to_string() == short.to_string()
    assert long._forward is None and short._forward is None
    lists = short.kv_num_blocks, short.kv_indices, *short._lists(False)[2:]
    assert st.BlockMask.from_kv_blocks(*lists).to_string() == short.to_string()


def test_copies():
    a, b = pair("heads")
    torch.save((b.as_tuple()[:-1]), buffer := io.BytesIO())
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)[3], a.kv_indices)
    assert len(b.as_tuple(flatten=False)) == len(b.as_tuple()) - 2
    for made in (copy.deepcopy(b), copy.copy(b), b.to("cpu")):
        same(a, made)
        assert made.mask_mod is b.mask_mod and made is not b


def test_changed_mod_and_lengths():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=g) for n in (16, KV, KV))
    row = st.create_block_mask(MASKS["causal"], None, None, Q, KV, BLOCK_SIZE=BLOCK)[:, :, 1]
    want = st.flex_attention(q, k, v, None, row)
    row.mask_mod = lambda b, h, i, j: i + 16 >= j
    torch.testing.assert_close(st.flex_attention(q, k, v, None, row), want)
    row.seq_lengths = (10, KV)
    torch.testing.assert_close(
        st.flex_attention(q[:, :, :10], k, v, None, row), want[:, :, :10]
    )


def test_errors():
    num, idx = (
        torch.ones(1, 1, 2, dtype=torch.int32),
        torch.zeros(1, 1, 2, 3, dtype=torch.int32),
    )
    with pytest.raises(AssertionError, match="expected both"):
        st.BlockMask.from_kv_blocks(num, idx, num)
    with pytest.raises(RuntimeError, match="2 dimensions"):
        st.BlockMask.from_kv_blocks(num[0, 0, :1], idx[0, 0, 0])
    with pytest.raises(ValueError, match="1 or more"):
        st.create_block_mask(MASKS["causal"], None, None, 0, 9)
    with pytest.raises(TypeError, match="4: \\(b, h, q_idx, kv_idx\\)"):
        st.create_block_mask(lambda s, b, h, i, j: s, None, None, 9, 9)


def test_index_tensors_are_the_user_s():
    """Contiguous, and each batch has its own, as torch's are."""
    made = pair("causal")[1]
    for name in made._TENSOR_ATTRS:
        t = getattr(made, name)
        assert t.is_contiguous() and t.view(-1).numel() == t.numel()
    made.kv_num_blocks[0] = 0
    assert int(made.kv_num_blocks[1].sum()) > 0


def test_lists_cut_to_their_used_width():
    b = st.create_block_mask(MASKS["causal"], None, None, 80, 80, BLOCK_SIZE=8)
    n = int(b.kv_num_blocks.max())
    m = int(b.full_kv_num_blocks.max())
    assert max(n, m) < b.kv_indices.shape[-1]
    cut = st.BlockMask.from_kv_blocks(
        b.kv_num_blocks,
        b.kv_indices[..., :n],
        b.full_kv_num_blocks,
        b.full_kv_indices[..., :m],
        BLOCK_SIZE=8,
        mask_mod=MASKS["causal"],
        seq_lengths=(80, 80),
    )
    assert torch.equal(cut.to_dense(), b.to_dense())
    assert torch.equal(cut.q_num_blocks, b.q_num_blocks)
    q, k, v = torch.randn(3, 1, 2, 80, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(*(st.flex_attention(q, k, v, None, x) for x in (b, cut)))


def test_without_transposes():
    b = pair("causal")[1]
    made = st.BlockMask.from_kv_blocks(b.kv_num_blocks, b.kv_indices, compute_q_blocks=False)
    assert made.q_num_blocks is None and made.q_indices is None


def test_trees_of_torch():
    from torch.utils import _pytree as tree

    kind = type("Mask", (st.BlockMask,), {})
    flatten, unflatten = kind._flatten, kind._unflatten
    tree.register_pytree_node(
        kind, flatten, unflatten, flatten_with_keys_fn=kind._flatten_with_keys
    )
    b = pair("heads")[1]
    leaves, context = b._flatten()
    made = unflatten(leaves, context)
    same(pair("heads")[0], made)
    assert type(made) is kind and made.mask_mod is b.mask_mod
    moved = tree.tree_map(lambda t: t.clone(), made)
    assert type(moved) is kind and torch.equal(moved.to_dense(), b.to_dense())
    keys = [str(k[0]) for k, _ in tree.tree_flatten_with_path(made)[0]]
    assert keys[0] == ".kv_num_blocks" and len(keys) == len(leaves)


def test_names_that_users_import():
    """Whatever torch's module offers that is not of other modules, hop excepted."""
    offered = [n for n, x in vars(theirs).items() if n[:1] == "_" and n[:2] != "__"]
    for name in [*offered, *theirs.__all__]:
        assert getattr(st, name) is not None, name
    assert st._DEFAULT_SPARSE_BLOCK_SIZE == 128
    with pytest.raises(ImportError):
        from saccade.torch import flex_attention_hop  # noqa: F401
    x = torch.arange(3)
    assert bool(st.noop_mask(x, x, x, x)) and st.noop_mask(x, x, x, x).dtype is torch.bool
    q = torch.randn(1, 2, 20, 8)
    want = st.flex_attention(q, q, q)
    for empty in (st._create_empty_block_mask, theirs._create_empty_block_mask):
        assert torch.equal(st.flex_attention(q, q, q, st._identity, empty(q, q)), want)
    made = st._create_sparse_block_from_block_mask(
        theirs._convert_mask_to_block_mask(torch.ones(1, 1, 128, 256, dtype=torch.bool)),
        None,
        (128, 256),
    )
    assert isinstance(made, st.BlockMask) and made.shape == (1, 1, 128, 256)


def test_refused():
    num, idx = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 3).int()
    with pytest.raises(AssertionError, match="full_q_num_blocks and full_q_indices"):
        st.BlockMask((256, 384), num, idx, full_q_num_blocks=num)
    for block in (0, (16, 0), -128):
        with pytest.raises(ValueError, match="BLOCK_SIZE: got"):
            st.create_block_mask(MASKS["causal"], None, None, 9, 9, BLOCK_SIZE=block)
    q = torch.randn(1, 1, 20, 8)
    for n, word in ((10, "smaller"), (30, "larger")):
        mask = st.create_block_mask(MASKS["causal"], None, None, n, n)
        with pytest.raises(ValueError, match=f"created for a {word} length than you're using"):
            st.flex_attention(q, q, q, None, mask)


def test_pages_that_no_key_has():
    """PyTorch's PagedAttention counts them and writes -1."""
    num = torch.tensor([[[3, 2]]], dtype=torch.int32)
    with_holes = torch.tensor([[[[2, -1, 0], [-1, 1, 0]]]], dtype=torch.int32)
    live = lambda b, h, q, kv: q >= kv - 40  # noqa: E731
    made = [
        st.BlockMask.from_kv_blocks(n, i, BLOCK_SIZE=16, mask_mod=live, seq_lengths=(32, 48))
        for n, i in (
            (num, with_holes),
            (
                torch.tensor([[[2, 1]]], dtype=torch.int32),
                torch.tensor([[[[2, 0, 0], [1, 0, 0]]]], dtype=torch.int32),
            ),
        )
    ]
    q = torch.randn(1, 1, 32, 16)
    k = torch.randn(1, 1, 48, 16)
    with_holes, without = (st.flex_attention(q, k, k, None, m) for m in made)
    assert torch.equal(with_holes, without)


def test_pictures_have_pytorchs_words():
    theirs = pytest.importorskip("torch.nn.attention.flex_attention")
    causal = lambda b, h, q, kv: q >= kv  # noqa: E731
    given = causal, 1, 1, 2048, 2048
    ours, want = (
        str(f(*given, device="cpu")).replace("█", "#").replace("░", "-").split("\n")
        for f in (st.create_block_mask, theirs.create_block_mask)
    )
    assert ours[:2] == want[:2]


def test_a_moved_mask_keeps_its_shape_and_is_seen_changing():
    b = st.create_block_mask(MASKS["causal"], 2, 3, 300, 300, "cpu")
    assert b.to("cpu").shape == (2, 3, 300, 300) and b.to("cpu").kv_indices.shape[:2] == (2, 3)
    b.kv_indices
    made = b.to("cpu")
    made.handle()
    made.kv_num_blocks[..., 1] = 0
    made.full_kv_num_blocks[..., 1] = 0
    q, k, v = (torch.ones(2, 3, 300, 8) for _ in range(3))
    out = st.flex_attention(q, k, v, block_mask=made)
    assert not out[:, :, 128:256].any() and out[:, :, 256:].all()


def test_masks_made_from_one_without_transposes_have_none():
    a, _ = pair("causal")
    lists = [getattr(a, name) for name in theirs.BlockMask._TENSOR_ATTRS[:4]]
    made = st.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=BLOCK, mask_mod=a.mask_mod, compute_q_blocks=False
    )
    for other in (made, made[:, :, :1], made._adjust(50, 50), made.to("cpu")):
        assert other.q_indices is None and other.full_q_num_blocks is None


def test_orders_of_sums_are_kept():
    _, b = pair("causal")
    lists = [getattr(b, name) for name in theirs.BlockMask._TENSOR_ATTRS[:4]]
    names = ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")
    assert all(getattr(b, name) is None for name in names)
    order = torch.arange(3)
    for given, wanted in ((True, (None, True)), (order, (order, None))):
        made = st.BlockMask.from_kv_blocks(
            *lists, dq_write_order=order, dq_write_order_full=order, dq_kv_order=given
        )
        assert made.dq_write_order is order and made.dq_write_order_full is order
        assert (made.dq_kv_order, made.dq_kv_order_spt) == wanted
    with pytest.raises(ValueError, match="dq_write_order"):
        st.BlockMask.from_kv_blocks(*lists, dq_write_order_full=order)


@pytest.mark.parametrize("flatten", (True, False))
def test_as_tuple_is_laid_out_as_torchs(flatten):
    a, b = pair("causal")
    for x, y in zip(a.as_tuple(flatten), b.as_tuple(flatten), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize(
    "counts, indices, words",
    [
        ([1, 4], [[0, 1, 2], [0, 1, 2]], r"num_blocks: got 4 at \[0, 0, 1\], expected 0 to 3"),
        ([-1, 1], [[0, 1, 2], [0, 1, 2]], r"num_blocks: got -1 at \[0, 0, 0\]"),
        ([1, 2], [[0, 1, 2], [0, 5, 2]], r"indices: got 5 at \[0, 0, 1, 1\], expected 0 to 2"),
        ([1, 2], [[-5, 1, 2], [0, 1, 2]], r"indices: got -5 at \[0, 0, 0, 0\]"),
    ],
)
@pytest.mark.parametrize("is_full", [False, True])
def test_blocks_that_are_not_there(counts, indices, words, is_full):
    wrong = torch.tensor([[counts]]).int(), torch.tensor([[indices]]).int()
    right = torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 3).int()
    lists = (*right, *wrong) if is_full else wrong
    with pytest.raises(ValueError, match=("full_" if is_full else "^") + "kv_" + words):
        st.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16)


def test_entries_that_are_not_counted_say_nothing():
    lists = torch.tensor([[[2]]]).int(), torch.tensor([[[[1, -1, 99, -7]]]]).int()
    mask = st.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16)
    assert mask.to_dense().tolist() == [[[[0, 1, 0, 0]]]]


def test_an_index_or_block_size_of_no_sense():
    mask = st.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 64, 64, device="cpu")
    with pytest.raises(IndexError, match="got None in dimension 1, expected an int"):
        mask[:, None, 0]
    lists = torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int()
    with pytest.raises(ValueError, match=r"BLOCK_SIZE: got \(1, 2, 3\), expected an int or"):
        st.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(1, 2, 3))


@pytest.mark.parametrize("n", (2, 3))
def test_index_tensors_without_batch_or_heads(n):
    """[rows, columns] and [H, rows, columns] are for all batches, as FlexAttention has it."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 256, 16) for _ in range(3))
    live = lambda b, h, i, j: (i >= j) & (i - j < 90 * (h + 1 if n == 3 else 1))  # noqa: E731
    whole = st.create_block_mask(live, None, 2 if n == 3 else None, 256, 256, BLOCK_SIZE=64)
    lists = (
        whole.kv_num_blocks, whole.kv_indices, whole.full_kv_num_blocks, whole.full_kv_indices
    )  # fmt: skip
    lists = [t[(0,) * (4 - n)] for t in lists]
    cut = st.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=64, mask_mod=live, seq_lengths=(256, 256)
    )
    want = st.flex_attention(q, k, v, None, whole)
    assert torch.equal(st.flex_attention(q, k, v, None, cut), want)
    assert torch.equal(st.flex_attention(q[:1], k[:1], v[:1], None, cut), want[:1])
    attend = torch.compile(lambda q: st.flex_attention(q, k, v, None, cut), backend="eager")
    assert torch.equal(attend(q), want)


def test_a_mask_of_no_named_device_is_for_any(monkeypatch):
    """Index tensors appear on the GPU where there is one; calls on the host take the mask."""
    from saccade.torch import masks

    monkeypatch.setattr(masks, "_device", lambda: torch.device("meta"))
    q = torch.randn(1, 2, 256, 16)
    mask = st.create_block_mask("q >= kv", None, None, 256, 256)
    assert mask.device.type == "meta"
    want = st.flex_attention(q, q, q, None, "q >= kv")
    assert torch.equal(st.flex_attention(q, q, q, None, mask), want)
    part = [q[:, :, :128]] * 3
    found = st.flex_attention(*part, None, mask._adjust(128, 128))
    assert torch.equal(found, st.flex_attention(*part, None, "q >= kv"))
    named = st.create_block_mask("q >= kv", None, None, 256, 256, "meta")
    for other in (named, mask.to("meta")):
        with pytest.raises(ValueError, match="block_mask is on meta"):
            st.flex_attention(q, q, q, None, other)


def hard(b, h, i, j):
    """Nothing proves where it is live: every position is evaluated."""
    return ((i * 7919 ^ j * 104729) * 2654435 >> 7) % 100003 == 1


class Alarm(Exception):
    pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="signals of POSIX")
@pytest.mark.parametrize("where", ("create_block_mask", "flex_attention"))
def test_signals_end_long_work(where):
    """What a handler raises comes within a second, time and again; one that returns changes
    nothing."""
    x = torch.randn(1, 1, 1 << 17, 16)

    def make():
        if where == "flex_attention":
            return st.flex_attention(x, x, x, block_mask=hard)
        return st.create_block_mask(hard, None, None, 1 << 18, 1 << 18)

    def ring(*_):
        rung.append(time.monotonic())
        if len(rung) == 2:
            raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(2):
            rung = []
            signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
            with pytest.raises(Alarm):
                make()
            assert time.monotonic() - rung[1] < 2
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    few = st.create_block_mask(hard, None, None, 1 << 11, 1 << 11)
    assert few.shape == (1, 1, 1 << 11, 1 << 11)
