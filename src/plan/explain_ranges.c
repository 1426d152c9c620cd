/* What range analysis knows of each value of a mod over all positions of the sizes a plan was
 * given, for `explain`. Captured values are unknown to a plan, so only their types count. */
#include "plan/plan.h"

#include "base/status.h"
#include "pass/pass.h"

static void print_range(const pass_range *r, mod_type type, strbuf *out)
{
    if (type == MOD_BOOL)
        strbuf_puts(out, !r->can_false ? "always" : !r->can_true ? "never" : "open");
    else if (type == MOD_INT)
        strbuf_printf(out, "%lld..%lld", (long long)r->lo, (long long)r->hi);
    else {
        strbuf_number(out, 6, r->flo);
        strbuf_puts(out, "..");
        strbuf_number(out, 6, r->fhi);
        strbuf_puts(out, r->may_nan ? " or nan" : "");
    }
    if (type == MOD_INT && r->step > 1 && r->lo < r->hi)
        strbuf_printf(out, ", %d mod %d", r->rest, r->step);
}

/* Positions from 0 on: offsets come with each run. */
static pass_box all_positions(const saccade_sizes *s)
{
    return (pass_box){.hi = {(int32_t)(s->B - 1), (int32_t)(s->H - 1), (int32_t)(s->Q - 1),
                             (int32_t)(s->KV - 1)}};
}

saccade_status plan_explain_ranges(const char *title, const mod_fn *fn,
                                   const plan_problem *problem, strbuf *out, saccade_error *err)
{
    const saccade_sizes *sizes = &problem->sizes;
    arena scratch;
    saccade_status status = SACCADE_OK;
    eval_env env = {.tensors = NULL};
    if (!fn || sizes->B < 1 || sizes->Q < 1 || sizes->KV < 1)
        return SACCADE_OK; /* lengths not told */
    const pass_box box = all_positions(sizes);
    arena_init(&scratch);
    pass_range *ranges = arena_array(&scratch, fn->n_nodes, sizeof *ranges);
    FAIL_IF_NULL_GOTO(ranges);
    plan_set_env(problem, sizes, &env);
    pass_ranges(fn, &env, &box, NULL, ranges);
    strbuf_printf(out, "ranges of %s, positions from 0:\n", title);
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        strbuf_printf(out, "n%u ", (unsigned)i);
        print_range(&ranges[i], fn->nodes[i].type, out);
        strbuf_puts(out, "\n");
    }
out:
    arena_free(&scratch);
    return status;
}
