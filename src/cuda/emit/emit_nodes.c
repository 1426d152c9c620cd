/* CUDA text of nodes: straight-line code from the typed nodes, split by what they depend on.
 *
 *   row      free of kv and score   once per row, before the loop over keys
 *   column   of kv, not q           once per key, shared by a thread's two rows
 *   element  the rest               once per score
 *
 * Kernels work on groups of four scores, x[0..3] = (row 0, key 0), (row 0, key 1), (row 1, key
 * 0), (row 1, key 1), which is what one thread holds of a tensor-core product. What does not
 * depend on score is exact IEEE f32, the rest may be approximate. */
#include "cuda/emit/emit.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { TANH_GAIN_MOST = 64 }; /* softcap(50) and below */

static const char *const exact_text[MOD_OP_COUNT] = {
#define OP(name, signature, form, value, exact, fast, grad, range) [OP_##name] = exact,
#include "mod/ops.def"
#undef OP
};

static const char *const fast_text[MOD_OP_COUNT] = {
#define OP(name, signature, form, value, exact, fast, grad, range) [OP_##name] = fast,
#include "mod/ops.def"
#undef OP
};

const char *emit_type(const mod_node *n)
{
    static const char *const names[] = {"bool", "int", "float"};
    return names[n->type];
}

/* A thread's two rows may be of two heads (decode): a key's value may not hang on the head. */
rate emit_rate_of(const mod_node *n)
{
    if (!(n->deps & (DEP_KV | DEP_SCORE)))
        return ROW;
    return n->deps & (DEP_Q | DEP_H | DEP_SCORE) ? ELEMENT : COLUMN;
}

void emit_float(strbuf *out, float x)
{
    char text[32];
    if (isnan(x)) {
        strbuf_puts(out, "NOT_A_NUMBER");
    } else if (isinf(x)) {
        strbuf_puts(out, x > 0 ? "POS_INF" : "NEG_INF");
    } else {
        snprintf(text, sizeof text, "%.9g", (double)x);
        const char *dot = strpbrk(text, ".e") ? "" : ".";
        strbuf_printf(out, x < 0 || signbit(x) ? "(%s%sf)" : "%s%sf", text, dot);
    }
}

static void put_int(strbuf *out, int32_t x)
{
    if (x == INT32_MIN)
        strbuf_puts(out, "(-2147483647 - 1)");
    else
        strbuf_printf(out, x < 0 ? "(%d)" : "%d", x);
}

/* Sizes that a plan fixes are numbers, the others come with each run. */
static void put_size(const emitter *e, strbuf *out, int which)
{
    const saccade_sizes *s = &e->problem->sizes;
    switch (which) {
    case SIZE_B:
        strbuf_puts(out, "p.B");
        break;
    case SIZE_Q:
        strbuf_puts(out, e->problem->has_rows ? "p.M_all" : "p.M");
        break;
    case SIZE_KV:
        strbuf_puts(out, "p.N");
        break;
    case SIZE_H:
        put_int(out, e->problem->heads_global);
        break;
    case SIZE_HKV:
        put_int(out, e->problem->heads_global / e->problem->group);
        break;
    case SIZE_D:
        put_int(out, (int32_t)s->D);
        break;
    default:
        put_int(out, (int32_t)s->Dv);
        break;
    }
}

/* Heads in texts are global, a kernel's are those of its run. */
static void put_var(const emitter *e, strbuf *out, int which, place at)
{
    const char *name = which == VAR_B ? "b" : which == VAR_H ? "h" : "q";
    if (which == VAR_H && e->problem->h_offset)
        strbuf_printf(out, "(%d + ", e->problem->h_offset);
    if (which == VAR_KV)
        strbuf_printf(out, "k%d", at.copy % 2);
    else if (which == VAR_B || at.rate == ROW)
        strbuf_puts(out, name);
    else
        strbuf_printf(out, "r%d.%s", at.copy / 2, name);
    if (which == VAR_H && e->problem->h_offset)
        strbuf_puts(out, ")");
}

/* The value of node n as seen from a place. */
void emit_value(const emitter *e, strbuf *out, const mod_node *n, place at)
{
    static const char *const reads[] = {"scalar_bool", "scalar_int", "scalar_float"};
    const unsigned i = emit_number(e, n);
    switch (n->op) {
    case OP_BOOL:
        strbuf_puts(out, n->imm.i ? "true" : "false");
        return;
    case OP_INT:
        put_int(out, n->imm.i);
        return;
    case OP_FLOAT:
        emit_float(out, n->imm.f);
        return;
    case OP_VAR:
        put_var(e, out, n->imm.i, at);
        return;
    case OP_SCORE:
        strbuf_printf(out, "(x[%d] * SCORE_SCALE)", at.copy);
        return;
    case OP_SIZE:
        put_size(e, out, n->imm.i);
        return;
    case OP_SCALAR:
        strbuf_printf(out, "%s(mod.cap[%d])", reads[n->type], e->first_capture + n->imm.i);
        return;
    default:
        break;
    }
    if (emit_rate_of(n) == ROW && at.rate == ROW)
        strbuf_printf(out, "n%u", i);
    else if (emit_rate_of(n) == ROW)
        strbuf_printf(out, "r%d.n%u", at.rate == COLUMN ? 0 : at.copy / 2, i);
    else if (emit_rate_of(n) == COLUMN)
        strbuf_printf(out, "c%d_%u", at.copy % 2, i);
    else
        strbuf_printf(out, "e%d_%u", at.copy, i);
}

static void put_load(const emitter *e, const mod_node *n, place at)
{
    const char *dtype = saccade_dtype_name(e->fn->captures[n->imm.i].dtype);
    const int cap = e->first_capture + n->imm.i, dense = emit_dense_read(e, n);
    if (dense >= 0)
        strbuf_printf(e->out, "DENSE_READ(as_%s(dense[%d][%d]), ", dtype, dense, at.copy);
    strbuf_printf(e->out, "load_%s(mod.cap[%d], ", dtype, cap);
    for (int d = 0; d < n->n_args; d++) {
        strbuf_printf(e->out, "%sstep(mod.cap[%d], %d, ", d ? " + " : "", cap, d);
        emit_value(e, e->out, emit_arg(e, n, d), at);
        strbuf_puts(e->out, ")");
    }
    strbuf_puts(e->out, dense >= 0 ? "))" : ")");
}

/* A column of ops.def with operands put for $0 $1 $2. */
static void put_template(const emitter *e, const char *text, const mod_node *n, place at)
{
    for (; *text; text++) {
        if (text[0] == '$' && text[1] >= '0' && text[1] <= '2')
            emit_value(e, e->out, emit_arg(e, n, *++text - '0'), at);
        else
            strbuf_putc(e->out, *text);
    }
}

/* score times or over something that no key changes: scale and it become one factor */
static int is_scaled_score(const emitter *e, const mod_node *n)
{
    if (n->op == OP_fdiv)
        return emit_arg(e, n, 0)->op == OP_SCORE && emit_rate_of(emit_arg(e, n, 1)) == ROW;
    return n->op == OP_fmul
           && ((emit_arg(e, n, 0)->op == OP_SCORE && emit_rate_of(emit_arg(e, n, 1)) == ROW)
               || (emit_arg(e, n, 1)->op == OP_SCORE
                   && emit_rate_of(emit_arg(e, n, 0)) == ROW));
}

static void put_scaled_score(const emitter *e, const mod_node *n, place at)
{
    const mod_node *by = emit_arg(e, n, emit_arg(e, n, 0)->op == OP_SCORE ? 1 : 0);
    strbuf_printf(e->out, "x[%d] * (SCORE_SCALE * %s", at.copy,
                  n->op == OP_fdiv ? "sac_inverse(" : "(");
    emit_value(e, e->out, by, at);
    strbuf_puts(e->out, "))");
}

/* The bare score and something else added or subtracted: with scale one multiply-add. */
static int is_score_sum(const emitter *e, const mod_node *n)
{
    return (n->op == OP_fadd || n->op == OP_fsub)
           && (emit_arg(e, n, 0)->op == OP_SCORE) != (emit_arg(e, n, 1)->op == OP_SCORE);
}

static void put_score_sum(const emitter *e, const mod_node *n, place at)
{
    const int side = emit_arg(e, n, 1)->op == OP_SCORE, is_difference = n->op == OP_fsub;
    strbuf_printf(e->out, "fmaf(x[%d], %sSCORE_SCALE, %s", at.copy,
                  is_difference && side ? "-" : "", is_difference && !side ? "-" : "");
    emit_value(e, e->out, emit_arg(e, n, 1 - side), at);
    strbuf_puts(e->out, ")");
}

/* One statement: node n at a place. */
void emit_node(const emitter *e, const mod_node *n, place at)
{
    const int is_late = (n->deps & DEP_SCORE) != 0;
    const int is_fast = is_late && e->problem->dtype != SACCADE_F32 && n->op != OP_ftanh;
    strbuf_printf(e->out, "    const %s ", emit_type(n));
    emit_value(e, e->out, n, at);
    strbuf_puts(e->out, " = ");
    if (emit_shared(e, n, at))
        ;
    else if (n->op == OP_LOAD)
        put_load(e, n, at);
    else if (is_late && is_scaled_score(e, n))
        put_scaled_score(e, n, at);
    else if (is_fast && is_score_sum(e, n))
        put_score_sum(e, n, at);
    else
        put_template(e, is_fast ? fast_text[n->op] : exact_text[n->op], n, at);
    strbuf_puts(e->out, ";\n");
}

/* The fast tanh errs by 2.8e-7: a score must not magnify that. Mods in f32 never take it. */
int emit_is_fast_tanh(const emitter *e, uint32_t i)
{
    const mod_node *n = &e->fn->nodes[i];
    return n->op == OP_ftanh && n->deps & DEP_SCORE && e->problem->dtype != SACCADE_F32
           && e->gain && e->gain[i] <= TANH_GAIN_MOST;
}

/* tanh of four scores at once shares one reciprocal (arith.cuh) */
static void put_tanh4(const emitter *e, const mod_node *n)
{
    const unsigned i = emit_number(e, n);
    for (int c = 0; c < 4; c++) {
        strbuf_printf(e->out, "    float e%d_%u = ", c, i);
        emit_value(e, e->out, emit_arg(e, n, 0), (place){ELEMENT, c});
        strbuf_puts(e->out, ";\n");
    }
    strbuf_printf(e->out, "    sac_tanh4(e0_%u, e1_%u, e2_%u, e3_%u);\n", i, i, i, i);
}

static int copies_of(rate which)
{
    return which == ROW ? 1 : which == COLUMN ? 2 : 4;
}

/* All nodes of one rate, each in all its copies; `except` is left out. */
void emit_nodes(const emitter *e, rate which, const mod_node *except)
{
    const int copies = copies_of(which);
    for (uint32_t i = 0; i < e->fn->n_nodes; i++) {
        const mod_node *n = &e->fn->nodes[i];
        if (emit_is_leaf(n) || emit_rate_of(n) != which || n == except)
            continue;
        if (emit_is_fast_tanh(e, i)) {
            put_tanh4(e, n);
            continue;
        }
        for (int c = 0; c < copies; c++)
            emit_node(e, n, (place){which, c});
    }
}

void emit_mark_operands(const emitter *e, unsigned char *needed)
{
    const mod_fn *fn = e->fn;
    for (uint32_t i = fn->n_nodes; i-- > 0;)
        for (int a = 0; needed[i] && !emit_is_leaf(&fn->nodes[i]) && a < fn->nodes[i].n_args;
             a++)
            needed[fn->args[fn->nodes[i].args + a]] = 1;
}

void emit_marked(const emitter *e, const unsigned char *needed, int all)
{
    for (uint32_t i = 0; i < e->fn->n_nodes; i++) {
        const mod_node *n = &e->fn->nodes[i];
        const rate which = emit_rate_of(n);
        if (!needed[i] || emit_is_leaf(n) || which == ROW)
            continue;
        for (int c = 0; c < (all ? copies_of(which) : 1); c++)
            emit_node(e, n, (place){which, c});
    }
}

/* marks row values that columns and elements read, or that are the result */
void emit_mark_kept(const emitter *e, unsigned char *kept)
{
    const mod_fn *fn = e->fn;
    memset(kept, 0, fn->n_nodes);
    kept[fn->result] = 1;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        for (int a = 0; emit_rate_of(&fn->nodes[i]) != ROW && a < fn->nodes[i].n_args; a++)
            kept[fn->args[fn->nodes[i].args + a]] = 1;
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        kept[i] = kept[i] && emit_rate_of(&fn->nodes[i]) == ROW && !emit_is_leaf(&fn->nodes[i]);
}

void emit_row_members(const emitter *e, const unsigned char *kept)
{
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        if (kept[i])
            strbuf_printf(e->out, "    %s n%u;\n", emit_type(&e->fn->nodes[i]), (unsigned)i);
}

void emit_row_values(const emitter *e, const unsigned char *kept)
{
    for (uint32_t i = 0; i < e->fn->n_nodes; i++)
        if (kept[i])
            strbuf_printf(e->out, "    r.n%u = n%u;\n", (unsigned)i, (unsigned)i);
}

/* <what>_row and <what>_row_begin: row values and who keeps them. */
void emit_row_struct(const emitter *e, const char *what, const unsigned char *kept)
{
    strbuf_printf(e->out, "struct %s_row {\n    int q, h;\n", what);
    emit_row_members(e, kept);
    strbuf_printf(e->out,
                  "};\n\nDEVICE void %s_row_begin(%s, int q, %s_row &r)\n{\n"
                  "    r.q = q;\n    r.h = h;\n",
                  what, EMIT_SIGNATURE, what);
    emit_nodes(e, ROW, NULL);
    emit_row_values(e, kept);
    strbuf_puts(e->out, "}\n\n");
}
