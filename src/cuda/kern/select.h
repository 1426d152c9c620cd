/* What the host hands to the kernels that make lists of blocks from a selection on the device
 * (select_lists.cu). C and CUDA include this one file. */
#ifndef SACCADE_CUDA_SELECT_H
#define SACCADE_CUDA_SELECT_H

#include "launch.h"

enum { SELECT_LISTS = 12 };

/* The lists of one device copy of a mask: cu_runs of blocks of some program's tiles. Every row
 * of tiles (of blocks of keys, where transposed) has a list. */
typedef struct cu_list {
    cu_run *runs;
    int *start;                    /* [batches * heads * rows + 1] */
    int batches, heads, rows;      /* batches, heads: 1 where all have the same */
    int columns;                   /* blocks that runs count */
    int row_blocks, column_blocks; /* rows and columns in one of the selection's */
    int is_transposed, is_partial;
} cu_list;

typedef struct cu_select {
    const int *blocks;            /* [B][H][rows][entries] */
    long long stride[4];
    unsigned *bits;               /* [B][H][rows][words] */
    int B, H, rows, columns;      /* H: KV heads, or 1 */
    int entries, words, n_lists;
    cu_list list[SELECT_LISTS];
} cu_select;

#endif
