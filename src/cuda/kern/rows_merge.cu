/* Partial results of rows, each over a window of keys, become one in float32, window after
 * window; the last one adds sinks and writes the result:
 *     m = max(lse, lse')   w = exp(lse - m)   w' = exp(lse' - m)
 *     out = (w out + w' out') / (w + w')      lse = m + log(w + w')
 * A side of -inf leaves the other as it is and is not read; a lse of NaN or +inf makes the row
 * NaN. A warp to each row; blockIdx.y is a batch and head. */
#include "elements.cuh"
#include "merge.h"

#define INFINITE __uint_as_float(0x7f800000u)

enum { MERGE_THREADS = 256 };

DEVICE float power_of_e(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

DEVICE float log_of(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y * 0.6931471805599453f;
}

DEVICE char *row_at(const cu_merge_side &s, int b, int h, int row)
{
    return (char *)s.data + b * s.b + h * s.h + row * s.n;
}

/* Weights of the two sides, which become one of this lse. */
DEVICE float join(float lse, float other, float &w, float &w_other)
{
    w = 1.f, w_other = 0.f;
    if (other == -INFINITE)
        return lse;
    if (lse == -INFINITE) {
        w = 0.f, w_other = 1.f;
        return other;
    }
    float m = other > lse || other != other ? other : lse;
    w = power_of_e(lse - m), w_other = power_of_e(other - m);
    float all = w + w_other;
    w = w / all, w_other = w_other / all;
    return m + log_of(all);
}

DEVICE float sink_of(const cu_merge &m, int b, int h, int row)
{
    float x = m.sinks.data ? load_as(row_at(m.sinks, b, h, row), 0, m.sinks.dtype) : -INFINITE;
    return x == INFINITE ? __uint_as_float(0x7fc00000u) : x;
}

DEVICE void raise(const cu_merge &m, int b, int h, int row, long long at)
{
    float *to = (float *)row_at(m.row_max, b, h, row);
    float x = m.part_max ? m.part_max[at] : -INFINITE, most = m.is_first ? -INFINITE : *to;
    *to = x != x || x > most ? x : most;
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    rows_merge(const __grid_constant__ cu_merge m)
{
    int row = blockIdx.x * (MERGE_THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
    int b = blockIdx.y / m.heads, h = blockIdx.y % m.heads;
    if (row >= m.rows)
        return;
    long long at = (long long)blockIdx.y * m.rows + row;
    if (m.row_max.data && lane == 0)
        raise(m, b, h, row, at);
    float lse = !m.lse ? 0.f : m.is_first ? -INFINITE : m.lse[at], old, added, kept = 1.f, none;
    float other = m.part ? m.part_lse[at] : -INFINITE;
    int is_dead = other == -INFINITE, is_new = lse == -INFINITE;
    if (is_dead && !m.is_first && !m.is_last)
        return;
    lse = join(lse, other, old, added);
    if (m.is_last && m.lse)
        lse = join(lse, sink_of(m, b, h, row), kept, none);
    const float *part = m.part + at * m.dim;
    float *sum = m.sum + at * m.dim;
    char *out = m.is_last ? row_at(m.out, b, h, row) : 0;
    for (int i = lane; i < m.dim; i += 32) {
        float x = (is_new ? 0.f : old * sum[i]) + (is_dead ? 0.f : added * part[i]);
        if (m.is_last)
            store_as(out, i, m.out.dtype,
                     x * kept + (m.is_added ? load_as(out, i, m.out.dtype) : 0.f));
        else
            sum[i] = x;
    }
    __syncwarp();
    if (lane == 0 && m.is_last && m.out_lse.data)
        *(float *)row_at(m.out_lse, b, h, row) = lse;
    else if (lane == 0 && !m.is_last)
        m.lse[at] = lse;
}
