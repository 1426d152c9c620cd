"""A small GPT on bytes for the examples that train: its text is the source of Python's standard
library, whatever is installed. Nothing is downloaded."""

import hashlib
import pathlib
import sys
import sysconfig
import time

import torch
from torch import nn

from saccade.torch import create_block_mask, create_mask, flex_attention, mask


def corpus(limit=12_000_000):
    """(bytes, document of each byte), both 1-D; the files in the order of their names."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and total < limit:
            texts.append(path.read_bytes())
            total += len(texts[-1])
    lengths = torch.tensor([len(t) for t in texts])
    data = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
    print(f"{len(texts)} files, {len(data):,} bytes, sha256 {digest(data)[:16]}")
    return data, torch.repeat_interleave(torch.arange(len(texts), dtype=torch.int32), lengths)


def digest(*tensors):
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Batches:
    """Rows of N + 1 bytes from anywhere in the text, the same for the same seed."""

    def __init__(self, data, documents, batch, n, seed, device="cpu"):
        self.data, self.documents, self.batch, self.n = data, documents, batch, n
        self.random = torch.Generator().manual_seed(seed)
        self.device = device

    def __next__(self):
        """(inputs, targets, documents), each [batch, n]."""
        first = torch.randint(
            len(self.data) - self.n - 1, (self.batch, 1), generator=self.random
        )
        at = first + torch.arange(self.n + 1)
        text, documents = self.data[at].long(), self.documents[at[:, :-1]]
        return (t.to(self.device) for t in (text[:, :-1], text[:, 1:], documents))


class Fused:
    """Attention by Saccade: a score and a mask, each one line of text."""

    def __init__(self, score, text):
        self.score, self.text = score, text

    def prepare(self, documents, n, heads):
        """For the batch: which blocks of the mask are live."""
        self.score_mod = self.score
        self.blocks = create_block_mask(
            mask(self.text, doc=documents), len(documents), None, n, n, documents.device
        )

    def __call__(self, q, k, v):
        return flex_attention(q, k, v, self.score_mod, self.blocks)


class Dense:
    """The same with PyTorch's SDPA, whose mask is a matrix. slope: ALiBi's, by head."""

    def __init__(self, text):
        self.text = text

    def prepare(self, documents, n, heads):
        live = create_mask(
            mask(self.text, doc=documents), len(documents), None, n, n, documents.device
        )
        slope = torch.exp2(-8 * torch.arange(1.0, heads + 1, device=live.device) / heads)
        at = torch.arange(n, device=live.device)
        bias = slope.view(-1, 1, 1) * (at - at.view(-1, 1))
        self.bias = bias.masked_fill(~live, -torch.inf)

    def __call__(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, self.bias)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, attention):
        B, N, W = x.shape
        q, k, v = self.qkv(self.before(x)).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(q, k, v).transpose(1, 2).reshape(B, N, W))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """Without position embeddings: ALiBi tells where bytes stand."""

    def __init__(self, layers, width, heads):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, text, targets, documents, attention):
        """Mean loss in nats a byte."""
        attention.prepare(documents, text.shape[1], self.heads)
        x = self.embed(text)
        for block in self.blocks:
            x = block(x, attention)
        logits = self.last(x) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(name, model, batches, attention, steps, rate=3e-3):
    """(loss of each step, tokens per second); shows how far it is."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    losses, start, tokens = [], time.perf_counter(), 0
    for step in range(steps):
        text, targets, documents = next(batches)
        with half_on_gpus(text):
            loss = model(text, targets, documents, attention)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += text.numel()
        speed = tokens / (time.perf_counter() - start)
        show(name, step + 1, steps, f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s")
    return losses, speed


def half_on_gpus(t):
    """Products and attention in bf16 on a GPU, sums and weights in f32."""
    return torch.autocast(t.device.type, torch.bfloat16, enabled=t.is_cuda)


def show(name, done, total, text):
    """A line that grows to the right."""
    if not sys.stderr.isatty() and done < total:
        return
    bar = "#" * (30 * done // total)
    end = "\n" if done == total else ""
    print(f"\r{name:18} [{bar:30}] {done}/{total}  {text}  ", end=end, file=sys.stderr)


@torch.no_grad()
def held_out(model, batches, attention, n=8):
    """Mean loss of a few batches."""
    total = 0.0
    for _ in range(n):
        text, targets, documents = next(batches)
        with half_on_gpus(text):
            total += model(text, targets, documents, attention).item()
    return total / n


COLORS = "#2b6cb0 #dd6b20 #2f855a #b83280".split()


def picture(path, title, curves, smooth=10):
    """Loss curves, {name: losses}, as an SVG: means over `smooth` steps."""
    W, H, left, top = 720, 400, 60, 40
    means = {
        name: [
            sum(c[max(0, i - smooth + 1) : i + 1]) / min(i + 1, smooth) for i in range(len(c))
        ]
        for name, c in curves.items()
    }
    every = [x for c in means.values() for x in c]
    low, high, steps = min(every), max(every), max(map(len, means.values()))

    def place(i, x):
        y = top + (H - 2 * top) * (high - x) / ((high - low) or 1)
        return f"{left + (W - 2 * left) * i / max(1, steps - 1):.1f},{y:.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{W}" height="{H}" fill="white"/>',
        f'<text x="{left}" y="24" font-size="16">{title}</text>',
    ]
    for k in range(5):
        x = low + (high - low) * k / 4
        y = place(0, x).split(",")[1]
        out.append(f'<path d="M{left} {y}H{W - left}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y}" text-anchor="end">{x:.2f}</text>')
    for k, (name, c) in enumerate(means.items()):
        points = " ".join(place(i, x) for i, x in enumerate(c))
        color = COLORS[k % len(COLORS)]
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
        out.append(f'<text x="{W - 220}" y="{60 + 18 * k}" fill="{color}">{name}</text>')
    out.append(f'<text x="{W / 2}" y="{H - 10}">step, of {steps}</text></svg>')
    pathlib.Path(path).write_text("\n".join(out) + "\n")
    print(f"loss curves: {path}")
