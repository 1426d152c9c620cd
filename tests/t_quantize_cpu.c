/* Attention of the CPU's kernels over quantised K and V, every dtype and granularity, decode
 * and prefill, in one piece and in pages, at every level: against float64 over the same codes,
 * within what plain attention over them is off. */
#include "base/convert.h"
#include "base/quantize.h"
#include "support/forward_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct granularity {
    int32_t tokens, channels;
    int is_shared; /* over batches and heads */
    saccade_dtype dtype;
} granularity;

static const granularity granularities[] = {
    {0, 0, 1, SACCADE_F32}, {0, 0, 0, SACCADE_F16}, {1, 0, 0, SACCADE_F32},
    {0, 1, 0, SACCADE_F32}, {8, 4, 0, SACCADE_F16}, {16, 7, 1, SACCADE_F32},
};
enum { GRANULARITIES = sizeof granularities / sizeof *granularities };

/* A quantised K or V [B, Hkv, KV, dim]. */
typedef struct codes {
    saccade_tensor codes, scale;
    void *memory[2];
} codes;

static float noise(uint64_t *seed)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        *seed = *seed * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(*seed >> 40) * 0x1p-24f - 0.5f;
    }
    return 1.7f * sum;
}

static void *filled(size_t bytes, int value)
{
    void *memory = malloc(bytes);
    assert_non_null(memory);
    memset(memory, value, bytes);
    return memory;
}

/* Rows are `gap` elements apart from each other; what lies between is NaN in fp8. */
static codes codes_make(saccade_dtype dtype, const granularity *g, const int64_t shape[4],
                        int gap, uint64_t seed)
{
    saccade_error err = {0};
    codes c;
    const int64_t n = shape[0] * shape[1] * shape[2] * shape[3];
    const int64_t scales[4] = {g->is_shared ? 1 : shape[0], g->is_shared ? 1 : shape[1],
                               g->tokens ? (shape[2] + g->tokens - 1) / g->tokens : 1,
                               g->channels ? (shape[3] + g->channels - 1) / g->channels : 1};
    float *x = filled((size_t)n * sizeof *x, 0);
    for (int64_t i = 0; i < n; i++)
        x[i] = noise(&seed) * (i % shape[3] == 3 ? 5 : 1); /* a channel that stands out */
    const saccade_tensor from = saccade_tensor_of(x, SACCADE_F32, 4, shape);
    int64_t wide[4] = {shape[0], shape[1], shape[2], (shape[3] + gap + 1) / 2 * 2};
    const size_t bytes = (size_t)(shape[0] * shape[1] * shape[2] * wide[3]);
    c.memory[0] = filled(bytes, 0x7f);
    c.memory[1] = filled((size_t)(scales[0] * scales[1] * scales[2] * scales[3]) * 4, 0xff);
    c.codes = saccade_tensor_of(c.memory[0], dtype, 4, wide);
    c.codes.shape[3] = shape[3];
    c.scale = saccade_tensor_of(c.memory[1], g->dtype, 4, scales);
    const saccade_quantize_args a = {.size = sizeof a,
                                     .from = &from,
                                     .to = &c.codes,
                                     .scale = &c.scale,
                                     .tokens = g->tokens,
                                     .channels = g->channels};
    assert_int_equal(saccade_quantize(NULL, &a, &err), SACCADE_OK);
    free(x);
    return c;
}

static void codes_free(codes *c)
{
    free(c->memory[0]);
    free(c->memory[1]);
}

/* ---- a problem ---- */

typedef struct quantised_case {
    saccade_sizes sizes;
    saccade_dtype dtype, kv_dtype;
    granularity g;
    int gap;
    const char *mask;
    int32_t page; /* 0: in one piece */
} quantised_case;

typedef struct quantised_run {
    const quantised_case *c;
    codes k, v;
    saccade_tensor q, table, length;
    saccade_mod *mask;
    float *wide, *gold, *plain, *out;
    void *narrow;
    int32_t *entries, lengths[8];
} quantised_run;

static int64_t q_elements(const saccade_sizes *s)
{
    return s->B * s->H * s->Q * s->D;
}

static int64_t out_elements(const saccade_sizes *s)
{
    return s->B * s->H * s->Q * s->Dv;
}

/* out: f32, of what the back end makes of Q in this dtype. */
static void attend(const quantised_run *r, const char *backend, const char *level,
                   saccade_dtype dtype, float *out)
{
    const quantised_case *c = r->c;
    const saccade_sizes *s = &c->sizes;
    const int64_t o[4] = {s->B, s->H, s->Q, s->Dv};
    saccade_error err = {0};
    saccade_context *context;
    saccade_plan *plan = NULL;
    saccade_problem p;
    saccade_forward_args a;
    const saccade_context_options options = {
        .size = sizeof options, .threads = 2, .level = level};
    saccade_problem_init(&p);
    p.sizes = *s;
    p.dtype = dtype;
    p.out_dtype = SACCADE_F32;
    p.kv_dtype = c->kv_dtype;
    p.backend = backend;
    p.mask = r->mask;
    p.page = c->page;
    p.k_scale_tokens = p.v_scale_tokens = c->g.tokens;
    p.k_scale_channels = p.v_scale_channels = c->g.channels;
    if (saccade_context_create(&options, &context, &err) != SACCADE_OK
        || saccade_plan_create(context, &p, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    saccade_tensor q = r->q, result = saccade_tensor_of(out, SACCADE_F32, 4, o);
    if (dtype == SACCADE_F32) {
        q.data = r->wide;
        q.dtype = SACCADE_F32;
    }
    saccade_pages pages;
    saccade_pages_init(&pages);
    pages.table = &r->table;
    saccade_positions at;
    saccade_positions_init(&at);
    at.kv_len = &r->length;
    saccade_forward_args_init(&a);
    a.q = &q;
    a.k = &r->k.codes;
    a.v = &r->v.codes;
    a.k_scale = &r->k.scale;
    a.v_scale = &r->v.scale;
    a.out = &result;
    a.pages = c->page ? &pages : NULL;
    a.positions = c->page ? &at : NULL;
    a.workspace_bytes = (saccade_plan_workspace(plan, s) + 63) / 64 * 64;
    a.workspace = aligned_alloc(64, a.workspace_bytes);
    if (saccade_forward(plan, &a, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    free(a.workspace);
    saccade_plan_destroy(plan);
    saccade_context_destroy(context);
}

/* Pages in the pool in an order of no order, two more of them than are used; lengths differ. */
static void make_pages(quantised_run *r)
{
    const saccade_sizes *s = &r->c->sizes;
    const int64_t each = s->KV / r->c->page, shape[2] = {s->B, each};
    r->entries = filled((size_t)(s->B * each) * sizeof *r->entries, 0);
    for (int64_t i = 0; i < s->B * each; i++)
        r->entries[i] = (int32_t)((i * 7 + 3) % (s->B * each + 2));
    for (int64_t b = 0; b < s->B; b++)
        r->lengths[b] = (int32_t)(s->KV - 5 * b);
    r->table = saccade_tensor_of(r->entries, SACCADE_I32, 2, shape);
    r->length = saccade_tensor_of(r->lengths, SACCADE_I32, 1, shape);
}

static quantised_run make(const quantised_case *c, uint64_t seed)
{
    const saccade_sizes *s = &c->sizes;
    const int64_t q[4] = {s->B, s->H, s->Q, s->D};
    int64_t k[4] = {s->B, s->Hkv, s->KV, s->D};
    quantised_run r = {.c = c};
    r.mask = c->mask ? case_mod(SACCADE_MASK, c->mask) : NULL;
    if (c->page) {
        make_pages(&r);
        k[0] = s->B * (s->KV / c->page) + 2;
        k[2] = c->page;
    }
    r.k = codes_make(c->kv_dtype, &c->g, k, c->gap, seed);
    k[3] = s->Dv;
    r.v = codes_make(c->kv_dtype, &c->g, k, c->gap, seed + 1);
    const size_t n = (size_t)q_elements(s), m = (size_t)out_elements(s);
    r.wide = filled(n * sizeof *r.wide, 0);
    r.narrow = filled(n * 2, 0);
    r.gold = filled(3 * m * sizeof *r.gold, 0xff);
    r.plain = r.gold + m;
    r.out = r.plain + m;
    for (size_t i = 0; i < n; i++)
        r.wide[i] = noise(&seed);
    if (c->dtype != SACCADE_F32) {
        convert_from_f32(c->dtype, r.wide, r.narrow, (int64_t)n);
        convert_to_f32(c->dtype, r.narrow, r.wide, (int64_t)n);
    }
    r.q = saccade_tensor_of(r.narrow, c->dtype, 4, q);
    attend(&r, "ref", NULL, SACCADE_F32, r.gold);
    attend(&r, "plain", NULL, c->dtype, r.plain);
    return r;
}

static void drop(quantised_run *r)
{
    codes_free(&r->k);
    codes_free(&r->v);
    saccade_mod_destroy(r->mask);
    free(r->entries);
    free(r->wide);
    free(r->narrow);
    free(r->gold);
}

static void check(const quantised_case *c, uint64_t seed)
{
    quantised_run r = make(c, seed);
    const int64_t n = out_elements(&c->sizes);
    double plain = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        plain = fmax(plain, fabs((double)r.plain[i] - (double)r.gold[i]));
        most = fmax(most, fabs((double)r.gold[i]));
    }
    const int bits = c->dtype == SACCADE_BF16 ? 8 : c->dtype == SACCADE_F16 ? 11 : 24;
    const double bound = 2 * plain + 2 * ldexp(1, ilogb(most) - bits + 1);
    for (const char *const *level = case_levels(); *level; level++) {
        attend(&r, "cpu", *level, c->dtype, r.out);
        for (int64_t i = 0; i < n; i++)
            if (!(fabs((double)r.out[i] - (double)r.gold[i]) <= bound)) /* NaN too */
                fail_msg("%s, %s, q %s, d%lld, groups %d x %d, page %d, out[%lld]: got %.9g, "
                         "expected %.9g within %.3g",
                         *level, saccade_dtype_name(c->kv_dtype), saccade_dtype_name(c->dtype),
                         (long long)c->sizes.D, c->g.tokens, c->g.channels, c->page,
                         (long long)i, (double)r.out[i], (double)r.gold[i], bound);
    }
    drop(&r);
}

static const saccade_dtype kv_dtypes[] = {SACCADE_E4M3, SACCADE_E5M2, SACCADE_I8, SACCADE_I4};

static void check_all(const saccade_sizes *sizes, const char *mask, int32_t page, int step)
{
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16, SACCADE_F16};
    for (int i = 0; i < 4 * GRANULARITIES; i += step) {
        const quantised_case c = {.sizes = *sizes,
                                  .dtype = dtypes[i % 3],
                                  .kv_dtype = kv_dtypes[i / GRANULARITIES],
                                  .g = granularities[i % GRANULARITIES],
                                  .gap = i % 2 ? 6 : 0,
                                  .mask = mask,
                                  .page = page};
        check(&c, (uint64_t)i + 1);
    }
}

static int step_of(int step)
{
    return getenv("SACCADE_TEST_EMULATED") ? 5 * step : step;
}

static void decode(void **state)
{
    (void)state;
    const saccade_sizes s = {2, 8, 2, 1, 301, 64, 64};
    check_all(&s, NULL, 0, step_of(1));
}

static void decode_of_odd_dims(void **state)
{
    (void)state;
    const saccade_sizes s = {2, 6, 2, 3, 133, 35, 21};
    check_all(&s, "kv != 7", 0, step_of(1));
}

static void prefill(void **state)
{
    (void)state;
    const saccade_sizes s = {1, 2, 1, 130, 290, 32, 48};
    check_all(&s, "causal()", 0, step_of(1));
}

static void decode_in_pages(void **state)
{
    (void)state;
    const saccade_sizes s = {2, 4, 2, 1, 288, 32, 32};
    check_all(&s, NULL, 16, step_of(1));
}

static void prefill_in_pages(void **state)
{
    (void)state;
    const saccade_sizes s = {2, 2, 1, 100, 160, 40, 24};
    check_all(&s, "causal()", 16, step_of(2));
}

/* MLA's shape: K of 576 dims, V the first 512 of them. */
static void wide_heads(void **state)
{
    (void)state;
    const saccade_sizes s = {1, 16, 1, 1, 270, 576, 512};
    check_all(&s, NULL, 0, step_of(5));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode),          cmocka_unit_test(decode_of_odd_dims),
        cmocka_unit_test(prefill),         cmocka_unit_test(decode_in_pages),
        cmocka_unit_test(prefill_in_pages), cmocka_unit_test(wide_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
