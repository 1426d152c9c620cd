/* What a plan keeps for forward mode, and the workspace as a function of the problem's
 * integers. */
#include "cpu/tangent/tangent.h"

#include "base/integers.h"
#include "base/status.h"
#include "cpu/schedule/layout.h"

/* So many bytes of packed keys are held at a time, or those of one head if that is more. */
static const size_t wave_bytes = (size_t)256 << 20;

/* ---- the graph ---- */

static int varies_in_head(const mod_fn *fn, uint32_t node)
{
    return (fn->nodes[node].deps & ~(DEP_B | DEP_H)) != 0;
}

static int is_zero(const mod_fn *fn, uint32_t node)
{
    return fn->nodes[node].op == OP_FLOAT && fn->nodes[node].imm.f == 0;
}

saccade_status cpu_tangent_create(const saccade_plan *plan, arena *arena, cpu_tangent_plan *out,
                                  saccade_error *err)
{
    const mod_fn *score = plan->problem.score, *all;
    uint32_t nodes[3], results[3];
    *out = (cpu_tangent_plan){.kernels = cpu_tangent_kernels_for(&plan->problem, plan->level)};
    if (!score)
        return SACCADE_OK;
    TRY(pass_tangent(score, arena, &all, out->twin, nodes, err));
    mod_fn *slope = arena_alloc(arena, sizeof *slope);
    FAIL_IF_NULL(slope);
    *slope = *all;
    slope->result = nodes[1];
    out->slope = slope;
    out->n_captures = all->n_captures;
    out->has_slopes = varies_in_head(all, nodes[1]);
    out->has_rates = !is_zero(all, nodes[2]);
    results[out->n_results++] = nodes[0];
    if (out->has_slopes)
        results[out->n_results++] = nodes[1];
    if (out->has_rates)
        results[out->n_results++] = nodes[2];
    if (out->n_results <= 1)
        return SACCADE_OK;
    return jit_compile_results(plan, all, results, out->n_results, arena, &out->score,
                               &out->jit, err);
}

void cpu_tangent_destroy(cpu_tangent_plan *plan)
{
    jit_destroy(plan->jit);
}

void cpu_tangent_explain(const saccade_plan *plan, const cpu_tangent_plan *tangent, strbuf *out)
{
    const cpu_kernels *k = tangent->kernels->block;
    strbuf_printf(out,
                  "forward mode: out and its tangent in one pass, tiles of %d rows x %d keys, "
                  "products: %s\n",
                  CPU_BLOCK_ROWS, CPU_BLOCK_KEYS, k->name);
    if (!plan->problem.score)
        return;
    strbuf_printf(out, "tangent of the score: %s%s%s\n",
                  !tangent->score ? "its slope is one number a head, folded into products"
                  : tangent->jit  ? "value and slopes compiled as one graph"
                                  : "value and slopes in the strip interpreter",
                  tangent->has_rates ? ", with rates of captures" : "",
                  tangent->score && !tangent->has_slopes
                      ? "; the slope by the score is one number a head"
                      : "");
}

/* ---- geometry ---- */

static tangent_geometry count(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                              const saccade_sizes *asked)
{
    const cpu_kernels *k = tangent->kernels->block;
    saccade_sizes s = plan->problem.sizes;
    tangent_geometry g = {0};
    s.B = larger(asked->B, 1);
    s.Q = larger(asked->Q, 1);
    s.KV = larger(asked->KV, 1);
    const size_t each = (size_t)k->element;
    g.q_ld = (int32_t)round_up(s.D, 32);
    g.o_ld = (int32_t)round_up(s.Dv, k->panel);
    g.rows = (int32_t)round_up(CPU_BLOCK_ROWS, k->strip);
    g.row_blocks = ceil_div(s.Q, CPU_BLOCK_ROWS);
    g.key_blocks = ceil_div(s.KV, CPU_BLOCK_KEYS);
    g.heads = s.B * s.Hkv;
    g.k_bytes = bytes64((int64_t)CPU_BLOCK_KEYS * round_up(s.D, k->depth), each);
    g.v_bytes = bytes64((int64_t)CPU_BLOCK_KEYS * g.o_ld, each);
    const size_t head = (size_t)g.key_blocks * 2 * (g.k_bytes + g.v_bytes);
    g.wave = head > wave_bytes ? 1 : smaller(g.heads, (int64_t)(wave_bytes / head));
    return g;
}

tangent_scratch tangent_scratch_of(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                                   const tangent_geometry *g)
{
    const cpu_state *state = cpu_state_of(plan);
    const plan_problem *p = &plan->problem;
    const pass_limits *limits = plan_limits(p);
    const cpu_kernels *k = tangent->kernels->block;
    const size_t strip = bytes64((int64_t)k->strip * CPU_BLOCK_KEYS, sizeof(float));
    const size_t q = bytes64((int64_t)g->rows * g->q_ld, (size_t)k->element);
    const size_t o = bytes64((int64_t)g->rows * g->o_ld, sizeof(float));
    tangent_scratch at;
    size_t end = 1024; /* tangent_worker itself */
    place(q, &at.q, &end);
    place(q, &at.q_dot, &end);
    place(strip, &at.s, &end);
    place(strip, &at.x, &end);
    place(strip, &at.y, &end);
    place(tangent->has_slopes ? strip : 0, &at.slope, &end);
    place(tangent->has_rates ? strip : 0, &at.added, &end);
    place(o, &at.o, &end);
    place(o, &at.o_dot, &end);
    place(6 * bytes64(g->rows, sizeof(float)), &at.stats, &end);
    place(bytes64((int64_t)k->strip * CPU_BLOCK_KEYS, 1), &at.live, &end);
    place(bytes64(2 * p->sizes.Dv, sizeof(float)), &at.row, &end);
    place(bytes64(g->rows, sizeof(float)), &at.most, &end);
    place(bytes64((int64_t)pass_cover_bytes(p->mask ? p->mask->n_nodes : 0), 1), &at.ranges,
          &end);
    place(limits ? 2 * CPU_MOST_ROWS * sizeof(int64_t) : 0, &at.limits, &end);
    const int64_t slopes = tangent->slope ? tangent->slope->n_nodes : 0;
    place(bytes64(larger(limits ? limits->fn->n_nodes : 0, slopes), sizeof(double)), &at.values,
          &end);
    const eval_prog *score = tangent->score ? tangent->score : state->score;
    const jit_program *jit = tangent->score ? tangent->jit : state->jit;
    place(score ? eval_state_bytes(score) : 0, &at.score, &end);
    place(state->mask ? eval_state_bytes(state->mask) : 0, &at.mask, &end);
    place(jit ? jit_state_bytes(jit) : 0, &at.jit, &end);
    at.bytes = end;
    return at;
}

tangent_geometry tangent_geometry_of(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                                     const saccade_sizes *sizes)
{
    tangent_geometry g = count(plan, tangent, sizes);
    /* Grows with every size: a wave of fewer heads may hold more than one of many. */
    const size_t head = (size_t)g.key_blocks * 2 * (g.k_bytes + g.v_bytes);
    const size_t all = (size_t)g.heads * head;
    const size_t least = head > wave_bytes ? head : wave_bytes;
    size_t end = all < least ? all : least;
    g.thread_bytes = tangent_scratch_of(plan, tangent, &g).bytes;
    place(bytes64(g.heads * g.key_blocks, 1), &g.flag_off, &end);
    place((size_t)plan->threads * g.thread_bytes, &g.thread_off, &end);
    g.bytes = end;
    return g;
}

size_t cpu_tangent_workspace(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                             const saccade_sizes *sizes)
{
    return tangent_geometry_of(plan, tangent, sizes).bytes;
}
