/* vec.h: the vector vocabulary of the level being compiled, for *_tmpl.c only, which the build
 * compiles once per level with LEVEL=<level> and LEVEL_<LEVEL>=1. */
#ifndef SACCADE_CPU_KERNELS_VEC_H
#define SACCADE_CPU_KERNELS_VEC_H

#if defined(LEVEL_AVX512) || defined(LEVEL_AMX)
#include "cpu/kernels/vec_avx512.h"
#elif defined(LEVEL_AVX2)
#include "cpu/kernels/vec_avx2.h"
#else
#include "cpu/kernels/vec_portable.h"
#endif

#define LEVEL_PASTE2(name, level) name##_##level
#define LEVEL_PASTE(name, level) LEVEL_PASTE2(name, level)
/* LEVEL_NAME(cpu_pack) is cpu_pack_avx2 and so on. */
#define LEVEL_NAME(name) LEVEL_PASTE(name, LEVEL)

#define ALWAYS_INLINE inline __attribute__((always_inline))
/* For the innermost kernels: inlined into a loop that needs many scalars, gcc keeps those in
 * vector registers and an operand in memory (178 instead of 258 GFLOP/s). */
#define NEVER_INLINE __attribute__((noinline))

#endif
