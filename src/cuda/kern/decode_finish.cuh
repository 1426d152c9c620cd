/* What a row of decode has beside its columns: lse, the row maximum, the flag of rows that the
 * careful path makes again, and that path. */
#pragma once

/* where the flag of row r of span s is: there are fewer than 2^31 */
DEVICE int flag_of(const cu_fwd &p, const span &s, int r)
{
    packed_row x = unpack_row(p, s, s.row0 + r);
    return (s.b * p.H + x.h) * p.decode.flags + x.m;
}

/* Row r of span s, its offset, sum and maximum known: one over the sum, sink included. */
DEVICE float row_inverse(const cu_fwd &p, const span &s, int r, float3 x)
{
    float inv = x.y == 0.f ? 0.f : rcp_fast(x.y);
#if CFG_SINKS
    packed_row at = unpack_row(p, s, s.row0 + r);
    float lse;
    add_sink(sink_of(p, s.b, at.h, at.m), x.x, x.y, inv, lse);
#endif
    return inv;
}

/* Writes lse and the row maximum of row r of span s. */
DEVICE void finish_row(const cu_fwd &p, const span &s, int r, float3 x)
{
    packed_row at = unpack_row(p, s, s.row0 + r);
    float lse = x.y == 0.f ? NEG_INF : (x.x + log2f(x.y)) * 0.6931471805599453f;
#if CFG_SINKS
    float inv;
    add_sink(sink_of(p, s.b, at.h, at.m), x.x, x.y, inv, lse);
#endif
    put_lse(p, s.b, at.h, span_row(s, at.m), lse);
    put_row_max(p, s.b, at.h, span_row(s, at.m), x.z * 0.6931471805599453f);
}

struct row_sums {
    float3 x; /* (m, l, peak) of a whole row */
    int is_bad;
};

/* What a row has for all of its columns, by one thread. */
DEVICE void put_row(const cu_fwd &p, const span &s, int row, int slot, int is_whole,
                    const row_sums &y)
{
    if (is_whole)
        finish_row(p, s, row, y.x);
    else
        *(float4 *)(p.part_ml + ((long long)slot * ROWS + row) * 4) =
            make_float4(y.x.x, y.x.y, y.x.z, 0.f);
    if (!p.decode.cluster)
        p.flags[flag_of(p, s, row)] = y.is_bad && is_whole;
}

DEVICE out_elem *output_row(const cu_fwd &p, const span &s, int r)
{
    packed_row x = unpack_row(p, s, s.row0 + r);
    return (out_elem *)p.o + s.b * p.os.b + x.h * p.os.h + span_row(s, x.m) * p.os.n;
}

/* ---- rows to be made again by the careful path, being non-finite or without their sum ---- */

DEVICE void redo_packed(const cu_fwd &p, const mod_args &mod, int b, packed_row at)
{
    __syncwarp(); /* the row is there, written by other lanes */
    tile t = batch_of(p, b);
    t.h = at.h;
    redo_row(p, mod, t, at.m);
}

/* Row r of a span. Rare: one out-of-line copy for all callers. */
__device__ __noinline__ void redo_at(const cu_fwd &p, const mod_args &mod, span s, int r)
{
    redo_packed(p, mod, s.b, unpack_row(p, s, s.row0 + r));
}

/* Where no other kernel follows, rows of a warp hang in a chain through p.flags. lost: the one
 * that it begins with; -1: none. */
DEVICE void chain_row(const cu_fwd &p, const span &s, int r, int &lost)
{
    int at = flag_of(p, s, r);
    if ((threadIdx.x & 31) == 0)
        p.flags[at] = lost;
    lost = at;
}

/* The rows of a warp's chain. There is no call here: where warps take registers from each other
 * ptxas allows none. */
DEVICE void redo_chain(const cu_fwd &p, const mod_args &mod, int lost)
{
#pragma unroll 1
    while (lost >= 0) {
        int head = lost / p.decode.flags, b = head / p.H;
        packed_row at = {head - b * p.H, lost - head * p.decode.flags};
        redo_packed(p, mod, b, at);
        lost = *(volatile int *)&p.flags[lost];
    }
}
