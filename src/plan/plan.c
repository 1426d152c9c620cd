/* From a problem to a plan: derive, choose, print.
 * Choosing asks the solvers of the wanted back end in order and takes the first that applies;
 * why the others did not is kept for `explain`. There is no silent fall-back: what no solver of
 * the wanted back end takes is an error with the reasons. */
#include "plan/plan.h"

#include "base/cpu_features.h"
#include "base/status.h"

#include <math.h>
#include <stdlib.h>

enum { WHY_BYTES = 160 };

/* Copies fn, captures' names too, so that the plan outlives the caller's mod. */
static saccade_status copy_fn(const mod_fn *fn, arena *a, const mod_fn **out,
                              saccade_error *err)
{
    mod_fn *copy = arena_memdup(a, fn, sizeof *fn);
    mod_capture *captures = arena_memdup(a, fn->captures, fn->n_captures * sizeof *captures);
    mod_node *nodes = arena_memdup(a, fn->nodes, fn->n_nodes * sizeof *nodes);
    uint32_t *args = arena_memdup(a, fn->args, fn->n_args * sizeof *args);
    FAIL_IF(!copy || !captures || !nodes || !args, SACCADE_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < fn->n_captures; i++) {
        captures[i].name = arena_strdup(a, fn->captures[i].name);
        FAIL_IF_NULL(captures[i].name);
    }
    copy->captures = captures;
    copy->nodes = nodes;
    copy->args = args;
    *out = copy;
    return SACCADE_OK;
}

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
            kind == SACCADE_MASK ? "score" : "mask", kind == SACCADE_MASK ? "mask" : "score");
    return copy_fn(fn, a, out, err);
}

static int is_float(saccade_dtype dtype)
{
    return dtype == SACCADE_F16 || dtype == SACCADE_BF16 || dtype == SACCADE_F32
           || dtype == SACCADE_F64;
}

static saccade_status check_problem(const saccade_problem *p, saccade_error *err)
{
    const saccade_sizes *s = &p->sizes;
    const int64_t most = (int64_t)1 << 30;
    FAIL_AT(s->H < 1 || s->Hkv < 1 || s->H > 65536 || s->H % s->Hkv != 0, SACCADE_EINVAL,
            "heads", 0, 0, "got H %lld, Hkv %lld, expected 1 to 65536 and H a multiple of Hkv",
            (long long)s->H, (long long)s->Hkv);
    FAIL_AT(s->D < 1 || s->Dv < 1 || s->D > 4096 || s->Dv > 4096, SACCADE_EINVAL, "head dim", 0,
            0, "got D %lld, Dv %lld, expected 1 to 4096", (long long)s->D, (long long)s->Dv);
    FAIL_AT(s->B < 0 || s->Q < 0 || s->KV < 0 || s->B > most || s->Q > most || s->KV > most,
            SACCADE_EINVAL, "sizes", 0, 0, "got B %lld, Q %lld, KV %lld, expected 0 to 2^30",
            (long long)s->B, (long long)s->Q, (long long)s->KV);
    FAIL_AT(!is_float(p->dtype), SACCADE_EINVAL, "dtype", 0, 0,
            "got %s, expected f32, f16 or bf16 (f64 with backend ref)",
            saccade_dtype_name(p->dtype));
    FAIL_AT(p->kv_dtype != SACCADE_NONE && !is_float(p->kv_dtype), SACCADE_EINVAL, "kv_dtype",
            0, 0, "got %s, expected f32, f16, bf16 or f64", saccade_dtype_name(p->kv_dtype));
    FAIL_AT(isinf(p->scale), SACCADE_EINVAL, "scale", 0, 0,
            "got an infinite scale, expected a finite number, or NaN for 1/sqrt(D)");
    return SACCADE_OK;
}

saccade_status plan_derive(const saccade_problem *p, saccade_plan *plan, saccade_error *err)
{
    TRY(check_problem(p, err));
    plan_problem d = {
        .sizes = p->sizes,
        .dtype = p->dtype,
        .kv_dtype = p->kv_dtype == SACCADE_NONE ? p->dtype : p->kv_dtype,
        .scale = isnan(p->scale) ? (float)(1.0 / sqrt((double)p->sizes.D)) : p->scale,
        .group = (int32_t)(p->sizes.H / p->sizes.Hkv),
    };
    if (p->arch) {
        d.arch = arena_strdup(&plan->arena, p->arch);
        FAIL_IF_NULL(d.arch);
    }
    const mod_fn *score = NULL;
    TRY(take_mod(p->score, SACCADE_SCORE, "score", &plan->arena, &score, err));
    TRY(take_mod(p->mask, SACCADE_MASK, "mask", &plan->arena, &plan->source_mask, err));
    if (score)
        TRY(pass_simplify(score, &plan->arena, &d.score, err));
    if (plan->source_mask)
        TRY(pass_simplify(plan->source_mask, &plan->arena, &d.mask, err));
    if (d.score && d.score->nodes[d.score->result].op == OP_SCORE)
        d.score = NULL;
    plan->problem = d;
    return SACCADE_OK;
}

saccade_status plan_choose(saccade_plan *plan, const plan_solver *const *solvers,
                           saccade_error *err)
{
    char why[WHY_BYTES] = "built without this back end";
    for (int i = 0; solvers[i]; i++) {
        why[0] = 0;
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

static void explain_fn(const char *title, const mod_fn *fn, strbuf *out, saccade_error *err)
{
    if (!fn)
        return;
    strbuf_printf(out, "%s:\n", title);
    mod_print_nodes(fn, out, err);
}

/* Derivative by score, and whether a mask's rows are intervals. */
static saccade_status explain_facts(const plan_problem *p, strbuf *out, saccade_error *err)
{
    arena scratch;
    saccade_status status = SACCADE_OK;
    arena_init(&scratch);
    if (p->score) {
        const mod_fn *gradient;
        uint32_t wanted = 0, result;
        while (wanted < p->score->n_nodes && p->score->nodes[wanted].op != OP_SCORE)
            wanted++;
        if (wanted == p->score->n_nodes) {
            strbuf_puts(out, "gradient by score: 0 (score is not used)\n");
        } else {
            TRY_GOTO(pass_gradient(p->score, &wanted, 1, &scratch, &gradient, &result, err));
            explain_fn("gradient by score", gradient, out, err);
        }
    }
    if (p->mask) {
        const mod_fn *bounds;
        uint32_t ends[2];
        if (pass_interval(p->mask, &scratch, &bounds, ends)) {
            strbuf_printf(out, "mask is one interval of keys per row: n%u <= kv < n%u of\n",
                          (unsigned)ends[0], (unsigned)ends[1]);
            explain_fn("limits", bounds, out, err);
        } else {
            strbuf_puts(out, "mask is not one interval per row: evaluated on PARTIAL blocks\n");
        }
    }
    FAIL_IF_GOTO(scratch.has_failed, SACCADE_ENOMEM, "out of memory");
out:
    arena_free(&scratch);
    return status;
}

saccade_status plan_explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    strbuf_puts(out, "problem: ");
    plan_print_problem(&p->sizes, p->dtype, out);
    strbuf_printf(out, "\nscale: %.9g\nbackend: %s\nkernel: %s\nlevel: %s\nthreads: %d\n",
                  (double)p->scale, plan->solver->backend, plan->solver->name,
                  cpu_level_name((cpu_level)plan->level), plan->threads);
    explain_fn("score", p->score, out, err);
    explain_fn("mask", p->mask, out, err);
    TRY(plan_explain_ranges("score", p->score, &p->sizes, out, err));
    TRY(plan_explain_ranges("mask", p->mask, &p->sizes, out, err));
    TRY(explain_facts(p, out, err));
    TRY(plan->solver->explain(plan, out, err));
    return strbuf_status(out, err);
}
