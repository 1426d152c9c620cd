/* Facts of a mod: limits and their slopes, the score as a line, how errors grow, what bounds
 * there are. A bound is proven for all inputs; whether results stay finite is a guess from
 * ordinary inputs, which kernels may act upon only where a wrong one costs time alone. */
#include "pass/facts.h"

#include "base/status.h"

#include <math.h>

/* ---- slopes of limits ---- */

static const pass_slope no_slope = {1, 0};

static pass_slope slope_between(int lo, int hi)
{
    if (lo < -PASS_MOST_SLOPE || hi > PASS_MOST_SLOPE)
        return no_slope;
    return (pass_slope){(int8_t)lo, (int8_t)hi};
}

static pass_slope hull(pass_slope x, pass_slope y)
{
    return (pass_slope){x.lo < y.lo ? x.lo : y.lo, x.hi > y.hi ? x.hi : y.hi};
}

static pass_slope slope_of(const mod_fn *fn, const mod_node *n, const pass_slope *all)
{
    const uint32_t *args = fn->args + n->args;
    if (!(n->deps & DEP_Q))
        return (pass_slope){0, 0};
    if (n->op == OP_VAR)
        return (pass_slope){1, 1};
    for (uint32_t k = 0; k < n->n_args; k++)
        if (!pass_slope_is_known(all[args[k]]))
            return no_slope;
    const pass_slope x = all[args[0]], y = n->n_args > 1 ? all[args[1]] : x;
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

static saccade_status find_limits(pass_facts *f, arena *a, saccade_error *err)
{
    pass_limits *limits = arena_alloc(a, sizeof *limits);
    FAIL_IF_NULL(limits);
    if (!pass_interval(f->fn, a, &limits->fn, limits->node))
        return SACCADE_OK;
    pass_slope *slope = arena_array(a, limits->fn->n_nodes, sizeof *slope);
    FAIL_IF_NULL(slope);
    for (uint32_t i = 0; i < limits->fn->n_nodes; i++)
        slope[i] = slope_of(limits->fn, &limits->fn->nodes[i], slope);
    limits->slope = slope;
    f->limits = limits;
    return SACCADE_OK;
}

/* ---- how much of a value reaches the result ---- */

/* |x| of a constant node, else infinite. */
static double constant_size(const mod_fn *fn, uint32_t node)
{
    const mod_node *n = &fn->nodes[node];
    return n->op == OP_FLOAT ? fabs((double)n->imm.f) : (double)INFINITY;
}

/* Adds to the gains of n's operands what n's own passes on. */
static void pass_on(const mod_fn *fn, const mod_node *n, double own, double *gain)
{
    const uint32_t *x = fn->args + n->args;
    switch (n->op) {
    case OP_fmul:
        gain[x[0]] += own * constant_size(fn, x[1]);
        gain[x[1]] += own * constant_size(fn, x[0]);
        return;
    case OP_fdiv:
        gain[x[0]] +=
            own / (constant_size(fn, x[1]) < (double)INFINITY ? constant_size(fn, x[1]) : 0.0);
        gain[x[1]] = (double)INFINITY;
        return;
    case OP_fsel:
        gain[x[1]] += own;
        gain[x[2]] += own;
        gain[x[0]] = (double)INFINITY;
        return;
    case OP_fadd:
    case OP_fsub:
    case OP_fmin:
    case OP_fmax:
    case OP_fneg:
    case OP_fabs:
    case OP_ftanh:
    case OP_fdetach:
        for (int i = 0; i < n->n_args; i++)
            gain[x[i]] += own;
        return;
    default:
        for (int i = 0; i < n->n_args; i++)
            gain[x[i]] = (double)INFINITY;
    }
}

double *pass_gains(const mod_fn *fn, uint32_t result, arena *a)
{
    double *gain = arena_array(a, fn->n_nodes, sizeof *gain);
    if (!gain)
        return NULL;
    gain[result] = 1;
    for (uint32_t i = result + 1; i-- > 0;)
        if (gain[i] != 0)
            pass_on(fn, &fn->nodes[i], gain[i], gain);
    return gain;
}

static saccade_status find_gains(pass_facts *f, arena *a, saccade_error *err)
{
    f->gain = pass_gains(f->fn, f->fn->result, a);
    FAIL_IF_NULL(f->gain);
    for (uint32_t i = 0; i < f->fn->n_nodes; i++)
        if (f->fn->nodes[i].op == OP_ftanh && f->fn->nodes[i].deps & DEP_SCORE)
            f->tanh_gain += f->gain[i];
    return SACCADE_OK;
}

/* ---- bounds ---- */

/* Rows and keys are below 2^30, as batches and heads are, and offsets within 2^30. */
enum { INDEX_MOST = (1 << 30) - 1, OFFSET_LEAST = -(1 << 30) };
static const pass_box anywhere = {
    {0, 0, OFFSET_LEAST, OFFSET_LEAST},
    {INDEX_MOST, INDEX_MOST, INT32_MAX, INT32_MAX},
};

/* By ranges over all positions, sizes and values of captures. */
static int is_bounded(const mod_fn *fn, pass_range *ranges)
{
    pass_ranges(fn, NULL, &anywhere, NULL, ranges);
    const pass_range *r = &ranges[fn->result];
    return r->flo >= -(double)PASS_BOUND && r->fhi <= (double)PASS_BOUND;
}

double pass_largest(const mod_fn *fn, uint32_t node, arena *a)
{
    pass_range *ranges = arena_array(a, fn->n_nodes, sizeof *ranges);
    if (!ranges)
        return (double)INFINITY;
    pass_ranges(fn, NULL, &anywhere, NULL, ranges);
    const pass_range *r = &ranges[node];
    return r->may_nan ? (double)INFINITY : fmax(fabs(r->flo), fabs(r->fhi));
}

int pass_gives_infinities(int op)
{
    return op == OP_frsqrt || op == OP_fexp || op == OP_fexp2 || op == OP_flog || op == OP_flog2
           || op == OP_ftan || op == OP_fpow;
}

/* Whether anything in a function makes infinities of finite numbers, but sums and products of
 * very large ones. */
static int makes_infinities(const mod_fn *fn)
{
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        const mod_node *n = &fn->nodes[i];
        switch (n->op) {
        case OP_FLOAT:
            if (!isfinite(n->imm.f))
                return 1;
            break;
        case OP_SCALAR:
        case OP_LOAD:
            if (n->type == MOD_FLOAT)
                return 1;
            break;
        default:
            if (pass_gives_infinities(n->op))
                return 1;
            break;
        }
    }
    return 0;
}

/* Whether slope * score + offset is finite at all positions, whatever captures hold. */
static int is_finite_line(const mod_fn *slope, const mod_fn *offset, arena *a)
{
    return slope && isfinite(pass_largest(offset, offset->result, a))
           && (!makes_infinities(slope) || isfinite(pass_largest(slope, slope->result, a)));
}

static int has_far_number(const mod_fn *fn)
{
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        const mod_node *n = &fn->nodes[i];
        if (n->op == OP_FLOAT && fabsf(n->imm.f) > PASS_FAR && isfinite(n->imm.f))
            return 1;
    }
    return 0;
}

/* Whether an instruction that computes this for each score can raise the invalid flag. */
static int can_be_invalid(const mod_fn *fn, const mod_node *n)
{
    const int is_tile = n->deps & DEP_SCORE || (n->deps & DEP_Q && n->deps & DEP_KV);
    if (n->op == OP_fdiv)
        return is_tile && constant_size(fn, fn->args[n->args + 1]) == (double)INFINITY;
    return is_tile && (n->op == OP_fsqrt || n->op == OP_frsqrt || n->op == OP_f2i);
}

static int stays_finite(const mod_fn *fn, pass_range *ranges)
{
    enum { ORDINARY = 1 << 20 };
    const pass_box box = {.hi = {ORDINARY, ORDINARY, ORDINARY, ORDINARY}};
    const pass_range score = {.flo = -1e30, .fhi = 1e30};
    eval_env env = {.tensors = NULL};
    for (int i = 0; i < MOD_SIZE_COUNT; i++)
        env.size[i] = ORDINARY;
    pass_ranges(fn, &env, &box, &score, ranges);
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        if (can_be_invalid(fn, &fn->nodes[i]))
            return 0;
    const pass_range *r = &ranges[fn->result];
    return !r->may_nan && r->flo > -1e37 && r->fhi < 1e37;
}

/* Whether operand k may be a term of a node's value, and not what it decides, divides or turns
 * into something small; a factor of the score or of distances is no term but a slope. */
static int is_term(const mod_fn *fn, const mod_node *n, int k, const pass_range *ranges)
{
    switch (n->op) {
    case OP_fsel:
        return k > 0;
    case OP_fdiv:
        return k == 0;
    case OP_fmul: {
        const uint32_t by = fn->args[n->args + (uint32_t)(1 - k)];
        const uint8_t deps = fn->nodes[by].deps;
        const int is_far = !(ranges[by].flo >= -1 && ranges[by].fhi <= 1);
        return !(deps & DEP_SCORE) && !(deps & (DEP_Q | DEP_KV) && is_far);
    }
    case OP_flog:
    case OP_flog2:
    case OP_fsqrt:
    case OP_frsqrt:
    case OP_fsin:
    case OP_fcos:
    case OP_ftanh:
    case OP_fsigmoid:
    case OP_ferf:
        return 0;
    default:
        return fn->nodes[fn->args[n->args + (uint32_t)k]].type == MOD_FLOAT;
    }
}

/* A number in the text, a bias of keys, or a capture that is a term of the result. ranges: over
 * all positions. */
static int may_be_lowest(const mod_fn *fn, const pass_range *ranges, unsigned char *is_reached)
{
    is_reached[fn->result] = 1;
    for (uint32_t i = fn->result + 1; i-- > 0;) {
        const mod_node *n = &fn->nodes[i];
        const int is_read = n->type == MOD_FLOAT && (n->op == OP_LOAD || n->op == OP_SCALAR);
        if (n->op == OP_FLOAT && fabsf(n->imm.f) > 1e37f && fabsf(n->imm.f) < INFINITY)
            return 1;
        if (is_read && (is_reached[i] || n->deps & DEP_KV))
            return 1;
        for (int k = 0; is_reached[i] && n->type == MOD_FLOAT && k < n->n_args; k++)
            is_reached[fn->args[n->args + (uint32_t)k]] |= is_term(fn, n, k, ranges) != 0;
    }
    return 0;
}

/* ---- the record ---- */

static saccade_status find_score_facts(pass_facts *f, arena *a, saccade_error *err)
{
    pass_range *ranges = arena_array(a, f->fn->n_nodes, sizeof *ranges);
    unsigned char *is_reached = arena_array(a, f->fn->n_nodes, 1);
    FAIL_IF_NULL(ranges);
    FAIL_IF_NULL(is_reached);
    if (!pass_affine(f->fn, a, &f->slope, &f->offset))
        f->slope = f->offset = NULL;
    f->is_bounded = (uint8_t)is_bounded(f->fn, ranges);
    f->is_far = f->offset && has_far_number(f->offset);
    f->is_finite_line = (uint8_t)is_finite_line(f->slope, f->offset, a);
    f->may_be_lowest = (uint8_t)may_be_lowest(f->fn, ranges, is_reached);
    f->stays_finite = (uint8_t)stays_finite(f->fn, ranges);
    return find_gains(f, a, err);
}

saccade_status pass_facts_make(const mod_fn *fn, arena *a, const pass_facts **out,
                               saccade_error *err)
{
    pass_facts *f = arena_alloc(a, sizeof *f);
    FAIL_IF_NULL(f);
    *f = (pass_facts){.fn = fn};
    TRY(pass_find_reads(fn, a, &f->reads, &f->n_reads, err));
    if (fn->kind == SACCADE_MASK)
        TRY(find_limits(f, a, err));
    else
        TRY(find_score_facts(f, a, err));
    FAIL_IF(a->has_failed, SACCADE_ENOMEM, "out of memory");
    *out = f;
    return SACCADE_OK;
}

/* ---- in words ---- */

static saccade_status print_limits(const pass_limits *limits, strbuf *out, saccade_error *err)
{
    if (!limits) {
        strbuf_puts(out, "mask is not one interval per row: evaluated on PARTIAL blocks\n");
        return SACCADE_OK;
    }
    strbuf_printf(out, "mask is one interval of keys per row: n%u <= kv < n%u of\nlimits:\n",
                  (unsigned)limits->node[0], (unsigned)limits->node[1]);
    TRY(mod_print_nodes(limits->fn, out, err));
    for (int k = 0; k < 2; k++) {
        const pass_slope s = limits->slope[limits->node[k]];
        if (pass_slope_is_known(s))
            strbuf_printf(out, "n%u gains %d to %d from row to row\n",
                          (unsigned)limits->node[k], s.lo, s.hi);
    }
    return SACCADE_OK;
}

static saccade_status print_line(const char *title, const mod_fn *fn, strbuf *out,
                                 saccade_error *err)
{
    strbuf_printf(out, "%s, n%u of:\n", title, (unsigned)fn->result);
    return mod_print_nodes(fn, out, err);
}

static saccade_status print_score(const pass_facts *f, strbuf *out, saccade_error *err)
{
    if (f->slope) {
        strbuf_puts(out, "score is a line, slope * score + offset\n");
        TRY(print_line("slope", f->slope, out, err));
        TRY(print_line("offset", f->offset, out, err));
    }
    if (f->is_bounded)
        strbuf_printf(out, "score lies within +-%d, proven\n", PASS_BOUND);
    strbuf_printf(out, "score %s finite for finite inputs, a guess\n",
                  f->stays_finite ? "stays" : "may not stay");
    if (f->tanh_gain > 0) {
        strbuf_puts(out, "score changes by ");
        strbuf_number(out, 6, f->tanh_gain);
        strbuf_puts(out, " times an error of its tanh, at most\n");
    }
    return SACCADE_OK;
}

saccade_status pass_facts_print(const pass_facts *f, strbuf *out, saccade_error *err)
{
    const int is_mask = f->fn->kind == SACCADE_MASK;
    strbuf_printf(out, "facts of %s:\n", is_mask ? "mask" : "score");
    for (uint32_t i = 0; i < f->n_reads; i++)
        pass_read_print(f->fn, &f->reads[i], out);
    if (is_mask)
        TRY(print_limits(f->limits, out, err));
    else
        TRY(print_score(f, out, err));
    return strbuf_status(out, err);
}
