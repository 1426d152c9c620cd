"""Warm calls by the extension: the same bits as without it, and nothing stale."""

import gc
import importlib.machinery
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from saccade.c import abi, extension  # noqa: E402
from saccade.torch import entries, gradients, warm, watch  # noqa: E402
from saccade.torch.mods import AnyMod  # noqa: E402

if warm.extension is None:
    pytest.skip("the extension is not built, or this PyTorch is older", allow_module_level=True)

SHAPE = 1, 2, 16, 16


def fresh():
    for table in (entries._entries, entries._calls, entries._patterns, entries._warm):
        table.clear()


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=g).requires_grad_() for _ in range(3)]


def steps(x, bias, mod, mask):
    """Out and gradients of the last of three calls."""
    d_out = torch.linspace(-1, 1, 512).view(SHAPE)
    for _ in range(3):
        out = st.flex_attention(*x, mod, mask)
        made = torch.autograd.grad(out, [*x, bias], d_out)
    return [out.detach(), *made]


def biased():
    bias = torch.tensor([0.25, -0.5], requires_grad=True)

    def mod(s, b, h, i, j):
        return s + bias[h] * (j - i)

    return bias, mod


def of_object():
    class Mod:
        bias = torch.tensor([0.25, -0.5], requires_grad=True)

        def __call__(self, s, b, h, i, j):
            return s + self.bias[h] * (j - i)

    mod = Mod()
    return mod.bias, mod


def of_halves():
    """In 16 bits, shared by all heads, and read through indices that have no gradient."""
    bias = torch.linspace(-1, 1, 24).bfloat16().requires_grad_()
    place = torch.arange(16) % 5

    def mod(s, b, h, i, j):
        return s + bias[place[i] + place[j]]

    return bias, mod


def same(a, b):
    assert all(torch.equal(s, t) for s, t in zip(a, b))


@pytest.mark.parametrize("made", [biased, of_object, of_halves])
def test_same_bits_as_without_it(made, monkeypatch):
    x, mask = inputs(), st.create_block_mask("q >= kv", None, None, 16, 16, device="cpu")
    fresh()
    by_extension = steps(x, *made(), mask)
    calls = list(entries._calls.values())
    assert calls and all(c.warm is not None and c.warm_backward[1] is not None for c in calls)
    fresh()
    monkeypatch.setattr(warm, "extension", None)
    same(by_extension, steps(x, *made(), mask))
    assert not entries._warm


def test_texts_made_anew_are_one():
    """Texts with the same captures are one mod; of one layout they share a call."""
    fresh()
    x, t, d_out = inputs(), torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 512).view(SHAPE)
    numbers = [(0.5, 1.0), (0.5, 1.0), (0.5, 2.0), (-0.0, 2.0), (0.0, 2.0)]

    def of(w, a, c):
        score = st.score("(score + w[q] * a) * c", w=w, a=a, c=c)
        out = st.flex_attention(*x, score)
        return [out.detach(), *torch.autograd.grad(out, [*x, w], d_out)]

    def by_function(w, a, c):
        out = st.flex_attention(*x, lambda s, b, h, i, j: (s + w[i] * a) * c)
        return [out.detach(), *torch.autograd.grad(out, [*x, w], d_out)]

    leaf, made = t.clone().requires_grad_(), []
    for a, c in numbers:
        made.append(of(leaf, a, c))
    assert len(entries._calls) == 1
    assert len(entries._warm) == 1  # what came twice
    for i in range(3):
        other = (t + i).requires_grad_()
        same(of(other, 0.5, 1.0), of(other, 0.5, 1.0))
    assert len(entries._calls) == 1
    del leaf, other
    assert not entries._warm  # gone with what they captured
    for want, (a, c) in zip(made, numbers):
        same(want, by_function(t.clone().requires_grad_(), a, c))


def test_entries_keep_no_captures_alive():
    """Of functions and texts of one form, each called twice with a tensor of its own."""
    fresh()
    x, d_out = inputs(), torch.linspace(-1, 1, 512).view(SHAPE)
    forms = [
        lambda w: lambda s, b, h, i, j: s + w[j] * 0.5,
        lambda w: st.score("score + w[kv] * a", w=w, a=0.5),
    ]
    for form in forms:
        gone = []
        for i in range(4):
            w = torch.full((16,), float(i), requires_grad=True)
            for _ in range(2):
                torch.autograd.grad(st.flex_attention(*x, form(w)), [*x, w], d_out)
            gone.append(weakref.ref(w))
        del w
        assert [r() is None for r in gone[1:]] == [True] * 3  # the first has made the form


def test_texts_made_anew_keep_no_proofs():
    fresh()
    x = [t.detach() for t in inputs()]
    for n in range(3):
        st.flex_attention(*x, None, st.mask("kv <= q + n", n=n))
    assert not entries._entries and not entries._warm
    kept = st.mask("kv <= q + n", n=3)
    for _ in range(2):
        st.flex_attention(*x, None, kept)
    assert len(entries._entries) == 1


def test_captures_of_a_text_may_change():
    x, t = inputs(), torch.linspace(-1, 1, 16)
    mod = st.score("score + w[kv]", w=t)
    before = st.flex_attention(*x, mod)
    mod.captures["w"] = 2 * t
    after = st.flex_attention(*x, mod)
    assert not torch.equal(before, after)
    assert torch.equal(after, st.flex_attention(*x, lambda s, b, h, i, j: s + 2 * t[j]))
    mod.captures["w"] = [0.0]
    with pytest.raises(TypeError, match="w: got "):
        st.flex_attention(*x, mod)
    for a in (1, 2, 1 << 40):
        mod = AnyMod("score", "score * a", {"a": a})
        if a < 1 << 31:
            st.flex_attention(*x, mod)
    with pytest.raises(ValueError, match="^a: got 1099511627776"):
        st.flex_attention(*x, mod)


def test_what_changes_is_seen():
    """Values, layouts, flags and what takes part, one after the other on warm tables."""
    fresh()
    x, (bias, mod) = inputs(), biased()
    d_out = torch.linspace(-1, 1, 512).view(SHAPE)

    def dense():
        bend = bias[:, None, None] * (torch.arange(16) - torch.arange(16)[:, None])
        return torch.nn.functional.scaled_dot_product_attention(*x, bend)

    def holds():
        want = torch.autograd.grad(dense(), [*x, bias], d_out)
        for _ in range(3):
            out = st.flex_attention(*x, mod)
            for a, b in zip(torch.autograd.grad(out, [*x, bias], d_out), want):
                assert (a - b).abs().max() <= 2e-5 * b.abs().max()

    holds()
    with torch.no_grad():
        bias.mul_(-2.0)
    holds()
    x[0] = x[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    holds()
    d_out = torch.ones(()).expand(SHAPE)
    holds()
    x = [t.detach().clone().requires_grad_() for t in x]
    bias.data = torch.tensor([1.0, 0.5])
    holds()
    bias.requires_grad_(False)
    assert not st.flex_attention(*[t.detach() for t in x], mod).requires_grad
    bias.requires_grad_(True)
    assert st.flex_attention(*[t.detach() for t in x], mod).requires_grad
    with torch.no_grad():
        assert not st.flex_attention(*x, mod).requires_grad


def test_grad_mode_is_seen_where_captures_alone_need_gradients():
    fresh()
    x, (bias, mod) = [t.detach() for t in inputs()], biased()
    with torch.no_grad():
        assert not st.flex_attention(*x, mod).requires_grad
    st.flex_attention(*x, mod).square().sum().backward()
    bend = bias[:, None, None] * (torch.arange(16) - torch.arange(16)[:, None])
    dense = torch.nn.functional.scaled_dot_product_attention(*x, bend)
    (want,) = torch.autograd.grad(dense.square().sum(), bias)
    assert (bias.grad - want).abs().max() <= 2e-5 * want.abs().max()
    with torch.no_grad():
        assert not st.flex_attention(*x, mod).requires_grad


def test_identity_is_that_of_python():
    """Mods that the extension tells apart itself, and those that it leaves to Python."""
    t, p = torch.ones(2), torch.nn.Parameter(torch.ones(2))

    def around(x, y=None):
        return lambda s, b, h, i, j: s + x * (y or 1)

    def with_attribute(s, b, h, i, j):
        return s

    def with_empty_cell(s, b, h, i, j):
        return s + late

    with_attribute.note = 1
    held = [t, p, 1, 0, 0.0, -0.0, 2.5, "", "x", True, None, [1], 1j, around, torch.float32]
    mods = [around(x) for x in held] + [around(t, x) for x in (p, 0.0, 3, None)]
    mods += [None, "score", with_attribute, with_empty_cell, "".join, t, around, inputs]
    mods += [lambda s, b, h, i, j, x=t: s, lambda s, b, h, i, j, *, x=2: s]
    mods.append(of_object()[1].__call__)
    mods += [AnyMod("score", "score", {"x": x}) for x in held] + [st.mask("w[q] > 0", w=t)]
    for mod in mods:
        assert repr(warm.extension.identity(mod)) == repr(watch.identity(mod))
    assert warm.extension.identity(around(0.0)) != warm.extension.identity(around(-0.0))
    code = around(t).__code__
    assert warm.extension.identity(around(t))[0] == id(code)  # it did so itself
    late = 1


def test_entries_that_the_extension_looks_at(monkeypatch):
    """A mask and tensors alone; others are asked in Python."""
    fresh()
    mask = st.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 16, 16)
    for make, is_quick in ((biased, True), (of_object, False)):
        bias, mod = make()
        steps(inputs(), bias, mod, mask)
        quick = [e.quick for e in entries._entries.values()]
        assert [x is not None for x in quick] == [is_quick]
        asked = []
        monkeypatch.setattr(entries._Entry, "current", lambda e: asked.append(e))
        st.flex_attention(*inputs(), mod, mask)
        monkeypatch.undo()
        assert bool(asked) is not is_quick
        fresh()


def test_another_threads_layout_is_not_taken(monkeypatch):
    """Another thread's backward pass of the same call, while this one's runs."""
    fresh()
    x, d_out = inputs(), torch.linspace(-1, 1, 512).view(SHAPE)
    dense = torch.nn.functional.scaled_dot_product_attention(*x)
    want = torch.autograd.grad(dense, x, d_out)
    run = gradients._run

    def beside(call, known, given, captures, sinks):
        made = run(call, known, given, captures, sinks)
        turned = given[5].transpose(1, 2).contiguous().transpose(1, 2)
        others = *given[:5], turned, given[6]
        call.layout = None, gradients._Layout(call, (True,) * 3, others, captures, (0, 0))
        return made

    monkeypatch.setattr(gradients, "_run", beside)
    for _ in range(3):
        for a, b in zip(torch.autograd.grad(st.flex_attention(*x), x, d_out), want):
            assert (a - b).abs().max() <= 2e-5 * b.abs().max()
    (call,) = entries._calls.values()
    _, run, layout = call.warm_backward
    assert run is not None and layout is not call.layout[1]


def test_autocast_of_what_is_no_tensor_or_has_no_data():
    x = [t.detach() for t in inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        out = st.flex_attention(*[t.to("meta") for t in x])
        assert out.shape == SHAPE and out.device.type == "meta"
        for i, name in enumerate(("query", "key", "value")):
            with pytest.raises(TypeError, match=f"{name}: got "):
                st.flex_attention(*x[:i], [0.0], *x[i + 1 :])


def test_where_the_extension_is_looked_for(tmp_path, monkeypatch):
    folder = Path(abi.lib._name).resolve().parent
    (tmp_path / "saccade_warm.abi3.so").symlink_to(folder / "saccade_warm.abi3.so")
    with monkeypatch.context() as m:
        m.chdir(tmp_path)
        m.setattr(abi, "lib", SimpleNamespace(_name="libsaccade.so"))
        assert extension._load() is None
    assert extension._load() is not None
    suffixes = [s for s in importlib.machinery.EXTENSION_SUFFIXES if s != ".abi3.so"]
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", suffixes)
    assert extension._load() is None


def test_tables_keep_nothing_alive():
    fresh()
    x, (bias, mod) = inputs(), biased()
    for _ in range(3):
        st.flex_attention(*x, mod).sum().backward()
    gone = [weakref.ref(t) for t in (*x, bias)]
    assert entries._warm
    del x, bias, mod
    gc.collect()
    assert not entries._warm and not any(r() is not None for r in gone)


def test_entries_that_go_while_a_full_table_makes_room(monkeypatch):
    """As the weak references of another thread take them out: between iter and next."""

    class Shrinking(dict):
        def __iter__(self):
            found = super().__iter__()
            if len(self) == 3:
                del self[2]
            return found

    table = Shrinking({0: None, 1: None, 2: None})
    monkeypatch.setattr(entries, "_ENTRIES", 2)
    entries._keep(table, 3, SimpleNamespace(), [])
    assert list(table) == [1, 3]


def test_a_change_of_what_is_saved_is_an_error():
    x = inputs()
    for _ in range(3):
        out = st.flex_attention(*x)
        out.sum().backward()
    out = st.flex_attention(*x)
    with torch.no_grad():
        x[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_nodes_of_warm_calls():
    """What autograd does with them: twice, freed, recorded, with hooks, checked, run again."""
    from torch.utils.checkpoint import checkpoint

    fresh()
    x, (bias, mod) = inputs(), biased()
    given, d_out = [*x, bias], torch.linspace(-1, 1, 512).view(SHAPE)
    _, *want = steps(x, bias, mod, "q >= kv")

    def holds(out, **options):
        made = torch.autograd.grad(out, given, d_out, **options)
        same(made, want)
        return made

    def call():
        return st.flex_attention(*x, mod, "q >= kv")

    out = call()
    assert type(out.grad_fn).__name__ == "WarmBackward"
    holds(out, retain_graph=True)
    holds(out)
    with pytest.raises(RuntimeError, match="second time"):
        holds(out)
    with pytest.raises(NotImplementedError, match="second"):
        holds(call(), create_graph=True)[0].sum().backward()
    seen = []
    out = call()
    out.grad_fn.register_prehook(lambda g: seen.append(g[0]))
    out.grad_fn.register_hook(lambda made, g: seen.append(made[0]))
    holds(out)
    same(seen, [d_out, want[0]])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        holds(call())
    with torch.autograd.set_detect_anomaly(True):
        holds(call())
    holds(checkpoint(call, use_reentrant=False))
    with pytest.raises(RuntimeError, match="second time"):
        out.grad_fn.apply(d_out)
    same(torch.autograd.grad(call(), x[1:2], d_out), want[1:2])
    torch.autograd.backward(call() * 0 + call(), d_out)
    assert torch.isfinite(bias.grad).all()


def test_plans_are_made_for_few_numbers_of_keys():
    """Caches that grow key by key share one plan; cross attention says how many keys it has."""
    from saccade.torch.calls import _hints

    assert {_hints(1, n, None)[0] for n in range(1, 300)} == {0}
    assert [_hints(4096, n, None)[0] for n in (1, 77, 80, 81, 256, 257)] == [
        32, 80, 80, 96, 256, 0,
    ]  # fmt: skip
    assert _hints(4096, 77, object()) == (0, 320)  # a mask's tiles take none
    assert [_hints(64, n, None)[1] for n in (77, 320, 321)] == [320, 320, 0]
