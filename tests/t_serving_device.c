/* Pages, ragged sequences, quantised keys, sinks and mods together on a CUDA device: random
 * problems against float64 over the same tensors, within twice what plain attention is off and
 * what rounding the result costs. Unequal queries mix prefill and decode. SACCADE_CUDA_CASES
 * and SACCADE_CUDA_SEED: how many cases, and which. */
#include "support/device_case.h"

#include "base/convert.h"
#include "base/quantize.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST_B = 16, MOST_MEMORY = 64 };

/* A problem and its tensors on the host; tensors without data are absent. */
typedef struct serving_case {
    saccade_sizes s; /* Q and KV: the longest */
    saccade_dtype dtype, kv_dtype;
    const char *mask, *score;
    int32_t tokens, channels, page;
    int has_ragged_q, has_ragged_kv, is_end, has_sinks;
    int32_t q_first[MOST_B + 1], kv_first[MOST_B + 1], length[MOST_B];
    saccade_tensor q, k, v, k_scale, v_scale, sinks, table;
    saccade_tensor wide_q, wide_k, wide_v; /* f32 of the same values */
    void *memory[MOST_MEMORY];
    int n_memory;
} serving_case;

static uint64_t rng;

static uint32_t draw(uint32_t n)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng >> 33) % n;
}

static float noise(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)draw(1 << 20) * 0x1p-20f - 0.5f;
    return 1.7f * sum;
}

static void *room(serving_case *c, size_t bytes)
{
    void *memory = malloc(bytes + 64);
    assert_true(memory && c->n_memory < MOST_MEMORY);
    memset(memory, 0, bytes + 64);
    return c->memory[c->n_memory++] = memory;
}

/* ---- a random problem ---- */

/* A random f32 tensor and the same rounded to a dtype; the f32 one then holds what it holds. */
static void make_pair(serving_case *c, saccade_dtype dtype, const int64_t *shape,
                      saccade_tensor *wide, saccade_tensor *narrow)
{
    const int64_t n = shape[0] * shape[1] * shape[2] * shape[3];
    float *x = room(c, (size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = noise();
    *wide = *narrow = saccade_tensor_of(x, SACCADE_F32, 4, shape);
    if (dtype == SACCADE_F32)
        return;
    void *y = room(c, (size_t)n * 2);
    convert_from_f32(dtype, x, y, n);
    convert_to_f32(dtype, y, x, n);
    *narrow = saccade_tensor_of(y, dtype, 4, shape);
}

static void make_codes(serving_case *c, const int64_t *shape, saccade_tensor *codes,
                       saccade_tensor *scale)
{
    saccade_error err = {0};
    saccade_tensor wide, same;
    const int64_t scales[4] = {shape[0], shape[1],
                               c->tokens ? (shape[2] + c->tokens - 1) / c->tokens : 1,
                               c->channels ? (shape[3] + c->channels - 1) / c->channels : 1};
    make_pair(c, SACCADE_F32, shape, &wide, &same);
    *codes = saccade_tensor_of(room(c, (size_t)(shape[0] * shape[1] * shape[2] * shape[3])),
                               c->kv_dtype, 4, shape);
    *scale =
        saccade_tensor_of(room(c, (size_t)(scales[0] * scales[1] * scales[2] * scales[3]) * 4),
                          draw(2) ? SACCADE_F32 : SACCADE_F16, 4, scales);
    const saccade_quantize_args a = {.size = sizeof a,
                                     .from = &wide,
                                     .to = codes,
                                     .scale = scale,
                                     .tokens = c->tokens,
                                     .channels = c->channels};
    assert_int_equal(saccade_quantize(NULL, &a, &err), SACCADE_OK);
}

/* Entries of keys before a length; what lies behind leads nowhere. */
static void make_table(serving_case *c, int64_t each, int64_t pages)
{
    int32_t *entries = room(c, (size_t)(c->s.B * each) * sizeof *entries);
    const int64_t shape[2] = {c->s.B, each};
    for (int64_t b = 0; b < c->s.B; b++)
        for (int64_t i = 0; i < each; i++)
            entries[b * each + i] =
                i * c->page < c->length[b] ? (int32_t)draw((uint32_t)pages) : INT32_MAX;
    c->table = saccade_tensor_of(entries, SACCADE_I32, 2, shape);
}

/* [1, heads, T, dim] of tensors [T, heads, dim] becomes that, as ragged runs take it. */
static void as_rows(saccade_tensor *t)
{
    const saccade_tensor x = *t;
    t->rank = 3;
    for (int d = 0; d < 3; d++) {
        static const int from[3] = {2, 1, 3};
        t->shape[d] = x.shape[from[d]];
        t->stride[d] = x.stride[from[d]];
    }
}

static void make_keys(serving_case *c)
{
    const saccade_sizes *s = &c->s;
    const int64_t each = c->page ? (s->KV + c->page - 1) / c->page : 0, pages = s->B * each + 3;
    int64_t k[4] = {s->B, s->Hkv, s->KV, s->D};
    if (c->page) {
        k[0] = pages;
        k[2] = c->page;
        make_table(c, each, pages);
    } else if (c->has_ragged_kv) {
        k[0] = 1;
        k[2] = c->kv_first[s->B] + 1;
    }
    const int64_t v[4] = {k[0], k[1], k[2], s->Dv};
    if (c->kv_dtype) {
        make_codes(c, k, &c->k, &c->k_scale);
        make_codes(c, v, &c->v, &c->v_scale);
        c->wide_k = c->k;
        c->wide_v = c->v;
    } else {
        make_pair(c, c->dtype, k, &c->wide_k, &c->k);
        make_pair(c, c->dtype, v, &c->wide_v, &c->v);
    }
    if (s->D > 256 && !c->kv_dtype && draw(4)) { /* values are columns of their keys */
        c->v = c->k;
        c->wide_v = c->wide_k;
        c->v.shape[3] = c->wide_v.shape[3] = s->Dv;
    }
    if (c->has_ragged_kv) {
        as_rows(&c->k);
        as_rows(&c->v);
        as_rows(&c->wide_k);
        as_rows(&c->wide_v);
    }
}

/* Lengths of queries: none, one, few, or a prompt. */
static int32_t random_queries(void)
{
    const uint32_t kind = draw(8);
    return kind == 0 ? 0 : kind < 4 ? 1 : kind < 7 ? 1 + (int32_t)draw(20) : (int32_t)draw(90);
}

static void make_lengths(serving_case *c)
{
    saccade_sizes *s = &c->s;
    s->Q = c->has_ragged_q ? 1 : 1 + draw(draw(3) ? 6 : 60);
    s->KV = 1;
    for (int64_t b = 0; b < s->B; b++) {
        const int32_t q = c->has_ragged_q ? random_queries() : (int32_t)s->Q;
        const int32_t kv = (int32_t)draw(draw(6) ? 200 : 900);
        c->q_first[b + 1] = c->q_first[b] + q;
        c->kv_first[b + 1] = c->kv_first[b] + kv;
        c->length[b] = kv;
        s->Q = q > s->Q ? q : s->Q;
        s->KV = kv > s->KV ? kv : s->KV;
    }
}

static void make_case(serving_case *c, uint64_t seed)
{
    static const char *const masks[] = {NULL, NULL, "causal()", "kv % 7 != 3",
                                        "q - kv < 90 && kv <= q"};
    static const char *const scores[] = {NULL, NULL, "alibi()", "softcap(20)"};
    static const saccade_dtype dtypes[] = {SACCADE_BF16, SACCADE_BF16, SACCADE_F16,
                                           SACCADE_F32};
    static const saccade_dtype codes[] = {SACCADE_E4M3, SACCADE_E5M2, SACCADE_I8, SACCADE_I4};
    static const int32_t sizes[] = {1, 3, 16, 48, 128}, dims[] = {64, 128, 128, 96, 40, 256};
    *c = (serving_case){.n_memory = 0};
    rng = seed * 0x9e3779b97f4a7c15u + 1;
    saccade_sizes *s = &c->s;
    s->B = draw(6) ? 1 + draw(6) : MOST_B;
    s->Hkv = 1 + draw(2);
    s->H = s->Hkv * (1 << draw(4) % 3);
    s->D = dims[draw(6)];
    s->Dv = draw(3) ? s->D : dims[draw(5)];
    c->dtype = dtypes[draw(4)];
    if (seed % 6 == 0) { /* heads wider than 256, which f32 has not on a device */
        s->D = seed % 12 ? 576 : 320;
        s->Dv = seed % 12 ? 512 : 64;
        c->dtype = c->dtype == SACCADE_F32 ? SACCADE_BF16 : c->dtype;
    }
    c->page = draw(3) ? sizes[draw(5)] : 0;
    c->has_ragged_q = draw(2);
    c->has_ragged_kv = !c->page && draw(2);
    c->is_end = draw(2);
    c->has_sinks = draw(3) == 0;
    c->mask = masks[draw(5)];
    c->score = scores[draw(4)];
    c->kv_dtype = draw(2) ? codes[draw(4)] : SACCADE_NONE;
    const int is_simple = c->has_ragged_q || c->has_ragged_kv; /* one scale a row, or for all */
    if (c->kv_dtype) {
        c->tokens = (int32_t)draw(2) * (is_simple ? 1 : 1 + 7 * (int32_t)draw(2));
        c->channels = draw(3) ? 0 : 1 + (int32_t)draw(40);
    }
    make_lengths(c);
    const int64_t q[4] = {c->has_ragged_q ? 1 : s->B, s->H,
                          c->has_ragged_q ? c->q_first[s->B] + 1 : s->Q, s->D};
    make_pair(c, c->dtype, q, &c->wide_q, &c->q);
    make_keys(c);
    if (c->has_ragged_q) {
        as_rows(&c->q);
        as_rows(&c->wide_q);
    }
    float *sinks = room(c, (size_t)s->H * sizeof *sinks);
    for (int64_t h = 0; h < s->H; h++)
        sinks[h] = noise() * 3;
    c->sinks = saccade_tensor_of(sinks, SACCADE_F32, 1, &s->H);
}

static void drop(serving_case *c)
{
    for (int i = 0; i < c->n_memory; i++)
        free(c->memory[i]);
}

/* ---- a run ---- */

/* What lies on the device while a run does. */
typedef struct there {
    int is_on;
    saccade_tensor t[16];
    const void *from[16]; /* where it lies on the host; NULL: what another owns */
    int n;
} there;

static size_t extent(const saccade_tensor *t)
{
    int64_t last = 0;
    for (int32_t d = 0; d < t->rank; d++)
        last += (t->shape[d] - 1) * t->stride[d];
    return (size_t)quant_bytes(t->dtype, last + 2) + 1;
}

/* What tensors share in memory they share there. */
static const saccade_tensor *placed(there *x, const saccade_tensor *t)
{
    saccade_error err;
    if (!t->data)
        return NULL;
    saccade_tensor *copy = &x->t[x->n];
    x->from[x->n++] = t->data;
    *copy = *t;
    if (!x->is_on)
        return copy;
    copy->device = (saccade_device){SACCADE_CUDA, 0};
    for (int i = 0; i < x->n - 1; i++)
        if (x->from[i] == t->data) {
            copy->data = x->t[i].data;
            x->from[x->n - 1] = NULL;
            return copy;
        }
    if (saccade_device_alloc(0, extent(t), &copy->data, &err)
        || saccade_device_copy(0, copy->data, t->data, extent(t), &err))
        fail_msg("%s", err.message);
    return copy;
}

static int64_t out_count(const serving_case *c)
{
    const int64_t rows = c->has_ragged_q ? c->q_first[c->s.B] + 1 : c->s.B * c->s.Q;
    return rows * c->s.H * c->s.Dv;
}

static saccade_plan *plan_of(const serving_case *c, const char *backend, saccade_dtype dtype,
                             saccade_mod *mask, saccade_mod *score)
{
    saccade_error err = {0};
    saccade_problem p;
    saccade_plan *plan = NULL;
    saccade_problem_init(&p);
    p.sizes = c->s;
    p.dtype = dtype;
    p.kv_dtype = c->kv_dtype;
    p.out_dtype = SACCADE_F32;
    p.backend = backend;
    p.mask = mask;
    p.score = score;
    p.page = c->page;
    p.ragged = c->has_ragged_q || c->has_ragged_kv;
    p.sinks_dtype = c->has_sinks ? SACCADE_F32 : SACCADE_NONE;
    p.k_scale_tokens = p.v_scale_tokens = c->tokens;
    p.k_scale_channels = p.v_scale_channels = c->channels;
    if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
        fail_msg("%s %s", err.where, err.message);
    return plan;
}

/* out: f32, 0 in rows of no sequence. */
static void attend(const serving_case *c, const char *backend, saccade_dtype dtype, float *out)
{
    const int64_t B = c->s.B, B1 = B + 1, rows = out_count(c) / c->s.H / c->s.Dv;
    const int64_t whole[4] = {B, c->s.H, c->s.Q, c->s.Dv}, flat[3] = {rows, c->s.H, c->s.Dv};
    const int is_wide = dtype != c->dtype;
    saccade_error err = {0};
    there x = {.is_on = strcmp(backend, "cuda") == 0};
    saccade_mod *mask = c->mask ? case_mod(SACCADE_MASK, c->mask) : NULL;
    saccade_mod *score = c->score ? case_mod(SACCADE_SCORE, c->score) : NULL;
    saccade_plan *plan = plan_of(c, backend, dtype, mask, score);
    saccade_positions at;
    saccade_pages pages;
    saccade_ragged ragged;
    saccade_forward_args a;
    memset(out, 0, (size_t)out_count(c) * sizeof *out);
    const saccade_tensor lengths = saccade_tensor_of((void *)c->length, SACCADE_I32, 1, &B);
    const saccade_tensor starts = saccade_tensor_of((void *)c->q_first, SACCADE_I32, 1, &B1);
    const saccade_tensor keys = saccade_tensor_of((void *)c->kv_first, SACCADE_I32, 1, &B1);
    const saccade_tensor host = saccade_tensor_of(out, SACCADE_F32, c->has_ragged_q ? 3 : 4,
                                                  c->has_ragged_q ? flat : whole);
    saccade_positions_init(&at);
    saccade_pages_init(&pages);
    saccade_ragged_init(&ragged);
    saccade_forward_args_init(&a);
    a.q = placed(&x, is_wide ? &c->wide_q : &c->q);
    a.k = placed(&x, is_wide ? &c->wide_k : &c->k);
    a.v = placed(&x, is_wide ? &c->wide_v : &c->v);
    a.k_scale = placed(&x, &c->k_scale);
    a.v_scale = placed(&x, &c->v_scale);
    a.out = placed(&x, &host);
    if (c->has_sinks)
        a.sinks = placed(&x, &c->sinks);
    if (!c->has_ragged_kv)
        at.kv_len = placed(&x, &lengths);
    pages.KV = c->s.KV;
    pages.table = placed(&x, &c->table);
    ragged.cu_seqlens_q = c->has_ragged_q ? placed(&x, &starts) : NULL;
    ragged.cu_seqlens_kv = c->has_ragged_kv ? placed(&x, &keys) : NULL;
    ragged.max_q = c->s.Q;
    ragged.max_kv = c->s.KV;
    ragged.align_end = c->is_end;
    a.positions = &at;
    a.pages = c->page ? &pages : NULL;
    a.ragged = c->has_ragged_q || c->has_ragged_kv ? &ragged : NULL;
    a.workspace_bytes = (saccade_plan_workspace(plan, &c->s) + 127) / 64 * 64;
    if (x.is_on)
        assert_int_equal(saccade_device_alloc(0, a.workspace_bytes, &a.workspace, &err), 0);
    else
        a.workspace = aligned_alloc(64, a.workspace_bytes);
    saccade_status status = saccade_forward(plan, &a, &err);
    if (status == SACCADE_OK && x.is_on)
        status = saccade_device_synchronize(0, &err);
    if (status == SACCADE_OK && x.is_on)
        status =
            saccade_device_copy(0, out, a.out->data, (size_t)out_count(c) * sizeof *out, &err);
    if (status != SACCADE_OK)
        fail_msg("%s: %s %s", backend, err.where, err.message);
    for (int i = 0; i < x.n && x.is_on; i++)
        if (x.from[i])
            saccade_device_free(0, x.t[i].data);
    if (x.is_on)
        saccade_device_free(0, a.workspace);
    else
        free(a.workspace);
    saccade_plan_destroy(plan);
    saccade_mod_destroy(mask);
    saccade_mod_destroy(score);
}

/* ---- the comparison ---- */

static void print_case(const serving_case *c, uint64_t seed)
{
    const saccade_sizes *s = &c->s;
    print_message("seed %llu: b%lld h%lld/%lld q%lld kv%lld d%lld dv%lld %s, keys %s %d x %d, "
                  "page %d, ragged %d %d end %d, sinks %d, mask %s, score %s\n",
                  (unsigned long long)seed, (long long)s->B, (long long)s->H, (long long)s->Hkv,
                  (long long)s->Q, (long long)s->KV, (long long)s->D, (long long)s->Dv,
                  saccade_dtype_name(c->dtype), saccade_dtype_name(c->kv_dtype), c->tokens,
                  c->channels, c->page, c->has_ragged_q, c->has_ragged_kv, c->is_end,
                  c->has_sinks, c->mask ? c->mask : "none", c->score ? c->score : "none");
}

static int holds(uint64_t seed, const char *backend)
{
    serving_case c;
    double plain = 0, most = 0, worst = 0;
    make_case(&c, seed);
    const int64_t n = out_count(&c);
    float *gold = room(&c, (size_t)n * 4), *same = room(&c, (size_t)n * 4);
    float *out = room(&c, (size_t)n * 4);
    attend(&c, "ref", SACCADE_F32, gold);
    attend(&c, "plain", c.dtype, same);
    attend(&c, backend, c.dtype, out);
    for (int64_t i = 0; i < n; i++) {
        plain = fmax(plain, fabs((double)same[i] - (double)gold[i]));
        most = fmax(most, fabs((double)gold[i]));
        const double off = fabs((double)out[i] - (double)gold[i]);
        worst = isnan(worst) || off <= worst ? worst : off; /* a NaN stays */
    }
    /* Where one key is live plain attention is exact. Products of f32 on tensor cores are not:
     * above head dim 64 an element of V has 11 bits in each of two parts, cut off. */
    const int bits = c.dtype == SACCADE_BF16 ? 8 : c.dtype == SACCADE_F16 ? 11 : 23;
    const double bound = 2 * plain + 2 * ldexp(1, ilogb(most + 1e-30) - bits + 1);
    const int is_good = worst <= bound;
    if (!is_good) {
        print_message("off by %.3g, %.3g allowed: ", worst, bound);
        print_case(&c, seed);
    }
    drop(&c);
    return is_good;
}

static void random_cases(void **state)
{
    const char *cases = getenv("SACCADE_CUDA_CASES"), *seed = getenv("SACCADE_CUDA_SEED");
    const int n = cases ? atoi(cases) : 30;
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (int i = 0; i < n; i++)
        n_bad += !holds((seed ? strtoull(seed, NULL, 10) : 1) + (uint64_t)i, "cuda");
    print_message("random_cases: %d\n", n);
    assert_int_equal(n_bad, 0);
}

/* The cases themselves, where there is no device: on the CPU. */
static void cases_are_sound(void **state)
{
    int n_bad = 0;
    (void)state;
    for (uint64_t i = 1; i <= 6; i++)
        n_bad += !holds(i, "cpu");
    assert_int_equal(n_bad, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cases_are_sound),
        cmocka_unit_test(random_cases),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
