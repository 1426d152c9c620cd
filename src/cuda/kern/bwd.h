/* What the host hands to the backward kernels; one text for C and for CUDA, as launch.h. */
#ifndef SACCADE_CUDA_BWD_H
#define SACCADE_CUDA_BWD_H

#include "launch.h"

enum {
    BWD_ROWS = 64,          /* queries of a step, and of a tile of dQ */
    BWD_WIDE_ROWS = 128,    /* queries of a CTA of bwd_wide_queries */
    BWD_FEW_BLOCKS = 5,     /* blocks of keys that a block of queries meets, at most, */
    BWD_FEW_DENSE = 1,      /* .. where other kernels have dense reads as tiles */
    BWD_CHUNKS = 32,        /* parts of a head whose bounds are found apart, at most */
    BWD_LSE_MOST = 1 << 18, /* beyond it f32 does not tell weights: see bwd_row.cuh */
    BWD_OF_Q = 1,
    BWD_OF_K = 2,
    BWD_OF_V = 4,
    BWD_OF_SINKS = 16,
    PREPARE_THREADS = 256, /* of a CTA of bwd_prepare */
    SINK_THREADS = 1024,   /* of a CTA of bwd_sinks */
    JOIN_THREADS = 256     /* of a CTA of bwd_join */
};

/* Lanes of bwd_prepare that share a row, eight elements each. */
#define BWD_ROW_LANES(dim) \
    ((dim) > 128 ? 32 : (dim) > 64 ? 16 : (dim) > 32 ? 8 : (dim) > 16 ? 4 : 2)

/* What an entry of the order of key tiles says beside the tile, in copies of a mask that are
 * walked by rows: each block of queries comes once for all heads of the group before the next
 * one does, and blocks come from the last one back. */
enum { ORDER_BY_ROWS = 1 << 30, ORDER_BACK = 1 << 29, ORDER_TILE = ORDER_BACK - 1 };

/* Where keys lie in pages, or come from other ranks, the gradient of one that has its place
 * alone is stored there. Others go to dk and dv of cu_bwd to be summed, those of pages
 * [B][G][N][dim] in f32. */
typedef struct cu_own {
    /* by entry of the table: a page that no other entry names, or -1; of ranks a row */
    const int *page;
    int per_batch, size, shift; /* entries of a batch; keys of a page; its logarithm, or -1 */
    int wide, added;            /* BWD_OF_*, as below */
    void *dk, *dv;              /* [page][G][size][dim] */
    cu_stride dks, dvs;
    long long dk_batch, dv_batch; /* strides of batches, of ranks; else 0 */
} cu_own;

/* What every sum of dQ in fixed point gains with a step beside its integer: the bits of the
 * float 3 * 2^22. */
#define BWD_LIFT 0x4b400000u

typedef struct cu_bwd {
    /* what forward had and left. Tiles are of keys here: n_qblk counts key tiles of one (b, g),
     * order lists (b*G + g)*n_qblk + tile, runs are those of query blocks of BWD_ROWS. */
    cu_fwd f;
    const void *d_out; /* [B][H][M][E] */
    const float *dlse; /* [B][H][M], or null */
    cu_stride dos, dlse_s;
    void *dq, *dk, *dv; /* [B][H][M][D], [B][G][N][D], [B][G][N][E]; null: not wanted */
    cu_stride dqs, dks, dvs;
    int n_mblk; /* query blocks of one (b, h) */
    /* Ragged queries: query blocks of a head in all that is prepared; 0: n_mblk to a batch. */
    int packed_blocks;
    /* bwd_queries: runs of key blocks of CFG_TM for each query block, as f.runs has them for
     * forward, and the order of query blocks */
    const cu_run *q_runs;
    const int *q_run_start, *q_order;
    int q_mask_b, q_mask_h;
    /* [B*H][n_mblk * BWD_ROWS]: lse (+INF for a dead row) in log2 units, of f32 in natural
     * ones; -delta; and, where dQ is summed in fixed point, one over the unit of a row's
     * sums, as many as a weight's own unit has of them */
    float *lse2, *minus_delta, *precision;
    float unit;       /* scale in log2 units: a constant operand, where registers are few */
    float slope_most; /* no larger derivative of a score by its product */
    unsigned *bounds; /* [B*G][n_bounds][2]: see bwd_unit.cuh */
    int n_bounds;     /* up to BWD_CHUNKS */
    float *dq_sum;    /* [B*H*n_mblk][64 * D], as bwd_dq.cuh stages it; D in whole 16 */
    unsigned *dq_steps; /* [B*H*n_mblk] how often the sums in fixed point were added to */
    unsigned *tiles_taken; /* beside the first one of each CTA */
    float *d_sinks; /* null: not wanted. Elements along b, h and m, 1 where one serves all */
    cu_stride d_sinks_s;
    int n_sinks_b, n_sinks_m;
    /* BWD_OF_* of the gradients that are f32, and of those added to what their tensors hold */
    int wide, added;
    int key_first, key_past; /* keys that rows read lie between */
    /* Over how many KV heads in a row a KV head's queries are dealt, where tiles are few, and
     * over how many of them the rows of a query head: kernels over tiles of keys have
     * `parts` times G heads, and leave dK and dV of each in f32 for bwd_join:
     * [B][G][parts][N][dim]. */
    int parts, row_parts;
    float *parts_k, *parts_v;
    /* With CFG_ROWS: each warp that stores gradients of the first n_told tiles adds 1 there. */
    unsigned *told;
    int n_told;
    /* read with CFG_PAGES or CFG_ROWS only; page null: no key has its place alone */
    cu_own own;
} cu_bwd;

/* What bwd_split leaves of f32: Q, K, V and dO, [B][heads][rows][3][panels * 64] of bf16. */
typedef struct cu_thirds {
    void *rows[4];
} cu_thirds;

/* ---- keys in chunks: bwd_pages.cu ---- */

enum {
    PAGES_THREADS = 256, /* of bwd_pages_sum */
    PAGES_SUMS = 16      /* rows of a warp */
};

/* What stands in for K, V, dK and dV in backward's other kernels, one key after the other:
 * [B][G][N][dim]. */
typedef struct cu_pages {
    void *k, *v;
    float *dk, *dv;              /* null: not wanted */
    unsigned long long *entries; /* [2][n] the table's by what they name, and room to sort */
    int *own;                    /* [n] for cu_own.page, or null */
    int *lens;                   /* [B] keys of each batch, or null where kv_len has them */
    unsigned n, per_batch;       /* entries in all; of a batch */
    int rows;                    /* of a page, or of K and V */
    int is_even;                 /* rows of K and V are read by 16 bytes */
    int even_results;            /* BWD_OF_*: four elements are stored at once */
    int key_blocks;              /* CTAs that make dK; the others make dV */
} cu_pages;

/* ---- gradients of captures: bwd_captures.cu, bwd_elements.cu ---- */

enum {
    CU_READS = 8,        /* reads of a score function that one launch makes terms of */
    CU_READS_MOST = 128, /* in all */
    SUM_WORDS = 12       /* of exact_sum.cuh */
};

/* Where the terms of a read go: elements of its capture's gradient, or exact sums of it. */
typedef struct cu_read {
    void *data;                /* the gradient */
    int dtype;                 /* of its elements: f32, bf16, f16 */
    unsigned long long *words; /* [SUM_WORDS + 1][n], or null */
    float *rows;               /* in [parts][n] f32, what ends as the gradient, or null: rows of
                                * queries, which add to them in order, or parts of sums */
    int parts;
    long long n;               /* elements of the gradient */
    long long stride[CU_RANK]; /* of data, or dense ones of words or rows */
} cu_read;

/* What a launch makes terms of. */
typedef struct cu_reads {
    cu_read of[CU_READS];
    int first;         /* of them; backward's tiles have the first ones */
    int from;          /* the launch's first block of queries; -1: it has all, longest first */
    int is_adding;     /* to what the gradient holds, where terms are stored */
    /* by read of these: whether backward's tiles make its terms, and whether any other kernel
     * than bwd_captures does */
    unsigned in_tiles, elsewhere;
} cu_reads;

/* What a head's scores, or those of one query, may read of a capture, where it is few elements:
 * bwd_tables.cuh, bwd_query_tables.cuh. */
typedef struct cu_table {
    int n;      /* elements; 0: there is no table */
    int digits; /* words of an element: 3, or 2 where 3 do not fit; 1 of a query's */
    int copies; /* of each, a power of 2 */
    int at;     /* in words from where tables begin */
    int pitch;  /* words from a query's table to the next one's; 0: one for all */
    int rank;
    unsigned short size[CU_RANK], stride[CU_RANK]; /* 0: one index for a head, or a query */
} cu_table;

typedef struct cu_tables {
    cu_table of[CU_READS];
    int bytes; /* of shared memory, whole 16 */
} cu_tables;

/* A launch of bwd_elements, of one read. */
typedef struct cu_elements {
    cu_read to;
    int read;                   /* its number */
    int has_batches, has_heads; /* each batch, each head has elements of its own */
    int may_move;               /* batches and heads that come together may read others */
    int blocks;                 /* of keys, of a CTA: as many as its form has at most */
    int parts;                  /* of batches and heads: elements of each go to [parts][n] */
    int is_adding;
} cu_elements;

#endif
