/* panel_step.h: one step of products on packed operands. A step is one f32; at level AMX, where
 * there is vdpbf16ps, it is two neighbours in bf16 (dims of Q and K, keys of P and V). Either
 * takes four bytes of each operand. */
#ifndef SACCADE_CPU_KERNELS_PANEL_STEP_H
#define SACCADE_CPU_KERNELS_PANEL_STEP_H

#include "cpu/kernels/vec.h"

#include <string.h>

enum { PANEL = VF * PANEL_VECTORS };

#if defined(LEVEL_AMX)

enum { STEP = 2 };
typedef uint16_t packed;
typedef __m512i step_vector;

static ALWAYS_INLINE step_vector load_step(const packed *p)
{
    return _mm512_loadu_si512(p);
}

static ALWAYS_INLINE step_vector broadcast_step(const packed *p)
{
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return _mm512_set1_epi32(bits);
}

static ALWAYS_INLINE vf add_step(vf acc, step_vector a, step_vector b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

#else

enum { STEP = 1 };
typedef float packed;
typedef vf step_vector;

static ALWAYS_INLINE step_vector load_step(const packed *p)
{
    return vf_load(p);
}

static ALWAYS_INLINE step_vector broadcast_step(const packed *p)
{
    return vf_set(*p);
}

static ALWAYS_INLINE vf add_step(vf acc, step_vector a, step_vector b)
{
    return vf_fma(a, b, acc);
}

#endif

#endif
