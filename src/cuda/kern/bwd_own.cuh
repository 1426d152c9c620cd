/* Gradients of keys in pages, or of ranks: to their places where no other key, or rank, has a
 * part of them, else to where they are summed from (cu_own). */
#pragma once

/* The row of dK or dV that key j of a head goes to. */
DEVICE result owned_row(const cu_bwd &p, int is_value, int b, int g, int j, int real)
{
    const cu_own &own = p.own;
    const cu_stride &s = is_value ? own.dvs : own.dks;
    int which = is_value ? BWD_OF_V : BWD_OF_K, page = -1, slot = 0;
    if (own.page) {
        int entry = own.shift >= 0 ? j >> own.shift : j / own.size;
        slot = j - entry * own.size;
        page = __ldg(own.page + (long long)b * own.per_batch + entry);
    }
    if (page < 0) {
#if CFG_PAGES
        long long row = (long long)(b * p.f.G + g) * p.f.N + j;
        return {(char *)((float *)(is_value ? p.dv : p.dk) + row * real), 0, 1, 0};
#else
        return result_from(is_value ? result_of(p, p.dv, p.dvs, b, g, 0, BWD_OF_V)
                                    : result_of(p, p.dk, p.dks, b, g, 0, BWD_OF_K),
                           j);
#endif
    }
    long long at = page * s.b + g * s.h + slot * s.n
                   + b * (is_value ? own.dv_batch : own.dk_batch);
    int is_wide = own.wide & which;
    return {(char *)(is_value ? own.dv : own.dk) + at * (is_wide ? 4 : 2), 0, is_wide,
            own.added & which};
}

/* Two rows of a fragment, 8 apart, as store_rows. */
template <int COUNT>
DEVICE void store_owned(const cu_bwd &p, int is_value, int b, int g, int row0, int n, int real,
                        float factor, int has, const float (&x)[COUNT])
{
    enum { CHUNKS = COUNT / 4 }; /* of 8 columns */
    int lane = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = row0 + 8 * i;
        result to = owned_row(p, is_value, b, g, min(row, n - 1), real);
        int is_by_two = CFG_F32 || (to.is_wide | to.is_added);
#pragma unroll
        for (int c = 0; c < CHUNKS; c += 4) {
            u32 w[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int at = c + k < CHUNKS ? 4 * (c + k) + 2 * i : 0;
                float lo = has ? x[at] * factor : 0.f, hi = has ? x[at + 1] * factor : 0.f;
                int column = (c + k) * 8 + 2 * lane;
                if (!CFG_F32)
                    w[k] = pack(lo, hi);
                if (is_by_two && row < n && c + k < CHUNKS && column < real)
                    put_two(to, column, lo, hi);
            }
            if (CFG_F32)
                continue;
            quad_transpose(w);
            if (!is_by_two && row < n && (c + lane) * 8 < real)
                *(uint4 *)((u16 *)to.rows + (c + lane) * 8) =
                    make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}
