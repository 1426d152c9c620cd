/* Scores of more rows of a group (decode) than fit one tile, as S^T = K Q^T like
 * decode_amx_qk_tmpl.c. 32 keys and two tiles of rows are taken at a time, so that every tile
 * of keys that is loaded serves two products. In f16 the two tiles of rows are the high and
 * the low parts of the same 16 rows. Keys of f16, and the ends of K, are copied into tiles in
 * L1 once for all rows, 32 dims ahead of their product: vectors and tiles work at the same
 * time. */
#include "cpu/kernels/kernels.h"
#include "cpu/decode/decode_amx.h"

enum { MOST_DEPTH = CPU_DECODE_DIM / TILE_DEPTH }; /* of 32 dims */

/* Q as tiles B: [two tiles of rows][tile][depth][pair of dims][row][2]; rows past the last
 * are 0. */
static ALWAYS_INLINE void pack_queries(int is_split, const bf16 *q, int32_t q_ld, int32_t rows,
                                       int32_t depth, bf16 *to)
{
    const bf16 *row[TILE_ROWS];
    for (int32_t first = 0; first < rows; first += UNIT >> is_split)
        for (int32_t i = 0; i < 2 * depth; i++, to += TILE) {
            const int32_t t = i / depth, d = i % depth;
            for (int32_t v = 0; v < TILE_ROWS; v++) {
                const int32_t r = first + (is_split ? v : t * TILE_ROWS + v);
                const int64_t at = ((int64_t)r * q_ld + d * TILE_DEPTH) << is_split;
                row[v] = r < rows ? q + at + (is_split ? t * TILE_DEPTH : 0) : NULL;
            }
            pack_pairs(row, to);
        }
}

CPU_PACK_DECODE(LEVEL_NAME(cpu_pack_decode_many))
{
    pack_queries(0, q, q_ld, rows, (D + TILE_DEPTH - 1) / TILE_DEPTH, to);
}

CPU_PACK_DECODE(LEVEL_NAME(cpu_pack_decode_many_split))
{
    pack_queries(1, q, q_ld, rows, (D + TILE_DEPTH - 1) / TILE_DEPTH, to);
}

/* 32 keys as tiles A. What has to be copied is in `made`, [depth][part][2][16 keys][32
 * dims]. */
typedef struct key_unit {
    const cpu_keys *k;
    int32_t j, left, depth; /* the first; keys that exist from it on; steps of 32 dims */
    int32_t whole;       /* the first so many steps are loaded from where K lies */
    int32_t ring;        /* step d is copied to place d & ring: 1 keeps two steps, -1 all, */
                         /* where more rows use them later */
    bf16 *made;
} key_unit;

/* Step d, the given part and half of the keys. */
static ALWAYS_INLINE bf16 *made_key(int is_split, const key_unit *u, int32_t d, int part,
                                    int half)
{
    return u->made + ((((int64_t)(d & u->ring) << is_split) + part) * 2 + half) * TILE;
}

/* Copies step d of keys [j, j + n), of one group, if it exists and has to be copied. */
static ALWAYS_INLINE void make_step(int is_split, const key_unit *u, int32_t d, int32_t j,
                                    int32_t n)
{
    if (d < u->depth && d >= u->whole)
        make_keys(is_split, &u->k->rows, cpu_key(u->k, u->j + (j < u->left ? j : 0)),
                  u->left - j, d, n, made_key(is_split, u, d, 0, 0) + j * TILE_DEPTH);
}

/* Multiplies one tile of keys with both tiles of rows. */
#define MULTIPLY_KEYS(reg, half, part)                                        \
    do {                                                                      \
        if (is_split || d >= u->whole)                                        \
            TILE_LOAD(reg, made_key(is_split, u, d, part, half), TILE_BYTES); \
        else                                                                  \
            TILE_STREAM(reg, row[half] + d * TILE_BYTES, u->k->rows.stride);  \
        if ((half) == 0) {                                                    \
            TILE_DOT(0, reg, 6);                                              \
            TILE_DOT(1, reg, 7);                                              \
        } else {                                                              \
            TILE_DOT(2, reg, 6);                                              \
            TILE_DOT(3, reg, 7);                                              \
        }                                                                     \
        prefetch_lines(next, MOST_PARTS, share);                              \
    } while (0)

/* Makes S^T [2 tiles of rows][32 keys][16]. While the first rows are multiplied, a part of the
 * next step of keys is copied between products; later rows find all steps there. */
static ALWAYS_INLINE void score_unit(int is_split, const key_unit *u, int is_first,
                                     const bf16 *q, cpu_prefetch *next, int32_t share,
                                     float *to)
{
    const int32_t each = TILE_ROWS >> is_split;
    const int32_t other = u->left > TILE_ROWS ? TILE_ROWS : 0;
    const char *const row[] = {cpu_key(u->k, u->j), cpu_key(u->k, u->j + other)};
    ZERO_UNIT();
    for (int32_t j = 0; j < UNIT && is_first; j += TILE_ROWS)
        make_step(is_split, u, 0, j, TILE_ROWS);
    for (int32_t d = 0; d < u->depth; d++) {
        TILE_LOAD(6, q + (int64_t)d * TILE, TILE_BYTES);
        TILE_LOAD(7, q + (int64_t)(u->depth + d) * TILE, TILE_BYTES);
        for (int part = 0; part < 1 + is_split; part++) {
            if (is_first)
                make_step(is_split, u, d + 1, 2 * part * each, each);
            MULTIPLY_KEYS(4, 0, part);
            if (is_first)
                make_step(is_split, u, d + 1, (2 * part + 1) * each, each);
            MULTIPLY_KEYS(5, 1, part);
        }
    }
    TILE_STORE(0, to, TILE_BYTES);
    TILE_STORE(2, to + SQUARE, TILE_BYTES);
    TILE_STORE(1, to + 2 * SQUARE, TILE_BYTES);
    TILE_STORE(3, to + 3 * SQUARE, TILE_BYTES);
}

/* s [rows][s_ld] = scale * the transpose of [32 keys][16 rows], for at most 16 rows. is_split:
 * of the sum of that for high and that for low parts. */
static ALWAYS_INLINE void turn(int is_split, const float *from, int32_t rows, float scale,
                               float *s, int32_t s_ld)
{
    for (int32_t j = 0; j < UNIT; j += VF)
        for (int32_t r = 0; r < TILE_ROWS && r < rows; r += VF) {
            vf square[VF];
            for (int32_t i = 0; i < VF; i++) {
                const float *at = from + (j + i) * TILE_ROWS + r;
                square[i] = vf_load(at);
                if (is_split)
                    square[i] += vf_load(at + 2 * SQUARE);
            }
            vf_transpose(square);
            for (int32_t i = 0; i < VF && r + i < rows; i++)
                vf_store(s + (int64_t)(r + i) * s_ld + j, vf_set(scale) * square[i]);
        }
}

static ALWAYS_INLINE void qk_wide(int is_split, const bf16 *q, const cpu_keys *k, int32_t n,
                                  int32_t rows, float scale, float *s, int32_t s_ld,
                                  cpu_prefetch *next)
{
    _Alignas(64) bf16 made[4 * TILE * MOST_DEPTH];
    _Alignas(64) float square[4 * SQUARE];
    const int32_t D = k->rows.dim, depth = (D + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t each = 2 * depth * TILE;
    const int32_t unit_rows = UNIT >> is_split, units = (rows + unit_rows - 1) / unit_rows;
    const int64_t ticks = (int64_t)((n + UNIT - 1) / UNIT) * units * depth * 2 << is_split;
    const int32_t share = prefetch_share(next, ticks);
    for (int32_t j = 0; j < n; j += UNIT) {
        const int32_t whole = !is_split && n - j >= UNIT ? D / TILE_DEPTH : 0;
        const key_unit u = {k, j, n - j, depth, whole, units == 1 ? 1 : -1, made};
        for (int32_t r = 0; r < rows; r += unit_rows) {
            float *to = s + (int64_t)r * s_ld + j;
            score_unit(is_split, &u, r == 0, q + r / unit_rows * each, next, share, square);
            turn(is_split, square, rows - r, scale, to, s_ld);
            if (!is_split)
                turn(0, square + 2 * SQUARE, rows - r - TILE_ROWS, scale,
                     to + (int64_t)TILE_ROWS * s_ld, s_ld);
        }
    }
    prefetch_rest(next, MOST_PARTS);
}

CPU_DECODE_QK(LEVEL_NAME(cpu_decode_qk_wide))
{
    (void)q_ld;
    qk_wide(0, q, k, n, rows, scale, s, s_ld, next);
}

CPU_DECODE_QK(LEVEL_NAME(cpu_decode_qk_wide_split))
{
    (void)q_ld;
    qk_wide(1, q, k, n, rows, scale, s, s_ld, next);
}
