/* Sequences of unequal lengths: their first rows are checked, and tensors [T, H, D] become
 * views [1, H, T, D], which is how back ends take them (plan_ragged). */
#include "api/api.h"

/* Numbers on the host; those on a GPU are bounded by its kernels. */
static saccade_status check_numbers(const saccade_tensor *t, const char *name, int64_t *longest,
                                    saccade_error *err)
{
    const int32_t *at = t->data;
    const int64_t most = *longest;
    FAIL_AT(at[0] < 0, SACCADE_EINVAL, name, 0, 0, "got %d first, expected 0 or more", at[0]);
    *longest = 0;
    for (int64_t b = 0; b + 1 < t->shape[0]; b++) {
        const int64_t n = (int64_t)at[b + 1] - at[b];
        FAIL_AT(n < 0, SACCADE_EINVAL, name, 0, 0,
                "got %d at %lld after %d, expected numbers that do not fall", at[b + 1],
                (long long)b + 1, at[b]);
        FAIL_AT(most && n > most, SACCADE_EINVAL, name, 0, 0,
                "got length %lld for sequence %lld, expected %lld (its max) or less",
                (long long)n, (long long)b, (long long)most);
        *longest = n > *longest ? n : *longest;
    }
    *longest = most ? most : *longest;
    return SACCADE_OK;
}

/* One of the two; *first stays NULL where there is none. */
static saccade_status read_numbers(const saccade_plan *plan, const saccade_tensor *t,
                                   const char *name, int64_t *B, int64_t *longest,
                                   const int32_t **first, int64_t *most, saccade_error *err)
{
    int64_t shape[1] = {*B ? *B + 1 : 0};
    const api_expected expected = {name, SACCADE_I32, 1, plan->backend->device};
    FAIL_AT(*longest < 0 || *longest > (int64_t)1 << 30, SACCADE_EINVAL, name, 0, 0,
            "got a longest of %lld, expected 0 to 2^30", (long long)*longest);
    if (!t)
        return SACCADE_OK;
    TRY(api_check_tensor(t, &expected, shape, err));
    FAIL_AT(shape[0] < 2 || t->stride[0] != 1, SACCADE_EINVAL, name, 0, 0,
            "got %lld numbers at stride %lld, expected 2 or more (B + 1) at stride 1",
            (long long)shape[0], (long long)t->stride[0]);
    *B = shape[0] - 1;
    *first = t->data;
    FAIL_AT(expected.device != SACCADE_CPU && !*longest, SACCADE_EINVAL, name, 0, 0,
            "got no longest (max_q, max_kv) beside numbers on a GPU, expected 1 or more");
    if (expected.device != SACCADE_CPU)
        return SACCADE_OK;
    *most = (*first)[*B];
    return check_numbers(t, name, longest, err);
}

saccade_status api_read_ragged(const saccade_plan *plan, const saccade_ragged *given,
                               api_ragged *out, saccade_error *err)
{
    saccade_ragged own;
    *out = (api_ragged){.is_given = given != NULL};
    FAIL_AT(plan->problem.is_ragged != out->is_given, SACCADE_EINVAL, "ragged", 0, 0,
            "got %s, expected %s: the plan's problem is %sragged", given ? "one" : "none",
            given ? "none" : "one", given ? "not " : "");
    if (!given)
        return SACCADE_OK;
    saccade_ragged_init(&own);
    TRY(RECORD_READ(&own, given, "ragged"));
    FAIL_AT(own.align_end != 0 && own.align_end != 1, SACCADE_EINVAL, "align_end", 0, 0,
            "got %d, expected 0 or 1", own.align_end);
    out->run.is_end = own.align_end;
    out->max_q = own.max_q;
    out->max_kv = own.max_kv;
    TRY(read_numbers(plan, own.cu_seqlens_q, "cu_seqlens_q", &out->B, &out->max_q,
                     &out->run.q_first, &out->most_q, err));
    return read_numbers(plan, own.cu_seqlens_kv, "cu_seqlens_kv", &out->B, &out->max_kv,
                        &out->run.kv_first, &out->most_kv, err);
}

/* ---- tensors ---- */

const char api_nothing[64];

static saccade_status view(const saccade_tensor **given, int32_t rank, int64_t most,
                           const char *name, saccade_tensor *out, saccade_error *err)
{
    const saccade_tensor *t = *given;
    if (!t)
        return SACCADE_OK;
    FAIL_AT(t->rank != rank, SACCADE_EINVAL, name, 0, 0,
            "got rank %d, expected %d: the run is ragged", t->rank, rank);
    FAIL_AT(t->shape[0] < most, SACCADE_EINVAL, name, 0, 0,
            "got %lld rows, expected the %lld of cu_seqlens or more", (long long)t->shape[0],
            (long long)most);
    *out = *t;
    *given = out;
    out->rank = rank + 1;
    out->shape[0] = 1;
    out->stride[0] = 0;
    out->shape[1] = t->shape[1];
    out->stride[1] = t->stride[1];
    out->shape[2] = t->shape[0];
    out->stride[2] = t->stride[0];
    out->shape[3] = rank == 3 ? t->shape[2] : 0;
    out->stride[3] = rank == 3 ? t->stride[2] : 0;
    FAIL_AT(t->shape[0] == 0 && t->device.kind != SACCADE_CPU, SACCADE_EINVAL, name, 0, 0,
            "got no rows on a GPU, expected one or more");
    if (t->shape[0] == 0) {
        out->data = (void *)(uintptr_t)api_nothing;
        out->shape[2] = 1;
        out->stride[3] = rank == 3;
    }
    return SACCADE_OK;
}

saccade_status api_view_rows(const api_ragged *ragged, const saccade_tensor **t, int32_t rank,
                             const char *name, saccade_tensor *out, saccade_error *err)
{
    return ragged->run.q_first ? view(t, rank, ragged->most_q, name, out, err) : SACCADE_OK;
}

saccade_status api_view_keys(const api_ragged *ragged, const saccade_tensor **t,
                             const char *name, saccade_tensor *out, saccade_error *err)
{
    return ragged->run.kv_first ? view(t, 3, ragged->most_kv, name, out, err) : SACCADE_OK;
}

saccade_status api_set_ragged(const api_inputs *in, plan_run *run, saccade_error *err)
{
    const api_ragged *r = in->ragged;
    const int64_t B = r->B ? r->B : run->sizes.B;
    FAIL_AT(r->run.is_end && in->positions && in->positions->q_offset, SACCADE_EINVAL,
            "q_offset", 0, 0,
            "got one with align_end, which says where rows stand, expected NULL");
    FAIL_AT(r->run.kv_first && in->pages, SACCADE_EINVAL, "cu_seqlens_kv", 0, 0,
            "got some with pages, expected lengths as pages have them (positions.kv_len)");
    run->ragged = &r->run;
    run->sizes.B = B;
    run->sizes.Q = r->run.q_first ? r->max_q : run->sizes.Q;
    run->sizes.KV = r->run.kv_first ? r->max_kv : run->sizes.KV;
    return SACCADE_OK;
}

saccade_sizes api_row_sizes(const plan_run *run)
{
    saccade_sizes s = run->sizes;
    s.B = run->q->shape[0];
    s.Q = run->q->shape[2];
    return s;
}
