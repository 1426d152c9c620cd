"""Whatever a caller changes between calls is seen by the next one: closures, globals, defaults,
attributes, lists, tensors in place. Each case is compared with a fresh evaluation in torch."""

import functools
import gc
import random
import types
import weakref

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402

B, H, N, D = 2, 3, 24, 16
G = torch.Generator().manual_seed(2)
Q, K, V = (torch.randn(B, H, N, D, generator=G) for _ in range(3))

WINDOW = 3
FLAG = True
SLOPE = torch.tensor([0.1, 0.2, 0.3])
SETTINGS = types.SimpleNamespace(window=3, deep=types.SimpleNamespace(slope=0.5))


class Config:
    scale = 2.0


def helper(score, distance):
    return score + WINDOW * 0.1 * distance


def want(mod):
    """Dense float64 attention under a score mod evaluated by torch."""
    i = torch.arange
    s = Q.double() @ K.double().mT / D**0.5
    out = torch.empty_like(s)
    rows = i(N).view(N, 1), i(N).view(1, N)
    for b in range(B):
        for h in range(H):
            x = mod(s[b, h], torch.tensor(b), torch.tensor(h), *rows)
            out[b, h] = torch.as_tensor(x).double().expand(N, N)
    return torch.softmax(out, -1) @ V.double()


def check(mod):
    got = st.flex_attention(Q, K, V, mod)
    assert float((got.double() - want(mod)).abs().max()) < 1e-4


def through(mod, *changes):
    """Calls, and after each change calls the same object again."""
    check(mod)
    check(mod)
    for change in changes:
        change()
        check(mod)
        check(mod)


def test_closure_number_dtype_and_shape():
    x = 0.5
    mod = lambda s, b, h, i, j: s + x * (i - j)  # noqa: E731
    through(mod)
    for x in (1.5, 2, torch.tensor(0.25), torch.tensor(3), True, 0.5):
        check(mod)
    t = torch.randn(H, generator=G)
    mod = lambda s, b, h, i, j: s * t[h]  # noqa: E731
    for t in (t * 2, t.half(), torch.arange(H), torch.randn(1, generator=G).expand(H)):
        check(mod)


def test_tensor_in_place_and_by_data():
    t = torch.ones(H)
    mod = lambda s, b, h, i, j: s * t[h]  # noqa: E731
    through(
        mod,
        lambda: t.mul_(3),
        lambda: setattr(t, "data", torch.rand(H)),
        lambda: setattr(t, "data", torch.rand(2 * H)[::2]),
        lambda: setattr(t, "data", torch.rand(H).double()),
    )
    zero = torch.tensor(1.0)
    through(lambda s, b, h, i, j: s * zero, lambda: zero.fill_(0.25))


def test_values_read_at_trace_time():
    t = torch.tensor([1.0, 2.0, 3.0])
    through(lambda s, b, h, i, j: s * t.max().item(), lambda: t.mul_(2))
    through(lambda s, b, h, i, j: s * (t * 0.5)[h], lambda: t.mul_(2))
    through(lambda s, b, h, i, j: s * torch.exp2(-t)[h] * t[0:2][1], lambda: t.add_(0.5))
    through(lambda s, b, h, i, j: s + (i - j) / t.shape[0])
    t = torch.rand(7)
    mod = lambda s, b, h, i, j: s + t[(i - j).clamp(0, t.shape[0] - 1)]  # noqa: E731
    check(mod)
    t = torch.rand(9)
    check(mod)
    again = lambda s, b, h, i, j: s + t[(i - j).clamp(0, len(t) - 1)]  # noqa: E731
    check(again)
    t = torch.rand(5)
    check(again)


def test_globals():
    global WINDOW, FLAG, SLOPE, helper
    through(lambda s, b, h, i, j: s + WINDOW * (i - j) * 0.1)
    mod = lambda s, b, h, i, j: helper(s, i - j) * SLOPE[h]  # noqa: E731
    branch = lambda s, b, h, i, j: s * 2 if FLAG else s  # noqa: E731
    nested = lambda s, b, h, i, j: sum(s * (WINDOW + n) for n in range(2))  # noqa: E731
    kept = WINDOW, FLAG, SLOPE, helper
    try:
        for m in (mod, branch, nested):
            through(m)
        WINDOW, FLAG, SLOPE = 5, False, SLOPE * 2
        for m in (mod, branch, nested):
            check(m)
        helper = lambda score, distance: score - distance * 0.05  # noqa: E731
        check(mod)
    finally:
        WINDOW, FLAG, SLOPE, helper = kept


def test_attributes():
    try:
        through(
            lambda s, b, h, i, j: s + SETTINGS.window * SETTINGS.deep.slope * (i - j) * 0.1,
            lambda: setattr(SETTINGS, "window", 7),
            lambda: setattr(SETTINGS.deep, "slope", 0.1),
            lambda: setattr(SETTINGS, "deep", types.SimpleNamespace(slope=1)),
        )
        through(lambda s, b, h, i, j: s * Config.scale, lambda: setattr(Config, "scale", 3.0))
    finally:
        Config.scale = 2.0
        SETTINGS.window, SETTINGS.deep = 3, types.SimpleNamespace(slope=0.5)
    module = types.ModuleType("mine")
    module.cap = 5.0
    through(
        lambda s, b, h, i, j: module.cap * torch.tanh(s / module.cap),
        lambda: setattr(module, "cap", 1.0),
    )


class Gate(torch.nn.Module):
    power = 1

    def __init__(self, slope):
        super().__init__()
        self.slope = slope
        self.gate = torch.nn.Parameter(torch.rand(H), requires_grad=False)

    def inner(self, h):
        return torch.sigmoid(self.gate[h]) ** self.power

    def forward(self, s, b, h, i, j):
        return s * self.inner(h) + self.slope * (i - j)

    def method(self, s, b, h, i, j):
        return s * self.inner(h)


def test_objects_and_methods():
    gate, other = Gate(0.1), Gate(0.1)
    through(gate.method, lambda: gate.gate.fill_(0.5))
    for m in (gate, other, gate.method, other.method):
        check(m)
    mod = lambda s, b, h, i, j: gate.method(s, b, h, i, j)  # noqa: E731
    through(mod, lambda: setattr(gate, "power", 2), lambda: setattr(gate, "slope", 3))
    gate.gate = torch.nn.Parameter(torch.rand(H), requires_grad=False)
    check(mod)
    gate = other
    check(mod)


class Plain:
    __slots__ = ("slope", "__weakref__")

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, s, b, h, i, j):
        return s + self.slope * (i - j)


class Counted:
    """A user's sequence, by __getitem__."""

    def __init__(self, *items):
        self.items = list(items)

    def __getitem__(self, i):
        return self.items[i]


def test_containers():
    a, d, plain, counted = [0.1, 0.2], {"x": 0.3}, Plain(0.1), Counted(0.5, 0.25)
    through(
        lambda s, b, h, i, j: s + a[1] * (i - j) * len(a) + d["x"] + counted[1] * i * 0.1,
        lambda: a.__setitem__(1, 0.5),
        lambda: a.append(9),
        lambda: d.update(x=0.9),
        lambda: counted.items.__setitem__(1, 0.75),
    )
    through(plain, lambda: setattr(plain, "slope", 1.5))
    through(lambda s, b, h, i, j: plain(s, b, h, i, j), lambda: setattr(plain, "slope", 0.3))


def test_defaults_and_partials():
    def mod(s, b, h, i, j, slope=0.1, *, more=0.2):
        return s + slope * (i - j) + more * j

    def renew():
        mod.__defaults__ = (0.7,)

    def renew_named():
        mod.__kwdefaults__["more"] = 0.9

    through(mod, renew, renew_named)
    part = functools.partial(lambda w, s, b, h, i, j: s * w, 2.0)
    through(part)
    check(functools.partial(lambda w, s, b, h, i, j: s * w, 3.0))
    named = functools.partial(lambda s, b, h, i, j, w: s * w, w=2.0)
    through(named, lambda: named.keywords.update(w=0.5))


def test_same_name_other_code():
    for body in ("s + i", "s - i * 0.1", "s * 2"):
        space = {}
        exec(f"def mod(s, b, h, i, j):\n    return {body}", space)
        check(space["mod"])


@pytest.mark.parametrize("seed", range(4))
def test_random_changes(seed):
    """A pool of closures over shared state, mutated at random, always equals torch."""
    import random

    r = random.Random(seed)
    state = types.SimpleNamespace(a=0.5, t=torch.rand(H), n=[0.1, 0.2], o=Plain(0.1))

    def make():
        x, t = r.random(), torch.rand(H)
        pool = [
            lambda s, b, h, i, j: s + x * (i - j),
            lambda s, b, h, i, j: s * t[h] + state.a,
            lambda s, b, h, i, j: s * state.t[h] * x,
            lambda s, b, h, i, j: s + state.n[0] * i + state.o.slope * j,
            functools.partial(lambda w, s, b, h, i, j: s * w + state.n[-1] * i, x),
        ]
        return r.choice(pool)

    changes = [
        lambda: setattr(state, "a", r.choice([r.random(), 2, torch.rand(())])),
        lambda: setattr(state, "t", torch.rand(H).to(r.choice([torch.half, torch.float]))),
        lambda: state.t.mul_(r.random()),
        lambda: setattr(state.t, "data", torch.rand(H, dtype=state.t.dtype)),
        lambda: state.n.__setitem__(r.randrange(2), r.random()),
        lambda: state.n.append(r.random()),
        lambda: setattr(state.o, "slope", r.choice([r.random(), 1])),
        lambda: setattr(state, "o", Plain(r.random())),
    ]
    mods = [make() for _ in range(5)]
    for _ in range(60):
        r.choice(changes)()
        if r.random() < 0.3:
            mods[r.randrange(5)] = make()
        check(r.choice(mods))


def test_mask_given_as_a_callable_is_proven_again():
    doc = torch.arange(N) // 8
    mask = lambda b, h, i, j: doc[i] == doc[j]  # noqa: E731

    def run():
        got = st.flex_attention(Q, K, V, None, mask)
        live = doc[:, None] == doc
        s = (Q.double() @ K.double().mT / D**0.5).masked_fill(~live, float("-inf"))
        assert float((got.double() - torch.softmax(s, -1) @ V.double()).abs().max()) < 1e-4

    run()
    doc.copy_(torch.arange(N) // 3)
    run()
    doc = torch.zeros(N, dtype=torch.int32)
    run()


def _moves(t, how):
    """Its values to other memory, and others to where they lay."""
    t.share_memory_() if how == "share" else t.resize_(1 << 20).resize_(N)
    return [torch.full((N,), 7 + i, dtype=t.dtype) for i in range(99)]


@pytest.mark.parametrize("how", ["share", "resize"])
def test_what_a_block_mask_captures_moves(how):
    """As a module's buffers do when it is given to another process."""
    doc = torch.arange(N, dtype=torch.int32) // 8
    mod = lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j)  # noqa: E731
    text = st.mask("doc[q] == doc[kv] && q >= kv", doc=doc)
    made = st.create_block_mask(mod, None, None, N, N)
    lists = made.kv_num_blocks, made.kv_indices
    masks = [made, st.create_block_mask(text, None, None, N, N), made._adjust(N, N), text]
    masks.append(st.BlockMask.from_kv_blocks(*lists, mask_mod=mod, seq_lengths=(N, N)))
    call = lambda mask: st.flex_attention(Q, K, V, None, mask)  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = lambda: [f(m) for f in (call, compiled) for m in masks]  # noqa: E731
    results()
    before = results()
    others = _moves(doc, how)
    for _ in range(2):
        for got, want in zip(results(), before):
            assert torch.equal(got, want)
    del others


def _document_mask():
    doc = torch.arange(N, dtype=torch.int32) // 8
    mod = lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j)  # noqa: E731
    return doc, st.create_block_mask(mod, None, None, N, N)


def test_what_a_block_mask_captures_moves_before_the_backward_pass():
    doc, made = _document_mask()
    q = Q.clone().requires_grad_()
    gradient = lambda out: torch.autograd.grad(out.sum(), q)[0]  # noqa: E731
    call = lambda: st.flex_attention(q, K, V, None, made)  # noqa: E731
    want, *_ = [gradient(call()) for _ in range(3)]  # the last by the extension
    out = call()
    others = _moves(doc, "share")
    with pytest.raises(RuntimeError, match="moved in memory between a call and its backward"):
        gradient(out)
    assert all(torch.equal(gradient(call()), want) for _ in range(3))
    del others


def test_captures_of_varlen_attention_move_before_the_backward_pass():
    doc, bias = torch.arange(N, dtype=torch.int32) // 8, torch.randn(H, N, generator=G)
    mask = st.mask("doc[q] == doc[kv] && q >= kv", doc=doc)
    score = st.score("score + bias[h, kv]", bias=bias)
    q, k = (t[0].transpose(0, 1).contiguous() for t in (Q, K))
    q.requires_grad_()
    at = torch.tensor([0, N], dtype=torch.int32)
    call = lambda: st.varlen_attention(q, k, k, at, at, mask=mask, score=score)  # noqa: E731
    want, out = torch.autograd.grad(call().sum(), q)[0], call()
    others = _moves(doc, "share"), _moves(bias, "share")
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], want)
    del others


def test_what_a_block_mask_captures_is_gone():
    doc, made = _document_mask()
    st.flex_attention(Q, K, V, None, made)
    doc.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ValueError):
            st.flex_attention(Q, K, V, None, made)


def test_a_selection_whose_captures_moved_says_so():
    doc = torch.arange(N, dtype=torch.int32) // 8
    made = st.BlockSelection(B, H, N, N, most=1, mask_mod=lambda b, h, i, j: doc[i] == doc[j])
    made.select(torch.zeros(B, H, 1, 1, dtype=torch.int32))
    st.flex_attention(Q, K, V, None, made)
    others = _moves(doc, "share")
    with pytest.raises(RuntimeError, match="lies elsewhere in memory"):
        st.flex_attention(Q, K, V, None, made)
    del others


def test_index_tensors_changed_in_place():
    made = st.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, BLOCK_SIZE=8)
    made = st.BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=8, seq_lengths=(N, N)
    )
    first = st.flex_attention(Q, K, V, None, made)
    made.kv_num_blocks.fill_(3)
    made.kv_indices.copy_(torch.arange(3).expand(3, 3))
    assert torch.allclose(st.flex_attention(Q, K, V, None, made), st.flex_attention(Q, K, V))
    made.kv_num_blocks = torch.ones(1, 1, 3, dtype=torch.int32)
    last = st.flex_attention(Q, K, V, None, made)
    assert not torch.allclose(first, last)
    assert torch.allclose(last, st.flex_attention(Q, K, V, None, "kv < 8"), atol=1e-6)


def test_nothing_of_the_caller_is_kept():
    def call():
        bias, extra = torch.rand(B, H, N, N), torch.rand(H)

        def mod(s, b, h, i, j):
            return s + bias[b, h, i, j] * extra[h]

        mask = st.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N)
        st.flex_attention(Q, K, V, mod, mask)
        st.flex_attention(Q, K, V, mod, mask)
        return [weakref.ref(x) for x in (bias, extra, mod, mask)]

    refs = call()
    gc.collect()
    assert [r() for r in refs] == [None] * 4


def test_memory_does_not_grow():
    resource = pytest.importorskip("resource")
    bias, mask = torch.rand(H), st.create_block_mask("q >= kv", None, None, N, N)
    fixed = lambda s, b, h, i, j: s + bias[h]  # noqa: E731

    def some(n):
        for x in range(n):
            new = torch.rand(H)
            st.flex_attention(Q, K, V, fixed, mask)
            st.flex_attention(Q, K, V, lambda s, b, h, i, j: s + new[h], mask)
            if x % 10 == 0:
                st.flex_attention(Q, K, V, lambda s, b, h, i, j: s * x + bias[h], mask)
                st.flex_attention(Q, K, V, None, lambda b, h, i, j: i >= j - x)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    some(6000)  # so that the bounded tables are full
    grown = []
    while len(grown) < 3 and (not grown or grown[-1] >= 4096):  # a leak grows every time
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        some(10000)
        grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    torch.set_num_threads(threads)
    assert grown[-1] < 4096, f"{grown} KiB, each over 22,000 calls"


def changes_of(t):
    """Other values, memory, dtype and layout of one tensor object."""
    first = t.clone()
    yield lambda: t.mul_(2)
    for data in (first + 1, first.double(), torch.rand(2 * H)[::2], first):
        yield lambda data=data: setattr(t, "data", data)


def test_defined_anew():
    """One code, made into a function again for each call: found again only if it holds the same
    tensors and numbers."""
    global SLOPE

    def make(x, y=1.0):
        return lambda s, b, h, i, j, z=y: s * z + torch.where(i - j > x, x, s / (j - i + 0.5))

    two = lambda x, y: lambda s, b, h, i, j: s * x[h] + y[h] * (i - j)  # noqa: E731
    t, u = torch.rand(H), torch.rand(H)
    for x, y in ((t, t), (t, u), (u, u), (u, t), (torch.rand(H), torch.rand(H))):
        check(two(x, y))  # one tensor twice is another text than two tensors
    for n in range(4):  # captures of a closure beside those of globals, which change too
        t, u = torch.rand(H), SLOPE if n == 2 else torch.rand(H)
        check(lambda s, b, h, i, j: s * t[h] + u[h] * SLOPE[h] * (i - j) * WINDOW + n)
        SLOPE = SLOPE * 2 if n == 1 else SLOPE
    for change in (lambda: None, lambda: None, *changes_of(SLOPE)):
        change()
        t = torch.rand(H)
        check(lambda s, b, h, i, j: s * t[h] + SLOPE[h] * (i - j))
    bias = torch.rand(H)
    for x in (0.0, -0.0, 0, 1, True, 1.0, False, bias[0], bias[1], bias[0]):
        check(make(x))
        check(make(x))
        check(make(x, 2.0))
    for n in range(20):  # tensors that die at once, whose ids come again
        t = torch.rand(H)
        check(lambda s, b, h, i, j: s * t[h])
        del t
    inner = lambda s: s * WINDOW + bias[0]  # noqa: E731
    for change in (lambda: None, lambda: bias.mul_(2), lambda: setattr(bias, "data", bias / 3)):
        change()
        check(lambda s, b, h, i, j: inner(s) - bias[h])
        check(lambda s, b, h, i, j: inner(s) - bias[h])
    for inner in (lambda s: s, lambda s: s * 2):
        check(lambda s, b, h, i, j: inner(s) - bias[h])
    weight = torch.rand(H)
    call = lambda: st.flex_attention(Q, K, V, lambda s, b, h, i, j: s * weight[h])  # noqa: E731
    assert not call().requires_grad
    weight.requires_grad_()
    assert call().requires_grad
    with torch.no_grad():
        assert not call().requires_grad


def test_threads():
    from concurrent.futures import ThreadPoolExecutor

    bias = torch.rand(H)
    mods = [lambda s, b, h, i, j, n=n: s * (n + 1) + bias[h] for n in range(6)]
    wants = [st.flex_attention(Q, K, V, m) for m in mods]

    def work(n):
        mask = st.create_block_mask(lambda b, h, i, j: i >= j - n % 5, None, None, N, N)
        st.flex_attention(Q, K, V, None, mask)
        fresh = lambda s, b, h, i, j: mods[n % 6](s, b, h, i, j)  # noqa: E731
        a, b = (st.flex_attention(Q, K, V, m) for m in (mods[n % 6], fresh))
        return torch.equal(a, wants[n % 6]) and torch.equal(b, wants[n % 6])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))


def _branches(n):
    return lambda s, b, h, i, j: s * 2 if n > 2 else s


def _loops(n):
    def mod(s, b, h, i, j):
        for _ in range(n):
            s = s * 1.25
        return s

    return mod


def _selects(n):
    return lambda s, b, h, i, j: s * {1: 0.5, 2: 3.0}.get(n, 1.5)


def _asks_for_the_type(n):
    return lambda s, b, h, i, j: s * n if isinstance(n, int) else s + n


@pytest.mark.parametrize(
    "make",
    [
        _branches,
        _loops,
        _selects,
        _asks_for_the_type,
        lambda n: lambda s, b, h, i, j: s * int(n),
        lambda n: lambda s, b, h, i, j: s * n.__class__(3).bit_length() if n == 1 else s * n,
        lambda n: lambda s, b, h, i, j: s * len([0.5] * int(n)),
        lambda n: lambda s, b, h, i, j: s * len(f"{n:03}"),
    ],
)
def test_numbers_that_python_looked_at(make):
    """A function made anew around another number, which its control flow uses, is another."""
    for n in (1, 4, 1, 2, 3, 4, 2):
        check(make(n))
    for n in (4, 1):
        mod = make(n)
        through(mod, lambda: None)


NAMES = """
def make(x, y, f):
    def mod(s, b, h, i, j):
        return s * x[h] + f(s, h) * y * (i - j) * 0.1 + SHARED[h] * COUNT + cfg.a * cfg.t[h]
    return mod

def inner(c, d):
    def g(s, h):
        return c[h] * d
    return g
"""


@pytest.mark.parametrize("seed", range(3))
def test_random_functions_made_anew(seed):
    """Functions of one code, kept or made for each call, while all that they read changes."""
    r = random.Random(seed)
    pool = [torch.rand(H) for _ in range(3)]
    names = dict(SHARED=pool[0], COUNT=2, cfg=types.SimpleNamespace(a=1.5, t=pool[1]))
    exec(NAMES, names)
    fresh = [
        lambda: torch.rand(2 * H)[::2],
        lambda: torch.rand(H),
        lambda: torch.rand(H).double(),
    ]
    tensor = lambda: r.choice(pool) if r.random() < 0.5 else r.choice(fresh)()  # noqa: E731
    numbers = [1, 2, 2.0, 0.5, True, -0.0, 0, torch.tensor(0.5), torch.tensor(2)]
    make_inner = lambda: names["inner"](tensor(), r.choice(numbers))  # noqa: E731
    make = lambda: names["make"](tensor(), r.choice(numbers), r.choice(inner))  # noqa: E731
    inner = [make_inner(), make_inner()]
    kept = [make(), make()]
    changes = [
        lambda: names.update(SHARED=tensor()),
        lambda: names.update(COUNT=r.choice([1, 2, 3.5])),
        lambda: setattr(names["cfg"], "a", r.choice([1.5, 2, 0.1])),
        lambda: setattr(names["cfg"], "t", tensor()),
        lambda: r.choice(pool).mul_(r.choice([0.5, 1.5])),
        lambda: setattr(r.choice(pool), "data", r.choice(fresh[:2])()),
        lambda: setattr(r.choice(inner).__closure__[0], "cell_contents", tensor()),
        lambda: inner.__setitem__(r.randrange(2), make_inner()),
        lambda: kept.__setitem__(r.randrange(2), make()),
        lambda: setattr(r.choice(kept).__closure__[1], "cell_contents", tensor()),
    ]
    for _ in range(120):
        if r.random() < 0.6:
            r.choice(changes)()
        mod = r.choice(kept) if r.random() < 0.4 else make()
        for _ in range(r.choice([1, 2])):
            check(mod)
