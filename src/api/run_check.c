/* What every run of a plan takes, forward or not: inputs, positions, captures, a block mask,
 * workspace. They are checked in this order: a message is about the first that is wrong. */
#include "api/api.h"

#include "base/quantize.h"

#include <string.h>

/* ---- tensors ---- */

/* Scales of K or V; rows of i4 begin at whole bytes. */
static saccade_status check_quantised(const saccade_plan *plan, const saccade_tensor *t,
                                      const char *name, const saccade_tensor *scale,
                                      const char *scale_name, const plan_groups *groups,
                                      saccade_error *err)
{
    const saccade_dtype dtype = plan->problem.kv_dtype;
    FAIL_AT(scale && !quant_is_dtype(dtype), SACCADE_EINVAL, scale_name, 0, 0,
            "got scales with kv_dtype %s, expected NULL", saccade_dtype_name(dtype));
    for (int i = 0; i < 3; i++)
        FAIL_AT(dtype == SACCADE_I4 && t->stride[i] % 2 != 0, SACCADE_EINVAL, name, 0, 0,
                "got stride %lld in dimension %d of i4, expected an even number",
                (long long)t->stride[i], i);
    return plan_check_scales(scale, scale_name, t->shape, groups, plan->backend->device, err);
}

static saccade_status read_tensors(const saccade_plan *plan, const api_inputs *in,
                                   plan_run *run, plan_chunks *chunks, saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    const saccade_device_kind device = plan->backend->device;
    const api_ragged *r = in->ragged;
    const int64_t B = r ? r->B : 0; /* 0: that of q */
    saccade_pages pages;
    TRY(api_start_pages(plan, in, &pages, err));
    int64_t q[4] = {r && r->run.q_first ? 1 : B, p->sizes.H, 0, p->sizes.D};
    TRY(api_check_tensor(in->q, &(api_expected){"q", p->dtype, 4, device}, q, err));
    const int is_pool = p->page && !pages.chunk;
    const int64_t kB = r && r->run.kv_first ? 1 : B ? B : q[0];
    int64_t k[4] = {is_pool ? 0 : kB, p->sizes.Hkv, 0, p->sizes.D};
    TRY(api_check_tensor(in->k, &(api_expected){"k", p->kv_dtype, 4, device}, k, err));
    int64_t v[4] = {k[0], p->sizes.Hkv, k[2], p->sizes.Dv};
    TRY(api_check_tensor(in->v, &(api_expected){"v", p->kv_dtype, 4, device}, v, err));
    run->q = in->q;
    run->k = in->k;
    run->v = in->v;
    run->k_scale = in->k_scale;
    run->v_scale = in->v_scale;
    TRY(check_quantised(plan, in->k, "k", in->k_scale, "k_scale", &p->k_groups, err));
    TRY(check_quantised(plan, in->v, "v", in->v_scale, "v_scale", &p->v_groups, err));
    run->sizes = (saccade_sizes){q[0], p->sizes.H, p->sizes.Hkv, q[2], k[2], q[3], v[3]};
    if (r && r->is_given)
        TRY(api_set_ragged(in, run, err));
    return p->page ? api_read_pages(plan, &pages, run, chunks, err) : SACCADE_OK;
}

saccade_status api_check_stats(const saccade_plan *plan, const saccade_tensor *t,
                               const char *name, const saccade_sizes *s, saccade_error *err)
{
    int64_t shape[3] = {s->B, s->H, s->Q};
    if (!t)
        return SACCADE_OK;
    const int is_wide = plan->problem.dtype == SACCADE_F64 && t->dtype == SACCADE_F64;
    const api_expected expected = {name, is_wide ? SACCADE_F64 : SACCADE_F32, 3,
                                   plan->backend->device};
    TRY(api_check_tensor(t, &expected, shape, err));
    return api_check_output(t, name, err);
}

/* ---- sinks ---- */

saccade_status api_read_sinks(const saccade_plan *plan, const saccade_tensor *t, int64_t rows,
                              plan_run *run, saccade_error *err)
{
    static const char name[] = "sinks";
    const plan_problem *p = &plan->problem;
    const saccade_sizes *s = &run->sizes;
    const int is_wanted = p->sinks_dtype != SACCADE_NONE;
    if (!t && !rows && !(p->gradients & SACCADE_GRADIENT_SINKS))
        return SACCADE_OK; /* a rank without rows has no sinks of its own */
    FAIL_AT(is_wanted != (t != NULL), SACCADE_EINVAL, name, 0, 0,
            "got %s tensor, expected %s: the plan's problem has %s", t ? "a" : "no",
            t ? "none" : "one", t ? "no sinks_dtype" : "a sinks_dtype");
    if (!t)
        return SACCADE_OK;
    FAIL_AT(t->rank != 1 && t->rank != 3, SACCADE_EINVAL, name, 0, 0,
            "got rank %d, expected 1 ([H]) or 3 ([B, H, Q])", t->rank);
    const int is_each = t->rank == 3;
    int64_t shape[3] = {is_each ? t->shape[0] == 1 ? 1 : s->B : p->sizes.H, p->sizes.H,
                        is_each && t->shape[2] == 1 ? 1 : rows};
    const api_expected expected = {name, p->sinks_dtype, t->rank, plan->backend->device};
    TRY(api_check_tensor(t, &expected, shape, err));
    run->sinks = (plan_sinks){.data = t->data, .dtype = t->dtype};
    if (!is_each)
        run->sinks.stride[1] = t->stride[0];
    for (int d = 0; d < 3 && is_each; d++)
        run->sinks.stride[d] = t->shape[d] == 1 ? 0 : t->stride[d];
    return SACCADE_OK;
}

/* ---- captures ---- */

static int has_capture(const mod_fn *fn, const char *name)
{
    for (uint32_t i = 0; fn && i < fn->n_captures; i++)
        if (strcmp(fn->captures[i].name, name) == 0)
            return 1;
    return 0;
}

static const saccade_binding *find_binding(const saccade_binding *bindings, int32_t n,
                                           const char *name)
{
    for (int32_t i = 0; i < n; i++)
        if (bindings[i].name && strcmp(bindings[i].name, name) == 0)
            return &bindings[i];
    return NULL;
}

/* Gives fn the bindings it names, and where one is missing the tensor a block mask was proven
 * from. */
static saccade_status resolve(const mod_fn *fn, const api_inputs *in,
                              saccade_device_kind device, const saccade_block_mask *proven,
                              saccade_tensor *tensors, saccade_error *err)
{
    saccade_binding mine[MOD_MAX_CAPTURES];
    const mask_view *view = proven ? mask_get_view(proven) : NULL;
    const mod_fn *from = view && view->mod ? mod_function(view->mod) : NULL;
    int32_t n = 0;
    for (uint32_t i = 0; fn && i < fn->n_captures; i++) {
        const char *name = fn->captures[i].name;
        const saccade_binding *b = find_binding(in->bindings, in->n_bindings, name);
        if (b) {
            mine[n++] = *b;
            continue;
        }
        for (uint32_t j = 0; from && j < from->n_captures; j++)
            if (strcmp(from->captures[j].name, name) == 0)
                mine[n++] = (saccade_binding){name, view->env.tensors[j]};
    }
    return fn ? eval_resolve_on(fn, mine, n, device, device == SACCADE_CPU, tensors, err)
              : SACCADE_OK;
}

static saccade_status check_bindings(const saccade_plan *plan, const api_inputs *in,
                                     saccade_error *err)
{
    FAIL_AT(in->n_bindings < 0 || in->n_bindings > 2 * MOD_MAX_CAPTURES
                || (in->n_bindings && !in->bindings),
            SACCADE_EINVAL, "bindings", 0, 0, "got %d%s, expected 0 to %d and their array",
            in->n_bindings, in->bindings ? "" : " and NULL", 2 * MOD_MAX_CAPTURES);
    for (int32_t i = 0; i < in->n_bindings; i++) {
        const char *name = in->bindings[i].name;
        FAIL_AT(!name, SACCADE_EINVAL, "bindings", 0, 0,
                "got no name in entry %d, expected one", i);
        FAIL_AT(!has_capture(plan->source_score, name) && !has_capture(plan->source_mask, name)
                    && !has_capture(plan->source_weight, name),
                SACCADE_EINVAL, name, 0, 0, "got a binding that no text names, expected none");
        FAIL_AT(find_binding(in->bindings, i, name), SACCADE_EINVAL, name, 0, 0,
                "got two bindings of one name, expected one");
    }
    return SACCADE_OK;
}

static saccade_status read_captures(const saccade_plan *plan, const api_inputs *in,
                                    plan_run *run, api_captures *captures, saccade_error *err)
{
    const saccade_device_kind device = plan->backend->device;
    TRY(resolve(plan->problem.score, in, device, NULL, captures->score, err));
    TRY(resolve(plan->problem.mask, in, device, in->block_mask, captures->mask, err));
    if (in->block_mask && plan->problem.mask)
        TRY(mask_check_captures(in->block_mask, plan->problem.mask, captures->mask, err));
    TRY(resolve(plan->problem.weight, in, device, NULL, captures->weight, err));
    TRY(api_read_dropout(plan, in->dropout, captures->weight, run, err));
    plan_set_env(&plan->problem, &run->sizes, &run->score_env);
    plan_set_env(&plan->problem, &run->sizes, &run->mask_env);
    run->score_env.tensors = captures->score;
    run->mask_env.tensors = captures->mask;
    return SACCADE_OK;
}

/* ---- block mask ---- */

static saccade_status check_block_mask(const saccade_plan *plan, const plan_run *run,
                                       saccade_error *err)
{
    static const char name[] = "block_mask";
    const mask_view *view = mask_get_view(run->block_mask);
    const saccade_sizes *s = &run->sizes;
    const saccade_sizes *made = &view->sizes;
    FAIL_AT(made->Q != s->Q || made->KV != s->KV, SACCADE_EINVAL, name, 0, 0,
            "got one of %lld x %lld positions, expected %lld x %lld (see block_mask_window)",
            (long long)made->Q, (long long)made->KV, (long long)s->Q, (long long)s->KV);
    FAIL_AT(made->B != 1 && made->B != s->B, SACCADE_EINVAL, name, 0, 0,
            "got batch %lld, expected %lld or 1", (long long)made->B, (long long)s->B);
    FAIL_AT(made->H != 1 && made->H != plan->problem.heads_global, SACCADE_EINVAL, name, 0, 0,
            "got %lld heads, expected %d or 1", (long long)made->H, plan->problem.heads_global);
    FAIL_AT(!view->mod != !plan->source_mask, SACCADE_EINVAL, name, 0, 0,
            "the plan %s a mask and the block mask %s one, expected both or neither",
            plan->source_mask ? "has" : "lacks", view->mod ? "has" : "lacks");
    FAIL_AT(view->mod && !mask_is_of(run->block_mask, plan->source_mask, plan->number),
            SACCADE_EINVAL, name, 0, 0,
            "got one made from another mask, expected the plan's (saccade_block_mask_mod)");
    eval_env env;
    plan_set_env(&plan->problem, s, &env);
    TRY(mask_check_run(run->block_mask, env.size, err));
    for (int64_t b = 0; plan->backend->device == SACCADE_CPU && b < s->B; b++) {
        const plan_position p = plan_position_in(run, b);
        const int64_t at = made->B == 1 ? 0 : b;
        FAIL_AT(p.q_offset != (view->q_offset ? view->q_offset[at] : 0)
                    || p.kv_offset != (view->kv_offset ? view->kv_offset[at] : 0),
                SACCADE_EINVAL, name, 0, 0,
                "got other offsets for batch %lld than it was made for (q %d, kv %d)",
                (long long)b, p.q_offset, p.kv_offset);
    }
    return SACCADE_OK;
}

/* What a proof over the longest lengths says of a sequence, the text must say of it alone. */
static saccade_status check_ragged_mask(const plan_run *run, const mod_fn *mask,
                                        saccade_error *err)
{
    FAIL_AT(run->ragged && plan_names_length(mask), SACCADE_EINVAL, "block_mask", 0, 0,
            "got one whose text names Q or KV in a ragged run, where they differ by "
            "sequence: expected none (tiles are then proven while running)");
    return SACCADE_OK;
}

/* Keys of a sequence that may be live are its own. */
static saccade_status check_ragged_lengths(const plan_run *run, saccade_error *err)
{
    const saccade_tensor *t = &run->positions.kv_len;
    const int32_t *first = run->ragged ? run->ragged->kv_first : NULL;
    if (!first || t->dtype == SACCADE_NONE || t->device.kind != SACCADE_CPU)
        return SACCADE_OK;
    for (int64_t b = 0; b < run->sizes.B; b++) {
        const int32_t len = ((const int32_t *)t->data)[t->rank ? b * t->stride[0] : 0];
        FAIL_AT(len > first[b + 1] - first[b], SACCADE_EINVAL, "kv_len", 0, 0,
                "got %d for sequence %lld, expected 0 to its %d keys", len, (long long)b,
                first[b + 1] - first[b]);
    }
    return SACCADE_OK;
}

/* ---- all of it ---- */

saccade_status api_read_context(const saccade_plan *plan, const api_inputs *in, plan_run *run,
                                api_captures *captures, saccade_error *err)
{
    TRY(api_read_positions(in->positions, plan->backend->device, &run->sizes, &run->positions,
                           err));
    TRY(api_read_page_lengths(plan, in, run, err));
    if (plan->backend->device == SACCADE_CPU)
        TRY(check_ragged_lengths(run, err));
    TRY(check_bindings(plan, in, err));
    run->block_mask = in->block_mask;
    if (run->block_mask)
        TRY(check_block_mask(plan, run, err));
    if (run->block_mask)
        TRY(check_ragged_mask(run, plan->source_mask, err));
    return read_captures(plan, in, run, captures, err);
}

saccade_status api_read_inputs(const saccade_plan *plan, const api_inputs *in, plan_run *run,
                               api_captures *captures, saccade_error *err)
{
    TRY(read_tensors(plan, in, run, &captures->chunks, err));
    TRY(api_read_sinks(plan, in->sinks, run->sizes.Q, run, err));
    FAIL_AT(run->ragged && in->sinks && in->sinks->rank == 3 && in->sinks->shape[2] > 1,
            SACCADE_EINVAL, "sinks", 0, 0,
            "got one for each row in a ragged run, expected [H] or [B, H, 1]");
    return api_read_context(plan, in, run, captures, err);
}

saccade_status api_read_workspace(const api_inputs *in, size_t bytes, plan_run *run,
                                  saccade_error *err)
{
    FAIL_AT(in->workspace_bytes < bytes, SACCADE_EINVAL, "workspace", 0, 0,
            "got %zu bytes, expected %zu or more", in->workspace_bytes, bytes);
    FAIL_AT(bytes && !in->workspace, SACCADE_EINVAL, "workspace", 0, 0,
            "got no data, expected a pointer");
    FAIL_AT((uintptr_t)in->workspace % 64 != 0, SACCADE_EINVAL, "workspace", 0, 0,
            "got an address that is not a multiple of 64, expected one that is");
    run->workspace = in->workspace;
    run->workspace_bytes = in->workspace_bytes;
    run->stream = in->stream;
    return SACCADE_OK;
}
