"""A tree of drafts verified in one run: keys in pages, ancestors as bits.

usage: python examples/draft_tree.py [--nodes 12] [--prefix 300] [--page 16] [--device cpu]

A model that drafts several continuations at a time writes them as a tree behind the sequence:
key prefix + i is node i, whose parent is some earlier node. Node i may see the prefix, its
ancestors and itself. In Saccade's language that is one line over two captures: the lengths of
the prefixes, and 64 bits of ancestors for each node, as two words. All nodes of all sequences
run together, over pages; each is compared with a causal run of its own path alone.
"""
import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import saccade.torch as st  # noqa: E402

B, H, HKV, D = 2, 8, 2, 64
TREE = "n = kv - len[b]; kv < len[b] || ((tree[b, q, n / 32] >> n % 32) & 1) == 1"


def ancestors(parents):
    """For each node two words, bit i of word j: node 32 j + i is an ancestor, or the node."""
    seen = []
    for i, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << i)
    words = torch.tensor([[x & 0xFFFFFFFF, x >> 32] for x in seen])
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def in_pages(k, v, page):
    """Pools of pages in a random order, and their table."""
    n = -(-k.shape[2] // page)
    table = torch.randperm(2 * B * n, device=k.device)[:B * n]
    pools = []
    for x in (k, v):
        x = torch.nn.functional.pad(x, (0, 0, 0, n * page - x.shape[2]))
        pools.append(x.new_zeros((2 * B * n, HKV, page, D)))
        pools[-1][table] = x.view(B, HKV, n, page, D).transpose(1, 2).flatten(0, 1)
    return *pools, table.view(B, n).int()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=12, help="2 to 64")
    parser.add_argument("--prefix", type=int, default=300)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    o = parser.parse_args()
    torch.manual_seed(3)
    parents = [[int(torch.randint(i, (1,))) if i else -1 for i in range(o.nodes)]
               for _ in range(B)]
    lengths = torch.tensor([o.prefix, o.prefix // 2], dtype=torch.int32, device=o.device)
    tree = torch.stack([ancestors(p) for p in parents]).to(o.device)
    dtype = torch.float32 if o.device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(B, h, n, D, device=o.device, dtype=dtype)
               for h, n in ((H, o.nodes), (HKV, o.prefix + o.nodes), (HKV, o.prefix + o.nodes)))
    keys, values, table = in_pages(k, v, o.page)
    mask = st.mask(TREE, len=lengths, tree=tree)
    out = st.cached_attention(q, keys, values, mask, block_table=table, q_offset=0,
                              seq_lens=lengths + o.nodes)
    worst = 0.0
    for b in range(B):
        n = int(lengths[b])
        for node in range(o.nodes):
            path = path_to(parents[b], node)
            seen = torch.tensor([*range(n), *(n + i for i in path)], device=o.device)
            own = st.cached_attention(q[b:b + 1, :, node:node + 1], k[b:b + 1, :, seen],
                                      v[b:b + 1, :, seen], "causal()")
            worst = max(worst, (own[0, :, 0] - out[b, :, node]).abs().max().item())
    print(f"{B} trees of {o.nodes} nodes behind {o.prefix} and {o.prefix // 2} keys, pages of "
          f"{o.page}: largest difference from each path alone {worst:.1e}")
    assert worst < (1e-5 if dtype is torch.float32 else 2e-2)


if __name__ == "__main__":
    main()
