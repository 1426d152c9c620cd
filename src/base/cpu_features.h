/* What this CPU and its operating system can run, and the level kernels may use. */
#ifndef SACCADE_BASE_CPU_FEATURES_H
#define SACCADE_BASE_CPU_FEATURES_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>

/* each level includes the ones before it. */
typedef enum cpu_level {
    CPU_PORTABLE,
    CPU_AVX2,   /* AVX2, FMA, F16C */
    CPU_AVX512, /* and AVX-512 F, BW, VL, DQ */
    CPU_AMX,    /* and AMX tiles with bf16, allowed by the kernel */
    CPU_LEVELS
} cpu_level;

typedef struct cpu_features {
    cpu_level level; /* highest that the CPU and the system allow */
    int32_t family;  /* of x86 cores, as their maker numbers them: 25 Zen 3 and 4, 26 Zen 5 */
    bool has_avx2, has_fma, has_f16c;
    bool has_avx512f, has_avx512bw, has_avx512vl, has_avx512dq, has_avx512_bf16;
    bool has_avx512_vbmi, has_amx_tile, has_amx_bf16;
} cpu_features;

/* looks once per process, asks the kernel for AMX then; safe from any thread. */
const cpu_features *cpu_features_get(void);

/* the level to use: what is there, lowered by the environment's SACCADE_LEVEL if it names one.
   Reads the environment each time; a name that is no level is an error. */
saccade_status cpu_level_allowed(cpu_level *out, saccade_error *err);

/* what that level comes from, in words for a message. */
const char *cpu_level_bound(void);

/* "portable", "avx2", "avx512", "amx". */
const char *cpu_level_name(cpu_level level);
saccade_status cpu_level_parse(const char *name, cpu_level *out, saccade_error *err);

#endif
