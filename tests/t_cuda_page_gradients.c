/* Gradients where keys lie in pages, on a CUDA device: those of pools against the sums of those
 * of keys in one piece, bit for bit, and against the reference; absent pages, tables that lead
 * out of the pool. Without a GPU: programs compile without spills. */
#include "support/backward_args.h"
#include "support/device_case.h"
#include "support/page_device.h"
#include "support/problem_case.h"

#include "base/convert.h"
#include "cuda/backward/cuda_backward.h"
#include "plan/gradient_sums.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

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
    for (size_t i = 0; i < page_extent(a) / each; i++) {
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
static int sums_differ(page_run *r, const page_results *whole, const page_results *paged,
                       const page_wanted *w)
{
    static const char *const names[] = {"d_q", "d_k", "d_v"};
    uint64_t *room = malloc(plan_sum_room(&r->sizes));
    const plan_chunks chunks = chunks_of(r);
    int bad = elements_differ(r, &whole->gradient[OF_Q], &paged->gradient[OF_Q], names[0]);
    assert_non_null(room);
    name_pages(r);
    for (int i = OF_K; i < GRADIENTS && !bad; i++) {
        const saccade_tensor *got = &paged->gradient[i];
        saccade_tensor expected = page_gradient(got, w);
        plan_sum_chunks(&whole->gradient[i], &chunks, room, &expected, w->is_added, 1);
        bad = elements_differ(r, &expected, got, names[i]);
        free(expected.data);
    }
    free(room);
    return bad;
}

/* The reference over the same pages, on the host, in float64. */
static double error_of(const page_run *r, const page_results *got)
{
    page_case c = *r->c;
    page_run host = *r;
    saccade_error err;
    saccade_forward_args f;
    const page_wanted wide = {SACCADE_F32, 0, 0};
    double off = 0, most = 0;
    const saccade_sizes *s = &r->sizes;
    c.backend = "ref";
    host.c = &c;
    saccade_plan *plan = page_plan(&host, 1);
    saccade_tensor out = page_tensor(r->dtype, s->B, s->H, s->Q, s->Dv, 1);
    saccade_tensor lse = page_tensor(SACCADE_F32, s->B, s->H, s->Q, 1, 1);
    saccade_tensor d[GRADIENTS] = {page_gradient(&r->q, &wide),
                                   page_gradient(&r->pool_k, &wide),
                                   page_gradient(&r->pool_v, &wide)};
    lse.rank = 3;
    saccade_forward_args_init(&f);
    f.q = &r->q;
    f.k = &r->pool_k;
    f.v = &r->pool_v;
    f.out = &out;
    f.lse = &lse;
    f.positions = &r->pool_at;
    f.pages = &r->at;
    saccade_backward_args a = backward_args_of(&f);
    a.d_out = &r->d_out;
    a.d_q = &d[OF_Q];
    a.d_k = &d[OF_K];
    a.d_v = &d[OF_V];
    f.workspace_bytes = saccade_plan_workspace(plan, s);
    a.workspace_bytes = saccade_plan_backward_workspace(plan, s);
    f.workspace = aligned_alloc(64, f.workspace_bytes / 64 * 64 + 64);
    a.workspace = aligned_alloc(64, a.workspace_bytes / 64 * 64 + 64);
    assert_true(f.workspace && a.workspace);
    if (saccade_forward(plan, &f, &err) || saccade_backward(plan, &a, &err))
        fail_msg("%s: %s: %s", c.problem, err.where, err.message);
    for (int g = 0; g < GRADIENTS; g++) {
        const size_t each = saccade_dtype_bytes(got->gradient[g].dtype);
        for (size_t i = 0; i < page_extent(&d[g]) / 4; i++) {
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

/* w: dtype NONE is the problem's. */
static int gradients_differ(const page_case *c, page_wanted w, int has_reference)
{
    page_run r;
    page_make(&r, c);
    page_clear_ends(&r);
    const page_wanted each = {SACCADE_F32, 0, 0};
    w.dtype = w.dtype ? w.dtype : r.dtype;
    page_results whole = page_run_once(&r, 0, &each), paged = page_run_once(&r, 1, &w);
    page_results again = page_run_once(&r, 1, &w);
    int bad = 0;
    for (int i = 0; i < GRADIENTS; i++)
        bad |= elements_differ(&r, &paged.gradient[i], &again.gradient[i], "again");
    if (has_reference) { /* before tables change */
        const double error = error_of(&r, &paged), most = r.dtype == SACCADE_F32 ? 1e-5 : 0.01;
        if (!(error <= most))
            print_message("error %g: --problem \"%s\"\n", error, c->problem);
        bad |= !(error <= most);
    }
    bad |= sums_differ(&r, &whole, &paged, &w);
    page_drop(&whole);
    page_drop(&paged);
    page_drop(&again);
    page_free(&r);
    return bad;
}

enum { ALL_GRADIENTS = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V };

/* Every kernel of backward but the next test's: tiles, smaller ones, wide heads, f32, rows that
 * are not aligned. */
static void gradients(void **state)
{
    static const page_problem rows[] = {
        {"b2 h4/2 q200 kv700 d64 bf16", "causal()", NULL},
        {"b3 h2 q130 kv600 d128 bf16", "kv <= q + 500", "alibi()"},
        {"b2 h4/1 q70 kv500 d128 dv64 f16", NULL, "softcap(20)"},
        {"b1 h2 q100 kv300 d256 bf16", "kv % 7 != 3", NULL},
        {"b2 h2/1 q40 kv300 d40 f32", "causal()", NULL},
        {"b2 h2 q70 kv300 d36 dv20 bf16", NULL, NULL},
        {"b1 h4/2 q300 kv900 d128 f32", "kv <= q + 500", "softcap(20)"},
    };
    int n_bad = 0, n = 0;
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int p = 0; p < PAGE_SIZES; p++, n++) {
            page_case c = page_case_of(&rows[i], page_sizes[p], n);
            c.gradients = ALL_GRADIENTS;
            if (c.form != CHUNKS)
                c.layout = (page_layout)(n % LAYOUTS);
            if (c.layout == VIEW && strstr(c.problem, "dv"))
                c.layout = HND;
            const page_wanted w = {n % 2 ? SACCADE_F32 : SACCADE_NONE, n % 5 == 4, n % 7 == 3};
            n_bad += gradients_differ(&c, w, n % 4 == 0 && !w.is_added && !w.is_of_heads);
        }
    print_message("gradients: %d cases\n", n);
    assert_int_equal(n_bad, 0);
}

/* The kernels of masks whose rows see few keys, which small problems take where small tiles
 * are asked for. Forward over pages takes large ones, whose bits differ, so that the reference
 * alone is what these are held against. */
static void gradients_of_few_keys(void **state)
{
    static const page_problem row = {"b2 h4/2 q500 kv500 d64 bf16", "q >= kv && q - kv < 90",
                                     NULL};
    (void)state;
    if (!has_device())
        skip();
    setenv("SACCADE_CUDA_TILES", "small", 1);
    for (int p = 0; p < PAGE_SIZES; p++) {
        page_run r;
        page_case c = page_case_of(&row, page_sizes[p], p);
        c.gradients = ALL_GRADIENTS;
        page_make(&r, &c);
        page_clear_ends(&r);
        page_results got = page_run_once(&r, 1, &(page_wanted){r.dtype, 0, 0});
        const double error = error_of(&r, &got);
        if (!(error <= 0.01))
            fail_msg("pages of %d: error %g", page_sizes[p], error);
        page_drop(&got);
        page_free(&r);
    }
    setenv("SACCADE_CUDA_TILES", "large", 1);
}

/* Keys of absent pages have gradients nowhere. */
static void gradients_of_absent_pages(void **state)
{
    int n_bad = 0;
    (void)state;
    if (!has_device())
        skip();
    for (int p = 0; p < PAGE_SIZES; p += 2)
        n_bad += gradients_differ(&(page_case){.problem = "b2 h2 q130 kv600 d128 bf16",
                                               .mask = "kv >= 300",
                                               .backend = "cuda",
                                               .gradients = ALL_GRADIENTS,
                                               .page = page_sizes[p],
                                               .form = p % 4 ? TABLE : LAST_PAGES,
                                               .dead = 300},
                                  (page_wanted){0}, 0);
    assert_int_equal(n_bad, 0);
}

static void gradients_of_entries_that_lead_out(void **state)
{
    const page_wanted w = {SACCADE_F32, 0, 0};
    (void)state;
    if (!has_device())
        skip();
    for (int n = 0; n < PAGE_LEAD_OUT; n++)
        page_lead_out(
            (page_case){.problem = "b2 h2 q130 kv600 d64 bf16", .gradients = ALL_GRADIENTS}, n,
            &w);
}

/* Without a GPU: plans are made, none of their programs spills. */
static void programs_of_gradients(void **state)
{
    static const struct {
        const char *problem, *arch;
    } rows[] = {{"b2 h4/2 q64 kv64 d128 bf16", "sm_90a"}, {"b2 h4 q64 kv64 d40 f32", "sm_80"}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        saccade_problem p;
        saccade_problem_init(&p);
        problem_case(rows[i].problem, &p.sizes, &p.dtype);
        p.backend = "cuda";
        p.arch = rows[i].arch;
        p.page = 16;
        p.gradients = ALL_GRADIENTS;
        expect_plan_does_not_spill(&p, 0, CU_BWD_PAGES);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients),
        cmocka_unit_test(gradients_of_few_keys),
        cmocka_unit_test(gradients_of_absent_pages),
        cmocka_unit_test(gradients_of_entries_that_lead_out),
        cmocka_unit_test(programs_of_gradients),
    };
    setenv("SACCADE_CUDA_TILES", "large", 1); /* small ones, of keys in one piece, differ */
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
