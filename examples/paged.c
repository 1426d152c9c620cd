/* Two continuations of one prompt: keys in pages, shared until one of the two writes.
 *
 * A cache of 8 pages holds a prompt of 100 keys, 32 a page. It is forked, both grow by other
 * keys, and one decode step attends to both through their tables. The results are compared with
 * those of the same keys in one piece: they are the same bits. */
#include "saccade_kv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGES = 8, PAGE = 32, H = 4, HKV = 2, D = 16, PROMPT = 100, BRANCHES = 2, MOST = 128 };

static float k_pool[PAGES][PAGE][HKV][D], v_pool[PAGES][PAGE][HKV][D];
static float k_whole[BRANCHES][MOST][HKV][D], v_whole[BRANCHES][MOST][HKV][D];

static void check(saccade_status status, const saccade_error *err)
{
    if (status == SACCADE_OK)
        return;
    fprintf(stderr, "paged: %s: %s\n", err->where, err->message);
    exit(1);
}

/* [outer, HKV, inner, D] of memory in the order outer, inner, head, D. */
static saccade_tensor heads_second(void *data, int64_t outer, int64_t inner)
{
    const int64_t shape[] = {outer, HKV, inner, D};
    saccade_tensor t = saccade_tensor_of(data, SACCADE_F32, 4, shape);
    t.stride[0] = inner * HKV * D;
    t.stride[1] = D;
    t.stride[2] = HKV * D;
    return t;
}

/* New keys of these sequences: into the cache, and beside it into one piece each. */
static void append(saccade_kv *cache, const int32_t *sequences, int32_t n, int32_t count)
{
    float k[BRANCHES * PROMPT][HKV][D], v[BRANCHES * PROMPT][HKV][D];
    int32_t counts[BRANCHES];
    saccade_error err;
    for (int32_t i = 0; i < n; i++) {
        const int64_t at = saccade_kv_length(cache, sequences[i]);
        float *new_k = k[i * count][0], *new_v = v[i * count][0];
        counts[i] = count;
        for (int x = 0; x < count * HKV * D; x++) {
            new_k[x] = (float)rand() / (float)RAND_MAX - 0.5f;
            new_v[x] = (float)rand() / (float)RAND_MAX - 0.5f;
        }
        memcpy(k_whole[i][at], new_k, (size_t)count * sizeof k[0]);
        memcpy(v_whole[i][at], new_v, (size_t)count * sizeof v[0]);
    }
    const int64_t shape[] = {(int64_t)n * count, HKV, D};
    const saccade_tensor from_k = saccade_tensor_of(k, SACCADE_F32, 3, shape);
    const saccade_tensor from_v = saccade_tensor_of(v, SACCADE_F32, 3, shape);
    const saccade_tensor to_k = heads_second(k_pool, PAGES, PAGE);
    const saccade_tensor to_v = heads_second(v_pool, PAGES, PAGE);
    check(saccade_kv_grow(cache, sequences, counts, n, &err), &err);
    check(saccade_kv_write(cache, &to_k, &to_v, &from_k, &from_v, &err), &err);
}

/* One query a sequence; pages NULL: keys in one piece. */
static void attend(float *out, float *q, const saccade_tensor *k, const saccade_tensor *v,
                   int32_t *lengths, const saccade_pages *pages)
{
    const int64_t shape[] = {BRANCHES, H, 1, D};
    const saccade_tensor tq = saccade_tensor_of(q, SACCADE_F32, 4, shape);
    const saccade_tensor to = saccade_tensor_of(out, SACCADE_F32, 4, shape);
    const saccade_tensor len = saccade_tensor_of(lengths, SACCADE_I32, 1, shape);
    saccade_sizes sizes = {BRANCHES, H, HKV, 1, MOST, D, D};
    saccade_problem problem;
    saccade_positions at;
    saccade_forward_args args;
    saccade_plan *plan = NULL;
    saccade_error err;
    saccade_problem_init(&problem);
    problem.sizes = sizes;
    problem.page = pages ? PAGE : 0;
    check(saccade_plan_create(NULL, &problem, &plan, &err), &err);
    saccade_positions_init(&at);
    at.kv_len = &len;
    saccade_forward_args_init(&args);
    args.q = &tq;
    args.k = k;
    args.v = v;
    args.out = &to;
    args.positions = &at;
    args.pages = pages;
    args.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    args.workspace = aligned_alloc(64, (args.workspace_bytes + 64) / 64 * 64);
    check(saccade_forward(plan, &args, &err), &err);
    free(args.workspace);
    saccade_plan_destroy(plan);
}

int main(void)
{
    int32_t branch[BRANCHES], table[BRANCHES][MOST / PAGE], lengths[BRANCHES];
    float q[BRANCHES * H * D], paged[BRANCHES * H * D], whole[BRANCHES * H * D];
    saccade_kv_options options;
    saccade_kv *cache = NULL;
    saccade_error err;
    saccade_pages pages;

    saccade_kv_options_init(&options);
    options.pages = PAGES;
    options.page = PAGE;
    options.sequences = BRANCHES;
    check(saccade_kv_create(&options, &cache, &err), &err);

    check(saccade_kv_add(cache, &branch[0], &err), &err);
    append(cache, branch, 1, PROMPT);
    check(saccade_kv_fork(cache, branch[0], &branch[1], &err), &err);
    memcpy(k_whole[1], k_whole[0], sizeof k_whole[0]);
    memcpy(v_whole[1], v_whole[0], sizeof v_whole[0]);
    append(cache, branch, BRANCHES, 5);
    check(saccade_kv_table(cache, branch, BRANCHES, table[0], MOST / PAGE, lengths, &err),
          &err);

    for (int x = 0; x < BRANCHES * H * D; x++)
        q[x] = (float)rand() / (float)RAND_MAX - 0.5f;
    const int64_t shape[] = {BRANCHES, MOST / PAGE};
    const saccade_tensor entries = saccade_tensor_of(table, SACCADE_I32, 2, shape);
    saccade_pages_init(&pages);
    pages.table = &entries;
    const saccade_tensor kp = heads_second(k_pool, PAGES, PAGE);
    const saccade_tensor vp = heads_second(v_pool, PAGES, PAGE);
    const saccade_tensor kw = heads_second(k_whole, BRANCHES, MOST);
    const saccade_tensor vw = heads_second(v_whole, BRANCHES, MOST);
    attend(paged, q, &kp, &vp, lengths, &pages);
    attend(whole, q, &kw, &vw, lengths, NULL);

    for (int b = 0; b < BRANCHES; b++) {
        printf("branch %d: %d keys in pages", b, lengths[b]);
        for (int i = 0; i < MOST / PAGE; i++)
            printf(" %d", table[b][i]);
        putchar('\n');
    }
    const int is_same = memcmp(paged, whole, sizeof paged) == 0;
    printf("%lld of %d pages free; %s\n", (long long)saccade_kv_free_pages(cache), PAGES,
           is_same ? "the same bits as in one piece" : "NOT what one piece gives");
    saccade_kv_destroy(cache);
    return !is_same;
}
