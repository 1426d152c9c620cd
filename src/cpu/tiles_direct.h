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

/* sums of bf16 for at most 8 rows (tiles_few_tmpl.c) */
CPU_SUMS(LEVEL_NAME(cpu_sums_few));

/* ---- 32 elements of a row ---- */

#if defined(VF_HAS_FRACTION)

typedef __m512i tiles_line;

static ALWAYS_INLINE tiles_line line_load(const char *from)
{
    return _mm512_loadu_si512(from);
}

/* Elements [d, d + 32) of a row of `dim`, 0 past its end, which is never read. */
static ALWAYS_INLINE tiles_line line_part(const char *row, int32_t dim, int32_t d)
{
    const int32_t left = dim - d;
    const __mmask32 there = left >= TILE_DEPTH ? UINT32_MAX : ((__mmask32)1 << left) - 1;
    return _mm512_maskz_loadu_epi16(there, row + 2 * (int64_t)d);
}

static ALWAYS_INLINE void line_store(bf16 *to, tiles_line x)
{
    _mm512_store_si512(to, x);
}

/* Elements of two lines side by side: those of quarters 0, 2, 4, 6, four elements each, in the
 * first; of 1, 3, 5, 7 in the second. */
static ALWAYS_INLINE void line_pair(tiles_line pair[2])
{
    const tiles_line x = pair[0], y = pair[1];
    pair[0] = _mm512_unpacklo_epi16(x, y);
    pair[1] = _mm512_unpackhi_epi16(x, y);
}

#else

typedef struct tiles_line {
    bf16 x[TILE_DEPTH];
} tiles_line;

static ALWAYS_INLINE tiles_line line_part(const char *row, int32_t dim, int32_t d)
{
    const int32_t left = dim - d;
    tiles_line line = {{0}};
    memcpy(line.x, row + 2 * (int64_t)d, 2 * (size_t)(left >= TILE_DEPTH ? TILE_DEPTH : left));
    return line;
}

static ALWAYS_INLINE tiles_line line_load(const char *from)
{
    return line_part(from, TILE_DEPTH, 0);
}

static ALWAYS_INLINE void line_store(bf16 *to, tiles_line x)
{
    memcpy(to, x.x, TILE_BYTES);
}

static ALWAYS_INLINE void line_pair(tiles_line pair[2])
{
    const tiles_line x = pair[0], y = pair[1];
    for (int32_t c = 0; c < TILE_DEPTH; c++) {
        bf16 *to = pair[c / 4 % 2].x + c / 8 * 8 + c % 4 * 2;
        to[0] = x.x[c];
        to[1] = y.x[c];
    }
}

#endif

/* ---- f16 as two of bf16 ---- */

/* Any numbers of f16: their first 8 bits, and the rest. An infinity's rest is NaN. */
static NEVER_INLINE void split_any(const bf16 *from, bf16 *high, bf16 *low)
{
    for (int32_t c = 0; c < TILE_DEPTH; c += VF) {
        const vf x = vf_from_f16(from + c);
#if defined(VF_HAS_FRACTION)
        const __m512i top = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-65536));
        const vf rest = x - _mm512_castsi512_ps(top);
        _mm256_storeu_si256((__m256i *)(void *)(high + c),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(top, 16)));
        _mm256_storeu_si256(
            (__m256i *)(void *)(low + c),
            _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(rest), 16)));
#else
        float number[VF];
        vf_store(number, x);
        for (int32_t i = 0; i < VF; i++) {
            const uint32_t top = f32_bits(number[i]) & 0xffff0000u;
            high[c + i] = (bf16)(top >> 16);
            low[c + i] = (bf16)(f32_bits(number[i] - f32_from_bits(top)) >> 16);
        }
#endif
    }
}

/* Parts of two lines: high ones to [2][32], low ones two tiles further. */
#if defined(LEVEL_AMX)

/* Those of two lines that hold subnormal numbers, not just 0, in the other way. */
static ALWAYS_INLINE void split_subnormal(const tiles_line x[2], bf16 *to)
{
    const __m512i exponent = _mm512_set1_epi16(0x7c00), fraction = _mm512_set1_epi16(0x3ff);
    for (int i = 0; i < 2; i++) {
        _Alignas(64) bf16 line[TILE_DEPTH];
        if (_mm512_testn_epi16_mask(x[i], exponent) & _mm512_test_epi16_mask(x[i], fraction)) {
            line_store(line, x[i]);
            split_any(line, to + i * TILE_DEPTH, to + 2 * TILE + i * TILE_DEPTH);
        }
    }
}

/* By integers, half the work of converting. The high part's first byte follows from sign and
 * exponent by a table of 64, its second are bits 3 to 10. The rest, x % 8 last places, has the
 * exponent less what a table of 8 says, and is 0 where that leaves nothing. Subnormal
 * numbers' high parts would be wrong; an infinity's or NaN's stays one. */
static ALWAYS_INLINE void split_lines(const tiles_line x[2], bf16 *to)
{
    static const _Alignas(64) uint8_t first_bytes[64] = {
        0,   56,  57,  57,  58,  58,  59,  59,  60,  60,  61,  61,  62,  62,  63,  63,
        64,  64,  65,  65,  66,  66,  67,  67,  68,  68,  69,  69,  70,  70,  71,  127,
        128, 184, 185, 185, 186, 186, 187, 187, 188, 188, 189, 189, 190, 190, 191, 191,
        192, 192, 193, 193, 194, 194, 195, 195, 196, 196, 197, 197, 198, 198, 199, 255,
    };
    static const _Alignas(64) uint16_t less[32] = {
        0xffff, 1280, 1152,   1088, 1024, 992,    960,  928,  0xffff, 1280, 1152,
        1088,   1024, 992,    960,  928,  0xffff, 1280, 1152, 1088,   1024, 992,
        960,    928,  0xffff, 1280, 1152, 1088,   1024, 992,  960,    928,
    };
    enum { PICK = 0xca }; /* of the second where the first is 1, else of the third */
    const __m512i from_3_and_10 = _mm512_set1_epi64(0x3a332a231a130a03);
    const __m512i sign = _mm512_set1_epi16(INT16_MIN), mask = _mm512_set1_epi16(0x7f80);
    __m512i exponent[2];
    for (int i = 0; i < 2; i++) {
        const __m512i bytes = _mm512_multishift_epi64_epi8(from_3_and_10, x[i]);
        const __m512i high = _mm512_mask_permutexvar_epi8(bytes, 0xaaaaaaaaaaaaaaaa, bytes,
                                                          _mm512_load_si512(first_bytes));
        exponent[i] = _mm512_and_si512(high, mask);
        const __m512i low = _mm512_subs_epu16(
            exponent[i], _mm512_permutexvar_epi16(x[i], _mm512_load_si512(less)));
        line_store(to + i * TILE_DEPTH, high);
        line_store(to + 2 * TILE + i * TILE_DEPTH,
                   _mm512_ternarylogic_epi32(sign, x[i], low, PICK));
    }
    if (__builtin_expect(
            _mm512_testn_epi16_mask(_mm512_min_epu16(exponent[0], exponent[1]), mask) != 0, 0))
        split_subnormal(x, to);
}

#else

static ALWAYS_INLINE void split_lines(const tiles_line x[2], bf16 *to)
{
    for (int i = 0; i < 2; i++) {
        _Alignas(64) bf16 line[TILE_DEPTH];
        line_store(line, x[i]);
        split_any(line, to + i * TILE_DEPTH, to + 2 * TILE + i * TILE_DEPTH);
    }
}

#endif

#endif
