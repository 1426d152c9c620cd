/* What of a run is live: whole tiles by the limits of rows, by the block mask's runs, or proven
 * by ranges if no block mask was given; and single keys inside PARTIAL tiles.
 *
 * Runs of a mask made from a mod only save time: the mod says what is live. Runs imported as
 * index tensors have their own block sizes and are the truth themselves, so there each row asks
 * them first, and the mod only inside their PARTIAL blocks. Masks with limits are evaluated
 * row by row in runs whose positions are too far off for the limits. */
#include "cpu/schedule/schedule.h"

#include <assert.h>
#include <string.h>

static void block_sizes(const saccade_block_mask *mask, int32_t *rows, int32_t *keys)
{
    const mask_view *view = mask_get_view(mask);
    *rows = view->imported_block_q ? view->imported_block_q : CPU_BLOCK_ROWS;
    *keys = view->imported_block_q ? view->imported_block_kv : CPU_BLOCK_KEYS;
}

int cpu_has_cells(const plan_problem *problem, const saccade_block_mask *mask)
{
    return mask && !mask_is_imported(mask) && !plan_limits(problem);
}

saccade_status cpu_prepare_mask(const plan_problem *problem, const saccade_block_mask *mask,
                                saccade_error *err)
{
    const mask_runs *runs;
    int32_t rows, keys;
    block_sizes(mask, &rows, &keys);
    TRY(mask_runs_for(mask, rows, keys, 0, &runs, err));
    return cpu_has_cells(problem, mask) ? mask_runs_for(mask, CPU_CELL, CPU_CELL, 0, &runs, err)
                                        : SACCADE_OK;
}

saccade_status cpu_live_of(const plan_problem *problem, const plan_run *run, cpu_live *out,
                           saccade_error *err)
{
    const pass_limits *limits = plan_limits(problem);
    int32_t rows, keys;
    *out = (cpu_live){.run = run, .by = CPU_BY_MASK, .mask = problem->mask};
    out->is_imported = mask_is_imported(run->block_mask);
    if (limits && !out->is_imported && plan_is_near(&run->positions, &run->sizes)) {
        out->by = CPU_BY_LIMITS;
        out->limits = limits;
        return SACCADE_OK;
    }
    if (limits || out->is_imported)
        out->by = CPU_BY_ROW;
    if (!run->block_mask)
        return SACCADE_OK;
    block_sizes(run->block_mask, &rows, &keys);
    TRY(mask_runs_prepared(run->block_mask, rows, keys, 0, &out->runs, err));
    out->cells =
        out->is_imported ? out->runs : mask_runs_ready(run->block_mask, CPU_CELL, CPU_CELL, 0);
    return SACCADE_OK;
}

/* ---- runs ---- */

/* First run of a block row that ends past key j. */
static int64_t first_past(const mask_runs *r, int64_t row, int64_t j)
{
    int64_t lo = r->row_begin[row], hi = r->row_begin[row + 1];
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (((int64_t)r->runs[mid].first + r->runs[mid].count) * r->block_kv > j)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

static cpu_cover cover_of_row(const mask_runs *r, int64_t row, int64_t j0, int64_t j1)
{
    int64_t full_to = j0;
    int touched = 0;
    for (int64_t n = first_past(r, row, j0); n < r->row_begin[row + 1]; n++) {
        const int64_t first = (int64_t)r->runs[n].first * r->block_kv;
        if (first >= j1)
            break;
        touched = 1;
        if (r->runs[n].full && first <= full_to)
            full_to = first + (int64_t)r->runs[n].count * r->block_kv;
    }
    return !touched ? CPU_EMPTY : full_to >= j1 ? CPU_FULL : CPU_PARTIAL;
}

static cpu_cover cover_by_runs(const cpu_live *live, const mask_runs *r, const cpu_box *box)
{
    cpu_cover all = CPU_EMPTY;
    int is_first = 1;
    for (int64_t h = box->h0; h < (r->H == 1 ? box->h0 + 1 : box->h1); h++)
        for (int64_t i = box->i0 / r->block_q * r->block_q; i < box->i1; i += r->block_q) {
            const int64_t row = plan_block_row(live->run, r, box->b, h, i / r->block_q);
            const cpu_cover one = cover_of_row(r, row, box->j0, box->j1);
            all = is_first || all == one ? one : CPU_PARTIAL;
            is_first = 0;
        }
    return all;
}

/* Widens [*from, *past) by the keys of [j0, j1) that a block row lists. */
static void span_of_row(const mask_runs *r, int64_t row, int64_t j0, int64_t j1, int64_t *from,
                        int64_t *past)
{
    for (int64_t n = first_past(r, row, j0); n < r->row_begin[row + 1]; n++) {
        const int64_t first = (int64_t)r->runs[n].first * r->block_kv;
        const int64_t end = first + (int64_t)r->runs[n].count * r->block_kv;
        if (first >= j1)
            break;
        *from = first < *from ? first : *from;
        *past = end > *past ? end : *past;
    }
}

static void span_of_cells(const cpu_live *live, const cpu_box *box, int64_t *from,
                          int64_t *past)
{
    const mask_runs *r = live->cells;
    for (int64_t h = box->h0; h < (r->H == 1 ? box->h0 + 1 : box->h1); h++)
        for (int64_t i = box->i0 / r->block_q * r->block_q; i < box->i1; i += r->block_q)
            span_of_row(r, plan_block_row(live->run, r, box->b, h, i / r->block_q), box->j0,
                        box->j1, from, past);
}

cpu_cover cpu_narrow(const cpu_live *live, const cpu_limits *limits, int32_t group,
                     cpu_box *box)
{
    const int by_limits = live->by == CPU_BY_LIMITS;
    int64_t from = box->j1, past = box->j0;
    if (!by_limits && !live->cells)
        return CPU_PARTIAL;
    if (by_limits) {
        from = limits->any_first;
        past = limits->any_past;
    } else {
        span_of_cells(live, box, &from, &past);
    }
    if (from >= past || from >= box->j1 || past <= box->j0)
        return CPU_EMPTY;
    if (from > box->j0)
        box->j0 += (from - box->j0) / group * group;
    if (past < box->j1)
        box->j1 = past;
    return by_limits ? cpu_cover_of_limits(limits, box->j0, box->j1)
                     : cover_by_runs(live, live->cells, box);
}

/* A bit for each of groups [from, past). */
static uint32_t bits_of(int64_t from, int64_t past)
{
    return from < past ? (UINT32_MAX >> (32 - (past - from))) << from : 0;
}

static cpu_groups groups_of_row(const mask_runs *r, int64_t row, int32_t group,
                                const cpu_box *box)
{
    const int64_t j0 = box->j0, j1 = box->j1, n_groups = (j1 - j0 + group - 1) / group;
    cpu_groups groups = {0, 0};
    for (int64_t n = first_past(r, row, j0); n < r->row_begin[row + 1]; n++) {
        const int64_t first = (int64_t)r->runs[n].first * r->block_kv;
        const int64_t past = first + (int64_t)r->runs[n].count * r->block_kv;
        if (first >= j1)
            break;
        const int64_t from = first > j0 ? first - j0 : 0;
        const int64_t to = past < j1 ? past - j0 : n_groups * group;
        groups.some |= bits_of(from / group, (to + group - 1) / group);
        if (r->runs[n].full)
            groups.every |= bits_of((from + group - 1) / group, to / group);
    }
    return groups;
}

cpu_groups cpu_groups_of(const cpu_live *live, int32_t group, const cpu_box *box)
{
    const mask_runs *r = live->cells;
    cpu_groups groups = {0, UINT32_MAX};
    assert(box->j1 - box->j0 <= 32 * (int64_t)group);
    for (int64_t h = box->h0; h < (r->H == 1 ? box->h0 + 1 : box->h1); h++)
        for (int64_t i = box->i0 / r->block_q * r->block_q; i < box->i1; i += r->block_q) {
            const int64_t row = plan_block_row(live->run, r, box->b, h, i / r->block_q);
            const cpu_groups one = groups_of_row(r, row, group, box);
            groups.some |= one.some;
            groups.every &= one.every;
        }
    return groups;
}

/* ---- proof ---- */

static cpu_cover cover_by_proof(const cpu_live *live, const cpu_box *box, void *ranges)
{
    const plan_run *run = live->run;
    const plan_position at = plan_position_of(&run->positions, run->sizes.KV, box->b);
    const pass_box where = {
        {(int32_t)box->b, (int32_t)box->h0, (int32_t)box->i0 + at.q_offset,
         (int32_t)box->j0 + at.kv_offset},
        {(int32_t)box->b, (int32_t)box->h1 - 1, (int32_t)box->i1 - 1 + at.q_offset,
         (int32_t)box->j1 - 1 + at.kv_offset},
    };
    switch (pass_cover(live->mask, &run->mask_env, &where, ranges)) {
    case PASS_NEVER:
        return CPU_EMPTY;
    case PASS_ALWAYS:
        return CPU_FULL;
    default:
        return CPU_PARTIAL;
    }
}

cpu_cover cpu_cover_of(const cpu_live *live, const cpu_limits *limits, const cpu_box *box,
                       void *ranges)
{
    if (live->by == CPU_BY_LIMITS)
        return cpu_cover_of_limits(limits, box->j0, box->j1);
    if (live->runs)
        return cover_by_runs(live, live->runs, box);
    return live->mask ? cover_by_proof(live, box, ranges) : CPU_FULL;
}

/* ---- keys ---- */

static void ask_mask(const cpu_live *live, eval_state *state, int64_t b, int64_t j0, int64_t n,
                     uint8_t *out)
{
    const plan_run *run = live->run;
    const plan_position at = plan_position_of(&run->positions, run->sizes.KV, b);
    if (live->mask)
        eval_mask(state, (int32_t)j0 + at.kv_offset, (int32_t)n, out);
    else
        memset(out, 1, (size_t)n);
}

void cpu_row_live(const cpu_live *live, eval_state *state, const cpu_box *row, uint8_t *out)
{
    const mask_runs *r = live->runs;
    if (!live->is_imported) {
        ask_mask(live, state, row->b, row->j0, row->j1 - row->j0, out);
        return;
    }
    memset(out, 0, (size_t)(row->j1 - row->j0));
    const int64_t which = plan_block_row(live->run, r, row->b, row->h0, row->i0 / r->block_q);
    for (int64_t n = first_past(r, which, row->j0); n < r->row_begin[which + 1]; n++) {
        const int64_t first = (int64_t)r->runs[n].first * r->block_kv;
        const int64_t past = first + (int64_t)r->runs[n].count * r->block_kv;
        const int64_t j0 = first > row->j0 ? first : row->j0;
        const int64_t j1 = past < row->j1 ? past : row->j1;
        if (j0 >= j1)
            break;
        if (r->runs[n].full)
            memset(out + (j0 - row->j0), 1, (size_t)(j1 - j0));
        else
            ask_mask(live, state, row->b, j0, j1 - j0, out + (j0 - row->j0));
    }
}

/* ---- order of work ---- */

enum { PROBES = 16 }; /* tiles looked at where counting all would cost */

void cpu_span_of(const cpu_live *live, const cpu_box *box, double *values, int64_t *from,
                 int64_t *to)
{
    const plan_run *run = live->run;
    const plan_position at = plan_position_of(&run->positions, run->sizes.KV, box->b);
    int64_t first[2], past[2];
    cpu_limits l = {.any_past = run->sizes.KV, .first = first, .past = past};
    for (int32_t r = 0; r < 2 && live->by == CPU_BY_LIMITS; r++) {
        const int64_t i = r ? box->i1 - 1 : box->i0;
        const eval_point row = {(int32_t)box->b, (int32_t)box->h0, (int32_t)i + at.q_offset, 0,
                                0};
        cpu_find_limits(live->limits, run, &row, 1, at.kv_offset, values, &l, r);
    }
    if (live->by == CPU_BY_LIMITS)
        cpu_limit_rows(&l, 0, 2);
    *from = l.any_first;
    *to = l.any_past;
}

/* How many keys of [j0, j1) lie in [from, to). */
static int64_t overlap(int64_t j0, int64_t j1, int64_t from, int64_t to)
{
    j0 = from > j0 ? from : j0;
    j1 = to < j1 ? to : j1;
    return j1 > j0 ? j1 - j0 : 0;
}

int64_t cpu_weight_of(const cpu_live *live, const cpu_box *box, int64_t from, int64_t to,
                      void *ranges)
{
    const mask_runs *r = live->runs;
    const int64_t blocks = (box->j1 - box->j0 + CPU_BLOCK_KEYS - 1) / CPU_BLOCK_KEYS;
    int64_t weight = 0;
    if (live->by == CPU_BY_LIMITS)
        return overlap(box->j0, box->j1, from, to);
    if (blocks == 0 || (!r && !live->mask))
        return blocks;
    if (r && box->j0 == 0 && box->j1 == live->run->sizes.KV)
        return r->row_live[plan_block_row(live->run, r, box->b, box->h0, box->i0 / r->block_q)];
    for (int64_t n = 0; n < PROBES; n++) {
        cpu_box tile = *box;
        tile.j0 += blocks * n / PROBES * CPU_BLOCK_KEYS;
        tile.j1 = tile.j0 + CPU_BLOCK_KEYS < box->j1 ? tile.j0 + CPU_BLOCK_KEYS : box->j1;
        weight += cpu_cover_of(live, NULL, &tile, ranges) != CPU_EMPTY;
    }
    return weight;
}

static int is_before(const int64_t *weight, int32_t a, int32_t b)
{
    return weight[a] > weight[b] || (weight[a] == weight[b] && a < b);
}

/* One step of heap sort, which needs no memory of its own, since a run allocates nothing. The
 * top of the heap is the index that comes last. */
static void sift(const int64_t *weight, int32_t *heap, int64_t at, int64_t n)
{
    for (;;) {
        int64_t last = at;
        for (int64_t child = 2 * at + 1; child <= 2 * at + 2 && child < n; child++)
            if (is_before(weight, heap[last], heap[child]))
                last = child;
        if (last == at)
            return;
        const int32_t swap = heap[at];
        heap[at] = heap[last];
        heap[last] = swap;
        at = last;
    }
}

void cpu_order(const int64_t *weight, int32_t *order, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        order[i] = (int32_t)i;
    for (int64_t i = n / 2 - 1; i >= 0; i--)
        sift(weight, order, i, n);
    for (int64_t last = n - 1; last > 0; last--) {
        const int32_t swap = order[0];
        order[0] = order[last];
        order[last] = swap;
        sift(weight, order, 0, last);
    }
}
