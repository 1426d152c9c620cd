"""A byte-level GPT with ALiBi in packed documents, the attention of which is two lines of text;
beside PyTorch's SDPA with a dense mask, from the same weights and batches.

usage: PYTHONPATH=python python examples/train_gpt.py [--steps N] [--svg FILE] [--short]

Prints losses of both and of SDPA from another seed, and whether a second run has the same bits.
"""

import argparse

import torch
from byte_gpt import GPT, Batches, Dense, Fused, corpus, digest, picture, train

SCORE = "alibi()"
MASK = "doc[b, q] == doc[b, kv] && q >= kv"

options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
options.add_argument("--steps", type=int, default=0, help="200, of --short 8")
options.add_argument("--batch", type=int, default=8)
options.add_argument("--n", type=int, default=256, help="bytes of a row")
options.add_argument("--layers", type=int, default=4)
options.add_argument("--width", type=int, default=128)
options.add_argument("--heads", type=int, default=4)
options.add_argument("--svg", default="train_gpt.svg")
options.add_argument("--short", action="store_true", help="a few steps of a tiny model")
o = options.parse_args()
o.steps = o.steps or (8 if o.short else 200)
if o.short:
    o.batch, o.n, o.layers, o.width, o.heads = 2, 64, 1, 32, 2

device = "cuda" if torch.cuda.is_available() else "cpu"
text, documents = corpus(400_000 if o.short else 12_000_000)
print(f"score: {SCORE}\nmask:  {MASK}")


def run(name, attention, seed):
    torch.manual_seed(seed)
    model = GPT(o.layers, o.width, o.heads).to(device)
    batches = Batches(text, documents, o.batch, o.n, seed, device)
    losses, speed = train(name, model, batches, attention, o.steps)
    last = sum(losses[-10:]) / len(losses[-10:])
    weights = digest(*model.parameters())[:16]
    print(f"{name:18} loss {last:.4f}  {speed:9,.0f} tokens/s  weights {weights}")
    return losses, last, weights


saccade = run("saccade", Fused(SCORE, MASK), 0)
sdpa = run("sdpa", Dense(MASK), 0)
other = run("sdpa, other seed", Dense(MASK), 1)
again = run("saccade again", Fused(SCORE, MASK), 0)
picture(
    o.svg, "byte-level GPT, ALiBi, packed documents", {"saccade": saccade[0], "sdpa": sdpa[0]}
)
print(
    f"saccade against sdpa {abs(saccade[1] - sdpa[1]):.1e}, "
    f"two seeds of sdpa {abs(sdpa[1] - other[1]):.1e}"
)
assert saccade[2] == again[2], "a second run differs"
assert abs(saccade[1] - sdpa[1]) <= abs(sdpa[1] - other[1]), "further apart than two seeds"
