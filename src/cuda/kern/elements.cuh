/* Elements whose dtype a run says, in kernels that no plan compiles for one dtype. */
#pragma once

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

/* Element i of a row. dtype: 0 float32, 1 float16, 2 bfloat16 (merge.h, move.h). */
DEVICE float load_as(const char *row, int i, int dtype)
{
    if (dtype == 0)
        return ((const float *)row)[i];
    unsigned short bits = ((const unsigned short *)row)[i];
    return dtype == 2 ? bf16_value(bits) : f16_value(bits);
}

DEVICE void store_as(char *row, int i, int dtype, float x)
{
    if (dtype == 0)
        ((float *)row)[i] = x;
    else
        ((unsigned short *)row)[i] = dtype == 2 ? bf16_bits(x) : f16_bits(x);
}
