/* One query against N keys, the keys split so that each part can run on its own.
 * Flash-Decoding: every part gives (m, l, O) and parts merge in any order, since
 *     l_xy = l_x e^{m_x - m_xy} + l_y e^{m_y - m_xy}
 *     O_xy = O_x e^{m_x - m_xy} l_x / l_xy + O_y e^{m_y - m_xy} l_y / l_xy
 * is associative and commutative. Flash-Decoding++ (arXiv 2311.01282, section 3): with one
 * maximum phi for all parts, known beforehand, parts need no rescaling and merge by adding; a
 * score too far from phi sends the row back to the first way. The query is row 0 of Q. */
#include "ref/ladder_ops.h"

/* e^{s - phi} stays well inside f32, and so does a sum of 2^30 of them. */
static const float DECODE_REACH = 60;

void LADDER(merge)(ladder_run *run, ladder_state *x, const ladder_state *y)
{
    const float m = FLOP(1, larger(x->m, y->m));
    if (m == -INFINITY) /* both are empty */
        return;
    const float l_x = FLOP(3, x->l * expf(x->m - m)), l_y = FLOP(3, y->l * expf(y->m - m));
    const float l = FLOP(1, l_x + l_y), a = FLOP(1, l_x / l), b = FLOP(1, l_y / l);
    for (int64_t c = 0; c < run->p->d; c++)
        x->o[c] = FLOP(3, x->o[c] * a + y->o[c] * b);
    x->m = m;
    x->l = l;
}

/* Keys of part s: [first, past). */
static int64_t decode_first(const ladder_problem *p, int64_t s)
{
    return s * p->N / p->splits;
}

/* FlashAttention-2 over the keys of one part: state.o is normalised at the end. */
static void decode_part(ladder_run *run, int64_t s, const float *q, float *k, float *v,
                        ladder_state *state)
{
    const int64_t d = run->p->d, past = decode_first(run->p, s + 1);
    state->m = -INFINITY;
    state->l = 0;
    clear(state->o, d);
    for (int64_t j = decode_first(run->p, s); j < past; j++) {
        load(run, k, run->p->K + j * d, d);
        load(run, v, run->p->V + j * d, d);
        VISIT(1);
        const float x = dot(run, q, k, d), m = FLOP(1, larger(state->m, x));
        const float a = FLOP(2, expf(state->m - m)), p = FLOP(2, expf(x - m));
        state->l = FLOP(2, state->l * a + p);
        for (int64_t c = 0; c < d; c++)
            state->o[c] = FLOP(3, state->o[c] * a + p * v[c]);
        state->m = m;
    }
    for (int64_t c = 0; c < d; c++)
        state->o[c] = FLOP(1, state->o[c] / state->l);
}

/* Parts leave (m, l, O) in slow memory; a second step merges them. */
void LADDER(decode_split)(ladder_run *run)
{
    const int64_t d = run->p->d, splits = run->p->splits;
    float *q = on_chip(run, d), *k = on_chip(run, d), *v = on_chip(run, d);
    float *parts = in_slow(run, splits * (d + 2));
    ladder_state all = {.o = on_chip(run, d)}, one = {.o = on_chip(run, d)};
    for (int64_t s = 0; s < splits; s++) {
        float *part = parts + s * (d + 2);
        load(run, q, run->p->Q, d);
        decode_part(run, s, q, k, v, &one);
        WRITE(part[0], one.m);
        WRITE(part[1], one.l);
        store(run, part + 2, one.o, d);
    }
    for (int64_t s = 0; s < splits; s++) {
        ladder_state *to = s == 0 ? &all : &one;
        to->m = READ(parts[s * (d + 2)]);
        to->l = READ(parts[s * (d + 2) + 1]);
        load(run, to->o, parts + s * (d + 2) + 2, d);
        if (s > 0)
            LADDER(merge)(run, &all, &one);
    }
    store(run, run->out, all.o, d);
}

/* l and o of one part under phi; 0 as soon as a score is out of reach. */
static int unified_part(ladder_run *run, int64_t s, const float *q, float *k, float *v,
                        float *l, float *o)
{
    const int64_t d = run->p->d, past = decode_first(run->p, s + 1);
    *l = 0;
    clear(o, d);
    for (int64_t j = decode_first(run->p, s); j < past; j++) {
        load(run, k, run->p->K + j * d, d);
        load(run, v, run->p->V + j * d, d);
        VISIT(1);
        const float x = FLOP(1, dot(run, q, k, d) - run->p->phi);
        if (FLOP(2, !(x > -DECODE_REACH && x < DECODE_REACH)))
            return 0;
        const float p = FLOP(1, expf(x));
        *l = FLOP(1, *l + p);
        accumulate(run, o, p, v, d);
    }
    return 1;
}

void LADDER(decode_unified)(ladder_run *run)
{
    const int64_t d = run->p->d, splits = run->p->splits;
    float *q = on_chip(run, d), *k = on_chip(run, d), *v = on_chip(run, d);
    float *o = on_chip(run, d), *parts = in_slow(run, splits * (d + 1));
    for (int64_t s = 0; s < splits; s++) {
        float *part = parts + s * (d + 1), l;
        load(run, q, run->p->Q, d);
        if (!unified_part(run, s, q, k, v, &l, o)) {
            COUNT(fallbacks, 1);
            LADDER(decode_split)(run);
            return;
        }
        WRITE(part[0], l);
        store(run, part + 1, o, d);
    }
    float l = 0;
    clear(o, d);
    for (int64_t s = 0; s < splits; s++) {
        const float *part = parts + s * (d + 1);
        l = FLOP(1, l + READ(part[0]));
        for (int64_t c = 0; c < d; c++)
            o[c] = FLOP(1, o[c] + READ(part[1 + c]));
    }
    for (int64_t c = 0; c < d; c++)
        WRITE(run->out[c], FLOP(1, o[c] / l));
}
