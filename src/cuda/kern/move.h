/* What the host hands to the kernels that move rows of keys between a rank's tensors, the pool
 * of the whole sequence and messages (rows_move.cu). C and CUDA include this one file. */
#ifndef SACCADE_CUDA_MOVE_H
#define SACCADE_CUDA_MOVE_H

/* One tensor of rows, by [batch][head][row]; strides count bytes. */
typedef struct cu_rows {
    void *data;
    long long b, h, n;
    int is_packed; /* a message: [peer][batch][row][head], b and n then those of one row */
} cu_rows;

/* Row `from` of the one is row `to` of the other. Of a packed side: the row is number `at` of
 * its peer's `keys`, of which `before` belong to peers before it, for each batch. */
typedef struct cu_row_pair {
    int from, to, before, keys;
} cu_row_pair;

/* Both of K and V, or of their gradients. */
typedef struct cu_move {
    cu_rows from[2], to[2];
    int bytes[2]; /* of a row of one head */
    const cu_row_pair *pair;
    int n, heads;
    int unit; /* bytes moved at a time: 16, 4 or 2, which divide all addresses */
} cu_move;

/* Sums of float32: row i of `to` is what the terms [start[i], start[i + 1]) name. A term's
 * `from` is a row of the pool, or -1: then it is row `to` of a message. */
typedef struct cu_sum {
    cu_rows pool[2], got[2], to[2];
    int dim[2];
    const int *start;
    const cu_row_pair *term;
    const int *rows; /* [n] of `to`; null: the first n */
    int n, heads;
    int dtype[2]; /* of to: f32, f16, bf16 */
    int added;    /* 1: to what K's holds, 2: to what V's holds */
    int wanted;   /* likewise which are made */
    int unit;     /* columns at a time: 4 where all addresses take 16 bytes, or 1 */
} cu_sum;

#endif
