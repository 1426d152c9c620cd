/* Rows of a sequence that a plan computes alone: where they stand, and which keys are far. */
#include "plan/plan.h"

/* before: how many of the first u units count. */
static int has_any(const plan_rows *rows, const int32_t *before, int64_t first, int64_t past)
{
    const int64_t from = first / rows->unit, end = (past + rows->unit - 1) / rows->unit;
    const int64_t to = end < rows->units ? end : rows->units;
    return from < to && before[to] > before[from];
}

int plan_has_far(const plan_rows *rows, int64_t first, int64_t past)
{
    return has_any(rows, rows->far_before, first, past);
}

int plan_has_touched(const plan_rows *rows, int64_t first, int64_t past)
{
    return has_any(rows, rows->touched_before, first, past);
}

const plan_part *plan_part_of(const plan_rows *rows, int64_t i)
{
    int32_t lo = 0, hi = rows->n;
    while (lo < hi) {
        const int32_t mid = lo + (hi - lo) / 2;
        if (rows->part[mid].first + rows->part[mid].count <= i)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < rows->n && rows->part[lo].first <= i ? &rows->part[lo] : NULL;
}
