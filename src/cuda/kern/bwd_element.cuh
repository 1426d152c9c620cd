/* Elements of a capture's gradient, in f32 or in the capture's own 16-bit dtype. */
#pragma once

#include "dtype_numbers.h"

DEVICE float element_at(const cu_read &to, long long at)
{
    if (to.dtype == DTYPE_F32)
        return ((const float *)to.data)[at];
    u16 x = ((const u16 *)to.data)[at];
    return to.dtype == DTYPE_BF16 ? __uint_as_float((u32)x << 16) : half_to_float(x);
}

/* two to 16 bits each, the first one low */
DEVICE u32 pack_as(float lo, float hi, int dtype)
{
    u32 r;
    if (dtype == DTYPE_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* Over what is there, or added to it. */
DEVICE void put_element(const cu_read &to, long long at, float x, int is_adding)
{
    x = is_adding ? element_at(to, at) + x : x;
    if (to.dtype == DTYPE_F32)
        ((float *)to.data)[at] = x;
    else
        ((u16 *)to.data)[at] = (u16)pack_as(x, 0.f, to.dtype);
}
