"""Each rank's rows against keys of the whole sequence, one rank after the other in one process:
out, lse and query's gradient are the whole run's, the other gradients add up to it. On the CPU,
and on CUDA where it is."""

import ctypes

import pytest

torch = pytest.importorskip("torch")
from saccade.c import abi, objects  # noqa: E402
from saccade.c import dist as c_dist  # noqa: E402
from saccade.torch import create_block_mask, flex_attention  # noqa: E402
from saccade.torch.calls import keeps_f32, kept_f32  # noqa: E402
from saccade.torch.exchange import expand  # noqa: E402
from saccade.torch.mods import Resolved, dtype_name, view  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CASES = [
    # heads, length, head dim, mask, score, ranks
    (4, 2, 1700, 64, "causal()", None, 2),
    (2, 1, 1500, 128, "q >= kv && q - kv < 300", "softcap(20.0)", 3),
    (2, 2, 1300, 64, "(q + 2 * kv) % 5 != 1", "alibi()", 2),
    (2, 2, 1024, 128, None, "score + (Q - q) * 0.001", 2),
]

# of tensors that a score reads: shape, score
CAPTURED = {
    "slopes": (lambda N: (2,), lambda x, N: lambda s, b, h, i, j: s + x[h] * (j - i) * 0.01),
    "bias": (lambda N: (2,), lambda x, N: lambda s, b, h, i, j: s + x[h]),
    "distance": (lambda N: (2 * N,), lambda x, N: lambda s, b, h, i, j: s + x[i - j + N]),
    "rows": (lambda N: (N,), lambda x, N: lambda s, b, h, i, j: s * x[i]),
    "keys": (lambda N: (2, N), lambda x, N: lambda s, b, h, i, j: s + x[h, j]),
    "pairs": (lambda N: (N, N), lambda x, N: lambda s, b, h, i, j: s + x[i, j]),
    "squares": (lambda N: (7,), lambda x, N: lambda s, b, h, i, j: s + x[(i * i + j) % 7]),
}


def repeated(sends, receives, _):
    """All ranks would say the same."""
    for (to, size, _), (of, _, _) in zip(receives, sends):
        ctypes.memmove(to, of, size)


def whole_run(q, k, v, score, mask, d_out):
    given = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = flex_attention(*given, score, mask, enable_gqa=True, return_lse=True)
    out.backward(d_out)
    return out.detach(), lse.detach(), [t.grad for t in given]


def memory(size, device):
    room = torch.empty(size + 64, dtype=torch.uint8, device=device)
    return room, (room.data_ptr() + 63) & ~63, size


def rank_run(made, shards, rank, q, k, v, handle, d_out, out_dtype, score=None, wanted=()):
    """Of this rank: its rows' out, lse and gradient, and its parts of those of keys and of what
    the score captures; keys that it needs not are zeros. out_dtype: as backward takes out."""
    rows = expand(shards.rows(rank)).to(q.device)
    if not len(rows):
        return None
    needed = [x for p in range(shards.ranks) for x in shards.needs(0, rank, p)]
    touched = expand(needed).to(q.device)
    pools = [torch.zeros_like(t).index_copy_(2, touched, t[:, :, touched]) for t in (k, v)]
    own, own_d = q[:, :, rows].contiguous(), d_out[:, :, rows].contiguous()
    out = torch.empty_like(own, dtype=out_dtype)
    lse = own.new_empty(own.shape[:3], dtype=torch.float32)
    given = {"q": own, "k": pools[0], "v": pools[1], "out": out, "lse": lse}
    stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else None
    made.prepare(handle)
    views = {n: view(t) for n, t in given.items()}
    names, read = (score.names, score.views) if score else ([], [])
    room, at, n = memory(made.local_workspace(q.shape[0]), q.device)
    made.forward_local(views, handle, names, read, at, n, stream)
    d = {"d_q": torch.empty_like(own), "d_out": own_d}
    d["d_k"], d["d_v"] = (torch.empty(t.shape, device=t.device) for t in pools)
    views.update({n: view(t) for n, t in d.items()})
    rooms = []

    def take(size):
        rooms.append(memory(size, q.device))
        return rooms[-1][1]

    captured = [
        (n, torch.full(t.shape, torch.nan, dtype=torch.float32, device=q.device))
        for n, t in zip(names, score.tensors if score else ())
        if n in wanted
    ]
    given = [(n, view(t)) for n, t in captured]
    made.backward_local(views, handle, names, read, given, take, stream)
    if q.is_cuda:
        torch.cuda.synchronize()
    d["captured"] = [t for _, t in captured]
    return rows, out.to(q.dtype), lse, d


def parts_of(device, ranks, q, k, v, d_out, score, handle, names=()):
    """(rank_run's results) of each rank that holds rows; names: captures with gradients."""
    B, H, N, D = q.shape
    name, hint = dtype_name(q), B if device == "cuda" else 0
    mods = score.bound if score else None, handle.mod if handle else None
    context = objects.context(1 if device == "cpu" else 0)
    bits = 7 | (abi.GRADIENT_CAPTURES if names else 0)
    heads = H, k.shape[1]
    is_kept = keeps_f32(q.dtype, score.bound if score else None, names)
    out_dtype = torch.float32 if is_kept else q.dtype
    about = name, name, None, *mods, device, bits, names, kept_f32(name) if is_kept else ()
    plan = objects.plan(context, hint, *heads, D, D, *about)
    tile = abi.lib.saccade_plan_row_tile(plan.handle, abi.Sizes(B, *heads, N, N, D, D))
    shards = c_dist.ShardPlan(ranks, tile, N, [handle] if handle else [], [1] if handle else [])
    shards.ranks = ranks
    problem = ((hint, *heads, 0, 0, D, D), *about)
    for rank in range(ranks):
        transport = c_dist.Transport(rank, ranks, 60.0, repeated)
        made = c_dist.Dist(context, problem, shards, 0, transport)
        tensors = q, k, v, handle, d_out, out_dtype
        one = rank_run(made, shards, rank, *tensors, score if names else None, names)
        if one is not None:
            yield one


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c[4]))
def test_rows_alone(device, case):
    H, Hkv, N, D, text, score, ranks = case
    torch.manual_seed(5)
    q, d_out = (torch.randn(2, H, N, D).to(device, torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, Hkv, N, D).to(device, torch.bfloat16) for _ in range(2))
    mask = create_block_mask(text, None, None, N, N, device=device) if text else None
    want = whole_run(q, k, v, score, mask, d_out)
    handle = mask.handle() if mask else None
    found = Resolved(score, "score", device) if score else None
    sums = [torch.zeros(t.shape, device=device) for t in (k, v)]
    seen = 0
    for rows, out, lse, d in parts_of(device, ranks, q, k, v, d_out, found, handle):
        seen += len(rows)
        assert torch.equal(out, want[0][:, :, rows])
        assert torch.equal(lse, want[1][:, :, rows])
        if device == "cpu":
            assert torch.equal(d["d_q"], want[2][0][:, :, rows])
        near(d["d_q"], want[2][0][:, :, rows])
        sums[0] += d["d_k"]
        sums[1] += d["d_v"]
    assert seen == N
    near(sums[0], want[2][1])
    near(sums[1], want[2][2])


def near(got, want):
    """Within a few roundings of bf16, where sums of f32 were rounded once."""
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", CAPTURED)
@pytest.mark.parametrize("D, dtype", [(64, "bfloat16"), (128, "bfloat16"), (32, "float32")])
def test_what_rows_alone_capture(device, kind, D, dtype):
    """Parts of the gradient of a captured tensor add up to the whole run's."""
    N, ranks, dtype = 1100, 3, getattr(torch, dtype)
    torch.manual_seed(6)
    shape, score = CAPTURED[kind]
    q, k, v, d_out = (torch.randn(2, 2, N, D).to(device, dtype) for _ in range(4))
    x = torch.randn(shape(N), device=device).requires_grad_()
    mask = create_block_mask("causal() && q - kv < 700", None, None, N, N, device=device)
    out, _, _ = whole_run(q, k, v, score(x, N), mask, d_out)
    found = Resolved(score(x, N), "score", device)
    names = tuple(n for n, w in zip(found.names, found.flags) if w)
    handle = mask.handle()
    parts = list(parts_of(device, ranks, q, k, v, d_out, found, handle, names))
    assert len(parts) == ranks
    for rows, own, _, _ in parts:
        assert torch.equal(own, out[:, :, rows])
    size = x.grad.abs().max().item()
    by = 1e-5 if dtype == torch.float32 else 5e-3
    total = sum(d["captured"][0] for *_, d in parts)
    torch.testing.assert_close(total, x.grad, rtol=by, atol=by * size)
