/* schedule.h: which work there is and in which order, without doing any of it: what of a run is
 * live, the limits of rows whose mask is one interval, tiles, splits and workspace. */
#ifndef SACCADE_CPU_SCHEDULE_SCHEDULE_H
#define SACCADE_CPU_SCHEDULE_SCHEDULE_H

#include "cpu/kernels/kernels.h"
#include "plan/plan.h"

/* ---- row_limits.c: masks that are one interval of keys per row ---- */

/* Keys [first[r], past[r]) of each row of an item are live, and of any and of every row. */
typedef struct cpu_limits {
    int64_t *first, *past; /* [CPU_MOST_ROWS] */
    int64_t any_first, any_past, all_first, all_past;
    int32_t rising; /* rows from 0 on whose limits lie on lines that do not fall, .. */
    int is_stair;   /* .. but rise by one key a row, but where they are cut to [0, KV] */
} cpu_limits;

/* Limits of n rows of a head, first's and those after it, to rows r0 and on; values: scratch, a
 * double per node. */
void cpu_find_limits(const pass_limits *mask, const plan_run *run, const eval_point *first,
                     int32_t n, int32_t kv_offset, double *values, cpu_limits *to, int32_t r0);
/* Fills any_ and all_ from rows [r0, r0 + n). */
void cpu_limit_rows(cpu_limits *limits, int32_t r0, int32_t n);

typedef enum cpu_cover { CPU_EMPTY, CPU_PARTIAL, CPU_FULL } cpu_cover;
cpu_cover cpu_cover_of_limits(const cpu_limits *limits, int64_t j0, int64_t j1);

/* ---- live.c: which tiles and keys of a run count ---- */

/* What decides about the keys of a PARTIAL tile. */
typedef enum cpu_live_by {
    CPU_BY_LIMITS, /* the interval of each row: nothing is evaluated and no runs are read */
    CPU_BY_MASK,   /* the mask's value; runs or ranges only skip whole tiles */
    CPU_BY_ROW,    /* cpu_row_live: imported runs and the mask inside their PARTIAL blocks; or
                    * a mask that has limits, and so no compiled code, at positions too far
                    * off for them */
} cpu_live_by;

typedef struct cpu_live {
    const plan_run *run;
    cpu_live_by by;
    const pass_limits *limits; /* CPU_BY_LIMITS: of the mask */
    const mod_fn *mask;        /* NULL: none */
    const mask_runs *runs;     /* NULL: tiles are proven while running */
    const mask_runs *cells;    /* what narrows PARTIAL tiles; NULL: nothing does */
    int is_imported;           /* the runs are the truth themselves */
} cpu_live;

/* Rows [i0, i1) of heads [h0, h1), keys [j0, j1). */
typedef struct cpu_box {
    int64_t b, h0, h1, i0, i1, j0, j1;
} cpu_box;

/* Square blocks of a mask's runs that tell what a strip of a PARTIAL tile needs where the
 * mask's value says it, and what backward's tiles need. */
enum { CPU_CELL = 32 };
/* Whether they are to be had: not of limits, and imported blocks are what they are. */
int cpu_has_cells(const plan_problem *problem, const saccade_block_mask *mask);
/* EINVAL when the run's block mask is needed and was not prepared for these tiles. */
saccade_status cpu_live_of(const plan_problem *problem, const plan_run *run, cpu_live *out,
                           saccade_error *err);
saccade_status cpu_prepare_mask(const plan_problem *problem, const saccade_block_mask *mask,
                                saccade_error *err);
/* Kernels bound kv_len themselves. limits: of the box's rows, CPU_BY_LIMITS only. ranges:
 * scratch of pass_cover_bytes. */
cpu_cover cpu_cover_of(const cpu_live *live, const cpu_limits *limits, const cpu_box *box,
                       void *ranges);
/* Cuts the box's keys to those between the first and the last that limits or cells leave, from
 * a multiple of `group` keys on, counted from j0; whether its rows see none or all of them.
 * limits: as above, with any_ and all_ of these rows. */
cpu_cover cpu_narrow(const cpu_live *live, const cpu_limits *limits, int32_t group,
                     cpu_box *box);
/* Groups of a box's keys, at most 32 of `group` from j0 on, a bit each: those of which cells
 * leave some to its rows, and those that every row sees whole. There are cells. */
typedef struct cpu_groups {
    uint32_t some, every;
} cpu_groups;
cpu_groups cpu_groups_of(const cpu_live *live, int32_t group, const cpu_box *box);
/* out[0..n) for row i0 of head h0 in a PARTIAL tile, n <= EVAL_STRIP; state is set to it. */
void cpu_row_live(const cpu_live *live, eval_state *state, const cpu_box *row, uint8_t *out);
/* The keys [*from, *to) that the limits of a box's first and last row span; all without limits.
 * values: scratch, a double per node. */
void cpu_span_of(const cpu_live *live, const cpu_box *box, double *values, int64_t *from,
                 int64_t *to);
/* An estimate of the work of a box whose rows span [from, to), to start the longest first: keys
 * by limits, or live tiles. */
int64_t cpu_weight_of(const cpu_live *live, const cpu_box *box, int64_t from, int64_t to,
                      void *ranges);
/* order[0..n): indices by falling weight, equal weights by index. */
void cpu_order(const int64_t *weight, int32_t *order, int64_t n);

/* ---- score_row.c: a row of a tile's scores ---- */

/* Places a state on row q (a position, offsets included) of head (b, h); *head: the head it is
 * on, -1 at first. */
void cpu_open_row(eval_state *state, int64_t *head, int64_t b, int64_t h, int32_t q);
/* s[0..n) outside of [first, past) becomes -inf. */
void cpu_cut_row(int64_t first, int64_t past, int32_t n, float *s);
/* s of the keys of a box of one row that are not live becomes -inf; as cpu_row_live. */
void cpu_mask_row(const cpu_live *live, eval_state *state, const cpu_box *row, float *s);

/* ---- geometry.c: tiles, splits and workspace as functions of integers ---- */

/* What a plan's kernels and mods need of every run's memory. */
typedef struct cpu_needs {
    const cpu_kernels *kernels;
    saccade_sizes sizes; /* H, Hkv, D and Dv */
    int32_t threads;
    uint32_t limit_nodes, mask_nodes;     /* 0: no interval, no mask */
    size_t score_bytes, mask_bytes;       /* interpreters' states */
    size_t jit_bytes, flow_bytes;         /* states of compiled code */
    size_t room_bytes;                    /* to gather a block of K, or of V */
    int is_invariant;                     /* plan_problem's */
} cpu_needs;

/* One thread's memory, in the order of cpu_worker's pointers (item.h). */
typedef struct cpu_scratch {
    size_t q, s, o, stats, k, v, live, row, ranges, limits, values, score, mask, jit, flow;
    size_t own, own_nonfinite, sums, room;
    size_t bytes;
} cpu_scratch;

/* An item is one query block of one head, or all rows of a group's heads, or of some, when they
 * fit in one block; with splits, a range of its keys. Byte counts are multiples of 64. */
typedef struct cpu_geometry {
    int32_t q_ld;                 /* elements of a packed row of Q: D, rounded up */
    int32_t o_ld;                 /* Dv, rounded up to panels */
    int32_t item_heads;           /* 1, some of a group or the whole group */
    int32_t item_rows;            /* rows of each head in an item, at most */
    int32_t block_rows;           /* rows of a head from item to item */
    int64_t row_blocks;           /* items along the rows of a head */
    int64_t key_blocks;           /* of CPU_BLOCK_KEYS */
    int64_t splits, split_blocks; /* ranges of keys; blocks in each */
    int64_t turn_blocks;          /* of a range that an item adds up by itself; 0: it has one */
    int64_t head_items;           /* items of one (batch, kv head) */
    int64_t heads, wave;          /* (batch, kv head) pairs in all, and packed at a time */
    int is_shared;                /* K and V are packed for many items */
    int is_own;                   /* .. by each thread for its own */
    int64_t own_items;            /* items next to each other that it then runs */
    int32_t own_blocks;           /* packed blocks of keys that a thread has of its own */
    int is_decode;                /* K and V are not packed at all */
    size_t k_bytes, v_bytes;      /* one packed block of keys */
    size_t partial_bytes;         /* per item when split */
    cpu_scratch scratch;          /* of each thread */
    size_t packed_off, nonfinite_off, state_off, weight_off, order_off, partial_off, left_off;
    size_t thread_off, bytes;
} cpu_geometry;

cpu_geometry cpu_geometry_of(const cpu_needs *needs, const saccade_sizes *sizes);
/* Blocks of rows of one size, for runs of all rows of few items on several threads, where a
 * row's bits do not depend on the rows beside it. */
void cpu_cut_evenly(const cpu_needs *needs, const saccade_sizes *sizes, cpu_geometry *g);

#endif
