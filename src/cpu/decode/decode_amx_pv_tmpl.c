/* O += P V of the rows of a group (decode) on AMX tiles. P is a tile A as softmax left it. V is
 * copied into tiles B in L1, with neighbouring keys interleaved, 32 or 64 columns of a block of
 * keys at a time, and 32 keys ahead of their product, so that vectors and tiles work at the
 * same time. Sums start from 0 and are added to O once they have shown no infinity or NaN. */
#include "cpu/kernels/kernels.h"
#include "cpu/decode/decode_amx.h"

enum { STEPS = CPU_BLOCK_KEYS / TILE_DEPTH }; /* of 32 keys */

typedef struct pv_job {
    const cpu_keys *v;
    int64_t first; /* key */
    const char *p;
    int64_t p_stride;       /* bytes */
    const bf16 *folded;     /* P of at most 8 rows of f16, as rows of a tile: [step][16][32] */
    int32_t n, rows, share; /* keys; rows; lines to prefetch at a time */
    int32_t groups;         /* of 32 columns at a time: 2 where rows fit one tile, else 1 */
    int32_t ring; /* step t is in place t & ring: 1 keeps two, -1 all, for later rows */
    bf16 *made;   /* V as tiles B: [step & ring][group][part][pair of keys][2][32] */
    cpu_prefetch *next;
} pv_job;

/* Where the tiles of group g of step t are. */
static ALWAYS_INLINE bf16 *made_at(int is_split, const pv_job *job, int32_t t, int32_t g)
{
    return job->made + ((int64_t)((t & job->ring) * job->groups + g) * 2 * TILE << is_split);
}

/* Interleaves columns [c, c + 32) of keys j and j + 1, and of j + 2 and j + 3, into `to`.
 * is_edge: some of these columns or keys do not exist and become 0. */
static ALWAYS_INLINE void make_pairs(int is_split, const split_tables *tables,
                                     const pv_job *job, int is_edge, int32_t j, int32_t c,
                                     bf16 *to)
{
    const int64_t stride = job->v->rows.stride;
    const int32_t dim = job->v->rows.dim;
    const char *row = cpu_key(job->v, job->first + (j < job->n ? j : 0));
    tiles_line line[SPLIT_LINES];
#pragma GCC unroll 4
    for (int32_t i = 0; i < SPLIT_LINES; i++)
        line[i] = is_edge ? line_part(row + i * stride, j + i < job->n ? dim : c, c)
                          : line_load(row + i * stride + 2 * (int64_t)c);
    for (int32_t i = 0; i < SPLIT_LINES; i += 2)
        line_pair(line + i);
    if (is_split)
        split_lines(tables, line, to);
    for (int32_t i = 0; i < SPLIT_LINES && !is_split; i++)
        line_store(to + i * TILE_DEPTH, line[i]);
}

/* So many keys are copied between one prefetch and the next. */
static ALWAYS_INLINE int32_t prefetch_every(int groups)
{
    return 8 / groups;
}

/* Copies one of `slices` equal parts of the 32 keys of step t, columns [c, c + 32 groups). */
static ALWAYS_INLINE void make_values(int is_split, int groups, const pv_job *job, int32_t t,
                                      int32_t c, int32_t slice, int32_t slices)
{
    const int32_t keys = TILE_DEPTH / slices, j0 = t * TILE_DEPTH;
    const int is_edge = j0 + TILE_DEPTH > job->n || c + groups * TILE_DEPTH > job->v->rows.dim;
    const split_tables tables = split_begin();
    bf16 *first = made_at(is_split, job, t, 0), *second = made_at(is_split, job, t, 1);
    for (int32_t i = slice * keys; i < (slice + 1) * keys; i += SPLIT_LINES) {
        bf16 *to = first + i * TILE_DEPTH, *beside = second + i * TILE_DEPTH;
        if (i % prefetch_every(groups) == 0)
            prefetch_lines(job->next, MOST_PARTS, job->share);
        if (is_edge) {
            make_pairs(is_split, &tables, job, 1, j0 + i, c, to);
            if (groups == 2)
                make_pairs(is_split, &tables, job, 1, j0 + i, c + TILE_DEPTH, beside);
        } else {
            make_pairs(is_split, &tables, job, 0, j0 + i, c, to);
            if (groups == 2)
                make_pairs(is_split, &tables, job, 0, j0 + i, c + TILE_DEPTH, beside);
        }
    }
}

/* Loads the two tiles B of a group into tile registers 6 and 7. */
#define LOAD_VALUES(job, t, g, part)                                               \
    do {                                                                           \
        const bf16 *at_ = made_at(is_split, job, t, g) + (int64_t)(part)*2 * TILE; \
        TILE_LOAD(6, at_, 2 * TILE_BYTES);                                         \
        TILE_LOAD(7, at_ + TILE_DEPTH, 2 * TILE_BYTES);                            \
    } while (0)

/* P V of one tile of rows and one or two groups of columns. Between products a part of the next
 * step of V is copied. */
static ALWAYS_INLINE void value_one(int is_split, int groups, const pv_job *job, int is_first,
                                    int32_t c, const char *p, int32_t steps)
{
    const int32_t slices = groups << is_split;
    for (int32_t t = 0; t < steps; t++) {
        if (is_split)
            TILE_LOAD(4, job->folded + (int64_t)t * TILE, TILE_BYTES);
        else
            TILE_LOAD(4, p + (int64_t)t * TILE_BYTES, job->p_stride);
        for (int32_t slice = 0; slice < slices; slice++) {
            if (is_first && t + 1 < steps)
                make_values(is_split, groups, job, t + 1, c, slice, slices);
            LOAD_VALUES(job, t, slice >> is_split, slice & is_split);
            if (slice >> is_split == 0) {
                TILE_DOT(0, 4, 6);
                TILE_DOT(1, 4, 7);
            } else {
                TILE_DOT(2, 4, 6);
                TILE_DOT(3, 4, 7);
            }
        }
    }
}

/* P V of two tiles of rows; or, in f16, of the high and the low parts of one. There the product
 * of two low parts is left out, being too small to matter. */
static ALWAYS_INLINE void value_two(int is_split, const pv_job *job, int is_first, int32_t c,
                                    const char *p, int32_t steps)
{
    const char *second = p + (is_split ? TILE_BYTES : TILE_ROWS * job->p_stride);
    for (int32_t t = 0; t < steps; t++) {
        const int64_t at = (int64_t)t * TILE_BYTES << is_split;
        if (is_first && t + 1 < steps)
            make_values(is_split, 1, job, t + 1, c, 0, 2);
        TILE_LOAD(4, p + at, job->p_stride);
        LOAD_VALUES(job, t, 0, 0);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        if (is_first && t + 1 < steps)
            make_values(is_split, 1, job, t + 1, c, 1, 2);
        TILE_LOAD(5, second + at, job->p_stride);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
        if (is_split) {
            LOAD_VALUES(job, t, 0, 1);
            TILE_DOT(0, 4, 6);
            TILE_DOT(1, 4, 7);
        }
    }
}

/* P V of one unit: [2 tiles of rows][16][32 columns], or [groups][16 rows][32 columns]. */
static ALWAYS_INLINE void value_unit(int is_split, int high, int groups, const pv_job *job,
                                     int is_first, int32_t c, const char *p, float *to)
{
    const int32_t steps = (job->n + TILE_DEPTH - 1) / TILE_DEPTH;
    ZERO_UNIT();
    if (is_first)
        make_values(is_split, groups, job, 0, c, 0, 1);
    if (high == 1)
        value_one(is_split, groups, job, is_first, c, p, steps);
    else
        value_two(is_split, job, is_first, c, p, steps);
    store_unit(to, 2 * TILE_BYTES);
}

/* Makes sums [rows][32] of what value_unit left. In f16 they are sums over its parts. */
static ALWAYS_INLINE void join_sums(int is_split, int high, const float *from, int32_t rows,
                                    float *sums)
{
    const int32_t second = TILE_ROWS * TILE_DEPTH, half = second / 2;
    for (int32_t r = 0; r < rows; r++, from += TILE_DEPTH, sums += TILE_DEPTH)
        for (int32_t c = 0; c < TILE_DEPTH; c += VF) {
            vf x = vf_load(from + c);
            if (is_split)
                x += vf_load(from + (high == 1 ? half : second) + c);
            vf_store(sums + c, x);
        }
}

/* P V of rows that fit one tile: sums [columns/32][rows][32 columns]. */
static ALWAYS_INLINE void multiply_few(int is_split, const pv_job *job, float *sums)
{
    _Alignas(64) float square[4 * SQUARE];
    const int32_t each = job->rows * TILE_DEPTH;
    int32_t c = 0;
    for (; c + TILE_DEPTH < job->v->rows.dim; c += 2 * TILE_DEPTH, sums += 2 * each) {
        value_unit(is_split, 1, 2, job, 1, c, job->p, square);
        join_sums(is_split, 1, square, job->rows, sums);
        join_sums(is_split, 1, square + 2 * SQUARE, job->rows, sums + each);
    }
    if (c < job->v->rows.dim) {
        value_unit(is_split, 1, 1, job, 1, c, job->p, square);
        join_sums(is_split, 1, square, job->rows, sums);
    }
}

/* P V of any number of rows, in the same order. */
static ALWAYS_INLINE void multiply_group(int is_split, const pv_job *job, float *sums)
{
    _Alignas(64) float square[4 * SQUARE];
    const int32_t tile_rows = TILE_ROWS >> is_split;
    for (int32_t c = 0; c < job->v->rows.dim; c += TILE_DEPTH)
        for (int32_t r = 0; r < job->rows; r += 2 * tile_rows) {
            const char *p = job->p + r * job->p_stride;
            const int32_t left = job->rows - r;
            const int32_t now = left < 2 * tile_rows ? left : 2 * tile_rows;
            if (left > tile_rows) {
                value_unit(is_split, 2, 1, job, r == 0, c, p, square);
                join_sums(is_split, 2, square, now, sums);
            } else {
                value_unit(is_split, 1, 1, job, r == 0, c, p, square);
                join_sums(is_split, 1, square, now, sums);
            }
            sums += now * TILE_DEPTH;
        }
}

/* Copies the last rows of P in f16, at most 8 of them, into one tile for each step of keys:
 * rows 0 to 7 are high parts, rows 8 to 15 low parts, and rows that do not exist are 0. */
static void fold_weights(const pv_job *job, bf16 *to)
{
    const int32_t half = TILE_ROWS / 2, first = job->rows / TILE_ROWS * TILE_ROWS;
    const int32_t steps = (job->n + TILE_DEPTH - 1) / TILE_DEPTH;
    for (int32_t t = 0; t < steps; t++)
        for (int32_t i = 0; i < TILE_ROWS; i++, to += TILE_DEPTH) {
            const int32_t row = first + i % half;
            const char *p = job->p + row * job->p_stride + (int64_t)t * 2 * TILE_BYTES;
            if (row < job->rows)
                memcpy(to, p + i / half * TILE_BYTES, TILE_BYTES);
            else
                memset(to, 0, TILE_BYTES);
        }
}

/* An infinity or NaN in V makes the sums of every row infinite or NaN, since even the 0 of a
 * dead key times it is NaN. So the sums of one row tell. */
static int is_nonfinite(const float *sums, int32_t rows, int32_t E)
{
    vf noted = vf_set(0);
    for (int32_t d = 0; d < E; d += TILE_DEPTH, sums += rows * TILE_DEPTH)
        for (int32_t t = 0; t < TILE_DEPTH; t += VF) /* of the first row */
            noted = vf_note_nonfinite(noted, vf_load(sums + t));
    return vf_any_nonfinite(noted);
}

/* Adds 32 columns to o. The columns are in the order that line_pair has left them in. */
static ALWAYS_INLINE void add_columns(const float *from, float *o)
{
#if defined(VF_HAS_FRACTION)
    const __m512i first =
        _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const vf even = vf_load(from), odd = vf_load(from + VF);
    vf_store(o, vf_load(o) + _mm512_permutex2var_ps(even, first, odd));
    vf_store(o + VF, vf_load(o + VF) + _mm512_permutex2var_ps(even, second, odd));
#else
    for (int32_t c = 0; c < TILE_DEPTH; c++)
        o[c] += from[c / 4 % 2 * TILE_ROWS + c / 8 * 4 + c % 4];
#endif
}

static ALWAYS_INLINE void add_group(const float *sums, int32_t rows, int32_t E, float *o,
                                    int32_t o_ld)
{
    for (int32_t d = 0; d < E; d += TILE_DEPTH)
        for (int32_t r = 0; r < rows; r++, sums += TILE_DEPTH)
            add_columns(sums, o + (int64_t)r * o_ld + d);
}

static ALWAYS_INLINE int32_t pv_by_tiles(int is_split, const float *p, int32_t p_ld,
                                         const cpu_keys *v, int32_t n, int32_t rows,
                                         const float *alpha, float *o, int32_t o_ld,
                                         cpu_prefetch *next)
{
    _Alignas(64) bf16 made[4 * TILE * STEPS], folded[TILE * STEPS];
    _Alignas(64) float sums[64 * CPU_DECODE_DIM];
    const int32_t tile_rows = TILE_ROWS >> is_split;
    const int32_t groups = rows <= tile_rows ? 2 : 1, columns = groups * TILE_DEPTH;
    const int64_t ticks = (int64_t)((n + TILE_DEPTH - 1) / TILE_DEPTH)
                          * (TILE_DEPTH / prefetch_every(groups))
                          * ((v->rows.dim + columns - 1) / columns);
    for (int32_t i = 0; i < rows; i++)
        scale_row(o + (int64_t)i * o_ld, o_ld, alpha[i]);
    for (int32_t j = 0; j < n; j += CPU_BLOCK_KEYS) {
        const pv_job job = {v,
                            j,
                            (const char *)p + (2 * (int64_t)j << is_split),
                            4 * (int64_t)p_ld,
                            folded,
                            n - j < CPU_BLOCK_KEYS ? n - j : CPU_BLOCK_KEYS,
                            rows,
                            prefetch_share(next, ticks),
                            groups,
                            rows <= 2 * tile_rows ? 1 : -1,
                            made,
                            next};
        if (is_split)
            fold_weights(&job, folded);
        if (rows <= tile_rows)
            multiply_few(is_split, &job, sums);
        else
            multiply_group(is_split, &job, sums);
        if (is_nonfinite(sums, rows, v->rows.dim))
            return j;
        add_group(sums, rows, v->rows.dim, o, o_ld);
    }
    prefetch_rest(next, MOST_PARTS);
    return n;
}

CPU_DECODE_PV(LEVEL_NAME(cpu_decode_pv_tiles))
{
    if (rows <= TILE_ROWS / 2)
        return LEVEL_NAME(cpu_decode_pv8)(p, p_ld, v, n, rows, alpha, o, o_ld, next);
    return pv_by_tiles(0, p, p_ld, v, n, rows, alpha, o, o_ld, next);
}

CPU_DECODE_PV(LEVEL_NAME(cpu_decode_pv_split))
{
    return pv_by_tiles(1, p, p_ld, v, n, rows, alpha, o, o_ld, next);
}
