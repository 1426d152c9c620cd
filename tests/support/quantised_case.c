/* See quantised_case.h. */
#include "support/quantised_case.h"

#include "base/convert.h"
#include "base/quantize.h"
#include "cpu/cpu.h"
#include "support/forward_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const granularity granularities[GRANULARITIES] = {
    {0, 0, 1, SACCADE_F32}, {0, 0, 0, SACCADE_F16}, {1, 0, 0, SACCADE_F32},
    {0, 1, 0, SACCADE_F32}, {8, 4, 0, SACCADE_F16}, {16, 7, 1, SACCADE_F32},
};

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

/* Of rows with scales of their own some are far larger: blocks of keys have even scales, and
 * uneven ones. */
static float size_of_row(const granularity *g, int64_t row)
{
    return g->tokens != 1 ? 1.0f : row % 67 == 5 ? 300.0f : row % 5 == 2 ? 0.25f : 1.0f;
}

/* Rows are `gap` elements apart from each other; what lies between is NaN in fp8. */
static codes codes_make(saccade_dtype dtype, const granularity *g, const int64_t shape[4],
                        int gap, int is_uneven, uint64_t seed)
{
    saccade_error err = {0};
    codes c;
    const int64_t n = shape[0] * shape[1] * shape[2] * shape[3];
    const int64_t scales[4] = {g->is_shared ? 1 : shape[0], g->is_shared ? 1 : shape[1],
                               g->tokens ? (shape[2] + g->tokens - 1) / g->tokens : 1,
                               g->channels ? (shape[3] + g->channels - 1) / g->channels : 1};
    float *x = filled((size_t)n * sizeof *x, 0);
    for (int64_t i = 0; i < n; i++)
        x[i] = noise(&seed) * (i % shape[3] == 3 ? 5 : 1) /* a channel that stands out */
               * (is_uneven ? size_of_row(g, i / shape[3]) : 1);
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

/* A copy of a tensor on device 0, whose elements end with `bytes`. */
static saccade_tensor on_device(const saccade_tensor *t, size_t bytes)
{
    saccade_error err = {0};
    saccade_tensor copy = *t;
    copy.device = (saccade_device){SACCADE_CUDA, 0};
    if (saccade_device_alloc(0, bytes, &copy.data, &err) != SACCADE_OK
        || saccade_device_copy(0, copy.data, t->data, bytes, &err) != SACCADE_OK)
        fail_msg("%s", err.message);
    return copy;
}

static size_t bytes_of(const saccade_tensor *t)
{
    const int64_t n = t->shape[0] * t->stride[0];
    return (size_t)quant_bytes(t->dtype, n);
}

/* Tables and lengths of a run moved to device 0. */
typedef struct placed_pages {
    saccade_tensor table, length;
    saccade_pages pages;
    saccade_positions at;
} placed_pages;

static void place_pages(saccade_forward_args *a, placed_pages *x)
{
    if (!a->pages)
        return;
    x->pages = *a->pages;
    x->at = *a->positions;
    x->table = on_device(a->pages->table, bytes_of(a->pages->table));
    x->length = on_device(a->positions->kv_len, bytes_of(a->positions->kv_len));
    x->pages.table = &x->table;
    x->at.kv_len = &x->length;
    a->pages = &x->pages;
    a->positions = &x->at;
}

/* A run whose tensors are moved to device 0 and back. */
static saccade_status forward_there(const saccade_plan *plan, const saccade_forward_args *args,
                                    saccade_error *err)
{
    saccade_tensor t[5];
    saccade_forward_args own = *args, *a = &own;
    const saccade_tensor **place[5] = {&a->q, &a->k, &a->v, &a->k_scale, &a->v_scale};
    const saccade_tensor *out = a->out;
    const int is_paged = a->pages != NULL;
    placed_pages there;
    const size_t out_bytes = bytes_of(out);
    saccade_tensor result = on_device(out, out_bytes);
    for (int i = 0; i < 5; i++) {
        t[i] = on_device(*place[i], bytes_of(*place[i]));
        *place[i] = &t[i];
    }
    place_pages(a, &there);
    saccade_status status = saccade_device_alloc(0, a->workspace_bytes, &a->workspace, err);
    a->out = &result;
    if (status == SACCADE_OK)
        status = saccade_forward(plan, a, err);
    if (status == SACCADE_OK)
        status = saccade_device_synchronize(0, err);
    if (status == SACCADE_OK)
        status = saccade_device_copy(0, out->data, result.data, out_bytes, err);
    for (int i = 0; i < 5; i++)
        saccade_device_free(0, t[i].data);
    if (is_paged) {
        saccade_device_free(0, there.table.data);
        saccade_device_free(0, there.length.data);
    }
    saccade_device_free(0, result.data);
    saccade_device_free(0, a->workspace);
    return status;
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
    const int is_tiles = strcmp(backend, "tiles") == 0;
    p.backend = is_tiles ? "cpu" : backend;
    p.mask = r->mask;
    p.page = c->page;
    p.k_scale_tokens = p.v_scale_tokens = c->g.tokens;
    p.k_scale_channels = p.v_scale_channels = c->g.channels;
    if (saccade_context_create(&options, &context, &err) != SACCADE_OK
        || saccade_plan_create(context, &p, &plan, &err) != SACCADE_OK)
        fail_msg("%s: %s", err.where, err.message);
    if (is_tiles) /* what runs on AMX, whose tiles are emulated */
        ((cpu_state *)plan->state)->needs.kernels = &cpu_bf16_tiles_portable;
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
    saccade_tensor length = r->length;
    length.data = (void *)(uintptr_t)r->lengths; /* r has moved since it was made */
    at.kv_len = &length;
    saccade_forward_args_init(&a);
    a.q = &q;
    a.k = &r->k.codes;
    a.v = &r->v.codes;
    a.k_scale = &r->k.scale;
    a.v_scale = &r->v.scale;
    a.out = &result;
    a.pages = c->page ? &pages : NULL;
    a.positions = c->page ? &at : NULL;
    a.workspace_bytes = saccade_plan_workspace(plan, s) / 64 * 64 + 64;
    a.workspace = aligned_alloc(64, a.workspace_bytes);
    const int is_cuda = strcmp(backend, "cuda") == 0;
    if ((is_cuda ? forward_there : saccade_forward)(plan, &a, &err) != SACCADE_OK)
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
    r.k = codes_make(c->kv_dtype, &c->g, k, c->gap, 0, seed);
    k[3] = s->Dv;
    r.v = codes_make(c->kv_dtype, &c->g, k, c->gap, 1, seed + 1);
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

static void compare(const quantised_run *r, const char *backend, const char *level,
                    double bound)
{
    const quantised_case *c = r->c;
    const int64_t n = out_elements(&c->sizes);
    attend(r, backend, level, c->dtype, r->out);
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)r->out[i] - (double)r->gold[i]) <= bound)) /* NaN too */
            fail_msg("%s %s, %s, q %s, d%lld, groups %d x %d, page %d, out[%lld]: got %.9g, "
                     "expected %.9g within %.3g",
                     backend, level, saccade_dtype_name(c->kv_dtype),
                     saccade_dtype_name(c->dtype), (long long)c->sizes.D, c->g.tokens,
                     c->g.channels, c->page, (long long)i, (double)r->out[i],
                     (double)r->gold[i], bound);
}

void quantised_check(const char *backend, const quantised_case *c, uint64_t seed)
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
    static const char *const one[] = {"portable", NULL};
    const int is_cpu = strcmp(backend, "cpu") == 0;
    for (const char *const *level = is_cpu ? case_levels() : one; *level; level++)
        compare(&r, backend, *level, bound);
    if (is_cpu && c->dtype == SACCADE_BF16)
        compare(&r, "tiles", "portable", bound);
    drop(&r);
}

void quantised_cases(const char *backend, const saccade_sizes *sizes, saccade_dtype dtype,
                     const char *mask, int32_t page, int step)
{
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16, SACCADE_F16};
    static const saccade_dtype kv[] = {SACCADE_E4M3, SACCADE_E5M2, SACCADE_I8, SACCADE_I4};
    for (int i = 0; i < 4 * GRANULARITIES; i += step) {
        const quantised_case c = {.sizes = *sizes,
                                  .dtype = dtype ? dtype : dtypes[i % 3],
                                  .kv_dtype = kv[i / GRANULARITIES],
                                  .g = granularities[i % GRANULARITIES],
                                  .gap = i % 4 == 1 ? 6 : 0,
                                  .mask = mask,
                                  .page = page};
        quantised_check(backend, &c, (uint64_t)i + 1);
    }
}
