/* backward_kernels.h: what kernels of backward must do. A tile is rows of Q against keys, S and
 * dP are [rows][ld] f32 as in forward, and all five products but two are forward's:
 *
 *     S  = scale Q K^T    scores   rows of Q, K turned into panels
 *     dP = dO V^T         scores   rows of dO, V turned
 *     dQ += dS K          values   dS over dP, K as values are packed
 *     dV += P^T dO        turned   P by steps of rows, dO as values are packed
 *     dK += dS^T Q        turned   dS by steps of rows, Q as values are packed
 *
 * Kernels on tiles take 32 rows at a time, whatever `rows` says. All operands and results have
 * room for them; what lies in rows past `rows` is used by no other row, but for P and dS of
 * `turned`, which sums over rows: weights fill those up with zeros. */
#ifndef SACCADE_CPU_KERNELS_BACKWARD_KERNELS_H
#define SACCADE_CPU_KERNELS_BACKWARD_KERNELS_H

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/unit_stream.h"

/* A strip whose weights are to be made: P = exp(scale S - lse), dX = P (dP - delta) and
 * dS = dX slope, exactly 0 where S is -INF, whatever dP, lse and delta are. dS also lies over
 * dP, row r at dp + r * ld, as packed elements. */
typedef struct cpu_strip_weights {
    float *s, *dp;       /* [rows][ld] */
    int32_t ld, rows, n; /* n: keys, a multiple of 16 */
    /* Those of them whose weights are made, from and past a multiple of 16; NULL: all. Kernels
     * with `overlap` make all. */
    const cpu_stretch *of;
    int32_t n_of;
    float scale;         /* 1 where `overlap` is NULL */
    const float *lse, *delta;
    const float *slope; /* [rows][ld], NULL: 1 */
    float *dx;          /* [rows][ld], NULL: not wanted */
    void *p, *ds; /* steps of rows, each [ld] times four bytes; in f32 S and dP themselves */
} cpu_strip_weights;
#define CPU_WEIGHTS(name) void name(const cpu_strip_weights *strip)
/* A strip whose scores are to be made: S = scale q K^T and dP = slope o V^T, as CPU_SCORES
 * has them. o NULL: no dP. */
typedef struct cpu_strip_scores {
    const void *q, *k, *o, *v;
    int32_t q_ld, o_ld, D, Dv, rows, n_panels, ld;
    float scale, slope;
    float *s, *dp;
} cpu_strip_scores;
/* The scores of one strip and the weights of another, at the same time. */
#define CPU_OVERLAP(name) \
    void name(const cpu_strip_scores *scores, const cpu_strip_weights *weights)
/* Whole strips of rows whose dS is made: O += dS K, as CPU_VALUES has it with alpha 1. */
typedef struct cpu_strip_values {
    const float *p;
    const void *v;
    int32_t p_ld, n, rows, n_panels, o_ld;
    int32_t is_first; /* sums begin here: O holds nothing yet */
    float *o;
} cpu_strip_values;
/* These products, and the weights of another strip at the same time. */
#define CPU_OVERLAP_VALUES(name) \
    void name(const cpu_strip_values *values, const cpu_strip_weights *weights)
/* These products alone. */
#define CPU_ADD_VALUES(name) void name(const cpu_strip_values *values)

/* A strip of 32 rows, whose |lse| is below 256, without dx and dropout; S and dP are not left.
 * Weights of its last units are made with the next strip's. */
#define CPU_STREAM(name)                                          \
    void name(cpu_stream *stream, const cpu_strip_scores *scores, \
              const cpu_strip_weights *weights)
/* Makes what weights are left. */
#define CPU_END_STREAM(name) void name(cpu_stream *stream)
/* c[j] += sum over rows i of a[i][j] b[i]. a: steps of rows, each of a_ld keys, four bytes a
 * key; b: panels of pack_values of `block` rows, from the first row of a step on;
 * c [keys][c_ld] f32, or by dims (pack_columns below). */
#define CPU_TURNED(name)                                                               \
    void name(const void *a, int32_t a_ld, const void *b, int32_t block, int32_t rows, \
              int32_t keys, int32_t n_panels, float *c, int32_t c_ld)
/* CPU_TURNED of some rows, stretch by stretch, in one sum; a and b are of the first row, and
 * `at` is not asked. */
#define CPU_TURNED_OF(name)                                                    \
    void name(const void *a, int32_t a_ld, const void *b, int32_t block,       \
              const cpu_stretch *stretches, int32_t n_stretches, int32_t keys, \
              int32_t n_panels, float *c, int32_t c_ld)
/* Sums [dims][from_ld] of `turned` that lie by dims: to[j][d] = from[d][j]. keys and dims are
 * multiples of 16. */
#define CPU_TURN_SUMS(name)                                                              \
    void name(const float *from, int32_t from_ld, int32_t keys, int32_t dims, float *to, \
              int32_t to_ld)
/* Sums of dX g over n keys of some rows, both [rows][ld], for gradients of captures; g NULL: 1.
 * dX of 0 adds 0 whatever g is. By rows: to[i] = sum over keys; by columns: to[j] += sum over
 * rows; by diagonals: to[j - i] += dX g. */
#define CPU_SUMS(name) \
    void name(const float *dx, const float *g, int32_t ld, int32_t rows, int32_t n, float *to)
/* Groups of 16 keys, of up to 512 keys, that are not -INF in all rows; a bit each. */
#define CPU_SEEN(name) uint32_t name(const float *s, int32_t ld, int32_t rows, int32_t n)
/* to[i] = x . y of the first n rows. */
#define CPU_ROW_DOTS(name) void name(const cpu_rows *x, const cpu_rows *y, int32_t n, float *to)
/* Rows of a gradient: scale * from, added to what is there or over it. */
#define CPU_STORE_GRADIENT(name)                                                     \
    void name(const float *from, int32_t ld, int32_t rows, int32_t dim, float scale, \
              int is_added, saccade_dtype dtype, void *to, int64_t stride)

typedef struct cpu_backward_kernels {
    const cpu_kernels *block; /* scores, values and what packs their operands */
    int32_t rows;             /* of a tile, a multiple of strips and of 32 */
    int32_t step;             /* rows of which `turned` has [ld] four bytes each */
    int32_t depth;            /* rows that `turned` takes at a time: weights fill them up */
    int32_t is_apart;         /* P and dS of `turned` lie apart from S and dP */
    /* Kernels in f32 for runs whose inputs are not finite and for problems with slopes, which
     * these do not take; NULL: these are good for all. */
    const struct cpu_backward_kernels *careful;
    CPU_WEIGHTS((*weights));
    CPU_OVERLAP((*overlap)); /* NULL: nothing is gained, weights follow their scores */
    CPU_OVERLAP_VALUES((*overlap_values)); /* NULL where that is */
    CPU_ADD_VALUES((*add_values));         /* NULL: the block's values serve */
    CPU_STREAM((*stream));                 /* NULL: there are no streams */
    CPU_END_STREAM((*end_stream));
    CPU_TURNED((*turned));
    CPU_TURNED_OF((*turned_of)); /* NULL: turned, stretch by stretch */
    /* Tiles: b of `turned` is made by pack_columns, and c is [dims][c_ld keys], for turn_sums
     * to turn. NULL: by the block's pack_values, and c lies by keys. */
    CPU_PACK_VALUES((*pack_columns));
    CPU_TURN_SUMS((*turn_sums));
    CPU_ROW_DOTS((*row_dots));
    CPU_SEEN((*seen));
    CPU_SUMS((*sum_rows));
    CPU_SUMS((*sum_columns));
    CPU_SUMS((*sum_diagonals));
    CPU_STORE_GRADIENT((*store));
} cpu_backward_kernels;

/* backward_sums_tmpl.c */
CPU_SEEN(cpu_seen_portable);
CPU_SEEN(cpu_seen_avx2);
CPU_SEEN(cpu_seen_avx512);
CPU_SUMS(cpu_sum_rows_portable);
CPU_SUMS(cpu_sum_rows_avx2);
CPU_SUMS(cpu_sum_rows_avx512);
CPU_SUMS(cpu_sum_columns_portable);
CPU_SUMS(cpu_sum_columns_avx2);
CPU_SUMS(cpu_sum_columns_avx512);
CPU_SUMS(cpu_sum_diagonals_portable);
CPU_SUMS(cpu_sum_diagonals_avx2);
CPU_SUMS(cpu_sum_diagonals_avx512);
/* backward_rows_tmpl.c */
CPU_ROW_DOTS(cpu_row_dots_portable);
CPU_ROW_DOTS(cpu_row_dots_avx2);
CPU_ROW_DOTS(cpu_row_dots_avx512);
CPU_STORE_GRADIENT(cpu_store_gradient_portable);
CPU_STORE_GRADIENT(cpu_store_gradient_avx2);
CPU_STORE_GRADIENT(cpu_store_gradient_avx512);
/* backward_amx_tmpl.c: tiles, emulated in levels other than AMX */
extern const cpu_backward_kernels cpu_backward_bf16_tiles_portable,
    cpu_backward_bf16_tiles_avx2, cpu_backward_bf16_tiles_avx512, cpu_backward_bf16_tiles_amx;
/* backward_amx_f16_tmpl.c: the same for f16 */
extern const cpu_backward_kernels cpu_backward_f16_tiles_portable, cpu_backward_f16_tiles_avx2,
    cpu_backward_f16_tiles_avx512, cpu_backward_f16_tiles_amx;
/* backward_f32_tmpl.c; backward_bf16_tmpl.c: AVX512-BF16 */
extern const cpu_backward_kernels cpu_backward_f32_portable, cpu_backward_f32_avx2,
    cpu_backward_f32_avx512, cpu_backward_bf16_dot;

/* Kernels for a problem at this level or below (backward_levels.c). */
const cpu_backward_kernels *cpu_backward_kernels_for(const plan_problem *problem,
                                                     int32_t level);

#endif
