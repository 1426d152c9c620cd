/* gradients.h: backward after an engine's run, for run --grad. */
#ifndef SACCADE_CLI_GRADIENTS_H
#define SACCADE_CLI_GRADIENTS_H

#include "engine_backward.h"
#include "files.h"
#include "outfile.h"

/* What --grad and --grad-of ask for. All owned; n is 0 without --grad. */
typedef struct gradients {
    backward run;
    const char *name[BACKWARD_MOST];
    outfile file[BACKWARD_MOST];
    int n;
} gradients;

/* What the engine's plan is to make, for a job of these arguments. */
void gradients_ask(const cli_args *args, const job *j, engine_options *options);
/* Reads DO and opens a file for each gradient, beside O. */
saccade_status gradients_begin(const cli_args *args, const file_tensors *files, gradients *out,
                               saccade_error *err);
/* One backward run after engine_run; *seconds is its time. */
saccade_status gradients_run(gradients *g, const cli_args *args, const job *j, engine *e,
                             double *seconds, saccade_error *err);
saccade_status gradients_write(gradients *g, const file_tensors *files, saccade_error *err);
/* outfile_finish and outfile_commit of all. */
saccade_status gradients_finish(gradients *g, saccade_error *err);
saccade_status gradients_commit(gradients *g, saccade_error *err);
/* Leaves nothing behind that was not committed; fine on a zeroed struct. */
void gradients_end(gradients *g);

#endif
