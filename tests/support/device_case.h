/* Forward cases on a CUDA device: inputs lie among NaN, outputs among a pattern that must not
 * change, results are compared whole with the float64 truth and between two runs bit for bit.
 * Nothing here fails a test by itself, so that threads may call it. */
#ifndef SACCADE_TESTS_DEVICE_CASE_H
#define SACCADE_TESTS_DEVICE_CASE_H

#include "support/forward_case.h"

enum { DEVICE_MEMORY = 24, DEVICE_WHY = 640 };

typedef struct device_options {
    const char *arch; /* NULL: the device's */
    int device;
    int shift;          /* elements that Q, K, V and O lie past an aligned address */
    int has_block_mask; /* where the case has a mask */
    /* Not 0: the case's mask as lists of such blocks, imported with a mod that says less. */
    int imported_block;
    const char *imported_mod; /* NULL: none */
    saccade_plan *plan;       /* borrowed; NULL: one is made */
} device_options;

typedef struct device_output {
    saccade_tensor t;
    void *base;
    size_t bytes;
} device_output;

/* A case whose tensors are on the device, with a plan. */
typedef struct device_case {
    const case_run *r;
    device_options options;
    saccade_plan *plan;
    saccade_block_mask *mask;
    saccade_mod *mod; /* of imported lists */
    saccade_tensor q, k, v, position[3];
    saccade_positions at;
    saccade_forward_args args; /* points into this struct */
    saccade_binding bindings[8];
    device_output out, lse, row_max;
    void *memory[DEVICE_MEMORY];
    int n_memory;
    char why[DEVICE_WHY]; /* first failure */
} device_case;

int has_device(void); /* or says that there is none */
/* Skips the test where there is no NVRTC, and says so. */
void skip_without_nvrtc(void);
/* Fails the test where a CUDA program without a mod does not compile, or spills, for sm_80 or
 * this one; skips it where there is no NVRTC. */
void expect_program_compiles(const char *file, const char *arch);
/* Makes a plan, one of some rows of a sequence where is_part; skips the test where there is no
 * NVRTC. */
saccade_plan *compiled_plan(const saccade_problem *p, int is_part);
/* Fails the test where such a plan's program of this number (cu_program) is missing or
 * spills. */
void expect_plan_does_not_spill(const saccade_problem *p, int is_part, int program);
/* Whether case n is to be run: all are, or SACCADE_CUDA_CASES from SACCADE_CUDA_SEED on. */
int is_device_case(int n);
/* A driver call that only a test makes, of which this fails where it is not there. */
void *device_driver_call(const char *name);

/* 0: `why` says what failed. close() in any case. */
int device_case_open(const case_run *r, const device_options *options, device_case *out);
int device_case_run(device_case *d);   /* one run, waited for */
int device_case_check(device_case *d); /* of what the last run wrote */
int device_case_clear(device_case *d); /* outputs back to the pattern */
void device_case_close(device_case *d);

/* All of it, with and without row maxima, two runs each. */
int device_case_all(const case_run *r, const device_options *options, char *why);
/* The same for a case; prints what failed. */
int device_case_holds(const forward_case *c, const device_options *options);

#endif
