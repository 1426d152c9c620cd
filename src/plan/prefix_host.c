/* Batches that share keys, on the host: the lists of the two runs, and their results merged in
 * double, as saccade_merge does. */
#include "plan/prefix.h"

#include "base/convert.h"
#include "base/parallel.h"

#include <math.h>

/* Groups rise, as those on the host do: pieces and batches are met in their order. */
void plan_write_prefix(const prefix_lists *l)
{
    int i = 0, g = 0;
    for (int n = 0; n < l->n; n++) {
        const int pieces = prefix_pieces(l, n);
        for (int k = 0; k < pieces; k++, i++)
            prefix_write_piece(l, i, (prefix_piece){prefix_row(l, n) + k * l->piece, n}, 0, 1);
    }
    for (; i <= l->pieces; i++)
        prefix_write_piece(l, i, (prefix_piece){prefix_row(l, l->n), -1}, 0, 1);
    for (int b = 0; b < l->B; b++) {
        while (g < l->n && b >= l->groups[g + 1])
            g++;
        prefix_write_rest(l, b, g < l->n && b >= l->groups[g] ? g : -1, 0, 1);
    }
}

typedef struct merge_job {
    const plan_parts *parts;
    const plan_run *run;
} merge_job;

static int64_t place(const saccade_tensor *t, int64_t b, int64_t h, int64_t i)
{
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
}

static double load(const saccade_tensor *t, int64_t at)
{
    return convert_element(t->dtype,
                           (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

static void put(const saccade_tensor *t, int64_t at, double x)
{
    convert_to_element(t->dtype, x,
                       (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

/* Whether row i of batch b has the part; a row of no group has no shared keys. */
static int has_part(const plan_run *run, int part, int64_t b)
{
    const plan_prefix *p = run->prefix;
    return part || (b >= p->groups[0] && b < p->groups[p->n]);
}

static void merge_row(void *arg, int64_t item, int thread)
{
    const merge_job *job = arg;
    const plan_run *run = job->run;
    const plan_parts *p = job->parts;
    const int64_t Q = run->sizes.Q, H = run->sizes.H;
    const int64_t b = item / Q / H, h = item / Q % H, i = item % Q;
    double lse[2], weight[2], most = -INFINITY, top = -INFINITY;
    (void)thread;
    for (int n = 0; n < 2; n++) {
        const int64_t at = place(&p->lse[n], b, h, i);
        const double max = has_part(run, n, b) && p->has_max ? load(&p->max[n], at) : -INFINITY;
        lse[n] = has_part(run, n, b) ? load(&p->lse[n], at) : -INFINITY;
        most = lse[n] > most || isnan(lse[n]) ? lse[n] : most;
        top = max > top || isnan(max) ? max : top;
    }
    if (most == INFINITY)
        most = NAN;
    for (int n = 0; n < 2; n++)
        weight[n] = lse[n] == -INFINITY ? 0 : exp(lse[n] - most);
    const double sum = most == -INFINITY ? 1 : weight[0] + weight[1];
    for (int64_t d = 0; d < run->sizes.Dv; d++) {
        double x = 0;
        for (int n = 0; n < 2; n++)
            if (lse[n] != -INFINITY)
                x += weight[n] * load(&p->out[n], place(&p->out[n], b, h, i) + d);
        put(run->out, place(run->out, b, h, i) + d, x / sum);
    }
    if (run->lse)
        put(run->lse, place(run->lse, b, h, i), most + log(sum));
    if (run->row_max)
        put(run->row_max, place(run->row_max, b, h, i), top);
}

void plan_merge_prefix(const plan_parts *parts, const plan_run *run, int threads)
{
    merge_job job = {parts, run};
    par_for(run->sizes.B * run->sizes.H * run->sizes.Q, threads, merge_row, &job);
}
