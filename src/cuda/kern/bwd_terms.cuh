/* Gradients of captures beside dQ (emit_terms.c says which): its warpgroup takes dS of a step
 * from shared memory while the product of dQ is under way.
 *
 * Diagonals. A word of dS is of one key and two queries. Thread e sums the words (key, word)
 * with word - key / 2 = e, whose diagonals q - key, counted within the step, are 2e - 1, 2e and
 * 2e + 1. In its turn j it takes word (j + e) % 32, so that the 32 threads of a warp read all
 * banks. A step on, queries are 64 further and a diagonal is that of thread e - 32: warps
 * change roles instead, and the one whose diagonals no later step has adds them to their
 * elements, exactly (exact_sum.cuh), so that the order of CTAs changes no bit.
 *
 * Elements. dS, transposed as it is read, is stored by pieces of rows.
 *
 * Lines have products of their own (bwd_lines.cuh). */
#pragma once

#if CFG_TERMS
#define READS_DS (HAS_DIAGONALS || HAS_ELEMENTS)
#else
#define READS_DS 0
#endif

/* When: while the product of dQ is under way, or, where registers are few, when its part has
 * been staged. */
enum { TERMS_NEVER, TERMS_BESIDE, TERMS_BETWEEN, TERMS_AFTER };
enum {
    TERMS = !READS_DS      ? TERMS_NEVER
            : PANELS_D > 1 ? TERMS_BETWEEN
            : CFG_WGS == 2 ? TERMS_BESIDE
                           : TERMS_AFTER
};

#if CFG_TERMS
#include "exact_sum.cuh"
#include "bwd_element.cuh"

/* Whether tiles make the terms of read r in this run. */
DEVICE int is_term(const cu_reads &c, int r, int kind)
{
    return term_kind(r) == kind && (c.in_tiles >> r & 1);
}

/* Of diagonals 2e - 1, 2e and 2e + 1. */
struct diagonals {
    float below, on, above;
};

struct terms {
    diagonals sum, last; /* last: no step to come has them; added four steps at a time */
    int from, last_from; /* q - kv of the middle one */
    int n, h, q0;        /* steps in a row so far; head and first query of the last one */
};

DEVICE void terms_begin(terms &x)
{
    x.sum = x.last = {0.f, 0.f, 0.f};
    x.from = x.last_from = x.n = x.q0 = 0;
    x.h = -1;
}

#if HAS_DIAGONALS
enum { ROLE_LAST = 3 - KEYS / 64 }; /* the warp with the last keys, e from 32 * role - 96 */

/* Adds a warp's sums of 65 diagonals to read r's elements. Buckets are often all the same. */
DEVICE void add_diagonals(const cu_bwd &p, const mod_args &mod, const cu_reads &c, int b, int h,
                          int r, int from, const float (&x)[3])
{
    const cu_read &to = c.of[r];
    int lane = threadIdx.x & 31;
    long long place[3];
    exact_term term[3];
    float y[3];
#pragma unroll
    for (int i = 0; i < 3; i++) { /* at key 0: nothing but the difference matters */
        int q = from + (i == 2 ? -1 : i);
        place[i] = read_place(mod, p.f, b, h, r, q, 0, to.stride);
        y[i] =
            x[i] == 0.f ? 0.f : x[i] * BWD_WEIGHT_UNIT * term_factor(mod, p.f, b, h, r, q, 0);
    }
    long long first = __shfl_sync(~0u, place[0], 0); /* by all lanes, whatever they have */
    int is_one = place[0] == first && place[1] == first && (lane > 0 || place[2] == first);
    if (__all_sync(~0u, is_one)) {
        y[0] += y[1] + y[2];
#pragma unroll
        for (int step = 1; step < 32; step *= 2)
            y[0] += __shfl_xor_sync(~0u, y[0], step);
        y[0] = lane == 0 ? y[0] : 0.f;
        y[1] = y[2] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 3; i++)
        term[i] = exact_term_of(y[i]);
#pragma unroll
    for (int i = 0; i < 3; i++)
        if (y[i] != 0.f) /* NaN too */
            add_exact_term(to, place[i], term[i]);
}

/* Adds sums of this warp to their elements, and clears them. */
DEVICE void flush_diagonals(diagonals &s, int from, const cu_bwd &p, const mod_args &mod,
                            const cu_reads &c, const key_tile &t, int h)
{
    int lane = threadIdx.x & 31;
    float next = __shfl_down_sync(~0u, s.below, 1);
    float x[3] = {s.on, s.above + (lane < 31 ? next : 0.f), lane == 0 ? s.below : 0.f};
    s = {0.f, 0.f, 0.f};
    if (!__any_sync(~0u, x[0] != 0.f || x[1] != 0.f || x[2] != 0.f))
        return;
#pragma unroll
    for (int r = 0; r < MOD_READS; r++)
        if (is_term(c, r, TERM_DIAGONAL))
            add_diagonals(p, mod, c, t.b, h, r, from, x);
}

DEVICE u32 load_word_if(u32 at, int yes)
{
    u32 x;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0;\n"
                 "mov.b32 %0, 0;\n@p ld.shared.b32 %0, [%1];}"
                 : "=r"(x)
                 : "r"(at), "r"(yes));
    return x;
}

DEVICE void sum_diagonals(diagonals &s, int e, u32 ds)
{
#pragma unroll 8
    for (int j = 0; j < 32; j++) {
        int word = (j + e) & 31, pair = word - e; /* keys 2 * pair and the next */
        u32 chunk = (u32)(word >> 2 ^ (2 * j & 7)) * 16 + (word & 3) * 4;
        int is_in = (unsigned)pair < KEYS / 2;
        u32 at = ds + pair * 256 + chunk;
        float lo, hi;
        unpack(load_word_if(at, is_in), lo, hi);
        s.on += lo;
        s.above += hi;
        unpack(load_word_if((at ^ 16) + 128, is_in), lo, hi);
        s.below += lo;
        s.on += hi;
    }
}

/* All warps' sums, before a step that does not follow. */
DEVICE void end_diagonals(terms &x, const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                          const key_tile &t)
{
    flush_diagonals(x.last, x.last_from, p, mod, c, t, x.h);
    flush_diagonals(x.sum, x.from, p, mod, c, t, x.h);
    x.n = 0;
}

DEVICE void take_diagonals(terms &x, const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                           const key_tile &t, const int4 &step, u32 ds)
{
    int warp = threadIdx.x / 32 & 3;
    if (step.z != x.h || step.y != x.q0 + BWD_ROWS)
        end_diagonals(x, p, mod, c, t);
    int role = (warp - x.n) & 3, e = 32 * role - 96 + (int)(threadIdx.x & 31);
    x.from = step.y + t.q_offset - (t.key0 + t.kv_offset) + 2 * e;
    x.h = step.z;
    x.q0 = step.y;
    x.n++;
    if (role >= ROLE_LAST)
        sum_diagonals(x.sum, e, ds);
    if (role == ROLE_LAST) {
        x.last = x.sum;
        x.last_from = x.from;
        x.sum = {0.f, 0.f, 0.f};
    }
    if (x.n % 4 == 0)
        flush_diagonals(x.last, x.last_from, p, mod, c, t, x.h);
}
#endif

#if HAS_ELEMENTS
/* How a read's elements lie, from the first query and key of a step on. */
struct element_lines {
    long long first, by_key, by_row;
    int is_whole; /* four keys of a row are one aligned store */
};

DEVICE element_lines lines_of(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                              const key_tile &t, const int4 &step)
{
    element_lines l;
    int q = step.y + t.q_offset, kv = t.key0 + t.kv_offset;
    l.first = read_place(mod, p.f, t.b, step.z, r, q, kv, to.stride);
    l.by_key = read_place(mod, p.f, t.b, step.z, r, q, kv + 1, to.stride) - l.first;
    l.by_row = read_place(mod, p.f, t.b, step.z, r, q + 1, kv, to.stride) - l.first;
    l.by_key = t.key0 + 1 < p.f.N ? l.by_key : 0; /* past the ends places are clamped */
    l.by_row = step_rows(step) > 1 ? l.by_row : 0;
    u32 bytes = to.dtype == DTYPE_F32 ? 4 : 2;
    u64 at = (u64)to.data + l.first * bytes;
    l.is_whole = l.by_key == 1 && !(at & (4 * bytes - 1)) && !(l.by_row & 3);
    return l;
}

/* Terms of four neighbours along keys. */
DEVICE void four_terms(float (&v)[4], u32 x, u32 y)
{
    unpack(x, v[0], v[1]);
    unpack(y, v[2], v[3]);
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] *= BWD_WEIGHT_UNIT;
}

/* They are stored whole; at: an index of elements. */
DEVICE void put_four(const cu_read &to, long long at, u32 x, u32 y)
{
    float v[4];
    four_terms(v, x, y);
    if (to.dtype == DTYPE_F32)
        *(float4 *)((float *)to.data + at) = make_float4(v[0], v[1], v[2], v[3]);
    else
        *(uint2 *)((u16 *)to.data + at) =
            make_uint2(pack_as(v[0], v[1], to.dtype), pack_as(v[2], v[3], to.dtype));
}

/* A row of a step without ends, in f32; at: of this thread's words of it, as put_elements has
 * them. Loads of several are under way together. */
DEVICE void put_row(float *to, u32 at)
{
    enum { AHEAD = 2 };
#pragma unroll 1
    for (int key = 0; key < KEYS; key += 32 * AHEAD) {
        u32 x[AHEAD][4];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            load_matrices_transposed(x[i], at + (key + 32 * i) * 128);
#pragma unroll
        for (int i = 0; i < 2 * AHEAD; i++) {
            float v[4];
            four_terms(v, x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
            *(float4 *)(to + key + 16 * i) = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
}

/* The first n of four, one by one. */
DEVICE void put_some(const cu_read &to, long long at, long long by_key, int n, int is_adding,
                     u32 x, u32 y)
{
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        float lo, hi;
        unpack(i < 2 ? x : y, lo, hi);
        if (i < n)
            put_element(to, at + i * by_key, (i & 1 ? hi : lo) * BWD_WEIGHT_UNIT, is_adding);
    }
}

/* dS of a step to the elements of read r: lines in q and kv. A warp has 16 queries. Of two
 * matrices of keys, rows are taken so that a thread has four neighbours. */
DEVICE void put_elements(const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                         const key_tile &t, const int4 &step, int r, u32 ds)
{
    const cu_read &to = c.of[r];
    element_lines l = lines_of(p, mod, to, r, t, step);
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
    int from = (lane >> 4) * 16 + (lane >> 1 & 3) * 4 + (lane >> 3 & 1) * 2 + (lane & 1);
    int is_whole = l.is_whole && !c.is_adding;
    int is_all = is_whole && to.dtype == DTYPE_F32 && t.kv_len - t.key0 >= KEYS
                 && step_rows(step) == BWD_ROWS;
    int n = t.kv_len - t.key0 - 4 * (lane & 3); /* keys from this thread's first one on */
#pragma unroll 1
    for (int chunk = 2 * warp; chunk < 2 * warp + 2; chunk++) {
        int row = chunk * 8 + lane / 4, has_row = row < step_rows(step);
        long long place = l.first + row * l.by_row + 4 * (lane & 3) * l.by_key;
        u32 at = ds + from * 128 + (chunk ^ (from & 7)) * 16;
        if (is_all) {
            put_row((float *)to.data + place, at);
            continue;
        }
#pragma unroll 1
        for (int key = 0; key < KEYS; key += 32) {
            u32 x[4];
            load_matrices_transposed(x, at + key * 128);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int left = has_row ? n - key - 16 * i : 0;
                if (is_whole && left >= 4)
                    put_four(to, place + key + 16 * i, x[2 * i], x[2 * i + 1]);
                else
                    put_some(to, place + (key + 16 * i) * l.by_key, l.by_key, left, c.is_adding,
                             x[2 * i], x[2 * i + 1]);
            }
        }
    }
}
#endif

/* All of a step. */
DEVICE void take_terms(terms &x, const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                       const key_tile &t, const int4 &step, u32 ds)
{
#if HAS_DIAGONALS
    take_diagonals(x, p, mod, c, t, step, ds);
#endif
#if HAS_ELEMENTS
#pragma unroll
    for (int r = 0; r < MOD_READS; r++)
        if (is_term(c, r, TERM_ELEMENT))
            put_elements(p, mod, c, t, step, r, ds);
#endif
    __syncwarp();
}

DEVICE void end_terms(terms &x, const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                      const key_tile &t)
{
#if HAS_DIAGONALS
    end_diagonals(x, p, mod, c, t);
#endif
}
#else
struct terms {
};

DEVICE void terms_begin(terms &)
{
}

DEVICE void take_terms(terms &, const cu_bwd &, const mod_args &, const cu_reads &,
                       const key_tile &, const int4 &, u32)
{
}

DEVICE void end_terms(terms &, const cu_bwd &, const mod_args &, const cu_reads &,
                      const key_tile &)
{
}
#endif
