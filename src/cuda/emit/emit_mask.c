/* CUDA text of a mask: two limits a row where it is one interval of keys; else a function of
 * four positions, which gets what it needs of each key from a struct made once a block. */
#include "cuda/emit/emit.h"

#include <stdlib.h>
#include <string.h>

/* marks column values that elements read, or that are the result */
static int mark_columns(const emitter *e, unsigned char *kept)
{
    const mod_fn *fn = e->fn;
    int n = 0;
    memset(kept, 0, fn->n_nodes);
    kept[fn->result] = 1;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        for (int a = 0; emit_rate_of(&fn->nodes[i]) == ELEMENT && a < fn->nodes[i].n_args; a++)
            kept[fn->args[fn->nodes[i].args + a]] = 1;
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        kept[i] =
            kept[i] && emit_rate_of(&fn->nodes[i]) == COLUMN && !emit_is_leaf(&fn->nodes[i]);
        n += kept[i];
    }
    return n;
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
                  EMIT_SIGNATURE);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        if (emit_rate_of(&e->fn->nodes[i]) == COLUMN && !emit_is_leaf(&e->fn->nodes[i]))
            emit_node(e, &e->fn->nodes[i], (place){COLUMN, 0});
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
        "                  bool (&live)[4] MASK_TILES)\n{\n",
        EMIT_SIGNATURE);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        for (int c = 0; columns[i] && c < 2; c++)
            strbuf_printf(e->out, "    const %s c%d_%u = c%d.c%u;\n",
                          emit_type(&e->fn->nodes[i]), c, (unsigned)i, c, (unsigned)i);
    emit_nodes(e, ELEMENT, NULL);
    for (int c = 0; c < 4; c++) {
        strbuf_printf(e->out, "    live[%d] = ", c);
        emit_value(e, e->out, &e->fn->nodes[e->fn->result], (place){ELEMENT, c});
        strbuf_puts(e->out, ";\n");
    }
    strbuf_puts(e->out, "}\n\n");
}

static saccade_status put_mask(emitter *e, cu_mod_text *facts, saccade_error *err)
{
    unsigned char *kept = malloc(e->fn->n_nodes);
    FAIL_IF_NULL(kept);
    emit_mark_kept(e, kept);
    emit_row_struct(e, "mask", kept);
    facts->column_words = mark_columns(e, kept);
    put_columns(e, kept, facts->column_words);
    const saccade_status status = emit_dense(e, "mask", "MASK", facts, err);
    put_mask4(e, kept);
    e->n_dense = 0;
    free(kept);
    return status;
}

/* Limits of an interval mask: bounds is free of kv. */
static void put_interval(const emitter *e, const uint32_t bounds[2])
{
    strbuf_printf(e->out,
                  "/* live: from <= kv < to */\n"
                  "DEVICE void mask_interval(%s, int q, int &from, int &to)\n{\n",
                  EMIT_SIGNATURE);
    emit_nodes(e, ROW, NULL);
    strbuf_puts(e->out, "    from = ");
    emit_value(e, e->out, &e->fn->nodes[bounds[0]], (place){ROW, 0});
    strbuf_puts(e->out, ";\n    to = ");
    emit_value(e, e->out, &e->fn->nodes[bounds[1]], (place){ROW, 0});
    strbuf_puts(e->out, ";\n}\n\n");
}

/* Bounds below which every key is live: of kv < bound and kv <= bound that the result, or what
 * it joins by ||, is. Writes node `n`'s into mask_sure(); returns how many there are. */
static int put_sure(const emitter *e, const mod_node *n)
{
    if (n->op == OP_or)
        return put_sure(e, emit_arg(e, n, 0)) + put_sure(e, emit_arg(e, n, 1));
    const int is_bound = (n->op == OP_ilt || n->op == OP_ile) && emit_arg(e, n, 0)->op == OP_VAR
                         && emit_arg(e, n, 0)->imm.i == VAR_KV
                         && emit_rate_of(emit_arg(e, n, 1)) == ROW;
    if (!is_bound)
        return 0;
    strbuf_puts(e->out, n->op == OP_ilt ? "    to = max(to, "
                                        : "    to = max(to, 1 + min(0x7ffffffe, ");
    emit_value(e, e->out, emit_arg(e, n, 1), (place){ROW, 0});
    strbuf_puts(e->out, n->op == OP_ilt ? ");\n" : "));\n");
    return 1;
}

/* It spares most blocks the evaluation where a prefix is seen by all, as by trees of drafts. */
static int put_all_sure(const emitter *e)
{
    strbuf_printf(e->out,
                  "/* every kv before it is live */\n"
                  "DEVICE int mask_sure(%s, int q)\n{\n    int to = -0x7fffffff;\n",
                  EMIT_SIGNATURE);
    emit_nodes(e, ROW, NULL);
    const int n = put_sure(e, &e->fn->nodes[e->fn->result]);
    strbuf_puts(e->out, "    return to;\n}\n\n");
    return n > 0;
}

saccade_status emit_mask(emitter *e, cu_mod_text *facts, saccade_error *err)
{
    facts->mask = CU_MASK_NONE;
    facts->has_sure_keys = 0;
    if (!e->problem->mask) {
        strbuf_puts(e->out, "#define MASK_TILES\n");
        return SACCADE_OK;
    }
    const pass_limits *limits = plan_limits(e->problem);
    e->fn = e->problem->mask;
    if (limits) {
        e->fn = limits->fn;
        put_interval(e, limits->node);
        strbuf_puts(e->out, "#define MASK_TILES\n");
        facts->mask = CU_MASK_INTERVAL;
        return SACCADE_OK;
    }
    facts->mask = CU_MASK_GENERAL;
    facts->has_sure_keys = put_all_sure(e);
    return put_mask(e, facts, err);
}
