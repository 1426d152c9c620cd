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

/* flags holds one word for every group of 16 rows, in the order of the tiles' own rows. Looking
 * keys up in a chunk table takes registers, and so leaves room for fewer CTAs. */
extern "C" __global__ void __launch_bounds__(128, CFG_CHUNKS ? 4 : 6)
    careful(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
    int n = p.n_tiles * p.tile_groups;
#if CFG_SM >= 90
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
                if (m < p.M)
                    redo_row(p, mod, t, m);
            }
        }
    }
}

/* What a run begins with: counters from 0. */
extern "C" __global__ void begin(const __grid_constant__ cu_fwd p)
{
    p.counter[0] = *p.redo_count = 0;
#if CFG_SM >= 90
    grid_let_next();
#endif
}
