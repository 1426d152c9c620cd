/* files.h: attention over .npy files, for run, explain, check and demo. */
#ifndef SACCADE_CLI_FILES_H
#define SACCADE_CLI_FILES_H

#include "job.h"
#include "npy.h"

/* Q, K, V of three files as [B, H, N, D] views, and room for the results. */
typedef struct file_tensors {
    saccade_sizes sizes;
    saccade_dtype file_dtype; /* of Q's file; O is written in it */
    job_tensors t;            /* in the dtype that is computed in */
    int32_t rank;             /* of Q's file; O gets the same */
    bool is_bnhd;
} file_tensors;

/* Reads -q -k -v as --layout and --dtype say. */
saccade_status files_load(const cli_args *args, file_tensors *out, saccade_error *err);
void files_free(file_tensors *files);
/* Room in the layout and rank of Q's file for [B, heads, length, dim]; owned. */
saccade_status files_room(const file_tensors *files, saccade_dtype dtype, int64_t heads,
                          int64_t length, int64_t dim, saccade_tensor *out, saccade_error *err);
/* The file of a tensor shaped like O, in the dtype that is computed in; owned. */
saccade_status files_load_out(const char *path, const file_tensors *files, saccade_tensor *out,
                              saccade_error *err);
/* Its lengths as its file has them, in the layout and rank of Q's; room for 4. */
void files_shape(const file_tensors *files, const saccade_tensor *t, int64_t *shape);
/* A tensor of files_room as its file wants it: row-major in the layout and dtype of Q's. */
saccade_status files_write(const file_tensors *files, const saccade_tensor *t, FILE *file,
                           saccade_error *err);
/* The options of the engine that the arguments give. */
saccade_status files_engine_options(const cli_args *args, engine_options *out,
                                    saccade_error *err);

/* What `run` did. */
typedef struct run_report {
    int64_t shape[4]; /* of O's file */
    int32_t rank;
    saccade_dtype dtype;
    double seconds, backward_seconds;
    double sparsity; /* 1 - live blocks / blocks; 0 without a mask */
} run_report;

/* The whole of `saccade run`. */
saccade_status run_files(const cli_args *args, run_report *report, saccade_error *err);

#endif
