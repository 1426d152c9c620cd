/* One kernel put on a run's stream, plainly or with a launch attribute. */
#include "cuda/run/run.h"

saccade_status run_start(const run_args *a, void *kernel, int64_t grid, int threads, int shared,
                         void **parameters, saccade_error *err)
{
    return cu_check(a->driver,
                    a->driver->launch(kernel, (unsigned)grid, 1, 1, (unsigned)threads, 1, 1,
                                      (unsigned)shared, a->stream, parameters, NULL),
                    "cuLaunchKernel", err);
}

saccade_status run_start_with(const run_args *a, void *kernel, const unsigned grid[2],
                              int threads, int shared, int attribute, int value,
                              void **parameters, saccade_error *err)
{
    cu_launch_attribute one = {.id = attribute, .value = {.values = {value, 1, 1}}};
    const cu_launch how = {.grid_x = grid[0],
                           .grid_y = grid[1],
                           .grid_z = 1,
                           .block_x = (unsigned)threads,
                           .block_y = 1,
                           .block_z = 1,
                           .shared_bytes = (unsigned)shared,
                           .stream = a->stream,
                           .attributes = &one,
                           .n_attributes = 1};
    return cu_check(a->driver, a->driver->launch_ex(&how, kernel, parameters, NULL),
                    "cuLaunchKernelEx", err);
}
