/* Elements whose dtype a run says, in kernels that no plan compiles for one dtype. */
#pragma once

#include "dtype_numbers.h"

#define DEVICE __device__ __forceinline__

DEVICE float f16_value(unsigned short x)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

DEVICE unsigned short f16_bits(float x)
{
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

DEVICE float bf16_value(unsigned short x)
{
    return __uint_as_float((unsigned)x << 16);
}

DEVICE unsigned short bf16_bits(float x)
{
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

/* Element i of a row of f32, f16 or bf16. */
DEVICE float load_as(const char *row, long long i, int dtype)
{
    if (dtype == DTYPE_F32)
        return ((const float *)row)[i];
    unsigned short bits = ((const unsigned short *)row)[i];
    return dtype == DTYPE_BF16 ? bf16_value(bits) : f16_value(bits);
}

DEVICE void store_as(char *row, long long i, int dtype, float x)
{
    if (dtype == DTYPE_F32)
        ((float *)row)[i] = x;
    else
        ((unsigned short *)row)[i] = dtype == DTYPE_BF16 ? bf16_bits(x) : f16_bits(x);
}
