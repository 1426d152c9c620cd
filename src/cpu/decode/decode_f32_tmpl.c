/* Products of a few rows (decode) straight from K and V, in f32, compiled once per level.
 *
 * Memory is the limit here, not arithmetic. Keys are read once and in order, a few at a time,
 * and stay in L1 while all rows use them. While K is used V is prefetched, and the next K while
 * V is used (Flash-Decoding's loop). Keys are first converted into a block in L1 where more
 * than a few rows would convert them again, or where a row of 16 bits or codes does not fill
 * whole vectors. Every sum runs over dims and then over lanes, in one order. */
#include "cpu/kernels/kernels.h"
#include "base/quantize.h"
#include "cpu/kv/prefetch.h"
#include "cpu/kernels/vec.h"
#include "cpu/kernels/vec_codes.h"

#include <string.h>

#if !defined(LEVEL_AMX)

enum {
    ACCUMULATORS = VF == 16 ? 16 : 8,
    KEY_GROUP = KV_GROUP, /* keys of a block */
    CONVERTED_ROWS = 16,  /* up to so many rows each convert keys as they use them */
    MOST_ROWS = 32,
};

/* Columns from d on of a row of dim; past its end, where a row of f32 ends within a vector,
 * zeros. */
static ALWAYS_INLINE vf widen(saccade_dtype dtype, const char *row, int32_t d, int32_t dim)
{
    if (dtype == SACCADE_F32 && d + VF > dim)
        return vf_load_first((const float *)(const void *)row + d, dim - d);
    if (dtype == SACCADE_F32)
        return vf_load((const float *)(const void *)row + d);
    if (dtype == SACCADE_BF16)
        return vf_from_bf16((const uint16_t *)(const void *)row + d);
    if (dtype == SACCADE_F16)
        return vf_from_f16((const uint16_t *)(const void *)row + d);
    return vf_from_codes(dtype, (const uint8_t *)row, d);
}

/* ---- blocks of f32 ---- */

/* Columns [d, from->dim) of n rows, fewer than a vector, and zeros. All rows are copied before
 * one is read: a load of what several stores have just written waits until they are in the
 * cache. */
static ALWAYS_INLINE void widen_rests(saccade_dtype dtype, const cpu_rows *from, int32_t d,
                                      int32_t n, int32_t ld, float *to)
{
    char rests[KEY_GROUP][VF * 4];
    const int64_t at = quant_bytes(dtype, d);
    const size_t bytes = (size_t)(quant_bytes(dtype, from->dim) - at), words = bytes / 8 * 8;
    const char *row = from->base + at;
    for (int32_t j = 0; j < n; j++, row += from->stride) {
        vf_store((float *)(void *)rests[j], vf_set(0));
        for (size_t i = 0; i < words; i += 8)
            memcpy(rests[j] + i, row + i, 8);
        for (size_t i = words; i < bytes; i++)
            rests[j][i] = row[i];
    }
    for (int32_t j = 0; j < n; j++)
        vf_store(to + j * (int64_t)ld + d, widen(dtype, rests[j], 0, VF));
}

static ALWAYS_INLINE void widen_rows(saccade_dtype dtype, const cpu_rows *from, int32_t n,
                                     int32_t ld, float *to)
{
    const int32_t full = from->dim / VF * VF;
    const char *row = from->base;
    for (int32_t j = 0; j < n && full; j++, row += from->stride)
        for (int32_t d = 0; d < full; d += VF)
            vf_store(to + j * (int64_t)ld + d, widen(dtype, row, d, full));
    if (full < from->dim)
        widen_rests(dtype, from, full, n, ld, to);
}

/* call(dtype, ...) by the value of dtype. */
#define BY_DTYPE(dtype, call, ...)            \
    do {                                      \
        switch (dtype) {                      \
        case SACCADE_F32:                     \
            call(SACCADE_F32, __VA_ARGS__);   \
            break;                            \
        case SACCADE_BF16:                    \
            call(SACCADE_BF16, __VA_ARGS__);  \
            break;                            \
        case SACCADE_F16:                     \
            call(SACCADE_F16, __VA_ARGS__);   \
            break;                            \
        case SACCADE_E4M3:                    \
            call(SACCADE_E4M3, __VA_ARGS__);  \
            break;                            \
        case SACCADE_E5M2:                    \
            call(SACCADE_E5M2, __VA_ARGS__);  \
            break;                            \
        case SACCADE_I8:                      \
            call(SACCADE_I8, __VA_ARGS__);    \
            break;                            \
        default:                              \
            call(SACCADE_I4, __VA_ARGS__);    \
        }                                     \
    } while (0)

/* Keys [j, j + n) of a group as they lie, or converted into the block and padded with 0. */
static cpu_rows take_rows(const cpu_keys *keys, int64_t j, int32_t n, int32_t rows,
                          float *block)
{
    const cpu_rows from = cpu_keys_from(keys, j);
    const int32_t ld = (from.dim + VF - 1) / VF * VF;
    if (from.dtype == SACCADE_F32 || (from.dim == ld && rows <= CONVERTED_ROWS))
        return from;
    BY_DTYPE(from.dtype, widen_rows, &from, n, ld, block);
    return (cpu_rows){(const char *)block, ld * (int64_t)sizeof *block, SACCADE_F32, ld};
}

/* ---- scores ---- */

/* `rows` rows against VF / rows keys: one vector of scores, [rows][keys]. */
static ALWAYS_INLINE vf dot_square(int rows, saccade_dtype dtype, const float *q, int32_t q_ld,
                                   const char *const *keys, int32_t D, cpu_prefetch *next,
                                   int32_t share)
{
    vf acc[VF];
    const int n_keys = VF / rows;
    for (int t = 0; t < VF; t++)
        acc[t] = vf_set(0);
    for (int32_t d = 0; d < D; d += VF) {
        prefetch_lines(next, 1, share);
#pragma GCC unroll 16
        for (int j = 0; j < n_keys; j++) {
            const vf k = widen(dtype, keys[j], d, D);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++)
                acc[i * n_keys + j] =
                    vf_fma(k, vf_load(q + (int64_t)i * q_ld + d), acc[i * n_keys + j]);
        }
    }
    return vf_sum_each(acc);
}

typedef struct qk_job {
    const float *q;
    float *s;
    int32_t q_ld, s_ld, rows, share;
    float scale;
    cpu_prefetch *next;
} qk_job;

/* Rows from i on against n keys; scores from column j on. */
static ALWAYS_INLINE void dot_rows(int rows, saccade_dtype dtype, const qk_job *job,
                                   int32_t i, const cpu_rows *k, int32_t n, int32_t column)
{
    const int n_keys = VF / rows;
    const float *q = job->q + (int64_t)i * job->q_ld;
    float *s = job->s + (int64_t)i * job->s_ld + column;
    for (int32_t j = 0; j < n; j += n_keys) {
        const char *keys[VF], *key = k->base + j * k->stride;
        float square[VF];
        for (int t = 0; t < n_keys; t++) { /* past the end the last one again */
            keys[t] = key;
            key += j + t + 1 < n ? k->stride : 0;
        }
        vf_store(square, vf_set(job->scale)
                             * dot_square(rows, dtype, q, job->q_ld, keys, k->dim, job->next,
                                          job->share));
        for (int r = 0; r < rows; r++)
            memcpy(s + (int64_t)r * job->s_ld + j, square + r * n_keys,
                   (size_t)n_keys * sizeof *s);
    }
}

static ALWAYS_INLINE void dot_group(saccade_dtype dtype, const qk_job *job, const cpu_rows *k,
                                    int32_t n, int32_t column)
{
    int32_t i = 0;
    for (; i + 4 <= job->rows; i += 4)
        dot_rows(4, dtype, job, i, k, n, column);
    for (; i + 2 <= job->rows; i += 2)
        dot_rows(2, dtype, job, i, k, n, column);
    for (; i < job->rows; i++)
        dot_rows(1, dtype, job, i, k, n, column);
}

CPU_DECODE_QK(LEVEL_NAME(cpu_decode_qk))
{
    _Alignas(64) float block[KEY_GROUP * CPU_DECODE_DIM];
    const int64_t steps = ((int64_t)n * rows + VF - 1) / VF * ((k->rows.dim + VF - 1) / VF);
    cpu_prefetch own = *next; /* which stores of scores cannot change */
    const qk_job job = {q, s, q_ld, s_ld, rows, prefetch_share(next, steps), scale, &own};
    for (int32_t j = 0; j < n; j += KEY_GROUP) {
        const int32_t m = n - j < KEY_GROUP ? n - j : KEY_GROUP;
        const cpu_rows keys = take_rows(k, j, m, rows, block);
        BY_DTYPE(keys.dtype, dot_group, &job, &keys, m, j);
    }
    prefetch_rest(&own, 1);
    *next = own;
}

/* ---- values ---- */

typedef struct pv_job {
    const float *p;
    float *sums; /* [rows][ld], of a few keys */
    int32_t p_ld, ld, rows, share;
    cpu_prefetch *next;
} pv_job;

/* Sums of a column that keys are dealt to in turn, so that a chunk of few columns has as many
 * additions under way as one of many: for columns of 4 rows and of one alike, as a row has its
 * bits whatever rows are with it. */
static ALWAYS_INLINE int sums_of(int columns)
{
    return columns < ACCUMULATORS / 4 ? ACCUMULATORS / 4 / columns : 1;
}

/* Rows [i, i + rows), columns [d, d + columns * VF), keys [0, n) with weights from j on. */
static ALWAYS_INLINE void sum_chunk(int rows, int columns, saccade_dtype dtype,
                                    const pv_job *job, int32_t i, int32_t d,
                                    const cpu_rows *v, int32_t n, int32_t j)
{
    const int turns = sums_of(columns), each = rows * columns;
    vf acc[ACCUMULATORS];
    const float *p = job->p + (int64_t)i * job->p_ld + j;
    const char *row = v->base;
    float *sums = job->sums + (int64_t)i * job->ld + d;
    for (int t = 0; t < each * turns; t++)
        acc[t] = vf_set(0);
    for (int32_t t = 0; t < n; t += turns) {
        prefetch_lines(job->next, 1, job->share * turns);
#pragma GCC unroll 4
        for (int k = 0; k < turns; k++, row += v->stride) {
            if (t + k == n)
                break;
#pragma GCC unroll 16
            for (int c = 0; c < columns; c++) {
                const vf x = widen(dtype, row, d + c * VF, v->dim);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    vf *at = &acc[k * each + r * columns + c];
                    *at = vf_fma(vf_set(p[(int64_t)r * job->p_ld + t + k]), x, *at);
                }
            }
        }
    }
    for (int step = turns / 2; step; step /= 2)
        for (int t = 0; t < each * step; t++)
            acc[t] += acc[t + each * step];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            vf_store(sums + (int64_t)r * job->ld + c * VF, acc[r * columns + c]);
}

/* Rows of one height from i on: columns in the widest chunks whose accumulators fit. */
static ALWAYS_INLINE void sum_rows(int rows, saccade_dtype dtype, const pv_job *job,
                                   int32_t i, const cpu_rows *v, int32_t n, int32_t j)
{
    const int most = ACCUMULATORS / rows;
    int32_t d = 0;
    for (; most >= 8 && d + 8 * VF <= v->dim; d += 8 * VF)
        sum_chunk(rows, most >= 8 ? 8 : 1, dtype, job, i, d, v, n, j);
    for (; most >= 4 && d + 4 * VF <= v->dim; d += 4 * VF)
        sum_chunk(rows, most >= 4 ? 4 : 1, dtype, job, i, d, v, n, j);
    for (; most >= 2 && d + 2 * VF <= v->dim; d += 2 * VF)
        sum_chunk(rows, most >= 2 ? 2 : 1, dtype, job, i, d, v, n, j);
    for (; d < v->dim; d += VF)
        sum_chunk(rows, 1, dtype, job, i, d, v, n, j);
}

static ALWAYS_INLINE void sum_group(saccade_dtype dtype, const pv_job *job, const cpu_rows *v,
                                    int32_t n, int32_t j)
{
    int32_t i = 0;
    for (; i + 4 <= job->rows; i += 4)
        sum_rows(4, dtype, job, i, v, n, j);
    for (; i + 2 <= job->rows; i += 2)
        sum_rows(2, dtype, job, i, v, n, j);
    for (; i < job->rows; i++)
        sum_rows(1, dtype, job, i, v, n, j);
}

/* An infinity or NaN in V makes the sums of every row infinite or NaN, since even 0 times it is
 * NaN. So the sums of one row tell, and V needs no pass of its own, without prefetches. */
static int is_nonfinite(const float *sums, int32_t n)
{
    vf noted = vf_set(0);
    for (int32_t d = 0; d < n; d += VF)
        noted = vf_note_nonfinite(noted, vf_load(sums + d));
    return vf_any_nonfinite(noted);
}

static void add_sums(const float *sums, int32_t ld, int32_t rows, float *o, int32_t o_ld)
{
    for (int32_t i = 0; i < rows; i++)
        for (int32_t d = 0; d < ld; d += VF) {
            float *at = o + (int64_t)i * o_ld + d;
            vf_store(at, vf_load(at) + vf_load(sums + (int64_t)i * ld + d));
        }
}

/* About how often the loop of sum_chunk turns for n keys. */
static int64_t sum_steps(int32_t rows, int32_t E, int32_t n)
{
    const int32_t height = rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
    const int32_t columns = ACCUMULATORS / height < 8 ? ACCUMULATORS / height : 8;
    return (int64_t)(rows / height) * ((E + columns * VF - 1) / (columns * VF)) * n;
}

CPU_DECODE_PV(LEVEL_NAME(cpu_decode_pv))
{
    _Alignas(64) float block[KEY_GROUP * CPU_DECODE_DIM], sums[MOST_ROWS * CPU_DECODE_DIM];
    cpu_prefetch own = *next;
    const pv_job job = {p,
                        sums,
                        p_ld,
                        (v->rows.dim + VF - 1) / VF * VF,
                        rows,
                        prefetch_share(next, sum_steps(rows, v->rows.dim, n)),
                        &own};
    for (int32_t i = 0; i < rows; i++)
        for (int32_t d = 0; d < v->rows.dim && alpha[i] != 1; d += VF) {
            float *at = o + (int64_t)i * o_ld + d;
            vf_store(at, vf_set(alpha[i]) * vf_load(at));
        }
    for (int32_t j = 0; j < n; j += KEY_GROUP) {
        const int32_t m = n - j < KEY_GROUP ? n - j : KEY_GROUP;
        const cpu_rows values = take_rows(v, j, m, rows, block);
        BY_DTYPE(values.dtype, sum_group, &job, &values, m, j);
        if (is_nonfinite(sums, job.ld))
            return j;
        add_sums(sums, job.ld, rows, o, o_ld);
    }
    prefetch_rest(&own, 1);
    *next = own;
    return n;
}

#endif
