/* K and V of small pages brought into one piece of the workspace before forward, whose tiles
 * read each key many times and then by whole tensor copies. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "one_piece.cuh"

extern "C" __global__ void __launch_bounds__(PAGES_COPIERS)
    collect_keys(const __grid_constant__ cu_fwd p, const __grid_constant__ cu_collected to)
{
    gather_block(p, to.k, to.v, 1, COLLECT_SPARE, blockIdx.x);
    if (blockIdx.x == 0 && to.lens)
        count_keys(p, to.lens);
}
