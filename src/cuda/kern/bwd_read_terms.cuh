/* Terms of reads (bwd_captures.cu, bwd_elements.cu): what 64 queries by PASS keys add to the
 * elements that a score reads. */
#pragma once

#include "bwd_element_terms.cuh"
#include "bwd_kept.cuh"

/* dX of this warp's 16 queries by PASS keys, times the derivatives of COUNT reads from FIRST
 * on. kept: where CFG_KEPT has what is kept of the block. */
template <int FIRST, int COUNT>
DEVICE void terms_of_queries(float (&term)[COUNT][S_COUNT], const cu_bwd &p,
                             const mod_args &mod, const query_tile &t, int key0, int masked,
                             const dropper &drop, u32 stay, u32 pass, const float2 (&stat)[2],
                             u32 kept)
{
    float s[S_COUNT], dp[S_COUNT];
    int lane = threadIdx.x & 31, q = t.row0 + warp_row() + lane / 4 + t.q_offset;
    tile_scores<STAY, CFG_D>(s, stay, warp_row(), pass);
    tile_scores<STAY, CFG_E>(dp, stay + STAY_D, warp_row(), pass + PASS_D);
    query_side q0 = query_side_of(p.f, mod, t.b, t.h, q);
    query_side q1 = query_side_of(p.f, mod, t.b, t.h, q + 8);
    bool has[2] = {stat[0].x != -NEG_INF, stat[1].x != -NEG_INF}; /* not past the last one */
    slope_row r0, r1;
    slope_row_begin(mod, p.f, t.b, t.h, q, r0);
    slope_row_begin(mod, p.f, t.b, t.h, q + 8, r1);
    u32 keep = kept_of_queries(drop, p.f, q, key0 + 2 * (lane & 3) + t.kv_offset);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        int key = key0 + 8 * i + 2 * (lane & 3);
        key_side k0 = {key + t.kv_offset, key < t.kv_len};
        key_side k1 = {key + 1 + t.kv_offset, key + 1 < t.kv_len};
        bool live[4] = {true, true, true, true};
        float x[4], by[READS_ALL][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = s[4 * i + j];
        reads_of_piece(p, mod, t, r0, r1, k0.kv, x, by, kept, i);
        if (masked)
            live4(p.f, mod, t.b, t.h, q0, q1, k0, k1, masked & MASKED_BY_MOD, live);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float w = exp2_fast((x[j] - stat[j / 2].x) * 1.4426950408889634f);
            w = live[j] && has[j / 2] && x[j] != NEG_INF ? w : 0.f;
            float d = dropped_dp(p.f, dp[4 * i + j], keep >> (4 * i + j) & 1);
            float dx = w == 0.f ? 0.f : w * (d + stat[j / 2].y);
#pragma unroll
            for (int k = 0; k < COUNT && FIRST + k < MOD_READS; k++)
                term[k][4 * i + j] = dx == 0.f ? 0.f : dx * by[FIRST + k][j];
        }
    }
}
