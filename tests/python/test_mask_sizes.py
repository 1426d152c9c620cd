"""Block masks that read what create_block_mask is not told: b, h and sizes of calls."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402
from saccade.c import objects  # noqa: E402
from saccade.torch import masks  # noqa: E402

B, H, HKV, N, D, DV = 2, 4, 2, 256, 32, 16
GIVEN = [(None, None), (B, H)]
# all with whole blocks, absent ones, and ones that are neither
TEXTS = {
    "kv % 7 != q % 7 && kv < D * 4": lambda b, h: 4 * D,
    "kv < D * 4": lambda b, h: 4 * D,
    "kv % 7 != q % 7 && kv < Dv * 9": lambda b, h: 9 * DV,
    "kv % 7 != q % 7 && kv < Hkv * 64": lambda b, h: 64 * HKV,
    "kv % 7 != q % 7 && kv < H * 32": lambda b, h: 32 * H,
    "kv % 7 != q % 7 && kv < (h + 1) * 60": lambda b, h: (h + 1) * 60,
    "kv < (h + 1) * 60": lambda b, h: (h + 1) * 60,
    "kv % 7 != q % 7 && kv < (b + 1) * 120": lambda b, h: (b + 1) * 120,
    "kv % 7 != q % 7 && kv < b * 120 + B * D + h": lambda b, h: b * 120 + B * D + h,
}


def tensors(batch=B):
    g = torch.Generator().manual_seed(7)
    shapes = (batch, H, N, D), (batch, HKV, N, D), (batch, HKV, N, DV)
    return [torch.randn(*s, generator=g) for s in shapes]


def expected(text, q, k, v, keys=N):
    i, j = torch.arange(N)[:, None], torch.arange(keys)
    at = range(q.shape[0]), range(H)
    live = torch.stack([torch.stack([j < TEXTS[text](b, h) for h in at[1]]) for b in at[0]])
    live = live[:, :, None].expand(-1, -1, N, -1)
    live = live & (j % 7 != i % 7) if "%" in text else live
    k, v = (t[:, :, :keys].repeat_interleave(H // HKV, 1) for t in (k, v))
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(~live, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0) @ v


def attend(q, k, v, mask):
    return st.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def close(x, y):
    torch.testing.assert_close(x, y, atol=2e-5, rtol=0)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("text", TEXTS)
def test_a_call_has_its_own_sizes(text, given):
    q, k, v = tensors()
    mask = st.create_block_mask(text, *given, N, N, BLOCK_SIZE=32)
    for made in (mask, text, copy.deepcopy(mask), mask[:, :, :]):
        close(attend(q, k, v, made), expected(text, q, k, v))
    lists = mask.full_kv_num_blocks, mask.kv_num_blocks
    assert any(t.any() for t in lists)
    q, k, v = tensors(1)
    first = mask if given[0] is None else st.create_block_mask(text, 3, H, N, N)
    if "B" not in text:
        close(attend(q, k, v, first), expected(text, q, k, v))


def test_a_function_that_reads_the_head():
    q, k, v = tensors()

    def live(b, h, i, j):
        return (j % 7 != i % 7) & (j < (h + 1) * 60)

    text = "kv % 7 != q % 7 && kv < (h + 1) * 60"
    for given in ((None, None), (None, H), (B, None)):
        mask = st.create_block_mask(live, *given, N, N)
        close(attend(q, k, v, mask), expected(text, q, k, v))


def test_lists_hold_for_all_dims():
    """Slices and copies are made of lists, which are whole blocks for any D."""
    text = "kv % 7 != q % 7 && kv < D * 4"
    q, k, v = tensors()
    mask = st.create_block_mask(text, B, H, N, N, BLOCK_SIZE=32)
    part = attend(q[:, :, 32:], k, v, mask[:, :, 1:])
    close(part, expected(text, q, k, v)[:, :, 32:])
    for B_H in GIVEN:
        head = st.create_block_mask("kv < (h + 1) * 60", *B_H, N, N, BLOCK_SIZE=32)
        part, live = attend(q[:, :, 32:], k, v, head[:, :, 1:]), "kv < (h + 1) * 60"
        close(part, expected(live, q, k, v)[:, :, 32:])
    always = st.create_block_mask("kv <= q || kv < D", B, H, N, N, BLOCK_SIZE=32)
    assert always.full_kv_num_blocks.sum() == B * H * (N // 32) * (N // 32 - 1) / 2
    with pytest.raises(ValueError, match="got a text that reads D"):
        st.create_mask(text, B, H, N, N)


def test_crops_keep_their_sizes():
    text = "kv % 7 != q % 7 && kv < (h + 1) * 60"
    q, k, v = tensors()
    mask = st.create_block_mask(text, None, None, N, N)._adjust(N, 200)
    found = attend(q, k[:, :, :200], v[:, :, :200], mask)
    close(found, expected(text, q, k, v, 200))


def test_gradients():
    text = "kv % 7 != q % 7 && kv < b * 120 + B * D + h"
    both = []
    for f in (lambda *x: attend(*x, st.create_block_mask(text, None, None, N, N)),
              lambda *x: expected(text, *x)):  # fmt: skip
        given = [t.requires_grad_() for t in tensors()]
        both.append(torch.autograd.grad(f(*given).square().sum(), given))
    for x, y in zip(*both):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=0)


@pytest.mark.parametrize("text", ["kv < D * 4", "kv % 7 != q % 7 && kv < (h + 1) * 60"])
def test_a_call_that_is_recorded(text):
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = tensors()
    mask = st.create_block_mask(text, None, None, N, N)
    made = make_fx(lambda *x: attend(*x, mask))(q, k, v)
    close(made(q, k, v), expected(text, q, k, v))


@pytest.mark.parametrize("text", ["kv < D * 4", "kv % 7 != q % 7 && kv < (h + 1) * 60"])
def test_graphs(text):
    q, k, v = tensors()
    mask = st.create_block_mask(text, None, None, N, N)

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, mask)

    compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
    exported = torch.export.export(Model(), (q, k, v)).module()
    for model in (compiled, exported):
        close(model(q, k, v), expected(text, q, k, v))


def test_a_mapped_call():
    text = "kv % 7 != q % 7 && kv < (b + 1) * 120"
    q, k, v = tensors()
    mask = st.create_block_mask(text, None, None, N, N)
    both = [torch.stack([t, t]) for t in (q, k, v)]
    found = torch.func.vmap(lambda *x: attend(*x, mask))(*both)
    close(found, torch.stack([expected(text, q, k, v)] * 2))


def test_explain_and_check_take_them():
    q, k, v = tensors()
    mask = st.create_block_mask("kv < D * 4", None, None, N, N, BLOCK_SIZE=32)
    assert "50.0 % not computed" in st.explain(q, k, v, block_mask=mask)
    st.check(q, k, block_mask=mask)


def test_proven_once_for_a_size(monkeypatch):
    q, k, v = tensors()
    mask = st.create_block_mask("kv < D * 4 + h", None, None, N, N)
    made = []
    create = objects.block_mask_create
    for module in (objects, masks.objects):
        monkeypatch.setattr(
            module, "block_mask_create", lambda *x, **y: made.append(1) or create(*x, **y)
        )
    attend(q, k, v, mask)
    assert len(made) == 1
    attend(q, k, v, mask)
    attend(q.double(), k.double(), v.double(), mask)
    assert len(made) == 1
    plain = st.create_block_mask("kv <= q", None, None, N, N)
    made.clear()
    attend(q, k, v, plain)
    assert not made


class At:
    def __getitem__(self, index):
        return index


AT, M = At(), 300


def of_all(b, h, q, kv):
    return q + h * 64 >= kv + b * 32


def right(mask, picked, x):
    """A call with the mask, against PyTorch's with what of_all says of these entries of x."""
    axes = torch.meshgrid(*map(torch.arange, (*x.shape[:2], M, M)), indexing="ij")
    live, x = of_all(*axes)[picked], x[picked]
    want = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=live)
    got = st.flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(got, want.nan_to_num(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("B, H", [(None, 4), (3, None), (None, None), (3, 4)])
def test_slices_of_masks_that_read_b_and_h(B, H):
    x = torch.randn(3, 4, M, 16)
    made = st.create_block_mask(of_all, B, H, M, M)
    right(made, AT[:], x)
    if H:
        right(made[:, 1:3], AT[:, 1:3], x)
        right(made[:, 2], AT[:, 2:3], x)
    if B:
        right(made[1], AT[1:2], x)
        right(made[[2, 0]], AT[[2, 0]], x)
    assert made[0].is_anywhere == made.is_anywhere


def test_one_kind_of_blocks_is_right_too():
    made = st.create_block_mask(of_all, None, None, M, M, separate_full_blocks=False)
    right(made, AT[:], torch.randn(3, 4, M, 16))


@pytest.mark.parametrize("mod", [lambda b, h, q, kv: q >= kv, of_all])
def test_exports_leave_batches_open(mod):
    """Not only of masks that read no size."""
    made = st.create_block_mask(mod, None, None, M, M)

    class Model(torch.nn.Module):
        def forward(self, x):
            return st.flex_attention(x, x, x, block_mask=made)

    batches = torch.export.Dim("batches", min=2, max=64)
    x, y = torch.randn(3, 4, M, 16), torch.randn(5, 4, M, 16)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: batches},))
    for t in (x, y):
        torch.testing.assert_close(program.module()(t), Model()(t))


def test_indices_of_a_calls_sizes_are_checked():
    keys, doc = torch.rand(2, M) > 0.2, torch.zeros(2, M, dtype=torch.int32)
    x, k = torch.randn(3, 4, M, 16), torch.randn(3, 2, M, 16)
    made = st.create_block_mask(st.mask("keys[h * Hkv / H, kv]", keys=keys), None, 4, M, M)
    got = st.flex_attention(x, k, k, block_mask=made, enable_gqa=True)
    live, k = keys.repeat_interleave(2, 0)[None, :, None], k.repeat_interleave(2, 1)
    want = torch.nn.functional.scaled_dot_product_attention(x, k, k, attn_mask=live)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    made = st.create_block_mask(lambda b, h, q, kv: doc[b, q] == doc[b, kv], None, None, M, M)
    st.flex_attention(x[:2], x[:2], x[:2], block_mask=made)
    with pytest.raises(IndexError, match="got index 2 in dimension 0"):
        st.flex_attention(x, x, x, block_mask=made)
