/* Registers by furthest next use (Belady): the loop's body is straight-line, so what each
 * value is needed for next is known. Values of lower levels and diagonals are never spilled,
 * they are read again. */
#include "saccade_config.h"

#if HAVE_ZYDIS && HAVE_LEVEL_AVX512

#include "cpu/jit/jit_regs.h"

/* ---- next uses ---- */

static int uses(const jit_emitter *t, int at, uint32_t value)
{
    const int lane = (int)(t->order[at] % LANES);
    const jit_node *n = node_of(t, t->order[at]);
    for (int i = 0; i < n->n_args; i++)
        if (value_of(t, n->args[i], lane) == value)
            return 1;
    return 0;
}

/* Results are stored after all nodes of the order, so their last use is at n_order. */
void jit_find_last_uses(jit_emitter *t)
{
    for (uint32_t i = 0; i < t->g->n_nodes * LANES; i++)
        t->last_use[i] = NOWHERE;
    for (int i = 0; i < t->n_order; i++) {
        const jit_node *n = node_of(t, t->order[i]);
        for (int k = 0; k < n->n_args; k++)
            t->last_use[value_of(t, n->args[k], (int)(t->order[i] % LANES))] = i;
    }
    for (int k = 0; k < t->n_results; k++)
        for (int lane = 0; lane < LANES; lane++)
            t->last_use[value_of(t, t->results[k], lane)] = t->n_order;
}

int jit_next_use_from(const jit_emitter *t, uint32_t value, int from)
{
    const int last = t->last_use[value];
    int i = from;
    if (last < from)
        return INT32_MAX;
    while (i < last && !uses(t, i, value))
        i++;
    return i;
}

static int next_use(const jit_emitter *t, uint32_t value)
{
    return jit_next_use_from(t, value, t->at);
}

/* ---- registers ---- */

static void forget_reg(jit_emitter *t, int r)
{
    if (t->in_reg[r] != NOWHERE)
        t->reg[t->in_reg[r]] = NOWHERE;
    t->in_reg[r] = NOWHERE;
}

static int new_slot(jit_emitter *t)
{
    return t->n_slots++;
}

static void move_out(jit_emitter *t, int r)
{
    const uint32_t value = (uint32_t)t->in_reg[r];
    if (is_computed(t, node_of(t, value)) && t->slot[value] == NOWHERE
        && next_use(t, value) != INT32_MAX) {
        t->slot[value] = new_slot(t);
        EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VMOVUPS, frame_slot(t, t->slot[value]), vec(t, r));
    }
    forget_reg(t, r);
}

/* Takes a register for `value`, or a temporary one if that is NOWHERE, and locks it until
 * unlock_all. */
int jit_take_reg(jit_emitter *t, int value)
{
    int best = NOWHERE, best_use = -1;
    for (int r = 0; r < t->n_registers && best_use < INT32_MAX; r++) {
        if (t->is_pinned[r] || t->locked[r])
            continue;
        const int use =
            t->in_reg[r] == NOWHERE ? INT32_MAX : next_use(t, (uint32_t)t->in_reg[r]);
        if (use > best_use) {
            best = r;
            best_use = use;
        }
    }
    if (best == NOWHERE) {
        t->a.failed = 1;
        return 0;
    }
    if (t->in_reg[best] != NOWHERE)
        move_out(t, best);
    t->locked[best] = 1;
    t->in_reg[best] = value;
    if (value != NOWHERE)
        t->reg[value] = best;
    return best;
}

/* Register r now holds another value. */
void jit_rename(jit_emitter *t, int r, uint32_t value)
{
    forget_reg(t, r);
    t->in_reg[r] = (int)value;
    t->reg[value] = r;
}

static void move_out_mask(jit_emitter *t, int k)
{
    const uint32_t value = (uint32_t)t->in_k[k];
    if (is_computed(t, node_of(t, value)) && t->slot[value] == NOWHERE
        && next_use(t, value) != INT32_MAX) {
        t->slot[value] = new_slot(t);
        jit_operand to = frame_slot(t, t->slot[value]);
        to.bytes = 2;
        EMIT(&t->a, KMOVW, to, mask_reg(k));
    }
    t->k[value] = NOWHERE;
    t->in_k[k] = NOWHERE;
}

int jit_take_mask(jit_emitter *t, int value)
{
    int best = NOWHERE, best_use = -1;
    for (int k = 1; k < t->past_mask && best_use < INT32_MAX; k++) {
        if (t->k_locked[k])
            continue;
        const int use = t->in_k[k] == NOWHERE ? INT32_MAX : next_use(t, (uint32_t)t->in_k[k]);
        if (use > best_use) {
            best = k;
            best_use = use;
        }
    }
    if (best == NOWHERE) {
        t->a.failed = 1;
        return 1;
    }
    if (t->in_k[best] != NOWHERE)
        move_out_mask(t, best);
    t->k_locked[best] = 1;
    t->in_k[best] = value;
    if (value != NOWHERE)
        t->k[value] = best;
    return best;
}

/* Ends an instruction: temporaries and values without a further use give their registers
 * back. */
void jit_unlock_all(jit_emitter *t)
{
    for (int r = 0; r < t->n_registers; r++) {
        t->locked[r] = 0;
        if (!t->is_pinned[r] && t->in_reg[r] != NOWHERE
            && next_use(t, (uint32_t)t->in_reg[r]) == INT32_MAX)
            forget_reg(t, r);
    }
    for (int k = 1; k < MAX_MASKS; k++) {
        t->k_locked[k] = 0;
        if (t->in_k[k] != NOWHERE && next_use(t, (uint32_t)t->in_k[k]) == INT32_MAX) {
            t->k[t->in_k[k]] = NOWHERE;
            t->in_k[k] = NOWHERE;
        }
    }
}

/* ---- values of lower levels, and diagonals ---- */

static void load_lower(jit_emitter *t, const jit_node *n, int lane, int r)
{
    const ZydisRegister none = ZYDIS_REGISTER_NONE;
    if (n->level == JIT_UNIFORM)
        EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VBROADCASTSS, vec(t, r),
                    jit_mem(ZYDIS_REGISTER_R10, none, 0, 4 * (int64_t)n->slot, 4));
    else if (n->level == JIT_ROW)
        EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VBROADCASTSS, vec(t, r),
                    jit_mem(ZYDIS_REGISTER_R14, none, 0,
                            t->row_at + 4 * (int64_t)n->slot * JIT_ROWS, 4));
    else if (n->level == JIT_TILE)
        EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VMOVUPS, vec(t, r),
                    jit_mem(ZYDIS_REGISTER_R9, t->column_index, 1,
                            4 * (int64_t)(n->diagonal - 1) * JIT_DIAGONALS
                                + lane * t->vector_bytes,
                            t->vector_bytes));
    else
        EMIT_VECTOR(
            &t->a, ZYDIS_MNEMONIC_VMOVUPS, vec(t, r),
            jit_mem(ZYDIS_REGISTER_R11, t->column_index, 1,
                    t->column_at + 4 * (int64_t)n->slot * JIT_COLS + lane * t->vector_bytes,
                    t->vector_bytes));
    if (n->type == MOD_BOOL && !t->a.is_wide) { /* 0, 1 to 0, -1 */
        EMIT(&t->a, VPXOR, vec(t, t->scratch), vec(t, t->scratch), vec(t, t->scratch));
        EMIT(&t->a, VPSUBD, vec(t, r), vec(t, t->scratch), vec(t, r));
    }
}

/* Register that holds the value, locked. */
int jit_get(jit_emitter *t, uint32_t node, int lane)
{
    const uint32_t value = value_of(t, node, lane);
    const jit_node *n = node_of(t, value);
    if (t->reg[value] == NOWHERE) {
        const int r = jit_take_reg(t, (int)value);
        if (!is_computed(t, n))
            load_lower(t, n, lane, r);
        else
            EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VMOVUPS, vec(t, r),
                        frame_slot(t, t->slot[value]));
    }
    t->locked[t->reg[value]] = 1;
    return t->reg[value];
}

/* jit_get for a bool, which lies in a mask register. */
int jit_get_mask(jit_emitter *t, uint32_t node, int lane)
{
    const uint32_t value = value_of(t, node, lane);
    const jit_node *n = node_of(t, value);
    if (t->k[value] == NOWHERE) {
        const int k = jit_take_mask(t, (int)value);
        if (!is_computed(t, n)) {
            load_lower(t, n, lane, t->scratch);
            EMIT_VECTOR(&t->a, ZYDIS_MNEMONIC_VPTESTMD, mask_reg(k), vec(t, t->scratch),
                        vec(t, t->scratch));
        } else {
            jit_operand from = frame_slot(t, t->slot[value]);
            from.bytes = 2;
            EMIT(&t->a, KMOVW, mask_reg(k), from);
        }
    }
    t->k_locked[t->k[value]] = 1;
    return t->k[value];
}

/* ---- calls and the loop's end ---- */

/* A call destroys all registers. Values that are needed later are spilled before it, and pinned
 * ones are loaded again after it. */
void jit_clear_registers(jit_emitter *t)
{
    for (int r = 0; r < t->n_registers; r++)
        if (!t->is_pinned[r] && t->in_reg[r] != NOWHERE)
            move_out(t, r);
    for (int k = 1; k < MAX_MASKS; k++)
        if (t->in_k[k] != NOWHERE)
            move_out_mask(t, k);
}

void jit_load_pinned(jit_emitter *t, int from_level, int to_level)
{
    for (int r = 0; r < t->n_registers; r++) {
        if (!t->is_pinned[r] || t->in_reg[r] == NOWHERE)
            continue;
        const jit_node *n = node_of(t, (uint32_t)t->in_reg[r]);
        if (n->level >= from_level && n->level <= to_level)
            load_lower(t, n, 0, r);
    }
}

void jit_forget_all(jit_emitter *t)
{
    for (int r = 0; r < t->n_registers; r++)
        if (!t->is_pinned[r])
            forget_reg(t, r);
    for (int k = 1; k < MAX_MASKS; k++) {
        if (t->in_k[k] != NOWHERE)
            t->k[t->in_k[k]] = NOWHERE;
        t->in_k[k] = NOWHERE;
    }
    memset(t->locked, 0, sizeof t->locked);
    memset(t->k_locked, 0, sizeof t->k_locked);
}

#endif
