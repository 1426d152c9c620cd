/* saccade_append: what the caller gives, checked and read into kv_append. Where keys go is
 * checked key by key when they go there. */
#include "api/api.h"
#include "cuda/small/small.h"
#include "kv/kv.h"
#include "saccade_kv.h"

#include "base/quantize.h"

typedef struct append_call {
    saccade_append_args args;
    saccade_pages pages;
    saccade_device_kind device;
    int64_t keys, heads, pages_there, page;
} append_call;

/* ---- K or V ---- */

static int is_number(saccade_dtype dtype)
{
    return dtype == SACCADE_F32 || dtype == SACCADE_F16 || dtype == SACCADE_BF16;
}

typedef struct append_names {
    const char *from, *pool, *scale;
} append_names;

static saccade_status check_pair(append_call *c, const append_names *names,
                                 const saccade_tensor *from, const saccade_tensor *pool,
                                 saccade_error *err)
{
    FAIL_AT(!from, SACCADE_EINVAL, names->from, 0, 0, "got NULL, expected a tensor");
    FAIL_AT(!pool, SACCADE_EINVAL, names->pool, 0, 0, "got NULL, expected a tensor");
    FAIL_AT(!is_number(from->dtype), SACCADE_EINVAL, names->from, 0, 0,
            "got dtype %s, expected f32, f16 or bf16", saccade_dtype_name(from->dtype));
    FAIL_AT(!is_number(pool->dtype) && !quant_is_dtype(pool->dtype), SACCADE_EINVAL,
            names->pool, 0, 0, "got dtype %s, expected f32, f16, bf16, e4m3, e5m2, i8 or i4",
            saccade_dtype_name(pool->dtype));
    const api_expected new_keys = {names->from, from->dtype, 3, c->device};
    const api_expected there = {names->pool, pool->dtype, 4, c->device};
    int64_t shape[3] = {c->keys, c->heads, 0};
    TRY(api_check_tensor(from, &new_keys, shape, err));
    FAIL_AT(shape[2] > 1 && from->stride[2] != 1, SACCADE_EINVAL, names->from, 0, 0,
            "got stride %lld in the last dimension, expected 1", (long long)from->stride[2]);
    int64_t pools[4] = {c->pages_there, shape[1], c->page, shape[2]};
    TRY(api_check_tensor(pool, &there, pools, err));
    for (int i = 0; i < 3; i++)
        FAIL_AT(pool->dtype == SACCADE_I4 && pool->stride[i] % 2 != 0, SACCADE_EINVAL,
                names->pool, 0, 0,
                "got stride %lld in dimension %d of i4, expected an even number",
                (long long)pool->stride[i], i);
    TRY(api_check_output(pool, names->pool, err));
    c->heads = shape[1];
    c->pages_there = pools[0];
    c->page = pools[2];
    return SACCADE_OK;
}

/* Scales of one key each are made: they must be its alone. */
static saccade_status check_scale(const append_call *c, const append_names *names,
                                  const saccade_tensor *pool, const saccade_tensor *scale,
                                  const plan_groups *groups, saccade_error *err)
{
    FAIL_AT(groups->tokens < 0 || groups->channels < 0, SACCADE_EINVAL, names->scale, 0, 0,
            "got groups of %d rows and %d channels, expected 0 (all) or more", groups->tokens,
            groups->channels);
    FAIL_AT((groups->tokens || groups->channels) && !quant_is_dtype(pool->dtype),
            SACCADE_EINVAL, names->scale, 0, 0,
            "got groups of %d rows and %d channels with a pool of %s, expected 0 with it",
            groups->tokens, groups->channels, saccade_dtype_name(pool->dtype));
    FAIL_AT(scale && !quant_is_dtype(pool->dtype), SACCADE_EINVAL, names->scale, 0, 0,
            "got a tensor, expected NULL: the pool is of %s", saccade_dtype_name(pool->dtype));
    TRY(plan_check_scales(scale, names->scale, pool->shape, groups, c->device, err));
    if (!scale || groups->tokens != 1)
        return SACCADE_OK;
    for (int i = 0; i < 2; i++)
        FAIL_AT(scale->shape[i] != pool->shape[i], SACCADE_EINVAL, names->scale, 0, 0,
                "got length %lld in dimension %d, expected %lld: scales of one key are made",
                (long long)scale->shape[i], i, (long long)pool->shape[i]);
    return api_check_output(scale, names->scale, err);
}

/* Whether four elements from a multiple of 4 on can be moved at a time. */
static int is_even(const saccade_tensor *t, int dimensions)
{
    const int64_t bytes = quant_bytes(t->dtype, 4);
    int64_t all = t->shape[dimensions];
    for (int i = 0; i < dimensions; i++)
        all |= t->stride[i];
    return all % 4 == 0 && (uintptr_t)t->data % (uintptr_t)bytes == 0;
}

static append_side side_of(const saccade_tensor *from, const saccade_tensor *pool,
                           const saccade_tensor *scale, const plan_groups *groups)
{
    append_side s = {.from = from->data,
                     .to = pool->data,
                     .from_n = from->stride[0],
                     .from_h = from->stride[1],
                     .to_b = pool->stride[0],
                     .to_h = pool->stride[1],
                     .to_n = pool->stride[2],
                     .from_dtype = (int)from->dtype,
                     .to_dtype = (int)pool->dtype,
                     .D = (int)pool->shape[3],
                     .tokens = groups->tokens,
                     .channels = groups->channels,
                     .is_even = is_even(from, 2) && is_even(pool, 3)};
    if (!scale)
        return s;
    s.scale = scale->data;
    s.scale_b = scale->shape[0] == 1 ? 0 : scale->stride[0];
    s.scale_h = scale->shape[1] == 1 ? 0 : scale->stride[1];
    s.scale_n = scale->stride[2];
    s.scale_d = scale->stride[3];
    s.is_made = groups->tokens == 1;
    s.scale_is_f16 = scale->dtype == SACCADE_F16;
    return s;
}

static saccade_status read_sides(append_call *c, kv_append *out, saccade_error *err)
{
    static const append_names k = {"k", "k_pool", "k_scale"}, v = {"v", "v_pool", "v_scale"};
    const saccade_append_args *a = &c->args;
    const plan_groups k_groups = {a->k_scale_tokens, a->k_scale_channels};
    const plan_groups v_groups = {a->v_scale_tokens, a->v_scale_channels};
    TRY(check_pair(c, &k, a->k, a->k_pool, err));
    TRY(check_scale(c, &k, a->k_pool, a->k_scale, &k_groups, err));
    out->side[0] = side_of(a->k, a->k_pool, a->k_scale, &k_groups);
    out->sides = 1;
    if (!a->v && !a->v_pool)
        return SACCADE_OK;
    TRY(check_pair(c, &v, a->v, a->v_pool, err));
    TRY(check_scale(c, &v, a->v_pool, a->v_scale, &v_groups, err));
    out->side[1] = side_of(a->v, a->v_pool, a->v_scale, &v_groups);
    out->sides = 2;
    return SACCADE_OK;
}

/* ---- where keys go ---- */

static saccade_status check_numbers(const append_call *c, const saccade_tensor *t,
                                    const char *name, int64_t n, saccade_error *err)
{
    const api_expected expected = {name, SACCADE_I32, 1, c->device};
    int64_t shape[1] = {n};
    return api_check_tensor(t, &expected, shape, err);
}

static saccade_status read_slots(const append_call *c, kv_append *out, saccade_error *err)
{
    const saccade_append_args *a = &c->args;
    const saccade_tensor *t = a->slots;
    const api_expected expected = {"slots", t->dtype, 1, c->device};
    int64_t shape[1] = {c->keys};
    FAIL_AT(t->dtype != SACCADE_I32 && t->dtype != SACCADE_I64, SACCADE_EINVAL, "slots", 0, 0,
            "got dtype %s, expected i32 or i64", saccade_dtype_name(t->dtype));
    FAIL_AT(a->pages || a->kv_len || a->cu_seqlens, SACCADE_EINVAL, "slots", 0, 0,
            "got them and pages, kv_len or cu_seqlens, expected one way to say where keys go");
    TRY(api_check_tensor(t, &expected, shape, err));
    out->slots = t->data;
    out->slot_stride = t->stride[0];
    out->is_long = t->dtype == SACCADE_I64;
    return SACCADE_OK;
}

static saccade_status read_table(append_call *c, kv_append *out, saccade_error *err)
{
    const saccade_tensor *t = c->pages.table;
    const int is_packed = c->pages.indptr != NULL;
    const api_expected expected = {"table", SACCADE_I32, is_packed ? 1 : 2, c->device};
    int64_t shape[2] = {0, 0};
    FAIL_AT(c->pages.chunk, SACCADE_EINVAL, "chunk", 0, 0,
            "got %lld, expected 0: new keys go to pages", (long long)c->pages.chunk);
    TRY(api_check_tensor(t, &expected, shape, err));
    TRY(api_check_packed(t, "table", err));
    out->table = t->data;
    out->columns = (int)shape[is_packed ? 0 : 1];
    out->row_stride = is_packed ? 0 : t->stride[0];
    if (is_packed) {
        TRY(check_numbers(c, c->pages.indptr, "indptr", 0, err));
        TRY(api_check_packed(c->pages.indptr, "indptr", err));
        out->start = c->pages.indptr->data;
    }
    out->B = (int)(is_packed ? c->pages.indptr->shape[0] - 1 : shape[0]);
    FAIL_AT(out->B < 1, SACCADE_EINVAL, "indptr", 0, 0, "got one number, expected B + 1");
    return SACCADE_OK;
}

static saccade_status read_lengths(const append_call *c, kv_append *out, saccade_error *err)
{
    const saccade_append_args *a = &c->args;
    const saccade_tensor *last = a->pages ? c->pages.last_page_len : NULL;
    const char *name = last ? "last_page_len" : "kv_len";
    const saccade_tensor *t = last ? last : a->kv_len;
    FAIL_AT(last && (a->kv_len || !out->start), SACCADE_EINVAL, name, 0, 0,
            "got it %s, expected one of them and indptr",
            a->kv_len ? "and kv_len" : "without indptr");
    TRY(check_numbers(c, t, name, out->B, err));
    out->is_last_page = last != NULL;
    out->length = t->data;
    out->length_stride = t->stride[0];
    if (a->cu_seqlens) {
        TRY(check_numbers(c, a->cu_seqlens, "cu_seqlens", (int64_t)out->B + 1, err));
        TRY(api_check_packed(a->cu_seqlens, "cu_seqlens", err));
        out->first = a->cu_seqlens->data;
    }
    FAIL_AT(!out->first && c->keys % out->B, SACCADE_EINVAL, "cu_seqlens", 0, 0,
            "got NULL, expected numbers: %lld keys are not as many for each of %d batches",
            (long long)c->keys, out->B);
    return SACCADE_OK;
}

static saccade_status read_places(append_call *c, kv_append *out, saccade_error *err)
{
    if (c->args.slots)
        return read_slots(c, out, err);
    if (c->args.pages) {
        saccade_pages_init(&c->pages);
        TRY(RECORD_READ(&c->pages, c->args.pages, "pages"));
        TRY(read_table(c, out, err));
    } else {
        out->B = (int)c->pages_there;
    }
    return read_lengths(c, out, err);
}

/* ---- calls ---- */

saccade_status saccade_append(const saccade_context *context, const saccade_append_args *args,
                              saccade_error *err)
{
    append_call c = {.device = SACCADE_CPU};
    kv_append a = {.sides = 0};
    saccade_context defaults;
    FAIL_AT(!args, SACCADE_EINVAL, "append", 0, 0, "got NULL, expected arguments");
    saccade_append_args_init(&c.args);
    TRY(RECORD_READ(&c.args, args, "arguments"));
    FAIL_AT(!c.args.k, SACCADE_EINVAL, "k", 0, 0, "got NULL, expected a tensor");
    if (c.args.k->rank == 3 && c.args.k->shape[0] == 0)
        return SACCADE_OK;
    c.device = c.args.k->device.kind;
    FAIL_AT(c.device != SACCADE_CPU && c.device != SACCADE_CUDA, SACCADE_EINVAL, "k", 0, 0,
            "got device kind %d, expected the host or a GPU", (int)c.device);
    c.keys = c.args.k->rank == 3 ? c.args.k->shape[0] : 0;
    TRY(read_sides(&c, &a, err));
    TRY(read_places(&c, &a, err));
    a.n = c.keys;
    a.heads = (int)c.heads;
    a.pages = c.pages_there;
    a.page = (int)c.page;
    if (c.device == SACCADE_CUDA)
        return cu_append(&a, c.args.k->device.index, c.args.stream, err);
    if (!context) {
        TRY(api_context(NULL, &defaults, err));
        context = &defaults;
    }
    kv_append_keys(&a, context->threads);
    return SACCADE_OK;
}

saccade_status saccade_append_prepare(int32_t device, saccade_error *err)
{
    return cu_append_prepare(device, err);
}
