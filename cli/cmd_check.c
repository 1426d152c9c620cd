/* saccade check: every back end and level against float64. Given a problem or files, that one;
 * else random problems over the named variants and some texts beyond them. */
#include "check.h"
#include "compare.h"
#include "files.h"
#include "floats.h"
#include "variants.h"

#include <math.h>
#include <string.h>

const check_way check_ways[CHECK_WAYS] = {
    {"cpu", "portable"}, {"cpu", "avx2"}, {"cpu", "avx512"}, {"cpu", "amx"}, {"cuda", NULL},
};

/* Texts no prelude has. */
static const cli_variant others[] = {
    {"checkerboard", "(q / 3 + kv / 5) % 2 == 0", NULL, NULL},
    {"per head", "kv <= q + h", "score * (1.0 + 0.25 * h)", NULL},
    {"table", "live[b, kv] || kv == q", "score + bias[h, q, kv]", NULL},
    {"no keys", "kv < q - 5", "softcap(4.0)", NULL},
};
enum { OTHERS = sizeof others / sizeof others[0] };

static void print_header(verdict *all)
{
    if (all->has_header)
        return;
    all->has_header = true;
    printf("%-40s %-16s %-5s %-8s %10s %10s %10s  %s\n", "problem", "variant", "on", "level",
           "error", "allowed", "lse error", "verdict");
}

bool check_wants(const engine_options *options, const check_way *way)
{
    const char *backend = options->backend, *level = options->level;
    return (!backend || strcmp(backend, "auto") == 0 || strcmp(backend, way->backend) == 0)
           && (!level || (way->level && strcmp(level, way->level) == 0));
}

/* One way to run; absent ways are no failure. */
static saccade_status try_way(const job *j, const engine_options *options, const check_way *way,
                              const job_tensors *t, const yardstick *y, const check_row *row,
                              verdict *all, saccade_error *err)
{
    engine_options o = *options;
    deviation d;
    o.backend = way->backend;
    o.level = way->level;
    const saccade_status status = engine_once(j, &o, t, NULL, err);
    if (status == SACCADE_EBACKEND) {
        all->left_out = *err;
        return SACCADE_OK;
    }
    CLI_TRY(status);
    compare_results(t, &y->gold, &d);
    const bool holds = yardstick_holds(y, &d);
    print_header(all);
    printf("%-40s %-16s %-5s %-8s %10.2e %10.2e %10.2e  %s\n", row->problem, row->name,
           o.backend, o.level ? o.level : "", d.out, y->allowed_out, d.lse,
           holds ? "ok" : "FAILED");
    all->is_good &= holds;
    all->rows++;
    return SACCADE_OK;
}

static saccade_status check_tensors(const job *j, const engine_options *options,
                                    const job_tensors *t, const check_row *row, verdict *all,
                                    saccade_error *err)
{
    yardstick y;
    saccade_status status = SACCADE_OK;
    CLI_TRY(yardstick_open(j, options, t, &y, err));
    for (int n = 0; n < CHECK_WAYS && status == SACCADE_OK; n++)
        if (check_wants(options, &check_ways[n]))
            status = try_way(j, options, &check_ways[n], t, &y, row, all, err);
    yardstick_close(&y);
    return status;
}

static saccade_status check_job(const cli_args *args, const saccade_sizes *sizes,
                                const job_tensors *t, check_row *row, verdict *all,
                                saccade_error *err)
{
    engine_options options;
    job j;
    problem_show(sizes, t->q.dtype, row->problem);
    CLI_TRY(files_engine_options(args, &options, err));
    CLI_TRY(job_open(args, sizes, &j, err));
    saccade_status status = job_check_indices(&j, err);
    if (status == SACCADE_EVALUE) {
        cli_report(err);
        all->is_good = false;
        all->rows++;
        status = SACCADE_OK;
    }
    if (status == SACCADE_OK)
        status = args->backward ? check_backward(&j, &options, t, row, all, err)
                                : check_tensors(&j, &options, t, row, all, err);
    job_close(&j);
    return status;
}

static saccade_status check_random_tensors(const cli_args *args, const saccade_sizes *sizes,
                                           saccade_dtype dtype, uint64_t seed, const char *name,
                                           verdict *all, saccade_error *err)
{
    check_row row = {.name = name};
    job_tensors t;
    CLI_TRY(job_tensors_new(sizes, dtype, seed, &t, err));
    const saccade_status status = check_job(args, sizes, &t, &row, all, err);
    job_tensors_free(&t);
    return status;
}

/* ---- random problems ---- */

static int64_t pick(uint64_t *seed, int64_t least, int64_t most)
{
    return least + (int64_t)(floats_random(seed) % (uint64_t)(most - least + 1));
}

static void random_sizes(uint64_t *seed, saccade_sizes *s, saccade_dtype *dtype)
{
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_F16, SACCADE_BF16};
    s->B = pick(seed, 1, 2);
    s->Hkv = pick(seed, 1, 3);
    s->H = s->Hkv * pick(seed, 1, 4);
    s->Q = pick(seed, 0, 3) ? pick(seed, 1, 200) : pick(seed, 1, 4);
    s->KV = pick(seed, 1, 300);
    s->D = pick(seed, 0, 1) ? pick(seed, 1, 96) : 64;
    s->Dv = pick(seed, 0, 1) ? pick(seed, 1, 96) : s->D;
    *dtype = dtypes[pick(seed, 0, 2)];
}

static saccade_status check_random(const cli_args *args, verdict *all, saccade_error *err)
{
    const int64_t n = args->random ? args->random : 24;
    uint64_t seed = (uint64_t)cli_seed(args);
    for (int64_t i = 0; i < n; i++) {
        saccade_sizes sizes;
        saccade_dtype dtype;
        cli_args filled = *args;
        const int64_t which = i % (VARIANTS + OTHERS);
        const cli_variant *v =
            which < VARIANTS ? &cli_variants[which] : &others[which - VARIANTS];
        random_sizes(&seed, &sizes, &dtype);
        CLI_TRY(cli_parse_dtype(args->dtype, dtype, &dtype, err));
        const bool is_given = args->mask || args->score.n;
        if (!is_given)
            variant_apply(v, &filled);
        const bool has_table = !is_given && strcmp(v->name, "table") == 0;
        if (has_table) {
            filled.bind.item[filled.bind.n++] = "live=bool[B,KV]:bernoulli(0.3)";
            filled.bind.item[filled.bind.n++] = "bias=f32[H,Q,KV]:normal";
        }
        if (!is_given && v->bind && sizes.KV < sizes.Q) /* every row has a document */
            sizes.KV = sizes.Q;
        if (!args->q_offset && !has_table && sizes.KV > sizes.Q && pick(&seed, 0, 2) == 0)
            filled.q_offset = "end";
        CLI_TRY(check_random_tensors(&filled, &sizes, dtype, floats_random(&seed),
                                     is_given ? "given" : v->name, all, err));
    }
    if (all->rows)
        printf("seed %lld\n", (long long)cli_seed(args));
    return SACCADE_OK;
}

/* ---- RMSE per variant and dtype: FlexAttention's figure 9 ---- */

static saccade_status rmse_row(const cli_args *args, const cli_variant *v, saccade_dtype dtype,
                               const saccade_sizes *sizes, verdict *all, saccade_error *err)
{
    cli_args filled = *args;
    engine_options options;
    job_tensors t;
    yardstick y;
    deviation d;
    job j;
    variant_apply(v, &filled);
    CLI_TRY(files_engine_options(args, &options, err));
    CLI_TRY(job_open(&filled, sizes, &j, err));
    saccade_status status = job_tensors_new(sizes, dtype, (uint64_t)cli_seed(args), &t, err);
    if (status == SACCADE_OK) {
        status = yardstick_open(&j, &options, &t, &y, err);
        if (status == SACCADE_OK) {
            status = engine_once(&j, &options, &t, NULL, err);
            compare_results(&t, &y.gold, &d);
            yardstick_close(&y);
        }
        job_tensors_free(&t);
    }
    job_close(&j);
    CLI_TRY(status);
    const bool holds = yardstick_holds(&y, &d);
    if (!all->rows)
        printf("%-16s %-5s %11s %11s %8s\n", "variant", "dtype", "rmse", "plain rmse", "ratio");
    printf("%-16s %-5s %11.3e %11.3e %8.2f  %s\n", v->name, saccade_dtype_name(dtype),
           d.rms_out, y.plain.rms_out, d.rms_out / y.plain.rms_out, holds ? "ok" : "FAILED");
    all->is_good &= holds;
    all->rows++;
    return SACCADE_OK;
}

static saccade_status check_rmse(const cli_args *args, verdict *all, saccade_error *err)
{
    static const saccade_dtype dtypes[] = {SACCADE_F32, SACCADE_F16, SACCADE_BF16};
    saccade_sizes sizes = {.B = 1, .H = 2, .Hkv = 2, .Q = 512, .KV = 512, .D = 64, .Dv = 64};
    saccade_dtype ignored;
    CLI_FAIL_IF(
        args->mask || args->score.n || args->q_file || args->backward || args->dtype
            || args->random,
        SACCADE_EINVAL, "--rmse",
        "runs the eight variants in three dtypes, expected no mask, score, files, --dtype, "
        "--random or --backward with it");
    if (args->problem)
        CLI_TRY(problem_read(args->problem, &sizes, &ignored, err));
    for (int v = 0; v < VARIANTS; v++)
        for (int d = 0; d < 3; d++) {
            cli_progress("%s %s", cli_variants[v].name, saccade_dtype_name(dtypes[d]));
            CLI_TRY(rmse_row(args, &cli_variants[v], dtypes[d], &sizes, all, err));
        }
    return SACCADE_OK;
}

/* ---- the command ---- */

static saccade_status check_files(const cli_args *args, verdict *all, saccade_error *err)
{
    check_row row = {.name = "given"};
    file_tensors f;
    CLI_TRY(files_load(args, &f, err));
    const saccade_status status = check_job(args, &f.sizes, &f.t, &row, all, err);
    files_free(&f);
    return status;
}

static saccade_status check_problem(const cli_args *args, verdict *all, saccade_error *err)
{
    saccade_sizes sizes;
    saccade_dtype dtype;
    CLI_TRY(problem_read(args->problem, &sizes, &dtype, err));
    CLI_TRY(cli_parse_dtype(args->dtype, dtype, &dtype, err));
    return check_random_tensors(args, &sizes, dtype, (uint64_t)cli_seed(args), "given", all,
                                err);
}

saccade_status cmd_check(const cli_args *args, saccade_error *err)
{
    verdict all = {.is_good = true};
    CLI_FAIL_IF(!!args->problem + !!args->q_file + !!args->random > 1, SACCADE_EINVAL, "check",
                "got more than one of --problem, -q and --random, expected one");
    if (args->rmse)
        CLI_TRY(check_rmse(args, &all, err));
    else if (args->q_file)
        CLI_TRY(check_files(args, &all, err));
    else if (args->problem)
        CLI_TRY(check_problem(args, &all, err));
    else
        CLI_TRY(check_random(args, &all, err));
    const char *given = args->level ? args->level : args->backend ? args->backend : "auto";
    CLI_FAIL_IF(all.rows == 0 && all.left_out.message[0], SACCADE_EBACKEND,
                args->level ? "--level" : "--backend", "%.300s", all.left_out.message);
    CLI_FAIL_IF(all.rows == 0, SACCADE_EINVAL, args->level ? "--level" : "--backend",
                "got '%.20s', expected %s", given,
                args->level ? "portable, avx2, avx512 or amx" : "auto, cpu or cuda");
    return all.is_good ? SACCADE_OK : (saccade_status)CLI_CHECK_FAILED;
}
