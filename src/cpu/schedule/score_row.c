/* A row of a tile's scores, as every operation's rows: the mods placed on it, and keys that do
 * not count made -inf, by the row's limits or by the mask. */
#include "cpu/schedule/schedule.h"

#include <math.h>

void cpu_open_row(eval_state *state, int64_t *head, int64_t b, int64_t h, int32_t q)
{
    if (*head != h) {
        *head = h;
        eval_head(state, (int32_t)b, (int32_t)h);
    }
    eval_row(state, q);
}

void cpu_cut_row(int64_t first, int64_t past, int32_t n, float *s)
{
    for (int32_t j = 0; j < n && j < first; j++)
        s[j] = -INFINITY;
    for (int32_t j = past > 0 ? (int32_t)(past < n ? past : n) : 0; j < n; j++)
        s[j] = -INFINITY;
}

void cpu_mask_row(const cpu_live *live, eval_state *state, const cpu_box *row, float *s)
{
    uint8_t is_live[EVAL_STRIP];
    const int64_t n = row->j1 - row->j0;
    cpu_row_live(live, state, row, is_live);
    for (int64_t j = 0; j < n; j++)
        s[j] = is_live[j] ? s[j] : -INFINITY;
}
