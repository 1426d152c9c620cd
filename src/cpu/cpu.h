/* cpu.h: what a plan of the CPU back end keeps, for its operations to read. */
#ifndef SACCADE_CPU_CPU_H
#define SACCADE_CPU_CPU_H

#include "cpu/flow/flow.h"
#include "cpu/jit/jit.h"
#include "cpu/kernels/kernels.h"
#include "cpu/schedule/schedule.h"
#include "plan/plan.h"

typedef struct cpu_state {
    const eval_prog *score, *mask;      /* NULL: none */
    jit_program *jit;                   /* both compiled; NULL: the interpreter runs them */
    flow_code *code;                    /* of streams; NULL: block by block */
    cpu_needs needs;                    /* the kernels too */
    struct cpu_backward_plan *backward; /* NULL: forward only */
    struct cpu_tangent_plan *tangent;   /* NULL: no forward mode */
} cpu_state;

static inline const cpu_state *cpu_state_of(const saccade_plan *plan)
{
    return plan->state;
}

#endif
