/* Gradients of sinks: -exp(sink - lse) delta, summed over the rows that an element serves, from
 * what bwd_prepare left of them. One CTA an element; threads take every SINK_THREADS-th row and
 * their sums are added as a tree, so the order follows from the lengths alone. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "arith.cuh"
#include "mod.cuh"
#include "bwd_tile.cuh"
#include "sinks.cuh"

/* Whether row `at` of out is 0, as of a row without a live key. */
DEVICE int is_row_zero(const cu_fwd &p, int b, int h, int at)
{
    const out_elem *o = (const out_elem *)p.o + b * p.os.b + h * p.os.h + at * p.os.n;
    for (int i = 0; i < CFG_E_REAL; i++)
        if (to_float(o[i]) != 0.f)
            return 0;
    return 1;
}

/* Of row m of (b, h). Rows that weigh nothing have delta 0 there. Where dO is not finite, delta
 * is not either, but a row without a live key has that of its dlse alone (plan_sink_delta). */
DEVICE float sink_term(const cu_bwd &p, const sequence &s, int b, int h, int m)
{
    long long row = (long long)row_block(p, s, b, h, 0) * BWD_ROWS + m;
    int at = s.q_first + m;
    float sink = sink_of(p.f, b, h, m), minus_delta = p.minus_delta[row];
    float lse = p.f.lse[b * p.f.lse_s.b + h * p.f.lse_s.h + at * p.f.lse_s.n];
    if (sink == NEG_INF)
        return 0.f;
    if (minus_delta - minus_delta != 0.f && sink == lse && is_row_zero(p.f, b, h, at))
        minus_delta = p.dlse ? p.dlse[b * p.dlse_s.b + h * p.dlse_s.h + at * p.dlse_s.n] : 0.f;
    return expf(sink - lse) * minus_delta;
}

extern "C" __global__ void __launch_bounds__(SINK_THREADS)
    bwd_sinks(const __grid_constant__ cu_bwd p)
{
    __shared__ float sums[SINK_THREADS];
    int m0 = blockIdx.x % p.n_sinks_m, rest = blockIdx.x / p.n_sinks_m;
    int h = rest % p.f.H, b0 = rest / p.f.H, at = threadIdx.x;
    int batches = p.n_sinks_b == 1 ? p.f.B : 1;
    float sum = 0.f;
    for (int b = b0; b < b0 + batches; b++) {
        sequence s = sequence_at(p.f, b);
        int rows = p.n_sinks_m == 1 ? s.q_len : 1;
        for (int m = at; m < rows; m += SINK_THREADS)
            sum += sink_term(p, s, b, h, m0 + m);
    }
    sums[at] = sum;
    for (int half = SINK_THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (at < half)
            sums[at] += sums[at + half];
    }
    if (at == 0) {
        float *to = p.d_sinks + b0 * p.d_sinks_s.b + h * p.d_sinks_s.h + m0 * p.d_sinks_s.n;
        *to = p.added & BWD_OF_SINKS ? *to + sums[0] : sums[0];
    }
}
