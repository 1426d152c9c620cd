/* Keys in pages on a CUDA device against the same keys in one piece, bit for bit: prefill and
 * decode, every form of table, layouts of pools, sizes that whole tiles and single rows are
 * copied for, lengths and tables on the device; tables that lead out of the pool. */
#include "support/device_case.h"
#include "support/page_case.h"

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

typedef struct results {
    unsigned char *out, *lse;
    size_t out_bytes, lse_bytes;
} results;

static results run_once(const page_run *r, int is_paged)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t out_shape[] = {s->B, s->H, s->Q, s->Dv};
    saccade_error err;
    saccade_forward_args a;
    saccade_positions at;
    saccade_pages pages = r->at;
    device_copies d = {.n = 0};
    results x;
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
    const results whole = run_once(&r, 0), paged = run_once(&r, 1);
    const int bad = memcmp(whole.out, paged.out, whole.out_bytes) != 0
                    || memcmp(whole.lse, paged.lse, whole.lse_bytes) != 0;
    if (bad)
        print_message("differs: --problem \"%s\" pages of %d, form %d, layout %d, mask %s\n",
                      c->problem, c->page, c->form, c->layout, c->mask ? c->mask : "none");
    free(whole.out);
    free(whole.lse);
    free(paged.out);
    free(paged.lse);
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
            const results x = run_once(&r, 1);
            free(x.out);
            free(x.lse);
            page_free(&r);
        }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),
        cmocka_unit_test(absent_pages),
        cmocka_unit_test(entries_that_lead_out),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
