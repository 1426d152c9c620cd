/* Batches that share keys: the lists of the two runs that stand for one (prefix_lists.h), a CTA
 * to a piece or a batch; and their results merged, a warp to a row of one head. */
#include "elements.cuh"
#include "prefix_lists.h"

enum { LIST_THREADS = 128, MERGE_WARPS = 8 };

extern "C" __global__ void __launch_bounds__(LIST_THREADS)
    prefix_write(const __grid_constant__ prefix_lists l)
{
    int i = blockIdx.x;
    if (i <= l.pieces)
        prefix_write_piece(&l, i, prefix_find_piece(&l, i), threadIdx.x, LIST_THREADS);
    else {
        int b = i - l.pieces - 1;
        prefix_write_rest(&l, b, prefix_find_group(&l, b), threadIdx.x, LIST_THREADS);
    }
}

/* NaN is larger than all. */
DEVICE float greater(float a, float b)
{
    return b > a || b != b ? b : a;
}

extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS)
    prefix_merge_rows(const __grid_constant__ prefix_merge m)
{
    const float none = __int_as_float(0xff800000), nan = __int_as_float(0x7fffffff);
    long long row = (long long)blockIdx.x * MERGE_WARPS + threadIdx.x / 32;
    if (row >= (long long)m.B * m.Q * m.H)
        return;
    int h = row % m.H, i = row / m.H % m.Q, b = row / m.H / m.Q, lane = threadIdx.x & 31;
    int is_shared = b >= m.groups[0] && b < m.groups[m.n];
    float l0 = is_shared ? m.lse[0][row] : none, l1 = m.lse[1][row];
    float most = greater(l0, l1);
    if (most == -none)
        most = nan;
    float w0 = l0 == none ? 0 : __expf(l0 - most), w1 = l1 == none ? 0 : __expf(l1 - most);
    float sum = most == none ? 1 : w0 + w1, scale = 1 / sum;
    const float *o0 = m.out[0] + row * m.Dv, *o1 = m.out[1] + row * m.Dv;
    long long to = b * m.to_stride[0] + h * m.to_stride[1] + i * m.to_stride[2];
    for (int d = lane; d < m.Dv; d += 32) {
        /* a part without keys adds nothing, whatever its out holds */
        float x = l0 == none ? 0 : w0 * scale * o0[d];
        store_as((char *)m.to, to + d, m.dtype, l1 == none ? x : x + w1 * scale * o1[d]);
    }
    if (lane)
        return;
    if (m.to_lse)
        m.to_lse[b * m.lse_stride[0] + h * m.lse_stride[1] + i * m.lse_stride[2]] =
            most + logf(sum);
    if (m.to_max)
        m.to_max[b * m.max_stride[0] + h * m.max_stride[1] + i * m.max_stride[2]] =
            greater(is_shared ? m.max[0][row] : none, m.max[1][row]);
}
