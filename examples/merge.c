/* Attention over two halves of the keys, merged: (out, lse) of the parts is all it takes. The
 * second half runs at its own positions, by kv_offset, so the mask still means what it says. */
#include <math.h>
#include <saccade.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 2, N = 200, HALF = N / 2, D = 48 };

static saccade_error err;
static float q[H * N * D], k[H * N * D], v[H * N * D];

static void check(saccade_status status)
{
    if (status == SACCADE_OK)
        return;
    fprintf(stderr, "%s: %s\n", err.where, err.message);
    exit(1);
}

/* Keys [from, from + n) of every head: a view, nothing is copied. */
static saccade_tensor keys(float *data, int64_t from, int64_t n)
{
    const int64_t shape[] = {1, H, N, D};
    saccade_tensor t = saccade_tensor_of(data + from * D, SACCADE_F32, 4, shape);
    t.shape[2] = n;
    return t;
}

static void attend(const saccade_plan *plan, int32_t from, int64_t n, float *out, float *lse)
{
    const int64_t lse_shape[] = {1, H, N};
    const saccade_sizes sizes = {1, H, H, N, n, D, D};
    const saccade_tensor queries = keys(q, 0, N), k_part = keys(k, from, n);
    const saccade_tensor v_part = keys(v, from, n), out_part = keys(out, 0, N);
    const saccade_tensor lse_part = saccade_tensor_of(lse, SACCADE_F32, 3, lse_shape);
    const saccade_tensor offset = saccade_tensor_of(&from, SACCADE_I32, 0, NULL);
    const saccade_positions positions = {.size = sizeof positions, .kv_offset = &offset};
    saccade_forward_args run = {
        .size = sizeof run,
        .q = &queries,
        .k = &k_part,
        .v = &v_part,
        .out = &out_part,
        .lse = &lse_part,
        .positions = &positions,
        .workspace_bytes = saccade_plan_workspace(plan, &sizes),
    };
    run.workspace = aligned_alloc(64, (run.workspace_bytes + 64) / 64 * 64);
    check(saccade_forward(plan, &run, &err));
    free(run.workspace);
}

int main(void)
{
    static float whole[H * N * D], part[2][H * N * D], merged[H * N * D], lse[3][H * N];
    static const char text[] = "causal()";
    for (int i = 0; i < H * N * D; i++) {
        q[i] = sinf((float)(i % 1009));
        k[i] = cosf((float)(i % 1013));
        v[i] = sinf((float)(i % 499));
    }
    saccade_mod *generic, *mask;
    check(saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, &err));
    check(saccade_mod_bind(generic, NULL, 0, &mask, &err));
    saccade_problem problem;
    saccade_problem_init(&problem);
    problem.sizes = (saccade_sizes){.H = H, .Hkv = H, .D = D, .Dv = D};
    problem.mask = mask;
    saccade_plan *plan; /* one plan: lengths and positions come with each run */
    check(saccade_plan_create(NULL, &problem, &plan, &err));
    attend(plan, 0, N, whole, lse[2]);
    attend(plan, 0, HALF, part[0], lse[0]);
    attend(plan, HALF, HALF, part[1], lse[1]);

    const saccade_tensor outs[] = {keys(part[0], 0, N), keys(part[1], 0, N)};
    const int64_t lse_shape[] = {1, H, N};
    const saccade_tensor lses[] = {saccade_tensor_of(lse[0], SACCADE_F32, 3, lse_shape),
                                   saccade_tensor_of(lse[1], SACCADE_F32, 3, lse_shape)};
    const saccade_tensor out = keys(merged, 0, N);
    const saccade_merge_args both = {
        .size = sizeof both, .outs = outs, .lses = lses, .n = 2, .out = &out};
    check(saccade_merge(NULL, &both, &err));

    float worst = 0;
    for (int i = 0; i < H * N * D; i++)
        worst = fmaxf(worst, fabsf(merged[i] - whole[i]));
    printf("largest difference between merged and whole: %g\n", (double)worst);
    saccade_plan_destroy(plan);
    saccade_mod_destroy(mask);
    saccade_mod_destroy(generic);
    return worst < 1e-5f ? 0 : 1;
}
