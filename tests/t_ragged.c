/* Ragged runs against each sequence in a run of its own, bit for bit: forward, statistics
 * and gradients, at every level and by the reference, prefill beside decode, empty
 * sequences, ends aligned, one side ragged alone, block masks. Every sequence of the loop
 * lies among NaN, so that nothing of its neighbours can matter; outputs lie among a pattern
 * that must not change. */
#include "saccade.h"

#include "support/forward_case.h"
#include "support/short_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { PAGE = 16 };
enum { MOST = 12, PAD = 3, GUARD = 5 }; /* sequences; elements after a row; rows around all */

typedef struct ragged_case {
    const char *problem_name;
    int64_t H, Hkv, D, Dv;
    saccade_dtype dtype;
    const char *mask, *score; /* a score may read t[b] */
    int32_t n, q[MOST], kv[MOST];
    int is_end, is_padded_kv, is_paged, has_block_mask, has_sinks; /* paged: padded too */
    const char *backend, *level;
} ragged_case;

static uint64_t rng = 88172645463325252u;

static float normal(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        rng ^= rng << 13;
        rng ^= rng >> 7;
        rng ^= rng << 17;
        sum += (float)(rng >> 40) / (float)(1 << 24) - 0.5f;
    }
    return 1.7f * sum;
}

static void put(saccade_dtype dtype, char *to, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == SACCADE_F32) {
        memcpy(to, &x, sizeof x);
    } else if (dtype == SACCADE_BF16) {
        const uint16_t half = (uint16_t)(bits >> 16);
        memcpy(to, &half, sizeof half);
    } else { /* f16 by its leading bits; small numbers become 0 */
        const int exponent = (int)(bits >> 23 & 255) - 127 + 15;
        const uint16_t half = (uint16_t)((bits >> 16 & 0x8000)
                                         | (exponent == 143 ? 0x7e00
                                            : exponent > 0 && exponent < 31
                                                ? exponent << 10 | (bits >> 13 & 1023)
                                                : 0));
        memcpy(to, &half, sizeof half);
    }
}

/* Rows of `heads` heads, with a gap after each row, and more rows before and behind. */
typedef struct rows {
    saccade_tensor t; /* [T, heads, dim], or [T, heads] for dim 0 */
    char *memory;
    size_t bytes;
} rows;

/* is_input: NaN everywhere but in rows [first, past), which are random; else a pattern. */
static rows make_rows(saccade_dtype dtype, int64_t T, int64_t heads, int64_t dim, int is_input,
                      int64_t first, int64_t past)
{
    const size_t each = saccade_dtype_bytes(dtype);
    const int64_t width = dim ? dim : 1, stride = heads * width + PAD;
    rows r = {.bytes = (size_t)((T + 2 * GUARD) * stride) * each};
    r.memory = malloc(r.bytes);
    assert_non_null(r.memory);
    memset(r.memory, 0x5a, r.bytes);
    for (int64_t n = 0; is_input && n < (T + 2 * GUARD) * stride; n++) {
        const int64_t row = n / stride - GUARD;
        put(dtype, r.memory + (size_t)n * each,
            row >= first && row < past && n % stride < heads * width ? normal() : NAN);
    }
    const int64_t shape[3] = {T, heads, width};
    r.t = saccade_tensor_of(r.memory + (size_t)(GUARD * stride) * each, dtype, dim ? 3 : 2,
                            shape);
    r.t.stride[0] = stride;
    r.t.stride[1] = width;
    return r;
}

/* Rows of a sequence as a tensor [1, heads, n, dim], or [1, heads, n]. */
static saccade_tensor batch_of(const saccade_tensor *t, int64_t first, int64_t n)
{
    saccade_tensor b = *t;
    b.data = (char *)t->data + first * t->stride[0] * (int64_t)saccade_dtype_bytes(t->dtype);
    b.rank = t->rank + 1;
    b.shape[0] = 1;
    b.shape[1] = t->shape[1];
    b.shape[2] = n;
    b.stride[0] = 0;
    b.stride[1] = t->stride[1];
    b.stride[2] = t->stride[0];
    if (t->rank == 3) {
        b.shape[3] = t->shape[2];
        b.stride[3] = 1;
    }
    return b;
}

/* The same rows among NaN. */
static rows copy_alone(const saccade_tensor *t, int64_t first, int64_t n)
{
    const int64_t dim = t->rank == 3 ? t->shape[2] : 0;
    rows r = make_rows(t->dtype, n, t->shape[1], dim, 1, 0, 0);
    const size_t each = saccade_dtype_bytes(t->dtype);
    const size_t bytes = (size_t)(t->shape[1] * (dim ? dim : 1)) * each;
    for (int64_t i = 0; i < n; i++)
        memcpy((char *)r.t.data + (size_t)(i * r.t.stride[0]) * each,
               (char *)t->data + (size_t)((first + i) * t->stride[0]) * each, bytes);
    return r;
}

/* ---- a case ---- */

typedef struct ragged_run {
    const ragged_case *c;
    saccade_mod *mask, *score;
    saccade_block_mask *block_mask;
    saccade_problem problem;
    saccade_context *context;
    int32_t cu_q[MOST + 1], cu_kv[MOST + 1], kv_len[MOST], q_offset[MOST];
    int64_t max_q, max_kv;
    float t[MOST]; /* the score's, by b */
    rows q, k, v, out, lse, row_max, d_out, d_lse, dq, dk, dv;
    float dt[MOST];
    float sinks[8], d_sinks[8], d_sinks_alone[8]; /* by head */
} ragged_run;

static saccade_mod *mod_of(saccade_kind kind, const char *text)
{
    saccade_mod *generic, *bound;
    saccade_error err = {0};
    if (!text)
        return NULL;
    if (saccade_mod_parse(kind, text, strlen(text), &generic, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_capture capture = {.name = "t", .dtype = SACCADE_F32, .rank = 1};
    if (saccade_mod_bind(generic, &capture, saccade_mod_capture_count(generic), &bound, &err))
        fail_msg("%s: %s", text, err.message);
    saccade_mod_destroy(generic);
    return bound;
}

static saccade_tensor numbers(const int32_t *at, int64_t n)
{
    return saccade_tensor_of((void *)(uintptr_t)at, SACCADE_I32, 1, &n);
}

static void make_mask(ragged_run *r)
{
    const ragged_case *c = r->c;
    saccade_error err = {0};
    saccade_sizes sizes = {c->n, c->H, c->Hkv, r->max_q, r->max_kv, c->D, c->Dv};
    saccade_positions at;
    const saccade_tensor q_offset = numbers(r->q_offset, c->n);
    saccade_positions_init(&at);
    at.q_offset = &q_offset;
    if (saccade_block_mask_create(r->context, r->mask, &sizes, &at, NULL, 0, NULL,
                                  &r->block_mask, &err))
        fail_msg("%s", err.message);
}

static void open_case(const ragged_case *c, ragged_run *r)
{
    saccade_context_options options;
    saccade_error err = {0};
    *r = (ragged_run){.c = c};
    saccade_context_options_init(&options);
    options.threads = 2;
    options.level = c->level;
    assert_int_equal(saccade_context_create(&options, &r->context, &err), SACCADE_OK);
    r->mask = mod_of(SACCADE_MASK, c->mask);
    r->score = mod_of(SACCADE_SCORE, c->score);
    r->cu_q[0] = c->is_end ? 2 : 0; /* rows before the first sequence are nobody's */
    for (int b = 0; b < c->n; b++) {
        r->cu_q[b + 1] = r->cu_q[b] + c->q[b];
        r->cu_kv[b + 1] = r->cu_kv[b] + c->kv[b];
        r->kv_len[b] = c->kv[b];
        r->q_offset[b] = c->is_end ? c->kv[b] - c->q[b] : 0;
        r->max_q = c->q[b] > r->max_q ? c->q[b] : r->max_q;
        r->max_kv = c->kv[b] > r->max_kv ? c->kv[b] : r->max_kv;
        r->t[b] = normal();
    }
    for (int h = 0; h < c->H; h++)
        r->sinks[h] = normal();
    if (c->is_paged)
        r->max_kv = (r->max_kv + PAGE - 1) / PAGE * PAGE;
    if (c->has_block_mask)
        make_mask(r);
    const int64_t T = r->cu_q[c->n], S = c->is_padded_kv ? c->n * r->max_kv : r->cu_kv[c->n];
    const int64_t first = r->cu_q[0];
    r->q = make_rows(c->dtype, T, c->H, c->D, 1, first, T);
    r->k = make_rows(c->dtype, S, c->Hkv, c->D, 1, 0, S);
    r->v = make_rows(c->dtype, S, c->Hkv, c->Dv, 1, 0, S);
    r->d_out = make_rows(c->dtype, T, c->H, c->Dv, 1, first, T);
    r->d_lse = make_rows(SACCADE_F32, T, c->H, 0, 1, first, T);
    r->out = make_rows(c->dtype, T, c->H, c->Dv, 0, 0, 0);
    r->lse = make_rows(SACCADE_F32, T, c->H, 0, 0, 0, 0);
    r->row_max = make_rows(SACCADE_F32, T, c->H, 0, 0, 0, 0);
    r->dq = make_rows(c->dtype, T, c->H, c->D, 0, 0, 0);
    r->dk = make_rows(SACCADE_F32, S, c->Hkv, c->D, 0, 0, 0);
    r->dv = make_rows(c->dtype, S, c->Hkv, c->Dv, 0, 0, 0);
    saccade_problem_init(&r->problem);
    r->problem.sizes = (saccade_sizes){0, c->H, c->Hkv, 0, 0, c->D, c->Dv};
    r->problem.dtype = c->dtype;
    r->problem.backend = c->backend;
    r->problem.mask = r->mask;
    r->problem.score = r->score;
    r->problem.sinks_dtype = c->has_sinks ? SACCADE_F32 : SACCADE_NONE;
}

static uint32_t gradients_of(const ragged_case *c, int has_t)
{
    return SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V
           | (has_t ? SACCADE_GRADIENT_CAPTURES : 0)
           | (c->has_sinks ? SACCADE_GRADIENT_SINKS : 0);
}

static saccade_tensor by_head(const ragged_case *c, float *at)
{
    return saccade_tensor_of(at, SACCADE_F32, 1, &c->H);
}

static void close_case(ragged_run *r)
{
    rows *all[] = {&r->q,  &r->k,  &r->v,     &r->out,   &r->lse, &r->row_max,
                   &r->dq, &r->dk, &r->dv, &r->d_out, &r->d_lse};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++)
        free(all[n]->memory);
    saccade_block_mask_destroy(r->block_mask);
    saccade_mod_destroy(r->mask);
    saccade_mod_destroy(r->score);
    saccade_context_destroy(r->context);
}

/* Keys of sequence b in k and v: where they begin. */
static int64_t key_of(const ragged_run *r, int b)
{
    if (r->c->is_paged) /* in another order */
        return (r->c->n - 1 - b) * r->max_kv;
    return r->c->is_padded_kv ? b * r->max_kv : r->cu_kv[b];
}

static void *workspace_of(size_t bytes, void **memory, size_t *size)
{
    *size = bytes;
    *memory = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
    return *memory;
}

/* A padded side, [B, heads, n, dim], of the same memory as rows. */
static saccade_tensor padded(const saccade_tensor *t, int64_t B, int64_t n)
{
    saccade_tensor p = batch_of(t, 0, n);
    p.shape[0] = B;
    p.stride[0] = n * t->stride[0];
    return p;
}

/* The same memory as a pool of pages. */
static saccade_tensor pool_of(const saccade_tensor *t)
{
    saccade_tensor p = batch_of(t, 0, PAGE);
    p.shape[0] = t->shape[0] / PAGE;
    p.stride[0] = PAGE * t->stride[0];
    return p;
}

static saccade_tensor keys_of(const ragged_run *r, const rows *x)
{
    if (r->c->is_paged)
        return pool_of(&x->t);
    return r->c->is_padded_kv ? padded(&x->t, r->c->n, r->max_kv) : x->t;
}

static void run_ragged(ragged_run *r, int is_backward)
{
    const ragged_case *c = r->c;
    saccade_error err = {0};
    saccade_plan *plan;
    saccade_ragged ragged;
    const char *name = "t";
    const int64_t n = c->n;
    const saccade_tensor cu_q = numbers(r->cu_q, n + 1), cu_kv = numbers(r->cu_kv, n + 1);
    const saccade_tensor kv_len = numbers(r->kv_len, n);
    const saccade_tensor sinks = by_head(c, r->sinks), d_sinks = by_head(c, r->d_sinks);
    const saccade_binding t = {"t", saccade_tensor_of(r->t, SACCADE_F32, 1, &n)};
    const saccade_binding dt = {"t", saccade_tensor_of(r->dt, SACCADE_F32, 1, &n)};
    const int has_t = c->score && strstr(c->score, "t[b]") != NULL;
    const saccade_tensor k = keys_of(r, &r->k), v = keys_of(r, &r->v);
    int32_t table[MOST * 128];
    const int64_t shape[2] = {n, r->max_kv / PAGE};
    const saccade_tensor entries = saccade_tensor_of(table, SACCADE_I32, 2, shape);
    saccade_pages pages;
    for (int64_t i = 0; c->is_paged && i < n * shape[1]; i++)
        table[i] = (int32_t)(key_of(r, (int)(i / shape[1])) / PAGE + i % shape[1]);
    saccade_pages_init(&pages);
    pages.table = &entries;
    saccade_positions at;
    saccade_problem problem = r->problem;
    saccade_positions_init(&at);
    if (c->is_padded_kv)
        at.kv_len = &kv_len;
    saccade_ragged_init(&ragged);
    ragged.cu_seqlens_q = &cu_q;
    ragged.cu_seqlens_kv = c->is_padded_kv ? NULL : &cu_kv;
    ragged.align_end = c->is_end;
    problem.ragged = 1;
    problem.page = c->is_paged ? PAGE : 0;
    problem.gradients = is_backward ? gradients_of(c, has_t) : 0;
    problem.gradient_captures = &name;
    problem.n_gradient_captures = has_t;
    if (saccade_plan_create(r->context, &problem, &plan, &err))
        fail_msg("%s: %s", err.where, err.message);
    if (r->block_mask)
        assert_int_equal(saccade_plan_prepare(plan, r->block_mask, &err), SACCADE_OK);
    const saccade_sizes sizes = {n, c->H, c->Hkv, r->max_q, r->max_kv, c->D, c->Dv};
    if (!is_backward) {
        saccade_forward_args a;
        saccade_forward_args_init(&a);
        a.q = &r->q.t, a.k = &k, a.v = &v, a.out = &r->out.t, a.lse = &r->lse.t;
        a.row_max = &r->row_max.t, a.positions = &at, a.ragged = &ragged;
        a.block_mask = r->block_mask, a.bindings = &t, a.n_bindings = has_t;
        a.pages = c->is_paged ? &pages : NULL;
        a.sinks = c->has_sinks ? &sinks : NULL;
        workspace_of(saccade_plan_workspace(plan, &sizes), &a.workspace, &a.workspace_bytes);
        if (saccade_forward(plan, &a, &err))
            fail_msg("%s: %s: %s", c->problem_name, err.where, err.message);
        free(a.workspace);
    } else {
        saccade_backward_args a;
        const saccade_tensor dk = keys_of(r, &r->dk), dv = keys_of(r, &r->dv);
        saccade_backward_args_init(&a);
        a.q = &r->q.t, a.k = &k, a.v = &v, a.out = &r->out.t, a.lse = &r->lse.t;
        a.d_out = &r->d_out.t, a.d_lse = &r->d_lse.t;
        a.d_q = &r->dq.t, a.d_k = &dk, a.d_v = &dv, a.positions = &at, a.ragged = &ragged;
        a.block_mask = r->block_mask, a.bindings = &t, a.n_bindings = has_t;
        a.pages = c->is_paged ? &pages : NULL;
        a.sinks = c->has_sinks ? &sinks : NULL;
        a.d_captures = &dt, a.n_d_captures = has_t;
        a.d_sinks = c->has_sinks ? &d_sinks : NULL;
        size_t bytes = saccade_plan_backward_workspace(plan, &sizes);
        if (c->is_paged) /* pools' sums are not among the sizes */
            assert_int_equal(saccade_backward_workspace(plan, &a, &bytes, &err), SACCADE_OK);
        workspace_of(bytes, &a.workspace, &a.workspace_bytes);
        if (saccade_backward(plan, &a, &err))
            fail_msg("%s: %s: %s", c->problem_name, err.where, err.message);
        free(a.workspace);
    }
    saccade_plan_destroy(plan);
}

/* ---- the loop ---- */

static void compare(const ragged_run *r, const char *what, int b, const saccade_tensor *got,
                    int64_t first, const saccade_tensor *want, int64_t n)
{
    const size_t each = saccade_dtype_bytes(got->dtype);
    const int64_t width = got->shape[1] * (got->rank == 3 ? got->shape[2] : 1);
    for (int64_t i = 0; i < n; i++)
        if (memcmp((char *)got->data + (size_t)((first + i) * got->stride[0]) * each,
                   (char *)want->data + (size_t)(i * want->stride[0]) * each,
                   (size_t)width * each))
            fail_msg("%s: %s of sequence %d (q%d kv%d), row %lld, differs from its own run: "
                     "mask %s score %s, %s %s",
                     r->c->problem_name, what, b, r->c->q[b], r->c->kv[b], (long long)i,
                     r->c->mask ? r->c->mask : "none", r->c->score ? r->c->score : "none",
                     r->c->backend, r->c->level ? r->c->level : "");
}

/* Sequence b of the case by a plan of its own. A run needs keys: where there are none, one that
 * is dead. */
static void run_alone(ragged_run *r, int b, int is_backward)
{
    const ragged_case *c = r->c;
    saccade_error err = {0};
    saccade_plan *plan;
    const int64_t nq = c->q[b], nk = c->kv[b], q0 = r->cu_q[b], k0 = key_of(r, b), one = 1;
    const int64_t KV = c->is_padded_kv ? r->max_kv : nk ? nk : 1;
    rows q = copy_alone(&r->q.t, q0, nq), k = copy_alone(&r->k.t, k0, nk ? nk : 0);
    rows v = copy_alone(&r->v.t, k0, nk), d_out = copy_alone(&r->d_out.t, q0, nq);
    rows d_lse = copy_alone(&r->d_lse.t, q0, nq), own_out = copy_alone(&r->out.t, q0, nq);
    rows own_lse = copy_alone(&r->lse.t, q0, nq);
    rows out = make_rows(c->dtype, nq, c->H, c->Dv, 0, 0, 0);
    rows lse = make_rows(SACCADE_F32, nq, c->H, 0, 0, 0, 0);
    rows row_max = make_rows(SACCADE_F32, nq, c->H, 0, 0, 0, 0);
    rows dq = make_rows(c->dtype, nq, c->H, c->D, 0, 0, 0);
    rows dk = make_rows(SACCADE_F32, KV, c->Hkv, c->D, 0, 0, 0);
    rows dv = make_rows(c->dtype, KV, c->Hkv, c->Dv, 0, 0, 0);
    if (c->is_padded_kv) { /* the same capacity, the rest of it dead */
        free(k.memory);
        free(v.memory);
        k = copy_alone(&r->k.t, k0, KV);
        v = copy_alone(&r->v.t, k0, KV);
    }
    const saccade_tensor tq = batch_of(&q.t, 0, nq), tk = batch_of(&k.t, 0, KV);
    const saccade_tensor tv = batch_of(&v.t, 0, KV), tout = batch_of(&out.t, 0, nq);
    const saccade_tensor tlse = batch_of(&lse.t, 0, nq), tmax = batch_of(&row_max.t, 0, nq);
    saccade_tensor q_offset = numbers(&r->q_offset[b], 1), kv_len = numbers(&r->kv_len[b], 1);
    const saccade_tensor sinks = by_head(c, r->sinks), d_sinks = by_head(c, r->d_sinks_alone);
    saccade_positions at;
    float d_t = 0;
    const saccade_binding t = {"t", saccade_tensor_of(&r->t[b], SACCADE_F32, 1, &one)};
    const saccade_binding dt = {"t", saccade_tensor_of(&d_t, SACCADE_F32, 1, &one)};
    const int has_t = c->score && strstr(c->score, "t[b]") != NULL;
    const char *name = "t";
    saccade_problem problem = r->problem;
    saccade_positions_init(&at);
    q_offset.rank = kv_len.rank = 0;
    at.q_offset = &q_offset;
    at.kv_len = &kv_len;
    problem.gradients = is_backward ? gradients_of(c, has_t) : 0;
    problem.gradient_captures = &name;
    problem.n_gradient_captures = has_t;
    assert_int_equal(saccade_plan_create(r->context, &problem, &plan, &err), SACCADE_OK);
    const saccade_sizes sizes = {1, c->H, c->Hkv, nq, KV, c->D, c->Dv};
    if (!is_backward) {
        saccade_forward_args a;
        saccade_forward_args_init(&a);
        a.q = &tq, a.k = &tk, a.v = &tv, a.out = &tout, a.lse = &tlse, a.row_max = &tmax;
        a.positions = &at, a.bindings = &t, a.n_bindings = has_t;
        a.sinks = c->has_sinks ? &sinks : NULL;
        workspace_of(saccade_plan_workspace(plan, &sizes), &a.workspace, &a.workspace_bytes);
        if (saccade_forward(plan, &a, &err))
            fail_msg("alone: %s: %s", err.where, err.message);
        free(a.workspace);
        compare(r, "out", b, &r->out.t, q0, &out.t, nq);
        compare(r, "lse", b, &r->lse.t, q0, &lse.t, nq);
        compare(r, "row_max", b, &r->row_max.t, q0, &row_max.t, nq);
    } else {
        const saccade_tensor to = batch_of(&own_out.t, 0, nq), tl = batch_of(&own_lse.t, 0, nq);
        const saccade_tensor tdo = batch_of(&d_out.t, 0, nq), tdl = batch_of(&d_lse.t, 0, nq);
        const saccade_tensor tdq = batch_of(&dq.t, 0, nq), tdk = batch_of(&dk.t, 0, KV);
        const saccade_tensor tdv = batch_of(&dv.t, 0, KV);
        saccade_backward_args a;
        saccade_backward_args_init(&a);
        a.q = &tq, a.k = &tk, a.v = &tv, a.out = &to, a.lse = &tl, a.d_out = &tdo;
        a.d_lse = &tdl, a.d_q = &tdq, a.d_k = &tdk, a.d_v = &tdv;
        a.positions = &at, a.bindings = &t, a.n_bindings = has_t;
        a.sinks = c->has_sinks ? &sinks : NULL;
        a.d_captures = &dt, a.n_d_captures = has_t;
        a.d_sinks = c->has_sinks ? &d_sinks : NULL;
        a.accumulate = SACCADE_GRADIENT_SINKS;
        workspace_of(saccade_plan_backward_workspace(plan, &sizes), &a.workspace,
                     &a.workspace_bytes);
        if (saccade_backward(plan, &a, &err))
            fail_msg("alone: %s: %s", err.where, err.message);
        free(a.workspace);
        compare(r, "dq", b, &r->dq.t, q0, &dq.t, nq);
        compare(r, "dk", b, &r->dk.t, k0, &dk.t, nk);
        compare(r, "dv", b, &r->dv.t, k0, &dv.t, nk);
        if (has_t && memcmp(&d_t, &r->dt[b], sizeof d_t))
            fail_msg("%s: gradient of t[%d]: got %g, alone %g", c->problem_name, b,
                     (double)r->dt[b], (double)d_t);
    }
    saccade_plan_destroy(plan);
    rows *all[] = {&q,   &k,       &v,  &d_out, &d_lse, &own_out, &own_lse,
                   &out, &row_max, &lse, &dq,    &dk,    &dv};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++)
        free(all[n]->memory);
}

static float value_of(const saccade_tensor *t, int64_t at)
{
    float x = 0;
    if (t->dtype == SACCADE_F32)
        memcpy(&x, (char *)t->data + at * 4, 4);
    else
        memcpy(&x, (char *)t->data + at * 2, 2); /* 0 or not is all that is asked */
    return x;
}

/* Nothing outside of the sequences' rows was written. */
static void check_guards(const char *what, const rows *r, int64_t first, int64_t past)
{
    const size_t each = saccade_dtype_bytes(r->t.dtype);
    const int64_t stride = r->t.stride[0], n = (int64_t)(r->bytes / each);
    const int64_t width = r->t.shape[1] * (r->t.rank == 3 ? r->t.shape[2] : 1);
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = i / stride - GUARD;
        if (row >= first && row < past && i % stride < width)
            continue;
        for (size_t byte = 0; byte < each; byte++)
            if (r->memory[(size_t)i * each + byte] != 0x5a)
                fail_msg("%s: something was written outside, row %lld", what, (long long)row);
    }
}

static void check(const ragged_case *c, int is_backward)
{
    ragged_run r;
    open_case(c, &r);
    run_ragged(&r, 0);
    const int64_t first = r.cu_q[0], past = r.cu_q[c->n];
    check_guards("out", &r.out, first, past);
    check_guards("lse", &r.lse, first, past);
    check_guards("row_max", &r.row_max, first, past);
    for (int b = 0; b < c->n; b++) {
        if (c->q[b] > 0)
            run_alone(&r, b, 0);
        for (int64_t i = r.cu_q[b]; c->kv[b] == 0 && i < r.cu_q[b + 1]; i++)
            for (int64_t h = 0; h < c->H; h++) {
                const int64_t at = i * r.lse.t.stride[0] + h;
                assert_true(c->has_sinks || value_of(&r.lse.t, at) == -INFINITY);
                assert_true(value_of(&r.out.t, i * r.out.t.stride[0] + h * c->Dv) == 0);
            }
    }
    if (is_backward) {
        run_ragged(&r, 1);
        check_guards("dq", &r.dq, first, past);
        check_guards("dk", &r.dk, 0, r.k.t.shape[0]);
        check_guards("dv", &r.dv, 0, r.k.t.shape[0]);
        for (int b = 0; b < c->n; b++)
            if (c->q[b] > 0 && (c->kv[b] > 0 || c->has_sinks))
                run_alone(&r, b, 1);
            else
                for (int64_t j = key_of(&r, b); j < key_of(&r, b) + c->kv[b]; j++)
                    assert_true(value_of(&r.dk.t, j * r.dk.t.stride[0]) == 0);
        assert_memory_equal(r.d_sinks, r.d_sinks_alone, sizeof r.d_sinks);
    }
    close_case(&r);
}

/* ---- cases ---- */

static const ragged_case lengths[] = {
    {.problem_name = "prefill beside decode",
     .n = 8,
     .q = {1, 130, 0, 1, 7, 260, 1, 33},
     .kv = {300, 130, 40, 1, 700, 260, 0, 90}},
    {.problem_name = "decode", .n = 5, .q = {1, 1, 1, 2, 1}, .kv = {1200, 3, 0, 513, 256}},
    {.problem_name = "one sequence", .n = 1, .q = {100}, .kv = {150}},
    {.problem_name = "nothing", .n = 3, .q = {0, 0, 0}, .kv = {5, 0, 2}},
};
static const char *const masks[] = {NULL, "causal()", "(q + kv) % 3 != 1", "kv >= Q - 20"};
static const char *const scores[] = {NULL, "alibi()", "score + t[b] * 0.25", "softcap(9.0)"};

static void shape(ragged_case *c, int n)
{
    static const struct {
        int64_t H, Hkv, D, Dv;
        saccade_dtype dtype;
    } shapes[] = {{4, 2, 64, 64, SACCADE_BF16},
                  {3, 3, 40, 24, SACCADE_F32},
                  {8, 1, 33, 65, SACCADE_F16}};
    c->H = shapes[n % 3].H;
    c->Hkv = shapes[n % 3].Hkv;
    c->D = shapes[n % 3].D;
    c->Dv = shapes[n % 3].Dv;
    c->dtype = shapes[n % 3].dtype;
}

/* Each length with each shape; masks, scores and what else there is take turns. */
static void check_all(const char *backend, const char *level, int is_backward, int step)
{
    int turn = 0;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (int n = 0; n < 12; n += step, turn++) {
            ragged_case c = lengths[l];
            c.backend = backend;
            c.level = level;
            c.mask = masks[turn % 4];
            c.score = scores[turn / 4 % 4];
            c.is_end = turn / 2 % 2;
            c.is_padded_kv = turn % 5 == 3 && l != 3;
            c.has_sinks = turn % 3 == 1;
            c.is_paged = turn % 10 == 4 && l != 3 && strcmp(backend, "plain") != 0;
            c.is_padded_kv |= c.is_paged;
            shape(&c, turn + n);
            check(&c, is_backward);
        }
}

static void every_level(void **state)
{
    (void)state;
    for (const char *const *level = case_levels(); *level; level++)
        check_all("cpu", *level, 0, is_short_run() ? 6 : 2);
}

static void gradients(void **state)
{
    (void)state;
    check_all("cpu", NULL, 1, is_short_run() ? 12 : 3);
    check_all("cpu", "portable", 1, 12);
}

static void reference_and_plain(void **state)
{
    (void)state;
    check_all("ref", NULL, 1, 12);
    check_all("plain", NULL, 1, 12);
}

/* Runs of the mask only save time: bits are those of tiles proven while running. */
static void block_masks(void **state)
{
    static const char *const texts[] = {"causal()", "q >= kv && (b + q - kv) % 5 != 3"};
    (void)state;
    for (int n = 0; n < 4; n++) {
        ragged_case c = lengths[n / 2];
        c.backend = "cpu";
        c.mask = texts[n % 2];
        c.is_end = 1;
        shape(&c, n);
        ragged_run with, without;
        c.has_block_mask = 1;
        const uint64_t seed = rng;
        open_case(&c, &with);
        run_ragged(&with, 0);
        run_ragged(&with, 1);
        c.has_block_mask = 0;
        rng = seed;
        open_case(&c, &without);
        run_ragged(&without, 0);
        run_ragged(&without, 1);
        assert_memory_equal(with.out.memory, without.out.memory, with.out.bytes);
        assert_memory_equal(with.lse.memory, without.lse.memory, with.lse.bytes);
        assert_memory_equal(with.dq.memory, without.dq.memory, with.dq.bytes);
        assert_memory_equal(with.dk.memory, without.dk.memory, with.dk.bytes);
        close_case(&with);
        close_case(&without);
    }
}

/* ---- pages that many sequences share ---- */

enum { SHARERS = 600, SHARED_HEADS = 2, SHARED_DIM = 16 };

/* One query a sequence, all over one page; the pool's other page is nobody's. Scores are 0, so
 * each weight is 1/16; Q and dO are 1 and V is 1 and -1 in turns, so every term of d_v is 1/16
 * and, with the scale of 1/4, of d_k 1/4 with the sign of V. */
typedef struct shared_case {
    const char *backend;
    saccade_dtype dtype;
    int is_added, is_one_head; /* the gradients' heads lie in one place */
} shared_case;

static uint16_t half_of(saccade_dtype dtype, float x)
{
    uint16_t half;
    put(dtype, (char *)&half, x);
    return half;
}

static saccade_tensor filled(saccade_dtype dtype, int32_t rank, const int64_t *shape, float x)
{
    int64_t n = 1;
    for (int32_t d = 0; d < rank; d++)
        n *= shape[d];
    char *data = malloc((size_t)n * saccade_dtype_bytes(dtype));
    assert_non_null(data);
    for (int64_t i = 0; i < n; i++)
        put(dtype, data + (size_t)i * saccade_dtype_bytes(dtype), x);
    return saccade_tensor_of(data, dtype, rank, shape);
}

static void check_sum(const shared_case *c, const char *what, const saccade_tensor *t,
                      float term, float start, int is_signed)
{
    const int heads = c->is_one_head ? 1 : SHARED_HEADS;
    const uint16_t *at = t->data;
    for (int64_t n = 0; n < 2 * heads * PAGE * SHARED_DIM; n++) {
        const int is_live = n < heads * PAGE * SHARED_DIM;
        const float sign = is_signed && n / SHARED_DIM % 2 ? -1 : 1;
        const float sum = sign * term * (SHARERS * SHARED_HEADS / heads);
        const float want = (c->is_added ? start : 0) + (is_live ? sum : 0);
        if (at[n] != half_of(c->dtype, want))
            fail_msg("%s, %s%s%s: element %lld of %s is 0x%04x, expected %g (0x%04x)",
                     c->backend, saccade_dtype_name(c->dtype), c->is_added ? ", added" : "",
                     c->is_one_head ? ", one head" : "", (long long)n, what, at[n],
                     (double)want, half_of(c->dtype, want));
    }
}

static void check_shared(const shared_case *c)
{
    enum { H = SHARED_HEADS, D = SHARED_DIM };
    static int32_t cu[SHARERS + 1], len[SHARERS], entries[SHARERS];
    const int64_t q_shape[3] = {SHARERS, H, D}, pool[4] = {2, H, PAGE, D};
    const int64_t table_shape[2] = {SHARERS, 1};
    saccade_error err = {0};
    saccade_plan *plan;
    saccade_problem problem;
    saccade_ragged ragged;
    saccade_pages pages;
    saccade_positions at;
    saccade_forward_args f;
    saccade_backward_args b;
    for (int n = 0; n < SHARERS; n++)
        cu[n + 1] = n + 1, len[n] = PAGE;
    const saccade_tensor cu_q = numbers(cu, SHARERS + 1), kv_len = numbers(len, SHARERS);
    const saccade_tensor table = saccade_tensor_of(entries, SACCADE_I32, 2, table_shape);
    saccade_tensor q = filled(c->dtype, 3, q_shape, 1), out = filled(c->dtype, 3, q_shape, 0);
    saccade_tensor d_out = filled(c->dtype, 3, q_shape, 1);
    saccade_tensor lse = filled(SACCADE_F32, 2, q_shape, 0);
    saccade_tensor k = filled(c->dtype, 4, pool, 0), v = filled(c->dtype, 4, pool, 1);
    saccade_tensor dk = filled(c->dtype, 4, pool, 2), dv = filled(c->dtype, 4, pool, 2.5f);
    for (int64_t n = 0; n < 2 * H * PAGE * D; n++)
        put(c->dtype, (char *)v.data + 2 * n, n / D % 2 ? -1 : 1);
    if (c->is_one_head)
        dk.stride[0] = dv.stride[0] = PAGE * D, dk.stride[1] = dv.stride[1] = 0;
    saccade_problem_init(&problem);
    problem.sizes = (saccade_sizes){0, H, H, 0, 0, D, D};
    problem.dtype = c->dtype;
    problem.backend = c->backend;
    problem.ragged = 1;
    problem.page = PAGE;
    problem.gradients = SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    assert_int_equal(saccade_plan_create(NULL, &problem, &plan, &err), SACCADE_OK);
    saccade_ragged_init(&ragged);
    ragged.cu_seqlens_q = &cu_q;
    saccade_pages_init(&pages);
    pages.table = &table;
    saccade_positions_init(&at);
    at.kv_len = &kv_len;
    const saccade_sizes sizes = {SHARERS, H, H, 1, PAGE, D, D};
    saccade_forward_args_init(&f);
    f.q = &q, f.k = &k, f.v = &v, f.out = &out, f.lse = &lse;
    f.positions = &at, f.ragged = &ragged, f.pages = &pages;
    workspace_of(saccade_plan_workspace(plan, &sizes), &f.workspace, &f.workspace_bytes);
    if (saccade_forward(plan, &f, &err))
        fail_msg("%s: %s", err.where, err.message);
    saccade_backward_args_init(&b);
    b.q = &q, b.k = &k, b.v = &v, b.out = &out, b.lse = &lse, b.d_out = &d_out;
    b.d_k = &dk, b.d_v = &dv, b.positions = &at, b.ragged = &ragged, b.pages = &pages;
    b.accumulate = c->is_added ? SACCADE_GRADIENT_K | SACCADE_GRADIENT_V : 0;
    size_t bytes;
    assert_int_equal(saccade_backward_workspace(plan, &b, &bytes, &err), SACCADE_OK);
    workspace_of(bytes, &b.workspace, &b.workspace_bytes);
    b.workspace_bytes = bytes - 1;
    assert_int_equal(saccade_backward(plan, &b, &err), SACCADE_EINVAL);
    b.workspace_bytes = bytes;
    if (saccade_backward(plan, &b, &err))
        fail_msg("%s: %s", err.where, err.message);
    check_sum(c, "d_k", &dk, 0.25f, 2, 1);
    check_sum(c, "d_v", &dv, 0.0625f, 2.5f, 0);
    void *all[] = {q.data, out.data, d_out.data, lse.data,    k.data,
                   v.data, dk.data,  dv.data,    f.workspace, b.workspace};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++)
        free(all[n]);
    saccade_plan_destroy(plan);
}

static void shared_pages_round_once(void **state)
{
    static const char *const backends[] = {"cpu", "ref"};
    (void)state;
    for (int n = 0; n < 16; n++)
        check_shared(&(shared_case){.backend = backends[n & 1],
                                    .dtype = n & 2 ? SACCADE_F16 : SACCADE_BF16,
                                    .is_added = n >> 2 & 1,
                                    .is_one_head = n >> 3});
}

/* ---- errors ---- */

typedef struct bad_run {
    int32_t cu[4];
    int64_t n, T, max_q;
    const char *where, *message;
} bad_run;

static void one_clear_line(void **state)
{
    static const bad_run bad[] = {
        {{0, 4, 2, 6}, 4, 6, 0, "cu_seqlens_q", "got 2 at 2 after 4"},
        {{-1, 4, 5, 6}, 4, 6, 0, "cu_seqlens_q", "got -1 first"},
        {{0, 4, 5, 9}, 4, 6, 0, "q", "got 6 rows, expected the 9"},
        {{0, 1, 5, 6}, 4, 6, 3, "cu_seqlens_q", "got length 4 for sequence 1, expected 3"},
        {{0}, 1, 6, 0, "cu_seqlens_q", "got 1 numbers"},
    };
    (void)state;
    for (size_t n = 0; n < sizeof bad / sizeof *bad; n++) {
        float data[64] = {0};
        const int64_t shape3[3] = {bad[n].T, 1, 4};
        const saccade_tensor t = saccade_tensor_of(data, SACCADE_F32, 3, shape3);
        const saccade_tensor cu = numbers(bad[n].cu, bad[n].n);
        saccade_problem problem;
        saccade_plan *plan;
        saccade_error err = {0};
        saccade_forward_args a;
        saccade_ragged ragged;
        saccade_problem_init(&problem);
        problem.sizes.D = problem.sizes.Dv = 4;
        problem.ragged = 1;
        assert_int_equal(saccade_plan_create(NULL, &problem, &plan, &err), SACCADE_OK);
        saccade_forward_args_init(&a);
        a.q = &t, a.k = &t, a.v = &t, a.out = &t;
        assert_int_equal(saccade_forward(plan, &a, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, "ragged");
        saccade_ragged_init(&ragged);
        ragged.cu_seqlens_q = &cu;
        ragged.max_q = bad[n].max_q;
        a.ragged = &ragged;
        assert_int_equal(saccade_forward(plan, &a, &err), SACCADE_EINVAL);
        assert_string_equal(err.where, bad[n].where);
        if (!strstr(err.message, bad[n].message) || !strstr(err.message, "expected"))
            fail_msg("got '%s', expected '%s'", err.message, bad[n].message);
        saccade_plan_destroy(plan);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_level), cmocka_unit_test(gradients),
        cmocka_unit_test(reference_and_plain), cmocka_unit_test(block_masks),
        cmocka_unit_test(shared_pages_round_once), cmocka_unit_test(one_clear_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
