/* saccade shard: which rank gets which rows of a sequence, how even that is, what travels. */
#include "inputs.h"
#include "job.h"
#include "outfile.h"
#include "problem_text.h"
#include "saccade_dist.h"

#include <stdlib.h>
#include <string.h>

/* The masks of a model's layers. */
typedef struct shard_masks {
    saccade_block_mask *at[CLI_LIST + 1];
    int32_t layers[CLI_LIST + 1];
    job jobs[CLI_LIST + 1]; /* whose captures the masks borrow */
    int32_t n;
    bool is_used[CLI_LIST]; /* --bind: some mask names it */
} shard_masks;

/* What is asked for: sizes, and whether K and V's bytes are known. */
typedef struct shard_sizes {
    saccade_sizes s;
    saccade_dtype dtype;
    bool has_bytes;
} shard_sizes;

static saccade_status sizes_of(const cli_args *args, shard_sizes *out, saccade_error *err)
{
    const int64_t heads = args->heads ? args->heads : 1;
    *out = (shard_sizes){.dtype = SACCADE_F32, .has_bytes = args->problem != NULL};
    if (args->problem) {
        CLI_FAIL_IF(args->q || args->kv || args->batch || args->heads, SACCADE_EINVAL,
                    "--problem", "got sizes beside it, expected one or the other");
        return problem_read(args->problem, &out->s, &out->dtype, err);
    }
    CLI_FAIL_IF(!args->q, SACCADE_EINVAL, "--q", "got nothing, expected a number of rows");
    out->s = (saccade_sizes){args->batch ? args->batch : 1, heads, heads, args->q,
                             args->kv ? args->kv : args->q, 64,    64};
    return SACCADE_OK;
}

/* ---- masks ---- */

/* Of all --bind those that this text names: others may be another mask's. */
static saccade_status bindings_for(const cli_args *args, const char *text, shard_masks *m,
                                   cli_list *out, saccade_error *err)
{
    char *read;
    size_t bytes;
    saccade_mod *mod;
    out->n = 0;
    CLI_TRY(input_text("--mask", text, &read, &bytes, err));
    const saccade_status status = saccade_mod_parse(SACCADE_MASK, read, bytes, &mod, err);
    free(read);
    if (status != SACCADE_OK)
        return SACCADE_OK; /* job_open says it with the text's name */
    for (int i = 0; i < args->bind.n; i++) {
        const char *bind = args->bind.item[i], *equals = strchr(bind, '=');
        for (int32_t c = 0; c < saccade_mod_capture_count(mod); c++) {
            const char *name = saccade_mod_capture(mod, c).name;
            if (!equals || strlen(name) != (size_t)(equals - bind)
                || strncmp(name, bind, strlen(name)) != 0)
                continue;
            out->item[out->n++] = bind;
            m->is_used[i] = true;
        }
    }
    saccade_mod_destroy(mod);
    return SACCADE_OK;
}

static saccade_status add_mask(const cli_args *args, const saccade_sizes *sizes,
                               saccade_context *context, const char *text, int32_t layers,
                               shard_masks *m, saccade_error *err)
{
    int32_t block_q, block_kv;
    cli_args own = *args;
    own.mask = text;
    CLI_TRY(cli_parse_block(args->block, &block_q, &block_kv, err));
    CLI_TRY(bindings_for(args, text, m, &own.bind, err));
    CLI_TRY(job_open(&own, sizes, &m->jobs[m->n], err));
    const saccade_status status =
        job_block_mask(&m->jobs[m->n], context, block_q, block_kv, &m->at[m->n], err);
    if (status == SACCADE_OK)
        m->layers[m->n++] = layers;
    else
        job_close(&m->jobs[m->n]);
    return status;
}

/* "5:sliding_window(W)" */
static saccade_status add_also(const cli_args *args, const saccade_sizes *sizes,
                               saccade_context *context, const char *also, shard_masks *m,
                               saccade_error *err)
{
    char *text;
    const long layers = strtol(also, &text, 10);
    CLI_FAIL_IF(text == also || *text != ':' || layers < 1 || layers > 100000, SACCADE_EINVAL,
                "--also", "got '%.60s', expected LAYERS:MASK, like 5:sliding_window(W)", also);
    const saccade_status status =
        add_mask(args, sizes, context, text + 1, (int32_t)layers, m, err);
    if (status != SACCADE_OK && strcmp(err->where, "--mask") == 0)
        snprintf(err->where, sizeof err->where, "--also");
    return status;
}

static saccade_status read_masks(const cli_args *args, const saccade_sizes *sizes,
                                 saccade_context *context, shard_masks *m, saccade_error *err)
{
    CLI_FAIL_IF(!args->mask && (args->also.n || args->layers), SACCADE_EINVAL, "--mask",
                "got nothing, expected a text before other masks and layers");
    CLI_TRY(cli_check_block(args, err));
    if (args->mask)
        CLI_TRY(add_mask(args, sizes, context, args->mask,
                         args->layers ? (int32_t)args->layers : 1, m, err));
    for (int i = 0; i < args->also.n; i++)
        CLI_TRY(add_also(args, sizes, context, args->also.item[i], m, err));
    for (int i = 0; i < args->bind.n; i++)
        CLI_FAIL_IF(!m->is_used[i], SACCADE_EINVAL, "--bind",
                    "got '%.60s', expected NAME=VALUE of a name in a mask", args->bind.item[i]);
    return SACCADE_OK;
}

static void close_masks(shard_masks *m)
{
    for (int32_t i = 0; i < m->n; i++) {
        saccade_block_mask_destroy(m->at[i]);
        job_close(&m->jobs[i]);
    }
}

/* ---- the answer ---- */

static void print_bytes(double bytes)
{
    if (bytes < 1e6)
        printf(" %8.1f KB", bytes / 1e3);
    else
        printf(" %8.1f MB", bytes / 1e6);
}

static void print_ranges(const saccade_range *ranges, int32_t n)
{
    enum { SHOWN = 4 };
    for (int32_t i = 0; i < n && i < SHOWN; i++)
        printf("%s%lld-%lld", i ? " " : "  ", (long long)ranges[i].first,
               (long long)(ranges[i].first + ranges[i].count - 1));
    if (n > SHOWN)
        printf(" and %d more", n - SHOWN);
}

static saccade_status print_rank(const saccade_shard_plan *plan, const shard_sizes *sizes,
                                 int32_t rank, saccade_error *err)
{
    const saccade_range *ranges;
    saccade_shard_stats stats;
    saccade_shard_stats_init(&stats);
    CLI_TRY(saccade_shard_get_stats(plan, rank, &stats, err));
    const int32_t n = saccade_shard_rows(plan, rank, &ranges);
    const double each = (double)(sizes->s.B * sizes->s.Hkv * (sizes->s.D + sizes->s.Dv))
                        * (double)saccade_dtype_bytes(sizes->dtype);
    printf("%4d %9lld %8.4f %9lld %9lld %5d", rank, (long long)stats.rows,
           stats.mean_area > 0 ? stats.area / stats.mean_area : 1, (long long)stats.received,
           (long long)stats.sent, stats.peers);
    if (sizes->has_bytes)
        print_bytes(each * (double)stats.received);
    print_ranges(ranges, n);
    putchar('\n');
    return SACCADE_OK;
}

static saccade_status print_plan(const saccade_shard_plan *plan, const shard_sizes *sizes,
                                 saccade_error *err)
{
    saccade_shard_options o;
    saccade_shard_stats stats;
    saccade_shard_options_init(&o);
    saccade_shard_stats_init(&stats);
    CLI_TRY(saccade_shard_plan_options(plan, &o, err));
    CLI_TRY(saccade_shard_get_stats(plan, 0, &stats, err));
    printf("rows         %lld in chunks of %lld\n", (long long)o.Q, (long long)o.chunk);
    printf("imbalance    %.4f (largest area / mean)\n", stats.imbalance);
    printf("time         %.3g ms\n\n", 1e3 * stats.seconds);
    printf("rank      rows     area  received      sent peers%s  which rows\n",
           sizes->has_bytes ? "   received" : "");
    for (int32_t r = 0; r < o.ranks; r++)
        CLI_TRY(print_rank(plan, sizes, r, err));
    return SACCADE_OK;
}

static saccade_status format_of(const char *path, saccade_picture *out, saccade_error *err)
{
    const char *end = path ? strrchr(path, '.') : NULL;
    *out = !path ? SACCADE_TEXT : end && strcmp(end, ".png") == 0 ? SACCADE_PNG : SACCADE_SVG;
    CLI_FAIL_IF(path && (!end || (*out == SACCADE_SVG && strcmp(end, ".svg") != 0)),
                SACCADE_EINVAL, "-o", "got '%.80s', expected a name ending in .svg or .png",
                path);
    return SACCADE_OK;
}

/* The picture is made before anything is printed. */
static saccade_status show(const cli_args *args, const saccade_shard_plan *plan,
                           const saccade_block_mask *mask, const shard_sizes *sizes,
                           saccade_error *err)
{
    saccade_picture format;
    void *bytes;
    size_t size;
    CLI_TRY(format_of(args->out_file, &format, err));
    CLI_TRY(cli_check_at(args, &sizes->s, err));
    CLI_TRY(saccade_shard_render(plan, mask, args->at_b, args->at_h, format,
                                 (int32_t)args->columns, &bytes, &size, err));
    saccade_status status = SACCADE_OK;
    if (args->out_file)
        status = outfile_put(args->out_file, bytes, size, err);
    if (status == SACCADE_OK)
        status = print_plan(plan, sizes, err);
    if (status == SACCADE_OK && args->out_file)
        printf("\npicture      %s\n", args->out_file);
    else if (status == SACCADE_OK) {
        putchar('\n');
        fwrite(bytes, 1, size, stdout);
    }
    saccade_free(bytes);
    return status;
}

static saccade_status shard(const cli_args *args, const shard_sizes *sizes,
                            const shard_masks *m, saccade_error *err)
{
    saccade_shard_plan *plan;
    saccade_shard_options o;
    saccade_shard_options_init(&o);
    o.ranks = args->ranks ? (int32_t)args->ranks : 2;
    o.tile = (int32_t)args->tile;
    o.chunk = args->chunk;
    o.Q = sizes->s.Q;
    o.KV = sizes->s.KV;
    o.masks = (const saccade_block_mask *const *)m->at;
    o.layers = m->layers;
    o.n_masks = m->n;
    CLI_TRY(saccade_shard_plan_create(&o, &plan, err));
    const saccade_status status = show(args, plan, m->n ? m->at[0] : NULL, sizes, err);
    saccade_shard_plan_destroy(plan);
    return status;
}

saccade_status cmd_shard(const cli_args *args, saccade_error *err)
{
    saccade_context *context;
    shard_sizes sizes;
    shard_masks *m;
    CLI_TRY(sizes_of(args, &sizes, err));
    CLI_TRY(engine_context((int32_t)args->threads, NULL, &context, err));
    m = calloc(1, sizeof *m);
    saccade_status status = m ? read_masks(args, &sizes.s, context, m, err)
                              : cli_fail(err, SACCADE_ENOMEM, "shard", "out of memory");
    if (status == SACCADE_OK)
        status = shard(args, &sizes, m, err);
    if (m)
        close_masks(m);
    free(m);
    saccade_context_destroy(context);
    return status;
}
