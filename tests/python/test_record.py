"""Calls that torch records: export, make_fx and jit.trace give programs that compute what the
call did, in other processes too."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402

N = 48
BIAS = torch.rand(4, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(N) // 16


def tensors(seed=3):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 4, N, 16, generator=g) for _ in range(3))


def bias(s, b, h, i, j):
    return s + BIAS[h] * (j - i) * 2


def packed(b, h, i, j):
    return (i >= j) & (IDS[i] == IDS[j])


MASK = st.create_block_mask(packed, None, None, N, N)
CALLS = {
    "callable": lambda q, k, v, p: st.flex_attention(q, k, v, bias),
    "parameter": lambda q, k, v, p: st.flex_attention(q, k, v, lambda s, b, h, i, j: s * p[h]),
    "block mask": lambda q, k, v, p: st.flex_attention(q, k, v, bias, MASK),
    "text": lambda q, k, v, p: st.flex_attention(q, k, v, "score * 2", "q >= kv"),
    "text with captures": lambda q, k, v, p: st.flex_attention(
        q, k, v, st.score("score * w[h] * n", w=p, n=0.5), st.mask("x[q] == x[kv]", x=IDS)
    ),
    "lse": lambda q, k, v, p: st.flex_attention(q, k, v, None, packed, return_lse=True)[1],
    "made inside": lambda q, k, v, p: st.flex_attention(
        q, k, v, None, st.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N)
    ),
}  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.register_buffer("p", torch.rand(4, generator=torch.Generator().manual_seed(2)))

    def forward(self, q, k, v):
        return self.call(q, k, v, self.p)


def exported(model, inputs):
    return torch.export.export(model, inputs, strict=False).module()


def make_fx(model, inputs):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(model)(*inputs)


def jit_traced(model, inputs):
    return torch.jit.trace(model, inputs, check_trace=False)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("record", [exported, make_fx, jit_traced])
@pytest.mark.filterwarnings("ignore")
def test_recorded(name, record):
    model, x = Model(CALLS[name]), tensors(4)
    with torch.no_grad():
        want = model(*x)
        got = record(model, tensors())(*x)
    assert torch.equal(want, got)


LOADED = """
import sys, torch, saccade.torch as st
others = [st.create_block_mask("kv < 3", None, None, 48, 48) for _ in range(40)]
q, k, v, want = torch.load(sys.argv[2])
with torch.no_grad():
    got = torch.export.load(sys.argv[1]).module()(q, k, v)
print(torch.equal(got, want), len(others))
"""


def test_exported_block_mask_is_not_another_process_s(tmp_path):
    x = tensors()
    model = Model(CALLS["block mask"])
    with torch.no_grad():
        torch.export.save(torch.export.export(model, x, strict=False), tmp_path / "model.pt2")
        torch.save((*x, model(*x)), tmp_path / "tensors")
    command = [sys.executable, "-c", LOADED, tmp_path / "model.pt2", tmp_path / "tensors"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "40"], done.stderr


@pytest.mark.skipif(
    not st.masks.graphs_take_callables, reason="a torch whose graphs take no callables"
)
def test_strict_export_holds_index_tensors(tmp_path):
    """Where torch.compile would know the mask by a number of this process."""
    whole = lambda q, k, v, p: st.flex_attention(q, k, v, None, MASK)  # noqa: E731
    rows = lambda q, k, v, p: st.flex_attention(q, k, v, None, MASK[:, :, :1])  # noqa: E731
    x = tensors()
    for call in (whole, rows):
        model = Model(call)
        with torch.no_grad():
            made = torch.export.export(model, x, strict=True)
            torch.export.save(made, tmp_path / "model.pt2")
            torch.save((*x, model(*x)), tmp_path / "tensors")
        command = [sys.executable, "-c", LOADED, tmp_path / "model.pt2", tmp_path / "tensors"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.split() == ["True", "40"], done.stderr


class Documents(torch.nn.Module):
    """Makes its mask from a buffer, or from an input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.arange(N) // 16)

    def forward(self, q, ids=None):
        ids = self.ids if ids is None else ids
        live = st.create_block_mask(
            lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, N, N, device="cpu"
        )
        return st.flex_attention(q, q, q, None, live)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic", "export"])
def test_masks_made_inside_of_what_is_recorded(tracing):
    """From a tensor whose values are not there yet: other values give other masks."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model, q = Documents(), tensors()[0]
    other = torch.arange(N) // 5
    with torch.no_grad():
        if tracing == "export":
            made = torch.export.export(model, (q, other * 0), strict=False).module()
            buffers = torch.export.export(model, (q,), strict=False).module()
            assert torch.equal(buffers(q), model(q))
        else:
            made = make_fx(lambda q, ids: model(q, ids), tracing_mode=tracing)(q, other * 0)
        for ids in (model.ids, other):
            assert torch.equal(made(q, ids), model(q, ids))


def test_masks_of_tensors_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def mask():
        return st.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, N, N, "cpu")

    whole, (q, k, v) = mask(), tensors()
    with FakeTensorMode():
        x = torch.randn(2, 4, N, 16)
        for live in (mask(), whole, MASK, "q >= kv"):
            assert st.flex_attention(x, x, x, bias, live).shape == x.shape
        ids = torch.arange(N)
        made = st.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], 1, 1, N, N, "cpu")
        assert made.shape == (1, 1, N, N) and st.flex_attention(x, x, x, None, made).is_cpu
        with pytest.raises(NotImplementedError, match="flex_attention to take it as it is"):
            made.kv_indices  # noqa: B018
    f = lambda q: st.flex_attention(q, q, q, None, whole)  # noqa: E731
    with pytest.raises(NotImplementedError, match="expected it inside"):
        make_fx(f, tracing_mode="fake")(q)
    given = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(q)
    assert torch.equal(given(k), f(k))


def test_a_changed_mask_is_recorded_as_it_is_now():
    mask = st.create_block_mask(packed, None, None, N, N)
    model, x = Model(lambda q, k, v, p: st.flex_attention(q, k, v, None, mask)), tensors()
    with torch.no_grad():
        exported(model, x)
        mask.mask_mod = lambda b, h, i, j: (i >= j) & (IDS[i] == IDS[j]) & (j % 2 == 0)
        assert torch.equal(exported(model, x)(*x), model(*x))


def test_dispatch_modes_see_one_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = tensors()
    want = st.flex_attention(q, k, v, bias, MASK)
    with Mode():
        assert torch.equal(st.flex_attention(q, k, v, bias, MASK), want)
    assert [name for name in seen if name.startswith("saccade")] == ["saccade.flex.default"]


def test_what_records_nothing():
    """Serving calls are errors there; flex_attention is recorded before autograd too."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q = torch.randn(1, 2, 5, 8)
    early = make_fx(lambda q: st.flex_attention(q, q, q, "score + kv"), pre_dispatch=True)(q)
    assert torch.equal(early(q + 1), st.flex_attention(q + 1, q + 1, q + 1, "score + kv"))
    for record in (make_fx, lambda f: make_fx(f, pre_dispatch=True)):
        with pytest.raises(NotImplementedError, match="got cached_attention inside of make_fx"):
            record(lambda q: st.cached_attention(q, q, q))(q)


def test_operations_are_counted():
    """By all of Q x KV, as FlexAttention's are, in eager calls and in graphs."""
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.randn(2, 4, 30, 16, requires_grad=True)
    k = torch.randn(1, 2, 40, 16, requires_grad=True)
    v = torch.randn(1, 2, 40, 24, requires_grad=True)

    def f(q, k, v, live=None):
        return st.flex_attention(q, k, v, block_mask=live, enable_gqa=True)

    one = 2 * 2 * 4 * 30 * 40
    calls = (f, lambda *x: f(*x, packed), torch.compile(f, backend="aot_eager"))
    for call in calls:
        with FlopCounterMode(display=False) as counted:
            out = call(q, k, v)
            assert counted.get_total_flops() == one * (16 + 24)
            out.sum().backward()
        assert counted.get_total_flops() == one * (16 + 24) + one * (3 * 16 + 2 * 24)


def test_a_profile_names_the_call():
    q = torch.randn(1, 2, 8, 16)
    for call in (st.flex_attention, torch.func.vmap(st.flex_attention)):
        x = q if call is st.flex_attention else q.unsqueeze(0)
        with torch.profiler.profile() as profile:
            call(x, x, x)
        named = [e for e in profile.key_averages() if e.key == "saccade::flex_attention"]
        assert len(named) == 1 and named[0].count == 1
