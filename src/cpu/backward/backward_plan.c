/* What a plan keeps for backward, and the workspace as a function of the problem's integers. */
#include "cpu/backward/backward.h"

#include "base/integers.h"
#include "base/status.h"
#include "cpu/schedule/layout.h"

enum { ITEMS = 32 }; /* aimed at: enough for sixteen threads, the longest first */
/* Sums of dQ at a time, unless one head is more. */
static const size_t wave_bytes = (size_t)512 << 20;

/* ---- the slope of the score mod ---- */

static int varies_in_head(const mod_fn *fn)
{
    return (fn->nodes[fn->result].deps & ~(DEP_B | DEP_H)) != 0;
}

static int is_one(const mod_fn *fn)
{
    return fn->nodes[fn->result].op == OP_FLOAT && fn->nodes[fn->result].imm.f == 1;
}

/* Of the derivatives, which run with the score and which are found once a head. dX itself is
 * needed for reads, so then slopes that are not 1 run with the score too. */
static saccade_status split_results(const mod_fn *all, const uint32_t *nodes,
                                    backward_read *reads, arena *arena, cpu_backward_plan *out,
                                    uint32_t *results, saccade_error *err)
{
    mod_fn *each = arena_array(arena, out->n_reads + 1, sizeof *each);
    FAIL_IF_NULL(each);
    for (uint32_t n = 0; n <= out->n_reads; n++) {
        each[n] = *all;
        each[n].result = nodes[1 + n];
    }
    out->slope = &each[0];
    out->has_slopes = varies_in_head(&each[0]) || (out->n_reads && !is_one(&each[0]));
    results[out->n_results++] = nodes[0];
    if (out->has_slopes)
        results[out->n_results++] = nodes[1];
    for (uint32_t n = 0; n < out->n_reads; n++) {
        reads[n].factor = varies_in_head(&each[1 + n]) ? NULL : &each[1 + n];
        reads[n].result = out->n_results;
        if (!reads[n].factor)
            results[out->n_results++] = nodes[2 + n];
    }
    return SACCADE_OK;
}

saccade_status cpu_backward_create(const saccade_plan *plan, arena *arena,
                                   cpu_backward_plan *out, saccade_error *err)
{
    const mod_fn *score = plan->problem.score, *all;
    uint32_t wanted[BACKWARD_READS + 1], nodes[BACKWARD_RESULTS], results[BACKWARD_RESULTS];
    out->kernels = cpu_backward_kernels_for(&plan->problem, plan->level);
    if (!score || !(out->has_dq || out->has_dk || out->captures))
        return SACCADE_OK;
    backward_read *reads = arena_array(arena, BACKWARD_READS, sizeof *reads);
    FAIL_IF_NULL(reads);
    const pass_facts *facts = plan->problem.score_facts;
    TRY(backward_check_reads(facts, out->captures, err));
    out->n_reads = backward_find_reads(facts, out->captures, reads, BACKWARD_READS);
    FAIL_IF(out->n_reads > BACKWARD_READS, SACCADE_EBACKEND,
            "score: got %u reads of captures whose gradients are wanted, expected at most %d",
            out->n_reads, BACKWARD_READS);
    TRY(backward_compile_indices(score, reads, out->n_reads, arena, err));
    out->reads = reads;
    wanted[0] = pass_find_score(score);
    for (uint32_t n = 0; n < out->n_reads; n++)
        wanted[1 + n] = reads[n].node;
    TRY(pass_value_and_gradient(score, wanted, 1 + out->n_reads, arena, &all, nodes, err));
    TRY(split_results(all, nodes, reads, arena, out, results, err));
    if (out->has_slopes && out->kernels->careful)
        out->kernels = out->kernels->careful;
    if (out->n_results <= 1)
        return SACCADE_OK;
    return jit_compile_results(plan, all, results, out->n_results, arena, &out->score,
                               &out->jit, err);
}

void cpu_backward_destroy(cpu_backward_plan *plan)
{
    jit_destroy(plan->jit);
}

/* ---- geometry ---- */

/* Bytes of a chunk's dQ of one query head. */
static size_t partial_bytes(const backward_geometry *g)
{
    return bytes64(g->dq_rows * g->dq_ld, sizeof(float));
}

/* Keys of a tile: many where what belongs to them lies in the second-level cache and items
 * stay enough, since rows are packed and dQ is read and written once a tile. */
enum { FEW_KEYS = BACKWARD_KEYS / 2, LONG_ROWS = 256 };

static int32_t keys_of(const saccade_sizes *s, int64_t heads)
{
    const int is_many =
        s->D + s->Dv <= LONG_ROWS && heads * ceil_div(s->KV, BACKWARD_KEYS) >= ITEMS;
    return is_many ? BACKWARD_KEYS : FEW_KEYS;
}

/* Without dQ and captures a block of keys is an item: nothing is left to add up. A wave's items
 * have numbers of 32 bits. */
static void cut_items(const saccade_plan *plan, const cpu_backward_plan *backward,
                      const saccade_sizes *s, backward_geometry *g)
{
    const size_t head = (size_t)plan->problem.group * partial_bytes(g);
    g->row_blocks = ceil_div(s->Q, g->rows);
    g->key_blocks = ceil_div(s->KV, g->keys);
    g->chunks = g->key_blocks;
    g->wave = smaller(g->heads, larger(1, INT32_MAX / g->chunks));
    if (!backward->has_dq && !backward->n_reads)
        return;
    g->chunks = smaller(g->chunks, smaller(ceil_div(ITEMS, g->heads), BACKWARD_CHUNKS));
    if ((size_t)g->chunks * head > wave_bytes)
        g->chunks = larger(1, (int64_t)(wave_bytes / head));
    g->wave = larger(1, smaller(g->heads, (int64_t)(wave_bytes / ((size_t)g->chunks * head))));
}

static void size_operands(const cpu_backward_kernels *kernels, const saccade_sizes *s,
                          backward_geometry *g)
{
    const cpu_kernels *k = kernels->block;
    const size_t each = (size_t)k->element;
    g->q_ld = (int32_t)round_up(s->D, 32);
    g->o_ld = (int32_t)round_up(s->Dv, 32);
    g->dq_ld = (int32_t)round_up(s->D, k->panel);
    g->dv_ld = (int32_t)round_up(s->Dv, k->panel);
    g->dq_rows = round_up(s->Q, kernels->depth);
    g->k_turned = bytes64(g->keys * round_up(s->D, k->depth), each);
    g->v_turned = bytes64(g->keys * round_up(s->Dv, k->depth), each);
    g->k_steps = bytes64((int64_t)g->keys * g->dq_ld, each);
    g->q_rows = bytes64((int64_t)g->rows * g->q_ld, each);
    g->q_steps = bytes64((int64_t)g->rows * g->dq_ld, each);
    g->o_rows = bytes64((int64_t)g->rows * g->o_ld, each);
    g->o_steps = bytes64((int64_t)g->rows * g->dv_ld, each);
}

backward_scratch backward_scratch_of(const saccade_plan *plan,
                                     const cpu_backward_plan *backward,
                                     const backward_geometry *g)
{
    const cpu_state *state = cpu_state_of(plan);
    const pass_limits *limits = plan_limits(&plan->problem);
    const size_t tile = (size_t)(g->rows * BACKWARD_KEYS) * sizeof(float);
    const size_t pairs =
        backward->kernels->is_apart ? tile / (size_t)backward->kernels->step : 0;
    backward_scratch at;
    size_t end = BACKWARD_WORKER;
    place(g->k_turned, &at.k_turned, &end);
    place(g->v_turned, &at.v_turned, &end);
    place(g->k_steps, &at.k_steps, &end);
    place(g->q_rows, &at.q_rows, &end);
    place(g->q_steps, &at.q_steps, &end);
    place(g->o_rows, &at.o_rows, &end);
    place(g->o_steps, &at.o_steps, &end);
    place(tile, &at.s, &end);
    place(tile, &at.dp, &end);
    place(pairs, &at.p, &end);
    place(pairs, &at.ds, &end);
    const size_t strip = bytes64((int64_t)backward->kernels->block->strip * BACKWARD_KEYS, 4);
    const size_t n_reads = backward->n_reads;
    const size_t n_results = backward->n_results > 1 ? backward->n_results : 1;
    place(bytes64(2 * (int64_t)n_results, sizeof(float *)), &at.pointers, &end);
    place((n_results - 1) * strip, &at.results, &end);
    place(n_reads ? strip : 0, &at.dx, &end);
    place(bytes64((int64_t)n_reads * BACKWARD_SUMS, sizeof(float)), &at.sums, &end);
    place(bytes64((int64_t)BACKWARD_KEYS * g->dq_ld, sizeof(float)), &at.dk, &end);
    place(bytes64((int64_t)BACKWARD_KEYS * g->dv_ld, sizeof(float)), &at.dv, &end);
    const int64_t turned = backward->kernels->turn_sums ? BACKWARD_TURNED : 0;
    place(bytes64(turned * larger(g->dq_ld, g->dv_ld), sizeof(float)), &at.turned, &end);
    place(bytes64(larger(g->dq_ld, g->dv_ld), sizeof(float)), &at.row, &end);
    place(bytes64(BACKWARD_ROWS, sizeof(float)), &at.most, &end);
    place(bytes64(g->rows * BACKWARD_KEYS, 1), &at.live, &end);
    place(bytes64((int64_t)pass_cover_bytes(state->mask ? plan->problem.mask->n_nodes : 0), 1),
          &at.ranges, &end);
    place(limits ? 2 * CPU_MOST_ROWS * sizeof(int64_t) : 0, &at.limits, &end);
    int64_t n_values = limits ? limits->fn->n_nodes : 0;
    n_values = larger(n_values, backward->slope ? backward->slope->n_nodes : 0);
    n_values = larger(n_values, plan->problem.score ? plan->problem.score->n_nodes : 0);
    place(bytes64(n_values, sizeof(double)), &at.values, &end);
    const eval_prog *score = backward->score ? backward->score : state->score;
    const jit_program *jit = backward->score ? backward->jit : state->jit;
    place(score ? eval_state_bytes(score) : 0, &at.score, &end);
    place(state->mask ? eval_state_bytes(state->mask) : 0, &at.mask, &end);
    place(jit ? jit_state_bytes(jit) : 0, &at.jit, &end);
    const size_t indices = backward_indices_bytes(backward);
    place(indices, &at.indices, &end);
    place(indices ? bytes64(BACKWARD_KEYS, sizeof(int64_t)) : 0, &at.element, &end);
    place(indices ? BACKWARD_KEPT * sizeof(backward_kept) : 0, &at.kept, &end);
    const int64_t room = (int64_t)kv_room(&plan->problem, BACKWARD_KEYS);
    place(bytes64(room, 1), &at.k_room, &end);
    place(bytes64(room, 1), &at.v_room, &end);
    at.bytes = end;
    return at;
}

/* Sums of a read along an axis, one for each chunk and query head, at most: beyond it they are
 * more than memory can be, and their bytes might wrap. */
static const int64_t MOST_SUMS = (int64_t)1 << 48;

/* Grows with every size, so that the workspace of the largest run serves the smaller ones:
 * sums of dQ are counted for as many chunks as any smaller run may have. */
static void lay_out(const saccade_plan *plan, const cpu_backward_plan *backward,
                    const saccade_sizes *s, backward_geometry *g)
{
    const int64_t rows = g->heads * plan->problem.group * s->Q;
    const int64_t blocks = g->heads * plan->problem.group * g->row_blocks;
    const int has_limits = plan_limits(&plan->problem) != NULL;
    const int64_t items = g->heads * larger(ceil_div(s->KV, FEW_KEYS), BACKWARD_CHUNKS);
    const size_t head = (size_t)plan->problem.group * partial_bytes(g);
    const int64_t sums = smaller(g->heads * BACKWARD_CHUNKS, g->heads + ITEMS);
    size_t most = smaller((int64_t)((size_t)sums * head), (int64_t)wave_bytes);
    size_t end = 0;
    most = backward->has_dq ? (most > head ? most : head) : 0;
    place(bytes64(rows, sizeof(float)), &g->lse_off, &end);
    place(bytes64(rows, sizeof(float)), &g->delta_off, &end);
    place(has_limits ? bytes64(rows, sizeof(int32_t)) : 0, &g->first_off, &end);
    place(has_limits ? bytes64(rows, sizeof(int32_t)) : 0, &g->past_off, &end);
    place(has_limits ? bytes64(blocks, sizeof(backward_span)) : 0, &g->span_off, &end);
    place(bytes64(items, sizeof(int64_t)), &g->weight_off, &end);
    place(bytes64(items, sizeof(int32_t)), &g->order_off, &end);
    place(bytes64(blocks * BACKWARD_CHUNKS, 1), &g->touched_off, &end);
    place(most, &g->partial_off, &end);
    place((size_t)plan->threads * g->thread_bytes, &g->thread_off, &end);
    const int64_t axis = s->Q + s->KV,
                  chunks = smaller(BACKWARD_CHUNKS, ceil_div(s->KV, FEW_KEYS));
    const int64_t lines = chunks * g->heads * plan->problem.group;
    if (backward->n_reads && lines > MOST_SUMS / axis) {
        g->bytes = SIZE_MAX;
        return;
    }
    g->read_bytes = bytes64(lines * axis, sizeof(double));
    place(backward->n_reads * g->read_bytes, &g->read_off, &end);
    place(backward->n_reads ? bytes64(axis, sizeof(int64_t)) : 0, &g->moving_off, &end);
    place(bytes64(backward->n_reads, sizeof(backward_read_run)), &g->reads_off, &end);
    g->bytes = end;
}

/* What the plan fixes, and at least one of what runs bring. */
static saccade_sizes whole_sizes(const saccade_plan *plan, const saccade_sizes *asked)
{
    saccade_sizes s = plan->problem.sizes;
    s.B = larger(asked->B, 1);
    s.Q = larger(asked->Q, 1);
    s.KV = larger(asked->KV, 1);
    return s;
}

backward_geometry backward_geometry_of(const saccade_plan *plan,
                                       const cpu_backward_plan *backward,
                                       const saccade_sizes *asked)
{
    const saccade_sizes s = whole_sizes(plan, asked);
    backward_geometry g = {0};
    g.rows = backward->kernels->rows;
    g.heads = s.B * s.Hkv;
    g.keys = keys_of(&s, g.heads);
    size_operands(backward->kernels, &s, &g);
    cut_items(plan, backward, &s, &g);
    g.thread_bytes = backward_scratch_of(plan, backward, &g).bytes;
    lay_out(plan, backward, &s, &g);
    return g;
}

/* Of all passes of a run, which lie in one place. */
static size_t bytes_of(const saccade_plan *plan, const cpu_backward_plan *backward,
                       const saccade_sizes *sizes)
{
    const cpu_backward_plan weighing = backward_weighing_of(backward);
    const size_t own = backward_geometry_of(plan, backward, sizes).bytes;
    const size_t first = backward_has_weighing(plan, backward)
                             ? backward_geometry_of(plan, &weighing, sizes).bytes
                             : 0;
    return own > first ? own : first;
}

size_t cpu_backward_workspace(const saccade_plan *plan, const cpu_backward_plan *backward,
                              const saccade_sizes *sizes, const plan_gradients *gradients)
{
    const saccade_sizes s = whole_sizes(plan, sizes);
    const int is_least = !gradients || gradients->is_least;
    const cpu_backward_plan careful = backward_careful_of(backward);
    const size_t own = bytes_of(plan, backward, sizes);
    const size_t with_careful = bytes_of(plan, &careful, sizes);
    const size_t more = backward_places_bytes(plan, backward, &s, gradients)
                        + (is_least ? 0 : backward_fixed_bytes(backward, gradients));
    return sum_bytes(own > with_careful ? own : with_careful, more);
}
