/* cli.h: what the commands share. A command is a function of parsed arguments; it fills a
 * saccade_error and returns a status, and main.c prints and makes the exit code of it. Only
 * saccade.h is used: whatever a command can do, any program can. */
#ifndef SACCADE_CLI_H
#define SACCADE_CLI_H

#include "saccade_measure.h"

#include <stdbool.h>
#include <stdio.h>

/* ---- errors (report.c) ---- */

#define CLI_PRINTF(format_at, first) __attribute__((format(printf, format_at, first)))

/* Fills *err and returns status. where: option, file or argument. */
saccade_status cli_fail(saccade_error *err, saccade_status status, const char *where,
                        const char *format, ...) CLI_PRINTF(4, 5);

#define CLI_FAIL_IF(cond, status, where, ...)                                 \
    do {                                                                      \
        if (cond)                                                             \
            return (cli_fail(err, (status), (where), __VA_ARGS__), (status)); \
    } while (0)

#define CLI_TRY(call)                             \
    do {                                          \
        const saccade_status try_status = (call); \
        if (try_status != SACCADE_OK)             \
            return try_status;                    \
    } while (0)

#define CLI_TRY_GOTO(call)        \
    do {                          \
        status = (call);          \
        if (status != SACCADE_OK) \
            goto out;             \
    } while (0)

/* "saccade: WHERE: what, got, expected" and, for texts, the excerpt and its caret. */
void cli_report(const saccade_error *err);
/* 0; 2 for what the user can change; 3 for our mistakes. */
int cli_exit_code(saccade_status status);
/* The one of `names` that `word` most likely meant, or NULL. */
const char *cli_nearest(const char *word, const char *const *names, int n_names);
/* One line on stderr that the next call overwrites; nothing when stderr is no terminal.
 * NULL clears it. */
void cli_progress(const char *format, ...) CLI_PRINTF(1, 2);
double cli_seconds(void); /* since some fixed moment */

/* ---- arguments (options.c) ---- */

enum { CLI_LIST = 16 };

typedef struct cli_list {
    const char *item[CLI_LIST];
    int n;
} cli_list;

/* All options of all commands; which command takes which is in options.c. */
typedef struct cli_args {
    const char *q_file, *k_file, *v_file, *out_file, *lse_file; /* -q -k -v -o --lse */
    const char *mask, *dtype, *q_offset, *kv_len, *layout, *block, *backend, *arch, *level;
    const char *problem;
    const char *weight, *sinks, *kv_dtype, *kv_scale;
    const char *csv, *plot, *baseline, *folder;
    const char *d_out_file; /* --grad */
    const char *shell;
    cli_list score, bind, suite, grad_of, also;
    double scale;                         /* NaN: not given */
    int64_t ladder_n, ladder_d, ladder_m; /* --n --d --m; 0: not given */
    int64_t seed;                         /* below 0: not given; cli_seed is what counts */
    int64_t threads, q, kv, batch, heads, random, columns, at_b, at_h, repeats;
    int64_t ranks, chunk, tile, layers, page_size; /* 0: not given */
    bool rmse, backward, batch_invariant, help;
} cli_args;

/* bits of cli_option.commands */
enum {
    CLI_RUN = 1,
    CLI_MASK = 2,
    CLI_EXPLAIN = 4,
    CLI_CHECK = 8,
    CLI_BENCH = 16,
    CLI_DEMO = 32,
    CLI_LADDER = 64,
    CLI_PRELUDE = 128,
    CLI_SHARD = 256,
    CLI_MAN = 512,
    CLI_COMPLETIONS = 1024
};

typedef struct cli_command {
    const char *name;
    int bit;
    const char *summary;  /* one line */
    const char *synopsis; /* arguments */
    const char *text;     /* what it does, with an example */
    saccade_status (*run)(const cli_args *args, saccade_error *err);
} cli_command;

saccade_status cli_parse(const cli_command *command, int argc, char **argv, cli_args *out,
                         saccade_error *err);
void cli_print_help(const cli_command *command, FILE *out);

/* --seed, else 1. */
int64_t cli_seed(const cli_args *args);
/* Whole words only; end with no rest. */
bool cli_parse_int(const char *text, int64_t *out);
bool cli_parse_real(const char *text, double *out);
/* "128" or "128x64"; NULL gives 128x128. */
saccade_status cli_parse_block(const char *text, int32_t *block_q, int32_t *block_kv,
                               saccade_error *err);
/* Whether --block has a mask to cut. */
saccade_status cli_check_block(const cli_args *args, saccade_error *err);
/* Whether --at-b and --at-h are within these sizes. */
saccade_status cli_check_at(const cli_args *args, const saccade_sizes *sizes,
                            saccade_error *err);
/* "f32", "f16", "bf16" (and f64 when wide). NULL gives `otherwise`. */
saccade_status cli_parse_dtype(const char *text, saccade_dtype otherwise, saccade_dtype *out,
                               saccade_error *err);

/* ---- commands, one cmd_<name>.c each ---- */

/* A check that failed, as opposed to a wrong input; main.c exits with 1. */
enum { CLI_CHECK_FAILED = 1000 };

saccade_status cmd_run(const cli_args *args, saccade_error *err);
saccade_status cmd_mask(const cli_args *args, saccade_error *err);
saccade_status cmd_shard(const cli_args *args, saccade_error *err);
saccade_status cmd_explain(const cli_args *args, saccade_error *err);
saccade_status cmd_check(const cli_args *args, saccade_error *err);
saccade_status cmd_bench(const cli_args *args, saccade_error *err);
saccade_status cmd_ladder(const cli_args *args, saccade_error *err);
saccade_status cmd_demo(const cli_args *args, saccade_error *err);
saccade_status cmd_man(const cli_args *args, saccade_error *err);
saccade_status cmd_completions(const cli_args *args, saccade_error *err);

#endif
