/* Scores of the rows of a group (decode) on AMX tiles, as S^T = K Q^T: then 16 rows of K are a
 * tile A just as they lie in memory. For rows that fit one tile; decode_amx_qk_wide_tmpl.c has
 * more. 64 keys are taken at a time, so that four sums take turns and no product waits for the
 * one before it; meanwhile S^T of the 64 keys before is transposed in registers.
 * Keys of f16, and the ends of K, are copied into tiles in L1, 32 dims ahead of their product.
 * The high and low parts of up to 8 rows of Q in f16 are the rows of one tile, so that a score
 * is the sum of two columns. */
#include "cpu/kernels/kernels.h"
#include "cpu/decode/decode_amx.h"

enum {
    TILES = 4,                /* of keys */
    KEYS = TILES * TILE_ROWS, /* at a time */
    HALF = TILE_ROWS / 2,     /* rows of f16 */
};

typedef struct qk_job {
    const cpu_keys *k;
    int32_t n, depth, rows; /* keys, steps of 32 dims, rows of Q */
    const bf16 *q;          /* tiles B: [depth][pair of dims][row][2] */
    bf16 *made;             /* tiles A: [step & 1][32 keys][part][2][16 keys][32 dims] */
    float *squares;         /* S^T: [64 keys & 1][tile][16 keys][row] */
    float *s;
    int32_t s_ld, share; /* lines to ask for with each tile of keys */
    float scale;
    cpu_prefetch *next;
} qk_job;

/* ---- queries ---- */

static ALWAYS_INLINE void pack_queries(int is_split, const bf16 *q, int32_t q_ld, int32_t rows,
                                       int32_t depth, bf16 *to)
{
    const bf16 *row[TILE_ROWS];
    for (int32_t d = 0; d < depth; d++, to += TILE) {
        for (int32_t v = 0; v < TILE_ROWS; v++) {
            const int32_t r = is_split ? v % HALF : v, low = is_split ? v / HALF : 0;
            const int64_t at = ((int64_t)r * q_ld + d * TILE_DEPTH) << is_split;
            row[v] = r < rows ? q + at + low * TILE_DEPTH : NULL;
        }
        pack_pairs(row, to);
    }
}

/* One row of bf16 takes dot products of vectors: 9 ns a key with D 128, where tiles take 14. */
static int by_vectors(int32_t rows)
{
#if defined(LEVEL_AMX)
    return rows == 1;
#else
    (void)rows;
    return 0;
#endif
}

CPU_PACK_DECODE(LEVEL_NAME(cpu_pack_decode_tiles))
{
    const int32_t depth = (D + TILE_DEPTH - 1) / TILE_DEPTH;
    if (by_vectors(rows))
        memcpy(to, q, (size_t)q_ld * sizeof(bf16));
    else if (rows <= TILE_ROWS)
        pack_queries(0, q, q_ld, rows, depth, to);
    else
        LEVEL_NAME(cpu_pack_decode_many)(q, q_ld, rows, D, to);
}

CPU_PACK_DECODE(LEVEL_NAME(cpu_pack_decode_split))
{
    if (rows <= HALF)
        pack_queries(1, q, q_ld, rows, (D + TILE_DEPTH - 1) / TILE_DEPTH, to);
    else
        LEVEL_NAME(cpu_pack_decode_many_split)(q, q_ld, rows, D, to);
}

/* ---- keys ---- */

static ALWAYS_INLINE bf16 *made_at(int is_split, const qk_job *job, int32_t step,
                                   int32_t tile, int part)
{
    const int32_t half = (step & 1) * 2 + tile / 2;
    return job->made + (((half << is_split) + part) * 2 + tile % 2) * TILE;
}

/* Whether dims of step d of keys [j, j + 64) have to be copied into tiles first. */
static ALWAYS_INLINE int is_made(int is_split, const qk_job *job, int32_t j, int32_t d)
{
    return is_split || j + KEYS > job->n || (d + 1) * TILE_DEPTH > job->k->rows.dim;
}

/* Copies tile t of step d of keys [j, j + 64) if they exist and have to be copied. */
static ALWAYS_INLINE void make_tile(int is_split, const qk_job *job, int32_t j, int32_t d,
                                    int32_t step, int32_t t)
{
    const int32_t first = j + t * TILE_ROWS;
    if (j >= job->n || !is_made(is_split, job, j, d))
        return;
    const char *row = cpu_key(job->k, first < job->n ? first : j);
    make_keys(is_split, &job->k->rows, row, job->n - first, d, TILE_ROWS,
              made_at(is_split, job, step, t, 0));
}

/* ---- scores ---- */

/* Tile registers 0 to 3 hold sums, 4 and 5 keys in turn, 6 queries. Before each product a tile
 * of the next step is copied. */
#define MULTIPLY_TILE(t, reg)                                                      \
    do {                                                                           \
        make_tile(is_split, job, next_j, next_d, step + 1, t);                     \
        if (is_made(is_split, job, j, d))                                          \
            TILE_LOAD(reg, made_at(is_split, job, step, t, 0), TILE_BYTES);        \
        else                                                                       \
            TILE_STREAM(reg, cpu_key(job->k, j + (t)*TILE_ROWS) + d * TILE_BYTES,  \
                        job->k->rows.stride);                                      \
        TILE_DOT(t, reg, 6);                                                       \
        if (is_split) {                                                            \
            TILE_LOAD(reg, made_at(1, job, step, t, 1), TILE_BYTES);               \
            TILE_DOT(t, reg, 6);                                                   \
        }                                                                          \
        prefetch_lines(job->next, MOST_PARTS, job->share);                                     \
    } while (0)

/* Adds the products of step d to the sums of keys [j, j + 64). */
static ALWAYS_INLINE void multiply_step(int is_split, const qk_job *job, int32_t j, int32_t d)
{
    const int32_t step = j / KEYS * job->depth + d, is_last = d + 1 == job->depth;
    const int32_t next_d = is_last ? 0 : d + 1, next_j = is_last ? j + KEYS : j;
    TILE_LOAD(6, job->q + (int64_t)d * TILE, TILE_BYTES);
    MULTIPLY_TILE(0, 4);
    MULTIPLY_TILE(1, 5);
    MULTIPLY_TILE(2, 4);
    MULTIPLY_TILE(3, 5);
}

/* s [rows][s_ld] = scale * the transpose of two squares [16 keys][16 rows]. */
#if defined(VF_HAS_FRACTION)

/* Rows [r, r + 8) of one key in both squares, side by side. */
static ALWAYS_INLINE vf load_both(const float *square, int32_t r)
{
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_load_ps(square + r)),
                              _mm256_load_ps(square + SQUARE + r), 1);
}

/* Rows [r, r + 8). In f16 these are all: rows 8 to 15 of a square are sums of low parts. */
static ALWAYS_INLINE void turn_half(int is_split, const float *square, int32_t r, int32_t rows,
                                    float scale, float *s, int32_t s_ld)
{
    vf x[VF];
    for (int32_t i = 0; i < VF; i++, square += TILE_ROWS) {
        x[i] = load_both(square, r);
        if (is_split)
            x[i] += load_both(square, HALF);
    }
    vf_transpose(x);
    for (int32_t i = 0; i < HALF && r + i < rows; i++) {
        vf_store(s + (int64_t)(r + i) * s_ld, vf_set(scale) * x[i]);
        vf_store(s + (int64_t)(r + i) * s_ld + VF, vf_set(scale) * x[VF / 2 + i]);
    }
}

static ALWAYS_INLINE void turn(int is_split, const float *square, int32_t rows, float scale,
                               float *s, int32_t s_ld)
{
    turn_half(is_split, square, 0, rows, scale, s, s_ld);
    if (rows > HALF)
        turn_half(is_split, square, HALF, rows, scale, s, s_ld);
}

#else

static ALWAYS_INLINE void turn(int is_split, const float *square, int32_t rows, float scale,
                               float *s, int32_t s_ld)
{
    for (int32_t j = 0; j < 2 * TILE_ROWS; j++, square += TILE_ROWS)
        for (int32_t r = 0; r < rows; r++)
            s[(int64_t)r * s_ld + j] =
                scale * (square[r] + (is_split ? square[r + HALF] : 0.0f));
}

#endif

/* Writes the scores of one half of the 64 keys from j on. */
static ALWAYS_INLINE void turn_keys(int is_split, const qk_job *job, int32_t j, int32_t half)
{
    const float *square = job->squares + ((j / KEYS & 1) * TILES + 2 * half) * SQUARE;
    turn(is_split, square, job->rows, job->scale, job->s + j + half * UNIT, job->s_ld);
}

static ALWAYS_INLINE void score_keys(int is_split, const qk_job *job, int32_t j)
{
    float *to = job->squares + (j / KEYS & 1) * TILES * SQUARE;
    ZERO_UNIT();
    for (int32_t d = 0; d < job->depth; d++) {
        multiply_step(is_split, job, j, d);
        if (j > 0 && d == 0)
            turn_keys(is_split, job, j - KEYS, 0);
        if (j > 0 && d == job->depth / 2)
            turn_keys(is_split, job, j - KEYS, 1);
    }
    store_squares(to);
}

static ALWAYS_INLINE void qk_by_tiles(int is_split, const bf16 *q, const cpu_keys *k, int32_t n,
                                      int32_t rows, float scale, float *s, int32_t s_ld,
                                      cpu_prefetch *next)
{
    _Alignas(64) bf16 made[16 * TILE];
    _Alignas(64) float squares[2 * TILES * SQUARE];
    const int32_t depth = (k->rows.dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const int32_t last = (n - 1) / KEYS * KEYS;
    const int64_t ticks = (int64_t)(last / KEYS + 1) * depth * TILES;
    const qk_job job = {
        k, n, depth, rows, q, made, squares, s, s_ld, prefetch_share(next, ticks),
        scale, next};
    for (int32_t t = 0; t < TILES; t++)
        make_tile(is_split, &job, 0, 0, 0, t);
    for (int32_t j = 0; j < n; j += KEYS)
        score_keys(is_split, &job, j);
    turn_keys(is_split, &job, last, 0);
    turn_keys(is_split, &job, last, 1);
    prefetch_rest(next, MOST_PARTS);
}

CPU_DECODE_QK(LEVEL_NAME(cpu_decode_qk_tiles))
{
#if defined(LEVEL_AMX)
    if (by_vectors(rows)) {
        cpu_decode_qk_bf16_parts(q, q_ld, k, n, rows, scale, s, s_ld, next);
        return;
    }
#endif
    if (rows <= TILE_ROWS)
        qk_by_tiles(0, q, k, n, rows, scale, s, s_ld, next);
    else
        LEVEL_NAME(cpu_decode_qk_wide)(q, q_ld, k, n, rows, scale, s, s_ld, next);
}

CPU_DECODE_QK(LEVEL_NAME(cpu_decode_qk_split))
{
    if (rows <= HALF)
        qk_by_tiles(1, q, k, n, rows, scale, s, s_ld, next);
    else
        LEVEL_NAME(cpu_decode_qk_wide_split)(q, q_ld, k, n, rows, scale, s, s_ld, next);
}
