/* saccade_measure_ceilings: what this machine gives at most, measured with the same threads as
 * the kernels, so that a benchmark can say how near they come. Each figure is the best of
 * several short runs. */
#include "measure/ceiling.h"

#include "base/clock.h"
#include "base/cpu_features.h"
#include "base/parallel.h"
#include "base/record.h"
#include "base/status.h"
#include "plan/plan.h"
#include "saccade_config.h"
#include "saccade_measure.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    REPEATS = 5,
    LINE_BYTES = 64,
    PAGE_BYTES = 4096,
    RUN_NS = 30000000 /* one run of a flops loop */
};

static const cpu_ceiling *const levels[CPU_LEVELS] = {
    [CPU_PORTABLE] = &cpu_ceiling_portable,
#if HAVE_LEVEL_AVX2
    [CPU_AVX2] = &cpu_ceiling_avx2,
#endif
#if HAVE_LEVEL_AVX512
    [CPU_AVX512] = &cpu_ceiling_avx512,
#endif
#if HAVE_LEVEL_AMX
    [CPU_AMX] = &cpu_ceiling_amx,
#endif
};

typedef struct flops_work {
    CPU_CEILING_FLOPS((*loop));
    int64_t rounds;
    const void *data;
} flops_work;

static void run_flops(void *arg, int64_t item, int thread)
{
    const flops_work *w = arg;
    (void)item, (void)thread;
    w->loop(w->rounds, w->data);
}

/* The quickest of several runs of as many rounds, ns: others may be using the machine too. */
static int64_t quickest(flops_work *w, int threads)
{
    int64_t best = INT64_MAX;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        const int64_t begin = clock_ns();
        par_for(threads, threads, run_flops, w);
        const int64_t ns = clock_ns() - begin;
        best = ns < best ? ns : best;
    }
    return best > 0 ? best : 1;
}

/* As many rounds as keep one thread busy for long enough; then all threads with as many. */
static double best_gflops(CPU_CEILING_FLOPS((*loop)), int threads, const void *data)
{
    flops_work w = {loop, 1 << 12, data};
    while (quickest(&w, 1) < RUN_NS / 2)
        w.rounds *= 2;
    return (double)threads * (double)w.rounds * loop(1, data) / (double)quickest(&w, threads);
}

typedef struct read_work {
    CPU_CEILING_READ((*loop));
    const char *data;
    size_t part;
    uint64_t *sums; /* one cache line each */
} read_work;

static void run_read(void *arg, int64_t item, int thread)
{
    const read_work *w = arg;
    (void)thread;
    w->sums[8 * item] = w->loop(w->data + (size_t)item * w->part, w->part);
}

/* Well past the last cache, and not more than an eighth of memory. */
static size_t read_size(void)
{
    const size_t least = (size_t)256 << 20;
    size_t bytes = least;
#if defined(_SC_LEVEL3_CACHE_SIZE) && defined(_SC_PHYS_PAGES)
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE), pages = sysconf(_SC_PHYS_PAGES);
    const long page = sysconf(_SC_PAGESIZE);
    if (cache > 0 && pages > 0 && page > 0) {
        const size_t eighth = (size_t)pages * (size_t)page / 8;
        while (bytes < 2 * (size_t)cache && 2 * bytes <= eighth)
            bytes *= 2;
    }
#endif
    return bytes;
}

/* Once, from the first whole line on, as many pages to each thread: GB/s. */
static saccade_status read_once(const cpu_ceiling *c, int threads, const char *data,
                                size_t bytes, double *rate, saccade_error *err)
{
    const size_t before = (LINE_BYTES - (uintptr_t)data % LINE_BYTES) % LINE_BYTES;
    const size_t part = (bytes - before) / (size_t)threads / PAGE_BYTES * PAGE_BYTES;
    uint64_t *sums = calloc(8 * (size_t)threads, sizeof *sums);
    read_work w = {c->read, data + before, part, sums};
    FAIL_IF_NULL(sums);
    const int64_t begin = clock_ns();
    par_for(threads, threads, run_read, &w);
    const int64_t ns = clock_ns() - begin;
    *rate = (double)part * threads / (double)(ns > 0 ? ns : 1);
    free(sums);
    return SACCADE_OK;
}

static saccade_status best_read(const cpu_ceiling *c, int threads, saccade_ceilings *out,
                                saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const size_t bytes = read_size();
    char *data = aligned_alloc(PAGE_BYTES, bytes);
    double best = 0, rate;
    FAIL_IF_NULL(data);
    memset(data, 1, bytes);
    for (int repeat = 0; repeat < REPEATS && status == SACCADE_OK; repeat++) {
        status = read_once(c, threads, data, bytes, &rate, err);
        best = status == SACCADE_OK && rate > best ? rate : best;
    }
    out->read_gbytes_per_s = best;
    out->read_bytes = (int64_t)bytes;
    free(data);
    return status;
}

/* Numbers near 1, alike to the eye of neither multiplier nor compressor. */
static void fill(uint16_t *bf16, float *f32)
{
    uint32_t seed = 12345;
    for (int i = 0; i < CPU_CEILING_BYTES / 4; i++) {
        seed = seed * 1664525 + 1013904223;
        f32[i] = 0.5f + (float)(seed >> 9) * 0x1p-24f;
    }
    for (int i = 0; i < CPU_CEILING_BYTES / 2; i++) {
        seed = seed * 1664525 + 1013904223;
        bf16[i] = (uint16_t)((seed >> 31 << 15) | (0x3f00 + (seed >> 24 & 127)));
    }
}

/* Loops of the context's level, or the best below that is there. */
static const cpu_ceiling *loops_of(const saccade_context *context)
{
    int level = context->level;
    while (!levels[level])
        level--;
    return levels[level];
}

saccade_status saccade_measure_read(const saccade_context *context, const void *data,
                                    int64_t bytes, double *gbytes_per_s, saccade_error *err)
{
    FAIL_AT(!context || !data || !gbytes_per_s, SACCADE_EINVAL, "read", 0, 0,
            "got NULL, expected a context, memory and a place for the rate");
    FAIL_AT(bytes < (context->threads + (int64_t)1) * PAGE_BYTES, SACCADE_EINVAL, "read", 0, 0,
            "got %lld bytes, expected a page to each of %d threads and one more",
            (long long)bytes, context->threads);
    return read_once(loops_of(context), context->threads, data, (size_t)bytes, gbytes_per_s,
                     err);
}

saccade_status saccade_measure_ceilings(const saccade_context *context, saccade_ceilings *out,
                                        saccade_error *err)
{
    FAIL_AT(!context, SACCADE_EINVAL, "ceilings", 0, 0, "got NULL, expected a context");
    TRY(record_check_size(out, "ceilings", err));
    const cpu_ceiling *c = loops_of(context);
    const cpu_features *has = cpu_features_get();
    _Alignas(64) uint16_t bf16[CPU_CEILING_BYTES / 2];
    _Alignas(64) float f32[CPU_CEILING_BYTES / 4];
    const int can_dot = c == levels[CPU_AMX] || has->has_avx512_bf16;
    fill(bf16, f32);
    saccade_ceilings made = {.fma_gflops = best_gflops(c->fma, context->threads, f32)};
    made.bf16_gflops = made.fma_gflops;
    if (c->bf16_dot && can_dot)
        made.bf16_gflops = best_gflops(c->bf16_dot, context->threads, bf16);
    TRY(best_read(c, context->threads, &made, err));
    record_write(out, &made, sizeof made);
    return SACCADE_OK;
}
