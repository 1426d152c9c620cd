/* One variant: causal attention with ALiBi, two query heads to a key head, in 40 lines. */
#include <math.h>
#include <saccade.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 1, H = 4, HKV = 2, N = 100, D = 32 };

static saccade_error err;

static void check(saccade_status status)
{
    if (status == SACCADE_OK)
        return;
    fprintf(stderr, "%s: %s\n", err.where, err.message);
    exit(1);
}

static saccade_tensor tensor(int64_t heads, float *data)
{
    const int64_t shape[] = {B, heads, N, D};
    for (int i = 0; i < B * heads * N * D; i++)
        data[i] = sinf((float)(i * i % 1009));
    return saccade_tensor_of(data, SACCADE_F32, 4, shape);
}

static saccade_mod *parse(saccade_kind kind, const char *text)
{
    saccade_mod *generic, *bound;
    check(saccade_mod_parse(kind, text, strlen(text), &generic, &err));
    check(saccade_mod_bind(generic, NULL, 0, &bound, &err)); /* it has no free names */
    saccade_mod_destroy(generic);
    return bound;
}

int main(void)
{
    static float q[B * H * N * D], k[B * HKV * N * D], v[B * HKV * N * D], o[B * H * N * D];
    saccade_mod *mask = parse(SACCADE_MASK, "causal()");
    saccade_mod *score = parse(SACCADE_SCORE, "alibi()");
    saccade_problem problem;
    saccade_problem_init(&problem);
    problem.sizes = (saccade_sizes){.H = H, .Hkv = HKV, .D = D, .Dv = D};
    problem.mask = mask;
    problem.score = score;
    saccade_plan *plan;
    check(saccade_plan_create(NULL, &problem, &plan, &err));

    const saccade_tensor queries = tensor(H, q), keys = tensor(HKV, k);
    const saccade_tensor values = tensor(HKV, v), out = tensor(H, o);
    saccade_forward_args run;
    saccade_forward_args_init(&run);
    run.q = &queries;
    run.k = &keys;
    run.v = &values;
    run.out = &out;
    const saccade_sizes sizes = {B, H, HKV, N, N, D, D};
    run.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    run.workspace = aligned_alloc(64, (run.workspace_bytes + 64) / 64 * 64);
    check(saccade_forward(plan, &run, &err));

    /* the first row sees the first key only: its output is that key's value */
    const int ok = memcmp(o, v, D * sizeof *o) == 0;
    printf("o[1] = %g, v[1] = %g\n", (double)o[1], (double)v[1]);
    free(run.workspace);
    saccade_plan_destroy(plan);
    saccade_mod_destroy(score);
    saccade_mod_destroy(mask);
    return ok ? 0 : 1;
}
