"""flex_attention under torch.compile, no_grad, inference mode and autocast."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from saccade.torch import compiled  # noqa: E402


def tensors(dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(2, 4, 48, 16, generator=g).to(dtype) for _ in range(3)]


@pytest.fixture(scope="module")
def compiler():
    try:
        f = torch.compile(lambda x: x + 1, fullgraph=True)
        f(torch.ones(2))
    except Exception as reason:  # no C++ compiler for inductor here
        pytest.skip(f"torch.compile does not work here: {type(reason).__name__}")
    torch._dynamo.reset()
    return torch.compile


def test_text_stays_in_the_graph(compiler):
    q, k, v = tensors()
    mask = st.create_block_mask("q >= kv", None, None, 48, 48)
    slope = torch.rand(4)

    def f(q, k, v):
        out, lse = st.flex_attention(
            q * 2,
            k,
            v,
            st.score("score + slope[h] * (kv - q)", slope=slope),
            mask,
            return_lse=True,
        )
        return out + 1, lse

    with torch.no_grad():
        want, got = f(q, k, v), compiler(f, fullgraph=True)(q, k, v)
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])


def test_mask_of_captures_stays_in_the_graph(compiler):
    """Values of its captures are read at every call, as outside."""
    q, k, v = tensors()
    ids = torch.arange(48) // 16
    near = st.mask("ids[q] == ids[kv] && abs(q - kv) < n", ids=ids, n=9)
    f = lambda q: st.flex_attention(q, k, v, "score * 2", near)  # noqa: E731
    g = compiler(f, fullgraph=True)
    with torch.no_grad():
        for change in (0, 1, 0, 3):
            ids[20:] += change
            for _ in range(2):
                assert torch.equal(f(q), g(q))


def test_callable_of_a_capture(compiler):
    q, k, v = tensors()
    bias = torch.rand(4)

    def f(q, k, v):
        return st.flex_attention(q * 2, k, v, lambda s, b, h, i, j: s + bias[h] * (j - i)) + 1

    with torch.no_grad():
        assert torch.equal(f(q, k, v), compiler(f)(q, k, v))


def test_compiled_as_it_is(compiler):
    """torch.compile around flex_attention and create_block_mask, as users have it."""
    q, k, v = tensors()
    flex, make = compiler(st.flex_attention), compiler(st.create_block_mask)
    bias = torch.rand(4)
    with torch.no_grad():
        for n in range(12):  # beyond the limit of recompilations
            mod = lambda s, b, h, i, j: s + bias[h] * (j - i) * n  # noqa: E731, B023
            mask = make(lambda b, h, i, j: i >= j - n, None, None, 48, 48)  # noqa: B023
            assert torch.equal(flex(q, k, v, mod, mask), st.flex_attention(q, k, v, mod, mask))


def sample(q, k, v, bias, n):
    """A callable of each kind, whose tensors and numbers differ from call to call."""

    def mod(s, b, h, i, j):
        return torch.where(j > n, s + bias[h] * (j - i), s * bias.exp()[h])

    mask = lambda b, h, i, j: (i >= j) | (j < n)  # noqa: E731
    return st.flex_attention(q * 2, k, v, mod, mask, return_lse=True)


def test_callables_stay_in_the_graph(compiler):
    """fullgraph, forward and backward, other numbers and lengths without compiling again."""
    graphs = []
    count = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    plain = compiler(sample, fullgraph=True, dynamic=True, backend=count)
    lowered = compiler(sample, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (48, 50, 55):
        x = [torch.randn(2, 4, n, 16).requires_grad_() for _ in range(3)]
        x.append(torch.rand(4).requires_grad_())
        made = [f(*x, n // 3) for f in (sample, plain, lowered)]
        for other in made[1:]:
            assert torch.equal(made[0][0], other[0]) and torch.equal(made[0][1], other[1])
        sums = [out.sin().sum() + lse.sum() for out, lse in made]
        want, *others = [torch.autograd.grad(s, x) for s in sums]
        for other in others:
            assert all(torch.allclose(a, b, 1e-5, 1e-6) for a, b in zip(want, other))
    assert len(graphs) == 1


@pytest.mark.skipif(not compiled.masks.graphs_take_callables, reason="torch of old graphs")
@pytest.mark.parametrize("dynamic", (None, True))
def test_captures_of_any_length_in_one_graph(compiler, dynamic):
    """Sizes of captured tensors are symbols where torch makes them symbols, unless the mod
    names them: the last element, an element that a shorter tensor has not."""
    graphs = []
    count = lambda graph, _: graphs.append(graph) or graph  # noqa: E731

    def f(q, doc, step):
        live = lambda b, h, i, j: doc[i] == doc[j]  # noqa: E731

        def score(s, b, h, i, j):
            return torch.where(i - j < 20, s, s * step.exp()[j])

        return st.flex_attention(q, q, q, score, live)

    def last(q, doc, step):
        return st.flex_attention(q, q, q, lambda s, b, h, i, j: s * doc[-1] + step[20])

    for mod, most in ((f, 1), (last, 3)):
        torch._dynamo.reset()
        graphs.clear()
        g = compiler(mod, fullgraph=True, dynamic=dynamic, backend=count)
        lengths = (30, 37, 44) if most > 1 else range(30, 100, 7)
        for n in lengths:
            x = torch.randn(1, 2, n, 16), torch.arange(n) // 7, torch.rand(n)
            assert torch.equal(g(*x), mod(*x))
        assert len(graphs) <= most + (dynamic is None)


SIZES = {  # what a mod reads of captured tensors while it runs
    "shape": lambda q, t: (lambda s, b, h, i, j: s + t[h, i - j + t.shape[1] // 2], None),
    "size": lambda q, t: (lambda s, b, h, i, j: s + t[h, i - j + t.size(1) // 2], None),
    "len": lambda q, t: (lambda s, b, h, i, j: s + t[h, i - j + len(t[0]) // 2], None),
    "float": lambda q, t: (lambda s, b, h, i, j: s * (1.0 / q.shape[2]) + i / t.size(1), None),
    "row": lambda q, t: (lambda s, b, h, i, j: s + i / t[h].size(0) + t[h - 1].shape[0], None),
    "mask": lambda q, t: (None, lambda b, h, i, j: q.shape[2] // 2 - i > -j),
}


@pytest.mark.skipif(not compiled.masks.graphs_take_callables, reason="torch of old graphs")
@pytest.mark.parametrize("dynamic", (None, True))
@pytest.mark.parametrize("name", SIZES)
def test_sizes_read_by_a_mod_in_one_graph(compiler, name, dynamic):
    """They are captured numbers, as sizes read outside of it are."""
    torch._dynamo.reset()
    graphs = []
    count = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    f = lambda q, t: st.flex_attention(q, q, q, *SIZES[name](q, t))  # noqa: E731
    plain = compiler(f, fullgraph=True, dynamic=dynamic, backend=count)
    lowered = compiler(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (30, 37, 44, 21):
        x = torch.randn(1, 2, n, 16), torch.rand(2, 2 * n - 1)
        for g in (plain, lowered):
            assert torch.allclose(g(*x), f(*x), 1e-5, 1e-6)
    assert len(graphs) <= 1 + (dynamic is None)


@pytest.mark.skipif(not compiled.masks.graphs_take_callables, reason="torch of old graphs")
def test_integers_of_texts_in_one_graph(compiler):
    """Once such a number is seen to change, none of its values compiles again."""
    g = torch.Generator().manual_seed(0)
    x, slope = torch.randn(1, 2, 40, 16, generator=g), torch.rand(2, generator=g)
    x.requires_grad_()
    slope.requires_grad_()

    def f(x, slope, n):
        bias = st.score("score + s[h] * n * (kv - q)", s=slope, n=n)
        return st.flex_attention(x, x, x, bias, st.mask("q >= kv && q - kv < w", w=n))

    def run(f, n):
        out = f(x, slope, n)
        return out, *torch.autograd.grad(out.square().sum(), (x, slope))

    torch._dynamo.reset()
    graphs = []
    count = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    plain = compiler(f, fullgraph=True, backend=count)
    lowered = compiler(f, fullgraph=True, backend="aot_eager")
    for n in (3, 5, 9, 4, 70):
        for got in (plain, lowered):
            for a, b in zip(run(got, n), run(f, n)):
                assert torch.allclose(a, b, 1e-4, 1e-4)
    assert len(graphs) == 2


def test_numbers_in_graphs_are_read_where_they_lie(compiler, monkeypatch):
    """A call makes nothing anew for other values of one that a score captures."""
    q, k, v = tensors()
    made, kind = [], compiled._OpCall
    monkeypatch.setattr(compiled, "_OpCall", lambda *x: made.append(x) or kind(*x))
    f = lambda w: st.flex_attention(q, k, v, lambda s, *_: s * w)  # noqa: E731
    torch._dynamo.reset()
    graph = compiler(f, fullgraph=True, backend="aot_eager")
    for x in (0.5, 2.0, -1.0):
        w = torch.tensor(x, requires_grad=True)
        out, want = graph(w), f(w)
        assert torch.equal(out, want)
        got, slope = (torch.autograd.grad(t.square().sum(), w)[0] for t in (out, want))
        assert torch.allclose(got, slope)
    assert len(made) == 1


@pytest.mark.skipif(not compiled.masks.graphs_take_callables, reason="torch of old graphs")
@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("name", ("shape", "float", "mask"))
def test_sizes_read_by_an_exported_mod(name, strict):
    class Model(torch.nn.Module):
        def forward(self, q, t):
            return st.flex_attention(q, q, q, *SIZES[name](q, t))

    x = torch.randn(1, 2, 30, 16), torch.rand(2, 59)
    n = torch.export.Dim("n", min=4, max=512)
    shapes = {2: n}, {1: 2 * n - 1}
    made = torch.export.export(Model(), x, dynamic_shapes=shapes, strict=strict).module()
    x = torch.randn(1, 2, 21, 16), torch.rand(2, 41)
    assert torch.allclose(made(*x), Model()(*x), 1e-5, 1e-6)


def test_callables_beside_text_and_block_masks(compiler):
    q, k, v = tensors()
    mask = st.create_block_mask("q >= kv", None, None, 48, 48)
    slope = torch.rand(4)
    near = st.mask("abs(q - kv) < n", n=9)
    cases = [
        (lambda s, b, h, i, j: s * slope[h], mask),
        (lambda s, b, h, i, j: s * slope[h], near),
        (st.score("score * slope[h]", slope=slope), lambda b, h, i, j: i >= j),
    ]
    for score, m in cases:
        f = lambda q: st.flex_attention(q, k, v, score, m)  # noqa: B023, E731
        assert torch.equal(f(q), compiler(f, fullgraph=True, backend="eager")(q))


def test_callables_that_break_the_graph(compiler):
    """What torch.compile can't make a graph of runs as it does outside."""
    q, k, v = tensors()

    def mod(s, b, h, i, j):
        torch._dynamo.graph_break()
        return s * 2

    f = lambda q: st.flex_attention(q * 2, k, v, mod, "q >= kv") + 1  # noqa: E731
    assert torch.equal(f(q), compiler(f, backend="eager")(q))


def test_any_length_in_one_graph(compiler):
    slope, seen = torch.rand(4), []
    mod = st.score("score + slope[h] * (kv - q)", slope=slope)

    def f(q, k, v):
        return st.flex_attention(q, k, v, mod, "q >= kv", return_lse=True)

    def counted(graph, inputs):
        seen.append(graph)
        return graph

    g = compiler(f, fullgraph=True, dynamic=True, backend=counted)
    with torch.no_grad():
        for n in (48, 50, 64, 77):
            x = [torch.randn(2, 4, n, 16) for _ in range(3)]
            for a, b in zip(f(*x), g(*x)):
                assert torch.equal(a, b)
    assert len(seen) == 1


def test_export(tmp_path):
    """torch.export with any length, saved and loaded."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("slope", torch.rand(4))

        def forward(self, q, k, v):
            mod = st.score("score + slope[h] * (kv - q)", slope=self.slope)
            return st.flex_attention(q, k, v, mod, "sliding_window(9)")

    model, n = Model(), torch.export.Dim("n", min=2, max=4096)
    with torch.no_grad():
        made = torch.export.export(model, tuple(tensors()), dynamic_shapes=[{2: n}] * 3)
        torch.export.save(made, tmp_path / "model.pt2")
        x = [torch.randn(2, 4, 70, 16) for _ in range(3)]
        for m in (made, torch.export.load(tmp_path / "model.pt2")):
            assert torch.equal(m.module()(*x), model(*x))


def test_masks_come_as_arguments(compiler):
    """A new BlockMask for each call is at most one more compilation."""
    q, k, v = tensors()
    seen = []
    f = lambda m: st.flex_attention(q, k, v, "score * 0.5", m)  # noqa: E731
    g = compiler(f, fullgraph=True, backend=lambda graph, _: seen.append(graph) or graph)
    with torch.no_grad():
        for n in range(20):
            m = st.create_block_mask(lambda b, h, i, j: i + n >= j, None, None, 48, 48)
            assert torch.equal(f(m), g(m))
    assert len(seen) <= 2


@pytest.mark.parametrize("place", [0, 1, 2])
def test_rows_that_are_not_contiguous(compiler, place):
    """The strides that the compiler expects of a result are those it gets."""
    x = tensors()
    x[place] = x[place].transpose(2, 3).contiguous().transpose(2, 3)
    x[0] = x[0].transpose(1, 2).contiguous().transpose(1, 2) if place else x[0]
    f = lambda *x: st.flex_attention(*x, "score * 2").transpose(1, 2) + 1  # noqa: E731
    with torch.no_grad():
        assert torch.equal(f(*x), compiler(f, fullgraph=True)(*x))


def test_training_graphs(compiler):
    """Gradients of inputs and captures, of lse too, bit for bit those outside."""
    q, k, v = (t.requires_grad_() for t in tensors())
    slope = torch.rand(4, requires_grad=True)

    def f(q):
        mod = st.score("score + slope[h]", slope=slope * 2)
        out, lse = st.flex_attention(q * 2, k, v, mod, "q >= kv", return_lse=True)
        return out.sin().sum() + lse.sum()

    x = q, k, v, slope
    want = torch.autograd.grad(f(q), x)
    for a, b in zip(want, torch.autograd.grad(compiler(f, fullgraph=True)(q), x)):
        assert torch.allclose(a, b, 1e-5, 1e-6)


def test_a_mask_lives_until_backward(compiler):
    """Made for one step, gone from the caller before backward, and after it altogether."""
    x = [t.requires_grad_() for t in tensors()]
    g = compiler(st.flex_attention, fullgraph=True, backend="aot_eager")

    def made():
        return st.create_block_mask(lambda b, h, i, j: i >= j, None, None, 48, 48)

    want = torch.autograd.grad(st.flex_attention(*x, None, made()).sum(), x)
    mask = made()
    seen, out = weakref.ref(mask), g(*x, None, mask)
    del mask
    for a, b in zip(want, torch.autograd.grad(out.sum(), x)):
        assert torch.equal(a, b)
    del out
    gc.collect()
    assert seen() is None


def test_ahead_of_time_code_passes_empty_lists_as_none(compiler):
    """The operator, as inductor's C++ calls it."""
    q, k, v = tensors()
    mods, mask = (None, None, "|", "", "q >= kv"), (0, None, None)
    arguments = (q, k, v, *mods, *mask, None, "auto", 0.0, None, False, False, False)
    found = compiled.flex._init_fn(*arguments)
    assert torch.equal(found[0], st.flex_attention(q, k, v, None, "q >= kv"))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator(dtype, layout):
    """torch's own checks of schema, fake kernel and dynamic shapes."""
    import saccade.torch.compiled  # noqa: F401

    q, k, v = tensors(dtype)
    if layout == "bnhd":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    mask = st.create_block_mask("q >= kv", None, None, 48, 48)
    numbered = [], [], "|", "", "", mask.number, [], []
    made = ([torch.rand(4)], [2.0], "slope w:float |", "score + slope[h] * w")
    for mods, wanted in (((*made, "", 0, [], []), True), (numbered, False)):
        torch.library.opcheck(
            torch.ops.saccade.flex.default,
            (q, k, v, *mods, 0.3, "auto", 0.0, None, wanted, wanted, True),
        )


def test_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = tensors()
    with FakeTensorMode() as mode:
        out, lse = st.flex_attention(*map(mode.from_tensor, (q, k, v)), return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype is torch.float32
    assert st.flex_attention(*(t.to("meta") for t in (q, k, v))).device.type == "meta"


def test_modes():
    q, k, v = tensors()
    want = st.flex_attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(st.flex_attention(q, k, v), want)
    with torch.autocast("cpu", torch.bfloat16):
        out = st.flex_attention(q, k, v)
    assert out.dtype is torch.bfloat16
    with torch.no_grad():
        x = q.clone().requires_grad_()
        assert not st.flex_attention(x, k, v).requires_grad
    half = st.flex_attention(*(t.bfloat16() for t in (q, k, v)))
    assert torch.equal(out, half)


def test_a_graph_makes_its_block_mask(compiler):
    """create_block_mask and its users in one graph, forward and backward, with other documents
    and lengths; and the mask itself where a graph gives it back."""

    def make(doc, n):
        live = lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j)  # noqa: E731
        return st.create_block_mask(live, None, None, n, n, device="cpu", BLOCK_SIZE=16)

    def f(q, k, v, doc):
        mask = make(doc, q.shape[2])
        out = st.flex_attention(q * 2, k, v, None, mask)
        return st.flex_attention(out, k, v, lambda s, b, h, i, j: s * 0.5, mask)

    graphs = []
    count = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    plain = compiler(f, fullgraph=True, dynamic=True, backend=count)
    lowered = compiler(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, size in ((48, 20), (50, 20), (50, 7)):
        x = [torch.randn(2, 4, n, 16).requires_grad_() for _ in range(3)]
        doc = torch.arange(n) // size
        want = f(*x, doc)
        wanted = torch.autograd.grad(want.sin().sum(), x)
        for g in (plain, lowered):
            out = g(*x, doc)
            assert torch.equal(out, want)
            for a, b in zip(torch.autograd.grad(out.sin().sum(), x), wanted):
                assert torch.allclose(a, b, 1e-5, 1e-6)
    assert len(graphs) <= 2  # PyTorch compiles once more for other lengths of doc
    made, same = compiler(make, fullgraph=True, backend="eager")(doc, n), make(doc, n)
    assert torch.equal(st.flex_attention(*x, None, made), st.flex_attention(*x, None, same))
    assert torch.equal(made.kv_indices, same.kv_indices) and made.sparsity() == same.sparsity()
    flex = compiler(st.flex_attention, fullgraph=True, backend="eager")
    assert torch.equal(flex(*x, None, made), st.flex_attention(*x, None, same))
    many = lambda q: st.flex_attention(q, q, q, None, st.create_block_mask(  # noqa: E731
        "q >= kv + b", 3, None, 50, 50, device="cpu"))  # fmt: skip
    for graph in (many, compiler(many, backend="eager")):
        assert torch.equal(graph(x[0]), st.flex_attention(*3 * x[:1], None, "q >= kv + b"))
        with pytest.raises(Exception, match="got batch 3"):
            graph(torch.cat([x[0], x[0]]))
    with pytest.raises(Exception, match="block_mask was created for"):
        wrong = lambda q: st.flex_attention(q, q, q, None, make(doc, 50))  # noqa: E731
        compiler(wrong, backend="eager")(x[0][:, :, :9])


@pytest.mark.parametrize("kind", ("varlen", "cached"))
def test_calls_that_run_between_graphs(compiler, kind):
    """One break around the call, gradients too; with fullgraph one line that says so."""
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    bias, graphs = torch.rand(2), []

    def f(q):
        if kind == "varlen":
            score = lambda s, b, h, i, j: s + bias[h]  # noqa: E731
            return st.varlen_attention(q * 2, q, q, starts, score=score) + 1
        rows = q.transpose(0, 1)[None].detach()
        return st.cached_attention(rows * 2, rows, rows, seq_lens=10) + 1

    g = compiler(f, backend=lambda graph, _: graphs.append(graph) or graph)
    q = torch.randn(10, 2, 16, requires_grad=kind == "varlen")
    want, got = f(q), g(q)
    assert torch.equal(want, got) and len(graphs) == 2
    if kind == "varlen":
        assert torch.equal(*(torch.autograd.grad(x.sum(), q)[0] for x in (want, got)))
    with pytest.raises(Exception, match=f"saccade: {kind}_attention runs between graphs"):
        compiler(f, fullgraph=True, backend="eager")(q)
