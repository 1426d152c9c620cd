/* Gradients of captures in a backward run: what is cleared before, the launches, and what ends
 * sums. Nothing is allocated, compiled or copied here. */
#include "cuda/backward/cuda_backward.h"

#include "base/integers.h"
#include "cuda/emit/emit.h"
#include "cuda/run/run.h"

#include <string.h>

/* ---- launches ---- */

static const cu_loaded *program_of(const cu_capture_run *x)
{
    const cu_state *s = x->plan->state;
    return &s->programs[CU_BWD_CAPTURES];
}

static int may_move(const cu_capture_run *x, int i)
{
    return cu_read_may_move(x->at.reads.read[i], &x->run->sizes);
}

/* 16 bits are rounded once, at the end: what is added to in turns has f32 beside. */
static void fill_read(cu_capture_run *x, int i, char *room)
{
    const saccade_tensor *t = &x->g->captures[x->at.reads.read[i]->capture];
    const cu_capture_way way = x->at.way[i];
    const int is_narrow = t->dtype != SACCADE_F32;
    const int has_beside =
        way == CU_SUMS_STORED && (x->at.parts[i] > 1 || (is_narrow && may_move(x, i)));
    const int has_room =
        way == CU_SUMS_EXACT || has_beside || (way == CU_SUMS_ROW && is_narrow);
    void *at = room + x->at.room_at[i];
    cu_read *to = &x->of[i];
    *to = (cu_read){.data = t->data, .dtype = t->dtype, .n = 1};
    for (int32_t d = t->rank - 1; d >= 0; d--) {
        to->stride[d] = has_room ? to->n : t->stride[d];
        to->n *= t->shape[d];
    }
    to->words = way == CU_SUMS_EXACT ? at : NULL;
    if (has_beside || way == CU_SUMS_ROW)
        to->rows = has_room ? at : t->data;
    to->parts = has_beside ? x->at.parts[i] : to->rows != NULL;
}

/* Where sums of read i go in this run. What is stored without a look at what is there must
 * not leave its tensor. */
static saccade_status find_way(cu_capture_run *x, int i, saccade_error *err)
{
    const plan_problem *p = &x->plan->problem;
    const pass_read *read = x->at.reads.read[i];
    const saccade_tensor *t = &x->g->captures[read->capture];
    const plan_positions *at = &x->run->positions;
    const saccade_sizes whole = cu_whole_sizes(x->plan, &x->run->sizes);
    const eval_env *env = &x->run->score_env;
    plan_position first = {0};
    const int knows_q = cu_knows_position(&at->q_offset, &first.q_offset);
    const int knows_kv = cu_knows_position(&at->kv_offset, &first.kv_offset);
    int is_good = 0;
    if (x->at.way[i] == CU_SUMS_EXACT)
        return SACCADE_OK;
    if (x->at.way[i] == CU_SUMS_STORED)
        is_good = knows_q && knows_kv && cu_read_is_inside(p, read, 0, t, &whole, env, &first);
    if (!is_good && x->at.may_be_row[i])
        x->at.way[i] = CU_SUMS_ROW;
    if (x->at.way[i] != CU_SUMS_STORED) /* of a query's own alone */
        is_good = knows_q && cu_read_is_inside(p, read, CU_OF_KEYS, t, &whole, env, &first);
    FAIL_AT(!is_good, SACCADE_EINVAL, p->score->captures[read->capture].name, 0, 0,
            "gradient: got offsets with which an index may leave the tensor, expected ones "
            "known to the host that keep it inside");
    return SACCADE_OK;
}

/* Every element of a gradient: from its sums, or cleared. */
static saccade_status end_gradient(const cu_capture_run *x, const saccade_tensor *t,
                                   const cu_read *sums, int is_added, saccade_error *err)
{
    cu_read to =
        sums ? *sums : (cu_read){.data = t->data, .dtype = t->dtype, .n = cu_element_count(t)};
    cu_shape shape = cu_shape_of(t);
    void *parameters[] = {&to, &shape, &is_added};
    return run_start(x->a, program_of(x)->other, (to.n + 255) / 256, 256, 0, parameters, err);
}

static int has_own(const cu_capture_run *x, int i, int var)
{
    return cu_read_is_apart(x->at.reads.read[i], &x->run->sizes, var);
}

/* How many batches and heads have elements of a read apart from each other. */
static int64_t count_own(const cu_capture_run *x, int i)
{
    return cu_count_apart(x->at.reads.read[i], &x->run->sizes);
}

/* Whether terms of several scores go to an element without exact sums: CU_BWD_ELEMENTS. */
static int is_shared(const cu_capture_run *x, int i)
{
    const saccade_sizes *s = &x->run->sizes;
    return x->at.way[i] == CU_SUMS_STORED && !cu_read_is_own(x->at.reads.read[i], s->B, s->H);
}

/* Tiles come once, in any order: what they store has elements of its own in all of them. */
static void choose_tiles(cu_capture_run *x, int has_tiles)
{
    const cu_state *s = x->plan->state;
    for (int i = 0; i < smaller(x->at.reads.n, CU_READS) && has_tiles; i++) {
        const int kind = s->backward_facts.term[i];
        const int is_stored = kind == CU_TERM_ELEMENT;
        const int is_made = kind == CU_TERM_ROW ? x->g->d_lse == NULL : kind != CU_TERM_NONE;
        if (is_made && is_stored == (x->at.way[i] == CU_SUMS_STORED) && !is_shared(x, i))
            x->c.in_tiles |= 1u << i;
    }
}

/* How many elements one query reads. */
static int64_t count_row(const cu_capture_run *x, int i)
{
    const pass_read *read = x->at.reads.read[i];
    int64_t n = 1;
    if (x->at.way[i] == CU_SUMS_STORED)
        return x->run->sizes.KV;
    for (int d = 0; d < read->rank; d++)
        n *= read->index[d].varies & CU_OF_KEYS ? x->g->captures[read->capture].shape[d] : 1;
    return n;
}

/* Whether each element of the gradient is stored once, so that none keeps what it held. Terms
 * of a mask's other positions are stored by CU_BWD_ELEMENTS alone. */
static int is_covered(const cu_capture_run *x, int i)
{
    const int has_all = !x->run->block_mask && x->run->positions.kv_len.dtype == SACCADE_NONE;
    const int is_whole = x->at.way[i] == CU_SUMS_ROW     ? 0
                         : x->at.way[i] == CU_SUMS_TABLE ? 1
                         : is_shared(x, i)               ? !may_move(x, i)
                                                         : has_all;
    return is_whole && count_own(x, i) * x->run->sizes.Q * count_row(x, i) == x->of[i].n;
}

static saccade_status fill_zeros(const run_args *a, void *at, size_t bytes, saccade_error *err)
{
    return cu_check(a->driver,
                    a->driver->fill32((cu_ptr)(uintptr_t)at, 0, bytes / 4, a->stream),
                    "cuMemsetD32Async", err);
}

static saccade_status clear_gradient(const cu_capture_run *x, const saccade_tensor *t,
                                     saccade_error *err)
{
    const cu_shape shape = cu_shape_of(t);
    const size_t bytes = (size_t)cu_element_count(t) * (t->dtype == SACCADE_F32 ? 4 : 2);
    return shape.rank == 1 && shape.stride[0] == 1 && bytes % 4 == 0
                   && (uintptr_t)t->data % 4 == 0
               ? fill_zeros(x->a, t->data, bytes, err)
               : end_gradient(x, t, NULL, 0, err);
}

static saccade_status clear(const cu_capture_run *x, saccade_error *err)
{
    for (int i = 0; i < x->at.reads.n; i++) {
        const saccade_tensor *t = &x->g->captures[x->at.reads.read[i]->capture];
        const cu_read *to = &x->of[i];
        if (to->words)
            TRY(fill_zeros(x->a, to->words, cu_words_bytes(t), err));
        else if (to->rows && (void *)to->rows != to->data)
            TRY(fill_zeros(x->a, to->rows, (size_t)(to->n * to->parts) * sizeof(float), err));
        else if (!x->is_added && !is_covered(x, i))
            TRY(clear_gradient(x, t, err));
    }
    return SACCADE_OK;
}

/* Reads that a launch makes terms of, from `first` on. */
static void take_reads(cu_capture_run *x, int first)
{
    const int n = (int)smaller(x->at.reads.n - first, CU_READS);
    memcpy(x->c.of, x->of + first, (size_t)n * sizeof *x->of);
    x->c.in_tiles = first ? 0 : x->c.in_tiles;
    x->c.elsewhere = x->c.in_tiles;
    for (int i = 0; i < n; i++)
        x->c.elsewhere |= (unsigned)is_shared(x, first + i) << i;
    x->c.first = first;
}

/* Heads that add to the same rows in place take turns. */
static int take_turns(const cu_capture_run *x)
{
    const saccade_sizes *s = &x->run->sizes;
    for (int k = 0; k < CU_READS && x->c.first + k < x->at.reads.n; k++)
        if (x->at.way[x->c.first + k] == CU_SUMS_ROW
            && !cu_read_is_own(x->at.reads.read[x->c.first + k], s->B, s->H))
            return 1;
    return 0;
}

static saccade_status start_reads(cu_capture_run *x, saccade_error *err)
{
    const int64_t heads = x->run->sizes.B * x->run->sizes.H, blocks = x->p->n_mblk;
    const int64_t turns = take_turns(x) ? heads : 1;
    const cu_loaded *program = program_of(x);
    void *parameters[] = {x->p, (void *)x->a->captures, &x->c, &x->tables};
    cu_choose_tables(x);
    for (int64_t turn = 0; turn < turns; turn++) {
        x->c.from = turns > 1 ? (int)(turn * blocks) : -1;
        TRY(run_start(x->a, program->kernel, heads / turns * blocks,
                      cu_backward_threads(&program->form),
                      cu_captures_base(x->plan) + x->tables.bytes, parameters, err));
    }
    return SACCADE_OK;
}

/* start_elements by larger tiles. */
static saccade_status start_elements90(cu_capture_run *x, int i, cu_elements *c,
                                       saccade_error *err)
{
    const cu_state *state = x->plan->state;
    const cu_loaded *program = &state->programs[CU_BWD_ELEMENTS90];
    const saccade_tensor *const boxes[4] = {x->run->q, x->run->k, x->run->v, x->g->d_out};
    cu_map m[4];
    void *parameters[] = {x->p, (void *)x->a->captures, c, &m[0], &m[1], &m[2], &m[3]};
    c->blocks = 1;
    for (int k = 0; k < 4; k++)
        TRY(run_encode_map(x->a->driver, boxes[k], BWD_ROWS, PROMOTE_128, &m[k], err));
    return run_start(x->a, program->kernel,
                     cu_elements90_ctas(state, count_own(x, i), &x->run->sizes) * c->parts,
                     cu_backward_threads(&program->form),
                     cu_backward_shared(state, &x->plan->problem, &program->form), parameters,
                     err);
}

/* One read whose elements several batches or heads share. */
static saccade_status start_elements(cu_capture_run *x, int i, saccade_error *err)
{
    const cu_state *state = x->plan->state;
    const saccade_sizes *s = &x->run->sizes;
    const cu_loaded *program = &state->programs[CU_BWD_ELEMENTS];
    const int shared = cu_backward_shared(state, &x->plan->problem, &program->form);
    cu_elements c = {.to = x->of[i],
                     .read = i,
                     .has_batches = has_own(x, i, VAR_B),
                     .has_heads = has_own(x, i, VAR_H),
                     .may_move = may_move(x, i),
                     .parts = (int)larger(x->of[i].parts, 1)};
    void *parameters[] = {x->p, (void *)x->a->captures, &c};
    const int64_t rows = count_own(x, i) * x->p->n_mblk;
    c.is_adding = c.parts == 1 && (x->is_added || c.may_move);
    if (c.to.rows) {
        c.to.data = c.to.rows;
        c.to.dtype = SACCADE_F32;
    }
    /* its tiles ask the mod of full blocks that lie beside partial ones */
    const int is_told = x->run->block_mask && mask_is_imported(x->run->block_mask);
    if (!x->p->f.is_plain && !is_told && cu_elements_by_wgmma(state, x->at.reads.read[i], s))
        return start_elements90(x, i, &c, err);
    c.blocks = cu_element_blocks(state, rows, s->KV);
    const int64_t keys = (int64_t)c.blocks * program->form.backward.rows;
    return run_start(x->a, program->kernel, rows * ((s->KV + keys - 1) / keys) * c.parts,
                     cu_backward_threads(&program->form), shared, parameters, err);
}

static saccade_status end_all(const cu_capture_run *x, saccade_error *err)
{
    uint64_t done = 0;
    for (int i = 0; i < x->at.reads.n; i++) {
        const uint32_t capture = x->at.reads.read[i]->capture;
        const cu_read *to = &x->of[i];
        const int has_sums = to->words || (to->rows && (void *)to->rows != to->data);
        if (has_sums && !(done >> capture & 1))
            TRY(end_gradient(x, &x->g->captures[capture], to, x->is_added, err));
        done |= (uint64_t)1 << capture;
    }
    for (int n = 0; n < MOD_MAX_CAPTURES && !x->is_added; n++) /* that nothing reads */
        if ((x->plan->problem.gradient_captures & ~done) >> n & 1)
            TRY(clear_gradient(x, &x->g->captures[n], err));
    return SACCADE_OK;
}

saccade_status cu_begin_captures(const saccade_plan *plan, const plan_run *run,
                                 const plan_gradients *g, size_t room_at, int has_tiles,
                                 const run_args *a, cu_capture_run *x, saccade_error *err)
{
    *x = (cu_capture_run){.plan = plan, .run = run, .g = g, .a = a};
    if (!cu_has_captures(&plan->problem))
        return SACCADE_OK;
    x->at = cu_lay_out_captures(plan, &run->sizes, g->captures, g->positions);
    FAIL_AT(run->workspace_bytes < room_at + x->at.bytes, SACCADE_EINVAL, "workspace", 0, 0,
            "got %zu bytes, expected %zu, saccade_backward_workspace's: captures' gradients",
            run->workspace_bytes, room_at + x->at.bytes);
    x->is_added = x->c.is_adding = (g->added & SACCADE_GRADIENT_CAPTURES) != 0;
    for (int i = 0; i < x->at.reads.n; i++) {
        TRY(find_way(x, i, err));
        fill_read(x, i, (char *)run->workspace + room_at);
    }
    choose_tiles(x, has_tiles);
    take_reads(x, 0);
    return clear(x, err);
}

saccade_status cu_end_captures(cu_capture_run *x, cu_bwd *p, saccade_error *err)
{
    if (!cu_has_captures(&x->plan->problem))
        return SACCADE_OK;
    x->p = p;
    for (int i = 0; i < x->at.reads.n; i++)
        if (is_shared(x, i))
            TRY(start_elements(x, i, err));
    for (int first = 0; first < x->at.reads.n; first += CU_READS) {
        take_reads(x, first);
        const int64_t n = smaller(x->at.reads.n - first, CU_READS);
        if (x->c.elsewhere + 1 < 1u << n)
            TRY(start_reads(x, err));
    }
    return end_all(x, err);
}
