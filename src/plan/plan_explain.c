/* What `explain` prints of a plan. */
#include "plan/plan.h"

#include "base/cpu_features.h"
#include "base/quantize.h"
#include "base/status.h"

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
    status = pass_gradient(score, &wanted, 1, &scratch, &gradient, &result, err);
    if (status == SACCADE_ELIMIT) { /* of a plan that runs forward all the same */
        strbuf_puts(out, "gradient by score: of more operations than there may be\n");
        status = SACCADE_OK;
        goto out;
    }
    TRY_GOTO(status);
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
    if (p->d_out_dtype != p->out_dtype)
        strbuf_printf(out, "\ntheir gradient: %s", saccade_dtype_name(p->d_out_dtype));
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
