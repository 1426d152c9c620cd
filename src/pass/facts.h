/* facts.h: what a mod is, found once when a plan is derived and never changed. Kernels are
 * chosen, compiled and explained by these facts; no back end finds out anything about a mod by
 * itself. A new fact is a member here, its finder and its line of text in facts.c. */
#ifndef SACCADE_PASS_FACTS_H
#define SACCADE_PASS_FACTS_H

#include "pass/pass.h"
#include "pass/scatter.h"

/* What an int gains from one row to the next, lo to hi; lo above hi: unknown. */
typedef struct pass_slope {
    int8_t lo, hi;
} pass_slope;
enum { PASS_MOST_SLOPE = 16 };

static inline int pass_slope_is_known(pass_slope s)
{
    return s.lo <= s.hi;
}

/* A mask as one interval of keys per row (pass_interval). */
typedef struct pass_limits {
    const mod_fn *fn;        /* ints free of kv */
    uint32_t node[2];        /* of fn: first live kv, and the one past the last */
    const pass_slope *slope; /* by node of fn */
} pass_limits;

typedef struct pass_facts {
    const mod_fn *fn;       /* simplified; its nodes say what each of them varies with */
    const pass_read *reads; /* of captures, in the order of their nodes */
    uint32_t n_reads;

    /* ---- masks ---- */
    const pass_limits *limits; /* NULL: a row's keys are no interval, or not surely one */

    /* ---- scores ---- */
    const mod_fn *slope, *offset; /* the score is slope * score + offset; NULL: no such line */
    const double *gain;           /* by node: how much the result changes with it, at most */
    double tanh_gain;             /* .. with an error of all tanh of scores; 0: there is none */
    uint8_t is_bounded;           /* proven: results lie within +-PASS_BOUND */
    uint8_t stays_finite;         /* guessed: finite scores give finite results */
    uint8_t may_be_lowest;        /* results may lie below -1e37 without being -inf */
    uint8_t is_far;               /* a number in the line's offset is above PASS_FAR */
    uint8_t is_finite_line;       /* proven: a line, which is no infinity for finite scores */
} pass_facts;

enum { PASS_BOUND = 35 };

/* By node of fn: how much `result` changes with it, at most; infinite where no constant says.
 * NULL: out of memory. */
double *pass_gains(const mod_fn *fn, uint32_t result, arena *arena);
/* An upper bound of |node| over all positions, finite scores and captured values. INFINITY if
 * there is none, the node may be NaN, or memory ran out. */
double pass_largest(const mod_fn *fn, uint32_t node, arena *arena);
/* Whether a float operation of one value, or a power, gives infinities of finite operands. */
int pass_gives_infinities(int op);
/* fn: simplified, as long as the arena lives. */
saccade_status pass_facts_make(const mod_fn *fn, arena *arena, const pass_facts **out,
                               saccade_error *err);
/* The facts in words; what each node varies with is in mod_print_nodes. */
saccade_status pass_facts_print(const pass_facts *facts, strbuf *out, saccade_error *err);

#endif
