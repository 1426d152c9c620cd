"""Context parallelism over two GPUs by NCCL: out is one GPU's bit for bit (in staged mode near
it), gradients near it, those of what a score captures the same bits on both ranks; calls that
differ are errors on both."""

import datetime
import os
import sys

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import two_processes  # noqa: E402

N, H, D, SECONDS = 1900, 4, 64, 60
WAYS = [
    ("gather", "nccl"),
    ("gather", "torch"),
    ("staged", "nccl"),
    ("heads", "torch"),
]


def score_of(kind, x):
    if kind == "slopes":
        return lambda s, b, h, i, j: s - x[h] * (i - j) * 0.01
    if kind == "distances":
        return lambda s, b, h, i, j: s + x[h, torch.clamp(i - j, 0, 63)]
    return lambda s, b, h, i, j: s * x[h, j % 5]


SHAPES = {"slopes": (H,), "distances": (H, 64), "products": (H, 5)}


def gradients(q, k, v, kind, x, mask, d_out):
    from saccade.torch import flex_attention

    given = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    x = x.detach().clone().requires_grad_()
    out = flex_attention(*given, score_of(kind, x), mask, enable_gqa=True)
    out.backward(d_out)
    return [out.detach(), *(t.grad for t in given)], x.grad


def check_way(mode, by, kind, masks, whole):
    from saccade.torch import context_parallel

    q, k, v, d_out = whole
    x = torch.rand(
        SHAPES[kind], device="cuda", generator=torch.Generator("cuda").manual_seed(2)
    )
    want, want_x = gradients(q, k, v, kind, x, masks[0], d_out)
    with context_parallel(
        None,
        (2, H, N, D),
        masks,
        kv_heads=H // 2,
        dtype=q.dtype,
        mode=mode,
        by=by,
        stage_keys=640 if mode == "staged" else 0,
        seconds=SECONDS,
    ) as cp:
        own = [cp.shard(t) for t in (q, k, v)]
        got, got_x = gradients(*own, kind, x, masks[0], cp.shard(d_out).contiguous())
    got = [cp.unshard(t) for t in got]
    other = got_x.clone()
    dist.broadcast(other, 0)
    assert torch.equal(got_x, other)
    assert mode == "staged" or torch.equal(got[0], want[0])
    for mine, whole_one in zip([*got, got_x], [*want, want_x]):
        far = (mine.float() - whole_one.float()).norm() / whole_one.float().norm()
        assert far < 1e-2, (mode, by, kind, float(far))


def check_disagreement(masks, whole):
    """Both ranks make kinds of call that neither has made before."""
    from saccade.torch import context_parallel, flex_attention

    q, k, v, _ = whole
    x = torch.ones(H, device="cuda")
    usual = (score_of("slopes", x), masks[0], None)
    others = [(usual[0], masks[1], None), (usual[0], masks[0], 0.5), (None, masks[0], None)]
    with context_parallel(
        None, (2, H, N, D), masks, kv_heads=H // 2, dtype=q.dtype, mode="heads", seconds=SECONDS
    ) as cp:
        own = [cp.shard(t) for t in (q, k, v)]
        for other in others:
            with pytest.raises(RuntimeError, match="another mask or problem"):
                flex_attention(*own, *(usual if dist.get_rank() else other), enable_gqa=True)
        flex_attention(*own, *usual, enable_gqa=True)
        torch.cuda.synchronize()


def worker(rank, store):
    from saccade.torch import create_block_mask

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    torch.manual_seed(4)
    heads = (H, H // 2, H // 2, H)
    whole = [torch.randn(2, n, N, D).to("cuda", torch.bfloat16) for n in heads]
    masks = [
        create_block_mask(text, None, None, N, N, "cuda")
        for text in ("q >= kv && q - kv < 900", "causal()")
    ]
    for mode, by in WAYS:
        for kind in SHAPES:
            check_way(mode, by, kind, masks, whole)
    check_disagreement(masks, whole)
    os._exit(0)  # a communicator that is taken down while the other rank's still works waits


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs here")
def test_two_gpus(tmp_path):
    two_processes.run(__file__, tmp_path / "store", 400)


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
