/* An item by streams (amx_flow.h): chunks of keys that stay in L2, in each the steps of every
 * strip of rows; what a stream cannot take goes block by block, as in item.c. In the end each
 * row's sums are looked at: strips whose anchors were too far off start again the exact way. */
#include "cpu/item.h"

#include <math.h>
#include <string.h>

/* Packed K and V that all strips of an item read in turn: half of a second-level cache. */
enum { STREAM_BYTES = 1 << 20 };
enum {
    CHUNK_STEPS = JIT_COLS / CPU_STREAM_KEYS,
    STEPS_OF_BLOCK = CPU_BLOCK_KEYS / CPU_STREAM_KEYS,
    STRIPS = CPU_MOST_ROWS / FLOW_ROWS,
    SQUARE_KEYS = FLOW_KEYS / FLOW_SQUARES,
};

int item_can_stream(const cpu_worker *w)
{
    const cpu_job *job = w->job;
    return ((const cpu_state *)job->plan->state)->code && w->kernels->stream && job->g.is_shared
           && (!w->score || w->jit) && !job->run->row_max && job->plan->problem.scale > 0;
}

static int32_t strip_rows(const cpu_worker *w, int32_t r0)
{
    const int32_t strip = w->kernels->strip;
    return w->rows - r0 < strip ? w->rows - r0 : strip;
}

/* What of a strip's rows x keys [j0, j1) is live. */
static cpu_cover strip_cover(const cpu_worker *w, const cpu_limits *limits, int32_t r0,
                             int64_t j0, int64_t j1)
{
    cpu_box box = w->item.box;
    if (limits)
        return cpu_cover_of_limits(limits, j0, j1);
    box.i0 += r0;
    box.i1 = box.i0 + strip_rows(w, r0);
    box.j0 = j0;
    box.j1 = j1;
    return cpu_cover_of(&w->job->live, &box, w->ranges);
}

/* Steps of one block for a strip, or the block tile by tile where that cannot be. */
static int32_t plan_block(cpu_worker *w, const cpu_limits *limits, int32_t r0, int64_t chunk,
                          int64_t j0, int64_t j1, cpu_stream_step *steps)
{
    const int64_t most = j0 + CPU_BLOCK_KEYS < j1 ? j0 + CPU_BLOCK_KEYS : j1;
    const cpu_cover cover = strip_cover(w, limits, r0, j0, most);
    int32_t n = 0;
    if (cover == CPU_EMPTY)
        return 0;
    item_tile t = {.j0 = j0, .n = (int32_t)(most - j0), .is_full = cover == CPU_FULL};
    item_find_operands(w, &t);
    if (t.is_wild || (cover == CPU_PARTIAL && !limits)) {
        item_run_strip(w, t, r0, strip_rows(w, r0));
        return 0;
    }
    for (int64_t j = j0; j < most; j += CPU_STREAM_KEYS) {
        const int64_t end = j + CPU_STREAM_KEYS;
        const cpu_cover own = limits ? cpu_cover_of_limits(limits, j, end) : cover;
        if (own != CPU_EMPTY)
            steps[n++] = (cpu_stream_step){r0 / FLOW_ROWS, (int32_t)((j - chunk) / SQUARE_KEYS),
                                           FLOW_SQUARES, own != CPU_FULL || end > j1};
    }
    return n;
}

/* The limits of a strip's rows, into `own`; NULL without limits. */
static const cpu_limits *limits_of_strip(const cpu_worker *w, int32_t r0, cpu_limits *own)
{
    if (!item_has_limits(w))
        return NULL;
    *own = w->limits;
    cpu_limit_rows(own, r0, strip_rows(w, r0));
    return own;
}

/* A strip's live squares in steps from the first one on, where no more than one square is left
 * in the end, as in windows of a multiple of 128 keys; steps that stand at multiples of 128 are
 * one more there. 0: not so. */
static int32_t plan_squares(const cpu_worker *w, const cpu_limits *limits, const char *wild,
                            int32_t r0, int64_t chunk, int64_t end, cpu_stream_step *steps)
{
    const cpu_state *state = w->job->plan->state;
    if (!limits || !amx_code_has_ends(state->code) || w->job->run->lse
        || limits->any_first >= limits->any_past)
        return 0;
    int64_t j = limits->any_first > chunk ? limits->any_first : chunk;
    j -= (j - chunk) % SQUARE_KEYS;
    const int64_t past = limits->any_past < end ? limits->any_past : end;
    const int64_t squares = (past - j + SQUARE_KEYS - 1) / SQUARE_KEYS;
    int32_t n = 0, is_wild = 0;
    for (int64_t n_block = (j - chunk) / CPU_BLOCK_KEYS;
         n_block * CPU_BLOCK_KEYS < past - chunk; n_block++)
        is_wild |= wild[n_block];
    if (is_wild || squares < FLOW_SQUARES || squares % FLOW_SQUARES > 1)
        return 0;
    for (; j < past; j += CPU_STREAM_KEYS) {
        const int32_t own = past - j > SQUARE_KEYS ? FLOW_SQUARES : 1;
        const int64_t to = j + own * SQUARE_KEYS;
        const int is_full = to <= end && cpu_cover_of_limits(limits, j, to) == CPU_FULL;
        steps[n++] = (cpu_stream_step){r0 / FLOW_ROWS, (int32_t)((j - chunk) / SQUARE_KEYS),
                                       own, own == 1 || !is_full};
    }
    return n;
}

static int32_t plan_strip(cpu_worker *w, const char *wild, int32_t r0, int64_t j0, int64_t j1,
                          int64_t end, cpu_stream_step *steps)
{
    cpu_limits own;
    const cpu_limits *limits = limits_of_strip(w, r0, &own);
    int32_t n = plan_squares(w, limits, wild, r0, j0, j1 < end ? j1 : end, steps);
    if (n > 0)
        return n;
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
                       (int32_t)w->job->run->q->shape[3], n_rows, 1, item_scale_of(w, &t), w->s,
                       CPU_BLOCK_KEYS);
    const float *most = item_change_scores(w, &t, r0, n_rows);
    for (int32_t r = 0; r < n_rows; r++)
        if (most[r] > w->m[r0 + r] && most[r] < INFINITY)
            w->m[r0 + r] = most[r];
}

/* Anchors of all strips from the first and the last keys that each meets and those that stand
 * where its rows do: mods favour near or far keys. */
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
    item_stand_compiled(w, 0);
    w->jit_j0 = -1;
    jit_cols(w->jit, (int32_t)j0 + w->at.kv_offset, (int32_t)(j1 - j0));
}

static void run_stream(cpu_worker *w, int64_t j0, int64_t j1, int64_t end,
                       const cpu_stream_step *steps, int32_t n)
{
    const cpu_geometry *g = &w->job->g;
    item_tile t = {.j0 = j0};
    item_find_operands(w, &t);
    const cpu_stream stream = {
        .code = ((const cpu_state *)w->job->plan->state)->code,
        .jit = w->score ? w->jit : NULL,
        .q = w->q,
        .k = t.k,
        .v = t.v,
        .o_ld = g->o_ld,
        .rows = w->rows,
        .is_exact = w->job->run->lse != NULL,
        .scale = w->job->plan->problem.scale,
        .m = w->m,
        .l = w->l,
        .o = w->o,
        .first = item_has_limits(w) ? w->limits.first : NULL,
        .past = item_has_limits(w) ? w->limits.past : NULL,
        .j0 = j0,
        .j1 = end,
        .steps = steps,
        .n = n,
        .memory = w->flow,
    };
    if (w->score)
        place_mod(w, j0, j1);
    w->kernels->stream(&stream);
}

/* Keys [j0, j1) of whole blocks, live ones before `end`. */
static void run_chunk(cpu_worker *w, int64_t j0, int64_t j1, int64_t end)
{
    cpu_stream_step steps[STRIPS * CHUNK_STEPS];
    int32_t n = 0;
    const cpu_packed packed = item_packed(w, j0 / CPU_BLOCK_KEYS, j1 / CPU_BLOCK_KEYS);
    for (int32_t r = 0; r < w->rows; r += FLOW_ROWS) {
        const int32_t own = plan_strip(w, packed.wild, r, j0, j1, end, steps + n);
        w->streamed |= (uint32_t)(own > 0) << (r / FLOW_ROWS);
        n += own;
    }
    if (n)
        run_stream(w, j0, j1, end, steps, n);
}

static void run_chunks(cpu_worker *w, int64_t begin, int64_t end)
{
    const cpu_geometry *g = &w->job->g;
    int64_t blocks = (int64_t)(STREAM_BYTES / (g->k_bytes + g->v_bytes));
    blocks = blocks < 1 ? 1 : blocks;
    blocks = blocks > CHUNK_STEPS / STEPS_OF_BLOCK ? CHUNK_STEPS / STEPS_OF_BLOCK : blocks;
    if (w->job->is_local)
        blocks = blocks < g->own_blocks ? blocks : g->own_blocks;
    const int64_t keys = blocks * CPU_BLOCK_KEYS;
    for (int64_t j = begin; j < end; j += keys) {
        const int64_t left = (end - j + CPU_BLOCK_KEYS - 1) / CPU_BLOCK_KEYS * CPU_BLOCK_KEYS;
        run_chunk(w, j, j + (left < keys ? left : keys), end);
    }
}

/* Whether a strip's sums are sound: anchors were near enough to the maxima that nothing was
 * lost or overflowed, and small enough for a stream's exponents, which are always fused. Then a
 * row of no weight at all had no live key. */
static int is_strip_sound(cpu_worker *w, int32_t r0)
{
    const int64_t o_ld = w->job->g.o_ld;
    int is_sound = !w->kernels->any_wild(w->o + r0 * o_ld, strip_rows(w, r0) * o_ld);
    for (int32_t r = r0; r < r0 + strip_rows(w, r0); r++) {
        if (item_has_limits(w) && w->limits.first[r] >= w->limits.past[r])
            w->m[r] = -INFINITY; /* an anchor is no maximum */
        else
            is_sound &= w->l[r] > 0x1p-40f && w->l[r] < 0x1p80f
                        && fabsf(w->m[r]) < CPU_FUSED_MOST;
    }
    return is_sound;
}

/* Strips whose stream went wrong start again, block by block. */
static void check_streams(cpu_worker *w, int64_t begin, int64_t end)
{
    for (int32_t r0 = 0; r0 < w->rows; r0 += FLOW_ROWS) {
        if (!(w->streamed >> (r0 / FLOW_ROWS) & 1) || is_strip_sound(w, r0))
            continue;
        item_clear_rows(w, r0, strip_rows(w, r0));
        for (int64_t j = begin; j < end; j += CPU_BLOCK_KEYS)
            item_run_tile(w, j, j + CPU_BLOCK_KEYS < end ? j + CPU_BLOCK_KEYS : end, r0,
                          strip_rows(w, r0));
    }
}

void item_run_streams(cpu_worker *w, int64_t begin, int64_t end)
{
    w->streamed = 0;
    if (w->score)
        find_anchors(w, begin, end);
    run_chunks(w, begin, end);
    check_streams(w, begin, end);
}
