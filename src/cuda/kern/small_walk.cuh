/* How a team's warpgroup walks a tile's pieces of keys: scores, softmax, O += P V. With
 * CFG_AHEAD a piece's scores are made beside the softmax of the piece before, which takes
 * registers for the scores of two; else beside that piece's product with V alone. */
#pragma once

struct progress {
    u32 n, q; /* loads of K or V, and of Q, that are used up */
    int lost; /* see small_rows.cuh */
#if CFG_SHARES
    u32 shared; /* blocks of shared values made */
#endif
};

DEVICE piece take_piece(const arena &s, u32 n)
{
    piece x;
    barrier_wait(s.full + slot_of(n) * 8, parity_of(n));
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.tile), "=r"(x.first), "=r"(x.flags), "=r"(x.unused)
                 : "r"(s.pieces + slot_of(n) * 16)
                 : "memory");
    x.tile = __shfl_sync(~0u, x.tile, 0);
    x.first = __shfl_sync(~0u, x.first, 0);
    x.flags = __shfl_sync(~0u, x.flags, 0); /* tells ptxas that a warp's lanes go one way */
    return x;
}

DEVICE void release(const arena &s, u32 n)
{
    barrier_arrive_if(s.empty + slot_of(n) * 8, (threadIdx.x & 31) == 0);
}

DEVICE void start_qk(const arena &sm, float (&s)[S_COUNT], u32 q, u32 n)
{
    product_qk(s, sm.q + q % CFG_QS * Q_BYTES, sm.ring + slot_of(n) * SLOT_BYTES);
    wgmma_commit();
}

DEVICE void start_pv(const arena &sm, float (&o)[O_COUNT], const u32 (&prob)[S_COUNT / 2],
                     u32 n)
{
    barrier_wait(sm.full + slot_of(n) * 8, parity_of(n));
    product_pv(o, prob, sm.ring + slot_of(n) * SLOT_BYTES);
    wgmma_commit();
}

/* What holds the wait that follows behind the exponentials in ptxas's order: no row sum is
 * negative, so nothing arrives (fwd_sm90.cu). */
DEVICE void hold_wait(const arena &sm, const consumer &c)
{
    barrier_arrive_if(sm.q_empty, c.rows.l[0] < 0.f);
}

/* Where Q has one place, the next tile's comes as soon as the scores of a tile's last piece are
 * there; where it has two, a test for that in each piece costs more than it gains. */
DEVICE void release_q(const arena &sm, progress &done, int is_last)
{
    barrier_arrive_if(sm.q_empty + done.q % CFG_QS * 8,
                      is_last != 0 & (threadIdx.x & 31) == 0);
    done.q += is_last != 0;
}

DEVICE int piece_masked(const piece &x, int kv_len)
{
    return masked_by(x.flags & PIECE_MASKED, x.first + CFG_TN > kv_len);
}

#if CFG_AHEAD
/* Makes packed weights of piece x's scores in s. Then waits until at most LEFT products are in
 * flight: that ends the older product, which read slot done.n (V of the piece before, or K of
 * the first piece), and the slot is released. */
template <int LEFT>
DEVICE void weigh(const arena &sm, const progress &done, consumer &c, const cu_fwd &p,
                  const mod_args &mod, const piece &x, int team, float (&s)[S_COUNT],
                  float (&o)[O_COUNT], u32 (&prob)[S_COUNT / 2])
{
    float rescale[2];
    int raised = softmax_step<0>(c, p, mod, x.first, piece_masked(x, c.at.kv_len),
                                 sm.columns + team * CFG_TN, team, s, rescale);
    hold_wait(sm, c);
    wgmma_wait<LEFT>();
    release(sm, done.n);
    if (raised)
        rows_scale(o, rescale);
    pack_p(prob, s);
    wgmma_fence();
}

/* The piece after x, whose scores are then in t. */
DEVICE piece next_piece(const arena &sm, progress &done, consumer &c, const cu_fwd &p,
                        const mod_args &mod, const piece &x, int team, float (&s)[S_COUNT],
                        float (&t)[S_COUNT], float (&o)[O_COUNT], u32 (&prob)[S_COUNT / 2])
{
    piece next = take_piece(sm, done.n + 1);
    wgmma_fence();
    start_qk(sm, t, done.q, done.n + 1);
    weigh<1>(sm, done, c, p, mod, x, team, s, o, prob);
    start_pv(sm, o, prob, done.n + 2);
    wgmma_wait<1>();
    release(sm, done.n + 1);
    done.n += 2;
    return next;
}

DEVICE void last_piece(const arena &sm, progress &done, consumer &c, const cu_fwd &p,
                       const mod_args &mod, const piece &x, int team, float (&s)[S_COUNT],
                       float (&o)[O_COUNT], u32 (&prob)[S_COUNT / 2])
{
    release_q(sm, done, 1);
    weigh<0>(sm, done, c, p, mod, x, team, s, o, prob);
    start_pv(sm, o, prob, done.n + 1);
    wgmma_wait<0>();
    release(sm, done.n + 1);
    done.n += 2;
}

DEVICE void walk_keys(const arena &sm, progress &done, consumer &c, const cu_fwd &p,
                      const mod_args &mod, piece x, int team, float (&o)[O_COUNT])
{
    float s[S_COUNT], t[S_COUNT];
    u32 prob[S_COUNT / 2];
    barrier_wait(sm.q_full + done.q % CFG_QS * 8, done.q / CFG_QS & 1);
    wgmma_fence();
    start_qk(sm, s, done.q, done.n);
    wgmma_wait<0>();
    for (;;) {
        if (x.flags & PIECE_LAST) {
            last_piece(sm, done, c, p, mod, x, team, s, o, prob);
            return;
        }
        x = next_piece(sm, done, c, p, mod, x, team, s, t, o, prob);
        if (x.flags & PIECE_LAST) {
            last_piece(sm, done, c, p, mod, x, team, t, o, prob);
            return;
        }
        x = next_piece(sm, done, c, p, mod, x, team, t, s, o, prob);
    }
}
#else
/* What scores of piece x share, made while their products run. */
DEVICE void share_scores(const arena &sm, progress &done, consumer &c, const cu_fwd &p,
                         const mod_args &mod, const piece &x)
{
#if CFG_SHARES
    share_block(c.at, p, mod, x.first, done.shared++, sm.shares);
#endif
}

/* The first piece of a tile has no product with V to run beside. */
DEVICE void first_piece(const arena &sm, progress &done, consumer &c, const cu_fwd &p,
                        const mod_args &mod, const piece &x, int team, float (&s)[S_COUNT],
                        u32 (&prob)[S_COUNT / 2])
{
    float unused[2];
    barrier_wait(sm.q_full + done.q % CFG_QS * 8, done.q / CFG_QS & 1);
    wgmma_fence();
    start_qk(sm, s, done.q, done.n);
    share_scores(sm, done, c, p, mod, x);
    wgmma_wait<0>();
    release(sm, done.n++);
    if (CFG_QS == 1)
        release_q(sm, done, x.flags & PIECE_LAST);
    softmax_step<1>(c, p, mod, x.first, piece_masked(x, c.at.kv_len),
                    sm.columns + team * CFG_TN, team, s, unused);
    pack_p(prob, s);
}

DEVICE piece next_piece(const arena &sm, progress &done, consumer &c, const cu_fwd &p,
                        const mod_args &mod, int team, float (&s)[S_COUNT], float (&o)[O_COUNT],
                        u32 (&prob)[S_COUNT / 2])
{
    float rescale[2];
    piece x = take_piece(sm, done.n);
    wgmma_fence();
    start_qk(sm, s, done.q, done.n);
    start_pv(sm, o, prob, done.n + 1);
    share_scores(sm, done, c, p, mod, x);
    wgmma_wait<1>();
    release(sm, done.n);
    if (CFG_QS == 1)
        release_q(sm, done, x.flags & PIECE_LAST);
    int raised = softmax_step<0>(c, p, mod, x.first, piece_masked(x, c.at.kv_len),
                                 sm.columns + team * CFG_TN, team, s, rescale);
    hold_wait(sm, c);
    wgmma_wait<0>();
    release(sm, done.n + 1);
    done.n += 2;
    if (raised)
        rows_scale(o, rescale);
    pack_p(prob, s);
    return x;
}

DEVICE void last_product(const arena &sm, progress &done, float (&o)[O_COUNT],
                         const u32 (&prob)[S_COUNT / 2])
{
    if (CFG_QS > 1)
        release_q(sm, done, 1);
    wgmma_fence();
    start_pv(sm, o, prob, done.n);
    wgmma_wait<0>();
    release(sm, done.n++);
}

DEVICE void walk_keys(const arena &sm, progress &done, consumer &c, const cu_fwd &p,
                      const mod_args &mod, piece x, int team, float (&o)[O_COUNT])
{
    float s[S_COUNT];
    u32 prob[S_COUNT / 2];
    first_piece(sm, done, c, p, mod, x, team, s, prob);
    while (!(x.flags & PIECE_LAST))
        x = next_piece(sm, done, c, p, mod, team, s, o, prob);
    last_product(sm, done, o, prob);
}
#endif
