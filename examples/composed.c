/* A mask composed of a named one and the user's own, with captured tensors: packed documents,
 * causal inside each, in which every query also sees the first `sinks` keys of its document;
 * the score is biased per head. A block mask says what is skipped. */
#include <math.h>
#include <saccade.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 1, H = 2, N = 512, D = 64 };

static const char mask_text[] = "mask near_or_sink(doc[], start[], sinks) =\n"
                                "    sliding_window(64) || kv - start[doc[kv]] < sinks;\n"
                                "document_causal(doc) && near_or_sink(doc, start, sinks)";
static const char score_text[] = "score = alibi(); score + gain[h]";

static saccade_error err;

static void check(saccade_status status)
{
    if (status == SACCADE_OK)
        return;
    fprintf(stderr, "%s %d:%d: %s\n", err.where, err.line, err.column, err.message);
    exit(1);
}

/* Parses, and types every free name by the binding of that name. */
static saccade_mod *make(saccade_kind kind, const char *text, const saccade_binding *bindings,
                         int n_bindings)
{
    saccade_capture captures[4];
    saccade_mod *generic, *bound;
    check(saccade_mod_parse(kind, text, strlen(text), &generic, &err));
    const int n = saccade_mod_capture_count(generic);
    for (int i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        for (int j = 0; j < n_bindings; j++)
            if (strcmp(captures[i].name, bindings[j].name) == 0)
                captures[i].dtype = bindings[j].tensor.dtype;
    }
    check(saccade_mod_bind(generic, captures, n, &bound, &err));
    saccade_mod_destroy(generic);
    return bound;
}

int main(void)
{
    static float q[H * N * D], k[H * N * D], v[H * N * D], o[H * N * D];
    static int32_t doc[N], start[4] = {0, 100, 101, 300}, sinks = 4;
    static float gain[H] = {0.5f, -1.0f};
    const int64_t shape[] = {B, H, N, D}, n_keys = N, n_docs = 4, n_heads = H;
    for (int i = 0; i < N; i++)
        doc[i] = (i >= 100) + (i >= 101) + (i >= 300);
    for (int i = 0; i < H * N * D; i++) {
        q[i] = sinf((float)(i % 1009));
        k[i] = cosf((float)(i % 1013));
        v[i] = 1; /* any weights of ones add up to one */
    }
    const saccade_binding bindings[] = {
        {"doc", saccade_tensor_of(doc, SACCADE_I32, 1, &n_keys)},
        {"start", saccade_tensor_of(start, SACCADE_I32, 1, &n_docs)},
        {"sinks", saccade_tensor_of(&sinks, SACCADE_I32, 0, NULL)},
        {"gain", saccade_tensor_of(gain, SACCADE_F32, 1, &n_heads)},
    };
    saccade_mod *mask = make(SACCADE_MASK, mask_text, bindings, 3);
    saccade_mod *score = make(SACCADE_SCORE, score_text, bindings + 3, 1);

    const saccade_sizes sizes = {B, H, H, N, N, D, D};
    const saccade_block_mask_options blocks = {
        .size = sizeof blocks, .block_q = 64, .block_kv = 64};
    saccade_block_mask *block_mask;
    check(saccade_block_mask_create(NULL, mask, &sizes, NULL, bindings, 3, &blocks, &block_mask,
                                    &err));
    saccade_block_mask_stats stats;
    saccade_block_mask_stats_init(&stats);
    check(saccade_block_mask_get_stats(block_mask, &stats, &err));
    printf("%lld of %lld blocks are skipped\n",
           (long long)(stats.blocks - stats.full - stats.partial), (long long)stats.blocks);

    saccade_problem problem;
    saccade_problem_init(&problem);
    problem.sizes = sizes;
    problem.mask = mask;
    problem.score = score;
    saccade_plan *plan;
    check(saccade_plan_create(NULL, &problem, &plan, &err));
    check(saccade_plan_prepare(plan, block_mask, &err));
    const saccade_tensor queries = saccade_tensor_of(q, SACCADE_F32, 4, shape);
    const saccade_tensor keys = saccade_tensor_of(k, SACCADE_F32, 4, shape);
    const saccade_tensor values = saccade_tensor_of(v, SACCADE_F32, 4, shape);
    const saccade_tensor out = saccade_tensor_of(o, SACCADE_F32, 4, shape);
    saccade_forward_args run = {
        .size = sizeof run,
        .q = &queries,
        .k = &keys,
        .v = &values,
        .out = &out,
        .block_mask = block_mask,
        .bindings = bindings,
        .n_bindings = 4,
        .workspace_bytes = saccade_plan_workspace(plan, &sizes),
    };
    run.workspace = aligned_alloc(64, (run.workspace_bytes + 64) / 64 * 64);
    check(saccade_forward(plan, &run, &err));

    float worst = 0;
    for (int i = 0; i < H * N * D; i++)
        worst = fmaxf(worst, fabsf(o[i] - 1));
    printf("largest difference from 1: %g\n", (double)worst);
    free(run.workspace);
    saccade_plan_destroy(plan);
    saccade_block_mask_destroy(block_mask);
    saccade_mod_destroy(score);
    saccade_mod_destroy(mask);
    return worst < 1e-5f ? 0 : 1;
}
