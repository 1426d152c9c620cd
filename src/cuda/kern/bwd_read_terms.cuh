/* Terms of reads (bwd_captures.cu, bwd_elements.cu): what 64 queries by PASS keys add to the
 * elements that a score reads, and elements that take them as they are. */
#pragma once

enum {
    READS_ALL = MOD_READS ? MOD_READS : 1,
    PITCH = PASS + 1,
    TERM_ROOM = STAY * PITCH /* floats of shared memory */
};

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
#if CFG_KEPT
        reads_shared shared;
        take_kept(kept, i, shared);
        reads4(mod, p.f, t.b, t.h, r0, r1, k0.kv, k1.kv, x, by, shared);
#else
        reads4(mod, p.f, t.b, t.h, r0, r1, k0.kv, k1.kv, x, by);
#endif
        if (masked)
            live4(p.f, mod, t.b, t.h, q0, q1, k0, k1, live);
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

/* The warps' terms as rows of 64 queries. */
DEVICE void share_terms(const float (&term)[S_COUNT], float *tile)
{
    int lane = threadIdx.x & 31, row = warp_row() + lane / 4;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        tile[(row + 8 * (i / 2 & 1)) * PITCH + i / 4 * 8 + 2 * (lane & 3) + (i & 1)] =
            term[i];
}

/* Elements of their own are lines in q and kv. */
struct element_line {
    long long first, by_row, by_key;
};

DEVICE int rows_left(const cu_bwd &p, const query_tile &t)
{
    return min(tile_rows_of(p.f, t).q_len - t.row0, (int)STAY);
}

/* Those that read r reads from the tile's first query and key0 on. */
DEVICE element_line elements_of(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                                const query_tile &t, int key0)
{
    int q = t.row0 + t.q_offset, kv = key0 + t.kv_offset;
    element_line e;
    e.first = read_place(mod, p.f, t.b, t.h, r, q, kv, to.stride);
    e.by_row = read_place(mod, p.f, t.b, t.h, r, q + 1, kv, to.stride) - e.first;
    e.by_key = read_place(mod, p.f, t.b, t.h, r, q, kv + 1, to.stride) - e.first;
    return e;
}

/* Terms of `rows` queries by `keys` keys to their elements; neighbouring threads have
 * neighbouring elements. tile: of TERM_ROOM. */
DEVICE void put_terms(const cu_read &to, const element_line &e, int rows, int keys,
                      const float (&term)[S_COUNT], int is_adding, float *tile)
{
    int is_turned = llabs(e.by_row) < llabs(e.by_key);
    share_terms(term, tile);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < STAY * PASS; i += THREADS) {
        int row = is_turned ? i % STAY : i / PASS, key = is_turned ? i / STAY : i % PASS;
        if (row < rows && key < keys)
            put_element(to, e.first + row * e.by_row + key * e.by_key, tile[row * PITCH + key],
                        is_adding);
    }
    __syncthreads();
}
