/* kernels.h: the contract between the loops over items and the kernels. A kernel does the work
 * on one strip of query rows and one block of keys; a table of them serves one level and packed
 * element. Kernels see packed operands and rows that begin where they may read; positions,
 * masks, strides of tensors and chunks of keys are settled before.
 * M query rows, N keys, D dims of Q and K, E columns of V. */
#ifndef SACCADE_CPU_KERNELS_KERNELS_H
#define SACCADE_CPU_KERNELS_KERNELS_H

#include "base/cpu_features.h"
#include "cpu/kv/kv_rows.h"
#include "cpu/kv/prefetch.h"
#include "plan/plan.h"

/* Rows of a block of an item, keys of a block, and the most rows that an item can have. */
enum { CPU_BLOCK_ROWS = 96, CPU_BLOCK_KEYS = 256, CPU_MOST_ROWS = 512 };

/* S = scale * Q K^T of one strip and one block of keys.
 * q [rows][q_ld] packed elements, 0 past D; k: panels of pack_keys; s [rows][s_ld] f32, of
 * which at most whole panels are written. n: keys. */
#define CPU_SCORES(name)                                                                      \
    void name(const void *q, int32_t q_ld, const void *k, int32_t D, int32_t rows, int32_t n, \
              float scale, float *s, int32_t s_ld)
/* FA2 (arXiv 2307.08691) alg. 1: m, l and alpha of the new block, and P over S in place
 * (as packed elements, row r at s + r * s_ld). n: keys, a multiple of 16; -INF is dead.
 * known: the rows' maxima where a pass before found them, else NULL. */
#define CPU_SOFTMAX(name)                                                                    \
    void name(float *s, int32_t s_ld, int32_t rows, int32_t n, const float *known, float *m, \
              float *l, float *alpha)
/* O = alpha O + P V. p: what softmax left; v: panels of pack_values; n: keys, a multiple of
 * 16 where packed elements are not f32; o [rows][o_ld] f32. */
#define CPU_VALUES(name)                                                             \
    void name(const float *p, int32_t p_ld, const void *v, int32_t n, int32_t block, \
              int32_t rows, int32_t n_panels, const float *alpha, float *o, int32_t o_ld)
/* CPU_VALUES of some keys of V, stretch by stretch. */
typedef struct cpu_stretch {
    int32_t from, past; /* keys */
    int32_t at;         /* where a row of P has them, in packed elements */
} cpu_stretch;
#define CPU_VALUES_OF(name)                                                              \
    void name(const float *p, int32_t p_ld, const void *v, const cpu_stretch *stretches, \
              int32_t n_stretches, int32_t block, int32_t rows, int32_t n_panels,        \
              const float *alpha, float *o, int32_t o_ld)
/* The first n rows of `from` into `to`, padded with 0 to `padded` rows.
 * rows: [padded][ld]; keys: [padded/panel][D][panel]; values: [E/panel][padded][panel].
 * Packed bf16 stores pairs along the second-to-last dimension.
 * pack_values returns nonzero if V holds an infinity or NaN. */
#define CPU_PACK_ROWS(name) \
    void name(const cpu_rows *from, int32_t n, int32_t padded, int32_t ld, void *to)
#define CPU_PACK_KEYS(name) void name(const cpu_rows *from, int32_t n, int32_t padded, void *to)
#define CPU_PACK_VALUES(name) \
    int name(const cpu_rows *from, int32_t n, int32_t padded, void *to)

/* Rows of packed Q as decode_qk takes them: as many bytes, rows to a multiple of 32. */
#define CPU_PACK_DECODE(name) \
    void name(const void *q, int32_t q_ld, int32_t rows, int32_t D, void *to)
/* Q K^T and P V for the few rows of a decode item, straight from K and V: every element is read
 * once and nothing is packed. D and Dv are at most CPU_DECODE_DIM. The lines of `next`
 * are prefetched meanwhile. decode_qk makes the scores of n keys; decode_pv adds P V of n keys
 * to O, stops before the first few keys that hold an infinity or NaN and returns how many keys
 * it has done. */
enum { CPU_DECODE_DIM = 576, CPU_NARROW_DIM = 32 };
/* The f32 kernels also take quantised rows, without their scales. They read an e4m3 element as
 * its value divided by this. */
#define CPU_E4M3_FACTOR 256.0f
#define CPU_DECODE_QK(name)                                                            \
    void name(const void *q, int32_t q_ld, const cpu_keys *k, int32_t n, int32_t rows, \
              float scale, float *s, int32_t s_ld, cpu_prefetch *next)
#define CPU_DECODE_PV(name)                                                                \
    int32_t name(const float *p, int32_t p_ld, const cpu_keys *v, int32_t n, int32_t rows, \
                 const float *alpha, float *o, int32_t o_ld, cpu_prefetch *next)

/* E elements of each row of O by its sum as dtype, `stride` bytes from row to row; 0 where the
 * sum is. */
#define CPU_STORE_ROWS(name)                                                                   \
    void name(const float *o, int32_t o_ld, const float *l, int32_t rows, saccade_dtype dtype, \
              int32_t E, void *to, int64_t stride)
/* Stores rows like CPU_STORE_ROWS and sets O to 0; returns whether a result is infinite or NaN.
 * is_far: the stores go past the caches, and a fence must follow. */
#define CPU_TAKE_ROWS(name)                                                             \
    int name(float *o, int32_t o_ld, const float *l, int32_t rows, saccade_dtype dtype, \
             int32_t E, void *to, int64_t stride, int is_far)
/* Whether any of n floats, a multiple of 16, is infinite or NaN. */
#define CPU_ANY_NONFINITE(name) int name(const float *o, int64_t n)
/* Strips of an item against a chunk of packed keys as merged streams of tiles and vectors
 * (flow/flow_run.h). 0: no stream could run. */
struct flow_run;
#define CPU_FLOW(name) int name(const struct flow_run *run)

/* Maxima up to which m log2 e is near enough when rounded (softmax_rows.h): off by 1 at most,
 * a factor of 2 that all weights of a row share. */
#define CPU_FUSED_MOST 0x1p24f

typedef struct cpu_kernels {
    const char *name;
    int32_t flops_of_ns; /* about, of one thread: how many threads a run is worth */
    int32_t strip;       /* query rows per call of scores, softmax, values */
    int32_t is_even;     /* fewer rows take as much less time: strips are cut of equal size */
    int32_t panel;       /* keys of a K panel, columns of a V panel */
    int32_t element;     /* bytes of a packed element: 4 f32, 2 bf16 */
    int32_t depth;       /* packed K has a multiple of these dims */
    int32_t is_fused;    /* P is 2^(s log2 e - r), r = m log2 e rounded, |m| < CPU_FUSED_MOST */
    CPU_SCORES((*scores));
    CPU_SOFTMAX((*softmax));
    CPU_VALUES((*values));
    CPU_VALUES_OF((*values_of)); /* NULL: values of all keys */
    CPU_PACK_ROWS((*pack_rows));
    CPU_PACK_KEYS((*pack_keys));
    CPU_PACK_VALUES((*pack_values));
    /* Up to so many rows decode_qk and decode_pv beat packing; of heads of at most
     * CPU_NARROW_DIM, whose scores are sums of few products over many lanes, up to fewer; and
     * where the tensors of such heads are near, in a cache, up to near_rows. */
    int32_t decode_rows, narrow_rows, near_rows;
    CPU_PACK_DECODE((*pack_decode)); /* NULL: decode_qk takes packed Q as it is */
    CPU_DECODE_QK((*decode_qk));
    CPU_DECODE_PV((*decode_pv));
    int32_t prefetch_parts; /* of what both prefetch */
    KV_DEQUANTISE((*dequantise));
    CPU_STORE_ROWS((*store_rows));
    CPU_TAKE_ROWS((*take_rows)); /* NULL where there is no flow, any_nonfinite too */
    CPU_ANY_NONFINITE((*any_nonfinite));
    CPU_FLOW((*flow));   /* NULL: block by block only */
    void (*begin)(void); /* around a thread's calls for an item; NULL: nothing to do */
    void (*end)(void);
    int is_by_keys; /* packed V is [keys/32][Dv/panel][32][panel] */
    int is_split;   /* elements of P are two bf16, 32 high parts, 32 low ones */
    /* Kernels in f32 whose packed blocks are no larger. They recompute rows that came out NaN.
     * NULL: these handle every value. */
    const struct cpu_kernels *careful;
    /* Kernels in f32 for decode items of so few rows that converting keys takes longer than
     * multiplying them: keys in floats, and quantised ones. */
    const struct cpu_kernels *few;
    int32_t few_rows, few_coded_rows;
} cpu_kernels;

/* store_tmpl.c */
CPU_STORE_ROWS(cpu_store_rows_portable);
CPU_STORE_ROWS(cpu_store_rows_avx2);
CPU_STORE_ROWS(cpu_store_rows_avx512);
CPU_ANY_NONFINITE(cpu_any_nonfinite_avx512);
/* store_amx_tmpl.c */
CPU_STORE_ROWS(cpu_store_rows_amx);
CPU_TAKE_ROWS(cpu_take_rows_amx);
/* codes_tmpl.c */
KV_DEQUANTISE(cpu_dequantise_portable);
KV_DEQUANTISE(cpu_dequantise_avx2);
KV_DEQUANTISE(cpu_dequantise_avx512);
/* decode_f32_tmpl.c */
CPU_DECODE_QK(cpu_decode_qk_portable);
CPU_DECODE_QK(cpu_decode_qk_avx2);
CPU_DECODE_QK(cpu_decode_qk_avx512);
CPU_DECODE_PV(cpu_decode_pv_portable);
CPU_DECODE_PV(cpu_decode_pv_avx2);
CPU_DECODE_PV(cpu_decode_pv_avx512);
/* decode_bf16_tmpl.c: AVX512-BF16 */
CPU_DECODE_QK(cpu_decode_qk_bf16);
CPU_DECODE_QK(cpu_decode_qk_bf16_parts); /* MOST_PARTS of them */
CPU_DECODE_PV(cpu_decode_pv_bf16);
/* decode_amx_qk_tmpl.c, decode_amx_pv_tmpl.c: bf16; f16 as sums of two of it */
CPU_PACK_DECODE(cpu_pack_decode_tiles_portable);
CPU_PACK_DECODE(cpu_pack_decode_tiles_avx2);
CPU_PACK_DECODE(cpu_pack_decode_tiles_avx512);
CPU_PACK_DECODE(cpu_pack_decode_tiles_amx);
CPU_PACK_DECODE(cpu_pack_decode_split_portable);
CPU_PACK_DECODE(cpu_pack_decode_split_avx2);
CPU_PACK_DECODE(cpu_pack_decode_split_avx512);
CPU_PACK_DECODE(cpu_pack_decode_split_amx);
CPU_DECODE_QK(cpu_decode_qk_tiles_portable);
CPU_DECODE_QK(cpu_decode_qk_tiles_avx2);
CPU_DECODE_QK(cpu_decode_qk_tiles_avx512);
CPU_DECODE_QK(cpu_decode_qk_tiles_amx);
CPU_DECODE_QK(cpu_decode_qk_split_portable);
CPU_DECODE_QK(cpu_decode_qk_split_avx2);
CPU_DECODE_QK(cpu_decode_qk_split_avx512);
CPU_DECODE_QK(cpu_decode_qk_split_amx);
CPU_DECODE_PV(cpu_decode_pv_tiles_portable);
CPU_DECODE_PV(cpu_decode_pv_tiles_avx2);
CPU_DECODE_PV(cpu_decode_pv_tiles_avx512);
CPU_DECODE_PV(cpu_decode_pv_tiles_amx);
CPU_DECODE_PV(cpu_decode_pv_split_portable);
CPU_DECODE_PV(cpu_decode_pv_split_avx2);
CPU_DECODE_PV(cpu_decode_pv_split_avx512);
CPU_DECODE_PV(cpu_decode_pv_split_amx);
/* block_amx_tmpl.c: tiles, emulated in levels other than AMX; flow_run_tmpl.c */
extern const cpu_kernels cpu_bf16_tiles_portable, cpu_bf16_tiles_avx2, cpu_bf16_tiles_avx512,
    cpu_bf16_tiles_amx;
/* block_amx_f16_tmpl.c: the same for f16 */
extern const cpu_kernels cpu_f16_tiles_portable, cpu_f16_tiles_avx2, cpu_f16_tiles_avx512,
    cpu_f16_tiles_amx;
CPU_FLOW(cpu_flow_run_amx); /* flow_run_tmpl.c */
/* block_f32_tmpl.c, one per level */
extern const cpu_kernels cpu_f32_portable, cpu_f32_avx2, cpu_f32_avx512;
extern const cpu_kernels cpu_bf16_dot; /* block_bf16_tmpl.c: AVX512-BF16 */

/* What blocks of quantised keys become: bf16 where that is what is packed, else f32. */
static inline saccade_dtype cpu_dequantised(const cpu_kernels *kernels)
{
    return kernels->element == 2 ? SACCADE_BF16 : SACCADE_F32;
}

/* ---- levels.c ---- */

/* Kernels for a problem at this level or below. */
const cpu_kernels *cpu_kernels_for(const plan_problem *problem, int32_t level);

#endif
