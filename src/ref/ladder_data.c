/* A problem for the ladder: random inputs, what a forward pass would have left for backward,
 * and the answers in float64, computed by definition from the same f32 inputs. */
#include "ref/ladder.h"

#include "base/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- inputs ---- */

/* splitmix64: the next of a sequence of well-mixed 64-bit numbers. */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Sum of 4 uniform numbers, scaled to variance 1. */
static void fill_normal(float *x, int64_t n, float scale, uint64_t *state)
{
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int k = 0; k < 4; k++)
            sum += (double)(next(state) >> 11) * 0x1p-53 - 0.5;
        x[i] = scale * (float)(sum * sqrt(3.0));
    }
}

static double score(const ladder_problem *p, int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t e = 0; e < p->d; e++)
        sum += (double)p->Q[i * p->d + e] * (double)p->K[j * p->d + e];
    return sum;
}

/* What a forward pass leaves: P, m and l, and O = P V. */
static void fill_forward(const ladder_problem *p, float *P, float *m, float *l, float *O)
{
    for (int64_t i = 0; i < p->N; i++) {
        const float *x = p->X + i * p->N;
        float *row = P + i * p->N;
        double top = -INFINITY, sum = 0;
        for (int64_t j = 0; j < p->N; j++)
            top = fmax(top, (double)x[j]);
        for (int64_t j = 0; j < p->N; j++)
            sum += exp((double)x[j] - top);
        for (int64_t j = 0; j < p->N; j++)
            row[j] = (float)(exp((double)x[j] - top) / sum);
        for (int64_t e = 0; e < p->d; e++) {
            double o = 0;
            for (int64_t j = 0; j < p->N; j++)
                o += (double)row[j] * (double)p->V[j * p->d + e];
            O[i * p->d + e] = (float)o;
        }
        m[i] = (float)top;
        l[i] = (float)sum;
    }
}

static saccade_status check(const ladder_problem *p, saccade_error *err)
{
    FAIL_AT(p->N < 1 || p->N > 4096, SACCADE_EINVAL, "N", 0, 0, "got %lld, expected 1 to 4096",
            (long long)p->N);
    FAIL_AT(p->d < 1 || p->d > 1024, SACCADE_EINVAL, "d", 0, 0, "got %lld, expected 1 to 1024",
            (long long)p->d);
    FAIL_AT(p->M < p->d || p->M > p->N * p->d, SACCADE_EINVAL, "M", 0, 0,
            "got %lld, expected d to Nd (%lld to %lld), as the theorems assume",
            (long long)p->M, (long long)p->d, (long long)(p->N * p->d));
    FAIL_AT(p->block < 1 || p->block > 4096, SACCADE_EINVAL, "block", 0, 0,
            "got %lld, expected 1 to 4096", (long long)p->block);
    FAIL_AT(p->splits < 1 || p->splits > p->N, SACCADE_EINVAL, "splits", 0, 0,
            "got %lld, expected 1 to N (%lld)", (long long)p->splits, (long long)p->N);
    return SACCADE_OK;
}

static float *take(float **at, int64_t n)
{
    float *taken = *at;
    *at += n;
    return taken;
}

saccade_status ladder_data_create(const ladder_problem *sizes, uint64_t seed, float q_scale,
                                  ladder_data *out, saccade_error *err)
{
    TRY(check(sizes, err));
    const int64_t N = sizes->N, d = sizes->d, M = sizes->M;
    ladder_data data = {.problem = *sizes};
    data.slow_size = 2 * N * N + 2 * N + 2 * sizes->splits * (d + 2);
    data.chip_size = 2 * N * d + 3 * N + 4 * M + 64 * d + 1024;
    data.inputs = malloc((size_t)(5 * N * d + 2 * N * N + 2 * N) * sizeof(float));
    data.truth = malloc((size_t)(N * N + 3 * N * d) * sizeof(double));
    data.out = malloc((size_t)(N * N + 3 * N * d) * sizeof(float));
    data.slow = malloc((size_t)data.slow_size * sizeof(float));
    data.chip = malloc((size_t)data.chip_size * sizeof(float));
    if (!data.inputs || !data.truth || !data.out || !data.slow || !data.chip) {
        ladder_data_destroy(&data);
        FAIL(SACCADE_ENOMEM, "out of memory");
    }
    float *at = data.inputs, *Q = take(&at, N * d), *K = take(&at, N * d);
    float *V = take(&at, N * d), *dO = take(&at, N * d), *O = take(&at, N * d);
    float *X = take(&at, N * N), *P = take(&at, N * N), *m = take(&at, N), *l = take(&at, N);
    fill_normal(Q, N * d, q_scale / sqrtf((float)d), &seed);
    fill_normal(K, N * d, 1, &seed);
    fill_normal(V, N * d, 1, &seed);
    fill_normal(dO, N * d, 1, &seed);
    ladder_problem *p = &data.problem;
    p->Q = Q, p->K = K, p->V = V, p->dO = dO, p->O = O;
    p->X = X, p->P = P, p->m = m, p->l = l;
    for (int64_t i = 0; i < N * N; i++)
        X[i] = (float)score(p, i / N, i % N);
    fill_forward(p, P, m, l, O);
    *out = data;
    return SACCADE_OK;
}

void ladder_data_destroy(ladder_data *data)
{
    free(data->inputs);
    free(data->truth);
    free(data->out);
    free(data->slow);
    free(data->chip);
    memset(data, 0, sizeof *data);
}

ladder_run ladder_start(ladder_data *data)
{
    return (ladder_run){
        .p = &data->problem,
        .out = data->out,
        .slow = {data->slow, data->slow, data->slow + data->slow_size},
        .chip = {data->chip, data->chip, data->chip + data->chip_size},
    };
}

/* ---- truth ---- */

static int is_live(const ladder_problem *p, int is_sparse, int64_t i, int64_t j)
{
    if (!is_sparse)
        return 1;
    const ladder_blocks b = ladder_blocks_of(p);
    return ladder_is_live(&b, i / b.moving, j / b.stationary);
}

/* s becomes softmax(s). */
static void softmax(double *s, int64_t n)
{
    double m = -INFINITY, l = 0;
    for (int64_t j = 0; j < n; j++)
        m = fmax(m, s[j]);
    for (int64_t j = 0; j < n; j++)
        l += s[j] = exp(s[j] - m);
    for (int64_t j = 0; j < n; j++)
        s[j] /= l;
}

/* One row of the probabilities. */
static void true_row(const ladder_problem *p, int is_sparse, int64_t i, double *row)
{
    for (int64_t j = 0; j < p->N; j++)
        row[j] = is_live(p, is_sparse, i, j) ? score(p, i, j) : -INFINITY;
    softmax(row, p->N);
}

static void weigh(const ladder_problem *p, const double *row, double *o)
{
    memset(o, 0, (size_t)p->d * sizeof *o);
    for (int64_t j = 0; j < p->N; j++)
        for (int64_t e = 0; e < p->d; e++)
            o[e] += row[j] * (double)p->V[j * p->d + e];
}

/* Adds row i's part: dV_j += P dO, dS = P (dO . v_j - dO . o), dQ += dS k_j, dK_j += dS q. */
static void true_gradient(const ladder_problem *p, int64_t i, const double *row, double *o,
                          double *truth)
{
    const int64_t N = p->N, d = p->d;
    double *dQ = truth + i * d, *dK = truth + N * d, *dV = truth + 2 * N * d, D = 0;
    weigh(p, row, o);
    for (int64_t e = 0; e < d; e++)
        D += o[e] * (double)p->dO[i * d + e];
    for (int64_t j = 0; j < N; j++) {
        double dP = 0;
        for (int64_t e = 0; e < d; e++)
            dP += (double)p->dO[i * d + e] * (double)p->V[j * d + e];
        const double dS = row[j] * (dP - D);
        for (int64_t e = 0; e < d; e++) {
            dQ[e] += dS * (double)p->K[j * d + e];
            dK[j * d + e] += dS * (double)p->Q[i * d + e];
            dV[j * d + e] += row[j] * (double)p->dO[i * d + e];
        }
    }
}

static void find_truth(const ladder_problem *p, ladder_kind kind, double *truth, double *row)
{
    double *o = row + p->N;
    if (kind == LADDER_BACKWARD)
        memset(truth, 0, (size_t)(3 * p->N * p->d) * sizeof *truth);
    for (int64_t i = 0; i < (kind == LADDER_DECODE ? 1 : p->N); i++) {
        if (kind == LADDER_SOFTMAX) {
            for (int64_t j = 0; j < p->N; j++)
                truth[i * p->N + j] = (double)p->X[i * p->N + j];
            softmax(truth + i * p->N, p->N);
            continue;
        }
        true_row(p, kind == LADDER_SPARSE, i, row);
        if (kind == LADDER_BACKWARD)
            true_gradient(p, i, row, o, truth);
        else
            weigh(p, row, truth + i * p->d);
    }
}

saccade_status ladder_error(ladder_data *data, const ladder_rung *rung, double *error,
                            saccade_error *err)
{
    const ladder_problem *p = &data->problem;
    double most = 0;
    double *row = malloc((size_t)(p->N + p->d) * sizeof *row);
    FAIL_IF_NULL(row);
    if (!data->has_truth || data->truth_kind != rung->kind)
        find_truth(p, rung->kind, data->truth, row);
    data->has_truth = 1;
    data->truth_kind = rung->kind;
    for (int64_t i = 0; i < ladder_out_size(rung, p); i++) {
        const double off = fabs((double)data->out[i] - data->truth[i]);
        most = off > most || isnan(off) ? off : most;
    }
    free(row);
    *error = most;
    return SACCADE_OK;
}
