/* Results of an item: out, lse and row maxima; or the part (O, m, l) that a split leaves, and
 * adding such parts up. */
#include "cpu/forward/item.h"

#include <math.h>
#include <string.h>

static void store_stat(const saccade_tensor *t, int64_t b, int64_t h, int64_t i, float value)
{
    if (t)
        ((float *)t->data)[b * t->stride[0] + h * t->stride[1] + i * t->stride[2]] = value;
}

/* m log2 e as the exponents of P had it: what is rounded there may be 1e-4 for m of thousands,
 * and parts of a row must not differ by that. */
static double exponent_of(const cpu_worker *w, float m)
{
    const int is_fused = w->kernels->is_fused && fabsf(m) < CPU_FUSED_MOST;
    return is_fused ? (double)(m * (float)M_LOG2E) : (double)m * M_LOG2E;
}

/* lse of a row with its sink in it. l exp(m) and exp(sink) may both be out of f32's range, but
 * not both so relative to the larger. */
static double lse_with(double sink, double lse)
{
    if (sink == -INFINITY || isnan(lse))
        return lse;
    return lse < sink ? sink + log1p(exp(lse - sink)) : lse + log1p(exp(sink - lse));
}

static void store_stats(const cpu_worker *w, int32_t r, double sink)
{
    const plan_run *run = w->job->run;
    const int64_t b = w->item.b, h = item_head_of(w, r);
    const int64_t i = item_index_of(w, r) + w->shift;
    const float l = w->l[r], m = isnan(l) ? NAN : w->m[r];
    if (run->lse) {
        const double own = l == 0 ? -INFINITY : exponent_of(w, m) * M_LN2 + log((double)l);
        store_stat(run->lse, b, h, i, (float)lse_with(sink, own));
    }
    store_stat(run->row_max, b, h, i, m);
}

/* Weights that dropout kept are divided by the part that is kept. */
static void scale_kept(const cpu_worker *w, int32_t r)
{
    if (w->l[r] != 0)
        w->l[r] /= w->job->run->dropout.factor;
}

/* Adds a row's sink to its sum, which may become infinite: then out is 0. Rows without a live
 * key stay such. */
static void add_sink(const cpu_worker *w, int32_t r, double sink)
{
    if (w->l[r] != 0 && sink != -INFINITY)
        w->l[r] += (float)exp2(sink * M_LOG2E - exponent_of(w, w->m[r]));
}

/* Statistics, and sums as out is divided by them. */
static void finish_rows(const cpu_worker *w)
{
    const plan_run *run = w->job->run;
    const int is_any = run->lse || run->row_max || run->sinks.data || run->dropout.is_on;
    for (int32_t r = 0; is_any && r < w->rows; r++) {
        const double sink =
            plan_sink_of(run, w->item.b, item_head_of(w, r), item_index_of(w, r) + w->shift);
        if (run->lse || run->row_max)
            store_stats(w, r, sink);
        add_sink(w, r, sink);
        if (run->dropout.is_on)
            scale_kept(w, r);
    }
}

char *item_out_of(const cpu_worker *w, int32_t r)
{
    const saccade_tensor *out = w->job->run->out;
    const int64_t at = w->item.b * out->stride[0] + item_head_of(w, r) * out->stride[1]
                       + (item_index_of(w, r) + w->shift) * out->stride[2];
    return (char *)out->data + at * (int64_t)saccade_dtype_bytes(out->dtype);
}

/* A row with no live key is 0 and -INF; one with a NaN or +INF score has l = NaN. */
static void store_rows(const cpu_worker *w, int32_t r, int32_t n)
{
    const saccade_tensor *out = w->job->run->out;
    const int32_t o_ld = w->job->g.o_ld;
    w->kernels->store_rows(w->o + (int64_t)r * o_ld, o_ld, w->l + r, n, out->dtype,
                           (int32_t)out->shape[3], item_out_of(w, r),
                           out->stride[2] * (int64_t)saccade_dtype_bytes(out->dtype));
}

/* All but the strips that are stored already. */
void item_store(const cpu_worker *w)
{
    const int32_t head = (int32_t)(w->item.box.i1 - w->item.box.i0);
    const int32_t each = w->stored ? w->kernels->strip : head;
    finish_rows(w);
    for (int32_t r = 0; r < w->rows; r += each)
        if (!w->stored || !(w->stored >> (r / each) & 1))
            store_rows(w, r, w->rows - r < each ? w->rows - r : each);
}

/* (m, l) of all rows, then O, of one split item. */
float *item_partial_of(const cpu_job *job, int64_t index)
{
    return (float *)(void *)(job->partial + (size_t)index * job->g.partial_bytes);
}

void item_copy_sums(const cpu_worker *w, float *to)
{
    memcpy(to, w->m, (size_t)w->rows * sizeof *to);
    memcpy(to + w->rows, w->l, (size_t)w->rows * sizeof *to);
    memcpy(to + 2 * w->rows, w->o, (size_t)w->rows * (size_t)w->job->g.o_ld * sizeof *to);
}

void item_take_sums(cpu_worker *w, const float *from)
{
    memcpy(w->m, from, (size_t)w->rows * sizeof *from);
    memcpy(w->l, from + w->rows, (size_t)w->rows * sizeof *from);
    memcpy(w->o, from + 2 * w->rows, (size_t)w->rows * (size_t)w->job->g.o_ld * sizeof *from);
}

void item_keep_partial(const cpu_worker *w, int64_t index)
{
    item_copy_sums(w, item_partial_of(w->job, index));
}

/* Writes an empty partial result (m = -inf, l = 0); add_part then does not read its O. */
void item_keep_nothing(const cpu_worker *w, int64_t index)
{
    float *to = item_partial_of(w->job, index);
    for (int32_t r = 0; r < w->rows; r++) {
        to[r] = -INFINITY;
        to[w->rows + r] = 0;
    }
}

/* Weight of a part whose maximum is m in a row whose maximum is all. */
static float part_weight(const cpu_worker *w, float m, float all)
{
    return m == -INFINITY ? 0 : (float)exp2(exponent_of(w, m) - exponent_of(w, all));
}

/* A part's O times its weight. A weight below f32's range gives 0 whatever the sign of O, but
 * NaN of an infinity or NaN. */
static float weighed(float weight, float o)
{
    return weight == 0 ? 0 * fabsf(o) : weight * o;
}

void item_add_part(cpu_worker *w, const float *part, int32_t r)
{
    const int32_t o_ld = w->job->g.o_ld;
    const float *po = part + 2 * w->rows + (int64_t)r * o_ld;
    float *o = w->o + (int64_t)r * o_ld;
    const float m = part[r], l = part[w->rows + r];
    if (m == -INFINITY && l == 0)
        return; /* no live key */
    if (isnan(l) || isnan(w->l[r])) { /* m of scores that are all NaN is -INF, and weighs 0 */
        w->l[r] = NAN;
        return;
    }
    const float all = m > w->m[r] ? m : w->m[r];
    const float keep = part_weight(w, w->m[r], all), take = part_weight(w, m, all);
    for (int32_t d = 0; d < o_ld; d++)
        o[d] = weighed(keep, o[d]) + weighed(take, po[d]);
    w->l[r] = keep * w->l[r] + take * l;
    w->m[r] = all;
}
