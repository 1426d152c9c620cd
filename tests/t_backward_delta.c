/* Gradients of captures whose derivative is large beside what differs in a row, where values
 * have a mean: the sum of a row's dX counts, which dO . O in 16 bits does not tell. At every
 * level, and on emulated tiles, against float64. */
#include "support/backward_case.h"
#include "support/short_run.h"

#include "base/convert.h"
#include "cpu/kernels/backward_kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MEAN = 10 };

static void add_mean(const saccade_tensor *t)
{
    for (int64_t row = 0; row < t->shape[0] * t->shape[1] * t->shape[2]; row++) {
        const int64_t i = row % t->shape[2], h = row / t->shape[2] % t->shape[1];
        const int64_t b = row / t->shape[2] / t->shape[1];
        const int64_t at = b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
        for (int64_t d = 0; d < t->shape[3]; d++) {
            char *x = (char *)t->data + (at + d) * (int64_t)saccade_dtype_bytes(t->dtype);
            convert_to_element(t->dtype, convert_element(t->dtype, x) + MEAN, x);
        }
    }
}

static void store(const saccade_tensor *t, const double *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        convert_to_element(t->dtype, from[i],
                           (char *)t->data + i * (int64_t)saccade_dtype_bytes(t->dtype));
}

/* Truth, with bounds of captures' gradients that are a part of the largest. */
static void solve(backward_case_run *r, double part)
{
    const saccade_sizes *s = &r->f.sizes;
    add_mean(&r->f.v.t);
    case_solve(&r->f);
    store(&r->out.t, r->f.out, s->B * s->H * s->Q * s->Dv);
    store(&r->lse.t, r->f.lse, s->B * s->H * s->Q);
    backward_case_solve(r);
    for (int c = 0; c < 8; c++) {
        double most = 0;
        for (int64_t i = 0; r->captured[c] && i < r->captured_count[c]; i++)
            most = fmax(most, fabs(r->captured[c][i]));
        r->captured_bound[c] = part * most;
    }
}

static void check(const backward_case *c, double part)
{
    backward_case_run r;
    backward_case_make(c, &r);
    solve(&r, part);
    for (const char *const *level = case_levels(); *level; level++)
        backward_case_check(&r, *level, 2, BACKWARD_PROVEN, NULL);
    r.c.kernels = r.f.dtype == SACCADE_BF16 ? &cpu_backward_bf16_tiles_portable
                                            : &cpu_backward_f16_tiles_portable;
    backward_case_check(&r, NULL, 1, BACKWARD_PROVEN, NULL);
    backward_case_free(&r);
}

static void sums_over_rows(void **state)
{
    static const char *const scores[] = {
        "score + h_scale[h] * 0.01 * (kv - q)",
        "score + c * 0.001 * kv",
        "score + table[kv < 180 ? 0 : 1 + kv % 7]",
    };
    char text[96];
    (void)state;
    for (int n = 0; n < (int)(sizeof scores / sizeof *scores); n++) {
        backward_case c = {.forward = {.problem = "b1 h2/1 q150 kv400 d16 dv32 bf16",
                                       .score = scores[n],
                                       .mask = n == 1 ? "q + 260 >= kv" : NULL,
                                       .seed = (uint64_t)n + 3},
                           .has_d_lse = n == 1,
                           .has_captures = 1};
        check(&c, 0.04);
        c.forward = case_in_f16(&c.forward, text);
        check(&c, 0.005);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(sums_over_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
