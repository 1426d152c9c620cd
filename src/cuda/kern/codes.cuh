/* Quantised K and V: CFG_CODES is their dtype (0: they are no codes). An element is its code
 * times its scale (saccade.h); strides of K and V count bytes here. */
#pragma once

#include "dtype_numbers.h"

typedef unsigned char code_byte;

/* Bytes of n codes. */
DEVICE int code_bytes(int n)
{
    return CFG_CODES == DTYPE_I4 ? n / 2 : n;
}

/* ---- scales ---- */

/* The scale of channel d of a row; b: its batch or page. */
DEVICE float scale_of(const cu_scale &s, int b, int g, int row, int d)
{
    if (!s.data)
        return 1.f;
    long long at = b * s.b + g * s.h;
    if (s.tokens)
        at += row / s.tokens * s.n;
    if (s.channels)
        at += d / s.channels * s.d;
    return s.is_f16 ? half_to_float(__ldg((const u16 *)s.data + at))
                    : __ldg((const float *)s.data + at);
}

/* scale_of as a call, for where it is rare or costs little beside what else is done. Where
 * warps take registers from each other ptxas allows none. */
#if CFG_SPAN_ROWS > 16
DEVICE
#else
__device__ __noinline__
#endif
float scale_apart(const cu_scale *s, int b, int g, int row, int d)
{
    return scale_of(*s, b, g, row, d);
}

/* ---- single elements ---- */

/* The number that code d of a row stands for, not scaled. */
DEVICE float code_value(const code_byte *row, int d)
{
    u32 x = __ldg(row + code_bytes(d));
    if (CFG_CODES == DTYPE_I8)
        return (float)(signed char)x;
    if (CFG_CODES == DTYPE_I4)
        return (float)((int)((d & 1 ? x >> 4 : x & 15) ^ 8) - 8);
    if (CFG_CODES == DTYPE_E5M2)
        return half_to_float((u16)(x << 8));
    u32 size = x & 0x7f;
    return half_to_float((u16)(size == 0x7f ? 0x7fff : (x & 0x80) << 8 | size << 7)) * 256.f;
}

/* The rows of one head of K or V, and their scales. */
struct code_rows {
    const code_byte *head; /* of batch or page 0 */
    cu_stride stride;
    const cu_scale *scale;
    int b, g, first; /* first: where row 0 lies */
#if CFG_CHUNKS
    chunk_table chunks;
#endif
};

DEVICE code_rows key_codes(const cu_fwd &p, int b, int g)
{
    code_rows x = {(const code_byte *)p.k + g * p.ks.h, p.ks, &p.k_scale, b, g, 0};
#if CFG_CHUNKS
    x.chunks = chunks_of(p, b);
#endif
    return x;
}

DEVICE code_rows value_codes(const cu_fwd &p, int b, int g)
{
    code_rows x = {(const code_byte *)p.v + g * p.vs.h, p.vs, &p.v_scale, b, g, 0};
#if CFG_CHUNKS
    x.chunks = chunks_of(p, b);
#endif
    return x;
}

DEVICE code_rows rows_from(code_rows x, int first)
{
    x.first += first;
    return x;
}

/* Where a row lies: batch or page, and row of it; row -1 in an absent page. */
struct code_place {
    int b, row;
};

DEVICE code_place code_place_of(const code_rows &x, int row)
{
#if CFG_CHUNKS
    chunk_place at = chunk_place_of(x.chunks, x.b, row);
    code_place y = {at.b, at.row};
#else
    code_place y = {x.b, x.first + row};
#endif
    return y;
}

DEVICE float code_at(const code_rows &x, code_place at, int d)
{
    return code_value(x.head + at.b * x.stride.b + at.row * x.stride.n, d)
           * scale_apart(x.scale, at.b, x.g, at.row, d);
}

/* ---- copies to shared memory ---- */

/* 16 bytes of elements from column on, those from `count` on zeros. */
DEVICE void copy_codes(u32 to, const code_rows &x, code_place at, int column, int count)
{
    enum { EACH = 16 / (int)sizeof(elem) };
    float y[EACH], scale = 0.f;
    u32 w[4];
    const code_byte *from = x.head + at.b * x.stride.b + at.row * x.stride.n;
    if (count > 0 && !x.scale->channels)
        scale = scale_apart(x.scale, at.b, x.g, at.row, 0);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        y[i] = 0.f;
        if (i < count) {
            if (x.scale->channels)
                scale = scale_apart(x.scale, at.b, x.g, at.row, column + i);
            y[i] = code_value(from, column + i) * scale;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#if CFG_F32
        w[i] = __float_as_uint(y[i]);
#else
        w[i] = pack(y[2 * i], y[2 * i + 1]);
#endif
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
}

/* As copy_rows of floats, done when it returns. */
template <int ROWS, int DIM, int REAL, int THREADS>
DEVICE void copy_rows(u32 to, const code_rows &rows, int first, int n, int is_plain, int thread)
{
    enum { EACH = 16 / (int)sizeof(elem), PIECES = DIM / EACH };
#pragma unroll 1
    for (int i = thread; i < ROWS * PIECES; i += THREADS) {
        int row = i / PIECES, piece = i % PIECES, column = piece * EACH;
        code_place at = {0, -1};
        if (first + row < n)
            at = code_place_of(rows, first + row);
        copy_codes(swizzled(to, ROWS * 128, row, piece), rows, at, column,
                   at.row >= 0 ? REAL - column : 0);
    }
}
