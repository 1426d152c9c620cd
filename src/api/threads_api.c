/* The threads of a host that computes with OpenMP. */
#include "saccade_threads.h"

#include "base/openmp.h"
#include "base/status.h"

saccade_status saccade_share_openmp(saccade_openmp_parallel parallel,
                                    saccade_openmp_number thread_num,
                                    saccade_openmp_number in_parallel, saccade_error *err)
{
    const int n = (parallel != NULL) + (thread_num != NULL) + (in_parallel != NULL);
    FAIL_AT(n == 1 || n == 2, SACCADE_EINVAL, "openmp", 0, 0,
            "got %d functions, expected three, or none for the library's own threads", n);
    FAIL_AT(!openmp_share(parallel, thread_num, in_parallel), SACCADE_EBACKEND, "openmp", 0, 0,
            "children of fork() could not be told apart here");
    return SACCADE_OK;
}
