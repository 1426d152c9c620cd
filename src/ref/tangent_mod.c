/* Score mods in directions: see tangent_mod.h. */
#include "ref/tangent_mod.h"

#include "base/status.h"

static int is_variable(const mod_node *node)
{
    return node->op == OP_SCORE
           || ((node->op == OP_LOAD || node->op == OP_SCALAR) && node->type == MOD_FLOAT);
}

static saccade_status differentiate(const mod_fn *fn, arena *arena, tangent_fn *out,
                                    saccade_error *err)
{
    const mod_fn *by;
    *out = (tangent_fn){.fn = *fn, .by = *fn};
    out->nodes = arena_array(arena, fn->n_nodes + 1, sizeof *out->nodes);
    out->results = arena_array(arena, fn->n_nodes + 1, sizeof *out->results);
    FAIL_IF(!out->nodes || !out->results, SACCADE_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        if (is_variable(&fn->nodes[i]))
            out->nodes[out->n++] = i;
    if (!out->n)
        return SACCADE_OK;
    TRY(pass_gradient(fn, out->nodes, out->n, arena, &by, out->results, err));
    out->by = *by;
    return SACCADE_OK;
}

static size_t most_values(const plan_problem *p, const tangent_fn *of, size_t n)
{
    const size_t fn = ref_score_values(p, &of->fn), by = ref_score_values(p, &of->by);
    n = fn > n ? fn : n;
    return by > n ? by : n;
}

saccade_status tangent_mod_of(const plan_problem *problem, arena *arena, tangent_mod *out,
                              saccade_error *err)
{
    TRY(differentiate(problem->score, arena, &out->value, err));
    out->n_values = most_values(problem, &out->value, 0);
    out->slopes = arena_array(arena, out->value.n + 1, sizeof *out->slopes);
    FAIL_IF_NULL(out->slopes);
    for (uint32_t k = 0; k < out->value.n; k++) {
        mod_fn slope = out->value.by;
        slope.result = out->value.results[k];
        TRY(differentiate(&slope, arena, &out->slopes[k], err));
        out->n_values = most_values(problem, &out->slopes[k], out->n_values);
    }
    return SACCADE_OK;
}

double tangent_slope(const tangent_fn *of, const ref_inputs *in, const ref_row *row, int64_t j,
                     uint32_t k)
{
    const eval_point point = ref_point(row, j);
    mod_fn by = of->by;
    by.result = of->results[k];
    return eval_scalar(&by, &in->score_env, &point, row->values, NULL);
}

/* Indices as in every engine, f64 problem or not, clamped as kernels do. */
int32_t tangent_read(const tangent_fn *of, const ref_inputs *in, const ref_row *row, int64_t j,
                     uint32_t k, int64_t *place)
{
    const mod_node *node = &of->fn.nodes[of->nodes[k]];
    const eval_env *env = &in->run->score_env;
    const eval_point point = ref_point(row, j);
    mod_fn index = of->fn;
    *place = 0;
    if (node->op == OP_SCORE)
        return -1;
    const saccade_tensor *t = &env->tensors[node->imm.i];
    for (int32_t d = 0; node->op == OP_LOAD && d < t->rank; d++) {
        index.result = index.args[node->args + (uint32_t)d];
        const double x = eval_scalar(&index, env, &point, row->values, NULL);
        const double last = (double)(t->shape[d] - 1);
        *place = *place * t->shape[d] + (int64_t)(x < 0 ? 0 : x > last ? last : x);
    }
    return node->imm.i;
}

double tangent_of(const tangent_fn *of, const ref_inputs *in, const tangent_captures *captures,
                  const ref_row *row, int64_t j, double s_dot)
{
    double sum = 0;
    for (uint32_t k = 0; k < of->n; k++) {
        int64_t place;
        const int32_t capture = tangent_read(of, in, row, j, k, &place);
        const double *dots = capture < 0 ? NULL : captures->dots[capture];
        const double dot = capture < 0 ? s_dot : dots ? dots[place] : 0;
        if (dot != 0)
            sum += dot * tangent_slope(of, in, row, j, k);
    }
    return sum;
}
