/* Elements of any dtype, and random ones. */
#include "floats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static float half_to_float(uint16_t h)
{
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    float x = exponent == 31 ? (mantissa ? NAN : INFINITY)
              : exponent     ? ldexpf((float)(mantissa + 1024), exponent - 25)
                             : ldexpf((float)mantissa, -24);
    return h >> 15 ? -x : x;
}

/* To float so that a later rounding to fewer bits is the right one: what is inexact gets an odd
 * last bit. */
static float to_float_odd(double x)
{
    const float f = (float)x;
    if (isnan(x) || (double)f == x || isinf(f))
        return f;
    const uint32_t u = bits_of(f);
    if (u & 1)
        return f;
    return of_bits(fabs((double)f) < fabs(x) ? u + 1 : u - 1);
}

static uint16_t float_to_half(float x)
{
    const uint32_t u = bits_of(x), a = u & 0x7fffffff;
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    if (a > 0x7f800000)
        return sign | 0x7e00;
    if (a >= 0x477ff000) /* 65520 and more round to infinity */
        return sign | 0x7c00;
    if (a < 0x38800000) /* below 2^-14: whole multiples of 2^-24 */
        return sign | (uint16_t)lrintf(ldexpf(of_bits(a), 24));
    const uint32_t round = 0xfff + (a >> 13 & 1);
    return sign | (uint16_t)((a + round - 0x38000000) >> 13);
}

static uint16_t float_to_bf16(float x)
{
    const uint32_t u = bits_of(x);
    if (isnan(x))
        return (uint16_t)(u >> 16 | 64);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#define EACH_PLAIN(X)        \
    X(SACCADE_BOOL, uint8_t) \
    X(SACCADE_U8, uint8_t)   \
    X(SACCADE_I8, int8_t)    \
    X(SACCADE_U16, uint16_t) \
    X(SACCADE_I16, int16_t)  \
    X(SACCADE_U32, uint32_t) \
    X(SACCADE_I32, int32_t)  \
    X(SACCADE_U64, uint64_t) \
    X(SACCADE_I64, int64_t)  \
    X(SACCADE_F32, float)    \
    X(SACCADE_F64, double)

double floats_get(const void *data, saccade_dtype dtype, int64_t at)
{
    switch (dtype) {
#define GET(name, type) \
    case name:          \
        return (double)((const type *)data)[at];
        EACH_PLAIN(GET)
#undef GET
    case SACCADE_F16:
        return half_to_float(((const uint16_t *)data)[at]);
    case SACCADE_BF16:
        return of_bits((uint32_t)((const uint16_t *)data)[at] << 16);
    default:
        return NAN;
    }
}

void floats_set(void *data, saccade_dtype dtype, int64_t at, double value)
{
    switch (dtype) {
#define SET(name, type)                   \
    case name:                            \
        ((type *)data)[at] = (type)value; \
        break;
        EACH_PLAIN(SET)
#undef SET
    case SACCADE_F16:
        ((uint16_t *)data)[at] = float_to_half(to_float_odd(value));
        break;
    case SACCADE_BF16:
        ((uint16_t *)data)[at] = float_to_bf16(to_float_odd(value));
        break;
    default:
        break;
    }
}

bool floats_is_float(saccade_dtype dtype)
{
    return dtype == SACCADE_F16 || dtype == SACCADE_BF16 || dtype == SACCADE_F32
           || dtype == SACCADE_F64;
}

int64_t floats_count(const saccade_tensor *tensor)
{
    int64_t n = 1;
    for (int32_t i = 0; i < tensor->rank; i++)
        n *= tensor->shape[i];
    return n;
}

saccade_status floats_new(saccade_dtype dtype, int32_t rank, const int64_t *shape,
                          saccade_tensor *out, saccade_error *err)
{
    size_t bytes = saccade_dtype_bytes(dtype);
    for (int32_t i = 0; i < rank; i++)
        CLI_FAIL_IF(shape[i] < 1 || __builtin_mul_overflow(bytes, (size_t)shape[i], &bytes)
                        || bytes > (size_t)1 << 46,
                    SACCADE_EINVAL, "tensor", "got a shape with no elements or too many");
    void *data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    CLI_FAIL_IF(!data, SACCADE_ENOMEM, "tensor", "out of memory for %zu bytes", bytes);
    *out = saccade_tensor_of(data, dtype, rank, shape);
    return SACCADE_OK;
}

static void convert_from(const saccade_tensor *in, int32_t dim, int64_t from,
                         const saccade_tensor *out, int64_t to)
{
    if (dim == in->rank) {
        floats_set(out->data, out->dtype, to, floats_get(in->data, in->dtype, from));
        return;
    }
    for (int64_t i = 0; i < in->shape[dim]; i++)
        convert_from(in, dim + 1, from + i * in->stride[dim], out, to + i * out->stride[dim]);
}

void floats_convert_into(const saccade_tensor *in, const saccade_tensor *out)
{
    convert_from(in, 0, 0, out, 0);
}

saccade_status floats_convert(const saccade_tensor *in, saccade_dtype dtype,
                              saccade_tensor *out, saccade_error *err)
{
    CLI_TRY(floats_new(dtype, in->rank, in->shape, out, err));
    floats_convert_into(in, out);
    return SACCADE_OK;
}

uint64_t floats_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

double floats_uniform(uint64_t *state)
{
    return (double)(floats_random(state) >> 11) * 0x1p-53;
}

/* Box and Muller's pair, one half used: short, and exact enough for inputs. */
double floats_normal(uint64_t *state)
{
    const double u = 1 - floats_uniform(state), v = floats_uniform(state);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

void floats_fill_normal(saccade_tensor *tensor, uint64_t seed)
{
    enum { PERIOD = 1048573 }; /* a prime: no two rows of a big tensor are alike */
    const int64_t n = floats_count(tensor), fresh = n < PERIOD ? n : PERIOD;
    const size_t width = saccade_dtype_bytes(tensor->dtype);
    char *data = tensor->data;
    for (int64_t i = 0; i < fresh; i++)
        floats_set(data, tensor->dtype, i, floats_normal(&seed));
    for (int64_t i = fresh; i < n; i += fresh) {
        const int64_t left = n - i < fresh ? n - i : fresh;
        memcpy(data + (size_t)i * width, data, (size_t)left * width);
    }
}
