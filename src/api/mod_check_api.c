/* saccade_mod_check: every index that a mod reads, held against its tensor before a kernel
 * would clamp it. */
#include "api/api.h"

#include "base/integers.h"

#include <stdlib.h>

/* Positions: all of so many, unless a budget says more; and the most of a sample. */
#define EVERY ((int64_t)1 << 26)
#define SAMPLE ((int64_t)1 << 33)

typedef struct index_walk {
    const mod_fn *fn;
    eval_env env;
    const saccade_sizes *sizes;
    plan_positions positions;
    double *values;
    int64_t all; /* positions; INT64_MAX: more than that */
} index_walk;

static int64_t count_positions(const saccade_sizes *s)
{
    const int64_t sizes[4] = {s->B, s->H, s->Q, s->KV};
    int64_t all = 1;
    for (int d = 0; d < 4; d++)
        all = all > INT64_MAX / sizes[d] ? INT64_MAX : all * sizes[d];
    return all;
}

/* Position i of n that are spread over all B*H*Q*KV, counted with kv fastest; n below 2^34 or
 * as many as there are. */
static saccade_status check_point(const index_walk *w, int64_t i, int64_t n, saccade_error *err)
{
    const saccade_sizes *s = w->sizes;
    const int64_t sizes[4] = {s->B, s->H, s->Q, s->KV};
    int64_t at[4];
    if (n == w->all)
        for (int d = 4; d-- > 0; i /= sizes[d])
            at[d] = i % sizes[d];
    else
        for (int d = 0; d < 4; i = i * sizes[d] % n, d++) /* i: of n parts of what is left */
            at[d] = i * sizes[d] / n;
    const int64_t b = at[0], h = at[1], q = at[2], kv = at[3];
    const plan_position p = plan_position_of(&w->positions, s->KV, b);
    const eval_point point = {(int32_t)b, (int32_t)h, (int32_t)q + p.q_offset,
                              (int32_t)kv + p.kv_offset, 0};
    eval_report report = {.node = -1};
    if (kv >= p.kv_len)
        return SACCADE_OK;
    eval_scalar(w->fn, &w->env, &point, w->values, &report);
    if (report.node < 0)
        return SACCADE_OK;
    const mod_node *load = &w->fn->nodes[report.node];
    return status_fail_at(err, SACCADE_EVALUE, w->fn->captures[load->imm.i].name, load->line,
                          load->column,
                          "got index %d in dimension %d at b %d, h %d, q %d, kv %d, expected 0 "
                          "to %lld (kernels clamp it)",
                          report.index, report.dim, point.b, point.h, point.q, point.kv,
                          (long long)report.size - 1);
}

saccade_status saccade_mod_check(const saccade_mod *mod, const saccade_sizes *sizes,
                                 const saccade_positions *positions,
                                 const saccade_binding *bindings, int32_t n_bindings,
                                 int64_t budget, saccade_error *err)
{
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    saccade_status status = SACCADE_OK;
    index_walk w = {
        .fn = mod ? mod_function(mod) : NULL, .env = {.tensors = tensors}, .sizes = sizes};
    FAIL_AT(!w.fn, SACCADE_EINVAL, "check", 0, 0, "got no bound mod, expected one");
    TRY(mask_check_sizes(sizes, err));
    TRY(api_read_positions(positions, SACCADE_CPU, sizes, &w.positions, err));
    TRY(eval_resolve(w.fn, bindings, n_bindings, 1, tensors, err));
    eval_sizes(sizes, w.env.size);
    w.values = malloc(w.fn->n_nodes * sizeof *w.values);
    FAIL_IF_NULL(w.values);
    w.all = count_positions(sizes);
    const int64_t most = budget > 0 ? budget : EVERY;
    const int64_t n = w.all <= most && w.all < INT64_MAX ? w.all : smaller(most, SAMPLE);
    for (int64_t i = 0; i < n; i++)
        TRY_GOTO(check_point(&w, i, n, err));
out:
    free(w.values);
    if (status != SACCADE_OK)
        mod_show_place(mod, err);
    return status;
}
