/* flow_run.h: what a run of merged streams is given: the item's rows, a chunk of packed keys
 * and the steps through it. flow_run_tmpl.c runs it. */
#ifndef SACCADE_CPU_FLOW_FLOW_RUN_H
#define SACCADE_CPU_FLOW_FLOW_RUN_H

#include "cpu/flow/flow.h"
#include "cpu/kernels/kernels.h"

typedef struct flow_step {
    int32_t strip, square; /* of the item; 32 keys of the chunk, its first ones */
    int32_t is_cut;        /* not all keys are live in all rows */
} flow_step;

/* What is read or written next, in pieces of CPU_PREFETCH_BYTES. They are brought into the
 * second-level cache while tiles and vectors work, the last ones first. */
enum { CPU_PREFETCH_BYTES = 2048, CPU_PREFETCHES = 32 };
typedef struct cpu_prefetch_list {
    const char *at[CPU_PREFETCHES];
    int32_t n;
} cpu_prefetch_list;

/* Steps of 96 keys for masks with limits, where somebody takes a strip's O as soon as it is
 * complete: o is one strip, 0 before each, and all keys of a strip are in the chunk. */
typedef struct flow_narrow {
    int is_stair;  /* limits that lie between keys rise by one key a row */
    const char *q; /* of all strips; NULL: the stream's has room for two, in turn */
    void *arg;
    /* The strip's q is needed. */
    void (*begin)(void *arg, int32_t strip, cpu_prefetch_list *prefetches);
    void (*end)(void *arg, int32_t strip); /* its o and l are complete; o is 0 after it */
} flow_narrow;

/* Strips of an item against a chunk of packed keys, in steps of FLOW_KEYS keys without infinite
 * values: scores, softmax and values of all steps merged (flow.h). m holds anchors, raised
 * from -INF where a row has none; l and O become relative to them, and l tells (item_flow.c)
 * whether that was good enough. */
typedef struct flow_run {
    const flow_code *code;
    const jit_state *jit; /* NULL: no score mod; set to the item's rows, the chunk's keys */
    const void *q;
    const char *k, *v;           /* the chunk's first block */
    int32_t o_ld, rows;          /* rows of the item */
    int is_exact;                /* somebody asks for l itself */
    float scale;                 /* > 0; the mod's where there is one */
    float *m, *l, *o;            /* of the item */
    const int64_t *first, *past; /* live keys of the item's rows; NULL: all */
    int64_t j0, j1;              /* the chunk's first key, the end of the keys */
    const flow_step *steps;      /* ordered by strips; never two of one square together */
    int32_t n;
    const flow_narrow *narrow; /* NULL: steps of 128 keys */
    char *memory;              /* FLOW_BYTES of scratch */
} flow_run;

#endif
