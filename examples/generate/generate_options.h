/* generate_options.h: the command line of generate. */
#ifndef GENERATE_OPTIONS_H
#define GENERATE_OPTIONS_H

#include "sampling.h"
#include "trouble.h"

typedef struct generate_options {
    const char *model, *prompt, *prompt_file, *tokens, *perplexity_file, *cache;
    int64_t count, context, threads, group, page;
    int is_chat, prints_tokens, explains, is_quiet;
    sampler sampling;
} generate_options;

/* 1: help was asked for and printed. */
int generate_options_read(int argc, char **argv, generate_options *out, trouble *t);

#endif
