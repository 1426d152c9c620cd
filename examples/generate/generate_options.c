/* generate_options.c: reading the command line of generate. */
#include "generate_options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: generate MODEL.gguf [OPTION...]\n"
    "Continues text by a LLaMA-shaped model whose attention is Saccade's.\n"
    "  -p, --prompt TEXT    what to continue (default: \"Once upon a time\")\n"
    "  -f, --file FILE      the same from a file\n"
    "      --tokens I,I,..  the same as token numbers; no tokenizer is used\n"
    "      --chat           the prompt is a question to a model that knows ChatML\n"
    "  -n, --count N        tokens to make at most (64)\n"
    "      --context N      tokens to have room for (what the prompt and -n need)\n"
    "      --temperature X  0, the default: always the likeliest token\n"
    "      --top-k K        of the K likeliest (0: all)\n"
    "      --top-p P        of the fewest that hold P of the weight (1: all)\n"
    "      --seed S         of sampling (1)\n"
    "      --threads N      of attention and of an OpenBLAS (all)\n"
    "      --cache TYPE     keys and values in f32 (default), e4m3, e5m2, i8 or i4\n"
    "      --group N        channels that share a scale, with --cache (all of a head)\n"
    "      --page N         keys and values in pages of N tokens (one piece)\n"
    "      --perplexity F   no prompt: how well the model foretells the text of F\n"
    "      --print-tokens   numbers in place of text\n"
    "      --explain        what Saccade runs\n"
    "  -q, --quiet          neither progress nor speed\n";

static int read_integer(const char *name, const char *text, int64_t least, int64_t most,
                        int64_t *out, trouble *t)
{
    char *end;
    errno = 0;
    const long long x = strtoll(text, &end, 10);
    if (errno || end == text || *end || x < least || x > most)
        return refuse(t, "%s: got \"%s\", expected a number from %lld to %lld", name, text,
                      (long long)least, (long long)most);
    *out = x;
    return 0;
}

static int read_number(const char *name, const char *text, double most, double *out, trouble *t)
{
    char *end;
    const double x = strtod(text, &end);
    if (end == text || *end || !(x >= 0 && x <= most))
        return refuse(t, "%s: got \"%s\", expected a number from 0 to %g", name, text, most);
    *out = x;
    return 0;
}

static int is_either(const char *got, const char *brief, const char *name)
{
    return strcmp(got, name) == 0 || (brief && strcmp(got, brief) == 0);
}

/* 1 if it was one. */
static int read_flag(const char *name, generate_options *o)
{
    const struct {
        const char *brief, *name;
        int *flag;
    } flags[] = {{NULL, "--chat", &o->is_chat},
                 {NULL, "--print-tokens", &o->prints_tokens},
                 {NULL, "--explain", &o->explains},
                 {"-q", "--quiet", &o->is_quiet}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (is_either(name, flags[i].brief, flags[i].name)) {
            *flags[i].flag = 1;
            return 1;
        }
    return 0;
}

static int read_value(const char *name, const char *value, generate_options *o, trouble *t)
{
    const struct {
        const char *brief, *name;
        const char **text;
    } texts[] = {{"-p", "--prompt", &o->prompt},
                 {"-f", "--file", &o->prompt_file},
                 {NULL, "--tokens", &o->tokens},
                 {NULL, "--perplexity", &o->perplexity_file},
                 {NULL, "--cache", &o->cache}};
    int64_t seed;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (is_either(name, texts[i].brief, texts[i].name)) {
            *texts[i].text = value;
            return 0;
        }
    if (is_either(name, "-n", "--count"))
        return read_integer(name, value, 0, 1 << 20, &o->count, t);
    if (is_either(name, NULL, "--context"))
        return read_integer(name, value, 1, 1 << 20, &o->context, t);
    if (is_either(name, NULL, "--threads"))
        return read_integer(name, value, 0, 1024, &o->threads, t);
    if (is_either(name, NULL, "--page"))
        return read_integer(name, value, 0, 1 << 20, &o->page, t);
    if (is_either(name, NULL, "--group"))
        return read_integer(name, value, 0, 256, &o->group, t);
    if (is_either(name, NULL, "--top-k"))
        return read_integer(name, value, 0, 1 << 20, &o->sampling.top_k, t);
    if (is_either(name, NULL, "--temperature"))
        return read_number(name, value, 100, &o->sampling.temperature, t);
    if (is_either(name, NULL, "--top-p"))
        return read_number(name, value, 1, &o->sampling.top_p, t);
    if (is_either(name, NULL, "--seed")) {
        const int status = read_integer(name, value, 0, INT64_MAX, &seed, t);
        o->sampling.state = status ? 0 : (uint64_t)seed;
        return status;
    }
    return refuse(t, "%s: not an option; --help lists them", name);
}

int generate_options_read(int argc, char **argv, generate_options *out, trouble *t)
{
    *out =
        (generate_options){.count = 64, .cache = "f32", .sampling = {.top_p = 1, .state = 1}};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (is_either(name, "-h", "--help")) {
            fputs(help, stdout);
            return 1;
        }
        if (name[0] != '-') {
            if (out->model)
                return refuse(t, "%s: got a second model, expected one", name);
            out->model = name;
        } else if (!read_flag(name, out)) {
            if (i + 1 == argc && strchr("-", name[0]) && name[1])
                return refuse(t, "%s: got nothing behind it, or it is not an option", name);
            if (read_value(name, argv[++i], out, t))
                return -1;
        }
    }
    if (!out->model)
        return refuse(t, "MODEL.gguf: got nothing, expected a file; --help says more");
    if (!!out->prompt + !!out->prompt_file + !!out->tokens + !!out->perplexity_file > 1)
        return refuse(t, "--prompt, --file, --tokens, --perplexity: got several, expected one");
    if (out->is_chat && (out->tokens || out->perplexity_file))
        return refuse(t, "--chat: goes with --prompt and --file alone");
    return 0;
}
