/* Scores of the rows of a group (decode) on AMX tiles: S^T = K Q^T, so that 16 rows of K are a
 * tile A as they lie in memory. Q^T is packed once per call, and S^T is turned in registers.
 * f16, and edges of K, are made in L1 first: f16 a step of 32 dims ahead of its product, so
 * that vectors and tiles work side by side. */
#include "cpu/cpu.h"
#include "cpu/tiles_direct.h"

enum {
    QUERIES = 64 * CPU_DIRECT_DIM,            /* elements of packed Q */
    MOST_DEPTH = CPU_DIRECT_DIM / TILE_DEPTH, /* of 32 dims */
};

/* Row v of tile t of a unit of rows: for f16 high parts and then low ones, in halves of one
 * tile or in two tiles. NULL: there is none. */
static ALWAYS_INLINE const bf16 *query_row(int is_split, int high, const bf16 *q, int32_t q_ld,
                                           int32_t rows, int32_t t, int32_t v)
{
    const int32_t half = TILE_ROWS / 2;
    int32_t row = t * TILE_ROWS + v, low = 0;
    if (is_split && high == 1) {
        row = v % half;
        low = v / half;
    } else if (is_split) {
        row = v;
        low = t;
    }
    return row < rows ? q + ((int64_t)row * q_ld << is_split) + low * TILE_DEPTH : NULL;
}

/* A unit of rows of Q as tiles B: [tile][depth][pair of dims][row][2], rows past the last 0. */
static ALWAYS_INLINE void pack_queries(int is_split, int high, const bf16 *q, int32_t q_ld,
                                       int32_t rows, int32_t depth, bf16 *to)
{
    _Alignas(64) bf16 part[TILE_ROWS][TILE_DEPTH];
    for (int32_t t = 0; t < high; t++)
        for (int32_t d = 0; d < depth; d++, to += TILE) {
            for (int32_t v = 0; v < TILE_ROWS; v++) {
                const bf16 *row = query_row(is_split, high, q, q_ld, rows, t, v);
                if (row)
                    memcpy(part[v], row + (d * TILE_DEPTH << is_split), TILE_BYTES);
                else
                    memset(part[v], 0, TILE_BYTES);
            }
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
}

/* 32 keys as tiles A. Those that are made lie in `made`: [depth][part][16 keys][32 dims]. */
typedef struct key_unit {
    const cpu_rows *k;
    const char *row;
    int32_t left, depth; /* keys there are, steps of 32 dims */
    int32_t whole;       /* steps that lie in memory as tiles do */
    int32_t ring;        /* step d is made in place d & ring: two, or all if more rows come */
    bf16 *made;
} key_unit;

/* Step d, the given part and half of the keys. */
static ALWAYS_INLINE bf16 *made_key(int is_split, const key_unit *u, int32_t d, int part,
                                    int half)
{
    return u->made + ((((int64_t)(d & u->ring) << is_split) + part) * 2 + half) * TILE;
}

/* Keys [j, end) of step d of 32 dims into `made`, 0 past the ends of the keys and the dims. */
static ALWAYS_INLINE void make_keys(int is_split, const key_unit *u, int32_t d, int32_t j,
                                    int32_t end, cpu_asking *next, int32_t share)
{
    const int32_t is_edge = u->left < UNIT || (d + 1) * TILE_DEPTH > u->k->dim;
    const int64_t stride = u->k->stride, at = (int64_t)d * TILE_BYTES;
    const char *row = u->row + j * stride;
    bf16 *to = made_key(is_split, u, d, 0, 0) + j * TILE_DEPTH;
    cpu_asking own = *next; /* in registers */
    for (; j < end; j += 2, row += 2 * stride, to += 2 * TILE_DEPTH) {
        tiles_line pair[2];
        if (is_split)
            ask_few(&own, share);
        for (int32_t i = 0; i < 2; i++)
            pair[i] = is_edge ? line_part(row + i * stride,
                                          j + i < u->left ? u->k->dim : d * TILE_DEPTH,
                                          d * TILE_DEPTH)
                              : line_load(row + i * stride + at);
        if (is_split) {
            split_lines(pair, to);
        } else {
            line_store(to, pair[0]);
            line_store(to + TILE_DEPTH, pair[1]);
        }
    }
    *next = own;
}

/* Tiles A, keys 0 to 15 in register 4 and 16 to 31 in 5. */
#define LOAD_KEYS(half, u, d, part)                                                \
    do {                                                                           \
        if (!is_split && (d) < (u)->whole)                                         \
            TILE_STREAM(half,                                                      \
                        (u)->row + ((half)-4) * TILE_ROWS * (u)->k->stride         \
                            + (int64_t)(d)*TILE_BYTES,                             \
                        (u)->k->stride);                                           \
        else                                                                       \
            TILE_LOAD(half, made_key(is_split, u, d, part, (half)-4), TILE_BYTES); \
    } while (0)

/* S^T of 32 keys and one tile of rows, in two sums, of even and odd steps, since a product must
 * wait for the one before it in its sum. */
static ALWAYS_INLINE void score_one(const key_unit *u, const bf16 *q, cpu_asking *next,
                                    int32_t share)
{
    enum { is_split = 0 };
    for (int32_t d = 0; d < u->depth; d += 2) {
        TILE_LOAD(6, q + (int64_t)d * TILE, TILE_BYTES);
        LOAD_KEYS(4, u, d, 0);
        TILE_DOT(0, 4, 6);
        ask_lines(next, share);
        LOAD_KEYS(5, u, d, 0);
        TILE_DOT(2, 5, 6);
        ask_lines(next, share);
        if (d + 1 < u->depth) {
            TILE_LOAD(7, q + (int64_t)(d + 1) * TILE, TILE_BYTES);
            LOAD_KEYS(4, u, d + 1, 0);
            TILE_DOT(1, 4, 7);
            ask_lines(next, share);
            LOAD_KEYS(5, u, d + 1, 0);
            TILE_DOT(3, 5, 7);
            ask_lines(next, share);
        }
    }
}

/* Two tiles of rows. */
static ALWAYS_INLINE void score_two(const key_unit *u, const bf16 *q, cpu_asking *next,
                                    int32_t share)
{
    enum { is_split = 0 };
    for (int32_t d = 0; d < u->depth; d++) {
        TILE_LOAD(6, q + (int64_t)d * TILE, TILE_BYTES);
        TILE_LOAD(7, q + (int64_t)(u->depth + d) * TILE, TILE_BYTES);
        LOAD_KEYS(4, u, d, 0);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        ask_lines(next, share);
        LOAD_KEYS(5, u, d, 0);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
        ask_lines(next, share);
    }
}

/* One tile of rows, their parts side by side, or two of parts of their own. Between products a
 * part of the next step is made. */
static ALWAYS_INLINE void score_split(int high, const key_unit *u, int is_first, const bf16 *q,
                                      cpu_asking *next, int32_t share)
{
    enum { is_split = 1, EACH = UNIT / 4 };
    for (int32_t d = 0; d < u->depth; d++) {
        TILE_LOAD(6, q + (int64_t)d * TILE, TILE_BYTES);
        if (high == 2)
            TILE_LOAD(7, q + (int64_t)(u->depth + d) * TILE, TILE_BYTES);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) { /* half i % 2 of the keys, part i / 2 */
            if (is_first && d + 1 < u->depth)
                make_keys(1, u, d + 1, i * EACH, (i + 1) * EACH, next, share);
            if (i % 2 == 0)
                LOAD_KEYS(4, u, d, i / 2);
            else
                LOAD_KEYS(5, u, d, i / 2);
            if (i == 0 || (i == 2 && high == 2))
                TILE_DOT(0, 4, 6);
            else if (i == 1 || high == 2)
                TILE_DOT(2, 5, 6);
            else if (i == 2)
                TILE_DOT(1, 4, 6);
            else
                TILE_DOT(3, 5, 6);
            if (i % 2 == 0 && high == 2)
                TILE_DOT(1, 4, 7);
            else if (high == 2)
                TILE_DOT(3, 5, 7);
        }
    }
}

/* S^T [2][32 keys][16] of one unit of rows. */
static ALWAYS_INLINE void score_unit(int is_split, int high, const key_unit *u, int is_first,
                                     const bf16 *q, cpu_asking *next, int32_t share, float *to)
{
    ZERO_UNIT();
    if (is_first && is_split)
        make_keys(1, u, 0, 0, UNIT, next, share);
    for (int32_t d = u->whole; d < u->depth && is_first && !is_split; d++)
        make_keys(0, u, d, 0, UNIT, next, share);
    if (is_split)
        score_split(high, u, is_first, q, next, share);
    else if (high == 1)
        score_one(u, q, next, share);
    else
        score_two(u, q, next, share);
    TILE_STORE(0, to, TILE_BYTES);
    TILE_STORE(2, to + SQUARE, TILE_BYTES);
    TILE_STORE(1, to + 2 * SQUARE, TILE_BYTES);
    TILE_STORE(3, to + 3 * SQUARE, TILE_BYTES);
}

/* s [rows][s_ld] = scale * the transpose of [32][16], of which at most 16 rows are wanted.
 * sums: how many such there are to add up. is_halved: rows of high and low parts, 8 and 8. */
static ALWAYS_INLINE void turn(int sums, int is_halved, const float *from, int32_t rows,
                               float scale, float *s, int32_t s_ld)
{
    const int32_t half = TILE_ROWS / 2, is_short = VF < half + half;
    for (int32_t j = 0; j < UNIT; j += VF)
        for (int32_t r = 0; r < TILE_ROWS && r < rows; r += VF) {
            vf square[VF];
            for (int32_t i = 0; i < VF; i++) {
                const float *at = from + (j + i) * TILE_ROWS + r;
                square[i] = vf_load(at);
                if (sums == 2)
                    square[i] += vf_load(at + 2 * SQUARE);
                if (is_halved && is_short)
                    square[i] += vf_load(at + half) + vf_load(at + 2 * SQUARE + half);
            }
            vf_transpose(square);
            for (int32_t i = 0; i < VF && r + i < rows; i++) {
                if (is_halved && !is_short)
                    square[i] += square[(i + half) % VF];
                vf_store(s + (int64_t)(r + i) * s_ld + j, vf_set(scale) * square[i]);
            }
        }
}

/* Of at most 8 rows: both 16 keys at once. */
static ALWAYS_INLINE void turn_few(int is_halved, const float *from, int32_t rows, float scale,
                                   float *s, int32_t s_ld)
{
#if defined(VF_HAS_FRACTION)
    vf square[VF];
    for (int32_t i = 0; i < VF; i++, from += TILE_ROWS) {
        const vf x = vf_load(from) + vf_load(from + 2 * SQUARE);
        const vf y = vf_load(from + SQUARE) + vf_load(from + 3 * SQUARE);
        square[i] = _mm512_shuffle_f32x4(x, y, 0x44);
        if (is_halved)
            square[i] += _mm512_shuffle_f32x4(x, y, 0xee);
    }
    vf_transpose(square);
    for (int32_t i = 0; i < rows; i++, s += s_ld) {
        vf_store(s, vf_set(scale) * square[i]);
        vf_store(s + VF, vf_set(scale) * square[VF / 2 + i]);
    }
#else
    turn(2, is_halved, from, rows, scale, s, s_ld);
#endif
}

typedef struct dots_job {
    const cpu_rows *k;
    float *s;
    int32_t s_ld, rows, share;
    float scale;
    cpu_asking *next;
} dots_job;

/* Rows from r on, one tile of them or two, against 32 keys; scores from column j on. */
static ALWAYS_INLINE void dots_unit(int is_split, int high, const dots_job *job,
                                    const key_unit *u, const bf16 *q, int32_t r, int32_t j)
{
    _Alignas(64) float square[4 * SQUARE];
    const int32_t left = job->rows - r, s_ld = job->s_ld;
    float *s = job->s + (int64_t)r * s_ld + j;
    score_unit(is_split, high, u, r == 0, q, job->next, job->share, square);
    if (high == 1 && left <= TILE_ROWS / 2) {
        turn_few(is_split, square, left, job->scale, s, s_ld);
    } else if (is_split || high == 1) {
        turn(2, is_split && high == 1, square, left, job->scale, s, s_ld);
    } else {
        turn(1, 0, square, TILE_ROWS, job->scale, s, s_ld);
        turn(1, 0, square + 2 * SQUARE, left - TILE_ROWS, job->scale,
             s + (int64_t)TILE_ROWS * s_ld, s_ld);
    }
}

/* Moments to ask in dots: for f16 while keys are made, else with every tile of them. */
static int64_t dots_ticks(int is_split, int32_t rows, int32_t n, int32_t depth)
{
    const int64_t units = (n + UNIT - 1) / UNIT;
    if (is_split)
        return units * depth * UNIT / 2;
    return units * depth * 2 * ((rows + UNIT - 1) / UNIT);
}

static ALWAYS_INLINE void dots_by_tiles(int is_split, const bf16 *q, int32_t q_ld,
                                        const cpu_rows *k, int64_t j0, int32_t n, int32_t rows,
                                        float scale, float *s, int32_t s_ld, cpu_asking *next)
{
    _Alignas(64) bf16 queries[QUERIES], made[4 * TILE * MOST_DEPTH];
    const int32_t depth = (k->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t tile_rows = TILE_ROWS >> is_split;
    const int32_t share = asking_share(next, dots_ticks(is_split, rows, n, depth));
    const dots_job job = {k, s, s_ld, rows, share, scale, next};
    for (int32_t r = 0; r < rows; r += 2 * tile_rows) {
        const bf16 *from = q + ((int64_t)r * q_ld << is_split);
        bf16 *to = queries + (int64_t)r / tile_rows * depth * TILE;
        if (rows - r > tile_rows)
            pack_queries(is_split, 2, from, q_ld, rows - r, depth, to);
        else
            pack_queries(is_split, 1, from, q_ld, rows - r, depth, to);
    }
    for (int32_t j = 0; j < n; j += UNIT) {
        const int32_t whole = n - j >= UNIT ? k->dim / TILE_DEPTH : 0;
        const key_unit u = {k,     k->base + (j0 + j) * k->stride,
                            n - j, depth,
                            whole, is_split && rows <= 2 * tile_rows ? 1 : -1,
                            made};
        for (int32_t r = 0; r < rows; r += 2 * tile_rows) {
            const bf16 *packed = queries + (int64_t)r / tile_rows * depth * TILE;
            if (rows - r > tile_rows)
                dots_unit(is_split, 2, &job, &u, packed, r, j);
            else
                dots_unit(is_split, 1, &job, &u, packed, r, j);
        }
    }
    ask_rest(next);
}

CPU_DOTS(LEVEL_NAME(cpu_dots_tiles))
{
#if defined(LEVEL_AMX)
    if (rows == 1) { /* 9 ns a key of D128 instead of 14 */
        cpu_dots_bf16(q, q_ld, k, j0, n, rows, scale, s, s_ld, next);
        return;
    }
#endif
    dots_by_tiles(0, q, q_ld, k, j0, n, rows, scale, s, s_ld, next);
}

CPU_DOTS(LEVEL_NAME(cpu_dots_split))
{
    dots_by_tiles(1, q, q_ld, k, j0, n, rows, scale, s, s_ld, next);
}
