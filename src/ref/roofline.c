/* What scalar code can reach on this machine: the level line above the ladder, which is scalar
 * too. Built, like the timed ladder, without vectorisation (cmake/library.cmake). */
#include "saccade_measure.h"

#include "base/clock.h"

enum {
    RUNS = 5,       /* the best counts: anything else on the machine only slows one down */
    CHAINS = 8,     /* as many as it takes to hide the latency of an addition */
    STEPS = 1 << 20 /* of each chain: some milliseconds */
};

/* CHAINS independent x = x * a + b, a multiplication and an addition each. */
static float run_chains(float a, float b)
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

double saccade_measure_scalar_gflops(void)
{
    volatile float sink;
    double best = 0;
    for (int run = 0; run < RUNS; run++) {
        const int64_t start = clock_thread_ns();
        sink = run_chains(0.5f, 1.0f);
        const double gflops = 2.0 * CHAINS * STEPS / (double)(clock_thread_ns() - start + 1);
        best = gflops > best ? gflops : best;
    }
    (void)sink;
    return best;
}
