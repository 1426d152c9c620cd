/* Gradients of captures whose index is of no form that gives an order: sums in fixed point,
 * 64-bit integers, which are exact and so the same in any order, and items run at once.
 *
 * The scale is proven before the run. A row's weights p sum to 1, and dropout multiplies them
 * by z, at most `factor`, so its terms p (z dO . v - delta) sum to at most
 * M_i = factor |dO_i| max |v| + |delta_i| in size, and whatever goes to one element to at most
 * sum M_i times the largest derivative by the read, which has to be constant within a head.
 * Scaled to 2^60 that leaves room for rounding, of 2^-61 of it a term. Where dO or a live V is
 * not finite there is no bound, and positions add one after the other as elsewhere. */
#include "cpu/backward/backward.h"

#include "base/tensor_walk.h"
#include "cpu/schedule/layout.h"

#include <math.h>
#include <string.h>

enum { BITS = 60, ROWS = 64, LD = BACKWARD_KEYS };

int backward_may_fix(const backward_read *read)
{
    return read->axis == BACKWARD_PLACE && (!read->is_dense || read->is_slanted)
           && read->factor;
}

/* Row-major strides over dimensions whose stride in the gradient is not 0; their elements. */
static int64_t compact(const saccade_tensor *t, int64_t stride[SACCADE_MAX_RANK])
{
    int64_t n = 1;
    for (int32_t d = t->rank - 1; d >= 0; d--) {
        stride[d] = t->stride[d] ? n : 0;
        n *= tensor_places(t, d);
    }
    return n;
}

size_t backward_fixed_bytes(const cpu_backward_plan *backward, const plan_gradients *gradients)
{
    int64_t stride[SACCADE_MAX_RANK];
    size_t bytes = 0;
    for (uint32_t n = 0; gradients && n < backward->n_reads; n++) {
        const backward_read *read = &backward->reads[n];
        if (backward_may_fix(read))
            bytes += bytes64(compact(&gradients->captures[read->capture], stride),
                             sizeof(int64_t) + 1);
    }
    return bytes;
}

/* ---- the scale ---- */

/* What squares of dim elements may have lost to underflow, with or without denormals. */
static double lost_of(int32_t dim)
{
    return dim * 0x1p-126;
}

/* The largest |v|^2 of keys, live or not. A NaN does not count: where it is live, the delta of
 * each row that sees it is NaN, and the sum below with it. */
static double most_of_values(const backward_job *job)
{
    const plan_run *run = job->run;
    const saccade_sizes *s = &run->sizes;
    void *room = backward_worker_of(job, 0)->v_room;
    double most = 0;
    for (int64_t head = 0; head < s->B * s->Hkv; head++) {
        const kv_view view = kv_view_of(run, run->v, head / s->Hkv, head % s->Hkv);
        const int64_t kv_len = plan_position_of(&run->positions, s->KV, head / s->Hkv).kv_len;
        for (int64_t j = 0; j < kv_len; j += ROWS) {
            const int32_t n = (int32_t)smaller(kv_len - j, ROWS);
            const cpu_rows rows = kv_block(&view, j, n, room);
            float squares[ROWS];
            job->backward->kernels->row_dots(&rows, &rows, n, squares);
            for (int32_t r = 0; r < n; r++)
                most = (double)squares[r] > most ? (double)squares[r] : most;
        }
    }
    return most + lost_of((int32_t)s->Dv);
}

/* sum M_i, what of it does not stand for squares that may have been lost, and the largest
 * |o|^2, of rows that are computed here. */
typedef struct rows_sum {
    double sum, sure, most_out;
} rows_sum;

static void add_part(const backward_job *job, const plan_part *part, int64_t head, double most,
                     rows_sum *to)
{
    const saccade_sizes *s = &job->run->sizes;
    const cpu_rows all = cpu_rows_of(job->gradients->d_out, head / s->H, head % s->H);
    const cpu_rows all_out = cpu_rows_of(job->run->out, head / s->H, head % s->H);
    const float *delta = job->delta + head * s->Q + part->first;
    const double lost = lost_of((int32_t)s->Dv), most_seen = most - lost;
    const double factor = job->run->dropout.is_on ? (double)job->run->dropout.factor : 1;
    for (int64_t i = 0; i < part->count; i += ROWS) {
        const int32_t n = (int32_t)smaller(part->count - i, ROWS);
        const cpu_rows rows = cpu_rows_from(all, part->row + i);
        const cpu_rows out = cpu_rows_from(all_out, part->row + i);
        float squares[ROWS], out_squares[ROWS];
        job->backward->kernels->row_dots(&rows, &rows, n, squares);
        job->backward->kernels->row_dots(&out, &out, n, out_squares);
        for (int32_t r = 0; r < n; r++) {
            const double square = (double)squares[r], of_delta = fabs((double)delta[i + r]);
            to->sum += factor * sqrt((square + lost) * most) + of_delta;
            to->sure += factor * sqrt(square * most_seen) + of_delta;
            if ((double)out_squares[r] > to->most_out)
                to->most_out = (double)out_squares[r];
        }
    }
}

/* sum M_i of the head above. The largest |o| is at most the largest live |v| (times factor).
 * Values far above it may be masked ones, which hold anything and would leave the live ones no
 * digits, and so would what stands for lost squares where all of dO or V is as small as that:
 * then there is no bound. 2^16 leaves 2^-45 of the sum's size a term. */
static double sum_of_rows(const backward_job *job, double most)
{
    const saccade_sizes *s = &job->run->sizes;
    const plan_part whole = {0, s->Q, 0};
    const plan_rows all = {.part = &whole, .n = 1};
    const plan_rows *rows = job->run->rows ? job->run->rows : &all;
    rows_sum to = {0, 0, 0};
    for (int64_t head = 0; head < s->B * s->H; head++)
        for (int32_t n = 0; n < rows->n; n++)
            add_part(job, &rows->part[n], head, most, &to);
    const double least = to.most_out + 2 * lost_of((int32_t)s->Dv);
    return most <= 0x1p32 * least && to.sum <= 0x1p16 * to.sure ? to.sum : INFINITY;
}

/* The largest |derivative| of a head; NaN if one is. */
static double most_of_factors(const backward_job *job, const backward_read *read)
{
    const saccade_sizes *s = &job->run->sizes;
    double *values = backward_worker_of(job, 0)->values, most = 0;
    for (int64_t head = 0; head < s->B * s->H; head++) {
        const double x = fabs(backward_factor_of(job, read, head / s->H, head % s->H, values));
        most = x <= most || isnan(most) ? most : x;
    }
    return most;
}

void backward_begin_fixed(backward_job *job, char *memory)
{
    double sum = -1;
    for (uint32_t n = 0; n < job->backward->n_reads; n++) {
        const backward_read *read = &job->backward->reads[n];
        backward_fixed *fixed = &job->reads[n].fixed;
        if (!backward_may_fix(read) || job->reads[n].is_dense || job->reads[n].is_stored)
            continue;
        if (sum < 0)
            sum = sum_of_rows(job, most_of_values(job));
        const double most = 1.01 * sum * most_of_factors(job, read);
        fixed->count = compact(&job->gradients->captures[read->capture], fixed->stride);
        char *room = memory;
        memory += bytes64(fixed->count, sizeof(int64_t) + 1);
        if (!isfinite(most))
            continue;
        fixed->scale = most > 0 ? ldexp(1, BITS - 1 - ilogb(most)) : 1;
        if (!isfinite(fixed->scale))
            fixed->scale = 1;
        fixed->sums = (_Atomic uint64_t *)(void *)room;
        fixed->is_nan = (_Atomic uint8_t *)(room + fixed->count * (int64_t)sizeof(int64_t));
        memset(room, 0, (size_t)fixed->count * (sizeof(int64_t) + 1));
    }
}

/* ---- terms ---- */

static void flush(const backward_job *job, const backward_kept *kept)
{
    if (kept->element >= 0 && kept->sum)
        atomic_fetch_add_explicit(&job->reads[kept->element % BACKWARD_READS]
                                       .fixed.sums[kept->element / BACKWARD_READS],
                                  kept->sum, memory_order_relaxed);
}

static int has_fixed(const backward_job *job)
{
    for (uint32_t n = 0; n < job->backward->n_reads; n++)
        if (job->reads[n].fixed.sums)
            return 1;
    return 0;
}

void backward_begin_kept(backward_worker *w)
{
    if (!has_fixed(w->job))
        return;
    for (int k = 0; k < BACKWARD_KEPT; k++)
        w->kept[k] = (backward_kept){.element = -1};
}

void backward_end_kept(const backward_worker *w)
{
    if (!has_fixed(w->job))
        return;
    for (int k = 0; k < BACKWARD_KEPT; k++)
        flush(w->job, &w->kept[k]);
}

/* To its slot's sum, which leaves first where it is another element's. */
static inline void keep(const backward_job *job, backward_kept *all, int64_t element,
                        uint64_t sum)
{
    backward_kept *kept = &all[(uint64_t)element / BACKWARD_READS % BACKWARD_KEPT];
    if (kept->element != element) {
        flush(job, kept);
        *kept = (backward_kept){.element = element};
    }
    kept->sum += sum;
}

/* Terms of one row, whose key j reads element first + element[j]. */
static void add_keys(backward_worker *w, uint32_t n, double factor, const float *dx,
                     int64_t first, const int64_t *element, const cpu_stretch *keys)
{
    const backward_fixed *fixed = &w->job->reads[n].fixed;
    int64_t at = first + element[keys->from];
    uint64_t sum = 0; /* of a run of keys of one element */
    for (int32_t j = keys->from; j < keys->past; j++) {
        const double term = factor * (double)dx[j];
        const int64_t next = first + element[j];
        if (next != at) {
            keep(w->job, w->kept, at * BACKWARD_READS + n, sum);
            at = next;
            sum = 0;
        }
        if (fabs(term) < 0x1p62) /* else a live NaN, or an lse that is not these scores' */
            sum += (uint64_t)llrint(term);
        else if (dx[j] != 0)
            atomic_store_explicit(&fixed->is_nan[at], 1, memory_order_relaxed);
    }
    keep(w->job, w->kept, at * BACKWARD_READS + n, sum);
}

void backward_add_fixed(backward_worker *w, uint32_t n, int32_t r0, int32_t rows,
                        uint32_t groups)
{
    const backward_job *job = w->job;
    const backward_fixed *fixed = &job->reads[n].fixed;
    const double factor =
        fixed->scale * backward_factor_of(job, &job->backward->reads[n], w->b, w->h, w->values);
    const cpu_stretch span = backward_span_of(w, groups);
    for (int32_t r = 0; r < rows && groups; r++) {
        const int64_t *element;
        const int64_t first =
            backward_find_elements(w, n, r0 + r, span.from, span.past, fixed->stride, &element);
        cpu_stretch keys;
        for (uint32_t left = groups; backward_take(w, &left, &keys);)
            add_keys(w, n, factor, w->dx + r * LD, first, element, &keys);
    }
}

void backward_end_fixed(const backward_job *job)
{
    for (uint32_t n = 0; n < job->backward->n_reads; n++) {
        const backward_fixed *fixed = &job->reads[n].fixed;
        if (!fixed->sums)
            continue;
        saccade_tensor once = job->gradients->captures[job->backward->reads[n].capture];
        for (int32_t d = 0; d < once.rank; d++)
            once.shape[d] = once.stride[d] ? once.shape[d] : 1;
        tensor_walk walk = {{0}, 0};
        for (int64_t i = 0; i < fixed->count; i++) {
            const double sum = (double)(int64_t)fixed->sums[i] / fixed->scale;
            backward_add_to(&once, walk.place, fixed->is_nan[i] ? (double)NAN : sum);
            tensor_next(&once, once.rank, &walk);
        }
    }
}
