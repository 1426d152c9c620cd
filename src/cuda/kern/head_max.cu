/* The largest of the maxima that forward left of each row, for each head: a CTA to a head of
 * one batch, or of all. */
#include "head_max.h"

#define DEVICE __device__ __forceinline__

enum { THREADS = 256, WARPS = THREADS / 32 };

/* NaN is larger than all. */
DEVICE float larger(float a, float b)
{
    return b > a || b != b ? b : a;
}

/* Of rows [0, n) that lie `step` apart, from `lane` on in strides of `lanes`. */
DEVICE float rows_max(float m, const float *rows, long long step, int n, int lane, int lanes)
{
    for (int i = lane; i < n; i += lanes)
        m = larger(m, rows[i * step]);
    return m;
}

/* Batches of equal numbers of rows: rows of all of them in turn. */
DEVICE float equal_max(const cu_head_max_run &p, const float *rows, int b, int past)
{
    float m = __int_as_float(0xff800000);
    long long n = (long long)(past - b) * p.M;
    for (long long j = threadIdx.x; j < n; j += THREADS)
        m = larger(m, rows[(b + j / p.M) * p.b + j % p.M * p.i]);
    return m;
}

/* Sequences: many have a warp each, few all threads. Whatever the numbers say, rows are those
 * of the run. */
DEVICE float ragged_max(const cu_head_max_run &p, const float *rows, int b, int past)
{
    float m = __int_as_float(0xff800000);
    int by_warp = past - b >= WARPS, warp = threadIdx.x / 32;
    int lane = by_warp ? threadIdx.x % 32 : threadIdx.x, lanes = by_warp ? 32 : THREADS;
    for (int s = b + (by_warp ? warp : 0); s < past; s += by_warp ? WARPS : 1) {
        int first = min(max(p.first[s], 0), p.all);
        int end = min(max(p.first[s + 1], 0), p.all);
        m = rows_max(m, rows + first * p.i, p.i, min(end - first, p.M), lane, lanes);
    }
    return m;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    head_max(const __grid_constant__ cu_head_max_run p)
{
    __shared__ float part[WARPS];
    int h = blockIdx.x % p.H, own = blockIdx.x / p.H;
    int b = p.is_joint ? 0 : own, past = p.is_joint ? p.B : own + 1;
    const float *rows = p.rows + h * p.h;
    float m = p.first ? ragged_max(p, rows, b, past) : equal_max(p, rows, b, past);
    for (int step = 16; step; step /= 2)
        m = larger(m, __shfl_xor_sync(~0u, m, step));
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = m;
    __syncthreads();
    if (threadIdx.x)
        return;
    for (int w = 1; w < WARPS; w++)
        m = larger(m, part[w]);
    p.out[b * p.out_b + h * p.out_h] = m;
}
