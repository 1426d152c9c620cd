/* What the host hands to the kernel that finds the largest score of each head (head_max.cu). C
 * and CUDA include this one file. */
#ifndef SACCADE_CUDA_HEAD_MAX_H
#define SACCADE_CUDA_HEAD_MAX_H

typedef struct cu_head_max_run {
    const float *rows; /* maxima of rows by [b][h][i], or of ragged runs [h][row] */
    float *out;        /* by [b][h] */
    long long b, h, i; /* strides of rows */
    long long out_b, out_h;
    const int *first; /* ragged: rows of sequence b begin here; else NULL */
    int B, H, M, all; /* M: rows of a batch at most; all: rows of a ragged run */
    int is_joint;     /* one result for all batches */
} cu_head_max_run;

#endif
