/* The float64 oracle, forward, and the solver "ref" that runs any problem by it. Rows are
 * independent, so a row is the unit of parallel work; no result depends on the thread count. */
#include "ref/rows.h"

#include "base/parallel.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

typedef struct forward_job forward_job;
struct forward_job {
    ref_inputs in;
    char *rows; /* one ref_row's memory per thread */
    size_t row_bytes;
    size_t n_values;
    void (*store)(const forward_job *job, const ref_row *row);
    double *out, *lse, *row_max; /* of ref_forward */
};

static size_t memory_bytes(const plan_problem *problem, const saccade_sizes *sizes, int threads)
{
    return ref_widened_bytes(sizes)
           + (size_t)threads * ref_row_bytes(sizes, ref_most_values(problem));
}

static void forward_row(void *arg, int64_t item, int thread)
{
    const forward_job *job = arg;
    const saccade_sizes *s = &job->in.run->sizes;
    ref_row row = ref_row_in(s, job->n_values, job->rows + (size_t)thread * job->row_bytes);
    ref_compute_row(&job->in, item / s->Q / s->H, item / s->Q % s->H, item % s->Q, &row);
    job->store(job, &row);
}

/* job's outputs are set; memory has memory_bytes. */
static void forward(const plan_problem *problem, const plan_run *run, int threads, void *memory,
                    forward_job *job)
{
    const saccade_sizes *s = &run->sizes;
    job->in = ref_widen(problem, run, threads, memory);
    job->n_values = ref_most_values(problem);
    job->row_bytes = ref_row_bytes(s, job->n_values);
    job->rows = (char *)memory + ref_widened_bytes(s);
    par_for(s->B * s->H * s->Q, threads, forward_row, job);
}

/* ---- as a function, for tests ---- */

static void store_doubles(const forward_job *job, const ref_row *row)
{
    const saccade_sizes *s = &job->in.run->sizes;
    const int64_t at = (row->b * s->H + row->h) * s->Q + row->i;
    memcpy(job->out + at * s->Dv, row->out, (size_t)s->Dv * sizeof *row->out);
    if (job->lse)
        job->lse[at] = ref_row_lse(row);
    if (job->row_max)
        job->row_max[at] = row->m;
}

saccade_status ref_forward(const plan_problem *problem, const plan_run *run, double *out,
                           double *lse, double *row_max, saccade_error *err)
{
    const int threads = par_max_threads();
    TRY(ref_check_block_mask(run, err));
    void *memory = malloc(memory_bytes(problem, &run->sizes, threads));
    FAIL_IF_NULL(memory);
    forward_job job = {.store = store_doubles, .out = out, .lse = lse, .row_max = row_max};
    forward(problem, run, threads, memory, &job);
    free(memory);
    return SACCADE_OK;
}

/* ---- as a solver ---- */

static void store_tensors(const forward_job *job, const ref_row *row)
{
    const plan_run *run = job->in.run;
    const int64_t b = row->b, h = row->h, i = row->i;
    const saccade_tensor *o = run->out, *stats[2] = {run->lse, run->row_max};
    const double stat[2] = {ref_row_lse(row), row->m};
    for (int64_t d = 0; d < run->sizes.Dv; d++)
        ref_store(o, b * o->stride[0] + h * o->stride[1] + i * o->stride[2] + d, row->out[d]);
    for (int n = 0; n < 2; n++)
        if (stats[n])
            ref_store(stats[n],
                      b * stats[n]->stride[0] + h * stats[n]->stride[1]
                          + i * stats[n]->stride[2],
                      stat[n]);
}

static int ref_applicable(const plan_problem *problem, int32_t level, char *why)
{
    (void)problem;
    (void)level;
    (void)why;
    return 1; /* the definition has no limits */
}

/* The truth evaluates the nodes as they were parsed, not what passes made of them, so that a
 * wrong simplification or fact shows as a difference. */
static saccade_status ref_create(saccade_plan *plan, saccade_error *err)
{
    plan_problem *p = &plan->problem;
    (void)err;
    if (p->score && plan->source_score)
        p->score = plan->source_score;
    if (p->mask && plan->source_mask)
        p->mask = plan->source_mask;
    p->score_facts = p->mask_facts = NULL;
    return SACCADE_OK;
}

static size_t ref_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    return memory_bytes(&plan->problem, sizes, plan->threads);
}

static saccade_status ref_solve(const saccade_plan *plan, const plan_run *run,
                                saccade_error *err)
{
    forward_job job = {.store = store_tensors};
    TRY(ref_check_block_mask(run, err));
    forward(&plan->problem, run, plan->threads, run->workspace, &job);
    return SACCADE_OK;
}

static saccade_status ref_explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    (void)plan;
    strbuf_puts(out, "method: float64 by definition, one row at a time: scores, then maximum,\n"
                     "  then exp and sum, then the weighted sum of values. Every position's\n"
                     "  mask and score is evaluated alone; nothing is skipped by blocks.\n"
                     "workspace: K and V in float64 and 2 x KV doubles a thread\n");
    return strbuf_status(out, err);
}

static void ref_destroy(saccade_plan *plan)
{
    (void)plan;
}

static const plan_solver float64 = {
    .name = "ref-float64",
    .applicable = ref_applicable,
    .create = ref_create,
    .workspace = ref_workspace,
    .prepare = ref_prepare,
    .forward = ref_solve,
    .backward_workspace = ref_backward_workspace,
    .backward = ref_backward_solve,
    .tangent = ref_tangent,
    .explain = ref_explain,
    .destroy = ref_destroy,
};
const plan_solver *const ref_solvers[] = {&float64, NULL};
