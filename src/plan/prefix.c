/* Plans whose batches share keys, as a solver over two plans of the back end: one for ragged
 * rows over what groups share, one for what each batch has of its own. A run makes their lists,
 * runs both in f32 and merges them; all of it lies in its workspace. */
#include "plan/prefix.h"

#include "base/integers.h"
#include "base/status.h"

#include <stdlib.h>

enum { PACKED = 64 }; /* queries times heads of a group that a GPU's decode takes at a time */

typedef struct prefix_state {
    saccade_plan *shared, *own;
} prefix_state;

/* ---- create ---- */

static void destroy(saccade_plan *plan)
{
    prefix_state *s = plan->state;
    if (!s)
        return;
    plan_destroy(s->shared);
    plan_destroy(s->own);
    free(s);
    plan->state = NULL;
}

/* Of the run over shared keys, where batches and rows are others. */
static int names_rows(const mod_fn *fn)
{
    for (uint32_t i = 0; fn && i < fn->n_nodes; i++) {
        const mod_node *n = &fn->nodes[i];
        if ((n->op == OP_VAR && (n->imm.i == VAR_B || n->imm.i == VAR_Q))
            || (n->op == OP_SIZE && n->imm.i == SIZE_B))
            return 1;
    }
    return plan_names_length(fn);
}

static saccade_status check(const saccade_plan *plan, saccade_error *err)
{
    static const char name[] = "shared_prefix";
    const plan_problem *p = &plan->problem;
    FAIL_AT(!p->page || p->is_ragged, SACCADE_EINVAL, name, 0, 0,
            "got a problem %s, expected keys in pages and batches of one number of rows",
            p->page ? "that is ragged" : "without page");
    FAIL_AT(p->gradients || p->has_tangents || p->weight || p->is_invariant, SACCADE_EINVAL,
            name, 0, 0,
            "got a problem with %s, expected none: parts of the keys are merged, forward alone",
            p->is_invariant ? "batch_invariant"
            : p->weight     ? "a weight"
                            : "gradients or tangents");
    FAIL_AT(names_rows(p->score), SACCADE_EINVAL, "score", 0, 0,
            "got one that reads b, q, B, Q or KV with shared_prefix, expected one that does "
            "not: shared keys are read for rows of several batches at a time");
    return SACCADE_OK;
}

static saccade_status create_one(const saccade_plan *plan, const saccade_problem *problem,
                                 saccade_plan **out, saccade_error *err)
{
    saccade_plan *made = calloc(1, sizeof *made);
    FAIL_IF_NULL(made);
    *out = made;
    arena_init(&made->arena);
    made->number = plan->number;
    made->backend = plan->backend;
    made->threads = plan->threads;
    made->level = plan->level;
    TRY(plan_derive(problem, made, err));
    return plan_choose(made, plan->backend->solvers, err);
}

static saccade_status create_both(saccade_plan *plan, const saccade_problem *problem,
                                  saccade_error *err)
{
    prefix_state *s = plan->state;
    saccade_problem p = *problem;
    p.shared_prefix = 0;
    p.out_dtype = p.dtype == SACCADE_F64 ? SACCADE_NONE : SACCADE_F32;
    TRY(create_one(plan, &p, &s->own, err)); /* with head_max, whose kernel it brings */
    p.head_max = 0;
    p.mask = NULL;
    p.sinks_dtype = SACCADE_NONE;
    p.ragged = 1;
    TRY(create_one(plan, &p, &s->shared, err));
    const plan_prefix_steps *steps = s->own->solver->prefix;
    return steps ? steps->prepare(s->own, err) : SACCADE_OK;
}

/* ---- where things lie ---- */

/* Bytes from the workspace's start. */
typedef struct layout {
    int64_t n_pieces, pages; /* at most */
    size_t piece_first, piece_len, piece_table, begin, rest, rest_table;
    size_t out[2], lse[2], max[2], work[2], work_bytes[2], bytes;
} layout;

static size_t take(size_t *at, int64_t count, size_t each)
{
    const size_t taken = *at;
    *at += (size_t)round_up(count * (int64_t)each, 64);
    return taken;
}

static int64_t piece_rows(const plan_problem *p)
{
    return p->group < PACKED ? PACKED / p->group : 1;
}

static saccade_sizes shared_sizes(const saccade_plan *plan, const saccade_sizes *s,
                                  int64_t pieces)
{
    saccade_sizes shared = *s;
    shared.B = pieces;
    shared.Q = piece_rows(&plan->problem);
    return shared;
}

static layout layout_of(const saccade_plan *plan, const saccade_sizes *s)
{
    const prefix_state *state = plan->state;
    const int64_t page = plan->problem.page > 0 ? plan->problem.page : 1;
    const size_t each = plan->problem.dtype == SACCADE_F64 ? sizeof(double) : sizeof(float);
    const int64_t rows = s->B * s->Q;
    layout l = {.n_pieces = rows / piece_rows(&plan->problem) + s->B,
                .pages = (s->KV + page - 1) / page};
    l.piece_first = take(&l.bytes, l.n_pieces + 1, sizeof(int32_t));
    l.piece_len = take(&l.bytes, l.n_pieces, sizeof(int32_t));
    l.piece_table = take(&l.bytes, l.n_pieces * l.pages, sizeof(int32_t));
    l.begin = take(&l.bytes, s->B, sizeof(int32_t));
    l.rest = take(&l.bytes, s->B, sizeof(int32_t));
    l.rest_table = take(&l.bytes, s->B * l.pages, sizeof(int32_t));
    for (int n = 0; n < 2; n++) {
        const saccade_sizes shared = shared_sizes(plan, s, l.n_pieces);
        l.out[n] = take(&l.bytes, rows * s->H * s->Dv, each);
        l.lse[n] = take(&l.bytes, rows * s->H, each);
        l.max[n] = take(&l.bytes, rows * s->H, each);
        l.work_bytes[n] =
            n ? plan_workspace(state->own, s) : plan_workspace(state->shared, &shared);
        if (l.work_bytes[n] == SIZE_MAX) { /* sizes that no run can have */
            l.bytes = SIZE_MAX;
            return l;
        }
        l.work[n] = take(&l.bytes, (int64_t)l.work_bytes[n], 1);
    }
    return l;
}

static size_t workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    return layout_of(plan, sizes).bytes;
}

/* ---- a run ---- */

/* Both runs, their lists and their results. Points into itself. */
typedef struct two_runs {
    prefix_lists lists;
    plan_run shared, own;
    plan_chunks shared_chunks, own_chunks;
    plan_ragged ragged;
    saccade_tensor q, out[2], lse[2], max[2]; /* as the runs have them */
    plan_parts parts;
} two_runs;

static int32_t *ints_at(const plan_run *run, size_t at)
{
    return (int32_t *)(void *)((char *)run->workspace + at);
}

static void fill_lists(const saccade_plan *plan, const plan_run *run, const layout *l,
                       prefix_lists *to)
{
    const saccade_tensor *len = &run->positions.kv_len;
    const int is_there = len->dtype != SACCADE_NONE;
    const int is_number =
        is_there && len->device.kind == SACCADE_CPU && run->q->device.kind != SACCADE_CPU;
    const int64_t page = run->chunks->size, pages = (run->sizes.KV + page - 1) / page;
    const int64_t rows = run->sizes.B * run->sizes.Q, most = run->prefix->max_keys / page;
    *to = (prefix_lists){
        .groups = run->prefix->groups,
        .shared = run->prefix->shared,
        .table = run->chunks->first,
        .table_step = run->chunks->row_stride,
        .len = is_there && !is_number ? len->data : NULL,
        .len_step = is_there && len->rank ? len->stride[0] : 0,
        .all_len = is_number ? *(const int32_t *)len->data : (int)run->sizes.KV,
        .B = (int)run->sizes.B,
        .Q = (int)run->sizes.Q,
        .n = run->prefix->n,
        .entries = (int)smaller(pages, run->chunks->count),
        .page = (int)page,
        .piece = (int)piece_rows(&plan->problem),
        .pieces = (int)(rows / piece_rows(&plan->problem)) + run->prefix->n,
        .most = (int)larger(most, 1),
        .piece_first = ints_at(run, l->piece_first),
        .piece_len = ints_at(run, l->piece_len),
        .piece_table = ints_at(run, l->piece_table),
        .begin = ints_at(run, l->begin),
        .rest = ints_at(run, l->rest),
        .rest_table = ints_at(run, l->rest_table),
    };
}

static saccade_tensor list_of(const plan_run *run, int32_t *data, int64_t n)
{
    return (saccade_tensor){.data = data,
                            .dtype = SACCADE_I32,
                            .rank = 1,
                            .device = run->q->device,
                            .shape = {n},
                            .stride = {1}};
}

/* Rows of all batches one after the other: [1, H, B Q, ..]. */
static saccade_tensor rows_of(const saccade_tensor *t, int64_t step)
{
    saccade_tensor rows = *t;
    rows.shape[0] = 1;
    rows.stride[0] = 0;
    rows.shape[2] = t->shape[0] * t->shape[2];
    rows.stride[2] = step;
    return rows;
}

/* A part's results, [B][Q][H][Dv]: by batch, and as rows of all. dim: 0 for lse and maxima. */
static void place_result(const saccade_plan *plan, const plan_run *run, size_t at, int64_t dim,
                         saccade_tensor *by_batch, saccade_tensor *rows)
{
    const saccade_sizes *s = &run->sizes;
    const int64_t each = dim ? dim : 1;
    *by_batch = (saccade_tensor){.data = (char *)run->workspace + at,
                                 .dtype = plan->problem.dtype == SACCADE_F64 ? SACCADE_F64
                                                                             : SACCADE_F32,
                                 .rank = dim ? 4 : 3,
                                 .device = run->q->device,
                                 .shape = {s->B, s->H, s->Q, dim},
                                 .stride = {s->Q * s->H * each, each, s->H * each, 1}};
    *rows = rows_of(by_batch, s->H * each);
}

static void fill_results(const saccade_plan *plan, const plan_run *run, const layout *l,
                         two_runs *two)
{
    plan_parts *p = &two->parts;
    saccade_tensor unused;
    p->has_max = run->row_max != NULL;
    for (int n = 0; n < 2; n++) {
        plan_run *part = n ? &two->own : &two->shared;
        place_result(plan, run, l->out[n], run->sizes.Dv, &p->out[n],
                     n ? &unused : &two->out[n]);
        place_result(plan, run, l->lse[n], 0, &p->lse[n], n ? &unused : &two->lse[n]);
        place_result(plan, run, l->max[n], 0, &p->max[n], n ? &unused : &two->max[n]);
        part->out = n ? &p->out[n] : &two->out[n];
        part->lse = n ? &p->lse[n] : &two->lse[n];
        part->row_max = !p->has_max ? NULL : n ? &p->max[n] : &two->max[n];
        part->workspace = (char *)run->workspace + l->work[n];
        part->workspace_bytes = l->work_bytes[n];
        part->prefix = NULL;
    }
}

static void fill_runs(const saccade_plan *plan, const plan_run *run, const layout *l,
                      two_runs *two)
{
    const prefix_lists *lists = &two->lists;
    const prefix_state *state = plan->state;
    two->own = two->shared = *run;
    two->own_chunks = two->shared_chunks = *run->chunks;
    two->own_chunks.first = lists->rest_table;
    two->own_chunks.row_stride = two->own_chunks.count = lists->entries;
    two->own.chunks = &two->own_chunks;
    two->own.positions.kv_offset = list_of(run, lists->begin, lists->B);
    two->own.positions.kv_len = list_of(run, lists->rest, lists->B);

    two->shared_chunks.first = lists->piece_table;
    two->shared_chunks.row_stride = two->shared_chunks.count = lists->most;
    two->shared.chunks = &two->shared_chunks;
    two->ragged = (plan_ragged){.q_first = lists->piece_first};
    two->shared.ragged = &two->ragged;
    two->shared.sinks = (plan_sinks){.data = NULL};
    two->shared.positions =
        (plan_positions){.kv_len = list_of(run, lists->piece_len, lists->pieces)};
    two->shared.sizes.B = lists->pieces;
    two->shared.sizes.Q = lists->piece;
    /* no more than the workspace is for: a page may be longer than all keys */
    two->shared.sizes.KV = smaller((int64_t)lists->most * lists->page, run->sizes.KV);
    two->q = rows_of(run->q, run->sizes.Q > 1 ? run->q->stride[2] : run->q->stride[0]);
    two->shared.q = &two->q;
    plan_set_env(&state->shared->problem, &two->shared.sizes, &two->shared.score_env);
    fill_results(plan, run, l, two);
}

static prefix_merge merge_of(const plan_run *run, const plan_parts *p)
{
    prefix_merge m = {.groups = run->prefix->groups,
                      .to = run->out->data,
                      .to_lse = run->lse ? run->lse->data : NULL,
                      .to_max = run->row_max ? run->row_max->data : NULL,
                      .dtype = run->out->dtype,
                      .B = (int)run->sizes.B,
                      .H = (int)run->sizes.H,
                      .Q = (int)run->sizes.Q,
                      .Dv = (int)run->sizes.Dv,
                      .n = run->prefix->n};
    for (int n = 0; n < 2; n++) {
        m.out[n] = p->out[n].data;
        m.lse[n] = p->lse[n].data;
        m.max[n] = p->has_max ? p->max[n].data : NULL;
    }
    for (int d = 0; d < 3; d++) {
        m.to_stride[d] = run->out->stride[d];
        m.lse_stride[d] = run->lse ? run->lse->stride[d] : 0;
        m.max_stride[d] = run->row_max ? run->row_max->stride[d] : 0;
    }
    return m;
}

static saccade_status forward(const saccade_plan *plan, const plan_run *run, saccade_error *err)
{
    const prefix_state *s = plan->state;
    const plan_prefix_steps *steps = s->own->solver->prefix;
    const layout l = layout_of(plan, &run->sizes);
    const int device = run->q->device.index;
    two_runs two;
    fill_lists(plan, run, &l, &two.lists);
    fill_runs(plan, run, &l, &two);
    if (steps)
        TRY(steps->write(&two.lists, device, run->stream, err));
    else
        plan_write_prefix(&two.lists);
    TRY(plan_forward_rows(s->shared, &two.shared, err));
    TRY(plan_forward_rows(s->own, &two.own, err));
    if (!steps) {
        plan_merge_prefix(&two.parts, run, plan->threads);
        return SACCADE_OK;
    }
    const prefix_merge merge = merge_of(run, &two.parts);
    return steps->merge(&merge, device, run->stream, err);
}

static saccade_status head_max(const saccade_plan *plan, const plan_run *run,
                               saccade_error *err)
{
    const prefix_state *s = plan->state;
    if (s->own->solver->head_max)
        return s->own->solver->head_max(s->own, run, err);
    plan_reduce_rows(run);
    return SACCADE_OK;
}

/* ---- the solver ---- */

static saccade_status prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                              saccade_error *err)
{
    (void)plan, (void)mask;
    FAIL_AT(1, SACCADE_EINVAL, "block_mask", 0, 0,
            "got one with shared_prefix, expected none: keys are run in two parts");
    return SACCADE_OK;
}

static saccade_status explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    const prefix_state *s = plan->state;
    strbuf_puts(out, "\nover keys that batches share, each group's rows as a sequence:\n");
    TRY(s->shared->solver->explain(s->shared, out, err));
    strbuf_puts(out, "\nover each batch's own keys:\n");
    return s->own->solver->explain(s->own, out, err);
}

static const plan_solver prefix_solver = {
    .name = "shared-prefix",
    .workspace = workspace,
    .prepare = prepare,
    .forward = forward,
    .head_max = head_max,
    .explain = explain,
    .destroy = destroy,
};

saccade_status plan_create_prefix(saccade_plan *plan, const saccade_problem *problem,
                                  saccade_error *err)
{
    TRY(check(plan, err));
    plan->state = calloc(1, sizeof(prefix_state));
    FAIL_IF_NULL(plan->state);
    plan->solver = &prefix_solver;
    return create_both(plan, problem, err);
}
