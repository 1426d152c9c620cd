"""scaled_dot_product_attention beside PyTorch's, on the CPU and, where it is, on CUDA."""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

from saccade.torch import scaled_dot_product_attention  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
theirs = F.scaled_dot_product_attention
B, H, L, S, D = 2, 4, 20, 30, 16
MASKS = [(L, S), (1, S), (B, 1, 1, S), (H, L, S), (B, H, L, S), (1, H, L, S), (B, 1, L, S)]


class Meaning(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    pass


def tensors(*shapes, device="cpu"):
    g = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(*shape, generator=g).to(device) for shape in shapes]


def both(inputs, mask=None, **options):
    """Results and gradients of both, with respect to a mask of floats too."""
    found = []
    for fn in (scaled_dot_product_attention, theirs):
        x = [t.clone().requires_grad_() for t in inputs]
        m = mask
        if mask is not None and mask.is_floating_point():
            m = mask.clone().requires_grad_()
        out = fn(*x, m, **options)
        wanted = x if m is mask else [*x, m]
        found.append((out, *torch.autograd.grad(out.square().sum(), wanted)))
    return found


def agree(inputs, mask=None, **options):
    ours, wanted = both(inputs, mask, **options)
    for a, b in zip(ours, wanted):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}, {"mask": True}])
@pytest.mark.parametrize("no", ["keys", "rows", "heads", "batch", "width", "values", "both"])
def test_sizes_of_nothing(no, options):
    """Zeros where there is no key, and equal weights where there is no dimension."""
    sizes = dict(keys=S, rows=L, heads=H, batch=B, width=D, values=8)
    sizes.update(dict(width=0, values=0) if no == "both" else {no: 0})
    n, h, rows, keys = (sizes[x] for x in ("batch", "heads", "rows", "keys"))
    shapes = [(n, h, rows, sizes["width"]), (n, h, keys, sizes["width"])]
    inputs = tensors(*shapes, (n, h, keys, sizes["values"]))
    options = dict(options)
    mask = torch.ones(rows, keys, dtype=torch.bool) if options.pop("mask", False) else None
    agree(inputs, mask, **options)
    if n and h:
        agree([t[0] for t in inputs], mask, **options)
        grouped = [inputs[0], *(t[:, ::2] for t in inputs[1:])]
        agree(grouped, mask, enable_gqa=True, **options)


def test_no_keys_in_a_graph():
    inputs = tensors((B, H, L, D), (B, H, 0, D), (B, H, 0, D))
    for backend in ("eager", "aot_eager"):
        made = torch.compile(scaled_dot_product_attention, fullgraph=True, backend=backend)
        assert torch.equal(made(*inputs), torch.zeros(B, H, L, D))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows, keys", [(16, 16), (L, S), (1, S), (S, L)])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_torch(bias, rows, keys, device):
    inputs = tensors((B, H, rows, D), (B, H, keys, D), (B, H, keys, 8), device=device)
    made = bias(rows, keys)
    lower = keys - rows if bias is causal_lower_right else 0
    dense = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(lower)
    q, k, v = (t.clone().requires_grad_() for t in inputs)
    out = scaled_dot_product_attention(q, k, v, made)
    alive = dense.any(1)
    wanted = theirs(q, k, v, dense)[:, :, alive]
    torch.testing.assert_close(out[:, :, alive], wanted, atol=3e-5, rtol=3e-5)
    assert not out[:, :, ~alive].any()
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    for a, b in zip(found, torch.autograd.grad(wanted.square().sum(), (q, k, v))):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_of_every_shape(shape, device):
    inputs = tensors((B, H, L, D), (B, H, S, D), (B, H, S, 8), device=device)
    (floats,) = tensors(shape, device=device)
    agree(inputs, floats)
    live = floats < 0.5
    live[..., 0] = True  # what a row without any key is differs
    agree(inputs, live)


@pytest.mark.parametrize(
    "query, key",
    [
        ((L, D), (S, D)),
        ((H, L, D), (H, S, D)),
        ((3, B, H, L, D), (3, B, H, S, D)),
        ((1, H, L, D), (B, H, S, D)),
        ((B, H, L, D), (1, 1, S, D)),
    ],
    ids=str,
)
def test_leading_dimensions(query, key):
    inputs = tensors(query, key, key)
    agree(inputs)
    agree(inputs, is_causal=True)
    agree(inputs, *tensors((L, S)), scale=0.3)


def test_masks_of_subclasses_with_memory():
    q, k, v = tensors((B, H, L, D), (B, H, S, D), (B, H, S, D))
    (mask,) = tensors((L, S))
    for made in (mask.as_subclass(Plain), torch.nn.Parameter(mask)):
        found = scaled_dot_product_attention(q, k, v, made)
        torch.testing.assert_close(found, theirs(q, k, v, mask))


def test_masks_of_several_batches():
    inputs = tensors((3, B, H, L, D), (3, B, H, S, D), (3, B, H, S, D))
    agree(inputs, *tensors((3, 1, 1, 1, S)))
    agree(inputs, *tensors((1, 1, H, L, S)))
    agree(inputs, *tensors((3, B, 1, L, S)))


def test_grouped_heads():
    inputs = tensors((B, H, L, D), (B, 2, S, D), (B, 2, S, D))
    agree(inputs, enable_gqa=True)
    agree(inputs, *tensors((B, 1, 1, S)), enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(*inputs)


def test_rows_that_see_nothing_are_zeros():
    q, k, v = tensors((B, H, L, D), (B, H, S, D), (B, H, S, D))
    live = torch.ones(L, S, dtype=torch.bool)
    live[3] = False
    for mask in (live, torch.zeros(L, S).masked_fill(~live, -float("inf"))):
        out = scaled_dot_product_attention(q, k, v, mask)
        assert not out[:, :, 3].any()
        assert out.isfinite().all()


def test_takes_its_place_in_a_model(monkeypatch):
    calls = []

    def counted(*arguments, **options):
        calls.append(options)
        return scaled_dot_product_attention(*arguments, **options)

    torch.manual_seed(1)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(B, 10, 32)
    padding = torch.zeros(B, 10, dtype=torch.bool)
    padding[0, 8:] = True
    want = layer(x, x, x, need_weights=False, key_padding_mask=padding)[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    out = layer(x, x, x, need_weights=False, key_padding_mask=padding)[0]
    assert len(calls) == 1
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_dropout_is_drawn():
    q, k, v = tensors((B, H, L, D), (B, H, S, D), (B, H, S, D))
    torch.manual_seed(3)
    first = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    again = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert not torch.equal(first, again)
    assert torch.equal(first, scaled_dot_product_attention(q, k, v, dropout_p=0.5))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mask", ["bool", "floats", "learned"])
def test_modules_of_torch_in_a_full_graph(monkeypatch, mask, dynamic):
    """torch.compile takes their functional forms whole, so that the call is recorded below it:
    with tensors of functionalisation and floats that are left open."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x, bias = torch.randn(3, 20, 32), torch.randn(20, 20)
    given = bias > 1 if mask == "bool" else bias.requires_grad_(mask == "learned")
    learned = [*module.parameters(), *([given] if mask == "learned" else [])]

    def run(f):
        out = f(x, x, x, need_weights=False, attn_mask=given)[0]
        return out, *torch.autograd.grad(out.square().sum(), learned)

    want = run(module)
    name = "scaled_dot_product_attention"
    monkeypatch.setattr(torch.nn.functional, name, scaled_dot_product_attention)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(run(compiled), want, rtol=1e-4, atol=1e-4)


def test_in_a_full_graph():
    q, k, v = tensors((B, H, L, D), (B, H, S, D), (B, H, S, D))
    (mask,) = tensors((B, 1, 1, S))
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    bias = causal_lower_right(L, S)
    torch.testing.assert_close(compiled(q, k, v, bias), theirs(q, k, v, bias))
    torch.testing.assert_close(compiled(q, k, v, mask), theirs(q, k, v, mask))
    torch.testing.assert_close(
        compiled(q, k, v, is_causal=True), theirs(q, k, v, is_causal=True)
    )


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"attn_mask": torch.zeros(2, S)}, ValueError, r"got shape \[2, 30\], expected one"),
        ({"attn_mask": torch.zeros(1, 1, 1, L, S)}, ValueError, "attn_mask: got shape"),
        ({"attn_mask": torch.zeros(L, S), "is_causal": True}, ValueError, "got True beside"),
        ({"attn_mask": torch.zeros(L, S, dtype=torch.int32)}, ValueError, "got torch.int32"),
        ({"attn_mask": "causal"}, TypeError, "attn_mask: got 'causal', expected a tensor"),
        (
            {"attn_mask": causal_lower_right(1, S)},
            ValueError,
            "got a causal bias of 1 queries and 30 keys, expected 20 and 30",
        ),
        (
            {"attn_mask": causal_upper_left(L, S), "is_causal": True},
            ValueError,
            "got True beside",
        ),
        (
            {"attn_mask": torch.zeros(L, S).as_subclass(Meaning)},
            TypeError,
            "got a Meaning, whose __torch_function__ says what it means, expected",
        ),
        ({"query": 1}, TypeError, "query: got 1, expected a tensor"),
        ({"query": torch.zeros(D)}, ValueError, r"query: got shape \[16\]"),
        ({"key": torch.zeros(B, 3, S, D)}, ValueError, "leading dimensions"),
        ({"dropout_p": 2}, ValueError, "dropout_p: got 2"),
    ],
)
def test_what_cannot_be_is_said(change, error, text):
    q, k, v = tensors((B, H, L, D), (B, H, S, D), (B, H, S, D))
    with pytest.raises(error, match=text):
        scaled_dot_product_attention(**{"query": q, "key": k, "value": v, **change})


def test_what_is_empty_is_checked_too():
    q, none = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 0, 8)
    with pytest.raises(ValueError, match="key: got torch.float64"):
        scaled_dot_product_attention(q, none.double(), none.double())
    with pytest.raises(ValueError, match="of one last dimension"):
        scaled_dot_product_attention(q, none[..., :7], none)
