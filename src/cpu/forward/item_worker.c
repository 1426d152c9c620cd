/* What a thread holds of its item: memory, where the item lies, its packed queries. */
#include "cpu/forward/item.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static cpu_worker *memory_of(const cpu_job *job, int thread)
{
    return (cpu_worker *)(void *)(job->threads + (size_t)thread * job->thread_bytes);
}

void cpu_forget_threads(const cpu_job *job)
{
    for (int n = 0; n < job->plan->threads; n++)
        memory_of(job, n)->job = NULL;
}

static void begin_mods(const cpu_job *job, char *base, cpu_worker *w)
{
    const cpu_scratch *at = &job->g.scratch;
    const cpu_state *state = cpu_state_of(job->plan);
    if (state->jit)
        w->code.state = jit_begin(state->jit, &job->run->score_env, &job->run->mask_env,
                                  (float)job->plan->problem.scale, base + at->jit);
    if (state->score)
        w->score.state = eval_begin(state->score, &job->run->score_env, base + at->score);
    if (state->mask)
        w->mask.state = eval_begin(state->mask, &job->run->mask_env, base + at->mask);
}

static void begin(const cpu_job *job, cpu_worker *w)
{
    const cpu_scratch at = job->g.scratch;
    char *base = (char *)w;
    static_assert(sizeof(cpu_worker) <= 1024, "room in front of the scratch");
    *w = (cpu_worker){.job = job, .kernels = cpu_state_of(job->plan)->needs.kernels};
    w->q = base + at.q;
    w->k = base + at.k;
    w->v = base + at.v;
    w->s = (float *)(void *)(base + at.s);
    w->o = (float *)(void *)(base + at.o);
    w->m = (float *)(void *)(base + at.stats);
    w->l = w->m + CPU_MOST_ROWS;
    w->alpha = w->l + CPU_MOST_ROWS;
    w->most = w->alpha + CPU_MOST_ROWS;
    w->own.at.k = base + at.own;
    w->own.at.v = w->own.at.k + (size_t)job->g.own_blocks * job->g.k_bytes;
    w->own.at.nonfinite = base + at.own_nonfinite;
    w->live = (uint8_t *)(base + at.live);
    w->flow = base + at.flow;
    w->row = (float *)(void *)(base + at.row);
    w->ranges = base + at.ranges;
    w->limits.first = (int64_t *)(void *)(base + at.limits);
    w->limits.past = w->limits.first + CPU_MOST_ROWS;
    w->bounds = (double *)(void *)(base + at.values);
    w->sums[0] = (float *)(void *)(base + at.sums);
    w->sums[1] = w->sums[0] + (at.room - at.sums) / 2 / sizeof(float);
    for (int i = 0; i < 2; i++)
        w->room[i] = base + at.room + i * (job->g.scratch.bytes - at.room) / 2;
    begin_mods(job, base, w);
}

cpu_worker *item_worker_of(const cpu_job *job, int thread)
{
    cpu_worker *w = memory_of(job, thread);
    if (w->job != job)
        begin(job, w);
    return w;
}

/* ---- items ---- */

/* Items of a head: splits fastest, then row blocks, then heads of the group. */
cpu_item cpu_item_of(const cpu_job *job, int64_t index)
{
    const cpu_geometry *g = &job->g;
    const saccade_sizes *s = &job->run->sizes;
    const int32_t group = job->plan->problem.group;
    cpu_item item = {.head = index / g->head_items};
    int64_t rest = index % g->head_items;
    item.b = (job->head0 + item.head) / s->Hkv;
    item.g = (job->head0 + item.head) % s->Hkv;
    item.split = rest % g->splits;
    rest /= g->splits;
    cpu_box *box = &item.box;
    box->b = item.b;
    box->i0 = rest % g->row_blocks * g->block_rows;
    box->i1 = box->i0 + g->block_rows < s->Q ? box->i0 + g->block_rows : s->Q;
    box->h0 = item.g * group + rest / g->row_blocks * g->item_heads;
    box->h1 = box->h0 + g->item_heads;
    box->j0 = item.split * g->split_blocks * CPU_BLOCK_KEYS;
    box->j1 = box->j0 + g->split_blocks * CPU_BLOCK_KEYS;
    box->j1 = box->j1 < s->KV ? box->j1 : s->KV;
    return item;
}

kv_view cpu_keys_of(const cpu_job *job, int is_value, int64_t b, int64_t g)
{
    const cpu_kernels *kernels = cpu_state_of(job->plan)->needs.kernels;
    kv_view view = kv_view_as(&job->plan->problem, job->run, is_value, b, g,
                              kernels->dequantise, cpu_dequantised(kernels));
    view.codes.factor = view.rows.dtype == SACCADE_E4M3 ? CPU_E4M3_FACTOR : 1;
    return view;
}

void item_clear_sums(cpu_worker *w, int32_t r0, int32_t n)
{
    for (int32_t r = r0; r < r0 + n; r++) {
        w->m[r] = -INFINITY;
        w->l[r] = 0;
    }
}

void item_clear_rows(cpu_worker *w, int32_t r0, int32_t n)
{
    const int64_t o_ld = w->job->g.o_ld;
    memset(w->o + r0 * o_ld, 0, (size_t)(n * o_ld) * sizeof(float));
    item_clear_sums(w, r0, n);
}

static int64_t shift_of(const plan_rows *rows, int64_t i)
{
    const plan_part *part = rows ? plan_part_of(rows, i) : NULL;
    return part ? part->row - part->first : 0;
}

/* The item's rows, before anything is known of their keys. */
void item_open(cpu_worker *w, const cpu_item *item)
{
    const cpu_box *box = &item->box;
    w->item = *item;
    w->keys = cpu_keys_of(w->job, 0, item->b, item->g);
    w->values = cpu_keys_of(w->job, 1, item->b, item->g);
    w->at = plan_position_of(&w->job->run->positions, w->job->run->sizes.KV, item->b);
    w->rows = (int32_t)((box->i1 - box->i0) * (box->h1 - box->h0));
    w->shift = shift_of(w->job->run->rows, box->i0);
    w->score.head = w->mask.head = w->code.head = -1;
    w->stored = 0;
    w->queries = w->q;
    w->queries_ld = w->job->g.q_ld;
}

void item_pack_queries(const cpu_worker *w, int32_t r0, int32_t n, void *to)
{
    const cpu_job *job = w->job;
    const cpu_box *box = &w->item.box;
    const int32_t each = (int32_t)(box->i1 - box->i0), strip = w->kernels->strip;
    const size_t row_bytes = (size_t)job->g.q_ld * (size_t)w->kernels->element;
    char *at = to;
    for (int32_t r = r0, own; r < r0 + n; r += own, at += (size_t)own * row_bytes) {
        const cpu_rows head = cpu_rows_of(job->run->q, w->item.b, item_head_of(w, r));
        const cpu_rows q = cpu_rows_from(head, item_index_of(w, r) + w->shift);
        own = each - r % each < r0 + n - r ? each - r % each : r0 + n - r;
        w->kernels->pack_rows(&q, own, own, job->g.q_ld, at);
    }
    if (w->kernels->flow && n % strip) /* no rows of chance: they might raise flags */
        memset(at, 0, (size_t)(strip - n % strip) * row_bytes);
}
