/* Rows of dropout from the squares of 16 keys that patches lie in. */
#include "cpu/kernels/drop.h"

#include "base/cpu_features.h"

#include "saccade_config.h"

cpu_drop cpu_drop_of(const saccade_plan *plan, const plan_run *run, int64_t b, int64_t h)
{
    cpu_drop drop = {.head = plan_dropout_head(&plan->problem, run, b, h),
                     .threshold = run->dropout.threshold,
                     .squares = cpu_drop_squares_portable};
#if HAVE_LEVEL_AVX2
    if (plan->level >= CPU_AVX2)
        drop.squares = cpu_drop_squares_avx2;
#endif
#if HAVE_LEVEL_AVX512
    if (plan->level >= CPU_AVX512)
        drop.squares = cpu_drop_squares_avx512;
#endif
    return drop;
}

const uint16_t *cpu_drop_row(const cpu_drop *drop, int32_t q, int32_t kv, int32_t n,
                             uint16_t *room)
{
    const uint32_t before = (uint32_t)kv % 16;
    const int32_t squares = ((int32_t)before + n + 15) / 16;
    drop->squares(&drop->head, dropout_row((uint32_t)q), (uint32_t)kv / 16 * 4, squares,
                  q >> 3 & 1, drop->threshold, room);
    return room + before;
}
