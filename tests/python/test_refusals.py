"""Wrong arguments of the public functions: one clear line each, by their names."""

import inspect
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

import saccade.torch as st  # noqa: E402

Q = torch.zeros(1, 2, 8, 16)
PACKED = torch.zeros(8, 2, 16)
STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)
CALLS = {
    "flex_attention": lambda **more: st.flex_attention(Q, Q, Q, **more),
    "explain": lambda **more: st.explain(Q, Q, Q, **more),
    "cached_attention": lambda **more: st.cached_attention(Q, Q, Q, **more),
    "varlen_attention": lambda **more: st.varlen_attention(
        PACKED, PACKED, PACKED, STARTS, **more
    ),
}
OF_ALL = list(CALLS)


def refused(call, names, kinds=(TypeError, ValueError), **more):
    """The message: one line that says which argument, what it got and what it expected."""
    with pytest.raises(kinds) as found:
        call(**more)
    text = str(found.value)
    assert "\n" not in text and "got" in text and "expected" in text, text
    assert text.startswith(names), text
    return text


@pytest.mark.parametrize("name", OF_ALL)
@pytest.mark.parametrize(
    "scale", [float("nan"), float("inf"), "x", [1.0], {}, torch.ones(2), True]
)
def test_a_scale_that_is_no_finite_number(name, scale):
    refused(CALLS[name], "scale", scale=scale)


@pytest.mark.parametrize("name", OF_ALL)
@pytest.mark.parametrize("scale", [1, torch.tensor(1.0)])
def test_numbers_are_scales(name, scale):
    made, plain = CALLS[name](scale=scale), CALLS[name](scale=1.0)
    assert made == plain if isinstance(made, str) else torch.equal(made, plain)


@pytest.mark.parametrize("name", OF_ALL)
@pytest.mark.parametrize(
    "options", [[1], "x", 3, torch.ones(2), {1: 2}, {"BATCH_INVARIANT": torch.ones(2)}]
)
def test_kernel_options_that_are_none(name, options):
    refused(CALLS[name], "kernel_options", kernel_options=options)


def test_flags_and_rates():
    call = CALLS["flex_attention"]
    for name in ("return_lse", "enable_gqa"):
        for x in (torch.ones(2), [1], "x"):
            refused(call, name, **{name: x})
    refused(CALLS["explain"], "verbose", verbose=torch.ones(2))
    for x in (3, "x", torch.ones(2)):
        refused(call, "return_aux", return_aux=x)
        refused(call, "dropout_p", dropout_p=x)
    refused(call, "sinks", sinks=3)
    refused(st.flex_attention, "query", query=3, key=Q, value=Q, sinks=torch.zeros(2))
    both = NotImplementedError, ValueError
    refused(st.flex_attention, "query", both, query=Q[0], key=Q, value=Q, sinks=Q[0, 0, 0])


WRONG = [None, "x", 1.5, [1], torch.ones(2), torch.zeros(2, 3).to_sparse(), object(), int]


def lengths(*n):
    return torch.tensor(n, dtype=torch.int32)


def cache():
    made = st.PagedCache(2, pages=8, page=4, sequences=4, heads=2, head_dim=16)
    made.step([made.add(), made.add()], [3, 3])
    return made


def test_rows_that_are_not_tensors():
    rows = torch.zeros(6, 2, 16)
    pools = dict(key_pool=torch.zeros(6, 2, 4, 16), value_pool=torch.zeros(6, 2, 4, 16))
    kinds = TypeError, ValueError
    for x in WRONG[1:]:
        given = dict(key=rows, value=rows, slots=torch.arange(6), **pools)
        for name in given:
            refused(st.append_keys, name, kinds, **{**given, name: x})
        starts = dict(cu_seqlens_q=STARTS)
        given = dict(query=PACKED, key=PACKED, value=PACKED, **starts)
        for name in given:
            refused(st.varlen_attention, name, kinds, **{**given, name: x})
        if x is not int:
            refused(st.check, "query", kinds, query=x, key=Q)
            refused(st.quantize, "x", kinds, x=x)


def without_memory():
    from torch.masked import masked_tensor
    from torch.nn.attention.bias import causal_upper_left

    with FakeTensorMode():
        fake = torch.zeros(8, 8)
    emptied = torch.zeros(8, 8)
    emptied.untyped_storage().resize_(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = masked_tensor(torch.zeros(8, 8), torch.ones(8, 8, dtype=torch.bool))
        rows = torch.eye(8).to_sparse_csr()
    memory = "has no memory of its own"
    return [(fake, memory), (masked, memory), (causal_upper_left(8, 8), memory),
            (emptied, "whose storage was resized to 0"), (rows, "layout"),
            (torch.eye(8).to_sparse(), "layout")]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_ALL)
def test_captures_without_memory(name):
    key = "score_mod" if name in ("flex_attention", "explain") else "score"
    for bad, text in without_memory():
        places = "0, q, kv" if bad.dim() == 3 else "q, kv"  # a causal bias is of one batch
        mods = [st.score(f"score + bias[{places}]", bias=bad)]
        if isinstance(bad, FakeTensor) or type(bad) is torch.Tensor:
            mods.append(reads(bad))
        for mod in mods:
            said = refused(CALLS[name], "bias: got", **{key: mod})
            assert text in said, said


@pytest.mark.parametrize(
    "kind, text, captures, said",
    [
        ("mask", "score > 0", {}, "got 'score' in a mask"),
        ("score", "causal()", {}, "a score's result: got bool, expected float"),
        ("mask", "q - kv <", {}, "got the end of the text"),
        ("mask", "q - kv < q", {"q": 1}, "q: got a value for it, but it is an index variable"),
        ("mask", "q - kv < abs", {"abs": 1}, "got 'abs' without arguments"),
        ("mask", "q - kv < W", {"w": 3}, "w: got a value for it, but the text does not use it"),
        ("mask", "q - kv < W", {}, "got no value for 'W', expected"),
        ("score", "score + w[h]", {"w": Q}, "got 'w' of rank 4, expected rank 1"),
        ("score", "score + w", {"w": Q[0, 0, 0, 0] * 1j}, "w: got a tensor of torch.complex64"),
        ("score", "score + w", {"w": 1 << 40}, "w: got 1099511627776, expected"),
        ("score", "score + w", {"w": "1"}, "w: got a str among the captures, expected"),
    ],
)
def test_texts_are_looked_at_as_they_are_made(kind, text, captures, said):
    with pytest.raises((ValueError, TypeError), match=said):
        getattr(st, kind)(text, **captures)


def reads(bias):
    return lambda s, b, h, q, kv: s + bias[q, kv]


def test_rows_without_memory():
    emptied = torch.zeros(8, 2, 16)
    emptied.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="query: got a tensor of shape .* resized to 0"):
        st.varlen_attention(emptied, PACKED, PACKED, STARTS)
    with FakeTensorMode():
        fake, one = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        rows, sinks = torch.zeros(1, 2, 8, 16), torch.zeros(2)
    for name, call in (
        ("cu_seqlens_q", lambda: st.varlen_attention(PACKED, PACKED, PACKED, fake)),
        ("query", lambda: st.cached_attention(rows, Q, Q)),
        ("seq_lens", lambda: st.cached_attention(Q, Q, Q, seq_lens=one)),
        ("sinks", lambda: st.cached_attention(Q, Q, Q, sinks=sinks)),
        ("x", lambda: st.quantize(rows, "i8")),
    ):
        with pytest.raises(TypeError, match=f"^{name}: got a FakeTensor, which has no memory"):
            call()


def test_numbers_of_caches():
    made = dict(pages=8, page=4, sequences=4, heads=2, head_dim=16)
    for x in [x for x in WRONG if x != "x"]:
        for name in made:
            refused(st.PagedCache, name, layers=2, **{**made, name: x})
        refused(st.PagedCache, "layers", layers=x, **made)
        refused(cache().step, "sequences", sequences=[x], counts=[1])
        refused(cache().step, "counts", sequences=[0], counts=[x])
        refused(cache().truncate, "length", sequence=0, length=x)
        refused(cache().drop, "first", sequence=0, first=x)
        refused(cache().fork, "sequence", sequence=x)
    refused(st.PagedCache, "dtype", layers=1, dtype=3, **made)
    refused(st.PagedCache, "scale_dtype", layers=1, dtype="i8", scale_dtype="f32", **made)
    refused(cache().step, "sequences", sequences=3, counts=[1])


def test_what_a_step_appends():
    rows = torch.zeros(6, 2, 16)
    for layer in (2, -3, "x", None, 1.0):
        refused(cache().append, "layer", IndexError, layer=layer, key=rows, value=rows)
        refused(cache().attend, "layer", IndexError, layer=layer, query=Q)
    for key, name in ((rows[:5], "key"), (rows[:, :1], "key"), (rows[..., :8], "key"),
                      (rows[0], "key"), (None, "key")):  # fmt: skip
        refused(cache().append, name, layer=0, key=key, value=rows)
    for value in (rows[:5], rows[:, :1], rows[..., :8]):
        refused(cache().append, "value", layer=0, key=rows, value=value)
    more = torch.zeros(9, 2, 16)
    cache().append(0, more, more)  # what a graph pads with goes nowhere


def test_lengths_of_masks():
    make = dict(mask_mod="q >= kv", B=1, H=1, Q_LEN=5, KV_LEN=5, device="cpu")
    for x in WRONG:
        for name in ("Q_LEN", "KV_LEN"):
            refused(st.create_block_mask, name, **{**make, name: x})
        if x is not None:
            refused(st.create_block_mask, "B", **{**make, "B": x})
            refused(st.create_block_mask, "BLOCK_SIZE", BLOCK_SIZE=x, **make)
    for size in ((1, 2, 3), (1,), (0, 4), (2.0, 4)):
        refused(st.create_block_mask, "BLOCK_SIZE", BLOCK_SIZE=size, **make)
    refused(st.create_mask, "mod_fn", mod_fn=None, B=1, H=1, Q_LEN=5, KV_LEN=5)


def test_devices_that_hold_no_values():
    meta = Q.to("meta")
    with pytest.raises(TypeError, match=r"query: got a tensor of shape \(.*\) on device meta"):
        st.cached_attention(meta, meta, meta)
    refused(st.cached_attention, "sinks", query=Q, key=Q, value=Q, sinks=meta[0, :, 0, 0])
    refused(st.cached_attention, "out", query=Q, key=Q, value=Q, out=meta)
    refused(st.cached_attention, "prefix", query=Q, key=Q, value=Q, prefix=3)


def test_calls_of_caches_on_another_device_than_torchs_default():
    pool, ones = torch.ones(4, 2, 8, 16), torch.ones(2, 2, 1, 16)
    table, lengths = torch.tensor([[0, 1], [0, 2]]).int(), torch.tensor([10, 9]).int()
    groups, shared = torch.tensor([0, 2]).int(), torch.tensor([8]).int()
    with torch.device("meta"):  # as torch.set_default_device sets it
        codes, scale = st.quantize(ones, "i8")
        prefix = st.SharedPrefix(table, lengths, groups, shared, page=8, max_shared=8)
        out = prefix.attention(ones, pool, pool)
        cache = st.PagedCache(
            1, pages=4, page=8, sequences=2, heads=2, head_dim=16, device="cpu"
        )
        cache.step([cache.add(), cache.add()], [1, 1])
        cache.append(0, ones, ones)
        same = cache.attend(0, ones)
    assert torch.equal(codes * scale, ones)
    assert torch.allclose(out, ones) and torch.equal(same, ones)


class Causal:
    def __call__(self, b, h, i, j):
        return i >= j


class Takes5:
    def __init__(self, s, b, h, i, j):
        pass


@pytest.mark.parametrize("mod", [Causal, Takes5, int, torch.Tensor, torch.nn.Module])
def test_classes_are_no_mods(mod):
    """What was meant is an object of it, or a function."""
    name = f"the class {mod.__name__}"
    make = dict(B=1, H=1, Q_LEN=5, KV_LEN=5)
    found = [
        refused(st.create_block_mask, "mask_mod", mask_mod=mod, **make),
        refused(st.create_mask, "mod_fn", mod_fn=mod, **make),
        refused(st.mask, "mask_mod", mod=mod),
        refused(st.score, "score_mod", mod=mod),
        refused(lambda: st.and_masks(mod, "q >= kv"), "mask_mods"),
    ]
    for call in CALLS.values():
        is_flex = call in (CALLS["flex_attention"], CALLS["explain"])
        mask, score = ("block_mask", "score_mod") if is_flex else ("mask", "score")
        found += [refused(call, "mask_mod", **{mask: mod})]
        found += [refused(call, "score_mod", **{score: mod})]
    assert all(name in text for text in found)
    if mod in (Causal, Takes5):
        assert all(f"test_refusals.py:{1 + line_of(mod)}," in text for text in found)
    st.create_block_mask(Causal(), **make, device="cpu")


def line_of(cls):
    return inspect.findsource(cls)[1]


@pytest.mark.parametrize("device", ["nonsense", "", "cuda:x", 3.5, [], object(), -1])
def test_devices_that_are_none(device):
    make = dict(B=1, H=1, Q_LEN=5, KV_LEN=5)
    made = st.create_block_mask("q >= kv", **make, device="cpu")
    cache = dict(layers=1, pages=8, page=4, sequences=4, heads=2, head_dim=16)
    selection = dict(B=1, H=2, Q=8, KV=8, most=1)
    refused(st.create_block_mask, "device", mask_mod="q >= kv", **make, device=device)
    refused(st.create_mask, "device", mod_fn="q >= kv", **make, device=device)
    refused(made.to, "device", device=device)
    refused(st.BlockSelection, "device", **selection, device=device)
    refused(st.PagedCache, "device", **cache, device=device)
    benchmark = dict(score_mod=None, mask_mod=None)
    refused(st.benchmark, "device", **benchmark, device=device)


def test_what_is_no_mod():
    for make, name in ((st.score, "score"), (st.mask, "mask")):
        for given in (None, 3, Q, ["score"]):
            refused(lambda x=given: make(x), name, TypeError)  # noqa: B023


def test_sizes_of_a_block_mask():
    for n in (0, -1, 1 << 30 | 1, 1 << 40, "x", 1.5, True):
        refused(lambda n=n: st.create_block_mask("q >= kv", None, None, n, 8), "Q_LEN")
        refused(lambda n=n: st.create_block_mask("q >= kv", None, None, 8, n), "KV_LEN")


def test_lists_of_other_shapes():
    m = st.create_block_mask("q >= kv", None, None, 256, 256, BLOCK_SIZE=64)
    num, idx, full_num, full_idx = (
        m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices
    )  # fmt: skip
    make = st.BlockMask.from_kv_blocks
    refused(lambda: make(num[..., :2], idx), "kv_num_blocks")
    refused(lambda: make(num, idx, full_num[..., :2], full_idx), "full_kv_num_blocks")


def test_rounds_of_a_benchmark():
    for n in (0, -1, 1.5):
        refused(lambda n=n: st.benchmark(repeats=n), "repeats")
