/* Second pass over rows whose first result was not finite or whose sum was lost: it overflowed
 * under a late offset, scores were beyond what rounding in log2 units allows, a NaN or infinity
 * lay in V at a masked key, or the row really holds one. One warp a row, plain f32, and V is
 * read at live keys only, so whatever is not finite now is the answer. Slow, and almost never
 * has anything to do; then it costs one look at the flags. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "arith.cuh"
#include "mod.cuh"
#include "careful.cuh"

/* flags holds one word for every group of 16 rows, a bit each, in the order of the tiles' own
 * rows. Looking keys up in a chunk table takes registers, and so leaves room for fewer CTAs. */
extern "C" __global__ void __launch_bounds__(128, CFG_CHUNKS ? 4 : 6)
    careful(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
    int n = p.n_tiles * p.tile_groups;
#if CFG_SM >= 90
    grid_let_next(); /* the next run's first kernel, whose wait is for this one */
    grid_wait_before();
#endif
    for (int base = blockIdx.x * 32; base < n; base += gridDim.x * 32) {
        int at = base + (threadIdx.x & 31);
        u32 todo = __ballot_sync(~0u, at < n && p.flags[at] != 0);
        for (; todo; todo &= todo - 1) {
            int group = base + __ffs(todo) - 1;
            tile t = tile_at(p, group / p.tile_groups, p.tile_groups * 16);
            for (int i = threadIdx.x / 32; i < 16; i += 4) {
                int m = t.row0 + group % p.tile_groups * 16 + i;
                if (m < rows_of(p, t) && p.flags[group] >> i & 1)
                    redo_row(p, mod, t, m);
            }
        }
    }
}

#if CFG_RAGGED
/* What a run begins with: counters from 0, and the order of the tiles that have rows. Sequences
 * come by the keys they have, the longest first, in classes; each goes head by head, so that K
 * and V stay in L2, the last rows first. One CTA, a team of threads for each sequence. */
enum { CLASSES = 512, BEGIN_THREADS = 1024, TEAMS = BEGIN_THREADS / 32 };

DEVICE int class_of(const cu_fwd &p, const tile &t)
{
    return CLASSES - 1 - (int)((long long)t.kv_len * CLASSES / (p.N + 1ll));
}

DEVICE int blocks_of(const cu_fwd &p, const tile &t)
{
    return t.q_len < p.ragged.least ? 0 : (t.q_len + CFG_TILE_ROWS - 1) / CFG_TILE_ROWS;
}

/* at[c], tiles of class c, becomes those of the classes before; at[CLASSES] all. */
DEVICE void sum_classes(int *at)
{
    int c = threadIdx.x, own = c < CLASSES ? at[c] : 0, sum = own;
    for (int step = 1; step < CLASSES; step *= 2) {
        __syncthreads();
        int before = c >= step && c < CLASSES ? at[c - step] : 0;
        __syncthreads();
        sum += before;
        if (c < CLASSES)
            at[c] = sum;
    }
    __syncthreads();
    if (c < CLASSES)
        at[c] = sum - own;
    if (c == CLASSES - 1)
        at[CLASSES] = sum;
    __syncthreads();
}

/* Tiles of sequence b, by one of `team` threads, from place `first` of the order on; those
 * without rows have nothing that is to be done again. */
DEVICE void list_tiles(const cu_fwd &p, const tile &t, int first, int thread, int team)
{
    int n = blocks_of(p, t);
    for (int i = thread; i < p.H * p.n_qblk; i += team) {
        int h = i / p.n_qblk, block = i - h * p.n_qblk, id = t.id + i;
        if (block < n)
            p.ragged.order[first + h * n + n - 1 - block] = id;
        for (int g = 0; block >= n && g < p.tile_groups; g++)
            p.flags[id * p.tile_groups + g] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(BEGIN_THREADS)
    begin(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
    __shared__ int at[CLASSES + 1], first[TEAMS];
    int team = p.B < TEAMS ? BEGIN_THREADS : 32, mine = threadIdx.x / team;
    int thread = threadIdx.x % team, stride = p.H * p.n_qblk;
    if (threadIdx.x < CLASSES)
        at[threadIdx.x] = 0;
    __syncthreads();
    for (int b = threadIdx.x; b < p.B; b += BEGIN_THREADS) {
        tile t = tile_at(p, b * stride, CFG_TILE_ROWS);
        atomicAdd(&at[class_of(p, t)], blocks_of(p, t) * p.H);
    }
    __syncthreads();
    sum_classes(at);
    for (int b = mine; b < p.B; b += BEGIN_THREADS / team) {
        tile t = tile_at(p, b * stride, CFG_TILE_ROWS);
        if (thread == 0)
            first[mine] = atomicAdd(&at[class_of(p, t)], blocks_of(p, t) * p.H);
        if (team == 32)
            __syncwarp();
        else
            __syncthreads();
        list_tiles(p, t, first[mine], thread, team);
        if (team == 32)
            __syncwarp();
        else
            __syncthreads();
    }
    if (threadIdx.x == 0) {
        p.counter[0] = *p.redo_count = 0;
        *p.ragged.n_tiles = at[CLASSES];
    }
#if CFG_SM >= 90
    grid_let_next();
#endif
}
#else
/* What a run begins with: counters from 0. What comes next is let go when the caller's kernels
 * are over, since it may read what they leave before it waits. */
extern "C" __global__ void begin(const __grid_constant__ cu_fwd p)
{
#if CFG_SM >= 90
    grid_wait_before();
#endif
    p.counter[0] = *p.redo_count = 0;
#if CFG_SM >= 90
    grid_let_next();
#endif
}
#endif
