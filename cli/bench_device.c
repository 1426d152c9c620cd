/* Rows of saccade bench on a CUDA device. Problems of one size share random tensors that are
 * made on the device; their rows are timed in shuffled rounds, by events, each run after L2 was
 * overwritten, so that clocks and temperature fall on all alike; medians. What the device does
 * not take (a dtype, too much memory) is named and left out. */
#include "bench.h"
#include "floats.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROUNDS = 15, MOST_ROUNDS = 1000 };

/* ---- tensors ---- */

/* Normal numbers: a million of them, repeated. */
static saccade_status fill_normal(void *memory, saccade_dtype dtype, int64_t n, uint64_t seed,
                                  saccade_error *err)
{
    const int64_t most = 1048573; /* a prime: no two rows of a big tensor are alike */
    const int64_t fresh[] = {n < most ? n : most};
    const size_t bytes = (size_t)n * saccade_dtype_bytes(dtype);
    size_t done = (size_t)fresh[0] * saccade_dtype_bytes(dtype);
    saccade_tensor host;
    CLI_TRY(floats_new(dtype, 1, fresh, &host, err));
    floats_fill_normal(&host, seed);
    saccade_status status = saccade_device_copy(0, memory, host.data, done, err);
    free(host.data);
    while (done < bytes && status == SACCADE_OK) {
        const size_t more = bytes - done < done ? bytes - done : done;
        status = saccade_device_copy(0, (char *)memory + done, memory, more, err);
        done += more;
    }
    return status;
}

/* seed 0: left as it is, for results. */
static saccade_status new_tensor(saccade_dtype dtype, int32_t rank, const int64_t *shape,
                                 uint64_t seed, saccade_tensor *out, saccade_error *err)
{
    saccade_tensor t = saccade_tensor_of(NULL, dtype, rank, shape);
    const int64_t n = floats_count(&t);
    t.device.kind = SACCADE_CUDA;
    CLI_TRY(saccade_device_alloc(0, (size_t)n * saccade_dtype_bytes(dtype), &t.data, err));
    *out = t;
    return seed ? fill_normal(t.data, dtype, n, seed, err) : SACCADE_OK;
}

static void free_tensors(job_tensors *t)
{
    saccade_tensor *all[] = {&t->q, &t->k, &t->v, &t->out, &t->lse};
    for (int i = 0; i < 5; i++)
        saccade_device_free(0, all[i]->data);
}

static saccade_status new_tensors(const saccade_sizes *s, saccade_dtype dtype, job_tensors *out,
                                  saccade_error *err)
{
    const int64_t q[] = {s->B, s->H, s->Q, s->D}, k[] = {s->B, s->Hkv, s->KV, s->D};
    const int64_t v[] = {s->B, s->Hkv, s->KV, s->Dv}, o[] = {s->B, s->H, s->Q, s->Dv};
    job_tensors t = {.q = {.data = NULL}};
    saccade_status status;
    CLI_TRY_GOTO(new_tensor(dtype, 4, q, 1, &t.q, err));
    CLI_TRY_GOTO(new_tensor(dtype, 4, k, 2, &t.k, err));
    CLI_TRY_GOTO(new_tensor(dtype, 4, v, 3, &t.v, err));
    CLI_TRY_GOTO(new_tensor(dtype, 4, o, 0, &t.out, err));
    CLI_TRY_GOTO(new_tensor(SACCADE_F32, 3, o, 0, &t.lse, err));
    *out = t;
    return SACCADE_OK;
out:
    free_tensors(&t);
    return status;
}

/* ---- rows of one size ---- */

typedef struct device_row {
    const bench_case *text;
    job job;
    engine engine;
    double live, seconds[MOST_ROUNDS];
} device_row;

static saccade_status open_row(bench *b, const job_tensors *t, device_row *r,
                               saccade_error *err)
{
    const cli_args args = bench_case_args(r->text);
    cli_progress("%s: compiling %s", b->suite, r->text->text.name);
    CLI_TRY(job_open(&args, &r->text->sizes, &r->job, err));
    saccade_status status = job_live_scores(&r->job, b->context, &r->live, err);
    if (status == SACCADE_OK)
        status = engine_open(&r->job, &b->options, t, &r->engine, err);
    if (status == SACCADE_OK) { /* the first run loads code */
        status = engine_run(&r->engine, NULL, err);
        if (status != SACCADE_OK)
            engine_close(&r->engine);
    }
    if (status != SACCADE_OK)
        job_close(&r->job);
    return status;
}

static void close_row(device_row *r)
{
    engine_close(&r->engine);
    job_close(&r->job);
}

static bool is_no_fault(saccade_status status)
{
    return status == SACCADE_EBACKEND || status == SACCADE_ENOMEM;
}

static void say_left_out(const bench *b, const bench_case *c, const saccade_error *err)
{
    char problem[PROBLEM_BYTES];
    problem_show(&c->sizes, c->dtype, problem);
    cli_progress(NULL);
    printf("%-8s %-28s %-40s left out: %s\n", b->suite, c->text.name, problem, err->message);
}

static saccade_status time_once(saccade_device_timer *timer, device_row *r, int round,
                                saccade_error *err)
{
    CLI_TRY(saccade_device_timer_begin(timer, NULL, 1, err));
    CLI_TRY(saccade_forward(r->engine.plan, &r->engine.args, err));
    return saccade_device_timer_end(timer, NULL, &r->seconds[round], err);
}

static saccade_status time_rounds(bench *b, device_row **rows, int n, int rounds,
                                  saccade_error *err)
{
    uint64_t state = 1;
    saccade_device_timer *timer;
    saccade_status status = SACCADE_OK;
    CLI_TRY(saccade_device_timer_create(0, &timer, err));
    for (int r = 0; r < rounds && status == SACCADE_OK; r++) {
        cli_progress("%s: round %d of %d", b->suite, r + 1, rounds);
        for (int i = 0; i < n && status == SACCADE_OK; i++) {
            const int other = i + (int)(floats_random(&state) % (uint64_t)(n - i));
            device_row *chosen = rows[other];
            rows[other] = rows[i];
            rows[i] = chosen;
            status = time_once(timer, chosen, r, err);
        }
    }
    saccade_device_timer_destroy(timer);
    return status;
}

static saccade_status put_row(bench *b, device_row *r, int rounds, saccade_error *err)
{
    bench_row row = bench_start_row(b, r->text, "cuda");
    row.ms = 1e3 * bench_median(r->seconds, rounds);
    bench_rate(b, r->text, r->live, b->device_ceilings.copy_gbytes_per_s, &row);
    CLI_TRY(bench_set_sparsity(b, r->text, &row, err));
    return bench_finish_row(b, &row, err);
}

static saccade_status time_open_rows(bench *b, device_row *rows, int n, saccade_error *err)
{
    const int rounds = b->args->repeats ? (int)b->args->repeats : ROUNDS;
    device_row **order = malloc((size_t)(n + 1) * sizeof *order);
    CLI_FAIL_IF(!order, SACCADE_ENOMEM, "bench", "out of memory");
    for (int i = 0; i < n; i++)
        order[i] = &rows[i];
    saccade_status status = time_rounds(b, order, n, rounds, err);
    free(order);
    for (int i = 0; i < n && status == SACCADE_OK; i++)
        status = put_row(b, &rows[i], rounds, err);
    return status;
}

/* Cases of one size and dtype. */
static saccade_status time_group(bench *b, const bench_case *cases, int n, saccade_error *err)
{
    job_tensors t;
    int n_open = 0;
    cli_progress("%s: making tensors", b->suite);
    saccade_status status = new_tensors(&cases[0].sizes, cases[0].dtype, &t, err);
    if (is_no_fault(status)) {
        for (int i = 0; i < n; i++)
            say_left_out(b, &cases[i], err);
        return SACCADE_OK;
    }
    CLI_TRY(status);
    device_row *rows = calloc((size_t)n, sizeof *rows);
    if (!rows)
        status = cli_fail(err, SACCADE_ENOMEM, "bench", "out of memory");
    for (int i = 0; i < n && status == SACCADE_OK; i++) {
        rows[n_open].text = &cases[i];
        status = open_row(b, &t, &rows[n_open], err);
        if (is_no_fault(status)) {
            say_left_out(b, &cases[i], err);
            status = SACCADE_OK;
        } else if (status == SACCADE_OK) {
            n_open++;
        }
    }
    if (status == SACCADE_OK)
        status = time_open_rows(b, rows, n_open, err);
    while (n_open > 0)
        close_row(&rows[--n_open]);
    free(rows);
    free_tensors(&t);
    return status;
}

static bool is_same_size(const bench_case *a, const bench_case *b)
{
    return memcmp(&a->sizes, &b->sizes, sizeof a->sizes) == 0 && a->dtype == b->dtype;
}

saccade_status bench_device_cases(bench *b, const bench_case *cases, int n, saccade_error *err)
{
    for (int first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && is_same_size(&cases[first], &cases[end]); end++)
            ;
        CLI_TRY(time_group(b, cases + first, end - first, err));
    }
    return SACCADE_OK;
}

/* ---- block masks ---- */

static saccade_status prepare_once(const bench *b, const job *j, const saccade_plan *plan,
                                   double *seconds, saccade_error *err)
{
    saccade_block_mask *mask;
    CLI_TRY(job_block_mask(j, b->context, 0, 0, &mask, err));
    const double begin = cli_seconds();
    const saccade_status status = saccade_plan_prepare(plan, mask, err);
    *seconds = cli_seconds() - begin;
    saccade_block_mask_destroy(mask);
    return status;
}

saccade_status bench_device_prepare(bench *b, const bench_case *c, saccade_error *err)
{
    enum { RUNS = 5 };
    const cli_args args = bench_case_args(c);
    double seconds[RUNS];
    char name[48];
    bench_case named = *c;
    saccade_plan *plan;
    job j;
    CLI_TRY(job_open(&args, &c->sizes, &j, err));
    saccade_status status = engine_plan(&j, &b->options, c->dtype, b->context, &plan, err);
    if (status == SACCADE_OK) {
        for (int i = 0; i < RUNS && status == SACCADE_OK; i++)
            status = prepare_once(b, &j, plan, &seconds[i], err);
        saccade_plan_destroy(plan);
    }
    job_close(&j);
    CLI_TRY(status);
    snprintf(name, sizeof name, "%.36s, upload", c->text.name);
    named.text.name = name;
    bench_row row = bench_start_row(b, &named, "cuda");
    row.ms = 1e3 * bench_median(seconds, RUNS);
    return bench_finish_row(b, &row, err);
}

/* ---- the cache of code ---- */

static const char cache_variable[] = "SACCADE_CACHE_DIR";
static char *cache_before; /* what the variable was */

saccade_status bench_cache_new(char folder[64], saccade_error *err)
{
    const char *before = getenv(cache_variable);
    snprintf(folder, 64, "/tmp/saccade-bench-XXXXXX");
    CLI_FAIL_IF(!mkdtemp(folder), SACCADE_EIO, "/tmp", "cannot make a folder");
    cache_before = before ? strdup(before) : NULL;
    setenv(cache_variable, folder, 1);
    return saccade_device_synchronize(0, err); /* makes the context, which is not timed */
}

void bench_cache_restore(const char *folder)
{
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (e->d_name[0] != '.')
            unlink(path);
    }
    if (d)
        closedir(d);
    rmdir(folder);
    if (cache_before)
        setenv(cache_variable, cache_before, 1);
    else
        unsetenv(cache_variable);
    free(cache_before);
    cache_before = NULL;
}
