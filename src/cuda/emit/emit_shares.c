/* CUDA text of shared values: what of a score a key brings alone, or a diagonal (b, h and
 * q - kv), as bias[kv] or table[q - kv + n]. A block of 64 rows by 128 keys has 8192 scores,
 * but 128 keys and 191 diagonals: programs with CFG_SHARES make each value once, and threads
 * read it from shared memory (kern/shares.cuh) or from each other (kern/bwd_shares.cuh). There,
 * where queries pass, they share what a query brings too. */
#include "cuda/emit/emit.h"

#include "pass/along.h"

#include <stdlib.h>
#include <string.h>

enum { WORTH = 4 }; /* what is cheaper than this is made for each score */

/* ---- which ---- */

static int cost_of(const mod_node *n)
{
    switch (n->op) {
    case OP_LOAD:
    case OP_idiv:
    case OP_irem:
    case OP_ifloordiv:
    case OP_ifloormod:
    case OP_fdiv:
    case OP_fsqrt:
    case OP_frsqrt:
    case OP_fexp:
    case OP_fexp2:
    case OP_flog:
    case OP_flog2:
    case OP_fsin:
    case OP_fcos:
    case OP_ftan:
    case OP_ftanh:
    case OP_fsigmoid:
    case OP_ferf:
    case OP_fpow:
        return WORTH;
    default:
        return 1;
    }
}

typedef struct search {
    const emitter *e;
    const unsigned char *along;
    unsigned char *seen, *counted;
    int has_rows; /* whether what a query brings is shared */
    cu_shares *out;
} search;

/* The cost of what n is made of for each row, or each score, and is not counted yet. */
static int add_cost(const search *s, const mod_node *n, int of_row)
{
    const unsigned i = emit_number(s->e, n);
    const int is_counted = of_row ? n->deps & DEP_Q : emit_rate_of(n) != ROW;
    if (emit_is_leaf(n) || !is_counted || s->counted[i])
        return 0;
    int cost = cost_of(n);
    s->counted[i] = 1;
    for (int a = 0; a < n->n_args && cost < WORTH; a++)
        cost += add_cost(s, emit_arg(s->e, n, a), of_row);
    return cost;
}

static void add(const search *s, const mod_node *n, unsigned *nodes, int *n_nodes)
{
    memset(s->counted, 0, s->e->fn->n_nodes);
    if (*n_nodes < CU_SHARES_MOST && add_cost(s, n, emit_rate_of(n) == ROW) >= WORTH)
        nodes[(*n_nodes)++] = emit_number(s->e, n);
}

/* The largest values that scores share, of those that n is made of. */
static void find(const search *s, const mod_node *n)
{
    const unsigned i = emit_number(s->e, n);
    if (emit_is_leaf(n) || s->seen[i])
        return;
    s->seen[i] = 1;
    if (emit_rate_of(n) == ROW) {
        if (s->has_rows && n->deps & DEP_Q)
            add(s, n, s->out->row, &s->out->n_rows);
    } else if (!(n->deps & (DEP_Q | DEP_SCORE))) {
        add(s, n, s->out->key, &s->out->n_keys);
    } else if (s->along[i]) {
        add(s, n, s->out->diagonal, &s->out->n_diagonals);
    } else {
        for (int a = 0; a < n->n_args; a++)
            find(s, emit_arg(s->e, n, a));
    }
}

static saccade_status find_shares(const emitter *e, const uint32_t *results, int n,
                                  int has_rows, cu_shares *out, saccade_error *err)
{
    arena scratch;
    arena_init(&scratch);
    const unsigned char *along = pass_find_along(e->fn, 1, &scratch);
    unsigned char *marks = arena_array(&scratch, e->fn->n_nodes, 2);
    const int ok = along && marks;
    *out = (cu_shares){0};
    const search s = {e, along, marks, marks + e->fn->n_nodes, has_rows, out};
    for (int r = 0; ok && r < n; r++)
        find(&s, &e->fn->nodes[results[r]]);
    arena_free(&scratch);
    FAIL_IF(!ok, SACCADE_ENOMEM, "out of memory");
    return SACCADE_OK;
}

static int find_in(const unsigned *nodes, int n, unsigned node)
{
    for (int i = 0; i < n; i++)
        if (nodes[i] == node)
            return i;
    return -1;
}

/* ---- text ---- */

static const char *of_word(const mod_node *n)
{
    return n->type == MOD_FLOAT ? "__uint_as_float" : n->type == MOD_INT ? "(int)" : "0 != ";
}

int emit_shared(const emitter *e, const mod_node *n, place at)
{
    const cu_shares *s = e->shares;
    const int key = s ? find_in(s->key, s->n_keys, emit_number(e, n)) : -1;
    const int diagonal = s ? find_in(s->diagonal, s->n_diagonals, emit_number(e, n)) : -1;
    const int element = s ? find_in(s->element, s->n_elements, emit_number(e, n)) : -1;
    if (key >= 0)
        strbuf_printf(e->out, "%s(shared.key[%d][%d])", of_word(n), key, at.copy % 2);
    else if (diagonal >= 0)
        strbuf_printf(e->out, "%s(shared.diagonal[%d][%d])", of_word(n), diagonal, at.copy);
    else if (element >= 0)
        strbuf_printf(e->out, "%s(shared.element[%d][%d])", of_word(n), element, at.copy);
    return key >= 0 || diagonal >= 0 || element >= 0;
}

const char *emit_to_word(const mod_node *n)
{
    return n->type == MOD_FLOAT ? "__float_as_uint" : "(u32)";
}

/* What a query brings: made with the row, and put into two rows. */
static void put_rows(const emitter *e, const char *what, const cu_shares *s)
{
    strbuf_printf(e->out,
                  "DEVICE void %s_of_row(%s, int q, u32 (&to)[%d])\n{\n    %s_row r;\n"
                  "    %s_row_begin(mod, p, b, h, q, r);\n",
                  what, EMIT_SIGNATURE, s->n_rows, what, what);
    for (int i = 0; i < s->n_rows; i++)
        strbuf_printf(e->out, "    to[%d] = %s(r.n%u);\n", i,
                      emit_to_word(&e->fn->nodes[s->row[i]]), s->row[i]);
    strbuf_puts(e->out, "}\n\n");
}

static void put_share_rows(const emitter *e, const char *what, const cu_shares *s)
{
    strbuf_printf(
        e->out,
        "DEVICE void %s_share_rows(%s_row &r0, %s_row &r1, const %s_shared &shared)\n{\n", what,
        what, what, what);
    for (int i = 0; i < s->n_rows; i++)
        for (int j = 0; j < 2; j++)
            strbuf_printf(e->out, "    r%d.n%u = %s(shared.row[%d][%d]);\n", j, s->row[i],
                          of_word(&e->fn->nodes[s->row[i]]), i, j);
    strbuf_puts(e->out, "}\n\n");
}

/* What a key or a diagonal brings, of any score that has it. */
static void put_makers(const emitter *e, const char *what, const char *of,
                       const unsigned *nodes, int n, unsigned char *needed)
{
    const mod_fn *fn = e->fn;
    strbuf_printf(e->out,
                  "DEVICE void %s_of_%s(%s, const %s_row &r0, int k0, u32 (&to)[%d])\n{\n",
                  what, of, EMIT_SIGNATURE, what, n);
    memset(needed, 0, fn->n_nodes);
    for (int i = 0; i < n; i++)
        needed[nodes[i]] = 1;
    emit_mark_operands(e, needed);
    emit_marked(e, needed, 0);
    for (int i = 0; i < n; i++) {
        const mod_node *node = &fn->nodes[nodes[i]];
        strbuf_printf(e->out, "    to[%d] = %s(", i, emit_to_word(node));
        emit_value(e, e->out, node, (place){emit_rate_of(node), 0});
        strbuf_puts(e->out, ");\n");
    }
    strbuf_puts(e->out, "}\n\n");
}

saccade_status emit_shares(emitter *e, const char *what, const char *WHAT,
                           const uint32_t *results, int n, int has_rows, cu_mod_text *facts,
                           saccade_error *err)
{
    const cu_shares *s = &facts->shares;
    TRY(find_shares(e, results, n, has_rows, &facts->shares, err));
    if (!cu_has_shares(facts))
        return SACCADE_OK;
    unsigned char *needed = malloc(e->fn->n_nodes);
    FAIL_IF_NULL(needed);
    strbuf_printf(
        e->out,
        "#if CFG_SHARES\n#define %s_ROWS %d\n#define %s_KEYS %d\n#define %s_DIAGONALS %d\n\n"
        "struct %s_shared {\n",
        WHAT, s->n_rows, WHAT, s->n_keys, WHAT, s->n_diagonals, what);
    if (s->n_rows)
        strbuf_printf(e->out, "    u32 row[%d][2];\n", s->n_rows);
    if (s->n_keys)
        strbuf_printf(e->out, "    u32 key[%d][2];\n", s->n_keys);
    if (s->n_diagonals)
        strbuf_printf(e->out, "    u32 diagonal[%d][4];\n", s->n_diagonals);
    strbuf_puts(e->out, "};\n\n");
    if (s->n_rows)
        put_rows(e, what, s);
    if (s->n_keys)
        put_makers(e, what, "key", s->key, s->n_keys, needed);
    if (s->n_diagonals)
        put_makers(e, what, "diagonal", s->diagonal, s->n_diagonals, needed);
    put_share_rows(e, what, s);
    free(needed);
    e->shares = s;
    return SACCADE_OK;
}

void emit_shares_end(emitter *e)
{
    e->shares = NULL;
    strbuf_puts(e->out, "#endif\n\n");
}
