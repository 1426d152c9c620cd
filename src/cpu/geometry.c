/* Tiles, splits and workspace: pure functions of the problem's integers, so that results do
 * not depend on the number of threads and every size can be tested without running.
 *
 * K and V are packed once per (batch, kv head). Where one item holds every row of a group the
 * item packs each block of keys itself, just before its use: then K and V are read once, and
 * the workspace does not grow with them. */
#include "cpu/cpu.h"

enum {
    SPLIT_BELOW = 64, /* items; fewer are split over keys, for many threads and long decodes */
    SPLIT_TO = 128,   /* items aimed at */
    SPLIT_MIN = 4,    /* blocks of keys in a split, so that merging stays below 1 % */
};
/* A thread's own packed keys: of a few items of a narrow window, in half of a second-level
 * cache; with wide heads no less than an item can need at a time. */
enum { OWN_BYTES = 1 << 20, OWN_MOST = 16, OWN_LEAST = 4 };
/* Packed K and V at a time, unless one head is more. */
static const size_t wave_bytes = (size_t)256 << 20;

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t round_up(int64_t a, int64_t b)
{
    return ceil_div(a, b) * b;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static size_t bytes64(int64_t count, size_t each)
{
    return (size_t)round_up(count * (int64_t)each, 64);
}

/* Rows of an item of streams: as many as leave items enough for all threads. Each chunk of K
 * and V is then read, and a stream begun, for more rows. */
static int32_t stream_rows(const plan_problem *p, const saccade_sizes *s)
{
    const int64_t heads = s->B * s->Hkv * p->group;
    if (heads * ceil_div(s->Q, CPU_MOST_ROWS) >= 4 * SPLIT_BELOW)
        return CPU_MOST_ROWS;
    if (heads * ceil_div(s->Q, CPU_MOST_ROWS / 2) >= SPLIT_BELOW)
        return CPU_MOST_ROWS / 2;
    return CPU_BLOCK_ROWS;
}

static void cut_items(const plan_problem *p, const saccade_sizes *s, const cpu_kernels *k,
                      cpu_geometry *g)
{
    const int is_grouped = p->group * s->Q <= CPU_BLOCK_ROWS;
    g->is_shared = !is_grouped;
    g->is_direct =
        p->group * s->Q <= k->direct_rows && s->D <= CPU_DIRECT_DIM && s->Dv <= CPU_DIRECT_DIM;
    g->item_heads = is_grouped ? p->group : 1;
    g->block_rows = k->stream && !is_grouped ? stream_rows(p, s) : CPU_BLOCK_ROWS;
    g->item_rows = (int32_t)smaller(s->Q, g->block_rows);
    g->row_blocks = ceil_div(s->Q, g->block_rows);
    g->key_blocks = ceil_div(s->KV, CPU_BLOCK_KEYS);
    g->heads = s->B * s->Hkv;
    const int64_t rows = g->heads * (p->group / g->item_heads) * g->row_blocks;
    int64_t splits = 1;
    if (rows < SPLIT_BELOW)
        splits = smaller(ceil_div(SPLIT_TO, rows), ceil_div(g->key_blocks, SPLIT_MIN));
    g->split_blocks = ceil_div(g->key_blocks, splits);
    g->splits = ceil_div(g->key_blocks, g->split_blocks);
    g->head_items = p->group / g->item_heads * g->row_blocks * g->splits;
}

/* Most (batch, kv head) pairs whose packed K and V fit the budget, at least one. */
static int64_t wave_of(const cpu_geometry *g)
{
    const size_t head = (size_t)g->key_blocks * (g->k_bytes + g->v_bytes);
    const int64_t fit = head > wave_bytes ? 1 : (int64_t)(wave_bytes / head);
    return g->is_shared ? smaller(g->heads, fit) : g->heads;
}

static int32_t own_blocks(const cpu_state *state, const cpu_geometry *g)
{
    const int64_t fit = (int64_t)(OWN_BYTES / (g->k_bytes + g->v_bytes));
    if (!state->limits)
        return 0;
    return (int32_t)(fit < OWN_LEAST ? OWN_LEAST : smaller(fit, OWN_MOST));
}

static void place(size_t bytes, size_t *off, size_t *end)
{
    *off = *end;
    *end += bytes;
}

/* Grows with every size, so that the workspace of the largest run serves the smaller ones:
 * partial results are counted as if the most items there can be were split. */
static void lay_out(const saccade_plan *plan, const saccade_sizes *s, cpu_geometry *g)
{
    const size_t head = (size_t)g->key_blocks * (g->k_bytes + g->v_bytes);
    const int64_t all = s->B * s->Hkv;
    const size_t most = (size_t)all * head < wave_bytes ? (size_t)all * head : wave_bytes;
    const int64_t items =
        all * plan->problem.group * ceil_div(s->Q, CPU_BLOCK_ROWS) + SPLIT_BELOW + SPLIT_TO;
    const int64_t item_rows = smaller(s->Q * plan->problem.group, CPU_BLOCK_ROWS);
    const size_t partial = bytes64(item_rows * (g->o_ld + 2), sizeof(float));
    size_t end = 0;
    place(!g->is_shared ? 0 : most > head ? most : head, &g->packed_off, &end);
    place(bytes64(all * g->key_blocks, 1), &g->wild_off, &end);
    place(bytes64(items, sizeof(int64_t)), &g->weight_off, &end);
    place(bytes64(items, sizeof(int32_t)), &g->order_off, &end);
    place((SPLIT_BELOW + SPLIT_TO) * partial, &g->partial_off, &end);
    place((size_t)plan->threads * g->thread_bytes, &g->thread_off, &end);
    g->partial_bytes = partial;
    g->bytes = end;
}

/* What the plan fixes, and at least one of what runs bring: a size asked for with a 0 in it is
 * that of the smallest run. */
static saccade_sizes whole_sizes(const saccade_plan *plan, const saccade_sizes *asked)
{
    saccade_sizes s = plan->problem.sizes;
    s.B = asked->B > 1 ? asked->B : 1;
    s.Q = asked->Q > 1 ? asked->Q : 1;
    s.KV = asked->KV > 1 ? asked->KV : 1;
    return s;
}

cpu_geometry cpu_geometry_of(const saccade_plan *plan, const saccade_sizes *asked)
{
    const cpu_kernels *k = ((const cpu_state *)plan->state)->kernels;
    const saccade_sizes whole = whole_sizes(plan, asked), *s = &whole;
    cpu_geometry g = {0};
    cut_items(&plan->problem, s, k, &g);
    g.q_ld = (int32_t)round_up(s->D, 32);
    g.o_ld = (int32_t)round_up(s->Dv, k->panel);
    g.k_bytes = bytes64(CPU_BLOCK_KEYS * round_up(s->D, k->depth), (size_t)k->element);
    g.v_bytes = bytes64((int64_t)CPU_BLOCK_KEYS * g.o_ld, (size_t)k->element);
    g.own_blocks = own_blocks(plan->state, &g);
    g.wave = wave_of(&g);
    g.thread_bytes = cpu_scratch_of(plan, &g).bytes;
    lay_out(plan, s, &g);
    return g;
}

cpu_scratch cpu_scratch_of(const saccade_plan *plan, const cpu_geometry *g)
{
    const cpu_state *state = plan->state;
    const cpu_kernels *k = state->kernels;
    const int64_t strip = k->strip > k->direct_rows ? k->strip : k->direct_rows;
    const size_t scores = bytes64(strip * CPU_BLOCK_KEYS, sizeof(float));
    const int64_t rows = g->block_rows;
    cpu_scratch at;
    size_t end = 1024; /* cpu_worker itself */
    place(bytes64(rows * g->q_ld, (size_t)k->element), &at.q, &end);
    place(bytes64(strip * CPU_BLOCK_KEYS, sizeof(float)), &at.s, &end);
    place(bytes64(rows * g->o_ld, sizeof(float)), &at.o, &end);
    place(bytes64(4 * CPU_MOST_ROWS, sizeof(float)), &at.stats, &end);
    place(g->is_direct && scores > g->k_bytes ? scores : g->k_bytes, &at.k, &end);
    place(g->v_bytes, &at.v, &end);
    place(bytes64(strip * CPU_BLOCK_KEYS, 1), &at.live, &end);
    place(bytes64(g->o_ld, sizeof(float)), &at.row, &end);
    place(bytes64(state->mask ? plan->problem.mask->n_nodes : 0, sizeof(pass_range)),
          &at.ranges, &end);
    place(state->limits ? 2 * CPU_MOST_ROWS * sizeof(int64_t) : 0, &at.limits, &end);
    const uint32_t n_values = state->limits ? state->limits->n_nodes : 0;
    place(bytes64(n_values, sizeof(double)), &at.values, &end);
    place(state->score ? eval_state_bytes(state->score) : 0, &at.score, &end);
    place(state->mask ? eval_state_bytes(state->mask) : 0, &at.mask, &end);
    place(state->jit ? jit_state_bytes(state->jit) : 0, &at.jit, &end);
    place(state->code ? FLOW_BYTES : 0, &at.flow, &end);
    place((size_t)g->own_blocks * (g->k_bytes + g->v_bytes), &at.own, &end);
    place(bytes64(g->own_blocks, 1), &at.own_wild, &end);
    at.bytes = end;
    return at;
}
