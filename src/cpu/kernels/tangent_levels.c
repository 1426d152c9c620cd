/* The table of forward mode's kernels: which for which level and dtypes, best first. Problems
 * that forward computes in other kernels than these are converted to f32 when packed. */
#include "cpu/kernels/tangent_kernels.h"

#include "saccade_config.h"

typedef struct tangent_choice {
    int32_t level;
    const cpu_kernels *forward; /* those of the problem's forward; NULL: any */
    const cpu_tangent_kernels *kernels;
} tangent_choice;

static const tangent_choice choices[] = {
#if HAVE_LEVEL_AMX
    {CPU_AMX, &cpu_bf16_tiles_amx, &cpu_tangent_bf16_tiles_amx},
    {CPU_AVX512, &cpu_bf16_dot, &cpu_tangent_bf16_dot},
#endif
#if HAVE_LEVEL_AVX512
    {CPU_AVX512, NULL, &cpu_tangent_f32_avx512},
#endif
#if HAVE_LEVEL_AVX2
    {CPU_AVX2, NULL, &cpu_tangent_f32_avx2},
#endif
    {CPU_PORTABLE, NULL, &cpu_tangent_f32_portable},
};

const cpu_tangent_kernels *cpu_tangent_kernels_for(const plan_problem *problem, int32_t level)
{
    const tangent_choice *c = choices;
    while (c->level > level || (c->forward && c->forward != cpu_kernels_for(problem, level)))
        c++;
    return c->kernels;
}
