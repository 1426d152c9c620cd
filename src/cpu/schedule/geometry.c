/* Tiles, splits and workspace: pure functions of the problem's integers, so that every size can
 * be tested without running. The number of threads decides who packs keys, and no result.
 *
 * K and V are packed once per (batch, kv head). Where one item holds every row of a group the
 * item packs each block of keys itself, just before its use: then K and V are read once, and
 * the workspace does not grow with them. Where there are many heads of few keys, a thread packs
 * those of the heads that it runs, into memory of its own. */
#include "cpu/schedule/layout.h"
#include "cpu/schedule/schedule.h"

enum {
    SPLIT_BELOW = 64, /* items; fewer are split over keys, for many threads and long decodes */
    SPLIT_TO = 128,   /* items aimed at */
    SPLIT_MIN = 4,    /* blocks of keys in a split, so that merging stays below 1 % */
    ITEMS_LEAST = 16, /* that items of several heads leave */
    INVARIANT = 16,   /* blocks in a range of keys where a row's bits follow from it alone */
};
/* A thread's own packed keys: of a few items of a narrow window, in half of a second-level
 * cache; with wide heads no less than an item can need at a time. */
enum { OWN_BYTES = 1 << 20, OWN_MOST = 16, OWN_LEAST = 4 };
/* Heads, and heads for each thread, from which on threads run whole heads, or halves. */
enum { MANY_HEADS = SPLIT_BELOW, HEADS_OF_THREAD = 4, WHOLE_HEADS = 6 };
/* The tensors of a run that take no more bytes, as kernels have them, are likely in a cache,
 * where what decode saves is not waited for. */
enum { NEAR_BYTES = 8 << 20 };
/* So many bytes of packed K and V are held at a time, or those of one head if that is more. */
static const size_t wave_bytes = (size_t)256 << 20;

/* Rows of an item of streams: as many as leave items enough for all threads. Each chunk of K
 * and V is then read, and a stream begun, for more rows. */
static int32_t stream_rows(const saccade_sizes *s)
{
    const int64_t heads = s->B * s->H;
    if (heads * ceil_div(s->Q, CPU_MOST_ROWS) >= 4 * SPLIT_BELOW)
        return CPU_MOST_ROWS;
    if (heads * ceil_div(s->Q, CPU_MOST_ROWS / 2) >= SPLIT_BELOW)
        return CPU_MOST_ROWS / 2;
    return CPU_BLOCK_ROWS;
}

/* Few items are split over their keys. */
static int64_t split_blocks(const cpu_needs *needs, int64_t items, int64_t key_blocks)
{
    if (items >= SPLIT_BELOW)
        return key_blocks;
    if (needs->is_invariant)
        return smaller(INVARIANT, key_blocks);
    return ceil_div(key_blocks,
                    smaller(ceil_div(SPLIT_TO, items), ceil_div(key_blocks, SPLIT_MIN)));
}

/* Heads of a group whose few rows make an item of streams together: those of one head may leave
 * most of their last strip empty. A mod is placed on the rows of one head. */
static int64_t heads_together(const cpu_needs *needs, const saccade_sizes *s)
{
    const int64_t group = s->H / s->Hkv, strip = needs->kernels->strip;
    const int is_plain = !needs->limit_nodes && !needs->mask_nodes && !needs->score_bytes;
    int64_t best = 1;
    if (!needs->kernels->flow || !is_plain || needs->is_invariant)
        return 1;
    for (int64_t n = 2; n * s->Q <= CPU_BLOCK_ROWS && s->B * s->H / n >= ITEMS_LEAST; n++)
        if (group % n == 0
            && ceil_div(n * s->Q, strip) * best < ceil_div(best * s->Q, strip) * n)
            best = n;
    return best;
}

/* Rows of a group up to which they read K and V where these lie. */
static int32_t decode_rows(const cpu_kernels *k, const saccade_sizes *s)
{
    const int64_t all = s->B * (s->H * s->Q + s->Hkv * s->KV) * (s->D + s->Dv);
    if (s->D > CPU_NARROW_DIM)
        return k->decode_rows;
    return all <= NEAR_BYTES / k->element ? k->near_rows : k->narrow_rows;
}

static void cut_items(const cpu_needs *needs, const saccade_sizes *s, cpu_geometry *g)
{
    const cpu_kernels *k = needs->kernels;
    const int64_t group = s->H / s->Hkv;
    const int is_grouped = group * s->Q <= CPU_BLOCK_ROWS;
    g->is_shared = !is_grouped;
    g->is_decode = group * s->Q <= decode_rows(k, s) && s->D <= CPU_DECODE_DIM
                   && s->Dv <= CPU_DECODE_DIM && !needs->is_invariant;
    g->item_heads = (int32_t)(is_grouped ? group : heads_together(needs, s));
    g->block_rows = k->flow && !is_grouped ? stream_rows(s) : CPU_BLOCK_ROWS;
    g->item_rows = (int32_t)smaller(s->Q, g->block_rows);
    g->row_blocks = ceil_div(s->Q, g->block_rows);
    g->key_blocks = ceil_div(s->KV, CPU_BLOCK_KEYS);
    g->heads = s->B * s->Hkv;
    const int64_t rows = g->heads * (group / g->item_heads) * g->row_blocks;
    g->split_blocks = split_blocks(needs, rows, g->key_blocks);
    g->turn_blocks = needs->is_invariant && g->key_blocks > INVARIANT ? INVARIANT : 0;
    g->splits = ceil_div(g->key_blocks, g->split_blocks);
    g->head_items = group / g->item_heads * g->row_blocks * g->splits;
}

/* The number of (batch, kv head) pairs whose packed K and V fit wave_bytes, at least one; and
 * whose items have numbers of 32 bits. */
static int64_t wave_of(const cpu_geometry *g)
{
    const size_t head = (size_t)g->key_blocks * (g->k_bytes + g->v_bytes);
    const int64_t fit = head > wave_bytes ? 1 : (int64_t)(wave_bytes / head);
    const int64_t most = smaller(g->heads, larger(1, INT32_MAX / g->head_items));
    return g->is_shared && !g->is_own ? smaller(most, fit) : most;
}

/* Without limits they are of use where all keys of a head fit. */
static int32_t own_blocks(const cpu_needs *needs, const cpu_geometry *g)
{
    const int64_t fit = (int64_t)(OWN_BYTES / (g->k_bytes + g->v_bytes));
    if (needs->limit_nodes)
        return (int32_t)(fit < OWN_LEAST ? OWN_LEAST : smaller(fit, OWN_MOST));
    if (needs->mask_nodes || !g->is_shared)
        return 0;
    return (int32_t)smaller(smaller(fit, OWN_MOST), g->key_blocks);
}

/* Heads of a run from which on they are not packed ahead. Fewer are, or are split. */
static int64_t many_heads(const cpu_needs *needs)
{
    const int64_t by_threads = (int64_t)HEADS_OF_THREAD * needs->threads;
    return by_threads > MANY_HEADS ? by_threads : MANY_HEADS;
}

static int fits_own(const cpu_needs *needs, const cpu_geometry *g)
{
    return !needs->limit_nodes && g->key_blocks <= g->own_blocks;
}

/* Items next to each other that a thread runs: those of a head, or half of them. */
static int64_t own_items(const cpu_needs *needs, const cpu_geometry *g)
{
    const int is_whole = g->heads >= (int64_t)WHOLE_HEADS * needs->threads;
    return is_whole ? g->head_items : (g->head_items + 1) / 2;
}

/* Items of split rows, at most. */
static size_t most_splits(const cpu_needs *needs, const cpu_geometry *g)
{
    const size_t ranges = (size_t)ceil_div(g->key_blocks, INVARIANT);
    if (g->key_blocks <= SPLIT_MIN)
        return 0;
    return needs->is_invariant ? SPLIT_BELOW * ranges : SPLIT_BELOW + SPLIT_TO;
}

/* Grows with every size, so that the workspace of the largest run serves the smaller ones:
 * partial results are counted as if the most items there can be were split. */
static void lay_out(const cpu_needs *needs, const saccade_sizes *s, cpu_geometry *g)
{
    const size_t head = (size_t)g->key_blocks * (g->k_bytes + g->v_bytes);
    const int64_t all = s->B * s->Hkv;
    const int64_t packed = fits_own(needs, g) ? smaller(all, many_heads(needs)) : all;
    const size_t most = (size_t)packed * head < wave_bytes ? (size_t)packed * head : wave_bytes;
    const int64_t items =
        s->B * s->H * ceil_div(s->Q, CPU_BLOCK_ROWS) + (int64_t)most_splits(needs, g);
    const int64_t item_rows = smaller(s->Q * (s->H / s->Hkv), CPU_BLOCK_ROWS);
    const size_t partial = bytes64(item_rows * (g->o_ld + 2), sizeof(float));
    size_t end = 0;
    place(!g->is_shared ? 0 : most > head ? most : head, &g->packed_off, &end);
    place(bytes64(all * g->key_blocks, 1), &g->nonfinite_off, &end);
    place(bytes64(all * g->key_blocks, 1), &g->state_off, &end);
    place(bytes64(items, sizeof(int64_t)), &g->weight_off, &end);
    place(bytes64(items, sizeof(int32_t)), &g->order_off, &end);
    place(most_splits(needs, g) * partial, &g->partial_off, &end);
    place(bytes64((int64_t)most_splits(needs, g), sizeof(int32_t)), &g->left_off, &end);
    place((size_t)needs->threads * g->scratch.bytes, &g->thread_off, &end);
    g->partial_bytes = partial;
    g->bytes = end;
}

/* The sizes that the plan fixes, with the lengths asked for. A length of 0 counts as 1, so that
 * the answer is that for the smallest run. */
static saccade_sizes whole_sizes(const cpu_needs *needs, const saccade_sizes *asked)
{
    saccade_sizes s = needs->sizes;
    s.B = asked->B > 1 ? asked->B : 1;
    s.Q = asked->Q > 1 ? asked->Q : 1;
    s.KV = asked->KV > 1 ? asked->KV : 1;
    return s;
}

static cpu_scratch scratch_of(const cpu_needs *needs, const cpu_geometry *g)
{
    const cpu_kernels *k = needs->kernels;
    const int64_t strip = k->strip > k->decode_rows ? k->strip : k->decode_rows;
    const size_t scores = bytes64(strip * CPU_BLOCK_KEYS, sizeof(float));
    const int64_t rows = g->block_rows;
    cpu_scratch at;
    size_t end = 1024; /* cpu_worker itself */
    place(bytes64(rows * g->q_ld, (size_t)k->element), &at.q, &end);
    place(bytes64(strip * CPU_BLOCK_KEYS, sizeof(float)), &at.s, &end);
    place(bytes64(rows * g->o_ld, sizeof(float)), &at.o, &end);
    place(bytes64(4 * CPU_MOST_ROWS, sizeof(float)), &at.stats, &end);
    place(scores > g->k_bytes ? scores : g->k_bytes, &at.k, &end); /* decode: scores again */
    place(g->v_bytes, &at.v, &end);
    place(bytes64(strip * CPU_BLOCK_KEYS, 1), &at.live, &end);
    place(bytes64(g->o_ld, sizeof(float)), &at.row, &end);
    place(bytes64((int64_t)pass_cover_bytes(needs->mask_nodes), 1), &at.ranges, &end);
    place(needs->limit_nodes ? 2 * CPU_MOST_ROWS * sizeof(int64_t) : 0, &at.limits, &end);
    place(bytes64(needs->limit_nodes, sizeof(double)), &at.values, &end);
    place(needs->score_bytes, &at.score, &end);
    place(needs->mask_bytes, &at.mask, &end);
    place(needs->jit_bytes, &at.jit, &end);
    place(needs->flow_bytes, &at.flow, &end);
    place((size_t)g->own_blocks * (g->k_bytes + g->v_bytes), &at.own, &end);
    place(bytes64(g->own_blocks, 1), &at.own_nonfinite, &end);
    place(needs->is_invariant ? 2 * bytes64(rows * (g->o_ld + 2), sizeof(float)) : 0, &at.sums,
          &end);
    place(2 * bytes64((int64_t)needs->room_bytes, 1), &at.room, &end);
    at.bytes = end;
    return at;
}

cpu_geometry cpu_geometry_of(const cpu_needs *needs, const saccade_sizes *asked)
{
    const cpu_kernels *k = needs->kernels;
    const saccade_sizes whole = whole_sizes(needs, asked), *s = &whole;
    cpu_geometry g = {0};
    cut_items(needs, s, &g);
    g.q_ld = (int32_t)round_up(s->D, 32);
    g.o_ld = (int32_t)round_up(s->Dv, k->panel);
    g.k_bytes = bytes64(CPU_BLOCK_KEYS * round_up(s->D, k->depth), (size_t)k->element);
    g.v_bytes = bytes64((int64_t)CPU_BLOCK_KEYS * g.o_ld, (size_t)k->element);
    g.own_blocks = own_blocks(needs, &g);
    g.is_own = g.is_shared && fits_own(needs, &g) && g.heads >= many_heads(needs);
    g.own_items = g.is_own ? own_items(needs, &g) : 0;
    g.wave = wave_of(&g);
    g.scratch = scratch_of(needs, &g);
    lay_out(needs, s, &g);
    return g;
}

void cpu_cut_evenly(const cpu_needs *needs, const saccade_sizes *s, cpu_geometry *g)
{
    enum { FEW = 8 }; /* items of a thread, on which the last one's size shows */
    const int64_t items = g->heads * g->head_items;
    if (!needs->kernels->is_even || !g->is_shared || g->splits > 1 || needs->threads == 1
        || items > (int64_t)FEW * needs->threads)
        return;
    g->head_items /= g->row_blocks;
    g->block_rows = (int32_t)ceil_div(s->Q, g->row_blocks);
    g->item_rows = g->block_rows;
    g->row_blocks = ceil_div(s->Q, g->block_rows);
    g->head_items *= g->row_blocks;
}
