/* One item of work: a block of query rows against its live blocks of keys, FlashAttention-2's
 * loop (arXiv 2307.08691, algorithm 1) with O, m and l of the whole block held by one thread.
 * Blocks are taken one by one (item_blocks.c) or, most on AMX, by streams (item_flow.c).
 * Split items leave (O, m, l); the one that ends last adds them up, in order of keys. Where a
 * row's bits follow from it alone, an item adds up ranges of keys of one length likewise, and
 * rows that have to be made again leave the others as they are. */
#include "cpu/forward/item.h"

#include "base/quantize.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

static void find_limits(cpu_worker *w)
{
    const int32_t each = (int32_t)(w->item.box.i1 - w->item.box.i0);
    for (int32_t r = 0; r < w->rows; r += each) {
        const eval_point row = {(int32_t)w->item.b, (int32_t)item_head_of(w, r),
                                (int32_t)item_index_of(w, r) + w->at.q_offset, 0, 0};
        cpu_find_limits(w->job->live.limits, w->job->run, &row, each, w->at.kv_offset,
                        w->bounds, &w->limits, r);
    }
    cpu_limit_rows(&w->limits, 0, w->rows);
}

/* Rows that packing would leave as they are, of one head and not so far apart that those of a
 * strip share places of a cache, are read where they lie. */
static int take_queries(cpu_worker *w)
{
    enum { NEAR = 1024 }; /* bytes */
    const cpu_kernels *k = w->kernels;
    const cpu_rows head = cpu_rows_of(w->job->run->q, w->item.b, item_head_of(w, 0));
    const cpu_rows q = cpu_rows_from(head, item_index_of(w, 0) + w->shift);
    if (q.dtype != SACCADE_F32 || k->element != 4 || k->flow || w->job->g.is_decode
        || w->job->g.item_heads > 1 || q.stride < 0 || q.stride > NEAR || q.stride % 4
        || (uintptr_t)q.base % sizeof(float))
        return 0;
    w->queries = q.base;
    w->queries_ld = (int32_t)(q.stride / 4);
    return 1;
}

/* Queries of decode items are packed a second time, as decode_qk takes them. The first packing
 * goes to the memory for packed keys, which decode leaves alone. */
static void pack_queries(cpu_worker *w)
{
    const cpu_kernels *k = w->kernels;
    const int is_twice = w->job->g.is_decode && k->pack_decode;
    item_pack_queries(w, 0, w->rows, is_twice ? w->k : w->q);
    if (is_twice)
        k->pack_decode(w->k, w->job->g.q_ld, w->rows, (int32_t)w->job->run->q->shape[3], w->q);
    w->queries = w->q;
    w->queries_ld = w->job->g.q_ld;
}

static void run_keys(cpu_worker *w, int64_t begin, int64_t end)
{
    if (item_can_stream(w)) {
        item_run_streams(w, begin, end);
        return;
    }
    if (!take_queries(w))
        pack_queries(w);
    item_clear_rows(w, 0, w->rows);
    const int64_t first = begin / CPU_BLOCK_KEYS, past = (end - 1) / CPU_BLOCK_KEYS + 1;
    if (w->job->is_local && begin < end && past - first <= w->job->g.own_blocks)
        item_packed(w, first, past); /* those that the next item needs too stay */
    item_run_blocks(w, begin, end, 0, w->rows);
}

/* Keys of the item that some row may see. */
static void find_keys(cpu_worker *w, int64_t *begin, int64_t *end)
{
    const cpu_box *box = &w->item.box;
    *begin = box->j0;
    *end = box->j1 < w->at.kv_len ? box->j1 : w->at.kv_len;
    if (w->job->live.by != CPU_BY_LIMITS)
        return;
    find_limits(w);
    const int64_t first = w->limits.any_first / CPU_BLOCK_KEYS * CPU_BLOCK_KEYS;
    *begin = first > *begin ? first : *begin;
    *end = w->limits.any_past < *end ? w->limits.any_past : *end;
}

static void run_item(cpu_worker *w, int64_t begin, int64_t end)
{
    if (w->kernels->begin)
        w->kernels->begin();
    run_keys(w, begin, end);
    if (w->kernels->end)
        w->kernels->end();
}

static int has_nan(const cpu_worker *w)
{
    for (int32_t r = 0; r < w->rows; r++)
        if (isnan(w->l[r]))
            return 1;
    return 0;
}

/* Runs the item; if a row comes out NaN, runs it again with the careful kernels. */
static void run_soundly(cpu_worker *w, int64_t begin, int64_t end)
{
    const cpu_item item = w->item;
    const cpu_kernels *quick = w->kernels;
    const int is_invariant = w->job->plan->problem.is_invariant;
    const int32_t o_ld = w->job->g.o_ld;
    run_item(w, begin, end);
    if (!quick->careful || !has_nan(w))
        return;
    if (is_invariant)
        item_copy_sums(w, w->sums[1]);
    w->kernels = quick->careful;
    item_open(w, &item);
    run_item(w, begin, end);
    if (!is_invariant)
        return;
    const float *before = w->sums[1], *l = before + w->rows, *o = l + w->rows;
    for (int32_t r = 0; r < w->rows; r++) {
        if (isnan(l[r]))
            continue;
        w->m[r] = before[r];
        w->l[r] = l[r];
        memcpy(w->o + (int64_t)r * o_ld, o + (int64_t)r * o_ld, (size_t)o_ld * sizeof *o);
    }
}

/* Keys [begin, end) by ranges that begin at multiples of one length. */
static void run_ranges(cpu_worker *w, int64_t begin, int64_t end)
{
    const int64_t keys = w->job->g.turn_blocks * CPU_BLOCK_KEYS;
    const cpu_kernels *quick = w->kernels;
    int64_t past = (begin / keys + 1) * keys;
    run_soundly(w, begin, past < end ? past : end);
    for (; past < end; past += keys) {
        item_copy_sums(w, w->sums[0]);
        w->kernels = quick;
        run_soundly(w, past, past + keys < end ? past + keys : end);
        item_copy_sums(w, w->sums[1]);
        item_take_sums(w, w->sums[0]);
        for (int32_t r = 0; r < w->rows; r++)
            item_add_part(w, w->sums[1], r);
    }
}

static void run_rows(const cpu_job *job, int64_t index, int thread)
{
    const cpu_item item = cpu_item_of(job, index);
    cpu_worker *w = item_worker_of(job, thread);
    const cpu_kernels *quick = cpu_state_of(job->plan)->needs.kernels;
    const int64_t rows = (item.box.h1 - item.box.h0) * (item.box.i1 - item.box.i0);
    const int is_coded = quant_is_dtype(job->plan->problem.kv_dtype);
    const int is_few =
        job->g.is_decode && rows <= (is_coded ? quick->few_coded_rows : quick->few_rows);
    int64_t begin, end;
    item_open(w, &item);
    find_keys(w, &begin, &end);
    if (job->g.splits > 1 && begin >= end) {
        item_keep_nothing(w, index);
        return;
    }
    w->kernels = is_few ? quick->few : quick;
    if (job->g.turn_blocks)
        run_ranges(w, begin, end);
    else
        run_soundly(w, begin, end);
    if (job->g.splits > 1) {
        item_keep_partial(w, index);
        return;
    }
    item_store(w);
}

/* Adds up the splits of a block of rows, in order of keys. */
static void merge_splits(const cpu_job *job, int64_t at, int thread)
{
    const cpu_item item = cpu_item_of(job, at * job->g.splits);
    cpu_worker *w = item_worker_of(job, thread);
    w->kernels = cpu_state_of(job->plan)->needs.kernels; /* not the last item's */
    item_open(w, &item);
    item_clear_rows(w, 0, w->rows);
    for (int64_t n = 0; n < job->g.splits; n++)
        for (int32_t r = 0; r < w->rows; r++)
            item_add_part(w, item_partial_of(job, at * job->g.splits + n), r);
    item_store(w);
}

void cpu_run_item(const cpu_job *job, int64_t index, int thread)
{
    const int64_t rows = index / job->g.splits;
    run_rows(job, index, thread);
    if (job->g.splits > 1 && atomic_fetch_sub(&job->left[rows], 1) == 1)
        merge_splits(job, rows, thread);
}
