/* The float64 oracle, backward. For one row, with p normalised (FlashAttention, appendix B.4):
 *     delta = dO . O          dP_j = dO . v_j        dS_j = p_j (dP_j - delta + dlse)
 *     dX_j = dS_j * score'(x_j),  x_j = scale * q . k_j
 *     dq += scale dX_j k_j    dk_j += scale dX_j q   dv_j += p_j dO
 * score' comes from pass_gradient. Rows without live keys, and positions that are not live,
 * give nothing. One (b, key head) is one item of parallel work and owns its dk, dv and the dq
 * of its group, so sums keep their order. */
#include "ref/rows.h"

#include "base/parallel.h"
#include "base/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct backward_job backward_job;
struct backward_job {
    ref_inputs in;
    char *rows;
    size_t row_bytes;
    size_t n_values;
    const double *d_out, *d_lse;
    const mod_fn *derivative; /* result: by score; NULL: the score mod is the identity */
    int is_constant;          /* the score mod does not use score */
    double *dq, *dk, *dv;
    void (*use)(const backward_job *job, const ref_row *row, int64_t j, double dS);
    void *user;
};

static void add_scaled(double *to, double factor, const double *x, int64_t n)
{
    for (int64_t d = 0; d < n; d++)
        to[d] += factor * x[d];
}

/* Gives each live key's dS to job->use. */
static void backward_row(const backward_job *job, int64_t b, int64_t h, int64_t i, ref_row *row)
{
    const saccade_sizes *s = &job->in.run->sizes;
    const int64_t at = (b * s->H + h) * s->Q + i;
    const double *dO = job->d_out + at * s->Dv;
    ref_compute_row(&job->in, b, h, i, row);
    const double delta = ref_dot(dO, row->out, s->Dv) - (job->d_lse ? job->d_lse[at] : 0);
    for (int64_t j = 0; j < s->KV; j++) {
        if (!row->live[j])
            continue;
        const double dP = ref_dot(dO, ref_value(&job->in, row, j), s->Dv);
        row->p[j] /= row->l;
        job->use(job, row, j, row->p[j] * (ref_factor(&job->in, row, j) * dP - delta));
    }
}

/* ---- by q, k, v ---- */

static double score_slope(const backward_job *job, const ref_row *row, int64_t j)
{
    const eval_point point = ref_point(row, j);
    if (!job->derivative)
        return job->is_constant ? 0 : 1;
    return eval_scalar(job->derivative, &job->in.score_env, &point, row->values, NULL);
}

static void add_to_inputs(const backward_job *job, const ref_row *row, int64_t j, double dS)
{
    const saccade_sizes *s = &job->in.run->sizes;
    const int64_t q_at = (row->b * s->H + row->h) * s->Q + row->i;
    const int64_t k_at = (row->b * s->Hkv + row->h / job->in.problem->group) * s->KV + j;
    const double dX = job->in.problem->scale * dS * score_slope(job, row, j);
    add_scaled(job->dq + q_at * s->D, dX, ref_key(&job->in, row, j), s->D);
    add_scaled(job->dk + k_at * s->D, dX, row->q, s->D);
    add_scaled(job->dv + k_at * s->Dv, row->p[j] * ref_factor(&job->in, row, j),
               job->d_out + q_at * s->Dv, s->Dv);
}

static void backward_head(void *arg, int64_t item, int thread)
{
    const backward_job *job = arg;
    const saccade_sizes *s = &job->in.run->sizes;
    const int64_t b = item / s->Hkv, group = job->in.problem->group;
    ref_row row = ref_row_in(s, job->n_values, job->rows + (size_t)thread * job->row_bytes);
    for (int64_t h = item % s->Hkv * group; h < (item % s->Hkv + 1) * group; h++)
        for (int64_t i = 0; i < s->Q; i++)
            backward_row(job, b, h, i, &row);
}

static saccade_status derive_by_score(backward_job *job, arena *arena, saccade_error *err)
{
    const mod_fn *score = job->in.problem->score, *gradient;
    uint32_t wanted = 0, result;
    if (!score)
        return SACCADE_OK;
    while (wanted < score->n_nodes && score->nodes[wanted].op != OP_SCORE)
        wanted++;
    job->is_constant = wanted == score->n_nodes;
    if (job->is_constant)
        return SACCADE_OK;
    TRY(pass_gradient(score, &wanted, 1, arena, &gradient, &result, err));
    mod_fn *derivative = arena_memdup(arena, gradient, sizeof *gradient);
    FAIL_IF_NULL(derivative);
    derivative->result = result;
    job->derivative = derivative;
    return SACCADE_OK;
}

/* Memory for `threads` rows and the widened inputs; in.problem, in.run and n_values are set. */
static saccade_status start(backward_job *job, int threads, void **memory, saccade_error *err)
{
    const plan_run *run = job->in.run;
    const size_t widened = ref_widened_bytes(&run->sizes);
    TRY(ref_check_block_mask(run, err));
    job->row_bytes = ref_row_bytes(&run->sizes, job->n_values);
    *memory = malloc(widened + (size_t)threads * job->row_bytes);
    FAIL_IF_NULL(*memory);
    job->in = ref_widen(job->in.problem, run, threads, *memory);
    job->rows = (char *)*memory + widened;
    return SACCADE_OK;
}

static size_t most(size_t x, size_t y)
{
    return x > y ? x : y;
}

/* x may be NULL where n is 0. */
static void clear(double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = 0;
}

saccade_status ref_backward(const plan_problem *problem, const plan_run *run,
                            const double *d_out, const double *d_lse, double *dq, double *dk,
                            double *dv, saccade_error *err)
{
    const saccade_sizes *s = &run->sizes;
    const int threads = par_max_threads();
    saccade_status status = SACCADE_OK;
    void *memory = NULL;
    arena arena;
    backward_job job = {.in = {.problem = problem, .run = run},
                        .d_out = d_out,
                        .d_lse = d_lse,
                        .dq = dq,
                        .dk = dk,
                        .dv = dv,
                        .use = add_to_inputs};
    arena_init(&arena);
    TRY_GOTO(derive_by_score(&job, &arena, err));
    job.n_values = most(ref_most_values(problem), ref_score_values(problem, job.derivative));
    TRY_GOTO(start(&job, threads, &memory, err));
    clear(dq, s->B * s->H * s->Q * s->D);
    clear(dk, s->B * s->Hkv * s->KV * s->D);
    clear(dv, s->B * s->Hkv * s->KV * s->Dv);
    par_for(s->B * s->Hkv, threads, backward_head, &job);
out:
    free(memory);
    arena_free(&arena);
    return status;
}

/* ---- by sinks ---- */

/* p_sink = exp(sink - lse):  d_sink = -p_sink (delta - dlse). */
saccade_status ref_backward_sinks(const plan_problem *problem, const plan_run *run,
                                  const double *d_out, const double *d_lse, double *terms,
                                  saccade_error *err)
{
    const saccade_sizes *s = &run->sizes;
    void *memory = NULL;
    backward_job job = {.in = {.problem = problem, .run = run}};
    job.n_values = ref_most_values(problem);
    TRY(start(&job, 1, &memory, err));
    ref_row row = ref_row_in(s, job.n_values, job.rows);
    for (int64_t at = 0; at < s->B * s->H * s->Q; at++) {
        ref_compute_row(&job.in, at / s->Q / s->H, at / s->Q % s->H, at % s->Q, &row);
        const int is_dead = row.m == -INFINITY;
        const double dot = is_dead ? 0 : ref_dot(d_out + at * s->Dv, row.out, s->Dv);
        const double delta = dot - (d_lse ? d_lse[at] : 0);
        terms[at] = row.sink == -INFINITY ? 0 : -ref_sink_weight(&row) * delta;
    }
    free(memory);
    return SACCADE_OK;
}

/* ---- by captures ---- */

/* Every place where the score reads a wanted capture, and the score's derivative by it. */
typedef struct capture_reads {
    uint32_t n;
    uint32_t *nodes;   /* OP_LOAD or OP_SCALAR of the score mod */
    uint32_t *results; /* node of the derivative in gradient */
    const mod_fn *gradient;
    double *const *d_captures;
} capture_reads;

/* Row-major place of the element that load `node` reads: indices as in every engine, f64
 * problem or not, and clamped as kernels do. */
static int64_t place_read(const backward_job *job, const ref_row *row, int64_t j, uint32_t node)
{
    const mod_fn *fn = job->in.problem->score;
    const mod_node *load = &fn->nodes[node];
    const saccade_tensor *t = &job->in.run->score_env.tensors[load->imm.i];
    const eval_point point = ref_point(row, j);
    mod_fn index = *fn;
    int64_t at = 0;
    for (int32_t d = 0; d < t->rank; d++) {
        index.result = fn->args[load->args + (uint32_t)d];
        const double x =
            eval_scalar(&index, &job->in.run->score_env, &point, row->values, NULL);
        const double last = (double)(t->shape[d] - 1);
        at = at * t->shape[d] + (int64_t)(x < 0 ? 0 : x > last ? last : x);
    }
    return at;
}

static void add_to_captures(const backward_job *job, const ref_row *row, int64_t j, double dS)
{
    const capture_reads *reads = job->user;
    const eval_point point = ref_point(row, j);
    mod_fn slope = *reads->gradient;
    for (uint32_t n = 0; n < reads->n; n++) {
        const int32_t capture = job->in.problem->score->nodes[reads->nodes[n]].imm.i;
        slope.result = reads->results[n];
        reads->d_captures[capture][place_read(job, row, j, reads->nodes[n])] +=
            dS * eval_scalar(&slope, &job->in.score_env, &point, row->values, NULL);
    }
}

static saccade_status find_reads(const mod_fn *score, arena *arena, capture_reads *reads,
                                 saccade_error *err)
{
    reads->nodes = arena_array(arena, score->n_nodes, sizeof *reads->nodes);
    reads->results = arena_array(arena, score->n_nodes, sizeof *reads->results);
    FAIL_IF(!reads->nodes || !reads->results, SACCADE_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < score->n_nodes; i++) {
        const mod_node *node = &score->nodes[i];
        if ((node->op == OP_LOAD || node->op == OP_SCALAR) && node->type == MOD_FLOAT
            && reads->d_captures[node->imm.i])
            reads->nodes[reads->n++] = i;
    }
    return reads->n ? pass_gradient(score, reads->nodes, reads->n, arena, &reads->gradient,
                                    reads->results, err)
                    : SACCADE_OK;
}

/* Serial: every row may add to the same element. */
static void backward_captures(const backward_job *job)
{
    const saccade_sizes *s = &job->in.run->sizes;
    ref_row row = ref_row_in(s, job->n_values, job->rows);
    for (int64_t at = 0; at < s->B * s->H * s->Q; at++)
        backward_row(job, at / s->Q / s->H, at / s->Q % s->H, at % s->Q, &row);
}

saccade_status ref_backward_captures(const plan_problem *problem, const plan_run *run,
                                     const double *d_out, const double *d_lse,
                                     double *const *d_captures, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    void *memory = NULL;
    arena arena;
    capture_reads reads = {.d_captures = d_captures};
    backward_job job = {.in = {.problem = problem, .run = run},
                        .d_out = d_out,
                        .d_lse = d_lse,
                        .use = add_to_captures,
                        .user = &reads};
    if (!problem->score)
        return SACCADE_OK;
    arena_init(&arena);
    TRY_GOTO(find_reads(problem->score, &arena, &reads, err));
    if (reads.n == 0)
        goto out;
    job.n_values = most(ref_most_values(problem), ref_score_values(problem, reads.gradient));
    TRY_GOTO(start(&job, 1, &memory, err));
    backward_captures(&job);
out:
    free(memory);
    arena_free(&arena);
    return status;
}
