/* Decoding on an NVIDIA GPU as one CUDA graph: recorded once, replayed for each new token. The
 * position of the query and the number of keys lie in device memory, so that a replay sees what
 * they are then; nothing is allocated or compiled between tokens. All queries are 0 here: every
 * key weighs the same and the output is the mean of the values so far. Without a GPU it says
 * why there is none and ends. */
#include <dlfcn.h>
#include <saccade.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 8, HKV = 2, CACHE = 256, D = 64, TOKENS = 100 };

static saccade_error err;

static void check(saccade_status status)
{
    if (status == SACCADE_OK)
        return;
    fprintf(stderr, "%s: %s\n", err.where, err.message);
    exit(1);
}

/* A function of the CUDA driver, which needs no CUDA headers; all return 0 when done. */
static void *driver(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = library ? dlsym(library, name) : NULL;
    if (found)
        return found;
    fprintf(stderr, "the CUDA driver lacks %s\n", name);
    exit(1);
}

static void done(const char *what, int result)
{
    if (result == 0)
        return;
    fprintf(stderr, "%s: CUDA error %d\n", what, result);
    exit(1);
}

/* A tensor on the device that begins as 0. */
static saccade_tensor on_device(saccade_dtype dtype, int32_t rank, const int64_t *shape)
{
    saccade_tensor t = saccade_tensor_of(NULL, dtype, rank, shape);
    size_t bytes = dtype == SACCADE_BF16 ? 2 : 4;
    for (int i = 0; i < rank; i++)
        bytes *= (size_t)shape[i];
    void *zeros = calloc(1, bytes);
    t.device.kind = SACCADE_CUDA;
    check(saccade_device_alloc(0, bytes, &t.data, &err));
    check(saccade_device_copy(0, t.data, zeros, bytes, &err));
    free(zeros);
    return t;
}

static uint16_t bf16_of(float x) /* exact for the small numbers here */
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}

static float float_of(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static saccade_plan *decode_plan(void)
{
    const char *text = "causal()";
    saccade_mod *generic, *mask;
    saccade_plan *plan;
    check(saccade_mod_parse(SACCADE_MASK, text, strlen(text), &generic, &err));
    check(saccade_mod_bind(generic, NULL, 0, &mask, &err));
    saccade_problem problem;
    saccade_problem_init(&problem);
    problem.sizes = (saccade_sizes){.H = H, .Hkv = HKV, .D = D, .Dv = D};
    problem.dtype = SACCADE_BF16;
    problem.mask = mask;
    problem.backend = "cuda";
    check(saccade_plan_create(NULL, &problem, &plan, &err));
    saccade_mod_destroy(mask);
    saccade_mod_destroy(generic);
    return plan;
}

/* The context that saccade works in becomes this thread's: streams and graphs belong to one. */
static void enter_context(void)
{
    int (*retain)(void **, int), (*set)(void *);
    void *context;
    *(void **)&retain = driver("cuDevicePrimaryCtxRetain");
    *(void **)&set = driver("cuCtxSetCurrent");
    done("context", retain(&context, 0));
    done("context", set(context));
}

/* What the run puts on its stream becomes a graph that can be launched. */
static void *record(const saccade_plan *plan, saccade_forward_args *run)
{
    int (*create)(void **, unsigned), (*begin)(void *, int), (*end)(void *, void **);
    int (*instantiate)(void **, void *, unsigned long long);
    void *graph, *launchable;
    *(void **)&create = driver("cuStreamCreate");
    *(void **)&begin = driver("cuStreamBeginCapture_v2");
    *(void **)&end = driver("cuStreamEndCapture");
    *(void **)&instantiate = driver("cuGraphInstantiateWithFlags");
    done("stream", create(&run->stream, 1)); /* 1: beside the default stream */
    check(saccade_forward(plan, run, &err)); /* the first run loads code */
    done("capture", begin(run->stream, 0));
    check(saccade_forward(plan, run, &err));
    done("capture", end(run->stream, &graph));
    done("graph", instantiate(&launchable, graph, 0));
    return launchable;
}

/* Token t: its value joins the cache (its key is 0), then the graph runs. */
static float step(const saccade_forward_args *run, void *graph, int t)
{
    static int (*launch)(void *, void *);
    const int32_t at = t, keys = t + 1;
    uint16_t value[D], out;
    if (!launch)
        *(void **)&launch = driver("cuGraphLaunch");
    for (int i = 0; i < D; i++)
        value[i] = bf16_of((float)t);
    for (int h = 0; h < HKV; h++)
        check(saccade_device_copy(0, (uint16_t *)run->v->data + (h * CACHE + t) * D, value,
                                  sizeof value, &err));
    check(saccade_device_copy(0, run->positions->q_offset->data, &at, 4, &err));
    check(saccade_device_copy(0, run->positions->kv_len->data, &keys, 4, &err));
    done("launch", launch(graph, run->stream));
    check(saccade_device_synchronize(0, &err));
    check(saccade_device_copy(0, &out, run->out->data, sizeof out, &err));
    return float_of(out);
}

int main(void)
{
    const int64_t q[] = {1, H, 1, D}, k[] = {1, HKV, CACHE, D};
    const saccade_sizes sizes = {1, H, HKV, 1, CACHE, D, D};
    int32_t devices;
    int wrong = 0;
    if (saccade_device_count(&devices, &err)) {
        printf("no GPU here: %s\n", err.message);
        return 0;
    }
    enter_context();
    saccade_plan *plan = decode_plan();
    const saccade_tensor queries = on_device(SACCADE_BF16, 4, q);
    const saccade_tensor keys = on_device(SACCADE_BF16, 4, k);
    const saccade_tensor values = on_device(SACCADE_BF16, 4, k);
    const saccade_tensor out = on_device(SACCADE_BF16, 4, q);
    const saccade_tensor offset = on_device(SACCADE_I32, 0, NULL);
    const saccade_tensor length = on_device(SACCADE_I32, 0, NULL);
    const saccade_positions positions = {
        .size = sizeof positions, .q_offset = &offset, .kv_len = &length};
    saccade_forward_args run = {.size = sizeof run,
                                .q = &queries,
                                .k = &keys,
                                .v = &values,
                                .out = &out,
                                .positions = &positions};
    run.workspace_bytes = saccade_plan_workspace(plan, &sizes);
    check(saccade_device_alloc(0, run.workspace_bytes + 1, &run.workspace, &err));

    void *graph = record(plan, &run);
    for (int t = 0; t < TOKENS; t++)
        wrong += step(&run, graph, t) != (float)t / 2;
    printf("%d tokens by one graph, %d wrong\n", TOKENS, wrong);
    void *memory[] = {queries.data,  keys.data,   values.data, out.data,
                      run.workspace, offset.data, length.data};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        saccade_device_free(0, memory[i]);
    saccade_plan_destroy(plan);
    return wrong != 0;
}
