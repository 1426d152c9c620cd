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
    BLOCK = 32768,                     /* of V as tiles */
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
        ask_lines(next, share);
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
                               int32_t s_ld, cpu_asking *next, int32_t share)
{
    for (int32_t j = 0; j < UNIT_KEYS; j += VF) {
        ask_lines(next, share);
        for (int32_t r = 0; r < TILE_ROWS && r < rows; r += VF) {
            vf square[VF];
            for (int32_t i = 0; i < VF; i++)
                square[i] = vf_set(scale) * vf_load(from + (j + i) * TILE_ROWS + r);
            vf_transpose(square);
            for (int32_t i = 0; i < VF && r + i < rows; i++)
                vf_store(s + (int64_t)(r + i) * s_ld + j, square[i]);
        }
    }
}

CPU_DOTS(LEVEL_NAME(cpu_dots_tiles))
{
    _Alignas(64) bf16 queries[QUERIES];
    _Alignas(64) float square[4 * TILE_ROWS * TILE_ROWS];
#if defined(LEVEL_AMX)
    if (rows == 1) { /* 9 ns a key of D128 instead of 14 */
        cpu_dots_bf16(q, q_ld, k, j0, n, rows, scale, s, s_ld, next);
        return;
    }
#endif
    const int32_t depth = (k->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t units = (rows + UNIT_KEYS - 1) / UNIT_KEYS;
    const int64_t steps = 2 * (int64_t)((n + UNIT_KEYS - 1) / UNIT_KEYS) * units * (depth + 1);
    const int32_t share = asking_share(next, steps);
    pack_queries(q, q_ld, rows, depth, queries);
    for (int32_t j = 0; j < n; j += UNIT_KEYS) {
        const char *row = k->base + (j0 + j) * k->stride;
        for (int32_t r = 0; r < rows; r += UNIT_KEYS) {
            const bf16 *packed = queries + (int64_t)r / TILE_ROWS * depth * TILE;
            float *to = s + (int64_t)r * s_ld + j;
            if (rows - r > TILE_ROWS) {
                score_unit(2, k, row, n - j, packed, depth, next, share, square);
                turn(square, TILE_ROWS, scale, to, s_ld, next, share);
                turn(square + 2 * TILE_ROWS * TILE_ROWS, rows - r - TILE_ROWS, scale,
                     to + (int64_t)TILE_ROWS * s_ld, s_ld, next, share);
            } else {
                score_unit(1, k, row, n - j, packed, depth, next, share, square);
                turn(square, rows - r, scale, to, s_ld, next, share);
            }
        }
    }
    ask_rest(next);
}

/* ---- values ---- */

/* 32 columns of two keys, side by side: even columns, then odd ones. */
static ALWAYS_INLINE void store_pairs(const char *even, const char *odd, bf16 *to)
{
#if defined(VF_HAS_FRACTION)
    const __m512i low = _mm512_set1_epi32(0xffff);
    const __m512i x = _mm512_loadu_si512(even), y = _mm512_loadu_si512(odd);
    enum { PICK = 0xca }; /* of the second where the first is 1, else of the third */
    _mm512_store_si512(to, _mm512_ternarylogic_epi32(low, x, _mm512_slli_epi32(y, 16), PICK));
    _mm512_store_si512(to + TILE_DEPTH,
                       _mm512_ternarylogic_epi32(low, _mm512_srli_epi32(x, 16), y, PICK));
#else
    bf16 x[TILE_DEPTH], y[TILE_DEPTH];
    memcpy(x, even, TILE_BYTES);
    memcpy(y, odd, TILE_BYTES);
    for (int32_t c = 0; c < TILE_DEPTH; c++) {
        to[c % 2 * TILE_DEPTH + c / 2 * 2] = x[c];
        to[c % 2 * TILE_DEPTH + c / 2 * 2 + 1] = y[c];
    }
#endif
}

/* n rows of V as tiles B, [columns/32][pair of keys][32][2], padded to 32 keys with 0. */
static void pair_values(const cpu_rows *v, int64_t j0, int32_t n, bf16 *to, cpu_asking *next,
                        int32_t share)
{
    const int32_t padded = (n + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH;
    const int32_t full = v->dim / TILE_DEPTH * TILE_DEPTH;
    const char *even = v->base + j0 * v->stride, *odd = even + v->stride;
    bf16 edge[2][TILE_DEPTH] = {{0}};
    int32_t j = 0;
    for (; j + 1 < n; j += 2, even += 2 * v->stride, odd += 2 * v->stride) {
        bf16 *at = to + j * TILE_DEPTH;
        int32_t d = 0;
        ask_lines(next, share);
        for (; d < full; d += TILE_DEPTH)
            store_pairs(even + 2 * d, odd + 2 * d, at + (int64_t)d * padded);
        if (d == v->dim)
            continue;
        copy_part(even, v->dim, d, edge[0]);
        copy_part(odd, v->dim, d, edge[1]);
        store_pairs((const char *)edge[0], (const char *)edge[1], at + (int64_t)d * padded);
    }
    memset(edge, 0, sizeof edge);
    for (; j < padded; j += 2)
        for (int32_t d = 0; d < v->dim; d += TILE_DEPTH) {
            if (j < n)
                copy_part(even, v->dim, d, edge[0]);
            else
                memset(edge[0], 0, sizeof edge[0]);
            store_pairs((const char *)edge[0], (const char *)edge[1],
                        to + j * TILE_DEPTH + (int64_t)d * padded);
        }
}

typedef struct sums_job {
    const char *p;
    int64_t p_stride; /* bytes */
    int32_t rows, share;
    cpu_asking *next;
} sums_job;

/* One tile of rows, or two, and 32 columns: P V over `depth` times 32 keys, [row][32]. */
static ALWAYS_INLINE void value_unit(int high, const sums_job *job, const char *p,
                                     const bf16 *v, int32_t depth, float *to)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
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
    TILE_STORE(0, to, 2 * TILE_BYTES);
    TILE_STORE(1, to + TILE_ROWS, 2 * TILE_BYTES);
    if (high == 2) {
        TILE_STORE(2, to + TILE_ROWS * TILE_DEPTH, 2 * TILE_BYTES);
        TILE_STORE(3, to + TILE_ROWS * TILE_DEPTH + TILE_ROWS, 2 * TILE_BYTES);
    }
}

/* P V of all rows: [columns/32][rows, rounded up to 16][32 columns, even then odd]. */
static void multiply_group(const sums_job *job, const bf16 *v, int32_t n, int32_t E, float *to)
{
    const int32_t depth = (n + TILE_DEPTH - 1) / TILE_DEPTH;
    for (int32_t d = 0; d < E; d += TILE_DEPTH, v += (int64_t)depth * 2 * TILE)
        for (int32_t r = 0; r < job->rows; r += 2 * TILE_ROWS) {
            const char *p = job->p + r * job->p_stride;
            if (job->rows - r > TILE_ROWS) {
                value_unit(2, job, p, v, depth, to);
                to += 2 * TILE_ROWS * TILE_DEPTH;
            } else {
                value_unit(1, job, p, v, depth, to);
                to += TILE_ROWS * TILE_DEPTH;
            }
        }
}

/* An infinity or NaN in V is one in every row's sums too: a dead key's 0 times it is NaN. */
static int is_wild(const float *sums, int32_t rows, int32_t E)
{
    const int32_t padded = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    vf noted = vf_set(0);
    for (int32_t d = 0; d < E; d += TILE_DEPTH, sums += padded * TILE_DEPTH)
        for (int32_t t = 0; t < TILE_DEPTH; t += VF) /* of the first row */
            noted = vf_note_wild(noted, vf_load(sums + t));
    return vf_any_wild(noted);
}

static ALWAYS_INLINE void add_columns(const float *from, float *o)
{
#if defined(VF_HAS_FRACTION)
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16,
                                           0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const vf even = vf_load(from), odd = vf_load(from + VF);
    vf_store(o, vf_load(o) + _mm512_permutex2var_ps(even, first, odd));
    vf_store(o + VF, vf_load(o + VF) + _mm512_permutex2var_ps(even, second, odd));
#else
    for (int32_t c = 0; c < TILE_DEPTH; c++)
        o[c] += from[c % 2 * TILE_ROWS + c / 2];
#endif
}

static void add_group(const float *sums, int32_t rows, int32_t E, float *o, int32_t o_ld)
{
    const int32_t padded = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    for (int32_t d = 0; d < E; d += TILE_DEPTH, sums += padded * TILE_DEPTH)
        for (int32_t r = 0; r < rows; r++)
            add_columns(sums + r * TILE_DEPTH, o + (int64_t)r * o_ld + d);
}

CPU_SUMS(LEVEL_NAME(cpu_sums_tiles))
{
    _Alignas(64) bf16 block[BLOCK];
    _Alignas(64) float sums[64 * CPU_DIRECT_DIM];
#if defined(LEVEL_AMX)
    if (rows == 1)
        return cpu_sums_bf16(p, p_ld, v, j0, n, rows, alpha, o, o_ld, next);
#endif
    const int32_t wide = (v->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t fit = BLOCK / (wide * TILE_DEPTH) / TILE_DEPTH * TILE_DEPTH;
    const int32_t group = fit < CPU_BLOCK_KEYS ? fit : CPU_BLOCK_KEYS;
    const int64_t steps = (int64_t)((n + TILE_DEPTH - 1) / TILE_DEPTH)
                          * ((rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS)) * wide;
    /* pairs take about as long as products */
    const int32_t pair_share = asking_share(next, n + 1), share = asking_share(next, 2 * steps);
    sums_job job = {(const char *)p, 4 * (int64_t)p_ld, rows, share, next};
    for (int32_t i = 0; i < rows; i++)
        for (int32_t d = 0; d < o_ld && alpha[i] != 1; d += VF) {
            float *at = o + (int64_t)i * o_ld + d;
            vf_store(at, vf_set(alpha[i]) * vf_load(at));
        }
    for (int32_t j = 0; j < n; j += group) {
        const int32_t m = n - j < group ? n - j : group;
        pair_values(v, j0 + j, m, block, next, pair_share);
        job.p = (const char *)p + 2 * (int64_t)j;
        multiply_group(&job, block, m, v->dim, sums);
        if (is_wild(sums, rows, v->dim))
            return j;
        add_group(sums, rows, v->dim, o, o_ld);
    }
    ask_rest(next);
    return n;
}
