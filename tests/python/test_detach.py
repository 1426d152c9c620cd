"""Where gradients flow in a mod: detach, torch.no_grad and its kin, autograd.Function."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from saccade.trace import closures  # noqa: E402

N, D = 17, 8
G = torch.Generator().manual_seed(5)
Q, K, V = (torch.randn(1, 2, N, D, generator=G, dtype=torch.float64) for _ in range(3))
W = torch.randn(N, generator=G, dtype=torch.float64)
P = torch.randn(N, 3, generator=G, dtype=torch.float64)
I, J = torch.arange(N).view(-1, 1), torch.arange(N)


def dense(q, k, v, mod):
    s = mod(q @ k.mT / D**0.5, 0, torch.arange(2).view(-1, 1, 1), I, J)
    return s.softmax(-1) @ v


def plain(w, p):
    return lambda s, b, h, i, j: s + (s.tanh() * w[j]).detach()


def captured(w, p):
    return lambda s, b, h, i, j: s * w[i] + w[j].detach() * s.detach()


def straight_through(w, p):
    return lambda s, b, h, i, j: s + (torch.round(s) - s).detach()


def by_function(w, p):
    return lambda s, b, h, i, j: s + torch.detach(s * w[j]) * w[i]


def of_the_tensor(w, p):
    return lambda s, b, h, i, j: s + w.detach()[j] * s + w.data[i]


def of_a_row(w, p):
    return lambda s, b, h, i, j: s + (p[i].detach() * p[j]).sum(-1) + w[i]


def block(w, p):
    def mod(s, b, h, i, j):
        with torch.no_grad():
            g = w[j] * s
        return s + g * w[i]

    return mod


def block_of_rows(w, p):
    def mod(s, b, h, i, j):
        with torch.no_grad():
            row = p[i] * 2
            first, raw = row[..., 0], p[j]
        return s + first * w[j] + (raw * p[i]).sum(-1)

    return mod


def inner(w, p):
    def mod(s, b, h, i, j):
        with torch.no_grad():
            with torch.enable_grad():
                kept = s * w[j]
            cut = kept * 2
        return kept + cut * w[i]

    return mod


def switched(w, p):
    def mod(s, b, h, i, j):
        with torch.set_grad_enabled(False):
            c = torch.sigmoid(s) + w[j]
        with torch.set_grad_enabled(True):
            return s * c

    return mod


def decorated(w, p):
    @torch.no_grad()
    def bias(i, j):
        return w[i] - w[j]

    return lambda s, b, h, i, j: s + bias(i, j) * w[i]


def itself(w, p):
    """What gives its argument back is not detached by no_grad."""

    def mod(s, b, h, i, j):
        with torch.no_grad():
            x = s.to(s.dtype).contiguous().double()
            y = s.view_as(s)
        return x * w[j] + y

    return mod


def integers(w, p):
    return lambda s, b, h, i, j: s + w[i] * (i - j).detach() * (i > j).detach()


MODS = [plain, captured, straight_through, by_function, of_the_tensor, of_a_row, block]
MODS += [block_of_rows, inner, switched, decorated, itself, integers]


@pytest.mark.parametrize("make", MODS, ids=lambda m: m.__name__)
def test_gradients_are_torchs(make):
    made = []
    for call in (st.flex_attention, dense):
        given = [t.clone().requires_grad_() for t in (Q, K, V, W, P)]
        out = call(*given[:3], make(*given[3:]))
        grads = torch.autograd.grad(out.sin().sum(), given, allow_unused=True)
        zeros = [torch.zeros_like(t) if g is None else g for t, g in zip(given, grads)]
        made.append([out, *zeros])
    for got, want in zip(*made):
        assert (got - want).abs().max() <= 1e-11 * max(1, want.abs().max())


def test_inference_mode_inside():
    """torch saves nothing that is made there, so this is against no_grad."""

    def mod(mode):
        def mod(s, b, h, i, j):
            with mode():
                c = torch.tanh(s)
            return s + c * W[j]

        return mod

    q = Q.clone().requires_grad_()
    made = [st.flex_attention(q, K, V, mod(m)) for m in (torch.inference_mode, torch.no_grad)]
    grads = [torch.autograd.grad(x.sum(), q)[0] for x in made]
    assert torch.equal(*made) and torch.equal(*grads)
    with torch.no_grad():
        assert torch.is_grad_enabled() is False and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("make", [block, captured, inner], ids=lambda m: m.__name__)
def test_the_callers_mode_does_not_change_the_text(make):
    texts = set()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            texts.add(closures.trace(make(W.clone(), P.clone()), "score")[0].text)
            assert before == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
            closures._cache.clear()
    assert len(texts) == 1


def test_a_decorated_mod_is_traced_once():
    mod = decorated(W, P)
    found = [closures.trace(mod, "score")[0] for _ in range(2)]
    assert found[0] is found[1]


def test_a_mode_that_a_mod_leaves_off_ends_with_it():
    def mod(s, b, h, i, j):
        torch.set_grad_enabled(False)
        return s * W[j]

    q = Q.clone().requires_grad_()
    out = st.flex_attention(q, K, V, mod)
    assert torch.is_grad_enabled()
    assert torch.autograd.grad(out.sum(), q)[0].abs().max() == 0


def test_tensors_made_inside_follow_the_caller():
    w = W.clone().requires_grad_()
    seen: list = []
    note = seen.append

    def mod(s, b, h, i, j):
        table = w * 2
        note(table.requires_grad)
        return s + table[j]

    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            st.flex_attention(Q, K, V, mod)
    assert seen == [True, False, False]


class AsItIs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return -g


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(x, step):
        return torch.round(x / step) * step

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return g, None


apply_rounded = Rounded.apply


@pytest.mark.parametrize(
    "mod, name",
    [
        (lambda s, b, h, i, j: AsItIs.apply(s), "AsItIs"),
        (lambda s, b, h, i, j: apply_rounded(s, 0.5) + 1, "Rounded"),
        (lambda s, b, h, i, j: s + AsItIs.apply(W[i]), "AsItIs"),
        (lambda s, b, h, i, j: s + AsItIs.apply(P[i]).sum(), "AsItIs"),
        (lambda s, b, h, i, j: torch.where(i > j, Rounded.apply(s, 1.0), s), "Rounded"),
    ],
)
def test_functions_with_a_backward_of_their_own(mod, name):
    with pytest.raises(TypeError, match=rf"(?s)test_detach.py:\d+: .*{name}.*detach") as caught:
        st.flex_attention(Q, K, V, mod)
    assert len(str(caught.value).splitlines()) == 2


def test_functions_of_whole_tensors_are_torchs_own():
    """They are computed by torch before an element is read."""
    w = W.clone().requires_grad_()
    got = st.flex_attention(Q, K, V, lambda s, b, h, i, j: s + AsItIs.apply(w)[j] * 0.5)
    want = dense(Q, K, V, lambda s, b, h, i, j: s + AsItIs.apply(w)[j] * 0.5)
    grads = [torch.autograd.grad(x.sin().sum(), w)[0] for x in (got, want)]
    assert torch.allclose(*grads)


@pytest.mark.parametrize("make", [captured, block, straight_through], ids=lambda m: m.__name__)
def test_compiled(make):
    made = []
    for call in (torch.compile(st.flex_attention, backend="aot_eager"), st.flex_attention):
        given = [t.clone().requires_grad_() for t in (Q, K, V, W, P)]
        out = call(*given[:3], make(*given[3:]))
        grads = torch.autograd.grad(out.sin().sum(), given[:4], allow_unused=True)
        made.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
    for got, want in zip(*made):
        assert (got - want).abs().max() <= 1e-12
