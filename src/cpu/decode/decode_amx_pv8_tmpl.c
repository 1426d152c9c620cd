/* O += P V of at most 8 rows of a group (decode) on AMX tiles that load V as it lies. A tile B
 * should hold pairs of keys; what lies side by side in a row of V are pairs of columns. With a
 * 0 beside each weight, 16 rows of V serve as a tile B all the same:
 *
 *     (p, 0) x (even, odd column) = even column of P V       (0, p) x the same = odd column
 *
 * The two kinds of weights are the halves of one tile A, so nothing of V has to be copied but
 * the ends of keys and columns, which are filled up with 0. Sums start from 0 and are added to
 * O once they have shown no infinity or NaN. */
#include "cpu/kernels/kernels.h"
#include "cpu/decode/decode_amx.h"

enum {
    STEP = TILE_ROWS, /* keys */
    STEPS = CPU_BLOCK_KEYS / STEP,
    MOST_DEPTH = CPU_DECODE_DIM / TILE_DEPTH, /* of 32 columns */
    HALF = TILE / 2, /* elements of the upper rows of a tile, TILE_ROWS / 2 of them */
    MOST_GROUPS = 4, /* of 32 columns, in one pass over V */
};

typedef struct few_job {
    const cpu_keys *v;
    const float *p; /* as softmax left it, rows p_ld apart */
    int32_t p_ld, first;    /* the first key */
    bf16 *weights;          /* [step][(p, 0) and (0, p)][8 rows][16 keys][2] */
    int32_t n, rows, share; /* keys; rows; lines to prefetch with each tile of V */
    bf16 *made;             /* ends of V: [step & 1][group][16 keys][32] */
    cpu_prefetch *next;
} few_job;

/* Writes 16 weights twice: with a 0 behind each, and with a 0 before each. */
static ALWAYS_INLINE void spread_line(const bf16 *from, bf16 *even, bf16 *odd)
{
#if defined(VF_HAS_FRACTION)
    const __m512i x =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)from));
    _mm512_store_si512(even, x);
    _mm512_store_si512(odd, _mm512_slli_epi32(x, 16));
#else
    for (int32_t j = 0; j < STEP; j++) {
        even[2 * j] = odd[2 * j + 1] = from[j];
        even[2 * j + 1] = odd[2 * j] = 0;
    }
#endif
}

/* Spreads the weights of step t, if there is such a step. */
static ALWAYS_INLINE void spread_weights(const few_job *job, int32_t t)
{
    bf16 *to = job->weights + (int64_t)t * TILE;
    for (int32_t r = 0; r < job->rows && t * STEP < job->n; r++, to += TILE_DEPTH) {
        const float *row = job->p + (int64_t)r * job->p_ld;
        spread_line((const bf16 *)(const void *)row + (int64_t)t * STEP, to, to + HALF);
    }
}

/* ---- products ---- */

static ALWAYS_INLINE bf16 *made_at(const few_job *job, int32_t t, int32_t g)
{
    return job->made + ((t & 1) * MOST_GROUPS + g) * TILE;
}

/* Whether some keys of step t or some of columns [c, c + 32) do not exist. */
static ALWAYS_INLINE int is_end(const few_job *job, int32_t t, int32_t c)
{
    return (t + 1) * STEP > job->n || c + TILE_DEPTH > job->v->rows.dim;
}

/* Copies those tiles of step t, columns [c, c + 32 groups), that are ends. */
static ALWAYS_INLINE void make_ends(const few_job *job, int32_t t, int32_t c, int32_t groups)
{
    for (int32_t g = 0; g < groups; g++, c += TILE_DEPTH) {
        const char *row = cpu_key(job->v, job->first + t * STEP);
        bf16 *to = made_at(job, t, g);
        if (!is_end(job, t, c))
            continue;
        for (int32_t j = t * STEP; j < (t + 1) * STEP; j++, row += job->v->rows.stride) {
            line_store(to, line_part(row, j < job->n ? job->v->rows.dim : c, c));
            to += TILE_DEPTH;
        }
    }
}

#define LOAD_GROUP(reg, g)                                               \
    do {                                                                 \
        if (is_end(job, t, c + (g)*TILE_DEPTH))                          \
            TILE_LOAD(reg, made_at(job, t, g), TILE_BYTES);              \
        else                                                             \
            TILE_STREAM(reg, row + (g)*TILE_BYTES, job->v->rows.stride); \
        prefetch_lines(job->next, MOST_PARTS, job->share);                           \
    } while (0)

/* Tile registers 0 to 3 hold sums. A product waits for the one before it in the same sum, so
 * one or two groups have two sums each, for even and for odd steps. */
#define MULTIPLY_GROUP(sum, p, reg, g) \
    do {                               \
        LOAD_GROUP(reg, g);            \
        TILE_DOT(sum, p, reg);         \
    } while (0)

static ALWAYS_INLINE void multiply_step(const few_job *job, int32_t t, int32_t c,
                                        int32_t groups)
{
    const char *row = cpu_key(job->v, job->first + t * STEP) + 2 * (int64_t)c;
    TILE_LOAD(4, job->weights + (int64_t)t * TILE, TILE_BYTES);
    MULTIPLY_GROUP(0, 4, 6, 0);
    if (groups > 1)
        MULTIPLY_GROUP(1, 4, 7, 1);
    if (groups > 2)
        MULTIPLY_GROUP(2, 4, 6, 2);
    if (groups > 3)
        MULTIPLY_GROUP(3, 4, 7, 3);
}

static ALWAYS_INLINE void multiply_odd(const few_job *job, int32_t t, int32_t c, int32_t groups)
{
    const char *row = cpu_key(job->v, job->first + t * STEP) + 2 * (int64_t)c;
    TILE_LOAD(5, job->weights + (int64_t)t * TILE, TILE_BYTES);
    MULTIPLY_GROUP(2, 5, 6, 0);
    if (groups > 1)
        MULTIPLY_GROUP(3, 5, 7, 1);
}

static ALWAYS_INLINE void store_sums(int32_t groups, float *to)
{
    store_squares(to);
    for (int32_t i = 0; i < groups * SQUARE && groups <= 2; i += VF)
        vf_store(to + i, vf_load(to + i) + vf_load(to + 2 * SQUARE + i));
}

/* P V of up to four groups of columns, [group][even, odd columns][8 rows][16]. Weights are
 * spread and ends are copied one step ahead. */
static ALWAYS_INLINE void multiply_pass(const few_job *job, int32_t c, int32_t groups,
                                        float *to)
{
    const int32_t steps = (job->n + STEP - 1) / STEP;
    const int has_ends = c + groups * TILE_DEPTH > job->v->rows.dim || job->n % STEP != 0;
    ZERO_UNIT();
    if (has_ends)
        make_ends(job, 0, c, groups);
    if (c == 0)
        spread_weights(job, 0);
    for (int32_t t = 0; t < steps; t++) {
        if (has_ends && t + 1 < steps)
            make_ends(job, t + 1, c, groups);
        if (c == 0)
            spread_weights(job, t + 1);
        if (groups <= 2 && t % 2 == 1)
            multiply_odd(job, t, c, groups);
        else
            multiply_step(job, t, c, groups);
    }
    store_sums(groups, to);
}

/* ---- sums ---- */

/* An infinity or NaN in V makes the sums of every row infinite or NaN, since even 0 times it is
 * NaN. So the sums of one row tell. */
static int is_nonfinite(const float *sums, int32_t groups)
{
    vf noted = vf_set(0);
    for (int32_t g = 0; g < groups; g++, sums += SQUARE)
        for (int32_t i = 0; i < TILE_ROWS; i += VF) { /* of the first row */
            noted = vf_note_nonfinite(noted, vf_load(sums + i));
            noted = vf_note_nonfinite(noted, vf_load(sums + SQUARE / 2 + i));
        }
    return vf_any_nonfinite(noted);
}

/* Adds 32 columns to o, taking even and odd ones in turn. */
static ALWAYS_INLINE void add_columns(const float *even, const float *odd, float *o)
{
#if defined(VF_HAS_FRACTION)
    const __m512i first =
        _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const vf x = vf_load(even), y = vf_load(odd);
    vf_store(o, vf_load(o) + _mm512_permutex2var_ps(x, first, y));
    vf_store(o + VF, vf_load(o + VF) + _mm512_permutex2var_ps(x, second, y));
#else
    for (int32_t c = 0; c < TILE_DEPTH; c++)
        o[c] += c % 2 ? odd[c / 2] : even[c / 2];
#endif
}

static void add_sums(const float *sums, int32_t groups, int32_t rows, float *o, int32_t o_ld)
{
    for (int32_t g = 0; g < groups; g++, sums += SQUARE, o += TILE_DEPTH)
        for (int32_t r = 0; r < rows; r++) {
            const float *even = sums + r * TILE_ROWS;
            add_columns(even, even + SQUARE / 2, o + (int64_t)r * o_ld);
        }
}

CPU_DECODE_PV(LEVEL_NAME(cpu_decode_pv8))
{
    _Alignas(64) bf16 weights[TILE * STEPS], made[2 * MOST_GROUPS * TILE];
    _Alignas(64) float sums[(MOST_DEPTH + MOST_GROUPS) * SQUARE];
    const int32_t groups = (v->rows.dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const int64_t ticks = (int64_t)((n + STEP - 1) / STEP) * groups;
    for (int32_t i = 0; i < STEPS * TILE && rows < TILE_ROWS / 2; i += HALF)
        memset(weights + i + rows * TILE_DEPTH, 0,
               (size_t)(HALF - rows * TILE_DEPTH) * sizeof *weights);
    for (int32_t i = 0; i < rows; i++)
        scale_row(o + (int64_t)i * o_ld, o_ld, alpha[i]);
    for (int32_t j = 0; j < n; j += CPU_BLOCK_KEYS) {
        const few_job job = {v,
                             p + j / 2,
                             p_ld,
                             j,
                             weights,
                             n - j < CPU_BLOCK_KEYS ? n - j : CPU_BLOCK_KEYS,
                             rows,
                             prefetch_share(next, ticks),
                             made,
                             next};
        for (int32_t g = 0; g < groups; g += MOST_GROUPS)
            multiply_pass(&job, g * TILE_DEPTH,
                          groups - g < MOST_GROUPS ? groups - g : MOST_GROUPS,
                          sums + g * SQUARE);
        if (is_nonfinite(sums, groups))
            return j;
        add_sums(sums, groups, rows, o, o_ld);
    }
    prefetch_rest(next, MOST_PARTS);
    return n;
}
