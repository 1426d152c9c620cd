/* cuda.h: the CUDA back end inside its folder. Data flow:
 *
 *     problem -> tile -> text (cfg.cuh, mod.cuh, wgmma.cuh and kern/) -> cubin -> launch
 *
 * Driver and NVRTC are found at run time; nothing here needs a CUDA header to build. */
#ifndef SACCADE_CUDA_CUDA_H
#define SACCADE_CUDA_CUDA_H

#include "base/status.h"
#include "base/strings.h"
#include "cuda/kern/launch.h"
#include "kv/append.h"
#include "plan/plan.h"

/* ---- driver.c: libcuda by dlopen ---- */

typedef unsigned long long cu_ptr;
typedef struct cu_map { /* CUtensorMap */
    _Alignas(64) uint64_t opaque[16];
} cu_map;

typedef struct cu_launch_attribute { /* CUlaunchAttribute */
    int id, pad;
    union {
        char bytes[64];
        int values[3];
    } value;
} cu_launch_attribute;

typedef struct cu_launch { /* CUlaunchConfig */
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void *stream;
    cu_launch_attribute *attributes;
    unsigned n_attributes;
} cu_launch;

/* Each driver function used: result, name in the table, symbol, parameters. */
#define CU_DRIVER_FUNCTIONS(X)                                                                \
    X(init, "cuInit", (unsigned flags))                                                       \
    X(error_string, "cuGetErrorString", (int error, const char **text))                       \
    X(device_count, "cuDeviceGetCount", (int *count))                                         \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))      \
    X(primary_retain, "cuDevicePrimaryCtxRetain", (void **context, int device))               \
    X(primary_release, "cuDevicePrimaryCtxRelease_v2", (int device))                          \
    X(context_current, "cuCtxGetCurrent", (void **context))                                   \
    X(context_device, "cuCtxGetDevice", (int *device))                                        \
    X(context_push, "cuCtxPushCurrent_v2", (void *context))                                   \
    X(context_pop, "cuCtxPopCurrent_v2", (void **context))                                    \
    X(context_synchronize, "cuCtxSynchronize", (void))                                        \
    X(alloc, "cuMemAlloc_v2", (cu_ptr * memory, size_t bytes))                                \
    X(free, "cuMemFree_v2", (cu_ptr memory))                                                  \
    X(copy, "cuMemcpy", (cu_ptr to, cu_ptr from, size_t bytes))                               \
    X(copy_on, "cuMemcpyAsync", (cu_ptr to, cu_ptr from, size_t bytes, void *stream))         \
    X(fill32, "cuMemsetD32Async", (cu_ptr to, unsigned value, size_t count, void *stream))    \
    X(copy_on_device, "cuMemcpyDtoDAsync_v2",                                                 \
      (cu_ptr to, cu_ptr from, size_t bytes, void *stream))                                   \
    X(stream_create, "cuStreamCreateWithPriority",                                            \
      (void **stream, unsigned flags, int priority))                                          \
    X(stream_destroy, "cuStreamDestroy_v2", (void *stream))                                   \
    X(stream_wait, "cuStreamWaitEvent", (void *stream, void *event, unsigned flags))          \
    X(stream_synchronize, "cuStreamSynchronize", (void *stream))                              \
    X(stream_capturing, "cuStreamIsCapturing", (void *stream, int *state))                    \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                         \
    X(event_query, "cuEventQuery", (void *event))                                             \
    X(event_create, "cuEventCreate", (void **event, unsigned flags))                          \
    X(event_record, "cuEventRecord", (void *event, void *stream))                             \
    X(event_synchronize, "cuEventSynchronize", (void *event))                                 \
    X(event_elapsed, "cuEventElapsedTime", (float *ms, void *begin, void *end))               \
    X(event_destroy, "cuEventDestroy_v2", (void *event))                                      \
    X(library_load, "cuLibraryLoadData",                                                      \
      (void **library, const void *code, int *jit_options, void **jit_values, unsigned n_jit, \
       int *options, void **values, unsigned n))                                              \
    X(library_unload, "cuLibraryUnload", (void *library))                                     \
    X(library_kernel, "cuLibraryGetKernel", (void **kernel, void *library, const char *name)) \
    X(kernel_set, "cuKernelSetAttribute",                                                     \
      (int attribute, int value, void *kernel, int device))                                   \
    X(launch, "cuLaunchKernel",                                                               \
      (void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,     \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream,               \
       void **parameters, void **extra))                                                      \
    X(launch_ex, "cuLaunchKernelEx",                                                          \
      (const cu_launch *how, void *kernel, void **parameters, void **extra))                  \
    X(encode_map, "cuTensorMapEncodeTiled",                                                   \
      (cu_map * map, int type, unsigned rank, void *address, const uint64_t *sizes,           \
       const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,   \
       int swizzle, int promotion, int oob_fill))

typedef struct cu_driver {
#define X(name, symbol, parameters) int(*name) parameters;
    CU_DRIVER_FUNCTIONS(X)
#undef X
} cu_driver;

/* The driver, loaded and initialised on first use; EBACKEND says why there is none. */
saccade_status cu_get_driver(const cu_driver **out, saccade_error *err);
/* Turns a driver result into a status that names the call. */
saccade_status cu_check(const cu_driver *driver, int result, const char *call,
                        saccade_error *err);
/* Makes device's primary context current unless a context of that device already is; cu_leave
 * undoes it. The process holds one reference to each primary context it has entered, so that
 * memory allocated there outlives the call. */
enum { CU_DEVICES_MOST = 64 };
saccade_status cu_enter(const cu_driver *driver, int device, void **pushed, saccade_error *err);
void cu_leave(const cu_driver *driver, void *pushed);
/* The device of the current context, the first where none is. */
int cu_current_device(const cu_driver *driver);

typedef struct cu_device {
    int sm;   /* 90 for compute capability 9.0 */
    int n_sm; /* multiprocessors */
    int l2_bytes;
} cu_device;
saccade_status cu_get_device(const cu_driver *driver, int device, cu_device *out,
                             saccade_error *err);

/* ---- tile.c: pure functions of integers ---- */

/* head dims as products take them */
int cu_padded(int64_t dim);
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
    int stay;         /* sm_90a, two kernels: queries of a CTA of the second */
    int ctas[2];      /* and CTAs of each to a multiprocessor */
    int is_split;     /* sm_90a: loads and sums into global memory by warps of their own */
    int registers[3]; /* sm_90a: a thread of the consumers, of dQ's group, of those warps */
} cu_backward_tile;

/* A kernel and its tile. */
typedef struct cu_form {
    cu_family family;
    cu_tile tile; /* groups 0: no such kernel */
    cu_backward_tile backward;
    int teams; /* small tiles: of a CTA, each with a tile of its own */
} cu_form;

/* The rung'th choice for these head dims, best first; 0 past the end of the ladder. */
int cu_tile_choice(cu_family family, int D, int E, saccade_dtype dtype, int rung, cu_tile *out);
/* The rung'th choice for the decode program: groups are its warps, each with stages of its own.
 * bits: of an element of K and V. */
int cu_decode_choice(int D, int E, int bits, int column_words, int rung, cu_tile *out);
/* cu_decode_choice for codes with half as many warps: a multiprocessor holds two CTAs, each
 * with one span. */
int cu_decode_half_choice(int D, int E, int bits, int column_words, int rung, cu_tile *out);
/* Whether the choice of cu_decode_half_choice is the faster one for so many spans. */
int cu_decode_half_pays(int n_sm, int64_t spans);
/* Query heads that read one KV head. */
int cu_group(const saccade_sizes *sizes);
/* Where decode's pieces are fixed, it takes all runs of up to so many rows. */
enum { CU_SHORT_ROWS = 128 };
/* Where a row's bits are its own, up to so many packed rows of a KV head count as few. */
enum { CU_PART_ROWS = 64 };
/* Whether the decode program takes runs of these sizes. */
int cu_decode_applies(const saccade_sizes *sizes);
/* Fixed pieces of KV keys, at least 1. */
int64_t cu_decode_pieces(int64_t KV);
/* Spans of a run (see decode.cu). */
int64_t cu_decode_spans(const saccade_sizes *sizes);
/* The most spans that the decode program takes. */
int64_t cu_decode_spans_most(void);
/* The most rows of a head that the decode program takes. */
int64_t cu_decode_rows_most(const saccade_sizes *sizes);
/* Decode in one launch: CTAs of a cluster that has a span, or several, to itself, and CTAs in
 * all; 0: two launches with equal shares are better. blocks: of a span; is_light: little
 * arithmetic beside the products. */
int cu_decode_cluster(int n_sm, int spans, int blocks, int warps, int is_light, unsigned *grid);
int cu_decode_shared(const cu_tile *tile, int D, int E, int bits, int column_words,
                     int64_t spans);
/* The kernel of small tiles: groups 1, and stages pieces of K or V in flight. is_general: the
 * mask's text is no interval of a row. */
int cu_small_choice(int D, int E, int is_general, int rung, cu_tile *out);
/* cu_small_choice for two teams with longer pieces, for bf16 without a mod. */
int cu_pair_choice(int D, int E, int rung, cu_tile *out);
/* Tiles of Q that a team has room for. */
int cu_small_buffers(int D, int E);
int cu_small_shared(const cu_tile *tile, int teams, int D, int E, int column_words);
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
/* Tiles whose rows have bits of their own: keys of a part, whole blocks, by the larger head
 * dim; the tile that few rows take beside `main`, whose blocks it has. */
int cu_part_keys(const cu_tile *main, int dim);
cu_tile cu_part_tile(const cu_tile *main, int D, int E, int column_words);
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
/* dynamic shared memory of a CTA, bytes */
int cu_tile_shared(cu_family family, const cu_tile *tile, int D, int E);

/* ---- emit.c, emit_products.c: text of the generated headers ---- */

typedef enum cu_score_kind { CU_SCORE_NONE, CU_SCORE_AFFINE, CU_SCORE_GENERAL } cu_score_kind;
typedef enum cu_mask_kind { CU_MASK_NONE, CU_MASK_INTERVAL, CU_MASK_GENERAL } cu_mask_kind;

/* Gradients of captures: what backward's tiles make of a read's terms (emit_terms.c). */
typedef enum cu_term {
    CU_TERM_NONE,
    CU_TERM_DIAGONAL,
    CU_TERM_ELEMENT,
    CU_TERM_SCALE,
    CU_TERM_LINE
} cu_term;

typedef struct cu_mod_text {
    cu_score_kind score;
    cu_mask_kind mask;
    int n_captures;    /* score's, then mask's */
    int is_bounded;    /* scores stay within +-35 whatever the data */
    int column_words;  /* words of mask_column: what a mask needs of each key */
    int has_sure_keys; /* a general mask has mask_sure: below it every key is live */
    int has_row_slope; /* backward: the slope does not vary with the key or the score */
    int is_head_slope; /* backward: it varies with the head alone, and is no constant 1 or 0 */
    unsigned char term[8]; /* backward: cu_term of each read whose gradient is wanted */
    int n_terms;           /* .. that is not CU_TERM_NONE */
    double slope_most; /* backward: no larger derivative by the score; INFINITY: not known */
} cu_mod_text;

/* mod.cuh: the user's score and mask as device functions. */
saccade_status cu_emit_mod(const plan_problem *problem, strbuf *out, cu_mod_text *facts,
                           saccade_error *err);
/* cu_emit_mod for backward, with the score's derivative; its graph lives in scratch. */
saccade_status cu_emit_backward_mod(const plan_problem *problem, arena *scratch, strbuf *out,
                                    cu_mod_text *facts, saccade_error *err);
/* wgmma.cuh: the two products at the widths of an instance. */
void cu_emit_products(const cu_tile *tile, int E, int is_f16, strbuf *out);

/* ---- compile.c: NVRTC and the cache ---- */

typedef struct cu_source {
    const char *name, *text;
} cu_source;

/* What ptxas said of a program. */
typedef struct cu_report {
    int registers, spill_bytes;
    int is_serialised; /* wgmma waits put in by ptxas, or setmaxnreg ignored */
    int from_cache;
    float seconds; /* to compile */
} cu_report;

typedef struct cu_image {
    void *code; /* cubin, or PTX for compute_ targets; free() */
    size_t bytes;
    cu_report report;
} cu_image;

/* Compiles kern/<entry> with the generated headers for arch ("sm_90a", "compute_80"), or takes
 * it from the cache. */
saccade_status cu_compile(const char *entry, const cu_source *generated, int n_generated,
                          const char *arch, cu_image *out, saccade_error *err);

/* ---- mask_upload.c: block masks on devices ---- */

typedef struct cu_runs {
    cu_ptr memory; /* one allocation: runs, run_start, order */
    cu_ptr runs, run_start, order;
    int keys, mask_b, mask_h, n_qblk, n_tiles; /* keys: of a block */
    int n_first;      /* of n_tiles: those that run before plan_run.between */
    int64_t n_blocks; /* of all lists; 0 where lists may change */
    int step_heads;   /* query heads that a step of mask_h passes */
    /* Lists by batch, head and row, 1 where all have the same, and blocks that their runs
     * count; bits: room for a selection's, of masks that are selected. */
    int list_batches, list_heads, list_columns;
    cu_ptr bits;
} cu_runs;

/* Device copy for these tiles, made on first use (may allocate; prepare does it). order covers
 * B x H of the sizes given. group: so many heads share a row, whose blocks are live where one
 * head's are (mask_h then steps by groups). group 0: transposed, runs of blocks of rows for
 * each block of keys; order then covers B x Hkv. A plan with rows of its own has copies of its
 * own, of those rows. */
saccade_status cu_runs_make(const cu_driver *driver, int device, const saccade_block_mask *mask,
                            int rows, int keys, int group, const saccade_sizes *sizes,
                            const saccade_plan *plan, saccade_error *err);
/* Memory in the current context that begins with a copy of the host's; 0 where this fails. */
saccade_status cu_alloc_filled(const cu_driver *driver, size_t bytes, const void *host,
                               size_t filled, cu_ptr *out, saccade_error *err);
/* Where rows of blocks of a run's head 0 begin: block masks are of all heads. */
cu_ptr cu_runs_start(const cu_runs *runs, const plan_problem *problem);
/* EINVAL where a plan's heads do not begin with a group of the mask's. */
saccade_status cu_runs_check(const plan_problem *problem, const saccade_block_mask *mask,
                             saccade_error *err);
/* The copies on a device of a mask that is selected, for select_launch.c: fills at most `most`
 * from number `first` on and returns how many there are. */
typedef struct cu_copy {
    const cu_runs *runs;
    int rows, keys, is_transposed;
} cu_copy;
int cu_runs_copies(int device, const saccade_block_mask *mask, int first, int most,
                   cu_copy *out);
/* The copy made before, or NULL. */
const cu_runs *cu_runs_find(int device, const saccade_block_mask *mask, int rows, int keys,
                            int group, const saccade_sizes *sizes, const saccade_plan *plan);

/* The work order of tiles of these runs: tiles [B x H x r->rows] of the sizes given. With rows
 * whose keys partly come from elsewhere, *n_first tiles that need none of those come first. */
saccade_status cu_order_tiles(const mask_runs *r, const saccade_sizes *s, size_t l2_bytes,
                              const plan_rows *rows, int32_t *order, int *n_first,
                              saccade_error *err);

/* ---- row_pieces.c, mask_pieces.c: what small tiles walk, and limits of rows ---- */

enum { PIECE_UNIT = 16 /* pieces begin at multiples of so many keys */ };

/* The pieces of `keys` keys, a multiple of the runs' block_kv, that cover the live blocks of a
 * row of blocks and do not overlap, as cu_work has them. Returns their number; to may be
 * NULL. */
int cu_cut_row(const mask_runs *r, int64_t row, int keys, int *to);

/* On a device: cu_work of every CTA and the pieces it points into. */
typedef struct cu_pieces {
    cu_ptr memory, work, pieces;
    int n_first; /* of the work: tiles before plan_run.between */
} cu_pieces;

/* Makes both for a plan where they serve it: pieces of so many keys, and limits of rows
 * where the mask is evaluated and they are known. May allocate; prepare does it. */
saccade_status cu_pieces_make(const cu_driver *driver, int device,
                              const saccade_block_mask *mask, int keys,
                              const saccade_sizes *sizes, const saccade_plan *plan,
                              saccade_error *err);
saccade_status cu_limits_make(const cu_driver *driver, int device,
                              const saccade_block_mask *mask, const saccade_plan *plan,
                              saccade_error *err);
/* What was made before; NULL, or no limits, where nothing was. Both count heads from the mask's
 * first on: they do not serve a plan of later heads where the mask has several. */
const cu_pieces *cu_pieces_find(int device, const saccade_block_mask *mask, int keys,
                                const saccade_sizes *sizes, const saccade_plan *plan);
cu_limits cu_limits_find(int device, const saccade_block_mask *mask, const saccade_plan *plan);

/* ---- head_groups.c ---- */

/* Runs of r->H / group heads; free with cu_grouped_free, after a failure too. */
typedef struct cu_grouped {
    mask_runs r;
    void *rows;
    saccade_run *runs;
} cu_grouped;
saccade_status cu_group_heads(const mask_runs *r, int64_t group, cu_grouped *out,
                              saccade_error *err);
void cu_grouped_free(cu_grouped *g);

/* ---- programs.c: what a plan compiles and loads ---- */

/* What a program does; choose_kernel.c picks a run's program, launch.c starts it. */
typedef enum cu_operation {
    CU_OP_DECODE,   /* few queries, heads of a group together */
    CU_OP_SMALL,    /* rows that see few keys, in tiles of one head */
    CU_OP_PARTS,    /* few queries, heads together, with the bits that they have among many */
    CU_OP_FORWARD,  /* any number of queries, in tiles of one head */
    CU_OP_KEYS,     /* keys brought to where another program of the run reads them */
    CU_OP_AGAIN,    /* rows that another program of the run could not finish */
    CU_OP_BACKWARD, /* a step of a backward run: backward_launch.c */
    CU_OPERATIONS
} cu_operation;

/* The rows of cu_program_kinds; those of forward in the order in which a run tries them. */
typedef enum cu_program {
    CU_DECODE_HALF,  /* few queries on codes, two CTAs to a multiprocessor (sm_90a) */
    CU_DECODE,       /* few queries (sm_90a) */
    CU_PAIR,         /* so few rows that a multiprocessor has two tiles at a time (sm_90a) */
    CU_SMALL,        /* rows that see few keys (sm_90a) */
    CU_PARTS,        /* few queries where a row's bits are its own (sm_90a) */
    CU_ONE_PIECE,    /* any number of queries, after CU_COLLECT (sm_90a) */
    CU_MAIN,         /* any number of queries */
    CU_EXACT,        /* CU_MAIN with exact offsets and row maxima */
    CU_UNALIGNED,    /* rows that tensor copies do not take (sm_90a) */
    CU_CAREFUL,      /* rows to be made again */
    CU_COLLECT,      /* keys of small pages into one piece (sm_90a) */
    CU_BWD_TILES,    /* dK, dV and sums of dQ by tiles of keys (sm_90a) */
    CU_BWD_SHORT,    /* CU_BWD_TILES by smaller tiles, for runs of few (sm_90a) */
    CU_BWD_FEW,      /* without sums of dQ, where a mask leaves rows few keys (sm_90a) */
    CU_BWD_WIDE,     /* heads wider than 128, without sums of dQ (sm_90a) */
    CU_BWD_F32,      /* f32, head dims to 128, without sums of dQ (sm_90a) */
    CU_BWD_SPLIT,    /* Q, K, V and dO in bf16 numbers for CU_BWD_F32 */
    CU_BWD_PLAIN,    /* dK and dV, then dQ, by CTAs that own them */
    CU_BWD_PREPARE,  /* what every row brings, and bounds of K and V */
    CU_BWD_FINISH,   /* dQ from its sums */
    CU_BWD_SINKS,    /* gradients of sinks */
    CU_BWD_CAPTURES, /* gradients of captures */
    CU_BWD_PAGES,    /* keys in chunks into one piece, and sums over what chunks share */
    CU_PROGRAMS
} cu_program;

typedef enum cu_maxima { CU_ANY_RUN, CU_WITHOUT_MAXIMA, CU_WITH_MAXIMA } cu_maxima;

typedef struct cu_state cu_state;
typedef struct cu_program_kind cu_program_kind;

/* The generated headers of an instance: cfg.cuh, wgmma.cuh, and mod.cuh, which is borrowed. */
typedef struct cu_headers {
    strbuf config, products;
    const char *mod;
} cu_headers;

/* Everything that tells one program from another. A program is one file of kern/ with the
 * constants of its form; a plan holds those that choose() finds a form for. */
struct cu_program_kind {
    const char *name; /* as explain prints it */
    cu_operation operation;
    const char *kernel[CU_FAMILIES]; /* by the form's family */
    const char *file;                /* in kern/, without .cu; NULL: the kernel's name */
    const char *other;               /* a second kernel in that file, or NULL */
    /* The rung'th form, best first; 0 past the last one. */
    int (*choose)(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
    void (*write)(const cu_state *s, const plan_problem *p, const cu_program_kind *kind,
                  const cu_form *form, cu_headers *out);
    int follows_main;  /* compiled for CU_MAIN's tile, and again when that changes */
    int follows_tiles; /* compiled once it is known whether the plan has CU_BWD_TILES */
    int is_optional; /* left out where every form spills much or waits: others take its runs */
    int spill_most;  /* bytes up to which a form that spills is taken before a smaller one */
    int may_be_lazy, has_maxima, is_packed; /* the constants CFG_LAZY, CFG_ROWMAX, CFG_PACKED */
    int has_one_span;  /* decode: a CTA takes one, CFG_ONE_SPAN */
    int has_one_piece; /* keys lie in one piece, whatever the problem says: CFG_CHUNKS is 0 */
    int wants_alignment;                    /* where CU_MAIN copies by TMA */
    cu_maxima runs;                         /* which runs it takes */
    /* Dynamic shared memory to ask the driver for, bytes; NULL: none. */
    int (*shared)(const cu_state *s, const plan_problem *p, const cu_form *form);
    int other_has_shared; /* the second kernel asks for as much */
};

extern const cu_program_kind cu_program_kinds[CU_PROGRAMS];

/* A program of a plan. */
typedef struct cu_loaded {
    cu_form form; /* groups 0: the plan has no such program */
    int rung;     /* forms before it in choose's order */
    cu_image image;
    void *library, *kernel, *other;
} cu_loaded;

struct cu_state {
    cu_family family; /* of CU_MAIN */
    int given_up;     /* every tile of CU_MAIN spills or waits: the first is kept */
    int is_lazy;      /* offsets of CU_MAIN are raised after the fact */
    cu_mod_text facts, backward_facts;
    char arch[16];
    char *mod_text, *backward_text; /* backward_text: NULL where no gradient is wanted */
    cu_loaded programs[CU_PROGRAMS];
    _Atomic uint64_t ready; /* bit per device: attributes set */
    int is_present;         /* there is a device for arch */
    cu_ptr row_shift;       /* on row_device: where rows stand, see row_parts.c; 0: none */
    int row_device, has_rows, is_ragged;
    int part_dim;         /* batch_invariant for all runs: the larger head dim; else 0 */
    int has_fixed_pieces; /* of keys in decode: batch_invariant for short runs */
    cu_device device; /* what the plan was tuned for */
    /* SACCADE_CUDA_TILES: 's' small ones wherever they can be, 'p' these by two teams where
     * they can be, 'l' none, or 0 */
    char tiles;
};

saccade_status cu_load_programs(cu_state *s, const cu_driver *driver, saccade_error *err);
void cu_free_programs(cu_state *s);

/* ---- row_parts.c: plans with some rows of a sequence ---- */

/* Whose rows alone a mask's copy is of: a plan's number, or 0 for all rows. */
uint64_t cu_rows_owner(const saccade_plan *plan);
/* Rows that are here. */
int64_t cu_row_count(const plan_rows *rows);
/* With Q the rows that are here; without plan->rows the same. */
saccade_sizes cu_local_sizes(const saccade_plan *plan, const saccade_sizes *sizes);
saccade_status cu_local_run(const saccade_plan *plan, const plan_run *run, plan_run *out,
                            saccade_error *err);
/* Makes the table of where rows stand; allocates. */
saccade_status cu_place_rows(const saccade_plan *plan, const cu_driver *driver, int device,
                             saccade_error *err);
void cu_free_rows(cu_state *s);
/* Runs of the rows that are here; free with cu_selected_free, after a failure too. unit: rows
 * of a block, which divides where parts begin. */
typedef struct cu_selected {
    mask_runs r;
    int64_t *begin, *live;
    saccade_run *runs;
} cu_selected;
saccade_status cu_select_rows(const mask_runs *r, const plan_rows *rows, int unit,
                              int is_transposed, cu_selected *out, saccade_error *err);
void cu_selected_free(cu_selected *s);
/* plan_solver.row_tile */
int64_t cu_row_tile(const saccade_plan *plan, const saccade_sizes *sizes);

/* ---- program_text.c ---- */

/* A program's constant, CFG_<name> in its text; the header of all of them. */
typedef struct cu_constant {
    const char *name;
    int value;
} cu_constant;
void cu_put_constants(const cu_constant *rows, size_t n, strbuf *out);
/* The generated headers of a forward program: cu_program_kind.write. */
void cu_write_forward(const cu_state *s, const plan_problem *p, const cu_program_kind *kind,
                      const cu_form *form, cu_headers *out);
/* Whether limits of rows between two others lie between theirs. */
int cu_is_monotone(const pass_limits *limits);
/* CFG_SINKS, by the dtype of the sinks (kern/sinks.cuh). */
int cu_sinks_code(const plan_problem *p);
/* CFG_CODES, by the dtype of quantised K and V (kern/codes.cuh); 0: they are floats. */
int cu_codes(const plan_problem *p);
/* Bits of an element of K and V. */
int cu_key_bits(const plan_problem *p);
/* Whether decode copies codes as tensors: rows of 128 bytes, keys in one piece. */
int cu_copies_codes_by_boxes(const cu_state *s, const plan_problem *p);
/* One program in one form, compiled for the state's architecture or taken from the cache. */
saccade_status cu_compile_instance(const cu_state *s, const plan_problem *p, cu_program which,
                                   const cu_form *form, cu_image *out, saccade_error *err);

/* ---- program_compile.c ---- */

/* Compiles every program of the plan, side by side; a program that spills gives way to the next
 * smaller form as far as there is one. needs: the texts of the mods. */
saccade_status cu_compile_programs(cu_state *s, const plan_problem *p, saccade_error *err);
/* cu_compile_programs for backward's programs alone. */
saccade_status cu_compile_backward(cu_state *s, const plan_problem *p, saccade_error *err);

/* ---- one_piece.c ---- */

enum { CU_COLLECT_BYTES = 256 << 20 }; /* of keys in one piece, at most */
/* Whether forward's keys may be brought into one piece first. */
int cu_collects(const plan_problem *p, const cu_tile *tile);

/* ---- run_space.c ---- */

int cu_shared_bytes(const cu_form *form, const cu_mod_text *facts, const plan_problem *problem);
size_t cu_workspace(const saccade_plan *plan, const saccade_sizes *sizes);

/* ---- choose_kernel.c ---- */

saccade_status cu_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                          saccade_error *err);

/* ---- launch.c ---- */

saccade_status cu_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err);

/* ---- measure.c ---- */

/* The loop that measures the tensor cores. */
saccade_status cu_compile_peak(const char *arch, cu_image *out, saccade_error *err);

/* ---- explain.c ---- */

saccade_status cu_explain(const saccade_plan *plan, strbuf *out, saccade_error *err);

/* ---- small_kernels.c: kernels that no plan owns ---- */

enum { CU_SMALL_KERNELS = 4 };
typedef struct cu_small {
    const char *file, *what;             /* of kern/; whose they are, for messages */
    const char *names[CU_SMALL_KERNELS]; /* NULL after the last */
} cu_small;
/* A launch of one of them. */
typedef struct cu_small_run {
    int kernel;       /* of the file's */
    long long blocks; /* along x */
    int sides;        /* along y, 0: 1 */
    int threads;      /* of a block */
    void *parameters; /* the kernel's one */
} cu_small_run;
/* Compiled at the first call for an architecture. The device's context is current. */
saccade_status cu_small_find(const cu_driver *driver, const cu_small *which, int device,
                             void *const **out, saccade_error *err);
/* cu_small_find from any context, before runs. */
saccade_status cu_small_prepare(const cu_driver *driver, const cu_small *which, int device,
                                saccade_error *err);
/* From any context; compiles what is not. */
saccade_status cu_small_launch(const cu_small *which, const cu_small_run *run, int device,
                               void *stream, saccade_error *err);

/* ---- append_launch.c: new keys into pools ---- */

/* Compiled at the first call for a GPU's architecture, and kept. */
saccade_status cu_append_prepare(int device, saccade_error *err);
saccade_status cu_append(const kv_append *a, int device, void *stream, saccade_error *err);

/* ---- head_max_launch.c: the largest score of each head ---- */

/* Compiled for the GPU of the current context, or the first, at the first call. */
saccade_status cu_head_max_prepare(const cu_driver *driver, saccade_error *err);
saccade_status cu_head_max(const saccade_plan *plan, const plan_run *run, saccade_error *err);

/* ---- prefix_launch.c: batches that share keys ---- */

extern const struct plan_prefix_steps cu_prefix_steps;

/* ---- select_launch.c: blocks selected on a device ---- */

saccade_status cu_select_prepare(const cu_driver *driver, int device, saccade_error *err);
/* Makes the lists of the mask's copies on the device that the tensor lies on. */
saccade_status cu_select_blocks(const saccade_block_mask *mask, const saccade_tensor *blocks,
                                void *stream, saccade_error *err);

#endif
