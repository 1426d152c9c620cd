/* Gradients that are not made where they belong: those of Q, K and V with dimensions of stride
 * 0 or with keys in chunks are made place by place in f32 and added up after all items
 * (plan/gradient_sums.h); those of captures in f16 and bf16 are summed in f32 and rounded once,
 * unless each element has one term (backward_stored.c).
 * Their room lies behind the run's other memory. */
#include "cpu/backward/backward.h"

#include "base/convert.h"
#include "base/parallel.h"
#include "base/tensor_walk.h"
#include "cpu/schedule/layout.h"
#include "plan/gradient_sums.h"

#include <string.h>

/* ---- Q, K, V ---- */

static void shape_of(const saccade_sizes *s, int which, int64_t shape[4])
{
    shape[0] = s->B;
    shape[1] = which == 0 ? s->H : s->Hkv;
    shape[2] = which == 0 ? s->Q : s->KV;
    shape[3] = which == 2 ? s->Dv : s->D;
}

static size_t each_bytes(const saccade_sizes *s, int which)
{
    int64_t shape[4];
    shape_of(s, which, shape);
    return bytes64(shape[0] * shape[1] * shape[2] * shape[3], sizeof(float));
}

static const uint32_t bits[] = {SACCADE_GRADIENT_Q, SACCADE_GRADIENT_K, SACCADE_GRADIENT_V};

static const saccade_tensor *gradient_of(const plan_gradients *g, int which)
{
    return which == 0 ? g->dq : which == 1 ? g->dk : g->dv;
}

static int is_each(const saccade_plan *plan, const cpu_backward_plan *b,
                   const plan_gradients *g, int which)
{
    const saccade_tensor *t = g ? gradient_of(g, which) : NULL;
    if (!(which == 0 ? b->has_dq : which == 1 ? b->has_dk : b->has_dv))
        return 0;
    return (plan->problem.has_chunks && which > 0) || (t && plan_is_repeated(t));
}

/* ---- captures ---- */

static int is_narrow(const saccade_tensor *t)
{
    return t->dtype != SACCADE_F32;
}

/* In f32, row-major over the dimensions whose stride is not 0. */
static saccade_tensor widened(const saccade_tensor *t, size_t *bytes)
{
    saccade_tensor wide = *t;
    int64_t n = 1;
    wide.dtype = SACCADE_F32;
    for (int32_t d = t->rank - 1; d >= 0; d--) {
        wide.stride[d] = t->stride[d] ? n : 0;
        n *= tensor_places(t, d);
    }
    *bytes = bytes64(n, sizeof(float));
    return wide;
}

/* Of two tensors of one shape, one of them in f32; dimensions of stride 0 are those of both. */
typedef struct copy_job {
    const saccade_tensor *from, *to;
    int64_t length; /* of a line, along the last dimension */
} copy_job;

static char *place_of(const saccade_tensor *t, int64_t at)
{
    return (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype);
}

static void copy_elements(const copy_job *job, int64_t x, int64_t y, int64_t n)
{
    const saccade_tensor *from = job->from, *to = job->to;
    if (to->dtype == SACCADE_F32)
        convert_to_f32(from->dtype, place_of(from, x), (float *)(void *)place_of(to, y), n);
    else
        convert_from_f32(to->dtype, (const float *)(const void *)place_of(from, x),
                         place_of(to, y), n);
}

/* par_fn over lines. */
static void copy_line(void *arg, int64_t index, int thread)
{
    const copy_job *job = arg;
    const saccade_tensor *from = job->from, *to = job->to;
    const int32_t last = to->rank - 1;
    int64_t x = 0, y = 0;
    (void)thread;
    for (int32_t d = last - 1; d >= 0; d--)
        if (to->stride[d]) {
            x += index % to->shape[d] * from->stride[d];
            y += index % to->shape[d] * to->stride[d];
            index /= to->shape[d];
        }
    if (job->length > 1 && (from->stride[last] != 1 || to->stride[last] != 1))
        for (int64_t n = 0; n < job->length; n++)
            copy_elements(job, x + n * from->stride[last], y + n * to->stride[last], 1);
    else
        copy_elements(job, x, y, job->length);
}

static void copy(const saccade_tensor *from, const saccade_tensor *to, int threads)
{
    const int32_t last = to->rank - 1;
    copy_job job = {from, to, last >= 0 ? tensor_places(to, last) : 1};
    int64_t lines = 1;
    for (int32_t d = 0; d < last; d++)
        lines *= tensor_places(to, d);
    par_for(lines, threads, copy_line, &job);
}

/* ---- a run's ---- */

/* memory NULL: bytes alone. */
static size_t lay_out_places(const saccade_plan *plan, const cpu_backward_plan *b,
                             const saccade_sizes *s, const plan_gradients *g, char *memory,
                             backward_places *out)
{
    size_t end = 0;
    for (int which = 0; which < 3; which++) {
        int64_t shape[4];
        if (!is_each(plan, b, g, which))
            continue;
        shape_of(s, which, shape);
        if (memory)
            out->each[which] = saccade_tensor_of(memory + end, SACCADE_F32, 4, shape);
        end += each_bytes(s, which);
    }
    if (memory)
        out->sorted = (uint64_t *)(void *)(memory + end);
    end += plan->problem.has_chunks ? bytes64((int64_t)plan_sum_room(s), 1) : 0;
    for (int c = 0; g && c < MOD_MAX_CAPTURES; c++) {
        size_t bytes;
        if (!(b->captures >> c & 1) || !is_narrow(&g->captures[c]))
            continue;
        const saccade_tensor wide = widened(&g->captures[c], &bytes);
        if (memory) {
            out->captures[c] = wide;
            out->captures[c].data = memory + end;
        }
        end += bytes;
    }
    return end;
}

size_t backward_places_bytes(const saccade_plan *plan, const cpu_backward_plan *backward,
                             const saccade_sizes *sizes, const plan_gradients *gradients)
{
    return lay_out_places(plan, backward, sizes, gradients, NULL, NULL);
}

void backward_begin_places(const saccade_plan *plan, const cpu_backward_plan *backward,
                           const plan_run *run, const plan_gradients *gradients, char *memory,
                           backward_places *out)
{
    plan_gradients *made = &out->made;
    const saccade_tensor **const tensors[] = {&made->dq, &made->dk, &made->dv};
    memset(out, 0, sizeof *out);
    *made = *gradients;
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        if (backward->captures >> c & 1)
            out->captures[c] = gradients->captures[c];
    lay_out_places(plan, backward, &run->sizes, gradients, memory, out);
    made->captures = out->captures;
    for (int which = 0; which < 3; which++)
        if (out->each[which].data) {
            *tensors[which] = &out->each[which];
            made->added &= ~bits[which];
        }
    for (int c = 0; c < MOD_MAX_CAPTURES && made->added & SACCADE_GRADIENT_CAPTURES; c++)
        if (backward->captures >> c & 1 && is_narrow(&gradients->captures[c]))
            copy(&gradients->captures[c], &out->captures[c], plan->threads);
}

void backward_end_places(const saccade_plan *plan, const cpu_backward_plan *backward,
                         const plan_run *run, const plan_gradients *gradients,
                         const backward_places *places)
{
    for (int which = 0; which < 3; which++)
        if (places->each[which].data)
            plan_sum_places(&places->each[which], which ? run->chunks : NULL, places->sorted,
                            gradient_of(gradients, which),
                            (gradients->added & bits[which]) != 0, plan->threads);
    for (int c = 0; c < MOD_MAX_CAPTURES; c++)
        if (backward->captures >> c & 1
            && places->captures[c].data != gradients->captures[c].data)
            copy(&places->captures[c], &gradients->captures[c], plan->threads);
}
