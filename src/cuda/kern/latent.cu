/* Few queries of heads wider than 256 whose values are the first columns of their keys, as
 * latent attention (MLA) has them: decode's spans and shares (decode.cu) by wgmma. A key is
 * copied once and serves both products.
 *
 * Of a CTA one warpgroup makes the scores and weights of 64 rows, two add up O, half of the
 * columns each, and one warp loads; so that products of scores, of values, the softmax and the
 * copies all run at a time. latent_place.cuh: who, where, in which units. latent_load.cuh, or
 * latent_codes.cuh over quantised keys, latent_scores.cuh, latent_values.cuh: the roles, in the
 * order in which data passes them.
 *
 * Order of sums: as decode.cu's. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "arith.cuh"
#include "mod.cuh"
#include "mod_mask.cuh"
#include "mod_score.cuh"
#include "wgmma.cuh"
#include "shared.cuh"
#include "careful.cuh"
#include "decode_span.cuh"
#include "decode_end.cuh"
#if CFG_CODES
#include "latent_codes.cuh"
#else
#include "latent_load.cuh"
#endif
#include "latent_scores.cuh"
#include "latent_values.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    latent(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
           const __grid_constant__ tensor_map mk, const __grid_constant__ tensor_map mv)
{
    extern __shared__ __align__(1024) char shared[];
    arena a = carve(shared);
    line l = line_of(p);
    l.prefix = smem_address(a.prefix);
    if (threadIdx.x == 0) {
#if !CFG_CODES
        map_prefetch(&mk);
#endif
        init_barriers(a);
    }
    __syncthreads();
    grid_let_next();
    grid_wait_before();
    if (!l.each)
        sum_spans(p, mod, a.prefix, l.spans);
    if (!l.each && !p.decode.cluster && threadIdx.x == 0) {
        joint j = joint_at(l, shares_of(p, l), number_behind(blockIdx.x));
        ((int4 *)p.done)[blockIdx.x] = make_int4(j.index, j.first, j.count, 0);
    }
    switch (role_of_thread()) {
    case SCORES:
        registers_become<CFG_REGS_SCORES>();
        make_weights(a, p, mod, l);
        break;
    case LOADS_KEYS:
        registers_shrink<CFG_REGS_PRODUCER>();
        if (threadIdx.x / 32 < WARPS + KEY_LOADERS)
            load_keys(a, p, mod, l, &mk);
        break;
    default:
        registers_grow<CFG_REGS_CONSUMER>();
        add_values(a, p, mod, l);
    }
}
