/* Rows of keys from where they lie to where they are wanted: out of a rank's tensors into
 * messages, out of messages and of its own tensors into the pool of the whole sequence; and the
 * way back, where gradients of a key from several ranks are added up in the order of ranks.
 * blockIdx.y is a batch and head, blockIdx.z 0 for K and 1 for V. */
#include "elements.cuh"
#include "move.h"

enum { MOVE_THREADS = 256, EACH = 4 };

/* row: number of the row in a tensor, or of its peer's in a message */
DEVICE char *row_of(const cu_rows &r, int heads, int row, const cu_row_pair &p)
{
    int b = blockIdx.y / heads, h = blockIdx.y % heads, B = gridDim.y / heads;
    long long at = row;
    if (r.is_packed)
        at += (long long)p.before * B + (long long)b * p.keys;
    return (char *)r.data + (r.is_packed ? 0 : b * r.b) + h * r.h + at * r.n;
}

/* EACH units a thread, all read before any is written: that many loads are under way. */
template <class Unit> DEVICE void move_rows(const cu_move &m)
{
    int lane = blockIdx.z;
    unsigned parts = m.bytes[lane] / sizeof(Unit), units = m.n * parts;
    unsigned first = blockIdx.x * MOVE_THREADS * EACH + threadIdx.x;
    Unit held[EACH], *to[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        unsigned at = first + i * MOVE_THREADS;
        to[i] = 0;
        if (at >= units)
            continue;
        unsigned row = at / parts, part = at - row * parts;
        cu_row_pair p = m.pair[row];
        held[i] = ((const Unit *)row_of(m.from[lane], m.heads, p.from, p))[part];
        to[i] = (Unit *)row_of(m.to[lane], m.heads, p.to, p) + part;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (to[i])
            *to[i] = held[i];
}

extern "C" __global__ void __launch_bounds__(MOVE_THREADS)
    rows_move(const __grid_constant__ cu_move m)
{
    if (m.unit == 16)
        move_rows<uint4>(m);
    else if (m.unit == 4)
        move_rows<unsigned>(m);
    else
        move_rows<unsigned short>(m);
}

/* ---- gradients ---- */

/* Sum of the terms of a row's columns i and on. */
template <int COLUMNS> DEVICE void sum_columns(const cu_sum &s, int row, int i)
{
    int lane = blockIdx.z;
    cu_row_pair here = {row, row, 0, 0};
    char *to = row_of(s.to[lane], s.heads, row, here);
    float sum[COLUMNS] = {0.f};
    for (int t = s.start[row]; t < s.start[row + 1]; t++) {
        cu_row_pair p = s.term[t];
        const char *from = p.from >= 0 ? row_of(s.pool[lane], s.heads, p.from, p)
                                       : row_of(s.got[lane], s.heads, p.to, p);
        if (COLUMNS == 4) {
            float4 x = *(const float4 *)((const float *)from + i);
            sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
        } else {
            sum[0] += ((const float *)from)[i];
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        store_as(to, i + c, s.dtype[lane],
                 sum[c] + (s.added >> lane & 1 ? load_as(to, i + c, s.dtype[lane]) : 0.f));
}

/* A warp to each row. */
extern "C" __global__ void __launch_bounds__(MOVE_THREADS)
    rows_sum(const __grid_constant__ cu_sum s)
{
    int lane = blockIdx.z, at = threadIdx.x & 31;
    int row = blockIdx.x * (MOVE_THREADS / 32) + threadIdx.x / 32;
    if (row >= s.n || !(s.wanted >> lane & 1))
        return;
    row = s.rows ? s.rows[row] : row;
    if (s.unit == 4)
        for (int i = 4 * at; i < s.dim[lane]; i += 128)
            sum_columns<4>(s, row, i);
    else
        for (int i = at; i < s.dim[lane]; i += 32)
            sum_columns<1>(s, row, i);
}
