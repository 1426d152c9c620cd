/* Options from a table: every option is a line that says which commands take it, where its
 * value goes and what the help says. `--name VALUE` and `--name=VALUE` are the same; a value
 * may begin with a dash. */
#include "options.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(cli_args, field)
enum {
    PROBLEM = CLI_RUN | CLI_EXPLAIN | CLI_CHECK,
    TEXTS = PROBLEM | CLI_MASK | CLI_SHARD,
    BLOCKS = CLI_MASK | CLI_SHARD,
    LENGTH_MAX = 1 << 30,
    LEFT = 20 /* columns of a help's names and values; longer ones have a line of their own */
};

/* clang-format off */
static const cli_option options[] = {
    {"-q", "Q.npy", PROBLEM, TEXT, AT(q_file), "queries [B, H, Q, D]", 0, 0},
    {"-k", "K.npy", PROBLEM, TEXT, AT(k_file), "keys [B, Hkv, KV, D]", 0, 0},
    {"-v", "V.npy", PROBLEM, TEXT, AT(v_file), "values [B, Hkv, KV, Dv]", 0, 0},
    {"-o", "O.npy", CLI_RUN, TEXT, AT(out_file), "where the output goes", 0, 0},
    {"-o", "FILE", BLOCKS, TEXT, AT(out_file), "picture as FILE.svg or FILE.png", 0, 0},
    {"-o", "FOLDER", CLI_DEMO, TEXT, AT(folder), "where files and pictures go (out)", 0, 0},
    {"-o", "FILE", CLI_LADDER, TEXT, AT(out_file), "roofline picture (ladder.svg)", 0, 0},
    {"--n", "N", CLI_LADDER, INT, AT(ladder_n), "queries and keys (1024)", 1, 4096},
    {"--d", "D", CLI_LADDER, INT, AT(ladder_d), "dim of a head (64)", 1, 1024},
    {"--m", "M", CLI_LADDER, INT, AT(ladder_m),
     "f32 elements on the chip, D to N D (49152: 192 KiB)", 1, 4096 * 1024},
    {"--lse", "L.npy", CLI_RUN, TEXT, AT(lse_file), "write log-sum-exp [B, H, Q] too", 0, 0},
    {"--grad", "DO.npy", CLI_RUN, TEXT, AT(d_out_file),
     "backward from the gradient of O too: O.dq.npy, O.dk.npy, O.dv.npy", 0, 0},
    {"--grad-of", "NAME", CLI_RUN, LIST, AT(grad_of),
     "with --grad: a float name of --score too, O.dNAME.npy", 0, 0},
    {"--grad-of", "NAME", CLI_EXPLAIN, LIST, AT(grad_of),
     "a plan that makes this capture's gradient too", 0, 0},
    {"--backward", NULL, CLI_EXPLAIN, FLAG, AT(backward),
     "a plan that makes gradients of Q, K and V too", 0, 0},
    {"--problem", "P", CLI_EXPLAIN | CLI_CHECK | CLI_SHARD, TEXT, AT(problem),
     "sizes instead of files: \"b2 h16/4 q4096 kv4096 d128 dv64 bf16\"", 0, 0},
    {"--mask", "M", TEXTS, TEXT, AT(mask), "which scores count: text or @file", 0, 0},
    {"--score", "S", PROBLEM, LIST, AT(score),
     "how scores change: text or @file; again to chain", 0, 0},
    {"--weight", "W", CLI_RUN | CLI_CHECK, TEXT, AT(weight),
     "what becomes of weights: 'dropout(0.1)', text or @file; --seed says which", 0, 0},
    {"--weight", "W", CLI_EXPLAIN, TEXT, AT(weight),
     "what becomes of weights: 'dropout(0.1)', text or @file", 0, 0},
    {"--sinks", "X", PROBLEM, TEXT, AT(sinks),
     "a logit of each head in its sums alone: F.npy, or like f32[H]:normal", 0, 0},
    {"--bind", "NAME=X", TEXTS, LIST, AT(bind),
     "a free name: number, F.npy, or like i32[KV]:docs(12)", 0, 0},
    {"--q", "N", BLOCKS, INT, AT(q), "queries", 1, LENGTH_MAX},
    {"--kv", "N", BLOCKS, INT, AT(kv), "keys (as many as queries)", 1, LENGTH_MAX},
    {"--batch", "B", BLOCKS, INT, AT(batch), "batch (1)", 1, LENGTH_MAX},
    {"--heads", "H", BLOCKS, INT, AT(heads), "query heads (1)", 1, 65536},
    {"--at-b", "N", BLOCKS, INT, AT(at_b), "which batch to draw (0)", 0, LENGTH_MAX},
    {"--at-h", "N", BLOCKS, INT, AT(at_h), "which head to draw (0)", 0, 65536},
    {"--columns", "N", BLOCKS, INT, AT(columns),
     "width of the picture: to 500 characters, 2048 pixels", 1, 2048},
    {"--ranks", "N", CLI_SHARD, INT, AT(ranks), "devices or processes (2)", 1, 1024},
    {"--layers", "N", CLI_SHARD, INT, AT(layers), "layers that have --mask (1)", 1, 100000},
    {"--also", "N:M", CLI_SHARD, LIST, AT(also),
     "another mask and how many layers have it: '5:sliding_window(W)'", 0, 0},
    {"--chunk", "N", CLI_SHARD, INT, AT(chunk), "rows that stay together (chosen)", 1,
     LENGTH_MAX},
    {"--tile", "N", CLI_SHARD, INT, AT(tile), "rows a chunk is a multiple of (128)", 1, 65536},
    {"--scale", "X", PROBLEM, REAL, AT(scale), "factor of Q.K (1/sqrt(D))", 0, 0},
    {"--dtype", "f32|f16|bf16", CLI_RUN | CLI_EXPLAIN | CLI_CHECK, TEXT, AT(dtype),
     "what is computed in (that of the files)", 0, 0},
    {"--q-offset", "N|end|F", TEXTS, TEXT, AT(q_offset),
     "position of row 0; end: the rows are the last", 0, 0},
    {"--kv-len", "N|F.npy", PROBLEM, TEXT, AT(kv_len), "live keys, the same or per batch", 0,
     0},
    {"--layout", "bhnd|bnhd", PROBLEM, TEXT, AT(layout),
     "order of the files' dimensions (bhnd)", 0, 0},
    {"--block", "N[xM]", CLI_RUN | BLOCKS, TEXT, AT(block), "block size (128x128)", 0, 0},
    {"--backend", "auto|cpu|cuda|ref|plain", CLI_RUN | CLI_EXPLAIN | CLI_BENCH, TEXT,
     AT(backend), "what computes (auto)", 0, 0},
    {"--backend", "auto|cpu|cuda", CLI_CHECK, TEXT, AT(backend),
     "what computes (auto)", 0, 0},
    {"--batch-invariant", NULL, PROBLEM | CLI_BENCH, FLAG, AT(batch_invariant),
     "a row's bits follow from the row alone: not from other rows, batches, prefill or decode",
     0, 0},
    {"--kv-dtype", "e4m3|e5m2|i8|i4", CLI_RUN | CLI_EXPLAIN, TEXT, AT(kv_dtype),
     "keys and values quantised, as a cache has them", 0, 0},
    {"--kv-scale", "row|head|channel|tensor", CLI_RUN | CLI_EXPLAIN, TEXT, AT(kv_scale),
     "with --kv-dtype: what shares a scale (row)", 0, 0},
    {"--page-size", "N", CLI_RUN | CLI_EXPLAIN | CLI_BENCH, INT, AT(page_size),
     "keys and values in pages of so many keys, in a random order", 1, LENGTH_MAX},
    {"--arch", "A", PROBLEM, TEXT, AT(arch),
     "CUDA code for sm_90a, sm_80, compute_80 ...; explain needs no GPU for it", 0, 0},
    {"--level", "portable|avx2|avx512|amx", PROBLEM | CLI_BENCH, TEXT, AT(level),
     "at most this instruction set (the best there is)", 0, 0},
    {"--threads", "N", TEXTS | CLI_BENCH | CLI_DEMO, INT, AT(threads),
     "threads (all)", 1, 4096},
    {"--random", "N", CLI_CHECK, INT, AT(random), "random problems to check (24)", 1, 100000},
    {"--seed", "N", CLI_CHECK | CLI_LADDER, INT, AT(seed), "where randomness starts (1)", 0,
     INT32_MAX},
    {"--seed", "N", CLI_RUN, INT, AT(seed), "with --weight: which weights are kept (1)", 0,
     INT32_MAX},
    {"--backward", NULL, CLI_CHECK, FLAG, AT(backward),
     "gradients of Q, K, V and captured tensors instead of the output", 0, 0},
    {"--rmse", NULL, CLI_CHECK, FLAG, AT(rmse), "RMSE per variant and dtype", 0, 0},
    {"--suite", "paper|dense|backward|decode|mask|compile|natten|shapes", CLI_BENCH, LIST,
     AT(suite), "which rows; again for more (all)", 0, 0},
    {"--repeats", "N", CLI_BENCH, INT, AT(repeats),
     "timed runs per row, at most (9; 15 on a GPU)", 1, 1000},
    {"--csv", "FILE", CLI_BENCH, TEXT, AT(csv), "the table as CSV", 0, 0},
    {"--plot", "FILE", CLI_BENCH, TEXT, AT(plot), "bars against the ceiling as SVG", 0, 0},
    {"--baseline", "plain", CLI_BENCH, TEXT, AT(baseline),
     "time an honest three-pass computation beside each", 0, 0},
    {"SHELL", "bash|zsh|fish", CLI_COMPLETIONS, TEXT, AT(shell), "whose completions", 0, 0},
    {"-h", NULL, ~0, FLAG, AT(help), "this help", 0, 0},
};
/* clang-format on */
enum { OPTIONS = sizeof options / sizeof options[0] };

const cli_option *cli_next_option(const cli_command *command, const cli_option *previous)
{
    for (const cli_option *o = previous ? previous + 1 : options; o < options + OPTIONS; o++)
        if (o->commands & command->bit)
            return o;
    return NULL;
}

bool cli_next_word(const cli_option *option, const char **at, const char **word, int *bytes)
{
    if (!*at)
        *at = option->value ? option->value : "";
    while (**at) {
        const size_t n = strcspn(*at, "|");
        *word = *at;
        *bytes = (int)n;
        *at += n + ((*at)[n] == '|');
        if (strspn(*word, "abcdefghijklmnopqrstuvwxyz0123456789") >= n)
            return true;
    }
    return false;
}

bool cli_is_file(const cli_option *option)
{
    return option->value
           && (strstr(option->value, ".npy") || strncmp(option->value, "FILE", 4) == 0
               || strcmp(option->value, "FOLDER") == 0);
}

int64_t cli_seed(const cli_args *args)
{
    return args->seed < 0 ? 1 : args->seed;
}

bool cli_parse_int(const char *text, int64_t *out)
{
    char *end;
    errno = 0;
    const long long n = strtoll(text, &end, 10);
    if (end == text || *end || errno || text[0] == ' ')
        return false;
    *out = n;
    return true;
}

bool cli_parse_real(const char *text, double *out)
{
    char *end;
    const double x = strtod(text, &end);
    if (end == text || *end || text[0] == ' ')
        return false;
    *out = x;
    return true;
}

/* is_given: of each option, whether it was met before. */
static saccade_status apply(const cli_option *o, const char *value, bool *is_given,
                            cli_args *args, saccade_error *err)
{
    const bool takes_one = o->kind != FLAG && o->kind != LIST;
    void *field = (char *)args + o->at;
    cli_list *list = field;
    int64_t n;
    double x;
    CLI_FAIL_IF(takes_one && is_given[o - options], SACCADE_EINVAL, o->name, "given twice");
    is_given[o - options] = true;
    switch (o->kind) {
    case FLAG:
        *(bool *)field = true;
        return SACCADE_OK;
    case TEXT:
        *(const char **)field = value;
        return SACCADE_OK;
    case LIST:
        CLI_FAIL_IF(list->n == CLI_LIST, SACCADE_EINVAL, o->name, "given more than %d times",
                    CLI_LIST);
        list->item[list->n++] = value;
        return SACCADE_OK;
    case INT:
        CLI_FAIL_IF(!cli_parse_int(value, &n) || n < o->least || n > o->most, SACCADE_EINVAL,
                    o->name, "got '%.40s', expected a whole number from %lld to %lld", value,
                    (long long)o->least, (long long)o->most);
        *(int64_t *)field = n;
        return SACCADE_OK;
    case REAL:
        CLI_FAIL_IF(!cli_parse_real(value, &x) || !isfinite(x), SACCADE_EINVAL, o->name,
                    "got '%.40s', expected a finite number", value);
        *(double *)field = x;
        return SACCADE_OK;
    }
    return SACCADE_EINTERNAL;
}

static saccade_status unknown(const cli_command *command, const char *word, saccade_error *err)
{
    const char *names[OPTIONS];
    int n = 0;
    for (int i = 0; i < OPTIONS; i++)
        if (options[i].commands & command->bit)
            names[n++] = options[i].name;
    const char *meant = word[0] == '-' ? cli_nearest(word, names, n) : NULL;
    if (meant)
        return cli_fail(err, SACCADE_EINVAL, command->name,
                        "got unknown option '%.60s', did you mean %s?", word, meant);
    return cli_fail(err, SACCADE_EINVAL, command->name,
                    "got unknown %s '%.60s', expected options as in saccade %s -h",
                    word[0] == '-' ? "option" : "argument", word, command->name);
}

static const cli_option *find(const cli_command *command, const char *word, size_t bytes)
{
    for (int i = 0; i < OPTIONS; i++)
        if ((options[i].commands & command->bit) && word[0] == '-'
            && strlen(options[i].name) == bytes && strncmp(options[i].name, word, bytes) == 0)
            return &options[i];
    return NULL;
}

/* The command's word that stands by itself, for `word`; NULL if it has none. */
static const cli_option *standing(const cli_command *command, const char *word)
{
    const cli_option *o = NULL;
    while (word[0] != '-' && (o = cli_next_option(command, o)) != NULL)
        if (o->name[0] != '-')
            return o;
    return NULL;
}

saccade_status cli_parse(const cli_command *command, int argc, char **argv, cli_args *out,
                         saccade_error *err)
{
    cli_args args = {.scale = NAN, .seed = -1};
    bool is_given[OPTIONS] = {false};
    for (int i = 0; i < argc; i++) {
        const char *word = argv[i], *equals = strchr(word, '=');
        const bool joined = strncmp(word, "--", 2) == 0 && equals;
        const cli_option *o =
            strcmp(word, "--help") == 0
                ? find(command, "-h", 2)
                : find(command, word, joined ? (size_t)(equals - word) : strlen(word));
        if (!o && (o = standing(command, word)) != NULL) {
            CLI_TRY(apply(o, word, is_given, &args, err));
            continue;
        }
        if (!o)
            return unknown(command, word, err);
        const char *value = joined ? equals + 1 : NULL;
        CLI_FAIL_IF(joined && o->kind == FLAG, SACCADE_EINVAL, o->name, "takes no value");
        if (!joined && o->kind != FLAG) {
            CLI_FAIL_IF(i + 1 == argc, SACCADE_EINVAL, o->name, "got nothing, expected %s",
                        o->value);
            value = argv[++i];
        }
        CLI_TRY(apply(o, value, is_given, &args, err));
    }
    *out = args;
    return SACCADE_OK;
}

void cli_print_help(const cli_command *command, FILE *out)
{
    fprintf(out, "usage: saccade %s%s%s\n\n%s\n", command->name,
            command->synopsis[0] ? " " : "", command->synopsis, command->text);
    for (const cli_option *o = NULL; (o = cli_next_option(command, o)) != NULL;) {
        const char *value = o->value ? o->value : "";
        const int width = (int)(strlen(o->name) + 1 + strlen(value));
        if (width > LEFT)
            fprintf(out, "  %s %s\n  %-*s %s\n", o->name, value, LEFT, "", o->help);
        else
            fprintf(out, "  %s %-*s %s\n", o->name, LEFT - (int)strlen(o->name) - 1, value,
                    o->help);
    }
}

saccade_status cli_parse_block(const char *text, int32_t *block_q, int32_t *block_kv,
                               saccade_error *err)
{
    long long q = 128, kv = 128;
    int used = 0;
    if (text) {
        const bool square = sscanf(text, "%lld%n", &q, &used) == 1 && !text[used];
        const bool both = sscanf(text, "%lldx%lld%n", &q, &kv, &used) == 2 && !text[used];
        if (square)
            kv = q;
        CLI_FAIL_IF((!square && !both) || q < 1 || kv < 1 || q > 65536 || kv > 65536,
                    SACCADE_EINVAL, "--block",
                    "got '%.40s', expected like 128 or 128x64, each from 1 to 65536", text);
    }
    *block_q = (int32_t)q;
    *block_kv = (int32_t)kv;
    return SACCADE_OK;
}

saccade_status cli_check_block(const cli_args *args, saccade_error *err)
{
    CLI_FAIL_IF(args->block && !args->mask, SACCADE_EINVAL, "--block",
                "got it without --mask, expected a mask to cut into blocks");
    return SACCADE_OK;
}

saccade_status cli_check_at(const cli_args *args, const saccade_sizes *sizes,
                            saccade_error *err)
{
    CLI_FAIL_IF(args->at_b >= sizes->B, SACCADE_EINVAL, "--at-b",
                "got batch %lld, expected less than %lld", (long long)args->at_b,
                (long long)sizes->B);
    CLI_FAIL_IF(args->at_h >= sizes->H, SACCADE_EINVAL, "--at-h",
                "got head %lld, expected less than %lld", (long long)args->at_h,
                (long long)sizes->H);
    return SACCADE_OK;
}

saccade_status cli_parse_dtype(const char *text, saccade_dtype otherwise, saccade_dtype *out,
                               saccade_error *err)
{
    static const saccade_dtype floats[] = {SACCADE_F32, SACCADE_F16, SACCADE_BF16};
    *out = otherwise;
    for (int i = 0; text && i < 3; i++) {
        if (strcmp(text, saccade_dtype_name(floats[i])) == 0) {
            *out = floats[i];
            return SACCADE_OK;
        }
    }
    CLI_FAIL_IF(text, SACCADE_EINVAL, "--dtype", "got '%.40s', expected f32, f16 or bf16",
                text);
    return SACCADE_OK;
}
