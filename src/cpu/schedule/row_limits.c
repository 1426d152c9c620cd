/* Masks that are one interval of keys per row (causal, windows, prefixes) need no evaluation at
 * all: the limits of a block of rows say which tiles and which columns of a strip to compute,
 * and where to cut. The bounds are a fact of the mask, two nodes free of kv; most are sums
 * of q and constants, and then those of a block's first and last row prove those between. */
#include "cpu/schedule/schedule.h"

/* ---- rows ---- */

/* A sum that stays this far from wrapping at an item's first and last row wraps at no row
 * between them, since an item has few rows and slopes are small. */
enum { MOST_SUM = INT32_MAX - 2 * PASS_MOST_SLOPE * CPU_MOST_ROWS };

typedef struct finder {
    const pass_limits *mask;
    const plan_run *run;
    eval_point row;
    double *values; /* scratch of the evaluation */
    cpu_limits *to;
    int32_t kv_offset;
} finder;

/* The limits of one row, not yet cut to the keys there are. Returns whether every sum stayed
 * far from wrapping. */
static int evaluate(finder *f, int32_t q, int64_t out[2])
{
    const mod_fn *fn = f->mask->fn;
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
        out[k] = (int64_t)f->values[f->mask->node[k]] - f->kv_offset;
    return is_safe;
}

/* Whether a limit that rises by so much over n rows lies on a line. It does if the rise is the
 * largest possible, or the smallest: then it is the same from each row to the next. */
static int is_line(const finder *f, int which, int64_t rise, int32_t n)
{
    const pass_slope s = f->mask->slope[f->mask->node[which]];
    return rise == (int64_t)s.lo * (n - 1) || rise == (int64_t)s.hi * (n - 1);
}

static int64_t clamp_key(int64_t key, int64_t KV)
{
    return key < 0 ? 0 : key > KV ? KV : key;
}

/* Whether both limits, from row 0 on, lie on lines that do not fall. */
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

/* Finds the limits of n rows. Where they lie on lines, the first and the last row say those of
 * the rows between; else the rows are halved. */
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

void cpu_find_limits(const pass_limits *mask, const plan_run *run, const eval_point *first,
                     int32_t n, int32_t kv_offset, double *values, cpu_limits *to, int32_t r0)
{
    finder f = {mask, run, *first, values, to, kv_offset};
    const int may_prove = pass_slope_is_known(mask->slope[mask->node[0]])
                          && pass_slope_is_known(mask->slope[mask->node[1]]);
    const int32_t each = may_prove ? n : 1;
    if (r0 == 0)
        to->rising = 0;
    for (int32_t r = 0; r < n; r += each)
        find(&f, r0 + r, first->q + r, each);
}

/* For limits that rise, the first and the last row say everything. If both have live keys, so
 * have all rows between: the two lines do not meet between the ends, and neither leaves the
 * keys there. */
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
