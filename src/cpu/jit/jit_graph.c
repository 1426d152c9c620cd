/* From typed nodes to levels. Loads become index arithmetic and a read, so that clamping and
 * strides are hoisted like any other value; exp, tanh and sigmoid downstream of the score
 * become the few operations that emitted code runs in line. */
#include "cpu/jit/jit_graph.h"

#include "pass/along.h"

#include "base/status.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Range reduction and polynomial of 2^f on [-1/2, 1/2], relative error 2e-9 (least squares on
 * Chebyshev nodes, rounded to float). */
static const float exp2_terms[] = {
    0x1.41a6fep-13f, 0x1.5f44fp-10f, 0x1.3b2dfep-7f, 0x1.c6aed6p-5f,
    0x1.ebfbdap-3f,  0x1.62e43p-1f,  1.0f,
};

/* How often a value that varies with these is computed. */
static jit_level level_of(uint8_t varies)
{
    if (varies & DEP_SCORE || (varies & DEP_Q && varies & DEP_KV))
        return JIT_TILE;
    if (varies & (DEP_Q | DEP_KV))
        return varies & DEP_Q ? JIT_ROW : JIT_COL;
    return JIT_UNIFORM;
}

/* The number of an equal node in the graph, or n_nodes if there is none. */
static uint32_t find(const jit_graph *g, const jit_node *n)
{
    uint32_t i = 0;
    for (; i < g->n_nodes; i++) {
        const jit_node *m = &g->nodes[i];
        if (m->op == n->op && m->type == n->type && m->imm == n->imm && m->n_args == n->n_args
            && memcmp(m->args, n->args, sizeof m->args) == 0)
            break;
    }
    return i;
}

static uint32_t put(jit_graph *g, int op, mod_type type, int32_t imm, int n_args,
                    const uint32_t *args, uint8_t varies)
{
    jit_node n = {.op = (uint16_t)op,
                  .type = (uint8_t)type,
                  .n_args = (uint8_t)n_args,
                  .imm = imm,
                  .varies = varies};
    for (int i = 0; i < n_args; i++) {
        n.args[i] = args[i];
        n.varies |= g->nodes[args[i]].varies;
    }
    n.level = (uint8_t)level_of(n.varies);
    const uint32_t same = find(g, &n);
    if (same < g->n_nodes)
        return same;
    if (g->n_nodes == g->capacity)
        return 0; /* reported by the caller, which looks at n_nodes */
    if (n.level != JIT_TILE)
        n.slot = g->n_slots[n.level]++;
    g->nodes[g->n_nodes] = n;
    return g->n_nodes++;
}

static uint32_t put_float(jit_graph *g, float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return put(g, OP_FLOAT, MOD_FLOAT, bits, 0, NULL, 0);
}

static uint32_t put1(jit_graph *g, int op, mod_type type, uint32_t x)
{
    return put(g, op, type, 0, 1, &x, 0);
}

static uint32_t put2(jit_graph *g, int op, mod_type type, uint32_t x, uint32_t y)
{
    return put(g, op, type, 0, 2, (uint32_t[]){x, y}, 0);
}

static uint32_t put3(jit_graph *g, int op, mod_type type, uint32_t x, uint32_t y, uint32_t z)
{
    return put(g, op, type, 0, 3, (uint32_t[]){x, y, z}, 0);
}

/* Changes signs by flipping a bit: that needs one constant, which keeps its register, instead
 * of an operation of its own. */
static uint32_t put_bits(jit_graph *g, mod_op op, uint32_t x, uint32_t bits)
{
    return put2(g, op, MOD_FLOAT, x, put(g, OP_INT, MOD_INT, (int32_t)bits, 0, NULL, 0));
}

static uint32_t put_negative(jit_graph *g, uint32_t x)
{
    return put_bits(g, OP_ixor, x, 0x80000000u);
}

static uint32_t put_size(jit_graph *g, uint32_t x)
{
    return put_bits(g, OP_iand, x, 0x7fffffffu);
}

/* ---- fast forms ---- */

/* Largest errors over all float32, in ulp (t_cpu_jit_values.c): exp 1.2, exp2 1.0, tanh 5.1,
 * sigmoid 2.5. Other curves are the interpreter's (arith.h). */

/* ((t0 x + t1) x + ..) + t_last */
static uint32_t put_polynomial(jit_graph *g, uint32_t x, const float *terms, size_t n)
{
    uint32_t p = put_float(g, terms[0]);
    for (size_t i = 1; i < n; i++)
        p = put3(g, JIT_FMA, MOD_FLOAT, p, x, put_float(g, terms[i]));
    return p;
}

/* 2^(f + n) for the polynomial's f and whole n. */
static uint32_t put_exp2_parts(jit_graph *g, uint32_t f, uint32_t n)
{
    const uint32_t p =
        put_polynomial(g, f, exp2_terms, sizeof exp2_terms / sizeof exp2_terms[0]);
    return put2(g, JIT_SCALEF, MOD_FLOAT, p, n);
}

/* x between lo and hi; a NaN stays (the second operand of a comparison that fails). */
static uint32_t put_clamp(jit_graph *g, uint32_t x, float lo, float hi)
{
    x = put2(g, OP_fmax, MOD_FLOAT, put_float(g, lo), x);
    return put2(g, OP_fmin, MOD_FLOAT, put_float(g, hi), x);
}

static uint32_t put_exp2(jit_graph *g, uint32_t x)
{
    x = put_clamp(g, x, -160.0f, 130.0f);
    const uint32_t n = put1(g, JIT_NEAREST, MOD_FLOAT, x);
    return put_exp2_parts(g, put2(g, OP_fsub, MOD_FLOAT, x, n), n);
}

static uint32_t put_exp(jit_graph *g, uint32_t x)
{
    x = put_clamp(g, x, -110.0f, 90.0f);
    const uint32_t high = put_float(g, 0x1.715476p+0f), low = put_float(g, 0x1.4ae0cp-26f);
    const uint32_t n = put1(g, JIT_NEAREST, MOD_FLOAT, put2(g, OP_fmul, MOD_FLOAT, x, high));
    const uint32_t rest = put3(g, JIT_FMA, MOD_FLOAT, x, high, put_negative(g, n));
    return put_exp2_parts(g, put3(g, JIT_FMA, MOD_FLOAT, x, low, rest), n);
}

/* 1 / (1 + e^-|x|), or its complement's part e^-|x| / (1 + e^-|x|), as arith.h has it. */
static uint32_t put_sigmoid(jit_graph *g, uint32_t x)
{
    const uint32_t one = put_float(g, 1.0f);
    const uint32_t away = put_size(g, x);
    const uint32_t e = put_exp(g, put_negative(g, away));
    const uint32_t below = put2(g, OP_flt, MOD_BOOL, x, put_float(g, 0.0f));
    const uint32_t top = put3(g, OP_fsel, MOD_FLOAT, below, e, one);
    return put2(g, JIT_DIV, MOD_FLOAT, top, put2(g, OP_fadd, MOD_FLOAT, one, e));
}

/* x P(x^2) / Q(x^2), both minimax together for the relative error on |x| <= 9.01, past which
 * tanh is 1 in f32: 6e-8, 3.1e-7 with rounding. One division instead of an exponential too. */
static uint32_t put_tanh(jit_graph *g, uint32_t x)
{
    static const float top_terms[] = {0x1.3f8616p-36f, -0x1.b5e14p-27f, 0x1.368d76p-17f,
                                      0x1.7ea76cp-9f,  0x1.088f68p-3f,  0x1.fffffep-1f};
    static const float bottom_terms[] = {0x1.ddf8bep-13f, 0x1.853ee0p-6f, 0x1.d99ce8p-2f, 1.0f};
    const uint32_t a = put_clamp(g, x, -9.01f, 9.01f);
    const uint32_t z = put2(g, OP_fmul, MOD_FLOAT, a, a);
    const uint32_t top = put_polynomial(g, z, top_terms, 6);
    const uint32_t bottom = put_polynomial(g, z, bottom_terms, 4);
    return put2(g, JIT_DIV, MOD_FLOAT, put2(g, OP_fmul, MOD_FLOAT, a, top), bottom);
}

static int is_scored_product(const jit_graph *g, uint32_t x)
{
    const jit_node *n = &g->nodes[x];
    return n->op == OP_fmul && n->varies & DEP_SCORE;
}

/* A fused form where one is a product that nothing else needs to see rounded. Not for a bias of
 * positions: it may be in the thousands where scores are a few units, and how it rounds then
 * decides how near a row comes to the truth. So it rounds as it does everywhere else. */
static uint32_t put_add(jit_graph *g, uint32_t x, uint32_t y)
{
    const jit_node *a = &g->nodes[x], *b = &g->nodes[y];
    if (is_scored_product(g, x))
        return put3(g, JIT_FMA, MOD_FLOAT, a->args[0], a->args[1], y);
    if (is_scored_product(g, y))
        return put3(g, JIT_FMA, MOD_FLOAT, b->args[0], b->args[1], x);
    return put2(g, OP_fadd, MOD_FLOAT, x, y);
}

static int is_uniform(const jit_graph *g, uint32_t x)
{
    return g->nodes[x].level == JIT_UNIFORM;
}

/* Moves a factor of an approximate score that is the same in a whole tile into its scale. */
static uint32_t put_multiply(jit_graph *g, uint32_t x, uint32_t y)
{
    if (is_uniform(g, x) && !is_uniform(g, y))
        return put_multiply(g, y, x);
    const jit_node *n = &g->nodes[x];
    if (g->is_approx && is_uniform(g, y) && n->op == JIT_INPUT)
        return put(g, JIT_INPUT, MOD_FLOAT, 0, 1,
                   (uint32_t[]){put2(g, OP_fmul, MOD_FLOAT, n->args[0], y)}, DEP_SCORE);
    return put2(g, OP_fmul, MOD_FLOAT, x, y);
}

/* The coarse tanh (jit_graph.h): it has no division, and a factor of x goes into the scale. */
static uint32_t put_approx_tanh(jit_graph *g, uint32_t x)
{
    uint32_t u = put_multiply(g, x, put_float(g, JIT_TANH_ROOT));
    u = put_clamp(g, u, -JIT_TANH_MOST, JIT_TANH_MOST);
    const uint32_t y = put3(g, JIT_FMA, MOD_FLOAT, u, u, put_float(g, 4.0f));
    return put2(g, OP_fmul, MOD_FLOAT, u, put1(g, JIT_TABLE, MOD_FLOAT, y));
}

/* Whether it is a number of the text whose reciprocal loses nothing. */
static int is_ordinary(const jit_graph *g, uint32_t x)
{
    const jit_node *n = &g->nodes[x];
    float value;
    memcpy(&value, &n->imm, sizeof value);
    return n->op == OP_FLOAT && isnormal(value) && isnormal(1 / value);
}

/* x / y for a y that is the same in a whole tile, by one reciprocal. Any x over 0 is 0, and a
 * subnormal y, whose reciprocal is infinite, is lifted along with x. */
static uint32_t put_uniform_quotient(jit_graph *g, uint32_t x, uint32_t y)
{
    const uint32_t zero = put_float(g, 0.0f), one = put_float(g, 1.0f);
    const uint32_t is_tiny = put2(g, OP_flt, MOD_BOOL, put_size(g, y), put_float(g, FLT_MIN));
    const uint32_t lift = put3(g, OP_fsel, MOD_FLOAT, is_tiny, put_float(g, 0x1p64f), one);
    const uint32_t inverse =
        put2(g, OP_fdiv, MOD_FLOAT, one, put2(g, OP_fmul, MOD_FLOAT, y, lift));
    const uint32_t quotient = put2(g, OP_fmul, MOD_FLOAT,
                                   put2(g, OP_fmul, MOD_FLOAT, x, lift), inverse);
    return put3(g, OP_fsel, MOD_FLOAT, put2(g, OP_feq, MOD_BOOL, y, zero), zero, quotient);
}

/* A division of the incoming score, which is finite where it is approximate, goes into its
 * scale. */
static uint32_t put_divide(jit_graph *g, uint32_t x, uint32_t y)
{
    const int is_scale = g->is_approx && g->nodes[x].op == JIT_INPUT;
    if (!is_uniform(g, y))
        return put2(g, OP_fdiv, MOD_FLOAT, x, y);
    if (is_ordinary(g, y) || is_scale)
        return put_multiply(g, x, put2(g, OP_fdiv, MOD_FLOAT, put_float(g, 1.0f), y));
    return put_uniform_quotient(g, x, y);
}

static uint32_t put_scored(jit_graph *g, const mod_node *n, const uint32_t *x)
{
    switch (n->op) {
    case OP_fexp:
        return put_exp(g, x[0]);
    case OP_fexp2:
        return put_exp2(g, x[0]);
    case OP_fsigmoid:
        return put_sigmoid(g, x[0]);
    case OP_ftanh:
        return g->has_approx_tanh ? put_approx_tanh(g, x[0]) : put_tanh(g, x[0]);
    case OP_fmul:
        return put_multiply(g, x[0], x[1]);
    case OP_fadd:
        return put_add(g, x[0], x[1]);
    case OP_fdiv:
        return put_divide(g, x[0], x[1]);
    default:
        return put(g, n->op, (mod_type)n->type, 0, n->n_args, x, 0);
    }
}

/* ---- lowering ---- */

static uint32_t put_load(jit_graph *g, const mod_fn *fn, const mod_node *n,
                         const uint32_t *place, int32_t tensor)
{
    const int in_words = jit_reads_words(fn->captures[n->imm.i].dtype);
    uint32_t offset = in_words ? put(g, JIT_SKIP, MOD_INT, tensor, 0, NULL, 0) : 0;
    for (int d = 0; d < n->n_args; d++) {
        const int32_t imm = tensor * SACCADE_MAX_RANK + d;
        const uint32_t zero = put(g, OP_INT, MOD_INT, 0, 0, NULL, 0);
        const uint32_t last = put(g, JIT_LAST, MOD_INT, imm, 0, NULL, 0);
        const uint32_t stride = put(g, JIT_STRIDE, MOD_INT, imm, 0, NULL, 0);
        uint32_t i = put2(g, OP_imax, MOD_INT, place[fn->args[n->args + (uint32_t)d]], zero);
        i = put2(g, OP_imin, MOD_INT, i, last);
        i = put2(g, OP_imul, MOD_INT, i, stride);
        offset = d || in_words ? put2(g, OP_iadd, MOD_INT, offset, i) : i;
    }
    return put(g, JIT_READ, (mod_type)n->type, tensor, 1, &offset, 0);
}

static uint32_t lower_node(jit_graph *g, const mod_fn *fn, const mod_node *n,
                           const uint32_t *place, int32_t first_tensor, uint32_t input)
{
    uint32_t x[3] = {0};
    switch (n->op) {
    case OP_SCORE:
        return input;
    case OP_VAR:
        return put(g, OP_VAR, MOD_INT, n->imm.i, 0, NULL, n->deps);
    case OP_LOAD:
        return put_load(g, fn, n, place, first_tensor + n->imm.i);
    case OP_SCALAR:
        return put(g, OP_SCALAR, (mod_type)n->type, first_tensor + n->imm.i, 0, NULL, 0);
    case OP_BOOL:
    case OP_INT:
    case OP_FLOAT:
    case OP_SIZE:
        return put(g, n->op, (mod_type)n->type, n->imm.i, 0, NULL, 0);
    }
    for (int i = 0; i < n->n_args; i++)
        x[i] = place[fn->args[n->args + (uint32_t)i]];
    if (n->op == OP_fdetach)
        return x[0];
    if (n->op == OP_fneg)
        return put_negative(g, x[0]);
    if (n->op == OP_fabs)
        return put_size(g, x[0]);
    if (n->deps & DEP_SCORE)
        return put_scored(g, n, x);
    return put(g, n->op, (mod_type)n->type, 0, n->n_args, x, 0);
}

/* (*out)[i]: node i of fn in the graph. */
static saccade_status lower_nodes(jit_graph *g, const mod_fn *fn, arena *a,
                                  int32_t first_tensor, uint32_t input, const uint32_t **out,
                                  saccade_error *err)
{
    uint32_t *place = arena_array(a, fn->n_nodes, sizeof *place);
    /* cells of a diagonal are made at other places of it, which may wrap */
    const unsigned char *along = pass_find_along(fn, 0, a);
    FAIL_IF_NULL(place);
    FAIL_IF_NULL(along);
    for (uint32_t i = 0; i < fn->n_nodes; i++) {
        place[i] = lower_node(g, fn, &fn->nodes[i], place, first_tensor, input);
        g->nodes[place[i]].is_along |= along[i];
    }
    *out = place;
    return SACCADE_OK;
}

static saccade_status lower(jit_graph *g, const mod_fn *fn, arena *a, int32_t first_tensor,
                            uint32_t input, const uint32_t **out, saccade_error *err)
{
    TRY(lower_nodes(g, fn, a, first_tensor, input, out, err));
    FAIL_IF(g->n_nodes == g->capacity, SACCADE_EBACKEND,
            "jit: got a mod of more than %d operations, the interpreter runs it",
            JIT_MAX_NODES);
    for (uint32_t i = 0; i < fn->n_captures; i++)
        g->dtype[first_tensor + (int32_t)i] = (uint8_t)fn->captures[i].dtype;
    return SACCADE_OK;
}

static int is_used_once(const jit_graph *g, uint32_t x)
{
    int uses = 0;
    for (uint32_t i = 0; i < g->n_nodes; i++)
        for (int k = 0; k < g->nodes[i].n_args; k++)
            uses += g->nodes[i].args[k] == x;
    return uses == 1;
}

/* Whether the table is the only one, and only this product needs it. */
static int has_own_table(const jit_graph *g, uint32_t product)
{
    const jit_node *n = &g->nodes[product];
    int tables = 0;
    for (uint32_t i = 0; i < g->n_nodes; i++)
        tables += g->nodes[i].op == JIT_TABLE;
    return n->op == OP_fmul && g->nodes[n->args[1]].op == JIT_TABLE && tables == 1
           && is_used_once(g, n->args[1]);
}

/* What errors of tanh may add to a score: a weight is off by as much, and by 4e-3 from its
 * rounding to bf16. */
static const double most_added = 0x1p-10;

static int allows_approx_tanh(const pass_facts *score)
{
    return score->tanh_gain > 0 && score->tanh_gain * (double)JIT_ROUGH_TANH <= most_added;
}

/* Adds the approximate score, for flows without lse. Where there is no room for it, it is the
 * score itself. */
static saccade_status lower_approx(jit_graph *g, const pass_facts *score, arena *a,
                                   uint32_t input, saccade_error *err)
{
    const jit_graph before = *g;
    const uint32_t *place;
    g->is_approx = 1;
    g->has_approx_tanh = (uint8_t)allows_approx_tanh(score);
    TRY(lower_nodes(g, score->fn, a, 0, input, &place, err));
    const uint32_t result = place[score->fn->result];
    const jit_node *n = &g->nodes[result];
    const int is_scaled = n->op == OP_fmul && n->level == JIT_TILE && is_uniform(g, n->args[1]);
    g->approx = is_scaled ? n->args[0] : result;
    if (is_scaled)
        g->approx_factor = put2(g, OP_fmul, MOD_FLOAT, n->args[1], g->approx_factor);
    if (has_own_table(g, g->approx)) {
        g->approx_times = g->nodes[g->approx].args[0];
        g->approx = g->nodes[g->approx].args[1];
    }
    if (g->n_nodes == g->capacity)
        *g = before;
    g->is_approx = g->has_approx_tanh = 0;
    return SACCADE_OK;
}

/* The incoming score, which is the result where there is no score mod. */
static saccade_status begin(jit_graph *g, arena *a, uint32_t *input, saccade_error *err)
{
    *g = (jit_graph){
        .capacity = JIT_MAX_NODES, .mask = UINT32_MAX, .approx_times = UINT32_MAX};
    g->nodes = arena_array(a, g->capacity, sizeof *g->nodes);
    FAIL_IF_NULL(g->nodes);
    const uint32_t scale = put(g, JIT_SCALE, MOD_FLOAT, 0, 0, NULL, 0);
    *input = put(g, JIT_INPUT, MOD_FLOAT, 0, 1, &scale, DEP_SCORE);
    g->results[0] = *input;
    g->n_results = 1;
    return SACCADE_OK;
}

static saccade_status lower_results(jit_graph *g, const mod_fn *score, const uint32_t *results,
                                    uint32_t n, arena *a, uint32_t input, saccade_error *err)
{
    const uint32_t *place;
    TRY(lower(g, score, a, 0, input, &place, err));
    for (uint32_t k = 0; k < n; k++)
        g->results[k] = place[results[k]];
    g->n_results = n;
    g->n_score_tensors = g->n_tensors = score->n_captures;
    return SACCADE_OK;
}

static saccade_status lower_mask(jit_graph *g, const mod_fn *mask, arena *a, uint32_t input,
                                 saccade_error *err)
{
    const uint32_t *place;
    TRY(lower(g, mask, a, (int32_t)g->n_score_tensors, input, &place, err));
    g->mask = place[mask->result];
    g->n_tensors = g->n_score_tensors + mask->n_captures;
    return SACCADE_OK;
}

saccade_status jit_build_graph(const pass_facts *score, const mod_fn *mask, arena *a,
                               jit_graph *out, saccade_error *err)
{
    jit_graph g;
    uint32_t input;
    TRY(begin(&g, a, &input, err));
    g.has_max = 1;
    g.is_finite = !score || score->stays_finite;
    g.approx_factor = put_float(&g, JIT_LOG2_E * (g.is_finite ? JIT_WORD_ONE : 1));
    if (score)
        TRY(lower_results(&g, score->fn, &score->fn->result, 1, a, input, err));
    g.approx = g.results[0];
    if (mask)
        TRY(lower_mask(&g, mask, a, input, err));
    if (score)
        TRY(lower_approx(&g, score, a, input, err));
    FAIL_IF(a->has_failed, SACCADE_ENOMEM, "out of memory");
    jit_find_diagonals(&g);
    *out = g;
    return SACCADE_OK;
}

saccade_status jit_build_results(const mod_fn *score, const uint32_t *results, uint32_t n,
                                 const mod_fn *mask, arena *a, jit_graph *out,
                                 saccade_error *err)
{
    jit_graph g;
    uint32_t input;
    FAIL_IF(n > JIT_MAX_RESULTS, SACCADE_EBACKEND,
            "jit: got a mod with %u results, expected at most %d, the interpreter runs it", n,
            JIT_MAX_RESULTS);
    TRY(begin(&g, a, &input, err));
    TRY(lower_results(&g, score, results, n, a, input, err));
    if (mask)
        TRY(lower_mask(&g, mask, a, input, err));
    FAIL_IF(a->has_failed, SACCADE_ENOMEM, "out of memory");
    jit_find_diagonals(&g);
    *out = g;
    return SACCADE_OK;
}

int jit_reads_inline(saccade_dtype dtype)
{
    return jit_reads_words(dtype) || dtype == SACCADE_F32 || dtype == SACCADE_I32
           || dtype == SACCADE_U32 || dtype == SACCADE_I64 || dtype == SACCADE_U64;
}

int jit_reads_words(saccade_dtype dtype)
{
    return dtype == SACCADE_BOOL || dtype == SACCADE_U8 || dtype == SACCADE_I8
           || dtype == SACCADE_U16 || dtype == SACCADE_I16 || dtype == SACCADE_F16
           || dtype == SACCADE_BF16;
}
