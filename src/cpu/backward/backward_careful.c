/* Kernels on sums of two parts take no infinities and no NaN: runs look for them first. */
#include "cpu/backward/backward.h"

#include "base/integers.h"
#include "base/parallel.h"

cpu_backward_plan backward_careful_of(const cpu_backward_plan *backward)
{
    cpu_backward_plan careful = *backward;
    if (backward->kernels->careful)
        careful.kernels = backward->kernels->careful;
    return careful;
}

/* Of f16, the one dtype whose kernels have careful ones. */
static int any_nonfinite(const cpu_rows *rows, int64_t n)
{
    unsigned found = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t *row = (const uint16_t *)(const void *)(rows->base + i * rows->stride);
        for (int32_t d = 0; d < rows->dim; d++)
            found |= (row[d] & 0x7c00) == 0x7c00;
    }
    return found != 0;
}

static void look_at(backward_job *job, const cpu_rows *rows, int64_t n)
{
    if (any_nonfinite(rows, n))
        atomic_store_explicit(&job->has_nonfinite, 1, memory_order_relaxed);
}

/* par_fn over (batch, head, block of rows). */
static void look_at_rows(void *arg, int64_t index, int thread)
{
    backward_job *job = arg;
    const plan_run *run = job->run;
    const int64_t head = index / job->g.row_blocks, b = head / run->sizes.H;
    const int64_t h = head % run->sizes.H, i0 = index % job->g.row_blocks * job->g.rows;
    const plan_part *part = run->rows ? plan_part_of(run->rows, i0) : NULL;
    (void)thread;
    if (run->rows && !part)
        return;
    const int64_t at = part ? part->row + i0 - part->first : i0;
    const int64_t n = smaller(run->sizes.Q - i0, job->g.rows);
    const cpu_rows q = cpu_rows_from(cpu_rows_of(run->q, b, h), at);
    const cpu_rows o = cpu_rows_from(cpu_rows_of(job->gradients->d_out, b, h), at);
    look_at(job, &q, n);
    look_at(job, &o, n);
}

/* par_fn over (batch, kv head, block of keys). */
static void look_at_keys(void *arg, int64_t index, int thread)
{
    backward_job *job = arg;
    const plan_run *run = job->run;
    const int64_t head = index / job->g.key_blocks, b = head / run->sizes.Hkv;
    const int64_t g = head % run->sizes.Hkv, j0 = index % job->g.key_blocks * job->g.keys;
    const int64_t kv_len = plan_position_of(&run->positions, run->sizes.KV, b).kv_len;
    const int64_t n = smaller(kv_len - j0, job->g.keys);
    backward_worker *w = backward_worker_of(job, thread);
    if (n <= 0)
        return;
    const kv_view k = kv_view_of(run, run->k, b, g), v = kv_view_of(run, run->v, b, g);
    const cpu_rows keys = kv_block(&k, j0, n, w->k_room),
                   values = kv_block(&v, j0, n, w->v_room);
    look_at(job, &keys, n);
    look_at(job, &values, n);
}

int backward_has_nonfinite(backward_job *job)
{
    const saccade_sizes *s = &job->run->sizes;
    if (!job->backward->kernels->careful)
        return 0;
    atomic_init(&job->has_nonfinite, 0);
    par_for(s->B * s->H * job->g.row_blocks, job->threads, look_at_rows, job);
    par_for(job->g.heads * job->g.key_blocks, job->threads, look_at_keys, job);
    return atomic_load(&job->has_nonfinite);
}
