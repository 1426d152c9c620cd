/* CUDA text of a score function for backward: its value and its derivative by the incoming
 * score, from one graph. */
#include "cuda/emit/emit.h"

#include <math.h>
#include <stdlib.h>

static void put_results(const emitter *e, const char *to, uint32_t node)
{
    for (int c = 0; c < 4; c++) {
        strbuf_printf(e->out, "    const float %s_%d = ", to, c);
        emit_value(e, e->out, &e->fn->nodes[node], (place){ELEMENT, c});
        strbuf_puts(e->out, ";\n");
    }
}

/* x: bare dot products become scores in natural units; slope: derivatives by scale * dot */
static void put_slope4(const emitter *e, const uint32_t results[2])
{
    strbuf_printf(e->out,
                  "DEVICE void slope4(%s, const slope_row &r0, const slope_row &r1,\n"
                  "                   int k0, int k1, float (&x)[4], float (&slope)[4]"
                  " SCORE_TILES%s)\n{\n",
                  EMIT_SIGNATURE, e->shares ? ", const slope_shared &shared" : "");
    emit_nodes(e, COLUMN, NULL);
    emit_nodes(e, ELEMENT, NULL);
    put_results(e, "value", results[0]);
    put_results(e, "by_score", results[1]);
    for (int c = 0; c < 4; c++)
        strbuf_printf(e->out, "    x[%d] = value_%d;\n    slope[%d] = by_score_%d;\n", c, c, c,
                      c);
    strbuf_puts(e->out, "}\n\n");
}

/* Whether a score may be -inf where no mask says so: not one of a cap, nor a finite line. */
static int may_mask(const plan_problem *p)
{
    const mod_fn *fn = p->score;
    const mod_node *n = &fn->nodes[fn->result];
    for (int i = 0; n->op == OP_fmul && i < 2; i++)
        if (fn->nodes[fn->args[n->args + i]].op == OP_FLOAT
            && isfinite(fn->nodes[fn->args[n->args + i]].imm.f)) {
            n = &fn->nodes[fn->args[n->args + 1 - i]];
            break;
        }
    return n->op != OP_ftanh && !p->score_facts->is_finite_line;
}

/* Whether an operation may have no finite result for finite operands. */
static int may_be_special(const emitter *e, const mod_node *n)
{
    switch (n->op) {
    case OP_LOAD:
    case OP_fsqrt:
        return 1;
    case OP_fdiv: {
        const mod_node *by = emit_arg(e, n, 1);
        return by->op != OP_FLOAT || by->imm.f == 0;
    }
    default:
        return pass_gives_infinities(n->op);
    }
}

/* Whether scores may be NaN or +inf at positions that a run does not have. */
static int may_be_nan(const mod_fn *score)
{
    const emitter e = {.fn = score};
    int any = 0;
    for (uint32_t i = 0; i < score->n_nodes; i++)
        any |= may_be_special(&e, &score->nodes[i]);
    return any;
}

static int is_minus_infinity(const mod_node *n)
{
    return n->op == OP_FLOAT && isinf(n->imm.f) && n->imm.f < 0;
}

/* Whether a value is the incoming score with something added to it, or -inf, where no weight is
 * left that a derivative could be multiplied by. */
static int is_score_or_masked(const emitter *e, const mod_node *n)
{
    const mod_node *of[3];
    if (n->op == OP_SCORE)
        return 1;
    if (n->op != OP_fadd && n->op != OP_fsub && n->op != OP_fsel)
        return 0;
    for (int i = 0; i < (n->op == OP_fsel ? 3 : 2); i++)
        of[i] = emit_arg(e, n, i);
    if (n->op == OP_fsel)
        return !(of[0]->deps & DEP_SCORE)
               && (is_minus_infinity(of[1]) || is_score_or_masked(e, of[1]))
               && (is_minus_infinity(of[2]) || is_score_or_masked(e, of[2]));
    if (of[0]->deps & DEP_SCORE)
        return !(of[1]->deps & DEP_SCORE) && is_score_or_masked(e, of[0]);
    return n->op == OP_fadd && is_score_or_masked(e, of[1]);
}

/* c * tanh(k * score), a soft cap: its constants, for Hopper's tiles. */
static void put_cap(const emitter *both, strbuf *out)
{
    emitter e = {.fn = both->problem->score,
                 .problem = both->problem,
                 .gain = both->problem->score_facts->gain};
    const mod_node *n = &e.fn->nodes[e.fn->result];
    double c = 0, k = 0;
    for (int i = 0; n->op == OP_fmul && i < 2 && k == 0; i++)
        if (emit_arg(&e, n, i)->op == OP_FLOAT) {
            c = (double)emit_arg(&e, n, i)->imm.f;
            k = emit_tanh_rate(&e, emit_arg(&e, n, 1 - i));
        }
    strbuf_printf(out, "#define SLOPE_CAP %d\n", k > 0);
    if (k == 0)
        return;
    strbuf_puts(out, "#define CAP_RATE "); /* e^(2 k x) as a power of 2 */
    emit_float(out, (float)(2.8853900817779268 * k));
    strbuf_puts(out, "\n#define CAP_MOST "); /* in log2 units */
    emit_float(out, (float)(1.4426950408889634 * c));
    strbuf_puts(out, "\n#define CAP_SLOPE "); /* where tanh is 0 */
    emit_float(out, (float)(c * k / (double)(float)e.problem->scale));
    strbuf_puts(out, "\n");
}

/* A value that jumps has no gain, but its slope may have a bound; one far above the slopes that
 * there are would leave sums in fixed point few digits. (A score at a jump that backward rounds
 * to its other side has another weight than in forward, by any way.) */
static double slope_most(const mod_fn *both, uint32_t slope, double gain, arena *scratch)
{
    enum { MOST = 4096 };
    const double largest = isinf(gain) ? pass_largest(both, slope, scratch) : gain;
    return isinf(gain) && largest > MOST ? (double)INFINITY : largest;
}

saccade_status emit_slope(emitter *e, arena *scratch, cu_mod_text *facts, saccade_error *err)
{
    const plan_problem *p = e->problem;
    const pass_facts *known = p->score_facts;
    const mod_fn *both;
    cu_reads_found reads;
    uint32_t wanted[1 + CU_READS_MOST], results[2 + CU_READS_MOST];
    facts->score = CU_SCORE_NONE;
    facts->slope_most = 1;
    facts->has_row_slope = facts->is_head_slope = facts->n_terms = 0;
    facts->kept = (cu_shares){0};
    if (!p->score) {
        strbuf_puts(e->out, "#define SLOPE_ONE 1\n#define SCORE_MAY_MASK 0\n"
                            "#define SCORE_MAY_BE_NAN 0\n"
                            "#define SLOPE_IS_FINITE 1\n#define SLOPE_CAP 0\n"
                            "#define SCORE_LINE 0\n#define ROW_SLOPE 0\n"
                            "#define HEAD_SLOPE 0\n#define SCORE_TILES\n");
        return SACCADE_OK;
    }
    cu_find_reads(p, &reads);
    wanted[0] = pass_find_score(p->score);
    for (int r = 0; r < reads.n; r++)
        wanted[1 + r] = reads.read[r]->node;
    TRY(pass_value_and_gradient(p->score, wanted, 1 + (uint32_t)reads.n, scratch, &both,
                                results, err));
    /* The value's gains do for the slope: a value that follows a tanh t by a bounded factor has
     * a slope that follows 1 - t * t by that factor, whose error is twice that of t. */
    e->gain = pass_gains(both, results[0], scratch);
    FAIL_IF_NULL(e->gain);
    unsigned char *kept = malloc(both->n_nodes);
    FAIL_IF_NULL(kept);
    e->fn = both;
    emit_mark_kept(e, kept);
    for (int i = 0; i < 2 + reads.n; i++) {
        const mod_node *n = &both->nodes[results[i]];
        kept[results[i]] |= emit_rate_of(n) == ROW && !emit_is_leaf(n);
    }
    emit_row_struct(e, "slope", kept);
    free(kept);
    TRY(emit_dense(e, "score", "SCORE", facts, err));
    put_slope4(e, results);
    TRY(emit_shares(e, "slope", "SLOPE", results, 2, 1, facts, err));
    if (e->shares) {
        put_slope4(e, results);
        emit_shares_end(e);
    }
    e->n_dense = 0;
    facts->is_head_slope = emit_has_head_slope(p);
    if (cu_has_captures(p)) {
        TRY(emit_reads(e, &reads, results, facts, err));
        TRY(emit_terms(e, &reads, results, scratch, facts, err));
    }
    const int is_one =
        emit_has_slope_one(p)
        || (!facts->is_head_slope && is_score_or_masked(e, &both->nodes[results[0]]));
    strbuf_printf(e->out,
                  "#define SLOPE_ONE %d\n#define SCORE_MAY_MASK %d\n"
                  "#define SCORE_MAY_BE_NAN %d\n",
                  is_one, may_mask(p), may_be_nan(p->score));
    strbuf_printf(e->out, "#define SCORE_LINE %d\n\n", emit_line(e));
    facts->slope_most = wanted[0] == PASS_NO_NODE
                            ? 0
                            : slope_most(both, results[1], known->gain[wanted[0]], scratch);
    const int has_row_slope =
        (isinf(facts->slope_most) || facts->is_head_slope) && emit_row_slope(e);
    facts->has_row_slope = has_row_slope && isinf(facts->slope_most);
    put_cap(e, e->out);
    strbuf_printf(e->out, "#define SLOPE_IS_FINITE %d\n", isfinite(facts->slope_most) != 0);
    strbuf_printf(e->out, "#define ROW_SLOPE %d\n#define HEAD_SLOPE %d\n\n",
                  facts->has_row_slope, facts->is_head_slope);
    facts->score = CU_SCORE_GENERAL;
    e->gain = NULL;
    return SACCADE_OK;
}
