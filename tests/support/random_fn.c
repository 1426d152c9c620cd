/* Random typed mods: a growing pool of nodes, each new one an operation drawn from ops.def on
   operands drawn from the pool, late ones more often, so that graphs are deep and shared. */
#include "support/random_fn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- numbers ---- */

uint64_t random_bits(random_source *r)
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int32_t random_below(random_source *r, int32_t n)
{
    return (int32_t)(random_bits(r) % (uint64_t)n);
}

int32_t random_int(random_source *r)
{
    static const int32_t ends[] = {INT32_MIN, INT32_MIN + 1, INT32_MAX, INT32_MAX - 1, -1, 0, 1,
                                   31, 32, 33, 65536, 1 << 24, (1 << 24) + 1, 1 << 30};
    switch (random_below(r, 4)) {
    case 0:
        return ends[random_below(r, sizeof ends / sizeof ends[0])];
    case 1:
        return (int32_t)random_bits(r);
    default:
        return random_below(r, 40) - 8;
    }
}

float random_float(random_source *r)
{
    static const float ends[] = {0.0f, -0.0f, 1.0f, -1.0f, 0.5f, 1.5f, 2.5f, INFINITY,
                                 -INFINITY, NAN, 0x1p-149f, -0x1p-126f, 0x1.fffffep127f,
                                 0x1p31f, -0x1p31f, 0x1p23f, 88.8f, -104.0f, 3.1415927f};
    eval_cell any;
    switch (random_below(r, 4)) {
    case 0:
        return ends[random_below(r, sizeof ends / sizeof ends[0])];
    case 1:
        any.i = (int32_t)random_bits(r);
        return any.f;
    default:
        return (float)(random_below(r, 20001) - 10000) / 1000.0f;
    }
}

/* ---- captures ---- */

static const struct {
    const char *name;
    saccade_dtype dtype;
    uint8_t rank;
} kinds[RANDOM_CAPTURES] = {
    {"flag", SACCADE_BOOL, 0}, {"W", SACCADE_I32, 0},   {"n8", SACCADE_U8, 0},
    {"c", SACCADE_F32, 0},     {"g", SACCADE_F64, 0},   {"live", SACCADE_BOOL, 1},
    {"doc", SACCADE_I32, 1},   {"wide", SACCADE_I64, 1}, {"u", SACCADE_U32, 1},
    {"v", SACCADE_U64, 2},     {"small", SACCADE_I8, 2}, {"byte", SACCADE_U8, 3},
    {"s16", SACCADE_I16, 1},   {"w16", SACCADE_U16, 4},  {"half", SACCADE_F16, 3},
    {"brain", SACCADE_BF16, 2}, {"bias", SACCADE_F32, 3}, {"deep", SACCADE_F64, 8},
};

static mod_type type_of(saccade_dtype dtype)
{
    return dtype == SACCADE_BOOL ? MOD_BOOL : dtype <= SACCADE_I64 ? MOD_INT : MOD_FLOAT;
}

/* Fills one element; values fit int32, as binding has checked. */
static void put(random_source *r, saccade_dtype dtype, char *at)
{
    const int32_t i = random_int(r);
    const float f = random_float(r);
    const double d = (double)f * (1.0 + 1e-9);
    const int64_t i64 = i;
    const uint64_t u64 = (uint64_t)i & INT32_MAX;
    const uint32_t u32 = (uint32_t)u64;
    const uint8_t bit = (uint8_t)(i & 1);
    const uint64_t any = random_bits(r);
    const void *from = &any;
    switch (dtype) {
    case SACCADE_BOOL: from = &bit; break;
    case SACCADE_I32: from = &i; break;
    case SACCADE_I64: from = &i64; break;
    case SACCADE_U64: from = &u64; break;
    case SACCADE_U32: from = &u32; break;
    case SACCADE_F32: from = &f; break;
    case SACCADE_F64: from = &d; break;
    default: break; /* narrow ones: any bits */
    }
    memcpy(at, from, saccade_dtype_bytes(dtype));
}

/* Strides of a random order of dimensions, padded; some broadcast, some reversed. */
static int64_t place(random_source *r, saccade_tensor *t, int64_t *first)
{
    int64_t span = 0, step = 1;
    *first = 0;
    for (int32_t d = t->rank - 1; d >= 0; d--) {
        const int32_t how = random_below(r, 8);
        t->stride[d] = how == 0 ? 0 : how == 1 ? -step : step;
        if (how == 0)
            continue;
        span += (t->shape[d] - 1) * step;
        if (how == 1)
            *first += (t->shape[d] - 1) * step;
        step = span + 1 + (random_below(r, 3) == 0);
    }
    return span + 1;
}

void random_env_make(random_env *e, random_source *r)
{
    const int32_t sizes[MOD_SIZE_COUNT] = {3, 8, 2, RANDOM_Q, RANDOM_KV, 64, 32};
    memset(e, 0, sizeof *e);
    memcpy(e->env.size, sizes, sizeof sizes);
    e->env.tensors = e->tensors;
    for (int c = 0; c < RANDOM_CAPTURES; c++) {
        saccade_tensor *t = &e->tensors[c];
        int64_t first;
        *t = (saccade_tensor){.dtype = kinds[c].dtype, .rank = kinds[c].rank};
        for (int32_t d = 0; d < t->rank; d++)
            t->shape[d] = d == t->rank - 1 && t->rank < 5 && random_below(r, 3)
                              ? RANDOM_KV
                              : 1 + random_below(r, t->rank < 3 ? 30 : 3);
        const size_t bytes = saccade_dtype_bytes(t->dtype);
        const int64_t span = place(r, t, &first);
        e->memory[c] = malloc((size_t)span * bytes);
        for (int64_t i = 0; i < span; i++)
            put(r, t->dtype, (char *)e->memory[c] + (size_t)i * bytes);
        t->data = (char *)e->memory[c] + (size_t)first * bytes;
        e->captures[c] = (mod_capture){kinds[c].name, t->dtype, (uint8_t)type_of(t->dtype),
                                       kinds[c].rank};
    }
}

void random_env_free(random_env *e)
{
    for (int c = 0; c < RANDOM_CAPTURES; c++)
        free(e->memory[c]);
}

/* ---- nodes ---- */

enum { POOL = 4096 };

typedef struct pool {
    mod_builder *b;
    random_source *r;
    const random_env *e;
    const random_shape *shape;
    uint32_t nodes[3][POOL]; /* by type */
    int n[3];
} pool;

static uint32_t add(pool *p, uint32_t node)
{
    const int type = mod_peek(p->b, node)->type;
    if (p->n[type] < POOL)
        p->nodes[type][p->n[type]++] = node;
    return node;
}

static uint32_t draw(pool *p, mod_type type)
{
    const int n = p->n[type];
    const int recent = n < 6 ? n : 6;
    if (random_below(p->r, 2))
        return p->nodes[type][n - 1 - random_below(p->r, recent)];
    return p->nodes[type][random_below(p->r, n)];
}

static void add_leaves(pool *p)
{
    for (int v = 0; v < 4; v++)
        add(p, mod_emit(p->b, OP_VAR, NULL, 0, v, 0, 0));
    for (int s = 0; s < MOD_SIZE_COUNT; s++)
        add(p, mod_emit(p->b, OP_SIZE, NULL, 0, s, 0, 0));
    for (int i = 0; i < 6; i++) {
        add(p, mod_emit_int(p->b, random_int(p->r)));
        add(p, mod_emit_float(p->b, p->shape->is_smooth
                                        ? (float)(random_below(p->r, 41) - 20) / 10.0f
                                        : random_float(p->r)));
    }
    add(p, mod_emit_bool(p->b, 0));
    add(p, mod_emit_bool(p->b, 1));
    for (int c = 0; c < RANDOM_CAPTURES && !p->shape->no_loads; c++)
        if (p->e->captures[c].rank == 0)
            add(p, mod_emit(p->b, OP_SCALAR, NULL, 0, c, 0, 0));
    if (p->shape->kind == SACCADE_SCORE && !p->shape->no_score)
        for (int i = 0; i < 3; i++)
            add(p, mod_emit(p->b, OP_SCORE, NULL, 0, 0, 0, 0));
}

/* kv + c and the like, which engines read as rows; or anything. */
static uint32_t draw_index(pool *p)
{
    const uint32_t kv = mod_emit(p->b, OP_VAR, NULL, 0, VAR_KV, 0, 0);
    const uint32_t c = mod_emit_int(p->b, random_below(p->r, 60) - 20);
    switch (random_below(p->r, 6)) {
    case 0:
        return kv;
    case 1:
        return mod_emit2(p->b, OP_iadd, kv, c);
    case 2:
        return mod_emit2(p->b, OP_isub, c, kv);
    case 3:
        return mod_emit(p->b, OP_VAR, NULL, 0, random_below(p->r, 3), 0, 0);
    default:
        return draw(p, MOD_INT);
    }
}

static void add_load(pool *p)
{
    uint32_t args[SACCADE_MAX_RANK];
    const int c = random_below(p->r, RANDOM_CAPTURES);
    const int rank = p->e->captures[c].rank;
    if (rank == 0 || p->shape->no_loads)
        return;
    for (int d = 0; d < rank; d++)
        args[d] = draw_index(p);
    add(p, mod_emit(p->b, OP_LOAD, args, (uint32_t)rank, c, 0, 0));
}

static mod_type of_letter(char letter)
{
    return letter == 'B' ? MOD_BOOL : letter == 'I' ? MOD_INT : MOD_FLOAT;
}

static uint32_t add_op(pool *p, mod_op op)
{
    const char *signature = mod_op_infos[op].signature;
    const uint32_t n = (uint32_t)strlen(signature) - 2;
    uint32_t args[3] = {0, 0, 0};
    for (uint32_t k = 0; k < n; k++)
        args[k] = draw(p, of_letter(signature[2 + k]));
    return add(p, mod_emit(p->b, op, args, n, 0, 0, 0));
}

/* ---- smooth ones: bounded operands, so that finite differences mean something ---- */

static uint32_t bounded(pool *p, uint32_t x)
{
    return mod_emit1(p->b, OP_ftanh, x);
}

static void add_smooth(pool *p)
{
    static const mod_op unary[] = {OP_fneg, OP_fexp, OP_fexp2, OP_fsin, OP_fcos, OP_ftan,
                                   OP_ftanh, OP_fsigmoid, OP_ferf, OP_fabs};
    static const mod_op positive[] = {OP_fsqrt, OP_frsqrt, OP_flog, OP_flog2};
    static const mod_op binary[] = {OP_fadd, OP_fsub, OP_fmul, OP_fmin, OP_fmax};
    const uint32_t x = bounded(p, draw(p, MOD_FLOAT)), y = bounded(p, draw(p, MOD_FLOAT));
    const uint32_t above = mod_emit2(p->b, OP_fadd, x, mod_emit_float(p->b, 1.75f));
    switch (random_below(p->r, 8)) {
    case 0:
    case 1:
        add(p, mod_emit1(p->b, unary[random_below(p->r, 10)], x));
        break;
    case 2:
        add(p, mod_emit1(p->b, positive[random_below(p->r, 4)], above));
        break;
    case 3:
        add(p, mod_emit2(p->b, OP_fdiv, y, above));
        break;
    case 4:
        add(p, mod_emit2(p->b, OP_fpow, above, y));
        break;
    case 5:
        add(p, mod_emit3(p->b, OP_fsel, draw(p, MOD_BOOL), x, y));
        break;
    default:
        add(p, mod_emit2(p->b, binary[random_below(p->r, 5)], x, y));
    }
}

const mod_fn *random_fn(arena *arena, random_source *r, const random_env *e,
                        const random_shape *shape)
{
    pool *p = calloc(1, sizeof *p);
    const mod_fn *fn = NULL;
    saccade_error err;
    *p = (pool){.b = mod_builder_create(arena, shape->kind, e->captures, RANDOM_CAPTURES),
                .r = r, .e = e, .shape = shape};
    add_leaves(p);
    for (int i = 0; i < shape->n_ops; i++) {
        if (shape->is_smooth)
            add_smooth(p);
        else if (random_below(r, 5) == 0)
            add_load(p);
        else
            add_op(p, (mod_op)(OP_LOAD + 1 + random_below(r, MOD_OP_COUNT - OP_LOAD - 1)));
    }
    const mod_type type = shape->kind == SACCADE_MASK ? MOD_BOOL : MOD_FLOAT;
    if (mod_finish(p->b, p->nodes[type][p->n[type] - 1], &fn, &err) != SACCADE_OK) {
        fprintf(stderr, "random_fn: %s\n", err.message);
        abort();
    }
    free(p);
    return fn;
}

/* ---- plain values ---- */

static eval_cell load_plainly(const mod_fn *fn, const eval_env *env, const mod_node *n,
                              const eval_cell *cells)
{
    const saccade_tensor *t = &env->tensors[n->imm.i];
    int64_t offset = 0;
    for (uint32_t d = 0; d < n->n_args; d++) {
        int64_t at = cells[fn->args[n->args + d]].i;
        at = at < 0 ? 0 : at >= t->shape[d] ? t->shape[d] - 1 : at;
        offset += at * t->stride[d];
    }
    return eval_read(t->dtype, t->data, offset);
}

eval_cell random_fn_value(const mod_fn *fn, const eval_env *env, const int32_t position[4],
                          float score, eval_cell *cells)
{
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        const mod_node *n = &fn->nodes[i];
        eval_cell x[3] = {{0}, {0}, {0}};
        for (uint32_t k = 0; k < n->n_args && k < 3; k++)
            x[k] = cells[fn->args[n->args + k]];
        switch (n->op) {
        case OP_BOOL:
        case OP_INT: cells[i].i = n->imm.i; break;
        case OP_FLOAT: cells[i].f = n->imm.f; break;
        case OP_VAR: cells[i].i = position[n->imm.i]; break;
        case OP_SIZE: cells[i].i = env->size[n->imm.i]; break;
        case OP_SCORE: cells[i].f = score; break;
        case OP_SCALAR:
        case OP_LOAD: cells[i] = load_plainly(fn, env, n, cells); break;
        default: cells[i] = eval_apply((mod_op)n->op, x[0], x[1], x[2]);
        }
    }
    return cells[fn->result];
}

bool random_same(mod_type type, eval_cell x, eval_cell y)
{
    if (type == MOD_FLOAT && isnan(x.f) && isnan(y.f))
        return true;
    return x.i == y.i;
}
