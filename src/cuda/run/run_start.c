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

static saccade_status start(const run_args *a, void *kernel, const unsigned grid[2],
                            int threads, int shared, cu_launch_attribute *attributes,
                            unsigned n_attributes, void **parameters, saccade_error *err)
{
    const cu_launch how = {.grid_x = grid[0],
                           .grid_y = grid[1],
                           .grid_z = 1,
                           .block_x = (unsigned)threads,
                           .block_y = 1,
                           .block_z = 1,
                           .shared_bytes = (unsigned)shared,
                           .stream = a->stream,
                           .attributes = attributes,
                           .n_attributes = n_attributes};
    return cu_check(a->driver, a->driver->launch_ex(&how, kernel, parameters, NULL),
                    "cuLaunchKernelEx", err);
}

static cu_launch_attribute attribute_of(int id, int value)
{
    return (cu_launch_attribute){.id = id, .value = {.values = {value, 1, 1}}};
}

saccade_status run_start_with(const run_args *a, void *kernel, const unsigned grid[2],
                              int threads, int shared, int attribute, int value,
                              void **parameters, saccade_error *err)
{
    cu_launch_attribute one = attribute_of(attribute, value);
    return start(a, kernel, grid, threads, shared, &one, 1, parameters, err);
}

saccade_status run_start_first(const run_args *a, void *kernel, unsigned grid, int threads,
                               int shared, int cluster, void **parameters, saccade_error *err)
{
    const unsigned size[2] = {grid, 1};
    cu_launch_attribute two[2];
    unsigned n = 0;
    if (cluster > 1)
        two[n++] = attribute_of(WITH_CLUSTER, cluster);
    if (a->starts_early)
        two[n++] = attribute_of(WITH_OVERLAP, 1);
    return start(a, kernel, size, threads, shared, two, n, parameters, err);
}
