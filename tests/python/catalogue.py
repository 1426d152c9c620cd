"""Masks and score functions as FlexAttention users write them, for tests.

Each entry makes its captures for given sizes. Formulas: FlexAttention (arXiv 2412.05496) and
the papers named in docs/language.md.
"""

import functools
import math

import torch


def masks(B, H, Q, KV, g):
    """name -> mask_mod."""
    doc = torch.sort(torch.randint(0, 5, (max(Q, KV),), generator=g)).values
    prefix = torch.randint(1, KV + 1, (B,), generator=g)
    is_global = torch.rand(max(Q, KV), generator=g) < 0.1
    heads = torch.arange(H) % 2 == 0
    live = torch.rand(B, Q, generator=g) < 0.7
    width, window = 8, 9

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def sliding(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= window) & (q_idx >= kv_idx)

    def dilated(b, h, q_idx, kv_idx):
        d = torch.abs(q_idx - kv_idx)
        return (d <= window) & (d % 3 == 0)

    def longformer(b, h, q_idx, kv_idx):
        return ((q_idx - kv_idx).abs() <= window) | is_global[q_idx] | is_global[kv_idx]

    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < prefix[b]) | (q_idx >= kv_idx)

    def document(b, h, q_idx, kv_idx):
        return doc[q_idx] == doc[kv_idx]

    def document_causal(b, h, q_idx, kv_idx):
        return document(b, h, q_idx, kv_idx) & causal(b, h, q_idx, kv_idx)

    def natten(b, h, q_idx, kv_idx):
        qx, qy, kx, ky = q_idx // width, q_idx % width, kv_idx // width, kv_idx % width
        cx = qx.clamp(2, (Q - 1) // width - 2)
        cy = qy.clamp(2, width - 1 - 2)
        return ((cx - kx).abs() <= 2) & ((cy - ky).abs() <= 2)

    def batchify(b, h, q_idx, kv_idx):
        same = q_idx // 16 == kv_idx // 16
        return same & causal(b, h, q_idx % 16, kv_idx % 16)

    def per_head(b, h, q_idx, kv_idx):
        return heads[h] & causal(b, h, q_idx, kv_idx)

    def rows(b, h, q_idx, kv_idx):
        return ~live[b, q_idx]

    def skip_odd(b, h, q_idx, kv_idx):
        return kv_idx % 2 == 0

    def xor(b, h, q_idx, kv_idx):
        return ((q_idx ^ kv_idx) & 5) != 0

    def offset(by, b, h, q_idx, kv_idx):
        return q_idx + by >= kv_idx

    start = torch.tensor([0, *(torch.bincount(doc, minlength=5).cumsum(0).tolist())])
    prompt_of = torch.tensor([0, 0, 0, 3, 3])

    def in_documents(inner):
        """A mask on positions counted from the start of each document."""

        def mod(b, h, q_idx, kv_idx):
            first = start[doc[q_idx]]
            local = inner(b, h, q_idx - first, kv_idx - start[doc[kv_idx]])
            return (doc[q_idx] == doc[kv_idx]) & local

        return mod

    def packed_causal(b, h, q_idx, kv_idx):
        return (kv_idx >= start[doc[q_idx]]) & (q_idx >= kv_idx)

    def shared_prefix(b, h, q_idx, kv_idx):
        own, prompt = doc[q_idx], prompt_of[doc[q_idx]]
        in_prompt = (kv_idx >= start[prompt]) & (kv_idx < start[prompt + 1])
        return packed_causal(b, h, q_idx, kv_idx) | ((own != prompt) & in_prompt)

    modality = torch.tensor([[5, 12], [30, 41], [50, 64]])

    def transfusion(b, h, q_idx, kv_idx):
        live = q_idx >= kv_idx
        for first, end in modality:
            inside = (q_idx >= first) & (q_idx < end) & (kv_idx >= first) & (kv_idx < end)
            live = live | inside
        return live

    image = torch.arange(KV) * 5 // KV
    seen = torch.tensor([[0, 20], [10, 30], [30, 31], [31, 65], [64, 65]])

    def flamingo(b, h, q_idx, kv_idx):
        return (q_idx >= seen[image[kv_idx], 0]) & (q_idx < seen[image[kv_idx], 1])

    def untiled(index):
        """Row and column of a token in tiles of 4 x 2 on a grid 8 wide."""
        tile, at = index // 8, index % 8
        return tile // 4 * 4 + at // 2, tile % 4 * 2 + at % 2

    def natten_tiled(b, h, q_idx, kv_idx):
        (qy, qx), (ky, kx) = untiled(q_idx), untiled(kv_idx)
        near_x = (qx.clamp(1, width - 2) - kx).abs() <= 1
        return near_x & ((qy.clamp(2, 13) - ky).abs() <= 2)

    def even_bits(index):
        x = index & 0x5555
        for by, kept in ((1, 0x3333), (2, 0x0F0F), (4, 0x00FF)):
            x = (x | (x >> by)) & kept
        return x

    def natten_morton(b, h, q_idx, kv_idx):
        qx, qy, kx, ky = (even_bits(i >> n) for i in (q_idx, kv_idx) for n in (0, 1))
        return ((qx.clamp(1, 6) - kx).abs() <= 1) & ((qy.clamp(1, 6) - ky).abs() <= 1)

    def sliding_tiles(b, h, q_idx, kv_idx):
        """A grid of 4 x 4 x 4 in tiles of 2 x 2 x 2, then text that sees and is seen."""
        near = (q_idx < 64) & (kv_idx < 64)
        for by in (16, 4, 1):
            tq, tk = q_idx // by % 4 // 2, kv_idx // by % 4 // 2
            near = near & ((tq.clamp(0, 1) - tk).abs() <= (by == 16))
        return near | (q_idx >= 64) | ((q_idx < 64) & (kv_idx >= 64))

    frame, prompt = 16, 6

    def video_spatial(b, h, q_idx, kv_idx):
        band = (q_idx - kv_idx).abs() < round(1.5 * frame)
        return (kv_idx < prompt + frame) | (q_idx < prompt) | band

    def video_temporal(b, h, q_idx, kv_idx):
        at = (q_idx - prompt) % frame - (kv_idx - prompt) % frame
        return (kv_idx < prompt) | (q_idx < prompt) | (at.abs() < 3)

    top = torch.stack([torch.randperm(KV // 8, generator=g)[:3] for _ in range(Q // 8 + 1)])

    def top_tiles(b, h, q_idx, kv_idx):
        return (top[q_idx // 8] == kv_idx // 8).any()

    noised, step = 32, 4

    def block_diffusion(b, h, q_idx, kv_idx):
        q_noised, k_noised = q_idx < noised, kv_idx < noised
        qb = torch.where(q_noised, q_idx, q_idx - noised) // step
        kb = torch.where(k_noised, kv_idx, kv_idx - noised) // step
        diagonal = (qb == kb) & (q_noised == k_noised)
        return (
            diagonal | ((qb > kb) & q_noised & ~k_noised) | ((qb >= kb) & ~q_noised & ~k_noised)
        )

    ancestor, context = torch.rand(Q, Q, generator=g) < 0.3, 12

    def draft_tree(b, h, q_idx, kv_idx):
        node = (kv_idx - context).clamp(0, Q - 1)
        in_tree = (kv_idx >= context) & (kv_idx < context + Q)
        return (kv_idx < context) | (in_tree & ancestor[q_idx, node])

    def draft_training(b, h, q_idx, kv_idx):
        at = kv_idx - context
        return (kv_idx < context) | (
            (at >= 0) & (q_idx // 8 == at // 8) & (at % 8 <= q_idx % 8)
        )

    length = torch.randint(1, Q, (B,), generator=g)

    def padded(b, h, q_idx, kv_idx):
        return (q_idx < length[b]) & (kv_idx < length[b])

    def stand_alone(b, h, q_idx, kv_idx):
        dx, dy = q_idx % width - kv_idx % width, q_idx // width - kv_idx // width
        return (dx.abs() <= 2) & (dy.abs() <= 1)

    def float_division(b, h, q_idx, kv_idx):
        return (torch.floor(q_idx / width) - torch.floor(kv_idx / width)).abs() <= 1

    made = dict(
        causal=causal,
        sliding=sliding,
        dilated=dilated,
        longformer=longformer,
        prefix_lm=prefix_lm,
        document=document,
        document_causal=document_causal,
        natten=natten,
        batchify=batchify,
        per_head=per_head,
        rows=rows,
        skip_odd=skip_odd,
        xor=xor,
        sliding_in_documents=in_documents(sliding),
        prefix_in_documents=in_documents(prefix_lm),
        packed_causal=packed_causal,
        shared_prefix=shared_prefix,
        transfusion=transfusion,
        flamingo=flamingo,
        natten_tiled=natten_tiled,
        natten_morton=natten_morton,
        sliding_tiles=sliding_tiles,
        video_spatial=video_spatial,
        video_temporal=video_temporal,
        top_tiles=top_tiles,
        block_diffusion=block_diffusion,
        draft_tree=draft_tree,
        draft_training=draft_training,
        padded=padded,
        stand_alone=stand_alone,
        float_division=float_division,
    )
    made["block_causal"] = lambda b, h, q, kv: q // 16 >= kv // 16
    made["mini_causal"] = lambda b, h, q, kv: q % 16 >= kv % 16
    made["batch_parity"] = lambda b, h, q, kv: (b % 2 == 0) | (q >= kv)
    made["inverse_causal"] = lambda b, h, q, kv: q <= kv
    made["noop"] = lambda b, h, q, kv: (
        torch.ones_like(q, dtype=torch.bool) if torch.is_tensor(q) else True
    )
    made["partial_offset"] = functools.partial(offset, 7)
    return made


def scores(B, H, Q, KV, g):
    """name -> score_mod."""
    N = max(Q, KV)
    f = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    head, row, key = f(H), f(Q), f(KV)
    bias2, bias3, bias4 = f(Q, KV), f(B, Q, KV), f(B, H, Q, KV)
    table, off = f(Q + KV), torch.randint(0, Q, (Q,), generator=g)
    point, which = f(N, 3), torch.tensor(1)
    stacked, scale0 = f(B, H, 2, N), torch.tensor(2, dtype=torch.int32)
    slope, cap = 0.25, 20.0

    class Gate:
        def __init__(self):
            self.gate = f(H)

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * torch.sigmoid(self.gate[h])

    def alibi(score, b, h, q_idx, kv_idx):
        return score + torch.exp2(-((h + 1) * 8.0 / H)) * (kv_idx - q_idx)

    def chained(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(alibi(score, b, h, q_idx, kv_idx) / cap)

    def causal_score(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    waves = 1 / (10000 ** (torch.arange(0, 8) / 8))
    sandwich_table = torch.cos(torch.arange(-N, N)[:, None] * waves).sum(-1)

    def sandwich(score, b, h, q_idx, kv_idx):
        return score + sandwich_table[q_idx - kv_idx + N] * H / (8 * (h + 1))

    hops = torch.randint(0, 6, (B, Q, KV), generator=g)
    of_hops, of_edge = f(H, 6), f(3, H, 5)
    path = torch.randint(0, 4, (B, Q, KV), generator=g)
    edges = torch.randint(0, 5, (B, Q, KV, 3), generator=g)

    def graphormer(score, b, h, q_idx, kv_idx):
        """Bias by distance in a graph, and the mean over the edges of the path there."""
        total = 0.0
        for n in range(3):
            kind = edges[b, q_idx, kv_idx, n]
            total = total + torch.where(path[b, q_idx, kv_idx] > n, of_edge[n, h, kind], 0.0)
        mean = total / torch.clamp(path[b, q_idx, kv_idx], min=1)
        return score + of_hops[h, hops[b, q_idx, kv_idx]] + mean

    q_rope, k_rope = f(B, H, Q, 8), f(B, 1, KV, 8)

    def mla(score, b, h, q_idx, kv_idx):
        """The decoupled positional part of DeepSeek-V2's scores."""
        return score + 0.2 * torch.dot(q_rope[b, h, q_idx], k_rope[b, h // H, kv_idx])

    def activation(score, b, h, q_idx, kv_idx):
        """ReLU attention through softmax: exp(log(x)) is x."""
        return torch.log(torch.relu(score) + 1e-3)

    def checkerboard(score, b, h, q_idx, kv_idx):
        score = torch.where((kv_idx - q_idx) % 2 == 1, score * 0.5, score)
        return torch.where((kv_idx - q_idx) % 2 == 0, score * 2, score)

    buckets = f(32, H)

    def t5_bias(score, b, h, q_idx, kv_idx):
        """Exact buckets for near positions, logarithmic ones beyond."""
        n = (q_idx - kv_idx).clamp(min=0)
        far = 16 + (torch.log((n.float() + 0.5) / 16) / math.log(128 / 16) * 16).to(torch.int32)
        return score + buckets[torch.where(n < 16, n, far.clamp(0, 31)), h]

    rows_bias, columns_bias = f(B, H, Q, KV // 8 + 1), f(B, H, Q, 8)

    def decomposed(score, b, h, q_idx, kv_idx):
        at = rows_bias[b, h, q_idx, kv_idx // 8] + columns_bias[b, h, q_idx, kv_idx % 8]
        return score + at

    inner, outer = f(6), f(6)

    def mlp(score, b, h, q_idx, kv_idx):
        """A small network of the distance."""
        x = torch.tanh((q_idx - kv_idx) / 16.0)
        total = 0.0
        for n in range(6):
            total = total + outer[n] * torch.relu(inner[n] * x)
        return score + total

    def distance(score, b, h, q_idx, kv_idx):
        d = q_idx - kv_idx
        return score / (1 + 1e-4 * d * d)

    def euclid(score, b, h, q_idx, kv_idx):
        return score * torch.exp(-torch.norm(point[q_idx] - point[kv_idx]) / 4)

    return dict(
        identity=lambda s, b, h, q, kv: s,
        times2=lambda s, b, h, q, kv: s * 2,
        squared=lambda s, b, h, q, kv: s * s,
        relative=lambda s, b, h, q, kv: s + (q - kv),
        silu=lambda s, b, h, q, kv: torch.nn.functional.silu(s),
        trig=lambda s, b, h, q, kv: torch.sin(torch.cos(s)) + torch.tan(b * 1.0),
        head=lambda s, b, h, q, kv: s * head[h],
        int_scale=lambda s, b, h, q, kv: s * scale0,
        bias_q=lambda s, b, h, q, kv: s + row[q],
        bias_kv=lambda s, b, h, q, kv: s + key[kv],
        bias2=lambda s, b, h, q, kv: s + bias2[q, kv],
        bias3=lambda s, b, h, q, kv: s + bias3[b, q, kv],
        bias4=lambda s, b, h, q, kv: s + bias4[b, h, q, kv],
        chained_index=lambda s, b, h, q, kv: s + bias4[b][h][q][kv],
        mixed_index=lambda s, b, h, q, kv: s + bias4[b, h][q, kv],
        which=lambda s, b, h, q, kv: s + stacked[b, h, which, q],
        indirect=lambda s, b, h, q, kv: s + row[off[q]],
        table=lambda s, b, h, q, kv: s + table[q - kv + KV],
        symmetric=lambda s, b, h, q, kv: s + point[q, 0] + point[kv, 0],
        slope=lambda s, b, h, q, kv: s - slope * (q - kv).abs(),
        floor_div=lambda s, b, h, q, kv: s + q // (1 + kv),
        negative=lambda s, b, h, q, kv: s + key[-1 - kv],
        clamp=lambda s, b, h, q, kv: s + (q - kv).clamp(-3, 3),
        gate=Gate(),
        alibi=alibi,
        chained=chained,
        causal_score=causal_score,
        distance=distance,
        euclid=euclid,
        softcap=lambda s, b, h, q, kv: cap * torch.tanh(s / cap),
        flipped=lambda s, b, h, q, kv: s + bias2.T[kv, q],
        sandwich=sandwich,
        graphormer=graphormer,
        mla=mla,
        activation=activation,
        checkerboard=checkerboard,
        t5_bias=t5_bias,
        decomposed=decomposed,
        mlp=mlp,
    )
