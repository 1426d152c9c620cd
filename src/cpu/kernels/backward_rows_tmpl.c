/* Rows of backward's inputs and outputs in any dtype, compiled once per level: dO . O, and
 * gradients stored or added. */
#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/vec.h"

#if !defined(LEVEL_AMX)

#include "cpu/kernels/row_parts.h"

CPU_ROW_DOTS(LEVEL_NAME(cpu_row_dots))
{
    for (int32_t i = 0; i < n; i++) {
        vf sum = vf_set(0);
        for (int32_t d = 0; d < x->dim; d += VF)
            sum = vf_fma(load_part(x, i, d), load_part(y, i, d), sum);
        to[i] = vf_sum_lanes(sum);
    }
}

/* Elements past the last whole vector. */
static void store_rest(const cpu_rows *row, const float *from, int32_t d, float scale,
                       int is_added, char *to)
{
    float rest[VF];
    const int32_t n = row->dim - d;
    const int64_t each = (int64_t)saccade_dtype_bytes(row->dtype);
    vf x = vf_set(scale) * vf_load(from + d);
    if (is_added)
        x += load_part(row, 0, d);
    vf_store(rest, x);
    convert_from_f32(row->dtype, rest, to + d * each, n);
}

CPU_STORE_GRADIENT(LEVEL_NAME(cpu_store_gradient))
{
    for (int32_t r = 0; r < rows; r++, from += ld) {
        char *row = (char *)to + r * stride;
        const cpu_rows old = {row, 0, dtype, dim};
        int32_t d = 0;
        for (; d + VF <= dim; d += VF) {
            vf x = vf_set(scale) * vf_load(from + d);
            if (is_added)
                x += load_part(&old, 0, d);
            narrow(dtype, row, d, x);
        }
        if (d < dim)
            store_rest(&old, from, d, scale, is_added, row);
    }
}

#endif
