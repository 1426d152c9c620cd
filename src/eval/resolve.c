/* Bindings to tensors: every capture gets the one tensor of its name, checked once here, so
   that nothing that reads captures has to. Messages say what, got, expected and name the
   capture as their place. */
#include "eval/eval.h"

#include "base/status.h"
#include "base/tensor_walk.h"
#include "eval/eval_ops.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define BAD(cond, ...) FAIL_AT(cond, SACCADE_EINVAL, name, 0, 0, __VA_ARGS__)

void eval_sizes(const saccade_sizes *sizes, int32_t size[MOD_SIZE_COUNT])
{
    const int64_t from[MOD_SIZE_COUNT] = {
        [SIZE_B] = sizes->B,   [SIZE_H] = sizes->H,   [SIZE_HKV] = sizes->Hkv,
        [SIZE_Q] = sizes->Q,   [SIZE_KV] = sizes->KV, [SIZE_D] = sizes->D,
        [SIZE_DV] = sizes->Dv,
    };
    for (int i = 0; i < MOD_SIZE_COUNT; i++)
        size[i] = from[i] > INT32_MAX ? INT32_MAX : (int32_t)from[i];
}

static int type_of_dtype(saccade_dtype dtype)
{
    if (dtype == SACCADE_BOOL)
        return MOD_BOOL;
    if (dtype >= SACCADE_U8 && dtype <= SACCADE_I64)
        return MOD_INT;
    return dtype >= SACCADE_F16 && dtype <= SACCADE_F64 ? MOD_FLOAT : -1;
}

static const char *name_of_dtype(saccade_dtype dtype)
{
    return type_of_dtype(dtype) < 0 ? "no dtype" : saccade_dtype_name(dtype);
}

/* ---- values ---- */

static bool fits_int32(saccade_dtype dtype, const void *data, int64_t offset)
{
    switch (dtype) {
    case SACCADE_U32:
        return ((const uint32_t *)data)[offset] <= INT32_MAX;
    case SACCADE_U64:
        return ((const uint64_t *)data)[offset] <= INT32_MAX;
    case SACCADE_I64:
        return ((const int64_t *)data)[offset] >= INT32_MIN
               && ((const int64_t *)data)[offset] <= INT32_MAX;
    default:
        return true;
    }
}

static saccade_status fail_value(const char *name, const saccade_tensor *t,
                                 const int64_t *index, int64_t offset, saccade_error *err)
{
    char place[SACCADE_MAX_RANK * 24] = "";
    int at = 0;
    for (int32_t d = 0; d < t->rank; d++)
        at += snprintf(place + at, sizeof place - (size_t)at, "%s%" PRId64, d ? ", " : "[",
                       index[d]);
    if (t->rank > 0)
        snprintf(place + at, sizeof place - (size_t)at, "]");
    if (t->dtype == SACCADE_I64)
        return status_fail_at(err, SACCADE_EVALUE, name, 0, 0,
                              "value%s%s: got %" PRId64 ", expected a 32-bit integer",
                              t->rank ? " at " : "", place, ((const int64_t *)t->data)[offset]);
    const uint64_t value = t->dtype == SACCADE_U64 ? ((const uint64_t *)t->data)[offset]
                                                   : ((const uint32_t *)t->data)[offset];
    return status_fail_at(err, SACCADE_EVALUE, name, 0, 0,
                          "value%s%s: got %" PRIu64 ", expected a 32-bit integer",
                          t->rank ? " at " : "", place, value);
}

/* Whether the dtype has values that fits_int32 refuses. */
static bool may_not_fit(saccade_dtype dtype)
{
    return dtype == SACCADE_I64 || dtype == SACCADE_U64 || dtype == SACCADE_U32;
}

/* fits_int32 for n values, side by side: a loop that the compiler makes vectors of. */
static bool all_fit_int32(saccade_dtype dtype, const void *data, int64_t offset, int64_t n)
{
    uint64_t bad = 0; /* every bit that a value has set */
    if (dtype == SACCADE_U32) {
        for (int64_t i = 0; i < n; i++)
            bad |= ((const uint32_t *)data)[offset + i];
        return bad <= INT32_MAX;
    }
    if (dtype == SACCADE_U64) {
        for (int64_t i = 0; i < n; i++)
            bad |= ((const uint64_t *)data)[offset + i];
        return bad <= INT32_MAX;
    }
    for (int64_t i = 0; i < n; i++)
        bad |= (uint64_t)((const int64_t *)data)[offset + i] + ((uint64_t)1 << 31);
    return bad >> 32 == 0;
}

/* All elements in order of their indices; a dimension of stride 0 is one element. */
static saccade_status scan_values(const char *name, const saccade_tensor *t, saccade_error *err)
{
    const int32_t last = t->rank - 1;
    const bool has_rows = t->rank > 0 && t->stride[last] == 1;
    int64_t index[SACCADE_MAX_RANK] = {0};
    int64_t offset = 0;
    for (;;) {
        const bool is_row_fine = has_rows && index[last] == 0
                                 && all_fit_int32(t->dtype, t->data, offset, t->shape[last]);
        if (!is_row_fine && !fits_int32(t->dtype, t->data, offset))
            return fail_value(name, t, index, offset, err);
        int32_t d = is_row_fine ? last - 1 : last;
        for (; d >= 0; d--) {
            offset += t->stride[d];
            if (++index[d] < t->shape[d] && t->stride[d] != 0)
                break;
            offset -= index[d] * t->stride[d];
            index[d] = 0;
        }
        if (d < 0)
            return SACCADE_OK;
    }
}

/* ---- one capture ---- */

static saccade_status check_dtype(const mod_capture *c, const saccade_tensor *t,
                                  saccade_error *err)
{
    static const char *const classes[] = {"a bool", "an integer", "a float"};
    const char *name = c->name;
    BAD(type_of_dtype(t->dtype) != (int)c->type, "dtype: got %s, expected %s dtype",
        name_of_dtype(t->dtype), classes[c->type]);
    BAD(c->rank > 0 && t->dtype != c->dtype, "dtype: got %s, expected %s as it was bound",
        name_of_dtype(t->dtype), name_of_dtype(c->dtype));
    return SACCADE_OK;
}

/* 48 bits: what a processor can address. */
static const int64_t MOST_ELEMENTS = (int64_t)1 << 48;

/* Offsets of elements, even one past each end, fit 64 bits in bytes; and elements can be
 * counted, those that a stride of 0 repeats once. */
static saccade_status check_span(const char *name, const saccade_tensor *t, saccade_error *err)
{
    const int64_t bytes = (int64_t)saccade_dtype_bytes(t->dtype);
    int64_t up = 0, down = 0, elements = 1;
    for (int32_t d = 0; d < t->rank; d++) {
        int64_t length;
        BAD(__builtin_mul_overflow(t->shape[d], t->stride[d], &length)
                || __builtin_mul_overflow(length, bytes, &length)
                || __builtin_add_overflow(length < 0 ? down : up, length,
                                          length < 0 ? &down : &up)
                || down == INT64_MIN,
            "stride: got %" PRId64 " in dimension %d, expected elements within 2^63 bytes",
            t->stride[d], d);
        if (t->stride[d] == 0)
            continue;
        BAD(t->shape[d] > MOST_ELEMENTS / elements,
            "shape: got over 2^48 elements up to dimension %d, expected fewer", d);
        elements *= t->shape[d] > 0 ? t->shape[d] : 1;
    }
    return SACCADE_OK;
}

/* Sizes of dimensions; has_elements says whether there is anything to read. */
static saccade_status check_shape(const mod_fn *fn, uint32_t capture, const saccade_tensor *t,
                                  bool *has_elements, saccade_error *err)
{
    const char *name = fn->captures[capture].name;
    *has_elements = true;
    for (int32_t d = 0; d < t->rank; d++) {
        BAD(t->shape[d] < 0, "shape: got %" PRId64 " in dimension %d, expected >= 1",
            t->shape[d], d);
        BAD(t->shape[d] > INT32_MAX,
            "shape: got %" PRId64 " in dimension %d, expected at most 2147483647", t->shape[d],
            d);
        BAD(t->shape[d] == 0 && mod_loads(fn, capture),
            "shape: got 0 in dimension %d, which is indexed, expected >= 1", d);
        if (t->shape[d] == 0)
            *has_elements = false;
    }
    return check_span(name, t, err);
}

static saccade_status check_tensor(const mod_fn *fn, uint32_t capture, const saccade_tensor *t,
                                   saccade_device_kind device, int scan, saccade_error *err)
{
    const mod_capture *c = &fn->captures[capture];
    const char *name = c->name;
    const saccade_device_kind wanted = c->rank == 0 ? SACCADE_CPU : device;
    bool has_elements;
    BAD(t->rank != (int32_t)c->rank, "rank: got %d, expected %d", t->rank, c->rank);
    TRY(check_dtype(c, t, err));
    BAD(t->device.kind != wanted, "device: got %s, expected %s%s",
        t->device.kind == SACCADE_CPU ? "cpu" : "cuda", wanted == SACCADE_CPU ? "cpu" : "cuda",
        c->rank == 0 ? " for a scalar" : "");
    TRY(check_shape(fn, capture, t, &has_elements, err));
    BAD(has_elements && t->data == NULL, "data: got NULL");
    if (has_elements)
        TRY(tensor_check_place(t, name, err));
    if (has_elements && wanted == SACCADE_CPU && may_not_fit(t->dtype)
        && (scan || c->rank == 0))
        TRY(scan_values(name, t, err));
    return SACCADE_OK;
}

/* ---- all of them ---- */

static int32_t find_binding(const char *name, const saccade_binding *bindings, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (strcmp(bindings[i].name, name) == 0)
            return i;
    return -1;
}

/* Names that are no capture's, or given twice. */
static saccade_status check_names(const mod_fn *fn, const saccade_binding *bindings, int32_t n,
                                  saccade_error *err)
{
    FAIL_AT(n < 0 || (n > 0 && bindings == NULL), SACCADE_EINVAL, "bindings", 0, 0,
            "got %d and %s, expected an array", n, bindings ? "an array" : "NULL");
    for (int32_t i = 0; i < n; i++) {
        const char *name = bindings[i].name;
        bool is_known = false;
        FAIL_AT(name == NULL, SACCADE_EINVAL, "bindings", 0, 0,
                "got no name in entry %d, expected one", i);
        for (uint32_t c = 0; c < fn->n_captures; c++)
            is_known |= strcmp(fn->captures[c].name, name) == 0;
        BAD(!is_known, "got a value for a name that is not captured");
        BAD(find_binding(name, bindings, i) >= 0, "got two values, expected one");
    }
    return SACCADE_OK;
}

saccade_status eval_resolve_on(const mod_fn *fn, const saccade_binding *bindings,
                               int32_t n_bindings, saccade_device_kind device, int scan,
                               saccade_tensor *tensors, saccade_error *err)
{
    TRY(check_names(fn, bindings, n_bindings, err));
    for (uint32_t c = 0; c < fn->n_captures; c++) {
        const char *name = fn->captures[c].name;
        const int32_t at = find_binding(name, bindings, n_bindings);
        BAD(at < 0, "got no value for this captured name");
        TRY(check_tensor(fn, c, &bindings[at].tensor, device, scan, err));
    }
    for (uint32_t c = 0; c < fn->n_captures; c++)
        tensors[c] = bindings[find_binding(fn->captures[c].name, bindings, n_bindings)].tensor;
    return SACCADE_OK;
}

saccade_status eval_resolve(const mod_fn *fn, const saccade_binding *bindings,
                            int32_t n_bindings, int scan, saccade_tensor *tensors,
                            saccade_error *err)
{
    return eval_resolve_on(fn, bindings, n_bindings, SACCADE_CPU, scan, tensors, err);
}
