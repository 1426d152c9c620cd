/* A forward problem with data, its float64 truth and the plain same-dtype result, and the
 * comparison of docs/design.md. Tensors lie between guards: everything around and between
 * their rows is NaN in inputs and a pattern in outputs, which must not change. */
#ifndef SACCADE_TESTS_FORWARD_CASE_H
#define SACCADE_TESTS_FORWARD_CASE_H

#include "plan/plan.h"

/* CASE_LATENT: values are the first columns of their keys. */
typedef enum case_layout {
    CASE_BHND,
    CASE_BNHD,
    CASE_PADDED,
    CASE_BROADCAST,
    CASE_LATENT
} case_layout;
typedef enum case_data {
    CASE_NORMAL,
    CASE_WIDE,      /* scores of 16 nats and more */
    CASE_DOMINANT,  /* one key far above the rest */
    CASE_ASCENDING, /* every key a new maximum */
    CASE_LOW,       /* all scores near -3700 */
    CASE_CLIFF,     /* -3751 for a third of the keys, then about 0 */
    CASE_JUMP,      /* the last keys 60 times as large */
    CASE_ZERO,
    CASE_DATA
} case_data;

typedef enum case_outputs { CASE_ALL, CASE_NO_MAX, CASE_OUT_ONLY } case_outputs;

typedef struct forward_case {
    const char *problem;      /* "b2 h4/2 q33 kv100 d40 dv24 f16" */
    const char *mask, *score; /* text or NULL; captures among case_bindings() */
    case_layout layout;
    case_data data;
    case_outputs outputs;        /* what a run is asked for: row maxima and lse beside out */
    saccade_dtype kv_dtype;      /* NONE: as Q */
    int32_t q_offset, kv_offset; /* of batch b: + b */
    int32_t kv_len; /* of batch b: kv_len - b; 0: all; below 0: -1 - kv_len and all by turns */
    float scale;                 /* 0: NaN, 1 / sqrt(D) */
    uint64_t seed;
} forward_case;

typedef struct case_tensor {
    saccade_tensor t;
    void *memory;
    size_t bytes;
} case_tensor;

/* A case ready to run, with gold, plain and the bounds they give. */
typedef struct case_run {
    forward_case c;
    saccade_sizes sizes;
    saccade_dtype dtype;
    saccade_mod *mask, *score;
    int32_t positions[3][64]; /* q_offset, kv_offset, kv_len by batch */
    case_tensor q, k, v;
    saccade_problem problem;
    saccade_tensor position[3];
    saccade_positions at;
    saccade_forward_args args; /* without outputs and workspace; points into this struct */
    saccade_binding used[8]; /* the captures that the texts name */
    double *out, *lse, *row_max;
    double out_bound, lse_bound;
} case_run;

/* A case in bf16, in f16; its problem's text is kept in `text`. */
forward_case case_in_f16(const forward_case *c, char text[96]);

/* Captures that the texts of cases may name: doc[], h_scale[], rel[,], table[], W, c. */
const saccade_binding *case_bindings(int32_t *n);

void case_make(const forward_case *c, case_run *r);
/* As back ends take them. */
plan_positions case_positions(const saccade_positions *at);
/* For cases whose tensors the test has changed: truth and bounds again. */
void case_solve(case_run *r);
void case_free(case_run *r);
/* The text with the dtypes of bindings of these names, of which nothing else is read. Captures
 * of other names are f32; 8 at most. */
saccade_mod *case_mod_of(saccade_kind kind, const char *text, const saccade_binding *known,
                         int32_t n_known);
/* The same by case_bindings(). */
saccade_mod *case_mod(saccade_kind kind, const char *text);

/* Runs with this plan and block mask (may be NULL) and fails the test, printing the case, where
 * a result is out of bounds or a guard changed. out, lse (may be NULL): [B,H,Q,Dv] and [B,H,Q]
 * copies of the results as f32. */
void case_check(const case_run *r, const saccade_plan *plan, const saccade_block_mask *mask,
                const char *what, float *out, float *lse);
saccade_plan *case_plan(const case_run *r, const char *level, int32_t threads);
/* Levels this machine runs, NULL-terminated; in a short run one of them. */
const char *const *case_levels(void);

#endif
