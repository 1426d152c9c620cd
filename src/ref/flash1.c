/* FlashAttention (arXiv 2205.14135): one loop gives O, with O normalised at every step.
 *     m_i = max(m_{i-1}, s_i)
 *     D_i = D_{i-1} e^{m_{i-1} - m_i} + e^{s_i - m_i}
 *     O_i = O_{i-1} e^{m_{i-1} - m_i} D_{i-1} / D_i + e^{s_i - m_i} / D_i v_i
 * First one key at a time for one row, then algorithm 1 (blocks of Q, K, V), then algorithm 5
 * (the same with absent blocks skipped). */
#include "ref/ladder_ops.h"

void LADDER(flash1_row)(ladder_run *run)
{
    const int64_t N = run->p->N, d = run->p->d;
    float *q = on_chip(run, d), *k = on_chip(run, d), *v = on_chip(run, d);
    float *o = on_chip(run, d);
    for (int64_t r = 0; r < N; r++) {
        float m = -INFINITY, D = 0;
        load(run, q, run->p->Q + r * d, d);
        clear(o, d);
        VISIT(N);
        for (int64_t i = 0; i < N; i++) {
            load(run, k, run->p->K + i * d, d);
            load(run, v, run->p->V + i * d, d);
            const float s = dot(run, q, k, d);
            const float m_new = FLOP(1, larger(m, s));
            const float kept = FLOP(3, D * expf(m - m_new)), p = FLOP(2, expf(s - m_new));
            D = FLOP(1, kept + p);
            const float a = FLOP(1, kept / D), b = FLOP(1, p / D);
            for (int64_t c = 0; c < d; c++)
                o[c] = FLOP(3, o[c] * a + b * v[c]);
            m = m_new;
        }
        store(run, run->out + r * d, o, d);
    }
}

/* ---- algorithm 1 ---- */

/* Arrays of one step (i, j): queries of block i, keys of block j. */
typedef struct flash1_tile {
    int64_t Br, Bc; /* rows, keys of this tile (ragged at the ends) */
    float *Q, *O;   /* [Br][d] */
    float *K, *V;   /* [Bc][d] */
    float *P;       /* [Br][Bc] S, then e^{S - m} */
    float *l, *m;   /* [Br] */
} flash1_tile;

static flash1_tile flash1_take(ladder_run *run, const ladder_blocks *b)
{
    const int64_t d = run->p->d, Br = b->moving, Bc = b->stationary;
    flash1_tile t = {.Q = on_chip(run, Br * d), .O = on_chip(run, Br * d)};
    t.K = on_chip(run, Bc * d);
    t.V = on_chip(run, Bc * d);
    t.P = on_chip(run, Br * Bc);
    t.l = on_chip(run, Br);
    t.m = on_chip(run, Br);
    return t;
}

/* Lines 9 to 12 for one row of the tile. */
static void flash1_update(ladder_run *run, flash1_tile *t, int64_t r)
{
    const int64_t d = run->p->d;
    float *p = t->P + r * t->Bc, *o = t->O + r * d;
    /* 9: S = Q K^T */
    for (int64_t j = 0; j < t->Bc; j++)
        p[j] = dot(run, t->Q + r * d, t->K + j * d, d);
    /* 10: m~ = rowmax(S), P~ = e^{S - m~}, l~ = rowsum(P~) */
    float m = p[0];
    for (int64_t j = 1; j < t->Bc; j++)
        m = FLOP(1, larger(m, p[j]));
    float l = p[0] = FLOP(2, expf(p[0] - m));
    for (int64_t j = 1; j < t->Bc; j++) {
        p[j] = FLOP(2, expf(p[j] - m));
        l = FLOP(1, l + p[j]);
    }
    /* 11: m_new = max(m, m~), l_new = e^{m - m_new} l + e^{m~ - m_new} l~ */
    const float m_new = FLOP(1, larger(t->m[r], m));
    const float kept = FLOP(3, expf(t->m[r] - m_new) * t->l[r]);
    const float factor = FLOP(2, expf(m - m_new));
    const float l_new = FLOP(2, kept + factor * l);
    /* 12: O = (l e^{m - m_new} O + e^{m~ - m_new} P~ V) / l_new */
    const float a = FLOP(1, kept / l_new), b = FLOP(1, factor / l_new);
    for (int64_t c = 0; c < d; c++) {
        float pv = 0;
        for (int64_t j = 0; j < t->Bc; j++)
            pv = FLOP(2, pv + p[j] * t->V[j * d + c]);
        o[c] = FLOP(3, a * o[c] + b * pv);
    }
    /* 13 */
    t->l[r] = l_new;
    t->m[r] = m_new;
}

/* Lines 8 to 13: one block of queries against the keys on the chip. */
static void flash1_step(ladder_run *run, flash1_tile *t, int64_t q0, float *l, float *m)
{
    const int64_t d = run->p->d;
    VISIT(t->Br * t->Bc);
    load(run, t->Q, run->p->Q + q0 * d, t->Br * d);
    load(run, t->O, run->out + q0 * d, t->Br * d);
    load(run, t->l, l + q0, t->Br);
    load(run, t->m, m + q0, t->Br);
    for (int64_t r = 0; r < t->Br; r++)
        flash1_update(run, t, r);
    store(run, run->out + q0 * d, t->O, t->Br * d);
    store(run, l + q0, t->l, t->Br);
    store(run, m + q0, t->m, t->Br);
}

static void flash1_blocks(ladder_run *run, int is_sparse)
{
    const ladder_problem *p = run->p;
    const int64_t N = p->N, d = p->d;
    /* 1: Bc = ceil(M / 4d), Br = min(Bc, d) */
    const ladder_blocks b = ladder_blocks_of(p);
    flash1_tile t = flash1_take(run, &b);
    /* 2: O = 0, l = 0, m = -inf in slow memory: what theorem 1 calls O(N) extra */
    float *l = in_slow(run, N), *m = in_slow(run, N);
    fill(run, run->out, 0, N * d);
    fill(run, l, 0, N);
    fill(run, m, -INFINITY, N);
    for (int64_t j = 0; j < b.n_stationary; j++) { /* 5 */
        const int64_t k0 = j * b.stationary;
        t.Bc = ladder_least(b.stationary, N - k0);
        int is_loaded = 0;
        for (int64_t i = 0; i < b.n_moving; i++) { /* 7 */
            if (is_sparse && !ladder_is_live(&b, i, j))
                continue;
            if (!is_loaded) { /* 6 */
                load(run, t.K, p->K + k0 * d, t.Bc * d);
                load(run, t.V, p->V + k0 * d, t.Bc * d);
                is_loaded = 1;
            }
            t.Br = ladder_least(b.moving, N - i * b.moving);
            flash1_step(run, &t, i * b.moving, l, m);
        }
    }
}

void LADDER(flash1_block)(ladder_run *run)
{
    flash1_blocks(run, 0);
}

void LADDER(flash1_sparse)(ladder_run *run)
{
    flash1_blocks(run, 1);
}
