/* Narrow formats, exhaustively against a slow conversion by search over all values. */
#include "base/convert.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

/* A format: its value by the definition, from sign, exponent and mantissa fields. */
typedef struct format {
    const char *name;
    int mantissa_bits, exponent_bits, bias;
    int has_inf; /* 0: the top exponent is finite but for the last code, which is NaN */
    float (*widen)(uint32_t code);
    uint32_t (*narrow)(float x);
} format;

static float widen_bf16(uint32_t c) { return bf16_to_f32((uint16_t)c); }
static float widen_f16(uint32_t c) { return f16_to_f32((uint16_t)c); }
static float widen_e4m3(uint32_t c) { return e4m3_to_f32((uint8_t)c); }
static float widen_e5m2(uint32_t c) { return e5m2_to_f32((uint8_t)c); }
static uint32_t narrow_bf16(float x) { return bf16_from_f32(x); }
static uint32_t narrow_f16(float x) { return f16_from_f32(x); }
static uint32_t narrow_e4m3(float x) { return e4m3_from_f32(x); }
static uint32_t narrow_e5m2(float x) { return e5m2_from_f32(x); }

static const format formats[] = {
    {"bf16", 7, 8, 127, 1, widen_bf16, narrow_bf16},
    {"f16", 10, 5, 15, 1, widen_f16, narrow_f16},
    {"e4m3", 3, 4, 7, 0, widen_e4m3, narrow_e4m3},
    {"e5m2", 2, 5, 15, 1, widen_e5m2, narrow_e5m2},
};
enum { N_FORMATS = sizeof formats / sizeof formats[0] };

static double by_definition(const format *f, uint32_t code)
{
    const uint32_t mantissa = code & ((1u << f->mantissa_bits) - 1);
    const int top = (1 << f->exponent_bits) - 1;
    const int exponent = (int)(code >> f->mantissa_bits) & top;
    const double sign = code >> (f->mantissa_bits + f->exponent_bits) & 1 ? -1 : 1;
    if (f->has_inf && exponent == top)
        return mantissa == 0 ? sign * INFINITY : NAN;
    if (!f->has_inf && exponent == top && mantissa == (1u << f->mantissa_bits) - 1)
        return NAN;
    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - f->bias - f->mantissa_bits);
    return sign * ldexp(1 + ldexp(mantissa, -f->mantissa_bits), exponent - f->bias);
}

static uint32_t code_count(const format *f)
{
    return 1u << (1 + f->mantissa_bits + f->exponent_bits);
}

static void widening_follows_the_definition(void **state)
{
    (void)state;
    for (int k = 0; k < N_FORMATS; k++)
        for (uint32_t code = 0; code < code_count(&formats[k]); code++) {
            const double want = by_definition(&formats[k], code);
            const float got = formats[k].widen(code);
            if (isnan(want))
                assert_true(isnan(got));
            else
                assert_true((double)got == want && !signbit(got) == !signbit(want));
        }
}

static void values_of_the_format_come_back(void **state)
{
    (void)state;
    for (int k = 0; k < N_FORMATS; k++)
        for (uint32_t code = 0; code < code_count(&formats[k]); code++) {
            const float x = formats[k].widen(code);
            const uint32_t back = formats[k].narrow(x);
            if (isnan(x))
                assert_true(isnan(formats[k].widen(back)));
            else if (isfinite(x) || formats[k].mantissa_bits > 3)
                assert_int_equal(back, code);
        }
}

/* Between each two neighbours: below, at and above the middle; ties go to the even code. */
static void check_gap(const format *f, uint32_t code)
{
    const double lo = by_definition(f, code), hi = by_definition(f, code + 1);
    const float middle = (float)((lo + hi) / 2);
    if (f->mantissa_bits < 23)
        assert_true((double)middle == (lo + hi) / 2);
    assert_int_equal(f->narrow(nextafterf(middle, 0)), code);
    assert_int_equal(f->narrow(nextafterf(middle, INFINITY)), code + 1);
    assert_int_equal(f->narrow(middle), code % 2 == 0 ? code : code + 1);
    const uint32_t sign = code_count(f) / 2;
    assert_int_equal(f->narrow(-middle), sign + (code % 2 == 0 ? code : code + 1));
}

static void narrowing_rounds_to_nearest_even(void **state)
{
    (void)state;
    for (int k = 0; k < N_FORMATS; k++)
        for (uint32_t code = 0; isfinite(by_definition(&formats[k], code + 1)); code++)
            check_gap(&formats[k], code);
}

static void overflow_is_infinite_or_saturates(void **state)
{
    (void)state;
    assert_int_equal(f16_from_f32(65519.996f), 0x7bff);
    assert_int_equal(f16_from_f32(65520.0f), 0x7c00);
    assert_int_equal(f16_from_f32(-INFINITY), 0xfc00);
    assert_int_equal(bf16_from_f32(3.4028235e38f), 0x7f80);
    assert_int_equal(bf16_from_f32(INFINITY), 0x7f80);
    assert_int_equal(e4m3_from_f32(1e9f), 0x7e);
    assert_int_equal(e4m3_from_f32(-INFINITY), 0xfe);
    assert_int_equal(e5m2_from_f32(61440.0f), 0x7b);
    assert_int_equal(e5m2_from_f32(INFINITY), 0x7b);
}

static void nan_stays_nan_with_any_payload(void **state)
{
    (void)state;
    static const uint32_t nans[] = {0x7f800001, 0x7fc00000, 0x7fffffff, 0xff800001, 0xffffffff};
    for (size_t i = 0; i < sizeof nans / sizeof nans[0]; i++)
        for (int k = 0; k < N_FORMATS; k++) {
            const float nan = f32_from_bits(nans[i]);
            assert_true(isnan(formats[k].widen(formats[k].narrow(nan))));
        }
}

static void arrays_convert_as_elements_do(void **state)
{
    (void)state;
    enum { N = 67 };
    float x[N], back[N];
    uint16_t half[N];
    double wide[N];
    for (int i = 0; i < N; i++)
        x[i] = (float)(i - 30) * 1.37f;
    convert_from_f32(SACCADE_F16, x, half, N);
    convert_to_f32(SACCADE_F16, half, back, N);
    for (int i = 0; i < N; i++)
        assert_true(back[i] == f16_to_f32(f16_from_f32(x[i])));
    convert_from_f32(SACCADE_BF16, x, half, N);
    convert_to_f32(SACCADE_BF16, half, back, N);
    for (int i = 0; i < N; i++)
        assert_true(back[i] == bf16_to_f32(bf16_from_f32(x[i])));
    convert_from_f32(SACCADE_F64, x, wide, N);
    convert_to_f32(SACCADE_F64, wide, back, N);
    assert_memory_equal(x, back, sizeof x);
    assert_false(convert_is_float(SACCADE_I32));
}

static void elements_of_every_dtype_read_as_double(void **state)
{
    (void)state;
    const int8_t i8 = -3;
    const uint16_t u16 = 65535, bf16 = 0x3fc0, f16 = 0xc200;
    const int64_t i64 = -(INT64_C(1) << 40);
    const uint32_t u32 = 4000000000u;
    const uint8_t yes = 7;
    assert_true(convert_element(SACCADE_I8, &i8) == -3);
    assert_true(convert_element(SACCADE_U16, &u16) == 65535);
    assert_true(convert_element(SACCADE_I64, &i64) == -1099511627776.0);
    assert_true(convert_element(SACCADE_U32, &u32) == 4e9);
    assert_true(convert_element(SACCADE_BOOL, &yes) == 1);
    assert_true(convert_element(SACCADE_BF16, &bf16) == 1.5);
    assert_true(convert_element(SACCADE_F16, &f16) == -3);
}

static void public_facts_about_types(void **state)
{
    (void)state;
    assert_int_equal(saccade_dtype_bytes(SACCADE_BF16), 2);
    assert_int_equal(saccade_dtype_bytes(SACCADE_NONE), 0);
    assert_string_equal(saccade_dtype_name(SACCADE_F64), "f64");
    assert_string_equal(saccade_status_name(SACCADE_ENOMEM), "out of memory");
    const int64_t shape[] = {2, 3, 4};
    const saccade_tensor t = saccade_tensor_of(NULL, SACCADE_F32, 3, shape);
    assert_int_equal(t.stride[0], 12);
    assert_int_equal(t.stride[2], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(widening_follows_the_definition),
        cmocka_unit_test(values_of_the_format_come_back),
        cmocka_unit_test(narrowing_rounds_to_nearest_even),
        cmocka_unit_test(overflow_is_infinite_or_saturates),
        cmocka_unit_test(nan_stays_nan_with_any_payload),
        cmocka_unit_test(arrays_convert_as_elements_do),
        cmocka_unit_test(elements_of_every_dtype_read_as_double),
        cmocka_unit_test(public_facts_about_types),
    };
    return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
