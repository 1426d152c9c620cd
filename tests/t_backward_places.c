/* Gradients of elements that stand at several places: keys in chunks against the same keys in
 * one piece, bit for bit, at every level and by the oracle, where rows are shared too; and
 * dimensions of stride 0, whose gradient is the sum over them; elements that are read in no
 * order, summed in fixed point. */
#include "saccade.h"

#include "base/convert.h"
#include "cpu/forward/forward.h"
#include "plan/gradient_sums.h"
#include "support/chunk_case.h"
#include "support/short_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const uint32_t inputs = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;

static void *room_of(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    assert_non_null(memory);
    memset(memory, 0xff, (bytes + 64) / 64 * 64);
    return memory;
}

static int64_t count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++)
        n *= t->stride[d] ? t->shape[d] : 1;
    return n;
}

static saccade_tensor tensor_of(saccade_dtype dtype, int32_t rank, const int64_t *shape)
{
    saccade_tensor t = saccade_tensor_of(NULL, dtype, rank, shape);
    t.data = room_of((size_t)count(&t) * saccade_dtype_bytes(dtype));
    return t;
}

/* ---- a backward run, whatever forward left ---- */

typedef struct gradients {
    saccade_tensor d_out, lse, out, dq, dk, dv;
} gradients;

static float noise(int64_t n)
{
    return (float)((uint64_t)n * 2654435761u % 4096) / 2048 - 1;
}

static gradients gradients_of(const saccade_sizes *s, saccade_dtype dtype)
{
    const int64_t rows[4] = {s->B, s->H, s->Q, s->Dv}, q[4] = {s->B, s->H, s->Q, s->D};
    const int64_t k[4] = {s->B, s->Hkv, s->KV, s->D}, v[4] = {s->B, s->Hkv, s->KV, s->Dv};
    gradients g = {.d_out = tensor_of(dtype, 4, rows),
                   .out = tensor_of(dtype, 4, rows),
                   .lse = tensor_of(SACCADE_F32, 3, rows),
                   .dq = tensor_of(SACCADE_F32, 4, q),
                   .dk = tensor_of(SACCADE_F32, 4, k),
                   .dv = tensor_of(SACCADE_F32, 4, v)};
    const size_t each = saccade_dtype_bytes(dtype);
    for (int64_t i = 0; i < count(&g.d_out); i++) {
        const float x = noise(i);
        convert_from_f32(dtype, &x, (char *)g.d_out.data + (size_t)i * each, 1);
    }
    return g;
}

static void drop(gradients *g)
{
    saccade_tensor *all[] = {&g->d_out, &g->lse, &g->out, &g->dq, &g->dk, &g->dv};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++)
        free(all[n]->data);
}

static void run_plan(const case_run *r, const saccade_plan *plan, const saccade_tensor *k,
                     const saccade_tensor *v, const plan_chunks *chunks, gradients *g,
                     uint32_t added)
{
    saccade_error err = {0};
    plan_run run = {.sizes = r->sizes, .q = &r->q.t, .k = k, .v = v, .chunks = chunks};
    const plan_gradients wanted = {.d_out = &g->d_out,
                                   .dq = &g->dq,
                                   .dk = &g->dk,
                                   .dv = &g->dv,
                                   .added = added};
    run.out = &g->out;
    run.lse = &g->lse;
    eval_sizes(&r->sizes, run.score_env.size);
    eval_sizes(&r->sizes, run.mask_env.size);
    run.workspace = room_of(plan_workspace(plan, &r->sizes));
    if (plan->solver->forward(plan, &run, &err))
        fail_msg("%s", err.message);
    free(run.workspace);
    run.workspace_bytes = plan_backward_workspace(plan, &r->sizes, &wanted);
    run.workspace = room_of(run.workspace_bytes + 64);
    if (plan->solver->backward(plan, &run, &wanted, &err))
        fail_msg("%s", err.message);
    for (size_t n = 0; n < 64; n++)
        assert_int_equal(((unsigned char *)run.workspace)[run.workspace_bytes + n], 0xff);
    free(run.workspace);
}

/* ---- chunks ---- */

/* The row of a pool of so many that holds key j; -1: none. */
static int64_t row_of(const plan_chunks *c, int64_t b, int64_t j, int64_t rows)
{
    const int64_t shape[4] = {1, 1, rows, 1};
    saccade_tensor pool = saccade_tensor_of(NULL, SACCADE_F32, 4, shape);
    pool.stride[0] = 0;
    return plan_place_of(c, &pool, b, j).row;
}

/* The logical keys that the table's pool holds, in one piece. */
static saccade_tensor gathered(const saccade_tensor *pool, const plan_chunks *c, int64_t KV)
{
    const size_t each = (size_t)pool->shape[3] * saccade_dtype_bytes(pool->dtype);
    const int64_t shape[4] = {pool->shape[0], pool->shape[1], KV, pool->shape[3]};
    saccade_tensor t = tensor_of(pool->dtype, 4, shape);
    char *to = t.data;
    for (int64_t b = 0; b < shape[0]; b++)
        for (int64_t h = 0; h < shape[1]; h++)
            for (int64_t j = 0; j < KV; j++, to += each) {
                const int64_t row = row_of(c, b, j, pool->shape[2]);
                if (row < 0)
                    memset(to, 0, each);
                else
                    memcpy(to,
                           (const char *)pool->data
                               + (size_t)(h * pool->shape[2] + row) * each,
                           each);
            }
    return t;
}

/* What the pool's rows should get of the logical keys' gradients; most 0: exactly. */
static void check_pool(const saccade_tensor *each, const plan_chunks *c,
                       const saccade_tensor *pool, float start, double most, const char *what)
{
    const int64_t B = each->shape[0], H = each->shape[1], KV = each->shape[2];
    const int64_t rows = pool->shape[2], dim = pool->shape[3];
    double *sums = calloc((size_t)(H * rows * dim), sizeof *sums);
    assert_non_null(sums);
    for (int64_t h = 0; h < H; h++)
        for (int64_t b = 0; b < B; b++)
            for (int64_t j = 0; j < KV; j++) {
                const int64_t row = row_of(c, b, j, rows);
                const float *from = (const float *)each->data + ((b * H + h) * KV + j) * dim;
                for (int64_t d = 0; d < dim && row >= 0; d++)
                    sums[(h * rows + row) * dim + d] += (double)from[d];
            }
    for (int64_t i = 0; i < H * rows * dim; i++) {
        const float expected = (float)(sums[i] + (double)start);
        const double e = fabs((double)((const float *)pool->data)[i] - (double)expected);
        if (!(e <= most * (1 + fabs((double)expected))))
            fail_msg("%s, element %lld: got %.9g, expected %.9g", what, (long long)i,
                     (double)((const float *)pool->data)[i], (double)expected);
    }
    free(sums);
}

static saccade_tensor pool_like(const saccade_tensor *pool, float start)
{
    saccade_tensor t = *pool;
    t.dtype = SACCADE_F32;
    t.stride[0] = 0;
    t.data = room_of((size_t)count(&t) * sizeof(float));
    for (int64_t i = 0; i < count(&t); i++)
        ((float *)t.data)[i] = start;
    return t;
}

static saccade_plan *plan_at(const case_run *r, const char *level, int has_chunks)
{
    case_run mine = *r;
    mine.problem.gradients = inputs;
    mine.problem.backend = strcmp(level, "ref") ? "cpu" : "ref";
    saccade_plan *plan = case_plan(&mine, strcmp(level, "ref") ? level : "portable", 2);
    plan->problem.has_chunks = has_chunks;
    if (strcmp(level, "ref"))
        ((cpu_state *)plan->state)->needs.room_bytes = kv_room(&plan->problem, CPU_BLOCK_KEYS);
    return plan;
}

/* Numbers in rows that the table of `filled` does not name. */
static void fill_holes(const saccade_tensor *pool)
{
    const size_t each = saccade_dtype_bytes(pool->dtype);
    for (int64_t i = 0; i < count(pool); i++) {
        char *at = (char *)pool->data + (size_t)i * each;
        const float x = noise(i + 5);
        if (isnan(convert_element(pool->dtype, at)))
            convert_from_f32(pool->dtype, &x, at, 1);
    }
}

static void at_level(const case_run *r, const chunk_case *c, const plan_chunks *chunks,
                     const plan_chunks *filled, int64_t rows, const char *level)
{
    const saccade_tensor k_pool = chunk_pool(&r->k.t, filled, rows);
    const saccade_tensor v_pool = chunk_pool(&r->v.t, filled, rows);
    if (filled != chunks) {
        fill_holes(&k_pool);
        fill_holes(&v_pool);
    }
    const saccade_tensor k = gathered(&k_pool, chunks, r->sizes.KV);
    const saccade_tensor v = gathered(&v_pool, chunks, r->sizes.KV);
    saccade_plan *whole = plan_at(r, level, 0), *parts = plan_at(r, level, 1);
    gradients one = gradients_of(&r->sizes, r->dtype), two = gradients_of(&r->sizes, r->dtype);
    char what[160];
    run_plan(r, whole, &k, &v, NULL, &one, 0);
    for (int is_added = 0; is_added < 2; is_added++) {
        const float start = is_added ? 1 : 0;
        free(two.dk.data);
        free(two.dv.data);
        two.dk = pool_like(&k_pool, is_added ? 1 : 7);
        two.dv = pool_like(&v_pool, is_added ? 1 : 7);
        run_plan(r, parts, &k_pool, &v_pool, chunks, &two,
                 is_added ? SACCADE_GRADIENT_K | SACCADE_GRADIENT_V : 0);
        snprintf(what, sizeof what, "%s, chunks of %d at %s, added %d", c->problem, c->size,
                 level, is_added);
        assert_memory_equal(one.dq.data, two.dq.data, (size_t)count(&one.dq) * sizeof(float));
        /* The oracle's sums are of doubles that were not rounded. */
        const double most = strcmp(level, "ref") ? 0 : 0x1p-22;
        check_pool(&one.dk, chunks, &two.dk, start, most, what);
        check_pool(&one.dv, chunks, &two.dv, start, most, what);
    }
    drop(&one);
    drop(&two);
    saccade_plan_destroy(whole);
    saccade_plan_destroy(parts);
    free(k_pool.data);
    free(v_pool.data);
    free(k.data);
    free(v.data);
}

/* is_shared: entries of batches and of one batch name the same rows, two overlap, and one lies
 * past the pool's end in part. */
static void check(const chunk_case *c, int is_shared)
{
    const forward_case f = {
        .problem = c->problem, .mask = c->mask, .score = c->score, .seed = 7};
    int32_t table[CHUNK_MOST], other[CHUNK_MOST];
    plan_chunks chunks, first;
    int64_t rows;
    case_run r;
    case_make(&f, &r);
    chunk_table(c, &r.sizes, other, &first, &rows);
    chunk_table(c, &r.sizes, table, &chunks, &rows);
    if (is_shared) {
        assert_true(chunks.count >= 4 && r.sizes.B == 2);
        table[chunks.count] = table[0];
        table[2] = table[0];
        table[3] = table[1] + c->size / 2;
        table[chunks.count + 1] = (int32_t)rows - (c->size + 1) / 2;
    }
    for (const char *const *level = case_levels(); *level; level++)
        at_level(&r, c, &chunks, is_shared ? &first : &chunks, rows, *level);
    at_level(&r, c, &chunks, is_shared ? &first : &chunks, rows, "ref");
    case_free(&r);
}

static void test_chunks(void **state)
{
    static const char *const problems[] = {"b2 h4/2 q30 kv333 d40 dv24 f32",
                                           "b2 h2 q50 kv300 d64 bf16",
                                           "b2 h3/1 q20 kv290 d33 f16"};
    static const int32_t sizes[] = {1, 16, 50, 300};
    const size_t n_problems = is_short_run() ? 1 : 3;
    (void)state;
    for (size_t p = 0; p < n_problems; p++)
        for (size_t n = p % 2; n < sizeof sizes / sizeof *sizes; n += p ? 2 : 1) {
            const chunk_case c = {problems[p], n % 2 ? "kv <= q + 200" : NULL,
                                  n % 2 ? NULL : "alibi()", sizes[n], 0};
            check(&c, 0);
            if (sizes[n] < 100)
                check(&c, 1);
        }
    check(&(chunk_case){"b2 h2 q40 kv300 d32 f32", "kv >= 200", NULL, 16, 200}, 0);
}

/* ---- stride 0 ---- */

static saccade_plan *plan_of(const char *backend, const saccade_sizes *s, saccade_dtype dtype,
                             saccade_mod *score)
{
    static const char *const names[] = {"bias", "w"};
    saccade_error err = {0};
    saccade_plan *plan = NULL;
    saccade_problem p;
    saccade_problem_init(&p);
    p.sizes = *s;
    p.dtype = dtype;
    p.backend = backend;
    p.score = score;
    p.gradients = inputs | SACCADE_GRADIENT_CAPTURES;
    p.gradient_captures = names;
    p.n_gradient_captures = 2;
    if (saccade_plan_create(NULL, &p, &plan, &err))
        fail_msg("%s: %s", err.where, err.message);
    return plan;
}

static saccade_mod *bound_mod(saccade_dtype dtype)
{
    static const char text[] = "score * w + bias[h, q, kv]";
    const saccade_capture captures[] = {{"bias", dtype, 3}, {"w", dtype, 0}};
    saccade_mod *generic, *bound = NULL;
    saccade_error err = {0};
    assert_int_equal(saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &generic, &err), 0);
    if (saccade_mod_bind(generic, captures, 2, &bound, &err))
        fail_msg("%s", err.message);
    saccade_mod_destroy(generic);
    return bound;
}

typedef struct call {
    saccade_tensor q, k, v, out, lse, d_out, dq, dk, dv, bias, w, d_bias, d_w;
} call;

static saccade_tensor filled(saccade_dtype dtype, int32_t rank, const int64_t *shape, int salt)
{
    const saccade_tensor t = tensor_of(dtype, rank, shape);
    for (int64_t i = 0; i < count(&t); i++) {
        const float x = noise(i * 7 + salt * 1000 + 3);
        convert_from_f32(dtype, &x, (char *)t.data + (size_t)i * saccade_dtype_bytes(dtype), 1);
    }
    return t;
}

static const saccade_sizes sizes = {2, 4, 2, 37, 210, 70, 20};

static call call_of(saccade_dtype dtype)
{
    const saccade_sizes *s = &sizes;
    const int64_t q[4] = {s->B, s->H, s->Q, s->D}, k[4] = {s->B, s->Hkv, s->KV, s->D};
    const int64_t v[4] = {s->B, s->Hkv, s->KV, s->Dv}, o[4] = {s->B, s->H, s->Q, s->Dv};
    const int64_t bias[3] = {s->H, s->Q, s->KV};
    return (call){.q = filled(dtype, 4, q, 1),
                  .k = filled(dtype, 4, k, 2),
                  .v = filled(dtype, 4, v, 3),
                  .out = filled(dtype, 4, o, 4),
                  .lse = filled(SACCADE_F32, 3, o, 5),
                  .d_out = filled(dtype, 4, o, 6),
                  .dq = filled(dtype, 4, q, 7),
                  .dk = filled(dtype, 4, k, 8),
                  .dv = filled(dtype, 4, v, 9),
                  .bias = filled(dtype, 3, bias, 10),
                  .w = filled(dtype, 0, NULL, 11),
                  .d_bias = filled(dtype, 3, bias, 12),
                  .d_w = filled(dtype, 0, NULL, 13)};
}

static void drop_call(call *c)
{
    saccade_tensor *all[] = {&c->q,  &c->k,  &c->v,    &c->out, &c->lse,    &c->d_out, &c->dq,
                             &c->dk, &c->dv, &c->bias, &c->w,   &c->d_bias, &c->d_w};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++)
        free(all[n]->data);
}

static const uint32_t all_gradients =
    SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V | SACCADE_GRADIENT_CAPTURES;

static void run_call(const char *backend, saccade_dtype dtype, call *c, uint32_t added)
{
    saccade_error err = {0};
    saccade_mod *score = bound_mod(dtype);
    saccade_plan *plan = plan_of(backend, &sizes, dtype, score);
    const saccade_binding bindings[] = {{"bias", c->bias}, {"w", c->w}};
    const saccade_binding d_captures[] = {{"bias", c->d_bias}, {"w", c->d_w}};
    saccade_forward_args f;
    saccade_backward_args a;
    saccade_forward_args_init(&f);
    saccade_backward_args_init(&a);
    f.q = a.q = &c->q;
    f.k = a.k = &c->k;
    f.v = a.v = &c->v;
    f.out = a.out = &c->out;
    f.lse = a.lse = &c->lse;
    f.bindings = a.bindings = bindings;
    f.n_bindings = a.n_bindings = 2;
    f.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    f.workspace = room_of(f.workspace_bytes);
    assert_int_equal(saccade_forward(plan, &f, &err), SACCADE_OK);
    free(f.workspace);
    a.d_out = &c->d_out;
    a.d_q = &c->dq;
    a.d_k = &c->dk;
    a.d_v = &c->dv;
    a.d_captures = d_captures;
    a.n_d_captures = 2;
    a.accumulate = added;
    if (saccade_backward_workspace(plan, &a, &a.workspace_bytes, &err))
        fail_msg("%s: %s", err.where, err.message);
    a.workspace = room_of(a.workspace_bytes);
    if (saccade_backward(plan, &a, &err))
        fail_msg("%s: %s", err.where, err.message);
    if (a.workspace_bytes > saccade_plan_backward_workspace(plan, &sizes)) {
        a.workspace_bytes = saccade_plan_backward_workspace(plan, &sizes);
        assert_int_equal(saccade_backward(plan, &a, &err), SACCADE_EINVAL);
    }
    free(a.workspace);
    saccade_plan_destroy(plan);
    saccade_mod_destroy(score);
}

static double element(const saccade_tensor *t, const int64_t *at)
{
    int64_t place = 0;
    for (int32_t d = 0; d < t->rank; d++)
        place += at[d] * t->stride[d];
    return convert_element(t->dtype, (const char *)t->data
                                         + place * (int64_t)saccade_dtype_bytes(t->dtype));
}

/* `sum` holds what `each` gives summed over its dimensions of stride 0, and `start`. */
static void check_sum(const saccade_tensor *each, const saccade_tensor *sum, double start,
                      double eps, const char *what)
{
    int64_t n = 1;
    double *sums = calloc((size_t)count(sum), sizeof *sums), most = 0;
    assert_non_null(sums);
    for (int32_t d = 0; d < each->rank; d++)
        n *= each->shape[d];
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < n; i++) {
            int64_t at[8] = {0}, left = i, place = 0;
            for (int32_t d = each->rank - 1; d >= 0; d--) {
                at[d] = left % each->shape[d];
                left /= each->shape[d];
                place += at[d] * sum->stride[d];
            }
            if (!pass) {
                sums[place] += element(each, at);
                most = sums[place] * sums[place] > most ? sums[place] * sums[place] : most;
            } else {
                const double e = element(sum, at) - sums[place] - start;
                if (!(e * e <= eps * eps * (1 + start * start + most)))
                    fail_msg("%s, place %lld: got %.9g, expected %.9g", what, (long long)place,
                             element(sum, at), sums[place] + start);
            }
        }
    free(sums);
}

/* Row-major over the dimensions that `kept` has a bit for, stride 0 over the others. */
static void broadcast(saccade_tensor *t, int kept, float start)
{
    int64_t n = 1;
    for (int32_t d = t->rank - 1; d >= 0; d--) {
        t->stride[d] = kept >> d & 1 ? n : 0;
        n *= kept >> d & 1 ? t->shape[d] : 1;
    }
    for (int64_t i = 0; i < n; i++)
        convert_from_f32(t->dtype, &start,
                         (char *)t->data + (size_t)i * saccade_dtype_bytes(t->dtype), 1);
}

static void test_repeated(void **state)
{
    static const int kept[][4] = {/* dq, dk, dv, bias */
                                  {15, 15, 15, 7}, {14, 14, 14, 6}, {13, 13, 15, 5},
                                  {12, 12, 12, 3}, {11, 10, 15, 4}, {8, 15, 8, 0}};
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_BF16, SACCADE_F16};
    static const char *const backends[] = {"cpu", "ref"};
    (void)state;
    for (int t = 0; t < 3; t++)
        for (int back = 0; back < 2; back++) {
            call each = call_of(dtypes[t]);
            call wide = each; /* the same, its gradients in f32 */
            saccade_tensor *const in_f32[] = {&wide.dq, &wide.dk, &wide.dv, &wide.d_bias,
                                              &wide.d_w};
            for (int n = 0; n < 5; n++)
                *in_f32[n] = tensor_of(SACCADE_F32, in_f32[n]->rank, in_f32[n]->shape);
            run_call(backends[back], dtypes[t], &wide, 0);
            for (size_t n = 0; n < sizeof kept / sizeof *kept; n++) {
                const int is_added = n % 2 == 1;
                const double eps = t == 0 ? 1e-5 : t == 1 ? 0x1p-8 : 0x1p-10;
                const float start = is_added ? 3 : 77;
                char what[96];
                call some = each;
                broadcast(&some.dq, kept[n][0], start);
                broadcast(&some.dk, kept[n][1], start);
                broadcast(&some.dv, kept[n][2], start);
                broadcast(&some.d_bias, kept[n][3], start);
                broadcast(&some.d_w, 0, start);
                run_call(backends[back], dtypes[t], &some, is_added ? all_gradients : 0);
                snprintf(what, sizeof what, "%s %s case %d", backends[back],
                         saccade_dtype_name(dtypes[t]), (int)n);
                const double from = is_added ? 3 : 0;
                check_sum(&wide.dq, &some.dq, from, eps, what);
                check_sum(&wide.dk, &some.dk, from, eps, what);
                check_sum(&wide.dv, &some.dv, from, eps, what);
                check_sum(&wide.d_bias, &some.d_bias, from, eps, what);
                check_sum(&wide.d_w, &some.d_w, from, eps, what);
            }
            for (int n = 0; n < 5; n++)
                free(in_f32[n]->data);
            drop_call(&each);
        }
}

/* ---- places in no order ---- */

enum { PLACES = 701 };

typedef struct gather {
    float t[PLACES * 4], sums[PLACES * 4], w, d_w;
    int32_t idx[37 * 210];
    const char *mask, *weight; /* or NULL */
    int64_t seed[2];           /* of dropout */
} gather;

/* A mod without captures, or NULL. */
static saccade_mod *mod_of(saccade_kind kind, const char *text)
{
    saccade_mod *generic, *mod = NULL;
    saccade_error err = {0};
    if (!text)
        return NULL;
    assert_int_equal(saccade_mod_parse(kind, text, strlen(text), &generic, &err), 0);
    if (saccade_mod_bind(generic, NULL, 0, &mod, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return mod;
}

/* The gradient of t, by so many threads, with all the workspace that the run would like or the
 * least that it needs. */
static void run_gather(const char *backend, const char *text, saccade_dtype dtype,
                       int32_t threads, int is_least, const call *c, gather *g)
{
    saccade_capture captures[3];
    saccade_binding bindings[3];
    static const char *const names[] = {"t"};
    const int64_t idx[] = {sizes.Q, sizes.KV}, t[] = {sizes.H, PLACES};
    const saccade_binding all[] = {{"idx", saccade_tensor_of(g->idx, SACCADE_I32, 2, idx)},
                                   {"t", saccade_tensor_of(g->t, SACCADE_F32, 2, t)},
                                   {"w", saccade_tensor_of(&g->w, SACCADE_F32, 0, NULL)}};
    const saccade_binding sums = {"t", saccade_tensor_of(g->sums, SACCADE_F32, 2, t)};
    const saccade_context_options options = {.size = sizeof options, .threads = threads};
    const int64_t two[] = {2};
    const saccade_tensor seed = saccade_tensor_of(g->seed, SACCADE_I64, 1, two);
    saccade_mod *const mask = mod_of(SACCADE_MASK, g->mask);
    saccade_mod *const weight = mod_of(SACCADE_WEIGHT, g->weight);
    saccade_mod *generic, *score;
    saccade_context *context;
    saccade_plan *plan;
    saccade_error err = {0};
    saccade_problem p;
    saccade_backward_args a;
    assert_int_equal(saccade_mod_parse(SACCADE_SCORE, text, strlen(text), &generic, &err), 0);
    for (int32_t i = 0; i < saccade_mod_capture_count(generic); i++)
        for (int n = 0; n < 3; n++)
            if (strcmp(all[n].name, saccade_mod_capture(generic, i).name) == 0) {
                bindings[i] = all[n];
                captures[i] = (saccade_capture){all[n].name, all[n].tensor.dtype,
                                                all[n].tensor.rank};
            }
    if (saccade_mod_bind(generic, captures, saccade_mod_capture_count(generic), &score, &err))
        fail_msg("%s", err.message);
    saccade_problem_init(&p);
    p.sizes = sizes;
    p.dtype = dtype;
    p.backend = backend;
    p.score = score;
    p.mask = mask;
    p.weight = weight;
    p.gradients = SACCADE_GRADIENT_CAPTURES;
    p.gradient_captures = names;
    p.n_gradient_captures = 1;
    assert_int_equal(saccade_context_create(&options, &context, &err), 0);
    if (saccade_plan_create(context, &p, &plan, &err))
        fail_msg("%s", err.message);
    saccade_backward_args_init(&a);
    a.q = &c->q;
    a.k = &c->k;
    a.v = &c->v;
    a.out = &c->out;
    a.lse = &c->lse;
    a.d_out = &c->d_out;
    a.dropout = weight ? &seed : NULL;
    a.d_captures = &sums;
    a.n_d_captures = 1;
    a.bindings = bindings;
    a.n_bindings = saccade_mod_capture_count(generic);
    assert_int_equal(saccade_backward_workspace(plan, &a, &a.workspace_bytes, &err), 0);
    if (is_least)
        a.workspace_bytes = saccade_plan_backward_workspace(plan, &sizes);
    a.workspace = room_of(a.workspace_bytes);
    saccade_forward_args f;
    saccade_forward_args_init(&f);
    f.q = a.q;
    f.k = a.k;
    f.v = a.v;
    f.out = a.out;
    f.lse = a.lse;
    f.dropout = a.dropout;
    f.bindings = bindings;
    f.n_bindings = a.n_bindings;
    f.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    f.workspace = room_of(f.workspace_bytes);
    assert_int_equal(saccade_forward(plan, &f, &err), SACCADE_OK);
    if (saccade_backward(plan, &a, &err))
        fail_msg("%s", err.message);
    free(f.workspace);
    free(a.workspace);
    saccade_plan_destroy(plan);
    saccade_context_destroy(context);
    saccade_mod_destroy(generic);
    saccade_mod_destroy(score);
    saccade_mod_destroy(mask);
    saccade_mod_destroy(weight);
}

static void near_sums(const gather *got, const gather *gold, double eps, const char *what)
{
    double most = 0;
    for (int i = 0; i < PLACES * 4; i++) {
        const double size = fabs((double)gold->sums[i]);
        if (size > most) /* fmax in this loop ends gcc 12 for aarch64 */
            most = size;
    }
    assert_true(most > 0.01);
    for (int i = 0; i < PLACES * 4; i++)
        if (!(fabs((double)got->sums[i] - (double)gold->sums[i]) <= eps * (1 + most)))
            fail_msg("%s [%d]: got %.9g, expected %.9g", what, i, (double)got->sums[i],
                     (double)gold->sums[i]);
}

/* Each score adds to a place that no form of the index orders: fixed point by any number of
 * threads gives the same bits, near the oracle as one thread in order is; a live infinity in V
 * leaves no bound and gives what the ordered way does. */
static void test_gathers(void **state)
{
    static const char *const texts[] = {"score + t[h, idx[q, kv]]",
                                        "score * 0.5 - 3.0 * t[h, (q * 7 + kv * kv) % 29]",
                                        "score + w * exp(t[h, idx[q, kv]])",
                                        /* f(q) + g(kv): inside, outside, below 0, wrapped */
                                        "score + t[h, q / 9 - kv / 9 + 24]",
                                        "score + t[h, q / 3 - kv / 9]",
                                        "x = q % 9 - kv / 9; score + t[h, x < 0 ? x + 29 : x]",
                                        "score + t[h, q / 20 * 1500000000 - kv / 9 + 25]"};
    static gather fixed[3], ordered, gold;
    (void)state;
    for (size_t n = 0; n < 2 * sizeof texts / sizeof texts[0]; n++) {
        const saccade_dtype dtype = n % 2 ? SACCADE_BF16 : SACCADE_F32;
        const double eps = n % 2 ? 0x1p-7 : 2e-5;
        call c = call_of(dtype);
        for (int i = 0; i < PLACES * 4; i++)
            gold.t[i] = noise(i + 11);
        for (int i = 0; i < 37 * 210; i++)
            gold.idx[i] = (int32_t)((uint32_t)i * 2654435761u % (PLACES + 2)) - 1; /* outside */
        gold.w = 0.7f;
        ordered = fixed[0] = fixed[1] = fixed[2] = gold;
        run_gather("ref", texts[n / 2], dtype, 1, 0, &c, &gold);
        run_gather("cpu", texts[n / 2], dtype, 2, 1, &c, &ordered);
        near_sums(&ordered, &gold, eps, texts[n / 2]);
        for (int threads = 1; threads <= 3; threads++) {
            run_gather("cpu", texts[n / 2], dtype, threads, 0, &c, &fixed[threads - 1]);
            near_sums(&fixed[threads - 1], &gold, eps, texts[n / 2]);
            assert_memory_equal(fixed[threads - 1].sums, fixed[0].sums, sizeof fixed[0].sums);
        }
        const float inf = INFINITY;
        convert_from_f32(dtype, &inf, c.v.data, 1);
        run_gather("cpu", texts[n / 2], dtype, 2, 1, &c, &ordered);
        run_gather("cpu", texts[n / 2], dtype, 2, 0, &c, &fixed[0]);
        assert_memory_equal(fixed[0].sums, ordered.sums, sizeof ordered.sums);
        drop_call(&c);
    }
}

static void fill_gather(gather *g)
{
    memset(g, 0, sizeof *g);
    for (int i = 0; i < PLACES * 4; i++)
        g->t[i] = noise(i + 11) / 64;
    for (int i = 0; i < 37 * 210; i++)
        g->idx[i] = (int32_t)((uint32_t)i * 2654435761u % PLACES);
}

static void fill_zero(const saccade_tensor *t)
{
    memset(t->data, 0, (size_t)count(t) * sizeof(float));
}

/* A masked V may hold anything. Row 0 of each head sees two large values that cancel, and row 1
 * one of them; key 2 is masked and its NaN, infinity or size must not reach the scale. */
static void test_masked_values(void **state)
{
    static const float masked[] = {0, NAN, INFINITY, -INFINITY, 1e18f, 3e38f};
    static gather got, gold;
    call c = call_of(SACCADE_F32);
    float *v = c.v.data, *d_out = c.d_out.data;
    (void)state;
    for (int is_large = 0; is_large < 2; is_large++)
        for (size_t n = 0; n < sizeof masked / sizeof *masked; n++) {
            fill_gather(&gold);
            gold.mask = "kv != 2 && (q != 1 || kv == 0)";
            if (is_large) {
                fill_zero(&c.k);
                fill_zero(&c.d_out);
                fill_zero(&c.v);
            }
            for (int64_t head = 0; head < 8; head++)
                d_out[head * sizes.Q * sizes.Dv] = 1;
            for (int64_t head = 0; head < 4; head++) {
                float *const first = v + head * sizes.KV * sizes.Dv;
                if (is_large) {
                    first[0] = 1e6f;
                    first[sizes.Dv] = -1e6f;
                    first[3 * sizes.Dv] = 1e-3f;
                }
                for (int64_t d = 0; d < sizes.Dv; d++)
                    first[2 * sizes.Dv + d] = masked[n];
            }
            got = gold;
            static const char text[] = "score + t[h, idx[q, kv]]";
            run_gather("ref", text, SACCADE_F32, 1, 0, &c, &gold);
            run_gather("cpu", text, SACCADE_F32, 2, 0, &c, &got);
            near_sums(&got, &gold, 2e-5, text);
        }
    drop_call(&c);
}

/* Where all of dO or of V is so small that squares of it are lost, terms keep their digits. */
static void test_small_terms(void **state)
{
    static const char text[] = "score + t[h, idx[q, kv]]";
    static gather got, gold;
    (void)state;
    for (int is_value = 0; is_value < 2; is_value++) {
        call c = call_of(SACCADE_F32);
        const saccade_tensor *small = is_value ? &c.v : &c.d_out;
        float *x = small->data;
        for (int64_t i = 0; i < count(small); i++)
            x[i] *= 1e-30f;
        fill_gather(&gold);
        got = gold;
        run_gather("ref", text, SACCADE_F32, 1, 0, &c, &gold);
        run_gather("cpu", text, SACCADE_F32, 2, 0, &c, &got);
        for (int i = 0; i < PLACES * 4; i++) {
            gold.sums[i] *= 1e30f;
            got.sums[i] *= 1e30f;
        }
        near_sums(&got, &gold, 2e-5, text);
        drop_call(&c);
    }
}

/* Two live keys of values 1 and nearly -1, both kept at rate 0.95: terms are ten times what
 * they are without dropout, and delta is small. */
static void test_kept_terms(void **state)
{
    static const char text[] = "score + t[h, idx[q, kv]]";
    static gather got, gold;
    call c = call_of(SACCADE_F32);
    float *v = c.v.data, *d_out = c.d_out.data;
    const float *out = c.out.data;
    int64_t found = -1;
    (void)state;
    fill_gather(&gold);
    gold.mask = "kv < 2";
    gold.weight = "dropout(0.95)";
    fill_zero(&c.k);
    fill_zero(&c.v);
    fill_zero(&c.d_out);
    for (int64_t head = 0; head < 4; head++) {
        v[head * sizes.KV * sizes.Dv] = 1;
        v[(head * sizes.KV + 1) * sizes.Dv] = -1 + 0x1p-6f;
    }
    for (int seed = 0; found < 0 && seed < 100; seed++) {
        gold.seed[0] = seed;
        run_gather("ref", text, SACCADE_F32, 1, 0, &c, &gold);
        for (int64_t row = 0; row < 8 * sizes.Q; row++) {
            const float o = fabsf(out[row * sizes.Dv]);
            found = o > 0 && o < 1 ? row : found;
        }
    }
    assert_true(found >= 0);
    d_out[found * sizes.Dv] = 1;
    got = gold;
    run_gather("ref", text, SACCADE_F32, 1, 0, &c, &gold);
    run_gather("cpu", text, SACCADE_F32, 2, 0, &c, &got);
    near_sums(&got, &gold, 2e-5, text);
    drop_call(&c);
}

/* Sums that are added to a pool leave rows that no key lies in as they are, to the sign of a
 * zero: a sequence of a ragged run passes over what others hold. */
static void test_rows_of_no_key(void **state)
{
    enum { PAGES = 5, PAGE = 2, DIM = 3, KEYS = 3 };
    const int32_t entries[] = {3, 1};
    const plan_chunks chunks = {
        .first = entries, .row_stride = 2, .count = 2, .size = PAGE, .is_paged = 1};
    const int64_t by_key[] = {1, 1, KEYS, DIM}, by_page[] = {PAGES, 1, PAGE, DIM};
    float each[KEYS * DIM], sums[PAGES * PAGE * DIM];
    uint64_t room[2 * KEYS];
    const saccade_tensor from = saccade_tensor_of(each, SACCADE_F32, 4, by_key);
    const saccade_tensor to = saccade_tensor_of(sums, SACCADE_F32, 4, by_page);
    (void)state;
    for (int i = 0; i < KEYS * DIM; i++)
        each[i] = (float)i + 1;
    for (int is_added = 0; is_added < 2; is_added++) {
        for (int i = 0; i < PAGES * PAGE * DIM; i++)
            sums[i] = -0.0f;
        plan_sum_chunks(&from, &chunks, room, &to, is_added, 1);
        for (int i = 0; i < PAGES * PAGE * DIM; i++) {
            const int page = i / DIM / PAGE, key = i / DIM % PAGE + (page == 1 ? PAGE : 0);
            const int is_key = (page == 1 || page == 3) && key < KEYS;
            assert_true(sums[i] == (is_key ? each[key * DIM + i % DIM] : 0));
            if (page != 1 && page != 3)
                assert_int_equal(!!signbit(sums[i]), is_added);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks),        cmocka_unit_test(test_rows_of_no_key),
        cmocka_unit_test(test_repeated),      cmocka_unit_test(test_gathers),
        cmocka_unit_test(test_masked_values), cmocka_unit_test(test_small_terms),
        cmocka_unit_test(test_kept_terms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
