/* CUDA text of a score function for backward: its value and its derivative by the incoming
 * score, from one graph. */
#include "cuda/emit.h"

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
                  "                   int k0, int k1, float (&x)[4], float (&slope)[4])\n{\n",
                  EMIT_SIGNATURE);
    emit_nodes(e, COLUMN, NULL);
    emit_nodes(e, ELEMENT, NULL);
    put_results(e, "value", results[0]);
    put_results(e, "by_score", results[1]);
    for (int c = 0; c < 4; c++)
        strbuf_printf(e->out, "    x[%d] = value_%d;\n    slope[%d] = by_score_%d;\n", c, c, c,
                      c);
    strbuf_puts(e->out, "}\n\n");
}

saccade_status emit_slope(emitter *e, arena *scratch, cu_mod_text *facts, saccade_error *err)
{
    const plan_problem *p = e->problem;
    const pass_facts *known = p->score_facts;
    const mod_fn *both;
    cu_reads_found reads;
    uint32_t wanted[1 + CU_READS], results[2 + CU_READS];
    facts->score = CU_SCORE_NONE;
    facts->slope_most = 1;
    facts->has_row_slope = 0;
    if (!p->score) {
        strbuf_puts(e->out, "#define SLOPE_ONE 1\n#define SCORE_MAY_MASK 0\n"
                            "#define SCORE_LINE 0\n#define ROW_SLOPE 0\n");
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
    put_slope4(e, results);
    free(kept);
    if (cu_has_captures(p))
        TRY(emit_reads(e, &reads, results, err));
    strbuf_printf(e->out, "#define SLOPE_ONE %d\n#define SCORE_MAY_MASK %d\n",
                  emit_has_slope_one(p), !known->offset || known->offset->n_captures > 0);
    strbuf_printf(e->out, "#define SCORE_LINE %d\n\n", emit_line(e));
    facts->slope_most = wanted[0] == PASS_NO_NODE ? 0 : known->gain[wanted[0]];
    facts->has_row_slope = isinf(facts->slope_most) && emit_row_slope(e);
    strbuf_printf(e->out, "#define ROW_SLOPE %d\n\n", facts->has_row_slope);
    facts->score = CU_SCORE_GENERAL;
    e->gain = NULL;
    return SACCADE_OK;
}
