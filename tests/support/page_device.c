/* Problems over pages on a CUDA device: see page_device.h. */
#include "support/page_device.h"

#include "base/convert.h"
#include "support/backward_args.h"

#include <setjmp.h>
#include <stdarg.h>
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

size_t page_extent(const saccade_tensor *t)
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
    void *const to = on_device(d, t->data, page_extent(t));
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

void page_drop(page_results *x)
{
    free(x->out);
    free(x->lse);
    for (int i = 0; i < GRADIENTS; i++)
        free(x->gradient[i].data);
}

/* ---- gradients ---- */

saccade_tensor page_gradient(const saccade_tensor *like, const page_wanted *wanted)
{
    const saccade_dtype dtype = wanted->dtype;
    const float one = 1;
    saccade_tensor x =
        page_tensor(dtype, like->shape[0], like->shape[1], like->shape[2], like->shape[3], 1);
    if (like->stride[0] == 0) /* chunks of rows that batches share */
        x.stride[0] = 0;
    if (wanted->is_of_heads) {
        x.stride[1] = 0;
        x.stride[0] = x.stride[0] ? x.shape[2] * x.shape[3] : 0;
    }
    for (size_t i = 0; wanted->is_added && i < page_extent(&x) / saccade_dtype_bytes(dtype);
         i++)
        convert_from_f32(dtype, &one, (char *)x.data + i * saccade_dtype_bytes(dtype), 1);
    return x;
}

static void run_backward(const page_run *r, const saccade_plan *plan,
                         const saccade_forward_args *f, const page_wanted *w, device_copies *d,
                         page_results *x)
{
    saccade_error err;
    saccade_backward_args a = backward_args_of(f);
    const page_wanted of_q = {r->dtype, 0, 0};
    const saccade_tensor *const inputs[GRADIENTS] = {f->q, f->k, f->v};
    const saccade_tensor **const outputs[GRADIENTS] = {&a.d_q, &a.d_k, &a.d_v};
    a.d_out = moved(d, &r->d_out);
    a.accumulate = w->is_added ? SACCADE_GRADIENT_K | SACCADE_GRADIENT_V : 0;
    for (int i = 0; i < GRADIENTS; i++) {
        x->gradient[i] = page_gradient(inputs[i], i ? w : &of_q);
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
                                page_extent(&x->gradient[i]), &err))
            fail_msg("%s: %s", r->c->problem, err.message);
}

page_results page_run_once(const page_run *r, int is_paged, const page_wanted *w)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t out_shape[] = {s->B, s->H, s->Q, s->Dv};
    saccade_error err;
    saccade_forward_args a;
    saccade_positions at;
    saccade_pages pages = r->at;
    device_copies d = {.n = 0};
    page_results x = {0};
    saccade_plan *plan = page_plan(r, is_paged);
    saccade_tensor out = saccade_tensor_of(NULL, r->dtype, 4, out_shape);
    saccade_tensor lse = saccade_tensor_of(NULL, SACCADE_F32, 3, out_shape);
    out.device.kind = lse.device.kind = SACCADE_CUDA;
    x.out_bytes = page_extent(&out);
    x.lse_bytes = page_extent(&lse);
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
    void *const poison = malloc(a.workspace_bytes + 64);
    assert_non_null(poison);
    memset(poison, 0xff, a.workspace_bytes + 64);
    a.workspace = on_device(&d, poison, a.workspace_bytes + 64);
    free(poison);
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

const int32_t page_sizes[PAGE_SIZES] = {1, 3, 16, 48, 64, 100, 128, 256};

page_case page_case_of(const page_problem *of, int32_t page, int n)
{
    page_case c = {.problem = of->problem,
                   .mask = of->mask,
                   .score = of->score,
                   .backend = "cuda",
                   .page = page,
                   .is_known = n % 2,
                   .form = (page_form)((n + n / 4) % FORMS),
                   .is_shared = n % 3 == 0};
    c.layout = c.form == CHUNKS ? NHD : (page_layout)(n % 2);
    return c;
}

void page_lead_out(page_case c, int n, const page_wanted *w)
{
    static const int32_t bad[] = {INT32_MAX, INT32_MIN, -2, 1 << 20, 1000};
    page_run r;
    c.backend = "cuda";
    c.page = n % 2 ? 16 : 1;
    c.form = (page_form)(n / 5);
    page_make(&r, &c);
    r.table[3] = r.table[40 % r.most] = bad[n % 5];
    page_results x = page_run_once(&r, 1, w);
    page_drop(&x);
    page_free(&r);
}

static void clear_ends(const page_run *r, const saccade_tensor *t)
{
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t j = r->len[b]; j < t->shape[2]; j++)
                memset(page_row(t, b, h, j), 0,
                       (size_t)t->shape[3] * saccade_dtype_bytes(t->dtype));
}

void page_clear_ends(const page_run *r)
{
    clear_ends(r, &r->k);
    clear_ends(r, &r->v);
}
