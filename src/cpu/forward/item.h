/* item.h: what a thread holds of its item, and what the item_*.c do with it for item.c. */
#ifndef SACCADE_CPU_FORWARD_ITEM_H
#define SACCADE_CPU_FORWARD_ITEM_H

#include "cpu/cpu.h"
#include "cpu/kernels/drop.h"

/* ---- the run that items belong to ---- */

/* A run, or a sequence of a ragged one. */
typedef struct cpu_job {
    const saccade_plan *plan;
    const plan_run *run;
    cpu_live live;
    cpu_geometry g;
    int64_t head0, n_heads; /* (batch, kv head) of the wave: the first, and how many */
    int is_local;           /* threads pack the keys of the items that they run */
    char *packed, *nonfinite, *partial; /* of the wave */
    _Atomic uint8_t *states;            /* cpu_block_state by block of packed keys */
    _Atomic int32_t *left;              /* by block of rows with splits: those not yet run */
    int64_t *weight;                    /* by item of the wave */
    char *threads;                      /* scratch, thread_bytes each */
    size_t thread_bytes;
} cpu_job;

/* Packed blocks of keys, one after the other; whether V has infinities or NaN. */
typedef struct cpu_packed {
    char *k, *v, *nonfinite;
} cpu_packed;

typedef struct cpu_item {
    int64_t b, g; /* batch, kv head */
    int64_t head; /* of the wave */
    cpu_box box;  /* rows of each head; keys, not yet cut to kv_len */
    int64_t split;
} cpu_item;

cpu_item cpu_item_of(const cpu_job *job, int64_t index);
/* By item of the wave. The last split of a block of rows merges them all. */
void cpu_run_item(const cpu_job *job, int64_t index, int thread);
/* Before the items of a wave: no block of keys is packed, no split is done. */
void cpu_open_wave(const cpu_job *job);
/* Before a run, and whenever something else has used the threads' scratch. */
void cpu_forget_threads(const cpu_job *job);

/* ---- a thread's item ---- */

/* Blocks [first, past) of a head that a thread has packed for itself. */
typedef struct item_keys {
    cpu_packed at;
    int64_t head, first, past;
} item_keys;

/* An interpreted mod and the head that its values are for, -1: none. state NULL: no mod. */
typedef struct item_mod {
    eval_state *state;
    int64_t head;
} item_mod;

/* The compiled mods, and the head and keys [j0, j0 + n) that their values are for, -1: none.
 * state NULL: the interpreter runs them. */
typedef struct item_code {
    jit_state *state;
    int64_t head, j0;
    int32_t n;
} item_code;

typedef struct cpu_worker {
    const cpu_job *job;
    const cpu_kernels *kernels;
    cpu_item item;
    kv_view keys, values; /* of the item's head */
    plan_position at;     /* of the item's batch */
    int32_t rows;         /* of all heads of the item */
    int64_t shift;        /* from a row's number to where it lies in q, out and lse */
    item_mod score, mask;
    item_code code;
    cpu_limits limits;
    double *bounds;      /* scratch of limits */
    void *q, *k, *v;     /* packed: rows of the item; a block of keys that no other reads */
    const void *queries; /* the item's rows as scores read them: q, or where they lie in Q */
    int32_t queries_ld;  /* elements from one to the next */
    void *room[2];       /* a block of K, of V, gathered from chunks */
    item_keys own;
    float *s;             /* [strip][CPU_BLOCK_KEYS] */
    float *o;             /* [rows][o_ld] */
    float *m, *l, *alpha; /* [rows] each */
    float *most;          /* [strip] maxima of a strip's scores */
    uint8_t *live;        /* [strip][CPU_BLOCK_KEYS] */
    char *flow;           /* memory of streams */
    uint32_t streamed;    /* strips that took part in one, a bit each */
    uint32_t stored;      /* strips whose result lies in out already */
    float *row;           /* [o_ld] */
    float *sums[2];       /* parts of all rows, of ranges before and of the last one */
    void *ranges;
} cpu_worker;

/* One block of keys of the item. */
typedef struct item_tile {
    int64_t j0;
    int32_t n; /* keys */
    int is_full, is_nonfinite;
    const void *k, *v; /* packed, from j0's block on */
    int32_t padded;    /* keys that packing it has filled */
    int32_t first;     /* of the packed block's keys, those before the tile's */
    int32_t block;     /* keys from the block's start on, whose columns are made once; 0: own */
} item_tile;

static inline int64_t item_head_of(const cpu_worker *w, int32_t r)
{
    const cpu_box *box = &w->item.box;
    return box->h0 + r / (box->i1 - box->i0);
}

static inline int64_t item_index_of(const cpu_worker *w, int32_t r)
{
    const cpu_box *box = &w->item.box;
    return box->i0 + r % (box->i1 - box->i0);
}

/* The box of rows [r0, r0 + n) with keys [j0, j1); of all the item's rows where it has several
 * heads, whose rows a strip may mix. */
static inline cpu_box item_box_of(const cpu_worker *w, int32_t r0, int32_t n, int64_t j0,
                                  int64_t j1)
{
    cpu_box box = w->item.box;
    if (box.h1 - box.h0 == 1) {
        box.i0 += r0;
        box.i1 = box.i0 + n;
    }
    box.j0 = j0;
    box.j1 = j1;
    return box;
}

/* ---- item_worker.c ---- */

/* The thread's own, set up for the job unless it was so before. */
cpu_worker *item_worker_of(const cpu_job *job, int thread);
/* The item's rows, before anything is known of their keys. */
void item_open(cpu_worker *w, const cpu_item *item);
/* m and l of rows [r0, r0 + n) as before the first key. */
void item_clear_sums(cpu_worker *w, int32_t r0, int32_t n);
/* m, l and O of rows [r0, r0 + n) as before the first key. */
void item_clear_rows(cpu_worker *w, int32_t r0, int32_t n);
/* Packs rows [r0, r0 + n) of Q, of one head or the whole item; whole strips. */
void item_pack_queries(const cpu_worker *w, int32_t r0, int32_t n, void *to);
/* Keys of K (or V) of a head. */
kv_view cpu_keys_of(const cpu_job *job, int is_value, int64_t b, int64_t g);

/* ---- item_scores.c ---- */

/* Sets the compiled mods to row r's head. */
void item_open_compiled(cpu_worker *w, int32_t r);
/* What the scores kernel multiplies by: 1 where the compiled pass scales. */
float item_scale_of(const cpu_worker *w, const item_tile *t);
/* Keys whose scores it makes: whole groups of the compiled pass, where there is one. */
int32_t item_columns_of(const cpu_worker *w, const item_tile *t);
/* Score, then mask, then the end of the keys, of s [n_rows][CPU_BLOCK_KEYS]; the rows' maxima
 * where known, or NULL. */
const float *item_change_scores(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows,
                                float *s);

/* ---- item_blocks.c ---- */

/* K and V of t's block, packed. */
void item_find_operands(cpu_worker *w, item_tile *t);
/* A strip against one block of keys. */
void item_run_strip(cpu_worker *w, item_tile t, int32_t r0, int32_t n_rows);
/* Rows [r0, r0 + rows) of the item, whole strips of it, against keys [begin, end), block by
 * block; begin is the first key of one. */
void item_run_blocks(cpu_worker *w, int64_t begin, int64_t end, int32_t r0, int32_t rows);

/* ---- item_drop.c ---- */

/* After softmax: weights of rows [r0, r0 + n_rows) that dropout drops become 0. */
void item_drop(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows);

/* ---- item_store.c ---- */

/* Row r of out. */
char *item_out_of(const cpu_worker *w, int32_t r);
/* All but the strips that are stored already. */
void item_store(const cpu_worker *w);
/* (m, l) of all rows, then O, of one split item. */
float *item_partial_of(const cpu_job *job, int64_t index);
void item_keep_partial(const cpu_worker *w, int64_t index);
/* The rows' sums as such a part, and back. */
void item_copy_sums(const cpu_worker *w, float *to);
void item_take_sums(cpu_worker *w, const float *from);
/* Stores an empty partial result (m = -inf, l = 0). Merging it adds nothing and does not read
 * its O. */
void item_keep_nothing(const cpu_worker *w, int64_t index);
/* Adds row r of a part to the worker's. */
void item_add_part(cpu_worker *w, const float *part, int32_t r);

/* ---- item_keys.c ---- */

/* Keys that packing n of a block's fills up, with zeros: as many as kernels read. */
int32_t item_padded(const cpu_job *job, int64_t n);
/* Packed blocks [first, past) of the item's keys; with is_local at most own_blocks, and until
 * the next call. */
cpu_packed item_packed(cpu_worker *w, int64_t first, int64_t past);

/* ---- item_flow.c ---- */

int item_can_stream(const cpu_worker *w);
/* All rows against keys [begin, end). */
void item_run_streams(cpu_worker *w, int64_t begin, int64_t end);

#endif
