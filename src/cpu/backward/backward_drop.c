/* Dropout in backward: dP = z (dO . v), and dV takes z P, while dS takes P whole. The factor of
 * weights that are kept is taken into dV when it is stored. */
#include "cpu/backward/backward.h"
#include "cpu/kernels/drop.h"

#include <math.h>

enum { LD = BACKWARD_KEYS };

/* What is kept of row r of the tile, from key `from` on. */
static const uint16_t *kept_of(const backward_worker *w, const cpu_drop *drop, int32_t r,
                               int32_t from, int32_t past, uint16_t *room)
{
    const int32_t q = (int32_t)w->i0 + r + w->at.q_offset;
    return cpu_drop_row(drop, q, (int32_t)w->j0 + from + w->at.kv_offset, past - from, room);
}

static cpu_drop drop_of(const backward_worker *w)
{
    return cpu_drop_of(w->job->plan, w->job->run, w->b, w->h);
}

static void scale(float *x, float factor, int32_t n)
{
    int32_t j = 0;
    for (; j + CPU_DROP_BLOCK <= n; j += CPU_DROP_BLOCK)
        for (int32_t i = 0; i < CPU_DROP_BLOCK; i++)
            x[j + i] *= factor;
    for (; j < n; j++)
        x[j] *= factor;
}

/* Every other word, which is a row of a pair. */
static void drop_pair(uint16_t *p, const uint16_t *keep, int32_t n)
{
    int32_t j = 0;
    for (; j + CPU_DROP_BLOCK <= n; j += CPU_DROP_BLOCK)
        for (int32_t i = 0; i < CPU_DROP_BLOCK; i++)
            p[2 * (j + i)] &= keep[j + i];
    for (; j < n; j++)
        p[2 * j] &= keep[j];
}

void backward_drop_incoming(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                            int32_t past)
{
    const backward_job *job = w->job;
    const cpu_backward_plan *b = job->backward;
    uint16_t room[CPU_DROP_ROOM(BACKWARD_KEYS)];
    if (!job->run->dropout.is_on || !(b->has_dq || b->has_dk || b->n_reads))
        return;
    const float factor = job->run->dropout.factor;
    const cpu_drop drop = drop_of(w);
    for (int32_t r = r0; r < r0 + rows; r++) {
        const uint16_t *keep = kept_of(w, &drop, r, from, past, room);
        float *dp = w->dp + r * LD + from;
        scale(dp, factor, past - from);
        cpu_drop_f32(dp, keep, past - from);
    }
}

/* The halves of row r's words: by pairs of rows, and in kernels on sums of two the low parts a
 * line behind the high ones. */
static void drop_halves(const backward_worker *w, int32_t r, int32_t from, int32_t past,
                        const uint16_t *keep)
{
    const int is_split = w->job->backward->kernels->block->is_split;
    const int32_t lines = is_split ? 2 : 1;
    uint16_t *high = (uint16_t *)w->p + r / 2 * lines * LD * 2 + r % 2;
    drop_pair(high + 2 * from, keep, past - from);
    if (is_split)
        drop_pair(high + 2 * (LD + from), keep, past - from);
}

void backward_drop_weights(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                           int32_t past)
{
    const backward_job *job = w->job;
    uint16_t room[CPU_DROP_ROOM(BACKWARD_KEYS)];
    if (!job->run->dropout.is_on || !job->backward->has_dv)
        return;
    const cpu_drop drop = drop_of(w);
    const saccade_sizes *s = &job->run->sizes;
    const float *lse = job->lse + (w->b * s->H + w->h) * s->Q + w->i0;
    for (int32_t r = r0; r < r0 + rows; r++) {
        if (isnan(lse[r])) /* live weights are NaN, and stay so times 0 */
            continue;
        const uint16_t *keep = kept_of(w, &drop, r, from, past, room);
        if (job->backward->kernels->is_apart)
            drop_halves(w, r, from, past, keep);
        else
            cpu_drop_f32((float *)w->p + r * LD + from, keep, past - from);
    }
}
