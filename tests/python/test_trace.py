"""What tracing makes of a mod: random ones against torch, and errors that show the line."""

import functools
import math
import random
import sys

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402

N = 40
I, J = torch.arange(N)[:, None], torch.arange(N)[None]
INTS = torch.randint(-20, 20, (N,), generator=torch.Generator().manual_seed(1))
FLOATS = torch.randn(N, generator=torch.Generator().manual_seed(2))
BOOLS = FLOATS > 0
ROWS = torch.randn(N, 3, generator=torch.Generator().manual_seed(3))
NAMES = {"a": 1}


def integer(r, depth):
    """Source of an int expression of q, kv and captures, small at every step."""
    if depth == 0:
        return r.choice(
            ["q", "kv", "b", "h", "ints[q]", "ints[-1 - kv]", str(r.randint(-9, 9))]
        )
    a, b, n = integer(r, depth - 1), integer(r, depth - 1), r.choice([-7, -3, -2, 2, 3, 5, 16])
    return r.choice(
        [
            f"(({a}) + ({b})) % 1000",
            f"(({a}) - ({b}))",
            f"(({a}) % 97 * (({b}) % 89))",
            f"(({a}) // {n})",
            f"(({a}) % {n})",
            f"(({a}) // (({b}).abs() + 1))" if "q" in b or "kv" in b else f"(-({a}))",
            f"torch.where({boolean(r, depth - 1)}, {a}, {b})",
            f"torch.clamp({a} + 0 * q, -5, 30)",
            f"torch.minimum({a} + 0 * q, {b} + 0 * kv)",
            f"torch.maximum({a} + 0 * q, {b} + 0 * kv)",
            f"(({a}) & ({b}))",
            f"(({a}) ^ {n & 15})",
            f"((({a}) % 64) << {r.randint(0, 4)})",
            f"(({a}) >> {r.randint(0, 4)})",
            f"ints[({a}) % {N}]",
            f"ints[(({a}) - {N // 2} + 0 * q).clamp(-{N}, {N - 1})]",
        ]
    )


def boolean(r, depth):
    if depth == 0:
        return r.choice(["q >= kv", "bools[q]", "bools[kv] | bools[q]", "q % 3 == 1"])
    a, b = boolean(r, depth - 1), boolean(r, depth - 1)
    x, y = integer(r, depth - 1), integer(r, depth - 1)
    return r.choice(
        [
            f"(({a}) & ({b}))",
            f"(({a}) | ({b}))",
            f"(({a}) ^ ({b}))",
            f"(~({a} | (q < 0)))",
            f"torch.logical_and({a} | (q < 0), {b} | (q < 0))",
            f"(({x} + 0 * q) < ({y}))",
            f"(({x} + 0 * q) != ({y}))",
            f"((({x}) + 0 * q) / 3 <= ({y}) * 0.5)",
            f"((({x}) + 0 * q) // 2.5 > floats[kv])",
            f"((({x}) + 0 * q) % 2.5 > floats[kv])",
            f"(({a}) == ({b}))",
        ]
    )


@pytest.mark.parametrize("seed", range(150))
def test_random_masks(seed):
    """Exact for masks: Python's // and %, negative indices, precedence, promotion."""
    r = random.Random(seed)
    text = boolean(r, r.randint(1, 4))
    names = {"torch": torch, "ints": INTS, "floats": FLOATS, "bools": BOOLS}
    mod = eval(f"lambda b, h, q, kv: {text}", names)
    for h in range(2):
        want = mod(torch.tensor(0), torch.tensor(h), I, J)
        got = st.create_mask(mod, 1, 2, N, N, device="cpu")[0, h]
        assert torch.equal(got, torch.as_tensor(want).expand(N, N)), text


@pytest.mark.parametrize("x", [1e-60, -1e-46, 2.0**-150, 1.4e-45, 1e-40])
def test_numbers_too_small_for_f32_are_0(x):
    """As torch has them beside tensors of f32; texts refuse such numbers."""
    mod = eval(f"lambda b, h, q, kv: zeros[kv] + {x!r} != 0", {"zeros": torch.zeros(N)})
    want = mod(torch.tensor(0), torch.tensor(0), I, J)
    got = st.create_mask(mod, 1, 1, N, N, device="cpu")[0, 0]
    assert torch.equal(got, torch.as_tensor(want).expand(N, N))


def changes_captured(s, b, h, i, j):
    FLOATS.add_(1)
    return s + FLOATS[i]


def sets_captured(s, b, h, i, j):
    FLOATS[0] = 1.0
    return s


def in_place(s, b, h, i, j):
    return s.add_(1)


def branch(s, b, h, i, j):
    return s if i > j else -math.inf


def both(s, b, h, i, j):
    return torch.where(i > j and j > 3, s, 0.0)


def chained(s, b, h, i, j):
    return torch.where(0 <= i < 5, s, 0.0)


def counted(s, b, h, i, j):
    return s + sum(FLOATS[n] for n in range(i))


def item(s, b, h, i, j):
    return s * FLOATS[i].item()


def whole(s, b, h, i, j):
    return s + FLOATS


def shaped(s, b, h, i, j):
    return s + torch.nonzero(BOOLS[i]).sum()


def sliced(s, b, h, i, j):
    return s + FLOATS[i : i + 2].sum()


def nothing(s, b, h, i, j):
    s + 1


def many(s, b, h, i, j):
    return s + FLOATS[i, j]


def floating(s, b, h, i, j):
    return s + FLOATS[i / 2]


def drawn(s, b, h, i, j):
    return s + torch.rand(()) * j


@pytest.mark.parametrize(
    "mod, says",
    [
        (drawn, "made outside of the mod"),
        (changes_captured, "changes a captured tensor"),
        (sets_captured, "changes a captured tensor"),
        (in_place, "write add"),
        (branch, "torch.where"),
        (both, "&"),
        (chained, "&"),
        (counted, "count of a loop"),
        (item, "item"),
        (whole, "index it"),
        (shaped, "nonzero"),
        (sliced, "slice"),
        (nothing, "expected one value"),
        (many, "2 indices"),
        (floating, "expected int"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_refused(mod, says):
    """The message names the user's line and says what to write; nothing was changed."""
    before = FLOATS.clone()
    with pytest.raises(TypeError, match=says) as caught:
        st.flex_attention(*(torch.ones(1, 1, N, 16) for _ in range(3)), mod)
    assert __file__ in str(caught.value) and ".py:" in str(caught.value)
    assert torch.equal(FLOATS, before)


def test_own_tensors_may_change():
    def mod(s, b, h, i, j):
        weight = torch.zeros(3)
        weight[1] = 2.0
        weight += 1
        return s * weight[1]

    x = torch.randn(1, 1, N, 16)
    assert torch.equal(st.flex_attention(x, x, x, mod), st.flex_attention(x, x, x, "score * 3"))


def test_symbols_are_tensors():
    """isinstance says so; torch's functions of them are traced as before."""
    found: dict = {}
    note = found.update

    def mod(s, b, h, i, j):
        row = ROWS[i]
        note(tensors=[isinstance(x, torch.Tensor) for x in (s, i, i > j, row, row * 2)])
        note(is_tensor=torch.is_tensor(s), parameter=isinstance(s, torch.nn.Parameter))
        note(device=(s.device.type, s.is_cuda), shapes=(s.shape, s.size(), s.dim(), s.ndim))
        note(numel=s.numel() * torch.numel(i), row=(row.shape, row.ndim, (row * 2).numel()))
        note(requires_grad=(s.requires_grad, i.requires_grad), dtype=(row * i).dtype)
        note(shown=f"{s} {row!r}")
        s += 1
        return torch.Tensor.mul(s, 2) - torch.Tensor.tanh(s) + torch.ops.aten.add(s, 0)

    x = torch.randn(1, 1, N, 16)
    got = st.flex_attention(x, x, x, mod)
    want = st.flex_attention(x, x, x, "score = score + 1; score * 2 - tanh(score) + score")
    assert torch.allclose(got, want)
    assert found == dict(
        tensors=[True] * 5, is_tensor=True, parameter=False, device=("cpu", False),
        shapes=((), (), 0, 0), numel=1, row=((3,), 1, 3), requires_grad=(True, False),
        dtype=torch.float32,
        shown="<traced value of torch.float32, shape ()> "
        "<captured row of torch.float32, shape (3,)>",
    )  # fmt: skip


def arity_of(n):
    return eval(f"lambda {', '.join(f'a{k}' for k in range(n))}: a0")


class Bound:
    def mod(self, s, b, h, q):
        return s

    def __call__(self, *arguments):
        return arguments[0]


@pytest.mark.parametrize("n", [0, 1, 3, 4, 6])
def test_the_number_of_arguments(n):
    """One line that says what was got, where it is, and what is expected."""
    x = torch.ones(1, 1, N, 16)
    says = rf"got a callable of {n} arguments, <lambda> at .*, expected 5: \(score, b, h, q_idx"
    with pytest.raises(TypeError, match=says) as caught:
        st.flex_attention(x, x, x, arity_of(n))
    assert "\n" not in str(caught.value)
    n += n == 4
    says = f"mask_mod: got a callable of {n} arguments, .* expected 4"
    with pytest.raises(TypeError, match=says):
        st.create_block_mask(arity_of(n), 1, 1, N, N)


def test_callables_of_other_kinds():
    x = torch.ones(1, 1, N, 16)
    with pytest.raises(TypeError, match="4 arguments, Bound.mod at .*, expected 5"):
        st.flex_attention(x, x, x, Bound().mod)
    with pytest.raises(TypeError, match="6 arguments"):
        st.flex_attention(x, x, x, functools.partial(lambda a, s, b, h, i, j, k: s, 1))
    with pytest.raises(TypeError, match="6 arguments"):
        st.flex_attention(x, x, x, eval("lambda s, b, h, i, j, *, k: s"))
    for mod in (
        Bound(),
        functools.partial(lambda a, s, b, h, i, j: s, 1),
        lambda s, b, h, i, j, n=3: s * n / 3,
        lambda s, *indices: s,
    ):
        assert torch.equal(st.flex_attention(x, x, x, mod), st.flex_attention(x, x, x))


def test_long_lines_are_shown_in_part(tmp_path):
    """Around the place, which Python 3.11 and later know."""
    path, x = tmp_path / "mods.py", torch.ones(1, 1, N, 16)
    far = " + ".join(["s"] * 40)
    path.write_text(f"mod = lambda s, b, h, i, j: {far} + s.cholesky() + {far}\n")
    names: dict = {}
    exec(compile(path.read_text(), path, "exec"), names)
    with pytest.raises(TypeError, match="has no cholesky") as caught:
        st.flex_attention(x, x, x, names["mod"])
    where, says = str(caught.value).splitlines()
    text = where.split(": ", 1)[1]
    assert len(text) <= 86 and text.endswith("...")
    assert sys.version_info < (3, 11) or ".cholesky()" in text


def test_errors_name_the_variable():
    x, own = torch.ones(1, 1, N, 16), torch.ones(N, 3)
    for mod, says in (
        (lambda s, b, h, i, j: s + own, "a whole captured tensor own of shape"),
        (lambda s, b, h, i, j: s + FLOATS[i, j], "2 indices, .* tensor FLOATS of"),
        (lambda s, b, h, i, j: s + own[i, 3], "index 3 in dimension 1, .* tensor own of"),
        (lambda s, b, h, i, j: s + own.add_(1)[i, 0], "changes a captured tensor own;"),
        (lambda s, b, h, i, j: s + NAMES, "a dict NAMES, expected a number"),
    ):
        with pytest.raises(TypeError, match=says):
            st.flex_attention(x, x, x, mod)


def test_captures_without_values_are_named():
    x, meta = torch.ones(1, 1, N, 16), torch.ones(N, device="meta")
    sparse, count, big = torch.ones(N).to_sparse(), torch.tensor(1 << 40), 1 << 40
    for mod, says in (
        (lambda s, b, h, i, j: s + meta[i], "^meta: got a tensor on meta"),
        (lambda s, b, h, i, j: s + sparse[i], "^sparse: .*sparse_coo, expected to_dense"),
        (lambda s, b, h, i, j: s + count, "^count: got 1099511627776, .* 32 bits"),
        (lambda s, b, h, i, j: s + big, "^big: got 1099511627776, .* 32 bits"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            st.flex_attention(x, x, x, mod)


def test_numbers_are_captures():
    """New numbers and tensors are no new text: one trace serves all."""
    from saccade.trace import closures

    texts = set()
    for n in range(50):
        bias = torch.rand(N)
        mod = lambda s, b, h, i, j: s * n + bias[i] * 0.5  # noqa: E731, B023
        texts.add(id(closures.trace(mod, "score")[0]))
    assert len(texts) == 1


def test_benchmark(tmp_path):
    rows = st.benchmark(
        lambda s, b, h, i, j: s * 2,
        lambda b, h, i, j: i >= j,
        H=2,
        Q=64,
        D=16,
        dtype=torch.float32,
        repeats=2,
        compile_flex=False,
    )
    assert [r["name"] for r in rows] == ["saccade"] and rows[0]["ratio"] == 1
    rows = st.benchmark(None, "q >= kv", H=2, Q=64, D=16, repeats=2, compile_flex=False)
    assert {r["name"] for r in rows} == {"saccade", "sdpa"}
    assert all(r["seconds"] > 0 and r["live_tflops"] > 0 for r in rows)
    sizes = dict(H=2, Hkv=1, Q=64, D=16, dtype=torch.float32, repeats=2, compile_flex=False)
    rows = st.benchmark(None, "q >= kv", backward=True, **sizes)
    assert all(r["backward_seconds"] > 0 and r["backward_tflops"] > 0 for r in rows)
    assert len(rows) == 2 and rows[0]["backward_ratio"] == 1
    pytest.importorskip("matplotlib")
    path = tmp_path / "b.png"
    st.benchmark(None, "q >= kv", H=2, Q=64, D=16, repeats=2, compile_flex=False, plot=path)
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("is_compiled", (False, True))
def test_embeddings_are_rows_of_their_table(is_compiled):
    q, k, v = (torch.randn(2, 4, 50, 16, requires_grad=True) for _ in range(3))
    table = torch.nn.Embedding(9, 4)

    def by_index(s, b, h, i, j):
        return s + table.weight[(i - j).clamp(-4, 4) + 4, h]

    def by_call(s, b, h, i, j):
        return s + table((i - j).clamp(-4, 4) + 4)[h]

    def raw(s, b, h, i, j):
        return s + torch.embedding(table.weight, j % 9)[h] * 0

    call = st.flex_attention
    if is_compiled:
        call = torch.compile(call, backend="eager")
    made = [call(q, k, v, by_call), st.flex_attention(q, k, v, by_index)]
    grads = [torch.autograd.grad(x.square().sum(), (q, k, table.weight)) for x in made]
    assert torch.equal(*made) and all(map(torch.equal, *grads))
    assert torch.equal(call(q, k, v, raw), st.flex_attention(q, k, v))
    padded = torch.nn.Embedding(9, 4, padding_idx=0)
    if not is_compiled:
        with pytest.raises(TypeError, match="padding_idx"):
            st.flex_attention(q, k, v, lambda s, b, h, i, j: s + padded(j % 9)[h])
