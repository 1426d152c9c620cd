/* blas.h: the one product that the decoder asks of a BLAS. */
#ifndef GENERATE_BLAS_H
#define GENERATE_BLAS_H

#include <stdint.h>

/* out [n][rows] = added * out + x [n][columns] times weights [rows][columns] transposed. */
void blas_rows_times(const float *x, int64_t n, const float *weights, int64_t rows,
                     int64_t columns, float added, float *out);
/* Where the BLAS can be told (OpenBLAS); 0: leave it as it is. */
void blas_threads(int threads);

#endif
