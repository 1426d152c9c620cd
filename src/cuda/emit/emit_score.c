/* CUDA text of a score function. One that is affine in kv, a * score + b, becomes two numbers a
 * row; another, a function of four scores, and a soft cap a polynomial besides. */
#include "cuda/emit/emit.h"

#include <math.h>
#include <stdlib.h>

/* A score c * X with a constant c > 0 leaves the factor to the exponent. */
static const mod_node *unit_of(const emitter *e, float *unit)
{
    const mod_node *root = &e->fn->nodes[e->fn->result];
    *unit = 1;
    if (root->op != OP_fmul || !(root->deps & DEP_SCORE))
        return root;
    for (int i = 0; i < 2; i++) {
        const mod_node *c = emit_arg(e, root, i);
        if (c->op == OP_FLOAT && c->imm.f >= 1e-6f && c->imm.f <= 1e6f
            && emit_arg(e, root, 1 - i)->op != OP_SCORE) {
            *unit = c->imm.f;
            return emit_arg(e, root, 1 - i);
        }
    }
    return root;
}

static void put_score4(const emitter *e, const mod_node *root)
{
    const mod_node *top = &e->fn->nodes[e->fn->result];
    strbuf_printf(e->out,
                  "DEVICE void score4(%s, const score_row &r0, const score_row &r1,\n"
                  "                   int k0, int k1, float (&x)[4] SCORE_TILES%s)\n{\n",
                  EMIT_SIGNATURE, e->shares ? ", const score_shared &shared" : "");
    emit_nodes(e, COLUMN, NULL);
    emit_nodes(e, ELEMENT, root != top ? top : NULL);
    for (int c = 0; c < 4; c++) {
        strbuf_printf(e->out, "    const float y%d = ", c);
        emit_value(e, e->out, root, (place){ELEMENT, c});
        strbuf_puts(e->out, ";\n");
    }
    for (int c = 0; c < 4; c++)
        strbuf_printf(e->out, "    x[%d] = y%d;\n", c, c);
    strbuf_puts(e->out, "}\n\n");
}

double emit_tanh_rate(const emitter *e, const mod_node *root)
{
    if (!emit_is_fast_tanh(e, emit_number(e, root)))
        return 0;
    const mod_node *a = emit_arg(e, root, 0);
    double k = (float)e->problem->scale; /* as kernels hold it */
    if (a->op == OP_fdiv && emit_arg(e, a, 0)->op == OP_SCORE
        && emit_arg(e, a, 1)->op == OP_FLOAT)
        k /= (double)emit_arg(e, a, 1)->imm.f;
    else if (a->op == OP_fmul && emit_arg(e, a, 0)->op == OP_SCORE
             && emit_arg(e, a, 1)->op == OP_FLOAT)
        k *= (double)emit_arg(e, a, 1)->imm.f;
    else if (a->op == OP_fmul && emit_arg(e, a, 1)->op == OP_SCORE
             && emit_arg(e, a, 0)->op == OP_FLOAT)
        k *= (double)emit_arg(e, a, 0)->imm.f;
    else if (a->op != OP_SCORE)
        return 0;
    return k > 0x1p-11 && k < 0x1p3 ? k : 0; /* coefficients stay normal numbers */
}

/* The polynomial of rows_exp_tanh (mod_score.cuh): tanh x = x P(x^2 - 1/4) for |x| < 1/2, by
 * minimax of the relative error, 1.3e-8. */
static void put_tanh_factor(strbuf *out, double k, double unit)
{
    static const double c[] = {0.9242343266534846, -0.2755707485545114, 0.09993386420648827,
                               -0.035851068581223014, 0.01713500679008545};
    double power = k * unit * 1.4426950408889634;
    strbuf_puts(out, "#define TANH_EDGE ");
    emit_float(out, (float)(0.25 / (k * k)));
    for (int i = 0; i < 5; i++, power *= k * k) {
        strbuf_printf(out, "\n#define TANH_C%d ", i);
        emit_float(out, (float)(c[i] * power));
    }
    strbuf_putc(out, '\n');
}

static saccade_status put_score(emitter *e, cu_mod_text *facts, saccade_error *err)
{
    float unit;
    const mod_node *root = unit_of(e, &unit);
    const pass_facts *known = e->problem->score_facts;
    unsigned char *kept = malloc(e->fn->n_nodes);
    FAIL_IF_NULL(kept);
    emit_mark_kept(e, kept);
    e->gain = known->gain;
    strbuf_puts(e->out, "#define SCORE_UNIT ");
    emit_float(e->out, unit);
    const double k = emit_tanh_rate(e, root);
    /* whether the polynomial holds is one vote for the rows of a warp */
    strbuf_printf(e->out, "\n#define SCORE_TANH %d\n#define SCORE_IS_LOW %d\n",
                  k > 0 && !e->problem->is_invariant, known->may_be_lowest);
    if (k > 0)
        put_tanh_factor(e->out, k, (double)unit);
    strbuf_puts(e->out, "\n");
    emit_row_struct(e, "score", kept);
    free(kept);
    saccade_status status = emit_dense(e, "score", "SCORE", facts, err);
    if (status == SACCADE_OK) {
        put_score4(e, root);
        status = emit_shares(e, "score", "SCORE", &e->fn->result, 1, 0, facts, err);
    }
    if (e->shares) {
        put_score4(e, root);
        emit_shares_end(e);
    }
    e->n_dense = 0;
    e->gain = NULL;
    return status;
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
    const int ok = linear_of(e, emit_arg(e, n, 0), depth, &x)
                   && linear_of(e, emit_arg(e, n, 1), depth, &y);
    strbuf_printf(&out->slope, "(%s %c %s)", strbuf_text(&x.slope), sign,
                  strbuf_text(&y.slope));
    strbuf_printf(&out->rest, "(%s %c %s)", strbuf_text(&x.rest), sign, strbuf_text(&y.rest));
    linear_free(&x);
    linear_free(&y);
    return ok;
}

/* before(x), or x times a factor that kv does not change: function(by), by NULL for none */
static int linear_wrap(const emitter *e, const char *before, const mod_node *by,
                       const char *function, const mod_node *x, int depth, linear *out)
{
    linear inner;
    linear_init(&inner);
    const int ok = linear_of(e, x, depth, &inner);
    strbuf *to[2] = {&out->slope, &out->rest};
    const strbuf *from[2] = {&inner.slope, &inner.rest};
    for (int i = 0; i < 2; i++) {
        strbuf_printf(to[i], "(%s(%s)", before, strbuf_text(from[i]));
        if (by) {
            strbuf_printf(to[i], " * %s(", function);
            emit_value(e, to[i], by, (place){ROW, 0});
            strbuf_puts(to[i], ")");
        }
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
        emit_value(e, &out->rest, n, (place){ROW, 0});
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
        return linear_wrap(e, "-", NULL, "", emit_arg(e, n, 0), depth - 1, out);
    case OP_i2f:
        return linear_wrap(e, "(float)", NULL, "", emit_arg(e, n, 0), depth - 1, out);
    case OP_fmul: {
        const int side = emit_arg(e, n, 0)->deps & DEP_KV ? 0 : 1;
        return !(emit_arg(e, n, 1 - side)->deps & DEP_KV)
               && linear_wrap(e, "", emit_arg(e, n, 1 - side), "", emit_arg(e, n, side),
                              depth - 1, out);
    }
    case OP_fdiv:
        return !(emit_arg(e, n, 1)->deps & DEP_KV)
               && linear_wrap(e, "", emit_arg(e, n, 1), "sac_inverse", emit_arg(e, n, 0),
                              depth - 1, out);
    default:
        return 0;
    }
}

/* The offset itself at one key, exact: what of it no key changes comes from the row. */
static saccade_status put_offset(const emitter *e, saccade_error *err)
{
    unsigned char *kept = malloc(e->fn->n_nodes);
    FAIL_IF_NULL(kept);
    emit_mark_kept(e, kept);
    strbuf_puts(
        e->out,
        "/* score + offset; the offset grows by alpha a key, alpha_raw: before scale */\n"
        "struct score_row {\n    int q, h;\n    float alpha, alpha_raw;\n");
    emit_row_members(e, kept);
    strbuf_printf(e->out,
                  "};\n\nDEVICE float score_offset(%s, const score_row &r0, int k0)\n{\n",
                  EMIT_SIGNATURE);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++) {
        const mod_node *n = &e->fn->nodes[i];
        if (!emit_is_leaf(n) && emit_rate_of(n) != ROW)
            emit_node(e, n, (place){emit_rate_of(n), 0});
    }
    strbuf_puts(e->out, "    return ");
    emit_value(e, e->out, &e->fn->nodes[e->fn->result], (place){ELEMENT, 0});
    strbuf_puts(e->out, ";\n}\n\n");
    strbuf_printf(e->out,
                  "DEVICE void score_row_begin(%s, int q, score_row &r)\n{\n"
                  "    r.q = q;\n    r.h = h;\n",
                  EMIT_SIGNATURE);
    emit_nodes(e, ROW, NULL);
    emit_row_values(e, kept);
    free(kept);
    return SACCADE_OK;
}

/* score + offset(kv), affine in kv, with a scale that can be divided by and no number beside
 * which a score is nothing, as rows are shifted after their weights. found: it is that. */
static saccade_status put_affine(emitter *e, int *found, saccade_error *err)
{
    const pass_facts *known = e->problem->score_facts;
    const mod_fn *slope = known->slope, *offset = known->offset, *whole = e->fn;
    linear l;
    *found = 0;
    if (!(e->problem->scale >= 1e-20f) || e->problem->dtype == SACCADE_F32 || !slope
        || known->is_far)
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

saccade_status emit_score(emitter *e, cu_mod_text *facts, saccade_error *err)
{
    e->fn = e->problem->score;
    facts->score = CU_SCORE_NONE;
    if (!e->fn)
        return SACCADE_OK;
    int is_affine;
    TRY(put_affine(e, &is_affine, err));
    if (is_affine) {
        facts->score = CU_SCORE_AFFINE;
        return SACCADE_OK;
    }
    facts->score = CU_SCORE_GENERAL;
    return put_score(e, facts, err);
}
