/* Latent decode over quantised keys: four warps copy codes, unit by unit, and widen them to
 * elements of Q's dtype in the panels that tensor copies would fill. An element is its code
 * times its scale, rounded, for both products.
 *
 * A thread has 16 columns of a panel for two keys of a block. It copies their codes to where
 * its elements will lie, which nobody else touches, AHEAD units before it widens them. */
#pragma once

#include "latent_place.cuh"
#include "code_words.cuh"
#include "copy.cuh"
#include "decode_scales.cuh"

enum {
    EACH = 16,                         /* columns */
    WORDS = EACH * CODE_BITS / 32,     /* of their codes */
    AHEAD = UNITS > 2 ? 2 : UNITS - 1, /* with more, units would wait for the block before */
    OTHERS = UNITS - AHEAD             /* the unit at which copies of the next block begin */
};
static_assert(AHEAD > 0, "more than one unit");
static_assert(CFG_K_CHANNELS % EACH == 0, "a thread's columns have one scale");

/* ---- keys ---- */

/* A thread's part of a key: its first codes, or null where there is no such key. */
struct code_key {
    const code_byte *codes;
    k_scale_word scale;
};

/* The thread's i'th key of the block at x: four lanes have it, two of which found it. */
DEVICE code_key key_of_block(const lookahead &x, const cu_fwd &p, int i)
{
    code_key k = {0, 0};
    if (x.first == NO_BLOCK)
        return k;
    lane_key found = find_key(x, 0, 1), at;
    int g = x.at.s.g, from = (threadIdx.x & 28) + i;
    at.b = __shfl_sync(~0u, found.b, from);
    at.row = __shfl_sync(~0u, found.row, from);
    if (at.row < 0)
        return k;
    k.codes = (const code_byte *)p.k + at.b * p.ks.b + g * p.ks.h + at.row * p.ks.n
              + code_bytes((threadIdx.x & 3) * EACH);
    find_scale<CFG_K_TOKENS>(k.scale, p.k_scale, g, at);
    return k;
}

/* ---- pieces ---- */

/* Where the thread's columns of a row of a panel lie: the i'th 16 bytes. */
DEVICE u32 own_place(u32 panel, int row, int i)
{
    return swizzled(panel, PANEL, row, 2 * (threadIdx.x & 3) + i);
}

/* Codes, or zeros. */
DEVICE void copy_own(u32 to, const code_byte *from, int is_there)
{
    enum { BYTES = WORDS * 4 };
    int bytes = is_there ? BYTES : 0;
    if (BYTES == 16)
        copy16(to, from, is_there);
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
                     "r"(bytes)
                     : "memory");
}

#if CFG_K_CHANNELS
DEVICE void copy_scale(u32 to, const cu_scale &s, const code_key &k, int column)
{
    long long at = k.scale + column / CFG_K_CHANNELS * s.d;
    if (!k.codes || !s.data)
        store_word(to, __float_as_uint(1.f));
    else if (s.is_f16)
        store_word(to, __float_as_uint(load_scale(s, at)));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to),
                     "l"((const float *)s.data + at)
                     : "memory");
}
#endif

DEVICE void copy_piece(u32 panel, int row, const cu_fwd &p, const code_key &k, int column)
{
    int is_there = k.codes && (CFG_D_REAL % 64 == 0 || column < CFG_D_REAL);
    const code_byte *from = k.codes + code_bytes(column / 64 * 64);
    copy_own(own_place(panel, row, 0), is_there ? from : (const code_byte *)p.k, is_there);
#if CFG_K_CHANNELS
    copy_scale(own_place(panel, row, 1), p.k_scale, k, min(column, CFG_D_REAL - EACH));
#endif
}

/* The codes of a word in the order of their channels. */
DEVICE void word_values(float (&y)[32 / CODE_BITS], u32 w)
{
    u32 h[PAIRS];
    widen<0>(w, h);
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        if (CODE_BITS == 4)
            halves_to_floats(h[i], y[i], y[i + PAIRS]);
        else
            halves_to_floats(h[i], y[2 * i], y[2 * i + 1]);
}

/* e: the elements of 16 codes. */
DEVICE void widen_piece(u32 (&e)[EACH / 2], const u32 (&w)[4], float scale)
{
    enum { CODES = 32 / CODE_BITS };
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        float y[CODES];
        word_values(y, w[i]);
#pragma unroll
        for (int j = 0; j < CODES; j += 2)
            e[(i * CODES + j) / 2] = pack(y[j] * scale, y[j + 1] * scale);
    }
}

/* The scale of a thread's piece of a panel; that of its key, or the one copied beside it. */
DEVICE float piece_scale(float scale, u32)
{
    return scale;
}

DEVICE float piece_scale(long long, u32 place)
{
    return __uint_as_float(load_word(place));
}

/* The thread's two pieces of a panel; scales: of their keys. */
DEVICE void widen_panel(u32 panel, const k_scale_word (&scales)[2])
{
    u32 w[2][4], e[2][EACH / 2];
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        load_words(w[i], own_place(panel, widened_key(i), 0));
        by[i] = piece_scale(scales[i], own_place(panel, widened_key(i), 1));
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        widen_piece(e[i], w[i], by[i]);
#pragma unroll
    for (int i = 0; i < 4; i++)
        store_words(own_place(panel, widened_key(i / 2), i % 2),
                    (const float *)(e[i / 2] + 4 * (i % 2)));
}

/* ---- units ---- */

/* Loops are loops here: written out, the code of a block is 24 KB and no faster. */

/* Begins the copies of unit `unit` of block n, when there is room. */
DEVICE void copy_unit(const arena &a, u32 n, int unit, const cu_fwd &p,
                      const code_key (&keys)[2])
{
    int panels = unit_panels(unit);
    barrier_wait(barrier_of(a.empty, n, unit), turn_of(n) ^ 1);
#pragma unroll 1
    for (int i = 0; i < panels; i++) {
        int panel = unit_panel(unit, i);
#pragma unroll
        for (int k = 0; k < 2; k++)
            copy_piece(stage_of(a, n) + panel * PANEL, widened_key(k), p, keys[k],
                       panel * 64 + (threadIdx.x & 3) * EACH);
    }
}

DEVICE void widen_unit(const arena &a, u32 n, int unit, const k_scale_word (&scales)[2])
{
    int panels = unit_panels(unit);
#pragma unroll 1
    for (int i = 0; i < panels; i++)
        widen_panel(stage_of(a, n) + unit_panel(unit, i) * PANEL, scales);
    __syncwarp();
    barrier_arrive_if(barrier_of(a.full, n, unit), (threadIdx.x & 31) == 0);
}

/* The keys of the block at x, which moves on; whether there is one. */
DEVICE int take_keys(code_key (&keys)[2], lookahead &x, const cu_fwd &p, const mod_args &mod,
                     const line &l, int end)
{
    int is_there = x.first != NO_BLOCK;
#pragma unroll
    for (int i = 0; i < 2; i++)
        keys[i] = key_of_block(x, p, i);
    if (is_there)
        ahead_move(x, p, mod, l, 1, end);
    return is_there;
}

DEVICE void load_keys(const arena &a, const cu_fwd &p, const mod_args &mod, const line &l,
                      const tensor_map *)
{
    lookahead x;
    code_key coming[2];     /* of the block whose units are copied */
    k_scale_word scales[2]; /* of the block whose units are widened */
    int end = share_of_cta(p, mod, l, x.at);
    ahead_begin(x, p, mod, l, 1, end);
    int is_there = take_keys(coming, x, p, mod, l, end);
#pragma unroll 1
    for (int unit = 0; unit < AHEAD; unit++) {
        if (is_there)
            copy_unit(a, 0, unit, p, coming);
        copy_commit();
    }
#pragma unroll 1
    for (u32 n = 0; is_there; n++) {
        int has_next = 1;
        scales[0] = coming[0].scale;
        scales[1] = coming[1].scale;
#pragma unroll 1
        for (int unit = 0; unit < UNITS; unit++) {
            int is_other = unit >= OTHERS;
            if (unit == OTHERS)
                has_next = take_keys(coming, x, p, mod, l, end);
            if (has_next)
                copy_unit(a, n + is_other, is_other ? unit - OTHERS : unit + AHEAD, p, coming);
            copy_commit();
            copy_wait<AHEAD>();
            widen_unit(a, n, unit, scales);
        }
        is_there = has_next;
    }
}
