/* Masks that are one interval of keys per row (causal, windows, prefixes) need no evaluation at
 * all: the limits of a block of rows say which tiles and which columns of a strip to compute,
 * and where to cut. The bounds come from pass_interval as two nodes free of kv; most are sums
 * of q and constants, and then those of a block's first and last row prove those between. */
#include "cpu/cpu.h"

/* ---- slopes ---- */

/* Rows of an item are few and slopes small, so that a sum not this near to wrapping at an
 * item's first and last row wraps at none between. */
enum { MOST_SLOPE = 16, MOST_SUM = INT32_MAX - 2 * MOST_SLOPE * CPU_MOST_ROWS };

static const cpu_slope no_slope = {1, 0};

static int is_known(cpu_slope s)
{
    return s.lo <= s.hi;
}

static cpu_slope slope_between(int lo, int hi)
{
    if (lo < -MOST_SLOPE || hi > MOST_SLOPE)
        return no_slope;
    return (cpu_slope){(int8_t)lo, (int8_t)hi};
}

static cpu_slope hull(cpu_slope x, cpu_slope y)
{
    return (cpu_slope){x.lo < y.lo ? x.lo : y.lo, x.hi > y.hi ? x.hi : y.hi};
}

static cpu_slope slope_of(const mod_fn *fn, const mod_node *n, const cpu_slope *all)
{
    const uint32_t *args = fn->args + n->args;
    if (!(n->deps & DEP_Q))
        return (cpu_slope){0, 0};
    if (n->op == OP_VAR)
        return (cpu_slope){1, 1};
    for (uint32_t k = 0; k < n->n_args; k++)
        if (!is_known(all[args[k]]))
            return no_slope;
    const cpu_slope x = all[args[0]], y = n->n_args > 1 ? all[args[1]] : x;
    switch (n->op) {
    case OP_iadd:
        return slope_between(x.lo + y.lo, x.hi + y.hi);
    case OP_isub:
        return slope_between(x.lo - y.hi, x.hi - y.lo);
    case OP_imin:
    case OP_imax:
        return hull(x, y);
    case OP_isel:
        return fn->nodes[args[0]].deps & DEP_Q ? no_slope : hull(y, all[args[2]]);
    default:
        return no_slope;
    }
}

const cpu_slope *cpu_find_slopes(const mod_fn *limits, arena *memory)
{
    cpu_slope *all = arena_array(memory, limits->n_nodes, sizeof *all);
    for (uint32_t i = 0; all && i < limits->n_nodes; i++)
        all[i] = slope_of(limits, &limits->nodes[i], all);
    return all;
}

/* ---- rows ---- */

typedef struct finder {
    const cpu_state *state;
    const plan_run *run;
    eval_point row;
    double *values; /* scratch of the evaluation */
    cpu_limits *to;
    int32_t kv_offset;
} finder;

/* Limits of one row before they are cut to keys; whether no sum was near to wrapping. */
static int evaluate(finder *f, int32_t q, int64_t out[2])
{
    const mod_fn *fn = f->state->limits;
    int is_safe = 1;
    f->row.q = q;
    eval_scalar(fn, &f->run->mask_env, &f->row, f->values, NULL);
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        const mod_node *n = &fn->nodes[i];
        if (n->op != OP_iadd && n->op != OP_isub)
            continue;
        const double x = f->values[fn->args[n->args]], y = f->values[fn->args[n->args + 1]];
        const double sum = n->op == OP_iadd ? x + y : x - y;
        is_safe &= sum < MOST_SUM && sum > -MOST_SUM;
    }
    for (int k = 0; k < 2; k++)
        out[k] = (int64_t)f->values[f->state->limit_nodes[k]] - f->kv_offset;
    return is_safe;
}

/* Rises of each row that add up to the most, or the least, that they can be are all equal. */
static int is_line(const finder *f, int which, int64_t rise, int32_t n)
{
    const cpu_slope s = f->state->slopes[f->state->limit_nodes[which]];
    return rise == (int64_t)s.lo * (n - 1) || rise == (int64_t)s.hi * (n - 1);
}

static int64_t clamp_key(int64_t key, int64_t KV)
{
    return key < 0 ? 0 : key > KV ? KV : key;
}

/* Both limits of rows 0 to n lie on lines, cut to keys, that do not fall. */
static int is_rising(int32_t r0, const int64_t *rise)
{
    return r0 == 0 && rise[0] >= 0 && rise[1] >= 0;
}

static void fill_line(int64_t *to, int32_t n, int64_t at, int64_t rise, int64_t KV)
{
    const int64_t end = at + (n - 1) * rise;
    if (at >= 0 && at <= KV && end >= 0 && end <= KV) { /* nothing to cut: vectors */
        for (int32_t r = 0; r < n; r++)
            to[r] = at + r * rise;
        return;
    }
    for (int32_t r = 0; r < n; r++)
        to[r] = clamp_key(at + r * rise, KV);
}

/* Rows between two whose limits lie on lines need no evaluation; halves, where they do not. */
static void find(finder *f, int32_t r0, int32_t q, int32_t n)
{
    int64_t begin[2], end[2], rise[2] = {0, 0};
    int is_safe = evaluate(f, q, begin);
    if (n > 1) {
        is_safe &= evaluate(f, q + n - 1, end);
        for (int k = 0; k < 2; k++) {
            is_safe &= is_line(f, k, end[k] - begin[k], n);
            rise[k] = (end[k] - begin[k]) / (n - 1);
        }
    }
    if (n > 1 && !is_safe) {
        find(f, r0, q, n / 2);
        find(f, r0 + n / 2, q + n / 2, n - n / 2);
        return;
    }
    const int64_t KV = f->run->sizes.KV;
    fill_line(f->to->first + r0, n, begin[0], rise[0], KV);
    fill_line(f->to->past + r0, n, begin[1], rise[1], KV);
    if (is_rising(r0, rise)) {
        f->to->rising = n;
        f->to->is_stair = rise[0] == 1 && rise[1] == 1;
    }
}

void cpu_find_limits(const cpu_state *state, const plan_run *run, const eval_point *first,
                     int32_t n, int32_t kv_offset, double *values, cpu_limits *to, int32_t r0)
{
    finder f = {state, run, *first, values, to, kv_offset};
    const uint32_t *nodes = state->limit_nodes;
    const int may_prove =
        is_known(state->slopes[nodes[0]]) && is_known(state->slopes[nodes[1]]);
    const int32_t each = may_prove ? n : 1;
    if (r0 == 0)
        to->rising = 0;
    for (int32_t r = 0; r < n; r += each)
        find(&f, r0 + r, first->q + r, each);
}

/* Of rising ones the ends say it all; where both are live, so are the rows between: lines that
 * meet nowhere at the ends do not in between, and neither has left the keys there. */
static int limit_by_ends(cpu_limits *l, int32_t r0, int32_t n)
{
    const int32_t last = r0 + n - 1;
    if (r0 + n > l->rising || l->first[r0] >= l->past[r0] || l->first[last] >= l->past[last])
        return 0;
    l->any_first = l->first[r0];
    l->all_first = l->first[last];
    l->all_past = l->past[r0];
    l->any_past = l->past[last];
    return 1;
}

void cpu_limit_rows(cpu_limits *l, int32_t r0, int32_t n)
{
    if (limit_by_ends(l, r0, n))
        return;
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

void cpu_span_of_limits(const cpu_state *state, const plan_run *run, const cpu_box *box,
                        double *values, int64_t *from, int64_t *to)
{
    const plan_position at = plan_position_of(&run->positions, run->sizes.KV, box->b);
    int64_t first[2], past[2];
    cpu_limits l = {.first = first, .past = past};
    for (int32_t r = 0; r < 2; r++) {
        const int64_t i = r ? box->i1 - 1 : box->i0;
        const eval_point row = {(int32_t)box->b, (int32_t)box->h0, (int32_t)i + at.q_offset, 0,
                                0};
        cpu_find_limits(state, run, &row, 1, at.kv_offset, values, &l, r);
    }
    cpu_limit_rows(&l, 0, 2);
    *from = l.any_first;
    *to = l.any_past;
}
