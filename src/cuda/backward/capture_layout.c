/* Where the terms of a plan's reads of captures go, and the room that takes. */
#include "cuda/backward/cuda_backward.h"

#include "base/integers.h"
#include "cuda/run/run.h"

#include <stdlib.h>

/* ---- indices ---- */

/* Of a tensor of this shape, wherever positions of a run are known to the host; env's scalars
 * may be unknown. Indices that count from the end where they are below 0 must not be. */
int cu_read_is_inside(const plan_problem *p, const pass_read *read, int but,
                      const saccade_tensor *t, const saccade_sizes *s, const eval_env *env,
                      const plan_position *at)
{
    const mod_fn *fn = p->score;
    const mod_node *load = &fn->nodes[read->node];
    const pass_box box = {{0, 0, at->q_offset, at->kv_offset},
                          {(int32_t)s->B - 1, (int32_t)s->H - 1,
                           at->q_offset + (int32_t)s->Q - 1,
                           at->kv_offset + (int32_t)s->KV - 1}};
    int is_inside = 1;
    arena scratch;
    arena_init(&scratch);
    pass_range *ranges = arena_array(&scratch, fn->n_nodes, sizeof *ranges);
    if (ranges)
        pass_ranges(fn, env, &box, NULL, ranges);
    for (int d = 0; d < read->rank && ranges; d++) {
        const pass_index *index = &read->index[d];
        const pass_range *r =
            &ranges[index->sum == PASS_NO_NODE ? fn->args[load->args + d] : index->sum];
        is_inside &= index->varies & but || (r->lo >= 0 && r->hi < t->shape[d]);
    }
    arena_free(&scratch);
    return ranges && is_inside;
}

/* Whether there are constants of a run with which all indices stay inside: those of lines do
 * where their tensor is as long as they are. */
static int may_be_inside(const pass_read *read, const saccade_tensor *t, const saccade_sizes *s)
{
    const int64_t extent[4] = {s->B, s->H, s->Q, s->KV};
    for (int d = 0; d < read->rank; d++) {
        const mod_line *line = &read->index[d].sum_line;
        int64_t span = 0;
        for (int i = 0; i < 4; i++)
            span += llabs(line->coef[i]) * (extent[i] - 1);
        if (line->known != (DEP_B | DEP_H | DEP_Q | DEP_KV) || span >= t->shape[d])
            return 0;
    }
    return 1;
}

static int is_only_read(const cu_reads_found *reads, int i)
{
    for (int k = 0; k < reads->n; k++)
        if (k != i && reads->read[k]->capture == reads->read[i]->capture)
            return 0;
    return 1;
}

/* ---- elements that batches or heads share ---- */

int cu_read_is_apart(const pass_read *read, const saccade_sizes *s, int var)
{
    return (var == VAR_B ? s->B : s->H) == 1 || cu_read_has_own(read, var);
}

int64_t cu_count_apart(const pass_read *read, const saccade_sizes *s)
{
    return (cu_read_is_apart(read, s, VAR_B) ? s->B : 1)
           * (cu_read_is_apart(read, s, VAR_H) ? s->H : 1);
}

int cu_read_may_move(const pass_read *read, const saccade_sizes *s)
{
    int varies = 0;
    for (int d = 0; d < read->rank; d++)
        varies |= read->index[d].varies;
    return (varies & DEP_B && !cu_read_is_apart(read, s, VAR_B))
           || (varies & DEP_H && !cu_read_is_apart(read, s, VAR_H));
}

enum { CTAS = 2, VISITS = 4 }; /* to a multiprocessor; of a part of batches and heads */

int cu_elements_by_wgmma(const cu_state *s, const pass_read *read, const saccade_sizes *sizes)
{
    return s->programs[CU_BWD_ELEMENTS90].form.tile.groups > 0
           && !cu_read_may_move(read, sizes);
}

int64_t cu_elements90_ctas(const cu_state *s, int64_t apart, const saccade_sizes *sizes)
{
    const cu_form *form = &s->programs[CU_BWD_ELEMENTS90].form;
    return apart * ceil_div(sizes->Q, form->backward.stay)
           * ceil_div(sizes->KV, form->tile.keys);
}
enum { PARTS_BYTES = 1 << 25 };

int cu_element_blocks(const cu_state *s, int64_t rows, int64_t keys)
{
    const cu_form *form = &s->programs[CU_BWD_ELEMENTS].form;
    int blocks = form->backward.blocks;
    while (blocks > 1
           && rows * ((keys - 1) / ((int64_t)blocks * form->backward.rows) + 1)
                  < CTAS * s->device.n_sm)
        blocks /= 2;
    return blocks;
}

/* CTAs for a read whose elements so many batches and heads have apart, and how many of them a
 * multiprocessor has room for. */
static int64_t count_ctas(const cu_state *s, const pass_read *read, int64_t apart,
                          const saccade_sizes *sizes, int *room)
{
    *room = cu_elements_by_wgmma(s, read, sizes) ? 1 : CTAS;
    if (*room == 1)
        return cu_elements90_ctas(s, apart, sizes);
    const int64_t rows = apart * cu_backward_query_blocks(sizes);
    const int per_block = s->programs[CU_BWD_ELEMENTS].form.backward.rows;
    return rows
           * ceil_div(sizes->KV, (int64_t)cu_element_blocks(s, rows, sizes->KV) * per_block);
}

/* Into how many parts batches and heads are cut whose CTAs would be too few. */
static int count_parts(const saccade_plan *plan, const pass_read *read, const saccade_sizes *s,
                       const saccade_tensor *t)
{
    const cu_state *state = plan->state;
    const int64_t each = cu_count_apart(read, s);
    int room;
    if (each == 0 || s->B * s->H == each || cu_read_may_move(read, s)
        || !state->programs[CU_BWD_ELEMENTS].form.backward.rows)
        return 1;
    const int64_t ctas = count_ctas(state, read, each, s, &room);
    const int64_t parts =
        smaller(room * state->device.n_sm / larger(ctas, 1), s->B * s->H / each / VISITS);
    const int64_t most = PARTS_BYTES / (int64_t)sizeof(float) / larger(cu_element_count(t), 1);
    return (int)larger(smaller(parts, most), 1);
}

/* ---- ways ---- */

int cu_knows_position(const saccade_tensor *t, int32_t *position)
{
    *position = 0;
    if (t->dtype == SACCADE_NONE)
        return 1;
    if (t->device.kind != SACCADE_CPU)
        return 0;
    *position = *(const int32_t *)t->data;
    return 1;
}

/* What a query's keys read of a tensor that no other query reads is summed in a table, or,
 * where that is over what is left of shared memory, in place; both where the query's position
 * is known. taken: words of tables so far. */
static cu_capture_way way_of(const saccade_plan *plan, const cu_reads_found *reads, int i,
                             const saccade_sizes *s, const saccade_tensor *t,
                             const plan_positions *positions, int64_t *taken, int *may_be_row)
{
    const plan_problem *p = &plan->problem;
    const saccade_sizes whole = cu_whole_sizes(plan, s);
    const pass_read *read = reads->read[i];
    plan_position at = {0};
    eval_env env = {0};
    plan_set_env(p, &whole, &env);
    *may_be_row = 0;
    const int knows_q = !positions || cu_knows_position(&positions->q_offset, &at.q_offset);
    const int knows_kv = !positions || cu_knows_position(&positions->kv_offset, &at.kv_offset);
    if (p->is_ragged || !knows_q)
        return CU_SUMS_EXACT;
    if (cu_read_has_elements(read) && knows_kv
        && cu_read_is_inside(p, read, 0, t, &whole, &env, &at))
        return CU_SUMS_STORED;
    if (!is_only_read(reads, i) || !cu_read_has_own(read, VAR_Q)
        || !cu_read_is_inside(p, read, CU_OF_KEYS, t, &whole, &env, &at))
        return CU_SUMS_EXACT;
    *may_be_row = cu_read_has_elements(read) && may_be_inside(read, t, &whole);
    if (*may_be_row)
        return CU_SUMS_STORED;
    if (read->scatter != SCATTER_GENERAL || !cu_read_is_own(read, s->B, s->H))
        return CU_SUMS_EXACT;
    const int64_t words = cu_query_table_words(plan, read, t, *taken);
    *taken += words;
    return words ? CU_SUMS_TABLE : CU_SUMS_ROW;
}

size_t cu_words_bytes(const saccade_tensor *t)
{
    return cu_aligned((size_t)cu_element_count(t) * (SUM_WORDS + 1) * sizeof(uint64_t));
}

cu_capture_layout cu_lay_out_captures(const saccade_plan *plan, const saccade_sizes *s,
                                      const saccade_tensor *captures,
                                      const plan_positions *positions)
{
    cu_capture_layout out = {.bytes = 0};
    int64_t taken = 0;
    cu_find_reads(&plan->problem, &out.reads);
    for (int i = 0; i < out.reads.n; i++) {
        const uint32_t capture = out.reads.read[i]->capture;
        const saccade_tensor *t = &captures[capture];
        int may_be_row, k = 0;
        taken = i % CU_READS ? taken : 0;
        out.way[i] = way_of(plan, &out.reads, i, s, t, positions, &taken, &may_be_row);
        out.may_be_row[i] = may_be_row;
        out.parts[i] =
            out.way[i] == CU_SUMS_STORED ? count_parts(plan, out.reads.read[i], s, t) : 1;
        while (k < i && out.reads.read[k]->capture != capture)
            k++;
        out.room_at[i] = k < i ? out.room_at[k] : out.bytes;
        if (k < i)
            continue;
        if (out.way[i] == CU_SUMS_EXACT)
            out.bytes += cu_words_bytes(t);
        else if (out.parts[i] > 1)
            out.bytes +=
                cu_aligned((size_t)cu_element_count(t) * (size_t)out.parts[i] * sizeof(float));
        else if (t->dtype != SACCADE_F32
                 && (may_be_row || out.way[i] == CU_SUMS_ROW
                     || cu_read_may_move(out.reads.read[i], s)))
            out.bytes += cu_aligned((size_t)cu_element_count(t) * sizeof(float));
    }
    return out;
}

size_t cu_captures_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                             const plan_gradients *gradients)
{
    return gradients && cu_has_captures(&plan->problem)
               ? cu_lay_out_captures(plan, sizes, gradients->captures, gradients->positions)
                     .bytes
               : 0;
}
