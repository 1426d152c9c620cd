/* Backward kernels on packed bf16 with AMX tiles: scores and dQ are forward's kernels
 * (block_amx_tmpl.c), weights those of weight_pairs.h. Pairs of rows of P and dS are what tiles
 * B take, so nothing is transposed in the loop over tiles:
 *
 *     dV^T += dO^T P    dK^T += Q^T dS      A: columns of Q or dO, B: pairs of rows of weights
 *
 * Sums of dK and dV lie [dim][keys] then, and are turned when a block of keys is done.
 *   columns [rows/32][D/32][32 dims][32 rows] bf16, tiles A of 16 dims x 32 rows
 *   weights [rows/2][ld] pairs, tiles B of 16 pairs x 16 keys
 * Levels other than AMX compile the same code on emulated tiles: tests run those anywhere. */
#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/vec.h"

#include "cpu/kernels/amx_units.h"
#include "cpu/kernels/weight_pairs.h"

/* C += 32 dims x 32 rows of A times 16 pairs of rows x 32 keys of B, of rows b_stride apart. */
static ALWAYS_INLINE void multiply_pairs(const char *a, const char *b, int64_t b_stride)
{
    TILE_LOAD(6, b, b_stride);
    TILE_STREAM(4, a, TILE_BYTES);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, b + TILE_BYTES, b_stride);
    TILE_DOT(1, 4, 7);
    TILE_STREAM(5, a + TILE_ROWS * TILE_BYTES, TILE_BYTES);
    TILE_DOT(2, 5, 6);
    TILE_DOT(3, 5, 7);
}

static CPU_TURNED(turned)
{
    const int32_t steps = (rows + TILE_DEPTH - 1) / TILE_DEPTH;
    const int64_t a_stride = (int64_t)a_ld * 4;
    (void)block;
    for (int32_t j = 0; j < keys; j += UNIT)
        for (int32_t v = 0; v < n_panels; v++) {
            const char *columns = (const char *)b + (int64_t)v * UNIT_BYTES;
            const char *weights = (const char *)a + (int64_t)j * 4;
            float *to = c + (int64_t)v * UNIT * c_ld + j;
            load_unit(to, (int64_t)c_ld * 4);
            for (int32_t t = 0; t < steps; t++)
                multiply_pairs(columns + (int64_t)t * n_panels * UNIT_BYTES,
                               weights + t * TILE_ROWS * a_stride, a_stride);
            store_unit(to, (int64_t)c_ld * 4);
        }
}

/* Tiles take 32 rows and 32 keys: those that are not there get weights 0. */
static CPU_WEIGHTS(weights)
{
    const int any_dead = weigh_pairs(s, dp, ld, rows, n, lse, delta, slope, dx, p, ds);
    const int32_t whole = (n + UNIT - 1) / UNIT * UNIT, pairs = (rows + 1) / 2;
    for (int32_t i = n < whole ? 0 : pairs; i < TILE_ROWS; i++) {
        const int32_t from = i < pairs ? n : 0;
        const size_t bytes = (size_t)(whole - from) * sizeof(int32_t);
        memset((int32_t *)p + (int64_t)i * ld + from, 0, bytes);
        memset((int32_t *)ds + (int64_t)i * ld + from, 0, bytes);
    }
    for (int32_t i = 0; i < rows && n < whole; i++)
        memset((uint16_t *)(void *)(dp + (int64_t)i * ld) + n, 0, 16 * sizeof(uint16_t));
    return any_dead;
}

/* ---- packing ---- */

/* 32 rows by 32 dims from row i and dim d on, as pairs of rows [16][32]: zeros where there are
 * none. Whether any is infinite or NaN. */
static unsigned take_pairs(const cpu_rows *from, int64_t i, int32_t n, int32_t d,
                           uint16_t pairs[TILE_ROWS][UNIT][2])
{
    const int32_t left = from->dim - d < UNIT ? from->dim - d : UNIT;
    unsigned nonfinite = 0;
    for (int32_t r = 0; r < TILE_DEPTH; r++) {
        uint16_t row[UNIT] = {0};
        if (i + r < n)
            memcpy(row, from->base + (i + r) * from->stride + (int64_t)d * 2,
                   (size_t)left * sizeof *row);
        for (int32_t c = 0; c < UNIT; c++) {
            nonfinite |= (row[c] & 0x7f80) == 0x7f80;
            pairs[r / 2][c][r % 2] = row[c];
        }
    }
    return nonfinite;
}

#if defined(LEVEL_AMX)
/* The same where all are there. */
static ALWAYS_INLINE unsigned take_whole(const char *row, int64_t stride,
                                         uint16_t pairs[TILE_ROWS][UNIT][2])
{
    const __m512i left = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i right = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 nonfinite = 0;
    for (int32_t r = 0; r < TILE_ROWS; r++, row += 2 * stride) {
        const __m512i even = _mm512_loadu_si512(row);
        const __m512i odd = _mm512_loadu_si512(row + stride);
        const __m512i low = _mm512_unpacklo_epi16(even, odd);
        const __m512i high = _mm512_unpackhi_epi16(even, odd);
        _mm512_storeu_si512(pairs[r][0], _mm512_permutex2var_epi64(low, left, high));
        _mm512_storeu_si512(pairs[r][16], _mm512_permutex2var_epi64(low, right, high));
        nonfinite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(even, exponent), exponent)
                     | _mm512_cmpeq_epi16_mask(_mm512_and_si512(odd, exponent), exponent);
    }
    return nonfinite != 0;
}
#endif

/* Pairs are 32-bit words: squares of VF pairs x VF dims are transposed. */
static CPU_PACK_VALUES(pack_columns)
{
    unsigned nonfinite = 0;
    float *out = to;
    for (int32_t i = 0; i < padded; i += TILE_DEPTH)
        for (int32_t d = 0; d < from->dim; d += UNIT, out += UNIT_BYTES / 4) {
            uint16_t pairs[TILE_ROWS][UNIT][2] __attribute__((aligned(64)));
#if defined(LEVEL_AMX)
            if (i + TILE_DEPTH <= n && d + UNIT <= from->dim)
                nonfinite |= take_whole(from->base + i * from->stride + (int64_t)d * 2,
                                        from->stride, pairs);
            else
#endif
                nonfinite |= take_pairs(from, i, n, d, pairs);
            for (int32_t c = 0; c < UNIT; c += VF)
                for (int32_t r = 0; r < TILE_ROWS; r += VF) {
                    vf square[VF];
                    for (int32_t t = 0; t < VF; t++)
                        square[t] = vf_load((const float *)(const void *)pairs[r + t][c]);
                    vf_transpose(square);
                    for (int32_t t = 0; t < VF; t++)
                        vf_store(out + (c + t) * TILE_ROWS + r, square[t]);
                }
        }
    return (int)nonfinite;
}

/* ---- sums ---- */

static CPU_TURN_SUMS(turn_sums)
{
    for (int32_t j = 0; j < keys; j += VF)
        for (int32_t d = 0; d < dims; d += VF) {
            vf square[VF];
            for (int32_t t = 0; t < VF; t++)
                square[t] = vf_load(from + (int64_t)(d + t) * from_ld + j);
            vf_transpose(square);
            for (int32_t t = 0; t < VF; t++)
                vf_store(to + (int64_t)(j + t) * to_ld + d, square[t]);
        }
}

#if defined(LEVEL_AMX)
#define ROWS(name) name##_avx512
#else
#define ROWS(name) LEVEL_NAME(name)
#endif

const cpu_backward_kernels LEVEL_NAME(cpu_backward_bf16_tiles) = {
    .block = &LEVEL_NAME(cpu_bf16_tiles),
    .step = 2,
    .depth = TILE_DEPTH,
    .weights = weights,
    .turned = turned,
    .pack_columns = pack_columns,
    .turn_sums = turn_sums,
    .row_dots = ROWS(cpu_row_dots),
    .sum_rows = ROWS(cpu_sum_rows),
    .sum_columns = ROWS(cpu_sum_columns),
    .sum_diagonals = ROWS(cpu_sum_diagonals),
    .store = ROWS(cpu_store_gradient),
};
