/* api.h: the edge of the library. Here callers' arguments are checked and read into what back
 * ends take; behind it everything is asserted, not checked.
 *
 *     saccade_forward: struct -> tensors -> positions -> captures -> block mask -> solver */
#ifndef SACCADE_API_H
#define SACCADE_API_H

#include "base/context.h"
#include "base/record.h"
#include "base/status.h"
#include "plan/plan.h"

/* ---- context.c ---- */

/* What a context of these options (NULL: the defaults) holds. */
saccade_status api_context(const saccade_context_options *options, saccade_context *out,
                           saccade_error *err);

/* ---- check.c: one argument each ---- */

/* `shape` is that of the tensor expected; a 0 accepts any length from 1 to 2^30 and becomes the
 * one found. */
typedef struct api_expected {
    const char *name;
    saccade_dtype dtype;
    int32_t rank;
    saccade_device_kind device;
} api_expected;
saccade_status api_check_tensor(const saccade_tensor *t, const api_expected *expected,
                                int64_t *shape, saccade_error *err);
/* api_check_tensor for any strides; it asks that the last of four dimensions has stride 1. */
saccade_status api_check_strided(const saccade_tensor *t, const api_expected *expected,
                                 int64_t *shape, saccade_error *err);
/* Elements of the last dimension lie side by side. */
saccade_status api_check_packed(const saccade_tensor *t, const char *name, saccade_error *err);
/* No two elements of an output are one place in memory. */
saccade_status api_check_output(const saccade_tensor *t, const char *name, saccade_error *err);
/* api_check_output for a gradient, where a dimension of stride 0 stands for a sum over it. */
saccade_status api_check_sum(const saccade_tensor *t, const char *name, saccade_error *err);
/* positions may be NULL. Reads values of tensors on the host and holds them against their
 * limits. */
saccade_status api_read_positions(const saccade_positions *positions,
                                  saccade_device_kind device, const saccade_sizes *sizes,
                                  plan_positions *out, saccade_error *err);

/* ---- overlap.c: outputs and what else lies where they do ---- */

typedef struct api_place {
    const saccade_tensor *tensor; /* or NULL */
    const char *name;
    uint32_t bit; /* SACCADE_GRADIENT_*; 0: of no gradient */
} api_place;
typedef struct api_places {
    const api_place *outputs, *inputs;
    int32_t n_outputs, n_inputs, n_bindings;
    uint32_t added;                  /* gradients that are added to what their tensors hold */
    const saccade_binding *bindings; /* inputs too */
} api_places;
/* EINVAL where an output has the data of an input, or where two outputs that are not both added
 * surely have an element in one place: always found where their strides are the same, or their
 * data. */
saccade_status api_check_places(const api_places *places, saccade_error *err);

/* ---- run_check.c: what all runs of a plan take ---- */

/* saccade_ragged as it was read, checked as far as its numbers lie on the host. */
typedef struct api_ragged {
    plan_ragged run;
    int is_given;
    int64_t B, max_q, max_kv; /* max_q, max_kv: 0 where the side is not ragged */
    int64_t most_q, most_kv;  /* the last number, 0 where it is not known here */
} api_ragged;

typedef struct api_inputs {
    const saccade_tensor *q, *k, *v;
    const saccade_tensor *k_scale, *v_scale; /* of forward_args alone */
    const api_ragged *ragged;                /* the tensors of ragged sides are views */
    const saccade_positions *positions;
    const saccade_block_mask *block_mask;
    const saccade_binding *bindings;
    int32_t n_bindings;
    void *workspace;
    size_t workspace_bytes;
    void *stream;
    const saccade_tensor *sinks;
    const saccade_pages *pages;
    const saccade_tensor *dropout;
} api_inputs;
/* Of saccade_forward_args or saccade_backward_args, whose members they are. */
#define API_INPUTS_OF(args)                                                         \
    {                                                                               \
        .q = (args).q, .k = (args).k, .v = (args).v, .positions = (args).positions, \
        .block_mask = (args).block_mask, .bindings = (args).bindings,               \
        .n_bindings = (args).n_bindings, .workspace = (args).workspace,             \
        .workspace_bytes = (args).workspace_bytes, .stream = (args).stream,         \
        .sinks = (args).sinks, .pages = (args).pages, .dropout = (args).dropout     \
    }

/* The captures' tensors and the chunk table, which the run points to. */
typedef struct api_captures {
    saccade_tensor score[MOD_MAX_CAPTURES], mask[MOD_MAX_CAPTURES], weight[MOD_MAX_CAPTURES];
    plan_chunks chunks;
} api_captures;

/* Checks inputs and fills of *run all but the outputs and the workspace. */
saccade_status api_read_inputs(const saccade_plan *plan, const api_inputs *in, plan_run *run,
                               api_captures *captures, saccade_error *err);
/* The sinks of `rows` rows, where the plan's problem has any. */
saccade_status api_read_sinks(const saccade_plan *plan, const saccade_tensor *t, int64_t rows,
                              plan_run *run, saccade_error *err);
/* api_read_inputs without q, k, v and sinks: run->sizes are known. */
saccade_status api_read_context(const saccade_plan *plan, const api_inputs *in, plan_run *run,
                                api_captures *captures, saccade_error *err);
saccade_status api_read_workspace(const api_inputs *in, size_t bytes, plan_run *run,
                                  saccade_error *err);
/* lse, row_max: NULL, or a [B, H, Q] output in f32, or in f64 where the problem is. */
saccade_status api_check_stats(const saccade_plan *plan, const saccade_tensor *t,
                               const char *name, const saccade_sizes *sizes,
                               saccade_error *err);

/* ---- run_ragged.c ---- */

saccade_status api_read_ragged(const saccade_plan *plan, const saccade_ragged *given,
                               api_ragged *out, saccade_error *err);
/* The data of views without an element, whose tensors need none. Never read. */
extern const char api_nothing[64];
/* Tensors of sides that are ragged, [T, H, D] or [T, H] of `rank`, become [1, H, T, D] or
 * [1, H, T] in *view; others stay, and NULL. */
saccade_status api_view_rows(const api_ragged *ragged, const saccade_tensor **t, int32_t rank,
                             const char *name, saccade_tensor *view, saccade_error *err);
saccade_status api_view_keys(const api_ragged *ragged, const saccade_tensor **t,
                             const char *name, saccade_tensor *view, saccade_error *err);
/* The sizes of q and of what has its rows, as views have them. */
saccade_sizes api_row_sizes(const plan_run *run);
/* Lengths of the sequences and of what they hold, into a run whose tensors were read. */
saccade_status api_set_ragged(const api_inputs *in, plan_run *run, saccade_error *err);

/* ---- weight_check.c ---- */

/* The rate by the weight's captures, and seed and offset. */
saccade_status api_read_dropout(const saccade_plan *plan, const saccade_tensor *state,
                                const saccade_tensor *captures, plan_run *run,
                                saccade_error *err);

/* ---- pages_api.c ---- */

/* Where keys lie, as the caller says: all 0 for plans whose keys lie in one piece. */
saccade_status api_start_pages(const saccade_plan *plan, const api_inputs *in,
                               saccade_pages *pages, saccade_error *err);
/* Fills *chunks, run->chunks and run->sizes.KV; the rest of sizes and k are known. */
saccade_status api_read_pages(const saccade_plan *plan, const saccade_pages *pages,
                              plan_run *run, plan_chunks *chunks, saccade_error *err);
/* After positions: lengths by last_page_len; on the host whether pages hold lengths. */
saccade_status api_read_page_lengths(const saccade_plan *plan, const api_inputs *in,
                                     plan_run *run, saccade_error *err);

/* ---- prefix_api.c ---- */

/* Into *out and run->prefix, of a run whose inputs were read. */
saccade_status api_read_prefix(const saccade_plan *plan, const saccade_prefix *given,
                               plan_run *run, plan_prefix *out, saccade_error *err);

/* ---- forward_api.c ---- */

/* A run but for its outputs and workspace: the arguments as they were read, their tensors of
 * ragged sides as views, and what points into them. */
typedef struct api_forward_call {
    saccade_forward_args args;
    api_captures captures;
    api_ragged ragged;
    plan_prefix prefix;
    saccade_tensor view[6];
    api_inputs in;
    plan_run run;
} api_forward_call;

/* what: the call that is made. */
saccade_status api_start_forward(const saccade_plan *plan, const saccade_forward_args *args,
                                 const char *what, api_forward_call *call, saccade_error *err);

/* out, lse and row_max for rows of these sizes. */
saccade_status api_check_outputs(const saccade_plan *plan, const saccade_forward_args *args,
                                 const saccade_sizes *sizes, saccade_error *err);

/* ---- backward_api.c ---- */

/* A run but for its workspace: the arguments as they were read, and what points into them. */
typedef struct api_backward_call {
    saccade_backward_args args;
    saccade_tensor captured[MOD_MAX_CAPTURES]; /* gradients, by capture of the score */
    api_captures captures;
    api_ragged ragged;
    saccade_tensor view[10]; /* of tensors whose rows or keys are ragged */
    api_inputs in;
    plan_gradients gradients;
    plan_run run;
} api_backward_call;

/* Fills of *call the arguments and inputs, and clears the rest. what: the call that is made. */
saccade_status api_start_backward(const saccade_plan *plan, const saccade_backward_args *args,
                                  const char *what, api_backward_call *call,
                                  saccade_error *err);
/* What backward takes beside its inputs, which *run has; captures: gradients by capture of the
 * score. rows: of q and what has its rows. Of ranks that hold no rows, or no keys, run->q or
 * run->k is NULL, and nothing is asked of what would have them. */
saccade_status api_read_gradients(const saccade_plan *plan, const saccade_backward_args *args,
                                  int64_t rows, plan_run *run, saccade_tensor *captures,
                                  plan_gradients *out, saccade_error *err);
/* api_check_places of gradients, of which one that is written would lose the other. Of runs
 * alone: who asks for a workspace may have no memory yet, and names any. */
saccade_status api_check_gradients_apart(const saccade_backward_args *args, const plan_run *run,
                                         saccade_error *err);
/* When nothing is refused any more: gradients of captures that no score is left to read. */
void api_clear_unread(const saccade_plan *plan, const saccade_backward_args *args);

/* ---- dist_api.c ---- */

/* Members that calls over ranks do not take, of which backward has ragged and pages alone. */
saccade_status api_refuse_over_ranks(const saccade_forward_args *args, saccade_error *err);
/* EINVAL where a transport has no function that exchanges, or no time that ends. */
struct saccade_transport;
saccade_status api_check_transport(const struct saccade_transport *transport,
                                   saccade_error *err);
struct saccade_dist;
/* EBACKEND where the plan's tensors lie on a device that the transport knows nothing of. */
saccade_status api_check_exchange(const struct saccade_dist *dist, saccade_error *err);
/* Reads q of this rank's rows, and k and v of n_keys keys; the run's sizes become those of the
 * whole sequence. */
saccade_status api_read_shard(const struct saccade_dist *dist, const api_inputs *in,
                              int64_t n_keys, plan_run *run, saccade_error *err);
/* Outputs of this rank's rows into *run. */
saccade_status api_read_shard_outputs(const struct saccade_dist *dist,
                                      const saccade_forward_args *args, plan_run *run,
                                      saccade_error *err);

/* ---- dist_backward_api.c ---- */

/* EINVAL where a gradient has two elements in one place: sums are made once, over ranks. */
saccade_status api_check_shard_gradients(const api_backward_call *call, saccade_error *err);

/* ---- plan_api.c ---- */

/* Whether runs of at most these sizes can have the plan's heads and head dims. */
int api_sizes_hold(const saccade_plan *plan, const saccade_sizes *sizes);

/* is_part: every run computes some rows of a sequence, and on the host brings a chunk table.
 * context may be NULL. */
saccade_status api_plan_create(const saccade_context *context, const saccade_problem *problem,
                               int is_part, saccade_plan **out, saccade_error *err);

#endif
