/* item.h: what a thread holds of its item, and what the item_*.c do with it for item.c. */
#ifndef SACCADE_CPU_ITEM_H
#define SACCADE_CPU_ITEM_H

#include "cpu/cpu.h"

/* Blocks [first, past) of a head that a thread has packed for itself. */
typedef struct item_keys {
    cpu_packed at;
    int64_t head, first, past;
} item_keys;

typedef struct cpu_worker {
    const cpu_job *job;
    const cpu_kernels *kernels;
    cpu_item item;
    plan_position at; /* of the item's batch */
    int32_t rows;     /* of all heads of the item */
    eval_state *score, *mask;
    int64_t score_head, mask_head; /* head each state stands on, -1: none */
    jit_state *jit;                /* NULL: the interpreter changes scores */
    int64_t jit_head, jit_j0;      /* head and first key it stands on, -1: none */
    int32_t jit_n;
    cpu_limits limits;
    double *values;  /* scratch of limits */
    void *q, *k, *v; /* packed: rows of the item; a block of keys that no other reads */
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
    pass_range *ranges;
} cpu_worker;

/* One block of keys of the item. */
typedef struct item_tile {
    int64_t j0;
    int32_t n; /* keys */
    int is_full, is_wild;
    const void *k, *v; /* packed, from j0's block on */
    int32_t first;     /* of the packed block's keys, those before the tile's */
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

/* ---- item_worker.c ---- */

cpu_worker *item_worker_of(const cpu_job *job, int thread);
/* The item's rows, before anything is known of their keys. */
void item_stand(cpu_worker *w, const cpu_item *item);
/* Whether the mask's limits replace its tiles and its evaluation. */
int item_has_limits(const cpu_worker *w);
/* m and l of rows [r0, r0 + n) as before the first key. */
void item_clear_sums(cpu_worker *w, int32_t r0, int32_t n);
/* The same, and O. */
void item_clear_rows(cpu_worker *w, int32_t r0, int32_t n);
/* Packs rows [r0, r0 + n) of Q, of one head or the whole item, to row `to`; whole strips. */
void item_pack_queries(cpu_worker *w, int32_t r0, int32_t n, int32_t to);

/* ---- item_scores.c ---- */

/* Puts the compiled mod on row r's head. */
void item_stand_compiled(cpu_worker *w, int32_t r);
/* What the scores kernel multiplies by: 1 where the compiled pass scales. */
float item_scale_of(const cpu_worker *w, const item_tile *t);
/* Score, then mask, then the end of the keys; the rows' maxima where known, or NULL. */
const float *item_change_scores(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows);

/* ---- item_tiles.c ---- */

/* K and V of t's block, packed. */
void item_find_operands(cpu_worker *w, item_tile *t);
/* A strip against one block of keys. */
void item_run_strip(cpu_worker *w, item_tile t, int32_t r0, int32_t n_rows);
/* Rows [r0, r0 + rows) of the item, whole strips of it, against keys [begin, end), block by
 * block; begin is the first key of one. */
void item_run_blocks(cpu_worker *w, int64_t begin, int64_t end, int32_t r0, int32_t rows);

/* ---- item_store.c ---- */

/* Row r of out. */
char *item_out_of(const cpu_worker *w, int32_t r);
/* All but the strips that are stored already. */
void item_store(const cpu_worker *w);
/* (m, l) of all rows, then O, of one split item. */
float *item_partial_of(const cpu_job *job, int64_t index);
void item_keep_partial(const cpu_worker *w, int64_t index);
/* A part that adding takes nothing of: O is not looked at. */
void item_keep_nothing(const cpu_worker *w, int64_t index);
/* Adds row r of a part to the worker's. */
void item_add_part(cpu_worker *w, const float *part, int32_t r);

/* ---- item_keys.c ---- */

/* Packed blocks [first, past) of the item's keys; with is_local at most own_blocks, and until
 * the next call. */
cpu_packed item_packed(cpu_worker *w, int64_t first, int64_t past);

/* ---- item_stream.c ---- */

int item_can_stream(const cpu_worker *w);
/* All rows against keys [begin, end). */
void item_run_streams(cpu_worker *w, int64_t begin, int64_t end);

#endif
