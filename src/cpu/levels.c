/* The one table of kernels: which for which level and dtypes, best first. */
#include "cpu/cpu.h"

#include "saccade_config.h"

typedef struct kernel_choice {
    int32_t level;
    int (*fits)(const plan_problem *problem); /* NULL: every problem */
    const cpu_kernels *kernels;
} kernel_choice;

static const kernel_choice choices[] = {
#if HAVE_LEVEL_AVX512
    {CPU_AVX512, NULL, &cpu_f32_avx512},
#endif
#if HAVE_LEVEL_AVX2
    {CPU_AVX2, NULL, &cpu_f32_avx2},
#endif
    {CPU_PORTABLE, NULL, &cpu_f32_portable},
};

const cpu_kernels *cpu_kernels_for(const plan_problem *problem, int32_t level)
{
    const kernel_choice *c = choices;
    while (c->level > level || (c->fits && !c->fits(problem)))
        c++;
    return c->kernels;
}
