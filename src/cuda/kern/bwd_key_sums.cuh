/* Gradients of captures whose element and factor are a key's (emit_terms.c), such as biases of
 * keys: sums of dS over queries, from one more product beside dK's, dS by a column of ones. The
 * product has eight columns; what the other seven read is what follows the ones, and nobody
 * looks at their sums. */
#pragma once

#if CFG_TERMS
#define HAS_KEY_SUMS HAS_KEYS
#else
#define HAS_KEY_SUMS 0
#endif

struct key_sums {
#if HAS_KEY_SUMS
    float sum[4]; /* of the head so far: two keys, 8 apart, columns 2 (lane % 4) + {0,1} */
    int any;      /* whether there is something in it */
#endif
};

#if HAS_KEY_SUMS
/* By the threads of a warp, before others read the ones. */
DEVICE void put_ones(const arena &s)
{
    u32 one = pack(1.f, 1.f);
    for (int i = threadIdx.x & 31; i < ONES_BYTES / 16; i += 32)
        store_four(s.ones + i * 16, one, one, one, one);
    fence_async_proxy();
}

DEVICE void product_key_sums(key_sums &x, const arena &s, const u32 (&ds)[S_COUNT / 2])
{
    u64 b = (u64)((s.ones & 0x3ffff) >> 4) | (u64)(16 >> 4) << 16 | (u64)(16 >> 4) << 32;
#pragma unroll
    for (int kk = 0; kk < BWD_ROWS / 16; kk++)
        wgmma_key_sums(x.sum, ds[4 * kk], ds[4 * kk + 1], ds[4 * kk + 2], ds[4 * kk + 3], b,
                       kk > 0 || x.any);
}

/* Adds sums of head h to the elements; the order of CTAs changes no bit (exact_sum.cuh). */
DEVICE void end_key_sums(key_sums &x, const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                         const key_tile &t, int h, int wg)
{
    int key = t.key0 + wg * 64 + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    if (x.any && (threadIdx.x & 3) == 0)
#pragma unroll
        for (int r = 0; r < MOD_READS; r++)
#pragma unroll 1
            for (int i = 0; i < 2 && is_term(c, r, TERM_KEY); i++) {
                int kv = key + 8 * i + t.kv_offset;
                float y = (i ? x.sum[2] : x.sum[0]) * BWD_WEIGHT_UNIT;
                if (key + 8 * i < t.kv_len && y != 0.f) /* NaN too */
                    add_exactly(c.of[r], read_place(mod, p.f, t.b, h, r, 0, kv, c.of[r].stride),
                                y * term_factor(mod, p.f, t.b, h, r, 0, kv));
            }
    __syncwarp();
    x.any = 0;
}
#endif
