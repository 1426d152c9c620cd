/* Problems in f64 are good to the last bits of double: scores with captures of f64, tensors and
 * scalars, against formulas written out; and indices and masks stay what they are in f32. */
#include "plan/plan.h"
#include "ref/ref.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { H = 3, Q = 5, KV = 7, D = 4 };

static const saccade_sizes sizes = {1, H, H, Q, KV, D, D};
static double q[H][Q][D], k[H][KV][D], v[H][KV][D];
static double slopes[H], table[KV], shift;
static float narrow[KV];

static saccade_binding all[] = {
    {"slopes", {slopes, SACCADE_F64, {0, 0}, 1, {H}, {1}}},
    {"table", {table, SACCADE_F64, {0, 0}, 1, {KV}, {1}}},
    {"narrow", {narrow, SACCADE_F32, {0, 0}, 1, {KV}, {1}}},
    {"shift", {&shift, SACCADE_F64, {0, 0}, 0, {0}, {0}}},
};
enum { CAPTURES = sizeof all / sizeof all[0] };

/* Values that f32 does not hold. */
static void fill(void)
{
    for (int h = 0; h < H; h++) {
        slopes[h] = pow(0.7, h + 1);
        for (int d = 0; d < D; d++) {
            for (int i = 0; i < Q; i++)
                q[h][i][d] = sin(1 + h + 3.1 * i + 0.7 * d);
            for (int j = 0; j < KV; j++) {
                k[h][j][d] = cos(2 + h + 1.3 * j + 0.9 * d);
                v[h][j][d] = sin(5 + h + 0.3 * j * j + 1.7 * d);
            }
        }
    }
    for (int j = 0; j < KV; j++) {
        table[j] = 1.0 / (j + 3);
        narrow[j] = (float)table[j];
    }
    shift = 0.1;
}

/* ---- runs ---- */

typedef struct one_run {
    saccade_mod *score, *mask;
    saccade_plan *plan;
    saccade_binding used[CAPTURES];
    int32_t n_used;
    double out[H][Q][D], lse[H][Q];
} one_run;

static saccade_mod *bind(saccade_kind kind, const char *text, one_run *r)
{
    saccade_error err = {0};
    saccade_capture captures[CAPTURES];
    saccade_mod *generic, *bound;
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err))
        fail_msg("%s: %s", text, err.message);
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++)
        for (int c = 0; c < CAPTURES; c++)
            if (strcmp(saccade_mod_capture(generic, i).name, all[c].name) == 0) {
                captures[i] = (saccade_capture){all[c].name, all[c].tensor.dtype,
                                                all[c].tensor.rank};
                r->used[r->n_used++] = all[c];
            }
    if (saccade_mod_bind(generic, captures, n, &bound, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return bound;
}

static void run(const char *score, const char *mask, double scale, one_run *r)
{
    saccade_error err = {0};
    saccade_problem p;
    const int64_t rows[4] = {1, H, Q, D}, keys[4] = {1, H, KV, D};
    saccade_problem_init(&p);
    memset(r, 0, sizeof *r);
    r->score = bind(SACCADE_SCORE, score, r);
    r->mask = mask ? bind(SACCADE_MASK, mask, r) : NULL;
    p.sizes = sizes;
    p.dtype = SACCADE_F64;
    p.scale = scale;
    p.score = r->score;
    p.mask = r->mask;
    p.backend = "ref";
    if (saccade_plan_create(NULL, &p, &r->plan, &err))
        fail_msg("%s: %s", score, err.message);
    const size_t bytes = (saccade_plan_workspace(r->plan, &sizes) + 63) / 64 * 64;
    void *workspace = aligned_alloc(64, bytes);
    assert_non_null(workspace);
    const saccade_tensor queries = saccade_tensor_of(q, SACCADE_F64, 4, rows);
    const saccade_tensor k_at = saccade_tensor_of(k, SACCADE_F64, 4, keys);
    const saccade_tensor v_at = saccade_tensor_of(v, SACCADE_F64, 4, keys);
    const saccade_tensor out = saccade_tensor_of(r->out, SACCADE_F64, 4, rows);
    const saccade_tensor lse = saccade_tensor_of(r->lse, SACCADE_F64, 3, rows);
    const saccade_forward_args args = {
        .size = sizeof args,
        .q = &queries,
        .k = &k_at,
        .v = &v_at,
        .out = &out,
        .lse = &lse,
        .bindings = r->used,
        .n_bindings = r->n_used,
        .workspace = workspace,
        .workspace_bytes = bytes};
    if (saccade_forward(r->plan, &args, &err))
        fail_msg("%s: %s: %s", score, err.where, err.message);
    free(workspace);
}

static void drop(one_run *r)
{
    saccade_plan_destroy(r->plan);
    saccade_mod_destroy(r->score);
    saccade_mod_destroy(r->mask);
}

/* ---- formulas ---- */

typedef double formula(double score, int h, int i, int j); /* -inf: masked */

static double alibi(double s, int h, int i, int j)
{
    return s + slopes[h] * (j - i);
}

static double alibi_text(double s, int h, int i, int j)
{
    return s + exp2(-8.0 * (h + 1) / H) * (j - i);
}

static double shifted(double s, int h, int i, int j)
{
    (void)h, (void)i, (void)j;
    return tanh(s * shift) / shift;
}

static double looked_up(double s, int h, int i, int j)
{
    (void)h, (void)i;
    return s + exp(table[j]) / 3.0;
}

/* Index of f32 truth: int(1 / 3 in f32 * 3) is 1, of what lies below it in f64 0. */
static double indexed(double s, int h, int i, int j)
{
    (void)h, (void)i;
    return s + table[(int)((float)table[j] * (float)(j + 3))];
}

/* A mask compares in f32, where table is narrow. */
static double masked(double s, int h, int i, int j)
{
    (void)h, (void)i, (void)j;
    return s * shift;
}

/* The same comparison in a score is one of doubles. */
static double compared(double s, int h, int i, int j)
{
    (void)h, (void)i;
    return table[j] == (double)narrow[j] ? s : s + 1;
}

static double folded(double s, int h, int i, int j)
{
    (void)h, (void)i, (void)j;
    return s * (1.0 / 3.0) + sqrt(2.0);
}

static void check(const one_run *r, formula *change, double scale, const char *text)
{
    for (int h = 0; h < H; h++)
        for (int i = 0; i < Q; i++) {
            double l = 0, o[D] = {0};
            for (int j = 0; j < KV; j++) {
                double s = 0;
                for (int d = 0; d < D; d++)
                    s += q[h][i][d] * k[h][j][d];
                const double p = exp(change(scale * s, h, i, j));
                l += p;
                for (int d = 0; d < D; d++)
                    o[d] += p * v[h][j][d];
            }
            if (!(fabs(r->lse[h][i] - log(l)) <= 1e-14 * (1 + fabs(log(l)))))
                fail_msg("%s: lse: got %.17g, expected %.17g", text, r->lse[h][i], log(l));
            for (int d = 0; d < D; d++)
                if (!(fabs(r->out[h][i][d] - o[d] / l) <= 1e-14))
                    fail_msg("%s: got %.17g, expected %.17g", text, r->out[h][i][d], o[d] / l);
        }
}

static void scores_are_double(void **state)
{
    static const struct {
        const char *score, *mask;
        formula *change;
    } cases[] = {
        {"score + slopes[h] * (kv - q)", NULL, alibi},
        {"score + exp2(-8.0 * (h + 1) / H) * (kv - q)", NULL, alibi_text},
        {"tanh(score * shift) / shift", NULL, shifted},
        {"score + exp(table[kv]) / 3.0", NULL, looked_up},
        {"score + table[int(table[kv] * (kv + 3))]", NULL, indexed},
        {"score * shift", "table[kv] == narrow[kv]", masked},
        {"table[kv] == narrow[kv] ? score : score + 1.0", NULL, compared},
        {"score * (1.0 / 3.0) + sqrt(2.0)", NULL, folded},
    };
    (void)state;
    fill();
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        one_run r;
        run(cases[n].score, cases[n].mask, 0.3, &r);
        check(&r, cases[n].change, 0.3, cases[n].score);
        drop(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(scores_are_double)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
