"""torch's functions in mods: the values, dtypes and arguments that torch has for them."""

import math
import random
import threading

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
F = torch.nn.functional

import saccade.torch as st  # noqa: E402

G = torch.Generator().manual_seed(3)
SMALL = torch.cat([s * 10.0 ** torch.arange(-30, 1.0, 3) for s in (1, -1)])
X = torch.cat([torch.randn(40, generator=G), SMALL, torch.tensor([0.5, -0.5, 2.5, -3.5, 0.0])])
X = torch.cat([X, torch.tensor([9.0, -9.0, 30.0, -30.0, 88.0, -88.0])])
Y = X[torch.randperm(len(X), generator=G)]
N = len(X)
UNIT = torch.cat([torch.linspace(-1, 1, 31), SMALL])


def scores(mod, n=N):
    """The score of each query, as the largest one of a row with one key."""
    q, k = torch.zeros(1, 1, n, 8), torch.zeros(1, 1, 1, 8)
    _, aux = st.flex_attention(q, k, k, mod, return_aux=st.AuxRequest(max_scores=True))
    return aux.max_scores[0, 0]


def agrees(f, *tensors):
    """f of captured elements, against torch's in double; torch's own error in f32 is allowed
    twice."""
    got = scores(lambda s, b, h, i, j: s + f(*(t[i] for t in tensors)), len(tensors[0]))
    want = f(*(t.double() if t.is_floating_point() else t for t in tensors)).double()
    theirs = f(*tensors).double()
    bad = (got - want).abs() > 6e-7 * want.abs() + 2 * (theirs - want).abs() + 1e-37
    same = (got == want) | (got.isnan() & want.isnan()) | (got == theirs)
    where = (bad | got.isnan()) & ~same
    shown = [
        (*[float(t[k]) for t in tensors], float(got[k]), float(want[k]))
        for k in where.nonzero().flatten()[:5]
    ]
    assert not where.any(), shown


FUNCTIONS = [
    torch.log1p, torch.expm1, torch.atan, torch.sinh, torch.cosh, torch.asinh, torch.erfc,
    F.softplus, F.elu, F.selu, F.leaky_relu, F.relu6, F.hardtanh, F.hardswish, F.mish,
    F.logsigmoid, F.softsign, F.silu, F.relu, F.gelu, torch.frac, torch.deg2rad, torch.sign,
    torch.round, torch.trunc, torch.square, torch.sigmoid, torch.tanh, torch.nan_to_num,
    lambda x: torch.round(x, decimals=1), lambda x: torch.round(x, decimals=-1),
    lambda x: F.softplus(x, beta=3), lambda x: F.softplus(x, 0.5, 4.0),
    lambda x: F.elu(x, alpha=0.5), lambda x: F.leaky_relu(x, 0.3, inplace=False),
    lambda x: F.hardtanh(x, -2.0, max_val=0.5), lambda x: F.gelu(x, approximate="tanh"),
    lambda x: x.clamp(min=-1), lambda x: x.clamp(-1, 1), lambda x: torch.clip(x, max=0.25),
    lambda x: x.masked_fill(x > 1, -7.0), lambda x: torch.where(x > 0, x, other=-x * 2),
    lambda x: x.where(x > 0, -3.0), lambda x: torch.add(x, 3.0, alpha=0.5),
    lambda x: torch.sub(x, x * x, alpha=2), lambda x: x.to(torch.float32).type_as(x),
    lambda x: x.float() * x.is_floating_point() + x, lambda x: x**3, lambda x: x.pow(2),
    lambda x: torch.full_like(x, 2.5), lambda x: x * x.new_ones(()) + torch.zeros_like(x),
    lambda x: torch.isfinite(x).to(x.dtype) + torch.isinf(1 / x).float(),
    lambda x: torch.copysign(x, -x), F.celu, lambda x: F.celu(x, 0.5), F.tanhshrink,
    lambda x: F.threshold(x, 0.1, -3.0), F.softshrink, lambda x: F.hardshrink(x, 0.75),
    torch.special.erfc, torch.special.expit, torch.sinc, torch.special.sinc,
    torch.special.entr, lambda x: F.prelu(x, torch.tensor([0.2], dtype=x.dtype)),
    lambda x: F.dropout(x, 0.1, training=False), torch.nn.Dropout(0.3).eval(),
    lambda x: F.dropout(x, p=0.0) + torch.Tensor.tanh(x), lambda x: x.view_as(x) * x.cpu(),
    lambda x: x.type(torch.float32) * 2,
    lambda x: x + x.numel() + x.dim() + x.ndim + len(x.shape) + x.size().numel()
    if x.dim() == 0 else x + 2, lambda x: x * x.data + x.detach(),
    lambda x: np.sqrt(np.float64(2.0)) * x + np.float32(0.5) - np.int64(3),
    lambda x: x * (1 / np.sqrt(2.0)) + np.float64(1.5), lambda x: np.float64(2.0) * x,
    lambda x: torch.where(x > np.float64(0.25), x, np.float32(1.0)),
]  # fmt: skip


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: getattr(f, "__name__", "f"))
def test_function(f):
    agrees(f, X)


@pytest.mark.parametrize("f", [torch.asin, torch.acos, torch.atanh, torch.arcsin, torch.logit])
def test_function_of_the_unit_interval(f):
    x = UNIT.abs() * 0.998 + 1e-3 if f is torch.logit else UNIT
    agrees(f, x * 0.999 if f is torch.atanh else x)


def test_acosh():
    agrees(torch.acosh, 1 + X.abs())


@pytest.mark.parametrize(
    "f",
    [
        torch.atan2, torch.hypot, torch.copysign, torch.logaddexp, torch.fmax,
        torch.logaddexp2, lambda x, y: torch.special.xlog1py(x, y.abs()),
        torch.fmin, torch.maximum, lambda x, y: torch.lerp(x, y, 0.3),
        lambda x, y: torch.lerp(x, y, 0.9), lambda x, y: torch.addcmul(x, y, y, value=0.5),
        lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.5), torch.heaviside,
        lambda x, y: torch.xlogy(x, y.abs() + 0.1),
        lambda x, y: torch.ldexp(x, y.clamp(-9, 9).int()),
        lambda x, y: torch.div(x, y, rounding_mode="floor") * 0 + y,
        lambda x, y: torch.where(input=x, condition=y > 0, other=y),
    ],
    ids=lambda f: getattr(f, "__name__", "f"),
)  # fmt: skip
def test_function_of_two(f):
    agrees(f, X, Y)


TENTHS = torch.arange(-60.0, 60) / 10


@pytest.mark.parametrize("y", [0.1, -0.1, 0.3, 0.7, 1.0, 2.5, -3.0, 1e-3, 1e30, 0.5])
@pytest.mark.parametrize("f", [torch.fmod, torch.remainder, torch.floor_divide])
def test_quotients_are_exact(f, y):
    """The rest and the floor are those of the true quotient, which f32 may round up to a whole
    number: of 1 and 0.1 they are torch's 0.1 and 9."""
    row, want = torch.full_like(TENTHS, y), f(TENTHS, y)
    for g in (lambda i: f(TENTHS[i], y), lambda i: f(TENTHS[i], row[i])):
        assert torch.equal(scores(lambda s, b, h, i, j, g=g: s + g(i), len(TENTHS)), want)


INF = float("inf")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, -0.5, INF, -INF, float("nan")]
BY_ZERO = [  # constants of a mod's code
    lambda x: x / -0.0, lambda x: x / 0.0, lambda x: x / 0, lambda x: -2.5 / x,
    lambda x: x // -0.0, lambda x: INF // x, lambda x: -INF // x, lambda x: x // -2.5,
    lambda x: 1 / (x * -2), lambda x: torch.reciprocal(-x),
    lambda x: torch.div(x, -0.0, rounding_mode="trunc"),
]  # fmt: skip


def agrees_at(f, *tensors):
    """At each element, in a score and in a mask, by the value and by its sign."""
    n, want = len(tensors[0]), f(*tensors)
    got = scores(lambda s, b, h, i, j: s + f(*(t[i] for t in tensors)), n)
    shown = torch.where(want == INF, torch.nan, want)  # a row with such a score is NaN
    assert torch.allclose(got, shown, equal_nan=True), f
    for is_so in (lambda x: x > 0, lambda x: x < 0, lambda x: x == x, lambda x: abs(x) == INF):
        live = st.create_mask(
            lambda b, h, i, j, is_so=is_so: is_so(f(*(t[i] for t in tensors))),
            None, None, n, 1, device="cpu",
        )  # fmt: skip
        assert torch.equal(live[0, 0, :, 0], is_so(want)), f


def test_divisions_by_zeros_and_of_infinities():
    """The sign of a zero is torch's, and an infinity has no floor of a quotient but by 0."""
    pairs = torch.cartesian_prod(*[torch.tensor(SPECIAL)] * 2).T.contiguous()
    for f in (
        torch.div, torch.floor_divide, torch.remainder, torch.fmod, torch.hypot, torch.copysign,
        lambda x, y: torch.div(x, y, rounding_mode="trunc"), lambda x, y: 1 / (x * y),
        lambda x, y: x / -y,
    ):  # fmt: skip
        agrees_at(f, *pairs)
        for y in SPECIAL:  # a number of the closure
            agrees_at(lambda x, f=f, y=y: f(x, torch.tensor(y)), torch.tensor(SPECIAL))
    for f in BY_ZERO:
        agrees_at(f, torch.tensor(SPECIAL))


def test_floors_of_quotients_are_proven():
    """Block masks of them cost what their boundaries do, as those of x / y."""
    N = 4096
    for f in (
        lambda i, h: i.float() // 33.3, lambda i, h: i * 0.1 // 64,
        lambda i, h: i.float() // (h * 100.5 + 50.25),
    ):  # fmt: skip
        mask = lambda b, h, i, j, f=f: f(i, h) == f(j, h)  # noqa: E731
        stats = st.create_block_mask(mask, 1, 2, N, N).handle().stats()
        assert stats.evaluated_positions < N * N // 4


@pytest.mark.parametrize("f", [torch.fmod, torch.remainder])
def test_slopes_of_rests(f):
    n = min(len(TENTHS), N)
    x, y = (t[:n].clone().requires_grad_() for t in (TENTHS, X + 0.31))
    q, k = torch.zeros(1, 1, n, 8), torch.zeros(1, 1, 1, 8)
    _, lse = st.flex_attention(
        q, k, k, lambda s, b, h, i, j: s + f(x[i], y[i]), return_lse=True
    )
    got = torch.autograd.grad(lse.sum(), (x, y))
    want = torch.autograd.grad(f(x, y).sum(), (x, y))
    assert all(torch.allclose(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("f", [torch.bitwise_left_shift, torch.bitwise_right_shift])
def test_shifts_by_all_bits(f):
    """torch's shifts by 32 and more leave the sign; the language's counts are mod 32."""
    x = torch.tensor([0, 1, -1, 5, -7, 1 << 20, -(1 << 31)], dtype=torch.int32)
    count = torch.tensor([0, 1, 31, 32, 33, 64, -1], dtype=torch.int32)
    for n in range(len(count)):
        want = f(x, count[n])
        for y in (lambda i, n=n: count[i * 0 + n], lambda i, n=n: int(count[n])):
            got = st.create_mask(
                lambda b, h, i, j, y=y: f(x[i], y(i)) == want[i], 1, 1, len(x), 1, device="cpu"
            )
            assert got.all(), (f, count[n], got.flatten())


@pytest.mark.parametrize("f", [torch.maximum, torch.minimum])
def test_either_not_a_number(f):
    x = torch.tensor([math.nan, 1.0, math.nan, 1.0])
    y = torch.tensor([2.0, math.nan, math.nan, 2.0])
    got = st.create_mask(
        lambda b, h, i, j: f(x[i], y[i]).isnan(), 1, 1, len(x), 1, device="cpu"
    )
    assert torch.equal(got.flatten(), f(x, y).isnan())


def test_infinite_and_not_numbers():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    for f in (torch.isfinite, torch.isinf, torch.isnan, torch.isposinf, torch.isneginf):
        got = st.create_mask(lambda b, h, i, j: f(x[i]), None, None, 4, 1, device="cpu")
        assert torch.equal(got.flatten(), f(x)), f
    for f in (torch.nan_to_num, lambda x: torch.nan_to_num(x, 2.0, 5.0, -5.0)):
        assert torch.equal(scores(lambda s, b, h, i, j: s + f(x[i]), 4), f(x))
    finite = lambda x: torch.atan(x).nan_to_num(9.0)  # noqa: E731
    agrees(finite, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_short_integers_wrap(dtype):
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max + 1, (60,), generator=G).to(dtype)
    y = torch.randint(info.min, info.max + 1, (60,), generator=G).to(dtype)
    n = 7
    for f in (
        lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: -x,
        lambda x, y: ~x, lambda x, y: x + 100, lambda x, y: 3 - y, lambda x, y: x * n,
        lambda x, y: x << 3, lambda x, y: (x + y) / 2, lambda x, y: x.int() + y,
        lambda x, y: (x - y) + y.long(), lambda x, y: abs(x), lambda x, y: x**3,
        lambda x, y: x.to(torch.uint8) * 1.0, lambda x, y: (x * y).to(torch.int8).sign(),
        lambda x, y: x + y.to(torch.int32), lambda x, y: (x > y) + x, lambda x, y: x + 0.5,
        lambda x, y: x.clamp(-40000, 40000), lambda x, y: torch.clamp_min(x, -40000),
        lambda x, y: 2 ** (x % 16), lambda x, y: x**0 + y, lambda x, y: (x > y) ** 2 + (x > 0),
    ):  # fmt: skip
        got = scores(lambda s, b, h, i, j: s + f(x[i], y[i]), 60)
        assert torch.equal(got.double(), f(x, y).double())


def test_bools_add_as_torch_adds_them():
    i, j = torch.arange(6).view(6, 1), torch.arange(6)
    for f in (
        lambda i, j: (i > j) + (j > 3), lambda i, j: (i > j) * (j > 3),
        lambda i, j: (i > j) + True, lambda i, j: (i > j) + 1, lambda i, j: (i > j) * 2.5,
        lambda i, j: torch.maximum(i > j, j > 3), lambda i, j: torch.sign(i > j),
    ):  # fmt: skip
        for k in range(6):
            got = scores(lambda s, b, h, i, j: s + f(i, j + k), 6)
            assert torch.equal(got, f(i, j)[:, k].float())


ROW = torch.tensor([[1.0, -2.0, 3.0], [0.0, 4.0, -0.5], [7.0, 1.0, 1.0], [2.0, 2.0, 0.1]])
ONE = ROW[:, :1]
IDS = torch.tensor([3, 5, 9])
LAYER = torch.nn.Linear(3, 1)
CUBE = torch.randn(2, 3, 4, generator=G)


@pytest.mark.parametrize(
    "f",
    [
        lambda r, i: r.norm(p=1), lambda r, i: r.norm(), lambda r, i: torch.norm(r, 3, dim=-1),
        lambda r, i: torch.linalg.vector_norm(r, ord=1), lambda r, i: r.norm(p=math.inf),
        lambda r, i: r.sum(-1), lambda r, i: r.mean(dim=-1), lambda r, i: r.prod(),
        lambda r, i: r @ r, lambda r, i: torch.matmul(r, r * 2), lambda r, i: r.max(),
        lambda r, i: r.max(-1).values, lambda r, i: r.min(dim=0)[0], lambda r, i: r.amax(),
        lambda r, i: torch.einsum("d,d->", r, r + 1),
        lambda r, i: torch.einsum("...d,...d->...", r, r + 1),
        lambda r, i: torch.einsum("...d, d", r, r * r),
        lambda r, i: (r == 1).any(-1),
        lambda r, i: (r == i.unsqueeze(-1)).any(-1), lambda r, i: (r > 0).sum(),
        lambda r, i: torch.isin(i + 2, IDS), lambda r, i: torch.isin(i + 2, IDS, invert=True),
        lambda r, i: (IDS == i + 3).any(), lambda r, i: r.where(r > 0, 5.0).sum(),
        lambda r, i: torch.dot(r, r), lambda r, i: r.clamp(max=2).sum(dtype=torch.float32),
        lambda r, i: torch.bucketize(i + 3, IDS), lambda r, i: torch.searchsorted(IDS, i * 3),
        lambda r, i: torch.bucketize(i + 3, IDS, right=True) + i,
        lambda r, i: torch.searchsorted(IDS, i * 3, side="right", out_int32=True),
        lambda r, i: torch.bucketize(i + 3, boundaries=IDS) + torch.bucketize(i, IDS[:0]),
        lambda r, i: torch.bucketize(input=i + 3, boundaries=IDS[:1]),
        lambda r, i: torch.searchsorted(sorted_sequence=IDS, input=i * 3),
        lambda r, i: torch.isin(i + 2, IDS[:1]), lambda r, i: torch.isin(i, IDS[:0]) + 1 * i,
        lambda r, i: torch.isin(i + 2, test_elements=IDS),
        lambda r, i: torch.bucketize(r[0] / 0.0, IDS) + torch.bucketize(0 * r[0] / 0.0, IDS),
        lambda r, i: r.softmax(-1)[1], lambda r, i: F.softmax(r, dim=0) @ r,
        lambda r, i: (r * 90).softmax(0, dtype=torch.float32).max(),
        lambda r, i: torch.log_softmax(r, 0)[i % 3], lambda r, i: F.log_softmax(r, -1)[-1],
        lambda r, i: torch.logsumexp(r * 50, 0), lambda r, i: (r - math.inf).logsumexp(-1),
        lambda r, i: r.var(), lambda r, i: torch.var(r, 0, unbiased=False),
        lambda r, i: r.std(),
        lambda r, i: torch.var(r, False), lambda r, i: r.std(-1, correction=0),
        lambda r, i: r.argmax(), lambda r, i: torch.argmin(r, -1) + i,
        lambda r, i: (-r).argmax(),
        lambda r, i: torch.argmax(torch.where(r == 1, math.nan, r)),
        lambda r, i: r.max(-1).indices, lambda r, i: torch.min(r, dim=0)[1],
        lambda r, i: F.cosine_similarity(r, r.abs() + 1, dim=0),
        lambda r, i: F.normalize(r, dim=0)[2],
        lambda r, i: torch.cosine_similarity(r, ROW[0], dim=-1),
        lambda r, i: (r / r.sum(-1, keepdim=True)).max(),
        lambda r, i: torch.index_select(ROW, 0, i.view(1)).sum(),
        lambda r, i: IDS.index_select(0, (i % 3).view(1)).sum(),
        lambda r, i: torch.gather(r, 0, (i % 3).unsqueeze(0).long()).sum(),
        lambda r, i: r.take((i % 3).long()) + r.select(0, 1),
        lambda r, i: sum(x * k for k, x in enumerate(r)),
        lambda r, i: (lambda a, b, c: a - b * c)(*(r * 2)),
        lambda r, i: ONE[i].softmax(0)[0] + F.normalize(ONE[i] + 3, dim=0)[0],
        lambda r, i: (ONE[i] * 2)[0] + ONE[i].log_softmax(0).sum(),
        lambda r, i: r.reshape(-1).sum() + r.view((-1,)).prod(),
        lambda r, i: torch.linalg.norm(r - 1) + torch.linalg.norm(r, ord=1),
        lambda r, i: torch.dist(r, r * 2) + torch.linalg.vecdot(r, r) + r.cumsum(0)[2],
        lambda r, i: (lambda a, b, c: a - b * c)(*r.unbind()),
        lambda r, i: (lambda a, b, c: a - b * c)(*torch.unbind(r, -1)),
        lambda r, i: r[:2].sum() + r[1:].prod() + r[-1:].sum() + r[::2].sum() + r[...][1],
        lambda r, i: (r * 2)[1:].sum() + (r * 2)[:-1][0],
        lambda r, i: r[1:][i % 2] + r[1:][(i % 2) - 2] + ROW[::2][i // 2, 1:].sum(),
        lambda r, i: ROW[i, :2].sum() + ROW[:, 0][i] + ROW[..., 1][i] + ROW[:3, 2][i % 3],
        lambda r, i: ROW[:, i % 3][2] + ROW[..., i % 3][-1] + CUBE[:, i % 3, 1:][1, 2],
        lambda r, i: CUBE[i % 2, ..., i % 3][1] + CUBE[i % 2][1:, 2].sum() + CUBE[i % 2, 1, 2],
        lambda r, i: sum(x.prod() for x in CUBE[i % 2]) + CUBE[i % 2].unbind(1)[2][0],
        lambda r, i: r.split([1, 2])[1].sum() - r.split(2)[1].sum() * r.chunk(2)[0].prod(),
        lambda r, i: r.narrow(0, 1, 2).sum() + r.select(0, -1) + CUBE[i % 2].select(1, 3)[0],
        lambda r, i: torch.stack([r[0], r[1] * 2, i + 0 * r[2]]).norm(),
        lambda r, i: torch.cat([r, r[:2] * 2]).max() + torch.stack((i, i * i)).sum(),
        lambda r, i: torch.as_tensor(i) + torch.as_tensor(r)[0] + torch.tensor(4) * r[1],
        lambda r, i: torch.index_select(IDS, 0, (i % 3).reshape(1))[0],
        lambda r, i: i.type(torch.float32) * i.type(torch.int64) + i.type_as(r) + i.to(CUBE),
        lambda r, i: r.numel() + r.dim() + r.shape[0] + len(r) + r.size(0) + r.sum(),
    ],
)  # fmt: skip
def test_rows(f):
    n = len(ROW)
    got = scores(lambda s, b, h, i, j: s + f(ROW[i], i), n)
    want = torch.stack([f(ROW[i], torch.tensor(i)) * 1.0 for i in range(n)])
    assert torch.allclose(got, want, rtol=1e-6)


def test_divmod():
    """Of tensors torch has none; it is Python's."""
    for a, n in ((7, 3), (0, 4), (9, 9)):
        got = scores(
            lambda s, b, h, i, j: s + divmod(i - 5, 3)[0] * 10 + divmod(a, i + n)[1], 9
        )
        assert got.tolist() == [(i - 5) // 3 * 10 + a % (i + n) for i in range(9)]
    got = scores(lambda s, b, h, i, j: s + divmod(X[i], 0.5)[1])
    assert torch.allclose(got, X - torch.floor(X / 0.5) * 0.5, atol=1e-6)


SLOPE = torch.tensor([0.25], dtype=torch.float64)
AT = torch.tensor([[-1.5, 0.0, 0.3, 2.0], [0.1, 0.9, 1e-4, 3.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: F.prelu(x.reshape(-1), SLOPE).reshape(x.shape), lambda x, y: torch.sinc(x),
        lambda x, y: torch.logaddexp2(x, y), lambda x, y: torch.special.entr(y),
        lambda x, y: torch.special.xlog1py(x, y), lambda x, y: torch.xlogy(x, y),
        lambda x, y: F.dropout(x, 0.5, False) * y,
    ],
)  # fmt: skip
def test_gradients_of_functions(f):
    """Of the functions' arguments, against torch's own in float64."""
    x, y = AT.clone().requires_grad_()
    q = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    k, v = torch.zeros(1, 1, 2, 8, dtype=torch.float64), torch.zeros_like(q[:, :, :2])
    v[..., 1, :] = 1.0
    mod = lambda s, b, h, i, j: s + torch.where(j > 0, f(x[i], y[i]), 0.0)  # noqa: E731
    got = torch.autograd.grad(st.flex_attention(q, k, v, mod)[0, 0, :, 0].sum(), (x, y))
    want = torch.autograd.grad(f(x, y).sigmoid().sum(), (x, y), allow_unused=True)
    for a, b in zip(got, want):
        assert torch.allclose(a, torch.zeros_like(a) if b is None else b, rtol=2e-6)


def slopes(f, tensors, dtype):
    """f of captured elements and its gradients, times what keeps values small: by kernels and
    by torch."""
    made = []
    size = f(*(t.to(dtype) for t in tensors)).abs()
    small = torch.where(size.isfinite() & (size > 1), 1 / size, torch.ones_like(size))
    for call in ("saccade", "torch"):
        x = [t.to(dtype).clone().requires_grad_() for t in tensors]
        if call == "saccade":
            q = torch.zeros(1, 1, len(size), 8, dtype=dtype)
            mod = lambda s, b, h, i, j: s + f(*(t[i] for t in x)) * small[i]  # noqa: B023, E731
            got = st.flex_attention(q, q[:, :, :1], q[:, :, :1], mod, return_lse=True)[1][0, 0]
        else:
            got = f(*x) * small
        made.append((got.detach(), *torch.autograd.grad(got.sum(), x)))
    return made


def agree_in_slopes(f, *tensors):
    """Where torch's value and slope are finite, but for what float32 loses of torch's own."""
    exact = slopes(f, tensors, torch.float64)[1]
    for dtype, rtol in ((torch.float64, 2e-6), (torch.float32, 1e-5)):
        got, theirs = slopes(f, tensors, dtype)
        for k, (a, b, best) in enumerate(zip(got, theirs, exact)):
            off = (a.double() - best).abs()
            least = 1e-37 if k else 1e-16
            bad = off > rtol * best.abs() + 2 * (b.double() - best).abs() + least
            bad = (bad | a.isnan()) & best.isfinite() & b.isfinite() & theirs[0].isfinite()
            shown = [(k, *[float(t[i]) for t in tensors], float(a[i]), float(best[i]))
                     for i in bad.nonzero().flatten()[:5]]  # fmt: skip
            assert not shown, (dtype, shown)


EDGES = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 0.25, 2.0, -2.0, 3.0, -3.0, 6.0, -6.0, 20.0, 40.0, 41.0]
    + [-40.0, 0.4142135623730950, 2.414213562373095, 0.0795, 88.0, -88.0]
    + [s * 10.0**n for s in (1, -1) for n in (-38, -30, -20, -10, -4, 4, 9, 10, 18, 30, 38)]
)
LOW, HIGH = -1.0, 2.0  # numbers of a closure, which are captured


def of_closure():
    low, high = LOW, HIGH
    return [
        lambda x: x.clamp(low, high), lambda x: torch.clamp(x, max=high),
        lambda x: torch.clamp_min(x, low), lambda x: F.hardtanh(x, low, high),
    ]  # fmt: skip


KINKS = [
    F.relu, F.relu6, F.hardtanh, F.hardsigmoid, F.hardswish, lambda x: x.clamp(-1, 1),
    lambda x: x.clamp(min=-1), lambda x: torch.clip(x, max=0.5), lambda x: x.clamp_max(2.0),
    lambda x: F.hardtanh(x, -2.0, 1.0), lambda x: x.clamp(2, 1), torch.nn.ReLU(),
    lambda x: F.hardshrink(x, 1.0), lambda x: F.softshrink(x, 1.0), torch.sign,
    lambda x: torch.maximum(x, 2 * x),
    lambda x: torch.minimum(x, -x), *of_closure(),
]  # fmt: skip
INNER = EDGES[EDGES.abs() < 1]
SMOOTH = [
    torch.log1p, torch.atan, torch.sinh, torch.cosh, torch.asinh, torch.erfc, F.softplus, F.elu,
    F.selu, F.leaky_relu, F.mish, F.logsigmoid, F.softsign, F.silu, F.gelu,
    torch.frac, torch.square, torch.sigmoid, torch.tanh, F.celu, F.tanhshrink, F.softshrink,
    F.hardshrink, torch.special.entr, torch.abs, torch.exp, torch.exp2, torch.erf,
    torch.reciprocal, torch.log, lambda x: F.softplus(x, 3.0), lambda x: F.elu(x, 0.5),
    lambda x: F.softplus(x, 0.5, 4.0), lambda x: F.celu(x, 0.5), lambda x: x**2, lambda x: x**3,
    lambda x: F.gelu(x, approximate="tanh"), lambda x: F.threshold(x, 1.0, -3.0),
    lambda x: x**1.5, lambda x: x**0, lambda x: 2.0**x, lambda x: 0.0**x, lambda x: x % 1.0,
    lambda x: torch.copysign(x, torch.ones_like(x)), lambda x: torch.lerp(x, x * 2, 0.5),
    lambda x: torch.atan2(x, torch.ones_like(x)), lambda x: torch.atan2(torch.ones_like(x), x),
    lambda x: torch.hypot(x, torch.ones_like(x)),
]  # fmt: skip


@pytest.mark.parametrize("f", SMOOTH, ids=lambda f: getattr(f, "__name__", "f"))
def test_slopes_at_edges(f):
    """At 0, where branches of formulas meet, and at arguments tiny and huge."""
    agree_in_slopes(f, EDGES)


@pytest.mark.parametrize("f", KINKS, ids=lambda f: getattr(f, "__name__", "f"))
def test_slopes_at_kinks(f):
    """As torch's: none at a bound, half each of two that are equal."""
    agree_in_slopes(f, EDGES)


@pytest.mark.parametrize("f", [torch.asin, torch.acos, torch.atanh, torch.logit])
def test_slopes_of_the_unit_interval(f):
    agree_in_slopes(f, INNER[INNER > 0] if f is torch.logit else INNER)


def test_slopes_of_acosh_expm1_and_sinc():
    agree_in_slopes(torch.acosh, EDGES[EDGES >= 1])
    agree_in_slopes(torch.expm1, EDGES[EDGES > -30])  # beyond torch's are 0
    x = EDGES.double()
    want = torch.where(x == 0, 0, (x * math.pi).cos() / x - torch.sinc(x) / x)
    want = torch.where(x.abs() < 1e-3, -x * math.pi**2 / 3, want)
    for dtype in (torch.float64, torch.float32):
        got, _ = slopes(torch.sinc, [EDGES], dtype)
        assert torch.allclose(got[1].double(), want, rtol=1e-5, atol=1e-6)
        small = x.abs() < 1e-2
        assert torch.allclose(got[1].double()[small], want[small], rtol=1e-5, atol=1e-37)


FEW = [0.0, -0.0, 1.0, -1.0, 0.3, 2.0, -2.0, 3.0, 1e-30, -1e-30, 1e30, -1e30, 1e-10]
PAIRS = torch.cartesian_prod(torch.tensor(FEW), torch.tensor(FEW)).T
SIGNED = PAIRS[:, (PAIRS.signbit() <= (PAIRS < 0)).all(0)]  # without -0


@pytest.mark.parametrize(
    "f",
    [
        torch.logaddexp, torch.logaddexp2, torch.copysign, torch.pow, torch.div,
        torch.hypot, torch.special.xlog1py, torch.xlogy, lambda x, y: torch.lerp(x, y, 0.3),
        torch.maximum, torch.minimum, torch.fmax, torch.fmin, lambda x, y: x.clamp(min=y),
        lambda x, y: x.clamp(y, y + y.abs() + 1), lambda x, y: torch.clamp_max(x, y),
        lambda x, y: torch.where(x > y, x, y * 2), lambda x, y: torch.addcdiv(x, y, y),
    ],
    ids=lambda f: getattr(f, "__name__", "f"),
)  # fmt: skip
def test_slopes_of_two(f):
    """At all pairs of edges, ties among them."""
    x, y = PAIRS
    if f is torch.pow:  # torch rounds y - 1: to an even number, and its slope has another sign
        keep = (x >= 0) | (y.abs() < 2.0**53)
        x, y = x[keep], y[keep]
    agree_in_slopes(f, x, y)


def test_slopes_of_atan2():
    """Of -0 the angle is that of 0. torch's slopes in float32 are 0 where squares under- or
    overflow."""
    y, x = SIGNED
    for dtype, rtol in ((torch.float64, 2e-6), (torch.float32, 1e-5)):
        got, _ = slopes(torch.atan2, [y, x], dtype)
        _, want = slopes(torch.atan2, [y, x], torch.float64)
        for a, b in zip(got, want):
            assert torch.allclose(a.double(), b, rtol=rtol, atol=1e-37)
    y, x = (torch.tensor(t) * math.inf for t in ([1.0, 1, -1, -1], [1.0, -1, 1, -1]))
    got = scores(lambda s, b, h, i, j: s + torch.atan2(y[i], x[i]), 4)
    assert torch.allclose(got, torch.atan2(y, x))


@pytest.mark.parametrize(
    "f",
    [
        lambda r: r.norm(), lambda r: r.norm(p=1), lambda r: r.norm(p=3), lambda r: r.var(),
        lambda r: r.norm(p=0.5), lambda r: r.std(), lambda r: r.prod(), lambda r: r[:2].max(),
        lambda r: r[1:].amin(), lambda r: r[:2].norm(p=math.inf),
        lambda r: r.max(-1).values, lambda r: r.min(0)[0], lambda r: r.softmax(0)[1],
        lambda r: r.log_softmax(0)[1], lambda r: r.logsumexp(0), lambda r: torch.dist(r, r),
        lambda r: F.normalize(r, dim=0)[1], lambda r: torch.dist(r, 2 * r, 1),
        lambda r: F.cosine_similarity(r, r.abs() + 1, dim=0), lambda r: r.abs().sum(),
    ],
)  # fmt: skip
def test_slopes_of_rows_at_edges(f):
    rows = [[0, 0, 0], [1, 1, 1], [1, -2, 3], [0, 1, 2], [2, 2, 1], [-1, -1, 0], [3, 0, 3]]
    for dtype in (torch.float64, torch.float32):
        p = torch.tensor([*rows, [1e-20, 1e-20, -1e-20]], dtype=dtype, requires_grad=True)
        q = torch.zeros(1, 1, len(p), 8, dtype=dtype)
        mod = lambda s, b, h, i, j: s + f(p[i])  # noqa: B023, E731
        got = st.flex_attention(q, q[:, :, :1], q[:, :, :1], mod, return_lse=True)[1][0, 0]
        want = torch.stack([f(x) for x in p])
        assert torch.allclose(got, want, rtol=1e-5)
        got, want = (torch.autograd.grad(t.sum(), p)[0] for t in (got, want))
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-6), (got, want)


def test_gradients_of_parts_of_rows():
    made = []
    for call in ("saccade", "torch"):
        p = (torch.arange(12.0, dtype=torch.float64).view(4, 3) / 7).requires_grad_()

        def part(x, y):
            a, b, c = x.unbind(-1)
            near = torch.stack([a, b * c]).norm() + torch.linalg.norm(x[1:] - y[:2])
            return near + torch.cat([x[:1], y]).prod() + x.split([1, 2])[1].cumsum(0)[-1]

        if call == "saccade":
            q = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
            v = torch.eye(4, 8, dtype=torch.float64)[None, None]
            out = st.flex_attention(q, q, v, lambda s, b, h, i, j: s + part(p[i], p[j] + 0.1))
            out = out[0, 0, :, :4]
        else:
            s = [part(p[i], p[j] + 0.1) for i in range(4) for j in range(4)]
            out = torch.stack(s).view(4, 4).softmax(-1)
        made.append((out, torch.autograd.grad(out.sin().sum(), p)[0]))
    for a, b in zip(*made):
        assert torch.allclose(a, b, rtol=1e-10)


INFINITE = torch.tensor([[math.inf, 1.0, 2.0], [1.0, -math.inf, 0.5], [-math.inf] * 3])


@pytest.mark.parametrize(
    "f",
    [
        lambda r: r.softmax(0)[0], lambda r: r.softmax(0)[1], lambda r: r.log_softmax(0)[1],
        lambda r: r.log_softmax(0)[2], lambda r: r.logsumexp(0), lambda r: r.amax(),
    ],
)  # fmt: skip
def test_rows_with_infinities(f):
    """As numbers, of which a mask is made: an infinite score would be a masked position."""
    for i, row in enumerate(INFINITE):
        is_nan = lambda i=i: f(INFINITE[i]).isnan()  # noqa: E731
        got = scores(lambda s, b, h, q, j: torch.where(is_nan(), 1.0, 2.0), 1)
        assert got.item() == (1.0 if f(row).isnan() else 2.0)
        if not f(row).isnan() and f(row).isfinite():
            got = scores(lambda s, b, h, q, j, i=i: f(INFINITE[i]) + 0 * s, 1)
            assert torch.allclose(got, f(row))


@pytest.mark.parametrize(
    "f, says",
    [
        (lambda s, i: s.half(), "float16"),
        (lambda s, i: s.to(torch.bfloat16), "bfloat16"),
        (lambda s, i: s.round(1, 2), "2 at most"),
        (lambda s, i: s.round(digits=2), "digits=2"),
        (lambda s, i: F.gelu(s, approximate="sine"), "sine"),
        (lambda s, i: s + random.random(), "a random number, whose one draw"),
        (lambda s, i: s * i * np.random.rand(), "a random number, whose one draw"),
        (lambda s, i: s + F.linear(ROW[i], CUBE[0, :, :3])[0], r"\(w\[n\] \* x\).sum"),
        (lambda s, i: s + (ROW[:3] @ ROW[i])[0], r"\(w\[n\] \* x\).sum"),
        (lambda s, i: s + LAYER(ROW[i])[0], r"\(w\[n\] \* x\).sum"),
        (lambda s, i: ROW[i].sum(1), "along 1"),
        (lambda s, i: torch.gather(ROW, 0, i), "index: tensor"),
        (lambda s, i: ROW[i].softmax(0), "a row"),
        (lambda s, i: (ROW[i].unsqueeze(0) * ROW[i].unsqueeze(1)).sum(), "one dimension"),
        (lambda s, i: (ROW[i].view(-1, 1) * ROW[i]).sum(), "one dimension"),
        (lambda s, i: (ROW[i].reshape((1, -1)) * 2).sum(), "one dimension"),
        (lambda s, i: ROW[i].softmax(0)[3], "-3 to 2"),
        (lambda s, i: F.cosine_similarity(ROW[i], s, dim=0), "two rows"),
        (lambda s, i: torch.where(s > 0), "without"),
        (lambda s, i: s.view(2, 3), "shape"),
        (lambda s, i: torch.add(s, 1, out=ROW), "out="),
        (lambda s, i: F.relu(s, inplace=True), "inplace=True"),
        (lambda s, i: torch.div(s, 2, rounding_mode="up"), "'up'"),
        (lambda s, i: F.dropout(s, 0.1), "dropout_p=p"),
        (lambda s, i: torch.lgamma(s), "torch.lgamma.* table"),
        (lambda s, i: torch.erfinv(s), "torch.erfinv.* table"),
        (lambda s, i: s + CUBE[i], "slice of CUBE of shape"),
        (lambda s, i: s + CUBE[i, None, 0, 0], "None"),
        (lambda s, i: s + CUBE[i, 0, 7], "index 7 in dimension 2, .*tensor CUBE"),
        (lambda s, i: s + CUBE[0, 0, i, i], "4 indices, expected 3 for .* CUBE"),
        (lambda s, i: s + ROW, "tensor ROW of shape"),
        (lambda s, i: s + ROW[i, i:].sum(), "bound of a slice"),
        (lambda s, i: s + ROW[i, ::-1].sum(), "step|Boolean|positive"),
        (lambda s, i: torch.stack([ROW[i], ROW[i]]).sum(), "stack of a Vector"),
        (lambda s, i: s + ROW[i].split([1, 1])[0].sum(), "a sum of 3"),
        (lambda s, i: s * math.sqrt(s), "function of math"),
        (lambda s, i: (i > 1) - (i > 2), "between bools"),
        (lambda s, i: torch.einsum("d,e->", ROW[i], ROW[i]), "'d,d->'"),
        (lambda s, i: torch.bucketize(ROW[i], IDS), "one value among"),
        (lambda s, i: torch.searchsorted(IDS, i, sorter=IDS), "that rises"),
        (lambda s, i: torch.searchsorted(IDS, i, side="middle"), "'middle'"),
        (lambda s, i: torch.searchsorted(IDS, i, right=True, side="left"), "as right says"),
    ],
)
def test_arguments_that_mean_nothing_here(f, says):
    with pytest.raises(TypeError, match=says):
        scores(lambda s, b, h, i, j: f(s, i))


@pytest.mark.parametrize(
    "f",
    [
        lambda s, i: torch.Tensor(s),
        lambda s, i: torch.vmap(lambda x: x * 2)(ROW[i]).sum(),
        lambda s, i: torch.vmap(torch.tanh)(ROW[i] * 2).sum(),
    ],
)
def test_what_asks_no_symbol_is_an_error(f):
    with pytest.raises(RuntimeError, match=r"(?s)test_functions.py:\d+: .*torch.func inside"):
        scores(lambda s, b, h, i, j: f(s, i))


def test_draws_of_other_threads_are_no_error():
    """Which are seen while a mod is traced."""

    def mod(s, b, h, i, j):
        other = threading.Thread(target=random.random)
        other.start()
        other.join()
        return s + 2 * i

    assert torch.equal(scores(mod, 4), 2.0 * torch.arange(4))


def test_unknown_methods_are_errors_of_the_mod():
    """With the line where they are; what asks by hasattr is told that they are not there."""
    for row in (lambda i: i, lambda i: ROW[i], lambda i: ROW[i] * 2):
        with pytest.raises(
            TypeError, match=r"(?s)test_functions.py:\d+: .*no cholesky"
        ) as raised:
            scores(lambda s, b, h, i, j: s + row(i).cholesky())  # noqa: B023
        assert isinstance(raised.value, AttributeError)
        got = scores(lambda s, b, h, i, j: s + 1 + hasattr(row(i), "cholesky"), 4)  # noqa: B023
        assert torch.equal(got, torch.ones(4))


def test_dtypes_are_torchs():
    seen = {}
    note = seen.update

    def mod(s, b, h, i, j):
        x = torch.ones(4, dtype=torch.uint8)[i]
        note(s=s.dtype, i=i.dtype, c=(i > j).dtype, x=x.dtype, y=(x + 1).dtype)
        note(z=(x * 0.5).dtype, w=(x + i).dtype)
        note(kinds=(s.is_floating_point(), i.is_floating_point(), s.dim()))
        return s + x

    scores(mod, 4)
    assert seen == dict(
        s=torch.float32, i=torch.int32, c=torch.bool, x=torch.uint8, y=torch.uint8,
        z=torch.float32, w=torch.int32, kinds=(True, False, 0),
    )  # fmt: skip
