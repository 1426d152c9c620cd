/* Scales of quantised K and V: checked, found and applied. */
#include "plan/plan.h"

#include "base/convert.h"
#include "base/quantize.h"
#include "base/status.h"
#include "base/tensor_walk.h"

#include <string.h>

plan_scale_row plan_scales_of(const saccade_tensor *t, const plan_groups *groups, int64_t b,
                              int64_t g, int64_t row)
{
    const int64_t bytes = (int64_t)saccade_dtype_bytes(t->dtype);
    const int64_t group = groups->tokens ? row / groups->tokens : 0;
    const int64_t at = (t->shape[0] == 1 ? 0 : b * t->stride[0])
                       + (t->shape[1] == 1 ? 0 : g * t->stride[1]) + group * t->stride[2];
    return (plan_scale_row){(const char *)t->data + at * bytes, t->stride[3] * bytes};
}

static float scale_at(const saccade_tensor *t, plan_scale_row row, int64_t group)
{
    const char *at = row.at + group * row.stride;
    float x;
    uint16_t half;
    if (t->dtype == SACCADE_F16) {
        memcpy(&half, at, sizeof half);
        return f16_to_f32(half);
    }
    memcpy(&x, at, sizeof x);
    return x;
}

void plan_load_key(const saccade_tensor *t, const saccade_tensor *scale,
                   const plan_groups *groups, int64_t b, int64_t g, int64_t row, float *to)
{
    const int64_t at = b * t->stride[0] + g * t->stride[1] + row * t->stride[2];
    const char *from = (const char *)t->data + quant_bytes(t->dtype, at);
    const int64_t D = t->shape[3];
    if (!quant_is_dtype(t->dtype)) {
        convert_to_f32(t->dtype, from, to, D);
        return;
    }
    quant_decode(t->dtype, from, 0, D, to);
    if (!scale)
        return;
    const plan_scale_row scales = plan_scales_of(scale, groups, b, g, row);
    for (int64_t d = 0; d < D; d++)
        to[d] *= scale_at(scale, scales, groups->channels ? d / groups->channels : 0);
}

double plan_key_element(const saccade_tensor *t, const saccade_tensor *scale,
                        const plan_groups *groups, int64_t b, int64_t g, int64_t row, int64_t d)
{
    const int64_t at = b * t->stride[0] + g * t->stride[1] + row * t->stride[2];
    float code;
    quant_decode(t->dtype, (const char *)t->data + quant_bytes(t->dtype, at), d, 1, &code);
    if (!scale)
        return code;
    return (double)code
           * (double)scale_at(scale, plan_scales_of(scale, groups, b, g, row),
                              groups->channels ? d / groups->channels : 0);
}

static saccade_status check_length(const saccade_tensor *t, int dimension, int64_t least,
                                   int64_t most, const char *name, saccade_error *err)
{
    const int64_t n = t->shape[dimension];
    FAIL_AT(n < least || n > most, SACCADE_EINVAL, name, 0, 0,
            "got length %lld in dimension %d, expected %lld%s", (long long)n, dimension,
            (long long)least, most > least ? " or more" : "");
    FAIL_AT(t->stride[dimension] < 0, SACCADE_EINVAL, name, 0, 0,
            "got stride %lld in dimension %d, expected 0 or more",
            (long long)t->stride[dimension], dimension);
    return SACCADE_OK;
}

saccade_status plan_check_scales(const saccade_tensor *t, const char *name,
                                 const int64_t shape[4], const plan_groups *groups,
                                 saccade_device_kind device, saccade_error *err)
{
    const int32_t tokens = groups->tokens, channels = groups->channels;
    if (!t) {
        FAIL_AT(tokens || channels, SACCADE_EINVAL, name, 0, 0,
                "got NULL, expected a tensor: the problem has groups of rows or channels");
        return SACCADE_OK;
    }
    FAIL_AT(t->dtype != SACCADE_F32 && t->dtype != SACCADE_F16, SACCADE_EINVAL, name, 0, 0,
            "got dtype %s, expected f32 or f16", saccade_dtype_name(t->dtype));
    FAIL_AT(t->rank != 4, SACCADE_EINVAL, name, 0, 0, "got rank %d, expected 4", t->rank);
    FAIL_AT(!t->data, SACCADE_EINVAL, name, 0, 0, "got no data, expected a pointer");
    TRY(tensor_check_place(t, name, err));
    FAIL_AT(t->device.kind != device, SACCADE_EINVAL, name, 0, 0,
            "got a tensor on %s, expected one on %s, where this plan runs",
            t->device.kind == SACCADE_CPU ? "the host" : "a GPU",
            device == SACCADE_CPU ? "the host" : "a GPU");
    for (int i = 0; i < 2; i++)
        if (t->shape[i] != 1)
            TRY(check_length(t, i, shape[i], shape[i], name, err));
    const int64_t rows = tokens ? (shape[2] + tokens - 1) / tokens : 1;
    const int64_t groups_of_row = channels ? (shape[3] + channels - 1) / channels : 1;
    TRY(check_length(t, 2, rows, tokens ? INT64_MAX : 1, name, err));
    return check_length(t, 3, groups_of_row, groups_of_row, name, err);
}
