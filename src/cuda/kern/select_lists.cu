/* Lists of blocks from a selection (saccade_block_mask_select), in four launches: a bit for
 * each block that a row has, then for each list its number of runs, where it begins, and its
 * runs. Numbers that are no blocks set no bit. A warp has a list, and takes 32 blocks at a
 * time. */
#include "select.h"

#define DEVICE __device__ __forceinline__

typedef unsigned u32;

enum { BIT_THREADS = 128, LIST_WARPS = 8, SCAN_THREADS = 1024 };

extern "C" __global__ void __launch_bounds__(BIT_THREADS)
    select_bits(const __grid_constant__ cu_select s)
{
    int row = blockIdx.x % s.rows, head = blockIdx.x / s.rows;
    const int *from = s.blocks + head / s.H * s.stride[0] + head % s.H * s.stride[1]
                      + row * s.stride[2];
    u32 *bits = s.bits + (long long)blockIdx.x * s.words;
    for (int i = threadIdx.x; i < s.words; i += BIT_THREADS)
        bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < s.entries; i += BIT_THREADS) {
        int block = from[i * s.stride[3]];
        if (block >= 0 && block < s.columns)
            atomicOr(bits + block / 32, 1u << block % 32);
    }
}

/* ---- lists as bits ---- */

struct list_row {
    const u32 *bits; /* of the selection's rows for this head */
    int row;         /* of the selection; transposed: its column */
    int n;           /* blocks along the list */
};

/* The warp's list; index -1: none. */
DEVICE list_row find_row(const cu_select &s, const cu_list &l, int &index)
{
    index = blockIdx.x * LIST_WARPS + threadIdx.x / 32;
    list_row x = {s.bits, 0, 0};
    if (index >= l.batches * l.heads * l.rows) {
        index = -1;
        return x;
    }
    int head = index / l.rows, b = head / l.heads * s.B / l.batches;
    int g = (int)((long long)(head % l.heads) * s.H / l.heads);
    x.bits = s.bits + ((long long)b * s.H + g) * s.rows * s.words;
    x.row = index % l.rows / l.row_blocks;
    x.n = l.is_transposed ? s.rows : s.columns;
    return x;
}

/* Blocks 32 w to 32 w + 31 of the list, in all lanes. */
DEVICE u32 word_of(const cu_select &s, const cu_list &l, const list_row &x, int w)
{
    if (!l.is_transposed)
        return x.bits[(long long)x.row * s.words + w];
    int row = 32 * w + (threadIdx.x & 31);
    u32 word = row < s.rows ? x.bits[(long long)row * s.words + x.row / 32] : 0;
    return __ballot_sync(~0u, word >> x.row % 32 & 1);
}

extern "C" __global__ void __launch_bounds__(32 * LIST_WARPS)
    select_count(const __grid_constant__ cu_select s)
{
    const cu_list &l = s.list[blockIdx.y];
    int index, n = 0;
    list_row x = find_row(s, l, index);
    if (index < 0)
        return;
    u32 carry = 0;
    for (int w = 0; 32 * w < x.n; w++) {
        u32 word = word_of(s, l, x, w);
        n += __popc(word & ~(word << 1 | carry));
        carry = word >> 31;
    }
    if ((threadIdx.x & 31) == 0)
        l.start[index + 1] = n;
}

/* Numbers of runs become places of their first ones; a CTA to a copy. */
extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
    select_scan(const __grid_constant__ cu_select s)
{
    __shared__ int sum[32];
    const cu_list &l = s.list[blockIdx.x];
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, before = 0;
    int n = l.batches * l.heads * l.rows;
    for (int first = 0; first < n; first += SCAN_THREADS) {
        int i = first + threadIdx.x, x = i < n ? l.start[i + 1] : 0;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, x, d);
            x += lane >= d ? other : 0;
        }
        if (lane == 31)
            sum[warp] = x;
        __syncthreads();
        int all = 0, mine = 0;
        for (int w = 0; w < 32; w++) {
            mine += w < warp ? sum[w] : 0;
            all += sum[w];
        }
        if (i < n)
            l.start[i + 1] = before + mine + x;
        before += all;
        __syncthreads();
    }
    if (threadIdx.x == 0)
        l.start[0] = 0;
}

/* First and past blocks, in the selection's, of a list's runs; returns how many there are. */
DEVICE int put_ends(const cu_select &s, const cu_list &l, const list_row &x, cu_run *runs)
{
    int lane = threadIdx.x & 31, begun = 0, ended = 0;
    u32 carry = 0, below = (1u << lane) - 1u;
    for (int w = 0; 32 * w < x.n; w++) {
        u32 word = word_of(s, l, x, w), shifted = word << 1 | carry;
        u32 begins = word & ~shifted, ends = ~word & shifted;
        if (begins >> lane & 1)
            runs[begun + __popc(begins & below)].first = 32 * w + lane;
        if (ends >> lane & 1)
            runs[ended + __popc(ends & below)].count = 32 * w + lane;
        begun += __popc(begins);
        ended += __popc(ends);
        carry = word >> 31;
    }
    if (ended < begun && lane == 0)
        runs[ended].count = x.n;
    return begun;
}

extern "C" __global__ void __launch_bounds__(32 * LIST_WARPS)
    select_runs(const __grid_constant__ cu_select s)
{
    const cu_list &l = s.list[blockIdx.y];
    int index, lane = threadIdx.x & 31, before = 0;
    list_row x = find_row(s, l, index);
    if (index < 0)
        return;
    cu_run *runs = l.runs + l.start[index];
    int n = put_ends(s, l, x, runs);
    __syncwarp();
    for (int first = 0; first < n; first += 32) {
        int i = first + lane, live = 0;
        cu_run run = {0, 0, l.is_partial, 0};
        if (i < n) {
            long long past = (long long)runs[i].count * l.column_blocks;
            run.first = runs[i].first * l.column_blocks;
            run.count = live = (int)(past < l.columns ? past : l.columns) - run.first;
        }
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, live, d);
            live += lane >= d ? other : 0;
        }
        run.ordinal = before + live - run.count;
        if (i < n)
            runs[i] = run;
        before += __shfl_sync(~0u, live, 31);
    }
}
