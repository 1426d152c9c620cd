/* saccade.h: exact, fused attention with your own masks and scores.
 *
 *     out = softmax(mask(score(scale * Q K^T))) V        never holding the Q x KV matrix
 *
 * Steps: parse a text, bind its captures, (make a block mask,) make a plan, run it.
 * Objects are immutable once made and may be shared by threads, but for what is said to change
 * one (a block mask's update, select and prepare; saccade_kv.h); create gives ownership to the
 * caller, destroy(NULL) is fine, and nothing is set or kept when a call fails. Every
 * fallible call returns a status, which says whether it failed; then, if `err` is not NULL, it
 * fills it. A call that succeeds leaves *err as it was. Language reference: docs/language.md.
 *
 * Letters: B batch, H query heads, Hkv key/value heads (H % Hkv == 0), Q queries, KV keys,
 * D dim of query and key, Dv dim of value and output.
 *
 * How it may grow. A struct whose first member is `size` may get members at its end: its _init
 * function writes that size, as the caller was compiled, and the defaults (0 but where a
 * comment says otherwise). The library takes a smaller struct, whose missing members have their
 * defaults, and refuses a larger one unless what it does not know is all 0. Such structs are
 * passed by pointer and lie in no arrays. All others are frozen. What is optional is a pointer,
 * NULL when absent, and what is not wanted is not computed.
 *
 * Until 1.0 a new minor version may break what was compiled before: SACCADE_ABI then counts up,
 * and the shared library's name is libsaccade.so.0.MINOR. A patch version breaks nothing. */
#ifndef SACCADE_H
#define SACCADE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SACCADE_VERSION "0.2.0"
#define SACCADE_VERSION_MAJOR 0
#define SACCADE_VERSION_MINOR 2
#define SACCADE_VERSION_PATCH 0
#define SACCADE_ABI 2

#if defined(_WIN32) || !defined(__GNUC__)
#define SACCADE_API
#else
#define SACCADE_API __attribute__((visibility("default")))
#endif

/* ---- status ---------------------------------------------------------------------------- */

typedef enum saccade_status {
    SACCADE_OK = 0,
    SACCADE_EINVAL = 10, /* an argument is wrong: shape, stride, dtype, range, name */
    SACCADE_EPARSE = 20, /* text that is not in the language */
    SACCADE_ETYPE = 21,  /* text whose types do not fit */
    SACCADE_ELIMIT = 22, /* text, nesting, nodes or evaluation past the documented limit */
    SACCADE_EVALUE = 23, /* a captured value outside int32, an index outside its tensor */
    SACCADE_ENOMEM = 30,
    SACCADE_EBACKEND = 40, /* back end, driver or library not there */
    SACCADE_EIO = 50,      /* a file cannot be read or written */
    SACCADE_ESTOPPED = 60, /* a progress function of the caller's ended the work */
    SACCADE_EPEER = 70,    /* another rank failed or did not answer in time */
    SACCADE_EINTERNAL = 90 /* our mistake; please report the message */
} saccade_status;

/* One line: what, got, expected. Of the last call that was given it and failed. */
typedef struct saccade_error {
    saccade_status status;
    int32_t line, column; /* place in a mod's text, from 1; 0 when not about a text */
    char where[64];       /* argument, capture, file or function */
    char message[448];
    char excerpt[2][96]; /* the text around the place, 80 columns; a caret line */
} saccade_error;

SACCADE_API const char *saccade_status_name(saccade_status status);
SACCADE_API const char *saccade_version(void);
/* What the library was built with: "threads, zydis, no png, levels portable avx2 avx512". */
SACCADE_API const char *saccade_build(void);
SACCADE_API int32_t saccade_abi(void); /* SACCADE_ABI of the library that runs */

/* Where members of this header's structs lie: struct, member (NULL: the struct itself), offset
 * and bytes. For other languages' mirrors of them. NULL past the end. */
typedef struct saccade_layout_entry {
    const char *record, *member;
    int32_t offset, bytes;
} saccade_layout_entry;
SACCADE_API const saccade_layout_entry *saccade_layout(int32_t i);

/* The scale of a problem that leaves it to the library; a constant, which traps nothing. */
#if defined(__GNUC__)
#define SACCADE_NAN __builtin_nan("")
#else
#define SACCADE_NAN (0.0 / 0.0)
#endif

/* Zeroes a struct that may grow and writes its size; called by the _init functions. */
static inline void saccade_record_init(void *record, size_t size)
{
    unsigned char *bytes = (unsigned char *)record;
    for (size_t i = 0; i < size; i++)
        bytes[i] = 0;
    *(size_t *)record = size;
}

/* ---- tensors --------------------------------------------------------------------------- */

typedef enum saccade_dtype {
    SACCADE_NONE = 0,
    SACCADE_BOOL = 1, /* one byte, 0 or 1 */
    SACCADE_U8,
    SACCADE_I8,
    SACCADE_U16,
    SACCADE_I16,
    SACCADE_U32,
    SACCADE_I32,
    SACCADE_U64,
    SACCADE_I64,
    SACCADE_F16 = 20,
    SACCADE_BF16,
    SACCADE_F32,
    SACCADE_F64,
    SACCADE_E4M3 = 30,
    SACCADE_E5M2, /* fp8 of OCP; e4m3 ("fn") has no infinity, NaN is 0x7f */
    SACCADE_I4    /* two's complement, two to a byte, the low half first; strides count elements
                * and are even but the last dimension's */
} saccade_dtype;

SACCADE_API const char *saccade_dtype_name(saccade_dtype dtype); /* "f32", "bf16", ... */
SACCADE_API size_t saccade_dtype_bytes(saccade_dtype dtype);     /* i4: 1, of two elements */

typedef enum saccade_device_kind { SACCADE_CPU = 0, SACCADE_CUDA = 1 } saccade_device_kind;
typedef struct saccade_device {
    saccade_device_kind kind;
    int32_t index;
} saccade_device;

enum { SACCADE_MAX_RANK = 8 };

/* A borrowed view. Strides count elements; 0 broadcasts. The address of data is a multiple of
 * an element's bytes, else EINVAL. Q, K, V, O are [B, H, N, D] with a last dimension of
 * stride 1; any order of the others is told by the strides. */
typedef struct saccade_tensor {
    void *data;
    saccade_dtype dtype;
    saccade_device device;
    int32_t rank;
    int64_t shape[SACCADE_MAX_RANK];
    int64_t stride[SACCADE_MAX_RANK];
} saccade_tensor;

/* Row-major view of `data` on the CPU: rank numbers of shape, which is not NULL where there are
 * any. A rank past SACCADE_MAX_RANK is refused by what is given the tensor. */
SACCADE_API saccade_tensor saccade_tensor_of(void *data, saccade_dtype dtype, int32_t rank,
                                             const int64_t *shape);

/* ---- sizes and positions ----------------------------------------------------------------- */

typedef struct saccade_sizes {
    int64_t B, H, Hkv, Q, KV, D, Dv;
} saccade_sizes;

/* Where rows and keys stand: q = row + q_offset[b], kv = key + kv_offset[b]; keys at and past
 * kv_len[b] (counted in keys of K, not in positions) are dead. Each is NULL (0, 0, KV) or an
 * int32 tensor of rank 0 or 1 ([B]); for CUDA runs they lie on the device, but a rank-0 tensor
 * may lie on the host. Offsets are from -2^30 to 2^30. On CUDA rows and live keys stay from
 * -2^29 to 2^30 - 1 where the mask is one interval of keys a row (explain says so): a run whose
 * host offsets lead out is refused, offsets on the device must not. */
typedef struct saccade_positions {
    size_t size;
    const saccade_tensor *q_offset, *kv_offset, *kv_len;
} saccade_positions;
static inline void saccade_positions_init(saccade_positions *positions)
{
    saccade_record_init(positions, sizeof *positions);
}

/* Sequences of unequal lengths in one run of a plan whose problem is ragged. Sequence b has
 * rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q [T, H, D], out [T, H, Dv], lse and
 * row_max [T, H]; likewise keys of k and v, [T, Hkv, D] and [T, Hkv, Dv], by cu_seqlens_kv.
 * Each is an int32 tensor [B + 1] where q, k and v lie; where one is NULL those tensors are
 * [B, H, N, D] as elsewhere. In texts q, kv, Q and KV are those of the sequence, b is its
 * number and B how many there are. Lengths of 0 are fine; rows that belong to no sequence
 * are neither read nor written. A block mask is one of B (or 1) batches, max_q x max_kv,
 * whose text names neither Q nor KV. */
typedef struct saccade_ragged {
    size_t size;
    const saccade_tensor *cu_seqlens_q, *cu_seqlens_kv;
    int64_t max_q, max_kv; /* no sequence is longer; 0: found on the host. CUDA needs them, and
                            * leaves out rows and keys past them */
    int32_t align_end;     /* 1: the last row of a sequence stands where its last live key
                            * does: q_offset[b] = kv_offset[b] + kv_len[b] - Q[b], and no
                            * q_offset is given. 0: as positions say */
} saccade_ragged;
static inline void saccade_ragged_init(saccade_ragged *ragged)
{
    saccade_record_init(ragged, sizeof *ragged);
}

/* ---- mods: masks and scores as text ------------------------------------------------------ */

typedef enum saccade_kind {
    SACCADE_MASK = 1,
    SACCADE_SCORE = 2,
    SACCADE_WEIGHT = 3 /* of softmax: dropout(rate) */
} saccade_kind;
typedef struct saccade_mod saccade_mod;

/* A free name of a mod. dtype is SACCADE_NONE until bound. */
typedef struct saccade_capture {
    const char *name; /* borrowed from the mod */
    saccade_dtype dtype;
    int32_t rank; /* 0: scalar */
} saccade_capture;

/* A name and the tensor it stands for; rank 0 for scalars. */
typedef struct saccade_binding {
    const char *name;
    saccade_tensor tensor;
} saccade_binding;

/* Text to generic mod. `text` need not end in 0. Errors: EPARSE, ETYPE, ELIMIT with
 * line:column. */
SACCADE_API saccade_status saccade_mod_parse(saccade_kind kind, const char *text, size_t bytes,
                                             saccade_mod **out, saccade_error *err);
/* Types a generic mod: every capture gets a dtype (rank must be the one its text uses). Extra
 * names are an error. f64 is read as f32; integers of any width must hold int32 values. */
SACCADE_API saccade_status saccade_mod_bind(const saccade_mod *mod,
                                            const saccade_capture *captures, int32_t n_captures,
                                            saccade_mod **out, saccade_error *err);
/* One score mod that applies `first`, then `then`. Same kinds for both (mask: `and`). Both
 * generic; captures of one name are one capture. */
SACCADE_API saccade_status saccade_mod_chain(const saccade_mod *first, const saccade_mod *then,
                                             saccade_mod **out, saccade_error *err);
/* For NULL they give 0, no captures and no text. */
SACCADE_API saccade_kind saccade_mod_kind(const saccade_mod *mod);
SACCADE_API int32_t saccade_mod_capture_count(const saccade_mod *mod);
SACCADE_API saccade_capture saccade_mod_capture(const saccade_mod *mod, int32_t i);
/* Prints text that parses back to the same mod. Writes at most `bytes` with the final 0 and
 * returns the length the whole text needs, without it. */
SACCADE_API size_t saccade_mod_print(const saccade_mod *mod, char *text, size_t bytes);
SACCADE_API void saccade_mod_destroy(saccade_mod *mod);

/* Reads every index of a bound mod over all positions, as the float64 oracle does (what && ||
 * ?: guard is not read), and returns EVALUE with line:column for the first one outside its
 * tensor. Kernels clamp such an index. Looks at every position of up to `budget` (0 and
 * less: 2^26), else at an even sample of so many (at most 2^33). Conditions that hang on the
 * score guard nothing, and indices that do are those of a score of 0. A read that the text has
 * twice is shown where it comes first. */
SACCADE_API saccade_status saccade_mod_check(const saccade_mod *mod, const saccade_sizes *sizes,
                                             const saccade_positions *positions,
                                             const saccade_binding *bindings,
                                             int32_t n_bindings, int64_t budget,
                                             saccade_error *err);

/* *sums: 1 where gradients of these captures of a bound score add up terms of several keys of a
 * row, as of slope[h] * (kv - q) and of tables by buckets of distances, else 0, as of
 * bias[q, kv] and x[kv], where each read of the text adds one term of a row. Of such sums in
 * f16 and bf16 what rounding takes from out counts as often as there are keys: they want
 * saccade_problem.out_dtype f32, with d_out_dtype. Captures that nothing reads, and integers,
 * have none. */
SACCADE_API saccade_status saccade_mod_sums_keys(const saccade_mod *score,
                                                 const char *const *captures,
                                                 int32_t n_captures, int32_t *sums,
                                                 saccade_error *err);

/* The named variants: "causal", its signature "causal()", its comment with formula and source.
 * NULL past the end. */
typedef struct saccade_prelude_entry {
    const char *name, *signature, *comment;
    saccade_kind kind;
} saccade_prelude_entry;
SACCADE_API const saccade_prelude_entry *saccade_prelude(int32_t i);

/* ---- context ----------------------------------------------------------------------------- */

typedef struct saccade_context saccade_context;
typedef struct saccade_context_options {
    size_t size;
    int32_t threads;   /* 0: all the process may use; -n: n, but no more than the CPUs that it
                        * may use */
    const char *level; /* the highest to use: "portable", "avx2", "avx512" or "amx", not above
                        * the machine's nor the environment's SACCADE_LEVEL; NULL: the lower of
                        * these two */
} saccade_context_options;
static inline void saccade_context_options_init(saccade_context_options *options)
{
    saccade_record_init(options, sizeof *options);
}

/* options may be NULL: all defaults. EINVAL: threads past 4096, a level that is none. EBACKEND:
 * a level that this machine, or SACCADE_LEVEL, does not reach. What is made with a context
 * keeps none of it: a context may be destroyed before its plans. */
SACCADE_API saccade_status saccade_context_create(const saccade_context_options *options,
                                                  saccade_context **out, saccade_error *err);
SACCADE_API void saccade_context_destroy(saccade_context *context);

/* ---- block masks ------------------------------------------------------------------------- */

typedef struct saccade_block_mask saccade_block_mask;

enum { SACCADE_EVALUATE_NONE = -1 };

/* Told the growing fraction that is done, on the thread that made the call, some 20 times a
 * second and with 1 at the end. An answer other than 0 ends the call with ESTOPPED. */
typedef int (*saccade_progress)(void *user, double fraction);

typedef struct saccade_block_mask_options {
    size_t size;
    int32_t block_q, block_kv; /* for pictures, statistics and export; 0: 128 */
    int64_t evaluation_budget; /* positions that may be evaluated; 0: as many as it takes,
                                 * SACCADE_EVALUATE_NONE: none, only ranges prove */
    saccade_progress progress; /* or NULL; for the call alone */
    void *progress_user;
} saccade_block_mask_options;
static inline void saccade_block_mask_options_init(saccade_block_mask_options *options)
{
    saccade_record_init(options, sizeof *options);
}

typedef struct saccade_block_mask_stats {
    size_t size;
    int64_t blocks, full, partial;      /* over the stored B x H (1 where broadcast) */
    int64_t proven, evaluated, unknown; /* of `blocks`: by ranges, evaluated, left PARTIAL */
    int64_t evaluated_positions;
    int64_t runs, bytes; /* size of the result */
    double seconds;      /* time to make it */
    double sparsity;     /* 1 - live blocks / blocks */
} saccade_block_mask_stats;
static inline void saccade_block_mask_stats_init(saccade_block_mask_stats *stats)
{
    saccade_record_init(stats, sizeof *stats);
}

/* One row of blocks: runs of neighbouring key blocks. */
typedef struct saccade_run {
    int32_t first, count; /* in blocks */
    int32_t full;         /* 1: every in-range position of every block is live */
} saccade_run;

/* FlexAttention's index tensors, [B, H, rows] and [B, H, rows, columns] int32, row-major;
 * entries past the count are unspecified. full_* may be NULL. */
typedef struct saccade_block_indices {
    int64_t B, H, rows, columns;
    int32_t block_q, block_kv;
    int32_t *kv_num_blocks, *kv_indices, *full_kv_num_blocks, *full_kv_indices;
} saccade_block_indices;

/* From a bound mask. Captures are borrowed until the block mask is destroyed (update reads them
 * again). context, positions and options may be NULL. A run with it has the same Q, KV
 * and offsets (which are not compared on CUDA), of B, H, Hkv, D and Dv those that the text
 * reads, and B or H unless that is 1 here and the text does not read b or h. */
SACCADE_API saccade_status saccade_block_mask_create(
    saccade_context *context, const saccade_mod *mask, const saccade_sizes *sizes,
    const saccade_positions *positions, const saccade_binding *bindings, int32_t n_bindings,
    const saccade_block_mask_options *options, saccade_block_mask **out, saccade_error *err);
/* From index tensors; `mask` (NULL: all live) says what is live inside PARTIAL blocks. */
SACCADE_API saccade_status
saccade_block_mask_import(saccade_context *context, const saccade_block_indices *indices,
                          const saccade_mod *mask, const saccade_sizes *sizes,
                          const saccade_positions *positions, const saccade_binding *bindings,
                          int32_t n_bindings, saccade_block_mask **out, saccade_error *err);
/* A mask whose blocks are selected while a model runs, as by a top-k: at first none. Each row
 * of block_q queries and each KV head, shared by its group, has a list of blocks of block_kv
 * keys, which saccade_block_mask_select reads; `mask` (NULL: all live) says what is live inside
 * them. Everything that takes imported masks takes these. */
typedef struct saccade_selection_options {
    size_t size;
    int64_t B, Hkv;            /* lists: those of sizes, or 1 where all have the same */
    int32_t block_q, block_kv; /* on CUDA multiples of a plan's tiles, as for imported masks;
                                * block_q no smaller than Q: one row */
    int32_t most;              /* entries of a row */
} saccade_selection_options;
static inline void saccade_selection_options_init(saccade_selection_options *options)
{
    saccade_record_init(options, sizeof *options);
}
SACCADE_API saccade_status saccade_block_mask_create_selected(
    saccade_context *context, const saccade_selection_options *options, const saccade_mod *mask,
    const saccade_sizes *sizes, const saccade_positions *positions,
    const saccade_binding *bindings, int32_t n_bindings, saccade_block_mask **out,
    saccade_error *err);
/* The blocks from now on: i32 [B, Hkv, rows, up to `most`] of any strides, where the runs are.
 * Entries that are no blocks, as -1, are none; one that comes twice is one. On a GPU kernels on
 * this stream (a CUstream) make the lists of all plans that the mask was prepared for, without
 * allocating, waiting or reading anything on the host, so that a graph can hold them; runs that
 * are to see the lists before are on the stream before. On the host plans see them at once, and
 * plans on GPUs when they are prepared again. Not thread-safe for one mask. */
SACCADE_API saccade_status saccade_block_mask_select(saccade_block_mask *mask,
                                                     const saccade_tensor *blocks, void *stream,
                                                     saccade_error *err);
/* Made anew by ranges from both mods. EINVAL: other sizes or offsets, or imported blocks that
 * their own mod contradicts; ELIMIT: more than 64 captures together. */
SACCADE_API saccade_status saccade_block_mask_and(const saccade_block_mask *a,
                                                  const saccade_block_mask *b,
                                                  saccade_block_mask **out, saccade_error *err);
SACCADE_API saccade_status saccade_block_mask_or(const saccade_block_mask *a,
                                                 const saccade_block_mask *b,
                                                 saccade_block_mask **out, saccade_error *err);
SACCADE_API saccade_status saccade_block_mask_not(const saccade_block_mask *a,
                                                  saccade_block_mask **out, saccade_error *err);
/* The same mask over rows [q0, q0 + Q) and keys [kv0, kv0 + KV) of the original's; may reach
 * past the original's lengths (a growing cache). Exact. EINVAL: of an imported mask, a window
 * that does not begin with one of its blocks; positions past 32 bits. */
SACCADE_API saccade_status saccade_block_mask_window(const saccade_block_mask *mask, int64_t q0,
                                                     int64_t Q, int64_t kv0, int64_t KV,
                                                     saccade_block_mask **out,
                                                     saccade_error *err);
/* Proves again from the captures' present values; stale says whether they changed since. */
SACCADE_API saccade_status saccade_block_mask_update(saccade_block_mask *mask,
                                                     saccade_error *err);
SACCADE_API int saccade_block_mask_is_stale(const saccade_block_mask *mask);
/* The bound mod it stands for, to put into saccade_problem.mask; NULL for one imported without.
 * Borrowed until destroy. */
SACCADE_API const saccade_mod *saccade_block_mask_mod(const saccade_block_mask *mask);
SACCADE_API saccade_status saccade_block_mask_get_stats(const saccade_block_mask *mask,
                                                        saccade_block_mask_stats *stats,
                                                        saccade_error *err);
/* Runs of one block row, borrowed until destroy or update; b and h may exceed the stored
 * (broadcast) 1. Returns the number of runs, -1 for a row that is not there or no memory.
 * transposed: runs of query blocks of a key block. */
SACCADE_API int64_t saccade_block_mask_row(const saccade_block_mask *mask, int64_t b, int64_t h,
                                           int64_t row, int transposed,
                                           const saccade_run **runs);
/* Fills the caller's arrays, of as many elements as saccade_block_indices says; call once with
 * NULL arrays to learn the shape. */
SACCADE_API saccade_status saccade_block_mask_export(const saccade_block_mask *mask,
                                                     int transposed,
                                                     saccade_block_indices *indices,
                                                     saccade_error *err);
/* dense: B * H * Q * KV bytes of the caller's, 1 live, [B, H, Q, KV]. */
SACCADE_API saccade_status saccade_block_mask_to_dense(const saccade_block_mask *mask,
                                                       uint8_t *dense, saccade_error *err);
typedef enum saccade_picture {
    SACCADE_TEXT = 1,
    SACCADE_SVG = 2,
    SACCADE_PNG = 3
} saccade_picture;
/* Picture of one (b, h); free with saccade_free. `columns`: width in characters or pixels, 0
 * for a default. PNG needs libpng at build time (EBACKEND otherwise). */
SACCADE_API saccade_status saccade_block_mask_render(const saccade_block_mask *mask, int64_t b,
                                                     int64_t h, saccade_picture format,
                                                     int32_t columns, void **bytes,
                                                     size_t *size, saccade_error *err);
SACCADE_API void saccade_block_mask_destroy(saccade_block_mask *mask);
SACCADE_API void saccade_free(void *bytes);

/* ---- plan -------------------------------------------------------------------------------- */

typedef struct saccade_plan saccade_plan;

/* Gradients: bits of saccade_problem.gradients and of saccade_backward_args.accumulate. */
enum {
    SACCADE_GRADIENT_Q = 1,
    SACCADE_GRADIENT_K = 2,
    SACCADE_GRADIENT_V = 4,
    SACCADE_GRADIENT_CAPTURES = 8, /* those of saccade_problem.gradient_captures */
    SACCADE_GRADIENT_SINKS = 16
};

enum { SACCADE_PAGE_ANY = -1 };

enum { SACCADE_INVARIANT = 1, SACCADE_INVARIANT_SHORT = 2 };

/* What never changes between runs of a plan. B, Q, KV in sizes are only a hint (0: unknown):
 * lengths, batch, strides, positions and captured values come with each run. */
typedef struct saccade_problem {
    size_t size;
    saccade_sizes sizes;      /* H, Hkv, D, Dv are fixed; default 1, 1, 64, 64 */
    saccade_dtype dtype;      /* of Q; default f32 */
    saccade_dtype kv_dtype;   /* NONE: dtype. f32, f16 and bf16 mix with each other; e4m3, e5m2,
                               * i8 and i4 go with each of these */
    double scale;             /* NaN, the default: 1 / sqrt(D) */
    const saccade_mod *score; /* bound, or NULL; not kept */
    const saccade_mod *mask;  /* bound, or NULL; not kept */
    const char *backend;      /* "auto" (NULL), "cpu", "cuda", "ref": float64 truth, "plain":
                               * three passes in the problem's dtype, the error yardstick */
    const char *arch;         /* CUDA: "sm_90a", "sm_80", ...; NULL: the device's. With "auto"
                               * it asks for "cuda", with others it is EINVAL. A plan for an
                               * arch not there can be explained, not run */
    uint32_t gradients;       /* SACCADE_GRADIENT_* that saccade_backward is to make; 0, the
                               * default: forward only */
    const char *const *gradient_captures; /* names of float captures of the score; not kept */
    int32_t n_gradient_captures;
    /* Where heads are spread over devices: head 0 of a run is head h_offset of heads_global
     * (0: H) in all. Mods see global h, H and Hkv = heads_global / (H / Hkv), captures and
     * block masks are those of all heads; key head g of a run serves its heads from g H / Hkv
     * on. Splits of keys, and with them last bits, may follow from a run's own H. */
    int64_t h_offset, heads_global;
    saccade_dtype out_dtype; /* of out; NONE: dtype. f32 with f16 and bf16 leaves parts of the
                               * keys unrounded, as saccade_merge takes them */
    /* Sinks: a logit of each row that takes part in its sum and has no value: out is what it is
     * without, times 1 - exp(sink - lse), lse includes it, row_max does not. A row without a
     * live key has out 0 and lse = sink. A sink of -inf is none, one of +inf counts as NaN. */
    saccade_dtype sinks_dtype; /* f32, f16, bf16 (f64: or f64): every run gives sinks; NONE:
                                * none does */
    /* Of K and V in e4m3, e5m2, i8 or i4: neighbouring rows, and channels of a row, that share
     * one scale of saccade_forward_args; 0, the default: all. */
    int32_t k_scale_tokens, k_scale_channels, v_scale_tokens, v_scale_channels;
    int64_t page; /* not 0: each run says by saccade_pages where keys lie. Keys of a page, which
                   * helps a GPU's kernels, or SACCADE_PAGE_ANY */
    int32_t ragged; /* 1: every run brings saccade_ragged; 0: none does */
    /* What becomes of a weight after the sum, or NULL; bound, not kept. dropout(rate): weights
     * are kept with probability 1 - rate, in steps of 2^-16, and divided by it; lse and row_max
     * are as without. Which are kept follows from seed and offset of the run and from b, h, q
     * and kv as mods see them alone: docs/language.md. */
    const saccade_mod *weight;
    /* SACCADE_INVARIANT (1): the bits of a row of out, lse and row_max follow from its own
     * query, from the keys that its mask leaves it and from where these stand (their positions
     * and their numbers in K); not from what else is in the run: other batches, heads and rows,
     * how many rows there are (prefill or decode), keys past those that the row sees, threads.
     * On Hopper that costs 1 to 13 percent, and one short sequence of few queries twice the
     * time; elsewhere on CUDA, and there in ragged, quantised, f32 and dropout problems, over
     * some rows of a sequence, with imported or selected block masks and rows that do not lie
     * on 16 bytes, few rows leave most of the device idle. Its workspace has room for the parts
     * of B H rows. SACCADE_INVARIANT_SHORT (2) lets runs of up to 128 rows of a sequence be
     * short on CUDA: they have bits of their own, which follow from the row alone as well, but
     * are not those of longer runs. A row that shares 256 keys with an infinity or NaN in V is
     * right but may differ, as may f32 rows of head dims above 128 beside a NaN row on CUDA;
     * there q, k, v and out must all lie on 16 bytes, or never. Gradients are not concerned. */
    int32_t batch_invariant;
    int32_t tangents;      /* 1: saccade_tangent is to run with this plan; 0: only back end
                            * ref can */
    int32_t head_max;      /* 1: runs may ask for saccade_forward_args.head_max; 0: none does */
    int32_t shared_prefix; /* 1: every run brings saccade_prefix; 0: none does */
    saccade_dtype d_out_dtype; /* of d_out; NONE: out_dtype. dtype with out_dtype f32: backward
                                * has of out what f16 and bf16 round away, which gradients of
                                * some captures need (saccade_mod_sums_keys); on CPUs that saves
                                * them a first pass over the keys. On CUDA d_out is of dtype */
} saccade_problem;
static inline void saccade_problem_init(saccade_problem *problem)
{
    saccade_record_init(problem, sizeof *problem);
    problem->sizes.H = problem->sizes.Hkv = 1;
    problem->sizes.D = problem->sizes.Dv = 64;
    problem->dtype = SACCADE_F32;
    problem->scale = SACCADE_NAN;
}

/* Chooses a back end and compiles what its runs need, for the lengths that sizes name or any
 * (0). context NULL: all threads, the best level. EINVAL: a problem that contradicts itself;
 * EBACKEND: one that the back end named, or every one there is, does not compute; ELIMIT: texts
 * and sizes past docs/limits.md. On CUDA for `arch`, else for the device whose context is
 * current. */
SACCADE_API saccade_status saccade_plan_create(saccade_context *context,
                                               const saccade_problem *problem,
                                               saccade_plan **out, saccade_error *err);
/* Makes the runs of a block mask for this plan's tiles, and on CUDA their copy on the device
 * whose context is current, kept in the mask. Must precede the first run with that mask, on
 * hosts too and on each device, and follow each update; not thread-safe for one mask. */
SACCADE_API saccade_status saccade_plan_prepare(const saccade_plan *plan,
                                                const saccade_block_mask *mask,
                                                saccade_error *err);
/* What the plan is, why, and the code it made; free with saccade_free. */
SACCADE_API saccade_status saccade_plan_explain(const saccade_plan *plan, char **text,
                                                saccade_error *err);
SACCADE_API void saccade_plan_destroy(saccade_plan *plan);

/* ---- keys in pages, and shared prefixes -------------------------------------------------- */

/* Where keys lie that are not in one piece, for problems with `page`: K is then a pool of pages
 * [pages, Hkv, page, D] and V one of [pages, Hkv, page, Dv], of any strides: NHD and HND, K and
 * V in one tensor, V a view of K. Mods, block masks and lengths see logical keys only: key j of
 * batch b is key j % page of the page that entry j / page of b names. A page may be named any
 * number of times. Results are those of the same keys in one piece, bit for bit (on CUDA but
 * for runs that docs/serving.md names).
 *     block_table, seq_lens           table [B, most], positions.kv_len
 *     indptr, indices, last_page_len  table [all], indptr, last_page_len (or positions.kv_len)
 *     slots                           either with pages of one key
 *     chunks                          table [B, most] of first rows, chunk, positions.kv_len
 * Entries that no key before its batch's length is in are never read. A page at -1 is absent:
 * its keys count as zeros, so none of them may be live. Whatever the tables say, nothing
 * outside of the pool is read: entries past it count as its last page, below -1 as absent, and
 * saccade_pages_check reports them. Tables are int32 and lie where K lies; on the host what
 * gives lengths (indptr, last_page_len) is checked by each run. */
typedef struct saccade_pages {
    size_t size;
    const saccade_tensor *table;         /* [B, most], last stride 1; with indptr [all] */
    const saccade_tensor *indptr;        /* [B + 1] from 0 up: batch b's entries are
                                          * [indptr[b], indptr[b + 1]); or NULL */
    const saccade_tensor *last_page_len; /* [B] keys of each batch's last page, 1 to page */
    int64_t chunk;                       /* not 0: entries are first rows of K and V, which are
                                          * [B, Hkv, rows, dim], and so many keys follow */
    int64_t KV;                          /* no batch is longer, and a block mask has so many
                                          * keys; 0: as many as `most` entries hold, with indptr
                                          * those of the longest batch (not on a GPU, which
                                          * wants the number) */
} saccade_pages;
static inline void saccade_pages_init(saccade_pages *pages)
{
    saccade_record_init(pages, sizeof *pages);
}

/* Batches that begin with the same keys, for problems with `page` and `shared_prefix`: batches
 * cu_groups[g] to cu_groups[g + 1] begin with the same lengths[g] keys, those of the group's
 * first batch, which are read for all of its rows at a time; other batches' entries of them are
 * never read. Every row must see all keys that its batch shares: the mask is not evaluated over
 * them, nor may the score read b, q, B, Q or KV; elsewhere both see logical positions. The
 * result is that of the same run without but for rounding: two parts in f32, merged. No batch
 * has fewer keys (kv_len) than it shares. Forward alone; pages by `table` [B, most], no block
 * mask, no kv_offset, no weight, and q whose batches and rows lie at one stride: [B, Q, H, D]
 * transposed, or Q 1. */
typedef struct saccade_prefix {
    size_t size;
    const saccade_tensor *cu_groups; /* [G + 1] i32 where q lies, from 0 up to B; G up to B */
    const saccade_tensor *lengths;   /* [G] i32 there, whole pages */
    int64_t max_keys;                /* none is longer; 0: as many keys as a batch can have */
} saccade_prefix;
static inline void saccade_prefix_init(saccade_prefix *prefix)
{
    saccade_record_init(prefix, sizeof *prefix);
}

/* ---- forward ----------------------------------------------------------------------------- */

/* One forward run. All borrowed for the call (for CUDA: what tensors' data point to until the
 * stream has passed it; a CUDA graph that has recorded a run reads these and the block mask at
 * each launch, and keeps none of them). With a block mask, captures of the mask may be left out
 * on the CPU, or must be those it was proven from: scalars of the same value, tensors of the
 * same address, shape, strides and dtype. On CUDA, where tensors of a run lie on the device and
 * those of a proof on the host, the host's decide which blocks are whole or absent and the
 * device's what is live in the others: they must be equal. */
typedef struct saccade_forward_args {
    size_t size;
    const saccade_tensor *q;       /* [B, H, Q, D] */
    const saccade_tensor *k;       /* [B, Hkv, KV, D], or see saccade_pages */
    const saccade_tensor *v;       /* [B, Hkv, KV, Dv] */
    const saccade_tensor *out;     /* [B, H, Q, Dv], out_dtype */
    const saccade_tensor *lse;     /* [B, H, Q] f32 (f64: or f64), natural log */
    const saccade_tensor *row_max; /* likewise: largest live score of each row */
    const saccade_positions *positions;
    const saccade_block_mask *block_mask; /* NULL: proven per tile while running */
    const saccade_binding *bindings;      /* captures of score and mask, by name */
    int32_t n_bindings;
    void *workspace; /* saccade_plan_workspace() bytes, 64-aligned */
    size_t workspace_bytes;
    void *stream;                /* CUstream for CUDA */
    const saccade_tensor *sinks; /* [H], or [B, H, Q] with 1 for B or Q (of ragged runs for Q);
                                  * of the run's own heads. Of parts of the keys that are
                                  * merged only one may have them: -inf for the others */
    /* Quantised K and V: an element is its code times its scale. [B|1, Hkv|1, groups of rows,
     * groups of channels] f32 or f16 of any strides: element (b, h, n, d) of K has the scale
     * [b, h, n / k_scale_tokens, d / k_scale_channels], 0 where that is 0. NULL: 1. */
    const saccade_tensor *k_scale, *v_scale;
    const saccade_pages *pages;    /* of problems with `page`; else NULL */
    const saccade_ragged *ragged;  /* of ragged problems; NULL for others */
    const saccade_tensor *dropout; /* of problems with `weight`: seed and offset, [2] i64 or
                                    * u64, on the host or where q lies */
    /* Of problems with `head_max`, or NULL: the largest live score of each head, [B, H], or
     * [1, H] over all batches; f32 (f64: or f64). -inf without a live score, NaN where some
     * row's maximum is NaN. It is that of the rows' maxima: exact. A ragged run without row_max
     * has at most B rows of the longest sequence in q. */
    const saccade_tensor *head_max;
    const saccade_prefix *prefix; /* of problems with `shared_prefix`; NULL for others */
} saccade_forward_args;
static inline void saccade_forward_args_init(saccade_forward_args *args)
{
    saccade_record_init(args, sizeof *args);
}

/* EVALUE for the first entry before its batch's length, of tables on the host, that names no
 * page of k's and is not -1; EINVAL for what a run refuses. */
SACCADE_API saccade_status saccade_pages_check(const saccade_plan *plan,
                                               const saccade_forward_args *args,
                                               saccade_error *err);
/* Bytes of workspace for runs of at most these sizes, SIZE_MAX for lengths that no run can
 * reach and for fewer heads or dims than the plan's, 0 for NULL. KV: logical keys, in pages as
 * many as tables have room for (columns times page, with indptr the longest batch's entries
 * times page, or saccade_pages.KV), however few are live.
 * Of ragged problems B is the number of sequences, Q and KV are those of the longest. */
SACCADE_API size_t saccade_plan_workspace(const saccade_plan *plan, const saccade_sizes *sizes);
/* Allocates, compiles and copies nothing; on CUDA it launches and does not wait. Threads change
 * no bit of the results. One plan may run from many threads at a time, each with its own
 * workspace and outputs, which overlap no input nor each other (EINVAL where that shows: an
 * output has the data of an input, or two of the same strides share an element). Dead rows:
 * out 0, lse and row_max -inf. */
SACCADE_API saccade_status saccade_forward(const saccade_plan *plan,
                                           const saccade_forward_args *args,
                                           saccade_error *err);

/* ---- backward ---------------------------------------------------------------------------- */

/* One backward run: gradients of sum(out * d_out) + sum(lse * d_lse), one tensor for each that
 * the problem names and none else: what it leaves out is not computed. Captures keep their
 * values from forward. On the host a dimension of stride 0 in a gradient of q, k, v or a
 * capture stands for the sum over it, as an input needs that was broadcast (not over rows in
 * pages, nor over sequences of a ragged run); on a GPU only heads of d_k and d_v whose keys lie
 * in pages, and batches too in chunks. d_sinks has a place for each of its elements. Borrowed
 * as in saccade_forward_args. */
typedef struct saccade_backward_args {
    size_t size;
    const saccade_tensor *q, *k, *v;       /* as in forward */
    const saccade_tensor *out, *lse;       /* what forward left */
    const saccade_tensor *d_out;           /* [B, H, Q, Dv], d_out_dtype */
    const saccade_tensor *d_lse;           /* [B, H, Q] f32 (f64: or f64); NULL: zeros */
    const saccade_tensor *d_q, *d_k, *d_v; /* shapes of q, k, v; their dtype or f32 */
    const saccade_binding *d_captures;     /* shapes of captures, f32 (f64: or f64), or f16 or
                                              * bf16 if the capture is */
    int32_t n_d_captures;
    uint32_t accumulate; /* SACCADE_GRADIENT_* that are added to what their tensors hold; the
                          * others are overwritten; those that the plan does not make say
                          * nothing */
    const saccade_positions *positions;
    const saccade_block_mask *block_mask;
    const saccade_binding *bindings;
    int32_t n_bindings;
    void *workspace; /* saccade_backward_workspace() bytes */
    size_t workspace_bytes;
    void *stream;
    const saccade_tensor *sinks;   /* as in forward */
    const saccade_tensor *d_sinks; /* shape of sinks, f32 (f64: or f64; on the host or their
                                    * dtype) */
    const saccade_pages *pages;    /* as in forward; a key's gradient is added up over all
                                    * places that name it, others' is 0 */
    const saccade_ragged *ragged;  /* as in forward; captures' gradients are f32 */
    const saccade_tensor *dropout; /* those of forward */
} saccade_backward_args;
static inline void saccade_backward_args_init(saccade_backward_args *args)
{
    saccade_record_init(args, sizeof *args);
}

/* Bytes of workspace for backward runs of at most these sizes, linear in the lengths; 0 for a
 * plan without gradients, SIZE_MAX as saccade_plan_workspace says. */
SACCADE_API size_t saccade_plan_backward_workspace(const saccade_plan *plan,
                                                   const saccade_sizes *sizes);
/* Bytes of workspace for the run of these arguments (of data positions on the host alone are
 * read; other positions may need other sizes): more
 * than saccade_plan_backward_workspace where gradients of q, k or v have dimensions of stride 0
 * (each place is then made in f32, and added up), those of k and v in pages are f16 or bf16 in
 * ragged runs on the host (sequences add to sums in f32, 4 bytes an element of the pools),
 * captures' are f16 or bf16, or captures' are wanted on CUDA (which sums many of them exactly,
 * 104 bytes an element): a run needs it;
 * and where a capture's index gives its gradient no order (explain says so): its sum is then in
 * fixed point by all threads, and in a smaller workspace on one thread in the order of items,
 * which may differ in the last bits. Less on CUDA where d_q has no holes: rows lie in it. */
SACCADE_API saccade_status saccade_backward_workspace(const saccade_plan *plan,
                                                      const saccade_backward_args *args,
                                                      size_t *bytes, saccade_error *err);
/* As saccade_forward: nothing is allocated (but by ref and plain) and threads change no bit.
 * Rows without a live key, masked positions and what they read get exactly 0. Gradients overlap
 * no input nor each other, as outputs of saccade_forward; but on the host d_k and d_v may share
 * elements where both are in accumulate, and are added up there: where V is a view of K, clear
 * d_k, let d_v be the same view of it and accumulate both. EINVAL: the gradients given are not
 * those that the plan's problem named. */
SACCADE_API saccade_status saccade_backward(const saccade_plan *plan,
                                            const saccade_backward_args *args,
                                            saccade_error *err);

/* ---- forward mode ------------------------------------------------------------------------ */

/* Forward mode: how out, lse and, with d_out, the gradients of saccade_backward change per unit
 * of t where q, k, v and float captures of the score change at the rates given (NULL or not
 * named: 0; d_out and d_lse are held). It is a jvp, and the second derivative in a direction:
 * for a gradient's own gradient give the rates that came for d_q, d_k, d_v and d_captures as
 * q_dot, k_dot, v_dot and captures_dot; then out_dot and lse_dot are its gradients by d_out and
 * d_lse, and d_q_dot, d_k_dot, d_v_dot and d_captures_dot those by q, k, v and captures. */
typedef struct saccade_tangent_args {
    size_t size;
    const saccade_tensor *q, *k, *v;             /* as in forward */
    const saccade_tensor *q_dot, *k_dot, *v_dot; /* shapes and dtypes of q, k, v */
    const saccade_binding *captures_dot;         /* shapes of captures, f32 (f64: or f64) */
    int32_t n_captures_dot;
    const saccade_tensor *out_dot, *lse_dot; /* results as forward's; NULL: not wanted */
    const saccade_tensor *d_out, *d_lse;     /* as in backward; NULL: zeros */
    const saccade_tensor *d_q_dot, *d_k_dot, *d_v_dot; /* results as backward's; NULL: not */
    const saccade_binding *d_captures_dot;             /* wanted, as without d_out */
    int32_t n_d_captures_dot;
    const saccade_positions *positions;
    const saccade_block_mask *block_mask;
    const saccade_binding *bindings;
    int32_t n_bindings;
    const saccade_tensor *sinks;     /* as in forward; held */
    const saccade_tensor *dropout;   /* as in forward */
    const saccade_tensor *out, *lse; /* forward's results, made on the way; NULL: not wanted */
    void *workspace;                 /* as in forward; back end ref needs none */
    size_t workspace_bytes;
} saccade_tangent_args;
static inline void saccade_tangent_args_init(saccade_tangent_args *args)
{
    saccade_record_init(args, sizeof *args);
}

/* Bytes of workspace for tangent runs of at most these sizes, linear in the lengths; 0 for back
 * end ref and for a plan without tangents. */
SACCADE_API size_t saccade_plan_tangent_workspace(const saccade_plan *plan,
                                                  const saccade_sizes *sizes);
/* Back end cpu, in one pass over the keys, for plans whose problem has tangents: out, lse and
 * their tangents; nothing is allocated and threads change no bit. Back end ref: in float64,
 * with d_out too, whatever the plan names; allocates. EBACKEND elsewhere. Rows without a live
 * key and masked positions have tangents 0. */
SACCADE_API saccade_status saccade_tangent(const saccade_plan *plan,
                                           const saccade_tangent_args *args,
                                           saccade_error *err);

/* ---- merge ------------------------------------------------------------------------------- */

/* Attention over n parts of the keys becomes attention over all of them: part i is (outs[i],
 * lses[i]), [B, H, Q, Dv] and [B, H, Q], all on the host and all f32, or f64. They are added in
 * the order given. A part whose lse is -inf adds nothing and its out is not read; a row without
 * any other has out 0, lse -inf. */
typedef struct saccade_merge_args {
    size_t size;
    const saccade_tensor *outs, *lses; /* [n] each */
    int32_t n;
    const saccade_tensor *out; /* [B, H, Q, Dv], f32, f16, bf16 or f64 */
    const saccade_tensor *lse; /* [B, H, Q], dtype of the parts; NULL: not wanted */
} saccade_merge_args;
static inline void saccade_merge_args_init(saccade_merge_args *args)
{
    saccade_record_init(args, sizeof *args);
}
/* context may be NULL; its threads change no bit. out and lse may be those of a part. */
SACCADE_API saccade_status saccade_merge(const saccade_context *context,
                                         const saccade_merge_args *args, saccade_error *err);

/* ---- quantised keys ---------------------------------------------------------------------- */

/* Codes and their scales from numbers, on the host. A group's scale is its largest magnitude
 * by the largest code (448, 57344, 127, 7), of zeros alone 1; codes are the nearest. Infinities
 * and NaN become NaN; in i8 and i4 all of their group does, but with is_given an infinity
 * becomes the largest code there and a NaN 0. A zero is 0 under a given scale of 0 too. */
typedef struct saccade_quantize_args {
    size_t size;
    const saccade_tensor *from;  /* [B, H, N, D], f32, f16 or bf16 */
    const saccade_tensor *to;    /* the same shape, e4m3, e5m2, i8 or i4 */
    const saccade_tensor *scale; /* as k_scale of saccade_forward_args: written, or read */
    int32_t tokens, channels;    /* as k_scale_tokens and k_scale_channels */
    int32_t is_given;            /* the scales are there; what is beyond them saturates */
} saccade_quantize_args;
static inline void saccade_quantize_args_init(saccade_quantize_args *args)
{
    saccade_record_init(args, sizeof *args);
}
/* context may be NULL; its threads change no bit. */
SACCADE_API saccade_status saccade_quantize(const saccade_context *context,
                                            const saccade_quantize_args *args,
                                            saccade_error *err);

/* ---- CUDA memory, for programs that have no other way to it ----------------------------- */

/* EBACKEND says why there is no CUDA here. */
SACCADE_API saccade_status saccade_device_count(int32_t *count, saccade_error *err);
SACCADE_API saccade_status saccade_device_alloc(int32_t device, size_t bytes, void **out,
                                                saccade_error *err);
SACCADE_API void saccade_device_free(int32_t device, void *memory);
/* Between host and device, either way, or on the device; done when it returns. */
SACCADE_API saccade_status saccade_device_copy(int32_t device, void *to, const void *from,
                                               size_t bytes, saccade_error *err);
/* Waits for everything the device was given. */
SACCADE_API saccade_status saccade_device_synchronize(int32_t device, saccade_error *err);

#ifdef __cplusplus
}
#endif
#endif
