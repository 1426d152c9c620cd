"""DDP and FSDP2 over two processes on the host: a model whose score captures a parameter has
the gradients that one process has over both halves of the batch."""

import os

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

RANKS, H, N, D = 2, 2, 17, 8


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.project = torch.nn.Linear(H * D, 3 * H * D)
        self.table = torch.nn.Parameter(torch.randn(H, 2 * N))

    def forward(self, x):
        from saccade.torch import flex_attention

        q, k, v = self.project(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)
        mod = lambda s, b, h, i, j: s + self.table[h, i - j + N]  # noqa: E731
        return flex_attention(q, k, v, mod, "q >= kv")


def gradients(model, x):
    model(x).sin().mean().backward()
    return [p.grad for p in model.parameters()]


def work(rank, store, inputs, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        x = torch.load(inputs)[rank]
        made = {"ddp": gradients(DistributedDataParallel(Model()), x)}
        sharded = Model()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (RANKS,)))
        made["fsdp2"] = [g.full_tensor() for g in gradients(sharded, x)]
        if rank == 0:
            torch.save(made, results)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads stay, and abort a process whose interpreter ends, rarely


def test_two_ranks(tmp_path):
    pytest.importorskip("torch.distributed.fsdp").fully_shard  # noqa: B018
    x = torch.randn(RANKS, 2, N, H * D, generator=torch.Generator().manual_seed(6))
    torch.save(x, tmp_path / "x")
    paths = tmp_path / "store", tmp_path / "x", tmp_path / "made"
    torch.multiprocessing.spawn(work, paths, RANKS)
    want = gradients(Model(), x.flatten(0, 1))
    for name, got in torch.load(tmp_path / "made").items():
        for a, b in zip(got, want, strict=True):
            assert torch.allclose(a, b, 1e-4, 1e-6), name
