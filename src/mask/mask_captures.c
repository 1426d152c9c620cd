/* Captures of a block mask: their content, by which a mask knows that it is stale, and whether
 * a run's are those that it was proven from: whole blocks come from the proof, the others from
 * the run, and of two documents each would give its part. */
#include "mask/mask_build.h"

#include "base/hash.h"
#include "base/status.h"
#include "base/tensor_walk.h"

#include <stdlib.h>
#include <string.h>

/* ---- their content ---- */

static void hash_element(hash128 *hash, const saccade_tensor *t, int64_t off)
{
    const size_t bytes = saccade_dtype_bytes(t->dtype);
    hash_add(hash, (const char *)t->data + off * (int64_t)bytes, bytes);
}

/* Elements below dimension d, in the order of their indices. */
static void hash_dimension(hash128 *hash, const saccade_tensor *t, int d, int64_t off)
{
    if (d == t->rank) {
        hash_element(hash, t, off);
    } else if (d == t->rank - 1 && t->stride[d] == 1) {
        const size_t bytes = saccade_dtype_bytes(t->dtype);
        hash_add(hash, (const char *)t->data + off * (int64_t)bytes,
                 (size_t)t->shape[d] * bytes);
    } else {
        const int64_t n = tensor_places(t, d);
        for (int64_t i = 0; i < n; i++)
            hash_dimension(hash, t, d + 1, off + i * t->stride[d]);
    }
}

uint64_t mask_hash_captures(const saccade_block_mask *mask)
{
    const mod_fn *fn = mask->mod ? mod_function(mask->mod) : NULL;
    hash128 hash;
    hash_init(&hash);
    for (uint32_t i = 0; fn && i < fn->n_captures; i++)
        hash_dimension(&hash, &mask->tensors[i], 0, 0);
    return hash.a ^ hash.b;
}

/* ---- of a run and of the proof ---- */

void mask_keep_scalars(saccade_block_mask *mask)
{
    const mod_fn *fn = mask->mod ? mod_function(mask->mod) : NULL;
    for (uint32_t i = 0; fn && i < fn->n_captures; i++) {
        const saccade_tensor *t = &mask->tensors[i];
        if (t->rank == 0)
            mask->scalars[i] = eval_read(t->dtype, t->data, 0);
    }
}

static int have_same_strides(const saccade_tensor *a, const saccade_tensor *b)
{
    for (int32_t d = 0; d < a->rank; d++)
        if (a->shape[d] > 1 && a->stride[d] != b->stride[d])
            return 0;
    return 1;
}

/* What tells two tensors apart; NULL: nothing, or they cannot be compared. */
static const char *difference(const saccade_tensor *a, const saccade_tensor *b)
{
    if (a->device.kind != b->device.kind)
        return NULL;
    if (a->rank != b->rank || memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape))
        return "another shape";
    if (a->dtype != b->dtype)
        return "another dtype";
    if (a->data != b->data)
        return "another address";
    return have_same_strides(a, b) ? NULL : "other strides";
}

static saccade_status check_capture(const saccade_block_mask *mask, uint32_t which,
                                    const saccade_tensor *got, saccade_error *err)
{
    const char *name = mod_function(mask->mod)->captures[which].name;
    if (got->rank == 0) {
        FAIL_AT(eval_read(got->dtype, got->data, 0).i != mask->scalars[which].i, SACCADE_EINVAL,
                name, 0, 0,
                "got another value than the block mask was proven with, expected the same, or "
                "a block mask made anew or updated");
        return SACCADE_OK;
    }
    const char *what = difference(got, &mask->tensors[which]);
    FAIL_AT(what, SACCADE_EINVAL, name, 0, 0,
            "got a tensor of %s than the block mask was proven from, expected the "
            "same one, or a block mask made from this one",
            what);
    return SACCADE_OK;
}

saccade_status mask_check_captures(const saccade_block_mask *mask, const mod_fn *fn,
                                   const saccade_tensor *tensors, saccade_error *err)
{
    const mod_fn *proven = mod_function(mask->mod);
    for (uint32_t i = 0; i < fn->n_captures; i++)
        for (uint32_t j = 0; j < proven->n_captures; j++)
            if (strcmp(fn->captures[i].name, proven->captures[j].name) == 0)
                TRY(check_capture(mask, j, &tensors[i], err));
    return SACCADE_OK;
}
