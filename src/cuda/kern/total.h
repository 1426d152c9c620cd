/* What the host hands to total.cu. C and CUDA include this one file. */
#ifndef SACCADE_CUDA_TOTAL_H
#define SACCADE_CUDA_TOTAL_H

#include "launch.h"

/* A tensor's elements from the parts that ranks have of them. */
typedef struct cu_total {
    const float *parts; /* [ranks], `step` floats from one to the next, each dense */
    long long step, n;  /* n: elements of the tensor */
    void *to;
    int ranks, dtype; /* dtype: of `to`, f32, f16 or bf16 */
    int is_added;     /* to what it holds */
    cu_shape shape;   /* of `to` */
} cu_total;

#endif
