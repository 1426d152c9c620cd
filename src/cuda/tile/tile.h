/* tile.h: which tile an instance takes, and what a tile needs. */
#ifndef SACCADE_CUDA_TILE_TILE_H
#define SACCADE_CUDA_TILE_TILE_H

#include "saccade.h"

/* ---- tile.c: pure functions of integers ---- */

/* head dims as products take them */
int cu_padded(int64_t dim);
/* columns of V: two warps that share those of large heads take whole pieces of 16 bytes each.
 * bits: of an element of K and V */
int cu_padded_values(int64_t D, int64_t Dv, int bits);
/* Parts of a workspace begin on whole 256 bytes. */
static inline size_t cu_aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Tuning of one instance: may change speed and last bits, nothing else. */
typedef struct cu_tile {
    int groups;      /* sm_90a: consumer warpgroups of 64 rows; else warps of 16 rows */
    int keys;        /* keys per block */
    int stages;      /* blocks of K (and of V) in flight */
    int is_pingpong; /* sm_90a: groups take turns at the tensor cores */
    int is_lazy;     /* offsets raised after the fact; overflowing rows are done again */
} cu_tile;

/* Which forward kernel: fwd_sm90.cu, fwd_sm80.cu or, on any GPU, fwd_f32.cu. */
typedef enum cu_family { CU_SM90, CU_SM80, CU_F32, CU_FAMILIES } cu_family;

/* What backward's kernels are tuned by beside a tile. */
typedef struct cu_backward_tile {
    int rows;  /* by mma.sync: rows of a block that passes */
    int parts; /* by mma.sync: warps that share 16 rows, each with a part of the columns */
    int is_thirds;    /* f32: operands in three bf16 numbers (split.cuh) */
    int value_stages; /* sm_90a, two kernels: blocks of V in flight beside dQ */
    int is_captures;  /* gradients of captures by it */
    int blocks;       /* of rows that a CTA of bwd_elements has beside those that stay */
    int kept;         /* bytes that it keeps of each score */
    int stay;         /* sm_90a, two kernels: queries of a CTA of the second */
    int ctas[2];      /* and CTAs of each to a multiprocessor */
    int passes;       /* sm_90a: groups of a tile of keys without a live one pass its steps */
    int has_helpers;  /* sm_90a: loads and sums into global memory by warps of their own */
    int registers[3]; /* sm_90a: a thread of the consumers, of dQ's group, of those warps */
} cu_backward_tile;

/* A kernel and its tile. */
typedef struct cu_form {
    cu_family family;
    cu_tile tile; /* groups 0: no such kernel */
    cu_backward_tile backward;
    int dense_bytes; /* of the tensors that come as tiles, for a score; 0: none do */
    int teams;       /* small tiles: of a CTA, each with a tile of its own */
    int buffers; /* small tiles of few keys: heads whose keys lie in shared memory, 1 or 2 */
    int span_rows;    /* decode: packed rows of a span */
    int column_parts; /* decode: warps that share its rows, each with a part of O's columns */
    int latent_panels; /* latent decode: panels of 64 columns of a product with V; else 0 */
} cu_form;

/* The rung'th choice for these head dims, best first; 0 past the end of the ladder. */
int cu_tile_choice(cu_family family, int D, int E, saccade_dtype dtype, int rung, cu_tile *out);
/* The rung'th choice for the decode program: groups are its warps, each with stages of its own.
 * bits: of an element of K and V. */
int cu_decode_choice(int D, int E, int bits, int column_words, int rung, cu_tile *out);
/* Packed rows of a span of decode; where one warp makes 16 of them and others the rest. */
enum { CU_SPAN_ROWS = 16, CU_WIDE_ROWS = 64 };
/* cu_decode_choice for spans of CU_WIDE_ROWS: four warps take the same blocks. Codes only of
 * large heads. */
int cu_decode_wide_choice(int D, int E, int bits, int column_words, int rung, cu_tile *out);
/* Heads wider than 256, for which there is decode by wide spans alone, and how wide they may
 * be; warps that share a row's columns there, else 1. */
enum { CU_LARGE_HEAD = 256, CU_LARGEST_D = 576, CU_LARGEST_DV = 512, CU_LARGE_SPANS = 1024 };
int cu_decode_parts(int D, int E);
/* Warps of a CTA, or groups of them, that take blocks of their own. */
int cu_decode_streams(const cu_tile *tile, int span_rows, int parts);
/* cu_decode_choice for values that are the first columns of their keys, in wide spans: panels
 * of a product with V, or 0 where this decode has no such heads. */
enum { CU_LATENT_SPANS = 128 /* that are counted */ };
int cu_latent_choice(int D, int E, int column_words, int rung, cu_tile *out);
int cu_latent_shared(const cu_tile *tile, int D, int E, int column_words, int64_t spans);
/* cu_decode_choice for codes with half as many warps: a multiprocessor holds two CTAs, each
 * with one span. */
int cu_decode_half_choice(int D, int E, int bits, int column_words, int rung, cu_tile *out);
/* Query heads that read one KV head. */
int cu_group(const saccade_sizes *sizes);
/* Where decode's pieces are fixed, it takes all runs of up to so many rows. */
enum { CU_SHORT_ROWS = 128 };
/* Where a row's bits are its own, up to so many packed rows of a KV head count as few. */
enum { CU_PART_ROWS = 64 };
/* Whether decode by spans of so many rows takes runs of these sizes. */
int cu_decode_applies(const saccade_sizes *sizes, int span_rows);
/* CTAs, one to a multiprocessor, that read memory fastest: 128 of 132, not all of them
 * (docs/lab/018). */
int cu_reading_ctas(int n_sm);
/* Fixed pieces of KV keys, at least 1. */
int64_t cu_decode_pieces(int64_t KV);
/* Spans of a run (see decode.cu), of so many packed rows each. */
int64_t cu_decode_spans(const saccade_sizes *sizes, int span_rows);
/* Whether kernels find the place of each span by multiplications of 32 bits (quotient). */
int cu_finds_spans(const saccade_sizes *sizes);
/* The most rows of a head that it takes. */
int64_t cu_decode_rows_most(const saccade_sizes *sizes, int span_rows);
/* Decode in one launch: CTAs of a cluster that has a span, or several, to itself, and CTAs in
 * all; 0: two launches with equal shares are better. blocks: of a span; is_light: little
 * arithmetic beside the products. */
int cu_decode_cluster(int n_sm, int spans, int blocks, int warps, int is_light, unsigned *grid);
int cu_decode_shared(const cu_tile *tile, int span_rows, int D, int E, int bits,
                     int column_words, int64_t spans);
/* The kernel of small tiles: groups 1, and stages pieces of K or V in flight. is_general: the
 * mask's text is no interval of a row. */
int cu_small_choice(int D, int E, int is_general, int rung, cu_tile *out);
/* cu_small_choice for two teams with longer pieces, for bf16 without a mod. */
int cu_pair_choice(int D, int E, int rung, cu_tile *out);
/* Tiles of Q that a team has room for. */
int cu_small_buffers(int D, int E);
int cu_small_shared(const cu_tile *tile, int teams, int D, int E, int column_words);
/* The kernel of small tiles that keeps a head's keys: stages are pieces that hold KV keys. */
enum { FEW_KEYS = 256, FEW_QUERIES = 2 /* tiles of Q that a team has room for */ };
int cu_few_choice(int D, int E, int64_t KV, int rung, cu_tile *out);
/* Heads whose keys there is room for, at most 2. */
int cu_few_buffers(const cu_tile *tile, int D, int E);
int cu_few_shared(const cu_tile *tile, int teams, int D, int E);
/* Tiles whose rows have bits of their own: keys of a part, whole blocks, by the larger head
 * dim; the tile that few rows take beside `main`, whose blocks it has. others: bytes that a
 * mod takes of its shared memory. */
int cu_part_keys(const cu_tile *main, int dim);
cu_tile cu_part_tile(const cu_tile *main, int D, int E, int others);
/* Whether kernels by mma.sync keep Q in shared memory rather than in registers. */
int cu_is_q_shared(int D, int E);
int cu_tile_rows(cu_family family, const cu_tile *tile);
/* Keys of a tensor copy from pages: the most that divide both. */
int cu_keys_in_both(int64_t page, int tile_keys);
/* Whether pieces of so many keys are copied by 16 bytes (kern/gather.cuh) instead. */
int cu_gathers(int is_decode, const cu_tile *tile, int box);
int cu_tile_threads(cu_family family, const cu_tile *tile, int E);
/* f32: warps that share 16 rows, each with a part of O's columns */
int cu_parts(int E);
/* what a CTA may have, bytes */
int cu_shared_most(int sm);
/* 90 of sm_90a and of compute_90. */
int cu_sm_of(const char *arch);
/* Tiles of tensors that scores read, sm_90a: shared memory beside that of the tile, bytes. */
int cu_dense_shared(const cu_tile *tile, int bytes);
/* Values that scores share (kern/shares.cuh): shared memory of a warpgroup, bytes. */
int cu_share_bytes(int keys, int of_keys, int of_diagonals);
/* dynamic shared memory of a CTA, bytes */
int cu_tile_shared(cu_family family, const cu_tile *tile, int D, int E);

/* ---- pays.c: which tiles make a run faster ---- */

/* Rows that end within a sector of 32 bytes: tensor copies of them are slow, docs/lab/128. */
static inline int cu_splits_sectors(int dim)
{
    return dim % 16 != 0;
}

/* What a run walks in one kind of tiles: of all heads; the most blocks of a tile. */
typedef struct cu_amount {
    int64_t tiles, blocks, longest;
} cu_amount;
/* Whether small tiles are faster than large ones; from SMALL_BLOCKS blocks a large tile on they
 * are not. dim: the larger head dim. is_evaluated: a mask that no limits of rows stand for. */
enum { SMALL_BLOCKS = 16 };
int cu_small_pays(int n_sm, int dim, int is_evaluated, const cu_tile *small, cu_amount s,
                  const cu_tile *large, cu_amount l);
/* Whether two teams are faster than three, for so many tiles that walk so many keys each. */
int cu_pair_pays(int n_sm, int64_t tiles, int64_t keys);
/* Whether small tiles that keep a head's keys are faster than others. */
int cu_few_pays(const cu_tile *few, const cu_tile *small, int dim, const saccade_sizes *sizes);
/* Whether decode by spans of so many rows is faster than tiles of one kind, for keys of 16
 * bits. */
int cu_decode_pays(int n_sm, int span_rows, const cu_tile *tile, int is_small,
                   const saccade_sizes *sizes);
/* Whether spans of CU_WIDE_ROWS are faster than those of CU_SPAN_ROWS. is_in_pieces: keys lie
 * in chunks, or sequences are ragged. */
int cu_decode_wide_pays(int n_sm, int is_in_pieces, const saccade_sizes *sizes);
/* Whether the choice of cu_decode_half_choice is the faster one for so many spans. */
int cu_decode_half_pays(int n_sm, int64_t spans);
/* Whether spans of unequal lengths are so many that whole ones, dealt out by the hardware, are
 * faster than equal shares of all keys. */
int cu_decode_owns_pays(int n_sm, int64_t spans);

#endif
