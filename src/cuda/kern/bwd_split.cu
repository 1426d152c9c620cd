/* Before bwd_f32.cu: rows of Q, K, V and dO as three rows of bf16 numbers each, whose sum is
 * the row, the largest first, in whole panels of 64 columns. A thread has 8 columns of a row;
 * blockIdx.y says of which tensor. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "arith.cuh"
#include "mod.cuh"
#include "kv.cuh"
#include "bwd_copy.cuh"
#include "split.cuh"

enum { Q_PART, K_PART, V_PART, O_PART };

DEVICE void split_piece(u16 *to, const elem *row, int dim, int piece, int panels)
{
    float x[8];
    u32 w[4][3];
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        int column = piece * 8 + i;
        float4 y = column < dim ? __ldg((const float4 *)(row + column))
                                : make_float4(0.f, 0.f, 0.f, 0.f);
        x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        split_two(x[2 * i], x[2 * i + 1], w[i]);
#pragma unroll
    for (int k = 0; k < 3; k++)
        *(uint4 *)(to + k * panels * 64 + piece * 8) =
            make_uint4(w[0][k], w[1][k], w[2][k], w[3][k]);
}

extern "C" __global__ void __launch_bounds__(256)
    bwd_split(const __grid_constant__ cu_bwd p, const __grid_constant__ cu_thirds to)
{
    int part = blockIdx.y, is_query = part == Q_PART || part == O_PART;
    int dim = part == Q_PART || part == K_PART ? CFG_D_REAL : CFG_E_REAL;
    int panels = part == Q_PART || part == K_PART ? (CFG_D + 63) / 64 : (CFG_E + 63) / 64;
    int n = is_query ? p.f.M : p.f.N, heads = is_query ? p.f.H : p.f.G;
    long long id = (long long)blockIdx.x * 256 + threadIdx.x, at = id / (panels * 8);
    if (at >= (long long)p.f.B * heads * n)
        return;
    int row = at % n, h = at / n % heads, b = at / n / heads;
    const elem *from;
    if (part == O_PART)
        from = (const elem *)p.d_out + b * p.dos.b + h * p.dos.h + row * p.dos.n;
    else
        from = row_address(part == Q_PART   ? query_rows(p.f, b, h)
                           : part == K_PART ? key_rows(p.f, b, h)
                                            : value_rows(p.f, b, h),
                           row);
    split_piece((u16 *)to.rows[part] + at * (3 * 64 * panels), from, dim, id % (panels * 8),
                panels);
}
