/* vec_portable.h: vectors of four floats in GNU C, for any architecture. The same vocabulary
 * is in vec_avx2.h and vec_avx512.h; vec.h picks one by the level being compiled. */
#ifndef SACCADE_CPU_KERNELS_VEC_PORTABLE_H
#define SACCADE_CPU_KERNELS_VEC_PORTABLE_H

#include "base/convert.h"

#include <stdint.h>
#include <string.h>

enum { VF = 4, STRIP_ROWS = 6, PANEL_VECTORS = 2, HAS_FMA = 0 };

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

static inline vf vf_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline vf vf_load_first(const float *p, int32_t n)
{
    vf x = {0};
    for (int32_t i = 0; i < n; i++)
        x[i] = p[i];
    return x;
}

static inline void vf_store(float *p, vf x)
{
    memcpy(p, &x, sizeof x);
}

static inline vf vf_set(float x)
{
    return (vf){x, x, x, x};
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}

/* b where either is NaN, as x86 does. */
static inline vf vf_max(vf a, vf b)
{
    const vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
}

static inline float vf_max_lanes(vf x)
{
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

static inline float vf_sum_lanes(vf x)
{
    return (x[0] + x[1]) + (x[2] + x[3]);
}

/* x * 2^n for whole n in [-200, 128]; below 2^-126 it is 0. Rows of a strip that nobody uses
 * bring larger n: any result will do for those. */
static inline vf vf_scale(vf x, vf n)
{
    const vi tiny = n < vf_set(-126.5f);
    const vu bits = (vu) __builtin_convertvector(n, vi) << 23;
    return (vf)(((vu)x + bits) & ~(vu)tiny);
}

/* Nearest whole number of |x| < 2^22. */
static inline vf vf_round(vf x)
{
    const vf magic = vf_set(0x1.8p23f);
    return (x + magic) - magic;
}

/* Dead scores are -INF: x in the lanes that are not, else 0. */
static inline vf vf_where_live(vf s, vf x)
{
    return (vf)((vi)x & (s != vf_set(-__builtin_inff())));
}

/* x in the lanes where s is not 0, else 0. */
static inline vf vf_where_nonzero(vf s, vf x)
{
    return (vf)((vi)x & (s != vf_set(0)));
}

/* Not 0 when a lane is infinite or NaN. */
static inline int vf_any_nonfinite(vf x)
{
    const vi exponent = (vi)x & 0x7f800000;
    const vi nonfinite = exponent == 0x7f800000;
    return (nonfinite[0] | nonfinite[1] | nonfinite[2] | nonfinite[3]) != 0;
}

/* An accumulator for vf_any_nonfinite: NaN once any x noted in it was infinite or NaN. Begin
 * with 0. */
static inline vf vf_note_nonfinite(vf noted, vf x)
{
    return noted + x * vf_set(0);
}

static inline vf vf_from_bf16(const uint16_t *p)
{
    return (vf){bf16_to_f32(p[0]), bf16_to_f32(p[1]), bf16_to_f32(p[2]), bf16_to_f32(p[3])};
}

static inline vf vf_from_f16(const uint16_t *p)
{
    return (vf){f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
}

static inline void vf_to_bf16(uint16_t *p, vf x)
{
    for (int i = 0; i < VF; i++)
        p[i] = bf16_from_f32(x[i]);
}

static inline void vf_to_f16(uint16_t *p, vf x)
{
    for (int i = 0; i < VF; i++)
        p[i] = f16_from_f32(x[i]);
}

/* Lane i: the sum of row i's lanes. */
static inline vf vf_sum_each(const vf r[VF])
{
    return (vf){vf_sum_lanes(r[0]), vf_sum_lanes(r[1]), vf_sum_lanes(r[2]), vf_sum_lanes(r[3])};
}

/* Rows of a VF x VF square become its columns. */
static inline void vf_transpose(vf r[VF])
{
    for (int i = 0; i < VF; i++)
        for (int j = i + 1; j < VF; j++) {
            const float x = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = x;
        }
}

#endif
