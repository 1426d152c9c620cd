/* From a problem as callers fill it in to plan_problem: its fields are checked, mods are
 * copied, simplified and analysed, defaults are set. */
#include "plan/plan.h"

#include "base/quantize.h"
#include "base/status.h"

#include <float.h>
#include <math.h>
#include <string.h>

static const char *const kind_names[] = {"", "mask", "score", "weight"};

/* Copies a mod's nodes into the plan's arena. */
static saccade_status take_mod(const saccade_mod *mod, saccade_kind kind, const char *name,
                               arena *a, const mod_fn **out, saccade_error *err)
{
    const mod_fn *fn = mod ? mod_function(mod) : NULL;
    if (!mod)
        return SACCADE_OK;
    FAIL_AT(!fn, SACCADE_EINVAL, name, 0, 0,
            "got a generic mod, expected one whose captures are bound");
    FAIL_AT(fn->kind != kind, SACCADE_EINVAL, name, 0, 0, "got a %s, expected a %s",
            kind_names[fn->kind], kind_names[kind]);
    return mod_copy_function(fn, a, out, err);
}

static int is_float(saccade_dtype dtype)
{
    return dtype == SACCADE_F16 || dtype == SACCADE_BF16 || dtype == SACCADE_F32
           || dtype == SACCADE_F64;
}

/* What quantised K and V ask of a problem, and scales of K and V. */
static saccade_status check_groups(const saccade_problem *p, saccade_error *err)
{
    const int32_t groups[] = {p->k_scale_tokens, p->k_scale_channels, p->v_scale_tokens,
                              p->v_scale_channels};
    static const char *const names[] = {"k_scale_tokens", "k_scale_channels", "v_scale_tokens",
                                        "v_scale_channels"};
    const int is_quantised = quant_is_dtype(p->kv_dtype);
    for (int i = 0; i < 4; i++) {
        FAIL_AT(groups[i] < 0, SACCADE_EINVAL, names[i], 0, 0,
                "got %d, expected 0 (all) or more", groups[i]);
        FAIL_AT(groups[i] && !is_quantised, SACCADE_EINVAL, names[i], 0, 0,
                "got %d with kv_dtype %s, expected e4m3, e5m2, i8 or i4 with it", groups[i],
                saccade_dtype_name(p->kv_dtype ? p->kv_dtype : p->dtype));
    }
    FAIL_AT(is_quantised && p->gradients, SACCADE_EINVAL, "gradients", 0, 0,
            "got gradients with kv_dtype %s, expected none: a quantised cache has no gradient",
            saccade_dtype_name(p->kv_dtype));
    return SACCADE_OK;
}

static saccade_status check_sizes(const saccade_problem *p, saccade_error *err)
{
    const saccade_sizes *s = &p->sizes;
    const int64_t most = (int64_t)1 << 30;
    FAIL_AT(s->H < 1 || s->Hkv < 1 || s->H > 65536 || s->H % s->Hkv != 0, SACCADE_EINVAL,
            "heads", 0, 0, "got H %lld, Hkv %lld, expected 1 to 65536 and H a multiple of Hkv",
            (long long)s->H, (long long)s->Hkv);
    const int64_t all = p->heads_global ? p->heads_global : s->H;
    FAIL_AT(all < 1 || all > 65536 || all % (s->H / s->Hkv) != 0, SACCADE_EINVAL,
            "heads_global", 0, 0,
            "got %lld, expected 0 (H), or 1 to 65536 and a multiple of H / Hkv = %lld",
            (long long)all, (long long)(s->H / s->Hkv));
    FAIL_AT(
        p->h_offset < 0 || p->h_offset > all - s->H, SACCADE_EINVAL, "h_offset", 0, 0,
        "got %lld with H %lld, expected 0 or more and heads within the %lld of heads_global",
        (long long)p->h_offset, (long long)s->H, (long long)all);
    FAIL_AT(s->D < 1 || s->Dv < 1 || s->D > 4096 || s->Dv > 4096, SACCADE_EINVAL, "head dim", 0,
            0, "got D %lld, Dv %lld, expected 1 to 4096", (long long)s->D, (long long)s->Dv);
    FAIL_AT(s->B < 0 || s->Q < 0 || s->KV < 0 || s->B > most || s->Q > most || s->KV > most,
            SACCADE_EINVAL, "sizes", 0, 0, "got B %lld, Q %lld, KV %lld, expected 0 to 2^30",
            (long long)s->B, (long long)s->Q, (long long)s->KV);
    FAIL_AT(p->page < SACCADE_PAGE_ANY || p->page > most, SACCADE_EINVAL, "page", 0, 0,
            "got %lld, expected 0, keys of a page up to 2^30, or SACCADE_PAGE_ANY",
            (long long)p->page);
    return SACCADE_OK;
}

static saccade_status check_flags(const saccade_problem *p, saccade_error *err)
{
    const struct {
        const char *name;
        int32_t value, most;
    } flags[] = {
        {"ragged", p->ragged, 1},
        {"batch_invariant", p->batch_invariant, SACCADE_INVARIANT_SHORT},
        {"tangents", p->tangents, 1},
        {"head_max", p->head_max, 1},
        {"shared_prefix", p->shared_prefix, 1},
    };
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        FAIL_AT(flags[i].value < 0 || flags[i].value > flags[i].most, SACCADE_EINVAL,
                flags[i].name, 0, 0, "got %d, expected 0%s", flags[i].value,
                flags[i].most == 1 ? " or 1" : ", 1 or 2");
    FAIL_AT(p->ragged && !p->page && (p->k_scale_tokens > 1 || p->v_scale_tokens > 1),
            SACCADE_EINVAL, "ragged", 0, 0,
            "got scales that several rows share, expected one a row or one for all of K and V: "
            "sequences begin anywhere in a group (pages do not)");
    FAIL_AT(p->tangents && (p->ragged || p->page || quant_is_dtype(p->kv_dtype)),
            SACCADE_EINVAL, "tangents", 0, 0,
            "got a problem that is ragged, in pages or quantised, expected keys in one piece "
            "of batches of one length");
    return SACCADE_OK;
}

static saccade_status check_dtypes(const saccade_problem *p, saccade_error *err)
{
    const int is_narrow = p->dtype == SACCADE_F16 || p->dtype == SACCADE_BF16;
    FAIL_AT(!is_float(p->dtype), SACCADE_EINVAL, "dtype", 0, 0,
            "got %s, expected f32, f16 or bf16 (f64 with backend ref)",
            saccade_dtype_name(p->dtype));
    FAIL_AT(p->kv_dtype != SACCADE_NONE && !is_float(p->kv_dtype)
                && !quant_is_dtype(p->kv_dtype),
            SACCADE_EINVAL, "kv_dtype", 0, 0,
            "got %s, expected f32, f16, bf16, f64, e4m3, e5m2, i8 or i4",
            saccade_dtype_name(p->kv_dtype));
    FAIL_AT(p->out_dtype != SACCADE_NONE && p->out_dtype != p->dtype
                && !(is_narrow && p->out_dtype == SACCADE_F32),
            SACCADE_EINVAL, "out_dtype", 0, 0, "got %s with dtype %s, expected that or %s",
            saccade_dtype_name(p->out_dtype), saccade_dtype_name(p->dtype),
            is_narrow ? "f32" : "none");
    FAIL_AT(p->d_out_dtype != SACCADE_NONE && p->d_out_dtype != p->dtype
                && p->d_out_dtype != p->out_dtype,
            SACCADE_EINVAL, "d_out_dtype", 0, 0, "got %s with dtype %s, expected that%s",
            saccade_dtype_name(p->d_out_dtype), saccade_dtype_name(p->dtype),
            p->out_dtype == SACCADE_F32 && p->dtype != SACCADE_F32 ? " or f32" : "");
    FAIL_AT(p->sinks_dtype != SACCADE_NONE
                && (!is_float(p->sinks_dtype)
                    || (p->sinks_dtype == SACCADE_F64 && p->dtype != SACCADE_F64)),
            SACCADE_EINVAL, "sinks_dtype", 0, 0, "got %s with dtype %s, expected f32, f16%s",
            saccade_dtype_name(p->sinks_dtype), saccade_dtype_name(p->dtype),
            p->dtype == SACCADE_F64 ? ", bf16 or f64" : " or bf16");
    return SACCADE_OK;
}

static saccade_status check_problem(const saccade_problem *p, saccade_error *err)
{
    TRY(check_sizes(p, err));
    TRY(check_flags(p, err));
    TRY(check_dtypes(p, err));
    TRY(check_groups(p, err));
    const double most = p->dtype == SACCADE_F64 ? DBL_MAX : (double)FLT_MAX;
    FAIL_AT(isgreater(fabs(p->scale), most), SACCADE_EINVAL, "scale", 0, 0, /* NaN: ours */
            "got %g, expected a finite number of f32 (f64 in f64 problems), or NaN for "
            "1/sqrt(D)",
            p->scale);
    return SACCADE_OK;
}

static int find_capture(const mod_fn *fn, const char *name, uint32_t *out)
{
    for (*out = 0; fn && *out < fn->n_captures; ++*out)
        if (strcmp(fn->captures[*out].name, name) == 0)
            return 1;
    return 0;
}

/* Each name has one tensor in a run: all texts that read it must take the same, a scalar of any
 * width. */
static saccade_status check_same_captures(const mod_fn *a, const mod_fn *b, saccade_error *err)
{
    for (uint32_t i = 0, j; a && b && i < a->n_captures; i++) {
        const mod_capture *x = &a->captures[i];
        if (!find_capture(b, x->name, &j))
            continue;
        const mod_capture *y = &b->captures[j];
        FAIL_AT(x->rank != y->rank || x->type != y->type || (x->rank && x->dtype != y->dtype),
                SACCADE_EINVAL, x->name, 0, 0,
                "got %s of rank %d in the %s and %s of rank %d in the %s, expected one kind of "
                "tensor",
                saccade_dtype_name(x->dtype), (int)x->rank, kind_names[a->kind],
                saccade_dtype_name(y->dtype), (int)y->rank, kind_names[b->kind]);
    }
    return SACCADE_OK;
}

/* A rate that follows from nothing that comes with a run is known now. */
static saccade_status check_rate(const mod_fn *weight, saccade_error *err)
{
    double values[PLAN_WEIGHT_NODES];
    const eval_env env = {.tensors = NULL};
    const eval_point at = {0};
    if (!weight || weight->n_captures)
        return SACCADE_OK;
    for (uint32_t i = 0; i < weight->n_nodes; i++)
        if (weight->nodes[i].op == OP_SIZE)
            return SACCADE_OK;
    const double rate = eval_scalar(weight, &env, &at, values, NULL);
    FAIL_AT(!(rate >= 0 && rate <= 1), SACCADE_EINVAL, "weight", 0, 0,
            "got a rate of %g, expected 0 to 1", rate);
    return SACCADE_OK;
}

static saccade_status find_gradients(const saccade_problem *p, saccade_plan *plan,
                                     saccade_error *err)
{
    const int32_t n = p->gradients & SACCADE_GRADIENT_CAPTURES ? p->n_gradient_captures : 0;
    FAIL_AT(p->gradients & ~(uint32_t)PLAN_GRADIENTS, SACCADE_EINVAL, "gradients", 0, 0,
            "got bits 0x%x, expected SACCADE_GRADIENT_*", (unsigned)p->gradients);
    FAIL_AT(n < 0 || n > MOD_MAX_CAPTURES || (n && !p->gradient_captures), SACCADE_EINVAL,
            "gradient_captures", 0, 0, "got %d%s, expected 0 to %d and their names", n,
            p->gradient_captures ? "" : " and NULL", MOD_MAX_CAPTURES);
    FAIL_AT(p->gradients & SACCADE_GRADIENT_SINKS && p->sinks_dtype == SACCADE_NONE,
            SACCADE_EINVAL, "gradients", 0, 0,
            "got SACCADE_GRADIENT_SINKS, expected a sinks_dtype with it");
    plan->problem.gradients = p->gradients;
    for (int32_t i = 0; i < n; i++) {
        const char *name = p->gradient_captures[i] ? p->gradient_captures[i] : "";
        uint32_t at;
        FAIL_AT(!find_capture(plan->source_score, name, &at), SACCADE_EINVAL,
                "gradient_captures", 0, 0, "got '%.60s', expected a capture of the score",
                name);
        FAIL_AT(!is_float(plan->source_score->captures[at].dtype), SACCADE_EINVAL, name, 0, 0,
                "got %s, expected a float capture to have a gradient",
                saccade_dtype_name(plan->source_score->captures[at].dtype));
        const uint64_t source = (uint64_t)1 << at;
        if (find_capture(plan->problem.score, name, &at))
            plan->problem.gradient_captures |= (uint64_t)1 << at;
        else
            plan->unread_captures |= source;
    }
    return SACCADE_OK;
}

/* As kernels and the oracle take it: f32 but in f64 problems. */
static double scale_of(const saccade_problem *p)
{
    const double scale = isnan(p->scale) ? 1.0 / sqrt((double)p->sizes.D) : p->scale;
    return p->dtype == SACCADE_F64 ? scale : (double)(float)scale;
}

static saccade_dtype d_out_dtype_of(const saccade_problem *p)
{
    const saccade_dtype out = p->out_dtype == SACCADE_NONE ? p->dtype : p->out_dtype;
    return p->d_out_dtype == SACCADE_NONE ? out : p->d_out_dtype;
}

saccade_status plan_derive(const saccade_problem *p, saccade_plan *plan, saccade_error *err)
{
    TRY(check_problem(p, err));
    plan_problem d = {
        .sizes = p->sizes,
        .dtype = p->dtype,
        .kv_dtype = p->kv_dtype == SACCADE_NONE ? p->dtype : p->kv_dtype,
        .out_dtype = p->out_dtype == SACCADE_NONE ? p->dtype : p->out_dtype,
        .d_out_dtype = d_out_dtype_of(p),
        .scale = scale_of(p),
        .sinks_dtype = p->sinks_dtype,
        .group = (int32_t)(p->sizes.H / p->sizes.Hkv),
        .h_offset = (int32_t)p->h_offset,
        .heads_global = (int32_t)(p->heads_global ? p->heads_global : p->sizes.H),
        .k_groups = {p->k_scale_tokens, p->k_scale_channels},
        .v_groups = {p->v_scale_tokens, p->v_scale_channels},
        .has_chunks = p->page != 0,
        .page = (int32_t)p->page,
        .is_ragged = p->ragged,
        .is_invariant = p->batch_invariant,
        .has_tangents = p->tangents,
        .has_head_max = p->head_max,
        .has_prefix = p->shared_prefix,
    };
    if (p->arch) {
        d.arch = arena_strdup(&plan->arena, p->arch);
        FAIL_IF_NULL(d.arch);
    }
    TRY(take_mod(p->score, SACCADE_SCORE, "score", &plan->arena, &plan->source_score, err));
    TRY(take_mod(p->mask, SACCADE_MASK, "mask", &plan->arena, &plan->source_mask, err));
    TRY(take_mod(p->weight, SACCADE_WEIGHT, "weight", &plan->arena, &plan->source_weight, err));
    d.weight = plan->source_weight;
    FAIL_AT(p->ragged && plan_names_length(d.weight), SACCADE_EINVAL, "weight", 0, 0,
            "got a rate that names Q or KV in a ragged problem, where they differ by sequence: "
            "expected one rate");
    FAIL_AT(d.weight && d.weight->n_nodes > PLAN_WEIGHT_NODES, SACCADE_ELIMIT, "weight", 0, 0,
            "got %u operations, expected at most %d", d.weight->n_nodes, PLAN_WEIGHT_NODES);
    TRY(check_rate(d.weight, err));
    if (plan->source_score)
        TRY(pass_simplify(plan->source_score, &plan->arena, &d.score, err));
    if (plan->source_mask)
        TRY(pass_simplify(plan->source_mask, &plan->arena, &d.mask, err));
    if (d.score && d.score->nodes[d.score->result].op == OP_SCORE)
        d.score = NULL;
    if (d.score && d.dtype == SACCADE_F64) /* what simplifying folds is rounded to f32 */
        d.score = plan->source_score;
    TRY(check_same_captures(d.score, d.mask, err));
    TRY(check_same_captures(d.score, d.weight, err));
    TRY(check_same_captures(d.mask, d.weight, err));
    if (d.score)
        TRY(pass_facts_make(d.score, &plan->arena, &d.score_facts, err));
    if (d.mask)
        TRY(pass_facts_make(d.mask, &plan->arena, &d.mask_facts, err));
    plan->problem = d;
    return find_gradients(p, plan, err);
}
