/* CUDA text of a mod: straight-line code from the typed nodes, split by what they depend on.
 *
 *   row      free of kv and score   once per row, before the loop over keys
 *   column   of kv, not q           once per key, shared by a thread's two rows
 *   element  the rest               once per score
 *
 * Kernels work on groups of four scores, x[0..3] = (row 0, key 0), (row 0, key 1), (row 1, key
 * 0), (row 1, key 1), which is what one thread holds of a tensor-core product. A score a *
 * score + b that is affine in kv becomes two numbers a row; a mask that is one interval of
 * keys, two limits a row. What does not depend on score is exact IEEE f32, the rest may be
 * approximate. */
#include "cuda/cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TANH_GAIN_MOST = 64 }; /* softcap(50) and below */

typedef enum rate { ROW, COLUMN, ELEMENT } rate;

/* where text is being written: the copy's number is of the column (0, 1) or element (0..3) */
typedef struct place {
    rate rate;
    int copy;
} place;

typedef struct emitter {
    const mod_fn *fn;
    const plan_problem *problem;
    strbuf *out;
    int first_capture;  /* of this fn among the arguments */
    const double *gain; /* of a score: see find_gains */
} emitter;

static const char *const exact_text[MOD_OP_COUNT] = {
#define OP(name, signature, form, value, exact, fast, grad, range) [OP_##name] = exact,
#include "mod/ops.def"
#undef OP
};

static const char *const fast_text[MOD_OP_COUNT] = {
#define OP(name, signature, form, value, exact, fast, grad, range) [OP_##name] = fast,
#include "mod/ops.def"
#undef OP
};

static const char *type_text(const mod_node *n)
{
    static const char *const names[] = {"bool", "int", "float"};
    return names[n->type];
}

/* A thread's two rows may be of two heads (decode), so a key's value may not hang on the head.
 */
static rate rate_of(const mod_node *n)
{
    if (!(n->deps & (DEP_KV | DEP_SCORE)))
        return ROW;
    return n->deps & (DEP_Q | DEP_H | DEP_SCORE) ? ELEMENT : COLUMN;
}

static int is_leaf(const mod_node *n)
{
    return n->op <= OP_SCALAR;
}

static const mod_node *arg(const emitter *e, const mod_node *n, int i)
{
    return &e->fn->nodes[e->fn->args[n->args + i]];
}

static unsigned number_of(const emitter *e, const mod_node *n)
{
    return (unsigned)(n - e->fn->nodes);
}

static void put_float(strbuf *out, float x)
{
    char text[32];
    if (isnan(x)) {
        strbuf_puts(out, "NOT_A_NUMBER");
    } else if (isinf(x)) {
        strbuf_puts(out, x > 0 ? "POS_INF" : "NEG_INF");
    } else {
        snprintf(text, sizeof text, "%.9g", (double)x);
        const char *dot = strpbrk(text, ".e") ? "" : ".";
        strbuf_printf(out, x < 0 || signbit(x) ? "(%s%sf)" : "%s%sf", text, dot);
    }
}

static void put_int(strbuf *out, int32_t x)
{
    if (x == INT32_MIN)
        strbuf_puts(out, "(-2147483647 - 1)");
    else
        strbuf_printf(out, x < 0 ? "(%d)" : "%d", x);
}

/* Sizes that a plan fixes are numbers, the others come with each run. */
static void put_size(const emitter *e, strbuf *out, int which)
{
    const saccade_sizes *s = &e->problem->sizes;
    switch (which) {
    case SIZE_B:
        strbuf_puts(out, "p.B");
        break;
    case SIZE_Q:
        strbuf_puts(out, "p.M");
        break;
    case SIZE_KV:
        strbuf_puts(out, "p.N");
        break;
    case SIZE_H:
        put_int(out, (int32_t)s->H);
        break;
    case SIZE_HKV:
        put_int(out, (int32_t)s->Hkv);
        break;
    case SIZE_D:
        put_int(out, (int32_t)s->D);
        break;
    default:
        put_int(out, (int32_t)s->Dv);
        break;
    }
}

static void put_var(strbuf *out, int which, place at)
{
    const char *name = which == VAR_B ? "b" : which == VAR_H ? "h" : "q";
    if (which == VAR_KV)
        strbuf_printf(out, "k%d", at.copy % 2);
    else if (which == VAR_B || at.rate == ROW)
        strbuf_puts(out, name);
    else
        strbuf_printf(out, "r%d.%s", at.copy / 2, name);
}

/* The value of node n as seen from a place. */
static void put_value(const emitter *e, strbuf *out, const mod_node *n, place at)
{
    static const char *const reads[] = {"scalar_bool", "scalar_int", "scalar_float"};
    const unsigned i = number_of(e, n);
    switch (n->op) {
    case OP_BOOL:
        strbuf_puts(out, n->imm.i ? "true" : "false");
        return;
    case OP_INT:
        put_int(out, n->imm.i);
        return;
    case OP_FLOAT:
        put_float(out, n->imm.f);
        return;
    case OP_VAR:
        put_var(out, n->imm.i, at);
        return;
    case OP_SCORE:
        strbuf_printf(out, "(x[%d] * SCORE_SCALE)", at.copy);
        return;
    case OP_SIZE:
        put_size(e, out, n->imm.i);
        return;
    case OP_SCALAR:
        strbuf_printf(out, "%s(mod.cap[%d])", reads[n->type], e->first_capture + n->imm.i);
        return;
    default:
        break;
    }
    if (rate_of(n) == ROW && at.rate == ROW)
        strbuf_printf(out, "n%u", i);
    else if (rate_of(n) == ROW)
        strbuf_printf(out, "r%d.n%u", at.rate == COLUMN ? 0 : at.copy / 2, i);
    else if (rate_of(n) == COLUMN)
        strbuf_printf(out, "c%d_%u", at.copy % 2, i);
    else
        strbuf_printf(out, "e%d_%u", at.copy, i);
}

static void put_load(const emitter *e, const mod_node *n, place at)
{
    const mod_capture *c = &e->fn->captures[n->imm.i];
    const int cap = e->first_capture + n->imm.i;
    strbuf_printf(e->out, "load_%s(mod.cap[%d], ", saccade_dtype_name(c->dtype), cap);
    for (int d = 0; d < n->n_args; d++) {
        strbuf_printf(e->out, "%sstep(mod.cap[%d], %d, ", d ? " + " : "", cap, d);
        put_value(e, e->out, arg(e, n, d), at);
        strbuf_puts(e->out, ")");
    }
    strbuf_puts(e->out, ")");
}

/* A column of ops.def with operands put for $0 $1 $2. */
static void put_template(const emitter *e, const char *text, const mod_node *n, place at)
{
    for (; *text; text++) {
        if (text[0] == '$' && text[1] >= '0' && text[1] <= '2')
            put_value(e, e->out, arg(e, n, *++text - '0'), at);
        else
            strbuf_putc(e->out, *text);
    }
}

/* score times or over something that no key changes: scale and it become one factor */
static int is_scaled_score(const emitter *e, const mod_node *n)
{
    if (n->op == OP_fdiv)
        return arg(e, n, 0)->op == OP_SCORE && rate_of(arg(e, n, 1)) == ROW;
    return n->op == OP_fmul
           && ((arg(e, n, 0)->op == OP_SCORE && rate_of(arg(e, n, 1)) == ROW)
               || (arg(e, n, 1)->op == OP_SCORE && rate_of(arg(e, n, 0)) == ROW));
}

static void put_scaled_score(const emitter *e, const mod_node *n, place at)
{
    const mod_node *by = arg(e, n, arg(e, n, 0)->op == OP_SCORE ? 1 : 0);
    strbuf_printf(e->out, "x[%d] * (SCORE_SCALE * %s", at.copy,
                  n->op == OP_fdiv ? "sac_inverse(" : "(");
    put_value(e, e->out, by, at);
    strbuf_puts(e->out, "))");
}

/* One statement: node n at a place. */
static void put_node(const emitter *e, const mod_node *n, place at)
{
    const int is_late = (n->deps & DEP_SCORE) != 0;
    const int is_fast = is_late && e->problem->dtype != SACCADE_F32 && n->op != OP_ftanh;
    strbuf_printf(e->out, "    const %s ", type_text(n));
    put_value(e, e->out, n, at);
    strbuf_puts(e->out, " = ");
    if (n->op == OP_LOAD)
        put_load(e, n, at);
    else if (is_late && is_scaled_score(e, n))
        put_scaled_score(e, n, at);
    else
        put_template(e, is_fast ? fast_text[n->op] : exact_text[n->op], n, at);
    strbuf_puts(e->out, ";\n");
}

/* What user u, followed by the result g-fold, adds to how much it follows u's operand a. */
static double gain_through(const emitter *e, const mod_node *u, int a, double g)
{
    if (g == 0 || u->op == OP_fadd || u->op == OP_fsub)
        return g;
    if (u->op == OP_fmul && arg(e, u, 1 - a)->op == OP_FLOAT)
        return g * fabs((double)arg(e, u, 1 - a)->imm.f);
    return INFINITY;
}

/* By how much the result follows a change of each node, where constants say; else infinite. */
static void find_gains(const emitter *e, double *gain)
{
    const mod_fn *fn = e->fn;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        gain[i] = i == fn->result;
    for (uint32_t i = fn->n_nodes; i-- > 0;) {
        const mod_node *u = &fn->nodes[i];
        for (int a = 0; !is_leaf(u) && a < u->n_args; a++)
            gain[fn->args[u->args + a]] += gain_through(e, u, a, gain[i]);
    }
}

/* The fast tanh errs by 2.8e-7: a score must not magnify that. Mods in f32 never take it. */
static int is_fast_tanh(const emitter *e, uint32_t i)
{
    const mod_node *n = &e->fn->nodes[i];
    return n->op == OP_ftanh && n->deps & DEP_SCORE && e->problem->dtype != SACCADE_F32
           && e->gain && e->gain[i] <= TANH_GAIN_MOST;
}

/* tanh of four scores at once shares one reciprocal (arith.cuh) */
static void put_tanh4(const emitter *e, const mod_node *n)
{
    const unsigned i = number_of(e, n);
    for (int c = 0; c < 4; c++) {
        strbuf_printf(e->out, "    float e%d_%u = ", c, i);
        put_value(e, e->out, arg(e, n, 0), (place){ELEMENT, c});
        strbuf_puts(e->out, ";\n");
    }
    strbuf_printf(e->out, "    sac_tanh4(e0_%u, e1_%u, e2_%u, e3_%u);\n", i, i, i, i);
}

/* All nodes of one rate, each in all its copies; `except` is left out. */
static void put_rate(const emitter *e, rate which, const mod_node *except)
{
    const int copies = which == ROW ? 1 : which == COLUMN ? 2 : 4;
    for (uint32_t i = 0; i < e->fn->n_nodes; i++) {
        const mod_node *n = &e->fn->nodes[i];
        if (is_leaf(n) || rate_of(n) != which || n == except)
            continue;
        if (is_fast_tanh(e, i)) {
            put_tanh4(e, n);
            continue;
        }
        for (int c = 0; c < copies; c++)
            put_node(e, n, (place){which, c});
    }
}

/* marks row values that columns and elements read, or that are the result */
static void mark_kept(const emitter *e, unsigned char *kept)
{
    const mod_fn *fn = e->fn;
    memset(kept, 0, fn->n_nodes);
    kept[fn->result] = 1;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        for (int a = 0; rate_of(&fn->nodes[i]) != ROW && a < fn->nodes[i].n_args; a++)
            kept[fn->args[fn->nodes[i].args + a]] = 1;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        kept[i] = kept[i] && rate_of(&fn->nodes[i]) == ROW && !is_leaf(&fn->nodes[i]);
}

/* marks column values that elements read, or that are the result */
static int mark_columns(const emitter *e, unsigned char *kept)
{
    const mod_fn *fn = e->fn;
    int n = 0;
    memset(kept, 0, fn->n_nodes);
    kept[fn->result] = 1;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        for (int a = 0; rate_of(&fn->nodes[i]) == ELEMENT && a < fn->nodes[i].n_args; a++)
            kept[fn->args[fn->nodes[i].args + a]] = 1;
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        kept[i] = kept[i] && rate_of(&fn->nodes[i]) == COLUMN && !is_leaf(&fn->nodes[i]);
        n += kept[i];
    }
    return n;
}

static const char signature[] = "const mod_args &mod, const cu_fwd &p, int b, int h";

static void put_row_members(const emitter *e, const unsigned char *kept)
{
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        if (kept[i])
            strbuf_printf(e->out, "    %s n%u;\n", type_text(&e->fn->nodes[i]), (unsigned)i);
}

static void put_row_values(const emitter *e, const unsigned char *kept)
{
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        if (kept[i])
            strbuf_printf(e->out, "    r.n%u = n%u;\n", (unsigned)i, (unsigned)i);
}

/* <what>_row and <what>_row_begin: row values and who keeps them. */
static void put_row_struct(const emitter *e, const char *what, const unsigned char *kept)
{
    strbuf_printf(e->out, "struct %s_row {\n    int q, h;\n", what);
    put_row_members(e, kept);
    strbuf_printf(e->out,
                  "};\n\nDEVICE void %s_row_begin(%s, int q, %s_row &r)\n{\n"
                  "    r.q = q;\n    r.h = h;\n",
                  what, signature, what);
    put_rate(e, ROW, NULL);
    put_row_values(e, kept);
    strbuf_puts(e->out, "}\n\n");
}

/* A score c * X with a constant c > 0 leaves the factor to the exponent. */
static const mod_node *unit_of(const emitter *e, float *unit)
{
    const mod_node *root = &e->fn->nodes[e->fn->result];
    *unit = 1;
    if (root->op != OP_fmul || !(root->deps & DEP_SCORE))
        return root;
    for (int i = 0; i < 2; i++) {
        const mod_node *c = arg(e, root, i);
        if (c->op == OP_FLOAT && c->imm.f >= 1e-6f && c->imm.f <= 1e6f
            && arg(e, root, 1 - i)->op != OP_SCORE) {
            *unit = c->imm.f;
            return arg(e, root, 1 - i);
        }
    }
    return root;
}

static void put_score4(const emitter *e, const mod_node *root)
{
    const mod_node *top = &e->fn->nodes[e->fn->result];
    strbuf_printf(e->out,
                  "DEVICE void score4(%s, const score_row &r0, const score_row &r1,\n"
                  "                   int k0, int k1, float (&x)[4])\n{\n",
                  signature);
    put_rate(e, COLUMN, NULL);
    put_rate(e, ELEMENT, root != top ? top : NULL);
    for (int c = 0; c < 4; c++) {
        strbuf_printf(e->out, "    const float y%d = ", c);
        put_value(e, e->out, root, (place){ELEMENT, c});
        strbuf_puts(e->out, ";\n");
    }
    for (int c = 0; c < 4; c++)
        strbuf_printf(e->out, "    x[%d] = y%d;\n", c, c);
    strbuf_puts(e->out, "}\n\n");
}

/* k where the score's root is tanh(k * score) by the fast tanh, k of the bare dot product and a
 * positive constant of moderate size; else 0. */
static double tanh_rate(const emitter *e, const mod_node *root)
{
    if (!is_fast_tanh(e, number_of(e, root)))
        return 0;
    const mod_node *a = arg(e, root, 0);
    double k = e->problem->scale;
    if (a->op == OP_fdiv && arg(e, a, 0)->op == OP_SCORE && arg(e, a, 1)->op == OP_FLOAT)
        k /= (double)arg(e, a, 1)->imm.f;
    else if (a->op == OP_fmul && arg(e, a, 0)->op == OP_SCORE && arg(e, a, 1)->op == OP_FLOAT)
        k *= (double)arg(e, a, 1)->imm.f;
    else if (a->op == OP_fmul && arg(e, a, 1)->op == OP_SCORE && arg(e, a, 0)->op == OP_FLOAT)
        k *= (double)arg(e, a, 0)->imm.f;
    else if (a->op != OP_SCORE)
        return 0;
    return k > 0x1p-11 && k < 0x1p3 ? k : 0; /* coefficients stay normal numbers */
}

/* The polynomial of rows.cuh's rows_exp_tanh: tanh x = x P(x^2 - 1/4) for |x| < 1/2, by minimax
 * of the relative error, 1.3e-8. */
static void put_tanh_factor(strbuf *out, double k, double unit)
{
    static const double c[] = {0.9242343266534846, -0.2755707485545114, 0.09993386420648827,
                               -0.035851068581223014, 0.01713500679008545};
    double power = k * unit * 1.4426950408889634;
    strbuf_puts(out, "#define TANH_EDGE ");
    put_float(out, (float)(0.25 / (k * k)));
    for (int i = 0; i < 5; i++, power *= k * k) {
        strbuf_printf(out, "\n#define TANH_C%d ", i);
        put_float(out, (float)(c[i] * power));
    }
    strbuf_putc(out, '\n');
}

/* Whether every score lies within +-35, by ranges over all positions. */
static int is_bounded(const mod_fn *fn)
{
    enum { MOST = (1 << 30) - 1 };
    const float limit = 35;
    const eval_env unknown = {{1, 1, 1, 1, 1, 1, 1}, NULL};
    const pass_box box = {{0, 0, -MOST, -MOST}, {MOST, MOST, MOST, MOST}};
    pass_range *ranges = malloc(fn->n_nodes * sizeof *ranges);
    if (!ranges)
        return 0;
    pass_ranges(fn, &unknown, &box, NULL, ranges);
    const pass_range *r = &ranges[fn->result];
    const int bounded = r->flo >= -limit && r->fhi <= limit;
    free(ranges);
    return bounded;
}

static saccade_status put_score(emitter *e, cu_mod_text *facts, saccade_error *err)
{
    float unit;
    const mod_node *root = unit_of(e, &unit);
    double *gain = malloc(e->fn->n_nodes * (sizeof *gain + 1));
    FAIL_IF_NULL(gain);
    unsigned char *kept = (unsigned char *)(gain + e->fn->n_nodes);
    find_gains(e, gain);
    mark_kept(e, kept);
    e->gain = gain;
    strbuf_puts(e->out, "#define SCORE_UNIT ");
    put_float(e->out, unit);
    const double k = tanh_rate(e, root);
    strbuf_printf(e->out, "\n#define SCORE_TANH %d\n", k > 0);
    facts->is_bounded = k > 0 || is_bounded(e->fn); /* softcap spreads no scores apart */
    if (k > 0)
        put_tanh_factor(e->out, k, (double)unit);
    strbuf_puts(e->out, "\n");
    put_row_struct(e, "score", kept);
    put_score4(e, root);
    e->gain = NULL;
    free(gain);
    return SACCADE_OK;
}

/* mask_column and mask_column_begin: what a key gives to all rows. Kernels make it once a block
 * and share it: a captured tensor is then read once a key, not once a score. */
static void put_columns(const emitter *e, const unsigned char *kept, int n)
{
    strbuf_printf(e->out, "#define MASK_COLUMN_WORDS %d\nstruct mask_column {\n", n);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        if (kept[i])
            strbuf_printf(e->out, "    %s c%u;\n",
                          e->fn->nodes[i].type == MOD_FLOAT ? "float" : "int", (unsigned)i);
    strbuf_printf(e->out,
                  "};\n\nDEVICE void mask_column_begin(%s, const mask_row &r0, int k0,\n"
                  "                              mask_column &c)\n{\n",
                  signature);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        if (rate_of(&e->fn->nodes[i]) == COLUMN && !is_leaf(&e->fn->nodes[i]))
            put_node(e, &e->fn->nodes[i], (place){COLUMN, 0});
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        if (kept[i])
            strbuf_printf(e->out, "    c.c%u = c0_%u;\n", (unsigned)i, (unsigned)i);
    strbuf_puts(e->out, "}\n\n");
}

static void put_mask4(const emitter *e, const unsigned char *columns)
{
    strbuf_printf(
        e->out,
        "DEVICE void mask4(%s, const mask_row &r0, const mask_row &r1, int k0, int k1,\n"
        "                  const mask_column &c0, const mask_column &c1,\n"
        "                  bool (&live)[4])\n{\n",
        signature);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        for (int c = 0; columns[i] && c < 2; c++)
            strbuf_printf(e->out, "    const %s c%d_%u = c%d.c%u;\n",
                          type_text(&e->fn->nodes[i]), c, (unsigned)i, c, (unsigned)i);
    put_rate(e, ELEMENT, NULL);
    for (int c = 0; c < 4; c++) {
        strbuf_printf(e->out, "    live[%d] = ", c);
        put_value(e, e->out, &e->fn->nodes[e->fn->result], (place){ELEMENT, c});
        strbuf_puts(e->out, ";\n");
    }
    strbuf_puts(e->out, "}\n\n");
}

static saccade_status put_mask(const emitter *e, cu_mod_text *facts, saccade_error *err)
{
    unsigned char *kept = malloc(e->fn->n_nodes);
    FAIL_IF_NULL(kept);
    mark_kept(e, kept);
    put_row_struct(e, "mask", kept);
    facts->column_words = mark_columns(e, kept);
    put_columns(e, kept, facts->column_words);
    put_mask4(e, kept);
    free(kept);
    return SACCADE_OK;
}

/* Limits of an interval mask: bounds is free of kv. */
static void put_interval(const emitter *e, const uint32_t bounds[2])
{
    strbuf_printf(e->out,
                  "/* live: from <= kv < to */\n"
                  "DEVICE void mask_interval(%s, int q, int &from, int &to)\n{\n",
                  signature);
    put_rate(e, ROW, NULL);
    strbuf_puts(e->out, "    from = ");
    put_value(e, e->out, &e->fn->nodes[bounds[0]], (place){ROW, 0});
    strbuf_puts(e->out, ";\n    to = ");
    put_value(e, e->out, &e->fn->nodes[bounds[1]], (place){ROW, 0});
    strbuf_puts(e->out, ";\n}\n\n");
}

/* ---- scores affine in kv: coefficient and rest as text over row values ---- */

enum { LINEAR_DEPTH = 12 };

typedef struct linear {
    strbuf slope, rest;
} linear;

static void linear_init(linear *l)
{
    strbuf_init(&l->slope, 2000);
    strbuf_init(&l->rest, 2000);
}

static void linear_free(linear *l)
{
    strbuf_free(&l->slope);
    strbuf_free(&l->rest);
}

static int linear_of(const emitter *e, const mod_node *n, int depth, linear *out);

static int linear_sum(const emitter *e, const mod_node *n, int depth, linear *out)
{
    const char sign = n->op == OP_isub || n->op == OP_fsub ? '-' : '+';
    linear x, y;
    linear_init(&x);
    linear_init(&y);
    const int ok =
        linear_of(e, arg(e, n, 0), depth, &x) && linear_of(e, arg(e, n, 1), depth, &y);
    strbuf_printf(&out->slope, "(%s %c %s)", strbuf_text(&x.slope), sign,
                  strbuf_text(&y.slope));
    strbuf_printf(&out->rest, "(%s %c %s)", strbuf_text(&x.rest), sign, strbuf_text(&y.rest));
    linear_free(&x);
    linear_free(&y);
    return ok;
}

/* x wrapped by text on both sides; by: a further operand that kv does not change, or NULL */
static int linear_wrap(const emitter *e, const mod_node *n, const char *before,
                       const mod_node *by, const char *between, const mod_node *x, int depth,
                       linear *out)
{
    linear inner;
    (void)n;
    linear_init(&inner);
    const int ok = linear_of(e, x, depth, &inner);
    strbuf *to[2] = {&out->slope, &out->rest};
    const strbuf *from[2] = {&inner.slope, &inner.rest};
    for (int i = 0; i < 2; i++) {
        strbuf_printf(to[i], "(%s(%s)%s", before, strbuf_text(from[i]), between);
        if (by)
            put_value(e, to[i], by, (place){ROW, 0});
        strbuf_puts(to[i], ")");
    }
    linear_free(&inner);
    return ok;
}

/* Tells whether n = slope * kv + rest with both free of kv, and writes them. */
static int linear_of(const emitter *e, const mod_node *n, int depth, linear *out)
{
    if (!(n->deps & DEP_KV)) {
        strbuf_puts(&out->slope, n->type == MOD_FLOAT ? "0.f" : "0");
        put_value(e, &out->rest, n, (place){ROW, 0});
        return !(n->deps & DEP_SCORE);
    }
    if (depth == 0 || n->deps & DEP_SCORE)
        return 0;
    switch (n->op) {
    case OP_VAR:
        strbuf_puts(&out->slope, "1");
        strbuf_puts(&out->rest, "0");
        return 1;
    case OP_iadd:
    case OP_isub:
    case OP_fadd:
    case OP_fsub:
        return linear_sum(e, n, depth - 1, out);
    case OP_ineg:
    case OP_fneg:
        return linear_wrap(e, n, "-", NULL, "", arg(e, n, 0), depth - 1, out);
    case OP_i2f:
        return linear_wrap(e, n, "(float)", NULL, "", arg(e, n, 0), depth - 1, out);
    case OP_fmul: {
        const int side = arg(e, n, 0)->deps & DEP_KV ? 0 : 1;
        return !(arg(e, n, 1 - side)->deps & DEP_KV)
               && linear_wrap(e, n, "", arg(e, n, 1 - side), " * ", arg(e, n, side), depth - 1,
                              out);
    }
    case OP_fdiv:
        return !(arg(e, n, 1)->deps & DEP_KV)
               && linear_wrap(e, n, "", arg(e, n, 1), " * sac_inverse", arg(e, n, 0), depth - 1,
                              out);
    default:
        return 0;
    }
}

/* The offset itself at one key, exact: what of it no key changes comes from the row. */
static saccade_status put_offset(const emitter *e, saccade_error *err)
{
    unsigned char *kept = malloc(e->fn->n_nodes);
    FAIL_IF_NULL(kept);
    mark_kept(e, kept);
    strbuf_puts(
        e->out,
        "/* score + offset; the offset grows by alpha a key, alpha_raw: before scale */\n"
        "struct score_row {\n    int q, h;\n    float alpha, alpha_raw;\n");
    put_row_members(e, kept);
    strbuf_printf(e->out,
                  "};\n\nDEVICE float score_offset(%s, const score_row &r0, int k0)\n{\n",
                  signature);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++) {
        const mod_node *n = &e->fn->nodes[i];
        if (!is_leaf(n) && rate_of(n) != ROW)
            put_node(e, n, (place){rate_of(n), 0});
    }
    strbuf_puts(e->out, "    return ");
    put_value(e, e->out, &e->fn->nodes[e->fn->result], (place){ELEMENT, 0});
    strbuf_puts(e->out, ";\n}\n\n");
    strbuf_printf(e->out,
                  "DEVICE void score_row_begin(%s, int q, score_row &r)\n{\n"
                  "    r.q = q;\n    r.h = h;\n",
                  signature);
    put_rate(e, ROW, NULL);
    put_row_values(e, kept);
    free(kept);
    return SACCADE_OK;
}

/* score + offset(kv), affine in kv, with a scale that can be divided by. found: it is that. */
static saccade_status put_affine(emitter *e, arena *scratch, int *found, saccade_error *err)
{
    const mod_fn *slope, *offset, *whole = e->fn;
    linear l;
    *found = 0;
    if (!(e->problem->scale >= 1e-20f) || e->problem->dtype == SACCADE_F32
        || !pass_affine(e->fn, scratch, &slope, &offset))
        return SACCADE_OK;
    const mod_node *one = &slope->nodes[slope->result];
    if (one->op != OP_FLOAT || one->imm.f != 1)
        return SACCADE_OK;
    saccade_status status = SACCADE_OK;
    e->fn = offset;
    linear_init(&l);
    *found = linear_of(e, &offset->nodes[offset->result], LINEAR_DEPTH, &l)
             && l.slope.failed == SACCADE_OK;
    if (*found)
        status = put_offset(e, err);
    if (*found && status == SACCADE_OK)
        strbuf_printf(e->out, "    r.alpha = %s;\n    r.alpha_raw = r.alpha / p.scale;\n}\n\n",
                      strbuf_text(&l.slope));
    linear_free(&l);
    e->fn = whole;
    return status;
}

static saccade_status emit_score(emitter *e, arena *scratch, cu_mod_text *facts,
                                 saccade_error *err)
{
    e->fn = e->problem->score;
    facts->score = CU_SCORE_NONE;
    if (!e->fn)
        return SACCADE_OK;
    int is_affine;
    TRY(put_affine(e, scratch, &is_affine, err));
    if (is_affine) {
        facts->score = CU_SCORE_AFFINE;
        return SACCADE_OK;
    }
    facts->score = CU_SCORE_GENERAL;
    return put_score(e, facts, err);
}

static saccade_status emit_mask(emitter *e, arena *scratch, cu_mod_text *facts,
                                saccade_error *err)
{
    const mod_fn *bounds_fn;
    uint32_t bounds[2];
    facts->mask = CU_MASK_NONE;
    if (!e->problem->mask)
        return SACCADE_OK;
    e->fn = e->problem->mask;
    if (pass_interval(e->fn, scratch, &bounds_fn, bounds)) {
        e->fn = bounds_fn;
        put_interval(e, bounds);
        facts->mask = CU_MASK_INTERVAL;
        return SACCADE_OK;
    }
    facts->mask = CU_MASK_GENERAL;
    return put_mask(e, facts, err);
}

saccade_status cu_emit_mod(const plan_problem *problem, arena *scratch, strbuf *out,
                           cu_mod_text *facts, saccade_error *err)
{
    static const char *const scores[] = {"SCORE_NONE", "SCORE_AFFINE", "SCORE_GENERAL"};
    static const char *const masks[] = {"MASK_NONE", "MASK_INTERVAL", "MASK_GENERAL"};
    emitter e = {.problem = problem, .out = out};
    const int n_score = problem->score ? (int)problem->score->n_captures : 0;
    const int n_mask = problem->mask ? (int)problem->mask->n_captures : 0;
    facts->n_captures = n_score + n_mask;
    facts->column_words = facts->is_bounded = 0;
    strbuf_printf(out,
                  "/* generated: the user's score and mask */\n#pragma once\n\n"
                  "struct mod_args {\n    cu_capture cap[%d];\n};\n\n",
                  facts->n_captures ? facts->n_captures : 1);
    TRY(emit_score(&e, scratch, facts, err));
    e.first_capture = n_score;
    TRY(emit_mask(&e, scratch, facts, err));
    strbuf_printf(out, "#define MOD_SCORE %s\n#define MOD_MASK %s\n", scores[facts->score],
                  masks[facts->mask]);
    return strbuf_status(out, err);
}

/* ---- the two wgmma products ---- */

static void put_list(strbuf *out, const char *format, int n)
{
    for (int i = 0; i < n; i++) {
        strbuf_puts(out, i ? ", " : "");
        strbuf_printf(out, format[0] == '%' ? "%%%d" : "\"+f\"(d[%d])", i);
        if (i % 12 == 11 && format[0] != '%')
            strbuf_puts(out, "\n          ");
    }
}

void cu_emit_products(const cu_tile *tile, int E, int is_f16, strbuf *out)
{
    const char *type = is_f16 ? "f16" : "bf16";
    const int s = tile->keys / 2, o = E / 2;
    strbuf_printf(
        out,
        "/* generated: S = Q K^T (both in shared memory) and O += P V (P in registers) */\n"
        "#pragma once\n\n"
        "DEVICE void wgmma_qk(float (&d)[%d], u64 a, u64 b, int add)\n{\n"
        "    asm volatile(\"{.reg .pred p; setp.ne.b32 p, %%%d, 0;\\n\"\n"
        "        \"wgmma.mma_async.sync.aligned.m64n%dk16.f32.%s.%s {",
        s, s + 2, tile->keys, type, type);
    put_list(out, "%", s);
    strbuf_printf(out, "}, %%%d, %%%d, p, 1, 1, 0, 0;}\"\n        : ", s, s + 1);
    put_list(out, "d", s);
    strbuf_printf(
        out,
        "\n        : \"l\"(a), \"l\"(b), \"r\"(add));\n}\n\n"
        "DEVICE void wgmma_pv(float (&d)[%d], u32 a0, u32 a1, u32 a2, u32 a3, u64 b)\n{\n"
        "    asm volatile(\"wgmma.mma_async.sync.aligned.m64n%dk16.f32.%s.%s {",
        o, E, type, type);
    put_list(out, "%", o);
    strbuf_printf(out, "}, {%%%d, %%%d, %%%d, %%%d}, %%%d, 1, 1, 1, 1;\"\n        : ", o, o + 1,
                  o + 2, o + 3, o + 4);
    put_list(out, "d", o);
    strbuf_puts(out, "\n        : \"r\"(a0), \"r\"(a1), \"r\"(a2), \"r\"(a3), \"l\"(b));\n}\n");
}
