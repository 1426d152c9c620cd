/* Gradients of a head's captures whose factor is a line in q - kv (emit_terms.c), such as the
 * slopes of ALiBi: sums of dS and of dS * (q - kv) over the head, from one more product beside
 * dQ's. It has eight columns, of which two are used: 1, and the key's place in the tile, which
 * 16 bits hold exactly.
 *
 * They lie in shared memory as eight keys of each column, 16 bytes each, 32 bytes from one
 * eight to the next: the other six columns are what follows, and nobody looks at their sums. */
#pragma once

#if CFG_TERMS && HAS_LINES
struct lines {
    float sum[4];        /* of a step: two rows, columns 2 (lane % 4) + {0,1} */
    float plain, moment; /* of the head so far: dS, dS * (q - kv) */
    int h;
};

DEVICE void lines_begin(lines &x, const arena &s)
{
    x.sum[0] = x.sum[1] = x.sum[2] = x.sum[3] = x.plain = x.moment = 0.f;
    x.h = -1;
    for (int i = threadIdx.x & 127; i < LINE_BYTES / 32; i += 128) {
        u32 one = pack(1.f, 1.f);
        float k = 8 * i < KEYS ? 8 * i : 0.f;
        store_four(s.lines + i * 32, one, one, one, one);
        store_four(s.lines + i * 32 + 16, pack(k, k + 1), pack(k + 2, k + 3),
                   pack(k + 4, k + 5), pack(k + 6, k + 7));
    }
    fence_async_proxy();
    named_sync(1, 128);
}

/* rows of dS lie along the sum, those of the columns do not */
DEVICE void start_lines(lines &x, const arena &s, u32 n)
{
    u64 a = operand(s.ds + (n & 1) * DS_BYTES, 16);
    u64 b = (u64)((s.lines & 0x3ffff) >> 4) | (u64)(32 >> 4) << 16 | (u64)(32 >> 4) << 32;
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < KEYS / 16; kk++)
        wgmma_lines(x.sum, a + kk * 2048 / 16, b + kk * 64 / 16, kk > 0);
    wgmma_commit();
}

/* Adds the head's sums of this warp's rows to the elements, and clears them. The order of CTAs
 * changes no bit (exact_sum.cuh). */
DEVICE void end_lines(lines &x, const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                      const key_tile &t)
{
    int lane = threadIdx.x & 31;
    float plain = lane & 3 ? 0.f : x.plain * BWD_WEIGHT_UNIT;
    float moment = lane & 3 ? 0.f : x.moment * BWD_WEIGHT_UNIT;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        plain += __shfl_xor_sync(~0u, plain, step);
        moment += __shfl_xor_sync(~0u, moment, step);
    }
    x.plain = x.moment = 0.f;
    if (lane > 0 || x.h < 0)
        return;
#pragma unroll
    for (int r = 0; r < MOD_READS; r++) {
        if (!is_term(c, r, TERM_LINE))
            continue;
        float first = term_factor(mod, p.f, t.b, x.h, r, 0, 0);
        float gain = (term_factor(mod, p.f, t.b, x.h, r, 4096, 0) - first) / 4096;
        float y = (plain == 0.f ? 0.f : plain * first) + (gain == 0.f ? 0.f : moment * gain);
        if (y != 0.f) /* NaN too */
            add_exactly(c.of[r], read_place(mod, p.f, t.b, x.h, r, 0, 0, c.of[r].stride), y);
    }
}

/* The sums of a step, once its products are there. */
DEVICE void take_lines(lines &x, const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                       const key_tile &t, const int4 &step)
{
    if (step.z != x.h)
        end_lines(x, p, mod, c, t);
    x.h = step.z;
    int row = (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    float d = (float)(step.y + row + t.q_offset - (t.key0 + t.kv_offset));
    x.plain += x.sum[0] + x.sum[2];
    x.moment += fmaf(d, x.sum[0], -x.sum[1]) + fmaf(d + 8.f, x.sum[2], -x.sum[3]);
}
#else
struct lines {
};

DEVICE void lines_begin(lines &, const arena &)
{
}

DEVICE void start_lines(lines &, const arena &, u32)
{
}

DEVICE void take_lines(lines &, const cu_bwd &, const mod_args &, const cu_reads &,
                       const key_tile &, const int4 &)
{
}

DEVICE void end_lines(lines &, const cu_bwd &, const mod_args &, const cu_reads &,
                      const key_tile &)
{
}
#endif
