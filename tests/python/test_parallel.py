"""Context parallelism over two processes (gloo, CPU): out, lse and query's gradient are one
process's bit for bit (in staged mode near them), the other gradients near, through two layers
and a learned bias."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import two_processes  # noqa: E402

N, H, D = 700, 4, 16

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch has no gloo here", allow_module_level=True)


def tensors():
    torch.manual_seed(3)
    q = torch.randn(2, H, N, D)
    k, v = torch.randn(2, H // 2, N, D), torch.randn(2, H // 2, N, D)
    return [t.requires_grad_() for t in (q, k, v)], torch.randn(2, H, N, D)


def model():
    """Masks of two layers and a score with a learned bias, all of the whole sequence."""
    from saccade.torch import create_block_mask

    doc = torch.arange(N) // 200
    masks = [
        create_block_mask(
            lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]), None, None, N, N, "cpu"
        ),
        create_block_mask(
            lambda b, h, q, kv: (q >= kv) & (q - kv < 64), None, None, N, N, "cpu"
        ),
    ]
    bias = torch.linspace(-1, 1, H * N).view(H, N).requires_grad_()
    return masks, bias, lambda s, b, h, q, kv: s + bias[h, kv] - 0.01 * (q - kv)


def two_layers(q, k, v, masks, score):
    from saccade.torch import flex_attention

    x, lse = flex_attention(q, k, v, score, masks[0], enable_gqa=True, return_lse=True)
    return flex_attention(x, k, v, None, masks[1], enable_gqa=True), lse


def worker(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    whole, weight = tensors()
    masks, bias, score = model()
    out, lse = two_layers(*whole, masks, score)
    (out * weight).sum().backward()
    want = [t.grad.clone() for t in (*whole, bias)]
    for mode, by_torch in (
        ("gather", False),
        ("staged", False),
        ("gather", True),
        ("heads", True),
    ):
        bias.grad = None
        over_ranks(rank, mode, by_torch, whole, weight, masks, bias, score, out, lse, want)
        slopes_in_16_bits(mode, by_torch, masks)
    for mode in ("gather", "staged", "heads"):
        names_of_texts(mode, whole)
    second_derivatives(whole, masks)
    calls_that_are_not_over_ranks(whole, masks)
    for mode in ("gather", "staged", "heads"):
        recomputed(rank, mode, whole, masks, score)
        other_captures(rank, mode, whole)
    other_calls_over_heads(rank, whole, masks)
    for mode in ("heads", "gather"):
        other_batch(rank, mode, whole, masks)
    other_batch_later(rank, whole, masks)
    late_over_heads(rank, whole, masks)
    os._exit(0)  # what was sent in vain is still there, and gloo would wait for it


def slopes_in_16_bits(mode, by_torch, masks):
    """Their gradients where V has a mean: ranks keep the output in f32, as one process does."""
    from saccade.torch import context_parallel, flex_attention

    g = torch.Generator().manual_seed(5)
    q, k, v, d = (torch.randn(1, H, N, D, generator=g) for _ in range(4))
    q, k, v, d = (t.bfloat16() for t in (q, k, v + 10, d))
    slopes = 2.0 ** -torch.arange(1.0, H + 1)
    exact = slopes.double().requires_grad_()
    i, j = torch.arange(N).view(-1, 1), torch.arange(N)
    live = (i >= j) & (i // 200 == j // 200)
    s = q.double() @ k.double().mT / D**0.5 + exact.view(-1, 1, 1) * (j - i)
    s = torch.softmax(s.masked_fill(~live, -torch.inf), 3)
    (s @ v.double()).backward(d.double())
    learned = slopes.clone().requires_grad_()
    keys = 64 if mode == "staged" else 0
    with context_parallel(
        None, (1, H, N, D), masks, kv_heads=H, mode=mode, stage_keys=keys, dtype=torch.bfloat16
    ) as cp:
        cp.local = by_torch
        q, k, v, d = (cp.shard(t) for t in (q, k, v, d))
        score = lambda s, b, h, q, kv: s + learned[h] * (kv - q)  # noqa: E731
        out = flex_attention(q, k, v, score, masks[0])
        assert out.dtype is torch.bfloat16
        out.backward(d)
    error = (learned.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.03, (mode, by_torch, error)


def names_of_texts(mode, whole):
    """A mask and a score in text that name other tensors alike."""
    import saccade.torch as st

    seen, scaled = torch.arange(N) // 200, torch.linspace(-1, 1, H).requires_grad_()
    mask = st.create_block_mask(
        st.mask("t[q] == t[kv] && q >= kv", t=seen), None, None, N, N, "cpu"
    )
    score = st.score("score + t[h] * (kv - q) / 100", t=scaled)
    q, k, v = (t.detach() for t in whole)
    want = st.flex_attention(q, k, v, score, mask, enable_gqa=True)
    (slope,) = torch.autograd.grad(want.square().sum(), scaled)
    with st.context_parallel(None, (2, H, N, D), [mask], kv_heads=H // 2, mode=mode) as cp:
        q, k, v = (cp.shard(t) for t in (q, k, v))
        out = st.flex_attention(q, k, v, score, mask, enable_gqa=True)
        (got,) = torch.autograd.grad(out.square().sum(), scaled)
        torch.testing.assert_close(cp.unshard(out.detach()), want)
    torch.testing.assert_close(got, slope, rtol=1e-4, atol=1e-4)


def second_derivatives(whole, masks):
    """Through the tensors that were saved too, where what comes in needs no gradient."""
    from saccade.torch import context_parallel, flex_attention

    with context_parallel(None, (2, H, N, D), masks, kv_heads=H // 2) as cp:
        q, k, v = [cp.shard(t.detach()).requires_grad_() for t in whole]
        w = torch.ones(D, requires_grad=True)
        out = flex_attention(q * w, k, v, None, masks[0], enable_gqa=True)
        (g,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            torch.autograd.grad(g.square().sum(), w)


def calls_that_are_not_over_ranks(whole, masks):
    """Those of serving, those in transforms, and those of a context inside of another."""
    from torch.autograd import forward_ad

    from saccade.torch import (
        cached_attention,
        context_parallel,
        flex_attention,
        varlen_attention,
    )

    q, k, v = [t.detach() for t in whole]
    ends = torch.tensor([0, N], dtype=torch.int32)
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    made = [context_parallel(None, (2, H, N, D), masks, kv_heads=H // 2) for _ in range(2)]
    with made[0] as cp, cp:  # itself, again
        with pytest.raises(NotImplementedError, match="got varlen_attention inside of context"):
            varlen_attention(*rows, ends)
        with pytest.raises(NotImplementedError, match="got cached_attention inside of context"):
            cached_attention(q, k, v)
        q, k, v = [cp.shard(t) for t in (q, k, v)]

        def attend(q):
            return flex_attention(q, k, v, None, masks[0], enable_gqa=True)

        for take in (
            lambda: torch.vmap(attend)(q[None]),
            lambda: attend(forward_ad.make_dual(q, q)),
        ):
            with forward_ad.dual_level():
                with pytest.raises(NotImplementedError, match="inside of context_parallel"):
                    take()
        with pytest.raises(RuntimeError, match="inside of another, expected one at a"):
            made[1].__enter__()


def other_calls_over_heads(rank, whole, masks):
    """Calls whose messages are of one size, of which one rank has made both before."""
    from saccade.torch import context_parallel, flex_attention

    def score(n):
        bias = torch.zeros(n, requires_grad=True)
        return lambda s, b, h, i, j: s + bias[h]

    calls = [
        (score(H), masks[0], None),
        (score(H), masks[1], None),
        (score(H), masks[0], 0.5),
        (score(H + 1), masks[0], None),
        (None, masks[0], None),
    ]
    dealt = context_parallel(None, (2, H, N, D), masks, kv_heads=H // 2).statistics()
    with context_parallel(
        None, (2, H, N, D), masks, kv_heads=H // 2, mode="heads", seconds=20
    ) as cp:
        for told in cp.statistics():  # all rows of as many heads
            assert told.area == told.mean_area == dealt[0].mean_area and told.imbalance == 1
        own = [cp.shard(t.detach()) for t in whole]
        for given in calls:
            flex_attention(*own, *calls[0], enable_gqa=True).sum()
            if given is calls[0]:
                continue
            with pytest.raises(RuntimeError, match="another mask or problem"):
                flex_attention(*own, *(calls[0] if rank else given), enable_gqa=True)


def recomputed(rank, mode, whole, masks, score):
    """Checkpointing of both kinds, in a context that was entered twice."""
    from torch.utils.checkpoint import checkpoint

    from saccade.torch import active, context_parallel, flex_attention

    def attend(q, k, v):
        return flex_attention(q, k, v, score, masks[0], enable_gqa=True)

    want = torch.autograd.grad(attend(*whole).sum(), whole)
    with context_parallel(
        None, (2, H, N, D), masks, kv_heads=H // 2, mode=mode, seconds=60
    ) as cp:
        with cp:
            pass
        assert active.parallel is cp
        for is_reentrant in (True, False):
            own = [cp.shard(t.detach()).requires_grad_() for t in whole]
            checkpoint(attend, *own, use_reentrant=is_reentrant).sum().backward()
            for t, right in zip(own, want):
                torch.testing.assert_close(t.grad, cp.shard(right), rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="got BACKEND 'ref' inside"):
            options = {"BACKEND": "ref"}
            flex_attention(*own, score, masks[0], enable_gqa=True, kernel_options=options)
        with pytest.raises(ValueError, match="enable_gqa=True"):
            flex_attention(*own, score, masks[0])
    assert active.parallel is None


def other_captures(rank, mode, whole):
    """Masks of one text whose captured values differ."""
    from saccade.torch import context_parallel, create_block_mask, flex_attention

    doc = torch.arange(N) // (50 + 10 * rank)
    mask = create_block_mask(lambda b, h, q, k: doc[q] == doc[k], None, None, N, N, "cpu")
    with pytest.raises(RuntimeError, match="another (mask|shard plan)"):
        with context_parallel(
            None, (2, H, N, D), [mask], kv_heads=H // 2, mode=mode, seconds=20
        ) as cp:
            own = [cp.shard(t.detach()) for t in whole]
            flex_attention(*own, None, mask, enable_gqa=True)


def late_over_heads(rank, whole, masks):
    """Leaves a group that has an exchange of one rank under way."""
    from saccade.torch import context_parallel, flex_attention

    with context_parallel(
        None, (2, H, N, D), masks, kv_heads=H // 2, mode="heads", seconds=0.5
    ) as cp:
        own = [cp.shard(t.detach()) for t in whole]
        if rank:
            time.sleep(2)
        else:
            for words in ("another rank failed", "failed before"):
                with pytest.raises(RuntimeError, match=words):
                    flex_attention(*own, None, masks[0], enable_gqa=True)


def other_batch(rank, mode, whole, masks):
    """Ranks that disagree have an error each, where gloo alone would end their processes."""
    from saccade.torch import context_parallel, flex_attention

    with context_parallel(
        None, (2, H, N, D), masks, kv_heads=H // 2, mode=mode, seconds=20
    ) as cp:
        own = [cp.shard(t.detach()[: 2 - rank]) for t in whole]
        with pytest.raises(RuntimeError) as caught:
            flex_attention(*own, None, masks[0], enable_gqa=True)
    assert "their batches differ" in str(caught.value.__cause__ or caught.value)


def other_batch_later(rank, whole, masks):
    """Both batches have been agreed on, and then one rank has one, one the other: nothing tells
    them so any more, and no message meets another's until time is up."""
    from saccade.torch import context_parallel, flex_attention

    with context_parallel(None, (2, H, N, D), masks, kv_heads=H // 2, seconds=3) as cp:
        for batch in (2, 1, 2, 1):
            own = [cp.shard(t.detach()[:batch]) for t in whole]
            flex_attention(*own, None, masks[0], enable_gqa=True)
        own = [cp.shard(t.detach()[: 2 - rank]) for t in whole]
        with pytest.raises(RuntimeError):
            flex_attention(*own, None, masks[0], enable_gqa=True)


def over_ranks(rank, mode, by_torch, whole, weight, masks, bias, score, out, lse, want):
    """by_torch: keys travel by torch's collectives, as they do on CUDA."""
    from saccade.torch import context_parallel, flex_attention

    keys = 200 if mode == "staged" else 0
    with context_parallel(
        None, (2, H, N, D), masks, kv_heads=H // 2, mode=mode, stage_keys=keys
    ) as cp:
        cp.local = by_torch
        own = [cp.shard(t.detach()).requires_grad_() for t in whole]
        call = torch.compile(two_layers, backend="aot_eager") if by_torch else two_layers
        part, part_lse = call(*own, masks, score)
        (part * cp.shard(weight)).sum().backward()
        with pytest.raises(ValueError, match="got None, expected one among its masks"):
            flex_attention(*own, None, None, enable_gqa=True)
    with context_parallel(None, (2, H, N, D), masks, kv_heads=H // 2, mode=mode):
        with pytest.raises(ValueError, match="this rank's rows"):
            flex_attention(*whole, None, masks[0], enable_gqa=True)
    told = cp.statistics()
    assert sum(s.rows for s in told) == N and told[0].received == told[1].sent
    assert told[0].imbalance == max(s.area for s in told) / told[1].mean_area < 1.5
    assert sorted(torch.cat([cp.positions, cp._rows[1 - rank]]).tolist()) == list(range(N))
    if mode == "staged":
        torch.testing.assert_close(cp.unshard(part), out.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(cp.unshard(part_lse), lse.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(cp.unshard(own[0].grad), want[0], rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(cp.unshard(part), out.detach())
        assert torch.equal(cp.unshard(part_lse), lse.detach())
        assert torch.equal(cp.unshard(own[0].grad), want[0])
    for mine, wanted in zip((own[1], own[2]), want[1:3]):
        torch.testing.assert_close(cp.unshard(mine.grad), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias.grad, want[3], rtol=1e-4, atol=1e-5)


def test_two_ranks(tmp_path):
    two_processes.run(__file__, tmp_path / "store", 240)


def test_kept_keys_are_for_the_run_alone():
    """Whatever may fail comes before the library is told of them."""
    from saccade.torch.ranks_calls import Exchanged

    done = []

    class Part:
        def keep(self, *_):
            done.append("keep")

        def backward(self, tensors, mask, names, views, gradients, memory, stream):
            done.append("workspace")
            memory(1 << self.bits)
            done.append("run")

    call = Exchanged(SimpleNamespace(device=torch.device("cpu")), 0, None, None, None)
    call.dist, call.wanted, kept = Part(), (), torch.empty(1)
    call.all_names = call.all_views = []
    q, rows = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4)
    call.dist.bits = 60  # more than there is
    with pytest.raises(RuntimeError, match="memory"):
        call.backward(q, q, q, q, rows, kept, q, None, (True,) * 3)
    call.dist.bits = 6
    call.backward(q, q, q, q, rows, kept, q, None, (True,) * 3)
    assert done == ["workspace", "workspace", "keep", "run"]


def test_ranks_agree_where_one_has_no_memory(monkeypatch):
    from saccade.torch import parallel

    def fail(*_):
        raise MemoryError

    votes = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", lambda t, *_: votes.append(t.item()))
    monkeypatch.setattr(parallel.c_dist, "nccl_id", lambda: b"id")
    monkeypatch.setattr(parallel.c_dist, "NcclTransport", fail)
    cp = parallel.ContextParallel.__new__(parallel.ContextParallel)
    cp.rank, cp.ranks, cp.group, cp.device = 0, 2, None, torch.device("cpu")
    assert cp._over_nccl(1.0) is None and votes == [0, 0]
    monkeypatch.setattr(parallel.c_dist, "nccl_id", fail)
    assert cp._over_nccl(1.0) is None and votes == [0, 0, 0]


@pytest.mark.parametrize("mode", ["gather", "staged", "heads"])
def test_captures_move_before_the_backward_pass(mode, tmp_path):
    """As share_memory_ moves them: those of scores are found, those of masks an error."""
    import saccade.torch as st

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    n = 64
    x = torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    doc, bias = torch.arange(n, dtype=torch.int32) // 8, torch.arange(n) / n
    mask = st.create_block_mask(lambda b, h, i, j: doc[i] == doc[j], None, None, n, n)
    try:
        with st.context_parallel(None, x.shape, [mask], mode=mode):
            call = lambda: st.flex_attention(  # noqa: E731
                x, x, x, lambda s, b, h, i, j: s + bias[j], mask
            )
            want, out = torch.autograd.grad(call().sum(), x)[0], call()
            bias.share_memory_()
            others = [torch.full((n,), 7.0 + i) for i in range(99)]
            assert torch.equal(torch.autograd.grad(out.sum(), x)[0], want)
            out = call()
            doc.share_memory_()
            with pytest.raises(RuntimeError, match="moved in memory between a call and its"):
                out.sum().backward()
            del others
    finally:
        dist.destroy_process_group()


def test_whose_collectives_a_group_has(monkeypatch, tmp_path):
    """Made without a backend, it is called undefined, and has one by device."""
    from saccade.torch.parallel import _device_of, _has_nccl

    for i, backend in enumerate((None, "gloo")):
        store = dist.FileStore(str(tmp_path / str(i)), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            if dist.get_backend() != "undefined" or not torch.cuda.is_available():
                assert not _has_nccl(None) and _device_of(None, None).type == "cpu"
        finally:
            dist.destroy_process_group()

    asked = []

    class Group:
        def _get_backend(self, device):
            asked.append(device.type)
            return SimpleNamespace(name=lambda: "nccl")

    for name in ("undefined", "cpu:gloo,cuda:nccl", "nccl"):
        monkeypatch.setattr(dist, "get_backend", lambda _, name=name: name)
        assert _has_nccl(Group())
        assert _has_nccl(object()) is (name != "undefined")  # a group that cannot be asked
    assert asked == ["cuda"]


def test_bad_arguments():
    from saccade.torch.parallel import _layers_of, _sizes_of

    for sizes in ((1, 2, 3), (1, 2, 0, 4), (1, 2, 3.0, 4), (1, True, 3, 4), (1, 2, 3, 1 << 40)):
        with pytest.raises(ValueError, match=r"query_shape: got .* expected \[B, H, N, D\]"):
            _sizes_of(sizes)
    with pytest.raises(ValueError, match="layers: got 2 numbers, expected one for each of 1"):
        _layers_of([None], [1, 2])
    with pytest.raises(TypeError, match="masks: got object, expected a list"):
        _layers_of(object(), None)
    assert _sizes_of(torch.Size([1, 2, 3, 4])) == (1, 2, 3, 4)
    assert _layers_of((None,), None) == ([None], [1])


@pytest.mark.parametrize(
    "name, values",
    [
        ("seconds", (0, -1, float("inf"), float("nan"), 1e7, "x", True)),
        ("stage_keys", (-5, 2.5, 100)),  # which mode="gather" has no use for
        ("kv_heads", (0, 3, -4, 2.0)),
        ("layers", ([0], [1.5])),
        ("mode", ("x",)),
        ("by", ("x",)),
    ],
)
def test_bad_numbers(name, values):
    """Before anything is asked of the group: there is none here."""
    from saccade.torch import context_parallel, create_block_mask

    masks = [create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, "cpu")]
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name}: got .*, expected "):
            context_parallel(None, (1, 4, N, D), masks, **{name: value})
    with pytest.raises(TypeError, match="^dtype: got 'float16', expected a torch.dtype"):
        context_parallel(None, (1, 4, N, D), masks, dtype="float16")


def test_other_groups():
    from saccade.torch import context_parallel

    class Mesh:
        def get_group(self):
            pass

    with pytest.raises(TypeError, match=r"group: got .*mesh.get_group\(\)"):
        context_parallel(Mesh(), (1, 4, N, D))
    with pytest.raises(TypeError, match="group: got 'x', expected a ProcessGroup or None"):
        context_parallel("x", (1, 4, N, D))


@pytest.mark.parametrize("steps, length", [(2, 300), (1, 40)])
def test_a_decoder_on_two_ranks(steps, length):
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root / "python"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(root / "examples" / "two_ranks.py")]
    run = subprocess.run(
        [*command, "--steps", str(steps), "--length", str(length)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0 and "on one" in run.stdout, run.stdout + run.stderr


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
    # Threads of gloo outlive the group that torch has destroyed; one that asks for the
    # interpreter while it ends aborts the process, rarely. Everything was asserted by now.
    os._exit(0)
