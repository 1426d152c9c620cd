/* The one table of kernels: which for which level and dtypes, best first. */
#include "cpu/kernels/kernels.h"

#include "base/quantize.h"

#include "saccade_config.h"

typedef struct kernel_choice {
    int32_t level;
    int (*fits)(const plan_problem *problem); /* NULL: every problem */
    const cpu_kernels *kernels;
} kernel_choice;

static int is_amd(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return 0;
#endif
}

/* Prefetches into the first-level cache leave Zen 5 5 to 15 % quicker; on Intel's cores and on
 * Zen 4 they hold its few places for lines on their way, and lose as much or more. */
int cpu_prefetches_near(void)
{
    enum { ZEN_5 = 26 }; /* a family */
    return is_amd() && cpu_features_get()->family >= ZEN_5;
}

#if HAVE_LEVEL_AMX
/* Scaled codes are rounded to bf16, as weights are. */
static int fits_tiles(const plan_problem *p)
{
    return p->dtype == SACCADE_BF16
           && (p->kv_dtype == SACCADE_BF16 || quant_is_dtype(p->kv_dtype));
}

static int fits_split(const plan_problem *p)
{
    return p->dtype == SACCADE_F16 && p->kv_dtype == SACCADE_F16;
}

/* Dot products run at the rate of FMAs on AMD's cores, at half of it on Intel's, where they
 * gain nothing over f32. */
static int fits_bf16_dot(const plan_problem *p)
{
    return fits_tiles(p) && cpu_features_get()->has_avx512_bf16 && is_amd();
}
#endif

static const kernel_choice choices[] = {
#if HAVE_LEVEL_AMX
    {CPU_AMX, fits_tiles, &cpu_bf16_tiles_amx},
    {CPU_AMX, fits_split, &cpu_f16_tiles_amx},
    {CPU_AVX512, fits_bf16_dot, &cpu_bf16_dot},
#endif
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
