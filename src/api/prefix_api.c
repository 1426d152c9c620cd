/* Which batches begin with the same keys, as the caller says. */
#include "api/api.h"

/* Numbers on the host: groups follow each other over all batches, and no batch has fewer keys
 * than it shares. */
static saccade_status check_numbers(const plan_prefix *p, const plan_run *run,
                                    saccade_error *err)
{
    const int64_t B = run->sizes.B, page = run->chunks->size;
    FAIL_AT(p->groups[0] != 0 || p->groups[p->n] != B, SACCADE_EINVAL, "cu_groups", 0, 0,
            "got %d first and %d last, expected 0 and the %lld batches", p->groups[0],
            p->groups[p->n], (long long)B);
    for (int32_t g = 0; g < p->n; g++) {
        const int64_t len = p->shared[g];
        FAIL_AT(p->groups[g + 1] < p->groups[g] || p->groups[g + 1] > B, SACCADE_EINVAL,
                "cu_groups", 0, 0, "got %d after %d, expected no less and up to %lld",
                p->groups[g + 1], p->groups[g], (long long)B);
        FAIL_AT(len < 0 || len > p->max_keys || len % page, SACCADE_EINVAL, "prefix.lengths", 0,
                0, "got %lld keys for group %d, expected whole pages of %lld, at most %lld",
                (long long)len, g, (long long)page, (long long)p->max_keys);
        for (int64_t b = p->groups[g]; b < p->groups[g + 1]; b++) {
            const int64_t own = plan_position_of(&run->positions, run->sizes.KV, b).kv_len;
            FAIL_AT(
                own < len, SACCADE_EINVAL, "kv_len", 0, 0,
                "got %lld keys for batch %lld, expected the %lld that its group %d shares or "
                "more",
                (long long)own, (long long)b, (long long)len, g);
        }
    }
    return SACCADE_OK;
}

/* What the rest of the run must be. */
static saccade_status check_run(const plan_run *run, saccade_error *err)
{
    const saccade_tensor *q = run->q;
    FAIL_AT(run->chunks->start || !run->chunks->is_paged, SACCADE_EINVAL, "pages", 0, 0,
            "got %s with shared_prefix, expected a table [B, most] of pages",
            run->chunks->start ? "indptr" : "chunks");
    FAIL_AT(run->block_mask, SACCADE_EINVAL, "block_mask", 0, 0,
            "got one with shared_prefix, expected none: keys are run in two parts");
    FAIL_AT(run->positions.kv_offset.dtype != SACCADE_NONE, SACCADE_EINVAL, "kv_offset", 0, 0,
            "got one with shared_prefix, expected none: shared keys begin at 0");
    FAIL_AT(q->shape[0] > 1 && q->shape[2] > 1 && q->stride[0] != q->shape[2] * q->stride[2],
            SACCADE_EINVAL, "q", 0, 0,
            "got batches %lld apart and rows %lld, expected batches at %lld: rows of all "
            "batches at one stride",
            (long long)q->stride[0], (long long)q->stride[2],
            (long long)(q->shape[2] * q->stride[2]));
    FAIL_AT(run->sizes.B * run->sizes.Q > (int64_t)1 << 30, SACCADE_ELIMIT, "q", 0, 0,
            "got too many rows for one run with shared_prefix, expected at most 2^30");
    return SACCADE_OK;
}

saccade_status api_read_prefix(const saccade_plan *plan, const saccade_prefix *given,
                               plan_run *run, plan_prefix *out, saccade_error *err)
{
    const saccade_device_kind device = plan->backend->device;
    saccade_prefix own;
    FAIL_AT(plan->problem.has_prefix != !!given, SACCADE_EINVAL, "prefix", 0, 0,
            "got %s, expected %s: the plan's problem has %s shared_prefix",
            given ? "one" : "none", given ? "none" : "one", given ? "no" : "a");
    if (!given)
        return SACCADE_OK;
    saccade_prefix_init(&own);
    TRY(RECORD_READ(&own, given, "prefix"));
    int64_t groups[1] = {0}, lengths[1] = {0};
    TRY(api_check_tensor(own.cu_groups, &(api_expected){"cu_groups", SACCADE_I32, 1, device},
                         groups, err));
    TRY(api_check_packed(own.cu_groups, "cu_groups", err));
    FAIL_AT(groups[0] < 2 || groups[0] - 1 > run->sizes.B, SACCADE_EINVAL, "cu_groups", 0, 0,
            "got %lld numbers, expected 2 to %lld (batches + 1)", (long long)groups[0],
            (long long)(run->sizes.B + 1));
    lengths[0] = groups[0] - 1;
    TRY(api_check_tensor(own.lengths, &(api_expected){"prefix.lengths", SACCADE_I32, 1, device},
                         lengths, err));
    TRY(api_check_packed(own.lengths, "prefix.lengths", err));
    const int64_t held = run->sizes.KV / run->chunks->size * run->chunks->size;
    FAIL_AT(own.max_keys < 0 || own.max_keys > run->sizes.KV, SACCADE_EINVAL, "max_keys", 0, 0,
            "got %lld, expected 0 to %lld", (long long)own.max_keys, (long long)run->sizes.KV);
    *out = (plan_prefix){.groups = own.cu_groups->data,
                         .shared = own.lengths->data,
                         .n = (int32_t)lengths[0],
                         .max_keys = own.max_keys ? own.max_keys : held};
    run->prefix = out;
    TRY(check_run(run, err));
    return device == SACCADE_CPU ? check_numbers(out, run, err) : SACCADE_OK;
}
