/* options.h: the table of options as what is printed from it sees it: help, man page and
 * completions. */
#ifndef SACCADE_CLI_OPTIONS_H
#define SACCADE_CLI_OPTIONS_H

#include "cli.h"

typedef enum option_kind { FLAG, TEXT, LIST, INT, REAL } option_kind;

/* A name without a dash is a word that stands by itself. A value like "a|b" is one of these
 * words; one in capitals stands for what the user writes. */
typedef struct cli_option {
    const char *name, *value;
    int commands;
    option_kind kind;
    size_t at; /* offset in cli_args */
    const char *help;
    int64_t least, most; /* of an INT */
} cli_option;

/* The options of a command, one after another: NULL gives the first, and past the last NULL. */
const cli_option *cli_next_option(const cli_command *command, const cli_option *previous);
/* The words that an option's value may be, one after another: *at begins as NULL, and *word of
 * so many bytes is not terminated. */
bool cli_next_word(const cli_option *option, const char **at, const char **word, int *bytes);
/* Whether its value is a file or a folder. */
bool cli_is_file(const cli_option *option);

/* The table of commands (main.c), as above. */
const cli_command *cli_next_command(const cli_command *previous);

#endif
