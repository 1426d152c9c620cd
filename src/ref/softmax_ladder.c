/* Four ways to softmax the rows of X [N][N]. Source: Milakov and Gimelshein, "Online normalizer
 * calculation for softmax" (arXiv 1805.02867), algorithms 1 to 3 and section 3.1.
 * FLOPs of the first two leave out the exponential that the last loop takes again of the same
 * argument (counted apart); all else that is computed is counted. */
#include "ref/ladder_ops.h"

/* d = sum e^{x_j};  y_i = e^{x_i} / d */
void LADDER(softmax_naive)(ladder_run *run)
{
    const int64_t N = run->p->N;
    for (int64_t r = 0; r < N; r++) {
        const float *x = run->p->X + r * N;
        float *y = run->out + r * N;
        VISIT(2 * N);
        float d = FLOP(1, expf(READ(x[0])));
        for (int64_t j = 1; j < N; j++)
            d = FLOP(2, d + expf(READ(x[j])));
        for (int64_t i = 0; i < N; i++)
            WRITE(y[i], FLOP(1, AGAIN(expf(READ(x[i]))) / d));
    }
}

/* m = max x_k;  d = sum e^{x_j - m};  y_i = e^{x_i - m} / d */
void LADDER(softmax_safe)(ladder_run *run)
{
    const int64_t N = run->p->N;
    for (int64_t r = 0; r < N; r++) {
        const float *x = run->p->X + r * N;
        float *y = run->out + r * N;
        VISIT(3 * N);
        float m = READ(x[0]);
        for (int64_t k = 1; k < N; k++)
            m = FLOP(1, larger(m, READ(x[k])));
        float d = FLOP(2, expf(READ(x[0]) - m));
        for (int64_t j = 1; j < N; j++)
            d = FLOP(3, d + expf(READ(x[j]) - m));
        for (int64_t i = 0; i < N; i++)
            WRITE(y[i], FLOP(2, AGAIN(expf(READ(x[i]) - m)) / d));
    }
}

/* d_xy = d_x e^{m_x - m_xy} + d_y e^{m_y - m_xy}: 8 FLOPs. */
static inline void online_merge(ladder_run *run, float *m, float *d, float m_y, float d_y)
{
    const float m_xy = FLOP(1, larger(*m, m_y));
    *d = FLOP(7, *d * expf(*m - m_xy) + d_y * expf(m_y - m_xy));
    *m = m_xy;
}

/* m and d in one loop;  y_i = e^{x_i - m} / d */
void LADDER(softmax_online)(ladder_run *run)
{
    const int64_t N = run->p->N;
    for (int64_t r = 0; r < N; r++) {
        const float *x = run->p->X + r * N;
        float *y = run->out + r * N;
        float m = -INFINITY, d = 0;
        VISIT(2 * N);
        for (int64_t j = 0; j < N; j++)
            online_update(run, &m, &d, READ(x[j]));
        for (int64_t i = 0; i < N; i++)
            WRITE(y[i], FLOP(3, expf(READ(x[i]) - m) / d));
    }
}

/* softmax_online with m and d of each block on their own, merged: blocks may run at once. */
void LADDER(softmax_block)(ladder_run *run)
{
    const int64_t N = run->p->N;
    for (int64_t r = 0; r < N; r++) {
        const float *x = run->p->X + r * N;
        float *y = run->out + r * N;
        float m = -INFINITY, d = 0;
        VISIT(2 * N);
        for (int64_t b = 0; b < N; b += run->p->block) {
            float m_block = -INFINITY, d_block = 0;
            for (int64_t j = b; j < ladder_least(b + run->p->block, N); j++)
                online_update(run, &m_block, &d_block, READ(x[j]));
            online_merge(run, &m, &d, m_block, d_block);
        }
        for (int64_t i = 0; i < N; i++)
            WRITE(y[i], FLOP(3, expf(READ(x[i]) - m) / d));
    }
}
