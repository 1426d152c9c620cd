/* Attention with the score matrix in slow memory. Source: FlashAttention (arXiv 2205.14135),
 * algorithm 0. The matrix products hold one whole operand (N d) on the chip, which is what the
 * stated counts assume. */
#include "ref/ladder_ops.h"

/* S = Q K^T: reads Q and K once, writes S. */
static void scores(ladder_run *run, float *S)
{
    const int64_t N = run->p->N, d = run->p->d;
    const ladder_memory before = run->chip;
    float *K = on_chip(run, N * d), *q = on_chip(run, d);
    load(run, K, run->p->K, N * d);
    VISIT(N * N);
    for (int64_t i = 0; i < N; i++) {
        load(run, q, run->p->Q + i * d, d);
        for (int64_t j = 0; j < N; j++)
            WRITE(S[i * N + j], dot(run, q, K + j * d, d));
    }
    chip_reset(run, before);
}

/* P = softmax(S) by rows held on the chip: reads S once, writes P. */
static void softmax(ladder_run *run, const float *S, float *P)
{
    const int64_t N = run->p->N;
    const ladder_memory before = run->chip;
    float *row = on_chip(run, N);
    VISIT(N * N);
    for (int64_t i = 0; i < N; i++) {
        load(run, row, S + i * N, N);
        float m = row[0];
        for (int64_t j = 1; j < N; j++)
            m = FLOP(1, larger(m, row[j]));
        float l = row[0] = FLOP(2, expf(row[0] - m));
        for (int64_t j = 1; j < N; j++) {
            row[j] = FLOP(2, expf(row[j] - m));
            l = FLOP(1, l + row[j]);
        }
        for (int64_t j = 0; j < N; j++)
            WRITE(P[i * N + j], FLOP(1, row[j] / l));
    }
    chip_reset(run, before);
}

/* O = P V: reads P and V once, writes O. */
static void weigh(ladder_run *run, const float *P)
{
    const int64_t N = run->p->N, d = run->p->d;
    float *V = on_chip(run, N * d), *o = on_chip(run, d);
    load(run, V, run->p->V, N * d);
    VISIT(N * N);
    for (int64_t i = 0; i < N; i++) {
        clear(o, d);
        for (int64_t j = 0; j < N; j++)
            accumulate(run, o, READ(P[i * N + j]), V + j * d, d);
        store(run, run->out + i * d, o, d);
    }
}

/* S and P both go through slow memory: five matrices read, three written. */
void LADDER(attention_standard)(ladder_run *run)
{
    const int64_t N = run->p->N;
    float *S = in_slow(run, N * N), *P = in_slow(run, N * N);
    scores(run, S);
    softmax(run, S, P);
    weigh(run, P);
}

/* Three passes over S alone: write it; read it for m and d; read it for O. P is never stored:
 *     O_r = sum_i e^{S_ri - m} / d * V_i */
void LADDER(attention_3_pass)(ladder_run *run)
{
    const int64_t N = run->p->N, d = run->p->d;
    float *S = in_slow(run, N * N);
    scores(run, S);
    float *V = on_chip(run, N * d), *o = on_chip(run, d);
    load(run, V, run->p->V, N * d);
    for (int64_t r = 0; r < N; r++) {
        const float *s = S + r * N;
        float m = -INFINITY, l = 0;
        VISIT(2 * N);
        for (int64_t j = 0; j < N; j++)
            online_update(run, &m, &l, READ(s[j]));
        clear(o, d);
        for (int64_t i = 0; i < N; i++)
            accumulate(run, o, FLOP(3, expf(READ(s[i]) - m) / l), V + i * d, d);
        store(run, run->out + r * d, o, d);
    }
}
