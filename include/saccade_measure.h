/* saccade_measure.h: what algorithms cost and what a machine gives: the published algorithms
 * with every access counted, the ceilings of processors and memory, and timers on a device.
 * Nothing here is needed to compute attention. The rules of saccade.h hold. */
#ifndef SACCADE_MEASURE_H
#define SACCADE_MEASURE_H

#include "saccade.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the ladder ------------------------------------------------------------------------ */

/* The published algorithms, from naive softmax to split keys and the recomputing backward, on
 * one random problem of N queries and keys of dim d, in scalar f32 on one core. Every access to
 * slow memory and every FLOP is counted while it runs. See docs/ladder.md. */
typedef struct saccade_ladder_options {
    size_t size;
    int64_t N, d;      /* 1 to 4096, 1 to 1024 */
    int64_t M;         /* elements on the chip, d to N d */
    int64_t block;     /* scores per block of block-online softmax */
    int64_t splits;    /* of the keys in decoding, 1 to N */
    uint64_t seed;
    const char *only;  /* one algorithm's name; NULL: all */
    int32_t is_timed;  /* 0: count only, seconds and error are 0 */
} saccade_ladder_options;
static inline void saccade_ladder_options_init(saccade_ladder_options *options)
{
    saccade_record_init(options, sizeof *options);
    options->N = 1024;
    options->d = 64;
    options->M = 49152; /* 192 KiB: the chip memory of one A100 multiprocessor */
    options->block = 256;
    options->splits = 8;
    options->seed = 1;
    options->is_timed = 1;
}

/* What one algorithm did, beside the closed formulas its counters must equal. Texts are static.
 * Accesses and memory are in elements of 4 bytes. */
typedef struct saccade_ladder_row {
    size_t size;
    const char *name, *title, *source;
    const char *accesses_text, *flops_text, *stated_text;
    int64_t reads, writes, accesses; /* counted, counted, the formula's */
    int64_t flops_counted, flops;    /* counted, the formula's */
    int64_t repeats;                 /* exponentials taken again, not in flops */
    double stated;                   /* accesses as the source states them, or their order */
    double passes;                   /* walks over the keys in slow memory, per query */
    double intensity;                /* FLOPs per byte of slow memory */
    int64_t extra, chip;             /* slow memory besides input and output; on the chip */
    double seconds;                  /* of its thread, best of some runs */
    double error;                    /* largest |result - float64| */
} saccade_ladder_row;

/* Calls `row` after each algorithm, in order; a nonzero answer ends the run. */
SACCADE_API saccade_status saccade_ladder_run(const saccade_ladder_options *options,
                                              int (*row)(void *user,
                                                         const saccade_ladder_row *row),
                                              void *user, saccade_error *err);
/* What the ladder's scalar code can reach on one core: multiplications and additions in f32,
 * measured in some milliseconds. */
SACCADE_API double saccade_measure_scalar_gflops(void);

/* ---- what this machine gives at most ------------------------------------------------- */

/* Measured with the context's threads and level, in about a second. No context is NULL here. */
typedef struct saccade_ceilings {
    size_t size;
    double fma_gflops;        /* f32 multiply-adds */
    double bf16_gflops;       /* bf16 by the level's best instructions: tiles (loaded from the
                               * first-level cache, random numbers: zeros and tiles kept in
                               * registers are faster), dot products, or f32 multiply-adds */
    double read_gbytes_per_s; /* of memory */
    int64_t read_bytes;       /* of memory that was read: twice the last cache, and more */
} saccade_ceilings;
static inline void saccade_ceilings_init(saccade_ceilings *ceilings)
{
    saccade_record_init(ceilings, sizeof *ceilings);
}
SACCADE_API saccade_status saccade_measure_ceilings(const saccade_context *context,
                                                    saccade_ceilings *out, saccade_error *err);
/* Reads `bytes` at `data` once, in order, a part to each of the context's threads: GB/s. Beside
 * timed runs over the same memory it tells what memory gave in those moments. EINVAL: NULL, of
 * the context too, or less than a page to a thread and one more. */
SACCADE_API saccade_status saccade_measure_read(const saccade_context *context,
                                                const void *data, int64_t bytes,
                                                double *gbytes_per_s, saccade_error *err);

/* The same for a CUDA device, in about 0.1 s and with 2 GiB of its memory. */
typedef struct saccade_device_ceilings {
    size_t size;
    double bf16_gflops;       /* tensor cores, bf16 with f32 sums */
    double copy_gbytes_per_s; /* of its memory, bytes read and bytes written */
} saccade_device_ceilings;
static inline void saccade_device_ceilings_init(saccade_device_ceilings *ceilings)
{
    saccade_record_init(ceilings, sizeof *ceilings);
}
SACCADE_API saccade_status saccade_measure_device(int32_t device, saccade_device_ceilings *out,
                                                  saccade_error *err);

/* Time on a stream, by events. is_cold: L2 is overwritten before the clock starts. end waits
 * for the stream. */
typedef struct saccade_device_timer saccade_device_timer;
SACCADE_API saccade_status saccade_device_timer_create(int32_t device,
                                                       saccade_device_timer **out,
                                                       saccade_error *err);
SACCADE_API saccade_status saccade_device_timer_begin(saccade_device_timer *timer, void *stream,
                                                      int is_cold, saccade_error *err);
SACCADE_API saccade_status saccade_device_timer_end(saccade_device_timer *timer, void *stream,
                                                    double *seconds, saccade_error *err);
SACCADE_API void saccade_device_timer_destroy(saccade_device_timer *timer);

#ifdef __cplusplus
}
#endif
#endif
