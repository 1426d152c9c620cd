/* Reads by how their indices vary. From the leaves up, each int is known as a line in the four
 * positions, or as a function of one combination of q and kv (its direction, such as q - kv),
 * or of neither, or as anything. Two dimensions whose lines cross give each score of a head an
 * element of its own; dimensions of a single direction make sums along it. */
#include "pass/scatter.h"

#include "pass/along.h"

#include "base/integers.h"
#include "base/status.h"
#include "pass/pass.h"

#include <stdlib.h>

/* ---- forms of ints ---- */

typedef enum form_kind {
    LINE,  /* coef . position + a constant of the run */
    FREE,  /* of q and kv, but no line */
    ALONG, /* for each head a function of step[0] q + step[1] kv alone */
    ANY
} form_kind;

typedef struct form {
    form_kind kind;
    int32_t coef[4];
    int32_t step[2]; /* coprime, the first that is not 0 above it; {0, 0}: free of q and kv */
} form;

/* A line's direction follows from its coefficients. */
static form line(const int32_t coef[4])
{
    form f = {.kind = LINE, .coef = {coef[0], coef[1], coef[2], coef[3]}};
    const int32_t q = coef[VAR_Q], kv = coef[VAR_KV];
    const int32_t by = (int32_t)llabs(common_divisor(q, kv));
    const int32_t sign = q < 0 || (q == 0 && kv < 0) ? -1 : 1;
    if (by != 0) {
        f.step[0] = sign * q / by;
        f.step[1] = sign * kv / by;
    }
    return f;
}

static int is_moving(const form *f)
{
    return f->step[0] != 0 || f->step[1] != 0;
}

/* A function of operands that all have one direction, or none, has it too. */
static form function_of(const mod_fn *fn, const mod_node *n, const form *all)
{
    form f = {.kind = FREE};
    for (uint32_t k = 0; k < n->n_args; k++) {
        const form *x = &all[fn->args[n->args + k]];
        if (x->kind == ANY
            || (is_moving(&f) && is_moving(x)
                && (f.step[0] != x->step[0] || f.step[1] != x->step[1])))
            return (form){.kind = ANY};
        if (!is_moving(x))
            continue;
        f.kind = ALONG;
        f.step[0] = x->step[0];
        f.step[1] = x->step[1];
    }
    return f;
}

static form form_of(const mod_fn *fn, const mod_node *n, const mod_line *own, const form *all)
{
    const pass_index index = {.line = *own};
    if (n->deps & DEP_SCORE)
        return (form){.kind = ANY};
    if (pass_compares_places(fn, n))
        return (form){.kind = ALONG, .step = {1, -1}};
    return pass_index_is_line(&index) ? line(own->coef) : function_of(fn, n, all);
}

/* Ints that are f(q) + g(kv) within a head, of operands of which this is known. */
static uint8_t is_sum(const mod_fn *fn, const mod_node *n, const uint8_t *all)
{
    const int both = DEP_Q | DEP_KV;
    const uint32_t *args = fn->args + n->args;
    if (n->deps & DEP_SCORE)
        return 0;
    if ((n->deps & both) != both)
        return 1;
    switch (n->op) {
    case OP_iadd:
    case OP_isub:
        return all[args[0]] && all[args[1]];
    case OP_ineg:
        return all[args[0]];
    case OP_imul:
        return all[args[0]] && all[args[1]]
               && (!(fn->nodes[args[0]].deps & both) || !(fn->nodes[args[1]].deps & both));
    default:
        return 0;
    }
}

static uint32_t find_sum(const mod_fn *fn, uint32_t index, const uint8_t *sums)
{
    const mod_node *n = &fn->nodes[index];
    const uint32_t *args = fn->args + n->args;
    if (sums[index])
        return index;
    if (n->op != OP_isel || !sums[args[2]])
        return PASS_NO_NODE;
    const mod_node *below = &fn->nodes[args[0]];
    if (below->op != OP_ilt || fn->args[below->args] != args[2])
        return PASS_NO_NODE;
    const mod_node *zero = &fn->nodes[fn->args[below->args + 1]];
    return zero->op == OP_INT && zero->imm.i == 0 ? args[2] : PASS_NO_NODE;
}

/* ---- classes ---- */

/* A step of 1, so that different positions give different indices, whatever wraps. */
static int is_unit(const form *f, int var)
{
    for (int i = 0; i < 4; i++)
        if (i != var && f->coef[i] != 0)
            return 0;
    return f->kind == LINE && abs(f->coef[var]) == 1;
}

/* q and kv with steps of at most 1, the same for all heads. */
static int is_plain(const form *f)
{
    return f->kind == LINE && f->coef[VAR_B] == 0 && f->coef[VAR_H] == 0
           && abs(f->coef[VAR_Q]) <= 1 && abs(f->coef[VAR_KV]) <= 1;
}

static int has_own_elements(const form *const *f, int rank)
{
    for (int i = 0; i < rank; i++)
        for (int k = 0; k < i; k++)
            if (is_plain(f[i]) && is_plain(f[k])
                && f[i]->coef[VAR_Q] * f[k]->coef[VAR_KV]
                       != f[k]->coef[VAR_Q] * f[i]->coef[VAR_KV])
                return 1;
    return 0;
}

static int any_unit(const form *const *f, int rank, int var)
{
    for (int i = 0; i < rank; i++)
        if (is_unit(f[i], var))
            return 1;
    return 0;
}

/* Sums along a direction: whether different ones have different elements, for all heads. */
static int any_plain(const form *const *f, int rank)
{
    for (int i = 0; i < rank; i++)
        if (is_plain(f[i]) && is_moving(f[i]))
            return 1;
    return 0;
}

/* Of the one direction of all dimensions. */
static pass_scatter along(const form *const *f, int rank)
{
    int32_t q = 0, kv = 0;
    for (int i = 0; i < rank; i++) {
        if (f[i]->kind == ANY)
            return SCATTER_GENERAL;
        if (!is_moving(f[i]))
            continue;
        if ((q != 0 || kv != 0) && (q != f[i]->step[0] || kv != f[i]->step[1]))
            return SCATTER_GENERAL;
        q = f[i]->step[0];
        kv = f[i]->step[1];
    }
    if (q == 0)
        return kv == 0 ? SCATTER_HEADS : SCATTER_COLUMNS;
    return kv == 0 ? SCATTER_ROWS : q == 1 && kv == -1 ? SCATTER_DIAGONALS : SCATTER_GENERAL;
}

static void classify(const form *const *f, pass_read *read)
{
    const int rank = read->rank;
    const int by_head = any_unit(f, rank, VAR_B) && any_unit(f, rank, VAR_H);
    read->scatter = has_own_elements(f, rank) ? SCATTER_ELEMENTS : along(f, rank);
    read->is_shared = !by_head
                      || (read->scatter != SCATTER_HEADS && read->scatter != SCATTER_ELEMENTS
                          && !any_plain(f, rank));
}

/* ---- reads ---- */

static void find_read(const mod_fn *fn, uint32_t node, const mod_line *lines, const form *forms,
                      const uint8_t *sums, pass_read *out)
{
    const mod_node *n = &fn->nodes[node];
    const form *f[SACCADE_MAX_RANK], *inside[SACCADE_MAX_RANK];
    form sum_form[SACCADE_MAX_RANK];
    *out = (pass_read){.node = node, .capture = (uint32_t)n->imm.i, .rank = n->n_args};
    for (uint32_t d = 0; d < n->n_args; d++) {
        const uint32_t arg = fn->args[n->args + d];
        const uint32_t sum = find_sum(fn, arg, sums);
        const mod_line *of_sum = &lines[sum == PASS_NO_NODE ? arg : sum];
        const pass_index known = {.line = *of_sum};
        f[d] = inside[d] = &forms[arg];
        if (pass_index_is_line(&known)) {
            sum_form[d] = line(of_sum->coef);
            inside[d] = &sum_form[d];
        }
        out->index[d] = (pass_index){fn->nodes[arg].deps, sum, lines[arg], *of_sum};
    }
    if (n->type != MOD_FLOAT)
        return;
    classify(f, out);
    out->is_own_inside = (uint8_t)has_own_elements(inside, out->rank);
}

/* Where several reads of a tensor meet, elements of their own are no longer that. */
static void join_reads(pass_read *reads, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < n; k++) {
            pass_read *x = &reads[i];
            if (i == k || x->capture != reads[k].capture || x->scatter == SCATTER_NONE)
                continue;
            x->is_shared = 1;
            x->is_own_inside = 0;
            if (x->scatter == SCATTER_ELEMENTS)
                x->scatter = SCATTER_GENERAL;
        }
}

saccade_status pass_find_reads(const mod_fn *fn, arena *a, const pass_read **out, uint32_t *n,
                               saccade_error *err)
{
    const mod_line *lines = mod_find_lines(fn, a);
    form *forms = arena_array(a, fn->n_nodes, sizeof *forms);
    uint8_t *sums = arena_array(a, fn->n_nodes, sizeof *sums);
    uint32_t count = 0;
    FAIL_IF_NULL(lines);
    FAIL_IF_NULL(forms);
    FAIL_IF_NULL(sums);
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        forms[i] = form_of(fn, &fn->nodes[i], &lines[i], forms);
        sums[i] = is_sum(fn, &fn->nodes[i], sums);
        count += fn->nodes[i].op == OP_LOAD || fn->nodes[i].op == OP_SCALAR;
    }
    pass_read *reads = arena_array(a, count, sizeof *reads);
    FAIL_IF_NULL(reads);
    count = 0;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        if (fn->nodes[i].op == OP_LOAD || fn->nodes[i].op == OP_SCALAR)
            find_read(fn, i, lines, forms, sums, &reads[count++]);
    join_reads(reads, count);
    *out = reads;
    *n = count;
    return SACCADE_OK;
}

int pass_sums_keys(const pass_read *read)
{
    for (int d = 0; d < read->rank; d++) {
        const mod_line *line = &read->index[d].sum_line;
        if (line->known & DEP_KV && line->coef[VAR_KV])
            return 0;
    }
    return 1;
}

/* ---- in words ---- */

static void print_line(const pass_index *index, strbuf *out)
{
    static const char *const names[] = {"b", "h", "q", "kv"};
    int n = 0;
    for (int i = 0; i < 4; i++) {
        const int32_t c = index->line.coef[i];
        if (c == 0)
            continue;
        strbuf_puts(out, c < 0 ? (n ? " - " : "-") : n ? " + " : "");
        if (abs(c) != 1)
            strbuf_printf(out, "%d ", abs(c));
        strbuf_puts(out, names[i]);
        n++;
    }
    strbuf_puts(out, n ? " + c" : "c");
}

static void print_index(const pass_index *index, strbuf *out)
{
    static const char *const names[] = {"b", "h", "q", "kv", "score"};
    int n = 0;
    if (pass_index_is_line(index)) {
        print_line(index, out);
        return;
    }
    if (index->sum != PASS_NO_NODE && index->varies & DEP_Q && index->varies & DEP_KV) {
        strbuf_puts(out, "f(q) + g(kv)");
        return;
    }
    strbuf_puts(out, "f(");
    for (int i = 0; i < 5; i++)
        if (index->varies >> i & 1)
            strbuf_printf(out, "%s%s", n++ ? ", " : "", names[i]);
    strbuf_putc(out, ')');
}

void pass_read_print(const mod_fn *fn, const pass_read *read, strbuf *out)
{
    static const char *const sums[] = {
        [SCATTER_HEADS] = "a sum for each head",
        [SCATTER_ROWS] = "a sum for each row",
        [SCATTER_COLUMNS] = "a sum for each column",
        [SCATTER_DIAGONALS] = "a sum for each diagonal",
        [SCATTER_ELEMENTS] = "an element for each score",
        [SCATTER_GENERAL] = "each score adds for itself",
    };
    strbuf_printf(out, "n%u reads %s[", (unsigned)read->node, fn->captures[read->capture].name);
    for (int d = 0; d < read->rank; d++) {
        strbuf_puts(out, d ? ", " : "");
        print_index(&read->index[d], out);
    }
    strbuf_putc(out, ']');
    if (read->scatter != SCATTER_NONE)
        strbuf_printf(out, "; its gradient: %s%s", sums[read->scatter],
                      read->scatter == SCATTER_GENERAL ? ""
                      : read->is_shared                ? ", added in order"
                                                       : ", stored once");
    strbuf_putc(out, '\n');
}
