/* ceiling.h: what one level of the CPU can do at most, as loops that do nothing else. */
#ifndef SACCADE_MEASURE_CEILING_H
#define SACCADE_MEASURE_CEILING_H

#include <stddef.h>
#include <stdint.h>

enum { CPU_CEILING_BYTES = 16384 }; /* of a first-level cache of 32 KiB and more */
/* Does `rounds` rounds of independent multiply-adds; returns their FLOPs. data:
 * CPU_CEILING_BYTES of the dtype's random numbers of modest size, none of them 0. */
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
