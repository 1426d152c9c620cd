/* Which gradients of captures backward's tiles make beside dQ, and the text they take. A term
 * is dX, which the tile has as dS, times the derivative of the score by what was read; that and
 * the element depend, beside b and h, on no more than the kind says:
 *
 *   DIAGONAL  on q - kv: sums of dS along it; LINE: on nothing, the derivative on a line in it
 *   KEY       on kv: sums of dS over queries
 *   ROW       on q, of a slope of 1: the terms cancel, as softmax sees no offset of a row
 *   ELEMENT   on q and kv, an element for each score: dS itself, stored by pieces of rows
 *   SCALE     the derivative is the incoming score: its sum over a row is Q . dQ
 *
 * The rest takes a kernel of its own (bwd_captures.cu). */
#include "cuda/emit/emit.h"

#include "pass/along.h"

#include <stdlib.h>
#include <string.h>

/* The first of them: later ones take that kernel always. */
static int tile_reads(const cu_reads_found *reads)
{
    return reads->n < CU_READS ? reads->n : CU_READS;
}

/* ---- kinds ---- */

static int is_same(const mod_fn *fn, uint32_t x, uint32_t y)
{
    const mod_node *a = &fn->nodes[x], *b = &fn->nodes[y];
    return x == y || (a->op == OP_FLOAT && b->op == OP_FLOAT && a->imm.f == b->imm.f);
}

/* The factor of the incoming score in node `by`, where that does not vary within a head: 1 for
 * the score itself (then NULL). */
static int is_scale(const emitter *e, const mod_node *by, const mod_node **factor)
{
    *factor = NULL;
    if (by->op == OP_SCORE)
        return 1;
    if (by->op != OP_fmul)
        return 0;
    const int side = emit_arg(e, by, 0)->op == OP_SCORE ? 0 : 1;
    *factor = emit_arg(e, by, 1 - side);
    return emit_arg(e, by, side)->op == OP_SCORE
           && !((*factor)->deps & (DEP_Q | DEP_KV | DEP_SCORE));
}

/* Whether a row's elements begin at other places than those of the row before, as those of
 * t[q, kv - q + n]: tiles store them one by one, the kernel of other reads row by row. */
static int is_slanted(const pass_read *read)
{
    int both = 0;
    for (int d = 0; d < read->rank; d++)
        both |= read->index[d].sum_line.coef[VAR_Q] && read->index[d].sum_line.coef[VAR_KV];
    return both;
}

/* Whether each score has an element of its own, in as many batches as the problem says there
 * are; tiles that could store terms take longer, whether they do or not. */
static int may_be_own(const plan_problem *p, const pass_read *read)
{
    return cu_read_has_elements(read) && cu_read_is_own(read, p->sizes.B, p->sizes.H);
}

/* results: of the value, the derivative by the score, and those by the reads. */
static cu_term kind_of(const emitter *e, const pass_read *read, const uint32_t *results, int r,
                       const unsigned char *along, int is_head_slope)
{
    const mod_node *factor;
    const uint32_t slope = results[1], by = results[2 + r];
    const int has_slope_one = emit_has_slope_one(e->problem);
    if (!(e->problem->gradients & SACCADE_GRADIENT_Q))
        return CU_TERM_NONE;
    const int is_sum = read->scatter == SCATTER_DIAGONALS || read->scatter == SCATTER_HEADS;
    const int is_ds = is_same(e->fn, slope, by) && !is_head_slope;
    const uint8_t by_deps = e->fn->nodes[by].deps;
    uint8_t varies = 0;
    for (int d = 0; d < read->rank; d++)
        varies |= read->index[d].varies;
    if (is_sum && (is_ds || ((has_slope_one || is_head_slope) && along[by])))
        return read->scatter == SCATTER_HEADS && (is_ds || emit_is_line(e, &e->fn->nodes[by]))
                   ? CU_TERM_LINE
                   : CU_TERM_DIAGONAL;
    if ((varies & (DEP_Q | DEP_KV | DEP_SCORE)) == DEP_KV
        && (is_ds || ((has_slope_one || is_head_slope) && !(by_deps & (DEP_Q | DEP_SCORE)))))
        return CU_TERM_KEY;
    if ((varies & (DEP_Q | DEP_KV | DEP_SCORE)) == DEP_Q && has_slope_one
        && !(by_deps & (DEP_KV | DEP_SCORE)) && e->problem->sinks_dtype == SACCADE_NONE)
        return CU_TERM_ROW;
    if (may_be_own(e->problem, read) && !is_slanted(read)
        && (is_ds
            || (e->fn->nodes[by].op == OP_FLOAT && e->fn->nodes[by].imm.f == 1
                && (has_slope_one || is_head_slope))))
        return CU_TERM_ELEMENT;
    if (read->scatter == SCATTER_HEADS && is_head_slope
        && is_scale(e, &e->fn->nodes[by], &factor))
        return CU_TERM_SCALE;
    return CU_TERM_NONE;
}

/* ---- text ---- */

/* What stands for a read's factor in the graph; NULL: it is 1. A slope of the head is no part
 * of dS: tiles leave it to the sums of dQ and dK. */
static const mod_node *factor_of(const emitter *e, const uint32_t *results, int r,
                                 const cu_mod_text *facts)
{
    const cu_term kind = (cu_term)facts->term[r];
    const mod_node *by = &e->fn->nodes[results[2 + r]], *factor = NULL;
    if (kind == CU_TERM_SCALE)
        is_scale(e, by, &factor);
    if ((kind == CU_TERM_DIAGONAL || kind == CU_TERM_LINE || kind == CU_TERM_KEY)
        && !(by->deps & DEP_SCORE)
        && (facts->is_head_slope || !is_same(e->fn, results[1], results[2 + r])))
        factor = by;
    return factor;
}

/* The factor of read r's terms on the diagonal of (q, k0), at the key, or in the head. */
static void put_factors(const emitter *e, const uint32_t *results, const cu_reads_found *reads,
                        const cu_mod_text *facts, unsigned char *needed, unsigned char *kept)
{
    memset(needed, 0, e->fn->n_nodes);
    for (int r = 0; r < tile_reads(reads); r++) {
        const mod_node *factor = factor_of(e, results, r, facts);
        if (factor)
            needed[emit_number(e, factor)] = 1;
    }
    emit_mark_operands(e, needed);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++) {
        const mod_node *n = &e->fn->nodes[i];
        kept[i] = needed[i] && emit_rate_of(n) == ROW && !emit_is_leaf(n);
    }
    emit_row_struct(e, "factor", kept);
    strbuf_printf(e->out,
                  "DEVICE float term_factor(%s, int r, int q, int k0)\n{\n"
                  "    factor_row r0;\n    factor_row_begin(mod, p, b, h, q, r0);\n",
                  EMIT_SIGNATURE);
    emit_marked(e, needed, 0);
    for (int r = 0; r < tile_reads(reads); r++) {
        const mod_node *factor = factor_of(e, results, r, facts);
        if (!factor)
            continue;
        strbuf_printf(e->out, "    if (r == %d)\n        return ", r);
        emit_value(e, e->out, factor, (place){ELEMENT, 0});
        strbuf_puts(e->out, ";\n");
    }
    strbuf_puts(e->out, "    return 1.f;\n}\n\n");
}

static void put_kinds(const cu_mod_text *facts, int n, strbuf *out)
{
    static const char *const kinds[] = {"TERM_NONE",  "TERM_DIAGONAL", "TERM_ELEMENT",
                                        "TERM_SCALE", "TERM_LINE",     "TERM_KEY",
                                        "TERM_ROW"};
    enum { KINDS = sizeof kinds / sizeof kinds[0] };
    int has[KINDS] = {0};
    strbuf_puts(out, "enum {");
    for (int i = 0; i < KINDS; i++)
        strbuf_printf(out, " %s,", kinds[i]);
    strbuf_puts(out, " };\n\nDEVICE constexpr int term_kind(int r)\n{\n    return ");
    for (int r = 0; r < n; r++) {
        strbuf_printf(out, "r == %d ? %s : ", r, kinds[facts->term[r]]);
        has[facts->term[r]] = 1;
    }
    strbuf_puts(out, "TERM_NONE;\n}\n\n");
    strbuf_printf(out,
                  "#define HAS_DIAGONALS %d\n#define HAS_ELEMENTS %d\n"
                  "#define HAS_SCALES %d\n#define HAS_LINES %d\n#define HAS_KEYS %d\n\n",
                  has[CU_TERM_DIAGONAL], has[CU_TERM_ELEMENT], has[CU_TERM_SCALE],
                  has[CU_TERM_LINE], has[CU_TERM_KEY]);
}

saccade_status emit_terms(emitter *e, const cu_reads_found *reads, const uint32_t *results,
                          arena *scratch, cu_mod_text *facts, saccade_error *err)
{
    const unsigned char *along = pass_find_along(e->fn, 1, scratch);
    unsigned char *marks = arena_array(scratch, e->fn->n_nodes, 2);
    FAIL_IF_NULL(along);
    FAIL_IF_NULL(marks);
    facts->n_terms = 0;
    for (int r = 0; r < tile_reads(reads); r++) {
        facts->term[r] =
            (unsigned char)kind_of(e, reads->read[r], results, r, along, facts->is_head_slope);
        facts->n_terms += facts->term[r] != CU_TERM_NONE;
    }
    strbuf_puts(e->out, "#if CFG_TERMS\n");
    put_kinds(facts, tile_reads(reads), e->out);
    put_factors(e, results, reads, facts, marks, marks + e->fn->n_nodes);
    strbuf_puts(e->out, "#endif\n");
    return SACCADE_OK;
}
