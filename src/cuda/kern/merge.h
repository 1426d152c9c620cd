/* What the host hands to the kernel that makes one result of partial ones (rows_merge.cu). C
 * and CUDA include this one file. */
#ifndef SACCADE_CUDA_MERGE_H
#define SACCADE_CUDA_MERGE_H

/* By [batch][head][row]; strides count bytes. data NULL: not wanted. */
typedef struct cu_merge_side {
    void *data;
    long long b, h, n;
    int dtype; /* saccade_dtype: f32, f16, bf16 */
} cu_merge_side;

/* part and sum are float32, dense. part NULL: nothing is added to the sum; lse NULL: rows have
 * no weights, and the sum is only stored. */
typedef struct cu_merge {
    const float *part, *part_lse, *part_max;
    float *sum, *lse;
    cu_merge_side out, out_lse, row_max, sinks; /* out, out_lse: written where is_last */
    int rows, heads, dim;
    int is_first, is_last; /* first: the sum holds nothing yet */
    int is_added;          /* to what out holds */
} cu_merge;

#endif
