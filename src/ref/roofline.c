/* The limits of one core of this machine, measured: bytes a second from memory, scalar FLOP/s
 * (what the ladder is written in), and FLOP/s of the widest fused multiply-add the CPU has.
 * Best of several short runs, since anything else on the machine only slows one down. */
#include "saccade.h"

#include "base/clock.h"
#include "base/cpu_features.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    RUNS = 5,
    STEPS = 1 << 20 /* of each chain: some milliseconds */
};

/* ---- memory ---- */

/* Reads all of x: 8 independent sums, so that only memory limits. */
static uint64_t read_all(const uint64_t *x, size_t n)
{
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++)
            sum[k] += x[i + (size_t)k];
    for (int k = 1; k < 8; k++)
        sum[0] += sum[k];
    return sum[0];
}

/* Twice the last cache, so that little of it can be reused, within 64 to 512 MiB. */
static size_t far_bytes(void)
{
    const int64_t least = (int64_t)64 << 20, most = (int64_t)512 << 20;
    const int64_t wanted = 2 * cpu_features_get()->l3_bytes;
    return (size_t)(wanted < least ? least : wanted > most ? most : wanted);
}

static saccade_status measure_memory(double *bytes_per_second, saccade_error *err)
{
    const size_t bytes = far_bytes();
    volatile uint64_t sink;
    uint64_t *x = malloc(bytes);
    double best = 0;
    FAIL_IF_NULL(x);
    memset(x, 1, bytes);
    for (int run = 0; run < RUNS; run++) {
        const int64_t start = clock_ns();
        sink = read_all(x, bytes / sizeof *x);
        const double speed = (double)bytes / (double)(clock_ns() - start) * 1e9;
        best = speed > best ? speed : best;
    }
    (void)sink;
    free(x);
    *bytes_per_second = best;
    return SACCADE_OK;
}

/* ---- arithmetic ---- */

/* Eight independent x = x * a + b, a multiplication and an addition each; the compiler is told
 * not to vectorise this folder (CMakeLists.txt). */
static float scalar_chains(float a, float b)
{
    float x0 = a, x1 = a, x2 = a, x3 = a, x4 = a, x5 = a, x6 = a, x7 = a;
    for (int i = 0; i < STEPS; i++) {
        x0 = x0 * a + b;
        x1 = x1 * a + b;
        x2 = x2 * a + b;
        x3 = x3 * a + b;
        x4 = x4 * a + b;
        x5 = x5 * a + b;
        x6 = x6 * a + b;
        x7 = x7 * a + b;
    }
    return x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7;
}

/* The same with the CPU's own instruction: the one place of this folder that needs compiler
 * extensions, since C has no other way to name an instruction set. */
#if defined(__GNUC__) && defined(__x86_64__)
#define FMA_CHAINS(name, isa, vector, set1, fmadd, first)                              \
    __attribute__((target(isa))) static float name(float a, float b)                   \
    {                                                                                  \
        const vector va = set1(a), vb = set1(b);                                       \
        vector x0 = va, x1 = va, x2 = va, x3 = va, x4 = va, x5 = va, x6 = va, x7 = va; \
        vector x8 = va, x9 = va;                                                       \
        for (int i = 0; i < STEPS; i++) {                                              \
            x0 = fmadd(x0, va, vb);                                                    \
            x1 = fmadd(x1, va, vb);                                                    \
            x2 = fmadd(x2, va, vb);                                                    \
            x3 = fmadd(x3, va, vb);                                                    \
            x4 = fmadd(x4, va, vb);                                                    \
            x5 = fmadd(x5, va, vb);                                                    \
            x6 = fmadd(x6, va, vb);                                                    \
            x7 = fmadd(x7, va, vb);                                                    \
            x8 = fmadd(x8, va, vb);                                                    \
            x9 = fmadd(x9, va, vb);                                                    \
        }                                                                              \
        return first(x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7 + x8 + x9);                 \
    }
FMA_CHAINS(fma_avx2, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_cvtss_f32)
FMA_CHAINS(fma_avx512, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_cvtss_f32)
#endif

/* A way to compute, and its FLOPs in one step of its loop. */
typedef struct chains {
    float (*run)(float a, float b);
    double flops;
} chains;

static chains widest(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    const cpu_features *cpu = cpu_features_get();
    if (cpu->has_avx512f)
        return (chains){fma_avx512, 10 * 16 * 2};
    if (cpu->has_avx2 && cpu->has_fma)
        return (chains){fma_avx2, 10 * 8 * 2};
#endif
    return (chains){scalar_chains, 8 * 2};
}

static double measure_flops(chains c)
{
    volatile float sink;
    double best = 0;
    for (int run = 0; run < RUNS; run++) {
        const int64_t start = clock_ns();
        sink = c.run(0.5f, 1.0f);
        const double speed = c.flops * STEPS / (double)(clock_ns() - start) * 1e9;
        best = speed > best ? speed : best;
    }
    (void)sink;
    return best;
}

saccade_status saccade_roofline_measure(saccade_roofline *out, saccade_error *err)
{
    saccade_roofline r;
    FAIL_IF(!out, SACCADE_EINVAL, "roofline: got NULL, expected where to put the result");
    TRY(measure_memory(&r.bytes_per_second, err));
    r.scalar_flops = measure_flops((chains){scalar_chains, 8 * 2});
    r.fma_flops = measure_flops(widest());
    *out = r;
    return SACCADE_OK;
}
