/* Strips of a tile as a stream of units (CPU_STREAM), where kernels have one and nothing but
 * scores, slopes and masks changes a unit: those are made unit by unit. */
#include "cpu/backward/backward.h"

#include <math.h>

enum { UNIT = CPU_UNIT_ROWS };

static int is_near(const backward_worker *w, int32_t r0)
{
    const saccade_sizes *s = &w->job->run->sizes;
    const float *lse = w->job->lse + (w->b * s->H + w->h) * s->Q + w->i0 + r0;
    int is_near = 1;
    for (int32_t r = 0; r < UNIT; r++)
        is_near &= fabsf(lse[r]) < 256;
    return is_near;
}

int backward_is_streamed(const backward_worker *w, int32_t r0, int32_t from, int32_t past)
{
    const cpu_backward_plan *b = w->job->backward;
    return b->kernels->stream && backward_strip_rows(w, r0) == UNIT && backward_needs_dp(b)
           && !b->n_reads && !w->job->run->dropout.is_on && !backward_is_nonfinite(w)
           && w->head_slope == 1 && backward_scale_of(w) == backward_late_scale(w)
           && backward_changes_units(w, r0, from, past) && is_near(w, r0);
}

static void change_unit(void *arg, float *unit, int32_t j)
{
    backward_worker *w = arg;
    const int32_t n = w->stream.n_keys - j;
    backward_change_unit(w, w->unit_r0, w->unit_from + j, n < UNIT ? n : UNIT, unit);
}

void backward_stream_strip(backward_worker *w, const cpu_strip_scores *scores,
                           const cpu_strip_weights *weights, int32_t r0, int32_t from,
                           int32_t past)
{
    const saccade_sizes *s = &w->job->run->sizes;
    const int64_t at = (w->b * s->H + w->h) * s->Q + w->i0 + r0;
    const int by_limits = !w->is_full && w->job->live.by == CPU_BY_LIMITS;
    cpu_stream *stream = &w->stream;
    w->unit_r0 = r0;
    w->unit_from = from;
    stream->change = backward_is_compiled(w) ? change_unit : NULL;
    stream->arg = w;
    stream->first = by_limits ? w->job->first + at : NULL;
    stream->past = by_limits ? w->job->past + at : NULL;
    stream->key = w->j0 + from;
    stream->n_keys = past - from;
    stream->ring = w->s;
    w->job->backward->kernels->stream(stream, scores, weights);
}

void backward_end_stream(backward_worker *w)
{
    if (w->stream.is_open)
        w->job->backward->kernels->end_stream(&w->stream);
}
