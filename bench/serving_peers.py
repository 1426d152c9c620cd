"""Serving on a GPU beside PyTorch's own: pages, ragged batches, batch invariance, sinks.

usage: python bench/serving_peers.py [SUITE ...] [--rounds 11] [--lengths 2048,8192,32768]
SUITE: paged ragged invariant sinks tree shared (none: all).

paged: decode, b32 h16 d64, pages of 128 in a random order over a pool twice as large, by
FlexAttention's own PagedAttention and by cached_attention over the very same pool and table,
each also over keys in one piece. ragged: causal, 64 sequences of 64 to 8192, h16, beside
torch.nn.attention.varlen and beside the same tokens as documents of one sequence. invariant:
batch_invariant against without. sinks: with against without. tree: drafts
of a tree behind a prefix, in pages of 64, against causal ones. shared: decode of 64 sequences,
in groups that begin alike, by SharedPrefix against cached_attention. All contenders of a case
have the same random tensors; medians of CUDA events by turns (peers_cuda.medians), and results
are compared before times are. A line ends with what is asked, where something is.
"""
import argparse
import inspect

import torch

from peers_cuda import check_same, flex, medians, ours, recorded

PAGE = 128
ROW = 16 * 64  # elements of a key


def normal(*shape):
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def line(label, ms, base, asked=""):
    """Each contender's time, and how many times faster `base` is."""
    times = " ".join(f"{name} {t * 1e3:.1f} us" for name, t in ms.items())
    ratios = " ".join(f"{name} {t / ms[base]:.3f}" for name, t in ms.items() if name != base)
    print(f"{label:34} {times} | over {base}: {ratios} {asked}", flush=True)


def their_pages(B, KV, lengths):
    """FlexAttention's table of B sequences of KV keys, pages drawn at random."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    most = (2**31 - 1) // (ROW * PAGE)  # flex_attention 2.11 compiles for no larger pool
    paged = PagedAttention(min(2 * B * KV // PAGE, most), PAGE, B)
    paged.empty_pages = torch.randperm(paged.n_pages).tolist()
    for b in range(B):
        paged.reserve(torch.tensor(b, device="cuda"), lengths[b].long())
    return paged


def paged(o):
    for KV in o.lengths:
        paged_of(KV, o)
        torch.cuda.empty_cache()


def paged_of(KV, o):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, H, D = 32, 16, 64
    q, k, v = normal(B, H, 1, D), normal(B, H, KV, D), normal(B, H, KV, D)
    lengths = torch.full((B,), KV, dtype=torch.int32, device="cuda")
    pages = their_pages(B, KV, lengths)
    pools = [normal(1, H, pages.n_pages * PAGE, D) for _ in range(2)]
    places = torch.arange(KV, device="cuda").expand(B, KV)
    for b in range(B):
        one = torch.tensor([b], device="cuda")
        pages.assign(one, places[:1], k[b:b + 1], v[b:b + 1], *pools)

    def live(b, h, q_idx, kv_idx):
        return q_idx + (KV - 1) >= kv_idx

    torch._dynamo.reset()
    logical = create_block_mask(live, B, None, 1, KV, device="cuda", BLOCK_SIZE=PAGE)
    physical = pages.convert_logical_block_mask(logical)
    compiled = torch.compile(flex_attention, dynamic=False)
    table = pages.page_table[:, :KV // PAGE].int().contiguous()
    mine = [x.view(H, pages.n_pages, PAGE, D).transpose(0, 1) for x in pools]
    runs = {
        "saccade": lambda: ours.cached_attention(q, *mine, None, seq_lens=lengths,
                                                 block_table=table),
        "saccade one piece": lambda: ours.cached_attention(q, k, v, None,
                                                           seq_lens=lengths),
        "flex paged": lambda: compiled(q, *pools, block_mask=physical),
    }
    check_same(f"paged kv{KV}", runs, ["saccade one piece", "flex paged"])
    runs["flex one piece"] = flex(q, k, v, None, None)
    line(f"paged b{B} h{H} kv{KV} d{D}", medians(runs, o.rounds), "saccade",
         "(flex paged: 1.7 asked)")


def unequal_lengths(n=64, least=64, most=8192, total=262144):
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(least, most + 1, (n,), generator=generator)
    while int(lengths.sum()) != total:  # the rest goes to whoever has room for it
        i = int(torch.randint(n, (1,), generator=generator))
        rest = total - int(lengths.sum())
        lengths[i] = min(most, max(least, int(lengths[i]) + rest))
    return lengths


def varlen(q, k, v, cu, most):
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    how = {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}
    return lambda: varlen_attn(q, k, v, cu, cu, most, most, **how)


def ragged(o):
    lengths, H = unequal_lengths(), 16
    T, most = int(lengths.sum()), int(lengths.max())
    cu = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int().cuda()
    doc = torch.repeat_interleave(torch.arange(len(lengths)), lengths).int().cuda()
    block = ours.create_block_mask(ours.mask("document(doc) && causal()", doc=doc), None, None,
                                   T, T, device="cuda")
    live = int((lengths * (lengths + 1) // 2).sum())
    for D, asked in ((128, 1.85), (64, 1.6)):
        q, k, v = (normal(T, H, D) for _ in range(3))
        whole = [x.transpose(0, 1)[None] for x in (q, k, v)]
        runs = {
            "saccade": lambda: ours.varlen_attention(q, k, v, cu, cu, most, most),
            "varlen": varlen(q, k, v, cu, most),
            "documents": lambda: ours.flex_attention(*whole, None, block)[0].transpose(0, 1),
        }
        check_same(f"ragged d{D}", runs, ["varlen", "documents"])
        ms = medians(runs, o.rounds)
        line(f"ragged b{len(lengths)} h{H} {T} d{D}", ms, "saccade",
             f"(varlen: {asked} asked, documents 0.98), "
             f"{4 * D * H * live / ms['saccade'] / 1e9:.0f} TFLOP/s")


# batch, heads, KV heads, queries, keys, head dim, mask
INVARIANT = [(1, 32, 8, 1, 131072, 128, None), (64, 32, 8, 1, 8192, 128, None),
             (1, 32, 8, 8192, 8192, 128, "causal()"), (4, 16, 16, 8192, 8192, 64, "causal()")]
SINKS = [(4, 16, 16, 8192, 8192, 128, None), (4, 16, 16, 8192, 8192, 128, "causal()"),
         (4, 16, 16, 8192, 8192, 64, None), (64, 64, 8, 1, 8192, 64, None),
         (1, 64, 8, 1, 131072, 64, None)]


def with_against_without(name, cases, options, asked, rounds):
    for case in cases:
        one_with_against_without(name, case, options, asked, rounds)
        torch.cuda.empty_cache()


def one_with_against_without(name, case, options, asked, rounds):
    B, H, G, Q, KV, D, mask = case
    q, k, v = normal(B, H, Q, D), normal(B, G, KV, D), normal(B, G, KV, D)
    runs = {"without": lambda: ours.cached_attention(q, k, v, mask),
            name: lambda: ours.cached_attention(q, k, v, mask, **options(H, Q))}
    if name == "invariant":
        check_same(f"{name} kv{KV}", {"saccade": runs["without"], **runs}, [name])
    line(f"{name} b{B} h{H}/{G} q{Q} kv{KV} d{D} {mask or ''}", medians(runs, rounds),
         "without", f"({asked} asked)")


def invariant(o):
    with_against_without("invariant", INVARIANT,
                         lambda H, Q: {"kernel_options": {"BATCH_INVARIANT": True}}, 1.1,
                         o.rounds)


def sinks(o):
    with_against_without("sinks", SINKS, lambda H, Q: {"sinks": torch.zeros(H, device="cuda")},
                         1.01, o.rounds)


TREE = "n = kv - len[b]; kv < len[b] || ((tree[b, q, n / 32] >> n % 32) & 1) == 1"


def tree(o):
    for nodes, KV in ((8, 8192), (16, 32768), (64, 8192)):
        tree_of(nodes, KV, o)
        torch.cuda.empty_cache()


def tree_of(nodes, KV, o):
    B, H, G, D, page = 8, 32, 8, 128, 64
    pages = B * KV // page
    q, pools = normal(B, H, nodes, D), [normal(2 * pages, G, page, D) for _ in range(2)]
    table = torch.randperm(2 * pages, device="cuda")[:pages].view(B, -1).int()
    lengths = torch.full((B,), KV, dtype=torch.int32, device="cuda")
    straight = torch.tensor([[(1 << min(i + 1, 31)) - 1, (1 << max(i - 31, 0)) - 1]
                             for i in range(nodes)])
    straight[31:, 0] = -1  # all of 32
    mask = ours.mask(TREE, len=lengths - nodes,
                     tree=straight.int().cuda().expand(B, -1, -1).contiguous())
    runs = {
        "saccade": lambda: ours.cached_attention(q, *pools, mask, seq_lens=lengths,
                                                 q_offset=0, block_table=table),
        "causal": lambda: ours.cached_attention(q, *pools, seq_lens=lengths,
                                                block_table=table),
    }
    check_same(f"tree of {nodes}", runs, ["causal"])
    line(f"tree b{B} h{H}/{G} q{nodes} kv{KV} d{D}", medians(runs, o.rounds), "causal")


def shared(o):
    for groups, common in ((1, 8192), (4, 8192), (1, 32768), (16, 2048)):
        shared_by(groups, common, o)
        torch.cuda.empty_cache()


def shared_by(groups, common, o):
    B, H, G, D, page, own = 64, 32, 8, 128, 64, 512
    KV, n = common + own, B // groups
    pages = B * KV // page
    q, pools = normal(B, H, 1, D), [normal(2 * pages, G, page, D) for _ in range(2)]
    table = torch.randperm(2 * pages, device="cuda")[:pages].view(B, -1).int()
    for b in range(B):
        table[b, :common // page] = table[b // n * n, :common // page]
    lengths = torch.full((B,), KV, dtype=torch.int32, device="cuda")
    cu = torch.arange(0, B + 1, n, dtype=torch.int32, device="cuda")
    prefix = ours.SharedPrefix(table, lengths, cu, torch.full_like(cu[1:], common),
                               page=page, max_shared=common)
    runs = {
        "saccade": lambda: prefix.attention(q, *pools),
        "unshared": lambda: ours.cached_attention(q, *pools, seq_lens=lengths,
                                                  block_table=table),
    }
    check_same(f"{groups} groups that share {common}", runs, ["unshared"])
    graphs = {name: recorded(run) for name, run in runs.items()}
    line(f"shared b{B} groups {groups} kv{common}+{own}", medians(graphs, o.rounds),
         "saccade")


SUITES = {"paged": paged, "ragged": ragged, "invariant": invariant, "sinks": sinks,
          "tree": tree, "shared": shared}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], metavar="SUITE")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--lengths", default="2048,8192,32768",
                        type=lambda text: [int(x) for x in text.split(",")])
    o = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to measure")
        return
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    for suite in o.suites or SUITES:
        SUITES[suite](o)


if __name__ == "__main__":
    main()
