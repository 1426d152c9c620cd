/* dK and dV of KV heads whose queries were cut into parts: sums of what the parts left in f32,
 * in their order. Threads take four neighbours of a row, or one where rows are not whole fours.
 */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "arith.cuh"
#include "mod.cuh"
#include "bwd_copy.cuh"
#include "bwd_store.cuh"

template <int N> struct few {
    float x[N];
};

DEVICE few<4> load_few(const float *at, few<4>)
{
#if CFG_SM >= 90
    float4 y = load_new4(at);
#else
    float4 y = *(const float4 *)at;
#endif
    return {{y.x, y.y, y.z, y.w}};
}

DEVICE few<1> load_few(const float *at, few<1>)
{
    return {{load_float(at)}};
}

DEVICE void put_few(const result &to, long long at, const few<4> &y)
{
    put_two(to, at, y.x[0], y.x[1]);
    put_two(to, at + 2, y.x[2], y.x[3]);
}

DEVICE void put_few(const result &to, long long at, const few<1> &y)
{
    put_float(to, at, y.x[0]);
}

/* Rows of REAL columns, N of them a thread. from: [B][G][parts][keys][REAL]. */
template <int REAL, int N>
DEVICE void join(const cu_bwd &p, const float *from, void *data, const cu_stride &s, int which)
{
    long long i = (long long)blockIdx.x * JOIN_THREADS + threadIdx.x;
    long long row = i / (REAL / N), head = row / p.f.N, part = (long long)p.f.N * REAL;
    int column = (int)(i % (REAL / N)) * N, key = (int)(row % p.f.N);
    if (head >= (long long)p.f.B * p.f.G)
        return;
    const float *at = from + head * p.parts * part + (long long)key * REAL + column;
    few<N> sum = load_few(at, few<N>());
    for (int k = 1; k < p.parts; k++) {
        few<N> next = load_few(at + k * part, few<N>());
#pragma unroll
        for (int n = 0; n < N; n++)
            sum.x[n] += next.x[n];
    }
    int b = (int)(head / p.f.G), g = (int)(head % p.f.G);
#if HAS_OWN_PLACES
    put_few(owned_row(p, which == BWD_OF_V, b, g, key, REAL), column, sum);
#else
    put_few(result_from(result_of(p, data, s, b, g, column, which), key), 0, sum);
#endif
}

template <int REAL>
DEVICE void join_rows(const cu_bwd &p, const float *from, void *data, const cu_stride &s,
                      int which)
{
    if (REAL % 4 == 0 && !p.f.is_plain)
        join<REAL, REAL % 4 ? 1 : 4>(p, from, data, s, which);
    else
        join<REAL, 1>(p, from, data, s, which);
}

extern "C" __global__ void __launch_bounds__(JOIN_THREADS)
    bwd_join(const __grid_constant__ cu_bwd p)
{
#if CFG_SM >= 90
    grid_wait_before();
    grid_let_next();
#endif
    if (blockIdx.y == 0 && p.dk)
        join_rows<CFG_D_REAL>(p, p.parts_k, p.dk, p.dks, BWD_OF_K);
    if (blockIdx.y == 1 && p.dv)
        join_rows<CFG_E_REAL>(p, p.parts_v, p.dv, p.dvs, BWD_OF_V);
}
