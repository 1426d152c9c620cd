/* CUDA text of dense reads: tensors that scores and masks read at their own query and key, as
 * bias[h, q, kv]. Element by element, the eight rows of a fragment are eight lines of the cache
 * for a few bytes each; programs with CFG_DENSE have them as tiles instead (kern/dense.cuh),
 * for runs whose tensors allow it (run/dense.c). */
#include "cuda/emit/emit.h"

#include <stdlib.h>
#include <string.h>

enum { OTHERS_MOST = 3 }; /* dimensions of a tensor map beside those of the query and key */

/* The variable itself, or as negative indices of a framework are written, `x < 0 ? .. : x`:
 * runs with positions below 0 take no tiles. */
static int is_position(const emitter *e, const mod_node *n, int which)
{
    if (n->op == OP_isel) {
        const mod_node *below = emit_arg(e, n, 0), *x = emit_arg(e, n, 2);
        return below->op == OP_ilt && emit_arg(e, below, 0) == x
               && emit_arg(e, below, 1)->op == OP_INT && emit_arg(e, below, 1)->imm.i == 0
               && is_position(e, x, which);
    }
    return n->op == OP_VAR && n->imm.i == which;
}

static int is_dense(const emitter *e, const mod_node *n, cu_dense *out)
{
    if (n->op != OP_LOAD || n->deps & DEP_SCORE || n->n_args > OTHERS_MOST + 2)
        return 0;
    *out = (cu_dense){.node = emit_number(e, n),
                      .capture = n->imm.i,
                      .rank = n->n_args,
                      .bytes = (int)saccade_dtype_bytes(e->fn->captures[n->imm.i].dtype),
                      .q = -1,
                      .kv = -1};
    for (int d = 0; d < n->n_args; d++) {
        const mod_node *index = emit_arg(e, n, d);
        if (!(index->deps & (DEP_Q | DEP_KV)))
            continue;
        int *const dim = is_position(e, index, VAR_Q)    ? &out->q
                         : is_position(e, index, VAR_KV) ? &out->kv
                                                         : NULL;
        if (!dim || *dim >= 0)
            return 0;
        *dim = d;
    }
    return out->q >= 0 && out->kv >= 0 && out->bytes <= 4;
}

int emit_dense_read(const emitter *e, const mod_node *n)
{
    for (int r = 0; r < e->n_dense; r++)
        if (e->dense[r].node == emit_number(e, n))
            return r;
    return -1;
}

/* ---- text ---- */

static int is_other(const cu_dense *read, int d)
{
    return d != read->q && d != read->kv;
}

/* Marks what the other indices are made of. */
static void mark_others(const emitter *e, unsigned char *needed)
{
    const mod_fn *fn = e->fn;
    memset(needed, 0, fn->n_nodes);
    for (int r = 0; r < e->n_dense; r++)
        for (int d = 0; d < e->dense[r].rank; d++)
            if (is_other(&e->dense[r], d))
                needed[fn->args[fn->nodes[e->dense[r].node].args + d]] = 1;
    emit_mark_operands(e, needed);
}

static void put_place(const emitter *e, int r)
{
    const cu_dense *read = &e->dense[r];
    int n = 0;
    for (int d = 0; d < read->rank; d++) {
        if (!is_other(read, d))
            continue;
        strbuf_printf(e->out, "    at[%d][%d] = dense_index(mod.cap[%d], %d, ", r, n++,
                      e->first_capture + read->capture, d);
        emit_value(e, e->out, emit_arg(e, &e->fn->nodes[read->node], d), (place){ROW, 0});
        strbuf_puts(e->out, ");\n");
    }
    for (; n < OTHERS_MOST; n++)
        strbuf_printf(e->out, "    at[%d][%d] = 0;\n", r, n);
}

static void put_text(const emitter *e, const char *what, const char *WHAT,
                     unsigned char *needed)
{
    strbuf_printf(e->out,
                  "#if CFG_DENSE\n"
                  "#define %s_TILES , const u32 (&dense)[%d][4]\n\n"
                  "DEVICE constexpr int %s_dense_bytes(int r)\n{\n    return ",
                  WHAT, e->n_dense, what);
    for (int r = 0; r < e->n_dense; r++)
        strbuf_printf(e->out, "r == %d ? %d : ", r, e->dense[r].bytes);
    strbuf_printf(e->out, "0;\n}\n\nDEVICE void %s_dense_place(%s, int (*at)[%d])\n{\n", what,
                  EMIT_SIGNATURE, OTHERS_MOST);
    mark_others(e, needed);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        if (needed[i] && !emit_is_leaf(&e->fn->nodes[i]))
            emit_node(e, &e->fn->nodes[i], (place){ROW, 0});
    for (int r = 0; r < e->n_dense; r++)
        put_place(e, r);
    strbuf_printf(e->out, "}\n#else\n#define %s_TILES\n#endif\n\n", WHAT);
}

saccade_status emit_dense(emitter *e, const char *what, const char *WHAT, cu_mod_text *facts,
                          saccade_error *err)
{
    const int before = facts->n_dense;
    for (uint32_t i = 0; i < e->fn->n_nodes && facts->n_dense < CU_DENSE_MOST; i++)
        facts->n_dense += is_dense(e, &e->fn->nodes[i], &facts->dense[facts->n_dense]);
    e->dense = facts->dense + before;
    e->n_dense = facts->n_dense - before;
    if (e->n_dense == 0) {
        strbuf_printf(e->out, "#define %s_TILES\n", WHAT);
        return SACCADE_OK;
    }
    unsigned char *needed = malloc(e->fn->n_nodes);
    FAIL_IF_NULL(needed);
    put_text(e, what, WHAT, needed);
    free(needed);
    return SACCADE_OK;
}
