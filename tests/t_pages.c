/* Keys in pages through the public interface against the same keys in one piece, bit for bit:
 * every form of table, layouts of pools, any size and order of pages, pages that several rows
 * or one row twice names, garbage behind lengths, NaN wherever no key lies, a page that cannot
 * be read behind the pool. */
#include "support/backward_args.h"
#include "support/forward_case.h"
#include "support/page_case.h"
#include "support/short_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- runs ---- */

typedef struct results {
    saccade_tensor out, lse, dq, dk, dv;
} results;

static void drop(results *x)
{
    saccade_tensor *const all[] = {&x->out, &x->lse, &x->dq, &x->dk, &x->dv};
    for (int i = 0; i < 5; i++)
        free(all[i]->data);
}

static void *workspace_of(size_t bytes)
{
    void *room = aligned_alloc(64, (bytes + 64) / 64 * 64);
    assert_non_null(room);
    memset(room, 0xff, (bytes + 64) / 64 * 64);
    return room;
}

static saccade_tensor lse_of(const page_run *r)
{
    const saccade_sizes *s = &r->sizes;
    saccade_tensor t = page_tensor(SACCADE_F32, s->B, s->H, s->Q, 1, 1);
    t.rank = 3;
    return t;
}

/* Gradients of pools have no two heads or rows in one place, whatever K's and V's strides. */
static saccade_tensor like(const saccade_tensor *t)
{
    saccade_tensor x = page_tensor(SACCADE_F32, t->shape[0], t->shape[1], t->shape[2],
                                 t->shape[3], 1);
    if (t->stride[0] == 0)
        x.stride[0] = 0;
    return x;
}

static void run_backward(const page_run *r, const saccade_plan *plan,
                         const saccade_forward_args *f, results *x)
{
    saccade_error err = {0};
    saccade_backward_args a = backward_args_of(f);
    a.d_out = &r->d_out;
    x->dq = page_tensor(SACCADE_F32, r->q.shape[0], r->q.shape[1], r->q.shape[2], r->q.shape[3],
                      1);
    x->dk = like(f->k);
    x->dv = like(f->v);
    a.d_q = &x->dq;
    a.d_k = &x->dk;
    a.d_v = &x->dv;
    if (saccade_backward_workspace(plan, &a, &a.workspace_bytes, &err))
        fail_msg("%s: %s", r->c->problem, err.message);
    a.workspace = workspace_of(a.workspace_bytes);
    if (saccade_backward(plan, &a, &err))
        fail_msg("%s: %s: %s", r->c->problem, err.where, err.message);
    free(a.workspace);
}

static results run_once(const page_run *r, int is_paged)
{
    const saccade_sizes *s = &r->sizes;
    saccade_error err = {0};
    saccade_forward_args a;
    results x = {.out = page_tensor(r->dtype, s->B, s->H, s->Q, s->Dv, 1), .lse = lse_of(r)};
    saccade_plan *plan = page_plan(r, is_paged);
    saccade_forward_args_init(&a);
    a.q = &r->q;
    a.k = is_paged ? &r->pool_k : &r->k;
    a.v = is_paged ? &r->pool_v : &r->v;
    a.out = &x.out;
    a.lse = &x.lse;
    a.positions = is_paged ? &r->pool_at : &r->whole_at;
    a.pages = is_paged ? &r->at : NULL;
    a.workspace_bytes = saccade_plan_workspace(plan, s);
    a.workspace = workspace_of(a.workspace_bytes);
    if ((is_paged && saccade_pages_check(plan, &a, &err)) || saccade_forward(plan, &a, &err))
        fail_msg("%s: %s: %s", r->c->problem, err.where, err.message);
    free(a.workspace);
    if (r->c->gradients)
        run_backward(r, plan, &a, &x);
    saccade_plan_destroy(plan);
    return x;
}

/* ---- comparison ---- */

static void same(const page_run *r, const saccade_tensor *a, const saccade_tensor *b,
                 const char *what)
{
    size_t bytes = saccade_dtype_bytes(a->dtype);
    for (int32_t d = 0; d < a->rank; d++)
        bytes *= (size_t)a->shape[d];
    if (memcmp(a->data, b->data, bytes))
        fail_msg("%s differs: --problem \"%s\" pages of %d, form %d, layout %d, %s %s", what,
                 r->c->problem, r->c->page, r->c->form, r->c->layout, r->c->backend,
                 r->c->level ? r->c->level : "");
}

/* A pool's gradient is the sum over all places that name a row, 0 where none does. */
static void same_sums(const page_run *r, const saccade_tensor *each, const saccade_tensor *pool,
                      const char *what)
{
    const int is_list = page_is_list(r);
    const int is_chunks = r->c->form == CHUNKS;
    const int64_t page = r->c->page, dim = pool->shape[3], H = r->sizes.Hkv;
    const int64_t rows = is_chunks ? pool->shape[2] : pool->shape[0] * page;
    double *sums = calloc((size_t)(rows * H * dim), sizeof *sums);
    assert_non_null(sums);
    for (int64_t b = 0; b < r->sizes.B; b++)
        for (int64_t j = 0; j < r->len[b]; j++) {
            const int32_t *row = r->table + (is_list ? r->indptr[b] : b * r->most);
            const int64_t entry = row[j / page];
            const int64_t at = (is_chunks ? entry : entry * page) + j % page;
            for (int64_t h = 0; h < H && entry >= 0; h++)
                for (int64_t d = 0; d < dim; d++)
                    sums[(at * H + h) * dim + d] +=
                        (double)((const float *)(void *)page_row(each, b, h, j))[d];
        }
    for (int64_t at = 0; at < rows; at++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t d = 0; d < dim; d++) {
                const float got = ((const float *)(void *)page_row(
                    pool, is_chunks ? 0 : at / page, h, is_chunks ? at : at % page))[d];
                const double x = sums[(at * H + h) * dim + d];
                if (!(fabs((double)got - x) <= 1e-6 * (r->c->is_shared ? 1 + fabs(x) : 0)
                                                   + fabs((double)(float)x - x)))
                    fail_msg("%s row %lld: got %g, expected %g: %s pages of %d", what,
                             (long long)at, (double)got, x, r->c->problem, r->c->page);
            }
    free(sums);
}

static void check(const page_case *c)
{
    page_run r;
    page_make(&r, c);
    results whole = run_once(&r, 0), paged = run_once(&r, 1);
    same(&r, &whole.out, &paged.out, "out");
    same(&r, &whole.lse, &paged.lse, "lse");
    if (c->gradients) {
        same(&r, &whole.dq, &paged.dq, "d_q");
        same_sums(&r, &whole.dk, &paged.dk, "d_k");
        same_sums(&r, &whole.dv, &paged.dv, "d_v");
    }
    drop(&whole);
    drop(&paged);
    page_free(&r);
}

/* ---- tests ---- */

static const int32_t sizes[] = {1, 3, 16, 64, 100};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void every_form_and_layout(void **state)
{
    (void)state;
    for (int f = 0; f < FORMS; f++)
        for (int l = 0; l < LAYOUTS; l++)
            for (int n = 0; n < SIZES; n += is_short_run() ? 2 : 1) {
                page_case c = {.problem = "b4 h4/2 q5 kv150 d24 dv16 f32",
                               .backend = n % 2 ? "plain" : "ref",
                               .mask = "kv <= q + 120",
                               .page = sizes[n],
                               .form = (page_form)f,
                               .layout = (page_layout)l,
                               .is_shared = n % 3 == 0,
                               .is_known = n % 2};
                if (f == CHUNKS && (l == HND || l == VIEW))
                    continue; /* rows that do not follow each other by one stride */
                check(&c);
                c.backend = "cpu";
                check(&c);
            }
}

static void at_every_level(void **state)
{
    static const char *const problems[] = {
        "b3 h4/2 q70 kv333 d40 dv24 f32", "b2 h2 q130 kv300 d64 bf16",
        "b2 h8/2 q1 kv400 d64 bf16",      "b2 h4/1 q2 kv310 d64 f32",
        "b2 h4/1 q1 kv310 d40 f16",       "b3 h2 q40 kv700 d128 f16"};
    (void)state;
    for (size_t p = 0; p < sizeof problems / sizeof *problems; p++)
        for (int n = is_short_run() ? (int)p % 2 : 0; n < SIZES; n += is_short_run() ? 2 : 1)
            for (const char *const *level = case_levels(); *level; level++) {
                page_case c = {.problem = problems[p],
                               .backend = "cpu",
                               .level = *level,
                               .page = sizes[n],
                               .layout = n % 2 ? NHD : HND,
                               .is_shared = (int)p % 2};
                check(&c);
                c.mask = "kv <= q + 280";
                c.score = "alibi()";
                c.form = LAST_PAGES;
                check(&c);
            }
}

static void gradients(void **state)
{
    const uint32_t all = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    (void)state;
    for (int f = 0; f < FORMS; f++)
        for (int n = 0; n < SIZES; n++) {
            page_case c = {.problem = "b3 h4/2 q33 kv150 d24 dv16 f32",
                           .backend = "cpu",
                           .mask = "kv <= q + 120",
                           .page = sizes[n],
                           .form = (page_form)f,
                           .layout = n % 2 || f == CHUNKS ? NHD : HND,
                           .is_shared = n % 2,
                           .gradients = all};
            check(&c);
            if (f == n % FORMS) {
                c.backend = "ref";
                check(&c);
                c.backend = "cpu";
                c.problem = "b2 h2 q40 kv200 d32 bf16";
                check(&c);
            }
        }
}

static void absent_where_nothing_is_live(void **state)
{
    (void)state;
    for (int n = 0; n < SIZES; n++) {
        check(&(page_case){.problem = "b2 h2 q40 kv300 d32 f32",
                           .backend = "cpu",
                           .mask = "kv >= 200",
                           .page = sizes[n],
                           .dead = 200});
        check(&(page_case){.problem = "b2 h2 q1 kv600 d64 bf16",
                           .backend = "cpu",
                           .mask = "kv >= 500 && (q + kv) % 3 != 1",
                           .page = sizes[n],
                           .form = LAST_PAGES,
                           .dead = 500});
    }
}

/* ---- untrusted tables ---- */

static saccade_status run_bad(const page_run *r, const saccade_plan *plan, int is_check,
                              saccade_error *err)
{
    saccade_forward_args a;
    const saccade_sizes *s = &r->sizes;
    saccade_tensor out = page_tensor(r->dtype, s->B, s->H, s->Q, s->Dv, 1);
    saccade_forward_args_init(&a);
    a.q = &r->q;
    a.k = &r->pool_k;
    a.v = &r->pool_v;
    a.out = &out;
    a.positions = &r->pool_at;
    a.pages = &r->at;
    a.workspace_bytes = saccade_plan_workspace(plan, &r->sizes);
    a.workspace = workspace_of(a.workspace_bytes);
    const saccade_status status =
        is_check ? saccade_pages_check(plan, &a, err) : saccade_forward(plan, &a, err);
    free(a.workspace);
    free(out.data);
    return status;
}

static void entries_that_lead_out(void **state)
{
    static const int32_t bad[] = {INT32_MAX, INT32_MIN, -2, 1 << 20, 1000};
    static const char *const backends[] = {"cpu", "ref", "plain"};
    (void)state;
    for (int f = 0; f < FORMS; f++)
        for (int i = 0; i < 5; i++)
            for (int e = 0; e < 3; e++) {
                const page_case c = {.problem = "b2 h2 q3 kv150 d64 f32",
                                     .backend = backends[e],
                                     .page = 16,
                                     .form = (page_form)f};
                page_run r;
                saccade_error err;
                page_make(&r, &c);
                page_fill(&(saccade_tensor){.data = r.pool_k.data, .dtype = r.dtype},
                     r.pages * 16 * 2 * 128, 0);
                saccade_plan *plan = page_plan(&r, 1);
                assert_int_equal(run_bad(&r, plan, 1, &err), SACCADE_OK);
                r.table[3] = bad[i];
                assert_int_equal(run_bad(&r, plan, 0, &err), SACCADE_OK);
                assert_int_equal(run_bad(&r, plan, 1, &err), SACCADE_EVALUE);
                assert_non_null(strstr(err.message, "entry 3 of batch 0"));
                saccade_plan_destroy(plan);
                page_free(&r);
            }
}

static void expect(const page_run *r, const saccade_plan *plan, const char *where,
                   const char *what)
{
    saccade_error err = {0};
    assert_int_equal(run_bad(r, plan, 0, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, where);
    if (!strstr(err.message, what) || !strstr(err.message, "expected"))
        fail_msg("got '%s', expected '%s' in it, and what was expected", err.message, what);
}

static void one_clear_line(void **state)
{
    const page_case c = {.problem = "b2 h2 q3 kv150 d16 f32",
                         .backend = "cpu",
                         .page = 16,
                         .form = LAST_PAGES,
                         .is_known = 1};
    page_run r;
    (void)state;
    page_make(&r, &c);
    saccade_plan *plan = page_plan(&r, 1), *whole = page_plan(&r, 0);
    const page_run good = r;
    expect(&r, whole, "pages", "got some, expected none");
    r.tables.dtype = SACCADE_I64;
    expect(&r, plan, "table", "got dtype i64, expected i32");
    r = good;
    r.indptr[1] = r.indptr[2] + 1;
    expect(&r, plan, "indptr", "expected no less");
    r = good;
    r.at.indptr = &r.starts;
    r.starts.data = r.indptr;
    r.indptr[2] = r.n_entries + 1;
    expect(&r, plan, "indptr", "entries");
    r = good;
    r.at.last_page_len = NULL;
    expect(&r, plan, "last_page_len", "got neither");
    r = good;
    r.pool_at.kv_len = &r.lens;
    expect(&r, plan, "last_page_len", "expected one of them");
    r = good;
    r.at.KV = 100;
    expect(&r, plan, "pages.KV", "expected 150 or more");
    r = good; /* one row of entries for both batches, which nobody reads */
    r.at.indptr = NULL;
    r.at.last_page_len = NULL;
    r.tables.rank = 2;
    r.tables.shape[0] = 2;
    r.tables.shape[1] = 1 << 28;
    r.tables.stride[0] = 0;
    r.tables.stride[1] = 1;
    r.at.KV = ((int64_t)1 << 31) + 64;
    expect(&r, plan, "pages.KV", "expected 0 to 1073741824");
    r = good;
    r.pool_k.shape[2] = r.pool_v.shape[2] = 8;
    expect(&r, plan, "page", "got 8 keys, expected 16, the problem's page");
    r = good;
    r.tables.device.kind = SACCADE_CUDA;
    expect(&r, plan, "table", "got a tensor on a GPU");
    saccade_plan_destroy(plan);
    saccade_plan_destroy(whole);
    r = good;
    page_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_form_and_layout),
        cmocka_unit_test(at_every_level),
        cmocka_unit_test(gradients),
        cmocka_unit_test(absent_where_nothing_is_live),
        cmocka_unit_test(entries_that_lead_out),
        cmocka_unit_test(one_clear_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
