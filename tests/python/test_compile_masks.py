"""Block masks inside of graphs of torch.compile: taken, sliced, cropped, changed, looked at."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from saccade.torch import compiled  # noqa: E402

takes_callables = pytest.mark.skipif(
    not compiled.masks.graphs_take_callables, reason="torch of old graphs"
)
of_new_graphs = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15), reason="torch of old graphs"
)
DOC = torch.arange(64) // 9
MODS = {
    "causal": lambda b, h, i, j: i >= j,
    "heads": lambda b, h, i, j: (i >= j) | (h > 0),
    "captured": lambda b, h, i, j: DOC[i] == DOC[j],
    "text": "q >= kv + b",
    "text with captures": st.mask("doc[q] == doc[kv] || h == n", doc=DOC, n=1),
    "noop": st.noop_mask,
}
LISTS = [
    prefix + name
    for prefix in ("", "full_")
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")
]


def tensors():
    g = torch.Generator().manual_seed(3)
    return [torch.randn(2, 4, 48, 16, generator=g) for _ in range(3)]


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    return torch.compile


def bases(name):
    """Masks by their mod, and by index tensors; the second may have no full blocks."""
    made = st.create_block_mask(MODS[name], 2, 4, 64, 60, device="cpu", BLOCK_SIZE=16)
    lists = [made.kv_num_blocks, made.kv_indices]
    given = st.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=16, mask_mod=MODS[name], seq_lengths=(64, 60)
    )
    return st.create_block_mask(MODS[name], 2, 4, 64, 60, device="cpu", BLOCK_SIZE=16), given


CUTS = {
    "integers": lambda m, i: m[1, 2, 3],
    "slices": lambda m, i: m[:1, 1:3, -2:],
    "last": lambda m, i: m[..., :, -1],
    "tensor": lambda m, i: m[:, :, i],
    "tensor of heads": lambda m, i: m[:, i],
    "twice": lambda m, i: m[1:][:, 1:4:2][:, :, 1:],
    "adjust": lambda m, i: m._adjust(40, 33),
    "adjust, slice": lambda m, i: m._adjust(40, 33)[:, :, 1:],
    "slice, adjust": lambda m, i: m[:, 1:3]._adjust(40, 33),
    "tensor, adjust": lambda m, i: m[:, :, i]._adjust(10, 33),
    "to": lambda m, i: m.to("cpu"),
    "to, slice": lambda m, i: m.to("cpu")[:, 1:3],
}


@takes_callables
@pytest.mark.parametrize("place, cut", list(enumerate(CUTS)))
def test_cuts(compiler, place, cut):
    """Results, index tensors and shape, in a full graph, are those outside: of masks made from
    each kind of mod, by turns, and from index tensors."""
    cut, name = CUTS[cut], list(MODS)[place % len(MODS)]

    def f(q, k, v, mask, i):
        m = cut(mask, i)
        B, H, Q, KV = m.shape
        out = st.flex_attention(q[:B, :H, :Q], k[:B, :H, :KV], v[:B, :H, :KV], None, m)
        return out, m.kv_num_blocks, m.kv_indices, m.to_dense(), m.q_indices, m

    x = [torch.randn(2, 4, 64, 16) for _ in range(3)]
    for mask in bases(name)[place // 3 % 2 :]:
        want = f(*x, mask, torch.tensor([2]))
        got = compiler(f, fullgraph=True, backend="eager")(*x, mask, torch.tensor([2]))
        for a, b in zip(want[:-1], got[:-1]):
            assert torch.equal(a, b)
        a, b = want[-1], got[-1]  # outside of the graph
        assert a.shape == b.shape and a.sparsity() == b.sparsity() and len(repr(b)) > 20
        for attribute in LISTS:
            left, right = getattr(a, attribute), getattr(b, attribute)
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left, right)
        B, H, Q, KV = a.shape
        y = x[0][:B, :H, :Q], x[1][:B, :H, :KV], x[2][:B, :H, :KV]
        assert torch.equal(st.flex_attention(*y, None, b), want[0])


@takes_callables
@pytest.mark.parametrize(
    "is_tensor, backend", [(False, "aot_eager"), (True, "eager"), (True, "inductor")]
)
def test_a_row_for_each_token(compiler, is_tensor, backend):
    """As decoding does: a row of blocks by the position, which the mod then moves by; no
    position compiles again but for what torch makes a symbol of."""
    mask, graphs = bases("causal")[0], []

    def f(q, k, v, at):
        m = mask[:, :, at // 16]
        m.mask_mod = lambda b, h, i, j: mask.mask_mod(b, h, i + at, j)
        m.seq_lengths = (1, 60)
        return st.flex_attention(q, k, v, None, m)

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    q, k, v = torch.randn(2, 4, 64, 16), *(torch.randn(2, 4, 60, 16) for _ in range(2))
    want = st.flex_attention(q, k, v, None, mask)
    g = compiler(f, fullgraph=True, backend=count)
    for at in (0, 5, 16, 33, 47, 63):
        row, place = q[:, :, at : at + 1].contiguous(), torch.tensor([at]) if is_tensor else at
        got = g(row, k, v, place)
        torch.testing.assert_close(got, want[:, :, at : at + 1])
    assert len(graphs) <= (1 if is_tensor else 4)


@takes_callables
def test_masks_of_index_tensors_made_in_a_graph(compiler):
    """Forward and backward; other index tensors and a new mask compile nothing."""
    graphs = []

    def f(q, k, v, num, idx, ids):
        live = lambda b, h, i, j: ids[i] >= ids[j]  # noqa: E731
        made = st.BlockMask.from_kv_blocks(
            num, idx, BLOCK_SIZE=16, mask_mod=live, seq_lengths=(48, 48)
        )
        return st.flex_attention(q, k, v, None, made), made.q_num_blocks, made.sparsity()

    g = compiler(f, fullgraph=True, backend=lambda x, _: graphs.append(x) or x)
    lowered = compiler(f, fullgraph=True, backend="aot_eager")
    x = [t.requires_grad_() for t in tensors()]
    for size in (16, 8):
        ids = torch.arange(48) // size
        live = st.mask("ids[q] >= ids[kv]", ids=ids)
        m = st.create_block_mask(live, 1, 1, 48, 48, "cpu", BLOCK_SIZE=16).to_dense()
        m[..., 1, 0] = 0
        num, idx = m.sum(-1, dtype=torch.int32), m.argsort(dim=-1, descending=True)
        given = num, idx.int(), ids
        want = f(*x, *given)
        wanted = torch.autograd.grad(want[0].sin().sum(), x)
        for other in (g, lowered):
            got = other(*x, *given)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
            assert got[2] == pytest.approx(want[2])
            for a, b in zip(torch.autograd.grad(got[0].sin().sum(), x), wanted):
                torch.testing.assert_close(a, b)
    assert len(graphs) == 1


@takes_callables
def test_what_is_read_of_a_mask(compiler):
    """Attributes of masks from outside, those made anew too, without compiling again; their
    index tensors are read when the graph runs."""
    graphs = []

    def f(q, m):
        sizes = m.numel() + m.shape[-1] + m.seq_lengths[0] + m.BLOCK_SIZE[0] + m.ndim
        lists = [m.kv_num_blocks, m.full_kv_indices, m.q_indices, m.full_q_num_blocks]
        return q * sizes + m.sparsity(), m.to_dense(), lists, str(m.device) + repr(m)[:9]

    g = compiler(f, fullgraph=True, backend=lambda x, _: graphs.append(x) or x)
    q = torch.randn(2)
    for n in range(5):
        live = st.mask("q + 16 * n >= kv", n=n)
        mask = st.create_block_mask(live, 1, 2, 64, 60, "cpu", BLOCK_SIZE=16)
        for _ in range(2):
            (a, *rest), (b, *others) = f(q, mask), g(q, mask)
            torch.testing.assert_close(a, b)
            assert torch.equal(rest[0], others[0]) and rest[2] == others[2]
            assert all(map(torch.equal, rest[1], others[1]))
    assert len(graphs) <= 2
    mask.kv_num_blocks = mask.kv_num_blocks * 0
    assert torch.equal(g(q, mask)[1], mask.to_dense())


@takes_callables
def test_a_mask_changed_in_a_graph_is_changed_outside(compiler):
    q, k, v = tensors()

    def f(q, mask):
        mask.mask_mod = lambda b, h, i, j: i - j < 9
        mask.full_kv_num_blocks = mask.full_kv_num_blocks * 0
        return st.flex_attention(q, k, v, None, mask)

    masks = [st.create_block_mask("q >= kv", 1, 1, 48, 48, "cpu", BLOCK_SIZE=16) for _ in "ab"]
    g = compiler(f, fullgraph=True, backend="eager")
    for _ in range(2):
        assert torch.equal(f(q, masks[0]), g(q, masks[1]))
        for kind in (lambda m: m.to_dense(), lambda m: st.flex_attention(q, k, v, None, m)):
            assert torch.equal(*map(kind, masks))


@takes_callables
@pytest.mark.parametrize("is_learned", (False, True))
def test_block_masks_of_torchs_own_stay_in_the_graph(compiler, is_learned):
    """By their index tensors, which are looked at in every call: those of the lower blocks are
    left out of the second mask by hand."""
    theirs = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = (t.requires_grad_() for t in tensors())
    ids, w = torch.arange(48) // 16, torch.rand(4, requires_grad=True)
    seen = []

    def count(graph, inputs):
        seen.append(graph)
        return graph.forward

    def near(b, h, i, j):
        return (ids[i] == ids[j]) | (i >= j)

    def f(q, mask):
        score = (lambda s, b, h, i, j: s * w[h]) if is_learned else None
        return st.flex_attention(q, k, v, score, mask)

    whole = theirs.create_block_mask(near, None, None, 48, 48, "cpu", BLOCK_SIZE=16)
    lists = [whole.kv_num_blocks, whole.kv_indices]
    lists += [whole.full_kv_num_blocks * 0, whole.full_kv_indices]
    part = theirs.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=near)
    all_live = theirs.create_block_mask(theirs.noop_mask, None, None, 48, 48, "cpu")
    g = compiler(f, fullgraph=True, backend=count)
    for mask in (whole, part, all_live):
        wanted = [q, k, v, w] if is_learned else [q, k, v]
        want = f(q, mask)
        want_grads = torch.autograd.grad(want.square().sum(), wanted)
        got = g(q, mask)
        assert torch.equal(got, want)
        for x, y in zip(torch.autograd.grad(got.square().sum(), wanted), want_grads):
            torch.testing.assert_close(x, y)
    assert not torch.equal(f(q, whole), f(q, part)) and len(seen) <= 2


def test_masks_adjusted_in_a_graph(compiler):
    """Made outside or in the graph, with other lengths and masks, forward and backward."""

    def f(q, mask):
        n = q.shape[2]
        mine = st.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64)._adjust(n, n)
        out = st.flex_attention(q, q, q, None, mask._adjust(n, n))
        return out + st.flex_attention(q, q, q, lambda s, b, h, i, j: s * 2, mine), mask

    for backend in ("eager", "aot_eager"):
        g = compiler(f, fullgraph=True, backend=backend)
        for n, text in (
            (48, "q >= kv"),
            (40, "q >= kv"),
            (40, "q - kv < 9"),
            (33, "q - kv < 9"),
        ):
            mask = st.create_block_mask(text, None, None, 64, 64, BLOCK_SIZE=16)
            q = torch.randn(2, 4, n, 16, requires_grad=True)
            want, got = f(q, mask)[0], g(q, mask)[0]
            torch.testing.assert_close(got, want)
            got, want = (torch.autograd.grad(x.sin().sum(), q)[0] for x in (got, want))
            torch.testing.assert_close(got, want)

    made = compiler(lambda m: m._adjust(40, 40), fullgraph=True, backend="eager")(mask)
    assert made.shape == (1, 1, 40, 40)
    assert torch.equal(made.kv_indices, mask._adjust(40, 40).kv_indices)


def test_what_else_is_asked_of_an_adjusted_mask(compiler):
    """Its attributes, slices and another adjustment: with breaks of the graph, as if eager."""
    mask = st.create_block_mask("q >= kv", None, None, 64, 64, BLOCK_SIZE=16)
    q = torch.randn(1, 2, 40, 16)

    def f(q, mask):
        cut = mask._adjust(48, 48)
        again = cut._adjust(40, 40)
        return st.flex_attention(q, q, q, None, again) * again.shape[-1] + cut.seq_lengths[0]

    torch.testing.assert_close(compiler(f, backend="eager")(q, mask), f(q, mask))
    rows = compiler(lambda m: m._adjust(40, 40)[:, :, :2].to("cpu"), backend="eager")(mask)
    assert rows.shape == (1, 1, 32, 40)


def test_a_selection_adjusted_in_a_graph(compiler):
    """Has the blocks that were selected last."""
    selection = st.BlockSelection(1, 2, 64, 64, most=4, BLOCK_SIZE=16)
    q = torch.randn(1, 2, 48, 16)
    f = lambda q, m: st.flex_attention(q, q, q, None, m._adjust(48, 48))  # noqa: E731
    g = compiler(f, fullgraph=True, backend="eager")
    for first in (0, 1, 2):
        selection.select(torch.full((1, 2, 4, 1), first, dtype=torch.int32))
        torch.testing.assert_close(g(q, selection), f(q, selection))


@of_new_graphs
def test_a_block_mask_that_a_graph_makes_has_no_index_tensors_there(compiler):
    """Its sizes are there, and one line says what to do for the rest; without fullgraph the
    graph breaks."""

    def f(q, is_read=False):
        m = st.create_block_mask(lambda b, h, i, j: i >= j, 1, 2, 48, 40, "cpu", BLOCK_SIZE=16)
        sizes = (*m.shape, *m.seq_lengths, *m.BLOCK_SIZE, m.numel())
        return q + m.kv_num_blocks.sum() if is_read else q, sizes, m.to("cpu")

    q = torch.ones(2)
    got = compiler(f, fullgraph=True, backend="eager")(q)
    assert got[1] == (1, 2, 48, 40, 48, 40, 16, 16, 48 * 40 * 2)
    assert torch.equal(got[2].kv_indices, f(q)[2].kv_indices)
    with pytest.raises(Exception, match="expected create_block_mask outside of the compiled"):
        compiler(f, fullgraph=True, backend="eager")(q, True)
    assert torch.equal(compiler(f, backend="eager")(q, True)[0], f(q, True)[0])


DENSE = {
    "causal": lambda b, h, i, j: i >= j,
    "captured": lambda b, h, i, j: (DOC[i] == DOC[j]) & (h + b < 3),
    "score": lambda s, b, h, i, j: torch.where(i >= j, s + 1.0, -float("inf")),
    "joined": st.or_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: DOC[i] == DOC[j]),
    "text": "q >= kv + b",
    "text with captures": st.mask("doc[q] == doc[kv] || h == n", doc=DOC, n=1),
    "of a block mask": st.create_block_mask("q >= kv", 1, 1, 64, 64, device="cpu").mask_mod,
}


@takes_callables
@pytest.mark.parametrize(
    "name, backend",
    [(n, "eager") for n in DENSE] + [("captured", "inductor"), ("text", "inductor")],
)
def test_dense_masks(compiler, name, backend):
    """create_mask of every form of mod, without a break; lengths may change."""

    def f(x, n):
        return x.masked_fill(st.create_mask(DENSE[name], 2, 3, n, 40, device="cpu"), 0.0)

    g = compiler(f, fullgraph=True, backend=backend)
    for n in (24, 33, 64):
        x = torch.randn(2, 3, n, 40)
        assert torch.equal(g(x, n), f(x, n))


@takes_callables
def test_dense_masks_where_the_default_device_is(compiler):
    def f(x):
        return x + st.create_mask(lambda b, h, i, j: i >= j, None, None, 8, 8)

    x = torch.zeros(8, 8)
    assert torch.equal(compiler(f, fullgraph=True, backend="eager")(x)[0, 0], x.add(1).tril())


@of_new_graphs
def test_texts_of_masks(compiler):
    """A graph knows a mask's shape and block size, and no values."""
    made = st.create_block_mask("q >= kv", 1, 1, 256, 256, device="cpu")
    want = "BlockMask(shape=(1, 1, 256, 256), BLOCK_SIZE=(128, 128))"

    def f(x, mask):
        own = st.create_block_mask("q >= kv", 1, 1, 256, 256, device="cpu")
        return x + 1, str(mask), f"{mask}", repr(mask), str(own)

    _, *texts = compiler(f, fullgraph=True, backend="eager")(torch.ones(1), made)
    assert texts == [want] * 4 and "sparsity" in str(made)
