/* Stands in for base/convert.h, math.h, stdint.h and string.h where mod/arith.h is compiled for
 * the device. */
#pragma once

typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

__device__ __forceinline__ uint32_t f32_bits(float x)
{
    return __float_as_uint(x);
}

__device__ __forceinline__ float f32_from_bits(uint32_t bits)
{
    return __uint_as_float(bits);
}
