/* Backward kernels on packed bf16 with AVX512-BF16 dot products: backward_f32_tmpl.c with pairs
 * of rows in place of rows where weights are turned (weight_pairs.h). Compiled with the flags
 * of the AMX level, the only one that has this extension. */
#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/vec.h"

#if defined(LEVEL_AMX)

#include "cpu/kernels/turned_products.h"
#include "cpu/kernels/weight_pairs.h"

const cpu_backward_kernels cpu_backward_bf16_dot = {
    .block = &cpu_bf16_dot,
    .rows = 96,
    .step = 2,
    .depth = 2,
    .is_apart = 1,
    .weights = weigh_pairs,
    .turned = turned,
    .turned_of = turned_of,
    .row_dots = cpu_row_dots_avx512,
    .seen = cpu_seen_avx512,
    .sum_rows = cpu_sum_rows_avx512,
    .sum_columns = cpu_sum_columns_avx512,
    .sum_diagonals = cpu_sum_diagonals_avx512,
    .store = cpu_store_gradient_avx512,
};

#endif
