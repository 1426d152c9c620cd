"""A small decoder trained on packed documents, its sequence spread over two processes.

    python examples/two_ranks.py [--steps 5] [--length 1024] [--device cpu]

Every rank holds half of the rows, dealt so that both have as much to compute under the mask;
masks are those of the whole sequence, and so are positions. Rank 0 trains the same model alone
beside it: the losses are equal within rounding, which is checked. Runs on two GPUs over NCCL
where they are, else on the CPU over gloo.
"""

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F

from saccade.torch import context_parallel, create_block_mask, flex_attention

RANKS, LAYERS, HEADS, DIM, TOKENS = 2, 2, 4, 64, 32


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(DIM), torch.nn.LayerNorm(DIM)
        self.project = torch.nn.Linear(DIM, 3 * DIM, bias=False)
        self.join = torch.nn.Linear(DIM, DIM, bias=False)
        self.widen, self.narrow = torch.nn.Linear(DIM, 4 * DIM), torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x, mask):
        q, k, v = self.project(self.before(x)).chunk(3, -1)
        split = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v)]
        y = flex_attention(*split, "alibi()", mask)
        x = x + self.join(y.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(TOKENS, DIM)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(DIM, TOKENS)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def packed(length):
    """Documents of uneven lengths, each counting up from a start of its own by one step."""
    torch.manual_seed(1)
    ids, tokens, d = [], [], 0
    while len(ids) < length:
        n, first, step = 20 + 37 * d % 300, d * 7, d % 3 + 1
        ids += [d] * n
        tokens += [(first + step * i) % TOKENS for i in range(n)]
        d += 1
    return torch.tensor(ids[:length]), torch.tensor(tokens[: length + 1] + [0])[: length + 1]


def step(model, optimizer, tokens, targets, mask, length, is_shared):
    """One step on these rows; the loss over all rows."""
    optimizer.zero_grad()
    logits = model(tokens[None], mask)
    loss = F.cross_entropy(logits[0], targets, reduction="sum") / length
    loss.backward()
    whole = loss.detach().clone()
    if is_shared:
        dist.all_reduce(whole)
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    return whole.item()


def new_model(device):
    torch.manual_seed(2)
    model = Decoder().to(device)
    return model, torch.optim.Adam(model.parameters(), 3e-3)


def join_group(rank, store, kind):
    """This rank's device."""
    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
    )
    return device


def train(rank, store, steps, length, kind):
    device = join_group(rank, store, kind)
    document, stream = packed(length)
    tokens, targets = stream[:-1].to(device), stream[1:].to(device)
    mask = create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv]),
        None,
        None,
        length,
        length,
        device,
    )
    model, optimizer = new_model(device)
    alone, losses = [], []
    with context_parallel(
        None, (1, HEADS, length, DIM // HEADS), [mask], layers=[LAYERS]
    ) as cp:
        mine, wanted = cp.shard(tokens, 0), cp.shard(targets, 0)
        for _ in range(steps):
            losses.append(step(model, optimizer, mine, wanted, mask, length, True))
    if rank == 0:
        model, optimizer = new_model(device)
        for _ in range(steps):
            alone.append(step(model, optimizer, tokens, targets, mask, length, False))
        for n, (shared, one) in enumerate(zip(losses, alone)):
            print(f"step {n}: loss {shared:.6f} on {RANKS} ranks, {one:.6f} on one")
        assert all(abs(a - b) < 1e-3 * b for a, b in zip(losses, alone)), (
            "not the same training"
        )
        assert steps == 1 or losses[-1] < losses[0], "nothing was learned"
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads stay, and abort a process whose interpreter ends, rarely


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=1024)
    on = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=on)
    options = parser.parse_args()
    for name, n in (("steps", options.steps), ("length", options.length)):
        if n < 1:
            parser.error(f"{name}: got {n}, expected 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes.spawn(train, (store, options.steps, options.length, options.device), RANKS)


if __name__ == "__main__":
    main()
