/* The oracle's gradients as the solver "ref" gives them: float64 throughout, rounded once into
 * the caller's tensors. Forward's out and lse are not read: rows are made again. */
#include "ref/rows.h"

#include "base/convert.h"
#include "base/status.h"
#include "base/tensor_walk.h"
#include "plan/gradient_sums.h"

#include <stdlib.h>
#include <string.h>

/* Row-major doubles, one block of memory for all. */
typedef struct gradient_room {
    double *d_out, *d_lse, *dq, *dk, *dv, *captures[MOD_MAX_CAPTURES];
    double *sinks; /* [B][H][Q] */
    double *memory;
    uint64_t *sorted; /* plan_sum_chunks's */
    int threads;
} gradient_room;

static int64_t count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++)
        n *= t->shape[d];
    return n;
}

/* Calls use(t, place, &dense[i]) for each element in row-major order. */
static void for_each(const saccade_tensor *t, double *dense,
                     void (*use)(const saccade_tensor *t, int64_t place, double *x))
{
    tensor_walk walk = {{0}, 0};
    do
        use(t, walk.place, dense++);
    while (tensor_next(t, t->rank, &walk));
}

static double element(const saccade_tensor *t, int64_t place)
{
    return convert_element(t->dtype, (const char *)t->data
                                         + place * (int64_t)saccade_dtype_bytes(t->dtype));
}

static void read(const saccade_tensor *t, int64_t place, double *x)
{
    *x = element(t, place);
}

/* Counts the elements of a tensor of t's shape, if there is one; with memory, gives them a
 * place and zeros. */
static void place(const saccade_tensor *t, double *memory, int64_t *n, double **out)
{
    const int64_t own = t ? count(t) : 0;
    if (memory && own) {
        *out = memory + *n;
        memset(*out, 0, (size_t)own * sizeof **out);
    }
    *n += own;
}

/* K or V by its logical keys, which lie in `rows`. */
static saccade_tensor keys_of(const saccade_tensor *rows, const saccade_sizes *s)
{
    saccade_tensor keys = *rows;
    keys.shape[0] = s->B;
    keys.shape[2] = s->KV;
    return keys;
}

/* Elements of all; with memory, their places. dq, dk and dv are made whether wanted or not. */
static int64_t lay_out(const plan_run *run, const plan_gradients *g, uint64_t wanted,
                       gradient_room *room)
{
    const saccade_tensor k = keys_of(run->k, &run->sizes), v = keys_of(run->v, &run->sizes);
    int64_t n = 0;
    place(g->d_out, room->memory, &n, &room->d_out);
    place(g->d_lse, room->memory, &n, &room->d_lse);
    place(run->q, room->memory, &n, &room->dq);
    place(&k, room->memory, &n, &room->dk);
    place(&v, room->memory, &n, &room->dv);
    for (int i = 0; i < MOD_MAX_CAPTURES; i++)
        if (wanted >> i & 1)
            place(&g->captures[i], room->memory, &n, &room->captures[i]);
    if (g->sinks) {
        room->sinks = room->memory ? room->memory + n : NULL;
        n += run->sizes.B * run->sizes.H * run->sizes.Q;
    }
    if (room->memory)
        room->sorted = (uint64_t *)(void *)(room->memory + n);
    return n + (run->chunks ? (int64_t)(plan_sum_room(&run->sizes) / sizeof(double)) : 0);
}

/* dense: row-major, of t's shape but for the keys of chunks. */
static void store(const gradient_room *room, const plan_run *run, const plan_chunks *chunks,
                  const saccade_tensor *t, double *dense, uint32_t is_added)
{
    int64_t shape[SACCADE_MAX_RANK];
    if (!t)
        return;
    memcpy(shape, t->shape, sizeof shape);
    if (chunks) {
        shape[0] = run->sizes.B;
        shape[2] = run->sizes.KV;
    }
    const saccade_tensor each = saccade_tensor_of(dense, SACCADE_F64, t->rank, shape);
    plan_sum_places(&each, chunks, room->sorted, t, is_added != 0, room->threads);
}

typedef struct sink_terms {
    const saccade_sizes *sizes;
    const double *each;
} sink_terms;

static double sink_term(const void *of, int64_t b, int64_t h, int64_t i)
{
    const sink_terms *t = of;
    return t->each[(b * t->sizes->H + h) * t->sizes->Q + i];
}

size_t ref_backward_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                              const plan_gradients *gradients)
{
    (void)plan;
    (void)sizes;
    (void)gradients;
    return 0; /* ref_backward takes its memory itself */
}

saccade_status ref_backward_solve(const saccade_plan *plan, const plan_run *run,
                                  const plan_gradients *g, saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    saccade_status status = SACCADE_OK;
    gradient_room room = {.threads = plan->threads};
    TRY(ref_check_block_mask(run, err));
    TRY(plan_check_places(run, err));
    room.memory = malloc((size_t)lay_out(run, g, p->gradient_captures, &room) * sizeof(double));
    FAIL_IF_NULL(room.memory);
    lay_out(run, g, p->gradient_captures, &room);
    for_each(g->d_out, room.d_out, read);
    if (g->d_lse)
        for_each(g->d_lse, room.d_lse, read);
    TRY_GOTO(ref_backward(p, run, room.d_out, room.d_lse, room.dq, room.dk, room.dv, err));
    TRY_GOTO(ref_backward_captures(p, run, room.d_out, room.d_lse, room.captures, err));
    if (g->sinks) {
        TRY_GOTO(ref_backward_sinks(p, run, room.d_out, room.d_lse, room.sinks, err));
        plan_sum_sinks(run, g, sink_term, &(sink_terms){&run->sizes, room.sinks}, 1);
    }
    store(&room, run, NULL, g->dq, room.dq, g->added & SACCADE_GRADIENT_Q);
    store(&room, run, run->chunks, g->dk, room.dk, g->added & SACCADE_GRADIENT_K);
    store(&room, run, run->chunks, g->dv, room.dv, g->added & SACCADE_GRADIENT_V);
    for (int i = 0; i < MOD_MAX_CAPTURES; i++)
        if (room.captures[i])
            store(&room, run, NULL, &g->captures[i], room.captures[i],
                  g->added & SACCADE_GRADIENT_CAPTURES);
out:
    free(room.memory);
    return status;
}
