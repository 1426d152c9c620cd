/* Keys in pages on a CUDA device against the same keys in one piece, bit for bit: prefill and
 * decode, every form of table, layouts of pools, sizes that whole tiles and single rows are
 * copied for, lengths and tables on the device; tables that lead out of the pool. Gradients of
 * pools against the sums of those of keys in one piece, and against the reference. */
#include "support/device_case.h"
#include "support/page_case.h"

#include "base/convert.h"
#include "cuda/cuda_backward.h"
#include "plan/gradient_sums.h"

#include <math.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 32 };

/* Copies of tensors on the device, freed together. */
typedef struct device_copies {
    void *memory[MOST];
    saccade_tensor tensors[MOST];
    int n;
} device_copies;

static void *on_device(device_copies *d, const void *from, size_t bytes)
{
    saccade_error err;
    void *to = NULL;
    assert_true(d->n < MOST);
    if (saccade_device_alloc(0, bytes, &to, &err)
        || (from && saccade_device_copy(0, to, from, bytes, &err)))
        fail_msg("%s", err.message);
    return d->memory[d->n++] = to;
}

/* All that lies between the first element and the last. */
static size_t extent(const saccade_tensor *t)
{
    int64_t last = 0;
    for (int32_t d = 0; d < t->rank; d++)
        last += (t->shape[d] - 1) * t->stride[d];
    return (size_t)(last + 1) * saccade_dtype_bytes(t->dtype);
}

static const saccade_tensor *moved(device_copies *d, const saccade_tensor *t)
{
    if (!t)
        return NULL;
    void *const to = on_device(d, t->data, extent(t));
    saccade_tensor *copy = &d->tensors[d->n - 1];
    *copy = *t;
    copy->data = to;
    copy->device.kind = SACCADE_CUDA;
    return copy;
}

static void drop(device_copies *d)
{
    for (int i = 0; i < d->n; i++)
        saccade_device_free(0, d->memory[i]);
    d->n = 0;
}

/* Gradients of Q, K and V lie on the host, in f32 or in the problem's dtype. */
enum { OF_Q, OF_K, OF_V, GRADIENTS };
typedef struct results {
    unsigned char *out, *lse;
    size_t out_bytes, lse_bytes;
    saccade_tensor gradient[GRADIENTS];
} results;

static void drop_results(results *x)
{
    free(x->out);
    free(x->lse);
    for (int i = 0; i < GRADIENTS; i++)
        free(x->gradient[i].data);
}

/* ---- gradients ---- */

/* Of the shape of `like`, filled with NaN, or with ones where they are added to. */
static saccade_tensor gradient_like(const saccade_tensor *like, saccade_dtype dtype,
                                    int is_added)
{
    const float one = 1;
    saccade_tensor x = page_tensor(dtype, like->shape[0], like->shape[1], like->shape[2],
                                   like->shape[3], 1);
    if (like->stride[0] == 0) /* chunks of rows that batches share */
        x.stride[0] = 0;
    for (size_t i = 0; is_added && i < extent(&x) / saccade_dtype_bytes(dtype); i++)
        convert_from_f32(dtype, &one, (char *)x.data + i * saccade_dtype_bytes(dtype), 1);
    return x;
}

/* How a run's gradients are asked for: the dtype of dK and dV, or NONE for none at all. */
typedef struct wanted {
    saccade_dtype dtype;
    int is_added;
} wanted;

static void run_backward(const page_run *r, const saccade_plan *plan,
                         const saccade_forward_args *f, const wanted *w, device_copies *d,
                         results *x)
{
    saccade_error err;
    saccade_backward_args a;
    const saccade_tensor *const inputs[GRADIENTS] = {f->q, f->k, f->v};
    const saccade_tensor **const outputs[GRADIENTS] = {&a.d_q, &a.d_k, &a.d_v};
    saccade_backward_args_init(&a);
    a.q = f->q;
    a.k = f->k;
    a.v = f->v;
    a.out = f->out;
    a.lse = f->lse;
    a.positions = f->positions;
    a.pages = f->pages;
    a.d_out = moved(d, &r->d_out);
    a.accumulate = w->is_added ? SACCADE_GRADIENT_K | SACCADE_GRADIENT_V : 0;
    for (int i = 0; i < GRADIENTS; i++) {
        x->gradient[i] = gradient_like(inputs[i], i ? w->dtype : r->dtype, i && w->is_added);
        *outputs[i] = moved(d, &x->gradient[i]);
    }
    if (saccade_backward_workspace(plan, &a, &a.workspace_bytes, &err))
        fail_msg("%s: %s", r->c->problem, err.message);
    assert_true(a.workspace_bytes <= saccade_plan_backward_workspace(plan, &r->sizes));
    a.workspace = on_device(d, NULL, a.workspace_bytes + 64);
    if (saccade_backward(plan, &a, &err) || saccade_device_synchronize(0, &err))
        fail_msg("%s: %s: %s", r->c->problem, err.where, err.message);
    for (int i = 0; i < GRADIENTS; i++)
        if (saccade_device_copy(0, x->gradient[i].data, (*outputs[i])->data,
                                extent(&x->gradient[i]), &err))
            fail_msg("%s: %s", r->c->problem, err.message);
}

/* w: NULL: forward alone. */
static results run_once(const page_run *r, int is_paged, const wanted *w)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t out_shape[] = {s->B, s->H, s->Q, s->Dv};
    saccade_error err;
    saccade_forward_args a;
    saccade_positions at;
    saccade_pages pages = r->at;
    device_copies d = {.n = 0};
    results x = {0};
    saccade_plan *plan = page_plan(r, is_paged);
    saccade_tensor out = saccade_tensor_of(NULL, r->dtype, 4, out_shape);
    saccade_tensor lse = saccade_tensor_of(NULL, SACCADE_F32, 3, out_shape);
    out.device.kind = lse.device.kind = SACCADE_CUDA;
    x.out_bytes = extent(&out);
    x.lse_bytes = extent(&lse);
    x.out = malloc(x.out_bytes);
    x.lse = malloc(x.lse_bytes);
    assert_true(x.out && x.lse);
    out.data = on_device(&d, NULL, x.out_bytes);
    lse.data = on_device(&d, NULL, x.lse_bytes);
    saccade_forward_args_init(&a);
    saccade_positions_init(&at);
    at.kv_len = moved(&d, is_paged ? r->pool_at.kv_len : r->whole_at.kv_len);
    pages.table = moved(&d, pages.table);
    pages.indptr = moved(&d, pages.indptr);
    pages.last_page_len = moved(&d, pages.last_page_len);
    a.q = moved(&d, &r->q);
    a.k = moved(&d, is_paged ? &r->pool_k : &r->k);
    a.v = moved(&d, is_paged ? &r->pool_v : &r->v);
    a.out = &out;
    a.lse = &lse;
    a.positions = &at;
    a.pages = is_paged ? &pages : NULL;
    a.workspace_bytes = saccade_plan_workspace(plan, s);
    a.workspace = on_device(&d, NULL, a.workspace_bytes + 64);
    if (saccade_forward(plan, &a, &err) || saccade_device_synchronize(0, &err)
        || saccade_device_copy(0, x.out, out.data, x.out_bytes, &err)
        || saccade_device_copy(0, x.lse, lse.data, x.lse_bytes, &err))
        fail_msg("%s: %s: %s", r->c->problem, err.where, err.message);
    if (w)
        run_backward(r, plan, &a, w, &d, &x);
    saccade_plan_destroy(plan);
    drop(&d);
    return x;
}

/* Zeros where K or V in one piece have NaN, past lengths: that makes the forward kernels do
 * rows again with other bits. In pools they do not. */
static void clear_ends(const page_run *r, const saccade_tensor *t)
{
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t j = r->len[b]; j < t->shape[2]; j++)
                memset(page_row(t, b, h, j), 0,
                       (size_t)t->shape[3] * saccade_dtype_bytes(t->dtype));
}

/* Memory of pools is one piece that K and V share; each is moved from its first element on. */
static int differs(const page_case *c)
{
    page_run r;
    page_make(&r, c);
    clear_ends(&r, &r.k);
    clear_ends(&r, &r.v);
    results whole = run_once(&r, 0, NULL), paged = run_once(&r, 1, NULL);
    const int bad = memcmp(whole.out, paged.out, whole.out_bytes) != 0
                    || memcmp(whole.lse, paged.lse, whole.lse_bytes) != 0;
    if (bad)
        print_message("differs: --problem \"%s\" pages of %d, form %d, layout %d, mask %s\n",
                      c->problem, c->page, c->form, c->layout, c->mask ? c->mask : "none");
    drop_results(&whole);
    drop_results(&paged);
    page_free(&r);
    return bad;
}

/* ---- gradients of pools ---- */

/* The table as back ends have it. */
static plan_chunks chunks_of(const page_run *r)
{
    return (plan_chunks){.first = r->table,
                         .row_stride = r->most,
                         .count = r->most,
                         .size = r->c->page,
                         .is_paged = r->c->form != CHUNKS,
                         .start = page_is_list(r) ? r->indptr : NULL,
                         .entries = r->n_entries};
}

/* Entries past lengths, whose keys have gradients of 0, to the first page. */
static void name_pages(page_run *r)
{
    for (int64_t b = 0; b < r->sizes.B && !page_is_list(r); b++)
        for (int32_t i = (r->len[b] + r->c->page - 1) / r->c->page; i < r->most; i++)
            r->table[b * r->most + i] = -1;
}

static int elements_differ(const page_run *r, const saccade_tensor *a, const saccade_tensor *b,
                           const char *what)
{
    const size_t each = saccade_dtype_bytes(a->dtype);
    for (size_t i = 0; i < extent(a) / each; i++) {
        const double x = convert_element(a->dtype, (const char *)a->data + i * each);
        const double y = convert_element(b->dtype, (const char *)b->data + i * each);
        if (!(x == y)) { /* zeros may differ in their sign */
            print_message("%s %zu: got %g, expected %g: --problem \"%s\" pages of %d, form %d, "
                          "layout %d, mask %s\n",
                          what, i, y, x, r->c->problem, r->c->page, r->c->form, r->c->layout,
                          r->c->mask ? r->c->mask : "none");
            return 1;
        }
    }
    return 0;
}

/* dK and dV of pools are the sums of those of keys in one piece, of one order and bits. */
static int sums_differ(page_run *r, const results *whole, const results *paged, int is_added)
{
    static const char *const names[] = {"d_q", "d_k", "d_v"};
    uint64_t *room = malloc(plan_sum_room(&r->sizes));
    const plan_chunks chunks = chunks_of(r);
    int bad = elements_differ(r, &whole->gradient[OF_Q], &paged->gradient[OF_Q], names[0]);
    assert_non_null(room);
    name_pages(r);
    for (int i = OF_K; i < GRADIENTS && !bad; i++) {
        const saccade_tensor *got = &paged->gradient[i];
        saccade_tensor expected = gradient_like(got, got->dtype, is_added);
        plan_sum_chunks(&whole->gradient[i], &chunks, room, &expected, is_added, 1);
        bad = elements_differ(r, &expected, got, names[i]);
        free(expected.data);
    }
    free(room);
    return bad;
}

/* The reference over the same pages, on the host, in float64. */
static double error_of(const page_run *r, const results *got)
{
    page_case c = *r->c;
    page_run host = *r;
    saccade_error err;
    saccade_forward_args f;
    saccade_backward_args a;
    double off = 0, most = 0;
    const saccade_sizes *s = &r->sizes;
    c.backend = "ref";
    host.c = &c;
    saccade_plan *plan = page_plan(&host, 1);
    saccade_tensor out = page_tensor(r->dtype, s->B, s->H, s->Q, s->Dv, 1);
    saccade_tensor lse = page_tensor(SACCADE_F32, s->B, s->H, s->Q, 1, 1);
    saccade_tensor d[GRADIENTS] = {gradient_like(&r->q, SACCADE_F32, 0),
                                   gradient_like(&r->pool_k, SACCADE_F32, 0),
                                   gradient_like(&r->pool_v, SACCADE_F32, 0)};
    lse.rank = 3;
    saccade_forward_args_init(&f);
    saccade_backward_args_init(&a);
    a.q = f.q = &r->q;
    a.k = f.k = &r->pool_k;
    a.v = f.v = &r->pool_v;
    a.out = f.out = &out;
    a.lse = f.lse = &lse;
    a.positions = f.positions = &r->pool_at;
    a.pages = f.pages = &r->at;
    a.d_out = &r->d_out;
    a.d_q = &d[OF_Q];
    a.d_k = &d[OF_K];
    a.d_v = &d[OF_V];
    f.workspace_bytes = saccade_plan_workspace(plan, s);
    a.workspace_bytes = saccade_plan_backward_workspace(plan, s);
    f.workspace = malloc(f.workspace_bytes + 64);
    a.workspace = malloc(a.workspace_bytes + 64);
    if (saccade_forward(plan, &f, &err) || saccade_backward(plan, &a, &err))
        fail_msg("%s: %s: %s", c.problem, err.where, err.message);
    for (int g = 0; g < GRADIENTS; g++) {
        const size_t each = saccade_dtype_bytes(got->gradient[g].dtype);
        for (size_t i = 0; i < extent(&d[g]) / 4; i++) {
            const double x = ((const float *)d[g].data)[i];
            const double y = convert_element(got->gradient[g].dtype,
                                             (const char *)got->gradient[g].data + i * each);
            off = fabs(y - x) > off || isnan(y) ? fabs(y - x) : off;
            most = fabs(x) > most ? fabs(x) : most;
        }
        free(d[g].data);
    }
    free(out.data);
    free(lse.data);
    free(f.workspace);
    free(a.workspace);
    saccade_plan_destroy(plan);
    return off / most;
}

static int gradients_differ(const page_case *c, saccade_dtype dtype, int is_added,
                            int has_reference)
{
    page_run r;
    page_make(&r, c);
    clear_ends(&r, &r.k);
    clear_ends(&r, &r.v);
    const wanted each = {SACCADE_F32, 0}, w = {dtype ? dtype : r.dtype, is_added};
    results whole = run_once(&r, 0, &each), paged = run_once(&r, 1, &w);
    results again = run_once(&r, 1, &w);
    int bad = 0;
    for (int i = 0; i < GRADIENTS; i++)
        bad |= elements_differ(&r, &paged.gradient[i], &again.gradient[i], "again");
    if (has_reference) { /* before tables change */
        const double error = error_of(&r, &paged), most = r.dtype == SACCADE_F32 ? 1e-5 : 0.01;
        if (!(error <= most))
            print_message("error %g: --problem \"%s\"\n", error, c->problem);
        bad |= !(error <= most);
    }
    bad |= sums_differ(&r, &whole, &paged, is_added);
    drop_results(&whole);
    drop_results(&paged);
    drop_results(&again);
    page_free(&r);
    return bad;
}

static const int32_t sizes[] = {1, 3, 16, 48, 64, 100, 128, 256};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void same_bits(void **state)
{
    static const struct {
        const char *problem, *mask, *score;
    } rows[] = {
        {"b2 h4/2 q200 kv700 d64 bf16", "causal()", NULL},
        {"b3 h2 q130 kv600 d128 bf16", "kv <= q + 500", "alibi()"},
        {"b2 h2/1 q70 kv500 d128 dv64 f16", NULL, NULL},
        {"b1 h2 q100 kv300 d256 bf16", NULL, "softcap(20)"},
        {"b4 h8/2 q1 kv1000 d128 bf16", NULL, NULL},
        {"b2 h8/2 q2 kv900 d64 f16", "kv % 7 != 3", NULL},
        {"b2 h4/4 q1 kv700 d256 bf16", "kv >= 100", NULL},
        {"b2 h2 q40 kv300 d40 f32", "causal()", NULL},
        {"b2 h2 q70 kv300 d36 bf16", NULL, NULL},
    };
    int n_bad = 0, n = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int p = 0; p < SIZES; p++, n++) {
            page_case c = {.problem = rows[i].problem,
                           .mask = rows[i].mask,
                           .score = rows[i].score,
                           .backend = "cuda",
                           .page = sizes[p],
                           .is_known = sizes[p] < 16, /* forward has a program for those */
                           .form = (page_form)((n + n / 4) % FORMS),
                           .is_shared = n % 3 == 0};
            c.layout = c.form == CHUNKS ? NHD : (page_layout)(n % 2);
            n_bad += differs(&c);
        }
    print_message("same_bits: %d cases\n", n);
    assert_int_equal(n_bad, 0);
}

static void absent_pages(void **state)
{
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (int p = 0; p < SIZES; p++) {
        n_bad += differs(&(page_case){.problem = "b2 h2 q130 kv600 d128 bf16",
                                      .mask = "kv >= 300",
                                      .backend = "cuda",
                                      .page = sizes[p],
                                      .dead = 300});
        n_bad += differs(&(page_case){.problem = "b2 h8/2 q1 kv600 d64 bf16",
                                      .mask = "kv >= 300",
                                      .backend = "cuda",
                                      .page = sizes[p],
                                      .form = LAST_PAGES,
                                      .dead = 300});
    }
    assert_int_equal(n_bad, 0);
}

/* What comes out may be anything; nothing outside of the pool is read. */
static void entries_that_lead_out(void **state)
{
    static const int32_t bad[] = {INT32_MAX, INT32_MIN, -2, 1 << 20, 1000};
    static const char *const problems[] = {
        "b2 h2 q130 kv600 d128 bf16", "b2 h8/2 q1 kv600 d64 bf16", "b2 h2 q40 kv300 d40 f32"};
    (void)state;
    if (!has_device())
        skip();
    for (int i = 0; i < 3; i++)
        for (int n = 0; n < 20; n++) {
            const page_case c = {.problem = problems[i],
                                 .backend = "cuda",
                                 .page = n % 2 ? 16 : 1,
                                 .form = (page_form)(n / 5)};
            page_run r;
            page_make(&r, &c);
            r.table[3] = r.table[40 % r.most] = bad[n % 5];
            results x = run_once(&r, 1, NULL);
            drop_results(&x);
            page_free(&r);
        }
}

enum { ALL_GRADIENTS = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V };

/* Every kernel of backward: tiles, smaller ones, wide heads, f32, rows that are not aligned. */
static void gradients(void **state)
{
    static const struct {
        const char *problem, *mask, *score;
    } rows[] = {
        {"b2 h4/2 q200 kv700 d64 bf16", "causal()", NULL},
        {"b3 h2 q130 kv600 d128 bf16", "kv <= q + 500", "alibi()"},
        {"b2 h4/1 q70 kv500 d128 dv64 f16", NULL, "softcap(20)"},
        {"b1 h2 q100 kv300 d256 bf16", "kv % 7 != 3", NULL},
        {"b2 h2/1 q40 kv300 d40 f32", "causal()", NULL},
        {"b2 h2 q70 kv300 d36 dv20 bf16", NULL, NULL},
    };
    int n_bad = 0, n = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int p = 0; p < SIZES; p++, n++) {
            page_case c = {.problem = rows[i].problem,
                           .mask = rows[i].mask,
                           .score = rows[i].score,
                           .backend = "cuda",
                           .gradients = ALL_GRADIENTS,
                           .page = sizes[p],
                           .is_known = n % 2,
                           .form = (page_form)((n + n / 4) % FORMS),
                           .is_shared = n % 3 == 0};
            c.layout = c.form == CHUNKS ? NHD : (page_layout)(n % LAYOUTS);
            if (c.layout == VIEW && strstr(c.problem, "dv"))
                c.layout = HND;
            n_bad += gradients_differ(&c, n % 2 ? SACCADE_F32 : 0, n % 5 == 4, n % 4 == 0 && n % 5 != 4);
        }
    print_message("gradients: %d cases\n", n);
    assert_int_equal(n_bad, 0);
}

/* Keys of absent pages have gradients nowhere. */
static void gradients_of_absent_pages(void **state)
{
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (int p = 0; p < SIZES; p += 2)
        n_bad += gradients_differ(&(page_case){.problem = "b2 h2 q130 kv600 d128 bf16",
                                               .mask = "kv >= 300",
                                               .backend = "cuda",
                                               .gradients = ALL_GRADIENTS,
                                               .page = sizes[p],
                                               .form = p % 4 ? TABLE : LAST_PAGES,
                                               .dead = 300},
                                  0, 0, 0);
    assert_int_equal(n_bad, 0);
}

static void gradients_of_entries_that_lead_out(void **state)
{
    static const int32_t bad[] = {INT32_MAX, INT32_MIN, -2, 1 << 20, 1000};
    const wanted w = {SACCADE_F32, 0};
    (void)state;
    if (!has_device())
        skip();
    for (int n = 0; n < 20; n++) {
        const page_case c = {.problem = "b2 h2 q130 kv600 d64 bf16",
                             .backend = "cuda",
                             .gradients = ALL_GRADIENTS,
                             .page = n % 2 ? 16 : 1,
                             .form = (page_form)(n / 5)};
        page_run r;
        page_make(&r, &c);
        r.table[3] = r.table[40 % r.most] = bad[n % 5];
        results x = run_once(&r, 1, &w);
        drop_results(&x);
        page_free(&r);
    }
}

/* Without a GPU: plans are made, none of their programs spills. */
static void programs_of_gradients(void **state)
{
    static const struct {
        const char *problem, *arch;
    } rows[] = {{"b2 h4/2 q64 kv64 d128 bf16", "sm_90a"}, {"b2 h4 q64 kv64 d40 f32", "sm_80"}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_error err = {0};
        saccade_plan *plan;
        saccade_problem p;
        saccade_problem_init(&p);
        assert_int_equal(plan_parse_problem(rows[i].problem, &p.sizes, &p.dtype, &err), 0);
        p.backend = "cuda";
        p.arch = rows[i].arch;
        p.page = 16;
        p.gradients = ALL_GRADIENTS;
        const cu_state *s;
        if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK) {
            if (!strstr(err.message, "NVRTC"))
                fail_msg("%s", err.message);
            print_message("no NVRTC on this machine: nothing compiled\n");
            skip();
        }
        s = plan->state;
        assert_non_null(s->programs[CU_BWD_PAGES].image.code);
        assert_int_equal(s->programs[CU_BWD_PAGES].image.report.spill_bytes, 0);
        saccade_plan_destroy(plan);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),
        cmocka_unit_test(absent_pages),
        cmocka_unit_test(entries_that_lead_out),
        cmocka_unit_test(gradients),
        cmocka_unit_test(gradients_of_absent_pages),
        cmocka_unit_test(gradients_of_entries_that_lead_out),
        cmocka_unit_test(programs_of_gradients),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
