/* Dropout in backward: dP = z (dO . v), and dV takes z P, while dS takes P whole. The factor of
 * weights that are kept is taken into dV when it is stored. */
#include "cpu/backward/backward.h"
#include "cpu/kernels/drop.h"

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
        for (int32_t j = from; j < past; j++)
            w->dp[r * LD + j] = keep[j - from] ? factor * w->dp[r * LD + j] : 0;
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
    for (int32_t j = from; j < past; j++)
        high[2 * j] &= keep[j - from];
    for (int32_t j = from; j < past && is_split; j++)
        high[2 * (LD + j)] &= keep[j - from];
}

void backward_drop_weights(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                           int32_t past)
{
    const backward_job *job = w->job;
    uint16_t room[CPU_DROP_ROOM(BACKWARD_KEYS)];
    if (!job->run->dropout.is_on || !job->backward->has_dv)
        return;
    const cpu_drop drop = drop_of(w);
    for (int32_t r = r0; r < r0 + rows; r++) {
        const uint16_t *keep = kept_of(w, &drop, r, from, past, room);
        uint32_t *row = (uint32_t *)w->p + r * LD;
        if (job->backward->kernels->is_apart)
            drop_halves(w, r, from, past, keep);
        for (int32_t j = from; j < past && !job->backward->kernels->is_apart; j++)
            row[j] &= (uint32_t)(int32_t)(int16_t)keep[j - from];
    }
}
