/* tangent_kernels.h: what kernels of forward mode must do. Products are forward's; between them
 * a strip has its scores in s and their rates in x:
 *
 *     S  = scale Q K^T                    scores
 *     S' = scale f_s (Q' K^T + Q K'^T)    scores, twice: x and y
 *     P = exp(S - m), P' = P (X' - c)     weights, over S and x; X' = S' f_s + captures' part
 *     O' += P' V + P V'    O += P V       values, three times
 *
 * c is about the mean of X' under the weights so far. Rates are taken relative to it, so that
 * out' is no difference of large numbers, as sum(P X' V) / l - lse' out is where rates have
 * much in common. A new c moves O' by (old - new) O, as a new m scales it. rest = sum P' is
 * what c is off by: lse' = c + rest / l, out' = (O' - rest / l O) / l. */
#ifndef SACCADE_CPU_KERNELS_TANGENT_KERNELS_H
#define SACCADE_CPU_KERNELS_TANGENT_KERNELS_H

#include "cpu/kernels/kernels.h"

/* Rows of scores whose weights are to be made, as CPU_SOFTMAX has them: -INF is dead, whatever
 * its rate. m, l, c, rest, alpha and the rows of o and o_dot are those of the strip; o_dot
 * takes the new c here, alpha comes with the values of both. P and P' as packed elements, row r
 * at r * ld. */
typedef struct cpu_strip_rates {
    float *s, *x;               /* [rows][ld] */
    const float *y;             /* [rows][ld], added to x; NULL: 0 */
    const float *slope, *added; /* [rows][ld]; NULL: 1, 0 */
    int32_t ld, rows, n;        /* n: keys, a multiple of 16 */
    float *m, *l, *c, *rest, *alpha;
    const float *o;
    float *o_dot;
    int32_t o_ld;
} cpu_strip_rates;
#define CPU_RATES(name) void name(const cpu_strip_rates *strip)

typedef struct cpu_tangent_kernels {
    const cpu_kernels *block; /* scores, values and what packs their operands */
    CPU_RATES((*weights));
} cpu_tangent_kernels;

/* tangent_rows_tmpl.c: in f32; in bf16 for dot products and for tiles, which are emulated in
 * levels other than AMX. */
extern const cpu_tangent_kernels cpu_tangent_f32_portable, cpu_tangent_f32_avx2,
    cpu_tangent_f32_avx512;
extern const cpu_tangent_kernels cpu_tangent_bf16_tiles_portable, cpu_tangent_bf16_tiles_avx2,
    cpu_tangent_bf16_tiles_avx512, cpu_tangent_bf16_tiles_amx, cpu_tangent_bf16_dot;

/* Kernels for a problem at this level or below (tangent_levels.c). */
const cpu_tangent_kernels *cpu_tangent_kernels_for(const plan_problem *problem, int32_t level);

#endif
