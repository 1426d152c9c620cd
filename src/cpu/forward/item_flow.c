/* An item by flows (flow.h). Keys are taken in chunks that stay in L2, and in each chunk
 * all strips of rows take their steps. Blocks that a flow cannot take run one by one, as in
 * item.c. At the end the sums of each row are checked: strips whose anchors were too far from
 * their maxima are computed again, block by block. */
#include "cpu/forward/item.h"

#include "cpu/flow/flow_run.h"

#include <math.h>
#include <string.h>

/* Packed K and V of a chunk, which all strips of an item read in turn: half of a second-level
 * cache. */
enum { STREAM_BYTES = 1 << 20 };
enum {
    CHUNK_STEPS = JIT_COLS / FLOW_KEYS,
    STEPS_OF_BLOCK = CPU_BLOCK_KEYS / FLOW_KEYS,
    STRIPS = CPU_MOST_ROWS / FLOW_ROWS,
    SQUARE_KEYS = FLOW_KEYS / FLOW_SQUARES,
};

int item_can_stream(const cpu_worker *w)
{
    const cpu_job *job = w->job;
    return cpu_state_of(job->plan)->code && w->kernels->flow && job->g.is_shared
           && (!w->score.state || w->code.state) && !job->run->row_max
           && !job->run->dropout.is_on && job->plan->problem.scale > 0;
}

static int32_t strip_rows(const cpu_worker *w, int32_t r0)
{
    const int32_t strip = w->kernels->strip;
    return w->rows - r0 < strip ? w->rows - r0 : strip;
}

/* Whether all, some or none of a strip's positions with keys [j0, j1) are live. */
static cpu_cover strip_cover(const cpu_worker *w, const cpu_limits *limits, int32_t r0,
                             int64_t j0, int64_t j1)
{
    const cpu_box box = item_box_of(w, r0, strip_rows(w, r0), j0, j1);
    return cpu_cover_of(&w->job->live, limits, &box, w->ranges);
}

/* Lists the steps of a strip over one block of keys; where a flow cannot take the block, runs
 * it as a tile and lists none. */
static int32_t plan_block(cpu_worker *w, const cpu_limits *limits, int32_t r0, int64_t chunk,
                          int64_t j0, int64_t j1, flow_step *steps)
{
    const int64_t most = j0 + CPU_BLOCK_KEYS < j1 ? j0 + CPU_BLOCK_KEYS : j1;
    const cpu_cover cover = strip_cover(w, limits, r0, j0, most);
    int32_t n = 0;
    if (cover == CPU_EMPTY)
        return 0;
    item_tile t = {.j0 = j0, .n = (int32_t)(most - j0), .is_full = cover == CPU_FULL};
    item_find_operands(w, &t);
    if (t.is_nonfinite || (cover == CPU_PARTIAL && !limits)) {
        item_run_strip(w, t, r0, strip_rows(w, r0));
        return 0;
    }
    for (int64_t j = j0; j < most; j += FLOW_KEYS) {
        const int64_t end = j + FLOW_KEYS;
        const cpu_cover own = limits ? cpu_cover_of_limits(limits, j, end) : cover;
        if (own != CPU_EMPTY)
            steps[n++] = (flow_step){r0 / FLOW_ROWS, (int32_t)((j - chunk) / SQUARE_KEYS),
                                     own != CPU_FULL || end > j1};
    }
    return n;
}

/* The limits of a strip's rows, into `own`; NULL without limits. */
static const cpu_limits *limits_of_strip(const cpu_worker *w, int32_t r0, cpu_limits *own)
{
    if (w->job->live.by != CPU_BY_LIMITS)
        return NULL;
    *own = w->limits;
    cpu_limit_rows(own, r0, strip_rows(w, r0));
    return own;
}

static int32_t plan_strip(cpu_worker *w, int32_t r0, int64_t j0, int64_t j1, int64_t end,
                          flow_step *steps)
{
    cpu_limits own;
    const cpu_limits *limits = limits_of_strip(w, r0, &own);
    int32_t n = 0;
    for (int64_t j = j0; j < j1; j += CPU_BLOCK_KEYS)
        n += plan_block(w, limits, r0, j0, j, end, steps + n);
    return n;
}

/* Raises a strip's anchors to the changed scores of 32 keys from j on. */
static void raise_anchors(cpu_worker *w, int32_t r0, int64_t j)
{
    const cpu_geometry *g = &w->job->g;
    const int32_t n_rows = strip_rows(w, r0);
    const char *q =
        (const char *)w->q + (size_t)r0 * (size_t)g->q_ld * (size_t)w->kernels->element;
    item_tile t = {.j0 = j, .n = FLOW_ROWS, .is_full = 1};
    item_find_operands(w, &t);
    w->kernels->scores(q, g->q_ld,
                       (const char *)t.k
                           + (size_t)(j % CPU_BLOCK_KEYS) * (g->k_bytes / CPU_BLOCK_KEYS),
                       (int32_t)w->job->run->q->shape[3], n_rows, FLOW_ROWS,
                       item_scale_of(w, &t), w->s, CPU_BLOCK_KEYS);
    const float *most = item_change_scores(w, &t, r0, n_rows, w->s);
    for (int32_t r = 0; r < n_rows; r++)
        if (most[r] > w->m[r0 + r] && most[r] < INFINITY)
            w->m[r0 + r] = most[r];
}

/* Finds the anchors of all strips. Mods favour near keys or far ones, so anchors are the
 * largest scores among the first keys of a strip, its last ones, and those at its rows' own
 * positions. */
static void find_anchors(cpu_worker *w, int64_t begin, int64_t end)
{
    for (int32_t r = 0; r < w->rows; r += FLOW_ROWS) {
        cpu_limits limits;
        const cpu_limits *l = limits_of_strip(w, r, &limits);
        int64_t first = l && l->any_first > begin ? l->any_first : begin;
        int64_t past = l && l->any_past < end ? l->any_past : end;
        while (first < past && !l
               && strip_cover(w, l, r, first, first + CPU_BLOCK_KEYS) == CPU_EMPTY)
            first += CPU_BLOCK_KEYS;
        while (first < past && !l
               && strip_cover(w, l, r, (past - 1) / CPU_BLOCK_KEYS * CPU_BLOCK_KEYS, past)
                      == CPU_EMPTY)
            past = (past - 1) / CPU_BLOCK_KEYS * CPU_BLOCK_KEYS;
        if (first >= past)
            continue;
        w->streamed |= 1u << (r / FLOW_ROWS);
        const int64_t near = w->item.box.i0 + r + w->at.q_offset - w->at.kv_offset;
        raise_anchors(w, r, first / FLOW_ROWS * FLOW_ROWS);
        if (near > first && near < past)
            raise_anchors(w, r, near / FLOW_ROWS * FLOW_ROWS);
        raise_anchors(w, r, (past - 1) / FLOW_ROWS * FLOW_ROWS);
    }
}

/* The mod's values at the item's rows and the chunk's keys. */
static void place_mod(cpu_worker *w, int64_t j0, int64_t j1)
{
    item_open_compiled(w, 0);
    w->code.j0 = -1;
    jit_cols(w->code.state, (int32_t)j0 + w->at.kv_offset, (int32_t)(j1 - j0));
}

static int run_stream(cpu_worker *w, int64_t j0, int64_t j1, int64_t end,
                      const flow_step *steps, int32_t n, const flow_narrow *narrow)
{
    const cpu_geometry *g = &w->job->g;
    const int by_limits = w->job->live.by == CPU_BY_LIMITS;
    item_tile t = {.j0 = j0};
    item_find_operands(w, &t);
    const flow_run run = {
        .code = cpu_state_of(w->job->plan)->code,
        .jit = w->score.state ? w->code.state : NULL,
        .q = w->q,
        .k = t.k,
        .v = t.v,
        .o_ld = g->o_ld,
        .rows = w->rows,
        .is_exact = w->job->run->lse || w->job->run->sinks.data,
        .scale = (float)w->job->plan->problem.scale,
        .m = w->m,
        .l = w->l,
        .o = w->o,
        .first = by_limits ? w->limits.first : NULL,
        .past = by_limits ? w->limits.past : NULL,
        .j0 = j0,
        .j1 = end,
        .steps = steps,
        .n = n,
        .narrow = narrow,
        .memory = w->flow,
    };
    if (w->score.state)
        place_mod(w, j0, j1);
    return w->kernels->flow(&run);
}

/* Runs keys [j0, j1), whole blocks; keys from `end` on are not live. */
static void run_chunk(cpu_worker *w, int64_t j0, int64_t j1, int64_t end)
{
    flow_step steps[STRIPS * CHUNK_STEPS];
    int32_t n = 0;
    item_packed(w, j0 / CPU_BLOCK_KEYS, j1 / CPU_BLOCK_KEYS);
    for (int32_t r = 0; r < w->rows; r += FLOW_ROWS) {
        const int32_t own = plan_strip(w, r, j0, j1, end, steps + n);
        w->streamed |= (uint32_t)(own > 0) << (r / FLOW_ROWS);
        n += own;
    }
    if (n)
        run_stream(w, j0, j1, end, steps, n, NULL);
}

/* Blocks of keys in a chunk. */
static int64_t chunk_blocks(const cpu_worker *w)
{
    const cpu_geometry *g = &w->job->g;
    int64_t blocks = (int64_t)(STREAM_BYTES / (g->k_bytes + g->v_bytes));
    blocks = blocks < 1 ? 1 : blocks;
    blocks = blocks > CHUNK_STEPS / STEPS_OF_BLOCK ? CHUNK_STEPS / STEPS_OF_BLOCK : blocks;
    if (w->job->is_local)
        blocks = blocks < g->own_blocks ? blocks : g->own_blocks;
    return blocks;
}

static void run_chunks(cpu_worker *w, int64_t begin, int64_t end)
{
    const int64_t keys = chunk_blocks(w) * CPU_BLOCK_KEYS;
    for (int64_t j = begin; j < end; j += keys) {
        const int64_t left = (end - j + CPU_BLOCK_KEYS - 1) / CPU_BLOCK_KEYS * CPU_BLOCK_KEYS;
        run_chunk(w, j, j + (left < keys ? left : keys), end);
    }
}

static int is_sum_sound(float l, float m)
{
    return isgreater(l, 0x1p-40f) & isless(l, 0x1p80f) & isless(fabsf(m), CPU_FUSED_MOST);
}

/* Whether a strip's sums are sound: the anchors were so near to the maxima that nothing was
 * lost and nothing overflowed, and small enough for the exponents of flows, which are always
 * fused. Rows that limits leave no key have no sum; they are sound, and their maximum is -inf.
 * Most often all sums pass the first look. */
static int are_sums_sound(cpu_worker *w, int32_t r0)
{
    const int32_t n = strip_rows(w, r0);
    const float *l = w->l + r0;
    float *m = w->m + r0;
    int is_sound = 1;
    for (int32_t r = 0; r < n; r++)
        is_sound &= is_sum_sound(l[r], m[r]);
    if (is_sound || w->job->live.by != CPU_BY_LIMITS)
        return is_sound;
    is_sound = 1;
    for (int32_t r = 0; r < n; r++) {
        if (w->limits.first[r0 + r] >= w->limits.past[r0 + r])
            m[r] = -INFINITY; /* an anchor is no maximum */
        else
            is_sound &= is_sum_sound(l[r], m[r]);
    }
    return is_sound;
}

/* Whether the strip's row sums are sound (are_sums_sound) and O has no infinity or NaN. */
static int is_strip_sound(cpu_worker *w, int32_t r0)
{
    const int64_t o_ld = w->job->g.o_ld;
    const int is_nonfinite =
        w->kernels->any_nonfinite(w->o + r0 * o_ld, strip_rows(w, r0) * o_ld);
    return are_sums_sound(w, r0) && !is_nonfinite;
}

static void run_again(cpu_worker *w, int32_t r0, int64_t begin, int64_t end)
{
    item_clear_rows(w, r0, strip_rows(w, r0));
    item_run_blocks(w, begin, end, r0, strip_rows(w, r0));
}

/* Strips whose stream went wrong start again, block by block. */
static void check_streams(cpu_worker *w, int64_t begin, int64_t end)
{
    for (int32_t r0 = 0; r0 < w->rows; r0 += FLOW_ROWS)
        if (w->streamed >> (r0 / FLOW_ROWS) & 1 && !is_strip_sound(w, r0))
            run_again(w, r0, begin, end);
}

/* ---- narrow masks: few keys a row ---- */

/* Squares of a strip up to which it takes narrow steps. */
enum { NARROW_MOST = 40, NARROW_STEPS = NARROW_MOST / FLOW_NARROW + 1 };

/* Lists the narrow steps of a strip over its live squares, filled up with dead squares before
 * them to a whole number of steps. 0: there are none, or too many. */
static int32_t plan_narrow(const cpu_worker *w, int32_t r0, int64_t begin, int64_t end,
                           flow_step *steps)
{
    cpu_limits limits;
    limits_of_strip(w, r0, &limits);
    const int64_t first = limits.any_first > begin ? limits.any_first : begin;
    const int64_t past = limits.any_past < end ? limits.any_past : end;
    if (first >= past)
        return 0;
    const int64_t to = (past - begin + SQUARE_KEYS - 1) / SQUARE_KEYS;
    const int64_t squares = to - (first - begin) / SQUARE_KEYS;
    const int32_t n = (int32_t)((squares + FLOW_NARROW - 1) / FLOW_NARROW);
    const int64_t all = (end - begin + CPU_BLOCK_KEYS - 1) / CPU_BLOCK_KEYS * CPU_BLOCK_KEYS;
    const int64_t from = to > n * FLOW_NARROW ? to - n * FLOW_NARROW : 0;
    if (squares > NARROW_MOST || (from + n * FLOW_NARROW) * SQUARE_KEYS > all)
        return 0;
    for (int32_t i = 0; i < n; i++)
        steps[i] = (flow_step){r0 / FLOW_ROWS, (int32_t)from + i * FLOW_NARROW, 1};
    return n;
}

/* An output larger than this does not stay in second-level caches. It is then written past the
 * caches, which saves reading its lines before they are written. */
static const int64_t far_bytes = (int64_t)2 << 20;

static int is_out_far(const cpu_worker *w)
{
    const saccade_tensor *out = w->job->run->out;
    const int64_t *n = out->shape;
    return n[0] * n[1] * n[2] * n[3] * (int64_t)saccade_dtype_bytes(out->dtype)
           >= far_bytes * w->job->plan->threads;
}

/* Rows that follow each other without a gap, to be prefetched a strip at a time. Empty where
 * there are gaps between them. */
typedef struct near_rows {
    const char *at, *past;
    int64_t strip; /* bytes */
} near_rows;

/* From row i on. */
static near_rows near_rows_of(const saccade_tensor *t, int64_t b, int64_t h, int64_t i)
{
    const cpu_rows rows = cpu_rows_of(t, b, h);
    const int64_t each = (int64_t)rows.dim * (int64_t)saccade_dtype_bytes(rows.dtype);
    if (rows.stride != each || i >= t->shape[2])
        return (near_rows){0};
    return (near_rows){rows.base + i * each, rows.base + t->shape[2] * each, FLOW_ROWS * each};
}

/* An item by narrow steps: its queries where they lie, if they need no packing, and what to
 * prefetch: V and K of the next item, which this thread will most often run, its queries and
 * its results. */
enum { NEXT = 4 };
typedef struct narrow_item {
    cpu_worker *w;
    const char *q;
    near_rows next[NEXT];
    int is_far; /* out goes past the caches */
} narrow_item;

/* Queries that lie in memory as pack_rows would have them, in whole lines; or NULL. */
static const char *plain_queries(const cpu_worker *w)
{
    const cpu_box *box = &w->item.box;
    const cpu_rows q = cpu_rows_of(w->job->run->q, box->b, box->h0);
    const char *at = q.base + (box->i0 + w->shift) * q.stride;
    const int is_whole = q.dim == w->job->g.q_ld && w->rows % FLOW_ROWS == 0;
    const int is_plain = q.stride == q.dim * w->kernels->element && !w->kernels->is_split;
    return is_whole && is_plain && (uintptr_t)at % 64 == 0 ? at : NULL;
}

static narrow_item narrow_item_of(cpu_worker *w)
{
    const plan_run *run = w->job->run;
    const cpu_box *box = &w->item.box;
    const int64_t j = w->own.past * CPU_BLOCK_KEYS, i0 = box->i0 + w->shift;
    narrow_item item = {.w = w, .q = plain_queries(w), .is_far = is_out_far(w)};
    if (w->job->is_local && !run->chunks) {
        item.next[0] = near_rows_of(run->v, box->b, w->item.g, j);
        item.next[1] = near_rows_of(run->k, box->b, w->item.g, j);
    }
    item.next[2] = near_rows_of(run->q, box->b, box->h0, i0 + FLOW_ROWS);
    if (!item.is_far)
        item.next[3] = near_rows_of(run->out, box->b, box->h0, i0);
    return item;
}

static void begin_narrow(void *arg, int32_t strip, cpu_prefetch_list *prefetches)
{
    const narrow_item *item = arg;
    const cpu_worker *w = item->w;
    const int64_t strip_bytes = (int64_t)FLOW_ROWS * w->job->g.q_ld * w->kernels->element;
    for (int n = 0; n < NEXT; n++) {
        const near_rows *rows = &item->next[n];
        if (!rows->at)
            continue;
        const char *at = rows->at + strip * rows->strip, *end = at + rows->strip;
        for (; at < end && at < rows->past && prefetches->n < CPU_PREFETCHES;
             at += CPU_PREFETCH_BYTES)
            prefetches->at[prefetches->n++] = at;
    }
    if (!item->q)
        item_pack_queries(w, strip * FLOW_ROWS, strip_rows(w, strip * FLOW_ROWS),
                          (char *)w->q + (strip % 2) * strip_bytes);
}

static void end_narrow(void *arg, int32_t strip)
{
    const narrow_item *item = arg;
    cpu_worker *w = item->w;
    const int32_t r0 = strip * FLOW_ROWS;
    const saccade_tensor *out = w->job->run->out;
    const int is_nonfinite = w->kernels->take_rows(
        w->o, w->job->g.o_ld, w->l + r0, strip_rows(w, r0), out->dtype, (int32_t)out->shape[3],
        item_out_of(w, r0), out->stride[2] * (int64_t)saccade_dtype_bytes(out->dtype),
        item->is_far);
    if (!is_nonfinite && are_sums_sound(w, r0))
        w->stored |= 1u << strip;
}

/* Runs all rows against their few keys and stores each strip's result when it is complete.
 * 0: the keys are too many, more than the result is wanted, or V is not finite. */
static int run_narrow(cpu_worker *w, int64_t begin, int64_t end)
{
    flow_step steps[STRIPS * NARROW_STEPS];
    const cpu_job *job = w->job;
    const cpu_state *state = cpu_state_of(job->plan);
    const int64_t past = (end + CPU_BLOCK_KEYS - 1) / CPU_BLOCK_KEYS;
    const int64_t first = begin / CPU_BLOCK_KEYS;
    int32_t n = 0;
    if (!flow_code_narrow(state->code) || job->live.by != CPU_BY_LIMITS || job->run->lse
        || job->run->sinks.data || job->g.splits > 1 || past - first > chunk_blocks(w))
        return 0;
    for (int32_t r = 0, own; r < w->rows; r += FLOW_ROWS, n += own) {
        own = plan_narrow(w, r, begin, end, steps + n);
        if (own == 0)
            return 0;
    }
    const cpu_packed packed = item_packed(w, first, past);
    for (int64_t i = 0; i < past - first; i++)
        if (packed.nonfinite[i])
            return 0;
    narrow_item item = narrow_item_of(w);
    const int is_stair = w->limits.rising == w->rows && w->limits.is_stair;
    const flow_narrow narrow = {is_stair, item.q, &item, begin_narrow, end_narrow};
    item_clear_rows(w, 0, strip_rows(w, 0));
    item_clear_sums(w, FLOW_ROWS, w->rows - FLOW_ROWS);
    if (run_stream(w, begin, past * CPU_BLOCK_KEYS, end, steps, n, &narrow))
        w->stored = 0;
    return 1;
}

/* Strips that were not sound. */
static void repair_narrow(cpu_worker *w, int64_t begin, int64_t end)
{
    const int32_t strips = (w->rows + FLOW_ROWS - 1) / FLOW_ROWS;
    if (w->stored == (uint32_t)((1u << strips) - 1))
        return;
    item_pack_queries(w, 0, w->rows, w->q);
    for (int32_t strip = 0; strip < strips; strip++)
        if (!(w->stored >> strip & 1))
            run_again(w, strip * FLOW_ROWS, begin, end);
}

void item_run_streams(cpu_worker *w, int64_t begin, int64_t end)
{
    w->streamed = 0;
    if (run_narrow(w, begin, end)) {
        repair_narrow(w, begin, end);
        return;
    }
    item_pack_queries(w, 0, w->rows, w->q);
    item_clear_rows(w, 0, w->rows);
    if (w->job->is_local && w->job->live.by != CPU_BY_LIMITS && begin < end)
        /* anchors need the last ones too */
        item_packed(w, begin / CPU_BLOCK_KEYS, (end - 1) / CPU_BLOCK_KEYS + 1);
    if (w->score.state)
        find_anchors(w, begin, end);
    run_chunks(w, begin, end);
    check_streams(w, begin, end);
}
