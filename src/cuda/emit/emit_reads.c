/* CUDA text of the reads of captures whose gradients are wanted: how each is summed, the
 * element that it reads at a position, and for four scores its derivatives beside their values
 * (emit_slope.c has their graph). Programs without CFG_CAPTURES take none of it. */
#include "cuda/emit/emit.h"

#include <stdlib.h>
#include <string.h>

static pass_scatter kind_of(const pass_read *read)
{
    return cu_read_has_elements(read)          ? SCATTER_ELEMENTS
           : read->scatter == SCATTER_ELEMENTS ? SCATTER_GENERAL
                                               : read->scatter;
}

static void put_kinds(const cu_reads_found *reads, strbuf *out)
{
    static const char *const kinds[] = {
        [SCATTER_HEADS] = "READ_HEAD",       [SCATTER_ROWS] = "READ_ROW",
        [SCATTER_COLUMNS] = "READ_COLUMN",   [SCATTER_DIAGONALS] = "READ_DIAGONAL",
        [SCATTER_ELEMENTS] = "READ_ELEMENT", [SCATTER_GENERAL] = "READ_ANY",
    };
    strbuf_printf(out,
                  "#define MOD_READS %d\n"
                  "enum { READ_HEAD, READ_ROW, READ_COLUMN, READ_DIAGONAL, READ_ELEMENT, "
                  "READ_ANY };\n\nDEVICE constexpr int read_kind(int r)\n{\n    return ",
                  reads->n);
    for (int r = 0; r < reads->n; r++)
        strbuf_printf(out, "r == %d ? %s : ", r, kinds[kind_of(reads->read[r])]);
    strbuf_puts(out, "READ_ANY;\n}\n\n");
}

/* ---- places ---- */

/* Marks what the indices of the reads are made of. */
static void mark_indices(const emitter *e, const cu_reads_found *reads, unsigned char *needed)
{
    const mod_fn *fn = e->fn;
    memset(needed, 0, fn->n_nodes);
    for (int r = 0; r < reads->n; r++) {
        const mod_node *load = &fn->nodes[reads->read[r]->node];
        for (int d = 0; d < reads->read[r]->rank; d++)
            needed[fn->args[load->args + d]] = 1;
    }
    emit_mark_operands(e, needed);
}

static void put_place(const emitter *e, const pass_read *read, int r)
{
    const mod_node *load = &e->fn->nodes[read->node];
    strbuf_printf(e->out, "    if (r == %d)\n        at = 0", r);
    for (int d = 0; d < read->rank; d++) {
        strbuf_puts(e->out, " + (AT)min(max(");
        emit_value(e, e->out, emit_arg(e, load, d), (place){ELEMENT, 0});
        strbuf_printf(e->out, ", 0), mod.cap[%d].shape[%d] - 1) * stride[%d]",
                      e->first_capture + (int)read->capture, d, d);
    }
    strbuf_puts(e->out, ";\n");
}

/* Elements from the first one to the one that read r reads at (q, k0), clamped as loads are;
 * strides of 32 bits where these suffice. */
static void put_places(const emitter *e, const cu_reads_found *reads,
                       const unsigned char *needed, unsigned char *kept)
{
    emit_mark_kept(e, kept);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++) {
        const mod_node *n = &e->fn->nodes[i];
        kept[i] |= needed[i] && emit_rate_of(n) == ROW && !emit_is_leaf(n);
    }
    emit_row_struct(e, "place", kept);
    strbuf_printf(e->out,
                  "template <class AT>\n"
                  "DEVICE AT read_place(%s, int r, int q, int k0,\n"
                  "                     const AT (&stride)[CU_RANK])\n{\n"
                  "    AT at = 0;\n    place_row r0;\n"
                  "    place_row_begin(mod, p, b, h, q, r0);\n",
                  EMIT_SIGNATURE);
    emit_marked(e, needed, 0);
    for (int r = 0; r < reads->n; r++)
        put_place(e, reads->read[r], r);
    strbuf_puts(e->out, "    return at;\n}\n\n");
}

/* ---- derivatives ---- */

static void put_reads4(const emitter *e, const uint32_t *results, int n)
{
    strbuf_printf(
        e->out,
        "DEVICE void reads4(%s, const slope_row &r0, const slope_row &r1,\n"
        "                   int k0, int k1, float (&x)[4], float (&by)[%d][4]%s)\n{\n",
        EMIT_SIGNATURE, n ? n : 1, e->shares ? ", const reads_shared &shared" : "");
    emit_nodes(e, COLUMN, NULL);
    emit_nodes(e, ELEMENT, NULL);
    for (int r = 0; r < n; r++)
        for (int c = 0; c < 4; c++) {
            strbuf_printf(e->out, "    by[%d][%d] = ", r, c);
            emit_value(e, e->out, &e->fn->nodes[results[2 + r]], (place){ELEMENT, c});
            strbuf_puts(e->out, ";\n");
        }
    for (int c = 0; c < 4; c++) {
        strbuf_printf(e->out, "    const float value_%d = ", c);
        emit_value(e, e->out, &e->fn->nodes[results[0]], (place){ELEMENT, c});
        strbuf_puts(e->out, ";\n");
    }
    for (int c = 0; c < 4; c++)
        strbuf_printf(e->out, "    x[%d] = value_%d;\n", c, c);
    strbuf_puts(e->out, "}\n\n");
}

/* ---- what stays while batches or heads pass ---- */

/* Which of b and h pass by in a launch of bwd_elements.cu, of any read. */
static int passing(const emitter *e, const cu_reads_found *reads)
{
    int deps = 0;
    for (int r = 0; r < reads->n; r++) {
        if (!cu_read_has_elements(reads->read[r]))
            continue;
        deps |= cu_read_has_own(reads->read[r], VAR_B) ? 0 : DEP_B;
        deps |= e->problem->sizes.H == 1 || cu_read_has_own(reads->read[r], VAR_H) ? 0 : DEP_H;
    }
    return deps;
}

static void find_kept(const emitter *e, const mod_node *n, int passing, unsigned char *seen,
                      cu_shares *out)
{
    const unsigned i = emit_number(e, n);
    if (emit_is_leaf(n) || seen[i])
        return;
    seen[i] = 1;
    if (n->op == OP_LOAD && emit_rate_of(n) == ELEMENT && !(n->deps & (passing | DEP_SCORE))) {
        if (out->n_elements < CU_SHARES_MOST)
            out->element[out->n_elements++] = i;
        return;
    }
    for (int a = 0; a < n->n_args; a++)
        find_kept(e, emit_arg(e, n, a), passing, seen, out);
}

/* The loads of the value and the derivatives: of a score's own, and of what does not pass. */
static void find_all_kept(const emitter *e, const cu_reads_found *reads,
                          const uint32_t *results, unsigned char *seen, cu_shares *out)
{
    const int deps = passing(e, reads);
    *out = (cu_shares){0};
    memset(seen, 0, e->fn->n_nodes);
    for (int r = 0; r < 2 + reads->n && deps; r++)
        find_kept(e, &e->fn->nodes[results[r]], deps, seen, out);
    for (int i = 0; i < out->n_elements; i++) {
        const saccade_dtype dtype = e->fn->captures[e->fn->nodes[out->element[i]].imm.i].dtype;
        const int is_short = dtype == SACCADE_BF16 || dtype == SACCADE_F16;
        out->element_dtype =
            !is_short || (i > 0 && dtype != out->element_dtype) ? SACCADE_NONE : dtype;
        if (out->element_dtype == SACCADE_NONE)
            break;
    }
}

/* reads_shared, how four scores' are made, and reads4() that takes them. */
static void put_kept(emitter *e, const cu_reads_found *reads, const uint32_t *results,
                     unsigned char *needed, const cu_shares *kept)
{
    const int n = kept->n_elements;
    if (n == 0)
        return;
    strbuf_printf(e->out,
                  "#if CFG_KEPT\n#define READS_KEPT %d\n#define KEPT_DTYPE %d\n\n"
                  "struct reads_shared {\n    u32 element[READS_KEPT][4];\n};\n\n"
                  "DEVICE void reads_keep4(%s, const slope_row &r0, const slope_row &r1,\n"
                  "                        int k0, int k1, reads_shared &to)\n{\n",
                  n, kept->element_dtype, EMIT_SIGNATURE);
    memset(needed, 0, e->fn->n_nodes);
    for (int i = 0; i < n; i++)
        needed[kept->element[i]] = 1;
    emit_mark_operands(e, needed);
    emit_marked(e, needed, 1);
    for (int i = 0; i < n; i++)
        for (int c = 0; c < 4; c++) {
            const mod_node *node = &e->fn->nodes[kept->element[i]];
            strbuf_printf(e->out, "    to.element[%d][%d] = %s(", i, c, emit_to_word(node));
            emit_value(e, e->out, node, (place){ELEMENT, c});
            strbuf_puts(e->out, ");\n");
        }
    strbuf_puts(e->out, "}\n\n");
    e->shares = kept;
    put_reads4(e, results, reads->n);
    e->shares = NULL;
    strbuf_puts(e->out, "#endif\n");
}

saccade_status emit_reads(emitter *e, const cu_reads_found *reads, const uint32_t *results,
                          cu_mod_text *facts, saccade_error *err)
{
    const mod_fn *both = e->fn;
    const double *gain = e->gain;
    const uint32_t most =
        both->n_nodes > e->problem->score->n_nodes ? both->n_nodes : e->problem->score->n_nodes;
    unsigned char *marks = malloc((size_t)most * 2);
    FAIL_IF_NULL(marks);
    strbuf_puts(e->out, "#if CFG_CAPTURES || CFG_TERMS\n");
    put_kinds(reads, e->out);
    put_reads4(e, results, reads->n);
    find_all_kept(e, reads, results, marks, &facts->kept);
    put_kept(e, reads, results, marks, &facts->kept);
    e->fn = e->problem->score;
    e->gain = NULL;
    mark_indices(e, reads, marks);
    put_places(e, reads, marks, marks + most);
    e->fn = both;
    e->gain = gain;
    strbuf_puts(e->out, "#endif\n");
    free(marks);
    return SACCADE_OK;
}
