/* The vectorised interpreter: a mod over a strip of neighbouring keys, one loop per node.
   Nodes are sorted by what they depend on into stages: nothing, (b, h), the row, the keys; the
   first three are single cells computed when their stage begins. Nodes of the last stage
   become steps over buffers of EVAL_STRIP lanes, reused as soon as their last reader has run,
   so that a strip stays in L1. An index that runs straight through a capture is read as a
   strided row; other indices are gathered, clamped. */
#include "eval/eval.h"

#include "base/cpu_features.h"
#include "base/status.h"
#include "eval/strip.h"
#include "mod/arith.h"
#include "saccade_config.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

enum stage { STAGE_RUN, STAGE_HEAD, STAGE_ROW, STAGE_KEYS, STAGES };
enum step_kind { STEP_COUNT, STEP_SCORE, STEP_LOAD, STEP_OP };

enum { SLOT_BYTES = STRIP_LANES * 4, OFFSETS_BYTES = STRIP_LANES * 8, NOT_ROW = -1 };

/* An operand: a slot, or the cell of a node (as ~node). */
typedef int32_t operand;

typedef struct step {
    uint8_t kind, op, same;
    int8_t row_dim; /* loads: the dimension that runs with the keys, or NOT_ROW */
    int32_t slope;  /* loads: step of that index per key */
    uint32_t node, out;
    const operand *args;
} step;

struct eval_prog {
    const mod_fn *fn;
    const strip_table *table;
    const uint32_t *stage[STAGE_KEYS]; /* nodes of each */
    uint32_t n_stage[STAGE_KEYS];
    const step *steps;
    uint32_t n_steps, n_slots;
    operand *results;
    uint32_t n_results;
    bool has_gather;
};

struct eval_state {
    const eval_prog *prog;
    eval_env env;
    int32_t position[4]; /* by mod_var; kv unused */
    eval_cell *cells;    /* by node, of all stages but the last */
    char *slots;
    int64_t *offsets; /* gather's */
};

/* ---- compiling ---- */

static enum stage stage_of(const mod_node *n)
{
    if (n->deps & (DEP_KV | DEP_SCORE))
        return STAGE_KEYS;
    if (n->deps & DEP_Q)
        return STAGE_ROW;
    return n->deps ? STAGE_HEAD : STAGE_RUN;
}

static saccade_status choose_table(const strip_table **out, saccade_error *err)
{
    cpu_level level;
    TRY(cpu_level_allowed(&level, err));
    *out = &strip_table_portable;
#if HAVE_LEVEL_AVX2
    if (level >= CPU_AVX2)
        *out = &strip_table_avx2;
#endif
#if HAVE_LEVEL_AVX512
    if (level >= CPU_AVX512)
        *out = &strip_table_avx512;
#endif
    return SACCADE_OK;
}

static saccade_status list_stages(eval_prog *prog, arena *arena, saccade_error *err)
{
    const mod_fn *fn = prog->fn;
    for (int s = STAGE_RUN; s < STAGE_KEYS; s++) {
        uint32_t *list = arena_array(arena, fn->n_nodes, sizeof *list);
        FAIL_IF_NULL(list);
        for (uint32_t i = 0; i < fn->n_nodes; i++)
            if ((int)stage_of(&fn->nodes[i]) == s)
                list[prog->n_stage[s]++] = i;
        prog->stage[s] = list;
    }
    return SACCADE_OK;
}

/* What is only needed while compiling; by node. */
typedef struct maker {
    eval_prog *prog;
    arena *arena;
    uint32_t *last_use; /* the last node that reads it */
    const mod_line *lines;
    uint32_t *slot;
    uint32_t *free; /* stack of slots */
    uint32_t n_free;
    step *steps;
} maker;

static saccade_status make_maker(maker *m, eval_prog *prog, arena *arena, saccade_error *err)
{
    const uint32_t n = prog->fn->n_nodes;
    *m = (maker){.prog = prog, .arena = arena};
    m->last_use = arena_array(arena, n, sizeof *m->last_use);
    m->lines = mod_find_lines(prog->fn, arena);
    m->slot = arena_array(arena, n, sizeof *m->slot);
    m->free = arena_array(arena, n, sizeof *m->free);
    m->steps = arena_array(arena, n, sizeof *m->steps);
    FAIL_IF_NULL(m->last_use);
    FAIL_IF_NULL(m->lines);
    FAIL_IF_NULL(m->slot);
    FAIL_IF_NULL(m->free);
    FAIL_IF_NULL(m->steps);
    return SACCADE_OK;
}

/* 0: no result needs the node. */
static void find_last_uses(maker *m, const uint32_t *results, uint32_t n)
{
    const mod_fn *fn = m->prog->fn;
    for (uint32_t k = 0; k < n; k++)
        m->last_use[results[k]] = fn->n_nodes;
    for (uint32_t i = fn->n_nodes; i-- > 0;) {
        for (uint32_t k = 0; m->last_use[i] && k < fn->nodes[i].n_args; k++) {
            uint32_t *last = &m->last_use[fn->args[fn->nodes[i].args + k]];
            *last = *last ? *last : i;
        }
    }
}

/* The one dimension whose index runs in a line, when all others stand still. */
static void plan_load(const maker *m, const mod_node *n, step *s)
{
    const mod_fn *fn = m->prog->fn;
    s->row_dim = NOT_ROW;
    for (uint32_t d = 0; d < n->n_args; d++) {
        const uint32_t arg = fn->args[n->args + d];
        if (stage_of(&fn->nodes[arg]) != STAGE_KEYS)
            continue;
        const bool is_second = s->row_dim != NOT_ROW;
        s->row_dim = (int8_t)d;
        s->slope = m->lines[arg].coef[VAR_KV];
        if (is_second || !(m->lines[arg].known & DEP_KV)) {
            s->row_dim = NOT_ROW;
            break;
        }
    }
    m->prog->has_gather = true; /* a row that leaves the tensor is gathered too */
}

static uint8_t kind_of(const mod_node *n)
{
    switch (n->op) {
    case OP_VAR:
        return STEP_COUNT;
    case OP_SCORE:
        return STEP_SCORE;
    case OP_LOAD:
        return STEP_LOAD;
    default:
        return STEP_OP;
    }
}

static operand operand_of(const maker *m, uint32_t node)
{
    const bool is_strip = stage_of(&m->prog->fn->nodes[node]) == STAGE_KEYS;
    return is_strip ? (operand)m->slot[node] : ~(operand)node;
}

/* Gives back the slots that node i reads for the last time; each once. */
static void free_slots(maker *m, uint32_t i)
{
    const mod_fn *fn = m->prog->fn;
    const mod_node *n = &fn->nodes[i];
    for (uint32_t k = 0; k < n->n_args; k++) {
        const uint32_t arg = fn->args[n->args + k];
        if (m->last_use[arg] != i || stage_of(&fn->nodes[arg]) != STAGE_KEYS)
            continue;
        m->free[m->n_free++] = m->slot[arg];
        m->last_use[arg] = UINT32_MAX;
    }
}

static saccade_status make_step(maker *m, uint32_t i, saccade_error *err)
{
    eval_prog *prog = m->prog;
    const mod_node *n = &prog->fn->nodes[i];
    operand *args = arena_array(m->arena, n->n_args, sizeof *args);
    step *s = &m->steps[prog->n_steps++];
    FAIL_IF_NULL(args);
    *s = (step){.kind = kind_of(n), .op = n->op, .node = i, .args = args};
    for (uint32_t k = 0; k < n->n_args; k++) {
        args[k] = operand_of(m, prog->fn->args[n->args + k]);
        s->same |= (uint8_t)(k < 3 && args[k] < 0 ? 1 << k : 0);
    }
    if (s->kind == STEP_LOAD)
        plan_load(m, n, s);
    s->out = m->n_free > 0 ? m->free[--m->n_free] : prog->n_slots++; /* not an operand's */
    free_slots(m, i);
    m->slot[i] = s->out;
    return SACCADE_OK;
}

static saccade_status make_steps(eval_prog *prog, const uint32_t *results, uint32_t n,
                                 arena *arena, saccade_error *err)
{
    const mod_fn *fn = prog->fn;
    maker m;
    TRY(make_maker(&m, prog, arena, err));
    find_last_uses(&m, results, n);
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        if (m.last_use[i] && stage_of(&fn->nodes[i]) == STAGE_KEYS)
            TRY(make_step(&m, i, err));
    }
    prog->steps = m.steps;
    prog->results = arena_array(arena, n, sizeof *prog->results);
    FAIL_IF_NULL(prog->results);
    prog->n_results = n;
    for (uint32_t k = 0; k < n; k++)
        prog->results[k] = operand_of(&m, results[k]);
    return SACCADE_OK;
}

saccade_status eval_compile_results(const mod_fn *fn, const uint32_t *results, uint32_t n,
                                    arena *arena, const eval_prog **out, saccade_error *err)
{
    eval_prog *prog = arena_alloc(arena, sizeof *prog);
    FAIL_IF_NULL(prog);
    *prog = (eval_prog){.fn = fn};
    TRY(choose_table(&prog->table, err));
    TRY(list_stages(prog, arena, err));
    TRY(make_steps(prog, results, n, arena, err));
    *out = prog;
    return SACCADE_OK;
}

saccade_status eval_compile(const mod_fn *fn, arena *arena, const eval_prog **out,
                            saccade_error *err)
{
    return eval_compile_results(fn, &fn->result, 1, arena, out, err);
}

/* ---- state ---- */

static size_t padded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

size_t eval_state_bytes(const eval_prog *prog)
{
    return padded(sizeof(eval_state)) + padded(prog->fn->n_nodes * sizeof(eval_cell))
           + (size_t)prog->n_slots * SLOT_BYTES + (prog->has_gather ? OFFSETS_BYTES : 0);
}

static eval_cell load_cell(const eval_state *state, const mod_node *n)
{
    const saccade_tensor *t = &state->env.tensors[n->imm.i];
    const uint32_t *args = state->prog->fn->args + n->args;
    int64_t offset = 0;
    for (uint32_t d = 0; d < n->n_args; d++)
        offset += eval_clamp(state->cells[args[d]].i, t->shape[d]) * t->stride[d];
    return eval_read(t->dtype, t->data, offset);
}

static eval_cell compute_cell(const eval_state *state, const mod_node *n)
{
    eval_cell x[3] = {{0}, {0}, {0}};
    switch (n->op) {
    case OP_BOOL:
    case OP_INT:
        return (eval_cell){.i = n->imm.i};
    case OP_FLOAT:
        return (eval_cell){.f = n->imm.f};
    case OP_VAR:
        return (eval_cell){.i = state->position[n->imm.i]};
    case OP_SIZE:
        return (eval_cell){.i = state->env.size[n->imm.i]};
    case OP_SCALAR:
    case OP_LOAD:
        return load_cell(state, n);
    default:
        for (uint32_t k = 0; k < n->n_args; k++)
            x[k] = state->cells[state->prog->fn->args[n->args + k]];
        return eval_apply((mod_op)n->op, x[0], x[1], x[2]);
    }
}

static void run_stage(eval_state *state, enum stage stage)
{
    const eval_prog *prog = state->prog;
    for (uint32_t i = 0; i < prog->n_stage[stage]; i++) {
        const uint32_t node = prog->stage[stage][i];
        state->cells[node] = compute_cell(state, &prog->fn->nodes[node]);
    }
}

eval_state *eval_begin(const eval_prog *prog, const eval_env *env, void *memory)
{
    eval_state *state = memory;
    char *at = (char *)memory + padded(sizeof *state);
    assert((uintptr_t)memory % 64 == 0);
    memset(memory, 0, eval_state_bytes(prog));
    *state = (eval_state){.prog = prog, .env = *env, .cells = (eval_cell *)at};
    state->slots = at + padded(prog->fn->n_nodes * sizeof(eval_cell));
    state->offsets = (int64_t *)(state->slots + (size_t)prog->n_slots * SLOT_BYTES);
    run_stage(state, STAGE_RUN);
    return state;
}

void eval_head(eval_state *state, int32_t b, int32_t h)
{
    state->position[VAR_B] = b + state->env.b_offset;
    state->position[VAR_H] = h + state->env.h_offset;
    run_stage(state, STAGE_HEAD);
}

void eval_row(eval_state *state, int32_t q)
{
    state->position[VAR_Q] = q;
    run_stage(state, STAGE_ROW);
}

/* ---- strips ---- */

static void *slot_at(const eval_state *state, uint32_t slot)
{
    return state->slots + (size_t)slot * SLOT_BYTES;
}

static const void *operand_at(const eval_state *state, operand x)
{
    return x >= 0 ? slot_at(state, (uint32_t)x) : (const void *)&state->cells[~x];
}

/* A line of indices that stays inside: reads it as a row; 0 when it doesn't. */
static int read_row(eval_state *state, const step *s, int32_t n)
{
    const mod_node *node = &state->prog->fn->nodes[s->node];
    const saccade_tensor *t = &state->env.tensors[node->imm.i];
    const int64_t size = t->shape[s->row_dim];
    const strip_int *index = operand_at(state, s->args[s->row_dim]);
    const int64_t first = index[0], last = index[n - 1];
    if (last - first != (int64_t)s->slope * (n - 1) || first < 0 || last < 0 || first >= size
        || last >= size)
        return 0;
    int64_t offset = 0;
    for (int d = 0; d < node->n_args; d++) {
        const strip_int *at = operand_at(state, s->args[d]);
        offset += (d == s->row_dim ? first : eval_clamp(*at, t->shape[d])) * t->stride[d];
    }
    const char *data = (const char *)t->data + offset * (int64_t)saccade_dtype_bytes(t->dtype);
    state->prog->table->read[t->dtype](slot_at(state, s->out), data,
                                       s->slope * t->stride[s->row_dim], n);
    return 1;
}

static void gather(eval_state *state, const step *s, int32_t n)
{
    const strip_table *table = state->prog->table;
    const mod_node *node = &state->prog->fn->nodes[s->node];
    const saccade_tensor *t = &state->env.tensors[node->imm.i];
    int64_t base = 0;
    for (int d = 0; d < node->n_args; d++) {
        const strip_int *at = operand_at(state, s->args[d]);
        if (s->args[d] < 0)
            base += eval_clamp(*at, t->shape[d]) * t->stride[d];
    }
    for (int32_t i = 0; i < n; i++)
        state->offsets[i] = base;
    for (int d = 0; d < node->n_args; d++)
        if (s->args[d] >= 0)
            table->add_offsets(state->offsets, operand_at(state, s->args[d]), t->shape[d],
                               t->stride[d], n);
    table->gather[t->dtype](slot_at(state, s->out), t->data, state->offsets, n);
}

static void run_op(eval_state *state, const step *s, int groups)
{
    const void *x[3];
    const int arity = state->prog->fn->nodes[s->node].n_args;
    /* what an operation does not have is read by no lane, but must be a pointer */
    for (int k = 0; k < 3; k++)
        x[k] = operand_at(state, s->args[k < arity ? k : 0]);
    state->prog->table->op[s->op](slot_at(state, s->out), x[0], x[1], x[2], groups, s->same);
}

static void run_steps(eval_state *state, int32_t kv0, int32_t n, const float *score)
{
    const eval_prog *prog = state->prog;
    const int groups = (n + STRIP_GROUP - 1) / STRIP_GROUP;
    assert(n >= 1 && n <= EVAL_STRIP);
    for (uint32_t i = 0; i < prog->n_steps; i++) {
        const step *s = &prog->steps[i];
        switch (s->kind) {
        case STEP_COUNT:
            prog->table->count(slot_at(state, s->out), kv0, groups);
            break;
        case STEP_SCORE:
            memcpy(slot_at(state, s->out), score, (size_t)n * sizeof *score);
            break;
        case STEP_LOAD:
            if (s->row_dim == NOT_ROW || !read_row(state, s, n))
                gather(state, s, n);
            break;
        default:
            run_op(state, s, groups);
        }
    }
}

void eval_mask(eval_state *state, int32_t kv0, int32_t n, uint8_t *live)
{
    const operand result = state->prog->results[0];
    if (n <= 0)
        return;
    run_steps(state, kv0, n, NULL);
    if (result >= 0)
        state->prog->table->to_bytes(live, slot_at(state, (uint32_t)result), n);
    else
        memset(live, state->cells[~result].i, (size_t)n);
}

static void take_result(const eval_state *state, operand result, int32_t n, float *out)
{
    if (result >= 0) {
        memcpy(out, slot_at(state, (uint32_t)result), (size_t)n * sizeof *out);
        return;
    }
    for (int32_t i = 0; i < n; i++)
        out[i] = state->cells[~result].f;
}

static void take_integers(const eval_state *state, operand result, int32_t n, int32_t *out)
{
    if (result >= 0) {
        memcpy(out, slot_at(state, (uint32_t)result), (size_t)n * sizeof *out);
        return;
    }
    for (int32_t i = 0; i < n; i++)
        out[i] = state->cells[~result].i;
}

void eval_integers(eval_state *state, int32_t kv0, int32_t n, int32_t *const *out)
{
    if (n <= 0)
        return;
    run_steps(state, kv0, n, NULL);
    for (uint32_t k = 0; k < state->prog->n_results; k++)
        take_integers(state, state->prog->results[k], n, out[k]);
}

void eval_results(eval_state *state, int32_t kv0, int32_t n, const float *score,
                  float *const *out)
{
    if (n <= 0)
        return;
    run_steps(state, kv0, n, score);
    for (uint32_t k = 0; k < state->prog->n_results; k++)
        take_result(state, state->prog->results[k], n, out[k]);
}

void eval_score(eval_state *state, int32_t kv0, int32_t n, float *score)
{
    eval_results(state, kv0, n, score, &score);
}
