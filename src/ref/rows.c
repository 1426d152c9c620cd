/* One row of attention in float64, by definition:
 *     s_j = score(scale * q . k_j),  live_j = mask and in kv_len and s_j > -inf
 *     m = max s_j,  p_j = exp(s_j - m),  l = sum p_j,  out = sum p_j v_j / l,  lse = m + log l
 * With a sink a: l = exp(a - m) + sum p_j, and exponents are relative to the larger of m and a.
 * A position that is not live is never read, so nothing it holds can reach a result. A live
 * NaN or +inf makes the whole row NaN; a row without live keys is out = 0, m = -inf, and
 * lse is the sink or -inf. */
#include "ref/rows.h"

#include "base/convert.h"
#include "base/parallel.h"
#include "base/quantize.h"
#include "base/status.h"

#include <math.h>
#include <string.h>

/* ---- memory ---- */

static double *take(char **at, int64_t count)
{
    double *taken = (double *)(void *)*at;
    *at += (size_t)count * sizeof *taken;
    return taken;
}

size_t ref_widened_bytes(const saccade_sizes *s)
{
    return ((size_t)(s->B * s->Hkv * s->KV * (s->D + s->Dv)) * sizeof(double) + 63) / 64 * 64;
}

size_t ref_row_bytes(const saccade_sizes *s, size_t n_values)
{
    const int64_t doubles = s->D + 2 * s->KV + s->Dv + (int64_t)n_values + (s->KV + 7) / 8;
    return ((size_t)doubles * sizeof(double) + 63) / 64 * 64;
}

ref_row ref_row_in(const saccade_sizes *s, size_t n_values, void *memory)
{
    char *at = memory;
    ref_row row = {.q = take(&at, s->D)};
    row.raw = take(&at, s->KV);
    row.p = take(&at, s->KV);
    row.out = take(&at, s->Dv);
    row.values = take(&at, (int64_t)n_values);
    row.live = (uint8_t *)at;
    return row;
}

static bool is_wide(const plan_problem *p)
{
    return p->dtype == SACCADE_F64;
}

size_t ref_score_values(const plan_problem *p, const mod_fn *fn)
{
    return fn ? eval_scalar_values(fn, is_wide(p)) : 0;
}

size_t ref_most_values(const plan_problem *p)
{
    const size_t score = ref_score_values(p, p->score);
    const size_t mask = p->mask ? eval_scalar_values(p->mask, false) : 0;
    return score > mask ? score : mask;
}

/* ---- elements ---- */

/* Elements of row (b, h, n) of a rank-4 tensor. */
static void load_row(const saccade_tensor *t, int64_t b, int64_t h, int64_t n, double *to)
{
    const size_t bytes = saccade_dtype_bytes(t->dtype);
    const int64_t at = b * t->stride[0] + h * t->stride[1] + n * t->stride[2];
    const char *from = (const char *)t->data + at * (int64_t)bytes;
    for (int64_t d = 0; d < t->shape[3]; d++)
        to[d] = convert_element(t->dtype, from + (size_t)d * bytes);
}

void ref_store(const saccade_tensor *t, int64_t at, double value)
{
    convert_to_element(t->dtype, value,
                       (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

/* Key j where it lies; zeros in an absent chunk. */
static void load_key(const ref_inputs *in, int is_value, int64_t b, int64_t g, int64_t j,
                     double *to)
{
    const plan_run *run = in->run;
    const saccade_tensor *t = is_value ? run->v : run->k;
    const saccade_tensor *scale = is_value ? run->v_scale : run->k_scale;
    const plan_groups *groups = is_value ? &in->problem->v_groups : &in->problem->k_groups;
    const plan_place at = plan_place_of(run->chunks, t, b, j);
    if (at.row < 0)
        memset(to, 0, (size_t)t->shape[3] * sizeof *to);
    else if (!quant_is_dtype(t->dtype))
        load_row(t, at.b, g, at.row, to);
    else
        for (int64_t d = 0; d < t->shape[3]; d++)
            to[d] = plan_key_element(t, scale, groups, at.b, g, at.row, d);
}

static void widen_head(void *arg, int64_t item, int thread)
{
    const ref_inputs *in = arg;
    const saccade_sizes *s = &in->run->sizes;
    const int64_t b = item / s->Hkv, g = item % s->Hkv;
    const int64_t kv_len = plan_position_of(&in->run->positions, s->KV, b).kv_len;
    (void)thread;
    for (int64_t j = 0; j < kv_len; j++) {
        load_key(in, 0, b, g, j, in->k + (item * s->KV + j) * s->D);
        load_key(in, 1, b, g, j, in->v + (item * s->KV + j) * s->Dv);
    }
}

ref_inputs ref_widen(const plan_problem *problem, const plan_run *run, int threads,
                     void *memory)
{
    const saccade_sizes *s = &run->sizes;
    char *at = memory;
    ref_inputs in = {.problem = problem, .run = run, .score_env = run->score_env};
    in.score_env.is_wide = is_wide(problem);
    in.k = take(&at, s->B * s->Hkv * s->KV * s->D);
    in.v = take(&at, s->B * s->Hkv * s->KV * s->Dv);
    par_for(s->B * s->Hkv, threads, widen_head, &in);
    return in;
}

static int64_t key_row(const ref_inputs *in, const ref_row *row, int64_t j)
{
    const saccade_sizes *s = &in->run->sizes;
    return (row->b * s->Hkv + row->h / in->problem->group) * s->KV + j;
}

const double *ref_key(const ref_inputs *in, const ref_row *row, int64_t j)
{
    return in->k + key_row(in, row, j) * in->run->sizes.D;
}

const double *ref_value(const ref_inputs *in, const ref_row *row, int64_t j)
{
    return in->v + key_row(in, row, j) * in->run->sizes.Dv;
}

/* ---- what is live ---- */

/* An imported block mask says more than its mod: FULL blocks are live, absent ones dead. */
static const mask_runs *runs_of(const plan_run *run)
{
    if (!mask_is_imported(run->block_mask))
        return NULL;
    const mask_view *view = mask_get_view(run->block_mask);
    return mask_runs_ready(run->block_mask, view->imported_block_q, view->imported_block_kv, 0);
}

saccade_status ref_check_block_mask(const plan_run *run, saccade_error *err)
{
    const mask_runs *runs;
    if (!mask_is_imported(run->block_mask))
        return SACCADE_OK;
    const mask_view *view = mask_get_view(run->block_mask);
    return mask_runs_prepared(run->block_mask, view->imported_block_q, view->imported_block_kv,
                              0, &runs, err);
}

saccade_status ref_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                           saccade_error *err)
{
    const mask_view *view = mask_get_view(mask);
    const mask_runs *runs;
    (void)plan;
    if (!view->imported_block_q)
        return SACCADE_OK;
    return mask_runs_for(mask, view->imported_block_q, view->imported_block_kv, 0, &runs, err);
}

void ref_block_row(const plan_run *run, int64_t b, int64_t h, int64_t i, int64_t kv_len,
                   uint8_t *state)
{
    const mask_runs *r = runs_of(run);
    memset(state, r ? 0 : 1, (size_t)kv_len);
    memset(state + kv_len, 0, (size_t)(run->sizes.KV - kv_len));
    if (!r)
        return;
    const int64_t row = plan_block_row(run, r, b, h, i / r->block_q);
    for (int64_t n = r->row_begin[row]; n < r->row_begin[row + 1]; n++) {
        const int64_t first = (int64_t)r->runs[n].first * r->block_kv;
        const int64_t past = first + (int64_t)r->runs[n].count * r->block_kv;
        for (int64_t j = first; j < past && j < kv_len; j++)
            state[j] = r->runs[n].full ? 2 : 1;
    }
}

eval_point ref_point(const ref_row *row, int64_t j)
{
    return (eval_point){
        .b = (int32_t)row->b,
        .h = (int32_t)row->h,
        .q = (int32_t)row->i + row->at.q_offset,
        .kv = (int32_t)j + row->at.kv_offset,
        .score = row->raw[j],
    };
}

static void find_live(const ref_inputs *in, ref_row *row)
{
    const mod_fn *mask = in->problem->mask;
    ref_block_row(in->run, row->b, row->h, row->i, row->at.kv_len, row->live);
    for (int64_t j = 0; j < row->at.kv_len; j++) {
        const eval_point point = ref_point(row, j);
        if (row->live[j] == 1 && mask)
            row->live[j] =
                eval_scalar(mask, &in->run->mask_env, &point, row->values, NULL) != 0;
        row->live[j] = row->live[j] != 0;
    }
}

/* ---- the row ---- */

double ref_dot(const double *x, const double *y, int64_t n)
{
    double sum = 0;
    for (int64_t d = 0; d < n; d++)
        sum += x[d] * y[d];
    return sum;
}

/* s_j into row->p; a score of -inf is a masked position. */
static void find_scores(const ref_inputs *in, ref_row *row)
{
    const plan_problem *problem = in->problem;
    for (int64_t j = 0; j < in->run->sizes.KV; j++) {
        row->p[j] = -INFINITY;
        if (!row->live[j])
            continue;
        row->raw[j] = problem->scale * ref_dot(row->q, ref_key(in, row, j), in->run->sizes.D);
        const eval_point point = ref_point(row, j);
        row->p[j] = problem->score
                        ? eval_scalar(problem->score, &in->score_env, &point, row->values, NULL)
                        : row->raw[j];
        row->live[j] = row->p[j] != -INFINITY;
    }
}

/* A sink is one more score, whose value is 0: it counts in rows that have a live key. */
static void softmax(ref_row *row, int64_t n)
{
    row->m = -INFINITY;
    row->l = 0;
    for (int64_t j = 0; j < n; j++)
        if (row->p[j] > row->m || isnan(row->p[j]))
            row->m = row->p[j];
    if (row->m == INFINITY)
        row->m = NAN;
    row->top = row->sink > row->m || isnan(row->sink) ? row->sink : row->m;
    for (int64_t j = 0; j < n; j++) {
        row->p[j] = row->live[j] ? exp(row->p[j] - row->top) : 0;
        row->l += row->p[j];
    }
    if (row->m != -INFINITY)
        row->l += plan_sink_weight(row->sink, row->top);
}

static void weigh_values(const ref_inputs *in, ref_row *row)
{
    const int64_t Dv = in->run->sizes.Dv;
    memset(row->out, 0, (size_t)Dv * sizeof *row->out);
    for (int64_t j = 0; j < in->run->sizes.KV; j++) {
        const double *v = ref_value(in, row, j);
        const double p = row->live[j] ? row->p[j] * ref_factor(in, row, j) : 0;
        for (int64_t d = 0; d < Dv && row->live[j]; d++)
            row->out[d] += p * v[d];
    }
    for (int64_t d = 0; d < Dv && row->m != -INFINITY; d++)
        row->out[d] /= row->l;
}

void ref_compute_row(const ref_inputs *in, int64_t b, int64_t h, int64_t i, ref_row *row)
{
    row->b = b;
    row->h = h;
    row->i = i;
    row->at = plan_position_of(&in->run->positions, in->run->sizes.KV, b);
    row->sink = plan_sink_of(in->run, b, h, i);
    if (in->run->dropout.is_on)
        row->head = plan_dropout_head(in->problem, in->run, b, h);
    memset(row->raw, 0, (size_t)in->run->sizes.KV * sizeof *row->raw);
    load_row(in->run->q, b, h, i, row->q);
    find_live(in, row);
    find_scores(in, row);
    softmax(row, in->run->sizes.KV);
    weigh_values(in, row);
}

double ref_factor(const ref_inputs *in, const ref_row *row, int64_t j)
{
    const plan_dropout *d = &in->run->dropout;
    const eval_point at = ref_point(row, j);
    return d->is_on ? plan_dropout_factor(d, row->head, at.q, at.kv) : 1;
}

double ref_row_lse(const ref_row *row)
{
    return row->m == -INFINITY ? row->sink : row->top + log(row->l);
}

double ref_sink_weight(const ref_row *row)
{
    return plan_sink_weight(row->sink, ref_row_lse(row));
}
