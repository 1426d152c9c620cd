"""flex_attention under torch.compile, no_grad, inference mode and autocast."""

import pytest

torch = pytest.importorskip("torch")

import saccade.torch as st  # noqa: E402


def tensors(dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(2, 4, 48, 16, generator=g).to(dtype) for _ in range(3)]


@pytest.fixture(scope="module")
def compiler():
    try:
        f = torch.compile(lambda x: x + 1, fullgraph=True)
        f(torch.ones(2))
    except Exception as reason:  # no C++ compiler for inductor here
        pytest.skip(f"torch.compile does not work here: {type(reason).__name__}")
    torch._dynamo.reset()
    return torch.compile


def test_text_stays_in_the_graph(compiler):
    q, k, v = tensors()
    mask = st.create_block_mask("q >= kv", None, None, 48, 48)
    slope = torch.rand(4)

    def f(q, k, v):
        out, lse = st.flex_attention(
            q * 2,
            k,
            v,
            st.score("score + slope[h] * (kv - q)", slope=slope),
            mask,
            return_lse=True,
        )
        return out + 1, lse

    with torch.no_grad():
        want, got = f(q, k, v), compiler(f, fullgraph=True)(q, k, v)
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])


def test_callable_breaks_the_graph(compiler):
    q, k, v = tensors()
    bias = torch.rand(4)

    def f(q, k, v):
        return st.flex_attention(q * 2, k, v, lambda s, b, h, i, j: s + bias[h] * (j - i)) + 1

    with torch.no_grad():
        assert torch.equal(f(q, k, v), compiler(f)(q, k, v))


def test_modes():
    q, k, v = tensors()
    want = st.flex_attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(st.flex_attention(q, k, v), want)
    with torch.autocast("cpu", torch.bfloat16):
        out = st.flex_attention(q, k, v)
    assert out.dtype is torch.bfloat16
    half = st.flex_attention(*(t.bfloat16() for t in (q, k, v)))
    assert torch.equal(out, half)
