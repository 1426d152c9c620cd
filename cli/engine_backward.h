/* engine_backward.h: gradients of an engine's problem on the host, as runs write them; an
 * engine on a device has copies of them there. */
#ifndef SACCADE_CLI_ENGINE_BACKWARD_H
#define SACCADE_CLI_ENGINE_BACKWARD_H

#include "job.h"

enum { BACKWARD_QKV = 3, BACKWARD_MOST = BACKWARD_QKV + CLI_LIST };

/* d_out and tensors are owned, row-major but d_out and those of Q, K, V, which may have any
 * strides; without data a gradient of Q, K or V is not wanted. */
typedef struct backward {
    saccade_tensor d_out, tensor[BACKWARD_MOST]; /* dq, dk, dv, then captures */
    const char *name[BACKWARD_MOST];
    int n;
    saccade_binding captures[CLI_LIST];
    saccade_backward_args args;
    void *workspace;
    bool on_device;
    saccade_tensor there[1 + BACKWARD_MOST]; /* d_out and tensors as args have them */
} backward;

/* Names of --score's float captures of at least this rank. */
void backward_captures(const job *j, int32_t least_rank, cli_list *out);
/* Random d_out and room for gradients of Q, K and V in the dtype of `t`. */
saccade_status backward_new(const job_tensors *t, uint64_t seed, backward *out,
                            saccade_error *err);
/* Room for a capture's gradient, in f32 (f64 in f64), or in its own f16 or bf16. where: for
 * messages. */
saccade_status backward_add_capture(backward *b, const job *j, const char *name,
                                    saccade_dtype dtype, bool is_own, const char *where,
                                    saccade_error *err);
/* Arguments and workspace of runs after the engine's, which has out and lse. */
saccade_status backward_bind(backward *b, engine *e, saccade_error *err);
/* One run; *seconds may be NULL. Gradients are on the host after backward_fetch. */
saccade_status backward_run(backward *b, engine *e, double *seconds, saccade_error *err);
saccade_status backward_fetch(backward *b, saccade_error *err);
/* Fine on a zeroed struct. */
void backward_free(backward *b);

#endif
