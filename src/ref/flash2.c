/* FlashAttention-2 (arXiv 2307.08691), algorithm 1: queries stay, keys pass by, and O is
 * divided by l only once, at the end (with SS = S D: SS_i = SS_{i-1} e^{m_{i-1} - m_i} + P V).
 * Rows of queries are independent, O is written once, and only lse = m + log l is kept. */
#include "ref/ladder_ops.h"

typedef struct flash2_tile {
    int64_t Br, Bc; /* rows, keys of this tile (ragged at the ends) */
    float *Q, *O;   /* [Br][d] */
    float *K, *V;   /* [Bc][d] */
    float *P;       /* [Bc] one row at a time */
    float *l, *m;   /* [Br] */
} flash2_tile;

static flash2_tile flash2_take(ladder_run *run, const ladder_blocks *b)
{
    const int64_t d = run->p->d, Br = b->stationary, Bc = b->moving;
    flash2_tile t = {.Q = on_chip(run, Br * d), .O = on_chip(run, Br * d)};
    t.K = on_chip(run, Bc * d);
    t.V = on_chip(run, Bc * d);
    t.P = on_chip(run, Bc);
    t.l = on_chip(run, Br);
    t.m = on_chip(run, Br);
    return t;
}

/* Lines 8 to 10 for one row of the tile. */
static void flash2_update(ladder_run *run, flash2_tile *t, int64_t r)
{
    const int64_t d = run->p->d;
    float *o = t->O + r * d;
    /* 8: S = Q K^T */
    for (int64_t j = 0; j < t->Bc; j++)
        t->P[j] = dot(run, t->Q + r * d, t->K + j * d, d);
    /* 9: m_new = max(m, rowmax(S)), P~ = e^{S - m_new}, l = e^{m - m_new} l + rowsum(P~) */
    float m_new = t->m[r];
    for (int64_t j = 0; j < t->Bc; j++)
        m_new = FLOP(1, larger(m_new, t->P[j]));
    const float a = FLOP(2, expf(t->m[r] - m_new));
    t->l[r] = FLOP(1, a * t->l[r]);
    for (int64_t j = 0; j < t->Bc; j++) {
        t->P[j] = FLOP(2, expf(t->P[j] - m_new));
        t->l[r] = FLOP(1, t->l[r] + t->P[j]);
    }
    /* 10: O = e^{m - m_new} O + P~ V */
    for (int64_t c = 0; c < d; c++)
        o[c] = FLOP(1, a * o[c]);
    for (int64_t j = 0; j < t->Bc; j++)
        accumulate(run, o, t->P[j], t->V + j * d, d);
    t->m[r] = m_new;
}

/* Lines 12 to 14: O / l and lse of a finished block of queries. */
static void flash2_finish(ladder_run *run, flash2_tile *t, float *out, float *lse)
{
    const int64_t d = run->p->d;
    for (int64_t r = 0; r < t->Br; r++) {
        for (int64_t c = 0; c < d; c++)
            WRITE(out[r * d + c], FLOP(1, t->O[r * d + c] / t->l[r]));
        WRITE(lse[r], FLOP(2, t->m[r] + logf(t->l[r])));
    }
}

void LADDER(flash2)(ladder_run *run)
{
    const ladder_problem *p = run->p;
    const int64_t N = p->N, d = p->d;
    const ladder_blocks b = ladder_blocks_of(p);
    flash2_tile t = flash2_take(run, &b);
    float *lse = in_slow(run, N);
    for (int64_t i = 0; i < b.n_stationary; i++) { /* 3 */
        const int64_t q0 = i * b.stationary;
        t.Br = ladder_least(b.stationary, N - q0);
        load(run, t.Q, p->Q + q0 * d, t.Br * d); /* 4 */
        clear(t.O, t.Br * d);                    /* 5 */
        clear(t.l, t.Br);
        for (int64_t r = 0; r < t.Br; r++)
            t.m[r] = -INFINITY;
        for (int64_t j = 0; j < b.n_moving; j++) { /* 6 */
            const int64_t k0 = j * b.moving;
            t.Bc = ladder_least(b.moving, N - k0);
            VISIT(t.Br * t.Bc);
            load(run, t.K, p->K + k0 * d, t.Bc * d); /* 7 */
            load(run, t.V, p->V + k0 * d, t.Bc * d);
            for (int64_t r = 0; r < t.Br; r++)
                flash2_update(run, &t, r);
        }
        flash2_finish(run, &t, run->out + q0 * d, lse + q0);
    }
}
