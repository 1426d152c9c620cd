/* Gradients of captures and of sinks from the parts that all ranks made: added up in the order
 * of ranks, in double, and rounded once. A thread to each element. */
#include "elements.cuh"
#include "total.h"
#include "place.cuh"

extern "C" __global__ void __launch_bounds__(256)
    ranks_total(const __grid_constant__ cu_total t)
{
    long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    if (at >= t.n)
        return;
    char *to = (char *)t.to + place_in(t.shape, at) * (t.dtype == DTYPE_F32 ? 4 : 2);
    double sum = t.is_added ? load_as(to, 0, t.dtype) : 0.;
    for (int r = 0; r < t.ranks; r++)
        sum += t.parts[r * t.step + at];
    store_as(to, 0, t.dtype, (float)sum);
}
