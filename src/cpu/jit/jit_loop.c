/* Machine code for the tile level: one loop over rows, inside it one over pairs of vectors of
 * columns, whose operations are interleaved so that both are in flight. The uniform and row
 * values used most keep a register through the loop (jit_regs.h draws the register map). */
#include "cpu/jit/jit_graph.h"

#include "base/cpu_features.h"
#include "base/status.h"
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AVX512

#include "cpu/jit/jit_regs.h"

#include <stdlib.h>

/* ---- the body ---- */

/* Results are the graph's and then, where there is one, the mask. */
static uint32_t mask_of(const jit_emitter *t)
{
    return (uint32_t)t->n_results > t->g->n_results ? t->results[t->g->n_results] : UINT32_MAX;
}

/* Score (or -inf where the mask is false) into s, and into the running maximum. */
static void store_score(jit_emitter *t, int lane)
{
    const uint32_t mask = mask_of(t);
    int r = jit_get(t, t->results[0], lane);
    if (mask != UINT32_MAX) {
        const int c = t->a.is_wide ? jit_get_mask(t, mask, lane) : jit_get(t, mask, lane);
        const int d = jit_take_reg(t, NOWHERE);
        jit_blend(t, d, c, r, t->low);
        r = d;
    }
    EMIT_VECTOR(&t->a, Z(VMOVUPS), scores_of(t, lane), vec(t, r));
    if (t->has_max)
        EMIT_VECTOR(&t->a, Z(VMAXPS), vec(t, t->max_reg[lane]), vec(t, r),
                    vec(t, t->max_reg[lane]));
}

/* A further result into its own tile. */
static void store_further(jit_emitter *t, uint32_t k, int lane)
{
    const int r = jit_get(t, t->results[k], lane);
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX), field(offsetof(jit_call, apart) + 8 * k));
    EMIT(&t->a, ADD, gpr(ZYDIS_REGISTER_RAX), gpr(t->s_base));
    EMIT_VECTOR(&t->a, Z(VMOVUPS),
                jit_mem(ZYDIS_REGISTER_RAX, t->column_index, 1, lane * t->lane_bytes,
                        t->vector_bytes),
                vec(t, r));
}

/* Ends a store: registers that were taken for it are free again. */
static void unlock_stored(jit_emitter *t)
{
    memset(t->locked, 0, sizeof t->locked);
    memset(t->k_locked, 0, sizeof t->k_locked);
}

void jit_emit_values(jit_emitter *t)
{
    for (t->at = 0; t->at < t->n_order;) {
        const uint32_t value = t->order[t->at];
        jit_emit_value(t, value);
        t->at++;
        jit_unlock_all(t);
    }
}

static void emit_body(jit_emitter *t)
{
    jit_emit_values(t);
    for (int lane = 0; lane < LANES; lane++) {
        store_score(t, lane);
        unlock_stored(t);
        for (uint32_t k = 1; k < t->g->n_results; k++) {
            store_further(t, k, lane);
            unlock_stored(t);
        }
    }
    jit_forget_all(t);
}

/* Stores the largest score of a row, taken over both vectors, to [row_max]. */
static void reduce_max(jit_emitter *t)
{
    const int top = t->scratch, part = t->scratch + 1;
    const ZydisRegister y = ZYDIS_REGISTER_YMM0, x = ZYDIS_REGISTER_XMM0;
    EMIT_VECTOR(&t->a, Z(VMAXPS), vec(t, top), vec(t, t->max_reg[0]), vec(t, t->max_reg[1]));
    if (t->a.is_wide) {
        EMIT_VECTOR(&t->a, Z(VEXTRACTF32X8), jit_reg(y + part), vec(t, top), jit_imm(1));
        EMIT_VECTOR(&t->a, Z(VMAXPS), jit_reg(y + top), jit_reg(y + top), jit_reg(y + part));
        EMIT_VECTOR(&t->a, Z(VEXTRACTF32X4), jit_reg(x + part), jit_reg(y + top), jit_imm(1));
    } else {
        EMIT(&t->a, VEXTRACTF128, jit_reg(x + part), vec(t, top), jit_imm(1));
    }
    EMIT_VECTOR(&t->a, Z(VMAXPS), jit_reg(x + top), jit_reg(x + top), jit_reg(x + part));
    for (int imm = 0x4e; imm; imm = imm == 0x4e ? 0xb1 : 0) { /* swap halves, then pairs */
        EMIT_VECTOR(&t->a, Z(VPSHUFD), jit_reg(x + part), jit_reg(x + top), jit_imm(imm));
        EMIT_VECTOR(&t->a, Z(VMAXPS), jit_reg(x + top), jit_reg(x + top), jit_reg(x + part));
    }
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RAX), FIELD(row_max));
    EMIT_VECTOR(&t->a, Z(VMOVSS), jit_mem(ZYDIS_REGISTER_RAX, ZYDIS_REGISTER_NONE, 0, 0, 4),
                jit_reg(x + top));
    EMIT(&t->a, ADD, FIELD(row_max), jit_imm(4));
}

/* Jumps back to `target` while the last comparison says "not zero", or "less". */
static void jump_back(jit_emitter *t, ZydisMnemonic mnemonic, size_t target)
{
    jit_aim(&t->a, jit_jump(&t->a, mnemonic), target);
}

/* ---- what is computed, what is pinned ---- */

static void mark(const jit_emitter *t, uint32_t node, uint8_t *wanted)
{
    wanted[node] = 1;
    for (uint32_t i = node + 1; i-- > 0;) {
        const jit_node *n = &t->g->nodes[i];
        for (int k = 0; wanted[i] && is_computed(t, n) && k < n->n_args; k++)
            wanted[n->args[k]] = 1;
    }
}

void jit_add_result(jit_emitter *t, uint32_t node)
{
    t->results[t->n_results++] = node;
}

void jit_choose_order(jit_emitter *t, uint8_t *wanted)
{
    for (int k = 0; k < t->n_results; k++)
        mark(t, t->results[k], wanted);
    for (uint32_t i = 0; i < t->g->n_nodes; i++)
        for (int lane = 0; wanted[i] && lane < LANES; lane++)
            if (is_computed(t, &t->g->nodes[i]))
                t->order[t->n_order++] = i * LANES + (uint32_t)lane;
    jit_find_last_uses(t);
}

/* Counts how many values of a tile use each node. */
static void count_uses(const jit_emitter *t, uint16_t *count)
{
    for (int i = 0; i < t->n_order; i += LANES) {
        const jit_node *n = node_of(t, t->order[i]);
        for (int k = 0; k < n->n_args; k++)
            count[n->args[k]] += (k < 1 || n->args[k] != n->args[0])
                                 && (k < 2 || n->args[k] != n->args[1]);
    }
}

void jit_choose_pinned(jit_emitter *t, const uint8_t *wanted, jit_level level, int most)
{
    uint16_t count[JIT_MAX_NODES] = {0};
    count_uses(t, count);
    for (int taken = 0; taken < most; taken++) {
        int best = NOWHERE, best_uses = 0;
        for (uint32_t i = 0; i < t->g->n_nodes; i++) {
            const jit_node *n = &t->g->nodes[i];
            if (!wanted[i] || n->level > level || n->type == MOD_BOOL
                || t->reg[i * LANES] != NOWHERE)
                continue;
            if (count[i] > best_uses) {
                best = (int)i;
                best_uses = count[i];
            }
        }
        if (best == NOWHERE)
            return;
        t->is_pinned[jit_take_reg(t, best * LANES)] = 1;
    }
}

void jit_start(jit_emitter *t, const jit_graph *g, int32_t level, jit_asm to)
{
    memset(t, 0, offsetof(jit_emitter, order));
    t->g = g;
    t->a = to;
    t->a.is_wide = level >= CPU_AVX512;
    t->vector_bytes = t->a.is_wide ? 64 : 32;
    t->n_registers = t->a.is_wide ? 30 : 13;
    t->scratch = t->a.is_wide ? 30 : 14;
    t->past_mask = MAX_MASKS;
    t->n_slots = CALL_SLOTS + LANES;
    t->s_base = ZYDIS_REGISTER_R12;
    t->column_index = ZYDIS_REGISTER_R13;
    t->frame_base = ZYDIS_REGISTER_RBP;
    t->lane_bytes = t->vector_bytes;
    for (uint32_t i = 0; g && i < g->n_nodes * LANES; i++)
        t->reg[i] = t->k[i] = t->slot[i] = NOWHERE;
    for (int i = 0; i < MAX_REGISTERS + 2; i++)
        t->in_reg[i] = NOWHERE;
    for (int i = 0; i <= MAX_MASKS; i++)
        t->in_k[i] = NOWHERE;
}

static void take_fixed(jit_emitter *t)
{
    int *const fixed[] = {&t->max_reg[0], &t->max_reg[1], &t->low};
    for (int i = t->has_max ? 0 : LANES; i < LANES + 1; i++) {
        *fixed[i] = jit_take_reg(t, NOWHERE);
        t->is_pinned[*fixed[i]] = 1;
    }
}

static const ZydisRegister saved[] = {
    ZYDIS_REGISTER_RBX, ZYDIS_REGISTER_RBP, ZYDIS_REGISTER_R12,
    ZYDIS_REGISTER_R13, ZYDIS_REGISTER_R14, ZYDIS_REGISTER_R15,
};
enum { SAVED = sizeof saved / sizeof *saved };

/* Six pushes and 8 bytes keep the stack a multiple of 16 for calls. */
static void emit_entry(jit_emitter *t)
{
    for (int i = 0; i < SAVED; i++)
        EMIT(&t->a, PUSH, gpr(saved[i]));
    EMIT(&t->a, SUB, gpr(ZYDIS_REGISTER_RSP), jit_imm(8));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RBX), gpr(ZYDIS_REGISTER_RDI));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_RBP), FIELD(frame));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R12), FIELD(s));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R14), FIELD(rows));
    EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R15), FIELD(n_rows));
    jit_load_bases(t);
    jit_load_pinned(t, JIT_UNIFORM, JIT_UNIFORM);
}

static void emit_exit(jit_emitter *t)
{
    EMIT(&t->a, ADD, gpr(ZYDIS_REGISTER_RSP), jit_imm(8));
    for (int i = SAVED; i-- > 0;)
        EMIT(&t->a, POP, gpr(saved[i]));
    jit_put(&t->a, Z(VZEROUPPER), 0, NULL);
    jit_put(&t->a, Z(RET), 0, NULL);
}

static void emit_rows(jit_emitter *t)
{
    const size_t row = t->a.size;
    jit_load_pinned(t, JIT_ROW, JIT_ROW);
    for (int i = 0; t->has_max && i < LANES; i++)
        EMIT_VECTOR(&t->a, Z(VMOVAPS), vec(t, t->max_reg[i]), vec(t, t->low));
    EMIT(&t->a, XOR, gpr(ZYDIS_REGISTER_R13D), gpr(ZYDIS_REGISTER_R13D));
    const size_t column = t->a.size;
    emit_body(t);
    EMIT(&t->a, ADD, gpr(ZYDIS_REGISTER_R13), jit_imm(LANES * t->vector_bytes));
    EMIT(&t->a, CMP, gpr(ZYDIS_REGISTER_R13), FIELD(col_bytes));
    jump_back(t, Z(JL), column);
    if (t->has_max)
        reduce_max(t);
    EMIT(&t->a, ADD, gpr(ZYDIS_REGISTER_R12), FIELD(ld_bytes));
    EMIT(&t->a, ADD, gpr(ZYDIS_REGISTER_R14), jit_imm(4));
    if (t->has_diagonals) {
        EMIT(&t->a, SUB, FIELD(diagonals), jit_imm(4));
        EMIT(&t->a, MOV, gpr(ZYDIS_REGISTER_R9), FIELD(diagonals));
    }
    EMIT(&t->a, SUB, gpr(ZYDIS_REGISTER_R15), jit_imm(1));
    jump_back(t, Z(JNZ), row);
}

saccade_status jit_emit_tile(const jit_graph *graph, int form, int32_t level, uint8_t *bytes,
                             size_t capacity, size_t *size, int32_t *spills, saccade_error *err)
{
    uint8_t wanted[JIT_MAX_NODES] = {0};
    jit_emitter *t = malloc(sizeof *t);
    FAIL_IF_NULL(t);
    jit_start(t, graph, level, (jit_asm){.bytes = bytes, .capacity = capacity});
    t->has_max = graph->has_max;
    t->has_diagonals = !(form & JIT_FEW_ROWS) && graph->n_diagonals > 0;
    for (uint32_t k = 0; k < graph->n_results; k++)
        jit_add_result(t, graph->results[k]);
    if (form & JIT_MASKED)
        jit_add_result(t, graph->mask);
    jit_choose_order(t, wanted);
    take_fixed(t);
    jit_choose_pinned(t, wanted, JIT_ROW, t->a.is_wide ? MAX_PINNED : 3);
    emit_entry(t);
    emit_rows(t);
    emit_exit(t);
    const int failed = t->a.failed;
    *size = t->a.size;
    *spills = t->n_slots;
    free(t);
    FAIL_IF(failed, SACCADE_EBACKEND,
            "jit: got a mod whose code does not fit %zu bytes, the "
            "interpreter runs it",
            capacity);
    return SACCADE_OK;
}

#else

saccade_status jit_emit_tile(const jit_graph *graph, int form, int32_t level, uint8_t *bytes,
                             size_t capacity, size_t *size, int32_t *spills, saccade_error *err)
{
    (void)graph, (void)form, (void)level, (void)bytes, (void)capacity, (void)size;
    (void)spills;
    FAIL(SACCADE_EBACKEND, "jit: built without Zydis, the interpreter runs mods");
}

#endif
