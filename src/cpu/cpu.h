/* cpu.h: the CPU back end inside. Kernels (one table per level and packed element) do the work
 * on one strip of query rows and one block of keys; item.c loops over them. docs/kernels.md has
 * the contract with its reasons. Letters of STYLE section 7: M query rows, N keys, D, E. */
#ifndef SACCADE_CPU_H
#define SACCADE_CPU_H

#include "base/cpu_features.h"
#include "cpu/amx_flow.h"
#include "cpu/jit.h"
#include "plan/plan.h"

/* Rows of Q, K or V of one (b, head): row j starts at base + j * stride bytes. */
typedef struct cpu_rows {
    const char *base;
    int64_t stride;
    saccade_dtype dtype;
    int32_t dim;
} cpu_rows;

/* S = scale * Q K^T of one strip and one block of keys.
 * q [rows][q_ld] packed elements, 0 past D; k: panels of pack_keys; s [rows][s_ld] f32. */
#define CPU_SCORES(name)                                                           \
    void name(const void *q, int32_t q_ld, const void *k, int32_t D, int32_t rows, \
              int32_t n_panels, float scale, float *s, int32_t s_ld)
/* FA2 (arXiv 2307.08691) alg. 1: m, l and alpha of the new block, and P over S in place
 * (as packed elements, row r at s + r * s_ld). n: keys, a multiple of 16; -INF is dead.
 * known: the rows' maxima where a pass before found them, else NULL. */
#define CPU_SOFTMAX(name)                                                                    \
    void name(float *s, int32_t s_ld, int32_t rows, int32_t n, const float *known, float *m, \
              float *l, float *alpha)
/* O = alpha O + P V. p: what softmax left; v: panels of pack_values; n: keys, a multiple of
 * 16; o [rows][o_ld] f32. */
#define CPU_VALUES(name)                                                             \
    void name(const float *p, int32_t p_ld, const void *v, int32_t n, int32_t block, \
              int32_t rows, int32_t n_panels, const float *alpha, float *o, int32_t o_ld)
/* Rows [j0, j0 + n) into `to`, padded with 0 to `padded` rows.
 * rows: [padded][ld]; keys: [padded/panel][D][panel]; values: [E/panel][padded][panel].
 * Packed bf16 keeps two neighbours of the second last dimension together.
 * Values return not 0 when any of them is infinite or NaN. */
#define CPU_PACK_ROWS(name) \
    void name(const cpu_rows *from, int64_t j0, int32_t n, int32_t padded, int32_t ld, void *to)
#define CPU_PACK_KEYS(name) \
    void name(const cpu_rows *from, int64_t j0, int32_t n, int32_t padded, void *to)
#define CPU_PACK_VALUES(name) \
    int name(const cpu_rows *from, int64_t j0, int32_t n, int32_t padded, void *to)

/* Lines of K or V that are read next, asked of memory while others are used (asking.h). */
typedef struct cpu_asking {
    const char *at;
    int64_t stride, apart;     /* bytes to the next row, and to the next part of them */
    int32_t line, lines, rows; /* the next of a row's lines; rows left, this one included */
    int32_t due;               /* parts of a line */
    int32_t is_near;           /* into the first-level cache, else the second */
} cpu_asking;

/* Which cache to ask into on this machine (levels.c). */
int cpu_asks_near(void);

/* Rows of packed Q as dots takes them: as many bytes as they have, rows to a multiple of 32. */
#define CPU_PACK_DIRECT(name) \
    void name(const void *q, int32_t q_ld, int32_t rows, int32_t D, void *to)
/* The same two products for at most direct_rows rows, straight from K and V: every element is
 * read once and nothing is packed. D and Dv are at most CPU_DIRECT_DIM. All of `next` is asked
 * for meanwhile. dots: scores of n keys from j0. sums: like values, for n keys; stops before
 * the first few keys that hold an infinity or NaN and returns the number of keys done. */
enum { CPU_DIRECT_DIM = 576 };
#define CPU_DOTS(name)                                                               \
    void name(const void *q, int32_t q_ld, const cpu_rows *k, int64_t j0, int32_t n, \
              int32_t rows, float scale, float *s, int32_t s_ld, cpu_asking *next)
#define CPU_SUMS(name)                                                                   \
    int32_t name(const float *p, int32_t p_ld, const cpu_rows *v, int64_t j0, int32_t n, \
                 int32_t rows, const float *alpha, float *o, int32_t o_ld, cpu_asking *next)

/* E elements of each row of O by its sum as dtype, `stride` bytes from row to row; 0 where the
 * sum is. */
#define CPU_STORE_ROWS(name)                                                                   \
    void name(const float *o, int32_t o_ld, const float *l, int32_t rows, saccade_dtype dtype, \
              int32_t E, void *to, int64_t stride)
/* The same, and O becomes 0; whether a result is infinite or NaN. is_far: past the
 * caches, and a fence must follow. */
#define CPU_TAKE_ROWS(name)                                                             \
    int name(float *o, int32_t o_ld, const float *l, int32_t rows, saccade_dtype dtype, \
             int32_t E, void *to, int64_t stride, int is_far)
/* Whether any of n floats, a multiple of 16, is infinite or NaN. */
#define CPU_ANY_WILD(name) int name(const float *o, int64_t n)
/* Strips of an item against a chunk of packed keys, in steps of CPU_STREAM_KEYS keys without
 * infinite values: scores, softmax and values of all steps merged (amx_flow.h). m: anchors,
 * raised from -INF where a row has none; l and O become relative to them, and l tells
 * (item_stream.c) whether that was good enough. */
enum { CPU_STREAM_KEYS = 128 }; /* with more, S and both P would leave the first-level cache */
typedef struct cpu_stream_step {
    int32_t strip, square; /* of the item; 32 keys of the chunk, its first ones */
    int32_t is_cut;        /* not all keys are live in all rows */
} cpu_stream_step;
/* Steps of 96 keys for masks with limits, where somebody takes a strip's O as soon as it is
 * complete: o is one strip, 0 before each, and all keys of a strip are in the chunk. */
enum { CPU_NARROW_KEYS = 96 };
/* What is read or written next, in pieces of CPU_ASK_BYTES: brought into the second-level cache
 * while tiles and vectors work, the last ones first. */
enum { CPU_ASK_BYTES = 2048, CPU_ASKS = 32 };
typedef struct cpu_asks {
    const char *at[CPU_ASKS];
    int32_t n;
} cpu_asks;
typedef struct cpu_narrow {
    int is_stair;  /* limits that lie between keys rise by one key a row */
    const char *q; /* of all strips; NULL: the stream's has room for two, in turn */
    void *arg;
    void (*begin)(void *arg, int32_t strip, cpu_asks *asks); /* its q is needed */
    void (*end)(void *arg, int32_t strip); /* its o and l are complete; o is 0 after it */
} cpu_narrow;
typedef struct cpu_stream {
    const amx_code *code;
    const jit_state *jit; /* NULL: no score mod; stands on the item's rows, the chunk's keys */
    const void *q;
    const char *k, *v;            /* the chunk's first block */
    int32_t o_ld, rows;           /* rows of the item */
    int is_exact;                 /* somebody asks for l itself */
    float scale;                  /* > 0; the mod's where there is one */
    float *m, *l, *o;             /* of the item */
    const int64_t *first, *past;  /* live keys of the item's rows; NULL: all */
    int64_t j0, j1;               /* the chunk's first key, the end of the keys */
    const cpu_stream_step *steps; /* ordered by strips; never two of one square together */
    int32_t n;
    const cpu_narrow *narrow; /* NULL: steps of 128 keys */
    char *memory;             /* FLOW_BYTES of scratch */
} cpu_stream;
#define CPU_STREAM(name) int name(const cpu_stream *stream)

/* Maxima up to which m log2 e is near enough when rounded (softmax_rows.h): off by 1 at most,
 * a factor of 2 that all weights of a row share. */
#define CPU_FUSED_MOST 0x1p24f

typedef struct cpu_kernels {
    const char *name;
    int32_t strip;    /* query rows per call of scores, softmax, values */
    int32_t panel;    /* keys of a K panel, columns of a V panel */
    int32_t element;  /* bytes of a packed element: 4 f32, 2 bf16 */
    int32_t depth;    /* packed K has a multiple of these dims */
    int32_t is_fused; /* P is 2^(s log2 e - r), r = m log2 e rounded, |m| < CPU_FUSED_MOST */
    CPU_SCORES((*scores));
    CPU_SOFTMAX((*softmax));
    CPU_VALUES((*values));
    CPU_PACK_ROWS((*pack_rows));
    CPU_PACK_KEYS((*pack_keys));
    CPU_PACK_VALUES((*pack_values));
    int32_t direct_rows; /* rows up to which dots and sums are faster than packing */
    CPU_PACK_DIRECT((*pack_direct)); /* NULL: dots takes packed Q as it is */
    CPU_DOTS((*dots));
    CPU_SUMS((*sums));
    CPU_STORE_ROWS((*store_rows));
    CPU_TAKE_ROWS((*take_rows)); /* NULL where there is no stream, any_wild too */
    CPU_ANY_WILD((*any_wild));
    CPU_STREAM((*stream)); /* NULL: block by block only */
    void (*begin)(void);   /* around a thread's calls for an item; NULL: nothing to do */
    void (*end)(void);
    int is_by_keys; /* packed V is [keys/32][Dv/panel][32][panel] */
    int is_split;   /* elements of P are two bf16, 32 high parts, 32 low ones */
    /* Kernels in f32, whose packed blocks are no larger, that make again rows that come out
     * NaN, and up to careful_rows direct ones from the start; NULL: these are good for all. */
    const struct cpu_kernels *careful;
    int32_t careful_rows;
} cpu_kernels;

/* store_tmpl.c */
CPU_STORE_ROWS(cpu_store_rows_portable);
CPU_STORE_ROWS(cpu_store_rows_avx2);
CPU_STORE_ROWS(cpu_store_rows_avx512);
CPU_ANY_WILD(cpu_any_wild_avx512);
/* amx_rows_tmpl.c */
CPU_STORE_ROWS(cpu_store_rows_amx);
CPU_TAKE_ROWS(cpu_take_rows_amx);
/* direct_tmpl.c */
CPU_DOTS(cpu_dots_portable);
CPU_DOTS(cpu_dots_avx2);
CPU_DOTS(cpu_dots_avx512);
CPU_SUMS(cpu_sums_portable);
CPU_SUMS(cpu_sums_avx2);
CPU_SUMS(cpu_sums_avx512);
/* bf16_direct_tmpl.c: AVX512-BF16 */
CPU_DOTS(cpu_dots_bf16);
CPU_SUMS(cpu_sums_bf16);
/* tiles_dots_tmpl.c, tiles_sums_tmpl.c: bf16; f16 as sums of two of it */
CPU_PACK_DIRECT(cpu_pack_direct_tiles_portable);
CPU_PACK_DIRECT(cpu_pack_direct_tiles_avx2);
CPU_PACK_DIRECT(cpu_pack_direct_tiles_avx512);
CPU_PACK_DIRECT(cpu_pack_direct_tiles_amx);
CPU_PACK_DIRECT(cpu_pack_direct_split_portable);
CPU_PACK_DIRECT(cpu_pack_direct_split_avx2);
CPU_PACK_DIRECT(cpu_pack_direct_split_avx512);
CPU_PACK_DIRECT(cpu_pack_direct_split_amx);
CPU_DOTS(cpu_dots_tiles_portable);
CPU_DOTS(cpu_dots_tiles_avx2);
CPU_DOTS(cpu_dots_tiles_avx512);
CPU_DOTS(cpu_dots_tiles_amx);
CPU_DOTS(cpu_dots_split_portable);
CPU_DOTS(cpu_dots_split_avx2);
CPU_DOTS(cpu_dots_split_avx512);
CPU_DOTS(cpu_dots_split_amx);
CPU_SUMS(cpu_sums_tiles_portable);
CPU_SUMS(cpu_sums_tiles_avx2);
CPU_SUMS(cpu_sums_tiles_avx512);
CPU_SUMS(cpu_sums_tiles_amx);
CPU_SUMS(cpu_sums_split_portable);
CPU_SUMS(cpu_sums_split_avx2);
CPU_SUMS(cpu_sums_split_avx512);
CPU_SUMS(cpu_sums_split_amx);
/* amx_tmpl.c: tiles, emulated in levels other than AMX; amx_stream_tmpl.c */
extern const cpu_kernels cpu_bf16_tiles_portable, cpu_bf16_tiles_avx2, cpu_bf16_tiles_avx512,
    cpu_bf16_tiles_amx;
/* amx_split_tmpl.c: the same for f16 */
extern const cpu_kernels cpu_f16_tiles_portable, cpu_f16_tiles_avx2, cpu_f16_tiles_avx512,
    cpu_f16_tiles_amx;
CPU_STREAM(cpu_stream_tiles_amx);
/* fwd_tmpl.c, one per level */
extern const cpu_kernels cpu_f32_portable, cpu_f32_avx2, cpu_f32_avx512;
extern const cpu_kernels cpu_bf16_dot; /* bf16_tmpl.c: AVX512-BF16 */

/* ---- levels.c ---- */

/* Kernels for a problem at this level or below. */
const cpu_kernels *cpu_kernels_for(const plan_problem *problem, int32_t level);

/* ---- live.c: which tiles and keys of a run count ---- */

enum { CPU_BLOCK_ROWS = 96, CPU_BLOCK_KEYS = 256, CPU_MOST_ROWS = 512 };

typedef enum cpu_cover { CPU_EMPTY, CPU_PARTIAL, CPU_FULL } cpu_cover;

typedef struct cpu_live {
    const plan_run *run;
    const mod_fn *mask;    /* NULL: none */
    const mask_runs *runs; /* NULL: tiles are proven while running */
    int is_imported;       /* runs say what is live; the mask only inside PARTIAL ones */
} cpu_live;

/* Rows [i0, i1) of heads [h0, h1), keys [j0, j1). */
typedef struct cpu_box {
    int64_t b, h0, h1, i0, i1, j0, j1;
} cpu_box;

/* EINVAL when the run's block mask was not prepared for these tiles. */
saccade_status cpu_live_of(const saccade_plan *plan, const plan_run *run, cpu_live *out,
                           saccade_error *err);
saccade_status cpu_prepare_mask(const saccade_block_mask *mask, saccade_error *err);
/* Kernels bound kv_len themselves. ranges: scratch, a pass_range per node of the mask. */
cpu_cover cpu_cover_of(const cpu_live *live, const cpu_box *box, pass_range *ranges);
/* out[0..n) for row i0 of head h0 in a PARTIAL tile, n <= EVAL_STRIP; state stands on it. */
void cpu_row_live(const cpu_live *live, eval_state *state, const cpu_box *row, uint8_t *out);
/* An estimate of the live tiles of a box, to start the longest work first. */
int64_t cpu_weight_of(const cpu_live *live, const cpu_box *box, pass_range *ranges);
/* order[0..n): indices by falling weight, equal weights by index. */
void cpu_order(const int64_t *weight, int32_t *order, int64_t n);

/* ---- geometry.c: tiles, splits and workspace as functions of integers ---- */

/* What an int gains from row to row, lo to hi; lo above hi: unknown. */
typedef struct cpu_slope {
    int8_t lo, hi;
} cpu_slope;

/* What a plan keeps. */
typedef struct cpu_state {
    const cpu_kernels *kernels;
    const eval_prog *score, *mask; /* NULL: none */
    jit_program *jit;              /* both compiled; NULL: the interpreter runs them */
    amx_code *code;                /* of streams; NULL: block by block */
    const mod_fn *limits;          /* the mask as one interval of keys per row, or NULL */
    uint32_t limit_nodes[2];       /* of limits: first live kv, and the one past the last */
    const cpu_slope *slopes;       /* of limits */
} cpu_state;

/* An item is one query block of one head, or all rows of a group's heads when they fit in one
 * block (decode); with splits, a range of its keys. Byte counts are multiples of 64. */
typedef struct cpu_geometry {
    int32_t q_ld;                 /* elements of a packed row of Q: D, rounded up */
    int32_t o_ld;                 /* Dv, rounded up to panels */
    int32_t item_heads;           /* 1, or the whole group */
    int32_t item_rows;            /* rows of each head in an item, at most */
    int32_t block_rows;           /* rows of a head from item to item */
    int64_t row_blocks;           /* items along the rows of a head */
    int64_t key_blocks;           /* of CPU_BLOCK_KEYS */
    int64_t splits, split_blocks; /* ranges of keys; blocks in each */
    int64_t head_items;           /* items of one (batch, kv head) */
    int64_t heads, wave;          /* (batch, kv head) pairs in all, and packed at a time */
    int is_shared;                /* K and V are packed for many items */
    int32_t own_blocks;           /* packed blocks of keys that a thread has of its own */
    int is_direct;                /* K and V are not packed at all */
    size_t k_bytes, v_bytes;      /* one packed block of keys */
    size_t thread_bytes, partial_bytes; /* per thread; per item when split */
    size_t packed_off, wild_off, weight_off, order_off, partial_off, thread_off, bytes;
} cpu_geometry;

cpu_geometry cpu_geometry_of(const saccade_plan *plan, const saccade_sizes *sizes);
/* One thread's memory, in the order of cpu_worker's pointers (item.h). */
typedef struct cpu_scratch {
    size_t q, s, o, stats, k, v, live, row, ranges, limits, values, score, mask, jit, flow;
    size_t own, own_wild;
    size_t bytes;
} cpu_scratch;
cpu_scratch cpu_scratch_of(const saccade_plan *plan, const cpu_geometry *g);

/* ---- row_limits.c: masks that are one interval of keys per row ---- */

/* Keys [first[r], past[r]) of each row of an item are live, and of any and of every row. */
typedef struct cpu_limits {
    int64_t *first, *past; /* [CPU_MOST_ROWS] */
    int64_t any_first, any_past, all_first, all_past;
    int32_t rising; /* rows from 0 on whose limits lie on lines that do not fall, .. */
    int is_stair;   /* .. but rise by one key a row, but where they are cut to [0, KV] */
} cpu_limits;

/* By node of limits; what a mod's limits gain from one row to the next lies between. NULL: out
 * of memory. */
const cpu_slope *cpu_find_slopes(const mod_fn *limits, arena *memory);
/* Limits of n rows of a head, first's and those after it, to rows r0 and on; values: scratch, a
 * double per node. */
void cpu_find_limits(const cpu_state *state, const plan_run *run, const eval_point *first,
                     int32_t n, int32_t kv_offset, double *values, cpu_limits *to, int32_t r0);
/* Fills any_ and all_ from rows [r0, r0 + n). */
void cpu_limit_rows(cpu_limits *limits, int32_t r0, int32_t n);
/* The keys [*from, *to) that a box's first and last rows span. */
void cpu_span_of_limits(const cpu_state *state, const plan_run *run, const cpu_box *box,
                        double *values, int64_t *from, int64_t *to);
cpu_cover cpu_cover_of_limits(const cpu_limits *limits, int64_t j0, int64_t j1);

/* ---- item.c, item_worker.c: one item ---- */

typedef struct cpu_job {
    const saccade_plan *plan;
    const plan_run *run;
    cpu_live live;
    cpu_geometry g;
    int64_t head0; /* first (batch, kv head) of the wave */
    int is_local;  /* threads pack the keys of the items that they run */
    char *memory;  /* the workspace */
} cpu_job;

/* Packed blocks of keys, one after the other; whether V has infinities or NaN. */
typedef struct cpu_packed {
    char *k, *v, *wild;
} cpu_packed;

typedef struct cpu_item {
    int64_t b, g; /* batch, kv head */
    int64_t head; /* of the wave */
    cpu_box box;  /* rows of each head; keys, not yet cut to kv_len */
    int64_t split;
} cpu_item;

cpu_item cpu_item_of(const cpu_job *job, int64_t index);
cpu_rows cpu_rows_of(const saccade_tensor *t, int64_t b, int64_t h);
/* par_fn over blocks of keys of the wave's heads: packs K and V ahead of the items. */
void cpu_pack_block(void *job, int64_t index, int thread);
/* par_fn over items of the wave in their order, and over blocks of rows with splits. */
void cpu_run_item(void *job, int64_t at, int thread);
void cpu_merge_item(void *job, int64_t at, int thread);
void cpu_begin_threads(cpu_job *job);

#endif
