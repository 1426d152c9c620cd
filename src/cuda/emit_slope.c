/* CUDA text of a score function for backward: its value and its derivative by the incoming
 * score, from one graph. */
#include "cuda/emit.h"

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
    const mod_fn *both;
    uint32_t results[2];
    facts->score = CU_SCORE_NONE;
    facts->slope_most = 1;
    if (!e->problem->score)
        return SACCADE_OK;
    const uint32_t score = pass_find_score(e->problem->score);
    TRY(pass_value_and_gradient(e->problem->score, &score, 1, scratch, &both, results, err));
    /* The value's gains do for the slope: a value that follows a tanh t by a bounded factor has
     * a slope that follows 1 - t * t by that factor, whose error is twice that of t. */
    e->gain = pass_gains(both, results[0], scratch);
    FAIL_IF_NULL(e->gain);
    unsigned char *kept = malloc(both->n_nodes);
    FAIL_IF_NULL(kept);
    e->fn = both;
    emit_mark_kept(e, kept);
    for (int i = 0; i < 2; i++) {
        const mod_node *n = &both->nodes[results[i]];
        kept[results[i]] |= emit_rate_of(n) == ROW && !emit_is_leaf(n);
    }
    emit_row_struct(e, "slope", kept);
    put_slope4(e, results);
    facts->score = CU_SCORE_GENERAL;
    facts->slope_most = score == PASS_NO_NODE ? 0 : e->problem->score_facts->gain[score];
    e->gain = NULL;
    free(kept);
    return SACCADE_OK;
}
