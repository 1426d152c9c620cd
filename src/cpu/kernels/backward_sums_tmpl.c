/* Sums of dX times what the score changes by with a captured value, compiled once per level: by
 * rows, columns or diagonals of a strip, in the order of rows; and which keys of a strip any
 * row sees. */
#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/vec.h"

#if !defined(LEVEL_AMX)

/* Past the last whole vector keys are dead up to a multiple of 16, so their dX is 0. */
static ALWAYS_INLINE vf term(const float *dx, const float *g, int64_t at)
{
    const vf x = vf_load(dx + at);
    return g ? vf_where_nonzero(x, x * vf_load(g + at)) : x;
}

CPU_SEEN(LEVEL_NAME(cpu_seen))
{
    enum { GROUP = 16 };
    uint32_t seen = 0;
    for (int32_t j = 0; j < n; j += VF) {
        vf count = vf_set(0);
        for (int32_t i = 0; i < rows; i++)
            count += vf_where_live(vf_load(s + (int64_t)i * ld + j), vf_set(1));
        seen |= (uint32_t)(vf_sum_lanes(count) > 0) << j / GROUP;
    }
    return seen;
}

CPU_SUMS(LEVEL_NAME(cpu_sum_rows))
{
    for (int32_t i = 0; i < rows; i++) {
        vf sum = vf_set(0);
        for (int32_t j = 0; j < n; j += VF)
            sum += term(dx, g, (int64_t)i * ld + j);
        to[i] = vf_sum_lanes(sum);
    }
}

CPU_SUMS(LEVEL_NAME(cpu_sum_columns))
{
    for (int32_t j = 0; j < n; j += VF) {
        vf sum = vf_load(to + j);
        for (int32_t i = 0; i < rows; i++)
            sum += term(dx, g, (int64_t)i * ld + j);
        vf_store(to + j, sum);
    }
}

CPU_SUMS(LEVEL_NAME(cpu_sum_diagonals))
{
    for (int32_t i = 0; i < rows; i++, to--)
        for (int32_t j = 0; j < n; j += VF)
            vf_store(to + j, vf_load(to + j) + term(dx, g, (int64_t)i * ld + j));
}

#endif
