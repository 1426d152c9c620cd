/* Any mask in runs: six bytes choose lengths, offsets (near 0 or near their bounds) and level,
   the rest is the text. All scores are 0, so that a row is the mean of its live keys' values:
   the CPU's rows are compared with ref's, proven while running and by a block mask. */
#include "base/cpu_features.h"
#include "plan/plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_Q = 9, MOST_KV = 300, HEADER = 6 };

typedef struct problem {
    saccade_sizes sizes;
    int32_t q_offset, kv_offset;
    const char *level;
    saccade_mod *mask;
    saccade_binding bindings[MOD_MAX_CAPTURES];
    int32_t n_bindings;
} problem;

/* values of all captures: small, and not monotone */
static int32_t values[4096];

static saccade_mod *bind(const unsigned char *text, size_t size, problem *p)
{
    static const int64_t shape[SACCADE_MAX_RANK] = {7, 5, 3, 2, 2, 2, 1, 1};
    saccade_capture captures[MOD_MAX_CAPTURES];
    saccade_mod *mod = NULL, *bound = NULL;
    if (saccade_mod_parse(SACCADE_MASK, (const char *)text, size, &mod, NULL) != SACCADE_OK)
        return NULL;
    p->n_bindings = saccade_mod_capture_count(mod);
    for (int32_t i = 0; i < p->n_bindings; i++) {
        captures[i] = saccade_mod_capture(mod, i);
        captures[i].dtype = SACCADE_I32;
        p->bindings[i].tensor =
            saccade_tensor_of(values + 13 * i, SACCADE_I32, captures[i].rank, shape);
    }
    if (saccade_mod_bind(mod, captures, p->n_bindings, &bound, NULL) == SACCADE_OK)
        for (int32_t i = 0; i < p->n_bindings; i++)
            p->bindings[i].name = saccade_mod_capture(bound, i).name;
    saccade_mod_destroy(mod);
    return bound;
}

static void check(saccade_status status, const saccade_error *err)
{
    if (status == SACCADE_OK)
        return;
    fprintf(stderr, "fuzz_forward: %s: %s\n", err->where, err->message);
    abort();
}

typedef struct offsets {
    saccade_tensor q, kv;
    saccade_positions at; /* points to them */
} offsets;

static const saccade_positions *positions_of(const problem *p, offsets *o)
{
    o->q = saccade_tensor_of((void *)&p->q_offset, SACCADE_I32, 0, NULL);
    o->kv = saccade_tensor_of((void *)&p->kv_offset, SACCADE_I32, 0, NULL);
    o->at = (saccade_positions){.size = sizeof o->at, .q_offset = &o->q, .kv_offset = &o->kv};
    return &o->at;
}

static saccade_plan *plan_of(const problem *p, const char *backend, const char *level)
{
    saccade_error err = {0};
    saccade_plan *plan;
    saccade_context *context;
    saccade_problem s;
    const saccade_context_options options = {
        .size = sizeof options, .threads = 1, .level = level};
    saccade_problem_init(&s);
    s.sizes = p->sizes;
    s.mask = p->mask;
    s.backend = backend;
    check(saccade_context_create(&options, &context, &err), &err);
    check(saccade_plan_create(context, &s, &plan, &err), &err);
    saccade_context_destroy(context);
    return plan;
}

static void forward(const problem *p, const saccade_plan *plan, const saccade_block_mask *mask,
                    float *out)
{
    static float zeros[MOST_KV], v[MOST_KV];
    const int64_t rows[4] = {1, 1, p->sizes.Q, 1}, keys[4] = {1, 1, p->sizes.KV, 1};
    const size_t bytes = (saccade_plan_workspace(plan, &p->sizes) + 63) / 64 * 64;
    void *workspace = aligned_alloc(64, bytes);
    saccade_error err = {0};
    for (int j = 0; j < MOST_KV; j++)
        v[j] = (float)(j * 7 % 97) - 20;
    const saccade_tensor queries = saccade_tensor_of(zeros, SACCADE_F32, 4, rows);
    const saccade_tensor k = saccade_tensor_of(zeros, SACCADE_F32, 4, keys);
    const saccade_tensor values_of = saccade_tensor_of(v, SACCADE_F32, 4, keys);
    const saccade_tensor result = saccade_tensor_of(out, SACCADE_F32, 4, rows);
    offsets o;
    const saccade_forward_args args = {.size = sizeof args,
                                       .q = &queries,
                                       .k = &k,
                                       .v = &values_of,
                                       .out = &result,
                                       .positions = positions_of(p, &o),
                                       .block_mask = mask,
                                       .bindings = p->bindings,
                                       .n_bindings = p->n_bindings,
                                       .workspace = workspace,
                                       .workspace_bytes = bytes};
    if (mask)
        check(saccade_plan_prepare(plan, mask, &err), &err);
    check(saccade_forward(plan, &args, &err), &err);
    free(workspace);
}

static void compare(const problem *p, const float *want, const float *got, const char *what)
{
    for (int64_t i = 0; i < p->sizes.Q; i++)
        if (!(fabsf(got[i] - want[i]) <= 1e-3f)) {
            fprintf(stderr, "fuzz_forward: %s, %s, row %lld: got %g, expected %g\n", p->level,
                    what, (long long)i, (double)got[i], (double)want[i]);
            abort();
        }
}

static void check_runs(const problem *p)
{
    float want[MOST_Q], got[MOST_Q];
    saccade_error err = {0};
    saccade_block_mask *mask;
    saccade_plan *ref = plan_of(p, "ref", NULL), *cpu = plan_of(p, "cpu", p->level);
    offsets o;
    check(saccade_block_mask_create(NULL, p->mask, &p->sizes, positions_of(p, &o), p->bindings,
                                    p->n_bindings, NULL, &mask, &err),
          &err);
    forward(p, ref, NULL, want);
    forward(p, cpu, NULL, got);
    compare(p, want, got, "proven while running");
    forward(p, cpu, mask, got);
    compare(p, want, got, "by a block mask");
    saccade_block_mask_destroy(mask);
    saccade_plan_destroy(ref);
    saccade_plan_destroy(cpu);
}

/* An offset within 128 of 0, or of a bound. */
static int32_t near_base(int which, int by)
{
    static const int32_t bases[] = {0, 1 << 30, -(1 << 30), 1 << 29, -(1 << 29)};
    const int64_t at = (int64_t)bases[which % 16 % 5] + by - 128;
    return (int32_t)(at > 1 << 30 ? 1 << 30 : at < -(1 << 30) ? -(1 << 30) : at);
}

static problem problem_of(const unsigned char *bytes)
{
    cpu_level best = CPU_PORTABLE;
    cpu_level_allowed(&best, NULL);
    problem p = {.sizes = {1, 1, 1, 1 + bytes[0] % MOST_Q, 1 + bytes[1] % MOST_KV, 1, 1}};
    p.q_offset = near_base(bytes[2], bytes[3]);
    p.kv_offset = near_base(bytes[2] >> 4, bytes[4]);
    p.level = cpu_level_name((cpu_level)(bytes[5] % ((int)best + 1)));
    return p;
}

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size)
{
    if (size <= HEADER)
        return 0;
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        values[i] = (int32_t)(i * i % 23) - 3;
    problem p = problem_of(bytes);
    p.mask = bind(bytes + HEADER, size - HEADER, &p);
    if (p.mask)
        check_runs(&p);
    saccade_mod_destroy(p.mask);
    return 0;
}
