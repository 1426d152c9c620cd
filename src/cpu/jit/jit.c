/* Programs and states of compiled score passes: code, and the levels below the tile and
 * diagonals, which run as the interpreter's loops over arrays. */
#include "cpu/jit/jit.h"

#include "base/cpu_features.h"
#include "base/status.h"
#include "cpu/jit/jit_graph.h"
#include "cpu/jit/jit_page.h"
#include "saccade_config.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { CODE_BYTES = 1 << 18, SLOT_BYTES = 64 };
enum { LEAST_ROWS = 12 }; /* that make up for arrays of diagonals */

static const int32_t lanes[JIT_LANES_ROWS][JIT_LANES] = {
    [JIT_LANES_UP] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    [JIT_LANES_DOWN] = {0, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10, -11, -12, -13, -14, -15},
    [JIT_LANES_BACK16] = {15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0},
    [JIT_LANES_BACK8] = {7, 6, 5, 4, 3, 2, 1, 0},
};

struct jit_program {
    arena arena;
    jit_graph graph;
    jit_page page;
    size_t size[JIT_FORMS], begin[JIT_FORMS]; /* a form that it has not: of another one */
    int32_t spills;
    int has_mask;
    const strip_table *table;
};

struct jit_state {
    const jit_program *program;
    eval_env score_env;
    saccade_tensor tensors[JIT_MAX_TENSORS]; /* data: where offsets count from */
    uint8_t skip[JIT_MAX_TENSORS];           /* JIT_SKIP */
    float scale;
    int32_t b, h;
    int32_t *uniform, *rows, *cols, *diagonals;
    int32_t n_rows, kv0, n_cols; /* fixed */
    int has_diagonals;           /* of what is fixed */
    int64_t *offsets;            /* JIT_DIAGONALS of them, scratch of reads */
    void *frame;
};

/* ---- programs ---- */

/* Whether a form has code of its own, or which one stands for it. */
static int form_of(const jit_program *p, int form)
{
    return form & ((p->has_mask ? JIT_MASKED : 0) | (p->graph.n_diagonals ? JIT_FEW_ROWS : 0));
}

static saccade_status emit(jit_program *p, int32_t level, saccade_error *err)
{
    size_t at = 0;
    TRY(jit_page_begin(CODE_BYTES, &p->page, err));
    for (int form = 0; form < JIT_FORMS; form++) {
        int32_t spills;
        p->begin[form] = p->begin[form_of(p, form)];
        if (form_of(p, form) != form)
            continue;
        TRY(jit_emit_tile(&p->graph, form, level, p->page.bytes + at, CODE_BYTES - at,
                          &p->size[form], &spills, err));
        p->spills = spills > p->spills ? spills : p->spills;
        p->begin[form] = at;
        at = (at + p->size[form] + 63) / 64 * 64;
    }
    return jit_page_end(&p->page, at, err);
}

/* A program that has no graph and no code yet. */
static saccade_status begin(int has_mask, int32_t level, jit_program **out, saccade_error *err)
{
    FAIL_IF(level < CPU_AVX2, SACCADE_EBACKEND,
            "jit: got level %s, expected avx2 or more; the interpreter runs mods",
            cpu_level_name((cpu_level)level));
    jit_program *p = calloc(1, sizeof *p);
    FAIL_IF_NULL(p);
    arena_init(&p->arena);
    p->has_mask = has_mask;
#if HAVE_LEVEL_AVX2
    p->table = &strip_table_avx2;
#endif
#if HAVE_LEVEL_AVX512
    if (level >= CPU_AVX512)
        p->table = &strip_table_avx512;
#endif
    *out = p;
    return SACCADE_OK;
}

saccade_status jit_create(const pass_facts *score, const mod_fn *mask, int32_t level,
                          jit_program **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    jit_program *p;
    TRY(begin(mask != NULL, level, &p, err));
    TRY_GOTO(jit_build_graph(score, mask, &p->arena, &p->graph, err));
    TRY_GOTO(emit(p, level, err));
    *out = p;
    return SACCADE_OK;
out:
    jit_destroy(p);
    return status;
}

saccade_status jit_create_results(const mod_fn *score, const uint32_t *results, uint32_t n,
                                  const mod_fn *mask, int32_t level, jit_program **out,
                                  saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    jit_program *p;
    TRY(begin(mask != NULL, level, &p, err));
    TRY_GOTO(jit_build_results(score, results, n, mask, &p->arena, &p->graph, err));
    TRY_GOTO(emit(p, level, err));
    *out = p;
    return SACCADE_OK;
out:
    jit_destroy(p);
    return status;
}

void jit_destroy(jit_program *p)
{
    if (!p)
        return;
    jit_page_destroy(&p->page);
    arena_free(&p->arena);
    free(p);
}

static void print_pass(const jit_program *p, int which, strbuf *out)
{
    jit_page_print(&p->page, p->begin[which], p->size[which], NULL, out);
}

saccade_status jit_print(const jit_program *p, strbuf *out, saccade_error *err)
{
    strbuf_printf(out, "score pass: %zu bytes\n", p->size[0]);
    print_pass(p, 0, out);
    if (p->has_mask) {
        strbuf_printf(out, "score and mask pass, PARTIAL blocks: %zu bytes\n", p->size[1]);
        print_pass(p, 1, out);
    }
    return strbuf_status(out, err);
}

/* ---- states ---- */

static size_t round64(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static size_t level_bytes(const jit_graph *g, jit_level level)
{
    static const size_t cells[] = {1, JIT_ROWS, JIT_COLS};
    return round64(sizeof(int32_t) * cells[level] * g->n_slots[level]) + SLOT_BYTES;
}

static size_t diagonals_bytes(const jit_graph *g)
{
    return sizeof(int32_t) * JIT_DIAGONALS * g->n_diagonals;
}

size_t jit_state_bytes(const jit_program *p)
{
    size_t bytes = round64(sizeof(jit_state)) + sizeof(int64_t) * JIT_DIAGONALS
                   + diagonals_bytes(&p->graph);
    for (int level = JIT_UNIFORM; level < JIT_TILE; level++)
        bytes += level_bytes(&p->graph, (jit_level)level);
    return bytes + (size_t)p->spills * SLOT_BYTES;
}

/* Whether every offset into t, in elements from `skip` before its first, fits int32. */
static int offsets_fit(const saccade_tensor *t, int skip)
{
    int64_t most = skip;
    for (int32_t d = 0; d < t->rank; d++) {
        if (t->stride[d] < INT32_MIN || t->stride[d] > INT32_MAX)
            return 0;
        most += (t->shape[d] - 1) * (t->stride[d] < 0 ? -t->stride[d] : t->stride[d]);
    }
    return most <= INT32_MAX;
}

/* Makes offsets into tensor i count from a whole word, where it is read by those. 0: offsets do
 * not fit, or elements may lie in two words. */
static int place_tensor(jit_state *s, uint32_t i)
{
    saccade_tensor *t = &s->tensors[i];
    s->skip[i] = 0;
    if (t->rank > 0 && jit_reads_words(t->dtype)) {
        const uintptr_t bytes = saccade_dtype_bytes(t->dtype);
        const uintptr_t past = (uintptr_t)t->data % JIT_WORD_BYTES;
        if (past % bytes != 0)
            return 0;
        s->skip[i] = (uint8_t)(past / bytes);
        t->data = (void *)((uintptr_t)t->data - past);
    }
    return offsets_fit(t, s->skip[i]);
}

static void *carve(char **memory, size_t bytes)
{
    void *at = *memory;
    *memory += bytes;
    return at;
}

/* ---- levels ---- */

static int32_t *place(const jit_state *s, uint32_t node)
{
    const jit_node *n = &s->program->graph.nodes[node];
    if (n->level == JIT_ROW)
        return s->rows + (size_t)n->slot * JIT_ROWS;
    if (n->level == JIT_COL)
        return s->cols + (size_t)n->slot * JIT_COLS;
    return s->uniform + n->slot;
}

static int32_t *diagonal_place(const jit_state *s, const jit_node *n)
{
    return s->diagonals + (size_t)(n->diagonal - 1) * JIT_DIAGONALS;
}

static int32_t leaf(const jit_state *s, const jit_node *n)
{
    const bool is_of_shape = n->op == JIT_LAST || n->op == JIT_STRIDE;
    const saccade_tensor *t = &s->tensors[is_of_shape ? n->imm / SACCADE_MAX_RANK : 0];
    const int dim = is_of_shape ? n->imm % SACCADE_MAX_RANK : 0;
    eval_cell cell = {.i = n->imm};
    switch ((int)n->op) {
    case OP_SIZE:
        cell.i = s->score_env.size[n->imm];
        break;
    case OP_SCALAR:
        cell = eval_read(s->tensors[n->imm].dtype, s->tensors[n->imm].data, 0);
        break;
    case OP_VAR:
        cell.i = n->imm == VAR_B ? s->b : s->h;
        break;
    case JIT_SCALE:
        cell.f = s->scale;
        break;
    case JIT_SKIP:
        cell.i = s->skip[n->imm];
        break;
    case JIT_LAST:
        cell.i = (int32_t)(t->shape[dim] - 1);
        break;
    case JIT_STRIDE:
        cell.i = t->shape[dim] > 1 ? (int32_t)t->stride[dim] : 0;
        break;
    }
    return cell.i;
}

/* Lanes of an operand; *step is 0 where they have one value. By diagonal values of rows are the
 * first one's. */
static const int32_t *operand(const jit_state *s, uint32_t node, int by_diagonal, int *step)
{
    const jit_node *n = &s->program->graph.nodes[node];
    *step = by_diagonal ? n->diagonal != 0 : n->level != JIT_UNIFORM;
    return *step && by_diagonal ? diagonal_place(s, n) : place(s, node);
}

static void read_lanes(const jit_state *s, const jit_node *n, int by_diagonal, int32_t *out,
                       int count)
{
    const saccade_tensor *t = &s->tensors[n->imm];
    int step;
    const int32_t *from = operand(s, n->args[0], by_diagonal, &step);
    for (int i = 0; i < count; i++)
        s->offsets[i] = from[i * step];
    s->program->table->gather[t->dtype](out, t->data, s->offsets, count);
}

static void uniform_node(const jit_state *s, const jit_node *n, int32_t *out)
{
    eval_cell x[3] = {{0}};
    for (int i = 0; i < n->n_args; i++)
        x[i].i = *place(s, n->args[i]);
    if (n->op == JIT_READ)
        *out = eval_read(s->tensors[n->imm].dtype, s->tensors[n->imm].data, x[0].i).i;
    else if (n->n_args == 0)
        *out = leaf(s, n);
    else
        *out = eval_apply((mod_op)n->op, x[0], x[1], x[2]).i;
}

/* first: the variable of lane 0, where n is one. */
static void lanes_node(const jit_state *s, const jit_node *n, int by_diagonal, int32_t *out,
                       int32_t first, int count)
{
    static const int same_bit[] = {STRIP_X_SAME, STRIP_Y_SAME, STRIP_Z_SAME};
    const strip_table *table = s->program->table;
    const int groups = (count + STRIP_GROUP - 1) / STRIP_GROUP;
    const void *x[3] = {out, out, out};
    int same = 0;
    if (n->op == OP_VAR) {
        table->count(out, first, groups);
        return;
    }
    if (n->op == JIT_READ) {
        read_lanes(s, n, by_diagonal, out, count);
        return;
    }
    for (int i = 0; i < n->n_args; i++) {
        int step;
        x[i] = operand(s, n->args[i], by_diagonal, &step);
        same |= step ? 0 : same_bit[i];
    }
    table->op[n->op](out, x[0], x[1], x[2], groups, same);
}

/* Nodes of one level, in order. */
static void run_level(jit_state *s, jit_level level, int32_t first, int count)
{
    const jit_graph *g = &s->program->graph;
    for (uint32_t i = 0; i < g->n_nodes; i++) {
        if (g->nodes[i].level != level)
            continue;
        if (level == JIT_UNIFORM)
            uniform_node(s, &g->nodes[i], place(s, i));
        else
            lanes_node(s, &g->nodes[i], 0, place(s, i), first, count);
    }
}

/* Computes the values of all diagonals of the current rows and keys. A value depends on q - kv
 * alone, so one row over n_rows - 1 + n_cols keys gives them all. */
static void run_diagonals(jit_state *s)
{
    const jit_graph *g = &s->program->graph;
    const int count = s->n_rows - 1 + s->n_cols;
    for (uint32_t i = 0; i < g->n_nodes; i++) {
        const jit_node *n = &g->nodes[i];
        if (!n->diagonal)
            continue;
        lanes_node(s, n, 1, diagonal_place(s, n), s->kv0 - (s->n_rows - 1), count);
    }
    s->has_diagonals = 1;
}

/* ---- running ---- */

jit_state *jit_begin(const jit_program *p, const eval_env *score_env, const eval_env *mask_env,
                     float scale, void *memory)
{
    const jit_graph *g = &p->graph;
    char *at = memory;
    jit_state *s = carve(&at, round64(sizeof *s));
    s->program = p;
    s->score_env = *score_env;
    s->scale = scale;
    s->b = s->h = 0;
    s->n_rows = s->kv0 = s->n_cols = s->has_diagonals = 0;
    for (uint32_t i = 0; i < g->n_tensors; i++) {
        s->tensors[i] = i < g->n_score_tensors ? score_env->tensors[i]
                                               : mask_env->tensors[i - g->n_score_tensors];
        if (!place_tensor(s, i))
            return NULL;
    }
    s->offsets = carve(&at, sizeof(int64_t) * JIT_DIAGONALS);
    s->diagonals = carve(&at, diagonals_bytes(g));
    s->uniform = carve(&at, level_bytes(g, JIT_UNIFORM));
    s->rows = carve(&at, level_bytes(g, JIT_ROW));
    s->cols = carve(&at, level_bytes(g, JIT_COL));
    s->frame = at;
    return s;
}

void jit_head(jit_state *s, int32_t b, int32_t h)
{
    s->b = b + s->score_env.b_offset;
    s->h = h + s->score_env.h_offset;
    s->has_diagonals = 0;
    run_level(s, JIT_UNIFORM, 0, 1);
}

void jit_rows(jit_state *s, int32_t q0, int32_t n)
{
    s->n_rows = n;
    s->has_diagonals = 0;
    run_level(s, JIT_ROW, q0, n);
}

/* Lanes past n, up to a whole group, get values as well: code reads all lanes of a group, and
 * their offsets are clamped to the tensor. */
void jit_cols(jit_state *s, int32_t kv0, int32_t n)
{
    const int whole = (n + JIT_GROUP - 1) / JIT_GROUP * JIT_GROUP;
    s->kv0 = kv0;
    s->n_cols = whole;
    s->has_diagonals = 0;
    run_level(s, JIT_COL, kv0, whole);
}

void jit_place(const jit_state *s, int32_t row0, int32_t col0, jit_call *call)
{
    call->uniform = s->uniform;
    call->rows = s->rows + row0;
    call->cols = s->cols + col0;
    call->diagonals = s->diagonals + col0 - row0 + s->n_rows - 1;
    for (uint32_t i = 0; i < s->program->graph.n_tensors; i++)
        call->tensors[i] = s->tensors[i].data;
}

static void read_vector(void *out, const void *offsets, const void *data, int32_t dtype,
                        int32_t n)
{
    int32_t *to = out;
    for (int i = 0; i < n; i++)
        to[i] = eval_read((saccade_dtype)dtype, data, ((const int32_t *)offsets)[i]).i;
}

/* Runs the code on what `call` says of the tile; the rest of it is set here. */
static void run_tile(jit_state *s, jit_call *call, int64_t ld, int32_t row0, int32_t rows,
                     int32_t col0, int32_t cols, int masked)
{
    const jit_program *p = s->program;
    jit_code_fn *run;
    if (p->graph.n_diagonals && s->n_rows >= LEAST_ROWS && !s->has_diagonals)
        run_diagonals(s);
    const int form = (masked ? JIT_MASKED : 0) | (s->n_rows < LEAST_ROWS ? JIT_FEW_ROWS : 0);
    const uint8_t *code = p->page.bytes + p->begin[form];
    call->ld_bytes = ld * 4;
    call->n_rows = rows;
    call->col_bytes = (int64_t)(cols + JIT_GROUP - 1) / JIT_GROUP * JIT_GROUP * 4;
    call->frame = s->frame;
    call->strips = p->table;
    call->read = read_vector;
    call->lanes = lanes[0];
    jit_place(s, row0, col0, call);
    memcpy(&run, &code, sizeof run); /* ISO C has no cast from data to function */
    run(call);
}

void jit_tile(jit_state *s, float *tile, int64_t ld, int32_t row0, int32_t rows, int32_t col0,
              int32_t cols, int masked, float *row_max)
{
    jit_call call = {.s = tile, .row_max = row_max};
    assert(s->program->graph.has_max);
    run_tile(s, &call, ld, row0, rows, col0, cols, masked);
}

void jit_tiles(jit_state *s, float *const *tiles, int64_t ld, int32_t row0, int32_t rows,
               int32_t col0, int32_t cols, int masked)
{
    jit_call call = {.s = tiles[0]};
    assert(!s->program->graph.has_max);
    for (uint32_t k = 0; k < s->program->graph.n_results; k++)
        call.apart[k] = (int64_t)((uintptr_t)tiles[k] - (uintptr_t)tiles[0]);
    run_tile(s, &call, ld, row0, rows, col0, cols, masked);
}

/* ---- for streams ---- */

int jit_has_shortcuts(const jit_program *p)
{
    enum { LEAST_READS = 2 }; /* docs/lab/126 */
    int reads = 0;
    for (uint32_t i = 0; i < p->graph.n_nodes; i++)
        reads += p->graph.nodes[i].op == JIT_READ && p->graph.nodes[i].level == JIT_TILE;
    return p->graph.n_diagonals > 0 || reads >= LEAST_READS;
}

const jit_graph *jit_graph_of(const jit_program *p)
{
    return &p->graph;
}

int64_t jit_frame_at(const jit_program *p)
{
    int64_t bytes = 0;
    for (int level = JIT_UNIFORM; level < JIT_TILE; level++)
        bytes += (int64_t)level_bytes(&p->graph, (jit_level)level);
    return bytes;
}

void jit_reserve(jit_program *p, int32_t spills)
{
    p->spills = spills > p->spills ? spills : p->spills;
}
