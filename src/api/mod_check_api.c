/* saccade_mod_check: every index that a mod reads, held against its tensor before a kernel
 * would clamp it. */
#include "api/api.h"

#include <stdlib.h>

typedef struct index_walk {
    const mod_fn *fn;
    eval_env env;
    const saccade_sizes *sizes;
    plan_positions positions;
    double *values;
} index_walk;

/* Position `at` of all B*H*Q*KV, counted with kv fastest. */
static saccade_status check_point(const index_walk *w, int64_t at, saccade_error *err)
{
    const saccade_sizes *s = w->sizes;
    const int64_t kv = at % s->KV, q = at / s->KV % s->Q, h = at / s->KV / s->Q % s->H;
    const int64_t b = at / s->KV / s->Q / s->H;
    const plan_position p = plan_position_of(&w->positions, s->KV, b);
    const eval_point point = {(int32_t)b, (int32_t)h, (int32_t)q + p.q_offset,
                              (int32_t)kv + p.kv_offset, 0};
    eval_report report = {.node = -1};
    if (kv >= p.kv_len)
        return SACCADE_OK;
    eval_scalar(w->fn, &w->env, &point, w->values, &report);
    if (report.node < 0)
        return SACCADE_OK;
    const mod_node *n = &w->fn->nodes[report.node];
    return status_fail_at(err, SACCADE_EVALUE, w->fn->captures[n->imm.i].name, n->line,
                          n->column,
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
    const double all = (double)sizes->B * sizes->H * sizes->Q * sizes->KV;
    const double most = budget > 0 ? (double)budget : 67108864.0;
    const double step = all > most ? all / most : 1;
    for (double at = 0; at < all; at += step)
        TRY_GOTO(check_point(&w, (int64_t)at, err));
out:
    free(w.values);
    if (status != SACCADE_OK)
        mod_show_place(mod, err);
    return status;
}
