/* Whole arrays between element types. The inner loops are free of calls, so that the compiler
   can make vectors of the cheap ones; kernels convert in their own registers instead. */
#include "base/convert.h"

#include <assert.h>

bool convert_is_float(saccade_dtype dtype)
{
    return dtype == SACCADE_F16 || dtype == SACCADE_BF16 || dtype == SACCADE_F32
           || dtype == SACCADE_F64;
}

#define WIDEN(type, expr)               \
    do {                                \
        const type *x = from;           \
        for (int64_t i = 0; i < n; i++) \
            to[i] = (expr);             \
    } while (0)

void convert_to_f32(saccade_dtype dtype, const void *from, float *to, int64_t n)
{
    assert(convert_is_float(dtype));
    if (dtype == SACCADE_F32)
        WIDEN(float, x[i]);
    else if (dtype == SACCADE_BF16)
        WIDEN(uint16_t, bf16_to_f32(x[i]));
    else if (dtype == SACCADE_F16)
        WIDEN(uint16_t, f16_to_f32(x[i]));
    else
        WIDEN(double, (float)x[i]);
}

#define NARROW(type, expr)              \
    do {                                \
        type *y = to;                   \
        for (int64_t i = 0; i < n; i++) \
            y[i] = (expr);              \
    } while (0)

void convert_from_f32(saccade_dtype dtype, const float *from, void *to, int64_t n)
{
    assert(convert_is_float(dtype));
    if (dtype == SACCADE_F32)
        NARROW(float, from[i]);
    else if (dtype == SACCADE_BF16)
        NARROW(uint16_t, bf16_from_f32(from[i]));
    else if (dtype == SACCADE_F16)
        NARROW(uint16_t, f16_from_f32(from[i]));
    else
        NARROW(double, from[i]);
}

#define ELEMENT(code, type, expr)      \
    case code: {                       \
        type x;                        \
        memcpy(&x, element, sizeof x); \
        return (double)(expr);         \
    }

double convert_element(saccade_dtype dtype, const void *element)
{
    switch (dtype) {
        ELEMENT(SACCADE_BOOL, uint8_t, x != 0)
        ELEMENT(SACCADE_U8, uint8_t, x)
        ELEMENT(SACCADE_I8, int8_t, x)
        ELEMENT(SACCADE_I16, int16_t, x)
        ELEMENT(SACCADE_U16, uint16_t, x)
        ELEMENT(SACCADE_I32, int32_t, x)
        ELEMENT(SACCADE_U32, uint32_t, x)
        ELEMENT(SACCADE_I64, int64_t, x)
        ELEMENT(SACCADE_U64, uint64_t, x)
        ELEMENT(SACCADE_F16, uint16_t, f16_to_f32(x))
        ELEMENT(SACCADE_BF16, uint16_t, bf16_to_f32(x))
        ELEMENT(SACCADE_F32, float, x)
        ELEMENT(SACCADE_F64, double, x)
        ELEMENT(SACCADE_E4M3, uint8_t, e4m3_to_f32(x))
        ELEMENT(SACCADE_E5M2, uint8_t, e5m2_to_f32(x))
    default:
        assert(!"no such dtype");
        return 0;
    }
}

void convert_to_element(saccade_dtype dtype, double x, void *element)
{
    const float narrow = (float)x;
    if (dtype == SACCADE_F64)
        memcpy(element, &x, sizeof x);
    else
        convert_from_f32(dtype, &narrow, element, 1);
}
