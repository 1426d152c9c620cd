"""flex_attention inside of torch.func's transforms."""

import pytest

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, jacfwd, jacrev, jvp, vmap  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import saccade.torch as st  # noqa: E402

B, H, N, D = 2, 2, 6, 4


def given(*more, dtype=torch.float64):
    torch.manual_seed(2)
    return [torch.randn(*more, B, H, N, D, dtype=dtype) for _ in range(3)]


def causal(b, h, q, kv):
    return q >= kv


def plain(q, k, v, slope=None):
    s = q @ k.mT / D**0.5
    i = torch.arange(N)
    if slope is not None:
        s = s + slope[torch.arange(B)][:, None, None, None] * (i - i[:, None])
    s = s.masked_fill(i[:, None] < i, -torch.inf)
    return torch.softmax(s, -1) @ v


def attend(q, k, v, slope=None):
    score = None if slope is None else lambda s, b, h, i, j: s + slope[b] * (j - i)
    return st.flex_attention(q, k, v, score, causal)


def test_vmap_of_vmap_with_mods():
    """Mods are folded twice: a text that defines functions becomes one of another."""
    slope = torch.tensor([0.5, -0.25])
    q, k, v = given(2, 3, dtype=torch.float32)
    one = vmap(lambda q: attend(q, k[0, 0], v[0, 0], slope))
    want = torch.stack([plain(x, k[0, 0], v[0, 0], slope) for x in q.flatten(0, 1)])
    torch.testing.assert_close(vmap(one)(q).flatten(0, 1), want, rtol=1e-5, atol=1e-5)


def test_vmap_of_scores_whose_definitions_name_captures():
    text = "score tilted() = score + slope[h] * (kv - q) * c; tilted()"
    for slope, name in ((torch.tensor([0.5, -0.25]), "slope"), (torch.ones(2), "score0")):
        score = st.score(text.replace("slope", name), c=0.5, **{name: slope})
        q, k, v = given(2, 3, dtype=torch.float32)

        def attend(q, k, v):
            return st.flex_attention(q, k, v, score)

        got = vmap(vmap(attend))(q, k, v)
        want = torch.stack([attend(*x) for x in zip(*(t.flatten(0, 1) for t in (q, k, v)))])
        torch.testing.assert_close(got.flatten(0, 1), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", [(0, 0, 0), (2, 0, 1), (0, None, None), (None, 3, 0)])
def test_vmap_folds_into_the_batch(dims):
    slope = torch.tensor([0.5, -0.25])
    x = given(3, dtype=torch.float32)
    x = [t[0] if d is None else t.movedim(0, d) for t, d in zip(x, dims)]
    for extra in ((), (slope,)):
        out = vmap(lambda q, k, v: attend(q, k, v, *extra), dims)(*x)
        want = vmap(lambda q, k, v: plain(q, k, v, *extra), dims)(*x)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    by_text = vmap(
        lambda q, k, v: st.flex_attention(
            q, k, v, st.score("score + slope[b] * (kv - q)", slope=slope), "causal()"
        ),
        dims,
    )(*x)
    assert torch.equal(by_text, out)
    mask = st.create_block_mask(causal, None, None, N, N)
    twice = vmap(vmap(lambda q, k, v: st.flex_attention(q, k, v, None, mask)))
    y = given(2, 3, dtype=torch.float32)
    torch.testing.assert_close(twice(*y), vmap(vmap(plain))(*y), rtol=1e-5, atol=1e-5)


def test_grad_and_grads_of_each_example():
    q, k, v = given(3, dtype=torch.float32)
    slope = torch.tensor([0.5, -0.25])

    def loss(f):
        return lambda q, k, v, slope: f(q, k, v, slope).square().sum()

    every = (0, 1, 2, 3)
    found = grad(loss(attend), every)(q[0], k[0], v[0], slope)
    want = grad(loss(plain), every)(q[0], k[0], v[0], slope)
    for a, b in zip(found, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    dims = (0, 0, None, None)
    found = vmap(grad(loss(attend), (0, 1, 2)), dims)(q, k, v[0], slope)
    want = vmap(grad(loss(plain), (0, 1, 2)), dims)(q, k, v[0], slope)
    for a, b in zip(found, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_forward_mode():
    x, dots = given(), [t.flip(0) for t in given()]
    slope, rate = torch.tensor([0.5, -0.25]).double(), torch.tensor([1.0, 2.0]).double()
    for more, rates in (((), ()), ((slope,), (rate,))):
        primals, tangents = (*x, *more), (*dots, *rates)
        found, want = (jvp(f, primals, tangents) for f in (attend, plain))
        for a, b in zip(found, want):
            torch.testing.assert_close(a, b)
    q, k, v = (t[:, :1, :3] for t in x)

    def small(f):
        return lambda q: f(q, k, v)

    def narrow(q, k, v):
        return st.flex_attention(q, k, v)

    def dense(q, k, v):
        return torch.softmax(q @ k.mT / D**0.5, -1) @ v

    want = jacrev(small(dense))(q)
    torch.testing.assert_close(jacfwd(small(narrow))(q), want)
    torch.testing.assert_close(jacrev(small(narrow))(q), want)


def test_dual_numbers():
    """torch.autograd.forward_ad without torch.func, of a query and of what a score captures."""
    (q, k, v), rate = (t[:1, :, :4] for t in given()), torch.tensor([1.0, 2.0]).double()
    slope = torch.tensor([0.5, -0.25]).double()

    def f(q, slope):
        return st.flex_attention(q, k, v, lambda s, b, h, i, j: s + slope[h] * (j - i))

    want = jvp(f, (q, slope), (q.flip(2), rate))
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(q, q.flip(2)), forward_ad.make_dual(slope, rate))
        torch.testing.assert_close(tuple(forward_ad.unpack_dual(out)), want)
        plain = forward_ad.unpack_dual(f(q, slope))
        assert torch.equal(plain.primal, want[0])
        with pytest.raises(NotImplementedError):
            st.flex_attention(q.float(), k.float(), v.float(), dropout_p=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_jvp_on_the_cpu(dtype):
    slope, rate = torch.tensor([0.5, -0.25]), torch.tensor([1.0, 2.0])
    x = [t.to(dtype) for t in given(2)]
    primals, tangents = [t[0] for t in x], [t[1] for t in x]
    mask = st.create_block_mask(causal, B, H, N, N)

    def alibi(s, b, h, i, j):
        return s + slopes[b] * (j - i)

    def by_mask(q, k, v):
        return st.flex_attention(q, k, v, alibi, mask)

    wide = [[t.double() for t in ts] for ts in (primals, tangents)]
    limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    found = jvp(attend, (*primals, slope), (*tangents, rate))
    want = jvp(plain, (*wide[0], slope.double()), (*wide[1], rate.double()))
    slopes = slope
    held = jvp(by_mask, tuple(primals), tuple(tangents))
    same = jvp(lambda *x: plain(*x, slope.double()), tuple(wide[0]), tuple(wide[1]))
    alone = jvp(lambda q: attend(q, *primals[1:]), (primals[0],), (tangents[0],))
    real = jvp(lambda q: plain(q, *wide[0][1:]), (wide[0][0],), (wide[1][0],))
    for a, b in zip((*found, *held, *alone), (*want, *same, *real)):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit)


def _of_each(f, dims=(0, 0, 0, 0)):
    """What vmap gives for functions of queries, keys, values and slopes."""

    def each(*x):
        made = []
        for i in range(3):
            made.append(f(*(t if d is None else t[i] for t, d in zip(x, dims))))
        if isinstance(made[0], tuple):
            return tuple(map(torch.stack, zip(*made)))
        return torch.stack(made)

    return each


def _loss(f):
    return lambda *x: f(*x).square().sum()


@pytest.mark.parametrize("shared", (False, True))
def test_captures_of_each(shared):
    """Ensembles, each with slopes of its own, and gradients of each sample by shared ones."""
    q, k, v = given(3)
    slopes = torch.linspace(-1, 1, 3 * B, dtype=torch.float64).view(3, B)
    x, dims = (q, k, v, slopes[0] if shared else slopes), (0, 0, 0, None if shared else 0)
    every = (0, 1, 2, 3)

    def moved(f):
        return lambda *x: jvp(f, x, tuple(map(torch.cos, x)))[1]

    def twice(f):
        return grad(lambda *x: grad(_loss(f), 3)(*x).square().sum(), every)

    for of in (lambda f: f, lambda f: grad(_loss(f), every), moved, twice):
        found, want = vmap(of(attend), dims)(*x), _of_each(of(plain), dims)(*x)
        for a, b in zip(found, want):
            torch.testing.assert_close(a, b)
    ensembles = vmap(vmap(attend, dims), (0, 0, 0, None if shared else 0))
    pair = [torch.stack([t, 2 * t]) for t in x[:3]]
    found = ensembles(*pair, x[3] if shared else torch.stack([x[3]] * 2))
    torch.testing.assert_close(found[1], vmap(attend, dims)(*(2 * t for t in x[:3]), x[3]))


@pytest.mark.parametrize("has_score", (False, True))
def test_masks_of_each(has_score):
    """Documents of each sample, and gradients of each; rows without a key are 0."""
    x = given(3)
    ids = torch.randint(0, 3, (3, B, N))
    slopes = torch.linspace(-1, 1, 3 * B, dtype=torch.float64).view(3, B)

    def mine(q, k, v, slope, ids):
        def live(b, h, i, j):
            return (ids[b, i] == ids[b, j]) & (i > j)

        def bias(s, b, h, i, j):
            return s + slope[b] * (j - i)

        return st.flex_attention(q, k, v, bias if has_score else None, live)

    def theirs(q, k, v, slope, ids):
        s, i = q @ k.mT / D**0.5, torch.arange(N)
        s = s + slope[:, None, None, None] * (i - i[:, None]) if has_score else s
        live = (ids[:, None, :, None] == ids[:, None, None, :]) & (i[:, None] > i)
        p = torch.softmax(s.masked_fill(~live, -torch.inf), -1)
        return torch.where(live.any(-1, keepdim=True), p, 0) @ v

    given_to = (*x, slopes, ids)
    torch.testing.assert_close(vmap(mine)(*given_to), torch.stack(
        [theirs(*one) for one in zip(*given_to)]))  # fmt: skip
    every = (0, 1, 2, 3) if has_score else (0, 1, 2)
    found = vmap(grad(_loss(mine), every))(*given_to)
    for i in range(3):
        leaves = [t[i].clone().requires_grad_() for t in given_to[: len(every)]]
        one = (*leaves, *(t[i] for t in given_to[len(every) :]))
        want = torch.autograd.grad(_loss(theirs)(*one), leaves)
        for a, b in zip(found, want):
            torch.testing.assert_close(a[i], b.nan_to_num(0))


def test_block_masks_of_a_batch():
    q, k, v = given(3)
    mask = st.create_block_mask(lambda b, h, i, j: i >= j + b, B, None, N, N)

    def call(q, k, v):
        return st.flex_attention(q, k, v, None, mask)

    dims = (0, 0, None)
    found, want = vmap(call, dims)(q, k, v[0]), _of_each(call, dims)(q, k, v[0])
    torch.testing.assert_close(found, want)
    got = vmap(grad(_loss(call)), dims)(q, k, v[0])
    torch.testing.assert_close(got, _of_each(grad(_loss(call)), dims)(q, k, v[0]))


def test_what_is_refused():
    q, k, v = given(3, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="second derivative|Second|second"):
        grad(lambda q: grad(lambda q: attend(q, k[0], v[0]).sum())(q).sum())(q[0])


def _second_of(f, kind):
    rates = given()[0].sin()
    return {
        "grad of grad": lambda q: grad(lambda q: (grad(f)(q) * rates).sum())(q),
        "hvp forward over reverse": lambda q: jvp(grad(f), (q,), (rates,))[1],
        "jacrev of grad": lambda q: jacrev(grad(f))(q),
        "hessian": torch.func.hessian(f),
        "grad of jvp": grad(lambda q: jvp(f, (q,), (rates,))[1]),
        "jacrev of jacfwd": jacrev(jacfwd(f)),
        "vmap of grad of jvp": lambda q: vmap(grad(lambda q: jvp(f, (q,), (rates,))[1]))(
            torch.stack([q, q.cos()])
        ),
        "vmap of grad of grad": lambda q: vmap(
            lambda q: grad(lambda q: (grad(f)(q) * rates).sum())(q)
        )(torch.stack([q, q.cos()])),
    }[kind]


@pytest.mark.parametrize("has_score", (False, True))
@pytest.mark.parametrize(
    "kind",
    [
        "grad of grad",
        "hvp forward over reverse",
        "jacrev of grad",
        "hessian",
        "vmap of grad of grad",
        "grad of jvp",
        "jacrev of jacfwd",
        "vmap of grad of jvp",
    ],
)
def test_second_derivatives(kind, has_score):
    q, k, v = given()
    slope = torch.tensor([0.5, -0.25], dtype=torch.float64) if has_score else None
    made = [
        _second_of(lambda q: call(q, k * q, v, slope).square().sum(), kind)(q)  # noqa: B023
        for call in (attend, plain)
    ]
    torch.testing.assert_close(*made)


def test_second_derivatives_by_captures():
    q, k, v = given()
    slope = torch.tensor([0.5, -0.25], dtype=torch.float64)
    for take in (
        lambda f: grad(lambda s: grad(f)(q, s).sin().sum())(slope),
        lambda f: grad(lambda q: grad(f, 1)(q, slope).sin().sum())(q),
        lambda f: grad(lambda s: grad(f, 1)(q, s).sin().sum())(slope),
        lambda f: jvp(lambda s: grad(f)(q, s), (slope,), (slope,))[1],
        lambda f: jvp(lambda q: grad(f, 1)(q, slope), (q,), (k,))[1],
        lambda f: grad(lambda s: jvp(lambda q: f(q, s), (q,), (k,))[1])(slope),
        lambda f: grad(lambda q: jvp(lambda s: f(q, s), (slope,), (slope,))[1])(q),
    ):
        made = [take(lambda q, s: call(q, k, v, s).square().sum())  # noqa: B023
                for call in (attend, plain)]  # fmt: skip
        torch.testing.assert_close(*made)


def test_what_second_derivatives_are_not_there():
    q, k, v = given(dtype=torch.float32)
    f = lambda q: attend(q, k, v).square().sum()  # noqa: E731
    for take in (
        lambda: torch.func.hessian(f)(q),
        lambda: jvp(grad(f), (q,), (q,)),
        lambda: grad(lambda q: jvp(f, (q,), (q,))[1])(q),
    ):
        with pytest.raises(NotImplementedError, match="second derivatives in float64"):
            take()
    q, k, v = given()
    with pytest.raises(NotImplementedError, match="forward mode of flex_attention inside of"):
        jacfwd(jacfwd(f))(q)
    with pytest.raises(NotImplementedError, match="got a third"):
        grad(lambda q: torch.func.hessian(f)(q).sum())(q)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("wants_lse", (False, True))
def test_batched_gradients(dtype, wants_lse):
    """is_grads_batched, and jacobian(vectorize=True), which is made of it."""
    q, k, v = (t.requires_grad_() for t in given(dtype=dtype))
    slope = torch.tensor([0.5, -0.25], dtype=dtype, requires_grad=True)
    score = lambda s, b, h, i, j: s + slope[b] * (j - i)  # noqa: E731
    made = st.flex_attention(q, k, v, score, causal, return_lse=wants_lse)
    out = sum(t.sum() for t in made[1:]) + made[0] if wants_lse else made
    x, rows = (q, k, v, slope), torch.randn(3, *out.shape, dtype=dtype)
    batched = torch.autograd.grad(out, x, rows, is_grads_batched=True, retain_graph=True)
    one = [torch.autograd.grad(out, x, r, retain_graph=True) for r in rows]
    mapped = vmap(lambda r: torch.autograd.grad(out, x, r, retain_graph=True))(rows)
    for a, b, c in zip(batched, zip(*one), mapped):
        torch.testing.assert_close(a, torch.stack(b))
        torch.testing.assert_close(c, torch.stack(b))
    f = lambda q: attend(q, k.detach(), v.detach())  # noqa: E731
    found = torch.autograd.functional.jacobian(f, q.detach(), vectorize=True)
    torch.testing.assert_close(
        found, jacrev(lambda q: plain(q, k, v))(q).detach(), rtol=1e-4, atol=1e-5
    )


def test_gradients_batched_in_another_thread(monkeypatch):
    """As autograd has one for each GPU, where no vmap is on."""
    import threading

    from saccade.torch import autograd, batched

    def in_thread(run, *tensors):
        found = []
        thread = threading.Thread(target=lambda: found.append(of_each(run, *tensors)))
        thread.start()
        thread.join()
        return found[0]

    of_each = batched.of_each
    monkeypatch.setattr(batched, "of_each", in_thread)
    monkeypatch.setattr(autograd, "of_each", in_thread)
    x, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    out, rows = st.flex_attention(x, k, v, None, "causal()"), torch.randn(1, 1, 2, 5, 8)
    (one,) = torch.autograd.grad(out, x, rows[0], retain_graph=True)
    (many,) = torch.autograd.grad(out, x, rows, is_grads_batched=True)
    assert torch.equal(many[0], one)


def test_batched_second_derivatives():
    """hessian(vectorize=True), and is_grads_batched around create_graph and before it."""
    functional = torch.autograd.functional
    q, k, v = given()
    f = lambda q: attend(q, k, v).sin().sum()  # noqa: E731
    want = torch.func.hessian(f)(q)
    for way in ("reverse-mode", "forward-mode"):
        found = functional.hessian(f, q, vectorize=True, outer_jacobian_strategy=way)
        torch.testing.assert_close(found, want)
    x = q.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    eye = torch.eye(g.numel(), dtype=g.dtype).view(-1, *g.shape)
    (found,) = torch.autograd.grad(g, x, eye, is_grads_batched=True)
    torch.testing.assert_close(found.view(want.shape), want)
    (g,) = torch.autograd.grad(
        attend(x, k, v), x, eye, is_grads_batched=True, create_graph=True
    )
    (found,) = torch.autograd.grad(g.sin().sum(), x)
    jacobian = jacrev(lambda q: attend(q, k, v))
    torch.testing.assert_close(found, grad(lambda q: jacobian(q).sin().sum())(q))


def test_third_derivatives_of_batched_ones_are_refused():
    q, k, v = given()
    x = q.requires_grad_()
    rows = torch.ones(2, *x.shape, dtype=x.dtype)
    g = attend(x, k, v).sin().sum()
    for _ in range(2):
        given_rows = rows if g.dim() else None
        options = dict(is_grads_batched=True) if g.dim() else {}
        (g,) = torch.autograd.grad(g, x, given_rows, create_graph=True, **options)
    with pytest.raises(NotImplementedError, match="no third derivatives"):
        torch.autograd.grad(g.sum(), x)
    (g,) = torch.autograd.grad(attend(x, k, v).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="batched by torch.func.vmap, expected"):
        vmap(lambda r: torch.autograd.grad(g, x, r, retain_graph=True))(rows)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_batched_rates(dtype):
    q, k, v = given(dtype=dtype)
    f = lambda q: attend(q, k, v)  # noqa: E731
    found = torch.autograd.functional.jacobian(f, q, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(found, jacfwd(f)(q))


def test_masks_of_what_vmap_maps():
    """Made inside of the mapped function, of callables and of text, and dense."""
    q, k, v = given(dtype=torch.float32)
    live = torch.rand(3, N) > 0.3
    live[:, 0] = True

    def by_callable(m):
        return lambda b, h, i, j: m[j]

    def by_text(m):
        return st.mask("m[kv]", m=m)

    for made in (by_callable, by_text):
        block = lambda m: st.create_block_mask(made(m), None, None, N, N)  # noqa: B023, E731
        one = lambda m: st.flex_attention(q, k, v, None, block(m))  # noqa: B023, E731
        torch.testing.assert_close(vmap(one)(live), torch.stack([one(m) for m in live]))
        with pytest.raises(NotImplementedError, match="inside a torch.func transform"):
            vmap(lambda m: block(m).kv_indices)(live)  # noqa: B023
    dense = lambda m: st.create_mask(by_callable(m), None, None, N, N, "cpu")  # noqa: E731
    assert torch.equal(vmap(dense)(live), torch.stack([dense(m) for m in live]))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_forward_mode_around_forward_mode_is_refused(dtype):
    q, k, v = given(dtype=dtype)
    f = lambda q: attend(q, k, v)  # noqa: E731
    rate = lambda f: lambda q: jvp(f, (q,), (k,))[1]  # noqa: E731
    for take in (rate(rate(f)), jacfwd(jacfwd(f))):
        with pytest.raises(NotImplementedError, match="inside of forward mode"):
            take(q)


def test_gradients_with_tangents_of_earlier_calls_are_refused():
    q, k, v = given()
    packed = q[0].transpose(0, 1).contiguous()
    ends = torch.tensor([0, N], dtype=torch.int32)
    for call, x in (
        (lambda q: attend(q, k, v), q),
        (lambda q: st.flex_attention(q, k, v, return_lse=True)[0], q),
        (lambda x: st.varlen_attention(x, packed, packed, ends), packed),
    ):
        x = x.clone().requires_grad_()
        out = call(x)
        for _ in range(3):  # warm
            torch.autograd.grad(call(x), x, out.detach())
        with forward_ad.dual_level():
            d_out = forward_ad.make_dual(out.detach(), out.detach())
            with pytest.raises(NotImplementedError, match="a gradient with a tangent"):
                torch.autograd.grad(out, x, d_out)


PACKED = torch.randn(9, 2, 8)
ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
ROWS = torch.randn(1, 2, 9, 8)


def varlen(x, score=None):
    return st.varlen_attention(x, PACKED, PACKED, ENDS, score=score)


def cached(x, score=None):
    return st.cached_attention(x, ROWS, ROWS, score=score)


@pytest.mark.parametrize("call, x", [(varlen, PACKED), (cached, ROWS)])
def test_calls_of_serving_say_that_they_have_no_transforms(call, x):
    w = torch.rand(9)
    in_text = lambda w: call(x, st.score("score + w[kv]", w=w))  # noqa: E731
    in_callable = lambda w: call(x, lambda s, b, h, q, kv: s + w[kv])  # noqa: E731
    name = "varlen_attention" if call is varlen else "cached_attention"
    text = f"got {name} inside of torch.func's transforms"
    for take in (
        lambda: vmap(call)(x[None]),
        lambda: grad(lambda x: call(x).sum())(x),
        lambda: jvp(call, (x,), (x,)),
        lambda: vmap(in_text)(w[None]),
        lambda: vmap(in_callable)(w[None]),
    ):
        with pytest.raises(NotImplementedError, match=text):
            take()
    plain = call(x)
    assert torch.equal(vmap(lambda _: call(x))(w[:1])[0], plain)
    for f, t in ((call, x), (in_text, w), (in_callable, w)):
        for given_t in (t, t.clone().requires_grad_()):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(given_t, torch.ones_like(t))
                with pytest.raises(NotImplementedError, match=f"got {name} of tensors with ta"):
                    f(dual)
                assert torch.equal(call(x), plain)


def rates_of(f, slope):
    return lambda q, dq: jvp(f, (q, slope), (dq, slope * 3))


def recorded(call, inputs, how):
    torch._dynamo.reset()
    if how in ("eager", "aot_eager"):
        return torch.compile(call, backend=how)
    if how == "jit.trace":
        return torch.jit.trace(call, inputs, check_trace=False)
    if how.startswith("export"):
        made = torch.nn.Module()
        made.forward = call
        return torch.export.export(made, inputs, strict=False).module()
    return make_fx(call, tracing_mode=how, _allow_non_fake_inputs=True)(*inputs)


@pytest.mark.parametrize(
    "how, has_block_mask",
    [("eager", True), ("aot_eager", False), ("jit.trace", True), ("export", True),
     ("real", False), ("symbolic", True)],
)  # fmt: skip
def test_recorded_rates(how, has_block_mask):
    """A program that was recorded under forward mode has rates, for other values too."""
    if how == "export" and torch.__version__ < "2.15":
        pytest.skip("torch of old programs")
    q, k, v = given(dtype=torch.float32)
    slope = torch.tensor([0.5, -0.25])
    mask = st.create_block_mask(causal, None, None, N, N) if has_block_mask else causal

    def attend(q, slope):
        return st.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + slope[b] * (j - i), mask, return_lse=True
        )

    call = rates_of(attend, slope)
    made = recorded(call, (q.clone(), k.clone()), how)
    found, want = made(k, v), call(k, v)
    assert all(t.abs().sum() > 0 for t in want[1])
    torch.testing.assert_close(tuple(map(tuple, found)), want)


def test_linearize():
    q, k, v = given(dtype=torch.float32)
    f = lambda q: attend(q, k, v)  # noqa: E731
    out, line = torch.func.linearize(f, q)
    torch.testing.assert_close((out, line(k)), jvp(f, (q,), (k,)))


def test_linearize_of_what_requires_gradients():
    """What a score captures, inputs, and both."""
    q, k, v = given(dtype=torch.float32)
    slope = torch.tensor([0.5, -0.25], requires_grad=True)
    ahead = q.clone().requires_grad_()
    for f, at in (
        (lambda q: attend(q, k, v, slope), (q,)),
        (lambda q: attend(q, k, v), (ahead,)),
        (lambda q, s: attend(q, k, v, s), (ahead, slope)),
    ):
        rates = [torch.randn_like(t) for t in at]
        out, line = torch.func.linearize(f, *at)
        with torch.no_grad():
            want = jvp(f, tuple(t.detach() for t in at), tuple(rates))
        torch.testing.assert_close((out, line(*rates)), want)


def test_compiled_forward_mode_of_what_requires_gradients():
    """Has none for its results; without, it is said how."""
    q, k, v = given(dtype=torch.float32)
    slope = torch.tensor([0.5, -0.25], requires_grad=True)
    score = lambda s, b, h, i, j: s + slope[b] * (j - i)  # noqa: E731
    attend = lambda q: st.flex_attention(q, k, v, score, "q >= kv")  # noqa: E731
    call = lambda q, rate: jvp(attend, (q,), (rate,))  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k), call(q, k))
    with pytest.raises(Exception, match="belongs inside of torch.no_grad"):
        compiled(q, k)


@pytest.mark.parametrize("mask", ["callable", "made inside", "text", "block mask"])
def test_compiled_transforms_break_the_graph(mask):
    """All but forward mode, and that too of a callable mask; a full graph is told so."""
    q, k, v = given(dtype=torch.float32)
    slope = torch.tensor([0.5, -0.25])
    score = lambda s, b, h, i, j: s + slope[b] * (j - i)  # noqa: E731
    block_mask = st.create_block_mask(causal, None, None, N, N)

    def attend(q):
        live = {"callable": causal, "text": "q >= kv"}.get(mask, block_mask)
        if mask == "made inside":
            live = st.create_block_mask(causal, None, None, N, N)
        return st.flex_attention(q, k, v, score, live)

    loss = lambda q: attend(q).sin().sum()  # noqa: E731
    for call in (
        lambda q: grad(loss)(q),
        lambda q: torch.func.vjp(attend, q)[1](k)[0],
        lambda q: vmap(attend)(torch.stack((q, 2 * q))),
        lambda q: vmap(grad(loss))(torch.stack((q, 2 * q))),
        lambda q: jvp(attend, (q,), (k,)),
    ):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(call, backend="aot_eager")(q), call(q))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="inside of torch.func.grad"):
        torch.compile(lambda q: grad(loss)(q), fullgraph=True, backend="aot_eager")(q)


@pytest.mark.parametrize(
    "take",
    [
        lambda f, slope: lambda q: grad(lambda q: f(q, slope).sin().sum())(q),
        lambda f, slope: lambda q: grad(lambda s: f(q, s).sin().sum())(slope),
        lambda f, slope: lambda q: torch.func.vjp(f, q, slope)[1](q * 2),
        lambda f, slope: lambda q: vmap(lambda q: f(q, slope))(torch.stack((q, 2 * q))),
        lambda f, slope: jacrev(lambda q: f(q, slope)),
        lambda f, slope: jacfwd(lambda q: f(q, slope)),
    ],
)
def test_recorded_transforms(take):
    q, k, v = given(dtype=torch.float32)
    slope = torch.tensor([0.5, -0.25])
    call = take(lambda q, s: attend(q, k, v, s), slope)
    made = make_fx(call, _allow_non_fake_inputs=True)(q)
    torch.testing.assert_close(made(k), call(k))


@pytest.mark.parametrize("how", ("eager", "real"))
def test_recorded_second_derivatives_are_refused(how):
    q, k, v = given()
    attend = lambda q: st.flex_attention(q, k, v, "2 * score", "q >= kv")  # noqa: E731
    twice = lambda q: jvp(lambda q: jvp(attend, (q,), (k,))[1], (q,), (v,))  # noqa: E731
    with pytest.raises(NotImplementedError, match="second derivatives"):
        recorded(twice, (q,), how)(q)
    if how == "real":
        other = lambda q: jvp(grad(lambda q: attend(q).sum()), (q,), (k,))  # noqa: E731
        with pytest.raises(NotImplementedError, match="second derivatives"):
            recorded(other, (q,), how)


def test_scores_that_compute_with_what_they_capture():
    """A gate of rank 0, computed inside of the mod: its gradient and its rate."""
    q, k, v = given()
    gate = torch.tensor(0.3, dtype=torch.float64)
    i = torch.arange(N)

    def attend(g):
        return st.flex_attention(q, k, v, lambda s, b, h, i, j: s * torch.sigmoid(g), causal)

    def plain(g):
        s = (q @ k.mT / D**0.5 * torch.sigmoid(g)).masked_fill(i[:, None] < i, -torch.inf)
        return torch.softmax(s, -1) @ v

    rate = lambda f: lambda g: jvp(f, (g,), (g,))[1]  # noqa: E731
    for take in (rate, lambda f: grad(lambda g: f(g).sin().sum())):
        torch.testing.assert_close(take(attend)(gate), take(plain)(gate))


def test_rates_of_other_layouts():
    """Those of a transposed query, whose rows are not as long as the values'."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(B, N, H, D + i // 2) for i in range(3))
    f = lambda q, k, v: torch.softmax(q @ k.mT / D**0.5, -1) @ v  # noqa: E731
    x = [t.transpose(1, 2) for t in (q, k, v)]
    want = jvp(f, tuple(x), tuple(x))
    with forward_ad.dual_level():
        out = st.flex_attention(*(forward_ad.make_dual(t, t) for t in x))
        torch.testing.assert_close(tuple(forward_ad.unpack_dual(out)), want)


OF_BATCHES = [
    {"block_mask": st.mask("q >= kv + B * 8")},
    {"score_mod": st.score("score + B * float(q - kv) * 0.01")},
]


@pytest.mark.parametrize("mod", OF_BATCHES)
def test_vmap_leaves_the_size_of_a_batch(mod):
    x = torch.randn(3, 2, 4, 64, 16)
    got = torch.func.vmap(lambda t: st.flex_attention(t, t, t, **mod))(x)
    want = torch.stack([st.flex_attention(t, t, t, **mod) for t in x])
    assert torch.equal(got, want)


@pytest.mark.parametrize("way", ["grad", "jvp", "vmap"])
def test_masks_that_are_made_inside(way):
    """Of tensors that the transform knows nothing of; a mask from outside may be asked for its
    index tensors there, and has them afterwards."""
    doc, width = torch.arange(N) // 4, torch.tensor(3)
    own = lambda b, h, i, j: (doc[i] == doc[j]) & (i - j < width)  # noqa: E731
    text = st.mask("doc[q] == doc[kv] && q - kv < width", doc=doc, width=width)
    q, k, v = given()
    i = torch.arange(N)
    live = (doc[:, None] == doc) & (i[:, None] - i < width)
    outside = st.create_block_mask(own, None, None, N, N)

    def ours(q, mod):
        mask = st.create_block_mask(mod, None, None, N, N)
        out = st.flex_attention(q, k, v, None, mask).sin().sum()
        return out * mask.kv_num_blocks.sum() * st.create_mask(mod, None, None, N, N).sum()

    def theirs(q):
        s = (q @ k.mT / D**0.5).masked_fill(~live, -torch.inf)
        return (torch.softmax(s, -1) @ v).sin().sum() * live.sum()

    for mod in own, text:
        if way == "grad":
            got, want = grad(lambda x, m=mod: ours(x, m))(q), grad(theirs)(q)
        elif way == "jvp":
            got, want = (jvp(f, (q,), (k,))[1] for f in (lambda x, m=mod: ours(x, m), theirs))
        else:
            got, want = (vmap(f)(q[None]) for f in (lambda x, m=mod: ours(x, m), theirs))
        torch.testing.assert_close(got, want)
    grad(lambda x: (x * outside.q_indices.sum() * outside.full_kv_indices.sum()).sum())(q)
    assert outside.q_indices.tolist() == outside.kv_indices.tolist() == [[[[0]]]]


@pytest.mark.parametrize("way", ["grad", "jvp"])
def test_parts_of_masks_that_are_made_inside(way):
    """Slices, masks of lists and selections, whose lists and maps are tensors of the transform,
    are what they are outside of it."""
    n, block = 256, 128
    torch.manual_seed(3)
    doc = torch.arange(n) // 100
    own = lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j)  # noqa: E731
    q, k, v = (torch.randn(1, 2, n, 16) for _ in range(3))
    whole = st.create_block_mask(own, None, None, n, n)

    def of_lists():
        num = torch.tensor([[[1, 2]]], dtype=torch.int32)
        idx = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
        return st.BlockMask.from_kv_blocks(num + 0, idx * 1, mask_mod=own)

    def selected(q=q):
        tops = (q @ k.mT).unflatten(3, (2, block)).unflatten(2, (2, block)).amax((3, 5))
        made = st.BlockSelection(1, 2, n, n, kv_heads=2, most=1, mask_mod=own)
        made.select(tops.topk(1).indices.int())
        return made

    for make, rows in (
        (lambda q: whole[:, :, 1:], block),
        (lambda q: whole[:, :, torch.tensor([1])], block),
        (lambda q: whole[:, :, -5:, :], 5),
        (lambda q: of_lists(), n),
        (selected, n),
    ):
        outside = make(q)
        call = lambda q, mask, rows=rows: (  # noqa: E731
            st.flex_attention(q[:, :, -rows:], k, v, None, mask).sin().sum()
        )
        if way == "grad":
            got = grad(lambda q, f=call, make=make: f(q, make(q)))(q)
            want = grad(lambda q, f=call, mask=outside: f(q, mask))(q)
        else:
            got, want = (
                jvp(f, (q,), (k,))[1]
                for f in (
                    lambda q, f=call, make=make: f(q, make(q)),
                    lambda q, f=call, mask=outside: f(q, mask),
                )
            )
        assert torch.equal(got, want)


def test_a_selection_of_what_vmap_maps_is_refused():
    made = st.BlockSelection(1, 2, 256, 256, kv_heads=2, most=1)
    with pytest.raises(NotImplementedError, match="inside a torch.func transform"):
        vmap(made.select)(torch.zeros(3, 1, 2, 2, 1, dtype=torch.int32))
