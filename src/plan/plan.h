/* plan.h: problems, plans and the table of solvers. A solver is a way to run a problem: a
 * struct of data and functions; choosing is asking each in order. api.c checks and resolves a
 * caller's arguments into plan_run before a solver sees them. */
#ifndef SACCADE_PLAN_H
#define SACCADE_PLAN_H

#include "base/context.h"
#include "eval/eval.h"
#include "mask/mask.h"
#include "mod/mod.h"
#include "pass/pass.h"

/* A problem with everything derived: mods simplified, scale set. Lives in the plan's arena. */
typedef struct plan_problem {
    saccade_sizes sizes; /* B, Q, KV: hints, 0 unknown */
    saccade_dtype dtype, kv_dtype;
    float scale;
    const mod_fn *score; /* NULL: identity */
    const mod_fn *mask;  /* NULL: all live */
    int32_t group;       /* H / Hkv */
    const char *arch;    /* CUDA target asked for, in the plan's arena; NULL: the device's */
} plan_problem;

/* Everything a forward run needs, checked. Tensors are in the order and shapes of saccade.h. */
typedef struct plan_run {
    saccade_sizes sizes;
    const saccade_tensor *q, *k, *v, *out;
    const saccade_tensor *lse, *row_max; /* NULL: not wanted */
    saccade_positions positions;
    const saccade_block_mask *block_mask; /* NULL: none */
    eval_env score_env, mask_env;         /* captures in the order of the mod_fns' */
    void *workspace;
    size_t workspace_bytes;
    void *stream;
} plan_run;

typedef struct plan_solver plan_solver;

struct saccade_plan {
    const plan_solver *solver;
    plan_problem problem;
    const mod_fn *source_mask; /* problem.mask before simplification; NULL: none */
    int32_t threads, level;
    arena arena;
    void *state; /* the solver's own */
};

struct plan_solver {
    const char *name;    /* "cpu-tile" */
    const char *backend; /* "cpu" */
    /* One boolean expression; why (>= 160 bytes) gets the clause that failed. */
    int (*applicable)(const plan_problem *problem, int32_t level, char *why);
    saccade_status (*create)(saccade_plan *plan, saccade_error *err);
    size_t (*workspace)(const saccade_plan *plan, const saccade_sizes *sizes);
    saccade_status (*prepare)(const saccade_plan *plan, const saccade_block_mask *mask,
                              saccade_error *err);
    saccade_status (*forward)(const saccade_plan *plan, const plan_run *run,
                              saccade_error *err);
    saccade_status (*explain)(const saccade_plan *plan, strbuf *out, saccade_error *err);
    void (*destroy)(saccade_plan *plan);
};

/* Tables of the back ends, NULL-terminated, best first. Only api.c names them together. */
extern const plan_solver *const ref_solvers[];
extern const plan_solver *const plain_solvers[]; /* src/ref too */
extern const plan_solver *const cpu_solvers[];
extern const plan_solver *const cuda_solvers[];

/* ---- plan.c ---- */

/* Checks a problem and derives what kernels read; mods into the plan. */
saccade_status plan_derive(const saccade_problem *problem, saccade_plan *plan,
                           saccade_error *err);
/* The first solver of the table that applies creates the plan; EBACKEND says why none does. */
saccade_status plan_choose(saccade_plan *plan, const plan_solver *const *solvers,
                           saccade_error *err);
saccade_status plan_explain(const saccade_plan *plan, strbuf *out, saccade_error *err);

/* ---- explain_ranges.c ---- */

/* A line per node: its range over all positions of `sizes`; nothing if lengths are unknown. */
saccade_status plan_explain_ranges(const char *title, const mod_fn *fn,
                                   const saccade_sizes *sizes, strbuf *out, saccade_error *err);

/* ---- problem.c ---- */

/* positions of batch b for host tensors; absent gives 0, 0, KV. */
typedef struct plan_position {
    int32_t q_offset, kv_offset;
    int64_t kv_len; /* clamped to 0..KV */
} plan_position;
plan_position plan_position_of(const saccade_positions *positions, int64_t KV, int64_t b);

/* One grammar for problems: "b2 h16/4 q4096 kv4096 d128 dv64 bf16". */
saccade_status plan_parse_problem(const char *text, saccade_sizes *sizes, saccade_dtype *dtype,
                                  saccade_error *err);
void plan_print_problem(const saccade_sizes *sizes, saccade_dtype dtype, strbuf *out);

#endif
