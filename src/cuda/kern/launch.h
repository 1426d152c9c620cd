/* What the host hands to a forward kernel. C and CUDA include this one file, so that both sides
 * have the same layout. Pointers are device addresses, strides count elements. */
#ifndef SACCADE_CUDA_LAUNCH_H
#define SACCADE_CUDA_LAUNCH_H

enum {
    CU_RANK = 8,
    ROW_BLOCK = 64,
    /* Keys of a fixed split, whose parts begin at multiples of so many keys, so that a row's
     * bits do not depend on the batch: of decode (decode.cu), and of tiles, in whole blocks
     * (parts.cuh). */
    PIECE_KEYS = 2048,
    PART_KEYS = 4096,
    /* Decode: warps that load, where others compute (decode_span.cuh); bytes that two warps use
     * which share rows (decode_columns.cuh). */
    DECODE_LOADERS = 4,
    DECODE_PAIR_BYTES = 1152,
    LATENT_SUMS = 64 * 16 + 2 * 64 * 4 + 64 * 4 + 16 /* bytes beside panels: latent_place.cuh */
};

typedef struct cu_stride {
    long long b, h, n; /* 0 broadcasts */
} cu_stride;

/* A tensor whose elements are taken one after the other (place.cuh). */
typedef struct cu_shape {
    int rank, size[CU_RANK];
    long long stride[CU_RANK]; /* elements */
} cu_shape;

typedef struct cu_capture {
    const void *data;          /* null for a scalar, whose bits are then in shape[0] */
    long long stride[CU_RANK]; /* elements */
    int shape[CU_RANK];
} cu_capture;

/* Tensors that scores and masks read at their own query and key, taken as tiles (dense.cuh):
 * reads of a program, blocks on their way; and bytes of a row of a panel in shared memory, by
 * the bytes of a row of all panels. */
enum { CU_DENSE_MOST = 3, CU_DENSE_STAGES = 2, CU_DENSE_LINE = 32 /* the shortest */ };
#define CU_DENSE_ROW(bytes) ((bytes) % 128 == 0 ? 128 : (bytes) % 64 == 0 ? 64 : CU_DENSE_LINE)

/* A run of key blocks. Where is_partial is set, the mask must be evaluated for each score. */
typedef struct cu_run {
    int first, count, is_partial;
    int ordinal; /* how many live blocks the row has before this run */
} cu_run;

/* Live keys of each row, where the host has found that they are one interval: from, past. */
typedef struct cu_limits {
    const int *of_row; /* null: not known */
    int b, h;          /* rows from one batch and head to the next; 0 broadcasts */
} cu_limits;

/* A tile of fwd_small.cu. A piece is its first key << PIECE_FLAGS, and 1 where the mask is
 * needed. */
enum { PIECE_FLAGS = 2 };
typedef struct cu_work {
    int tile, first, count; /* pieces[first ...] */
    int piece;              /* the first one */
} cu_work;

typedef struct cu_position {
    const int *by_batch; /* [B], or null where `value` holds for all batches */
    int step;            /* elements from one batch to the next */
    int value;
} cu_position;

/* Keys that do not lie in one piece: see plan_chunks. */
typedef struct cu_chunks {
    const int *first; /* entries: rows where chunks begin or pages, below 0 for absent ones */
    const int *start; /* [B + 1] where batches' entries begin, or null: every `step` elements */
    long long step;
    int count, size, shift; /* chunks of a batch; keys of a chunk; its logarithm, or -1 */
    int entries;            /* with start: of all batches */
    int last;     /* row or page of K and V, in which all stay whatever the table says */
    int is_paged; /* K and V are [page][G][size][dim] */
    int has_last; /* kv_len counts keys of a batch's last page */
    int box;      /* keys of one tensor copy: no copy crosses the end of a chunk */
    int is_small; /* copied by 16 bytes (gather.cuh) */
} cu_chunks;

/* Kernels that bring keys in chunks into one piece (one_piece.cuh). */
enum {
    PAGES_COPIERS = 1024, /* threads of a CTA */
    PAGES_ROWS = 128,     /* keys that it copies */
    COLLECT_SPARE = 256   /* keys past a batch's last that forward's tiles may copy */
};

/* What stands in for K and V in forward, one key after the other: [B][G][N][dim]. */
typedef struct cu_collected {
    void *k, *v;
    int *lens; /* [B] keys of each batch, or null where kv_len has them */
} cu_collected;

/* Scales of quantised K or V: [b][h][row / tokens][channel / channels]. */
typedef struct cu_scale {
    const void *data; /* null: 1 */
    long long b, h, n, d; /* elements; 0 where there is one */
    int tokens, channels; /* of a group; 0: all */
    int is_f16;           /* else f32 */
} cu_scale;

/* Sequences of unequal lengths: b has rows [q_first[b], q_first[b + 1]) of q and of what has
 * its rows, and likewise keys; null where all batches have M rows, or N keys. */
typedef struct cu_ragged {
    const int *q_first, *kv_first;
    int rows, keys; /* of q, and of K and V, in which all stay whatever the numbers say */
    int is_end;     /* a sequence's last row stands where its last live key does */
    int least;      /* tiles leave out sequences of fewer rows: decode takes them */
    int *order;     /* [tiles] those with rows, the longest first, as `begin` finds them */
    int *n_tiles;   /* how many those are */
} cu_ragged;

/* Which weights a run keeps: see mod/dropout.h. */
typedef struct cu_drop {
    const unsigned long long *state; /* seed and offset, or null: those beside it */
    unsigned long long seed, offset;
    int b_offset, h_offset; /* from the run's batches and heads to those of the generator */
    unsigned threshold;     /* weights of fewer random bits are dropped */
    float factor;           /* of the others */
} cu_drop;

/* For decode.cu: what the host works out once for all CTAs. */
typedef struct cu_decode {
    int group;       /* query heads of a KV head, H / G */
    int rows;        /* packed rows of a KV head, group * M */
    int tiles;       /* tiles of CFG_SPAN_ROWS that they make */
    int spans;       /* such tiles of all batches and KV heads */
    int cluster;     /* CTAs that share one span; 0: CTAs have shares that may cross spans */
    int owns;        /* each CTA has a span of its own, however long */
    int span_blocks; /* key blocks of every span, or 0 where spans differ; most, with `owns` */
    int share;       /* where spans do not differ: blocks of a CTA's share */
    int larger;      /* so many CTAs have one block more than that */
    int joins_spans; /* CTAs that join have a span each, rather than a cut between shares */
    int flags;       /* rows of a head that have flags */
    int most;        /* ragged: sequences of more rows are the tiles' */
    /* 2^32 divided by tiles, G and M, rounded up, to divide by multiplication; 0 where the
     * divisor is 1 */
    unsigned by_tiles, by_G, by_M;
} cu_decode;

typedef struct cu_fwd {
    const void *q, *k, *v; /* [B][H][M][D], [B][G][N][D], [B][G][N][E] */
    void *o;               /* [B][H][M][E] */
    float *lse;            /* [B][H][M], natural log, or null */
    float *row_max;        /* [B][H][M], natural units, or null */
    cu_stride qs, ks, vs, os, lse_s, max_s;
    int B, H, G, M, N;
    int is_plain; /* rows of some tensor do not lie on 16 bytes (sm_80 kernel) */
    float scale;
    cu_position q_offset, kv_offset, kv_len;
    /* The block mask: the runs of all rows of blocks, and where each row begins among them. If
     * runs is null every block is taken, as a partial one if there is a mask. */
    const cu_run *runs;
    const int *run_start; /* [rows of blocks + 1] */
    int block_keys;       /* keys of a block */
    int mask_b, mask_h;   /* rows of blocks from one batch and head to the next; 0 broadcasts */
    int n_qblk;           /* query blocks of one (b, h) */
    /* [tiles] (b * H + h) * n_qblk + block, the longest tiles first; null: ascending */
    const int *order;
    int *flags;          /* [tiles][tile_groups] 1 where a row of the group is not finite */
    int *redo; /* [tiles * tile_groups] room for a list of tiles with such rows, or null */
    int *redo_count;     /* how many are listed */
    const int *n_listed; /* second pass: how many tiles order holds; else null */
    int n_tiles;
    int tile_groups; /* groups of 16 rows in a tile */
    int *counter;    /* 0 at the start: how many tiles were drawn after each CTA's first */
    /* For decode.cu. A span that the shares of several CTAs cut into parts has a slot for each
     * part's result, which is not normalised. With CFG_BY_PARTS n_split parts of keys have
     * slots of decode.rows rows; with CFG_PART_KEYS alone part_o holds what CTAs put by. */
    int n_split;    /* CTAs that share the keys */
    float *part_o;  /* [slot][CFG_SPAN_ROWS][E] */
    float *part_ml; /* [slot][CFG_SPAN_ROWS][4] row offset (log2 units), sum, maximum */
    int *done;      /* [CTA][4] the span cut where its share begins, first CTA, parts */
    cu_decode decode;
    cu_chunks chunks; /* read with CFG_CHUNKS only */
    const void *sinks; /* of rows; read with CFG_SINKS only */
    cu_stride sinks_s;
    /* Read with CFG_ROWS only, where M counts the rows that are here, parts of a sequence of
     * M_all. A part begins with a whole block of ROW_BLOCK rows; for each block that is here,
     * how far on its rows stand in the sequence. */
    const int *row_shift;
    int M_all;
    cu_scale k_scale, v_scale; /* read with CFG_CODES only; strides of K and V are then bytes */
    cu_drop drop;              /* read with CFG_DROP only */
    cu_ragged ragged; /* read with CFG_RAGGED only; M and N are bounds then */
    cu_limits limits; /* read with CFG_LIMITS only */
    int dense_turned; /* read with CFG_DENSE only: a bit of each read (dense.cuh) */
    const cu_work *work; /* [n_tiles] in the work order of fwd_small.cu; null: all keys */
    const int *pieces;
} cu_fwd;

#endif
