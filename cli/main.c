/* saccade: exact, fused attention with your own masks and scores, on the command line. */
#include "options.h"
#include "outfile.h"
#include "signals.h"

#include <string.h>

static saccade_status cmd_prelude(const cli_args *args, saccade_error *err);

/* clang-format off */
static const cli_command commands[] = {
    {"run", CLI_RUN, "attention over NumPy files",
     "-q Q.npy -k K.npy -v V.npy -o O.npy [option]...",
     "Computes softmax(mask(score(scale * Q K^T))) V without ever holding the scores.\n"
     "O has the layout and dtype of Q's file.\n\n"
     "    saccade run -q q.npy -k k.npy -v v.npy -o o.npy --mask 'sliding_window(W)' \\\n"
     "        --bind W=256 --score 'alibi()' --score 'softcap(20.0)'\n"
     "    saccade run -q q.npy -k k.npy -v v.npy -o o.npy --grad do.npy --grad-of bias \\\n"
     "        --score 'score + bias[h, kv]' --bind bias=bias.npy\n", cmd_run},
    {"mask", CLI_MASK, "the block mask of a text, as a picture and in numbers",
     "--mask M --q N [--kv N] [-o FILE.svg|FILE.png] [option]...",
     "Blocks are FULL (every score counts), PARTIAL, or absent. Proven: known from the\n"
     "ranges of the expression; evaluated: looked at score by score.\n\n"
     "    saccade mask --mask 'causal()' --q 1048576\n"
     "    saccade mask --mask 'doc[q] == doc[kv]' --q 4096 --bind 'doc=i32[KV]:docs(12)' \\\n"
     "        -o documents.svg\n", cmd_mask},
    {"shard", CLI_SHARD, "rows of a sequence over several devices: balance, traffic, picture",
     "[--mask M] (--q N | --problem P) --ranks N [-o FILE.svg|FILE.png] [option]...",
     "Deals chunks of rows to ranks so that each has as much to compute, and says which keys\n"
     "travel: only those that a rank's rows touch. area is a rank's work over the mean;\n"
     "received and sent count keys, over all masks and layers, and with --problem bytes of K\n"
     "and V in one pass.\n\n"
     "    saccade shard --mask 'causal()' --problem 'b1 h32/8 q131072 d128 bf16' --ranks 4 \\\n"
     "        --also '5:sliding_window(W)' --bind W=1024 -o shards.svg\n", cmd_shard},
    {"explain", CLI_EXPLAIN, "what would run, why, and the code made for it",
     "--problem P | -q Q.npy -k K.npy -v V.npy  [option]...",
     "Typed nodes, gradients, ranges, the chosen kernel and generated code.\n\n"
     "    saccade explain --problem 'b1 h16/4 q4096 d128 bf16' --score 'softcap(20.0)'\n",
     cmd_explain},
    {"check", CLI_CHECK, "every back end and level against float64",
     "[--problem P | -q Q.npy -k K.npy -v V.npy | --random N] [option]...",
     "Error of each against twice that of a plain computation in the same dtype.\n"
     "Without a problem: random ones over the named variants. Exit status 1 if one fails.\n"
     "--backward: the same of gradients, from a random gradient of the output; captured: the\n"
     "largest error of captured tensors of rank 2 and more; of bound: the error that comes\n"
     "nearest to what is allowed, over that.\n\n"
     "    saccade check --problem 'b2 h4/2 q300 kv200 d40 bf16' --mask 'causal()'\n"
     "    saccade check --backward --random 40\n"
     "    saccade check --rmse\n", cmd_check},
    {"bench", CLI_BENCH, "speed, beside the machine's own limits",
     "[--suite NAME]... [option]...",
     "gflops counts 2(D+Dv) per live score; ceiling is measured in the same run with the\n"
     "same threads, in the row's own unit; of_ceiling is the fraction reached.\n"
     "paper: eight variants; dense: large heads and all dtypes; backward: gradients, 10 D\n"
     "FLOPs per live score, variants beside full attention's rate, gradients of captured\n"
     "tensors beside the same without them; decode: few queries on long\n"
     "caches, K and V larger than any, by turns with a plain read of the same K and V, whose\n"
     "median is the ceiling; mask: block masks of a million tokens, then a narrow window, its\n"
     "ceiling full attention's rate on live blocks; compile: from text to plan, the first\n"
     "time and again; natten: neighbourhoods in 2-D; shapes: small heads, short\n"
     "runs, medium lengths, then 1, 2, 4, .. threads, whose ceiling is one thread's rate\n"
     "times what the machine's products gain. With --backend cuda sizes are a GPU's,\n"
     "rows of one size are timed in shuffled rounds by events, L2 overwritten before each.\n\n"
     "    saccade bench --suite paper --threads 2 --csv paper.csv --plot paper.svg\n"
     "    saccade bench --suite paper --backend cuda\n",
     cmd_bench},
    {"ladder", CLI_LADDER, "from softmax to FlashAttention, counted and drawn",
     "[--n N] [--d D] [--m M] [-o FILE.svg]",
     "Runs every published step on one problem: passes over memory, accesses and FLOPs\n"
     "counted against the formula, time, error, and a roofline of this machine's limits.\n"
     "Exit status 1 if a count is not its formula. See docs/ladder.md.\n\n"
     "    saccade ladder --n 1024 --d 64 -o ladder.svg\n", cmd_ladder},
    {"demo", CLI_DEMO, "eight variants over files it makes; pictures of their masks",
     "[-o FOLDER] [--threads N]",
     "Writes Q, K, V as .npy, runs full, causal, relative bias, ALiBi, sliding window,\n"
     "prefix-LM, soft cap and document attention as `saccade run` does, with as many\n"
     "key heads as query heads (MHA) and with fewer (GQA). Look at FOLDER/index.html.\n",
     cmd_demo},
    {"prelude", CLI_PRELUDE, "the named masks and scores",
     "", "Prints every named mask and score with its formula and source.\n", cmd_prelude},
    {"man", CLI_MAN, "this program's manual page",
     "", "Prints the page that `man saccade` shows where it is installed.\n\n"
     "    saccade man >saccade.1 && man ./saccade.1\n", cmd_man},
    {"completions", CLI_COMPLETIONS, "what a shell completes after saccade",
     "bash|zsh|fish",
     "Prints completions of commands, options and their values for a shell.\n\n"
     "    source <(saccade completions bash)\n", cmd_completions},
};
/* clang-format on */
enum { COMMANDS = sizeof commands / sizeof commands[0] };

const cli_command *cli_next_command(const cli_command *previous)
{
    const cli_command *next = previous ? previous + 1 : commands;
    return next < commands + COMMANDS ? next : NULL;
}

static saccade_status cmd_prelude(const cli_args *args, saccade_error *err)
{
    const saccade_prelude_entry *e;
    (void)args, (void)err;
    for (int32_t i = 0; (e = saccade_prelude(i)) != NULL; i++)
        printf("%s %-38s %s\n", e->kind == SACCADE_MASK ? "mask " : "score", e->signature,
               e->comment);
    return SACCADE_OK;
}

static void print_usage(FILE *out)
{
    fprintf(out,
            "saccade %s: exact, fused attention with your own masks and scores\n\n"
            "usage: saccade COMMAND [option]...    (saccade COMMAND -h for more)\n\n",
            saccade_version());
    int width = 0;
    for (int i = 0; i < COMMANDS; i++) {
        const int length = (int)strlen(commands[i].name);
        width = length > width ? length : width;
    }
    for (int i = 0; i < COMMANDS; i++)
        fprintf(out, "  %-*s  %s\n", width, commands[i].name, commands[i].summary);
    fputs("\nexit status: 0 done, 1 a check failed, 2 something to change in what was given,\n"
          "3 our mistake\n",
          out);
}

static const cli_command *find(const char *name, saccade_error *err)
{
    const char *names[COMMANDS];
    for (int i = 0; i < COMMANDS; i++) {
        names[i] = commands[i].name;
        if (strcmp(name, commands[i].name) == 0)
            return &commands[i];
    }
    const char *meant = cli_nearest(name, names, COMMANDS);
    cli_fail(err, SACCADE_EINVAL, "command", "got '%.40s', %s%s", name,
             meant ? "did you mean " : "expected one that saccade -h lists",
             meant ? meant : "");
    return NULL;
}

static saccade_status run(int argc, char **argv, saccade_error *err)
{
    cli_args args;
    const cli_command *command = find(argv[1], err);
    if (!command)
        return SACCADE_EINVAL;
    CLI_TRY(cli_parse(command, argc - 2, argv + 2, &args, err));
    if (args.help) {
        cli_print_help(command, stdout);
        return SACCADE_OK;
    }
    const char *const results[] = {args.out_file, args.lse_file, args.csv, args.plot};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++)
        outfile_keep_words_out(results[i]);
    return command->run(&args, err);
}

static bool is_one_of(const char *word, const char *a, const char *b, const char *c)
{
    return strcmp(word, a) == 0 || strcmp(word, b) == 0 || strcmp(word, c) == 0;
}

static void print_version(void)
{
    saccade_error err;
    int32_t devices = 0;
    printf("saccade %s\nbuilt with: %s\n", saccade_version(), saccade_build());
    if (saccade_device_count(&devices, &err) == SACCADE_OK)
        printf("CUDA devices: %d\n", devices);
    else
        printf("CUDA devices: none (%s)\n", err.message);
}

static saccade_status help(int argc, char **argv, saccade_error *err)
{
    const cli_command *command = argc > 2 ? find(argv[2], err) : NULL;
    if (argc > 2 && !command)
        return SACCADE_EINVAL;
    CLI_FAIL_IF(argc > 3, SACCADE_EINVAL, argv[1], "got '%.40s' too, expected one command",
                argv[3]);
    if (command)
        cli_print_help(command, stdout);
    else
        print_usage(stdout);
    return SACCADE_OK;
}

static saccade_status answer(int argc, char **argv, saccade_error *err)
{
    if (is_one_of(argv[1], "-h", "--help", "help"))
        return help(argc, argv, err);
    if (!is_one_of(argv[1], "-V", "--version", "version"))
        return run(argc, argv, err);
    CLI_FAIL_IF(argc > 2, SACCADE_EINVAL, argv[1], "got '%.40s', expected nothing after it",
                argv[2]);
    print_version();
    return SACCADE_OK;
}

int main(int argc, char **argv)
{
    saccade_error err = {.status = SACCADE_OK};
    if (argc < 2) {
        print_usage(stderr);
        return 2;
    }
    signals_open();
    saccade_status status = answer(argc, argv, &err);
    cli_progress(NULL);
    if (status == SACCADE_OK && (fflush(stdout) != 0 || ferror(stdout)))
        status = cli_fail(&err, SACCADE_EIO, "standard output", "cannot write");
    if (status != SACCADE_OK && (int)status != CLI_CHECK_FAILED)
        cli_report(&err);
    if (status == SACCADE_ESTOPPED)
        signals_obey();
    return cli_exit_code(status);
}
