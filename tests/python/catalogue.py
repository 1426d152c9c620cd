"""Masks and score functions as FlexAttention users write them, for tests.

Each entry makes its captures for given sizes. Formulas: FlexAttention (arXiv 2412.05496) and
the papers named in docs/language.md.
"""

import functools

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
    )
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
    )
