/* The typing rules, which are nothing but ops.def: an operator or built-in stands for all
   operations of that form, and the first one whose operands fit is meant. int fits float. */
#include "mod/ast.h"

#include <string.h>

const mod_op_info mod_op_infos[MOD_OP_COUNT] = {
    [OP_BOOL] = {"bool", "B:", "constant"},   [OP_INT] = {"int", "I:", "constant"},
    [OP_FLOAT] = {"float", "F:", "constant"}, [OP_VAR] = {"var", "I:", "leaf"},
    [OP_SCORE] = {"score", "F:", "leaf"},     [OP_SIZE] = {"size", "I:", "leaf"},
    [OP_SCALAR] = {"scalar", "?:", "leaf"},   [OP_LOAD] = {"load", "?:*", "load"},
#define OP(name, signature, form, ...) [OP_##name] = {#name, signature, form},
#include "mod/ops.def"
#undef OP
};

enum { FIRST_OP = OP_LOAD + 1 };

const char *types_name(unsigned set)
{
    static const char *const names[] = {"nothing", "bool",          "int",      "bool or int",
                                        "float",   "bool or float", "a number", "anything"};
    return names[set & 7];
}

/* what an operand of this letter takes. */
static unsigned accepted(char letter)
{
    return letter == 'B' ? T_BOOL : letter == 'I' ? T_INT : T_NUMBER;
}

static unsigned given(char letter)
{
    return letter == 'B' ? T_BOOL : letter == 'I' ? T_INT : T_FLOAT;
}

static uint32_t n_operands(int op)
{
    return (uint32_t)strlen(mod_op_infos[op].signature + 2);
}

uint32_t types_arity(const char *form)
{
    for (int op = FIRST_OP; op < MOD_OP_COUNT; op++)
        if (strcmp(mod_op_infos[op].form, form) == 0)
            return n_operands(op);
    return 0;
}

/* Calls are the forms that end in "(", and what is more than one operation, or none. */
static const char *const builtins[] = {
    "clamp",
    "sum",
#define OP(name, signature, form, ...) form,
#include "mod/ops.def"
#undef OP
};
enum { N_BUILTINS = sizeof builtins / sizeof builtins[0] };

/* length of the name of a call; 0 for an operator. */
static size_t name_length(int i)
{
    const size_t n = strlen(builtins[i]);
    if (builtins[i][n - 1] == '(')
        return n - 1;
    return i < 2 ? n : 0;
}

bool types_is_builtin(const char *name)
{
    const size_t n = strlen(name);
    for (int i = 0; i < N_BUILTINS; i++)
        if (n > 0 && n == name_length(i) && memcmp(builtins[i], name, n) == 0)
            return true;
    return false;
}

const char *types_nearest_builtin(const char *name)
{
    char text[N_BUILTINS][AST_MAX_NAME + 1];
    const char *names[N_BUILTINS];
    for (int i = 0; i < N_BUILTINS; i++) {
        const size_t n = name_length(i);
        memcpy(text[i], builtins[i], n);
        text[i][n] = '\0';
        names[i] = text[i];
    }
    const char *nearest = source_nearest(name, names, N_BUILTINS);
    for (int i = 0; i < N_BUILTINS; i++)
        if (nearest == names[i])
            return builtins[i];
    return NULL;
}

enum fit { NEVER, MAYBE, SURELY };

/* how the operands fit one operation; *wrong: the first that does not. */
static enum fit fit(int op, const unsigned *types, uint32_t n, uint32_t *wrong)
{
    enum fit result = SURELY;
    for (uint32_t i = 0; i < n; i++) {
        const unsigned ok = accepted(mod_op_infos[op].signature[2 + i]);
        *wrong = i;
        if ((types[i] & ok) == 0)
            return NEVER;
        if ((types[i] & ~ok) != 0)
            result = MAYBE;
    }
    return result;
}

bool types_resolve(const char *form, const unsigned *types, uint32_t n, overload *out)
{
    *out = (overload){0};
    for (int op = FIRST_OP; op < MOD_OP_COUNT; op++) {
        uint32_t wrong = 0;
        if (strcmp(mod_op_infos[op].form, form) != 0 || n_operands(op) != n)
            continue;
        const enum fit f = fit(op, types, n, &wrong);
        if (f == NEVER && out->result == 0 && wrong >= out->wrong) {
            if (wrong > out->wrong)
                out->expected = 0;
            out->wrong = wrong;
            out->expected |= accepted(mod_op_infos[op].signature[2 + wrong]);
        }
        if (f == NEVER)
            continue;
        if (out->result == 0)
            out->op = (mod_op)op;
        out->result |= given(mod_op_infos[op].signature[0]);
        if (f == SURELY)
            break;
    }
    return out->result != 0;
}
