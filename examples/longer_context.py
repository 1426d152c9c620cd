"""Longer context and sparse masks, as FlashAttention's paper compares them, in miniature.

GPTs that see 256 bytes or 2048, and of these all, a window with a few global bytes, or a
butterfly (arXiv 2205.14135, section 4): for each the same number of tokens, then its loss on
held-out text and what it cost. A sparse mask costs less and loses little. That more context
loses less, as in the paper, is not seen in the minutes here: rows of 256 bytes are ahead at
500,000 tokens (2.41, 2.58) and at 3,000,000 (1.64, 1.95).

usage: PYTHONPATH=python python examples/longer_context.py [--tokens N] [--short]
"""

import argparse
import time

import torch
from byte_gpt import GPT, Batches, Fused, corpus, held_out, picture, train

DOCUMENTS = "doc[b, q] == doc[b, kv] && q >= kv"
WINDOW = DOCUMENTS + " && (q - kv < 128 || kv % 256 < 8)"
# of blocks of 64 bytes, those whose numbers differ by at most one bit
BUTTERFLY = "x = (q / 64) ^ (kv / 64); (x & (x - 1)) == 0 && " + DOCUMENTS

options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
options.add_argument("--tokens", type=int, default=0, help="500,000, of --short 4096")
options.add_argument("--long", type=int, default=2048)
options.add_argument("--svg", default="longer_context.svg")
options.add_argument("--short", action="store_true", help="a few steps of a tiny model")
o = options.parse_args()
layers, width, heads = 4, 128, 4
o.tokens = o.tokens or (4096 if o.short else 500_000)
if o.short:
    o.long, layers, width, heads = 512, 1, 32, 2
device = "cuda" if torch.cuda.is_available() else "cpu"
text, documents = corpus(400_000 if o.short else 12_000_000)
cut = len(text) * 9 // 10
curves, found = {}, {}
for name, n, mask in (
    ("N 256", 256, DOCUMENTS),
    (f"N {o.long}", o.long, DOCUMENTS),
    (f"N {o.long}, window", o.long, WINDOW),
    (f"N {o.long}, butterfly", o.long, BUTTERFLY),
):
    torch.manual_seed(0)
    model = GPT(layers, width, heads).to(device)
    attention = Fused("alibi()", mask)
    batch = o.long // n  # tokens of a step are the same for all
    batches = Batches(text[:cut], documents[:cut], batch, n, 0, device)
    start = time.perf_counter()
    curves[name], speed = train(name, model, batches, attention, max(1, o.tokens // o.long))
    spent = time.perf_counter() - start
    kept = Batches(text[cut:], documents[cut:], batch, n, 9, device)
    loss = held_out(model, kept, attention, 2 if o.short else 16)
    live = 1 - attention.blocks.sparsity() / 100
    print(
        f"{name:18} held-out loss {loss:.4f}  {spent:7.1f} s  {speed:9,.0f} tokens/s  "
        f"live blocks {100 * live:.0f} %",
        flush=True,
    )
picture(o.svg, "the same number of tokens, more context", curves)
