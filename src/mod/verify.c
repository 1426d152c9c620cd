/* What every typed mod keeps to, checked whole: operands before uses and of the right types,
   deps that are the union of the operands', captures in range, a result of the mod's kind.
   Passes call it after changing a mod; a failure is our mistake. */
#include "mod/mod.h"

#include "base/status.h"

#include <string.h>

static mod_type type_of_letter(char letter)
{
    return letter == 'B' ? MOD_BOOL : letter == 'I' ? MOD_INT : MOD_FLOAT;
}

static saccade_status verify_leaf(const mod_fn *fn, uint32_t i, unsigned *deps,
                                  saccade_error *err)
{
    static const uint8_t of_var[] = {DEP_B, DEP_H, DEP_Q, DEP_KV};
    const mod_node *n = &fn->nodes[i];
    const int32_t imm = n->imm.i;
    FAIL_IF(n->op == OP_BOOL && imm != 0 && imm != 1, SACCADE_EINTERNAL,
            "n%u: got bool %d, expected 0 or 1", i, imm);
    FAIL_IF(n->op == OP_VAR && (imm < 0 || imm > VAR_KV), SACCADE_EINTERNAL,
            "n%u: got variable %d", i, imm);
    FAIL_IF(n->op == OP_SIZE && (imm < 0 || imm >= MOD_SIZE_COUNT), SACCADE_EINTERNAL,
            "n%u: got size %d", i, imm);
    FAIL_IF(n->op == OP_SCORE && fn->kind != SACCADE_SCORE, SACCADE_EINTERNAL,
            "n%u: got the score in a mask", i);
    if (n->op == OP_VAR)
        *deps |= of_var[imm];
    if (n->op == OP_SCORE)
        *deps |= DEP_SCORE;
    return SACCADE_OK;
}

static saccade_status verify_capture(const mod_fn *fn, uint32_t i, saccade_error *err)
{
    const mod_node *n = &fn->nodes[i];
    FAIL_IF(n->imm.i < 0 || (uint32_t)n->imm.i >= fn->n_captures, SACCADE_EINTERNAL,
            "n%u: got capture %d of %u", i, n->imm.i, fn->n_captures);
    const mod_capture *c = &fn->captures[n->imm.i];
    FAIL_IF(c->rank != n->n_args || (n->op == OP_SCALAR) != (n->n_args == 0), SACCADE_EINTERNAL,
            "n%u: got %u indices for %s of rank %u", i, n->n_args, c->name, c->rank);
    FAIL_IF(c->type != n->type, SACCADE_EINTERNAL, "n%u: type is not that of %s", i, c->name);
    return SACCADE_OK;
}

static saccade_status verify_args(const mod_fn *fn, uint32_t i, unsigned *deps,
                                  saccade_error *err)
{
    const mod_node *n = &fn->nodes[i];
    const char *wants = mod_op_infos[n->op].signature + 2;
    const bool is_load = n->op == OP_LOAD;
    FAIL_IF(n->args > fn->n_args || n->n_args > fn->n_args - n->args, SACCADE_EINTERNAL,
            "n%u: operands outside of the pool", i);
    FAIL_IF(!is_load && strlen(wants) != n->n_args, SACCADE_EINTERNAL,
            "n%u: got %u operands, expected %zu", i, n->n_args, strlen(wants));
    for (uint32_t j = 0; j < n->n_args; j++) {
        const uint32_t arg = fn->args[n->args + j];
        FAIL_IF(arg >= i, SACCADE_EINTERNAL, "n%u: got operand n%u, expected an earlier one", i,
                arg);
        FAIL_IF(fn->nodes[arg].type != (is_load ? MOD_INT : type_of_letter(wants[j])),
                SACCADE_EINTERNAL, "n%u: type of operand %u", i, j);
        *deps |= fn->nodes[arg].deps;
    }
    return SACCADE_OK;
}

static saccade_status verify_node(const mod_fn *fn, uint32_t i, saccade_error *err)
{
    const mod_node *n = &fn->nodes[i];
    unsigned deps = 0;
    FAIL_IF(n->op >= MOD_OP_COUNT, SACCADE_EINTERNAL, "n%u: got operation %d", i, n->op);
    TRY(verify_leaf(fn, i, &deps, err));
    TRY(verify_args(fn, i, &deps, err));
    if (n->op == OP_SCALAR || n->op == OP_LOAD)
        TRY(verify_capture(fn, i, err));
    else
        FAIL_IF(n->type != type_of_letter(mod_op_infos[n->op].signature[0]), SACCADE_EINTERNAL,
                "n%u: type of %s", i, mod_op_infos[n->op].name);
    FAIL_IF(n->deps != deps, SACCADE_EINTERNAL, "n%u: got deps %u, expected %u", i, n->deps,
            deps);
    return SACCADE_OK;
}

saccade_status mod_verify(const mod_fn *fn, saccade_error *err)
{
    FAIL_IF(fn->n_nodes == 0 || fn->n_nodes > MOD_MAX_NODES, SACCADE_EINTERNAL,
            "got %u nodes, expected 1 to %d", fn->n_nodes, MOD_MAX_NODES);
    FAIL_IF(fn->result != fn->n_nodes - 1, SACCADE_EINTERNAL,
            "got result n%u, expected the last node", fn->result);
    for (uint32_t i = 0; i < fn->n_nodes; i++)
        TRY(verify_node(fn, i, err));
    const unsigned type = fn->nodes[fn->result].type;
    FAIL_IF(type != (fn->kind == SACCADE_MASK ? MOD_BOOL : MOD_FLOAT), SACCADE_EINTERNAL,
            "result: got type %u for kind %d", type, fn->kind);
    return SACCADE_OK;
}
