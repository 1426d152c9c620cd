/* blas.c: products by whatever CBLAS the program is linked with. */
#include "blas.h"

#include <cblas.h>

/* OpenBLAS's own; NULL in others. */
extern void openblas_set_num_threads(int) __attribute__((weak));

void blas_rows_times(const float *x, int64_t n, const float *weights, int64_t rows,
                     int64_t columns, float added, float *out)
{
    const int N = (int)n, R = (int)rows, C = (int)columns;
    if (n == 1)
        cblas_sgemv(CblasRowMajor, CblasNoTrans, R, C, 1, weights, C, x, 1, added, out, 1);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, R, C, 1, x, C, weights, C,
                    added, out, R);
}

void blas_threads(int threads)
{
    if (threads > 0 && openblas_set_num_threads)
        openblas_set_num_threads(threads);
}
