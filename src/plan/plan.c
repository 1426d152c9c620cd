/* From a problem to a plan: derive, choose, print.
 * Choosing asks the solvers of the wanted back end in order and takes the first that applies;
 * why the others did not is kept for `explain`. There is no silent fall-back: what no solver of
 * the wanted back end takes is an error with the reasons. */
#include "plan/plan.h"

#include "base/cpu_features.h"
#include "base/quantize.h"
#include "base/integers.h"
#include "base/status.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WHY_BYTES = 160 };

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
    FAIL_AT(
        p->ragged && (p->k_scale_tokens > 1 || p->v_scale_tokens > 1), SACCADE_EINVAL, "ragged",
        0, 0,
        "got scales that several rows share, expected one a row, or one for all of K and V");
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

saccade_status plan_derive(const saccade_problem *p, saccade_plan *plan, saccade_error *err)
{
    TRY(check_problem(p, err));
    plan_problem d = {
        .sizes = p->sizes,
        .dtype = p->dtype,
        .kv_dtype = p->kv_dtype == SACCADE_NONE ? p->dtype : p->kv_dtype,
        .out_dtype = p->out_dtype == SACCADE_NONE ? p->dtype : p->out_dtype,
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

static const int64_t MOST_LENGTH = (int64_t)1 << 30;

/* Elements of [B, heads, length, dim], at least 1; as doubles they do not wrap. */
static double elements(int64_t B, int64_t heads, int64_t length, int64_t dim)
{
    return (double)B * (double)heads * (double)length * (double)dim;
}

int plan_is_possible(const saccade_sizes *s)
{
    const int64_t dim = s->D > s->Dv ? s->D : s->Dv;
    return s->B >= 0 && s->Q >= 0 && s->KV >= 0 && s->B <= MOST_LENGTH && s->Q <= MOST_LENGTH
           && s->KV <= MOST_LENGTH && elements(s->B, s->H, s->Q, dim) <= 0x1p48
           && elements(s->B, s->Hkv, s->KV, dim) <= 0x1p48;
}

int plan_has_lengths(const plan_problem *problem)
{
    const saccade_sizes *s = &problem->sizes;
    return s->B && s->Q && s->KV && plan_is_possible(s);
}

/* Of what a solver is given at a time: a sequence of a ragged run, or all of a run. */
static saccade_sizes given_sizes(const saccade_plan *plan, int is_whole, const saccade_sizes *s)
{
    saccade_sizes given = *s;
    if (plan->problem.is_ragged && !is_whole)
        given.B = 1;
    return given;
}

size_t plan_workspace(const saccade_plan *plan, const saccade_sizes *s)
{
    const saccade_sizes given = given_sizes(plan, plan->solver->takes_ragged, s);
    if (!plan_is_possible(s))
        return SIZE_MAX;
    const size_t room = plan_head_max_room(&plan->problem, s);
    return sum_bytes(room, plan->solver->workspace(plan, &given));
}

size_t plan_backward_workspace(const saccade_plan *plan, const saccade_sizes *s,
                               const plan_gradients *gradients)
{
    if (!plan->problem.gradients)
        return 0;
    const saccade_sizes given = given_sizes(plan, plan->solver->takes_ragged_backward, s);
    if (!plan_is_possible(s))
        return SIZE_MAX;
    return plan->solver->backward_workspace(plan, &given, gradients);
}

size_t plan_tangent_workspace(const saccade_plan *plan, const saccade_sizes *s)
{
    if (!plan->problem.has_tangents || !plan->solver->tangent_workspace)
        return 0;
    return plan_is_possible(s) ? plan->solver->tangent_workspace(plan, s) : SIZE_MAX;
}

saccade_status plan_choose(saccade_plan *plan, const plan_solver *const *solvers,
                           saccade_error *err)
{
    char why[WHY_BYTES] = "built without this back end";
    for (int i = 0; solvers[i]; i++) {
        why[0] = 0;
        if (plan->problem.gradients && !solvers[i]->backward) {
            snprintf(why, sizeof why, "%s makes no gradients", solvers[i]->name);
            continue;
        }
        if (plan->problem.has_tangents && !solvers[i]->tangent) {
            snprintf(why, sizeof why, "%s has no forward mode", solvers[i]->name);
            continue;
        }
        if (!solvers[i]->applicable(&plan->problem, plan->level, why))
            continue;
        plan->solver = solvers[i];
        const saccade_status status = solvers[i]->create(plan, err);
        if (status != SACCADE_OK)
            plan->solver = NULL;
        return status;
    }
    return status_fail_at(err, SACCADE_EBACKEND, "plan", 0, 0,
                          "no kernel takes this problem: %s", why);
}

void plan_destroy(saccade_plan *plan)
{
    if (!plan)
        return;
    if (plan->solver)
        plan->solver->destroy(plan);
    arena_free(&plan->arena);
    free(plan);
}

static void explain_fn(const char *title, const mod_fn *fn, strbuf *out, saccade_error *err)
{
    if (!fn)
        return;
    strbuf_printf(out, "%s:\n", title);
    mod_print_nodes(fn, out, err);
}

/* The score and its slope, as backward computes them. */
static saccade_status explain_gradient(const mod_fn *score, strbuf *out, saccade_error *err)
{
    arena scratch;
    saccade_status status = SACCADE_OK;
    const mod_fn *gradient;
    const uint32_t wanted = pass_find_score(score);
    uint32_t result;
    if (wanted == PASS_NO_NODE) {
        strbuf_puts(out, "gradient by score: 0 (score is not used)\n");
        return SACCADE_OK;
    }
    arena_init(&scratch);
    TRY_GOTO(pass_gradient(score, &wanted, 1, &scratch, &gradient, &result, err));
    explain_fn("gradient by score", gradient, out, err);
out:
    arena_free(&scratch);
    return status;
}

static void explain_groups(const char *name, const plan_groups *g, strbuf *out)
{
    strbuf_printf(out, "%s per ", name);
    if (g->tokens)
        strbuf_printf(out, "%d row%s x ", g->tokens, g->tokens == 1 ? "" : "s");
    else
        strbuf_puts(out, "all rows x ");
    if (g->channels)
        strbuf_printf(out, "%d channel%s", g->channels, g->channels == 1 ? "" : "s");
    else
        strbuf_puts(out, "all channels");
}

/* K and V that are not in Q's dtype. */
static void explain_keys(const plan_problem *p, strbuf *out)
{
    if (p->kv_dtype == p->dtype)
        return;
    strbuf_printf(out, "\nkeys and values: %s", saccade_dtype_name(p->kv_dtype));
    if (!quant_is_dtype(p->kv_dtype))
        return;
    explain_groups(", scales of K", &p->k_groups, out);
    explain_groups(", of V", &p->v_groups, out);
}

saccade_status plan_explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    strbuf_puts(out, "problem: ");
    plan_print_problem(&p->sizes, p->dtype, out);
    if (!plan_is_possible(&p->sizes))
        strbuf_puts(out, "\nlengths: no run can have these sizes, more than 2^48 elements of a "
                         "tensor");
    if (p->heads_global != p->sizes.H)
        strbuf_printf(out, "\nheads: %d to %lld of %d", p->h_offset,
                      (long long)(p->h_offset + p->sizes.H - 1), p->heads_global);
    if (p->out_dtype != p->dtype)
        strbuf_printf(out, "\nresults: %s", saccade_dtype_name(p->out_dtype));
    if (p->page > 0)
        strbuf_printf(out, "\nkeys: in pages of %d", p->page);
    else if (p->page)
        strbuf_puts(out, "\nkeys: in pages of any size");
    if (p->sinks_dtype != SACCADE_NONE)
        strbuf_printf(out, "\nsinks: %s", saccade_dtype_name(p->sinks_dtype));
    explain_keys(p, out);
    if (p->is_invariant)
        strbuf_printf(out, "\nbatch invariant: a row's bits follow from the row alone%s",
                      p->is_invariant == SACCADE_INVARIANT_SHORT ? ", apart for short runs"
                                                                 : "");
    strbuf_puts(out, "\nscale: ");
    strbuf_number(out, 9, p->scale);
    strbuf_printf(out, "\nbackend: %s\nkernel: %s\nlevel: %s\nthreads: %d\n",
                  plan->backend->name, plan->solver->name,
                  cpu_level_name((cpu_level)plan->level), plan->threads);
    strbuf_printf(out, "library: %s\n", saccade_build());
    explain_fn("score", p->score, out, err);
    explain_fn("mask", p->mask, out, err);
    explain_fn("weight, its rate of dropout", p->weight, out, err);
    TRY(plan_explain_ranges("score", p->score, p, out, err));
    TRY(plan_explain_ranges("mask", p->mask, p, out, err));
    if (p->score_facts)
        TRY(pass_facts_print(p->score_facts, out, err));
    if (p->score)
        TRY(explain_gradient(p->score, out, err));
    if (p->mask_facts)
        TRY(pass_facts_print(p->mask_facts, out, err));
    TRY(plan->solver->explain(plan, out, err));
    return strbuf_status(out, err);
}

/* before: how many of the first u units count. */
static int has_any(const plan_rows *rows, const int32_t *before, int64_t first, int64_t past)
{
    const int64_t from = first / rows->unit, end = (past + rows->unit - 1) / rows->unit;
    const int64_t to = end < rows->units ? end : rows->units;
    return from < to && before[to] > before[from];
}

int plan_has_far(const plan_rows *rows, int64_t first, int64_t past)
{
    return has_any(rows, rows->far_before, first, past);
}

int plan_has_touched(const plan_rows *rows, int64_t first, int64_t past)
{
    return has_any(rows, rows->touched_before, first, past);
}

const plan_part *plan_part_of(const plan_rows *rows, int64_t i)
{
    int32_t lo = 0, hi = rows->n;
    while (lo < hi) {
        const int32_t mid = lo + (hi - lo) / 2;
        if (rows->part[mid].first + rows->part[mid].count <= i)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < rows->n && rows->part[lo].first <= i ? &rows->part[lo] : NULL;
}
