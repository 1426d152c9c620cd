/* A block mask by proof: the caller's sizes, positions and options, checked. */
#include "mask/mask_build.h"

#include "base/context.h"
#include "base/record.h"
#include "base/status.h"
#include "base/tensor_walk.h"

#include <stdlib.h>

enum { DEFAULT_BLOCK = 128 };

saccade_status mask_check_sizes(const saccade_sizes *s, saccade_error *err)
{
    FAIL_AT(!s, SACCADE_EINVAL, "sizes", 0, 0, "got NULL");
    FAIL_AT(s->B < 1 || s->B > MASK_LENGTH_MAX, SACCADE_EINVAL, "sizes.B", 0, 0,
            "got %lld, expected 1 to 2^30", (long long)s->B);
    FAIL_AT(s->H < 1 || s->H > MASK_LENGTH_MAX, SACCADE_EINVAL, "sizes.H", 0, 0,
            "got %lld, expected 1 to 2^30", (long long)s->H);
    FAIL_AT(s->Q < 1 || s->Q > MASK_LENGTH_MAX, SACCADE_EINVAL, "sizes.Q", 0, 0,
            "got %lld, expected 1 to 2^30", (long long)s->Q);
    FAIL_AT(s->KV < 1 || s->KV > MASK_LENGTH_MAX, SACCADE_EINVAL, "sizes.KV", 0, 0,
            "got %lld, expected 1 to 2^30", (long long)s->KV);
    return SACCADE_OK;
}

/* Offsets of one axis, whose positions stay within 32 bits; t may be NULL. */
static saccade_status read_offset(const saccade_tensor *t, const char *name, int64_t B,
                                  int64_t length, int32_t **out, saccade_error *err)
{
    if (!t)
        return SACCADE_OK;
    FAIL_AT(t->dtype != SACCADE_I32 || t->rank < 0 || t->rank > 1, SACCADE_EINVAL, name, 0, 0,
            "got %s of rank %d, expected i32 of rank 0 or 1", saccade_dtype_name(t->dtype),
            t->rank);
    FAIL_AT(t->device.kind != SACCADE_CPU || !t->data, SACCADE_EINVAL, name, 0, 0,
            "got no data on the CPU, where block masks are made");
    TRY(tensor_check_place(t, name, err));
    FAIL_AT(t->rank == 1 && t->shape[0] != B, SACCADE_EINVAL, name, 0, 0,
            "got shape [%lld], expected [%lld]", (long long)t->shape[0], (long long)B);
    int32_t *offset = malloc((size_t)B * sizeof *offset);
    int any = 0;
    FAIL_IF_NULL(offset);
    *out = offset;
    for (int64_t b = 0; b < B; b++) {
        offset[b] = ((const int32_t *)t->data)[t->rank ? b * t->stride[0] : 0];
        any |= offset[b] != 0;
        FAIL_AT(offset[b] < -MASK_LENGTH_MAX || offset[b] + length - 1 > INT32_MAX,
                SACCADE_EINVAL, name, 0, 0,
                "got %d for batch %lld, expected -2^30 or more and positions within 32 bits",
                offset[b], (long long)b);
    }
    if (!any) {
        free(offset);
        *out = NULL;
    }
    return SACCADE_OK;
}

void mask_free_offsets(mask_offsets *offsets)
{
    free(offsets->q);
    free(offsets->kv);
}

saccade_status mask_read_offsets(const saccade_positions *positions, const saccade_sizes *s,
                                 mask_offsets *out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    saccade_positions p;
    *out = (mask_offsets){NULL, NULL};
    saccade_positions_init(&p);
    if (positions)
        TRY(RECORD_READ(&p, positions, "positions"));
    TRY_GOTO(read_offset(p.q_offset, "q_offset", s->B, s->Q, &out->q, err));
    TRY_GOTO(read_offset(p.kv_offset, "kv_offset", s->B, s->KV, &out->kv, err));
out:
    if (status != SACCADE_OK)
        mask_free_offsets(out);
    return status;
}

static saccade_status read_options(const saccade_block_mask_options *given, mask_recipe *out,
                                   saccade_error *err)
{
    saccade_block_mask_options o;
    saccade_block_mask_options_init(&o);
    if (given)
        TRY(RECORD_READ(&o, given, "block mask options"));
    FAIL_AT(o.block_q < 0 || o.block_kv < 0 || o.block_q > MASK_LENGTH_MAX
                || o.block_kv > MASK_LENGTH_MAX,
            SACCADE_EINVAL, "block", 0, 0, "got %d x %d, expected 1 to 2^30, or 0 for %d",
            o.block_q, o.block_kv, DEFAULT_BLOCK);
    FAIL_AT(o.evaluation_budget < SACCADE_EVALUATE_NONE, SACCADE_EINVAL, "evaluation_budget", 0,
            0, "got %lld, expected positions, 0 for any number or SACCADE_EVALUATE_NONE",
            (long long)o.evaluation_budget);
    out->options = (mask_options){.block_q = o.block_q ? o.block_q : DEFAULT_BLOCK,
                                  .block_kv = o.block_kv ? o.block_kv : DEFAULT_BLOCK,
                                  .evaluation_budget = o.evaluation_budget};
    out->progress = (mask_progress){o.progress, o.progress_user};
    return SACCADE_OK;
}

saccade_status saccade_block_mask_create(saccade_context *context, const saccade_mod *mask,
                                         const saccade_sizes *sizes,
                                         const saccade_positions *positions,
                                         const saccade_binding *bindings, int32_t n_bindings,
                                         const saccade_block_mask_options *options,
                                         saccade_block_mask **out, saccade_error *err)
{
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    mask_offsets offsets;
    FAIL_AT(!out, SACCADE_EINVAL, "block_mask", 0, 0, "got NULL, expected a result");
    FAIL_AT(!mask || !mod_function(mask), SACCADE_EINVAL, "block_mask", 0, 0,
            "got %s, expected a bound mask", mask ? "a mod not bound" : "NULL");
    FAIL_AT(saccade_mod_kind(mask) != SACCADE_MASK, SACCADE_EINVAL, "block_mask", 0, 0,
            "got a score, expected a mask");
    mask_recipe r = {
        .mod = mask, .tensors = tensors, .threads = context ? context->threads : 0};
    TRY(mask_check_sizes(sizes, err));
    r.sizes = *sizes;
    TRY(read_options(options, &r, err));
    TRY(eval_resolve(mod_function(mask), bindings, n_bindings, 1, tensors, err));
    TRY(mask_read_offsets(positions, sizes, &offsets, err));
    r.q_offset = offsets.q;
    r.kv_offset = offsets.kv;
    const saccade_status status = mask_make(&r, out, err);
    mask_free_offsets(&offsets);
    return status;
}
