/* The float64 oracle, forward mode: how out, lse and the gradients change where q, k, v and
 * captures change at given rates (x' is d x / d t). A jvp, and the second derivative of
 * sum(out * dO) + sum(lse * dlse) in a direction: all that a derivative of backward asks for,
 * whose gradients by dO and dlse are out' and lse'. */
#include "ref/rows.h"
#include "ref/tangent_mod.h"

#include "base/convert.h"
#include "base/status.h"
#include "base/tensor_walk.h"
#include "plan/gradient_sums.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct tangent_job {
    const plan_problem *problem;
    const plan_run *run;
    const plan_tangents *t;
    ref_inputs in;
    tangent_mod mod;
    tangent_captures captures;
    uint64_t wanted;               /* captures whose gradients' tangents are, a bit each */
    double *q_dot, *k_dot, *v_dot; /* row-major, zeros where none is given */
    double *d_out, *d_lse;         /* likewise */
    double *made, *made_lse;       /* of forward itself, row-major */
    double *out, *lse, *dq, *dk, *dv, *dt[MOD_MAX_CAPTURES]; /* results, row-major */
    double *s, *x; /* [KV] tangents of a row's scores, before and after the mod */
    char *memory;
} tangent_job;

static void add_scaled(double *to, double factor, const double *x, int64_t n)
{
    for (int64_t d = 0; d < n; d++)
        to[d] += factor * x[d];
}

/* ---- a row ----
 *
 * With p normalised:
 *     s_j' = scale (q' . k_j + q . k_j')        x_j' = the score mod's, from s_j' and captures'
 *     lse' = sum p_j x_j'    p_j' = p_j (x_j' - lse')    out' = sum p_j' v_j + p_j v_j'
 * and of backward, with dO and dlse held, dX_j = p_j (dO . v_j - delta) and f_r the score mod's
 * derivative by score or a read r of a capture:
 *     delta' = dO . out'     dX_j' = p_j' (dO . v_j - delta) + p_j (dO . v_j' - delta')
 *     g_j = dX_j f_s         g_j'  = dX_j' f_s + dX_j f_s'
 *     dq'   = scale sum g_j' k_j + g_j k_j'      dk_j' = scale sum g_j' q + g_j q'
 *     dv_j' = sum p_j' dO                        dt_r' = sum dX_j' f_r + dX_j f_r' */

static int64_t key_of(const tangent_job *job, const ref_row *row, int64_t j)
{
    const saccade_sizes *s = &job->run->sizes;
    return (row->b * s->Hkv + row->h / job->problem->group) * s->KV + j;
}

/* p becomes the weight; s and x get the tangents. Returns lse's. */
static double change_scores(const tangent_job *job, ref_row *row, const double *q_dot)
{
    const saccade_sizes *s = &job->run->sizes;
    double lse = 0;
    for (int64_t j = 0; j < s->KV; j++) {
        if (!row->live[j])
            continue;
        const double *k_dot = job->k_dot + key_of(job, row, j) * s->D;
        row->p[j] /= row->l;
        job->s[j] =
            job->problem->scale
            * (ref_dot(q_dot, ref_key(&job->in, row, j), s->D) + ref_dot(row->q, k_dot, s->D));
        job->x[j] = job->problem->score ? tangent_of(&job->mod.value, &job->in, &job->captures,
                                                     row, j, job->s[j])
                                        : job->s[j];
        lse += row->p[j] * job->x[j];
    }
    return lse;
}

static void change_out(const tangent_job *job, const ref_row *row, double lse, double *out)
{
    const saccade_sizes *s = &job->run->sizes;
    for (int64_t j = 0; j < s->KV; j++) {
        if (!row->live[j])
            continue;
        const double p = row->p[j] * ref_factor(&job->in, row, j);
        add_scaled(out, p * (job->x[j] - lse), ref_value(&job->in, row, j), s->Dv);
        add_scaled(out, p, job->v_dot + key_of(job, row, j) * s->Dv, s->Dv);
    }
}

/* Of one key: dX and its tangent to the gradients of what its score reads. */
static void add_reads(const tangent_job *job, const ref_row *row, int64_t j, double dx,
                      double dx_dot)
{
    const tangent_fn *f = &job->mod.value;
    for (uint32_t k = 0; job->problem->score && k < f->n; k++) {
        int64_t place;
        const int32_t capture = tangent_read(f, &job->in, row, j, k, &place);
        if (capture >= 0 && job->wanted >> capture & 1)
            job->dt[capture][place] += dx_dot * tangent_slope(f, &job->in, row, j, k)
                                       + dx
                                             * tangent_of(&job->mod.slopes[k], &job->in,
                                                          &job->captures, row, j, job->s[j]);
    }
}

/* The score mod's derivative by score, and its tangent. */
static double slope_of(const tangent_job *job, const ref_row *row, int64_t j, double *dot)
{
    const tangent_fn *f = &job->mod.value;
    *dot = 0;
    if (!job->problem->score)
        return 1;
    for (uint32_t k = 0; k < f->n; k++)
        if (f->fn.nodes[f->nodes[k]].op == OP_SCORE) {
            *dot = tangent_of(&job->mod.slopes[k], &job->in, &job->captures, row, j, job->s[j]);
            return tangent_slope(f, &job->in, row, j, k);
        }
    return 0;
}

static void change_gradients(const tangent_job *job, const ref_row *row, const double *q_dot,
                             double lse, const double *out)
{
    const saccade_sizes *s = &job->run->sizes;
    const int64_t at = (row->b * s->H + row->h) * s->Q + row->i;
    const double *d_out = job->d_out + at * s->Dv, scale = job->problem->scale;
    const double delta = ref_dot(d_out, row->out, s->Dv) - job->d_lse[at];
    const double delta_dot = ref_dot(d_out, out, s->Dv);
    for (int64_t j = 0; j < s->KV; j++) {
        const int64_t key = key_of(job, row, j);
        const double *k = ref_key(&job->in, row, j), *k_dot = job->k_dot + key * s->D;
        double slope_dot;
        if (!row->live[j])
            continue;
        const double p = row->p[j], p_dot = p * (job->x[j] - lse);
        const double z = ref_factor(&job->in, row, j);
        const double dp = z * ref_dot(d_out, ref_value(&job->in, row, j), s->Dv) - delta;
        const double dp_dot = z * ref_dot(d_out, job->v_dot + key * s->Dv, s->Dv) - delta_dot;
        const double dx = p * dp, dx_dot = p_dot * dp + p * dp_dot;
        const double slope = slope_of(job, row, j, &slope_dot);
        const double g = scale * dx * slope;
        const double g_dot = scale * (dx_dot * slope + dx * slope_dot);
        add_scaled(job->dq + at * s->D, g_dot, k, s->D);
        add_scaled(job->dq + at * s->D, g, k_dot, s->D);
        add_scaled(job->dk + key * s->D, g_dot, row->q, s->D);
        add_scaled(job->dk + key * s->D, g, q_dot, s->D);
        add_scaled(job->dv + key * s->Dv, z * p_dot, d_out, s->Dv);
        add_reads(job, row, j, dx, dx_dot);
    }
}

/* Rows without a live key have no tangents. */
static void run_row(const tangent_job *job, int64_t b, int64_t h, int64_t i, ref_row *row)
{
    const saccade_sizes *s = &job->run->sizes;
    const int64_t at = (b * s->H + h) * s->Q + i;
    const double *q_dot = job->q_dot + at * s->D;
    double *out = job->out + at * s->Dv;
    ref_compute_row(&job->in, b, h, i, row);
    memcpy(job->made + at * s->Dv, row->out, (size_t)s->Dv * sizeof *out);
    job->made_lse[at] = ref_row_lse(row);
    if (row->m == -INFINITY)
        return;
    job->lse[at] = change_scores(job, row, q_dot);
    change_out(job, row, job->lse[at], out);
    if (job->t->d_out)
        change_gradients(job, row, q_dot, job->lse[at], out);
}

/* ---- memory ---- */

static int64_t count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++)
        n *= t->shape[d];
    return n;
}

/* n doubles, zeroed, with the elements of t where there is one; memory NULL: counts them. */
static double *take(tangent_job *job, int64_t *at, const saccade_tensor *t, int64_t n)
{
    double *to = job->memory ? (double *)(void *)job->memory + *at : NULL, *next = to;
    tensor_walk walk = {{0}, 0};
    *at += n;
    if (!to || !t || !t->data)
        return to;
    do
        *next++ = convert_element(t->dtype,
                                  (const char *)t->data
                                      + walk.place * (int64_t)saccade_dtype_bytes(t->dtype));
    while (tensor_next(t, t->rank, &walk));
    return to;
}

static int64_t lay_out(tangent_job *job)
{
    const saccade_sizes *s = &job->run->sizes;
    const plan_tangents *t = job->t;
    const int64_t rows = s->B * s->H * s->Q, keys = s->B * s->Hkv * s->KV;
    int64_t n = 0;
    job->q_dot = take(job, &n, t->q, rows * s->D);
    job->k_dot = take(job, &n, t->k, keys * s->D);
    job->v_dot = take(job, &n, t->v, keys * s->Dv);
    job->d_out = take(job, &n, t->d_out, rows * s->Dv);
    job->d_lse = take(job, &n, t->d_lse, rows);
    job->made = take(job, &n, NULL, rows * s->Dv);
    job->made_lse = take(job, &n, NULL, rows);
    job->out = take(job, &n, NULL, rows * s->Dv);
    job->lse = take(job, &n, NULL, rows);
    job->dq = take(job, &n, NULL, rows * s->D);
    job->dk = take(job, &n, NULL, keys * s->D);
    job->dv = take(job, &n, NULL, keys * s->Dv);
    job->s = take(job, &n, NULL, s->KV);
    job->x = take(job, &n, NULL, s->KV);
    for (int c = 0; c < MOD_MAX_CAPTURES; c++) {
        if (t->captures[c].data)
            job->captures.dots[c] = take(job, &n, &t->captures[c], count(&t->captures[c]));
        if (t->d_captures[c].data)
            job->dt[c] = take(job, &n, NULL, count(&t->d_captures[c]));
        job->wanted |= (uint64_t)(t->d_captures[c].data != NULL) << c;
    }
    return n;
}

static void store(double *from, const saccade_tensor *to)
{
    if (!to || !to->data)
        return;
    const saccade_tensor each = saccade_tensor_of(from, SACCADE_F64, to->rank, to->shape);
    plan_sum_repeated(&each, to, 0, 1);
}

static void store_all(const tangent_job *job)
{
    const plan_tangents *t = job->t;
    store(job->made, job->run->out);
    store(job->made_lse, job->run->lse);
    store(job->out, t->out);
    store(job->lse, t->lse);
    store(job->dq, t->dq);
    store(job->dk, t->dk);
    store(job->dv, t->dv);
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        store(job->dt[c], &t->d_captures[c]);
}

static saccade_status run_rows(tangent_job *job, saccade_error *err)
{
    const saccade_sizes *s = &job->run->sizes;
    const size_t mods = ref_most_values(job->problem);
    const size_t n_values = job->mod.n_values > mods ? job->mod.n_values : mods;
    char *memory = malloc(ref_widened_bytes(s) + ref_row_bytes(s, n_values));
    FAIL_IF_NULL(memory);
    job->in = ref_widen(job->problem, job->run, 1, memory);
    ref_row row = ref_row_in(s, n_values, memory + ref_widened_bytes(s));
    for (int64_t at = 0; at < s->B * s->H * s->Q; at++)
        run_row(job, at / s->Q / s->H, at / s->Q % s->H, at % s->Q, &row);
    free(memory);
    return SACCADE_OK;
}

saccade_status ref_tangent(const saccade_plan *plan, const plan_run *run,
                           const plan_tangents *tangents, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    arena arena;
    tangent_job job = {.problem = &plan->problem, .run = run, .t = tangents};
    TRY(ref_check_block_mask(run, err));
    arena_init(&arena);
    if (plan->problem.score)
        TRY_GOTO(tangent_mod_of(&plan->problem, &arena, &job.mod, err));
    job.memory = calloc((size_t)lay_out(&job), sizeof(double));
    FAIL_IF_NULL_GOTO(job.memory);
    lay_out(&job);
    TRY_GOTO(run_rows(&job, err));
    store_all(&job);
out:
    free(job.memory);
    arena_free(&arena);
    return status;
}
