/* Single arguments: a tensor's dtype, shape, strides and place; outputs that do not overlap
 * themselves; positions. */
#include "api/api.h"

#include "base/tensor_walk.h"

static const char *place_name(saccade_device_kind kind)
{
    return kind == SACCADE_CPU ? "the host" : kind == SACCADE_CUDA ? "a GPU" : "no device";
}

static saccade_status check_lengths(const saccade_tensor *t, const char *name, int64_t *shape,
                                    saccade_error *err)
{
    double reach = 0;
    for (int32_t i = 0; i < t->rank; i++) {
        FAIL_AT(t->shape[i] < 1 || t->shape[i] > (int64_t)1 << 30, SACCADE_EINVAL, name, 0, 0,
                "got length %lld in dimension %d, expected 1 to 2^30", (long long)t->shape[i],
                i);
        FAIL_AT(shape[i] && t->shape[i] != shape[i], SACCADE_EINVAL, name, 0, 0,
                "got length %lld in dimension %d, expected %lld", (long long)t->shape[i], i,
                (long long)shape[i]);
        FAIL_AT(t->stride[i] < 0, SACCADE_EINVAL, name, 0, 0,
                "got stride %lld in dimension %d, expected 0 or more", (long long)t->stride[i],
                i);
        reach += (double)(t->shape[i] - 1) * (double)t->stride[i];
        FAIL_AT(reach > TENSOR_MOST_REACH, SACCADE_EINVAL, name, 0, 0,
                "got stride %lld in dimension %d, expected elements within 2^58 of the first",
                (long long)t->stride[i], i);
        shape[i] = t->shape[i];
    }
    return SACCADE_OK;
}

saccade_status api_check_strided(const saccade_tensor *t, const api_expected *x, int64_t *shape,
                                 saccade_error *err)
{
    const char *name = x->name;
    FAIL_AT(!t, SACCADE_EINVAL, name, 0, 0, "got NULL, expected a tensor");
    FAIL_AT(t->dtype != x->dtype, SACCADE_EINVAL, name, 0, 0, "got dtype %s, expected %s",
            saccade_dtype_name(t->dtype), saccade_dtype_name(x->dtype));
    FAIL_AT(t->rank != x->rank, SACCADE_EINVAL, name, 0, 0, "got rank %d, expected %d", t->rank,
            x->rank);
    FAIL_AT(!t->data, SACCADE_EINVAL, name, 0, 0, "got no data, expected a pointer");
    TRY(tensor_check_place(t, name, err));
    FAIL_AT(t->device.kind != x->device, SACCADE_EINVAL, name, 0, 0,
            "got a tensor on %s (device kind %d), expected one on %s, where this plan runs",
            place_name(t->device.kind), (int)t->device.kind, place_name(x->device));
    return check_lengths(t, name, shape, err);
}

saccade_status api_check_packed(const saccade_tensor *t, const char *name, saccade_error *err)
{
    const int32_t last = t->rank - 1;
    FAIL_AT(t->shape[last] > 1 && t->stride[last] != 1, SACCADE_EINVAL, name, 0, 0,
            "got stride %lld in the last dimension, expected 1", (long long)t->stride[last]);
    return SACCADE_OK;
}

saccade_status api_check_tensor(const saccade_tensor *t, const api_expected *x, int64_t *shape,
                                saccade_error *err)
{
    TRY(api_check_strided(t, x, shape, err));
    return t->rank == 4 ? api_check_packed(t, x->name, err) : SACCADE_OK;
}

/* Two elements of an output must not be one place in memory: a dimension's stride passes over
 * all elements of those with smaller strides. */
saccade_status api_check_output(const saccade_tensor *t, const char *name, saccade_error *err)
{
    for (int32_t i = 0; i < t->rank; i++) {
        const double last = tensor_inner_reach(t, i);
        FAIL_AT(t->shape[i] > 1 && (double)t->stride[i] <= last, SACCADE_EINVAL, name, 0, 0,
                "got stride %lld in dimension %d of an output, expected over %.0f: elements "
                "that do not overlap",
                (long long)t->stride[i], i, last);
    }
    return SACCADE_OK;
}

saccade_status api_check_sum(const saccade_tensor *t, const char *name, saccade_error *err)
{
    saccade_tensor once = *t;
    for (int32_t d = 0; d < t->rank; d++)
        if (t->stride[d] == 0)
            once.shape[d] = 1;
    return api_check_output(&once, name, err);
}

/* One of the positions; absent: dtype NONE in *out. A scalar on the host goes by value to
 * whatever device. */
static saccade_status read_position(const saccade_tensor *t, const api_expected *x, int64_t B,
                                    const int64_t limits[2], saccade_tensor *out,
                                    saccade_error *err)
{
    int64_t shape[1] = {B};
    *out = (saccade_tensor){.dtype = SACCADE_NONE};
    if (!t)
        return SACCADE_OK;
    FAIL_AT(t->rank != 0 && t->rank != 1, SACCADE_EINVAL, x->name, 0, 0,
            "got rank %d, expected 0 or 1", t->rank);
    api_expected expected = *x;
    expected.rank = t->rank;
    if (t->rank == 0 && t->device.kind == SACCADE_CPU)
        expected.device = SACCADE_CPU;
    TRY(api_check_tensor(t, &expected, shape, err));
    *out = *t;
    if (expected.device != SACCADE_CPU)
        return SACCADE_OK;
    for (int64_t b = 0; b < (t->rank ? B : 1); b++) {
        const int64_t at = ((const int32_t *)t->data)[t->rank ? b * t->stride[0] : 0];
        FAIL_AT(at < limits[0] || at > limits[1], SACCADE_EINVAL, x->name, 0, 0,
                "got %lld for batch %lld, expected %lld to %lld", (long long)at, (long long)b,
                (long long)limits[0], (long long)limits[1]);
    }
    return SACCADE_OK;
}

saccade_status api_read_positions(const saccade_positions *positions,
                                  saccade_device_kind device, const saccade_sizes *s,
                                  plan_positions *out, saccade_error *err)
{
    const int64_t most = (int64_t)1 << 30, offsets[2] = {-most, most}, lengths[2] = {0, s->KV};
    const api_expected q = {"q_offset", SACCADE_I32, 0, device};
    const api_expected kv = {"kv_offset", SACCADE_I32, 0, device};
    const api_expected len = {"kv_len", SACCADE_I32, 0, device};
    saccade_positions p;
    saccade_positions_init(&p);
    if (positions)
        TRY(RECORD_READ(&p, positions, "positions"));
    TRY(read_position(p.q_offset, &q, s->B, offsets, &out->q_offset, err));
    TRY(read_position(p.kv_offset, &kv, s->B, offsets, &out->kv_offset, err));
    return read_position(p.kv_len, &len, s->B, lengths, &out->kv_len, err);
}
