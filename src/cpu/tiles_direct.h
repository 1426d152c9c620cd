/* tiles_direct.h: products of the rows of a group (decode) on AMX bf16 tiles, straight from K
 * and V: up to 16 rows cost what one does, and every element is read once.
 * f16 (is_split) goes as the sum of two bf16, high and low (amx_split_tmpl.c). The parts of Q
 * and P are rows of a tile of their own, so that up to 8 rows cost two products instead of one;
 * those of K and V are made as they are read. For tiles_*_tmpl.c only. */
#ifndef SACCADE_CPU_TILES_DIRECT_H
#define SACCADE_CPU_TILES_DIRECT_H

#include "cpu/asking.h"
#include "cpu/vec.h"

#include "cpu/amx_units.h"

#include <string.h>

typedef uint16_t bf16;

enum {
    TILE = TILE_ROWS * TILE_BYTES / 2, /* elements */
    SQUARE = TILE_ROWS * TILE_ROWS,    /* elements of a tile of sums */
};

/* Elements [d, d + 32) of a row of `dim`, 0 past its end; never reads past it. */
static ALWAYS_INLINE void copy_part(const char *row, int32_t dim, int32_t d, bf16 *to)
{
    const int32_t left = dim - d;
#if defined(VF_HAS_FRACTION)
    const __mmask32 there = left >= TILE_DEPTH ? UINT32_MAX : ((__mmask32)1 << left) - 1;
    _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(there, row + 2 * (int64_t)d));
#else
    memset(to, 0, TILE_BYTES);
    memcpy(to, row + 2 * (int64_t)d, 2 * (size_t)(left >= TILE_DEPTH ? TILE_DEPTH : left));
#endif
}

/* 16 numbers of f16 as low halves of words, 16 others as high halves: their first 8 bits, and
 * the rest. An infinity's rest is NaN. */
static ALWAYS_INLINE void split_words(const bf16 *first, const bf16 *second, bf16 *high,
                                      bf16 *low)
{
#if defined(VF_HAS_FRACTION)
    enum { PICK = 0xca }; /* of the second where the first is 1, else of the third */
    const __m512i top = _mm512_set1_epi32((int32_t)0xffff0000);
    const vf x = vf_from_f16(first), y = vf_from_f16(second);
    const __m512i x_bits = _mm512_castps_si512(x), y_bits = _mm512_castps_si512(y);
    const vf x_rest = x - _mm512_castsi512_ps(_mm512_and_si512(x_bits, top));
    const vf y_rest = y - _mm512_castsi512_ps(_mm512_and_si512(y_bits, top));
    _mm512_store_si512(
        high, _mm512_ternarylogic_epi32(top, y_bits, _mm512_srli_epi32(x_bits, 16), PICK));
    _mm512_store_si512(low, _mm512_ternarylogic_epi32(
                                top, _mm512_castps_si512(y_rest),
                                _mm512_srli_epi32(_mm512_castps_si512(x_rest), 16), PICK));
#else
    for (int32_t c = 0; c < TILE_DEPTH; c++) {
        const float x = f16_to_f32(c % 2 ? second[c / 2] : first[c / 2]);
        const uint32_t top = f32_bits(x) & 0xffff0000u;
        high[c] = (bf16)(top >> 16);
        low[c] = (bf16)(f32_bits(x - f32_from_bits(top)) >> 16);
    }
#endif
}

#endif
