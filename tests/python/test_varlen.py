"""Sequences of unequal lengths against each of them alone."""

import math

import pytest

torch = pytest.importorskip("torch")

from saccade.torch import cached_attention, mask, score, varlen_attention  # noqa: E402
from saccade.torch import varlen, warm_serving  # noqa: E402

Q, K = [5, 0, 35, 1], [9, 3, 35, 153]


def lengths(n):
    return torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32)


def tensors(dtype=torch.float32, **options):
    torch.manual_seed(1)
    return (
        torch.randn(sum(Q), 4, 16, dtype=dtype, **options),
        torch.randn(sum(K), 2, 16, dtype=dtype, **options),
        torch.randn(sum(K), 2, 24, dtype=dtype, **options),
    )


def alone(q, k, v, b, end):
    rows, keys = slice(sum(Q[:b]), sum(Q[: b + 1])), slice(sum(K[:b]), sum(K[: b + 1]))
    q, k, v = (x.transpose(0, 1) for x in (q[rows], k[keys], v[keys]))
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    at = torch.arange(Q[b])[:, None] + (K[b] - Q[b] if end else 0)
    s = (q @ k.mT / 4).masked_fill(at < torch.arange(K[b]), -math.inf)
    return (torch.softmax(s, -1) @ v).transpose(0, 1), torch.logsumexp(s, -1).mT


@pytest.mark.parametrize("end", [False, True])
def test_each_sequence_alone(end):
    q, k, v = tensors(requires_grad=True)
    out, lse = varlen_attention(
        q,
        k,
        v,
        lengths(Q),
        lengths(K),
        align="end" if end else "start",
        return_lse=True,
    )
    parts = [alone(q, k, v, b, end) for b in range(4)]
    torch.testing.assert_close(out, torch.cat([o for o, _ in parts]))
    torch.testing.assert_close(lse, torch.cat([x for _, x in parts]))
    got = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    loss = sum(o.square().sum() + x.sum() for o, x in parts)
    for a, b in zip(got, torch.autograd.grad(loss, (q, k, v))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rows_of_no_sequence_are_zeros(monkeypatch):
    """Those of padding on either side, whatever the memory of the results held."""
    new = torch.Tensor.new_empty
    filled = lambda *given, **options: new(*given, **options).fill_(7)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    q, k, v = (torch.randn(9, heads, 16) for heads in (4, 2, 2))
    ends = torch.tensor([2, 3, 7], dtype=torch.int32)
    out, lse = varlen_attention(q, k, v, ends, return_lse=True)
    for rows in (slice(0, 2), slice(7, 9)):
        assert (out[rows] == 0).all() and (lse[rows] == -math.inf).all()
    same = varlen_attention(q[2:7], k[2:7], v[2:7], ends - 2)
    assert torch.equal(out[2:7], same)


def test_gradients_of_rows_of_no_sequence_are_zeros(monkeypatch):
    """Whatever their memory held, and those of sequences without keys or queries."""
    like = torch.empty_like
    filled = lambda *given, **options: like(*given, **options).fill_(7)  # noqa: E731
    q, k, v = (torch.randn(9, h, 16, requires_grad=True) for h in (4, 2, 2))
    of_q = torch.tensor([2, 3, 7, 7], dtype=torch.int32)
    of_k = torch.tensor([1, 1, 5, 8], dtype=torch.int32)
    out = varlen_attention(q, k, v, of_q, of_k)
    monkeypatch.setattr(torch, "empty_like", filled)
    d_q, d_k, d_v = torch.autograd.grad(out.sum(), (q, k, v))
    assert (d_q[:3] == 0).all() and (d_q[7:] == 0).all() and (d_q[3:7] != 0).any()
    for given in (d_k, d_v):
        assert (given[0] == 0).all() and (given[5:] == 0).all() and (given[1:5] != 0).any()


@pytest.mark.skipif(warm_serving.built is None, reason="no extension")
def test_calls_of_one_layout_are_kept(monkeypatch):
    """Later ones make no plan; lengths, padding and contents are their own."""
    torch.manual_seed(1)
    x = torch.randn(3, 40, 4, 16)
    sinks = torch.randn(4)
    cases = [{}, {"align": "end"}, {"sinks": sinks}, {"scale": 0.3, "mask": None}]
    starts = [[0, 3, 40], [0, 40, 40], [5, 6, 33], [0, 0, 0], [0, 17, 30]]
    for options in cases:
        options["return_lse"] = True

        def run(starts, options=options):
            return varlen_attention(*x, torch.tensor(starts, dtype=torch.int32), **options)

        with monkeypatch.context() as patch:
            patch.setattr(warm_serving, "recall", lambda *_: None)
            wanted = [run(s) for s in starts]
        run(starts[0])
        with monkeypatch.context() as patch:
            patch.setattr(varlen, "_Call", None)
            for s, (out, lse) in zip(starts, wanted):
                again, its_lse = run(s)
                assert torch.equal(again, out) and torch.equal(its_lse, lse)


def test_scores_see_the_sequence():
    q, k, v = tensors()
    shift = torch.randn(4)
    out, lse = varlen_attention(
        q,
        k,
        v,
        lengths(Q),
        lengths(K),
        score=score("score + t[b]", t=shift),
        return_lse=True,
    )
    plain, free = varlen_attention(q, k, v, lengths(Q), lengths(K), return_lse=True)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(
        lse - free, shift.repeat_interleave(torch.tensor(Q))[:, None] + 0 * lse
    )


def test_pages():
    torch.manual_seed(1)
    q = torch.randn(sum(Q), 4, 16)
    pool_k, pool_v = torch.randn(2, 40, 2, 8, 16)
    table = torch.randperm(40)[:40].reshape(4, 10).int()
    lens = torch.tensor([9, 3, 35, 80], dtype=torch.int32)
    out = varlen_attention(
        q, pool_k, pool_v, lengths(Q), align="end", block_table=table, seq_lens=lens
    )
    for b, n in enumerate(Q):
        if n:
            rows = slice(sum(Q[:b]), sum(Q[: b + 1]))
            want = cached_attention(
                q[rows].transpose(0, 1)[None],
                pool_k,
                pool_v,
                block_table=table[b : b + 1],
                seq_lens=lens[b : b + 1],
            )
            assert torch.equal(out[rows], want[0].transpose(0, 1))


def keys_of(pool, table, lens, b):
    """[Hkv, n, D] of a pool [pages, Hkv, page, D], differentiable."""
    rows = pool[table[b].clamp(min=0).long()].transpose(0, 1).flatten(1, 2)
    return rows[:, : lens[b]]


def gradients_of_pages(device, dtype, page, bound):
    """Against the dense formula in float64. Sequences share pages, one names a page twice, some
    are absent behind a window, and tables lead anywhere past lengths."""
    torch.manual_seed(1)
    lens, window = [9, 3, 35, 80], 30
    most = -(-max(lens) // page)
    table = torch.randint(0, 24, (4, most), dtype=torch.int32)
    table[3, : (80 - 35 - window) // page] = -1
    given = [
        torch.randn(*shape, dtype=dtype).to(device).requires_grad_()
        for shape in ((sum(Q), 4, 16), (24, 2, page, 16), (24, 2, page, 24))
    ]
    sinks = torch.randn(4).to(device).requires_grad_()
    live = "q + len[b] - n[b] >= kv && q + len[b] - n[b] - kv < W"
    seen = mask(live, W=window, len=torch.tensor(lens).to(device), n=torch.tensor(Q).to(device))
    kept = table.clone()
    for b, n in enumerate(lens):
        table[b, -(-n // page) :] = 2**31 - 1  # never read
    out, lse = varlen_attention(
        *given,
        lengths(Q).to(device),
        None,
        max(Q),
        mask=seen,
        block_table=table.to(device),
        seq_lens=torch.tensor(lens).int().to(device),
        sinks=sinks,
        return_lse=True,
    )
    gold, parts = [t.detach().double().cpu().requires_grad_() for t in (*given, sinks)], []
    for b, n in enumerate(lens):
        q = gold[0][sum(Q[:b]) : sum(Q[: b + 1])].transpose(0, 1)
        k, v = (keys_of(x, kept, lens, b).repeat_interleave(2, 0) for x in gold[1:3])
        back = torch.arange(Q[b])[:, None] + n - Q[b] - torch.arange(n)
        s = (q @ k.mT / 4).masked_fill((back < 0) | (back >= window), -math.inf)
        s = torch.cat([s, gold[3][:, None, None].expand(-1, Q[b], 1)], 2)
        parts.append((torch.softmax(s, -1)[..., :-1] @ v).transpose(0, 1))
    want = torch.cat(parts)
    weight = torch.randn(want.shape, dtype=torch.float64)
    torch.testing.assert_close(out.double().cpu(), want, rtol=0, atol=bound)
    got = torch.autograd.grad(out, (*given, sinks), weight.to(dtype).to(device))
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), gold)):
        assert (a.double().cpu() - b).abs().max() <= 4 * bound * b.abs().max()
    again = torch.autograd.grad(
        varlen_attention(
            *given,
            lengths(Q).to(device),
            None,
            max(Q),
            mask=seen,
            block_table=table.to(device),
            seq_lens=torch.tensor(lens).int().to(device),
        ),
        given[1:],
        weight.to(dtype).to(device),
    )
    assert all(torch.isfinite(x).all() for x in again)


@pytest.mark.parametrize("page", [1, 8])
def test_gradients_of_pages(page):
    gradients_of_pages("cpu", torch.float32, page, 1e-5)


def test_gradients_of_no_rows():
    none = torch.zeros(2, dtype=torch.int32)
    q, k, v = (torch.zeros(0, h, 8, requires_grad=True) for h in (4, 2, 2))
    varlen_attention(q, k, v, none).sum().backward()  # d_out: a number, expanded to nothing
    assert q.grad.shape == q.shape and k.grad.shape == k.shape


def test_errors():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="align"):
        varlen_attention(q, k, v, lengths(Q), lengths(K), align="left")
    with pytest.raises(Exception, match="got 2 at 2 after 4"):
        bad = torch.tensor([0, 4, 2, 41, 41], dtype=torch.int32)
        varlen_attention(q, k, v, bad, lengths(K))


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_traced", [False, True])
def test_learned_captures(device, is_traced):
    """Slopes, a table of distances and a number, against the dense formula in float64; over
    pages the same."""
    learned = [torch.randn(4), torch.randn(4, 41), torch.tensor(0.7)]
    given = [t.to(device).requires_grad_() for t in (*tensors(), *learned)]
    text = "g * score + 0.01 * slope[h] * (kv - q) + t[h, clamp(kv - q, -20, 20) + 20]"

    def traced(x, b, h, q, kv):
        near = given[4][h, torch.clamp(kv - q, -20, 20) + 20]
        return given[5] * x + 0.01 * given[3][h] * (kv - q) + near

    mod = traced if is_traced else score(text, slope=given[3], t=given[4], g=given[5])
    starts = [lengths(n).to(device) for n in (Q, K)]
    out = varlen_attention(*given[:3], *starts, max(Q), max(K), score=mod)
    gold, parts = [t.detach().double().cpu().requires_grad_() for t in given], []
    for b in range(4):
        rows = slice(sum(Q[:b]), sum(Q[: b + 1])), slice(sum(K[:b]), sum(K[: b + 1]))
        q, k, v = (x[r].transpose(0, 1) for x, r in zip(gold, (rows[0], rows[1], rows[1])))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        back = torch.arange(K[b]) - torch.arange(Q[b])[:, None]
        s = gold[5] * (q @ k.mT / 4) + 0.01 * gold[3][:, None, None] * back
        s = s + gold[4][:, back.clamp(-20, 20) + 20]
        s = s.masked_fill(back > 0, -math.inf)
        parts.append((torch.softmax(s, -1) @ v).transpose(0, 1))
    weight = torch.randn(out.shape, dtype=torch.float64)
    got = torch.autograd.grad(out, given, weight.float().to(device))
    for a, b in zip(got, torch.autograd.grad((torch.cat(parts) * weight).sum(), gold)):
        assert (a.double().cpu() - b).abs().max() <= 2e-5 * b.abs().max()
    page = [(t.view(8, 25, 2, -1).transpose(1, 2).contiguous()) for t in given[1:3]]
    pooled = varlen_attention(
        given[0],
        *page,
        starts[0],
        None,
        max(Q),
        score=mod,
        block_table=torch.tensor([[0], [1], [2], [3]], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([9, 3, 25, 20], dtype=torch.int32, device=device),
    )
    assert all(t.abs().max() > 0 for t in torch.autograd.grad(pooled.sum(), given[3:]))


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_and_sinks(device):
    """Against the dense formula with the weights that the same seed keeps, gradients too."""
    given = [x.detach().to(device).requires_grad_() for x in tensors()]
    sinks = torch.randn(4, device=device, requires_grad=True)
    starts = lengths(Q).to(device), lengths(K).to(device), max(Q), max(K)
    at = torch.cat([torch.arange(n) for n in K]).to(device)
    eye = torch.nn.functional.one_hot(at, max(K)).float()[:, None].expand(-1, 2, -1)
    zero = torch.zeros_like(given[0]), torch.zeros_like(given[1]), eye
    torch.manual_seed(3)
    z = varlen_attention(*zero, *starts, None, align="end", dropout_p=0.3)
    torch.manual_seed(3)
    out, lse = varlen_attention(
        *given, *starts, align="end", sinks=sinks, dropout_p=0.3, return_lse=True
    )
    parts = []
    for b in range(4):
        rows, keys = slice(sum(Q[:b]), sum(Q[: b + 1])), slice(sum(K[:b]), sum(K[: b + 1]))
        q, k, v = (x.transpose(0, 1) for x in (given[0][rows], given[1][keys], given[2][keys]))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        last = torch.arange(Q[b], device=device)[:, None] + K[b] - Q[b]
        s = (q @ k.mT / 4).masked_fill(last < torch.arange(K[b], device=device), -math.inf)
        s = torch.cat([s, sinks[:, None, None].expand(-1, Q[b], 1)], 2)
        p = torch.softmax(s, -1)[..., :-1] * z[rows].transpose(0, 1)[..., : K[b]] * K[b]
        parts.append(((p @ v).transpose(0, 1), torch.logsumexp(s, -1).mT))
    gold, gold_lse = (torch.cat(x) for x in zip(*parts))
    torch.testing.assert_close(out, gold, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, gold_lse)
    wanted = (*given, sinks)
    got = torch.autograd.grad(out.square().sum() + lse.sum(), wanted)
    for a, b in zip(got, torch.autograd.grad(gold.square().sum() + gold_lse.sum(), wanted)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page", [1, 8, 64])
def test_gradients_of_pages_on_a_gpu(dtype, page):
    bound = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    gradients_of_pages("cuda", dtype, page, bound)


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("end", [False, True])
def test_on_a_gpu(dtype, end):
    """Against the float64 reference; lengths changed under a recorded graph; lengths that lead
    out of the tensors."""
    q, k, v = tensors(dtype)
    align = "end" if end else "start"
    given = [x.cuda() for x in (q, k, v, lengths(Q), lengths(K))]
    out, lse = varlen_attention(*given, 35, 153, align=align, return_lse=True)
    gold, gold_lse = varlen_attention(
        *(x.double() for x in (q, k, v)),
        lengths(Q),
        lengths(K),
        align=align,
        return_lse=True,
    )
    bound = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(out.cpu().double(), gold, rtol=0, atol=bound)
    torch.testing.assert_close(lse.cpu().double(), gold_lse.double(), rtol=0, atol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = varlen_attention(*given, 35, 153, align=align)
    given[3].copy_(torch.tensor([0, 20, 21, 30, 41], dtype=torch.int32))
    graph.replay()
    assert torch.equal(again, varlen_attention(*given, 35, 153, align=align))
    given[3].copy_(torch.tensor([-5, 2**31 - 1, 7, 3, 10**9], dtype=torch.int32))
    varlen_attention(*given, 35, 153, align=align)
    torch.cuda.synchronize()


def test_what_a_gradient_needs_stays():
    q, k, v = tensors(requires_grad=True)
    starts = lengths(Q)
    out = varlen_attention(q, k, v, starts, lengths(K))
    starts[1] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    bias = torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match="least: requires grad"):
        learned = mask("least[h] > 0", least=bias)
        varlen_attention(q, k, v, lengths(Q), lengths(K), mask=learned)
    table = bias.detach().requires_grad_()
    by_head = score("score + t[h]", t=table)
    out = varlen_attention(q, k, v, lengths(Q), lengths(K), score=by_head)
    with torch.no_grad():
        table += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with pytest.raises(ValueError, match="cu_seqlens_q: got 1 numbers, expected 2 or more"):
        varlen_attention(q, k, v, torch.zeros(1, dtype=torch.int32))


def test_gradients_of_sinks_beside_rows_of_no_sequence():
    """Rows past the last sequence hold what memory held, and have no part in a sum."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    sinks, ends = torch.zeros(2, requires_grad=True), torch.tensor([0, 5], dtype=torch.int32)
    want = None
    for _ in range(3):
        held = [torch.full(n, math.nan) for n in ((8, 2, 16), (8, 2))]
        del held
        out = varlen_attention(q, k, v, ends, sinks=sinks)
        (got,) = torch.autograd.grad(out[:5].sum(), sinks)
        assert got.isfinite().all() and (want is None or torch.equal(got, want))
        want = got
    alone = varlen_attention(q[:5], k[:5], v[:5], ends, sinks=sinks)
    torch.testing.assert_close(want, *torch.autograd.grad(alone.sum(), sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives_are_refused(dtype):
    """Through the tensors that were saved too, where what comes in needs no gradient."""
    x, w = (torch.randn(9, 2, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    q = x * w
    (g,) = torch.autograd.grad(varlen_attention(q, q, q, ends).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="varlen_attention has no second derivatives"):
        torch.autograd.grad(g.square().sum(), w)
    plain = torch.autograd.grad(varlen_attention(x * w, q, q, ends).sum(), x)
    assert not plain[0].requires_grad
    q = x * w
    out = varlen_attention(q, q, q, ends)
    rows = torch.ones(2, *out.shape, dtype=dtype)
    (g,) = torch.autograd.grad(out, x, rows, is_grads_batched=True, create_graph=True)
    with pytest.raises(NotImplementedError, match="varlen_attention has no second derivatives"):
        torch.autograd.grad(g.square().sum(), w)


def test_batched_gradients():
    q, k, v = (torch.randn(9, 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(9, requires_grad=True)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = varlen_attention(q, k, v, ends, score=lambda s, b, h, i, j: s + bias[j])
    x, rows = (q, k, v, bias), torch.randn(3, *out.shape)
    each = [torch.autograd.grad(out, x, r, retain_graph=True) for r in rows]
    batched = torch.autograd.grad(out, x, rows, is_grads_batched=True, retain_graph=True)
    mapped = torch.vmap(lambda r: torch.autograd.grad(out, x, r, retain_graph=True))(rows)
    for a, b, c in zip(batched, zip(*each), mapped):
        assert torch.equal(a, torch.stack(b)) and torch.equal(c, torch.stack(b))


def test_autocast():
    q, k, v = tensors()
    given = lengths(Q), lengths(K)
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen_attention(q.bfloat16(), k, v, *given)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, varlen_attention(*(t.bfloat16() for t in (q, k, v)), *given))


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpointing(is_reentrant):
    """Saved tensors may be looked at once where they are made again."""
    from torch.utils.checkpoint import checkpoint

    cu = torch.tensor([0, 5, 5, 19], dtype=torch.int32)
    q, k, v = (torch.randn(19, 2, 8).requires_grad_() for _ in range(3))
    want = torch.autograd.grad(varlen_attention(q, k, v, cu).square().sum(), (q, k, v))
    out = checkpoint(lambda *t: varlen_attention(*t, cu), q, k, v, use_reentrant=is_reentrant)
    out.square().sum().backward()
    assert all(torch.equal(t.grad, right) for t, right in zip((q, k, v), want))
