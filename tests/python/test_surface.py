"""The first things that a newcomer asks: indices in a wrong order, explain, pictures, what is
said to what cannot be."""

import re

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402

B, H, N, D = 1, 4, 64, 16


def tensors(n=N):
    return [torch.randn(B, H, n, D) for _ in range(3)]


# ---- indices ----


def test_swapped_indices_are_an_error_of_the_first_call():
    q, k, v = tensors()
    tab = torch.rand(H, N)
    st.flex_attention(q, k, v, lambda s, b, h, i, j: s + tab[h, i])
    with pytest.raises(IndexError, match=r"score_mod: .*got index 31 in dimension 0"):
        st.flex_attention(q, k, v, lambda s, b, h, i, j: s + tab[i, h])
    with pytest.raises(ValueError):
        st.flex_attention(q, k, v, lambda s, b, h, i, j: s * tab[i, h])
    with pytest.raises(IndexError, match="mask_mod"):
        st.create_block_mask(lambda b, h, i, j: tab[i, h] > 0.5, None, H, N, N)


@pytest.mark.parametrize("mask", ["causal()", "sliding_window(64)", "imported"])
def test_swapped_indices_are_an_error_under_a_mask(mask):
    """Whose first row of a block may have few keys, or low positions alone."""
    n = 300
    q, k, v = tensors(n)
    bias = torch.rand(n, H, n)
    block_mask = st.create_block_mask(st.mask("causal()"), None, None, n, n, device="cpu")
    if mask == "imported":
        block_mask = st.BlockMask.from_kv_blocks(
            block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices, BLOCK_SIZE=128, mask_mod=lambda b, h, i, j: i >= j,
            seq_lengths=(n, n),
        )  # fmt: skip
    elif mask != "causal()":
        block_mask = st.create_block_mask(st.mask(mask), None, None, n, n, device="cpu")
    right = lambda s, b, h, i, j: s + bias[i, h, j]  # noqa: E731
    st.check(q, k, right, block_mask)
    st.flex_attention(q, k, v, right, block_mask)
    for wrong in (
        lambda s, b, h, i, j: s + bias[h, i, j],
        lambda s, b, h, i, j: s + bias[i, j, h],
    ):
        with pytest.raises(IndexError, match="score_mod"):
            st.check(q, k, wrong, block_mask)
        with pytest.raises(IndexError, match="score_mod"):
            st.flex_attention(q, k, v, wrong, block_mask)
    ends = torch.rand(n)[:-1]
    with pytest.raises(IndexError, match="got index 299"):
        st.check(q, k, lambda s, b, h, i, j: s + ends[i], block_mask)


def test_what_is_read_at_dead_positions_alone_is_no_error():
    q, k, v = tensors()
    table = torch.rand(N)
    mask = st.create_block_mask(lambda b, h, i, j: i + j < N, None, None, N, N, device="cpu")
    out = st.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[i + j], mask)
    place = torch.arange(N)[:, None] + torch.arange(N)
    bias = table[place.clamp(max=N - 1)].masked_fill(place >= N, -float("inf"))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert torch.allclose(out, want, atol=1e-5)
    with pytest.raises(IndexError):
        st.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[i + j])


TABLE = torch.arange(N)


class Held:
    def __init__(self, table):
        self.table = table

    def __call__(self, b, h, i, j):
        return self.table[i] == self.table[j]


def masks_of(ids):
    """Masks that read a tensor in every way, and what messages call it."""
    rows, held = [ids], Held(ids)

    def default(b, h, i, j, given=ids):
        return given[i] == j

    closure = lambda b, h, i, j: ids[i] == ids[j]  # noqa: E731
    yield "ids", closure
    yield "given", default
    yield "table", held
    yield "table", lambda b, h, i, j: held.table[i] == j
    yield "rows[0]", lambda b, h, i, j: rows[0][i] == j
    yield "ids", st.and_masks(closure, "q >= kv")
    yield "doc", st.mask("doc[q] == doc[kv]", doc=ids)
    yield "TABLE", lambda b, h, i, j: TABLE[i] == j


def test_values_that_do_not_fit_are_named_as_the_caller_does():
    """In int64 tensors, before and after a first call."""
    (q, k, v), wide = tensors(), 1 << 40
    ids = TABLE.clone()
    ids[3] = TABLE[3] = wide
    text = rf"value at \[3\]: got {wide}, expected a 32-bit integer"
    for name, mod in masks_of(ids):
        message = rf"^(mask_mod: )?{re.escape(name)}: {text}"
        for call in (
            lambda: st.create_block_mask(mod, None, None, N, N, device="cpu"),
            lambda: st.flex_attention(q, k, v, None, mod),
            lambda: st.check(q, k, None, mod),
            lambda: st.cached_attention(q, k, v, mod),
        ):
            with pytest.raises(ValueError, match=message) as found:
                call()
            assert not isinstance(found.value, IndexError)
    TABLE[3] = 3
    with pytest.raises(ValueError, match=f"^score_mod: ids: {text}"):
        st.flex_attention(q, k, v, lambda s, b, h, i, j: s + ids[i])


def test_values_that_change_to_ones_that_do_not_fit():
    q, k, v = tensors()
    ids, wide = torch.arange(N), 1 << 40
    same = st.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, N, N, "cpu")
    for call in (
        lambda: st.flex_attention(q, k, v, lambda s, b, h, i, j: s + ids[i]),
        lambda: st.flex_attention(q, k, v, None, same),
        lambda: st.flex_attention(q.requires_grad_(), k, v, lambda s, b, h, i, j: s + ids[j]),
        lambda: st.cached_attention(
            k, k, v, "causal()", lambda s, b, h, i, j: torch.where(i >= j, s + ids[j], s)
        ),
    ):
        for _ in range(3):
            call()
        ids[5] = wide
        with pytest.raises(ValueError, match=rf"^ids: value at \[5\]: got {wide}, expected"):
            call()
        ids[5] = 5
        call()


def test_check_looks_where_a_sample_does_not():
    n = 2048
    q, k, _ = tensors(n)
    ids = torch.zeros(n, dtype=torch.int32)
    table = torch.rand(4)
    ids[777] = 9  # one row of all

    def mod(b, h, i, j):
        return table[ids[i]] > -1

    with pytest.raises(IndexError, match="got index 9"):
        st.check(q, k, None, mod)
    ids[777] = 3
    st.check(q, k, None, mod)
    st.check(q, k, lambda s, b, h, i, j: s + table[h], "q >= kv")
    with pytest.raises(IndexError, match="score_mod"):
        st.check(q, k, lambda s, b, h, i, j: s + table[i], "q >= kv")


# ---- explain, pictures ----


def test_explain_begins_with_a_summary():
    q, k, v = tensors()
    slope = torch.rand(H)
    call = (q, k, v, lambda s, b, h, i, j: s + slope[h] * (i - j), lambda b, h, i, j: i >= j)
    brief, whole = st.explain(*call), st.explain(*call, verbose=True)
    assert whole.startswith(brief) and len(whole) > len(brief)
    assert brief.startswith(f"problem: b{B} h{H}/{H} q{N} kv{N} d{D} dv{D} f32\n")
    for said in ("score text: ", "mask text: ", "% not computed", "kernel: ", "threads: "):
        assert said in brief
    node = re.compile(r"^n0 ", re.M)
    assert node.search(whole) and not node.search(brief) and len(brief.splitlines()) < 25


def test_block_mask_in_a_notebook_and_as_a_tensor():
    mask = st.create_block_mask("q >= kv", None, None, 512, 512, device="cpu")
    page = mask._repr_html_()
    assert "<svg" in page and "</svg>" in page and "not computed" in page
    assert mask.ndim == 4 and mask.contiguous() is mask


def test_benchmark_leaves_the_backend_of_matplotlib_alone(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("svg")
    for name in ("b.png", "b.svg"):
        made = tmp_path / name
        st.benchmark(None, "q >= kv", H=2, Q=64, repeats=1, compile_flex=False, plot=str(made))
        assert made.stat().st_size > 1000
    assert matplotlib.get_backend().lower() == "svg"
    text = made.read_text()
    assert "threads" in text or "glyph" in text  # title, or its letters as paths


def test_words():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="score_mod: got an int, expected"):
        st.flex_attention(q, k, v, 3)
    with pytest.raises(TypeError, match="mask_mod: got a Tensor, expected"):
        st.create_block_mask(torch.ones(4, 4), None, None, 4, 4)
    with pytest.raises(TypeError, match=r"text that reads it: .* keep\[.* goes to score_mod"):
        st.flex_attention(q, k, v, block_mask=torch.ones(4, 4))
    with pytest.raises(TypeError, match=r"text that reads it: .* score \+ t\["):
        st.flex_attention(q, k, v, torch.ones(4, 4))


# ---- arrays without torch ----


def test_arrays_say_what_to_do():
    np = pytest.importorskip("numpy")
    import saccade

    q = np.random.rand(1, 2, 8, 4)
    with pytest.raises(ValueError, match=r"astype.*backend=.ref"):
        saccade.attention(q, q, q)
    assert saccade.attention(q, q, q, backend="ref").dtype == np.float64
    q = q.astype("float32")
    with pytest.raises(TypeError, match="mask: got a function.*saccade.torch"):
        saccade.attention(q, q, q, mask=lambda b, h, i, j: i >= j)
    dense = np.tril(np.ones((8, 8), bool))
    with pytest.raises(TypeError, match=r'an array is captured: mask="m\[q, kv\]"'):
        saccade.attention(q, q, q, mask=dense)
    as_said = saccade.attention(q, q, q, mask="m[q, kv]", captures={"m": dense})
    assert np.array_equal(as_said, saccade.attention(q, q, q, mask="q >= kv"))


def test_transforms_of_jax_are_refused():
    jax = pytest.importorskip("jax")
    import saccade

    q = jax.numpy.ones((1, 1, 4, 4), jax.numpy.float32)
    assert saccade.attention(q, q, q).shape == (1, 1, 4, 4)
    for transformed in (
        jax.jit(saccade.attention),
        jax.grad(lambda *x: saccade.attention(*x).sum()),
        jax.vmap(saccade.attention),
    ):
        with pytest.raises(TypeError, match="q: got a tracer of JAX.*pure_callback"):
            transformed(q, q, q)
