/* backward.h: gradients of queries, keys and values on CPUs. For a live score x of weight
 * p = exp(x - lse), with s = scale q . k and x = score mod of s:
 *
 *     delta = dO . O - dlse                  once a row                     (backward_rows.c)
 *     dS    = p (dO . v - delta) dx/ds       per tile, S and dP made again (backward_tile.c)
 *     dV += p dO    dK += scale dS q    dQ += scale dS k
 *
 * A tile is 96 or 192 queries against 192 or 384 keys; nothing of the size of all scores is
 * ever stored. An item is one (batch, kv head) and a chunk of its key blocks, every
 * `chunks`th one, so that under causal masks too chunks weigh the same:
 *
 *     for each block of keys of the chunk: pack K and V; dK, dV = 0        (backward_item.c)
 *         for each head of the group, each live block of rows:
 *             pack Q and dO
 *             strip by strip: S, score mod, mask; dP; P and dS
 *             dV += P^T dO; dK += dS^T Q; the chunk's dQ += dS K
 *         store dK and dV
 *
 * An item owns its keys, so dK and dV are sums in one order. dQ is summed once per chunk, in
 * f32, and the chunks' sums are added in their order (backward_run.c). Chunks are a function of
 * the problem alone and at most BACKWARD_CHUNKS: results are equal bit for bit over runs and
 * thread counts. Products of gradients that are not wanted are not made.
 *
 * A captured value t that scores read gets the sum of p (dO . v - delta) dx/dt over them, made
 * along rows, columns or diagonals of tiles first (backward_reads.c, backward_captures.c). In
 * 16 bits such sums need a delta without the rounding of O: a pass before makes it
 * (backward_delta.c).
 *
 * A position that is not live gives exactly 0: P and dS are 0 there, and where Q, K or dO hold
 * an infinity or NaN, tiles with dead positions are multiplied by live ones alone. */
#ifndef SACCADE_CPU_BACKWARD_BACKWARD_H
#define SACCADE_CPU_BACKWARD_BACKWARD_H

#include "cpu/cpu.h"
#include "cpu/kernels/backward_kernels.h"

#include <stdatomic.h>

/* A tile at most: multiples of every level's strips and panels and of JIT_GROUP. Lines of a
 * tile are BACKWARD_KEYS elements long whatever its keys. */
enum { BACKWARD_ROWS = 192, BACKWARD_KEYS = 384, BACKWARD_CHUNKS = 16, BACKWARD_TURNED = 32 };
/* Rows of a larger |lse| weigh nothing: see backward_rows.c. */
enum { BACKWARD_LSE_MOST = 1 << 18 };
/* Blocks of the mask's runs, square: cells of a tile, a whole number each way. */
enum { BACKWARD_CELL = CPU_CELL };
/* Strips of a tile at most. Of its keys a strip has groups, a bit each from the first on. */
enum { BACKWARD_STRIPS = 32, BACKWARD_GROUP = 16 };
_Static_assert(BACKWARD_KEYS < 32 * BACKWARD_GROUP, "a bit for each group, and one that is 0");

/* A captured value's gradient is a sum of dX times the score's derivative by it over all
 * positions that read it. By what its index varies with, such sums are made first along one
 * axis, each in one order, and then added where they belong (backward_captures.c). */
typedef enum backward_axis {
    BACKWARD_HEAD,     /* the index varies with b and h alone */
    BACKWARD_ROW,      /* .. and with q */
    BACKWARD_COLUMN,   /* .. or with kv */
    BACKWARD_DIAGONAL, /* .. or with q - kv */
    BACKWARD_PLACE     /* .. or with both in another way: every position adds for itself */
} backward_axis;

/* A read of a captured tensor or scalar whose gradient is wanted. */
typedef struct backward_read {
    uint32_t node;   /* of the score mod */
    int32_t capture; /* of the score mod */
    backward_axis axis;
    int rank;     /* indices */
    int is_dense; /* BACKWARD_PLACE: each index is a line in q and kv, as find_steps() has it */
    int is_own;   /* .. different positions of a head read different elements, here alone */
    int sums_keys;  /* keys of a row may read one element */
    int is_slanted; /* .. an index is not q, kv or neither (kv - q), or no line below 0 */
    int8_t by_q[SACCADE_MAX_RANK], by_kv[SACCADE_MAX_RANK]; /* .. -1, 0 or 1, of an index */
    /* BACKWARD_PLACE (backward_indices.c): all indices; and, where each has one, the sums
     * f(q) + g(kv) that they are while these lie inside of the tensor, else NULL. */
    const eval_prog *indices, *sums;
    uint32_t sum[SACCADE_MAX_RANK]; /* nodes of the score mod, or PASS_NO_NODE */
    const mod_fn *factor;     /* the derivative where it varies with b and h alone, else NULL */
    uint32_t result;          /* .. and its number among results */
} backward_read;

enum { BACKWARD_READS = 512, BACKWARD_RESULTS = BACKWARD_READS + 2 };

/* What a plan keeps for backward. */
typedef struct cpu_backward_plan {
    const cpu_backward_kernels *kernels;
    int has_dq, has_dk, has_dv;
    int is_weighing;   /* a first pass, for delta alone (backward_delta.c) */
    uint64_t captures; /* of the score mod that gradients are wanted of, a bit each */
    /* dx/ds as a score mod, NULL where there is no score mod and it is 1. */
    const mod_fn *slope;
    int has_slopes; /* it varies within a head: score mods run with it as their second result */
    const backward_read *reads;
    uint32_t n_reads, n_results; /* results: the value, slopes, what reads need */
    const eval_prog *score;      /* of all results; NULL where there is but the value */
    jit_program *jit;            /* and the mask; NULL: the interpreter runs them */
} cpu_backward_plan;

/* ---- backward_plan.c ---- */

/* needs: plan->state of forward, and what is wanted in *out. What it makes lives in the arena;
 * destroy frees compiled code. */
saccade_status cpu_backward_create(const saccade_plan *plan, arena *arena,
                                   cpu_backward_plan *out, saccade_error *err);
void cpu_backward_destroy(cpu_backward_plan *plan);

/* ---- backward_explain.c ---- */

void cpu_backward_explain(const saccade_plan *plan, const cpu_backward_plan *backward,
                          strbuf *out);

/* ---- backward_reads.c ---- */

/* EBACKEND: an index of a wanted capture varies with the score. */
saccade_status backward_check_reads(const pass_facts *score, uint64_t captures,
                                    saccade_error *err);
/* The score mod's reads of wanted captures: at most `most`; their number, or more. */
uint32_t backward_find_reads(const pass_facts *score, uint64_t captures, backward_read *reads,
                             uint32_t most);

/* ---- backward_plan.c ---- */

/* Byte counts are multiples of 64. */
typedef struct backward_geometry {
    int32_t q_ld, o_ld;   /* elements of a packed row of Q, of dO */
    int32_t dq_ld, dv_ld; /* floats of a row of dQ and dK, of dV: whole panels */
    int64_t dq_rows;      /* of a chunk's dQ: whole steps */
    int32_t rows, keys;   /* of a tile */
    int64_t row_blocks, key_blocks;
    int64_t chunks;      /* items of one (batch, kv head) */
    int64_t heads, wave; /* (batch, kv head) pairs in all, and run at a time */
    size_t k_turned, v_turned, k_steps, q_rows, q_steps, o_rows, o_steps; /* bytes, packed */
    size_t thread_bytes;
    size_t lse_off, delta_off, first_off, past_off, span_off;
    size_t weight_off, order_off, touched_off, partial_off, thread_off, read_off, moving_off;
    size_t reads_off;
    size_t read_bytes; /* sums of one read, of whatever axis */
    size_t bytes;
} backward_geometry;

/* One thread's memory, in the order of backward_worker's pointers. */
typedef struct backward_scratch {
    size_t k_turned, v_turned, k_steps, q_rows, q_steps, o_rows, o_steps, s, dp, p, ds;
    size_t pointers, results, dx, sums, dk, dv, turned, row, most, live, ranges, limits;
    size_t values, score, mask;
    size_t indices, element, kept, jit, k_room, v_room, bytes;
} backward_scratch;
backward_scratch backward_scratch_of(const saccade_plan *plan,
                                     const cpu_backward_plan *backward,
                                     const backward_geometry *g);
backward_geometry backward_geometry_of(const saccade_plan *plan,
                                       const cpu_backward_plan *backward,
                                       const saccade_sizes *sizes);
size_t cpu_backward_workspace(const saccade_plan *plan, const cpu_backward_plan *backward,
                              const saccade_sizes *sizes, const plan_gradients *gradients);

/* ---- backward_places.c ---- */

/* A run's gradients as items make them: `made` names the caller's tensors, or those here. */
typedef struct backward_places {
    plan_gradients made;
    saccade_tensor each[3]; /* of Q, K, V, a place each in f32; no data: the caller's */
    saccade_tensor captures[MOD_MAX_CAPTURES]; /* f32 */
    uint64_t *sorted;                          /* plan_sum_chunks's room */
} backward_places;

/* Bytes behind the run's other memory. gradients NULL: for keys in chunks alone. */
size_t backward_places_bytes(const saccade_plan *plan, const cpu_backward_plan *backward,
                             const saccade_sizes *sizes, const plan_gradients *gradients);
void backward_begin_places(const saccade_plan *plan, const cpu_backward_plan *backward,
                           const plan_run *run, const plan_gradients *gradients, char *memory,
                           backward_places *out);
/* After all items. */
void backward_end_places(const saccade_plan *plan, const cpu_backward_plan *backward,
                         const plan_run *run, const plan_gradients *gradients,
                         const backward_places *places);

/* ---- backward_run.c ---- */

saccade_status cpu_backward_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                                    saccade_error *err);
saccade_status cpu_backward(const saccade_plan *plan, const cpu_backward_plan *backward,
                            const plan_run *run, const plan_gradients *gradients,
                            saccade_error *err);

/* Keys of a block of rows that are live in any and in every row. */
typedef struct backward_span {
    int32_t any_first, any_past, all_first, all_past;
} backward_span;

/* Sums of a read in fixed point; sums NULL: it has none. */
typedef struct backward_fixed {
    _Atomic uint64_t *sums;  /* two's complement, by stride */
    _Atomic uint8_t *is_nan; /* some term was not finite */
    int64_t count, stride[SACCADE_MAX_RANK];
    double scale;
} backward_fixed;

/* What a run knows of a read. */
typedef struct backward_read_run {
    backward_fixed fixed;
    int is_dense;  /* positions add along lines of the gradient */
    int is_stored; /* positions store (backward_stored.c) */
} backward_read_run;

typedef struct backward_job {
    const saccade_plan *plan;
    const cpu_backward_plan *backward;
    const plan_run *run; /* with out and lse, which forward left */
    const plan_gradients *gradients;
    cpu_live live;
    const mask_runs *runs; /* of cells, by keys; NULL: live tells each tile */
    backward_geometry g;
    int threads;           /* that loops use */
    int64_t head0, step;   /* first (batch, kv head) of the wave, and from one to the next */
    char *memory;          /* the workspace */
    float *lse, *delta;    /* [B][H][Q] */
    int32_t *first, *past; /* [B][H][Q] live keys, where the mask has limits */
    backward_span *spans;  /* [B][H][row_blocks], likewise */
    backward_read_run *reads; /* [n_reads] */
    atomic_int has_nonfinite; /* an input holds an infinity or NaN (backward_careful.c) */
    int has_stored;           /* some read is */
} backward_job;

/* The (batch, kv head) pair of number n in the wave. */
static inline int64_t backward_head_of(const backward_job *job, int64_t n)
{
    return job->head0 + n * job->step;
}

/* The chunk's dQ [dq_rows][dq_ld] of query head `head` of the wave, and which of its blocks of
 * rows it holds: the others were never written. */
float *backward_partial_of(const backward_job *job, int64_t chunk, int64_t head);
uint8_t *backward_touched_of(const backward_job *job, int64_t chunk, int64_t head);
/* All items, in waves, and dQ from their sums. */
void backward_run_items(backward_job *job);

/* ---- backward_careful.c ---- */

/* The plan with its kernels replaced by their f32 fall-back (`careful`), if they have one. */
cpu_backward_plan backward_careful_of(const cpu_backward_plan *backward);
/* Whether the run must take the careful kernels, since an input is non-finite; asked before its
 * rows are found. */
int backward_has_nonfinite(backward_job *job);

/* ---- backward_rows.c ---- */

/* par_fn over (batch, head, block of rows): lse, delta and limits. */
void backward_find_rows(void *job, int64_t index, int thread);
/* dlse of a row as it lies in the run's tensors; 0 in runs without. */
double backward_d_lse_of(const backward_job *job, int64_t b, int64_t h, int64_t i);
/* After it: the gradients of sinks, if they are wanted. */
void backward_sum_sinks(const backward_job *job, const plan_gradients *gradients);

/* ---- backward_item.c ---- */

/* Rows of an operand, ld elements apart. */
typedef struct backward_operand {
    const void *rows;
    int32_t ld;
} backward_operand;

/* Sums of a thread on their way to backward_fixed's: each slot holds those of the last element
 * of a read that came to it. */
enum { BACKWARD_KEPT = 1024 };
typedef struct backward_kept {
    int64_t element; /* BACKWARD_READS times it, and the read; -1: none */
    uint64_t sum;    /* two's complement */
} backward_kept;

/* Of indices that are f(q) + g(kv), for a tile's keys: g less g of its first key. */
typedef struct backward_by_key {
    int64_t j0;                                              /* its first key, -1: none yet */
    int64_t least[SACCADE_MAX_RANK], most[SACCADE_MAX_RANK]; /* of the keys that there are */
    int64_t element[BACKWARD_KEYS];                          /* from the first key's */
} backward_by_key;

/* A read's indices as a thread computes them. */
typedef struct backward_index {
    eval_state *all, *sums;  /* NULL: the read has none */
    backward_by_key *by_key; /* where it has sums */
    int64_t head;            /* where they stand, -1: nowhere */
} backward_index;

typedef struct backward_worker {
    const backward_job *job;
    plan_position at; /* of the item's batch */
    int64_t b, g, chunk;
    int64_t h, i0, j0; /* the tile's head, first row and first key */
    int64_t shift;     /* from a row's number to where it lies in q and d_out */
    int32_t m, n;      /* its rows and keys */
    int is_full;
    void *k_turned, *v_turned, *k_steps, *q_rows, *q_steps, *o_rows, *o_steps;
    backward_operand q_at, o_at; /* rows of Q and dO as scores read them: packed, or in place */
    int k_nonfinite, q_nonfinite, o_nonfinite;
    int64_t rows_stored;   /* of the head at the block of keys: captures' rows up to this one */
    kv_view k, v;          /* keys of the item */
    void *k_room, *v_room; /* where they do not lie in one piece */
    int is_packed;         /* keys of this block */
    float *s, *dp;         /* [BACKWARD_ROWS][BACKWARD_KEYS] */
    float **results; /* of a strip [strip][BACKWARD_KEYS], but the first */
    float **out;     /* where the score's program puts them, and the value */
    float *dx;       /* of a strip, for captures */
    float *sums;         /* of a tile's columns or diagonals, BACKWARD_SUMS for each read */
    void *p, *ds;        /* steps of rows by BACKWARD_KEYS, 4 bytes each */
    float *dk, *dv, *dq; /* of the block of keys; dq lies in the chunk's sums */
    int dq_is_new;       /* no block of keys has added to dq yet: it holds nothing */
    float *turned;       /* some keys of dK or dV, where kernels sum them by dims */
    float *row, *most;
    uint8_t *live; /* [BACKWARD_ROWS][BACKWARD_KEYS] where 0 * NaN threatens */
    /* Groups of each strip: those that some row sees, as far as masks are proven or scores are
     * made (backward_strip.c); and, by proof, those that every row sees whole. */
    uint32_t some[BACKWARD_STRIPS], every[BACKWARD_STRIPS];
    uint8_t cells[BACKWARD_ROWS / BACKWARD_CELL][BACKWARD_KEYS / BACKWARD_CELL]; /* cpu_cover */
    cpu_stream stream;          /* its ring lies in s */
    int32_t unit_r0, unit_from; /* the strip whose units are made, its first key */
    eval_state *score, *mask;
    backward_index *indices; /* [n_reads] where any read has indices */
    int64_t *element; /* [BACKWARD_KEYS] backward_find_elements's */
    backward_kept *kept; /* [BACKWARD_KEPT] */
    jit_state *jit; /* NULL: the interpreter changes scores */
    int64_t score_head, mask_head, jit_head, jit_i0, jit_j0; /* where they stand, -1: nowhere */
    float head_slope; /* dP and delta are multiplied by it */
    void *ranges;
    cpu_limits limits;
    double *values;
} backward_worker;

enum { BACKWARD_WORKER = 8192 }; /* bytes in front of a thread's scratch */
backward_worker *backward_worker_of(const backward_job *job, int thread);
void backward_begin_threads(backward_job *job);
/* par_fn over items of the wave in any order, by their weights' order. */
void backward_run_item(void *job, int64_t at, int thread);
/* par_fn over items: their live tiles, about. */
void backward_weigh_item(void *job, int64_t index, int thread);
/* Keys of the worker's block that there are, those past kv_len too. */
int32_t backward_keys_there(const backward_worker *w);
/* Whether rows of the block and keys [j0, j1) have live positions; is_full: all. */
cpu_cover backward_cover_of(const backward_job *job, int64_t b, int64_t h, int64_t row_block,
                            int64_t j0, int64_t j1, void *ranges);

/* ---- backward_scores.c ---- */

/* The total factor of scores (1 if the compiled mod scales), and the part of it that `weights`
 * applies; the scores kernel applies their quotient. */
float backward_scale_of(const backward_worker *w);
float backward_late_scale(const backward_worker *w);
/* Score mod, its slope and the mask on rows [r0, r0 + rows), keys [from, past) of the tile. */
void backward_change_scores(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                            int32_t past);

/* Whether a compiled pass runs on the tile: for the score mod, or for the mask. */
int backward_is_compiled(const backward_worker *w);
/* Whether the strip's scores of keys [from, past) can be changed one unit at a time. */
int backward_changes_units(const backward_worker *w, int32_t r0, int32_t from, int32_t past);
/* Whether every row of the strip is proven to see all keys [from, past). */
int backward_sees_all(const backward_worker *w, int32_t r0, int32_t from, int32_t past);
/* Applies score mod and mask to n keys of one unit, from key `key` of the tile on; its slopes
 * lie two unit-tiles behind its scores. */
void backward_change_unit(backward_worker *w, int32_t r0, int32_t key, int32_t n, float *unit);

/* ---- backward_stream.c ---- */

/* Whether the strip's keys [from, past) go through the kernel's stream. */
int backward_is_streamed(const backward_worker *w, int32_t r0, int32_t from, int32_t past);
/* Puts a strip through the stream. Weights of its last units are made with the next strip's, or
 * by backward_end_stream. */
void backward_stream_strip(backward_worker *w, const cpu_strip_scores *scores,
                           const cpu_strip_weights *weights, int32_t r0, int32_t from,
                           int32_t past);
void backward_end_stream(backward_worker *w);

/* ---- backward_captures.c ---- */

enum { BACKWARD_SUMS = BACKWARD_ROWS + BACKWARD_KEYS };

/* How items may run at once, not while any add to one place: all of them; those of a batch, of
 * a KV head in all batches, of both; or none. */
typedef enum backward_order {
    BACKWARD_FREE,
    BACKWARD_BY_BATCH,
    BACKWARD_BY_HEAD,
    BACKWARD_BY_BOTH,
    BACKWARD_SERIAL
} backward_order;
backward_order backward_order_of(const backward_job *job);
/* Which reads of BACKWARD_PLACE have their positions in lines of the gradient. */
void backward_find_dense(backward_job *job);
/* Before the run: gradients that are not added to start from 0. */
void backward_begin_captures(const backward_job *job);
/* Before an item; before the tiles of one head and block of keys. */
void backward_begin_sums(const backward_worker *w, int64_t head);
void backward_begin_columns(const backward_worker *w);
/* Rows [r0, r0 + rows), groups of keys of the tile, whose dX the worker holds; and, around the
 * strips of a tile, its columns and diagonals. */
void backward_add_sums(backward_worker *w, int32_t r0, int32_t rows, uint32_t groups);
void backward_begin_lines(backward_worker *w);
void backward_end_lines(const backward_worker *w);
/* A read's sums over query head h, counted over the batch; columns are of no chunk. */
double *backward_sums_of(const backward_job *job, uint32_t read, int64_t chunk, int64_t h);
/* After all items: sums go where they belong. */
void backward_spread(const backward_job *job);

/* What both ways of adding position by position need: where row i and key j are; the read's
 * derivative of a head; and adding to an element. */
eval_point backward_point_at(const backward_job *job, int64_t b, int64_t h, int64_t i,
                             int64_t j);
/* The gradient of a sum of dX whose derivative is the head's: 0 of dX stays 0, as of masked
 * positions, whatever the derivative. */
static inline double backward_scaled(double factor, double sum)
{
    return sum == 0 ? 0 : factor * sum;
}
double backward_factor_of(const backward_job *job, const backward_read *read, int64_t b,
                          int64_t h, double *values);
void backward_add_to(const saccade_tensor *t, int64_t place, double x);

/* Of a read's indices: which element a position reads, from the gradient's first one; whether
 * one is this variable itself, along a dimension that is not summed over; and of dense ones,
 * steps of a row and of a key in t, and whether none leaves its tensor anywhere in the run. */
int64_t backward_place_of(const backward_job *job, const backward_read *read,
                          const eval_point *at, double *values);
int backward_has_index(const backward_job *job, const backward_read *read, int32_t var);
void backward_dense_strides(const backward_read *read, const saccade_tensor *t,
                            int64_t *by_row, int64_t *by_key);
int backward_is_inside(const backward_job *job, const backward_read *read);

/* ---- backward_stored.c ---- */

/* Before captures begin: finds the reads that are stored; their places are the caller's. */
void backward_begin_stored(backward_job *job, const plan_gradients *wanted,
                           backward_places *places);
/* Whether different indices lead to different elements: no dimension is summed over. */
int backward_is_spread(const saccade_tensor *t);
/* Whether all elements of the capture's gradient are stored, zeros too. */
int backward_stores_all(const backward_job *job, int32_t capture);
/* Read n on rows [r0, r0 + rows) of the tile and groups of its keys. */
void backward_store_strip(backward_worker *w, uint32_t n, int32_t r0, int32_t rows,
                          uint32_t groups);
/* Zeros of all stored reads, rows from row i of the head on against the block of keys but for
 * these groups. */
void backward_store_zeros(backward_worker *w, int64_t i, int64_t rows, uint32_t groups);

/* ---- backward_indices.c ---- */

/* Compiles the indices of reads that add position by position. */
saccade_status backward_compile_indices(const mod_fn *score, backward_read *reads, uint32_t n,
                                        arena *arena, saccade_error *err);
size_t backward_indices_bytes(const cpu_backward_plan *backward);
void backward_begin_indices(backward_worker *w, char *memory);
/* Which elements, by these strides, read n's indices name at row r of the worker's tile: of key
 * j, in [from, past), result + (*element)[j]. */
int64_t backward_find_elements(backward_worker *w, uint32_t n, int32_t r, int32_t from,
                               int32_t past, const int64_t *stride, const int64_t **element);

/* ---- backward_fixed.c ---- */

/* Where positions do not add along lines, or, slanted, may leave the tensor. */
int backward_may_fix(const backward_read *read);
/* Bytes behind all others. gradients NULL: 0. */
size_t backward_fixed_bytes(const cpu_backward_plan *backward, const plan_gradients *gradients);
/* After rows, whose delta gives the scale, and what is stored or dense is known. */
void backward_begin_fixed(backward_job *job, char *memory);
void backward_begin_kept(backward_worker *w);
void backward_end_kept(const backward_worker *w);
void backward_add_fixed(backward_worker *w, uint32_t n, int32_t r0, int32_t rows,
                        uint32_t groups);
void backward_end_fixed(const backward_job *job);

/* ---- backward_drop.c ---- */

/* Before weights: dP of rows [r0, r0 + rows) and keys [from, past) becomes z dP. After them:
 * weights that dropout drops become 0; the factor of the others is dV's. */
void backward_drop_incoming(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                            int32_t past);
void backward_drop_weights(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                           int32_t past);

/* ---- backward_delta.c ---- */

/* Whether runs make delta in a pass of its own, whose plan this is. */
int backward_has_weighing(const saccade_plan *plan, const cpu_backward_plan *backward);
cpu_backward_plan backward_weighing_of(const cpu_backward_plan *backward);
/* After rows: delta from P and dP. Threads begin anew afterwards. */
void backward_weigh_rows(const backward_job *job);
/* Of this pass: what a strip's weights take for dP of keys [from, past); and what is added up
 * when they are made. */
void backward_begin_weighing(const backward_worker *w, int32_t rows, int32_t from,
                             int32_t past);
void backward_add_weighing(backward_worker *w, int32_t r0, int32_t rows, int32_t from,
                           int32_t past);

/* ---- backward_strip.c ---- */

/* Groups that hold keys [from, past). */
static inline uint32_t backward_groups_of(int32_t from, int32_t past)
{
    const int32_t first = from / BACKWARD_GROUP;
    const int32_t last = (past + BACKWARD_GROUP - 1) / BACKWARD_GROUP;
    return from < past ? (UINT32_C(1) << last) - (UINT32_C(1) << first) : 0;
}

/* Both groups of each pair that has one: pairs are panels, and what compiled code begins at. */
static inline uint32_t backward_pairs_of(uint32_t groups)
{
    const uint32_t even = UINT32_C(0x55555555);
    return groups | (groups >> 1 & even) | (groups & even) << 1;
}

/* Takes the first groups that lie side by side out of *groups, as keys of the tile; 0: there
 * are none. */
static inline int backward_take(const backward_worker *w, uint32_t *groups, cpu_stretch *to)
{
    if (!*groups)
        return 0;
    const int32_t first = __builtin_ctz(*groups);
    const int32_t past = first + __builtin_ctz(~(*groups >> first));
    *to = (cpu_stretch){.from = first * BACKWARD_GROUP, .past = past * BACKWARD_GROUP};
    *groups &= UINT32_MAX << past;
    to->past = to->past < w->n ? to->past : w->n;
    return 1;
}

/* From the first to the last of some groups. */
static inline cpu_stretch backward_span_of(const backward_worker *w, uint32_t groups)
{
    if (!groups)
        return (cpu_stretch){0, 0, 0};
    const int32_t past = (32 - __builtin_clz(groups)) * BACKWARD_GROUP;
    return (cpu_stretch){.from = __builtin_ctz(groups) * BACKWARD_GROUP,
                         .past = past < w->n ? past : w->n};
}

/* A strip whose scores are made and whose weights are not. */
typedef struct backward_strip {
    int is_open;
    int32_t r0, rows, from, past;
    cpu_strip_weights weights;
    float delta[BACKWARD_ROWS];
} backward_strip;

int32_t backward_strip_rows(const backward_worker *w, int32_t r0);
int backward_needs_dp(const cpu_backward_plan *b);
/* Whether an operand of the tile's products holds an infinity or NaN. */
int backward_is_nonfinite(const backward_worker *w);
/* Scores and weights of a strip's groups; where kernels make them side by side, scores beside
 * which those of `open` become weights. Whether a position of the groups is dead, which counts
 * where 0 * NaN threatens. */
int backward_make_strip(backward_worker *w, int32_t r0, backward_strip *open);
/* Weights of an open strip and what follows them, or that alone. */
void backward_make_weights(backward_worker *w, backward_strip *o);
void backward_close_strip(backward_worker *w, backward_strip *o);

/* ---- backward_tile.c ---- */

void backward_run_tile(backward_worker *w);

#endif
