/* kv_store.c: a cache [layer][page][kv head][token][dim], scales of quantised ones
 * [layer][page][kv head][token][groups], and a table of where the sequence's pages lie, which
 * saccade_kv makes; in one piece it is one page of the whole context. */
#include "kv_store.h"

#include <saccade.h>
#include <saccade_kv.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct half { /* keys or values */
    void *elements;
    float *scales; /* NULL: f32 */
} half;

struct kv_store {
    kv_store_form form;
    saccade_dtype dtype;
    int64_t groups, page, pages;
    saccade_kv *book; /* NULL: one piece */
    int32_t sequence;
    int32_t *table; /* [pages] */
    half keys, values;
    saccade_context *context_of;
    saccade_plan *plan;
    void *workspace;
    size_t workspace_bytes;
    double seconds;
};

static int wrong(const saccade_error *err, trouble *t)
{
    return refuse(t, "saccade: %s: %s", err->where, err->message);
}

static int make_plan(kv_store *s, int64_t chunk, int threads, trouble *t)
{
    static const char text[] = "causal()";
    const kv_store_form *f = &s->form;
    saccade_error err;
    saccade_mod *generic = NULL, *mask = NULL;
    saccade_problem problem;
    saccade_context_options options;
    saccade_context_options_init(&options);
    options.threads = threads;
    saccade_problem_init(&problem);
    problem.sizes = (saccade_sizes){1, f->heads, f->kv_heads, 0, 0, f->dim, f->dim};
    problem.backend = "cpu";
    problem.kv_dtype = s->dtype;
    problem.page = f->page;
    if (s->groups) {
        problem.k_scale_tokens = problem.v_scale_tokens = 1;
        problem.k_scale_channels = problem.v_scale_channels = (int32_t)(f->dim / s->groups);
    }
    int is_wrong = saccade_context_create(&options, &s->context_of, &err)
                   || saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, &err)
                   || saccade_mod_bind(generic, NULL, 0, &mask, &err);
    problem.mask = mask;
    is_wrong = is_wrong || saccade_plan_create(s->context_of, &problem, &s->plan, &err);
    saccade_mod_destroy(mask);
    saccade_mod_destroy(generic);
    if (is_wrong)
        return wrong(&err, t);
    const saccade_sizes most = {1,      f->heads, f->kv_heads, chunk, s->pages * s->page,
                                f->dim, f->dim};
    s->workspace_bytes = (saccade_plan_workspace(s->plan, &most) + 63) / 64 * 64;
    s->workspace = aligned_alloc(64, s->workspace_bytes + 64);
    return s->workspace ? 0 : refuse(t, "no memory for attention's workspace");
}

static int find_type(kv_store *s, trouble *t)
{
    static const saccade_dtype types[] = {SACCADE_F32, SACCADE_E4M3, SACCADE_E5M2, SACCADE_I8,
                                          SACCADE_I4};
    const kv_store_form *f = &s->form;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(f->type, saccade_dtype_name(types[i])) == 0)
            s->dtype = types[i];
    if (s->dtype == SACCADE_NONE)
        return refuse(t, "--cache: got \"%s\", expected f32, e4m3, e5m2, i8 or i4", f->type);
    const int64_t group = f->group ? f->group : f->dim;
    if (f->dim % group || (s->dtype == SACCADE_I4 && f->dim % 2))
        return refuse(t, "--group: got %lld, expected a divisor of the %lld channels",
                      (long long)group, (long long)f->dim);
    s->groups = s->dtype == SACCADE_F32 ? 0 : f->dim / group;
    return 0;
}

static int make_table(kv_store *s, trouble *t)
{
    saccade_kv_options options;
    saccade_error err;
    s->page = s->form.page ? s->form.page : s->form.context;
    s->pages = (s->form.context + s->page - 1) / s->page;
    s->table = calloc((size_t)s->pages, sizeof *s->table);
    if (!s->table)
        return refuse(t, "no memory for a table of %lld pages", (long long)s->pages);
    if (!s->form.page)
        return 0;
    saccade_kv_options_init(&options);
    options.pages = s->pages;
    options.page = s->page;
    options.sequences = 1;
    const int is_wrong = saccade_kv_create(&options, &s->book, &err)
                         || saccade_kv_add(s->book, &s->sequence, &err);
    return is_wrong ? wrong(&err, t) : 0;
}

static int make_half(const kv_store *s, half *out, trouble *t)
{
    const kv_store_form *f = &s->form;
    const size_t rows = (size_t)(f->layers * f->kv_heads * s->pages * s->page);
    const size_t bytes = (size_t)f->dim * saccade_dtype_bytes(s->dtype);
    out->elements = calloc(rows, bytes); /* of i4 twice what it takes */
    out->scales = s->groups ? calloc(rows, (size_t)s->groups * sizeof *out->scales) : NULL;
    if (out->elements && (out->scales || !s->groups))
        return 0;
    return refuse(t, "no memory for keys and values of %lld tokens", (long long)f->context);
}

int kv_store_make(const kv_store_form *form, int64_t chunk, int threads, kv_store **out,
                  trouble *t)
{
    kv_store *s = calloc(1, sizeof *s);
    *out = s;
    if (!s)
        return refuse(t, "no memory for a cache");
    s->form = *form;
    if (find_type(s, t) || make_table(s, t) || make_half(s, &s->keys, t)
        || make_half(s, &s->values, t))
        return -1;
    return make_plan(s, chunk, threads, t);
}

void kv_store_free(kv_store *s)
{
    if (!s)
        return;
    saccade_plan_destroy(s->plan);
    saccade_context_destroy(s->context_of);
    free(s->workspace);
    saccade_kv_destroy(s->book);
    free(s->table);
    free(s->keys.elements);
    free(s->keys.scales);
    free(s->values.elements);
    free(s->values.scales);
    free(s);
}

/* [1, heads, n, dim] with these strides. */
static saccade_tensor view(const void *data, saccade_dtype dtype, int64_t heads, int64_t n,
                           int64_t dim, int64_t head_stride, int64_t row_stride)
{
    const int64_t shape[] = {1, heads, n, dim};
    saccade_tensor x = saccade_tensor_of((void *)(uintptr_t)data, dtype, 4, shape);
    x.stride[1] = head_stride;
    x.stride[2] = row_stride;
    return x;
}

static const char *place_of(const kv_store *s, const half *h, int64_t elements)
{
    const int64_t bytes = s->dtype == SACCADE_I4
                              ? elements / 2
                              : elements * (int64_t)saccade_dtype_bytes(s->dtype);
    return (const char *)h->elements + bytes;
}

/* Tokens [from, from + n) of a layer, which lie in one page. */
static saccade_tensor kept(const kv_store *s, const half *h, int64_t layer, int64_t from,
                           int64_t n)
{
    const kv_store_form *f = &s->form;
    const int64_t plane = s->page * f->dim;
    const int64_t page = layer * s->pages + s->table[from / s->page];
    const char *at = place_of(s, h, page * f->kv_heads * plane + from % s->page * f->dim);
    return view(at, s->dtype, f->kv_heads, n, f->dim, plane, f->dim);
}

/* The pages of a layer. */
static saccade_tensor pool_of(const kv_store *s, const half *h, int64_t layer)
{
    const kv_store_form *f = &s->form;
    const int64_t shape[] = {s->pages, f->kv_heads, s->page, f->dim};
    const char *at = place_of(s, h, layer * s->pages * f->kv_heads * s->page * f->dim);
    return saccade_tensor_of((void *)(uintptr_t)at, s->dtype, 4, shape);
}

/* Their scales. */
static saccade_tensor scales_of(const kv_store *s, const half *h, int64_t layer, int64_t from,
                                int64_t n)
{
    const int64_t plane = s->page * s->groups;
    const int64_t page = layer * s->pages + s->table[from / s->page];
    const float *at = h->scales + page * s->form.kv_heads * plane + from % s->page * s->groups;
    return view(at, SACCADE_F32, s->form.kv_heads, n, s->groups, plane, s->groups);
}

static saccade_tensor pool_scales(const kv_store *s, const half *h, int64_t layer)
{
    const int64_t shape[] = {s->pages, s->form.kv_heads, s->page, s->groups};
    const int64_t rows = layer * s->pages * s->form.kv_heads * s->page;
    return saccade_tensor_of(h->scales + rows * s->groups, SACCADE_F32, 4, shape);
}

/* from [kv_heads][dim] of each row, into one page */
static int append_piece(const kv_store *s, const half *h, int64_t layer, const float *from,
                        int64_t past, int64_t n, trouble *t)
{
    const kv_store_form *f = &s->form;
    const int64_t row = (f->heads + 2 * f->kv_heads) * f->dim;
    const saccade_tensor to = kept(s, h, layer, past, n);
    if (!s->groups) {
        for (int64_t i = 0; i < n; i++)
            for (int64_t g = 0; g < f->kv_heads; g++)
                memcpy((float *)to.data + g * to.stride[1] + i * to.stride[2],
                       from + i * row + g * f->dim, (size_t)f->dim * sizeof *from);
        return 0;
    }
    const saccade_tensor rows = view(from, SACCADE_F32, f->kv_heads, n, f->dim, f->dim, row);
    const saccade_tensor scale = scales_of(s, h, layer, past, n);
    saccade_quantize_args args;
    saccade_error err;
    saccade_quantize_args_init(&args);
    args.from = &rows;
    args.to = &to;
    args.scale = &scale;
    args.tokens = 1;
    args.channels = (int32_t)(f->dim / s->groups);
    return saccade_quantize(s->context_of, &args, &err) ? wrong(&err, t) : 0;
}

static int append_half(const kv_store *s, const half *h, int64_t layer, const float *from,
                       int64_t past, int64_t n, trouble *t)
{
    const int64_t row = (s->form.heads + 2 * s->form.kv_heads) * s->form.dim;
    for (int64_t done = 0, piece; done < n; done += piece) {
        const int64_t left = s->page - (past + done) % s->page;
        piece = left < n - done ? left : n - done;
        if (append_piece(s, h, layer, from + done * row, past + done, piece, t))
            return -1;
    }
    return 0;
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* Pages for n more tokens, of all layers. */
static int grow(kv_store *s, int64_t n, trouble *t)
{
    const int32_t count = (int32_t)n;
    saccade_error err;
    const int is_wrong =
        saccade_kv_grow(s->book, &s->sequence, &count, 1, &err)
        || saccade_kv_table(s->book, &s->sequence, 1, s->table, s->pages, NULL, &err);
    return is_wrong ? wrong(&err, t) : 0;
}

int kv_store_attend(kv_store *s, int64_t layer, const float *rows, int64_t past, int64_t n,
                    float *out, trouble *t)
{
    const kv_store_form *f = &s->form;
    const int64_t d = f->dim, row = (f->heads + 2 * f->kv_heads) * d;
    const float *keys = rows + f->heads * d;
    saccade_error err;
    saccade_tensor k_scale, v_scale;
    if (s->book && layer == 0 && grow(s, n, t))
        return -1;
    if (append_half(s, &s->keys, layer, keys, past, n, t)
        || append_half(s, &s->values, layer, keys + f->kv_heads * d, past, n, t))
        return -1;
    const double begin = now();
    const saccade_tensor q = view(rows, SACCADE_F32, f->heads, n, d, d, row);
    const int is_paged = f->page > 0;
    const saccade_tensor k =
        is_paged ? pool_of(s, &s->keys, layer) : kept(s, &s->keys, layer, 0, past + n);
    const saccade_tensor v =
        is_paged ? pool_of(s, &s->values, layer) : kept(s, &s->values, layer, 0, past + n);
    const saccade_tensor o = view(out, SACCADE_F32, f->heads, n, d, d, f->heads * d);
    int32_t offset = (int32_t)past, length = (int32_t)(past + n);
    const saccade_tensor offset_of = saccade_tensor_of(&offset, SACCADE_I32, 0, NULL);
    const saccade_tensor length_of = saccade_tensor_of(&length, SACCADE_I32, 0, NULL);
    const int64_t of_table[] = {1, s->pages};
    const saccade_tensor table = saccade_tensor_of(s->table, SACCADE_I32, 2, of_table);
    saccade_pages pages;
    saccade_positions positions;
    saccade_forward_args args;
    saccade_positions_init(&positions);
    positions.q_offset = &offset_of;
    saccade_pages_init(&pages);
    pages.table = &table;
    saccade_forward_args_init(&args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.out = &o;
    args.positions = &positions;
    if (is_paged) {
        positions.kv_len = &length_of;
        args.pages = &pages;
    }
    if (s->groups) {
        k_scale = is_paged ? pool_scales(s, &s->keys, layer)
                           : scales_of(s, &s->keys, layer, 0, past + n);
        v_scale = is_paged ? pool_scales(s, &s->values, layer)
                           : scales_of(s, &s->values, layer, 0, past + n);
        args.k_scale = &k_scale;
        args.v_scale = &v_scale;
    }
    args.workspace = s->workspace;
    args.workspace_bytes = s->workspace_bytes;
    const saccade_status status = saccade_forward(s->plan, &args, &err);
    s->seconds += now() - begin;
    return status ? wrong(&err, t) : 0;
}

double kv_store_seconds(const kv_store *s)
{
    return s->seconds;
}

char *kv_store_explain(const kv_store *s, trouble *t)
{
    char *text = NULL, *copy;
    saccade_error err;
    if (saccade_plan_explain(s->plan, &text, &err)) {
        wrong(&err, t);
        return NULL;
    }
    copy = strdup(text);
    saccade_free(text);
    return copy;
}
