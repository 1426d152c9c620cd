/* What the host hands to a forward kernel; one text for C and for CUDA, so that the two cannot
 * drift. Pointers are device addresses, strides count elements. A null offset pointer means
 * "use the scalar". */
#ifndef SACCADE_CUDA_LAUNCH_H
#define SACCADE_CUDA_LAUNCH_H

enum { CU_RANK = 8 };

typedef struct cu_stride {
    long long b, h, n; /* 0 broadcasts */
} cu_stride;

typedef struct cu_capture {
    const void *data;          /* null for a scalar, whose bits are then in shape[0] */
    long long stride[CU_RANK]; /* elements */
    int shape[CU_RANK];
} cu_capture;

/* a run of key blocks; is_partial means that the mask must be evaluated there */
typedef struct cu_run {
    int first, count, is_partial;
    int ordinal; /* live blocks of the row before this run */
} cu_run;

typedef struct cu_position {
    const int *by_batch; /* [B], or null: value */
    int step;            /* elements from one batch to the next */
    int value;
} cu_position;

/* Keys that do not lie in one piece: see plan_chunks. */
typedef struct cu_chunks {
    const int *first; /* [B][count] the row where a chunk begins, -1 for an absent one */
    long long step;   /* elements from one batch to the next */
    int count, size;  /* chunks of a batch; keys of a chunk */
    int rows;         /* of K and V, in which all rows stay whatever the table says */
} cu_chunks;

/* Decode, see decode.cu: what the host works out for all CTAs. */
typedef struct cu_decode {
    int group, rows, tiles, spans; /* H / G; times M; tiles of 16 of them; all tiles */
    int cluster;                   /* CTAs of a span, or 0: shares that cross spans */
    int span_blocks;               /* blocks of every span, or 0 where they differ */
    int share, larger;             /* blocks of a CTA where they don't; CTAs with one more */
    unsigned by_tiles, by_G, by_M; /* 2^32 / tiles, G, M, rounded up; 0 for 1 */
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
    const cu_run *
        runs; /* runs of all rows of blocks, or null: every block, partial if there is a mask */
    const int *run_start; /* [mask rows + 1] */
    int block_keys;       /* of a block of the runs */
    int mask_b, mask_h; /* steps in rows of blocks for the next batch and head, 0 broadcasts */
    int n_qblk;         /* query blocks of one (b, h) */
    const int
        *order; /* [tiles]: (b*H + h)*n_qblk + block, longest work first, or null: ascending */
    int *flags; /* [tiles][groups]: 1 where a group of 16 rows is not finite */
    int *redo;  /* [tiles * groups] tiles with such rows, or null */
    int *redo_count;          /* entries of redo */
    const int *n_listed;      /* second pass: order holds this many tiles; else null */
    int n_tiles, tile_groups; /* of 16 rows, in a tile */
    int *counter;             /* 0 at the start: tiles drawn beyond the first of each CTA */
    int n_split;              /* decode: CTAs that share the keys */
    float *part_o;  /* decode: [slot][16][E], unnormalised; a slot for each cut span */
    float *part_ml; /* decode: [slot][16][4], row offset (log2), sum, maximum */
    int *done;      /* decode: [CTA][4] the cut before each CTA's share: see decode.cu */
    cu_decode decode;
    cu_chunks chunks; /* read with CFG_CHUNKS only */
} cu_fwd;

#endif
