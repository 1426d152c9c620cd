/* Products of the rows of a group (decode) on AMX bf16 tiles, straight from K and V: up to 16
 * rows cost what one does, and every element is read once.
 *
 * S^T = K Q^T: 16 rows of K are a tile A as they lie in memory, Q^T is packed once per call,
 * and S^T is turned in registers. O += P V: P is a tile A as softmax left it, and V becomes
 * tiles B in L1, two keys side by side, a group of keys at a time. Edges of D and of the keys
 * go through a copy padded with 0. amx_tiles.h has the tiles and their emulation for tests. */
#include "cpu/cpu.h"
#include "cpu/asking.h"
#include "cpu/vec.h"

#include "cpu/amx_tiles.h"

#include <string.h>

typedef uint16_t bf16;

enum {
    TILE = TILE_ROWS * TILE_BYTES / 2, /* elements */
    UNIT_KEYS = 2 * TILE_ROWS,         /* keys of a call of score_unit */
    QUERIES = 64 * CPU_DIRECT_DIM,     /* elements of packed Q */
    BLOCK = 18432,                     /* of V as tiles: 32 keys of CPU_DIRECT_DIM columns */
    MOST_KEYS = 128,
};

/* Elements [d, d + 32) of a row of `dim`, 0 past its end; never reads past it. */
static ALWAYS_INLINE void copy_part(const char *row, int32_t dim, int32_t d, bf16 *to)
{
    const int32_t left = dim - d;
    memset(to, 0, TILE_BYTES);
    memcpy(to, row + 2 * (int64_t)d,
           2
               * (size_t)(left >= TILE_DEPTH ? TILE_DEPTH
                          : left > 0         ? left
                                             : 0));
}

/* ---- scores ---- */

/* Q as tiles B: [row tile][depth][pair of dims][row][2], rows past the last 0. */
static void pack_queries(const bf16 *q, int32_t q_ld, int32_t rows, int32_t depth, bf16 *to)
{
    for (int32_t r = 0; r < rows; r += TILE_ROWS)
        for (int32_t d = 0; d < depth; d++, to += TILE)
            for (int32_t a = 0; a < TILE_ROWS; a += VF)
                for (int32_t b = 0; b < TILE_ROWS; b += VF) {
                    vf square[VF];
                    for (int32_t i = 0; i < VF; i++) {
                        const bf16 *row = q + (int64_t)(r + a + i) * q_ld + d * TILE_DEPTH;
                        square[i] = r + a + i < rows
                                        ? vf_load((const float *)(const void *)row + b)
                                        : vf_set(0);
                    }
                    vf_transpose(square);
                    for (int32_t i = 0; i < VF; i++)
                        vf_store((float *)(void *)to + (b + i) * TILE_ROWS + a, square[i]);
                }
}

typedef struct key_tile {
    const char *at;
    int64_t stride;
} key_tile;

/* 16 keys from row `row` of memory on, `left` of which there are; dims [d, d + 32). */
static ALWAYS_INLINE key_tile take_keys(const cpu_rows *k, const char *row, int32_t left,
                                        int32_t d, bf16 *edge)
{
    if (left >= TILE_ROWS && d + TILE_DEPTH <= k->dim)
        return (key_tile){row + 2 * (int64_t)d, k->stride};
    for (int32_t j = 0; j < TILE_ROWS; j++)
        if (j < left)
            copy_part(row + j * k->stride, k->dim, d, edge + j * TILE_DEPTH);
        else
            memset(edge + j * TILE_DEPTH, 0, TILE_BYTES);
    return (key_tile){(const char *)edge, TILE_BYTES};
}

/* S^T of 32 keys and one tile of rows, or two: registers 0 and 2, 1 and 3. */
static ALWAYS_INLINE void score_unit(int high, const cpu_rows *k, const char *row, int32_t left,
                                     const bf16 *q, int32_t depth, cpu_asking *next,
                                     int32_t share, float *to)
{
    _Alignas(64) bf16 edge[2][TILE];
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int32_t d = 0; d < depth; d++, q += TILE) {
        const key_tile top = take_keys(k, row, left, d * TILE_DEPTH, edge[0]);
        const key_tile low = take_keys(k, row + TILE_ROWS * k->stride, left - TILE_ROWS,
                                       d * TILE_DEPTH, edge[1]);
        TILE_LOAD(6, q, TILE_BYTES);
        TILE_STREAM(4, top.at, top.stride);
        TILE_DOT(0, 4, 6);
        TILE_STREAM(5, low.at, low.stride);
        TILE_DOT(2, 5, 6);
        if (high == 2) {
            TILE_LOAD(7, q + (int64_t)depth * TILE, TILE_BYTES);
            TILE_DOT(1, 4, 7);
            TILE_DOT(3, 5, 7);
        }
        ask_lines(next, share);
    }
    TILE_STORE(0, to, TILE_BYTES);
    TILE_STORE(2, to + TILE_ROWS * TILE_ROWS, TILE_BYTES);
    if (high == 2) {
        TILE_STORE(1, to + 2 * TILE_ROWS * TILE_ROWS, TILE_BYTES);
        TILE_STORE(3, to + 3 * TILE_ROWS * TILE_ROWS, TILE_BYTES);
    }
}

/* s [rows][s_ld] = scale * the transpose of [32][16], of which at most 16 rows are wanted. */
static ALWAYS_INLINE void turn(const float *from, int32_t rows, float scale, float *s,
                               int32_t s_ld)
{
    for (int32_t j = 0; j < UNIT_KEYS; j += VF)
        for (int32_t r = 0; r < TILE_ROWS && r < rows; r += VF) {
            vf square[VF];
            for (int32_t i = 0; i < VF; i++)
                square[i] = vf_set(scale) * vf_load(from + (j + i) * TILE_ROWS + r);
            vf_transpose(square);
            for (int32_t i = 0; i < VF && r + i < rows; i++)
                vf_store(s + (int64_t)(r + i) * s_ld + j, square[i]);
        }
}

CPU_DOTS(LEVEL_NAME(cpu_dots_tiles))
{
    _Alignas(64) bf16 queries[QUERIES];
    _Alignas(64) float square[4 * TILE_ROWS * TILE_ROWS];
    const int32_t depth = (k->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t units = (rows + UNIT_KEYS - 1) / UNIT_KEYS;
    const int64_t steps = (int64_t)((n + UNIT_KEYS - 1) / UNIT_KEYS) * units * depth;
    const int32_t share = asking_share(next, steps);
    pack_queries(q, q_ld, rows, depth, queries);
    for (int32_t j = 0; j < n; j += UNIT_KEYS) {
        const char *row = k->base + (j0 + j) * k->stride;
        for (int32_t r = 0; r < rows; r += UNIT_KEYS) {
            const bf16 *packed = queries + (int64_t)r / TILE_ROWS * depth * TILE;
            float *to = s + (int64_t)r * s_ld + j;
            if (rows - r > TILE_ROWS) {
                score_unit(2, k, row, n - j, packed, depth, next, share, square);
                turn(square, TILE_ROWS, scale, to, s_ld);
                turn(square + 2 * TILE_ROWS * TILE_ROWS, rows - r - TILE_ROWS, scale,
                     to + (int64_t)TILE_ROWS * s_ld, s_ld);
            } else {
                score_unit(1, k, row, n - j, packed, depth, next, share, square);
                turn(square, rows - r, scale, to, s_ld);
            }
        }
    }
    ask_rest(next);
}

/* ---- values ---- */

#if defined(VF_HAS_FRACTION)
/* 32 columns of two keys by turns; the largest exponents stay in noted. NULL: a row of 0. */
static ALWAYS_INLINE __m512i store_turns(const char *even, const char *odd, int32_t left,
                                         bf16 *to, __m512i noted)
{
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i sign = _mm512_set1_epi16(0x7fff);
    const __mmask32 wanted = left >= 32 ? ~(__mmask32)0 : ((__mmask32)1 << left) - 1;
    const __m512i x = even ? _mm512_maskz_loadu_epi16(wanted, even) : _mm512_setzero_si512();
    const __m512i y = odd ? _mm512_maskz_loadu_epi16(wanted, odd) : _mm512_setzero_si512();
    const __m512i a = _mm512_permutexvar_epi64(order, x);
    const __m512i b = _mm512_permutexvar_epi64(order, y);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + 32, _mm512_unpackhi_epi16(a, b));
    noted = _mm512_max_epu16(noted, _mm512_and_si512(x, sign));
    return _mm512_max_epu16(noted, _mm512_and_si512(y, sign));
}

typedef __m512i wild_note;

static ALWAYS_INLINE int is_wild(__m512i noted)
{
    return _mm512_cmpgt_epu16_mask(noted, _mm512_set1_epi16(0x7f7f)) != 0;
}
#else
typedef unsigned wild_note;

static unsigned store_turns(const char *even, const char *odd, int32_t left, bf16 *to,
                            unsigned noted)
{
    bf16 part[2][TILE_DEPTH] = {{0}};
    if (even)
        copy_part(even, left, 0, part[0]);
    if (odd)
        copy_part(odd, left, 0, part[1]);
    for (int32_t c = 0; c < 2 * TILE_DEPTH; c++) {
        to[c] = part[c % 2][c / 2];
        noted |= (to[c] & 0x7f80) == 0x7f80;
    }
    return noted;
}

static int is_wild(unsigned noted)
{
    return noted != 0;
}
#endif

/* n rows of V as tiles B, [columns/32][pair of keys][32][2], padded to 32 keys with 0. Not 0
 * when any is infinite or NaN. */
static int pair_values(const cpu_rows *v, int64_t j0, int32_t n, bf16 *to)
{
    const int32_t padded = (n + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH;
    const char *row = v->base + j0 * v->stride;
    wild_note noted = {0};
    for (int32_t j = 0; j < padded; j += 2, row += 2 * v->stride, to += 2 * TILE_DEPTH)
        for (int32_t d = 0; d < v->dim; d += TILE_DEPTH)
            noted = store_turns(j < n ? row + 2 * (int64_t)d : NULL,
                                j + 1 < n ? row + v->stride + 2 * (int64_t)d : NULL, v->dim - d,
                                to + (int64_t)d * padded, noted);
    return is_wild(noted);
}

typedef struct sums_job {
    const char *p;
    float *o;
    int64_t p_stride, o_stride; /* bytes */
    int32_t rows, share;
    cpu_asking *next;
} sums_job;

/* One tile of rows, or two, from r on and 32 columns: O += P V over `depth` times 32 keys. */
static ALWAYS_INLINE void value_unit(int high, const sums_job *job, const char *p, float *o,
                                     const bf16 *v, int32_t depth)
{
    float *low = o + TILE_ROWS * job->o_stride / 4;
    TILE_LOAD(0, o, job->o_stride);
    TILE_LOAD(1, o + TILE_ROWS, job->o_stride);
    if (high == 2) {
        TILE_LOAD(2, low, job->o_stride);
        TILE_LOAD(3, low + TILE_ROWS, job->o_stride);
    }
    for (int32_t d = 0; d < depth; d++, p += TILE_BYTES, v += 2 * TILE) {
        TILE_LOAD(4, p, job->p_stride);
        TILE_LOAD(6, v, 2 * TILE_BYTES);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, v + TILE_DEPTH, 2 * TILE_BYTES);
        TILE_DOT(1, 4, 7);
        if (high == 2) {
            TILE_LOAD(5, p + TILE_ROWS * job->p_stride, job->p_stride);
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
        ask_lines(job->next, job->share);
    }
    TILE_STORE(0, o, job->o_stride);
    TILE_STORE(1, o + TILE_ROWS, job->o_stride);
    if (high == 2) {
        TILE_STORE(2, low, job->o_stride);
        TILE_STORE(3, low + TILE_ROWS, job->o_stride);
    }
}

static void sum_group(const sums_job *job, const bf16 *v, int32_t n, int32_t j, int32_t E)
{
    const int32_t depth = (n + TILE_DEPTH - 1) / TILE_DEPTH;
    for (int32_t d = 0; d < E; d += TILE_DEPTH, v += (int64_t)depth * 2 * TILE)
        for (int32_t r = 0; r < job->rows; r += 2 * TILE_ROWS) {
            const char *p = job->p + r * job->p_stride + 2 * (int64_t)j;
            float *o = job->o + r * job->o_stride / 4 + d;
            if (job->rows - r > TILE_ROWS)
                value_unit(2, job, p, o, v, depth);
            else
                value_unit(1, job, p, o, v, depth);
        }
}

CPU_SUMS(LEVEL_NAME(cpu_sums_tiles))
{
    _Alignas(64) bf16 block[BLOCK];
    const int32_t wide = (v->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t fit = BLOCK / (wide * TILE_DEPTH) / TILE_DEPTH * TILE_DEPTH;
    const int32_t group = fit < MOST_KEYS ? fit : MOST_KEYS;
    const int64_t steps = (int64_t)((n + TILE_DEPTH - 1) / TILE_DEPTH)
                          * ((rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS)) * wide;
    const sums_job job = {
        (const char *)p,           o,   4 * (int64_t)p_ld, 4 * (int64_t)o_ld, rows,
        asking_share(next, steps), next};
    for (int32_t i = 0; i < rows; i++)
        for (int32_t d = 0; d < o_ld && alpha[i] != 1; d += VF) {
            float *at = o + (int64_t)i * o_ld + d;
            vf_store(at, vf_set(alpha[i]) * vf_load(at));
        }
    for (int32_t j = 0; j < n; j += group) {
        const int32_t m = n - j < group ? n - j : group;
        if (pair_values(v, j0 + j, m, block))
            return j;
        sum_group(&job, block, m, j, v->dim);
    }
    ask_rest(next);
    return n;
}
