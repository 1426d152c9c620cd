/* Gradients of attention, from dO. Source: FlashAttention (arXiv 2205.14135), appendix B.
 *     dV = P^T dO     dP = dO V^T     dS = P (dP - rowsum(P dP))     dQ = dS K     dK = dS^T Q
 * Algorithm 3 keeps P of the forward pass and moves dP and dS through slow memory; algorithm 4
 * keeps only m and l and computes P again, block by block, with rowsum(P dP) = rowsum(dO O).
 * dQ is by Q as given (which holds the scale). */
#include "ref/ladder_ops.h"

/* ---- algorithm 3 ---- */

/* 2: dV = P^T dO, dV on the chip. */
static void standard_dv(ladder_run *run, float *dV_out)
{
    const ladder_problem *p = run->p;
    const int64_t N = p->N, d = p->d;
    const ladder_memory before = run->chip;
    float *dV = on_chip(run, N * d), *dO = on_chip(run, d);
    clear(dV, N * d);
    VISIT(N * N);
    for (int64_t i = 0; i < N; i++) {
        load(run, dO, p->dO + i * d, d);
        for (int64_t j = 0; j < N; j++)
            accumulate(run, dV + j * d, READ(p->P[i * N + j]), dO, d);
    }
    store(run, dV_out, dV, N * d);
    chip_reset(run, before);
}

/* 3: dP = dO V^T, V on the chip. */
static void standard_dp(ladder_run *run, float *dP)
{
    const ladder_problem *p = run->p;
    const int64_t N = p->N, d = p->d;
    const ladder_memory before = run->chip;
    float *V = on_chip(run, N * d), *dO = on_chip(run, d);
    load(run, V, p->V, N * d);
    VISIT(N * N);
    for (int64_t i = 0; i < N; i++) {
        load(run, dO, p->dO + i * d, d);
        for (int64_t j = 0; j < N; j++)
            WRITE(dP[i * N + j], dot(run, dO, V + j * d, d));
    }
    chip_reset(run, before);
}

/* 4: dS = P (dP - rowsum(P dP)), a row of each on the chip. */
static void standard_ds(ladder_run *run, const float *dP, float *dS)
{
    const int64_t N = run->p->N;
    const ladder_memory before = run->chip;
    float *p = on_chip(run, N), *dp = on_chip(run, N);
    VISIT(N * N);
    for (int64_t i = 0; i < N; i++) {
        load(run, p, run->p->P + i * N, N);
        load(run, dp, dP + i * N, N);
        const float D = dot(run, p, dp, N);
        for (int64_t j = 0; j < N; j++)
            WRITE(dS[i * N + j], FLOP(2, p[j] * (dp[j] - D)));
    }
    chip_reset(run, before);
}

/* 5: dQ = dS K, K on the chip. */
static void standard_dq(ladder_run *run, const float *dS, float *dQ)
{
    const ladder_problem *p = run->p;
    const int64_t N = p->N, d = p->d;
    const ladder_memory before = run->chip;
    float *K = on_chip(run, N * d), *dq = on_chip(run, d);
    load(run, K, p->K, N * d);
    VISIT(N * N);
    for (int64_t i = 0; i < N; i++) {
        clear(dq, d);
        for (int64_t j = 0; j < N; j++)
            accumulate(run, dq, READ(dS[i * N + j]), K + j * d, d);
        store(run, dQ + i * d, dq, d);
    }
    chip_reset(run, before);
}

/* 6: dK = dS^T Q, dK on the chip. */
static void standard_dk(ladder_run *run, const float *dS, float *dK_out)
{
    const ladder_problem *p = run->p;
    const int64_t N = p->N, d = p->d;
    const ladder_memory before = run->chip;
    float *dK = on_chip(run, N * d), *q = on_chip(run, d);
    clear(dK, N * d);
    VISIT(N * N);
    for (int64_t i = 0; i < N; i++) {
        load(run, q, p->Q + i * d, d);
        for (int64_t j = 0; j < N; j++)
            accumulate(run, dK + j * d, READ(dS[i * N + j]), q, d);
    }
    store(run, dK_out, dK, N * d);
    chip_reset(run, before);
}

void LADDER(backward_standard)(ladder_run *run)
{
    const int64_t N = run->p->N, d = run->p->d;
    float *dP = in_slow(run, N * N), *dS = in_slow(run, N * N);
    standard_dv(run, run->out + 2 * N * d);
    standard_dp(run, dP);
    standard_ds(run, dP, dS);
    standard_dq(run, dS, run->out);
    standard_dk(run, dS, run->out + N * d);
}

/* ---- algorithm 4 ---- */

typedef struct backward_tile {
    int64_t Br, Bc;
    float *K, *V, *dK, *dV; /* [Bc][d] */
    float *Q, *O, *dO, *dQ; /* [Br][d] */
    float *l, *m;           /* [Br] */
} backward_tile;

static backward_tile backward_take(ladder_run *run, const ladder_blocks *b)
{
    const int64_t keys = b->stationary * run->p->d, rows = b->moving * run->p->d;
    backward_tile t = {.K = on_chip(run, keys), .V = on_chip(run, keys)};
    t.dK = on_chip(run, keys);
    t.dV = on_chip(run, keys);
    t.Q = on_chip(run, rows);
    t.O = on_chip(run, rows);
    t.dO = on_chip(run, rows);
    t.dQ = on_chip(run, rows);
    t.l = on_chip(run, b->moving);
    t.m = on_chip(run, b->moving);
    return t;
}

/* Lines 11 to 22 for one row: scores computed again, never stored. */
static void backward_row(ladder_run *run, backward_tile *t, int64_t r)
{
    const int64_t d = run->p->d;
    const float *q = t->Q + r * d, *dO = t->dO + r * d;
    const float D = dot(run, dO, t->O + r * d, d); /* 19 */
    for (int64_t j = 0; j < t->Bc; j++) {
        const float s = dot(run, q, t->K + j * d, d);         /* 11 */
        const float p = FLOP(3, expf(s - t->m[r]) / t->l[r]); /* 13 */
        accumulate(run, t->dV + j * d, p, dO, d);             /* 16 */
        const float dP = dot(run, dO, t->V + j * d, d);       /* 17 */
        const float dS = FLOP(2, p * (dP - D));               /* 20 */
        accumulate(run, t->dQ + r * d, dS, t->K + j * d, d);  /* 21 */
        accumulate(run, t->dK + j * d, dS, q, d);             /* 22 */
    }
}

static void backward_step(ladder_run *run, backward_tile *t, int64_t q0)
{
    const ladder_problem *p = run->p;
    const int64_t d = p->d;
    VISIT(t->Br * t->Bc);
    load(run, t->Q, p->Q + q0 * d, t->Br * d);
    load(run, t->O, p->O + q0 * d, t->Br * d);
    load(run, t->dO, p->dO + q0 * d, t->Br * d);
    load(run, t->dQ, run->out + q0 * d, t->Br * d);
    load(run, t->l, p->l + q0, t->Br);
    load(run, t->m, p->m + q0, t->Br);
    for (int64_t r = 0; r < t->Br; r++)
        backward_row(run, t, r);
    store(run, run->out + q0 * d, t->dQ, t->Br * d);
}

void LADDER(backward_flash)(ladder_run *run)
{
    const ladder_problem *p = run->p;
    const int64_t N = p->N, d = p->d;
    const ladder_blocks b = ladder_blocks_of(p);
    backward_tile t = backward_take(run, &b);
    fill(run, run->out, 0, N * d); /* 5: dQ = 0 */
    for (int64_t j = 0; j < b.n_stationary; j++) {
        const int64_t k0 = j * b.stationary;
        t.Bc = ladder_least(b.stationary, N - k0);
        load(run, t.K, p->K + k0 * d, t.Bc * d);
        load(run, t.V, p->V + k0 * d, t.Bc * d);
        clear(t.dK, t.Bc * d);
        clear(t.dV, t.Bc * d);
        for (int64_t i = 0; i < b.n_moving; i++) {
            t.Br = ladder_least(b.moving, N - i * b.moving);
            backward_step(run, &t, i * b.moving);
        }
        store(run, run->out + (N + k0) * d, t.dK, t.Bc * d);
        store(run, run->out + (2 * N + k0) * d, t.dV, t.Bc * d);
    }
}
