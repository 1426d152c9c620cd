/* amx_split.h: f32 and f16 numbers as sums of two of bf16 in tiles; block_amx_f16_tmpl.c says
 * why and has the layouts. For the kernels on f16 in tiles only. */
#ifndef SACCADE_CPU_KERNELS_AMX_SPLIT_H
#define SACCADE_CPU_KERNELS_AMX_SPLIT_H

#include "cpu/kernels/amx_units.h"
#include "cpu/kv/kv_rows.h"

/* Bytes of 32 elements of a row of A, and of a step of B: high parts, then low parts. */
enum { SPLIT_ROW = 2 * TILE_BYTES, SPLIT_BYTES = 2 * UNIT_BYTES };

typedef uint16_t bf16;

/* 32 numbers as 32 high parts and 32 low ones. What has no sum of two is NaN in both. */
static ALWAYS_INLINE void store_split(bf16 *p, const vf x[TILE_DEPTH / VF])
{
#if defined(LEVEL_AMX)
    const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
    const __m512i even = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(high));
    const __m512i odd = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1));
    const vf low0 = x[0] - _mm512_castsi512_ps(_mm512_slli_epi32(even, 16));
    const vf low1 = x[1] - _mm512_castsi512_ps(_mm512_slli_epi32(odd, 16));
    _mm512_storeu_si512(p, high);
    _mm512_storeu_si512(p + TILE_DEPTH, (__m512i)_mm512_cvtne2ps_pbh(low1, low0));
#else
    for (int c = 0; c < TILE_DEPTH / VF; c++) {
        vf_to_bf16(p + c * VF, x[c]);
        vf_to_bf16(p + TILE_DEPTH + c * VF, x[c] - vf_from_bf16(p + c * VF));
    }
#endif
}

/* 32 elements of row j from d on as high and low parts, 0 past the row's end, which is never
 * read. Not 0: one of them is infinite or NaN. */
static inline unsigned load_split(const cpu_rows *from, int64_t j, int32_t d,
                                  bf16 parts[2 * TILE_DEPTH])
{
    const uint16_t *row = (const uint16_t *)(const void *)(from->base + j * from->stride);
    const int32_t left = from->dim - d;
    uint16_t part[TILE_DEPTH] = {0};
    unsigned nonfinite = 0;
    vf x[TILE_DEPTH / VF];
    if (left > 0)
        memcpy(part, row + d, (size_t)(left < TILE_DEPTH ? left : TILE_DEPTH) * sizeof *part);
    for (int32_t c = 0; c < TILE_DEPTH; c++)
        nonfinite |= (part[c] & 0x7c00) == 0x7c00;
    for (int32_t c = 0; c < TILE_DEPTH; c += VF)
        x[c / VF] = vf_from_f16(part + c);
    store_split(parts, x);
    return nonfinite;
}

/* C += A x one part of a step of B; A lies in registers 4 and 5. */
static ALWAYS_INLINE void multiply_part(const char *b)
{
    TILE_STREAM(6, b, 2 * TILE_BYTES);
    TILE_DOT(0, 4, 6);
    TILE_STREAM(7, b + TILE_BYTES, 2 * TILE_BYTES);
    TILE_DOT(1, 4, 7);
    TILE_DOT(2, 5, 6);
    TILE_DOT(3, 5, 7);
}

/* C += 32 rows of A times a step of B, the smallest products first. Low parts of A are a_low
 * bytes behind the high ones. has_low: products of two low parts count too. */
static ALWAYS_INLINE void multiply_split(int has_low, const char *a, int64_t a_stride,
                                         int64_t a_low, const char *b)
{
    const char *low = a + a_low, *b_low = b + UNIT_BYTES;
    TILE_LOAD(4, low, a_stride);
    TILE_LOAD(5, low + TILE_ROWS * a_stride, a_stride);
    if (has_low)
        multiply_part(b_low);
    multiply_part(b);
    TILE_LOAD(4, a, a_stride);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(5, a + TILE_ROWS * a_stride, a_stride);
    TILE_DOT(1, 4, 7);
    TILE_DOT(2, 5, 6);
    TILE_DOT(3, 5, 7);
    multiply_part(b_low);
}

#endif
