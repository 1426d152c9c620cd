/* Masks that are one interval of keys per row (causal, windows, prefixes) need no evaluation at
 * all: the limits of a block of rows say which tiles and which columns of a strip to compute,
 * and where to cut. The bounds come from pass_interval as two nodes free of kv. */
#include "cpu/cpu.h"

static int64_t clamp_key(double kv, int32_t kv_offset, int64_t KV)
{
    const int64_t key = (int64_t)kv - kv_offset;
    return key < 0 ? 0 : key > KV ? KV : key;
}

void cpu_limit_row(const cpu_state *state, const plan_run *run, const eval_point *row,
                   int32_t kv_offset, double *values, cpu_limits *limits, int32_t r)
{
    const int64_t KV = run->sizes.KV;
    eval_scalar(state->limits, &run->mask_env, row, values, NULL);
    limits->first[r] = clamp_key(values[state->limit_nodes[0]], kv_offset, KV);
    limits->past[r] = clamp_key(values[state->limit_nodes[1]], kv_offset, KV);
}

void cpu_limit_rows(cpu_limits *l, int32_t r0, int32_t n)
{
    l->any_first = l->all_past = INT64_MAX;
    l->any_past = l->all_first = 0;
    for (int32_t r = r0; r < r0 + n; r++) {
        const int64_t first = l->first[r], past = l->past[r];
        l->all_first = first > l->all_first ? first : l->all_first;
        l->all_past = past < l->all_past ? past : l->all_past;
        if (first >= past)
            continue;
        l->any_first = first < l->any_first ? first : l->any_first;
        l->any_past = past > l->any_past ? past : l->any_past;
    }
}

cpu_cover cpu_cover_of_limits(const cpu_limits *l, int64_t j0, int64_t j1)
{
    if (j1 <= l->any_first || j0 >= l->any_past)
        return CPU_EMPTY;
    return j0 >= l->all_first && j1 <= l->all_past ? CPU_FULL : CPU_PARTIAL;
}

int64_t cpu_weight_of_limits(const cpu_state *state, const plan_run *run, const cpu_box *box,
                             double *values)
{
    const plan_position at = plan_position_of(&run->positions, run->sizes.KV, box->b);
    int64_t first[2], past[2];
    cpu_limits l = {.first = first, .past = past};
    for (int32_t r = 0; r < 2; r++) {
        const int64_t i = r ? box->i1 - 1 : box->i0;
        const eval_point row = {(int32_t)box->b, (int32_t)box->h0, (int32_t)i + at.q_offset, 0,
                                0};
        cpu_limit_row(state, run, &row, at.kv_offset, values, &l, r);
    }
    cpu_limit_rows(&l, 0, 2);
    const int64_t j0 = l.any_first > box->j0 ? l.any_first : box->j0;
    const int64_t j1 = l.any_past < box->j1 ? l.any_past : box->j1;
    return j1 > j0 ? j1 - j0 : 0;
}
