"""saccade.attention over NumPy arrays (and JAX where it is), without torch."""

import subprocess
import sys

import pytest

np = pytest.importorskip("numpy")

import saccade  # noqa: E402
from saccade import dlpack  # noqa: E402

RNG = np.random.default_rng(5)


def arrays(dtype=np.float32, B=2, H=4, Hkv=2, Q=33, KV=40, D=24, Dv=16):
    return tuple(
        RNG.standard_normal(s).astype(dtype)
        for s in ((B, H, Q, D), (B, Hkv, KV, D), (B, Hkv, KV, Dv))
    )


def truth(q, k, v, live=None, bias=0.0):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + bias
    s = s if live is None else np.where(live, s, -np.inf)
    m = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(m), m, 0))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0]) + np.where(np.isfinite(m), m, 0)[..., 0]
    return (p / np.where(total == 0, 1, total)) @ v, lse


@pytest.mark.parametrize("dtype, bound", [(np.float32, 2e-6), (np.float16, 4e-3)])
@pytest.mark.parametrize("block_mask", [True, False])
def test_numpy(dtype, bound, block_mask):
    q, k, v = arrays(dtype)
    doc = np.arange(40) // 13
    slope = np.linspace(0.1, 0.5, 4).astype(np.float32)
    out, lse = saccade.attention(
        q,
        k,
        v,
        mask="doc[q] == doc[kv] && q >= kv",
        score="score + slope[h] * (kv - q)",
        captures={"doc": doc, "slope": slope},
        return_lse=True,
        block_mask=block_mask,
    )
    i, j = np.arange(33)[:, None], np.arange(40)[None]
    want, want_lse = truth(
        q, k, v, (doc[:33][:, None] == doc) & (i >= j), slope[:, None, None] * (j - i)
    )
    assert out.dtype == dtype and out.shape == (2, 4, 33, 16)
    assert np.abs(out - want).max() < bound * max(1, np.abs(want).max())
    assert np.allclose(lse, want_lse, atol=1e-4 if dtype == np.float32 else 1e-3)


def test_strided_and_read_only():
    q, k, v = arrays()
    want = saccade.attention(q, k, v)
    moved = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    assert np.array_equal(saccade.attention(*moved), want)
    for x in (q, k, v):
        x.flags.writeable = False
    assert np.array_equal(saccade.attention(q, k, v), want)


def test_numbers():
    q, k, v = arrays()
    a = saccade.attention(q, k, v, mask="q - kv <= W && q >= kv", captures={"W": 5})
    b = saccade.attention(q, k, v, mask="q - kv <= 5 && q >= kv")
    assert np.array_equal(a, b)


def test_numbers_of_numpy():
    q, k, v = arrays()
    numbers = {"a": np.float32(2), "c": np.int64(3), "e": np.bool_(True), "d": np.float64(0.5)}
    text = "score * a + (e && kv >= c ? d : 0.0)"
    a = saccade.attention(q, k, v, score=text, captures=numbers)
    b = saccade.attention(q, k, v, score="score * 2 + (kv >= 3 ? 0.5 : 0.0)")
    assert np.array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_results_can_be_written_to(dtype):
    backend = "ref" if dtype is np.float64 else "auto"
    made = saccade.attention(*arrays(dtype), return_lse=True, backend=backend)
    for x in made:
        x += 1
        assert x.flags.writeable and x.flags.c_contiguous
    assert made[0].dtype == dtype


class Derived(np.ndarray):
    """As a user makes one of NumPy's."""


class Foreign:
    """An array of a library that makes none by from_dlpack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__()


def test_results_for_a_class_derived_from_numpys():
    q, k, v = arrays()
    out = saccade.attention(q.view(Derived), k, v)
    assert isinstance(out, np.ndarray) and out.flags.writeable
    assert np.array_equal(out, saccade.attention(q, k, v))


def test_results_for_what_is_not_known():
    """Memory that others take, and that goes when nobody has it any more."""
    q = arrays()[0][..., :16].copy()
    before, out = len(dlpack._alive), Foreign(q)
    for _ in range(3):  # each looks at the one before
        out = saccade.attention(out, q, q)
    assert len(dlpack._alive) == before
    taken = np.from_dlpack(out)
    want = taken.copy()
    del out
    assert np.array_equal(taken, want) and len(dlpack._alive) == before + 1
    del taken
    assert len(dlpack._alive) == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scale": float("nan")}, "scale: got nan, expected a finite number"),
        ({"scale": "x"}, "scale: got a str"),
        ({"scale": True}, "scale: got a bool"),
        ({"scale": 10**400}, "scale: got 1000+, expected a finite number"),
        ({"threads": 2.5}, "threads: got a float, expected a whole number"),
        ({"threads": 1 << 40}, "threads: got 1099511627776, expected a number of 32 bits"),
        ({"stream": "x"}, "stream: got a str, expected a whole number"),
        ({"backend": None}, "backend: got a NoneType, expected its name"),
        ({"captures": [1]}, "captures: got a list, expected a dict"),
        ({"q": arrays(">f4")[0]}, "q: got a ndarray .* expected numbers in memory"),
        ({"k": arrays(object)[1]}, "k: got a ndarray .* expected numbers in memory"),
        ({"v": None}, "v: got None|v: got a NoneType"),
        ({"q": np.ma.array(arrays()[0], mask=True)}, "q: got a masked array, .* x.filled"),
    ],
)
def test_wrong_arguments(options, message):
    given = {**dict(zip("qkv", arrays())), **options}
    with pytest.raises((TypeError, ValueError), match=message) as found:
        saccade.attention(**given)
    assert "\n" not in str(found.value)


def test_tensors_that_have_no_numbers():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays())
    with pytest.raises(ValueError, match="q: got a tensor that requires grad, expected detach"):
        saccade.attention(q.clone().requires_grad_(), k, v)
    with pytest.raises(ValueError, match="k: got a Tensor .* expected numbers in memory"):
        saccade.attention(q, k.to("meta"), v)


def test_errors():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="captures"):
        saccade.attention(q, k, v, mask="q >= kv && doc[q] == 0")
    with pytest.raises(ValueError, match="neither text names"):
        saccade.attention(q, k, v, captures={"x": 1})
    with pytest.raises(ValueError, match="4"):
        saccade.attention(q[0], k, v)
    with pytest.raises(saccade.BadValue, match="1:"):
        saccade.attention(q, k, v, mask="q >=")
    with pytest.raises(TypeError, match="__dlpack__"):
        saccade.attention([[1.0]], k, v)


def jax_arrays(kind, dtype):
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices(kind)[0]
    except RuntimeError:
        pytest.skip(f"jax has no {kind} device")
    made = [jax.device_put(x, device) for x in arrays()]
    return made if dtype == "float32" else [x.astype(dtype) for x in made], jax.Array


def cupy_arrays(kind, dtype):
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("cupy has no device")
    return [cupy.asarray(x).astype(dtype) for x in arrays()], cupy.ndarray


def host(x):
    return np.asarray(x.get() if hasattr(x, "get") else x).astype(np.float64)


@pytest.mark.parametrize(
    "make, kind, dtype",
    [
        (jax_arrays, "cpu", "float32"),
        (jax_arrays, "cpu", "bfloat16"),
        (jax_arrays, "cuda", "float16"),
        (jax_arrays, "cuda", "bfloat16"),
        (cupy_arrays, "cuda", "float16"),
        (cupy_arrays, "cuda", "float32"),
    ],
)
def test_other_libraries(make, kind, dtype):
    """Results are arrays of the query's library, where the query is; lse is always f32."""
    (q, k, v), its_array = make(kind, dtype)
    slope = q[0, :, 0, 0]
    out, lse = saccade.attention(
        q,
        k,
        v,
        mask="q - kv <= W && q >= kv",
        score="score + slope[h]",
        captures={"W": 9, "slope": slope},
        return_lse=True,
    )
    assert isinstance(out, its_array) and isinstance(lse, its_array)
    assert out.device == q.device and str(out.dtype) == dtype and str(lse.dtype) == "float32"
    distance = np.arange(33)[:, None] - np.arange(40)
    want, want_lse = truth(
        *map(host, (q, k, v)),
        (distance >= 0) & (distance <= 9),
        host(slope)[:, None, None],
    )
    bound = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    assert np.abs(host(out) - want).max() < bound * np.abs(want).max()
    assert np.abs(host(lse) - want_lse).max() < 1e-3
    again = saccade.attention(q, k, v)  # inputs are as they were
    assert np.abs(host(again) - truth(*map(host, (q, k, v)))[0]).max() < bound * 2


def test_cupy_stream():
    (q, k, v), _ = cupy_arrays("cuda", "float16")
    import cupy

    want = saccade.attention(q, k, v)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        got = saccade.attention(q * 1, k * 1, v * 1)
        stream.synchronize()
    assert bool((got == want).all())


def test_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import numpy, saccade; "
        "x = numpy.ones((1, 1, 4, 8), 'f'); print(saccade.attention(x, x, x).sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "32.0", done.stderr


def test_prelude():
    found = saccade.prelude()
    assert found["causal"][0] == "mask" and "kv" in found["causal"][2]
