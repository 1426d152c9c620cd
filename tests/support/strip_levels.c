/* strip_levels.h: tables of the levels that were compiled. */
#include "support/strip_levels.h"

#include "base/cpu_features.h"
#include "saccade_config.h"

const strip_table *const strip_level[] = {
    &strip_table_portable,
#if HAVE_LEVEL_AVX2
    &strip_table_avx2,
#endif
#if HAVE_LEVEL_AVX512
    &strip_table_avx512,
#endif
};

int strip_levels(void)
{
    const cpu_level level = cpu_features_get()->level;
    int n = 1;
#if HAVE_LEVEL_AVX2
    n += level >= CPU_AVX2;
#endif
#if HAVE_LEVEL_AVX512
    n += level >= CPU_AVX512;
#endif
    return level == CPU_PORTABLE ? 1 : n;
}
