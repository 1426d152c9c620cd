/* saccade_kv.h: a cache of keys and values in pages: which pages of a pool the sequences that
 * are generated hold. Never needed to run a kernel; it makes the tables that saccade_pages
 * takes.
 *
 * A cache counts pages; the memory is the caller's: for each layer a pool of K
 * [pages, Hkv, page, D] and one of V, of any strides, that all obey the one table. A step is
 *
 *     saccade_kv_grow(cache, sequences, counts, n)      once: room for new keys, or nothing
 *     saccade_kv_write(cache, k_pool, v_pool, k, v)     for each layer: the new keys, or
 *     saccade_append(context, args)                     .. quantised, or on a GPU
 *     saccade_kv_table(cache, sequences, n, ...)        block_table and seq_lens of the run
 *     saccade_forward(...)
 *
 * Forked sequences share their pages; a page is copied when one of those that share it writes
 * to it. A cache allocates when it is created and never after (its tables are four bytes for
 * each page that each sequence may have), is not thread-safe, and stays as it was when a call
 * fails. */
#ifndef SACCADE_KV_H
#define SACCADE_KV_H

#include "saccade.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct saccade_kv saccade_kv;

typedef struct saccade_kv_options {
    size_t size;
    int64_t pages, page; /* of the pool; keys of a page: 1 to 2^30 each */
    int64_t sequences;   /* at most, at a time: 1 to 2^24 */
    int64_t most_keys;   /* of a sequence, at most 2^30; 0: as many as all pages hold */
} saccade_kv_options;
static inline void saccade_kv_options_init(saccade_kv_options *options)
{
    saccade_record_init(options, sizeof *options);
}

SACCADE_API saccade_status saccade_kv_create(const saccade_kv_options *options,
                                             saccade_kv **out, saccade_error *err);
SACCADE_API void saccade_kv_destroy(saccade_kv *cache);

/* A new sequence without keys; ELIMIT: there are as many as there may be. Numbers of sequences
 * that are freed come again. */
SACCADE_API saccade_status saccade_kv_add(saccade_kv *cache, int32_t *sequence,
                                          saccade_error *err);
/* A new sequence with all keys of this one, in the same pages. */
SACCADE_API saccade_status saccade_kv_fork(saccade_kv *cache, int32_t sequence, int32_t *child,
                                           saccade_error *err);
SACCADE_API saccade_status saccade_kv_free(saccade_kv *cache, int32_t sequence,
                                           saccade_error *err);
/* Keys from `length` on are forgotten (a draft that was refused). EINVAL: the page of the last
 * key that would stay was dropped, and is not full. */
SACCADE_API saccade_status saccade_kv_truncate(saccade_kv *cache, int32_t sequence,
                                               int64_t length, saccade_error *err);
/* Pages whose keys all lie before key `first` are given back and become absent, -1: of windows,
 * whose masks leave no such key live. Lengths and positions stay. */
SACCADE_API saccade_status saccade_kv_drop(saccade_kv *cache, int32_t sequence, int64_t first,
                                           saccade_error *err);

/* Room for counts[i] more keys in sequences[i], which differ from each other; for all of them
 * or, with ELIMIT, for none. Whoever shares a page that is written to gets one of its own. What
 * is to be written is known until the next grow that succeeds, fork, free, truncate or drop. */
SACCADE_API saccade_status saccade_kv_grow(saccade_kv *cache, const int32_t *sequences,
                                           const int32_t *counts, int32_t n,
                                           saccade_error *err);
/* Of the last grow, in its order: where each new key goes, as page * page size + key of the
 * page. For frameworks that write by themselves; they make the copies first. Returns how many
 * there are and writes at most `most`. */
SACCADE_API int64_t saccade_kv_slots(const saccade_kv *cache, int64_t *slots, int64_t most);
/* Pages of the last grow that must be copied before keys are written, with their scales where
 * pages have scales: pairs from, to. */
SACCADE_API int64_t saccade_kv_copies(const saccade_kv *cache, int32_t *pairs, int64_t most);
/* Makes the copies of the last grow in these pools on the host and writes its new keys: k
 * [all, Hkv, D] and v [all, Hkv, Dv], sequence by sequence, f32, f16 or bf16, rounded to the
 * pools' dtype. No two keys of a pool lie in one place. NULL for v_pool and v: V is a view of
 * K. */
SACCADE_API saccade_status saccade_kv_write(const saccade_kv *cache,
                                            const saccade_tensor *k_pool,
                                            const saccade_tensor *v_pool,
                                            const saccade_tensor *k, const saccade_tensor *v,
                                            saccade_error *err);

/* ---- new keys into pools, with a cache or without --------------------------------------- */

/* New keys are cast to their pool's dtype or, where that is e4m3, e5m2, i8 or i4, made codes,
 * in one launch, on the host or on a GPU. Codes obey saccade_quantize's rule: where each key
 * has scales of its own (tokens 1), they are made and written; others are read as they are,
 * and what is beyond them saturates. NULL for v and v_pool: V is a view of K.
 *
 * Where keys go lies where the pools lie and is read when the run is there: nothing waits, and
 * the launch can be captured in a graph. A key whose slot or page is -1 or lies outside of the
 * pool goes nowhere, and so do keys past cu_seqlens[B]. No two keys may have one place. */
typedef struct saccade_append_args {
    size_t size;
    const saccade_tensor *k, *v;           /* [N, Hkv, D]; f32, f16 or bf16 */
    const saccade_tensor *k_pool, *v_pool; /* [pages, Hkv, page, D] */
    const saccade_tensor *k_scale, *v_scale; /* as in saccade_forward_args, or NULL */
    int32_t k_scale_tokens, k_scale_channels, v_scale_tokens, v_scale_channels;
    /* [N] i32 or i64: page * page size + key of the page; NULL: those that follow say where */
    const saccade_tensor *slots;
    const saccade_pages *pages;       /* as the run takes them, no chunks; NULL: page b is all
                                       * of batch b */
    const saccade_tensor *kv_len;     /* [B] i32 keys of each batch, the new ones as its last,
                                       * as the run takes it; or pages.last_page_len */
    const saccade_tensor *cu_seqlens; /* [B + 1] i32: batch b's new keys are cu_seqlens[b] to
                                       * cu_seqlens[b + 1]; NULL: N / B each */
    void *stream;                     /* CUstream */
} saccade_append_args;
static inline void saccade_append_args_init(saccade_append_args *args)
{
    saccade_record_init(args, sizeof *args);
}
/* context may be NULL; its threads change no bit. */
SACCADE_API saccade_status saccade_append(const saccade_context *context,
                                          const saccade_append_args *args, saccade_error *err);
/* Compiles what saccade_append runs on a GPU, or takes it from the cache; else the first call
 * does. */
SACCADE_API saccade_status saccade_append_prepare(int32_t device, saccade_error *err);

/* ---- tables of a cache ------------------------------------------------------------------ */

/* The rows of these sequences: entries table[i * columns + ...], -1 past their ends, and their
 * lengths, either of which may be NULL. EINVAL: a sequence has more pages than columns. */
SACCADE_API saccade_status saccade_kv_table(const saccade_kv *cache, const int32_t *sequences,
                                            int32_t n, int32_t *table, int64_t columns,
                                            int32_t *lengths, saccade_error *err);
/* -1 for a sequence that is not there. */
SACCADE_API int64_t saccade_kv_length(const saccade_kv *cache, int32_t sequence);
SACCADE_API int64_t saccade_kv_free_pages(const saccade_kv *cache);

#ifdef __cplusplus
}
#endif
#endif
