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
/* The options of the engine that the arguments give. */
saccade_status files_engine_options(const cli_args *args, engine_options *out,
                                    saccade_error *err);

/* What `run` did. */
typedef struct run_report {
    saccade_sizes sizes;
    saccade_dtype dtype;
    double seconds;
    double sparsity; /* 1 - live blocks / blocks; 0 without a mask */
} run_report;

/* The whole of `saccade run`. */
saccade_status run_files(const cli_args *args, run_report *report, saccade_error *err);

#endif
