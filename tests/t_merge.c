/* saccade_merge: parts of the keys against the whole in float64, dead parts on any side, other
 * dtypes out, and equal bits over threads. */
#include "saccade.h"

#include "base/convert.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = 1, H = 2, Q = 7, DV = 5, PARTS = 3, ROWS = B * H * Q, OUT = ROWS * DV };

static const int64_t out_shape[4] = {B, H, Q, DV};

typedef struct parts {
    float out[PARTS][OUT], lse[PARTS][ROWS];
    saccade_tensor outs[PARTS], lses[PARTS];
    double gold[OUT], gold_lse[ROWS];
} parts;

/* Row r lacks part n where bit n of r is set: row 7 lacks all. Dead parts hold NaN. */
static int is_dead(int n, int row)
{
    return row >> n & 1;
}

static void solve(parts *p)
{
    for (int row = 0; row < ROWS; row++) {
        double most = -INFINITY, sum = 0;
        for (int n = 0; n < PARTS; n++)
            most = fmax(most, (double)p->lse[n][row]);
        for (int n = 0; n < PARTS; n++)
            sum += is_dead(n, row) ? 0 : exp((double)p->lse[n][row] - most);
        for (int d = 0; d < DV; d++) {
            double x = 0;
            for (int n = 0; n < PARTS; n++)
                if (!is_dead(n, row))
                    x += exp((double)p->lse[n][row] - most) * (double)p->out[n][row * DV + d];
            p->gold[row * DV + d] = sum > 0 ? x / sum : 0;
        }
        p->gold_lse[row] = sum > 0 ? most + log(sum) : -INFINITY;
    }
}

static void fill(parts *p)
{
    for (int n = 0; n < PARTS; n++) {
        for (int row = 0; row < ROWS; row++) {
            p->lse[n][row] = is_dead(n, row) ? -INFINITY : 40 * sinf((float)(row + 5 * n));
            for (int d = 0; d < DV; d++)
                p->out[n][row * DV + d] =
                    is_dead(n, row) ? NAN : cosf((float)(3 * row + 7 * d + n));
        }
        p->outs[n] = saccade_tensor_of(p->out[n], SACCADE_F32, 4, out_shape);
        p->lses[n] = saccade_tensor_of(p->lse[n], SACCADE_F32, 3, out_shape);
    }
    solve(p);
}

static saccade_merge_args args_of(const parts *p, const saccade_tensor *out,
                                  const saccade_tensor *lse)
{
    return (saccade_merge_args){.size = sizeof(saccade_merge_args),
                                .outs = p->outs,
                                .lses = p->lses,
                                .n = PARTS,
                                .out = out,
                                .lse = lse};
}

static void merge(const saccade_context *context, const saccade_merge_args *a)
{
    saccade_error err = {0};
    if (saccade_merge(context, a, &err))
        fail_msg("%s: %s", err.where, err.message);
}

static void parts_are_the_whole(void **unused)
{
    (void)unused;
    static parts p;
    float out[OUT], lse[ROWS];
    fill(&p);
    assert_true(is_dead(0, 7) && is_dead(1, 7) && is_dead(2, 7));
    const saccade_tensor o = saccade_tensor_of(out, SACCADE_F32, 4, out_shape);
    const saccade_tensor l = saccade_tensor_of(lse, SACCADE_F32, 3, out_shape);
    const saccade_merge_args a = args_of(&p, &o, &l);
    merge(NULL, &a);
    for (int i = 0; i < OUT; i++)
        assert_true(fabs((double)out[i] - p.gold[i]) <= 0x1p-24 * (1 + fabs(p.gold[i])));
    for (int i = 0; i < ROWS; i++)
        assert_true(isinf(p.gold_lse[i])
                        ? (double)lse[i] == p.gold_lse[i]
                        : fabs((double)lse[i] - p.gold_lse[i]) <= 0x1p-23 * 64);
    for (int d = 0; d < DV; d++)
        assert_true(out[7 * DV + d] == 0);
}

static void narrow_results_are_rounded_once(void **unused)
{
    (void)unused;
    static parts p;
    uint16_t out[OUT];
    fill(&p);
    const saccade_tensor o = saccade_tensor_of(out, SACCADE_BF16, 4, out_shape);
    const saccade_merge_args a = args_of(&p, &o, NULL);
    merge(NULL, &a);
    for (int i = 0; i < OUT; i++)
        assert_int_equal(out[i], bf16_from_f32((float)p.gold[i]));
}

static void threads_change_no_bit(void **unused)
{
    (void)unused;
    static parts p;
    float first[OUT], out[OUT];
    fill(&p);
    for (int32_t threads = 1; threads < 5; threads++) {
        const saccade_context_options options = {.size = sizeof options, .threads = threads};
        saccade_context *context;
        assert_int_equal(saccade_context_create(&options, &context, NULL), SACCADE_OK);
        const saccade_tensor o =
            saccade_tensor_of(threads == 1 ? first : out, SACCADE_F32, 4, out_shape);
        const saccade_merge_args a = args_of(&p, &o, NULL);
        merge(context, &a);
        if (threads > 1)
            assert_memory_equal(first, out, sizeof out);
        saccade_context_destroy(context);
    }
}

/* The result may take the place of a part. */
static void a_part_becomes_the_whole(void **unused)
{
    (void)unused;
    static parts p;
    fill(&p);
    const saccade_merge_args a = args_of(&p, &p.outs[1], &p.lses[1]);
    merge(NULL, &a);
    for (int i = 0; i < OUT; i++)
        assert_true(fabs((double)p.out[1][i] - p.gold[i]) <= 0x1p-24 * (1 + fabs(p.gold[i])));
}

static void not_finite_parts(void **unused)
{
    (void)unused;
    static parts p;
    static const float bad[] = {NAN, INFINITY};
    float out[OUT], lse[ROWS];
    const saccade_tensor o = saccade_tensor_of(out, SACCADE_F32, 4, out_shape);
    const saccade_tensor l = saccade_tensor_of(lse, SACCADE_F32, 3, out_shape);
    for (int i = 0; i < 2; i++) {
        fill(&p);
        p.lse[2][3] = bad[i];
        const saccade_merge_args a = args_of(&p, &o, &l);
        merge(NULL, &a);
        assert_true(isnan(out[3 * DV]) && isnan(lse[3]));
        assert_false(isnan(out[4 * DV]) || isnan(lse[4]));
    }
}

static void expect(const saccade_merge_args *a, const char *where, const char *part)
{
    saccade_error err = {0};
    assert_int_equal(saccade_merge(NULL, a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, where);
    assert_non_null(strstr(err.message, part));
}

static void wrong_arguments(void **unused)
{
    (void)unused;
    static parts p;
    float out[OUT];
    fill(&p);
    saccade_tensor o = saccade_tensor_of(out, SACCADE_F32, 4, out_shape);
    saccade_merge_args a = args_of(&p, &o, NULL);
    a.n = 0;
    expect(&a, "parts", "got 0");
    a.n = PARTS;
    a.out = NULL;
    expect(&a, "out", "got NULL");
    a.out = &o;
    o.dtype = SACCADE_I32;
    expect(&a, "out", "got dtype i32");
    o.dtype = SACCADE_F32;
    o.stride[0] = o.stride[2] = 0;
    expect(&a, "out", "do not overlap");
    o = saccade_tensor_of(out, SACCADE_F32, 4, out_shape);
    p.outs[1].shape[2] = Q - 1;
    expect(&a, "outs", "got length 6");
    p.outs[1].shape[2] = Q;
    p.lses[2].dtype = SACCADE_F64;
    expect(&a, "lses", "got dtype f64");
    expect(NULL, "arguments", "got NULL");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_are_the_whole),
        cmocka_unit_test(narrow_results_are_rounded_once),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(a_part_becomes_the_whole),
        cmocka_unit_test(not_finite_parts),
        cmocka_unit_test(wrong_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
