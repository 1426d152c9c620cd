/* Ragged runs, on the host: a sequence of one as a run of its own, with tensors that begin
 * at its first row, its own lengths and positions; and whole runs sequence by sequence, for
 * solvers that take no ragged run as a whole. */
#include "plan/plan.h"

#include "base/integers.h"
#include "base/quantize.h"
#include "base/status.h"
#include "base/tensor_walk.h"
#include "plan/gradient_sums.h"

typedef struct span {
    int64_t first, count;
} span;

/* Rows of sequence b, or all of a tensor that is [B, H, n, D]. */
static span span_of(const int32_t *first, int64_t n, int64_t b)
{
    if (!first)
        return (span){0, n};
    return (span){first[b], (int64_t)first[b + 1] - first[b]};
}

static span rows_of(const plan_run *run, int64_t b)
{
    return span_of(run->ragged ? run->ragged->q_first : NULL, run->sizes.Q, b);
}

static span keys_of(const plan_run *run, int64_t b)
{
    return span_of(run->ragged ? run->ragged->kv_first : NULL, run->sizes.KV, b);
}

plan_position plan_position_in(const plan_run *run, int64_t b)
{
    plan_position at = plan_position_of(&run->positions, keys_of(run, b).count, b);
    if (run->ragged && run->ragged->is_end)
        at.q_offset = (int32_t)(at.kv_offset + at.kv_len - rows_of(run, b).count);
    return at;
}

/* Whether K and V are pages, of all sequences. */
static int is_pool(const plan_run *run)
{
    return run->chunks && run->chunks->is_paged;
}

/* t [B, heads, n, D] or [B, heads, n], whose rows are ragged if is_ragged, for sequence b. NULL
 * for NULL. */
static const saccade_tensor *take(const saccade_tensor *t, int64_t b, span rows, int is_ragged,
                                  saccade_tensor *out)
{
    if (!t)
        return NULL;
    *out = *t;
    out->shape[0] = 1;
    const int64_t at = is_ragged ? rows.first * t->stride[2] : b * t->stride[0];
    out->data = (char *)t->data + quant_bytes(t->dtype, at);
    if (is_ragged)
        out->shape[2] = rows.count;
    return out;
}

static const saccade_tensor *take_rows(const plan_run *run, const saccade_tensor *t, int64_t b,
                                       saccade_tensor *out)
{
    return take(t, b, rows_of(run, b), run->ragged && run->ragged->q_first, out);
}

/* All of a pool of pages. */
static const saccade_tensor *take_keys(const plan_run *run, const saccade_tensor *t, int64_t b,
                                       saccade_tensor *out)
{
    if (is_pool(run))
        return t;
    return take(t, b, keys_of(run, b), run->ragged && run->ragged->kv_first, out);
}

/* Scales of K or V: of their rows, where each row has its own. */
static const saccade_tensor *take_scales(const plan_run *run, const saccade_tensor *t,
                                         int64_t b, saccade_tensor *out)
{
    if (!t)
        return NULL;
    *out = *t;
    if (is_pool(run))
        return out;
    int64_t at = t->shape[0] == 1 ? 0 : b * t->stride[0];
    if (run->ragged && run->ragged->kv_first && t->shape[2] > 1)
        at += run->ragged->kv_first[b] * t->stride[2];
    out->data = (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype);
    out->shape[0] = 1;
    return out;
}

static saccade_tensor number(int32_t *value)
{
    return (saccade_tensor){.data = value, .dtype = SACCADE_I32};
}

static void set_env(const plan_run *run, int64_t b, eval_env *env)
{
    env->size[SIZE_Q] = (int32_t)rows_of(run, b).count;
    env->size[SIZE_KV] = (int32_t)keys_of(run, b).count;
    env->b_offset = (int32_t)b;
}

void plan_sequence_of(const plan_run *run, int64_t b, plan_sequence *out)
{
    const plan_position at = plan_position_in(run, b);
    plan_run *own = &out->run;
    *own = *run;
    own->ragged = NULL;
    own->sizes.B = 1;
    own->sizes.Q = rows_of(run, b).count;
    own->sizes.KV = keys_of(run, b).count;
    own->q = take_rows(run, run->q, b, &out->q);
    own->out = take_rows(run, run->out, b, &out->out);
    own->lse = take_rows(run, run->lse, b, &out->lse);
    own->row_max = take_rows(run, run->row_max, b, &out->row_max);
    own->k = take_keys(run, run->k, b, &out->k);
    own->v = take_keys(run, run->v, b, &out->v);
    own->k_scale = take_scales(run, run->k_scale, b, &out->k_scale);
    own->v_scale = take_scales(run, run->v_scale, b, &out->v_scale);
    if (run->sinks.dtype != SACCADE_NONE)
        own->sinks.data =
            (const char *)run->sinks.data
            + b * run->sinks.stride[0] * (int64_t)saccade_dtype_bytes(run->sinks.dtype);
    if (run->chunks) {
        const plan_entries entries = plan_entries_of(run->chunks, b);
        out->chunks = *run->chunks;
        out->chunks.first = entries.first;
        out->chunks.count = entries.count;
        out->chunks.start = NULL;
        own->chunks = &out->chunks;
    }
    out->q_offset = at.q_offset;
    out->kv_offset = at.kv_offset;
    out->kv_len = (int32_t)at.kv_len;
    own->positions = (plan_positions){.q_offset = number(&out->q_offset),
                                      .kv_offset = number(&out->kv_offset),
                                      .kv_len = number(&out->kv_len)};
    set_env(run, b, &own->score_env);
    set_env(run, b, &own->mask_env);
}

/* ---- sequence by sequence ---- */

saccade_status plan_forward_rows(const saccade_plan *plan, const plan_run *run,
                                 saccade_error *err)
{
    if (!run->ragged || plan->solver->takes_ragged)
        return plan->solver->forward(plan, run, err);
    for (int64_t b = 0; b < run->sizes.B; b++) {
        plan_sequence sequence;
        plan_sequence_of(run, b, &sequence);
        if (sequence.run.sizes.Q > 0)
            TRY(plan->solver->forward(plan, &sequence.run, err));
    }
    return SACCADE_OK;
}

static void clear_unless(const saccade_tensor *t, uint32_t is_added)
{
    if (t && !is_added && t->shape[2] > 0)
        tensor_clear(t);
}

/* Bytes of a pool's gradient in f32, whole lines of them; 0 where sequences add to the gradient
 * itself. */
static size_t sum_room(const saccade_tensor *t)
{
    double bytes = sizeof(float);
    if (!t || (t->dtype != SACCADE_F16 && t->dtype != SACCADE_BF16))
        return 0;
    for (int32_t d = 0; d < t->rank; d++)
        bytes *= (double)t->shape[d];
    return bytes < TENSOR_MOST_REACH ? ((size_t)bytes + 63) / 64 * 64 : SIZE_MAX;
}

size_t plan_pool_room(const saccade_plan *plan, const plan_gradients *gradients)
{
    const plan_problem *p = &plan->problem;
    if (!gradients || !p->is_ragged || !p->page || plan->solver->takes_ragged_backward)
        return 0;
    return sum_bytes(sum_room(gradients->dk), sum_room(gradients->dv));
}

/* Gradients that sequences add to: a pool's of 16 bits, which many sequences may share, are
 * summed in f32 at the front of the workspace and rounded once. */
typedef struct pool_sums {
    plan_run run; /* with the rest of the workspace */
    plan_gradients gradients;
    saccade_tensor dk, dv;
} pool_sums;

static const saccade_tensor *begin_sum(const saccade_tensor *t, plan_run *run,
                                       saccade_tensor *sum)
{
    const size_t bytes = sum_room(t);
    if (!bytes)
        return t;
    *sum = saccade_tensor_of(run->workspace, SACCADE_F32, t->rank, t->shape);
    run->workspace = (char *)run->workspace + bytes;
    run->workspace_bytes -= bytes;
    return sum;
}

static void begin_sums(const plan_run *run, const plan_gradients *gradients, pool_sums *s)
{
    s->run = *run;
    s->gradients = *gradients;
    if (!is_pool(run))
        return;
    s->gradients.dk = begin_sum(gradients->dk, &s->run, &s->dk);
    s->gradients.dv = begin_sum(gradients->dv, &s->run, &s->dv);
    if (s->gradients.dk == &s->dk)
        s->gradients.added &= ~(uint32_t)SACCADE_GRADIENT_K;
    if (s->gradients.dv == &s->dv)
        s->gradients.added &= ~(uint32_t)SACCADE_GRADIENT_V;
    clear_unless(s->gradients.dk, s->gradients.added & SACCADE_GRADIENT_K);
    clear_unless(s->gradients.dv, s->gradients.added & SACCADE_GRADIENT_V);
}

static void end_sums(const saccade_plan *plan, const plan_gradients *gradients,
                     const pool_sums *s)
{
    if (s->gradients.dk == &s->dk)
        plan_sum_repeated(&s->dk, gradients->dk, (gradients->added & SACCADE_GRADIENT_K) != 0,
                          plan->threads);
    if (s->gradients.dv == &s->dv)
        plan_sum_repeated(&s->dv, gradients->dv, (gradients->added & SACCADE_GRADIENT_V) != 0,
                          plan->threads);
}

/* Gradients of one sequence, those of captures and sinks on top of the others'. */
static saccade_status one_backward(const saccade_plan *plan, const plan_run *run,
                                   const plan_gradients *all, int64_t b, saccade_error *err)
{
    plan_sequence sequence;
    saccade_tensor d_out, d_lse, dq, dk, dv, sinks;
    plan_gradients own = *all;
    plan_sequence_of(run, b, &sequence);
    own.d_out = take_rows(run, all->d_out, b, &d_out);
    own.d_lse = take_rows(run, all->d_lse, b, &d_lse);
    own.dq = take_rows(run, all->dq, b, &dq);
    own.dk = take_keys(run, all->dk, b, &dk);
    own.dv = take_keys(run, all->dv, b, &dv);
    own.added |= SACCADE_GRADIENT_CAPTURES | SACCADE_GRADIENT_SINKS;
    if (is_pool(run))
        own.added |= SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    if (all->sinks) {
        sinks = *all->sinks;
        if (sinks.rank == 3 && sinks.shape[0] > 1) {
            sinks.data = (char *)sinks.data
                         + b * sinks.stride[0] * (int64_t)saccade_dtype_bytes(sinks.dtype);
            sinks.shape[0] = 1;
        }
        own.sinks = &sinks;
    }
    if (sequence.run.sizes.Q > 0 && (sequence.run.sizes.KV > 0 || all->sinks))
        return plan->solver->backward(plan, &sequence.run, &own, err);
    clear_unless(own.dq, all->added & SACCADE_GRADIENT_Q);
    clear_unless(own.dk, own.added & SACCADE_GRADIENT_K);
    clear_unless(own.dv, own.added & SACCADE_GRADIENT_V);
    return SACCADE_OK;
}

saccade_status plan_backward(const saccade_plan *plan, const plan_run *run,
                             const plan_gradients *gradients, saccade_error *err)
{
    pool_sums s;
    if (!run->ragged || plan->solver->takes_ragged_backward)
        return plan->solver->backward(plan, run, gradients, err);
    for (int i = 0; i < MOD_MAX_CAPTURES; i++)
        if ((plan->problem.gradient_captures >> i & 1)
            && !(gradients->added & SACCADE_GRADIENT_CAPTURES))
            tensor_clear(&gradients->captures[i]);
    if (gradients->sinks && !(gradients->added & SACCADE_GRADIENT_SINKS))
        tensor_clear(gradients->sinks);
    begin_sums(run, gradients, &s);
    for (int64_t b = 0; b < run->sizes.B; b++)
        TRY(one_backward(plan, &s.run, &s.gradients, b, err));
    end_sums(plan, gradients, &s);
    return SACCADE_OK;
}
