/* kv_store.c: a contiguous cache [layer][kv head][context][dim], in which a head's keys lie in
 * one piece whatever the length. */
#include "kv_store.h"

#include <saccade.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct kv_store {
    int64_t layers, heads, kv_heads, dim, context;
    float *keys, *values;
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
    saccade_error err;
    saccade_mod *generic = NULL, *mask = NULL;
    saccade_problem problem;
    saccade_context_options options;
    saccade_context_options_init(&options);
    options.threads = threads;
    saccade_problem_init(&problem);
    problem.sizes = (saccade_sizes){1, s->heads, s->kv_heads, 0, 0, s->dim, s->dim};
    problem.backend = "cpu";
    int is_wrong = saccade_context_create(&options, &s->context_of, &err)
                   || saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, &err)
                   || saccade_mod_bind(generic, NULL, 0, &mask, &err);
    problem.mask = mask;
    is_wrong = is_wrong || saccade_plan_create(s->context_of, &problem, &s->plan, &err);
    saccade_mod_destroy(mask);
    saccade_mod_destroy(generic);
    if (is_wrong)
        return wrong(&err, t);
    const saccade_sizes most = {1, s->heads, s->kv_heads, chunk, s->context, s->dim, s->dim};
    s->workspace_bytes = (saccade_plan_workspace(s->plan, &most) + 63) / 64 * 64;
    s->workspace = aligned_alloc(64, s->workspace_bytes + 64);
    return s->workspace ? 0 : refuse(t, "no memory for attention's workspace");
}

int kv_store_make(int64_t layers, int64_t heads, int64_t kv_heads, int64_t dim, int64_t context,
                  int64_t chunk, int threads, kv_store **out, trouble *t)
{
    kv_store *s = calloc(1, sizeof *s);
    *out = s;
    if (!s)
        return refuse(t, "no memory for a cache");
    *s = (kv_store){
        .layers = layers, .heads = heads, .kv_heads = kv_heads, .dim = dim, .context = context};
    const size_t elements = (size_t)(layers * kv_heads) * (size_t)(context * dim);
    s->keys = calloc(elements, sizeof *s->keys);
    s->values = calloc(elements, sizeof *s->values);
    if (s->keys && s->values)
        return make_plan(s, chunk, threads, t);
    return refuse(t, "no memory for keys and values of %lld tokens", (long long)context);
}

void kv_store_free(kv_store *s)
{
    if (!s)
        return;
    saccade_plan_destroy(s->plan);
    saccade_context_destroy(s->context_of);
    free(s->workspace);
    free(s->keys);
    free(s->values);
    free(s);
}

static void append(kv_store *s, int64_t layer, const float *rows, int64_t past, int64_t n)
{
    const int64_t row = (s->heads + 2 * s->kv_heads) * s->dim;
    const size_t bytes = (size_t)s->dim * sizeof *rows;
    for (int64_t i = 0; i < n; i++)
        for (int64_t g = 0; g < s->kv_heads; g++) {
            const float *key = rows + i * row + (s->heads + g) * s->dim;
            const int64_t at = ((layer * s->kv_heads + g) * s->context + past + i) * s->dim;
            memcpy(s->keys + at, key, bytes);
            memcpy(s->values + at, key + s->kv_heads * s->dim, bytes);
        }
}

/* [1, heads, n, dim] with these strides. */
static saccade_tensor view(const float *data, int64_t heads, int64_t n, int64_t dim,
                           int64_t head_stride, int64_t row_stride)
{
    const int64_t shape[] = {1, heads, n, dim};
    saccade_tensor x = saccade_tensor_of((void *)(uintptr_t)data, SACCADE_F32, 4, shape);
    x.stride[1] = head_stride;
    x.stride[2] = row_stride;
    return x;
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

int kv_store_attend(kv_store *s, int64_t layer, const float *rows, int64_t past, int64_t n,
                    float *out, trouble *t)
{
    saccade_error err;
    append(s, layer, rows, past, n);
    const double begin = now();
    const int64_t d = s->dim, plane = s->context * d, first = layer * s->kv_heads * plane;
    const int64_t row = (s->heads + 2 * s->kv_heads) * d;
    const saccade_tensor q = view(rows, s->heads, n, d, d, row);
    const saccade_tensor k = view(s->keys + first, s->kv_heads, past + n, d, plane, d);
    const saccade_tensor v = view(s->values + first, s->kv_heads, past + n, d, plane, d);
    const saccade_tensor o = view(out, s->heads, n, d, d, s->heads * d);
    int32_t offset = (int32_t)past;
    const saccade_tensor offset_of = saccade_tensor_of(&offset, SACCADE_I32, 0, NULL);
    saccade_positions positions;
    saccade_forward_args args;
    saccade_positions_init(&positions);
    positions.q_offset = &offset_of;
    saccade_forward_args_init(&args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.out = &o;
    args.positions = &positions;
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
