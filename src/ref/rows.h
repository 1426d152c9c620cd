/* rows.h: what the float64 oracle's forward and backward share: one query row at a time, in
 * double, from inputs widened once. Readable before fast. */
#ifndef SACCADE_REF_ROWS_H
#define SACCADE_REF_ROWS_H

#include "ref/ref.h"

/* K and V in double. Borrowed memory: ref_widened_bytes. */
typedef struct ref_inputs {
    const plan_problem *problem;
    const plan_run *run;
    eval_env score_env; /* the run's, wide in f64 problems */
    double *k;          /* [B][Hkv][KV][D] */
    double *v;          /* [B][Hkv][KV][Dv] */
} ref_inputs;

/* One query row and everything computed for it. Borrowed memory: ref_row_bytes. */
typedef struct ref_row {
    int64_t b, h, i;
    plan_position at;
    double *q;          /* [D] */
    double *raw;        /* [KV] scale * q . k, where live */
    double *p;          /* [KV] score, then exp(score - top); 0 where not live */
    double *out;        /* [Dv] */
    double *values;     /* scratch of eval_scalar */
    uint8_t *live;      /* [KV] 1: counts in this row */
    double m;           /* row maximum; -INF for an empty row */
    double top;         /* the larger of m and the sink */
    double l;           /* sum of p, with exp(sink - top) */
    double sink;        /* -INF: none */
    dropout_words head; /* of the row's head, where the run drops weights */
} ref_row;

size_t ref_widened_bytes(const saccade_sizes *sizes);
ref_inputs ref_widen(const plan_problem *problem, const plan_run *run, int threads,
                     void *memory);

/* n_values: the most that a mod evaluated with the row's scratch asks for. */
size_t ref_row_bytes(const saccade_sizes *sizes, size_t n_values);
ref_row ref_row_in(const saccade_sizes *sizes, size_t n_values, void *memory);
/* Of the problem's mods; of fn, its score or a derivative of it (NULL: 0). */
size_t ref_most_values(const plan_problem *problem);
size_t ref_score_values(const plan_problem *problem, const mod_fn *fn);

/* Fills row for query i of (b, h): q, live, raw, p, m, l, out. */
void ref_compute_row(const ref_inputs *in, int64_t b, int64_t h, int64_t i, ref_row *row);
/* log sum exp of a computed row, and the weight of its sink. */
double ref_row_lse(const ref_row *row);
double ref_sink_weight(const ref_row *row);
/* The place of a key in its mod's words. */
eval_point ref_point(const ref_row *row, int64_t j);

/* What the weight of a key is multiplied by: 1 without dropout. */
double ref_factor(const ref_inputs *in, const ref_row *row, int64_t j);
double ref_dot(const double *x, const double *y, int64_t n);
const double *ref_key(const ref_inputs *in, const ref_row *row, int64_t j);
const double *ref_value(const ref_inputs *in, const ref_row *row, int64_t j);

/* What the run's block mask says of row i: per key of [0, kv_len) 0 dead, 1 ask the mask, 2
 * live whatever the mask says; dead at and past kv_len. Without an imported block mask: 1. */
void ref_block_row(const plan_run *run, int64_t b, int64_t h, int64_t i, int64_t kv_len,
                   uint8_t *state);
/* EINVAL when the run's block mask needs a prepare it did not get. */
saccade_status ref_check_block_mask(const plan_run *run, saccade_error *err);
saccade_status ref_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                           saccade_error *err);

/* One place of any tensor. */
void ref_store(const saccade_tensor *t, int64_t at, double value);

#endif
