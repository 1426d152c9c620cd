/* plan.h: problems, plans and the table of solvers. A solver is a way to run a problem: a
 * struct of data and functions; choosing is asking each in order. api/ checks and resolves a
 * caller's arguments into plan_run before a solver sees them. */
#ifndef SACCADE_PLAN_H
#define SACCADE_PLAN_H

#include "base/context.h"
#include "eval/eval.h"
#include "mask/mask.h"
#include "mod/dropout.h"
#include "mod/mod.h"
#include "pass/facts.h"

/* Rows and channels that share a scale; 0: all. */
typedef struct plan_groups {
    int32_t tokens, channels;
} plan_groups;

/* A problem with everything derived: mods simplified, scale set. Lives in the plan's arena. */
typedef struct plan_problem {
    saccade_sizes sizes; /* B, Q, KV: hints, 0 unknown */
    saccade_dtype dtype, kv_dtype, out_dtype, d_out_dtype;
    double scale;
    const mod_fn *score;  /* NULL: identity */
    const mod_fn *mask;   /* NULL: all live */
    const mod_fn *weight; /* the rate of dropout, alike in a whole run; NULL: none */
    /* of these; NULL with them */
    const pass_facts *score_facts, *mask_facts;
    int32_t group; /* H / Hkv */
    /* Head 0 of a run is h_offset of all heads, which mods, captures and block masks see. */
    int32_t h_offset, heads_global;
    const char *arch; /* CUDA target asked for, in the plan's arena; NULL: the device's */
    int has_chunks;   /* every run says by plan_chunks where its keys lie */
    int has_rows;     /* every run computes some rows of a sequence: plan_run.rows */
    int32_t page;     /* of keys in pages: their size, -1 where each run has its own; else 0 */
    uint32_t gradients;         /* SACCADE_GRADIENT_* wanted; CAPTURES if any of the next is */
    uint64_t gradient_captures; /* of score's captures, a bit each */
    saccade_dtype sinks_dtype;  /* of the sinks that every run has; NONE: it has none */
    int is_ragged;              /* every run is of sequences of unequal lengths */
    /* 0, SACCADE_INVARIANT or SACCADE_INVARIANT_SHORT: a row's bits do not depend on the rest
     * of the run; SHORT: separately among runs of up to 128 rows and among longer ones. */
    int is_invariant;
    int has_tangents;               /* tangent is to run */
    int has_head_max;               /* runs may want plan_run.head_max */
    int has_prefix;                 /* every run says by plan_prefix what batches share */
    plan_groups k_groups, v_groups; /* of quantised K and V */
    int is_relaxed; /* sums of dQ in any order, as CTAs come; no public problem asks for it */
} plan_problem;

/* Where keys lie that are not in one piece: logical key j of batch b is key j % size of chunk
 * j / size. A chunk's entry is its first row of K and V or, where is_paged, its page: K and V
 * are then [pages, Hkv, size, dim]. The last chunk may be short. One below 0 is absent: it
 * holds no live key and is never read. The table lies where K and V do. */
typedef struct plan_chunks {
    const int32_t *first; /* entries of batch b: row_stride apart, or from start[b] on */
    int64_t row_stride;
    int32_t count, size; /* chunks of a batch, or of the longest; keys of a chunk, 1 and more */
    int32_t is_paged;
    const int32_t *start; /* [B + 1] or NULL */
    int32_t entries;      /* with start: of all batches */
} plan_chunks;

/* Sequences of unequal lengths: b has rows [q_first[b], q_first[b + 1]) of q and of what
 * has its rows, which then are [1, H, T, ..] with one stride of rows, and likewise keys.
 * NULL: all of [B, H, N, D]. The numbers lie where q does; those on the host rise and are
 * in range. */
typedef struct plan_ragged {
    const int32_t *q_first, *kv_first;
    int is_end; /* the last row stands where the last live key does */
} plan_ragged;

/* Rows of Q that a run computes where it does not compute them all: logical rows
 * [first, first + count) are rows `row` and on of q, out, lse and row_max. Parts rise, begin at
 * multiples of the solver's row_tile and end at one or with the last row, so that every row is
 * computed as in a run of all rows. */
typedef struct plan_part {
    int64_t first, count, row;
} plan_part;
typedef struct plan_rows {
    const plan_part *part;
    int32_t n;
    int64_t all; /* rows of the whole sequence */
    /* Keys that come from elsewhere while kernels run: how many of the first u units of `unit`
     * keys do so. NULL: none. See plan_run.between. */
    const int32_t *far_before; /* [units + 1] */
    /* Units of which a row reads keys, counted so too, and the keys between which they lie. */
    const int32_t *touched_before; /* [units + 1] */
    int64_t touched_first, touched_past;
    int64_t unit, units;
} plan_rows;
/* Whether some of keys [first, past) come from elsewhere. */
int plan_has_far(const plan_rows *rows, int64_t first, int64_t past);
/* Whether a row reads some of them. */
int plan_has_touched(const plan_rows *rows, int64_t first, int64_t past);
/* The part that holds logical row i; NULL: none. */
const plan_part *plan_part_of(const plan_rows *rows, int64_t i);

/* A mask's limits, or NULL without a mask or without limits. */
static inline const pass_limits *plan_limits(const plan_problem *p)
{
    return p->mask_facts ? p->mask_facts->limits : NULL;
}

/* Where rows and keys stand, as saccade_positions says; dtype NONE: absent. */
typedef struct plan_positions {
    saccade_tensor q_offset, kv_offset, kv_len;
    /* Not NULL: kv_len counts keys of a batch's last page, and these are all its pages. */
    const plan_chunks *pages;
} plan_positions;

/* A logit for each row of a run, where it takes part in the row's sum: strides of b, h and i,
 * 0 where one serves all. dtype NONE: absent. */
typedef struct plan_sinks {
    const void *data;
    saccade_dtype dtype;
    int64_t stride[3];
} plan_sinks;

/* Which weights a run keeps (mod/dropout.h), and what it multiplies them by. */
typedef struct plan_dropout {
    int is_on;
    uint32_t threshold; /* 0 .. DROPOUT_ONE: weights of fewer random bits are dropped */
    float factor;       /* one over the part that is kept; 0 where none is */
    uint64_t seed, offset;
    const uint64_t *state; /* not NULL: they lie here, on the run's device */
} plan_dropout;

/* Batches groups[g] to groups[g + 1] begin with the same keys, as many as shared[g] says: whole
 * chunks, at most max_keys. The numbers lie where q does; those on the host are in range. */
typedef struct plan_prefix {
    const int32_t *groups, *shared; /* [n + 1], [n] */
    int32_t n;
    int64_t max_keys;
} plan_prefix;

/* What a backward run does besides for rows of a sequence whose keys partly come from elsewhere
 * (plan_rows): gradients of those keys are sent while others are made, and gradients of keys
 * that no other run has a part of are stored where they belong. Those of keys that no row reads
 * are not made. */
typedef struct plan_far {
    /* Called once, when the kernels that make gradients of keys from elsewhere are on the
     * stream. They are there when those kernels have added so much to *told or, where that is
     * 0, when all is done that is on the stream now. NULL: there are no such keys. */
    saccade_status (*send)(void *user, uint32_t added, saccade_error *err);
    void *user;
    uint32_t *told; /* on the run's device */
    /* By unit of plan_rows the row of dk and dv where its first key belongs, or -1: that unit's
     * gradients go to plan_gradients' dk and dv. On the run's device; NULL: all do so. */
    const int32_t *row;
    const saccade_tensor *dk, *dv; /* NULL: not wanted */
    uint32_t added;                /* as plan_gradients.added */
} plan_far;

/* Everything a forward run needs, checked. Tensors are in the order and shapes of saccade.h. */
typedef struct plan_run {
    saccade_sizes sizes;                     /* ragged: Q and KV of the longest, or more */
    const saccade_tensor *q, *k, *v, *out;   /* with chunks, k and v have rows or pages */
    const saccade_tensor *k_scale, *v_scale; /* of quantised K and V; NULL: 1 */
    const plan_chunks *chunks;               /* NULL: keys lie one after the other */
    const plan_rows *rows;               /* NULL: all rows; else q's are those of the parts */
    const plan_prefix *prefix;           /* NULL: no batches share keys */
    const plan_ragged *ragged;           /* NULL: all batches have Q rows and KV keys */
    const saccade_tensor *lse, *row_max; /* NULL: not wanted */
    const saccade_tensor *head_max; /* [B, H], or [1, H] of all batches; NULL: not wanted */
    plan_positions positions;
    plan_sinks sinks;
    plan_dropout dropout;
    const saccade_block_mask *block_mask; /* NULL: none */
    eval_env score_env, mask_env;         /* captures in the order of the mod_fns' */
    void *workspace;
    size_t workspace_bytes;
    void *stream;
    /* Not NULL: a forward run calls it once, before it puts kernels on the stream that read
     * keys from elsewhere (plan_rows). */
    saccade_status (*between)(void *user, saccade_error *err);
    void *between_user;
    const plan_far *far; /* of a backward run; NULL: nothing besides */
} plan_run;

/* Everything a backward run needs beside its plan_run, whose out and lse are what forward left.
 * Gradients that are not wanted are NULL. */
typedef struct plan_gradients {
    const saccade_tensor *d_out, *d_lse; /* d_lse: NULL for zeros */
    const saccade_tensor *dq, *dk, *dv;
    const saccade_tensor *captures; /* by capture of the score mod; dtype NONE: not wanted */
    const saccade_tensor *sinks;
    const plan_positions *positions; /* of the run; NULL: zeros, for all that is known */
    uint32_t added; /* SACCADE_GRADIENT_* that are added to what their tensors hold */
    int is_least;   /* backward_workspace: the least that a run can work in, not what
                     * makes it fast */
} plan_gradients;

/* Rates of change given to forward mode, and what is made from them, beside a plan_run, whose
 * out and lse may be NULL. Optional tensors are NULL; a capture of the score mod without one
 * has no data. */
typedef struct plan_tangents {
    const saccade_tensor *q, *k, *v;     /* rates of change; NULL: 0 */
    const saccade_tensor *captures;      /* rates of change, by capture; NULL: 0 */
    const saccade_tensor *out, *lse;     /* results */
    const saccade_tensor *d_out, *d_lse; /* of backward, whose gradients' tangents follow */
    const saccade_tensor *dq, *dk, *dv, *d_captures; /* results, with d_out alone */
} plan_tangents;

/* Operations of a weight at most. */
enum { PLAN_WEIGHT_NODES = 64 };

typedef struct plan_solver plan_solver;
struct plan_carry;        /* plan/carry.h */
struct plan_prefix_steps; /* plan/prefix.h */

/* A back end: its solvers, best first and NULL-terminated, and the device its tensors lie on.
 * Their values are read and checked before a run only if that is the host. */
typedef struct plan_backend {
    const char *name; /* "cpu" */
    const plan_solver *const *solvers;
    saccade_device_kind device;
    const struct plan_carry *carry; /* NULL: what ranks exchange is moved by the host */
} plan_backend;

struct saccade_plan {
    uint64_t number; /* from 1, no other's in this process */
    const plan_backend *backend;
    const plan_solver *solver;
    plan_problem problem;
    const mod_fn *source_score, *source_mask; /* before simplification; NULL: none */
    const mod_fn *source_weight;
    uint64_t unread_captures; /* source_score's whose gradients are wanted, and are 0 */
    int32_t threads, level;
    const plan_rows *rows; /* with has_rows, where known before runs: prepare is for these */
    arena arena;
    void *state; /* the solver's own */
};

struct plan_solver {
    const char *name; /* "cpu-tile" */
    /* One boolean expression; why (>= 160 bytes) gets the clause that failed. */
    int (*applicable)(const plan_problem *problem, int32_t level, char *why);
    saccade_status (*create)(saccade_plan *plan, saccade_error *err);
    size_t (*workspace)(const saccade_plan *plan, const saccade_sizes *sizes);
    saccade_status (*prepare)(const saccade_plan *plan, const saccade_block_mask *mask,
                              saccade_error *err);
    saccade_status (*forward)(const saccade_plan *plan, const plan_run *run,
                              saccade_error *err);
    /* NULL, both: the solver takes no problem that wants gradients. */
    size_t (*backward_workspace)(const saccade_plan *plan, const saccade_sizes *sizes,
                                 const plan_gradients *gradients);
    saccade_status (*backward)(const saccade_plan *plan, const plan_run *run,
                               const plan_gradients *gradients, saccade_error *err);
    /* Rows of the tiles that runs of these sizes are cut into; NULL: no plan_run.rows. */
    int64_t (*row_tile)(const saccade_plan *plan, const saccade_sizes *sizes);
    /* run->head_max from run->row_max; NULL: they lie on the host. */
    saccade_status (*head_max)(const saccade_plan *plan, const plan_run *run,
                               saccade_error *err);
    const struct plan_prefix_steps *prefix; /* NULL: lists and parts lie on the host */
    /* NULL, both: the solver has no forward mode; tangent_workspace: or it needs none. */
    size_t (*tangent_workspace)(const saccade_plan *plan, const saccade_sizes *sizes);
    saccade_status (*tangent)(const saccade_plan *plan, const plan_run *run,
                              const plan_tangents *tangents, saccade_error *err);
    /* Forward, or backward, takes ragged runs; else they run sequence by sequence. */
    int takes_ragged, takes_ragged_backward;
    saccade_status (*explain)(const saccade_plan *plan, strbuf *out, saccade_error *err);
    void (*destroy)(saccade_plan *plan);
};

/* Tables of the back ends. Only api/plan_api.c names them together. */
extern const plan_solver *const ref_solvers[];
extern const plan_solver *const plain_solvers[]; /* src/ref too */
extern const plan_solver *const cpu_solvers[];
extern const plan_solver *const cuda_solvers[];
extern const struct plan_carry cu_carry;

/* All bits of gradients. */
enum {
    PLAN_GRADIENTS = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V
                     | SACCADE_GRADIENT_CAPTURES | SACCADE_GRADIENT_SINKS
};

/* ---- plan_derive.c ---- */

/* Checks a problem and derives what kernels read; mods into the plan. */
saccade_status plan_derive(const saccade_problem *problem, saccade_plan *plan,
                           saccade_error *err);

/* ---- plan.c ---- */

/* A plan in memory of its own, one that could not be made whole too; NULL: nothing. */
void plan_destroy(saccade_plan *plan);
/* Whether some run can have these sizes: lengths up to 2^30, and 2^48 elements of Q or O, K or
 * V at most. */
int plan_is_possible(const saccade_sizes *sizes);
/* Whether a problem says for which lengths, and some run can have them: what such a run takes
 * can then be told. */
int plan_has_lengths(const plan_problem *problem);
/* The solver's bytes for runs of these sizes; SIZE_MAX where no run can have them. */
size_t plan_workspace(const saccade_plan *plan, const saccade_sizes *sizes);
/* gradients: of the run, whose dtypes and strides may ask for more; NULL: of no strides that
 * are 0, captures' in f32. */
size_t plan_backward_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                               const plan_gradients *gradients);
/* Bytes for runs of tangent. */
size_t plan_tangent_workspace(const saccade_plan *plan, const saccade_sizes *sizes);
/* The first solver of the table that applies creates the plan; EBACKEND says why none does. */
saccade_status plan_choose(saccade_plan *plan, const plan_solver *const *solvers,
                           saccade_error *err);

/* ---- plan_explain.c ---- */

saccade_status plan_explain(const saccade_plan *plan, strbuf *out, saccade_error *err);

/* ---- sinks.c ---- */

/* The sink of row i, counted as the rows of q are; -inf in runs without, NaN for +inf. */
double plan_sink_of(const plan_run *run, int64_t b, int64_t h, int64_t i);
/* Of a run whose state lies on the host: what patches of a run's head are drawn with; and the
 * factor of one weight, by its positions. */
dropout_words plan_dropout_head(const plan_problem *problem, const plan_run *run, int64_t b,
                                int64_t h);
double plan_dropout_factor(const plan_dropout *d, dropout_words head, int32_t q, int32_t kv);
/* The weight of a sink in a row of this lse, which includes it. */
double plan_sink_weight(double sink, double lse);
/* delta of row i, as the sink's gradient counts it: in a row without a live key, and where the
 * sink is none, an infinity or NaN of d_out counts for nothing. */
double plan_sink_delta(const plan_run *run, const plan_gradients *gradients, int64_t b,
                       int64_t h, int64_t i, double delta);
/* gradients->sinks, which is there: sums of term(of, b, h, i) over the run's rows that an
 * element serves, in double, in the order of batches and rows; i counts all rows. */
typedef double plan_sink_term(const void *of, int64_t b, int64_t h, int64_t i);
void plan_sum_sinks(const plan_run *run, const plan_gradients *gradients, plan_sink_term *term,
                    const void *of, int threads);

/* ---- ragged.c ---- */

/* Where the rows and keys of one batch stand. */
typedef struct plan_position {
    int32_t q_offset, kv_offset;
    int64_t kv_len; /* clamped to 0..KV */
} plan_position;

/* A sequence as a run of its own, on the host. b in texts, and of block masks, stays that of
 * the whole run. Points into itself and to what the whole run points to. */
typedef struct plan_sequence {
    plan_run run;
    saccade_tensor q, k, v, k_scale, v_scale, out, lse, row_max;
    plan_chunks chunks;
    int32_t q_offset, kv_offset, kv_len;
} plan_sequence;
void plan_sequence_of(const plan_run *run, int64_t b, plan_sequence *out);
/* Positions of batch b of a run on the host that may be ragged. */
plan_position plan_position_in(const plan_run *run, int64_t b);
/* A run of the plan's solver, ragged or not, without head_max. */
saccade_status plan_forward_rows(const saccade_plan *plan, const plan_run *run,
                                 saccade_error *err);
saccade_status plan_backward(const saccade_plan *plan, const plan_run *run,
                             const plan_gradients *gradients, saccade_error *err);
/* Bytes of plan_backward's own at the front of its workspace: sums in f32 of gradients of 16
 * bits of pools of pages, which sequences of a ragged run add to one after the other. */
size_t plan_pool_room(const saccade_plan *plan, const plan_gradients *gradients);

/* ---- head_max.c ---- */

/* Bytes of workspace for the row maxima of runs that want none but a head's. */
size_t plan_head_max_room(const plan_problem *problem, const saccade_sizes *sizes);
/* A forward run. */
saccade_status plan_forward(const saccade_plan *plan, const plan_run *run, saccade_error *err);
/* run->head_max from run->row_max, on the host. */
void plan_reduce_rows(const plan_run *run);

/* ---- explain_ranges.c ---- */

/* A line per node: its range over all positions of `sizes`; nothing if lengths are unknown. */
saccade_status plan_explain_ranges(const char *title, const mod_fn *fn,
                                   const plan_problem *problem, strbuf *out,
                                   saccade_error *err);

/* ---- scales.c ---- */

/* Where the scales of a row of K or V lie: that of channels' group n at `at` + n * stride. */
typedef struct plan_scale_row {
    const char *at;
    int64_t stride; /* bytes */
} plan_scale_row;
plan_scale_row plan_scales_of(const saccade_tensor *scale, const plan_groups *groups, int64_t b,
                              int64_t g, int64_t row);
/* Row (b, g, row) of a K or V of any dtype, dequantised; and one element of a quantised one. */
void plan_load_key(const saccade_tensor *t, const saccade_tensor *scale,
                   const plan_groups *groups, int64_t b, int64_t g, int64_t row, float *to);
double plan_key_element(const saccade_tensor *t, const saccade_tensor *scale,
                        const plan_groups *groups, int64_t b, int64_t g, int64_t row,
                        int64_t d);
/* Scales of a tensor of this shape: dtype, shape, strides. scale may be NULL. */
saccade_status plan_check_scales(const saccade_tensor *scale, const char *name,
                                 const int64_t shape[4], const plan_groups *groups,
                                 saccade_device_kind device, saccade_error *err);

/* ---- problem.c ---- */

/* Whether a text names Q or KV, which differ by sequence in ragged runs. fn may be NULL. */
int plan_names_length(const mod_fn *fn);
/* A batch's entries, whatever start says: none outside the table. */
typedef struct plan_entries {
    const int32_t *first;
    int32_t count;
} plan_entries;
plan_entries plan_entries_of(const plan_chunks *chunks, int64_t b);
/* Where logical key j of batch b lies in t, K or V: b numbers what its first dimension counts,
 * batches or pages, and row is -1 in an absent chunk. Past the end: the last row or page. */
typedef struct plan_place {
    int64_t b, row;
} plan_place;
plan_place plan_place_of(const plan_chunks *chunks, const saccade_tensor *t, int64_t b,
                         int64_t j);

/* The sizes and the offset of heads that mods see in runs of these sizes; the rest of *out
 * stays. */
void plan_set_env(const plan_problem *problem, const saccade_sizes *sizes, eval_env *out);
/* Row of blocks `row` of a run's head h in the runs of its block mask. */
int64_t plan_block_row(const plan_run *run, const mask_runs *runs, int64_t b, int64_t h,
                       int64_t row);

/* Positions of batch b of KV keys, for tensors on the host; absent ones give 0, 0, KV. */
plan_position plan_position_of(const plan_positions *positions, int64_t KV, int64_t b);
/* Whether pass_interval's limits are exact at all of a run's positions: rows' and live keys'.
 * Offsets on a GPU are unknown here and count as 0. */
int plan_is_near(const plan_positions *positions, const saccade_sizes *sizes);

/* "b2 h16/4 q4096 kv4096 d128 dv64 bf16" */
void plan_print_problem(const saccade_sizes *sizes, saccade_dtype dtype, strbuf *out);

#endif
