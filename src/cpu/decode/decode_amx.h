/* decode_amx.h: what the decode kernels on AMX bf16 tiles (decode_amx_*_tmpl.c) share. They
 * multiply the rows of a group straight with K and V: up to 16 rows cost as much as one row
 * does, and every element of K and V is read once.
 * A number of f16 (is_split) is the sum of two of bf16, its high and its low part, as in
 * block_amx_f16_tmpl.c. High and low parts of Q and P are separate rows of a tile, so that up
 * to 8 rows cost two products where bf16 costs one. K and V are split as they are read. */
#ifndef SACCADE_CPU_DECODE_DECODE_AMX_H
#define SACCADE_CPU_DECODE_DECODE_AMX_H

#include "cpu/kernels/amx_units.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"
#include "cpu/kv/prefetch.h"

#include <string.h>

typedef uint16_t bf16;

enum {
    TILE = TILE_ROWS * TILE_BYTES / 2, /* elements */
    SQUARE = TILE_ROWS * TILE_ROWS,    /* elements of a tile of sums */
};

/* Scores of more than 16 rows, or of more than 8 in f16 (decode_amx_qk_wide_tmpl.c). */
CPU_PACK_DECODE(LEVEL_NAME(cpu_pack_decode_many));
CPU_PACK_DECODE(LEVEL_NAME(cpu_pack_decode_many_split));
CPU_DECODE_QK(LEVEL_NAME(cpu_decode_qk_wide));
CPU_DECODE_QK(LEVEL_NAME(cpu_decode_qk_wide_split));
/* Weighted sums of V in bf16 for at most 8 rows (decode_amx_pv8_tmpl.c). */
CPU_DECODE_PV(LEVEL_NAME(cpu_decode_pv8));

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

/* Interleaves two lines, so that elements of one place stand side by side. Of the eight groups
 * of four places, groups 0, 2, 4 and 6 become the first line, groups 1, 3, 5 and 7 the second:
 * this is how the unpack instructions work, which stay inside of 128 bits. */
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

/* Splits any numbers of f16, subnormal ones too. The high part has a number's first 8
 * significant bits, the low part what is left of it. The low part of an infinity is NaN. */
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

/* split_lines splits so many lines: high parts go to [4][32], low parts two tiles further. */
enum { SPLIT_LINES = 4 };
#if defined(LEVEL_AMX)

/* Constants of split_lines, held in registers. Made anew in each turn of a loop they would cost
 * half as much as splitting itself. */
typedef struct split_tables {
    __m512i first_bytes, less, from_3_and_10, sign, exponent, normal;
    __mmask64 second_bytes;
} split_tables;

static ALWAYS_INLINE __m512i kept(__m512i x)
{
    __asm__("" : "+v"(x)); /* the compiler, not knowing the value, cannot make it anew */
    return x;
}

static ALWAYS_INLINE split_tables split_begin(void)
{
    static const _Alignas(64) uint8_t first_bytes[64] = {
        0,   56,  57,  57,  58,  58,  59,  59,  60,  60,  61,  61,  62,  62,  63,  63,
        64,  64,  65,  65,  66,  66,  67,  67,  68,  68,  69,  69,  70,  70,  71,  0,
        128, 184, 185, 185, 186, 186, 187, 187, 188, 188, 189, 189, 190, 190, 191, 191,
        192, 192, 193, 193, 194, 194, 195, 195, 196, 196, 197, 197, 198, 198, 199, 128,
    };
    static const _Alignas(64) uint16_t less[32] = {
        0xffff, 1280, 1152,   1088, 1024, 992,    960,  928,  0xffff, 1280, 1152,
        1088,   1024, 992,    960,  928,  0xffff, 1280, 1152, 1088,   1024, 992,
        960,    928,  0xffff, 1280, 1152, 1088,   1024, 992,  960,    928,
    };
    __mmask64 second_bytes = 0xaaaaaaaaaaaaaaaa;
    __asm__("" : "+k"(second_bytes));
    return (split_tables){kept(_mm512_load_si512(first_bytes)),
                          kept(_mm512_load_si512(less)),
                          kept(_mm512_set1_epi64(0x3a332a231a130a03)),
                          kept(_mm512_set1_epi16(INT16_MIN)),
                          kept(_mm512_set1_epi16(0x7f80)),
                          kept(_mm512_set1_epi16(0x7f00)),
                          second_bytes};
}

/* Splits again, by split_any, those lines that hold subnormal numbers, infinities or NaN. */
static NEVER_INLINE void split_rare(const tiles_line x[SPLIT_LINES], bf16 *to)
{
    const __m512i infinity = _mm512_set1_epi16(0x7c00), fraction = _mm512_set1_epi16(0x3ff);
    for (int i = 0; i < SPLIT_LINES; i++) {
        _Alignas(64) bf16 line[TILE_DEPTH];
        const __m512i exponent = _mm512_and_si512(x[i], infinity);
        if ((_mm512_testn_epi16_mask(exponent, exponent)
             & _mm512_test_epi16_mask(x[i], fraction))
            | _mm512_cmpeq_epi16_mask(exponent, infinity)) {
            line_store(line, x[i]);
            split_any(line, to + i * TILE_DEPTH, to + 2 * TILE + i * TILE_DEPTH);
        }
    }
}

/* Splits with integer operations, which take half the time of conversions. The first byte of a
 * high part follows from the sign and the exponent by a table of 64 entries; the second byte is
 * bits 3 to 10 of the number. The low part is the number's last three bits, x % 8 of its last
 * places: a table of 8 entries says how much smaller than the high part's its exponent is, and
 * a difference below zero becomes 0, for x % 8 = 0 as well. This is wrong for subnormal
 * numbers, infinities and NaN. The table gives all of them a high part with a tiny exponent, so
 * that one look at the smallest exponent finds the lines to split again. */
static ALWAYS_INLINE void split_lines(const split_tables *with, const tiles_line x[SPLIT_LINES],
                                      bf16 *to)
{
    enum { PICK = 0xca }; /* where the first operand is 1 the second, else the third */
    __m512i least = with->exponent;
#pragma GCC unroll 4
    for (int i = 0; i < SPLIT_LINES; i++) {
        const __m512i bytes = _mm512_multishift_epi64_epi8(with->from_3_and_10, x[i]);
        const __m512i high =
            _mm512_mask_permutexvar_epi8(bytes, with->second_bytes, bytes, with->first_bytes);
        const __m512i exponent = _mm512_and_si512(high, with->exponent);
        const __m512i low =
            _mm512_subs_epu16(exponent, _mm512_permutexvar_epi16(x[i], with->less));
        least = _mm512_min_epu16(least, exponent);
        line_store(to + i * TILE_DEPTH, high);
        line_store(to + 2 * TILE + i * TILE_DEPTH,
                   _mm512_ternarylogic_epi32(with->sign, x[i], low, PICK));
    }
    if (__builtin_expect(_mm512_testn_epi16_mask(least, with->normal) != 0, 0)) {
        const tiles_line some[SPLIT_LINES] = {x[0], x[1], x[2], x[3]}; /* x may be registers */
        split_rare(some, to);
    }
}

#else

typedef struct split_tables {
    int unused;
} split_tables;

static ALWAYS_INLINE split_tables split_begin(void)
{
    return (split_tables){0};
}

static ALWAYS_INLINE void split_lines(const split_tables *with, const tiles_line x[SPLIT_LINES],
                                      bf16 *to)
{
    (void)with;
    for (int i = 0; i < SPLIT_LINES; i++) {
        _Alignas(64) bf16 line[TILE_DEPTH];
        line_store(line, x[i]);
        split_any(line, to + i * TILE_DEPTH, to + 2 * TILE + i * TILE_DEPTH);
    }
}

#endif

/* ---- tiles ---- */

/* Stores the four tiles of sums, each a square of its own behind the one before. */
static ALWAYS_INLINE void store_squares(float *to)
{
    TILE_STORE(0, to, TILE_BYTES);
    TILE_STORE(1, to + SQUARE, TILE_BYTES);
    TILE_STORE(2, to + 2 * SQUARE, TILE_BYTES);
    TILE_STORE(3, to + 3 * SQUARE, TILE_BYTES);
}

/* Packs 16 rows of 32 elements into a tile B, [pair of elements][row][2]. A row that is NULL
 * counts as zeros. */
static ALWAYS_INLINE void pack_pairs(const bf16 *const row[TILE_ROWS], bf16 *to)
{
    _Alignas(64) bf16 part[TILE_ROWS][TILE_DEPTH];
    for (int32_t v = 0; v < TILE_ROWS; v++)
        if (row[v])
            memcpy(part[v], row[v], TILE_BYTES);
        else
            memset(part[v], 0, TILE_BYTES);
    for (int32_t a = 0; a < TILE_ROWS; a += VF)
        for (int32_t b = 0; b < TILE_ROWS; b += VF) {
            vf square[VF];
            for (int32_t i = 0; i < VF; i++)
                square[i] = vf_load((const float *)(const void *)part[a + i] + b);
            vf_transpose(square);
            for (int32_t i = 0; i < VF; i++)
                vf_store((float *)(void *)to + (b + i) * TILE_ROWS + a, square[i]);
        }
}

/* Copies dims [32 d, 32 d + 32) of n keys of one group into rows of tiles A, from `to` on. The
 * first key is at `row` and only `left` keys exist: places of the others, and of dims past the
 * last, become 0. Low parts of f16 go two tiles further on. */
static ALWAYS_INLINE void make_keys_or_edge(int is_split, int is_edge, const cpu_rows *k,
                                            const char *row, int32_t left, int32_t d, int32_t n,
                                            bf16 *to)
{
    const split_tables tables = split_begin();
    const char *at = row + (int64_t)d * TILE_BYTES;
    for (int32_t j = 0; j < n; j += SPLIT_LINES, to += SPLIT_LINES * TILE_DEPTH) {
        tiles_line line[SPLIT_LINES];
#pragma GCC unroll 4
        for (int32_t i = 0; i < SPLIT_LINES; i++, row += k->stride, at += k->stride)
            line[i] =
                is_edge ? line_part(row, j + i < left ? k->dim : d * TILE_DEPTH, d * TILE_DEPTH)
                        : line_load(at);
        if (is_split)
            split_lines(&tables, line, to);
        for (int32_t i = 0; i < SPLIT_LINES && !is_split; i++)
            line_store(to + i * TILE_DEPTH, line[i]);
    }
}

static ALWAYS_INLINE void make_keys(int is_split, const cpu_rows *k, const char *row,
                                    int32_t left, int32_t d, int32_t n, bf16 *to)
{
    if (left < n || (d + 1) * TILE_DEPTH > k->dim)
        make_keys_or_edge(is_split, 1, k, row, left, d, n, to);
    else
        make_keys_or_edge(is_split, 0, k, row, left, d, n, to);
}

#endif
