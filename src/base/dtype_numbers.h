/* Numbers of saccade_dtype, for kernels of CUDA, whose preprocessor compares them. C and CUDA
 * include this one file; dtypes.c asserts that the public header has the same numbers. */
#ifndef SACCADE_BASE_DTYPE_NUMBERS_H
#define SACCADE_BASE_DTYPE_NUMBERS_H

#define DTYPE_I8 3
#define DTYPE_F16 20
#define DTYPE_BF16 21
#define DTYPE_F32 22
#define DTYPE_E4M3 30
#define DTYPE_E5M2 31
#define DTYPE_I4 32

#endif
