/* From texts and --bind to bound mods: every free name of a text needs a value, every value a
 * name. Positions become i32 tensors. */
#include "job.h"
#include "floats.h"
#include "inputs.h"
#include "signals.h"

#include <stdlib.h>
#include <string.h>

/* ---- errors ---- */

saccade_status job_by_option(saccade_status status, saccade_error *err)
{
    static const struct {
        const char *where, *option;
    } names[] = {
        {"level", "--level"},       {"gradient_captures", "--grad-of"},
        {"sinks_dtype", "--sinks"}, {"backend", "--backend"},
        {"arch", "--arch"},         {"weight", "--weight"},
        {"q_offset", "--q-offset"}, {"kv_len", "--kv-len"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0] && status != SACCADE_OK; i++)
        if (strcmp(err->where, names[i].where) == 0)
            snprintf(err->where, sizeof err->where, "%s", names[i].option);
    return status;
}

/* ---- texts ---- */

/* A place in a text is of use only with the text's name. */
static saccade_status named(saccade_status status, const char *option, const char *text,
                            saccade_error *err)
{
    if (status != SACCADE_OK && err->line > 0)
        snprintf(err->where, sizeof err->where, "%s", text[0] == '@' ? text + 1 : option);
    return status;
}

static saccade_status parse(saccade_kind kind, const char *option, const char *text,
                            saccade_mod **out, saccade_error *err)
{
    char *read;
    size_t bytes;
    CLI_TRY(input_text(option, text, &read, &bytes, err));
    const saccade_status status = saccade_mod_parse(kind, read, bytes, out, err);
    free(read);
    return named(status, option, text, err);
}

/* One text is the score itself. Of several the parts stay, so that what is wrong in one is said
 * with its name, and the score is their chain. */
static saccade_status parse_scores(const cli_list *texts, job *j, saccade_error *err)
{
    saccade_mod *both;
    if (texts->n == 1)
        return parse(SACCADE_SCORE, "--score", texts->item[0], &j->score, err);
    for (int i = 0; i < texts->n; i++) {
        const char *text = texts->item[i];
        const saccade_mod *before = j->score ? j->score : j->part[0];
        CLI_TRY(parse(SACCADE_SCORE, "--score", text, &j->part[i], err));
        j->n_parts = i + 1;
        if (i == 0)
            continue;
        CLI_TRY(named(saccade_mod_chain(before, j->part[i], &both, err), "--score", text, err));
        saccade_mod_destroy(j->score);
        j->score = both;
    }
    return SACCADE_OK;
}

/* The text that places in the score are in; of several texts it is not known. */
static const char *score_text(const job *j)
{
    return j->n_parts ? "--score" : j->score_texts.item[0];
}

/* ---- captures ---- */

static saccade_status read_binding(const char *text, job *j, saccade_error *err)
{
    const char *equals = strchr(text, '=');
    saccade_binding *made = &j->bindings[j->n_bindings];
    CLI_FAIL_IF(!equals || equals == text, SACCADE_EINVAL, "--bind",
                "got '%.60s', expected NAME=VALUE", text);
    char *name = strndup(text, (size_t)(equals - text));
    CLI_FAIL_IF(!name, SACCADE_ENOMEM, "--bind", "out of memory");
    made->name = name;
    saccade_status status = SACCADE_OK;
    for (int i = 0; i < j->n_bindings; i++)
        if (strcmp(j->bindings[i].name, name) == 0)
            status = cli_fail(err, SACCADE_EINVAL, "--bind", "got '%.60s' twice", name);
    if (status == SACCADE_OK)
        status = input_value(name, equals + 1, &j->sizes, &made->tensor, err);
    if (status == SACCADE_OK)
        j->n_bindings++;
    else
        free(name);
    return status;
}

static const saccade_binding *find(const job *j, const char *name)
{
    for (int32_t i = 0; i < j->n_bindings; i++)
        if (strcmp(j->bindings[i].name, name) == 0)
            return &j->bindings[i];
    return NULL;
}

static bool names(const saccade_mod *mod, const char *name)
{
    for (int32_t i = 0; mod && i < saccade_mod_capture_count(mod); i++)
        if (strcmp(saccade_mod_capture(mod, i).name, name) == 0)
            return true;
    return false;
}

int32_t job_bindings_of(const job *j, const saccade_mod *mod, saccade_binding *out)
{
    int32_t n = 0;
    for (int32_t i = 0; i < j->n_bindings; i++)
        if (names(mod, j->bindings[i].name))
            out[n++] = j->bindings[i];
    return n;
}

/* Replaces a generic mod by a bound one. text: the one that its places are in. */
static saccade_status bind(const job *j, const char *option, const char *text,
                           saccade_mod **mod, saccade_error *err)
{
    saccade_capture captures[CLI_LIST];
    saccade_mod *bound;
    const int32_t n = *mod ? saccade_mod_capture_count(*mod) : 0;
    if (!*mod)
        return SACCADE_OK;
    for (int32_t i = 0; i < n; i++) {
        const saccade_capture wanted = saccade_mod_capture(*mod, i);
        const saccade_binding *given = find(j, wanted.name);
        CLI_FAIL_IF(!given || i == CLI_LIST, SACCADE_EINVAL, option,
                    "got no value for '%.60s', expected --bind %.60s=%s", wanted.name,
                    wanted.name, wanted.rank ? "F.npy" : "NUMBER");
        captures[i] = (saccade_capture){wanted.name, given->tensor.dtype, given->tensor.rank};
    }
    const saccade_status status = saccade_mod_bind(*mod, captures, n, &bound, err);
    if (status != SACCADE_OK)
        return named(status, option, text, err);
    saccade_mod_destroy(*mod);
    *mod = bound;
    return SACCADE_OK;
}

static saccade_status bind_all(const cli_args *args, job *j, saccade_error *err)
{
    for (int i = 0; i < args->bind.n; i++) {
        CLI_TRY(read_binding(args->bind.item[i], j, err));
        const char *name = j->bindings[j->n_bindings - 1].name;
        CLI_FAIL_IF(!names(j->mask, name) && !names(j->score, name) && !names(j->weight, name),
                    SACCADE_EINVAL, "--bind", "got '%.60s', which no text names", name);
        if (j->bindings[i].tensor.dtype == SACCADE_F64)
            fprintf(stderr, "saccade: note: %s is f64 and is read as f32\n", name);
    }
    CLI_TRY(bind(j, "--mask", j->mask_text, &j->mask, err));
    for (int i = 0; i < j->n_parts; i++)
        CLI_TRY(bind(j, "--score", j->score_texts.item[i], &j->part[i], err));
    CLI_TRY(bind(j, "--score", score_text(j), &j->score, err));
    return bind(j, "--weight", args->weight, &j->weight, err);
}

/* ---- positions ---- */

/* The rows are the last of the live keys. */
static saccade_status offset_from_end(job *j, saccade_error *err)
{
    const saccade_tensor *len = &j->kv_len;
    saccade_tensor *offset = &j->q_offset;
    if (len->dtype == SACCADE_NONE)
        return input_scalar("--q-offset", j->sizes.KV - j->sizes.Q, offset, err);
    CLI_TRY(floats_convert(len, SACCADE_I32, offset, err));
    for (int64_t b = 0; b < floats_count(offset); b++)
        ((int32_t *)offset->data)[b] -= (int32_t)j->sizes.Q;
    return SACCADE_OK;
}

static saccade_status read_positions(const cli_args *args, job *j, saccade_error *err)
{
    if (args->kv_len)
        CLI_TRY(input_positions("--kv-len", args->kv_len, &j->kv_len, err));
    if (!args->q_offset)
        return SACCADE_OK;
    if (strcmp(args->q_offset, "end") == 0)
        return offset_from_end(j, err);
    return input_positions("--q-offset", args->q_offset, &j->q_offset, err);
}

void job_positions(const job *j, saccade_positions *out)
{
    saccade_positions_init(out);
    if (j->q_offset.dtype != SACCADE_NONE)
        out->q_offset = &j->q_offset;
    if (j->kv_len.dtype != SACCADE_NONE)
        out->kv_len = &j->kv_len;
}

/* ---- the job ---- */

static saccade_status fill(const cli_args *args, job *j, saccade_error *err)
{
    if (args->mask)
        CLI_TRY(parse(SACCADE_MASK, "--mask", args->mask, &j->mask, err));
    CLI_TRY(parse_scores(&args->score, j, err));
    if (args->weight)
        CLI_TRY(parse(SACCADE_WEIGHT, "--weight", args->weight, &j->weight, err));
    if (args->sinks)
        CLI_TRY(input_value("sinks", args->sinks, &j->sizes, &j->sinks, err));
    j->seed = cli_seed(args);
    CLI_TRY(read_positions(args, j, err));
    return bind_all(args, j, err);
}

saccade_status job_open(const cli_args *args, const saccade_sizes *sizes, job *out,
                        saccade_error *err)
{
    job made = {.sizes = *sizes, .mask_text = args->mask, .score_texts = args->score};
    const saccade_status status = fill(args, &made, err);
    if (status == SACCADE_OK)
        *out = made;
    else
        job_close(&made);
    return status;
}

void job_close(job *j)
{
    for (int32_t i = 0; i < j->n_bindings; i++) {
        free((char *)j->bindings[i].name);
        free(j->bindings[i].tensor.data);
    }
    free(j->q_offset.data);
    free(j->kv_len.data);
    free(j->sinks.data);
    saccade_mod_destroy(j->mask);
    saccade_mod_destroy(j->score);
    saccade_mod_destroy(j->weight);
    for (int i = 0; i < j->n_parts; i++)
        saccade_mod_destroy(j->part[i]);
    *j = (job){.mask = NULL};
}

/* Told how far a block mask is; what takes no time is done before a line could be read. */
static int show_progress(void *user, double fraction)
{
    const double since = *(const double *)user, seconds = cli_seconds() - since;
    if (seconds > 0.5)
        cli_progress("block mask: %.1f %%, %.0f s", 100 * fraction, seconds);
    return signals_told_to_stop();
}

saccade_status job_block_mask(const job *j, saccade_context *context, int32_t block_q,
                              int32_t block_kv, saccade_block_mask **out, saccade_error *err)
{
    saccade_binding used[CLI_LIST];
    saccade_block_mask_options options;
    saccade_positions positions;
    double start = cli_seconds();
    *out = NULL;
    if (!j->mask)
        return SACCADE_OK;
    const int32_t n = job_bindings_of(j, j->mask, used);
    saccade_block_mask_options_init(&options);
    options.block_q = block_q;
    options.block_kv = block_kv;
    options.progress = show_progress;
    options.progress_user = &start;
    job_positions(j, &positions);
    signals_hold();
    const saccade_status status = saccade_block_mask_create(
        context, j->mask, &j->sizes, &positions, used, n, &options, out, err);
    signals_release();
    if (cli_seconds() - start > 0.5)
        cli_progress(NULL);
    return job_by_option(status, err);
}

/* Live keys of all rows when there is no mask. */
static double unmasked(const job *j)
{
    const saccade_tensor *len = &j->kv_len;
    double keys = (double)j->sizes.B * (double)j->sizes.KV;
    if (len->dtype != SACCADE_NONE)
        keys = 0;
    for (int64_t b = 0; b < j->sizes.B && len->dtype != SACCADE_NONE; b++)
        keys += ((const int32_t *)len->data)[len->rank ? b : 0];
    return keys * (double)j->sizes.H * (double)j->sizes.Q;
}

/* With blocks of one score each, live blocks are live scores. */
saccade_status job_live_scores(const job *j, saccade_context *context, double *out,
                               saccade_error *err)
{
    saccade_block_mask *mask;
    saccade_block_mask_stats s;
    saccade_status status = SACCADE_OK;
    CLI_TRY(job_block_mask(j, context, 1, 1, &mask, err));
    if (mask) {
        saccade_block_mask_stats_init(&s);
        status = saccade_block_mask_get_stats(mask, &s, err);
        const double all =
            (double)j->sizes.B * (double)j->sizes.H * (double)j->sizes.Q * (double)j->sizes.KV;
        *out = (double)(s.full + s.partial) / (double)s.blocks * all;
    } else {
        *out = unmasked(j);
    }
    saccade_block_mask_destroy(mask);
    return status;
}

static saccade_status check_indices(const job *j, const saccade_mod *mod, const char *option,
                                    const char *text, saccade_error *err)
{
    saccade_positions positions;
    saccade_binding used[CLI_LIST];
    const int32_t n = job_bindings_of(j, mod, used);
    job_positions(j, &positions);
    return named(saccade_mod_check(mod, &j->sizes, &positions, used, n, 0, err), option, text,
                 err);
}

/* Of a score of several texts that fails one of them may say alone where. */
saccade_status job_check_indices(const job *j, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    if (j->mask)
        CLI_TRY(check_indices(j, j->mask, "--mask", j->mask_text, err));
    if (j->score)
        status = check_indices(j, j->score, "--score", score_text(j), err);
    for (int i = 0; i < j->n_parts && status != SACCADE_OK; i++)
        CLI_TRY(check_indices(j, j->part[i], "--score", j->score_texts.item[i], err));
    return status;
}
