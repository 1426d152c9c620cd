/* Arguments of backward's kernels: what a run brings, and where its workspace has what kernels
 * leave each other. */
#include "cuda/backward/cuda_backward.h"
#include "cuda/run/run.h"

#include <assert.h>

static int is_aligned(const plan_run *run, const plan_gradients *g)
{
    const saccade_tensor *const written[] = {g->dq, g->dk, g->dv};
    int ok = run_is_aligned(run) && run_has_aligned_rows(g->d_out);
    for (int i = 0; i < 3; i++)
        ok = ok && (!written[i] || run_has_aligned_rows(written[i]));
    return ok;
}

static_assert(BWD_OF_Q == (int)SACCADE_GRADIENT_Q && BWD_OF_K == (int)SACCADE_GRADIENT_K
                  && BWD_OF_V == (int)SACCADE_GRADIENT_V
                  && BWD_OF_SINKS == (int)SACCADE_GRADIENT_SINKS,
              "kernels take the bits of the interface");

static void fill_result(const saccade_tensor *t, int which, void **data, cu_stride *strides,
                        cu_bwd *p)
{
    if (!t)
        return;
    *data = t->data;
    *strides = run_strides(t);
    p->wide |= t->dtype == SACCADE_F32 ? which : 0;
}

static void fill_sinks(const saccade_tensor *t, cu_bwd *p)
{
    if (!t)
        return;
    const int is_each = t->rank == 3;
    p->d_sinks = t->data;
    p->d_sinks_s = is_each ? run_strides(t) : (cu_stride){.h = t->stride[0]};
    p->n_sinks_b = is_each ? (int)t->shape[0] : 1;
    p->n_sinks_m = is_each ? (int)t->shape[2] : 1;
}

/* A page there is a row. */
static void fill_own(const saccade_tensor *t, int which, void **data, cu_stride *strides,
                     long long *batch, cu_own *own)
{
    if (!t)
        return;
    *data = t->data;
    *strides = run_strides(t);
    *batch = strides->b;
    strides->b = strides->n;
    own->wide |= t->dtype == SACCADE_F32 ? which : 0;
}

/* Which keys are read, and where gradients go that are stored where they belong. */
static void fill_touched(const plan_run *run, cu_bwd *p)
{
    const plan_rows *rows = run->rows;
    const plan_far *far = run->far;
    const int is_known = rows && rows->touched_before;
    p->key_first = is_known ? (int)rows->touched_first : 0;
    p->key_past = is_known ? (int)rows->touched_past : p->f.N;
    if (!far || !far->row)
        return;
    p->own = (cu_own){.page = far->row,
                      .size = (int)rows->unit,
                      .shift = run_shift(rows->unit),
                      .added = (int)far->added};
    fill_own(far->dk, BWD_OF_K, &p->own.dk, &p->own.dks, &p->own.dk_batch, &p->own);
    fill_own(far->dv, BWD_OF_V, &p->own.dv, &p->own.dvs, &p->own.dv_batch, &p->own);
}

void cu_backward_fill(const saccade_plan *plan, const plan_run *run, const plan_gradients *g,
                      cu_bwd *p)
{
    const cu_state *s = plan->state;
    const cu_backward_space at = cu_backward_space_of(plan, &run->sizes, g);
    char *base = run->workspace;
    *p = (cu_bwd){0};
    run_fill(plan, run, &s->programs[CU_MAIN].form, NULL, &p->f);
    p->f.is_plain = !is_aligned(run, g);
    p->d_out = g->d_out->data;
    p->dos = run_strides(g->d_out);
    if (g->d_lse) {
        p->dlse = g->d_lse->data;
        p->dlse_s = run_strides(g->d_lse);
    }
    fill_result(g->dq, BWD_OF_Q, &p->dq, &p->dqs, p);
    fill_result(g->dk, BWD_OF_K, &p->dk, &p->dks, p);
    fill_result(g->dv, BWD_OF_V, &p->dv, &p->dvs, p);
    fill_sinks(g->sinks, p);
    p->added = (int)g->added;
    p->n_mblk = (int)cu_backward_query_blocks(&run->sizes);
    p->packed_blocks = (int)cu_backward_packed_blocks(plan, &run->sizes, g);
    p->unit = p->f.scale * 1.4426950408889634f;
    p->slope_most = (float)s->backward_facts.slope_most;
    p->precision = (float *)(base + at.precision);
    p->bounds = (unsigned *)(base + at.bounds); /* null where there are no sums */
    p->tiles_taken = (unsigned *)(base + at.tiles_taken);
    p->dq_sum = g->dq ? (float *)(base + at.dq_sum) : NULL;
    p->dq_steps = g->dq ? (unsigned *)(base + at.dq_steps) : NULL;
    p->parts = p->row_parts = 1;
    p->parts_k = (float *)(base + at.parts[0]);
    p->parts_v = (float *)(base + at.parts[1]);
    fill_touched(run, p);
}

int cu_backward_makes_sums(cu_program program)
{
    return program == CU_BWD_TILES || program == CU_BWD_SHORT || program == CU_BWD_DENSE;
}

void cu_backward_fill_rows(const saccade_plan *plan, const plan_run *run,
                           const plan_gradients *g, cu_program program, cu_bwd *p)
{
    const cu_backward_space at = cu_backward_space_of(plan, &run->sizes, g);
    char *base = !at.is_in_result                  ? run->workspace
                 : cu_backward_makes_sums(program) ? g->dq->data
                                                   : (char *)run->workspace + at.dq_sum;
    p->lse2 = (float *)(base + at.lse2);
    p->minus_delta = (float *)(base + at.minus_delta);
}

void cu_backward_fill_tiles(const plan_problem *problem, const cu_runs *runs, int keys,
                            cu_fwd *p)
{
    p->n_qblk = (p->N + keys - 1) / keys;
    p->n_tiles = p->B * p->G * p->n_qblk;
    run_fill_runs(problem, runs, p);
}

void cu_backward_fill_queries(const plan_problem *problem, const cu_runs *runs, cu_bwd *p)
{
    if (!runs)
        return;
    p->q_runs = (const cu_run *)(uintptr_t)runs->runs;
    p->q_run_start = (const int *)(uintptr_t)cu_runs_start(runs, problem);
    p->q_order = (const int *)(uintptr_t)runs->order;
    p->q_mask_b = runs->mask_b;
    p->q_mask_h = runs->mask_h;
}
