/* Typed nodes, hash-consed while they are made: an equal node is never made twice, so equal
   subexpressions are one and the graph stays small however a text is written. mod_finish puts
   what is alive into one canonical order (depth first from the result, operands in order),
   which is why printed text parses back to the same nodes.
   Failures stick; they are reported once, by mod_finish. */
#include "mod/mod.h"

#include "base/status.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum { BUILDER_MAX_NODES = 2 * MOD_MAX_NODES }; /* dead ones included */

struct mod_builder {
    arena *arena;
    saccade_kind kind;
    const mod_capture *captures;
    uint32_t n_captures;
    mod_node *nodes;
    uint32_t n_nodes, nodes_room;
    uint32_t *args;
    uint32_t n_args, args_room;
    uint32_t *table;     /* node + 1 by hash; 0: free */
    uint32_t table_size; /* power of two, more than twice n_nodes */
    saccade_status failed;
    bool is_wide;
};

mod_builder *mod_builder_create(arena *arena, saccade_kind kind, const mod_capture *captures,
                                uint32_t n_captures)
{
    mod_builder *b = arena_alloc(arena, sizeof *b);
    if (b == NULL)
        return NULL;
    *b = (mod_builder){.arena = arena,
                       .kind = kind,
                       .captures = captures,
                       .n_captures = n_captures,
                       .nodes_room = 32,
                       .args_room = 64,
                       .table_size = 128};
    b->nodes = arena_array(arena, b->nodes_room, sizeof *b->nodes);
    b->args = arena_array(arena, b->args_room, sizeof *b->args);
    b->table = arena_array(arena, b->table_size, sizeof *b->table);
    return b->nodes && b->args && b->table ? b : NULL;
}

/* ---- growth ---- */

static void *grown(mod_builder *b, const void *old, uint32_t used, uint32_t *room, size_t size)
{
    void *bigger = arena_array(b->arena, 2 * (size_t)*room, size);
    if (bigger == NULL)
        return NULL;
    memcpy(bigger, old, used * size);
    *room *= 2;
    return bigger;
}

static uint32_t hash_node(const mod_node *n, const uint32_t *args)
{
    uint32_t hash = 2166136261u;
    hash = (hash ^ n->op) * 16777619u;
    hash = (hash ^ (uint32_t)n->imm.i) * 16777619u;
    for (uint32_t i = 0; i < n->n_args; i++)
        hash = (hash ^ args[i]) * 16777619u;
    return hash ^ hash >> 15;
}

static bool grow_table(mod_builder *b)
{
    const uint32_t size = 2 * b->table_size;
    uint32_t *table = arena_array(b->arena, size, sizeof *table);
    if (table == NULL)
        return false;
    for (uint32_t i = 0; i < b->n_nodes; i++) {
        uint32_t at = hash_node(&b->nodes[i], b->args + b->nodes[i].args) & (size - 1);
        while (table[at] != 0)
            at = (at + 1) & (size - 1);
        table[at] = i + 1;
    }
    b->table = table;
    b->table_size = size;
    return true;
}

/* room for one node with n operands. */
static bool reserve(mod_builder *b, uint32_t n)
{
    if (b->n_nodes == b->nodes_room) {
        mod_node *nodes = grown(b, b->nodes, b->n_nodes, &b->nodes_room, sizeof *nodes);
        if (nodes == NULL)
            return false;
        b->nodes = nodes;
    }
    while (b->n_args + n > b->args_room) {
        uint32_t *args = grown(b, b->args, b->n_args, &b->args_room, sizeof *args);
        if (args == NULL)
            return false;
        b->args = args;
    }
    return 2 * (b->n_nodes + 1) <= b->table_size || grow_table(b);
}

/* ---- emitting ---- */

static uint32_t fail(mod_builder *b, saccade_status status)
{
    if (b->failed == SACCADE_OK)
        b->failed = status;
    return 0;
}

static mod_type type_of_letter(char letter)
{
    return letter == 'B' ? MOD_BOOL : letter == 'I' ? MOD_INT : MOD_FLOAT;
}

/* do the operands fit the signature? Loads take ints. */
static bool operands_fit(const mod_builder *b, mod_op op, const uint32_t *args, uint32_t n)
{
    const char *wants = mod_op_infos[op].signature + 2;
    const bool is_load = op == OP_LOAD;
    if (is_load ? n < 1 || n > SACCADE_MAX_RANK : strlen(wants) != n)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        if (args[i] >= b->n_nodes)
            return false;
        if (b->nodes[args[i]].type != (is_load ? MOD_INT : type_of_letter(wants[i])))
            return false;
    }
    return true;
}

static uint8_t deps_of(const mod_builder *b, const mod_node *node, const uint32_t *args)
{
    static const uint8_t of_var[] = {DEP_B, DEP_H, DEP_Q, DEP_KV};
    unsigned deps = node->op == OP_SCORE ? DEP_SCORE : 0;
    if (node->op == OP_VAR)
        deps = of_var[node->imm.i & 3];
    for (uint32_t i = 0; i < node->n_args; i++)
        deps |= b->nodes[args[i]].deps;
    return (uint8_t)deps;
}

static bool same(const mod_builder *b, const mod_node *x, const mod_node *y,
                 const uint32_t *y_args)
{
    return x->op == y->op && x->imm.i == y->imm.i && x->n_args == y->n_args
           && (y->n_args == 0
               || memcmp(b->args + x->args, y_args, y->n_args * sizeof *y_args) == 0);
}

/* the equal node, or the new one. */
static uint32_t intern(mod_builder *b, mod_node *node, const uint32_t *args)
{
    uint32_t at = hash_node(node, args) & (b->table_size - 1);
    for (; b->table[at] != 0; at = (at + 1) & (b->table_size - 1))
        if (same(b, &b->nodes[b->table[at] - 1], node, args))
            return b->table[at] - 1;
    if (b->n_nodes == BUILDER_MAX_NODES)
        return fail(b, SACCADE_ELIMIT);
    node->args = b->n_args;
    if (node->n_args > 0)
        memcpy(b->args + b->n_args, args, node->n_args * sizeof *args);
    b->n_args += node->n_args;
    b->nodes[b->n_nodes++] = *node;
    b->table[at] = b->n_nodes;
    return b->n_nodes - 1;
}

uint32_t mod_emit(mod_builder *b, mod_op op, const uint32_t *args, uint32_t n_args, int32_t imm,
                  uint16_t line, uint16_t column)
{
    mod_node node = {.op = (uint8_t)op,
                     .n_args = (uint8_t)n_args,
                     .imm.i = imm,
                     .line = line,
                     .column = column};
    if (b->failed != SACCADE_OK)
        return 0;
    if (!reserve(b, n_args))
        return fail(b, SACCADE_ENOMEM);
    if (!operands_fit(b, op, args, n_args))
        return fail(b, SACCADE_EINTERNAL);
    if (op == OP_FLOAT && isnan(node.imm.f))
        node.imm.f = NAN; /* one NaN */
    if (op == OP_SCORE || op > OP_LOAD)
        node.imm.i = 0;
    if (op == OP_SCALAR || op == OP_LOAD) {
        if (imm < 0 || (uint32_t)imm >= b->n_captures)
            return fail(b, SACCADE_EINTERNAL);
        node.type = b->captures[imm].type;
    } else {
        node.type = (uint8_t)type_of_letter(mod_op_infos[op].signature[0]);
    }
    node.deps = deps_of(b, &node, args);
    return intern(b, &node, args);
}

void mod_builder_be_wide(mod_builder *b)
{
    b->is_wide = true;
}

bool mod_builder_is_wide(const mod_builder *b)
{
    return b->is_wide;
}

uint32_t mod_emit_float(mod_builder *b, float value)
{
    const mod_node bits = {.imm.f = value};
    return mod_emit(b, OP_FLOAT, NULL, 0, bits.imm.i, 0, 0);
}

uint32_t mod_emit_int(mod_builder *b, int32_t value)
{
    return mod_emit(b, OP_INT, NULL, 0, value, 0, 0);
}

uint32_t mod_emit_bool(mod_builder *b, int value)
{
    return mod_emit(b, OP_BOOL, NULL, 0, value != 0, 0, 0);
}

uint32_t mod_emit1(mod_builder *b, mod_op op, uint32_t x)
{
    return mod_emit(b, op, &x, 1, 0, 0, 0);
}

uint32_t mod_emit2(mod_builder *b, mod_op op, uint32_t x, uint32_t y)
{
    const uint32_t args[] = {x, y};
    return mod_emit(b, op, args, 2, 0, 0, 0);
}

uint32_t mod_emit3(mod_builder *b, mod_op op, uint32_t x, uint32_t y, uint32_t z)
{
    const uint32_t args[] = {x, y, z};
    return mod_emit(b, op, args, 3, 0, 0, 0);
}

const mod_node *mod_peek(const mod_builder *b, uint32_t node)
{
    return &b->nodes[node < b->n_nodes ? node : 0];
}

uint32_t mod_peek_arg(const mod_builder *b, uint32_t node, uint32_t k)
{
    const mod_node *n = mod_peek(b, node);
    return k < n->n_args ? b->args[n->args + k] : 0;
}

saccade_status mod_builder_status(const mod_builder *b)
{
    return b->failed;
}

uint32_t mod_emit_function(mod_builder *b, const mod_fn *fn, uint32_t first_capture)
{
    uint32_t *new_of = arena_array(b->arena, fn->n_nodes, sizeof *new_of);
    if (new_of == NULL)
        return fail(b, SACCADE_ENOMEM);
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        const mod_node *n = &fn->nodes[i];
        const bool reads = n->op == OP_SCALAR || n->op == OP_LOAD;
        uint32_t args[SACCADE_MAX_RANK];
        for (uint32_t j = 0; j < n->n_args; j++)
            args[j] = new_of[fn->args[n->args + j]];
        new_of[i] =
            mod_emit(b, (mod_op)n->op, args, n->n_args,
                     n->imm.i + (reads ? (int32_t)first_capture : 0), n->line, n->column);
    }
    return new_of[fn->result];
}

/* ---- finishing ---- */

/* What is alive, in canonical order. */
typedef struct order {
    uint32_t *new_of; /* of each old node, + 1; 0: not reached */
    uint32_t *list;   /* old nodes in new order */
    uint32_t *stack, *next_arg;
    uint32_t n;
} order;

static bool order_init(order *o, mod_builder *b)
{
    o->new_of = arena_array(b->arena, b->n_nodes, sizeof *o->new_of);
    o->list = arena_array(b->arena, b->n_nodes, sizeof *o->list);
    o->stack = arena_array(b->arena, b->n_nodes, sizeof *o->stack);
    o->next_arg = arena_array(b->arena, b->n_nodes, sizeof *o->next_arg);
    o->n = 0;
    return o->new_of && o->list && o->stack && o->next_arg;
}

/* depth first without recursion: graphs can be as deep as they are long. */
static void order_visit(order *o, const mod_builder *b, uint32_t root)
{
    uint32_t top = 0;
    if (o->new_of[root] != 0)
        return;
    o->stack[top++] = root;
    while (top > 0) {
        const uint32_t at = o->stack[top - 1];
        const mod_node *n = &b->nodes[at];
        if (o->next_arg[at] < n->n_args) {
            const uint32_t arg = b->args[n->args + o->next_arg[at]++];
            if (o->new_of[arg] == 0)
                o->stack[top++] = arg;
            continue;
        }
        top--;
        if (o->new_of[at] == 0) {
            o->list[o->n++] = at;
            o->new_of[at] = o->n;
        }
    }
}

static mod_fn *collect(const mod_builder *b, const order *o)
{
    mod_fn *fn = arena_alloc(b->arena, sizeof *fn);
    mod_node *nodes = arena_array(b->arena, o->n, sizeof *nodes);
    uint32_t *args = arena_array(b->arena, b->n_args, sizeof *args);
    uint32_t n_args = 0;
    if (fn == NULL || nodes == NULL || args == NULL)
        return NULL;
    for (uint32_t i = 0; i < o->n; i++) {
        nodes[i] = b->nodes[o->list[i]];
        const uint32_t *old = b->args + nodes[i].args;
        nodes[i].args = n_args;
        for (uint32_t j = 0; j < nodes[i].n_args; j++)
            args[n_args++] = o->new_of[old[j]] - 1;
    }
    *fn = (mod_fn){.kind = b->kind,
                   .nodes = nodes,
                   .args = args,
                   .captures = b->captures,
                   .n_nodes = o->n,
                   .n_args = n_args,
                   .n_captures = b->n_captures};
    return fn;
}

static saccade_status check_failed(const mod_builder *b, saccade_error *err)
{
    FAIL_IF(b->failed == SACCADE_ENOMEM, SACCADE_ENOMEM, "out of memory");
    FAIL_IF(b->failed == SACCADE_ELIMIT, SACCADE_ELIMIT,
            "got more than %d operations, definitions and sum() written out", MOD_MAX_NODES);
    FAIL_AT(b->failed != SACCADE_OK, b->failed, "builder", 0, 0,
            "operands do not fit the operation");
    return SACCADE_OK;
}

saccade_status mod_finish_roots(mod_builder *b, uint32_t *roots, uint32_t n, const mod_fn **out,
                                saccade_error *err)
{
    order o;
    TRY(check_failed(b, err));
    assert(n > 0);
    if (!order_init(&o, b))
        FAIL(SACCADE_ENOMEM, "out of memory");
    for (uint32_t i = 0; i < n; i++)
        order_visit(&o, b, roots[i]);
    FAIL_IF(o.n > MOD_MAX_NODES, SACCADE_ELIMIT,
            "got %u operations, expected at most %d, definitions and sum() written out", o.n,
            MOD_MAX_NODES);
    mod_fn *fn = collect(b, &o);
    FAIL_IF_NULL(fn);
    for (uint32_t i = 0; i < n; i++)
        roots[i] = o.new_of[roots[i]] - 1;
    fn->result = roots[n - 1];
    *out = fn;
    return SACCADE_OK;
}

saccade_status mod_finish(mod_builder *b, uint32_t result, const mod_fn **out,
                          saccade_error *err)
{
    const mod_fn *fn;
    TRY(mod_finish_roots(b, &result, 1, &fn, err));
    TRY(mod_verify(fn, err));
    *out = fn;
    return SACCADE_OK;
}

saccade_status mod_copy_function(const mod_fn *fn, arena *arena, const mod_fn **out,
                                 saccade_error *err)
{
    mod_fn *copy = arena_memdup(arena, fn, sizeof *fn);
    mod_capture *captures =
        arena_memdup(arena, fn->captures, fn->n_captures * sizeof *captures);
    FAIL_IF_NULL(copy);
    FAIL_IF_NULL(captures);
    copy->nodes = arena_memdup(arena, fn->nodes, fn->n_nodes * sizeof *fn->nodes);
    copy->args = arena_memdup(arena, fn->args, fn->n_args * sizeof *fn->args);
    FAIL_IF_NULL(copy->nodes);
    FAIL_IF_NULL(copy->args);
    for (uint32_t i = 0; i < fn->n_captures; i++) {
        captures[i].name = arena_strdup(arena, fn->captures[i].name);
        FAIL_IF_NULL(captures[i].name);
    }
    copy->captures = captures;
    *out = copy;
    return SACCADE_OK;
}
