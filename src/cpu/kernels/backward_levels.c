/* The table of backward kernels: which for which level and dtypes, best first. Problems that
 * forward computes in other kernels than these are converted to f32 when packed. */
#include "cpu/kernels/backward_kernels.h"

#include "saccade_config.h"

typedef struct backward_choice {
    int32_t level;
    const cpu_kernels *forward; /* those of the problem's forward; NULL: any */
    const cpu_backward_kernels *kernels;
} backward_choice;

static const backward_choice choices[] = {
#if HAVE_LEVEL_AMX
    {CPU_AMX, &cpu_bf16_tiles_amx, &cpu_backward_bf16_tiles_amx},
    {CPU_AMX, &cpu_f16_tiles_amx, &cpu_backward_f16_tiles_amx},
    {CPU_AVX512, &cpu_bf16_dot, &cpu_backward_bf16_dot},
#endif
#if HAVE_LEVEL_AVX512
    {CPU_AVX512, NULL, &cpu_backward_f32_avx512},
#endif
#if HAVE_LEVEL_AVX2
    {CPU_AVX2, NULL, &cpu_backward_f32_avx2},
#endif
    {CPU_PORTABLE, NULL, &cpu_backward_f32_portable},
};

/* Kernels that go with forward's take rows of its dtype alone, those of dO too. */
static int fits(const backward_choice *c, const plan_problem *problem, int32_t level)
{
    return c->level <= level
           && (!c->forward
               || (c->forward == cpu_kernels_for(problem, level)
                   && problem->d_out_dtype == problem->dtype));
}

const cpu_backward_kernels *cpu_backward_kernels_for(const plan_problem *problem, int32_t level)
{
    const backward_choice *c = choices;
    while (!fits(c, problem, level))
        c++;
    return c->kernels;
}
