/* ceiling.h: what one level of the CPU can do at most, as loops that do nothing else. */
#ifndef SACCADE_CPU_CEILING_H
#define SACCADE_CPU_CEILING_H

#include <stddef.h>
#include <stdint.h>

/* Does `rounds` rounds of independent multiply-adds in registers; returns their FLOPs. data:
 * 4 KiB of the dtype's random numbers of modest size. */
#define CPU_CEILING_FLOPS(name) double name(int64_t rounds, const void *data)
/* Reads `bytes` (a multiple of 4096) once. What it returns only keeps the loop. */
#define CPU_CEILING_READ(name) uint64_t name(const void *from, size_t bytes)

typedef struct cpu_ceiling {
    CPU_CEILING_FLOPS((*fma));
    CPU_CEILING_FLOPS((*bf16_dot)); /* NULL: the level has no bf16 arithmetic */
    CPU_CEILING_READ((*read));
} cpu_ceiling;

extern const cpu_ceiling cpu_ceiling_portable, cpu_ceiling_avx2, cpu_ceiling_avx512,
    cpu_ceiling_amx;

#endif
