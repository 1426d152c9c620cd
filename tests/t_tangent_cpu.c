/* saccade_tangent on back end cpu against the oracle in float64: dtypes, levels, masks, scores,
 * sinks, dropout, shapes, strides, threads, which rates are given, poisoned memory, AMX tiles
 * emulated and as compiled. */
#include "support/amx_trap.h"
#include "support/fail_alloc.h"
#include "support/short_run.h"

#include "base/convert.h"
#include "cpu/tangent/tangent.h"
#include "saccade_config.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Rates that a run gives. */
enum { OF_Q = 1, OF_K = 2, OF_V = 4, OF_CAPTURES = 8, OF_ALL = 15 };
/* How a run tells what is live. */
enum { PROVEN, RUNS };

typedef struct tangent_case {
    const char *score, *mask;
    saccade_dtype dtype;
    saccade_sizes s;
    int rates;
    const char *level;                  /* NULL: the best there is */
    const cpu_tangent_kernels *kernels; /* NULL: those of the level */
    int32_t q_offset, kv_len;           /* kv_len 0: all keys */
    int has_sinks, drops, by, threads;
    double data; /* by how much random numbers are multiplied; 0: 1 */
    int poisons; /* keys past kv_len and masked ones hold NaN */
} tangent_case;

/* All of a run. Everything is [B, H, N, D] with a gap behind each row. */
typedef struct tangent_run {
    const tangent_case *c;
    saccade_tensor q, k, v, q_dot, k_dot, v_dot, bias, bias_dot, sinks;
    saccade_tensor out, lse, out_dot, lse_dot;
    float w_value, w_rate;
} tangent_run;

static uint32_t seed;

static float noise(void)
{
    seed = seed * 1664525u + 1013904223u;
    return (float)(seed >> 8) / (1 << 23) - 1;
}

enum { GAP = 3 };

static saccade_tensor tensor(saccade_dtype dtype, int32_t rank, const int64_t *shape)
{
    saccade_tensor t = saccade_tensor_of(NULL, dtype, rank, shape);
    int64_t n = shape[rank - 1] + GAP;
    for (int32_t d = rank - 2; d >= 0; d--) {
        t.stride[d] = n;
        n *= shape[d];
    }
    const size_t bytes = (size_t)(n + 1) * saccade_dtype_bytes(dtype);
    t.data = malloc(bytes);
    memset(t.data, 0xff, bytes); /* NaN, between rows too */
    return t;
}

static void put(const saccade_tensor *t, int64_t at, float x)
{
    convert_from_f32(t->dtype, &x,
                     (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype), 1);
}

static double get(const saccade_tensor *t, int64_t at)
{
    return convert_element(t->dtype,
                           (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

/* Of element n. */
static int64_t place(const saccade_tensor *t, int64_t n)
{
    int64_t at = 0;
    for (int32_t d = t->rank - 1; d >= 0; d--, n /= t->shape[d + 1])
        at += n % t->shape[d] * t->stride[d];
    return at;
}

static int64_t count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++)
        n *= t->shape[d];
    return n;
}

static saccade_tensor noisy(saccade_dtype dtype, int32_t rank, const int64_t *shape, double by)
{
    const saccade_tensor t = tensor(dtype, rank, shape);
    for (int64_t n = 0; n < count(&t); n++)
        put(&t, place(&t, n), (float)by * noise());
    return t;
}

static void poison_keys(const tangent_case *c, const saccade_tensor *t)
{
    for (int64_t n = 0; n < count(t); n++) {
        const int64_t j = n / t->shape[3] % t->shape[2];
        if ((c->kv_len && j >= c->kv_len) || (c->poisons > 1 && j == 5))
            put(t, place(t, n), NAN);
    }
}

static tangent_run make_run(const tangent_case *c)
{
    const saccade_sizes *s = &c->s;
    const int64_t q[] = {s->B, s->H, s->Q, s->D}, k[] = {s->B, s->Hkv, s->KV, s->D};
    const int64_t v[] = {s->B, s->Hkv, s->KV, s->Dv}, o[] = {s->B, s->H, s->Q, s->Dv};
    const int64_t bias[] = {s->H, 64}, one[] = {s->H};
    const double by = c->data > 0 ? c->data : 1;
    tangent_run r = {.c = c};
    seed = 7;
    r.q = noisy(c->dtype, 4, q, 2 * by);
    r.k = noisy(c->dtype, 4, k, 2);
    r.v = noisy(c->dtype, 4, v, 1);
    r.q_dot = noisy(c->dtype, 4, q, 1);
    r.k_dot = noisy(c->dtype, 4, k, 1);
    r.v_dot = noisy(c->dtype, 4, v, 1);
    r.bias = noisy(SACCADE_F32, 2, bias, 1);
    r.bias_dot = noisy(SACCADE_F32, 2, bias, 1);
    r.sinks = noisy(SACCADE_F32, 1, one, 1);
    r.w_value = 0.75f;
    r.w_rate = 0.5f;
    r.out = tensor(c->dtype, 4, o);
    r.out_dot = tensor(c->dtype, 4, o);
    r.lse = tensor(SACCADE_F32, 3, o);
    r.lse_dot = tensor(SACCADE_F32, 3, o);
    if (c->poisons) {
        poison_keys(c, &r.k);
        poison_keys(c, &r.v);
        poison_keys(c, &r.k_dot);
        poison_keys(c, &r.v_dot);
    }
    return r;
}

static void free_run(tangent_run *r)
{
    const saccade_tensor *all[] = {&r->q,     &r->k,       &r->v,        &r->q_dot, &r->k_dot,
                                   &r->v_dot, &r->bias,    &r->bias_dot, &r->sinks, &r->out,
                                   &r->lse,   &r->out_dot, &r->lse_dot};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]->data);
}

static saccade_mod *mod_of(saccade_kind kind, const char *text)
{
    saccade_capture captures[2];
    saccade_mod *generic, *bound = NULL;
    saccade_error err = {0};
    assert_int_equal(saccade_mod_parse(kind, text, strlen(text), &generic, &err), 0);
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        captures[i].dtype = SACCADE_F32;
    }
    if (saccade_mod_bind(generic, captures, n, &bound, &err))
        fail_msg("%s", err.message);
    saccade_mod_destroy(generic);
    return bound;
}

static saccade_plan *plan_of(const tangent_case *c, const saccade_context *context,
                             const char *backend)
{
    static const char weight_text[] = "dropout(0.25)";
    saccade_mod *score = c->score ? mod_of(SACCADE_SCORE, c->score) : NULL;
    saccade_mod *mask = c->mask ? mod_of(SACCADE_MASK, c->mask) : NULL;
    saccade_mod *weight = c->drops ? mod_of(SACCADE_WEIGHT, weight_text) : NULL;
    saccade_plan *plan = NULL;
    saccade_error err = {0};
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = c->s;
    p.dtype = c->dtype;
    p.score = score;
    p.mask = mask;
    p.weight = weight;
    p.backend = backend;
    p.sinks_dtype = c->has_sinks ? SACCADE_F32 : SACCADE_NONE;
    p.tangents = 1;
    if (saccade_plan_create((saccade_context *)(uintptr_t)context, &p, &plan, &err))
        fail_msg("%s: %s", c->score ? c->score : "-", err.message);
    saccade_mod_destroy(score);
    saccade_mod_destroy(mask);
    saccade_mod_destroy(weight);
    if (c->kernels && strcmp(backend, "cpu") == 0)
        cpu_state_of(plan)->tangent->kernels = c->kernels;
    return plan;
}

static saccade_block_mask *runs_of(const tangent_case *c, const saccade_plan *plan,
                                   const saccade_positions *at)
{
    saccade_mod *mask = mod_of(SACCADE_MASK, c->mask);
    saccade_block_mask *out = NULL;
    saccade_error err = {0};
    assert_int_equal(
        saccade_block_mask_create(NULL, mask, &c->s, at, NULL, 0, NULL, &out, &err),
        SACCADE_OK);
    assert_int_equal(saccade_plan_prepare(plan, out, &err), SACCADE_OK);
    saccade_mod_destroy(mask);
    return out;
}

static saccade_status call(const tangent_case *c, tangent_run *r, const saccade_plan *plan,
                           saccade_error *err)
{
    int32_t q_offset = c->q_offset, kv_len = c->kv_len ? c->kv_len : (int32_t)c->s.KV;
    int64_t dropout[2] = {11, 0};
    const int64_t two = 2;
    const saccade_tensor offset = saccade_tensor_of(&q_offset, SACCADE_I32, 0, NULL);
    const saccade_tensor len = saccade_tensor_of(&kv_len, SACCADE_I32, 0, NULL);
    const saccade_tensor state = saccade_tensor_of(dropout, SACCADE_I64, 1, &two);
    saccade_binding given[2], dots[2];
    int32_t n = 0;
    if (c->score && strstr(c->score, "bias")) {
        given[n] = (saccade_binding){"bias", r->bias};
        dots[n++] = (saccade_binding){"bias", r->bias_dot};
    }
    if (c->score && strchr(c->score, 'w')) {
        given[n] = (saccade_binding){"w", saccade_tensor_of(&r->w_value, SACCADE_F32, 0, NULL)};
        dots[n++] = (saccade_binding){"w", saccade_tensor_of(&r->w_rate, SACCADE_F32, 0, NULL)};
    }
    saccade_positions at;
    saccade_tangent_args a;
    saccade_positions_init(&at);
    at.q_offset = &offset;
    at.kv_len = &len;
    saccade_tangent_args_init(&a);
    a.q = &r->q;
    a.k = &r->k;
    a.v = &r->v;
    a.q_dot = c->rates & OF_Q ? &r->q_dot : NULL;
    a.k_dot = c->rates & OF_K ? &r->k_dot : NULL;
    a.v_dot = c->rates & OF_V ? &r->v_dot : NULL;
    a.bindings = given;
    a.n_bindings = n;
    a.captures_dot = dots;
    a.n_captures_dot = c->rates & OF_CAPTURES ? n : 0;
    a.positions = &at;
    a.sinks = c->has_sinks ? &r->sinks : NULL;
    a.dropout = c->drops ? &state : NULL;
    a.out = &r->out;
    a.lse = &r->lse;
    a.out_dot = &r->out_dot;
    a.lse_dot = &r->lse_dot;
    saccade_block_mask *runs = c->by == RUNS ? runs_of(c, plan, &at) : NULL;
    a.block_mask = runs;
    a.workspace_bytes = saccade_plan_tangent_workspace(plan, &c->s);
    char *room = aligned_alloc(64, a.workspace_bytes + 128);
    memset(room, 0xff, a.workspace_bytes + 128);
    a.workspace = room;
    const saccade_status status = saccade_tangent(plan, &a, err);
    for (int i = 0; i < 64; i++)
        assert_int_equal((unsigned char)room[a.workspace_bytes + (size_t)i], 0xff);
    free(room);
    saccade_block_mask_destroy(runs);
    return status;
}

static tangent_run run_on(const tangent_case *c, const char *backend, int threads)
{
    saccade_context_options options;
    saccade_context *context = NULL;
    saccade_error err = {0};
    tangent_run r = make_run(c);
    saccade_context_options_init(&options);
    options.threads = threads;
    options.level = c->level;
    assert_int_equal(saccade_context_create(&options, &context, &err), SACCADE_OK);
    saccade_plan *plan = plan_of(c, context, backend);
    if (call(c, &r, plan, &err))
        fail_msg("%s: %s", err.where, err.message);
    saccade_plan_destroy(plan);
    saccade_context_destroy(context);
    return r;
}

/* The largest difference, relative to 1 and the largest value; both may be infinite or NaN
 * alike. */
static void near(const tangent_case *c, const char *what, const saccade_tensor *got,
                 const saccade_tensor *expected, double most)
{
    double largest = 1;
    for (int64_t n = 0; n < count(expected); n++) {
        const double x = fabs(get(expected, place(expected, n)));
        largest = isfinite(x) && x > largest ? x : largest;
    }
    for (int64_t n = 0; n < count(got); n++) {
        const double x = get(got, place(got, n)), y = get(expected, place(expected, n));
        if (!(x == y || fabs(x - y) <= most * largest || (isnan(x) && isnan(y))))
            fail_msg("%s[%lld] of %s, %s, dtype %d, rates %d: got %.9g, expected %.9g", what,
                     (long long)n, c->score ? c->score : "-", c->mask ? c->mask : "-",
                     (int)c->dtype, c->rates, x, y);
    }
}

/* Of a result in this dtype: its rounding and that of weights, or of a few thousand sums. */
static double bound_of(saccade_dtype dtype)
{
    return dtype == SACCADE_BF16 ? 1.0 / 64 : dtype == SACCADE_F16 ? 1.0 / 512 : 2e-5;
}

static void same_bits(const saccade_tensor *a, const saccade_tensor *b)
{
    for (int64_t n = 0; n < count(a); n++) {
        const double x = get(a, place(a, n)), y = get(b, place(b, n));
        assert_true(x == y || (isnan(x) && isnan(y)));
    }
}

static void check(const tangent_case *c)
{
    const double most = bound_of(c->dtype);
    tangent_run truth = run_on(c, "ref", 1), r = run_on(c, "cpu", c->threads ? c->threads : 2);
    near(c, "out", &r.out, &truth.out, most);
    near(c, "lse", &r.lse, &truth.lse, c->dtype == SACCADE_BF16 ? 1e-4 : 2e-5);
    near(c, "out_dot", &r.out_dot, &truth.out_dot, most);
    near(c, "lse_dot", &r.lse_dot, &truth.lse_dot, c->dtype == SACCADE_BF16 ? 4e-3 : 2e-5);
    if (c->threads) {
        tangent_run alone = run_on(c, "cpu", 1);
        same_bits(&r.out, &alone.out);
        same_bits(&r.out_dot, &alone.out_dot);
        same_bits(&r.lse_dot, &alone.lse_dot);
        free_run(&alone);
    }
    free_run(&truth);
    free_run(&r);
}

static const char *const scores[] = {
    NULL,
    "score + bias[h, min(abs(q - kv), 63)]",
    "x = score + w * bias[h, kv % 64]; 3.0 * tanh(x / 3.0)",
    "score * w + bias[h, (q + kv) % 64] * bias[h, kv % 64] * score",
    "q > kv ? exp(0.3 * score) * w : score + sqrt(2.0 + bias[h, kv % 64] * bias[h, kv % 64])",
    "kv == 3 ? -inf : bias[h, abs(kv - q) % 64] * sigmoid(score) + w * w * score",
    "w * bias[h, q % 64]",
};
static const char *const masks[] = {
    NULL,
    "q >= kv",
    "q >= kv && q - kv < 70",
    "(q * 7 + kv * 3) % 5 != 0 && q != 4",
    "q / 50 == kv / 50",
};
enum { SCORES = sizeof scores / sizeof *scores, MASKS = sizeof masks / sizeof *masks };

static void scores_and_masks(void **state)
{
    const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16, SACCADE_F16};
    int turn = 0;
    (void)state;
    for (int i = 0; i < SCORES; i++)
        for (int k = 0; k < MASKS; k++, turn++) {
            if (is_short_run() && turn % 4)
                continue;
            tangent_case c = {.score = scores[i],
                              .mask = masks[k],
                              .dtype = dtypes[turn % 3],
                              .s = {1 + turn % 2, 4, 2, 101 + turn, 300 - turn, 20, 13},
                              .rates = turn % 5 == 4 ? 1 + turn % OF_ALL : OF_ALL,
                              .by = masks[k] && turn % 2 ? RUNS : PROVEN,
                              .has_sinks = turn % 4 == 1,
                              .drops = turn % 6 == 2,
                              .q_offset = turn % 3 == 2 ? 150 : 0,
                              .threads = turn % 7 == 0 ? 3 : 0};
            check(&c);
        }
}

static void rates_alone(void **state)
{
    (void)state;
    for (int rates = 0; rates <= OF_ALL; rates += is_short_run() ? 5 : 1) {
        const tangent_case c = {.score = scores[2],
                                .mask = masks[1],
                                .s = {1, 2, 1, 70, 290, 16, 24},
                                .dtype = SACCADE_F32,
                                .rates = rates};
        tangent_run r;
        check(&c);
        if (rates)
            continue;
        r = run_on(&c, "cpu", 1); /* nothing changes */
        for (int64_t n = 0; n < count(&r.out_dot); n++)
            assert_true(get(&r.out_dot, place(&r.out_dot, n)) == 0);
        free_run(&r);
    }
}

/* Whether there is such a level here, and SACCADE_LEVEL allows it. */
static int is_there(const char *level)
{
    saccade_context_options options;
    saccade_context *context = NULL;
    saccade_error err;
    saccade_context_options_init(&options);
    options.level = level;
    const saccade_status status = saccade_context_create(&options, &context, &err);
    saccade_context_destroy(context);
    return status == SACCADE_OK;
}

static void levels(void **state)
{
    static const char *const names[] = {"portable", "avx2", "avx512"};
    (void)state;
    assert_true(is_there(names[0]));
    for (int i = 0; i < 3 && is_there(names[i]); i++)
        for (int k = 0; k < 3; k++) {
            const tangent_case c = {.score = k ? scores[4 - k] : NULL,
                                    .mask = masks[k],
                                    .dtype = k ? SACCADE_F32 : SACCADE_F16,
                                    .s = {1, 3, 1, 130, 270, 64, 70},
                                    .rates = OF_ALL,
                                    .level = names[i]};
            check(&c);
        }
}

static void small_and_empty(void **state)
{
    const saccade_sizes all[] = {{1, 1, 1, 1, 1, 1, 1},
                                 {2, 2, 1, 3, 257, 5, 2},
                                 {1, 2, 2, 97, 1, 8, 33},
                                 {1, 2, 1, 2, 520, 200, 136}};
    (void)state;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (int k = 0; k < 2; k++) {
            const tangent_case c = {
                .s = all[i], .dtype = SACCADE_F32, .rates = OF_ALL, .has_sinks = k};
            check(&c);
        }
}

/* What no row may see holds NaN, in the rates too. */
static void dead_keys_are_not_read(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        const tangent_case c = {.mask = i % 2 ? "kv != 5" : "kv != 5 && q + 250 > kv",
                                .score = scores[i / 2],
                                .dtype = i == 3 ? SACCADE_BF16 : SACCADE_F32,
                                .s = {1, 2, 1, 40, 300, 24, 20},
                                .rates = OF_ALL,
                                .kv_len = 281,
                                .poisons = 2};
        tangent_run r = run_on(&c, "cpu", 1);
        for (int64_t n = 0; n < count(&r.out_dot); n++)
            assert_true(isfinite(get(&r.out_dot, place(&r.out_dot, n))));
        free_run(&r);
        check(&c);
    }
}

/* Rates that all keys share cancel: out' is what it is without them. */
static void common_rates_cancel(void **state)
{
    tangent_case c = {.score = "score + w",
                      .s = {1, 1, 1, 33, 700, 16, 16},
                      .dtype = SACCADE_F32,
                      .rates = OF_CAPTURES};
    saccade_error err = {0};
    (void)state;
    tangent_run r = make_run(&c);
    r.w_rate = 1e4f;
    saccade_plan *plan = plan_of(&c, NULL, "cpu");
    assert_int_equal(call(&c, &r, plan, &err), SACCADE_OK);
    for (int64_t n = 0; n < count(&r.out_dot); n++)
        assert_true(fabs(get(&r.out_dot, place(&r.out_dot, n))) < 4e-3);
    for (int64_t n = 0; n < count(&r.lse_dot); n++)
        assert_true(fabs(get(&r.lse_dot, place(&r.lse_dot, n)) - 1e4) < 0.01);
    saccade_plan_destroy(plan);
    free_run(&r);
}

/* Scores of hundreds: weights beside the largest are 0, and maxima move. */
static void large_scores(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        const tangent_case c = {.s = {1, 2, 2, 50, 600, 32, 16},
                                .mask = masks[i],
                                .dtype = SACCADE_F32,
                                .rates = OF_ALL,
                                .data = 40};
        check(&c);
    }
}

static const cpu_tangent_kernels *emulated(int turn)
{
    const cpu_level level = cpu_features_get()->level;
    const cpu_tangent_kernels *list[3] = {&cpu_tangent_bf16_tiles_portable};
    int n = 1;
#if HAVE_LEVEL_AVX2
    if (level >= CPU_AVX2)
        list[n++] = &cpu_tangent_bf16_tiles_avx2;
#endif
#if HAVE_LEVEL_AVX512
    if (level >= CPU_AVX512)
        list[n++] = &cpu_tangent_bf16_tiles_avx512;
#endif
    (void)level;
    return list[turn % n];
}

static void tiles(void **state)
{
    (void)state;
    for (int i = 0; i < (is_short_run() ? 2 : 5); i++) {
        const tangent_case c = {.score = scores[i],
                                .mask = masks[i],
                                .dtype = SACCADE_BF16,
                                .kernels = emulated(i),
                                .s = {1, 2, 1, 75 + i, 290 - 17 * i, 40, 50},
                                .rates = OF_ALL,
                                .drops = i == 1,
                                .poisons = i == 3,
                                .kv_len = i == 3 ? 200 : 0};
        check(&c);
    }
}

static void compiled_tiles(void **state)
{
    const tangent_case c = {.score = scores[2],
                            .mask = masks[1],
                            .dtype = SACCADE_BF16,
                            .s = {1, 2, 1, 70, 200, 64, 32},
                            .rates = OF_ALL};
    (void)state;
    if (is_short_run() || !amx_trap_begin())
        return;
    check(&c);
    amx_trap_end();
}

static void what_is_wrong_is_said(void **state)
{
    const tangent_case c = {.s = {1, 1, 1, 8, 8, 8, 8}, .dtype = SACCADE_F32, .rates = OF_ALL};
    saccade_error err = {0};
    saccade_tangent_args a;
    saccade_problem p;
    saccade_plan *plan;
    (void)state;
    tangent_run r = make_run(&c);
    plan = plan_of(&c, NULL, "cpu");
    saccade_tangent_args_init(&a);
    a.q = &r.q;
    a.k = &r.k;
    a.v = &r.v;
    a.out_dot = &r.out_dot;
    assert_int_equal(saccade_tangent(plan, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "workspace");
    a.d_out = &r.out;
    assert_int_equal(saccade_tangent(plan, &a, &err), SACCADE_EBACKEND);
    assert_string_equal(err.where, "d_out");
    saccade_plan_destroy(plan);
    saccade_problem_init(&p);
    p.tangents = 2;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    p.tangents = 1;
    p.page = 16;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "tangents");
    p.page = 0;
    p.backend = "plain";
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_EBACKEND);
    p.backend = "cpu";
    p.tangents = 0;
    p.sizes = c.s;
    assert_int_equal(saccade_plan_create(NULL, &p, &plan, &err), SACCADE_OK);
    a.d_out = NULL;
    assert_int_equal(saccade_tangent(plan, &a, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, "tangent");
    saccade_plan_destroy(plan);
    free_run(&r);
}

static saccade_status make_plan(void *arg, saccade_error *err)
{
    saccade_plan *plan = NULL;
    const saccade_status status = saccade_plan_create(NULL, arg, &plan, err);
    saccade_plan_destroy(plan);
    return status;
}

static void no_memory_is_an_error(void **state)
{
    saccade_mod *score = mod_of(SACCADE_SCORE, scores[2]);
    saccade_problem p;
    (void)state;
    saccade_problem_init(&p);
    p.score = score;
    p.backend = "cpu";
    p.tangents = 1;
    p.gradients = SACCADE_GRADIENT_Q;
    assert_true(fail_alloc_sweep("plan", make_plan, &p) > 3);
    saccade_mod_destroy(score);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_and_masks),
        cmocka_unit_test(rates_alone),
        cmocka_unit_test(levels),
        cmocka_unit_test(small_and_empty),
        cmocka_unit_test(dead_keys_are_not_read),
        cmocka_unit_test(common_rates_cancel),
        cmocka_unit_test(large_scores),
        cmocka_unit_test(tiles),
        cmocka_unit_test(compiled_tiles),
        cmocka_unit_test(what_is_wrong_is_said),
        cmocka_unit_test(no_memory_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
